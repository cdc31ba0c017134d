"""`TrajectoryDataset`: a file of trajectories as an iterable that a trainer can resume.

```python
with Recorder("unix:///tmp/rollouts.sock", "rollouts.mmc"):  # shipped rollouts are written, then acknowledged
    dataset = TrajectoryDataset("rollouts.mmc", wait=600)
    loader = StatefulDataLoader(dataset, batch_size=8, collate_fn=collator)
```

The file is the only source, also for rollouts that come over a socket: an acknowledged one is on disk, and a
state is a place in the file. So the records before a state and the records after it are all records, each
once, in one order, from any state that a trainer starts at.

Each data-parallel rank reads its own records: every `world`-th, or the records that a plan assigns to it.

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
    """A reader's place in the file.

    Attributes:
        record: Number of the next record, or of a record with `item` items taken.
        item: Number of items taken.
        records: Records of the pass, or None if it follows a file that grows.
        worker: Number of this reader among `workers`, which take the records by turns.
        workers: Workers of a DataLoader; 1 without.
        last: Number of the record that was read last, and None before the first.
        checksum: Checksum of the last record; None if its header is damaged.
        rank: Number of the data-parallel rank among `world`, which take the records by turns.
        world: Data-parallel ranks; 1 without.
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
        """The reader's share of the records, in words."""
        rank = f" of rank {self.rank} of {self.world}" if self.world > 1 else ""
        return f"worker {self.worker} of {self.workers}{rank}"


