"""Which records a reader takes, in which order, and which records remain when other readers take over.

A reader is a worker of a rank. Record `n` of a file belongs to reader `(n + first) % readers`, and the name
of the file decides `first`. Of a shipped message, `n` is the sequence number and the sender decides `first`,
so that all records of one message have one reader, whatever files they are in. The owner of a record does not
depend on records and files that come later, and readers need not agree on how far files have grown.

A sender that left one receiver for another one may have shipped a message to both of them. Its reader reads
the record of the earliest round, and of one round the record of the first file. Others are left out.

A pass goes in rounds. A round holds the records that the files held when it began and the rounds before did
not; a pass over files that do not grow has one round. Shuffled, the records of a round are sorted by a random
number of their own, which follows from seed, epoch, file and record.

When other readers take over, because the number of ranks or workers has changed, the places of all earlier
readers say which records are read. The new readers share the remaining records by the same rule.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mmrender.errors import BatchError
from mmrender.trajectory.index import RecordIds

FORMAT: Final = "mmrender.reading"
VERSION: Final = 2

Numbers: TypeAlias = npt.NDArray[np.int64]
_NO_NUMBERS: Final[Numbers] = np.zeros(0, np.int64)
_NO_IDS: Final = RecordIds.of([])


class Element(NamedTuple):
    """One reading of a record. A file with a weight of 2 has two for each record."""

    file: str
    record: int
    copy: int


class Elements(Sequence[Element]):
    """Elements in order, each in 24 bytes.

    Args:
        files: Names of files.
        columns: int64 `[elements, 3]`: row in `files`, record and copy.
    """

    def __init__(self, files: Sequence[str], columns: Numbers) -> None:
        self._files = files
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns)

    @overload
    def __getitem__(self, index: int) -> Element: ...
    @overload
    def __getitem__(self, index: slice) -> "Elements": ...
    def __getitem__(self, index: int | slice) -> "Element | Elements":
        if isinstance(index, slice):
            return Elements(self._files, self._columns[index])
        row, record, copy = self._columns[index].tolist()
        return Element(self._files[row], record, copy)

    def by_copy(self) -> Iterator[tuple[str, int, Numbers]]:
        """Yield each file and copy with its records, in rising order."""
        rows, records, copies = self._columns.T
        ordered = self._columns[np.lexsort((records, copies, rows))]
        ends = np.flatnonzero(np.diff(ordered[:, [0, 2]], axis=0).any(axis=1)) + 1
        for part in np.split(ordered, ends):
            for row, _, copy in part[:1].tolist():
                yield self._files[row], copy, part[:, 1]


@dataclass
class Place:
    """The place of one reader in a pass, as plain data.

    Attributes:
        reader: Number of the reader among `readers`.
        readers: Workers of all ranks.
        epoch: The epoch, for which records are shuffled and drawn by weight.
        seed: Seed of the shuffling, or None without.
        weights: Readings of a record in an epoch, for each argument that names files.
        follows: Whether the pass goes on with records that are appended.
        counts: Records of each file that belong to the current round or an earlier one.
        done: Records of each file that belong to an earlier round.
        position: Elements of the current round that were read.
        item: Items taken of the next element.
        last: File, record and checksum of the record that was read last.
        earlier: The places of all readers of each earlier arrangement of the pass, the oldest first.
    """

    reader: int
    readers: int
    epoch: int
    seed: int | None
    weights: list[float]
    follows: bool
    counts: dict[str, int]
    done: dict[str, int] = field(default_factory=dict)
    position: int = 0
    item: int = 0
    last: tuple[str, int, int | None] | None = None
    earlier: list[list[dict[str, Any]]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return the place as plain data that does not change with it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        copies = {"counts": dict(self.counts), "done": dict(self.done)}
        last = None if self.last is None else list(self.last)
        return {"format": FORMAT, "version": VERSION, **values, **copies, "last": last}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Place":
        """Return the place of a state. Raises `TypeError` if fields are missing or unknown."""
        return cls(**{name: value for name, value in state.items() if name not in ("format", "version")})


def places_of(state: Any, seed: int | None, weights: list[float]) -> list[Place]:
    """Return the places of the states in mappings and lists of any depth, of this order and of one pass.

    Raises:
        BatchError: There are none, or they are of another release or order, or of several passes.
    """
    states = [*_states(state)]
    try:
        places = [Place.of(one) for one in states if one.get("version") == VERSION]
    except TypeError:
        places = []
    if not places or len(places) < len(states):
        raise BatchError(
            "this is not a state of a dataset",
            where="state",
            expected=f"a dict with format {FORMAT!r}, version {VERSION}",
            got=f"{len(states)} of another version or none",
            remedy="Save and load with the same release of mmrender",
        )
    order = [seed, weights]
    by_reader: dict[int, Place] = {}
    passes = [places[0].epoch, places[0].readers, places[0].earlier]
    for place in places:
        if [place.seed, place.weights] != order:
            raise BatchError(
                "the state belongs to another order",
                where="state",
                expected=f"shuffle {order[0]} and weights {order[1]}",
                got=f"{place.seed} and {place.weights}",
            )
        if [place.epoch, place.readers, place.earlier] != passes:
            raise BatchError(
                "the states belong to several passes",
                where="state",
                expected=f"epoch {passes[0]} of {passes[1]} readers",
                got=f"epoch {place.epoch} of {place.readers} readers",
                remedy="Save the states of all ranks at one step",
            )
        if place != by_reader.setdefault(place.reader, place):
            raise BatchError(
                "two states of one reader differ",
                where="state",
                got=f"reader {place.reader} of {place.readers}",
                remedy="Load the states of one checkpoint",
            )
    return places


def _states(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the states in mappings and lists of any depth, such as the states of loaders.

    Raises:
        BatchError: A loader's state is of batches before its last one.
    """
    if isinstance(value, Mapping):
        if value.get("format") == FORMAT:
            yield dict(value)
            return
        if value.get("_steps_since_snapshot"):
            raise BatchError(
                "the state of a loader is of earlier batches",
                where="state",
                got=f"a snapshot {value['_steps_since_snapshot']} batches before",
                remedy="Make the StatefulDataLoader with snapshot_every_n_steps=1",
            )
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _states(one)


