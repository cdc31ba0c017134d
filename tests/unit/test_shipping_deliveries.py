"""Deliveries: nothing acknowledged is lost or doubled, and failures are reported once."""

import asyncio
import copy
import gc
import pickle
import weakref
from contextlib import AsyncExitStack

import numpy as np
import pytest

import mmrender.shipping.receiver as receiving
import mmrender.shipping.sender as sending
from kit import error_of, raised_by, until
from mmcodecs import BufferPool, Shared
from mmrender import Trajectory
from mmrender.errors import (
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    TrajectoryError,
)
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.protocol import Timing
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
        got = [(await receiver.receive(60)).value for _ in range(2)]
        assert [len(each) for each in got] == [1, 2]


async def test_an_acknowledgement_counts_before_closing_and_is_refused_after(url):
    receiver = Receiver(url, ack="explicit", timing=PATIENT)
    await receiver.open()
    sender = Sender(url, timing=PATIENT)
    kept, late = await sender.send("kept"), await sender.send("late")
    first, second = await receiver.receive(60), await receiver.receive(60)
    first.ack()
    await receiver.aclose()
    await asyncio.wait_for(kept, 60)
    first.ack()  # idempotent
    problem = error_of(ShippingClosedError, second.ack)
    assert problem == (
        f"message '{second.id}': the receiver is closed, so the sender gets no answer. Acknowledge before "
        "closing, or pass your ids to the next receiver as seen="
    )
    assert not late.done
    async with Receiver(url, timing=PATIENT) as successor:
        assert (await successor.receive(60)).value == "late"
        await asyncio.wait_for(late, 60)
    await sender.aclose()


async def test_closing_ends_in_time_when_nobody_acknowledges(url):
    async with Receiver(url, ack="explicit", timing=Timing(goodbye=0.1)):
        sender = Sender(url)
        await sender.connect(60)
        delivery = await sender.send(np.ones(1000))
        async with asyncio.timeout(20):
            with pytest.raises(ShippingConnectionError, match="the receiver does not acknowledge"):
                await sender.aclose(0.1)
        with pytest.raises(ShippingClosedError, match="the sender was closed before this was acknowledged"):
            await delivery


@pytest.fixture
def picky(monkeypatch):
    """A receiver that cannot use the value "bad"."""

    def from_wire(kind, value):
        if value == "bad":
            raise TrajectoryError("it does not hold together")
        return value

    monkeypatch.setattr(receiving, "from_wire", from_wire)


async def test_a_failure_is_reported_once(url, picky):
    async with Receiver(url, timing=PATIENT):
        sender = Sender(url, timing=PATIENT)
        for awaited in (True, False):
            delivery = await sender.send("bad")
            with pytest.raises(ShippingProtocolError, match="cannot use this message"):
                await (delivery if awaited else sender.flush(60))
            await sender.flush(60)
        await sender.send("bad")
        with pytest.raises(ShippingProtocolError):
            await sender.aclose()


async def test_memory_of_failures_is_bounded_when_nobody_asks(url, picky, monkeypatch):
    monkeypatch.setattr(sending, "_MAX_FAILURES", 5)
    timing = Timing(first_retry=0.001, last_retry=0.001)
    async with Receiver(url, timing=timing), Sender(url, timing=timing) as sender:
        for _ in range(12):
            await sender.send("bad")
        with pytest.raises(ShippingProtocolError):
            await sender.flush(60)
        assert sender.stats.refused == 12
        assert len(sender._failures) <= 5


async def test_a_receiver_keeps_one_number_for_a_sender_and_nothing_after_its_goodbye(url):
    async with Receiver(url) as receiver:
        async with Sender(url) as sender:
            for number in range(300):
                await sender.send(number)
                assert (await receiver.receive(60)).value == number
            await sender.flush(60)
            (source,) = receiver._sources.values()
            assert (source.last, source.unacked, source.seen) == (300, set(), [])
        while receiver.stats.connections:
            await asyncio.sleep(0.001)
        assert receiver._sources == {}


