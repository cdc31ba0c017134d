"""Sidecars as references into a table of distinct items.

An item is known by its modality, its hash and its type, so a hash that comes with its tensors here and
without them there gives two rows. Every repetition is checked against the first: the same hash with other
content is an error, since a reference would then show the model another image.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from mmrender.errors import TrajectoryError
from mmrender.media.wire import ranges_to_array
from mmrender.spans import MultiModalData, PlaceholderRange
from mmrender.trajectory.packed import (
    Int32Array,
    PackedEntries,
    PackedItem,
    PackedSidecar,
    PoolReader,
    check_keep,
)
from mmrender.trajectory.ranges import RANGE_FORMS, range_form, read_range
from mmrender.trajectory.steps import as_fields, get_field

FIELDS: Final = ("mm_hashes", "mm_placeholders", "mm_items")

_NO_RANGE: Final = PlaceholderRange(0, 0)


class Entry(NamedTuple):
    """One placeholder of a sidecar: the row of its item in the table, and its range."""

    row: int
    range: PlaceholderRange


Entries: TypeAlias = dict[str, list[Entry]]
"""Per modality the placeholders of a step, in prompt order."""


def same_item(first: Any, second: Any) -> bool:
    """Whether two items have equal content: the same object, equal identities, or equal values and arrays."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    identity = getattr(first, "identity", None)
    if isinstance(identity, str):
        return bool(identity == second.identity)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same_item(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same_item, first, second))
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return all(same_item(getattr(first, name), getattr(second, name)) for name in names)
    if hasattr(first, "dtype") and hasattr(first, "shape"):
        return _same_array(first, second)
    return bool(first == second)


def _same_array(first: Any, second: Any) -> bool:
    if first.dtype != second.dtype or tuple(first.shape) != tuple(second.shape):
        return False
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    return bool(first.equal(second))  # a torch tensor


@dataclass(slots=True)
class _Fields:
    """The three lists that a sidecar holds for one modality, `None` where it holds none."""

    hashes: Sequence[Any] | None
    ranges: Sequence[Any] | None
    items: Sequence[Any] | None

    def length(self, where: str) -> int:
        lengths = {len(entries) for entries in (self.hashes, self.ranges, self.items) if entries is not None}
        if len(lengths) > 1:
            raise TrajectoryError(
                "hashes, placeholders and items of a sidecar must be equally many",
                where=where,
                got=", ".join(
                    f"{len(entries)} {name}"
                    for name, entries in zip(
                        ("hashes", "placeholders", "items"),
                        (self.hashes, self.ranges, self.items),
                        strict=True,
                    )
                    if entries is not None
                ),
            )
        return lengths.pop()


class SidecarPacker:
    """Builds the item table and the placeholder pool."""

    def __init__(self) -> None:
        self.items: list[PackedItem] = []
        self._rows: dict[tuple[str, str, type], int] = {}
        self._added: list[Entry] = []

    def add(self, sidecar: Any, reference: Entries, where: str) -> tuple[PackedSidecar, Entries]:
        """Store what a sidecar adds to the placeholders of `reference`.

        Returns:
            The packed sidecar and its entries, for later steps to refer to.

        Raises:
            TrajectoryError: It is no sidecar, its lists differ in length, an item has no hash, a range is
                malformed, or a hash stands for two different items.
        """
        fields = as_fields(sidecar, where)
        held = [name for name in FIELDS if isinstance(fields.get(name), Mapping)]
        if not held:
            raise TrajectoryError(
                "this is no sidecar", where=where, expected=f"some of {', '.join(FIELDS)}", got=_keys(fields)
            )
        rest = {name: value for name, value in fields.items() if name not in held}
        if rest and not isinstance(sidecar, Mapping):
            raise TrajectoryError(
                "a sidecar object with other fields cannot be packed",
                where=where,
                expected=", ".join(FIELDS),
                got=_keys(rest),
            )
        entries: Entries = {}
        modalities: dict[str, PackedEntries] = {}
        for modality in dict.fromkeys(key for name in held for key in fields[name]):
            lists = _Fields(*(get_field(fields.get(name), modality) for name in FIELDS))
            path = f"{where}.{modality}"
            if not isinstance(modality, str):
                raise TrajectoryError("a modality is no text", where=where, got=repr(modality))
            entries[modality] = self._entries(modality, lists, path)
            known = reference.get(modality, [])
            modalities[modality] = self._pack(entries[modality], known, lists, path)
        form: Literal["MultiModalData", "mapping"] = (
            "mapping" if isinstance(sidecar, Mapping) else "MultiModalData"
        )
        return PackedSidecar(form, modalities, held, rest), entries

    def _entries(self, modality: str, lists: _Fields, where: str) -> list[Entry]:
        entries = []
        for index in range(lists.length(where)):
            path = f"{where}[{index}]"
            item = lists.items[index] if lists.items is not None else None
            digest = lists.hashes[index] if lists.hashes is not None else getattr(item, "identity", None)
            if not isinstance(digest, str):
                raise TrajectoryError("an item has no hash", where=path, expected="text", got=repr(digest))
            placeholder = _NO_RANGE if lists.ranges is None else read_range(lists.ranges[index], path)
            entries.append(Entry(self._row(modality, digest, item, path), placeholder))
        return entries

    def _row(self, modality: str, digest: str, item: Any, where: str) -> int:
        key = (modality, digest, type(item))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self.items)
            self.items.append(PackedItem(modality, digest, item))
        elif not same_item(self.items[row].item, item):
            raise TrajectoryError(
                f"the hash {digest!r} stands for two different items",
                where=where,
                remedy="Derive hashes from the pixels and the processor's settings",
            )
        return row

    def _pack(self, entries: list[Entry], known: list[Entry], lists: _Fields, where: str) -> PackedEntries:
        keep = 0
        while keep < min(len(entries), len(known)) and entries[keep] == known[keep]:
            keep += 1
        self._added += entries[keep:]
        return PackedEntries(
            keep,
            len(entries) - keep,
            _sequence_form(lists.hashes, where),
            _sequence_form(lists.ranges, where),
            _sequence_form(lists.items, where),
            range_form(lists.ranges or (), [entry.range for entry in entries], where),
        )

    def pools(self) -> tuple[Int32Array, Int32Array]:
        """Return the pool of placeholders, int32 `[P, 4]`, and that of embed spans, int32 `[S, 2]`."""
        return ranges_to_array(self._added)


