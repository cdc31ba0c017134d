"""Which records a reader takes, in which order, and which records remain when other readers take over.

A reader is a worker of a rank. Record `n` of a file belongs to reader `(n + first) % readers`, and the name
of the file decides `first`. So the owner of a record does not depend on records and files that come later,
and readers need not agree on how far files have grown.

A pass goes in rounds. A round holds the records that the files held when it began and the rounds before did
not; a pass over files that do not grow has one round. Shuffled, the records of a round are sorted by a random
number of their own, which follows from seed, epoch, file and record.

When other readers take over, because the number of ranks or workers has changed, the places of all earlier
readers say which records are read. The new readers share the remaining records by the same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

FORMAT: Final = "mmrender.reading"
VERSION: Final = 1


class Element(NamedTuple):
    """One reading of a record. A file with a weight of 2 has two for each record."""

    file: str
    record: int
    copy: int


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


class Pass:
    """The elements of readers in one pass, after earlier arrangements of readers have read a part.

    Attributes:
        items: Items taken of elements that an earlier reader had begun.
    """

    def __init__(self, earlier: Sequence[Sequence[dict[str, Any]]]) -> None:
        self._finished: list[list[dict[str, int]]] = []  # of each arrangement, by reader
        self._read: set[Element] = set()
        self.items: dict[Element, int] = {}
        for arrangement in earlier:
            places = [Place.of(state) for state in arrangement]
            shares = [self.elements(place) for place in places]
            for place, elements in zip(places, shares, strict=True):
                self._read.update(elements[: place.position])
                if place.item:
                    self.items[elements[place.position]] = place.item
            self._finished.append([place.done for place in places])

    def elements(self, place: Place) -> list[Element]:
        """Return the elements of a reader's current round, in order."""
        elements: list[Element] = []
        keys: list[npt.NDArray[np.uint64]] = []
        for file in sorted(place.counts, key=_argument_and_path):
            numbers = self._numbers(place, file)
            if not numbers.size:
                continue
            weight = place.weights[_argument_and_path(file)[0]]
            chance = _random(numbers, place, file, "weight") / 2.0**64
            times = np.floor(weight) + (chance < weight % 1)
            for copy in range(int(np.ceil(weight))):
                chosen = numbers[times > copy]
                keys.append(_random(chosen, place, file, f"copy {copy}"))
                elements += [Element(file, record, copy) for record in chosen.tolist()]
        if place.seed is not None and elements:
            elements = [elements[index] for index in np.argsort(np.concatenate(keys), kind="stable").tolist()]
        return [each for each in elements if each not in self._read] if self._read else elements

    def _numbers(self, place: Place, file: str) -> npt.NDArray[np.int64]:
        """Return the records of a file in a reader's current round that no earlier round finished."""
        numbers = np.arange(place.done.get(file, 0), place.counts[file], dtype=np.int64)
        first = _first_reader(file)
        is_left: npt.NDArray[np.bool_] = (numbers + first) % place.readers == place.reader
        for finished in self._finished:
            counts = np.array([done.get(file, 0) for done in finished], np.int64)
            is_left &= numbers >= counts[(numbers + first) % len(finished)]
        return numbers[is_left]


def _argument_and_path(file: str) -> tuple[int, str]:
    """Return the parts of a file's name: the number of the argument that names it, and its path there."""
    argument, _, path = file.partition("/")
    return int(argument), path


def _first_reader(file: str) -> int:
    """Return the number of the reader of a file's first record, before the remainder is taken."""
    argument, path = _argument_and_path(file)
    return argument + (_digest(path) % (1 << 32) if path else 0)


def _digest(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(8), "little")


def _random(numbers: npt.NDArray[np.int64], place: Place, file: str, purpose: str) -> npt.NDArray[np.uint64]:
    """Return a random number for each record, the same in every release: SplitMix64 (Steele et al., 2014)."""
    base = _digest(f"{place.seed} {place.epoch} {purpose} {file}")
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