async def test_a_receiver_takes_up_ids_with_gaps_and_in_any_order(url):
    """A consumer may have stored a later message and not an earlier one."""
    first = Receiver(url, ack="explicit", timing=PATIENT)
    await first.open()
    sender = Sender(url, timing=PATIENT)
    deliveries = [await sender.send(number) for number in range(10)]
    ids = [(await first.receive(60)).id for _ in range(10)]
    await first.aclose()
    stored = {ids[0], ids[1], ids[4], ids[7], ids[9], "rollout 1", "x:1"}
    async with Receiver(url, ack="explicit", seen=stored, timing=PATIENT) as second:
        for number in (2, 3, 5, 6, 8):
            message = await second.receive(60)
            assert (message.value, message.id) == (number, ids[number])
            assert not deliveries[number].done
            message.ack()
        await sender.flush(60)
        assert second.stats.duplicates == 5
        await sender.send(10)
        (await second.receive(60)).ack()
        await sender.aclose()


def test_ids_of_earlier_runs_take_a_run_of_numbers_for_each_sender():
    names = ["a" * 32, "0" * 32]
    sources = receiving._sources(f"{name}:{seq}" for seq in range(50_000, 0, -1) for name in names)
    assert [source.seen for source in sources.values()] == [[range(1, 50_001)]] * 2


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, lambda end: pickle.loads(pickle.dumps(end))])
@pytest.mark.parametrize("kind", [Sender, Receiver])
def test_an_end_is_not_copied(kind, copy_of, url):
    problem = error_of(ShippingError, copy_of, kind(url))
    assert problem == (
        f"{kind.__name__}: an end of shipping cannot be copied or pickled: messages of two copies would be taken "
        "for one. Pass the address, and make another one there"
    )


@pytest.mark.parametrize("error", [UnicodeError("label empty"), ZeroDivisionError("a fault of ours")])
async def test_a_sender_whose_task_ends_says_so_everywhere(url, error, monkeypatch):
    async def dial(*_):
        await asyncio.sleep(0.01)
        raise error

    monkeypatch.setattr(sending, "dial", dial)
    sender = Sender(url)
    delivery = await sender.send(1)
    for attempt in (sender.connect(60), delivery, sender.send(2), sender.flush(5)):
        caught = await raised_by(ShippingError, asyncio.wait_for(attempt, 60))
        assert str(caught) == f"{url}: the sender has failed - got {error!r}"
    await sender.aclose()


async def test_a_sender_whose_task_is_cancelled_says_so(url):
    async with Receiver(url, ack="explicit"):
        sender = Sender(url)
        await sender.connect()
        delivery = await sender.send(1)
        sender._task.cancel()
        for attempt in (delivery, sender.send(2), sender.flush(60)):
            with pytest.raises(ShippingError, match="the sender's task was cancelled"):
                await asyncio.wait_for(attempt, 60)
        await sender.aclose()


async def test_a_receiver_that_cannot_listen_raises_an_error_of_the_tree(monkeypatch):
    async def unknown(*_, **__):
        raise UnicodeError("label too long")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    receiver = Receiver("tcp://localhost:0")
    with pytest.raises(ShippingConnectionError, match="unknown host - got label too long"):
        await receiver.open()
    await receiver.aclose()


async def test_what_a_connection_leaves_is_small_and_bounded_over_all_senders(url, monkeypatch):
    """Once everything is acknowledged and dropped, only shared arrays for later messages hold buffers."""
    leased: dict[int, int] = {}
    acquire = BufferPool.acquire

    def counted(pool, num_bytes):
        lease = acquire(pool, num_bytes)
        leased[id(lease.obj)] = num_bytes
        weakref.finalize(lease.obj, leased.pop, id(lease.obj))
        return lease

    monkeypatch.setattr(BufferPool, "acquire", counted)
    image = 1 << 20
    async with Receiver(url, memory_bytes=4 * image) as receiver, AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(Sender(url)) for _ in range(5)]
        for number, sender in enumerate(senders):
            for part in range(6):
                await sender.send(Shared(np.full(image, part, np.uint8), b"%d %d" % (number, part)))
                assert (await receiver.receive(60)).value[0] == part
            await sender.flush(60)
        await until(lambda: gc.collect() is not None and sum(leased.values()) <= 4 * image)
        assert 2 * image <= sum(leased.values())
        assert receiver._pool.idle_bytes <= image