class TrajectoryDataset(torch.utils.data.IterableDataset):  # type: ignore[misc] # torch is not followed
    """The samples of a file of trajectories, in the order of its records.

    Ranks take records by turns, and workers of a `DataLoader` share their rank's records. Only the headers of
    other records are read. Ranks may get different numbers of samples, which a plan evens out. Each pass
    begins with the first record, or at a state that was loaded. torchdata's `StatefulDataLoader` calls
    `state_dict` and `load_state_dict`, in its workers, too. A state is plain data. A dataset is without
    `len`. A damaged record is left out with a `RuntimeWarning` that names it.

    Args:
        path: The file, of `save_trajectories`, `TrajectoryWriter` or `mmrender.shipping.Recorder`.
        rank: Number of this data-parallel rank, below `world`.
        world: Number of data-parallel ranks.
        wait: Seconds to wait for a record that is appended, before the pass ends; 0 ends it with the records
            that the file holds when the dataset is made.
        make: Makes items from the trajectories of a record, the same each time, by default their samples.
            If a record is a group of rollouts, advantages can be computed here.

    Raises:
        BatchError: The rank is not below `world`.
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
        """Return the place after the last item, as plain data."""
        return asdict(self._place or self._start())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at a state.

        Raises:
            BatchError: The state is of another number of workers or ranks, of another worker or rank, or of
                another file.
            TrajectoryError: The file cannot be used.
        """
        place, start, reader = _Place(**state), self._start(), self._reader()
        if place.share != start.share:
            kind = "worker" if (place.rank, place.world) == (start.rank, start.world) else "rank"
            raise BatchError(
                f"the state belongs to another {kind}",
                where="state",
                expected=start.share,
                got=place.share,
                remedy=f"Load states with the number of {kind}s of their pass",
            )
        last, count = place.last, self._count(reader)
        minimum = max(place.records or 0, 0 if last is None else last + 1)
        fewer = minimum > count
        checksum = None if last is None or fewer else reader.checksum(last)
        if fewer or checksum != place.checksum:
            raise BatchError(
                "the state belongs to another file",
                where=self._path if fewer else f"{self._path}[{last}]",
                expected=f"{minimum} records or more" if fewer else f"the checksum {place.checksum}",
                got=str(count if fewer else checksum),
                remedy="Keep the file that was trained on, and only append to it",
            )
        if start.records is None or place.records is None:
            place.records = start.records
        self._place, self._loaded = place, True

    def __iter__(self) -> Iterator[Any]:
        place = self._place if self._loaded else None
        self._place, self._loaded = place or self._start(), False
        return self._items(self._place)

    def describe(self, records: Iterable[int] | None = None) -> list[Descriptor]:
        """Return the sizes of the samples of records, for a plan.

        Heads of records are read: tokens, numbers, messages and sizes, without the bytes of tensors. They are
        not compared with checksums, so every rank describes the same; `load` compares the records that a rank
        uses. A record with a damaged head is left out with a `RuntimeWarning`.

        Args:
            records: Numbers of records, the same on every rank, by default all records of the file. Then the
                newest one is read to see whether it is whole.

        Raises:
            BatchError: A number is beyond the file's records.
        """
        reader = self._reader()
        count = len(reader) if records is not None else reader.settle()
        descriptors: list[Descriptor] = []
        for number in range(count) if records is None else records:
            if not 0 <= number < count:
                raise BatchError(
                    "there is no such record",
                    where=f"{self._path}[{number}]",
                    expected=f"one of {count} records",
                    got=str(number),
                    remedy="Wait for the record to be appended, or describe fewer",
                )
            items = self._made(number, reader.head)
            descriptors += [
                Descriptor.of(item, record=number, item=place) for place, item in enumerate(items)
            ]
        return descriptors

    def load(self, step: Sequence[Descriptor], indices: Iterable[int]) -> dict[int, Any]:
        """Read and check the records of some descriptors, each record once, and return their items by index.

        Args:
            step: Descriptors, from `describe`.
            indices: Indices of descriptors, such as those that a plan assigns to a rank.

        Raises:
            TrajectoryError: A record is damaged.
            BatchError: An item differs from its descriptor.
        """
        reader = self._reader()
        descriptors = {index: step[index] for index in indices}
        numbers = {descriptor.record for descriptor in descriptors.values()}
        records = {number: [*self._make(reader[number])] for number in numbers}
        samples: dict[int, Any] = {}
        for index, descriptor in descriptors.items():
            record, place = descriptor.record, descriptor.item
            item = records[record][place] if place < len(records[record]) else None
            if item is None or Descriptor.of(item, record=record, item=place) != descriptor:
                raise BatchError(
                    "an item differs from its descriptor",
                    where=f"{self._path}[{record}], item {place}",
                    expected=str(descriptor),
                    got="no item" if item is None else str(Descriptor.of(item)),
                    remedy="Describe the same file, and let `make` return the same items each time",
                )
            samples[index] = item
        return samples

    def _reader(self) -> TrajectoryReader:
        return TrajectoryReader(self._path, tail=False)

    def _count(self, reader: TrajectoryReader) -> int:
        """Return the number of records up to the newest one of this rank that is not torn."""
        numbers = range(self._rank, len(reader), self._world)
        if numbers and not reader.holds(numbers[-1]):
            numbers = range(self._rank, reader.settle(), self._world)
        return numbers[-1] + 1 if numbers else 0

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
                    "a record has fewer items than when the state was taken",
                    where=f"{self._path}[{place.record}]",
                    expected=f"{place.item} or more",
                    got=str(len(items)),
                    remedy="`make` must return the same items each time",
                )
            while place.item < len(items):
                place.item += 1  # before the item is yielded: a state that is taken then is after it
                yield items[place.item - 1]
            place.record, place.item = place.record + place.workers * place.world, 0

    def _next(self, reader: TrajectoryReader, place: _Place) -> list[Any] | None:
        """Return the items of the next record, None at the end. A pass that follows a file waits for it."""
        if place.records is not None:
            return self._made(place.record, reader.__getitem__) if place.record < place.records else None
        until = time.monotonic() + self._wait
        # A record that is there without its content is still being appended.
        number = place.record
        while number >= len(reader) or not (reader.holds(number) or number < reader.settle()):
            if time.monotonic() >= until:
                return None
            time.sleep(min(_POLL, self._wait))
            reader.refresh()
        return self._made(number, reader.__getitem__)

    def _made(self, number: int, read: Callable[[int], list[Trajectory]]) -> list[Any]:
        """Return the items of a record. A damaged one counts as empty, with a warning."""
        try:
            trajectories = read(number)
        except MMRenderError as error:
            message = f"{self._path}[{number}]: left out, damaged - got {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return []
        return list(self._make(trajectories))
