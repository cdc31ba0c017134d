"""The index beside a file of trajectories: the place of each record, and the sizes of its samples.

`run.mmr.index` is a record file as well (`mmcodecs.files`). Each of its messages is a dict that describes
some consecutive records of `run.mmr`:

- `version`: 2.
- `first`: number of the first record.
- `blocks`, uint64 `[records, 3]`: start, stop and checksum of each record's message. The checksum of a record
  with a damaged header is 0.
- `samples`, uint8: msgpack of `_Table`, the sizes of the samples.
- `ids`, int64 `[records, 2]`: row in `names` and number of each record's id, see `RecordIds`.
- `names`: distinct names of ids.

The file of trajectories is the only truth. `TrajectoryWriter` writes the index with some records' delay, and
completes it or writes it anew when it opens the file. Readers compare each place with the header in the file,
each description with the checksum of its record, and read the heads of records that the index lacks.
"""

import os
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

import mmcodecs
from mmcodecs.files import Block, Blocks
from mmcodecs.structs import ready
from mmrender.errors import MMRenderError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import tensor_specs
from mmrender.trajectory.delivery import DeliveryId
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.stores import INDEX_SUFFIX, source_of
from mmrender.trajectory.tree import Trajectory

_VERSION: Final = 2
_MIN_ROWS: Final = 64
"""Records and samples of a message, at least, unless the writer is closed."""

Tensors: TypeAlias = frozenset[tuple[str, str, tuple[int, ...]]]


class Descriptor(msgspec.Struct, frozen=True):
    """The size of a sample for plans, and its place in a file: plain data of few bytes.

    Attributes:
        length: Its tokens.
        trained: Tokens in its loss mask.
        media: Its media items.
        tensors: Name, dtype and shape of each distinct kind of tensor that its items expand to.
        smallest: Tokens and bytes of its smallest item; None without items.
        version: Weights that sampled its last token, or None.
        record: Number of its record in a file of trajectories. A group of rollouts is one record.
        item: Its number in the record.
        group: The trajectory's `extra["group"]` if it is a string, as of a gateway's session, or None.
        file: Name of the file among the files of a `TrajectoryDataset`.
    """

    length: int
    trained: int
    media: int = 0
    tensors: Tensors = frozenset()
    smallest: tuple[int, int] | None = None
    version: str | None = None
    record: int = 0
    item: int = 0
    group: str | None = None
    file: str = ""

    @classmethod
    def of(cls, sample: TrainingSample, *, record: int = 0, item: int = 0, file: str = "") -> "Descriptor":
        """Describe a sample, without expanding items of the library's own classes."""
        spans = sample.media_spans
        items = [span.item for span in spans if not isinstance(span.item, ReferenceItem)]
        specs = [entry for item in items for entry in tensor_specs(item).items()]
        group = sample.extra.get("group")
        return cls(
            len(sample),
            int(sample.loss_mask.sum()),
            len(spans),
            frozenset((name, str(spec.dtype), tuple(spec.shape)) for name, spec in specs),
            min(((span.range.length, span.item.nbytes) for span in spans), default=None),
            sample.weight_versions[-1].version if sample.weight_versions else None,
            record,
            item,
            group if isinstance(group, str) else None,
            file,
        )


class RecordIds(NamedTuple):
    """The ids of the first records of a file, such as of the messages that were written there.

    Attributes:
        names: Distinct names: the senders of deliveries, and ids of other forms.
        rows: int64 `[records]`, row of each record's name, or -1 if the record has no id.
        numbers: int64 `[records]`, sequence number of a delivery, or 0 if the id is the name.
    """

    names: list[str]
    rows: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, ids: Iterable[str | None]) -> "RecordIds":
        """Return ids in this form."""
        names: dict[str, int] = {}
        pairs = []
        for id in ids:
            parsed = None if id is None else DeliveryId.parse(id) or DeliveryId(id, 0)
            pairs.append((-1, 0) if parsed is None else (names.setdefault(parsed[0], len(names)), parsed[1]))
        rows, numbers = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls(list(names), rows, numbers)

    @classmethod
    def joined(cls, parts: Sequence["RecordIds"]) -> "RecordIds":
        """Return the ids of consecutive parts of a file."""
        names: dict[str, int] = {}
        rows = []
        for part in parts:
            places = np.array([names.setdefault(name, len(names)) for name in part.names] + [-1], np.int64)
            rows.append(places[part.rows])
        empty = np.zeros(0, np.int64)
        numbers = [part.numbers for part in parts]
        return cls(list(names), np.concatenate([empty, *rows]), np.concatenate([empty, *numbers]))

    def texts(self) -> list[str | None]:
        """Return the ids of records as texts."""
        return [
            None if row < 0 else str(DeliveryId(self.names[row], number)) if number else self.names[row]
            for row, number in zip(self.rows.tolist(), self.numbers.tolist(), strict=True)
        ]

    def last_numbers(self) -> dict[str, int]:
        """Return the last sequence number of each sender."""
        last = np.zeros(len(self.names), np.int64)
        has_id = self.rows >= 0
        np.maximum.at(last, self.rows[has_id], self.numbers[has_id])
        return {name: number for name, number in zip(self.names, last.tolist(), strict=True) if number}