class Pass:
    """The elements of readers in one pass, after earlier arrangements of readers have read a part.

    Args:
        earlier: As `Place.earlier`.
        ids: Returns the ids of a file's records. Records beyond them have none.

    Attributes:
        items: Items taken of elements that an earlier reader had begun.
    """

    def __init__(
        self, earlier: Sequence[Sequence[dict[str, Any]]], ids: Callable[[str], RecordIds] = lambda _: _NO_IDS
    ) -> None:
        self._ids = ids
        self._finished: list[list[dict[str, int]]] = []  # of each arrangement, by reader
        self._read: dict[tuple[str, int], Numbers] = {}  # records by file and copy
        self._begun: dict[str, Numbers] = {}  # records of each file of which items were read
        self._senders_of: dict[str, tuple[RecordIds, dict[int, str]]] = {}
        self.items: dict[Element, int] = {}
        for arrangement in earlier:
            places = [Place.of(state) for state in arrangement]
            shares = [self.elements(place) for place in places]
            for place, elements in zip(places, shares, strict=True):
                for file, copy, records in elements[: place.position].by_copy():
                    self._read[file, copy] = np.union1d(self._read.get((file, copy), _NO_NUMBERS), records)
                for file, _, records in elements[: place.position + (place.item > 0)].by_copy():
                    self._begun[file] = np.union1d(self._begun.get(file, _NO_NUMBERS), records)
                if place.item:
                    self.items[elements[place.position]] = place.item
            self._finished.append([place.done for place in places])

    def elements(self, place: Place) -> Elements:
        """Return the elements of a reader's current round, in order."""
        copies, files = self._copies(place), sorted(place.counts, key=_argument_and_path)
        columns = [np.zeros((0, 3), np.int64)]
        keys = [np.zeros(0, np.uint64)]
        for row, file in enumerate(files):
            numbers = self._numbers(place, file)
            if file in copies:
                numbers = numbers[~copies[file][numbers]]
            if not numbers.size:
                continue
            weight = place.weights[_argument_and_path(file)[0]]
            chance = _random(numbers, place, file, "weight") / 2.0**64
            times = np.floor(weight) + (chance < weight % 1)
            for copy in range(int(np.ceil(weight))):
                chosen = numbers[times > copy]
                if (file, copy) in self._read:
                    chosen = chosen[~np.isin(chosen, self._read[file, copy])]
                keys.append(_random(chosen, place, file, f"copy {copy}"))
                columns.append(np.stack([np.full_like(chosen, row), chosen, np.full_like(chosen, copy)], 1))
        whole = np.concatenate(columns)
        if place.seed is not None:
            whole = whole[np.argsort(np.concatenate(keys), kind="stable")]
        return Elements(files, whole)

    def reader_of(self, file: str, record: int, readers: int) -> int:
        """Return the reader of a record among `readers`."""
        return int(self._turns(file, record + 1)[record]) % readers

    def _numbers(self, place: Place, file: str) -> Numbers:
        """Return the records of a file in a reader's current round that no earlier round finished."""
        turns = self._turns(file, place.counts[file])
        is_left = (turns % place.readers == place.reader) & ~self._is_finished(place, file, turns)
        return np.flatnonzero(is_left)

    def _turns(self, file: str, count: int) -> Numbers:
        """Return the number whose remainder is the reader of each of a file's first records."""
        argument, path = _argument_and_path(file)
        turns = np.arange(count, dtype=np.int64) + argument + (_digest(path) % (1 << 32) if path else 0)
        ids, senders = self._ids(file), self._senders(file)
        if senders:
            firsts = np.zeros(len(ids.names), np.int64)
            firsts[[*senders]] = [_digest(name) % (1 << 32) for name in senders.values()]
            numbers, rows = ids.numbers[:count], ids.rows[:count]
            turns[: len(rows)] = np.where(numbers > 0, firsts[rows] + numbers, turns[: len(rows)])
        return turns

    def _senders(self, file: str) -> dict[int, str]:
        """Return the names of the senders of a file's records, with their rows."""
        ids, known = self._ids(file), self._senders_of.get(file)
        if not ids.names:
            return {}
        if known is None or known[0] is not ids:
            used = np.flatnonzero(np.bincount(ids.rows[ids.numbers > 0], minlength=1))
            known = self._senders_of[file] = ids, {row: ids.names[row] for row in used.tolist()}
        return known[1]

    def _is_finished(self, place: Place, file: str, turns: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of a file's first records belong to a finished round, of this or an earlier reader."""
        numbers = np.arange(len(turns), dtype=np.int64)
        is_finished: npt.NDArray[np.bool_] = numbers < place.done.get(file, 0)
        for finished in self._finished:
            counts = np.array([done.get(file, 0) for done in finished], np.int64)
            is_finished |= numbers < counts[turns % len(finished)]
        return is_finished

    def _copies(self, place: Place) -> dict[str, npt.NDArray[np.bool_]]:
        """Return which of each file's records are copies of a message that is read from another record."""
        weighted = [file for file in place.counts if place.weights[_argument_and_path(file)[0]]]
        files = sorted(weighted, key=_argument_and_path)
        times = Counter(name for file in files for name in self._senders(file).values())
        places = {name: place for place, (name, count) in enumerate(times.items()) if count > 1}
        if not places:
            return {}
        columns = []
        for order, file in enumerate(files):
            ids, count = self._ids(file), place.counts[file]
            moved = np.full(len(ids.names) + 1, -1, np.int64)  # the last one is of records without an id
            for row, name in self._senders(file).items():
                moved[row] = places.get(name, -1)
            senders = moved[ids.rows[:count]]
            records = np.flatnonzero((senders >= 0) & (ids.numbers[:count] > 0))
            # A message that was begun is read on, and one of a finished round is not read again.
            ranks = np.where(self._is_finished(place, file, self._turns(file, count)), 1, 2)
            begun = self._begun.get(file, _NO_NUMBERS)
            ranks[begun[begun < count]] = 0
            orders = np.full(len(records), order, np.int64)
            columns.append([senders[records], ids.numbers[records], ranks[records], orders, records])
        sender, number, rank, place_of_file, record = map(np.concatenate, zip(*columns, strict=True))
        sequence = np.lexsort((record, place_of_file, rank, number, sender))
        is_copy = np.zeros(len(sequence), np.bool_)
        is_copy[1:] = (np.diff(sender[sequence]) == 0) & (np.diff(number[sequence]) == 0)
        copies = {file: np.zeros(place.counts[file], np.bool_) for file in files}
        for order, file in enumerate(files):
            copies[file][record[sequence[is_copy & (place_of_file[sequence] == order)]]] = True
        return copies


def _argument_and_path(file: str) -> tuple[int, str]:
    """Return the parts of a file's name: the number of the argument that names it, and its path there."""
    argument, _, path = file.partition("/")
    return int(argument), path


def _digest(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(8), "little")


def _random(numbers: npt.NDArray[np.int64], place: Place, file: str, purpose: str) -> npt.NDArray[np.uint64]:
    """Return a random number for each record, the same in every release: SplitMix64 (Steele et al., 2014)."""
    base = _digest(f"{place.seed} {place.epoch} {purpose} {file}")
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
