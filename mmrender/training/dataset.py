"""`TrajectoryDataset`: files of trajectories as an iterable that a trainer can resume.

```python
with Recorder("unix:///tmp/rollouts.sock", "rollouts.mmr"):  # shipped rollouts are written, then acknowledged
    dataset = TrajectoryDataset("rollouts.mmr", wait=600)
    loader = StatefulDataLoader(dataset, batch_size=8, collate_fn=collator)
```

The files are the only source, also for rollouts that come over a socket: an acknowledged one is on disk, and
a state is a place in the files. So the records before a state and the records after it are all records, each
once, from any state that a trainer starts at.

Each data-parallel rank reads its own records: its share of each file, or the records that a plan assigns to
it.

```python
step = dataset.describe(range(64))       # sizes, from the index: the same on every rank
plan = plan_steps(step, family, ranks=world, max_tokens=4096)
samples = dataset.load(step, [index for turn in plan for index in turn[rank].samples])
batches = [collate_micro_batch(samples, turn[rank], family, pad_token_id=0) for turn in plan]
```
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from mmrender.errors import BatchError, MMRenderError, check_count
from mmrender.training.order import Element, Pass, Place, places_of
from mmrender.training.packing import Descriptor
from mmrender.training.tensor_list import torch
from mmrender.trajectory.files import TrajectoryReader
from mmrender.trajectory.index import RecordIds, describe, samples_of
from mmrender.trajectory.stores import find_files, is_stored
from mmrender.trajectory.tree import Trajectory

_POLL: Final = 0.1
"""Seconds between two looks at files that grow."""
_STORE_POLL: Final = 2.0
"""Seconds between two looks at objects of a store."""
_MAX_WORKERS: Final = 4096
"""Maximum number of workers of a DataLoader that a state is loaded for."""

FilePath: TypeAlias = str | os.PathLike[str]
Value = TypeVar("Value")


class TrajectoryDataset(torch.utils.data.IterableDataset):  # type: ignore[misc] # torch is not followed
    """The samples of files of trajectories.

    Each record belongs to one reader, which is a worker of a rank: readers take the records of a file by
    turns. A reader reads the indexes of the files and its own records, see `mmrender.trajectory.index`. Ranks
    may get different numbers of samples, which a plan evens out. Each pass begins with the first record, or
    at a state that was loaded. torchdata's `StatefulDataLoader` calls `state_dict` and `load_state_dict`, in
    its workers, too. A state is plain data. A dataset is without `len`. A damaged record is left out with a
    `RuntimeWarning` that names it.

    Args:
        files: Files of `save_trajectories`, `TrajectoryWriter` or `mmrender.shipping.Recorder`: a path, a
            directory, a pattern, or several of them. A path with `://` is an object that fsspec reads (extra
            `store`). A mapping gives each of them a weight: the mean number of times that a record comes in
            an epoch. A weight of 0.5 draws half of the records, in each epoch others; 2 doubles them.
        rank: Number of this data-parallel rank, below `world`.
        world: Number of data-parallel ranks.
        wait: Seconds to wait for a record that is appended, also to a new file, before the pass ends; 0 ends
            it with the records that the files hold when the dataset is made.
        shuffle: Seed of the order of records, which differs by epoch, see `set_epoch`. None keeps the order
            of files and records.
        accept: Whether to read a record, by the descriptors of its samples, such as by the version of the
            weights that sampled them. Asked when the record's turn comes, before it is read. A record that is
            not accepted counts as read.
        make: Makes items from the trajectories of a record, the same each time, by default their samples.
            If a record is a group of rollouts, advantages can be computed here.

    Raises:
        BatchError: The rank is not below `world`, or a weight is negative.
        TrajectoryError: A file is of another kind.
        OSError: A file cannot be opened.
    """

    def __init__(
        self,
        files: FilePath | Sequence[FilePath] | Mapping[FilePath, float],
        *,
        rank: int = 0,
        world: int = 1,
        wait: float = 0.0,
        shuffle: int | None = None,
        accept: Callable[[Sequence[Descriptor]], bool] | None = None,
        make: Callable[[Sequence[Trajectory]], Iterable[Any]] = samples_of,
    ) -> None:
        check_count("rank", rank, minimum=0, maximum=world - 1, error=BatchError)
        several = [files] if isinstance(files, str | os.PathLike) else files
        self._arguments = [os.fspath(path) for path in several]
        self._weights = [float(one) for one in files.values()] if isinstance(files, Mapping) else []
        self._weights = self._weights or [1.0] * len(self._arguments)
        for path, weight in zip(self._arguments, self._weights, strict=True):
            if not 0 <= weight < float("inf"):
                raise BatchError("a weight is not a number of times", where=path, got=str(weight))
        self._rank, self._world, self._wait, self._seed = rank, world, wait, shuffle
        self._accept, self._make = accept, make
        self._epoch = 0
        self._poll = _STORE_POLL if any(map(is_stored, self._arguments)) else _POLL
        self._process, self._readers = os.getpid(), dict[str, TrajectoryReader]()
        self._counts = self._count()
        self._place: Place | None = None
        self._loaded: list[Place] = []
        self._begun: Any = None  # uint8 [_MAX_WORKERS], shared: which workers have begun at the loaded state

    def set_epoch(self, epoch: int) -> None:
        """Let later passes be of an epoch, 0 at first. A loaded state of another epoch is dropped."""
        if self._loaded and self._loaded[0].epoch != epoch:
            self._place, self._loaded = None, []
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last item, as plain data."""
        return (self._place or self._start()).state()

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass begin at a state, in the state's epoch.

        Args:
            state: The state of a reader as this one is. Or the states of all workers of all ranks, in any
                mapping or list, such as a list of the states of each rank's `StatefulDataLoader`: then each
                record comes once, whatever the number of ranks and workers was.

        Raises:
            BatchError: The state is of another order or of other files, or states of readers are missing.
            TrajectoryError: A file cannot be used.
        """
        places = places_of(state, self._seed, self._weights)
        for place in places:
            self._check_files(place)
        self._loaded, self._epoch = places, places[0].epoch
        self._place = self._start()
        is_worker = torch.utils.data.get_worker_info() is not None
        self._begun = None if is_worker else torch.zeros(_MAX_WORKERS, dtype=torch.uint8).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        if self._begun is not None and info is not None:
            # The next pass has new workers, with copies of the dataset as it was when the state was loaded.
            if self._begun[info.id]:
                self._loaded = []
            self._begun[info.id] = 1
        self._place, self._loaded = self._start(), []
        return self._items(self._place, self._items_of)

    def follow(self) -> Iterator[Descriptor]:
        """Yield the sizes of the samples of a pass, in its order, without reading their records.

        For the rank that plans the steps over files that grow: it waits as a pass does, and a state is the
        place after the last descriptor. Other ranks `load` the samples that it assigns to them.
        """
        self._place, self._loaded = self._start(), []
        return self._items(self._place, lambda element: self._descriptors_of(element, self._accept))

    def describe(self, records: Iterable[int] | None = None) -> list[Descriptor]:
        """Return the sizes of the samples of records, for a plan.

        Sizes come from the indexes of the files, and from the heads of records that these lack: tokens,
        numbers, messages and sizes, without the bytes of tensors. Heads are not compared with checksums, so
        every rank describes the same; `load` compares the records that a rank uses. A record with a damaged
        head is left out with a `RuntimeWarning`.

        Args:
            records: Numbers of records of the only file, the same on every rank. By default all records of
                all files that are accepted, in the order of the epoch. Then the newest record of each file is
                read to see whether it is whole.

        Raises:
            BatchError: A number is beyond the file's records, or there are several files.
        """
        counts, accept = self._count(), self._accept if records is None else None
        if records is None:
            counts = {file: self._reader(file).settle() for file in counts}
            whole = Place(0, 1, self._epoch, self._seed, self._weights, False, counts)
            chosen = [(file, record) for file, record, _ in Pass([], self._ids).elements(whole)]
        elif len(counts) == 1:
            chosen = [(file, record) for record in records for file in counts]
        else:
            problem = "numbers of records need a single file"
            raise BatchError(problem, where="records", got=f"{len(counts)} files")
        descriptors: list[Descriptor] = []
        for file, record in chosen:
            if not 0 <= record < counts[file]:
                raise BatchError(
                    "there is no such record",
                    where=f"{self._reader(file)}[{record}]",
                    expected=f"one of {counts[file]} records",
                    got=str(record),
                    remedy="Wait for the record to be appended, or describe fewer",
                )
            descriptors += self._descriptors_of(Element(file, record, 0), accept) or []
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
        descriptors = {index: step[index] for index in indices}
        records: dict[tuple[str, int], list[Any]] = {}
        samples: dict[int, Any] = {}
        for index, descriptor in descriptors.items():
            file, record, place = descriptor.file, descriptor.record, descriptor.item
            if (file, record) not in records:
                if record >= len(self._reader(file)):  # another rank has planned, and seen a longer file
                    self._reader(file).refresh()
                records[file, record] = [*self._make(self._reader(file)[record])]
            items = records[file, record]
            item = items[place] if place < len(items) else None
            if item is None or Descriptor.of(item, record=record, item=place, file=file) != descriptor:
                raise BatchError(
                    "an item differs from its descriptor",
                    where=f"{self._reader(file)}[{record}], item {place}",
                    expected=str(descriptor),
                    got="no item" if item is None else str(Descriptor.of(item)),
                    remedy="Describe the same file, and let `make` return the same items each time",
                )
            samples[index] = item
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}

    def _start(self) -> Place:
        """Return the place of this reader at the begin of the next pass."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader, readers = self._rank + self._world * worker, self._world * workers
        if not self._loaded:
            follows = self._wait > 0
            return Place(reader, readers, self._epoch, self._seed, self._weights, follows, dict(self._counts))
        places = {place.reader: place for place in self._loaded}
        first = self._loaded[0]
        if first.readers == readers and reader in places:
            return replace(places[reader])
        if sorted(places) != list(range(first.readers)):
            raise BatchError(
                "states of readers are missing",
                where="state",
                expected=f"all of {first.readers}, or reader {reader} of {readers}",
                got=f"readers {', '.join(map(str, sorted(places)))}",
                remedy="Load a list of the states of all workers of all ranks",
            )
        counts: dict[str, int] = {}
        for place in self._loaded:
            counts |= {file: max(count, counts.get(file, 0)) for file, count in place.counts.items()}
        arrangement = [places[number].state() for number in range(first.readers)]
        for one in arrangement:
            del one["earlier"]
        earlier = [*first.earlier, arrangement]
        return Place(
            reader, readers, first.epoch, self._seed, self._weights, first.follows, counts, earlier=earlier
        )

    def _items(self, place: Place, items_of: Callable[[Element], list[Any] | None]) -> Iterator[Any]:
        rest = Pass(place.earlier, self._ids)
        if self._wait and (place.position, place.item) == (0, 0):
            place.counts = self._settled(rest, place, place.counts)
        while True:
            elements = rest.elements(place)
            while place.position < len(elements):
                element = elements[place.position]
                where = f"{self._reader(element.file)}[{element.record}]"
                items = self._wait_for(partial(items_of, element))
                if items is None and self._wait:
                    return
                if items is None:
                    message = f"{where}: left out, torn or no longer there"
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                    items = []
                elif element.record < len(self._reader(element.file)):
                    place.last = element.file, element.record, self._checksum(element)
                place.item = max(place.item, rest.items.get(element, 0))
                if place.item > len(items):
                    raise BatchError(
                        "a record has fewer items than when the state was taken",
                        where=where,
                        expected=f"{place.item} or more",
                        got=str(len(items)),
                        remedy="`make` must return the same items each time",
                    )
                while place.item < len(items):
                    place.item += 1  # before the item is yielded: a state that is taken then is after it
                    yield items[place.item - 1]
                place.position, place.item = place.position + 1, 0
            later = self._wait_for(partial(self._next_round, rest, place))
            if later is None:
                return
            place.counts, place.done, place.position, place.follows = (
                later.counts,
                later.done,
                0,
                later.follows,
            )

    def _wait_for(self, call: Callable[[], Value | None]) -> Value | None:
        """Return the result of a call as soon as it is not None. None if that takes longer than the wait."""
        until = time.monotonic() + self._wait
        while (value := call()) is None and time.monotonic() < until:
            time.sleep(min(self._poll, self._wait))
        return value

    def _next_round(self, rest: Pass, place: Place) -> Place | None:
        """Return the place at the begin of the next round, or None if there is nothing to read."""
        if not (self._wait or place.follows):
            return None
        counts = self._count() if self._wait else self._counts
        counts = {file: max(count, place.counts.get(file, 0)) for file, count in counts.items()}
        done = place.done | place.counts
        if self._wait:
            counts = self._settled(rest, replace(place, done=done), counts)
        if counts == place.counts:
            return None
        later = replace(place, counts=counts, done=done, position=0, item=0, follows=self._wait > 0)
        return later if rest.elements(later) else None

    def _settled(self, rest: Pass, place: Place, counts: dict[str, int]) -> dict[str, int]:
        """Return the numbers of records that may belong to a round, while files grow.

        The newest record of a file, which the index lacks, counts for its reader alone, and if it is whole:
        after the failure of a machine it may be torn, and another record takes its place.
        """
        settled = {}
        for file, count in counts.items():
            reader, newest = self._reader(file), count - 1
            is_new = newest >= max(reader.indexed, place.done.get(file, 0)) and count == len(reader)
            is_own = is_new and rest.reader_of(file, newest, place.readers) == place.reader
            settled[file] = newest if is_new and not (is_own and reader.holds(newest)) else count
        return settled

    def _items_of(self, element: Element) -> list[Any] | None:
        """Return the items of a record, none of a damaged one, or None if it is torn or not there."""
        file, record, _ = element
        reader = self._reader(file)
        if self._accept is not None:
            samples = self._described(file, record)
            if samples and not self._accept(samples):
                return []
        trajectories = self._sound(file, record, TrajectoryReader.__getitem__)
        if trajectories is None:
            reader.refresh()  # for the next call
        return list(self._make(trajectories)) if trajectories else trajectories

    def _descriptors_of(
        self, element: Element, accept: Callable[[Sequence[Descriptor]], bool] | None
    ) -> list[Descriptor] | None:
        """Return the sizes of a record's items, none of a damaged one, or None if it is torn or not there."""
        file, record, _ = element
        is_described = self._make is samples_of
        samples = self._described(file, record) if is_described or accept else []
        if samples is None:
            self._reader(file).refresh()  # for the next call
        elif samples and accept and not accept(samples):
            return []
        elif not is_described:
            head = self._sound(file, record, TrajectoryReader.head)
            if head is None:
                return None
            items = self._make(head) if head else ()
            samples = [
                Descriptor.of(one, record=record, item=item, file=file) for item, one in enumerate(items)
            ]
        return samples

    def _described(self, file: str, record: int) -> list[Descriptor] | None:
        """Return the descriptors of the samples of a record, none of a damaged one, as `_items_of`."""
        samples = self._reader(file).descriptors(record, file=file)
        if samples is not None:
            return samples
        head = self._sound(file, record, TrajectoryReader.head)
        return None if head is None else describe(head, record, file)

    def _sound(
        self, file: str, record: int, read: Callable[[TrajectoryReader, int], list[Trajectory]]
    ) -> list[Trajectory] | None:
        """Read a record, or a copy of it in another file if it is damaged.

        Nothing of a damaged one without a copy, with a warning, and None if it is torn or not there.
        """
        reader = self._reader(file)
        try:
            return read(reader, record) if record < len(reader) else None
        except MMRenderError as error:
            copies = self._copies_of(file, record)
            is_torn = not reader.holds(record) and record >= reader.settle()
            if is_torn and self._wait:  # another record may take its place
                return None
            for other, number in copies:
                with suppress(MMRenderError):
                    return read(other, number)
            if is_torn:
                return None
            message = f"{reader}[{record}]: left out, damaged - got {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
            return []

    def _copies_of(self, file: str, record: int) -> list[tuple[TrajectoryReader, int]]:
        """Return the records of other files that hold the same shipped message."""
        ids = self._ids(file)
        if record >= len(ids.rows) or not (number := ids.numbers[record]):
            return []
        copies, sender = [], ids.names[ids.rows[record]]
        for other, reader in self._readers.items():
            theirs = reader.ids()
            if other != file and sender in theirs.names:
                is_copy = (theirs.rows == theirs.names.index(sender)) & (theirs.numbers == number)
                copies += [(reader, copy) for copy in np.flatnonzero(is_copy).tolist()]
        return copies

    def _ids(self, file: str) -> RecordIds:
        return self._reader(file).ids()

    def _checksum(self, element: Element) -> int | None:
        return self._reader(element.file).block(element.record).checksum

    def _reader(self, file: str) -> TrajectoryReader:
        if self._process != os.getpid() or file not in self._readers:
            self._count()
        if file not in self._readers:
            raise BatchError("a file is gone", where=file, remedy="Keep files until they are read")
        return self._readers[file]

    def _count(self) -> dict[str, int]:
        """Return the number of records of each file now, torn ones included unless records are awaited."""
        if self._process != os.getpid():
            self._process, self._readers = os.getpid(), {}
        counts = {}
        for argument, path in enumerate(self._arguments):
            for name, where in find_files(path):
                file = f"{argument}/{name}" if name else str(argument)
                if file in self._readers:
                    counts[file] = self._readers[file].refresh()
                else:
                    self._readers[file] = TrajectoryReader(where, tail=False)
                    counts[file] = len(self._readers[file])
        if self._wait:  # a record whose head cannot be read yet may come to be another reader's
            return {file: min(count, len(self._readers[file].ids().rows)) for file, count in counts.items()}
        return counts

    def _check_files(self, place: Place) -> None:
        """Check that the record that was read last is still there."""
        if place.last is None:
            return
        file, record, checksum = place.last
        reader = self._reader(file)
        if fewer := record >= len(reader):
            reader.refresh()
            fewer = record >= len(reader)
        got = None if fewer else reader.block(record).checksum
        if fewer or got != checksum:
            raise BatchError(
                "the state belongs to another file",
                where=str(reader) if fewer else f"{reader}[{record}]",
                expected=f"{record + 1} records or more" if fewer else f"the checksum {checksum}",
                got=str(len(reader) if fewer else got),
                remedy="Keep the file that was trained on, and only append to it",
            )
