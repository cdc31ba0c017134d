"""`TrajectoryDataset`: a file of trajectories as an iterable that a trainer takes up again where it stopped.

```python
with Recorder("unix:///tmp/rollouts.sock", "rollouts.mmc"):  # what workers ship is written, then acknowledged
    dataset = TrajectoryDataset("rollouts.mmc", wait=600)
    loader = StatefulDataLoader(dataset, batch_size=8, collate_fn=collator)
```

The file is the only source, also for what comes over a socket: what was acknowledged is on disk, whether it
was trained on or not, and a state is a place in the file. So from whichever state a trainer starts, what it
took before that state and what it takes from there on is every record once, in one order.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mmrender.errors import BatchError, MMRenderError
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
    """

    record: int
    item: int
    records: int | None
    worker: int
    workers: int
    last: int | None = None
    checksum: int | None = None


class TrajectoryDataset(torch.utils.data.IterableDataset):  # type: ignore[misc] # torch is not followed
    """The samples of a file of trajectories, in the order of its records.

    Workers of a `DataLoader` take records by turns. Each pass begins with the first record, unless a state
    was loaded: then it begins there. `state_dict` and `load_state_dict` are what torchdata's
    `StatefulDataLoader` calls, in its workers, too; a state is plain data. It has no length. A damaged record
    is left out with a `RuntimeWarning` that names it.

    Args:
        path: The file, of `save_trajectories`, `TrajectoryWriter` or `mmrender.shipping.Recorder`.
        wait: Seconds to wait for a record that is appended, before the pass ends; 0 ends it with the records
            that the file holds when the dataset is made.
        make: Makes of the trajectories of a record the items to give, the same each time; their samples if
            not given. Where a record is a group of rollouts, advantages can be computed here.

    Raises:
        TrajectoryError: The file is of another kind.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        wait: float = 0.0,
        make: Callable[[Sequence[Trajectory]], Iterable[Any]] = _samples,
    ) -> None:
        self._path = os.fspath(path)
        self._wait = wait
        self._make = make
        count = len(TrajectoryReader(path))
        self._records = None if wait else count
        self._place: _Place | None = None
        self._loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the item that was given last, as plain data."""
        return asdict(self._place or self._start())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where a state was taken.

        Raises:
            BatchError: The state is of another number of workers, of another worker, or of another file.
            TrajectoryError: The file cannot be used.
        """
        place, own, reader = _Place(**state), self._start(), TrajectoryReader(self._path)
        if (place.worker, place.workers) != (own.worker, own.workers):
            raise BatchError(
                "the state is that of another worker",
                where="state",
                expected=f"worker {own.worker} of {own.workers}",
                got=f"worker {place.worker} of {place.workers}",
                remedy="Load states with as many workers as they were taken with",
            )
        last = place.last
        least = max(place.records or 0, 0 if last is None else last + 1)
        found = None if last is None or least > len(reader) else reader.checksum(last)
        if least > len(reader) or found != place.checksum:
            fewer = least > len(reader)
            raise BatchError(
                "the state is that of another file",
                where=self._path if fewer else f"{self._path}[{last}]",
                expected=f"{least} records or more" if fewer else f"the checksum {place.checksum}",
                got=str(len(reader) if fewer else found),
                remedy="Keep the file that was trained on, and only append to it",
            )
        if own.records is None or place.records is None:
            place.records = own.records
        self._place, self._loaded = place, True

    def __iter__(self) -> Iterator[Any]:
        place = self._place if self._loaded else None
        self._place, self._loaded = place or self._start(), False
        return self._items(self._place)

    def _start(self) -> _Place:
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return _Place(worker, 0, self._records, worker, workers)

    def _items(self, place: _Place) -> Iterator[Any]:
        reader = TrajectoryReader(self._path)
        while self._has(reader, place):
            items = self._read(reader, place.record)
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
            place.record, place.item = place.record + place.workers, 0

    def _has(self, reader: TrajectoryReader, place: _Place) -> bool:
        """Return whether the pass has another record, waiting for it where it follows the file."""
        if place.records is not None:
            return place.record < place.records
        until = time.monotonic() + self._wait
        while place.record >= len(reader) and place.record >= reader.refresh():
            if time.monotonic() >= until:
                return False
            time.sleep(min(_POLL, self._wait))
        return True

    def _read(self, reader: TrajectoryReader, number: int) -> list[Any]:
        try:
            trajectories = reader[number]
        except MMRenderError as error:
            message = f"{self._path}[{number}]: left out, damaged - got {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return []
        return list(self._make(trajectories))
