"""Files of trajectories: record files that survive a crash and are read by memory map.

```python
with TrajectoryWriter("run.mmr") as file:
    file.append(trajectory)        # one record
    file.append(group)             # one record, in which shared content is written once

load_trajectories("run.mmr")       # all of them
TrajectoryReader("run.mmr")[1]     # the trajectories of one record, without reading others
```
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

import mmcodecs
from mmcodecs.files import Block
from mmrender.errors import MMRenderError, TrajectoryError
from mmrender.trajectory.conversation import MediaSources
from mmrender.trajectory.index import Descriptor, IndexReader, IndexWriter, RecordIds
from mmrender.trajectory.stores import source_of
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire


class TrajectoryWriter(AbstractContextManager["TrajectoryWriter"]):
    """Appends trajectories to a file, which is made if it does not exist.

    A record survives the process once `append` has returned, and with `sync` the machine. A record that was
    torn by a crash is cut off when the file is next opened for writing. One writer at a time.

    The index of the file, for readers that need sizes or a part of the records, is written beside it, see
    `mmrender.trajectory.index`. Opening a file completes its index, so
    `TrajectoryWriter("old.mmr").close()` makes one for a file of an earlier release.

    Args:
        path: The file.
        media_sources: As for `Trajectory.to_frames`.
        sync: Whether each append waits for the disk.

    Raises:
        TrajectoryError: The file is of another kind, or another writer has it open.
        OSError: It cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, media_sources: MediaSources = "drop", sync: bool = False
    ) -> None:
        self._path = os.fspath(path)
        self._media_sources = media_sources
        try:
            self._file = mmcodecs.RecordWriter(path, sync=sync)
        except mmcodecs.CodecError as error:
            raise _unusable(self._path, error) from error
        reader = TrajectoryReader(path, tail=False, indexed=False)
        self._index = IndexWriter(path, reader._blocks)
        if self._index.count < len(reader):
            ids = reader.ids().texts()
            for number in range(self._index.count, len(reader)):
                id = ids[number] if number < len(ids) else None
                self._index.append(reader.block(number), id, partial(reader.head, number))

    def __len__(self) -> int:
        return len(self._file)

    def append(self, trajectories: Trajectory | Sequence[Trajectory], *, id: str | None = None) -> int:
        """Write one trajectory, or a group as one record, and return the number of the record.

        `id` is kept with it, such as the id of its message, see `received_ids`.

        Raises:
            TrajectoryError: A message or `extra` cannot be stored, or it is none. Nothing is written.
            MediaError: The class of an item has no stored form.
            OSError: Writing failed, such as on a full disk. The part that was written is cut off, and later
                records can be appended once there is room.
        """
        given: Any = trajectories
        is_group = isinstance(given, Iterable) and not isinstance(given, Trajectory)
        group = list(given) if is_group else [given]
        other = next((type(each).__name__ for each in group if not isinstance(each, Trajectory)), None)
        if other is not None:
            raise TrajectoryError("a file holds trajectories alone", where=self._path, got=other)
        wire = trajectories_to_wire(group, media_sources=self._media_sources, share=False)
        wire |= {} if id is None else {"id": id}
        try:
            number = self._file.append(wire)
        except mmcodecs.CodecError as error:
            raise TrajectoryError(
                "a trajectory cannot be stored",
                where=f"{self._path}[{len(self)}]",
                got=str(error),
                remedy="Keep plain data and arrays in `extra` and messages",
            ) from error
        if (block := self._file.block) is not None:
            # The parts of router choices would be put together for nothing.
            has_experts = any(step.own_experts is not None for each in group for step in each.steps)
            self._index.append(
                block, id, lambda: trajectories_from_wire(_head_of(wire)) if has_experts else group
            )
        return number

    def close(self) -> None:
        """Close the file, and complete its index."""
        self._file.close()
        self._index.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class TrajectoryReader(mmcodecs.RecordReader):
    """The records that a file held when it was opened, by number. Each is a list of trajectories.

    Pixels and router choices are read-only views of the memory map, which stays open as long as any view.
    A damaged record keeps its number, and other records can be read.

    Args:
        path: The file, or its URL in an object store that fsspec reads (extra `store`). Objects are read by
            ranged requests instead of a memory map.
        tail: Read the newest record, and leave it out if it is torn. Otherwise only headers are read until
            `settle` is called.
        indexed: Take the places of records from the file's index. Otherwise follow all headers.

    Raises:
        TrajectoryError: The file is of another kind.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, tail: bool = True, indexed: bool = True) -> None:
        self._index = IndexReader(path) if indexed else None
        self._ids = RecordIds.of([])
        self._last_known: Block | None = None  # the record of the last of these ids
        super().__init__(source_of(os.fspath(path)), tail=tail)

    def refresh(self, known: Sequence[Block] = ()) -> int:
        """Take in later appends, and return the number of records. Raises as opening does."""
        if self._index is not None:
            self._index.refresh()
            known = self._index.blocks
        try:
            return super().refresh(known)
        except mmcodecs.CodecError as error:
            raise _unusable(self._path, error) from error

    def __getitem__(self, number: int) -> list[Trajectory]:
        """Read one record. Negative numbers count from the end.

        Raises:
            IndexError: The file has fewer records.
            TrajectoryError: The record is damaged, or holds something else.
            MediaError: An item is damaged.
        """
        return trajectories_from_wire(self._read(number, verify=True))

    def head(self, number: int) -> list[Trajectory]:
        """Read one record's tokens, numbers and messages, and the sizes of its items, without checksums.

        The bytes of tensors are not read, but items hold views of them. Router choices are left out, and the
        encoded images of references are zeros. Raises as `__getitem__`, as far as damage shows.
        """
        return trajectories_from_wire(_head_of(self._read(number, verify=False)))

    def descriptors(self, number: int, *, file: str = "") -> list[Descriptor] | None:
        """Return the sizes of one record's samples, or None if the index does not hold them.

        `file` is their `Descriptor.file`.
        """
        if self._index is None or not 0 <= number < len(self):
            return None
        return self._index.descriptors(number, self.block(number), file)

    @property
    def indexed(self) -> int:
        """Number of first records that the index has."""
        return 0 if self._index is None else min(len(self._index.blocks), len(self))

    def ids(self) -> RecordIds:
        """Return the ids of records, from the index as far as it goes, and from the heads of later records.

        The newest records are left out while their heads cannot be read. Any other damaged head counts as one
        without an id.
        """
        known, count = len(self._ids.rows), len(self)
        if known > count or (known and self.block(known - 1) != self._last_known):
            known, self._ids = 0, RecordIds.of([])  # the file was replaced
        indexed = self.indexed
        if self._index is not None and self._index.blocks[known:indexed] == self._blocks[known:indexed]:
            self._ids = RecordIds.joined([self._ids, self._index.ids(known, indexed)])
            known = max(known, indexed)
        ids: list[str | None] = []
        for number in range(known, count):
            try:
                value = super().read(number, verify=False)
            except mmcodecs.CodecError:
                continue
            id = value.get("id") if isinstance(value, dict) else None
            ids += [None] * (number - known - len(ids)) + [id if isinstance(id, str) else None]
        if ids:
            self._ids = RecordIds.joined([self._ids, RecordIds.of(ids)])
        self._last_known = self.block(len(self._ids.rows) - 1) if len(self._ids.rows) else None
        return self._ids

    def _read(self, number: int, *, verify: bool) -> Any:
        try:
            return super().read(number, verify=verify)
        except mmcodecs.CodecError as error:
            raise _unusable(f"{self._path}[{number}]", error) from error

    def __iter__(self) -> Iterator[list[Trajectory]]:
        return (self[number] for number in range(len(self)))


def save_trajectories(
    path: str | os.PathLike[str],
    trajectories: Iterable[Trajectory | Sequence[Trajectory]],
    *,
    media_sources: MediaSources = "drop",
) -> int:
    """Append trajectories to a file and return how many records were written.

    Each element is one record: a trajectory, or a group whose members share common content. Raises as
    `TrajectoryWriter` and its `append`. Records before a failed one stay in the file.
    """
    with TrajectoryWriter(path, media_sources=media_sources) as file:
        return sum(1 for _ in map(file.append, trajectories))


def load_trajectories(path: str | os.PathLike[str]) -> list[Trajectory]:
    """Return all sound trajectories of a file in one list.

    Damaged records, and a torn one at the end, are left out with a `RuntimeWarning` that names them.

    Raises:
        TrajectoryError: The file is of another kind, or all of its records are damaged.
        MediaError: All records are damaged, the first one in an item.
        OSError: It cannot be opened.
    """
    reader = TrajectoryReader(path)
    trajectories: list[Trajectory] = []
    damaged: dict[int, MMRenderError] = {}
    for number in range(len(reader)):
        try:
            trajectories += reader[number]
        except MMRenderError as error:
            damaged[number] = error
    if damaged and len(damaged) == len(reader):
        raise damaged[0]
    where = os.fspath(path)
    messages = [f"{where}[{number}]: left out, damaged - got {error}" for number, error in damaged.items()]
    if reader.torn_bytes:
        messages.append(f"{where}: torn after {len(reader)} records - {reader.torn_bytes} bytes are left out")
    for message in messages:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return trajectories


def received_ids(path: str | os.PathLike[str]) -> list[str]:
    """Return the ids of records that have one. Only the index and heads that it lacks are read."""
    return [id for id in TrajectoryReader(path, tail=False).ids().texts() if id is not None]


def _head_of(value: Any) -> Any:
    """Leave router choices and encoded images out of the plain form of trajectories."""
    if isinstance(value, dict):
        value["experts"] = {}
        items = value["items"].get("items") if isinstance(value.get("items"), dict) else None
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and isinstance(source := item.get("source"), np.ndarray):
                item["source"] = np.zeros(source.shape, np.uint8)
    return value


def _unusable(where: str, error: mmcodecs.CodecError) -> TrajectoryError:
    return TrajectoryError("this file of trajectories cannot be used", where=where, got=str(error))
