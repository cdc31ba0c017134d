"""What a sender says of messages that failed: once, where somebody listens, and with bounded memory."""

import asyncio

import pytest

from mmrender.errors import ShippingConnectionError, ShippingError, ShippingProtocolError
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.delivery import Delivery
from mmrender.shipping.failures import Failures
from mmrender.shipping.outbox import Outbox, Outgoing
from shipping_cases import PATIENT

LOST = (
    "message 'x': the connection broke before this was acknowledged, and it is sent at most once"
    '. Take delivery="at-least-once" to have it sent again'
)


def failed(number: int) -> Delivery:
    delivery = Delivery(str(number))
    delivery.settle(ShippingError(f"problem {number}"))
    return delivery


async def tell(delivery: Delivery) -> None:
    with pytest.raises(ShippingError):
        await delivery


async def lose_one(url: str) -> tuple[Sender, Delivery]:
    """A sender whose only message was on its way when the receiver went."""
    async with Receiver(url, ack="explicit") as receiver:
        sender = Sender(receiver.url, delivery="at-most-once", timing=PATIENT)
        await sender.connect()
        delivery = await sender.send("x", id="x")
        await receiver.receive(5)
    async with asyncio.timeout(5):
        while not delivery.done:
            await asyncio.sleep(0.005)
    assert sender.stats.lost == 1
    assert sender.stats.refused == 0
    return sender, delivery


def test_flush_reports_what_may_be_lost_once(tmp_path):
    async def run():
        sender, _ = await lose_one(f"unix://{tmp_path}/a")
        with pytest.raises(ShippingConnectionError) as caught:
            await sender.flush(5)
        assert str(caught.value) == LOST
        await sender.flush(5)
        await sender.aclose()

    asyncio.run(run())


def test_closing_reports_what_may_be_lost_and_closes(tmp_path):
    async def run():
        sender, _ = await lose_one(f"unix://{tmp_path}/a")
        with pytest.raises(ShippingConnectionError) as caught:
            await sender.aclose()
        assert str(caught.value) == LOST
        await sender.aclose()

    asyncio.run(run())


def test_leaving_a_with_block_reports_what_may_be_lost(tmp_path):
    async def run():
        sender, _ = await lose_one(f"unix://{tmp_path}/a")
        # No receiver is there to connect to again, so only the way out is taken.
        with pytest.raises(ShippingConnectionError):
            await sender.__aexit__(None, None, None)

    asyncio.run(run())


def test_what_a_delivery_has_told_is_not_told_again(tmp_path):
    async def run():
        sender, delivery = await lose_one(f"unix://{tmp_path}/a")
        await tell(delivery)
        await sender.flush(5)
        await sender.aclose()

    asyncio.run(run())


def test_errors_that_were_told_make_room_and_none_of_the_others_goes_silent():
    async def run():
        failures = Failures(most=3)
        assert not failures
        kept = [failed(number) for number in range(3)]
        for delivery in kept:
            failures.add(delivery)
        await tell(kept[0])
        kept.append(failed(3))
        failures.add(kept[3])  # in the place of the first
        failures.add(failed(4))
        failures.add(failed(5))
        assert len(failures._untold) == 3
        for delivery in kept[1:]:
            await tell(delivery)
        assert failures
        assert str(failures.take()) == "problem 4"
        assert not failures
        assert failures.take() is None

    asyncio.run(run())


def test_memory_of_failures_is_bounded_when_nobody_asks():
    outbox = Outbox(max_messages=10, max_bytes=1000, resend=True)
    for seq in range(3000):
        outbox.add(Outgoing(seq, "value", None, 1, Delivery(str(seq))))
        outbox.refused(seq, "no", "peer")
    assert outbox.counts.refused == 3000
    assert len(outbox.counts.failures._untold) == 1024
    error = outbox.counts.failures.take()
    assert isinstance(error, ShippingProtocolError)
    assert "message '0' to peer" in str(error)
