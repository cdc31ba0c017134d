"""Whatever a connection does, each message is kept once, in the order of its sender, and whole."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender import Trajectory
from mmrender.shipping import Receiver, Sender
from shipping_cases import PATIENT, QUICK, CuttingProxy, is_message, leftovers, message
from tree_cases import assert_same, calls, grown, wire_bound

PICTURES = st.lists(st.integers(0, 5), unique=True, max_size=4)
CUTS = st.lists(st.integers(0, 60_000), max_size=4)
PLAN = st.fixed_dictionaries(
    {
        "messages": st.lists(PICTURES, min_size=1, max_size=14),
        "cuts": CUTS,
        "restarts": st.sets(st.integers(0, 12), max_size=2),  # receiver replaced after so many
        "window_messages": st.integers(1, 4),
        "memory_bytes": st.sampled_from([1, 5_000, 100_000, 1 << 20]),
        "hold": st.integers(0, 3),  # how many messages the consumer keeps before it acknowledges
    }
)


def make_receiver(plan: dict[str, Any], url: str, kept: list[str]) -> Receiver:
    options = {name: plan[name] for name in ("window_messages", "memory_bytes")}
    return Receiver(url, timing=QUICK, ack="explicit", seen=kept, **options)


async def consume(plan: dict[str, Any], url: str, numbers: list[int]) -> Receiver:
    """Take messages, keep and acknowledge them, and start over with the kept ids where the plan says so."""
    kept: list[str] = []
    pending: list[Any] = []
    restarts, taken = set(plan["restarts"]), 0
    receiver = make_receiver(plan, url, kept)
    await receiver.open()
    while len(kept) < len(plan["messages"]):
        received = await receiver.receive()
        number = received.value["number"]
        assert is_message(received.value, number, plan["messages"][number])
        pending.append(received)
        taken += 1
        while pending and (len(pending) > plan["hold"] or len(kept) + len(pending) == len(plan["messages"])):
            first = pending.pop(0)
            kept.append(first.id)
            numbers.append(first.value["number"])
            first.ack()
        if taken in restarts:
            restarts.discard(taken)
            pending.clear()
            await receiver.aclose()
            receiver = make_receiver(plan, url, kept)
            await receiver.open()
    return receiver


async def run(plan: dict[str, Any], folder: Path) -> None:
    url = f"unix://{folder}/back"
    numbers: list[int] = []
    async with CuttingProxy(f"unix://{folder}/front", url, plan["cuts"]) as proxy:
        sender = Sender(proxy.url, timing=QUICK)
        consumer = asyncio.create_task(consume(plan, url, numbers))
        await sender.connect(timeout=None)
        deliveries = []
        for number, pictures in enumerate(plan["messages"]):
            deliveries.append(await sender.send(message(number, pictures)))
        receiver = await asyncio.wait_for(consumer, 60)
        await sender.flush(60)
        assert numbers == list(range(len(plan["messages"])))
        assert all(delivery.acknowledged for delivery in deliveries)
        await sender.aclose()
        await receiver.aclose()
        if not plan["cuts"]:
            assert list(receiver.errors) == []  # both sides count alike
    assert await leftovers() == []


@settings(max_examples=40)
@given(PLAN)
def test_every_message_is_kept_once_and_in_order(plan):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(plan, Path(folder)))


async def ship(trajectories: list[Trajectory], cuts: list[int], folder: Path) -> tuple[list[Any], int, int]:
    """Send each by itself; return what arrived, its bytes, and the number of connections."""
    timing = QUICK if cuts else PATIENT  # a busy machine breaks no connection
    async with (
        Receiver(f"unix://{folder}/back", timing=timing) as receiver,
        CuttingProxy(f"unix://{folder}/front", receiver.url, cuts) as proxy,
    ):
        sender = Sender(proxy.url, timing=timing)
        await sender.connect(timeout=None)
        for trajectory in trajectories:
            await sender.send(trajectory)
        got = [(await receiver.receive(60)).value for _ in trajectories]
        await sender.aclose(60)
        return got, receiver.stats.received_bytes, sender.stats.connections


@settings(max_examples=20)
@given(st.lists(calls(), min_size=1, max_size=4), st.integers(1, 3), CUTS)
def test_trees_arrive_as_they_were(rollouts, copies, cuts):
    sent = [grown(rollout, f"task-{n}") for _ in range(copies) for n, rollout in enumerate(rollouts)]
    with tempfile.TemporaryDirectory() as folder:
        got, num_bytes, connections = asyncio.run(ship(sent, cuts, Path(folder)))
    assert len(got) == len(sent)
    for before, after in zip(sent, got, strict=True):
        assert_same(before, after)
    if not cuts:
        assert connections == 1
        assert num_bytes <= sum(wire_bound([one]) for one in sent)  # short arrays travel with each message
