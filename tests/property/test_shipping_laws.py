"""Whatever a connection does, each message is taken once, in the order of its sender, and whole."""

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.errors import ShippingConnectionError
from mmrender.shipping import Receiver, Sender, Window
from shipping_cases import QUICK, FaultyTransport, is_message, leftovers, message

PICTURES = st.lists(st.integers(0, 5), unique=True, max_size=4)
NAMES = itertools.count()
PLAN = st.fixed_dictionaries(
    {
        "messages": st.lists(PICTURES, min_size=1, max_size=14),
        "again": st.lists(st.integers(0, 13), max_size=4),  # ids that are sent once more
        "faults": st.just([])
        | st.lists(
            st.tuples(st.integers(1, 90), st.sampled_from(["cut", "cut", "drop", "repeat"])), max_size=6
        ),
        "restarts": st.sets(st.integers(0, 12), max_size=2),  # receiver replaced after so many
        "forgets": st.sets(st.integers(0, 12), max_size=3),  # shared arrays dropped after so many
        "window": st.builds(Window, st.integers(1, 4), st.sampled_from([1, 5_000, 100_000])),
        "table_bytes": st.sampled_from([0, 9_000, 1 << 20]),
        "hold": st.integers(0, 3),  # how many messages the consumer keeps before it acknowledges
        "key": st.sampled_from([None, "sixteen bytes or more"]),
    }
)


def make_receiver(plan: dict[str, Any], transport: FaultyTransport, kept: list[str]) -> Receiver:
    return Receiver(
        "memory://laws", transport=transport, timing=QUICK, ack="explicit", seen=kept, key=plan["key"],
        window=plan["window"], table_bytes=plan["table_bytes"],
    )  # fmt: skip


async def consume(plan: dict[str, Any], transport: FaultyTransport, values: dict[str, Any]) -> list[str]:
    """Take messages, keep and acknowledge them, and start over with what was kept where the plan says so."""
    kept: list[str] = []
    pending: list[Any] = []
    restarts, taken = set(plan["restarts"]), 0
    receiver = make_receiver(plan, transport, kept)
    await receiver.open()
    while len(kept) < len(values):
        received = await receiver.receive()
        assert is_message(received.value, *values[received.id])
        pending.append(received)
        taken += 1
        while pending and (len(pending) > plan["hold"] or len(kept) + len(pending) == len(values)):
            first = pending.pop(0)
            kept.append(first.id)
            first.ack()
        if taken in plan["forgets"]:
            receiver.drop_tables()
        if taken in restarts:
            restarts.discard(taken)
            pending.clear()
            await receiver.aclose()
            receiver = make_receiver(plan, transport, kept)
            await receiver.open()
    closing.append(receiver)
    return kept


closing: list[Receiver] = []


async def run(plan: dict[str, Any]) -> None:
    transport = FaultyTransport(f"laws{next(NAMES)}", plan["faults"])
    values = {f"m{number}": (number, pictures) for number, pictures in enumerate(plan["messages"])}
    sender = Sender("memory://laws", transport=transport, timing=QUICK, key=plan["key"])
    consumer = asyncio.create_task(consume(plan, transport, values))
    await sender.connect(timeout=None)
    deliveries = []
    for number, pictures in enumerate(plan["messages"]):
        deliveries.append(await sender.send(message(number, pictures), id=f"m{number}"))
        if number in plan["again"]:
            deliveries.append(await sender.send(message(number, pictures), id=f"m{number}"))
    kept = await asyncio.wait_for(consumer, 30)
    await sender.flush(30)
    assert kept == list(values)
    assert all(delivery.acknowledged for delivery in deliveries)
    await sender.aclose()
    receiver = closing.pop()
    await receiver.aclose()
    if not plan["faults"]:
        assert list(receiver.errors) == []  # both sides count alike, holes in the line included
    assert await leftovers() == []


@settings(max_examples=40)
@given(PLAN)
def test_every_message_is_kept_once_and_in_order(plan):
    asyncio.run(run(plan))


async def run_at_most_once(messages: list[list[int]], faults: list[tuple[int, str]]) -> None:
    transport = FaultyTransport(f"once{next(NAMES)}", faults)
    async with Receiver("memory://once", transport=transport, timing=QUICK) as receiver:
        sender = Sender("memory://once", transport=transport, timing=QUICK, delivery="at-most-once")
        await sender.connect(timeout=None)
        got: list[str] = []

        async def consume() -> None:
            async for received in receiver:
                number = int(received.id)
                assert is_message(received.value, number, messages[number])
                got.append(received.id)

        consumer = asyncio.create_task(consume())
        deliveries = [await sender.send(message(n, each), id=str(n)) for n, each in enumerate(messages)]
        lost = set()
        for delivery in deliveries:
            try:
                await asyncio.wait_for(delivery, 30)
            except ShippingConnectionError:
                lost.add(delivery.id)
        acknowledged = {delivery.id for delivery in deliveries if delivery.acknowledged}
        assert lost | acknowledged == {delivery.id for delivery in deliveries}
        assert sender.stats.resent == 0
        assert sender.stats.lost == len(lost)
        await sender.aclose()
    await consumer
    assert got == sorted(set(got), key=int)
    assert acknowledged <= set(got)
    assert await leftovers() == []


@settings(max_examples=30)
@given(
    st.lists(PICTURES, min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["cut", "drop"])), max_size=5),
)
def test_at_most_once_sends_nothing_again_and_knows_what_may_be_lost(messages, faults):
    asyncio.run(run_at_most_once(messages, faults))
