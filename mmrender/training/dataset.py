"""`TrajectoryDataset`: a file of trajectories as an iterable that a trainer takes up again where it stopped.

```python
with Recorder("unix:///tmp/rollouts.sock", "rollouts.mmc"):  # what workers ship is written, then acknowledged
    dataset = TrajectoryDataset("rollouts.mmc", wait=600)
    loader = StatefulDataLoader(dataset, batch_size=8, collate_fn=collator)
```

The file is the only source, also for what comes over a socket: what was acknowledged is on disk, whether it
was trained on or not, and a state is a place in the file. So from whichever state a trainer starts, what it
took before that state and what it takes from there on is every record once, in one order.

Each data-parallel rank reads its own records: every `world`-th, or those that a plan gives it.

```python
step = dataset.describe(range(64))       # sizes, from the heads of records: the same on every rank
plan = plan_steps(step, family, ranks=world, max_tokens=4096)
samples = dataset.load(step, [index for turn in plan for index in turn[rank].samples])
batches = [collate_micro_batch(samples, turn[rank], family, pad_token_id=0) for turn in plan]
```
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mmrender.errors import BatchError, MMRenderError
from mmrender.training.packing import Descriptor
from mmrender.training.tensor_list import torch
from mmrender.trajectory.files import TrajectoryReader
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory

_POLL: Final = 0.1
"""Seconds between two looks at a file that grows."""


def _samples(trajectories: Sequence[Trajectory]) -> list[TrainingSample]:
    return [sample for trajectory in trajectories for sample in trajectory.samples()]


@dataclass
class _Place:
    """A place in the file, and the reader that it is the place of.

    Attributes:
        record: Number of the record that comes next, or that `item` items were taken of.
        item: How many.
        records: Records of the pass, or None where it follows a file that grows.
        worker: Number of this reader among `workers`, which share the records by turns.
        workers: As a DataLoader has them; 1 without.
        last: Number of the record that was read last, and None before the first.
        checksum: Its checksum; None where its header is damaged.
        rank: Number of the data-parallel rank among `world`, which share the records by turns.
        world: Ranks; 1 without.
    """

    record: int
    item: int
    records: int | None
    worker: int
    workers: int
    last: int | None = None
    checksum: int | None = None
    rank: int = 0
    world: int = 1

    @property
    def share(self) -> str:
        """Which records are this reader's, in words."""
        rank = f" of rank {self.rank} of {self.world}" if self.world > 1 else ""
        return f"worker {self.worker} of {self.workers}{rank}"


