"""Deliveries: nothing acknowledged is lost or doubled, and failures are reported once."""

import asyncio
import errno
import os

import numpy as np
import pytest

from mmrender.errors import (
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
)
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.protocol import Timing
from mmrender.trajectory import Trajectory
from shipping_cases import PATIENT


@pytest.fixture
def url(tmp_path):
    return f"unix://{tmp_path}/a"


def rollout(name, *turns):
    trajectory = Trajectory(name)
    for number, token in enumerate(turns):
        trajectory.append([1, 2, *range(3, 3 + number)], [token], logprobs=[-0.1], reward=float(token))
    return trajectory


async def test_a_trajectory_that_grew_arrives_again(url):
    async with Receiver(url) as receiver, Sender(url) as sender:
        trajectory = rollout("task-18", 7)
        await sender.send(trajectory)
        trajectory.append([1, 2, 7, 3], [8], logprobs=[-0.1])
        await sender.send(trajectory)
        trajectory.append([1, 2, 7, 3, 8, 4], [9], logprobs=[-0.1])  # after it was given: not sent
        got = [(await receiver.receive(5)).value for _ in range(2)]
        assert [len(each) for each in got] == [1, 2]


async def test_an_idempotency_key_is_delivered_once_from_any_sender(url):
    receiver = Receiver(url, ack="explicit")
    async with receiver, Sender(url) as one, Sender(url) as other:
        first = await one.send(rollout("t", 1), id="rollout 1")
        second = await other.send(rollout("t", 1), id="rollout 1")
        message = await receiver.receive(5)
        with pytest.raises(TimeoutError):
            await receiver.receive(0.05)
        assert not first.done
        assert not second.done
        message.ack()
        message.ack()
        await asyncio.gather(first, second)
        await (await one.send(rollout("t", 1), id="rollout 1"))  # also after it was acknowledged
        assert (message.id, receiver.stats.duplicates) == ("rollout 1", 2)


@pytest.mark.parametrize("acknowledged", [False, True])
async def test_one_key_with_other_content_is_an_error_and_stops_nothing(url, acknowledged):
    async with Receiver(url, ack="explicit") as receiver, Sender(url) as sender:
        await sender.send(rollout("t", 1), id="k")
        message = await receiver.receive(5)
        if acknowledged:
            message.ack()
            await sender.flush(5)
        wrong = await sender.send(rollout("t", 2), id="k")
        with pytest.raises(ShippingProtocolError) as caught:
            await wrong
        assert str(caught.value) == (
            f"message 'k' to {url}: the receiver cannot use this message - got id 'k': the idempotency key "
            "was used for other content. Give each message a key of its own, or none"
        )
        message.ack()
        await sender.send("next")
        last = await receiver.receive(5)
        assert last.value == "next"
        last.ack()
        assert sender.stats.connections == 1


async def test_remembered_ids_are_bounded(url):
    async with Receiver(url, dedup_window=2, seen=["x"]) as receiver, Sender(url) as sender:
        for number in range(5):
            await sender.send(number)
            await receiver.receive(5)
        await sender.flush(5)
        assert len(receiver._seen) == 2
        assert receiver._open == {}


async def test_an_acknowledgement_counts_before_closing_and_is_refused_after(url):
    receiver = Receiver(url, ack="explicit", timing=PATIENT)
    await receiver.open()
    sender = Sender(url, timing=PATIENT)
    kept, late = await sender.send("kept"), await sender.send("late")
    first, second = await receiver.receive(5), await receiver.receive(5)
    first.ack()
    await receiver.aclose()
    await asyncio.wait_for(kept, 5)
    first.ack()  # idempotent
    with pytest.raises(ShippingClosedError) as caught:
        second.ack()
    assert str(caught.value) == (
        f"message '{second.id}': the receiver is closed, so the sender gets no answer. Acknowledge before "
        "closing; or give the next receiver the ids you have, as seen="
    )
    assert not late.done
    async with Receiver(url, timing=PATIENT) as successor:
        assert (await successor.receive(5)).value == "late"
        await asyncio.wait_for(late, 5)
    await sender.aclose()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")
async def test_shared_memory_that_cannot_be_made_stops_nothing(monkeypatch):
    """With no memory left for segments messages travel through the socket, and closing ends in time."""

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    address = f"shm://full-{os.getpid()}"
    async with Receiver(address) as receiver, Sender(address) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", full)
            await sender.send(np.ones(500_000, np.uint8))
            assert (await receiver.receive(5)).value.sum() == 500_000
        await sender.send(np.ones(500_000, np.uint8))
        assert (await receiver.receive(5)).value.sum() == 500_000
        async with asyncio.timeout(5):
            await sender.aclose(1)


async def test_closing_ends_in_time_when_nobody_acknowledges(url):
    async with Receiver(url, ack="explicit", timing=Timing(goodbye=0.1)):
        sender = Sender(url)
        delivery = await sender.send(np.ones(1000))
        async with asyncio.timeout(3):
            with pytest.raises(ShippingConnectionError, match="the receiver does not acknowledge"):
                await sender.aclose(0.1)
        with pytest.raises(ShippingClosedError, match="the sender was closed before this was acknowledged"):
            await delivery


async def test_a_failure_is_reported_once(url):
    async with Receiver(url) as receiver:
        sender = Sender(url)
        await sender.send(1, id="k")
        await receiver.receive(5)
        for awaited in (True, False):
            delivery = await sender.send(2, id="k")
            if awaited:
                with pytest.raises(ShippingProtocolError, match="other content"):
                    await delivery
            else:
                with pytest.raises(ShippingProtocolError, match="other content"):
                    await sender.flush(5)
            await sender.flush(5)
        await sender.send(3, id="k")
        with pytest.raises(ShippingError):
            await sender.aclose()


async def test_memory_of_failures_is_bounded_when_nobody_asks(url):
    async with Receiver(url) as receiver, Sender(url) as sender:
        await sender.send(0, id="k")
        await receiver.receive(5)
        for number in range(1, 1200):
            await sender.send(number, id="k")
        with pytest.raises(ShippingProtocolError):
            await sender.flush(20)
        assert sender.stats.refused == 1199
        assert len(sender._failures) <= 1024