def _keys(fields: Mapping[str, Any]) -> str:
    return ", ".join(sorted(fields)) or "nothing"


def _sequence_form(value: Any, where: str) -> Literal["list", "tuple"] | None:
    if value is None:
        return None
    if type(value) not in (list, tuple):
        raise TrajectoryError(
            "the lists of a sidecar must be lists or tuples", where=where, got=type(value).__name__
        )
    return cast(Literal["list", "tuple"], type(value).__name__)


class SidecarUnpacker:
    """Reads sidecars back from the item table and the pools."""

    def __init__(self, items: Sequence[PackedItem], pool: Int32Array, spans: Int32Array) -> None:
        self._items = items
        self._placeholders = PoolReader(pool, "placeholders")
        self._spans = PoolReader(spans, "spans")

    def finish(self) -> None:
        """Raise `TrajectoryError` if placeholders or embed spans are left over."""
        self._placeholders.finish()
        self._spans.finish()

    def expand(self, packed: PackedSidecar, reference: Entries, where: str) -> tuple[Any, Entries]:
        """Return the sidecar in the form that it had, and its entries.

        Raises:
            TrajectoryError: It refers to something that is not there.
        """
        entries = {
            modality: self._entries(modality, part, reference.get(modality, []), f"{where}.{modality}")
            for modality, part in packed.modalities.items()
        }
        if not set(packed.fields) <= set(FIELDS):
            raise TrajectoryError(
                "a sidecar names an unknown field", where=where, got=_keys(dict.fromkeys(packed.fields))
            )
        values: dict[str, Any] = {name: {} for name in packed.fields}
        for modality, part in packed.modalities.items():
            for name, column, form in self._columns(entries[modality], part):
                if form is not None and name in values:
                    values[name][modality] = tuple(column) if form == "tuple" else list(column)
        if packed.form == "mapping":
            return {**values, **packed.rest}, entries
        return MultiModalData(**values), entries

    def _columns(
        self, entries: list[Entry], part: PackedEntries
    ) -> Iterable[tuple[str, Iterable[Any], str | None]]:
        ranges = (RANGE_FORMS[part.range_form](entry.range) for entry in entries)
        yield "mm_hashes", (self._items[entry.row].hash for entry in entries), part.hashes
        yield "mm_placeholders", ranges, part.ranges
        yield "mm_items", (self._items[entry.row].item for entry in entries), part.items

    def _entries(self, modality: str, part: PackedEntries, known: list[Entry], where: str) -> list[Entry]:
        check_keep(part.keep, len(known), f"{where}.keep")
        added = self._placeholders.take(part.add, f"{where}.add").tolist()
        return known[: part.keep] + [
            Entry(self._checked_row(row, modality, where), self._range(offset, length, count, where))
            for row, offset, length, count in added
        ]

    def _range(self, offset: int, length: int, count: int, where: str) -> PlaceholderRange:
        if count < 0:
            return PlaceholderRange(offset, length)
        spans = self._spans.take(count, where).tolist()
        return PlaceholderRange(offset, length, tuple((start, stop) for start, stop in spans))

    def _checked_row(self, row: int, modality: str, where: str) -> int:
        if not 0 <= row < len(self._items) or self._items[row].modality != modality:
            raise TrajectoryError(
                f"a placeholder refers to no {modality} of the item table",
                where=where,
                expected=f"a row below {len(self._items)}",
                got=str(row),
            )
        return row