class TrajectoryDataset(torch.utils.data.IterableDataset):  # type: ignore[misc] # torch is not followed
    """The samples of a file of trajectories, in the order of its records.

    Ranks take records by turns, and workers of a `DataLoader` share those of their rank; of the other records
    only headers are read. Ranks may get unlike numbers of samples, which a plan evens out. Each pass begins
    with the first record, unless a state was loaded: then it begins there. `state_dict` and `load_state_dict`
    are what torchdata's `StatefulDataLoader` calls, in its workers, too; a state is plain data. It has no
    length. A damaged record is left out with a `RuntimeWarning` that names it.

    Args:
        path: The file, of `save_trajectories`, `TrajectoryWriter` or `mmrender.shipping.Recorder`.
        rank: Number of this data-parallel rank, below `world`.
        world: Number of data-parallel ranks.
        wait: Seconds to wait for a record that is appended, before the pass ends; 0 ends it with the records
            that the file holds when the dataset is made.
        make: Makes of the trajectories of a record the items to give, the same each time; their samples if
            not given. Where a record is a group of rollouts, advantages can be computed here.

    Raises:
        BatchError: There is no such rank.
        TrajectoryError: The file is of another kind.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        world: int = 1,
        wait: float = 0.0,
        make: Callable[[Sequence[Trajectory]], Iterable[Any]] = _samples,
    ) -> None:
        if not 0 <= rank < world:
            expected = f"0 to {world - 1}"
            raise BatchError("there is no such rank", where="rank", expected=expected, got=str(rank))
        self._path = os.fspath(path)
        self._rank, self._world = rank, world
        self._wait = wait
        self._make = make
        reader = self._reader()
        self._records = None if wait else self._count(reader)
        self._place: _Place | None = None
        self._loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the item that was given last, as plain data."""
        return asdict(self._place or self._start())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where a state was taken.

        Raises:
            BatchError: The state is of another number of workers or ranks, of another worker or rank, or of
                another file.
            TrajectoryError: The file cannot be used.
        """
        place, own, reader = _Place(**state), self._start(), self._reader()
        if place.share != own.share:
            kind = "worker" if (place.rank, place.world) == (own.rank, own.world) else "rank"
            raise BatchError(
                f"the state is that of another {kind}",
                where="state",
                expected=own.share,
                got=place.share,
                remedy=f"Load states with as many {kind}s as they were taken with",
            )
        last, count = place.last, self._count(reader)
        least = max(place.records or 0, 0 if last is None else last + 1)
        fewer = least > count
        found = None if last is None or fewer else reader.checksum(last)
        if fewer or found != place.checksum:
            raise BatchError(
                "the state is that of another file",
                where=self._path if fewer else f"{self._path}[{last}]",
                expected=f"{least} records or more" if fewer else f"the checksum {place.checksum}",
                got=str(count if fewer else found),
                remedy="Keep the file that was trained on, and only append to it",
            )
        if own.records is None or place.records is None:
            place.records = own.records
        self._place, self._loaded = place, True

    def __iter__(self) -> Iterator[Any]:
        place = self._place if self._loaded else None
        self._place, self._loaded = place or self._start(), False
        return self._items(self._place)

    def describe(self, records: Iterable[int] | None = None) -> list[Descriptor]:
        """Return what a plan needs to know of the items of records, which are samples.

        Heads of records are read: tokens, numbers, messages and sizes, and no bytes of tensors. They are not
        compared with checksums, so every rank describes the same; `load` compares what a rank uses. A record
        whose head is damaged is left out with a `RuntimeWarning`.

        Args:
            records: Numbers of records, the same on every rank; by default those that the file holds. Then
                the newest one is read to see whether it is whole.
        """
        reader = self._reader()
        found: list[Descriptor] = []
        for number in range(reader.settle()) if records is None else records:
            items = self._made(number, reader.head)
            found += [Descriptor.of(item, record=number, item=place) for place, item in enumerate(items)]
        return found

    def load(self, step: Sequence[Descriptor], indices: Iterable[int]) -> dict[int, Any]:
        """Read and check the records of some descriptors, each record once; return their items by index.

        Args:
            step: Descriptors, of `describe`.
            indices: Which of them, such as those that a plan gives to a rank.

        Raises:
            TrajectoryError: A record is damaged.
            BatchError: An item is not the one that was described.
        """
        reader = self._reader()
        wanted = {index: step[index] for index in indices}
        numbers = {one.record for one in wanted.values()}
        records = {number: [*self._make(reader[number])] for number in numbers}
        samples: dict[int, Any] = {}
        for index, one in wanted.items():
            items = records[one.record]
            found = items[one.item] if one.item < len(items) else None
            if found is None or Descriptor.of(found, record=one.record, item=one.item) != one:
                raise BatchError(
                    "an item is not the one that was described",
                    where=f"{self._path}[{one.record}], item {one.item}",
                    expected=str(one),
                    got="no item" if found is None else str(Descriptor.of(found)),
                    remedy="Describe the same file, and let `make` give the same items each time",
                )
            samples[index] = found
        return samples

    def _reader(self) -> TrajectoryReader:
        return TrajectoryReader(self._path, tail=False)

    def _count(self, reader: TrajectoryReader) -> int:
        """Return the number of records up to the newest one of this rank that is not torn."""
        own = range(self._rank, len(reader), self._world)
        if own and not reader.holds(own[-1]):
            own = range(self._rank, reader.settle(), self._world)
        return own[-1] + 1 if own else 0

    def _start(self) -> _Place:
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = self._rank + self._world * worker
        return _Place(first, 0, self._records, worker, workers, rank=self._rank, world=self._world)

    def _items(self, place: _Place) -> Iterator[Any]:
        reader = self._reader()
        while (items := self._next(reader, place)) is not None:
            place.last, place.checksum = place.record, reader.checksum(place.record)
            if place.item > len(items):
                raise BatchError(
                    "a record gives fewer items than when the state was taken",
                    where=f"{self._path}[{place.record}]",
                    expected=f"{place.item} or more",
                    got=str(len(items)),
                    remedy="`make` must give the same items each time",
                )
            while place.item < len(items):
                place.item += 1  # before it is given: a state that is taken then is behind it
                yield items[place.item - 1]
            place.record, place.item = place.record + place.workers * place.world, 0

    def _next(self, reader: TrajectoryReader, place: _Place) -> list[Any] | None:
        """Return the items of the next record, for which a pass that follows waits; None at the end."""
        if place.records is not None:
            return self._made(place.record, reader.__getitem__) if place.record < place.records else None
        until = time.monotonic() + self._wait
        while not self._has(reader, place.record):
            if time.monotonic() >= until:
                return None
            time.sleep(min(_POLL, self._wait))
            reader.refresh()
        return self._made(place.record, reader.__getitem__)

    @staticmethod
    def _has(reader: TrajectoryReader, number: int) -> bool:
        """Return whether a record was appended; without its content the append is still under way."""
        return number < len(reader) and (reader.holds(number) or number < reader.settle())

    def _made(self, number: int, read: Callable[[int], list[Trajectory]]) -> list[Any]:
        """Return the items of a record; none, with a warning, if it is damaged."""
        try:
            trajectories = read(number)
        except MMRenderError as error:
            message = f"{self._path}[{number}]: left out, damaged - got {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return []
        return list(self._make(trajectories))