def samples_of(trajectories: Iterable[Trajectory]) -> list[TrainingSample]:
    """Return the samples of the trajectories of a record, in order."""
    return [sample for trajectory in trajectories for sample in trajectory.samples()]


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A descriptor, with the rows of its tensors and names in `_Table`."""

    length: int
    trained: int
    media: int
    tensors: int
    smallest: tuple[int, int] | None
    version: int | None
    group: int | None


class _Table(msgspec.Struct, frozen=True, array_like=True):
    """The samples of some records.

    Attributes:
        records: The rows of each record, or None if it cannot be described.
        tensors: The distinct sets of tensors.
        names: The distinct weight versions and groups.
    """

    records: list[list[_Row] | None]
    tensors: list[Tensors]
    names: list[str]

    def descriptor(self, row: _Row, record: int, item: int, file: str) -> Descriptor:
        """Return the descriptor of a row."""
        version = None if row.version is None else self.names[row.version]
        group = None if row.group is None else self.names[row.group]
        tensors = self.tensors[row.tensors]
        return Descriptor(
            row.length, row.trained, row.media, tensors, row.smallest, version, record, item, group, file
        )


class IndexReader:
    """The index of a file of trajectories, as far as it is there and sound.

    Args:
        path: The file of trajectories.

    Attributes:
        blocks: Places of the first records.
        messages: Sound messages of the index, which hold them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._source = source_of(os.fspath(path) + INDEX_SUFFIX, whole=True)
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self._reader: mmcodecs.RecordReader | None = None
        self.blocks = Blocks()
        self._firsts: list[int] = []
        self._tables: list[memoryview] = []
        self._ids: list[RecordIds] = []
        self._newest: tuple[int, _Table] | None = None

    @property
    def messages(self) -> int:
        """Number of sound messages, each of which continues the one before."""
        return len(self._tables)

    def refresh(self) -> None:
        """Take in later messages. A damaged index counts as one that ends before the damage."""
        try:
            if self._reader is None:
                self._reader = mmcodecs.RecordReader(self._source)
            else:
                self._reader.refresh()
        except (OSError, mmcodecs.CodecError):
            self._forget()
            return
        with suppress(mmcodecs.CodecError, KeyError, TypeError, ValueError, AttributeError):
            for number in range(len(self._tables), len(self._reader)):
                message = self._reader.read(number)
                if (message["version"], message["first"]) != (_VERSION, len(self.blocks)):
                    return
                places = message["blocks"].astype(np.uint64, casting="equiv").reshape(-1, 3)
                table = message["samples"].data
                rows, numbers = message["ids"].astype(np.int64, casting="equiv").reshape(len(places), 2).T
                ids = RecordIds([sys.intern(str(name)) for name in message["names"]], rows, numbers)
                is_named = (rows >= 0) & (rows < len(ids.names)) & (numbers >= 0)
                if not (is_named | ((rows == -1) & (numbers == 0))).all():
                    return
                self._ids.append(ids)
                self._firsts.append(len(self.blocks))
                self._tables.append(table)
                self.blocks.add_numbers(places)

    def ids(self, start: int, stop: int) -> RecordIds:
        """Return the ids of some records of the index."""
        parts = []
        for first, ids in zip(self._firsts, self._ids, strict=True):
            own = slice(max(start - first, 0), max(stop - first, 0))
            parts.append(ids._replace(rows=ids.rows[own], numbers=ids.numbers[own]))
        return RecordIds.joined([part for part in parts if part.rows.size])

    def descriptors(self, number: int, block: Block, file: str) -> list[Descriptor] | None:
        """Return the descriptors of a record, or None if the index does not hold a record of this place."""
        if number >= len(self.blocks) or self.blocks[number] != block:
            return None
        place = bisect_right(self._firsts, number) - 1
        with suppress(msgspec.MsgspecError, IndexError):  # of another release
            if self._newest is None or self._newest[0] != place:
                self._newest = place, msgspec.msgpack.decode(self._tables[place], type=ready(_Table))
            table = self._newest[1]
            rows = table.records[number - self._firsts[place]]
            if rows is not None:
                return [table.descriptor(row, number, item, file) for item, row in enumerate(rows)]
        return None


