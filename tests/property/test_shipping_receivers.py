"""Whatever receivers, their list and acknowledgements do, each shipped trajectory is trained on once."""

import asyncio
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from mmrender import Trajectory
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.protocol import Timing
from mmrender.training import TrajectoryDataset
from mmrender.trajectory import TrajectoryReader, TrajectoryWriter

HASTY = Timing(
    heartbeat=0.5, silence=60, first_retry=0.001, last_retry=0.005, look=0.002, leave=0.004, failover=0.01
)
RECEIVERS, SENDERS = 3, 2
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, SENDERS - 1), st.integers(1, 5)),
        st.tuples(st.just("record"), st.integers(0, RECEIVERS - 1), st.integers(1, 6)),
        st.tuples(st.just("lose"), st.integers(0, RECEIVERS - 1), st.integers(1, 3)),
        st.tuples(st.just("kill"), st.integers(0, RECEIVERS - 1), st.booleans()),
        st.tuples(st.just("list"), st.integers(1, 2**RECEIVERS - 1), st.just(0)),
        st.tuples(st.just("read"), st.integers(0, 4), st.integers(1, 3)),
    ),
    min_size=4,
    max_size=24,
)


def rollout(number: int) -> Trajectory:
    trajectory = Trajectory(f"task-{number}")
    trajectory.append([1, 2], [number], logprobs=[-0.5])
    return trajectory


class Recording:
    """A receiver and its file, which dies as a process does."""

    def __init__(self, url: str, path: Path) -> None:
        self.path = path
        self.writer = TrajectoryWriter(path)
        last = TrajectoryReader(path, tail=False).ids().last_numbers()
        self.receiver = Receiver(url, ack="explicit", seen=last, timing=HASTY)

    async def record(self, times: int, *, is_lost: bool = False) -> int:
        """Record some messages if they come. An acknowledgement may be lost with its connection."""
        for time in range(times):
            try:
                message = await self.receiver.receive(0.01)
            except TimeoutError:
                return time
            self.writer.append(message.value, id=message.id)
            if is_lost:
                await self.cut()
            message.ack()
        return times

    async def cut(self) -> None:
        """Break all connections."""
        for session in list(self.receiver._sessions):
            session.connection.close()
        for _ in range(3):
            await asyncio.sleep(0)

    async def die(self) -> None:
        """Leave messages unacknowledged, an index without the last records, and half a record."""
        await self.cut()
        await self.receiver.aclose()
        self.writer._file.close()
        if self.writer._index._writer is not None:
            self.writer._index._writer.close()
        if data := self.path.read_bytes():
            with self.path.open("ab") as file:
                file.write(data[:200])


class Fleet:
    """Receivers, senders and ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, folder / "files"
        self.files.mkdir()
        self.listed: list[str] = []
        self.count = self.born = 0
        self.recordings: list[Recording] = []
        self.trained: list[str] = []
        self.states: list[Any] = []
        self.world = 1

    async def start(self, path: Path | None = None) -> Recording:
        """Start a receiver under a new address, with a new file or one that is there."""
        self.born += 1
        path = path or self.files / f"{self.born * 7 % 11}-{self.born}.mmc"  # names in no order of time
        recording = Recording(f"unix://{self.folder}/{self.born}", path)
        await recording.receiver.open()
        return recording

    async def open(self) -> None:
        self.recordings = [await self.start() for _ in range(RECEIVERS)]
        self.listed[:] = [each.receiver.url for each in self.recordings]
        self.senders = [Sender(lambda: list(self.listed), timing=HASTY) for _ in range(SENDERS)]

    async def do(self, kind: str, number: int, more: int) -> None:
        if kind == "send":
            for _ in range(more):
                await self.senders[number].send(rollout(self.count))
                self.count += 1
        elif kind in ("record", "lose"):
            await self.recordings[number].record(more, is_lost=kind == "lose")
        elif kind == "kill":
            dead = self.recordings[number]
            await dead.die()
            born = self.recordings[number] = await self.start(dead.path if more else None)
            # The dead address stays in the list if the new one is to be found by a later change only.
            if dead.receiver.url in self.listed and self.born % 3:
                self.listed[self.listed.index(dead.receiver.url)] = born.receiver.url
        elif kind == "list":
            self.listed[:] = [
                each.receiver.url for place, each in enumerate(self.recordings) if number >> place & 1
            ]
        elif kind == "read":
            self.read(number, world=more)

    def read(self, count: int | None, *, world: int) -> None:
        """Let each rank of a new world read, from the states of the ranks before."""
        states = []
        for rank in range(world):
            dataset = TrajectoryDataset(self.files, rank=rank, world=world, wait=1e-9)
            if self.states:
                dataset.load_state_dict(self.states[rank] if world == self.world else self.states)
            self.trained += [sample.sample_id for sample in islice(dataset, count)]
            states.append(dataset.state_dict())
        self.states, self.world = states, world

    async def finish(self) -> None:
        """Ship and read the rest."""
        self.listed[:] = [each.receiver.url for each in self.recordings]
        async with asyncio.timeout(60):
            while any(sender.stats.unacked for sender in self.senders):
                for each in self.recordings:
                    await each.record(50)
        for sender in self.senders:
            await sender.aclose(60)
        for each in self.recordings:
            await each.receiver.aclose()
        self.read(None, world=self.world)
        for each in self.recordings:
            each.writer.close()
        self.read(None, world=2)


async def play(steps: list[Any], folder: Path) -> None:
    fleet = Fleet(folder)
    await fleet.open()
    for step in steps:
        await fleet.do(*step)
    await fleet.finish()
    expected = sorted(f"task-{number}/0" for number in range(fleet.count))
    assert sorted(fleet.trained) == expected
    epoch = TrajectoryDataset(fleet.files, shuffle=1)
    assert sorted(sample.sample_id for sample in epoch) == expected


@settings(max_examples=20, deadline=None)
@given(STEPS)
@pytest.mark.filterwarnings("ignore:.*left out, torn.*:RuntimeWarning")
def test_each_trajectory_is_trained_on_once(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(steps, Path(folder)))
