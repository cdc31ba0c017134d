"""Random trees of steps arrive whole over a connection that breaks, and each image travels once over one that holds."""

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.shipping import Receiver, Sender
from mmrender.trajectory import Trajectory
from shipping_cases import QUICK, FaultyTransport
from tree_cases import assert_same, calls, grown

NAMES = itertools.count()
FAULTS = st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["cut", "drop", "repeat"])), max_size=4)


async def ship(
    trajectories: list[Trajectory], faults: list[tuple[int, str]]
) -> tuple[list[Trajectory], int, int]:
    """Send each by itself; give what arrived, the bytes that did, and the number of connections."""
    transport = FaultyTransport(f"trees{next(NAMES)}", faults)
    async with Receiver("memory://t", transport=transport, timing=QUICK) as receiver:
        sender = Sender("memory://t", transport=transport, timing=QUICK)
        await sender.connect(timeout=None)
        for trajectory in trajectories:
            await sender.send(trajectory)
        got = [(await receiver.receive(30)).value for _ in trajectories]
        await sender.aclose()
        return got, receiver.stats.received_bytes, sender.stats.connections


def bound(trajectories: list[Trajectory]) -> int:
    """Bytes for distinct images, and for everything else once for each rollout; all of it linear."""
    images = {item.identity: item.nbytes for each in trajectories for item in each.items}
    steps = [step for each in trajectories for step in each.steps]
    return (
        sum(images.values())
        + sum(8 * (len(step.own_ids) + len(step.completion_ids)) for step in steps)
        + sum(step.own_experts.data.nbytes for step in steps if step.own_experts)
        + sum(400 + 120 * len(step.new_messages) + 40 * len(step.own_entries) for step in steps)
        + sum(2000 + 1500 * len(each.items) for each in trajectories)
    )


@settings(max_examples=30)
@given(st.lists(calls(), min_size=1, max_size=4), st.integers(1, 3), FAULTS)
def test_trees_arrive_as_they_were(rollouts, copies, faults):
    sent = [grown(rollout, f"{c}-{n}") for c in range(copies) for n, rollout in enumerate(rollouts)]
    got, num_bytes, connections = asyncio.run(ship(sent, faults))
    assert len(got) == len(sent)
    for before, after in zip(sent, got, strict=True):
        assert_same(before, after)
    if not faults:
        assert connections == 1
        assert num_bytes <= bound(sent)