class IndexWriter:
    """Appends to the index of a file of trajectories. `count` records are in it or about to be written.

    A failure is a `RuntimeWarning`, and ends the index: readers do without, and the next writer completes it.

    Args:
        path: The file of trajectories, which only this process writes.
        blocks: The places of its records. An index with other places is written anew.
    """

    def __init__(self, path: str | os.PathLike[str], blocks: Blocks) -> None:
        self._path = Path(os.fspath(path) + INDEX_SUFFIX)
        self._writer: mmcodecs.RecordWriter | None = None
        self._blocks: list[Block] = []
        self._records: list[list[Descriptor] | None] = []
        self._ids: list[str | None] = []
        self.count = 0
        try:
            if not self._open(blocks):
                self._path.unlink()
                self._open(blocks)
        except (OSError, mmcodecs.CodecError) as error:
            self._give_up(error)

    def _open(self, blocks: Blocks) -> bool:
        """Open the index if it is sound and agrees with the file, or is not there. Otherwise return False."""
        index = IndexReader(self._path.with_name(self._path.name.removesuffix(INDEX_SUFFIX)))
        if index.blocks != blocks[: len(index.blocks)]:
            return False
        try:
            self._writer = mmcodecs.RecordWriter(self._path)
        except mmcodecs.CodecError:
            return False
        self.count = len(index.blocks)
        if len(self._writer) == index.messages:
            return True
        self._writer.close()
        self._writer = None
        return False

    def append(self, block: Block, id: str | None, read: Callable[[], Sequence[Trajectory]]) -> None:
        """Add the next record of the file. `read` returns its trajectories, or raises if there are none."""
        if self._writer is None:
            return
        samples = None
        with suppress(MMRenderError):
            samples = describe(read(), self.count)
        self._blocks.append(block)
        self._records.append(samples)
        self._ids.append(id)
        self.count += 1
        if sum(len(record or [None]) for record in self._records) >= _MIN_ROWS:
            self._write()

    def close(self) -> None:
        """Write the records that are waiting, and close the file."""
        self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self) -> None:
        first, blocks, records = self.count - len(self._blocks), self._blocks, self._records
        ids = RecordIds.of(self._ids)
        self._blocks, self._records, self._ids = [], [], []
        if self._writer is None or not blocks:
            return
        places = [(block.start, block.stop, block.checksum or 0) for block in blocks]
        table = np.frombuffer(msgspec.msgpack.encode(_table_of(records)), np.uint8)
        try:
            self._writer.append(
                {
                    "version": _VERSION,
                    "first": first,
                    "blocks": np.array(places, np.uint64),
                    "samples": table,
                    "ids": np.stack([ids.rows, ids.numbers], axis=1),
                    "names": ids.names,
                }
            )
        except (OSError, mmcodecs.CodecError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        message = f"{self._path}: the index is not written, and readers do without it - got {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _table_of(records: Sequence[list[Descriptor] | None]) -> _Table:
    tensors: dict[Tensors, int] = {}
    names: dict[str, int] = {}

    def row_of(one: Descriptor) -> _Row:
        version, group = (
            None if name is None else names.setdefault(name, len(names)) for name in (one.version, one.group)
        )
        kinds = tensors.setdefault(one.tensors, len(tensors))
        return _Row(one.length, one.trained, one.media, kinds, one.smallest, version, group)

    rows = [None if record is None else [row_of(one) for one in record] for record in records]
    return _Table(rows, list(tensors), list(names))


def describe(trajectories: Sequence[Trajectory], record: int, file: str = "") -> list[Descriptor]:
    """Describe the samples of a record. Raises as `Trajectory.samples`."""
    return [
        Descriptor.of(sample, record=record, item=item, file=file)
        for item, sample in enumerate(samples_of(trajectories))
    ]
