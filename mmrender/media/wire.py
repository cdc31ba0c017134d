"""Media items and sidecars as plain data for the codec, and back without copying an array.

```python
message = mmcodecs.encode(item_to_wire(item))
item_from_wire(mmcodecs.decode(message))  # tensors equal to the last bit; pixels are views of `message`
```

The plain form is dicts, lists, scalars and arrays: `{"version": 1, "arithmetics": [...], "items": [...]}`,
and for a sidecar the placeholder ranges beside them. Arrays stand as `mmcodecs.Shared` unless `share=False`,
so that `mmcodecs.Encoder` sends the pixels of an item once over a connection; readers take either.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.errors import MediaError
from mmrender.media.item_fields import WireFields, checked_integer, wire_error
from mmrender.media.item_forms import form_of, form_of_kind
from mmrender.media.item_plain import ArithmeticTable, common_fields, read_arithmetics
from mmrender.media.item_reference import ReferenceItem
from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange

__all__ = [
    "ReferenceItem",
    "item_from_wire",
    "item_to_wire",
    "items_from_wire",
    "items_to_wire",
    "multi_modal_data_from_wire",
    "multi_modal_data_to_wire",
    "ranges_from_array",
    "ranges_to_array",
]

WIRE_VERSION: Final = 1


def items_to_wire(items: Sequence[MediaItem], *, share: bool = True, where: str = "items") -> dict[str, Any]:
    """Return items as plain data; what they have in common is written once.

    Args:
        items: Of any classes that have a form.
        share: Whether arrays are wrapped for an encoder with a table.
        where: Path for errors.

    Raises:
        MediaError: An item's class has no form, or its identity is no hex digest of 32 bytes.
    """
    table = ArithmeticTable()
    written = []
    for index, item in enumerate(items):
        path = f"{where}[{index}]"
        form = form_of(item, path)
        fields = common_fields(item, f"{path}.identity")
        written.append({"kind": form.kind, **fields, **form.write(item, table, share)})
    return {"version": WIRE_VERSION, "arithmetics": table.rows, "items": written}


def items_from_wire(wire: Mapping[str, Any], *, where: str = "items") -> list[MediaItem]:
    """Return the items of `items_to_wire`. Their arrays are read-only views of those given.

    Raises:
        MediaError: The form is of another version, or anything in it is missing, malformed or does not fit.
    """
    _check_version(wire, where)
    fields = WireFields(wire, where, ("version", "arithmetics", "items"))
    arithmetics = read_arithmetics(fields["arithmetics"], fields.path("arithmetics"))
    values = fields["items"]
    if not isinstance(values, list | tuple):
        raise wire_error("a table of items is malformed", fields.path("items"), "a list", values)
    items = []
    for index, value in enumerate(values):
        path = f"{where}[{index}]"
        kind = value.get("kind") if isinstance(value, Mapping) else None
        items.append(form_of_kind(kind, f"{path}.kind").read(value, arithmetics, path))
    return items


def item_to_wire(item: MediaItem, *, share: bool = True) -> dict[str, Any]:
    """Return one item as plain data: `items_to_wire` of a single one.

    Raises:
        MediaError: As `items_to_wire`.
    """
    return items_to_wire([item], share=share)


def item_from_wire(wire: Mapping[str, Any]) -> MediaItem:
    """Return the item of `item_to_wire`.

    Raises:
        MediaError: As `items_from_wire`, or there is not one item.
    """
    items = items_from_wire(wire)
    if len(items) != 1:
        raise wire_error("there is not one item", "items", "1 item", len(items))
    return items[0]


def ranges_to_array(
    entries: Sequence[tuple[int, PlaceholderRange]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return placeholder ranges as two arrays.

    Args:
        entries: Row of the item in its table, and range.

    Returns:
        int32 `[n, 4]` of row, offset, length and number of embed spans (-1 for None), and int32 `[m, 2]` of
        the embed spans one after another.
    """
    rows = [
        (row, found.offset, found.length, -1 if found.embed_spans is None else len(found.embed_spans))
        for row, found in entries
    ]
    spans = [span for _, found in entries for span in found.embed_spans or ()]
    return np.array(rows, np.int32).reshape(-1, 4), np.array(spans, np.int32).reshape(-1, 2)


def ranges_from_array(
    rows: npt.NDArray[np.int32], spans: npt.NDArray[np.int32], items: int, where: str
) -> list[tuple[int, PlaceholderRange]]:
    """Undo `ranges_to_array`.

    Args:
        rows: int32 `[n, 4]`.
        spans: int32 `[m, 2]`.
        items: Number of rows of the item table.
        where: Path for errors.

    Raises:
        MediaError: A row refers to no item, a number is negative, or spans do not lie inside their range,
            are not in order, are too few or are left over.
    """
    entries = []
    taken = 0
    for index, (row, offset, length, count) in enumerate(rows.tolist()):
        path = f"{where}[{index}]"
        if not 0 <= row < items or offset < 0 or length < 1 or count < -1:
            expected = f"an item below {items}, an offset and a length"
            raise wire_error("a placeholder range is malformed", path, expected, [row, offset, length, count])
        own = tuple((start, stop) for start, stop in spans[taken : taken + max(count, 0)].tolist())
        bounds = [0, *(bound for span in own for bound in span), length]
        if len(own) != max(count, 0) or any(a > b for a, b in pairwise(bounds)):
            raise wire_error(
                "embed spans are malformed", path, f"{count} spans within {length} tokens", list(own)
            )
        taken += len(own)
        entries.append((row, PlaceholderRange(offset, length, None if count < 0 else own)))
    if taken != len(spans):
        raise wire_error("embed spans are left over", where, str(taken), len(spans))
    return entries


def multi_modal_data_to_wire(sidecar: MultiModalData, *, share: bool = True) -> dict[str, Any]:
    """Return a sidecar as plain data, each distinct item once.

    Raises:
        MediaError: As `items_to_wire`, or hashes, ranges and items do not belong together.
    """
    known: dict[tuple[str, type], int] = {}
    items: list[MediaItem] = []
    entries: list[tuple[int, PlaceholderRange]] = []
    counts: dict[str, int] = {}
    for modality, held in sidecar.mm_items.items():
        ranges, hashes = sidecar.mm_placeholders.get(modality, ()), sidecar.mm_hashes.get(modality, ())
        if not len(held) == len(ranges) == len(hashes):
            got = f"{len(hashes)} hashes, {len(ranges)} ranges, {len(held)} items"
            raise MediaError("a sidecar's lists differ in length", where=f"mm_items[{modality!r}]", got=got)
        counts[modality] = len(held)
        for item, found in zip(held, ranges, strict=True):
            row = known.setdefault((item.identity, type(item)), len(items))
            if row == len(items):
                items.append(item)
            entries.append((row, found))
    ranges_array, spans = ranges_to_array(entries)
    table = items_to_wire(items, share=share, where="mm_items")
    return {"table": table, "counts": counts, "ranges": ranges_array, "spans": spans}


def multi_modal_data_from_wire(wire: Mapping[str, Any], *, where: str = "multi_modal_data") -> MultiModalData:
    """Return the sidecar of `multi_modal_data_to_wire`; an item that stands twice is one object.

    Raises:
        MediaError: As `items_from_wire`, or ranges do not fit the items.
    """
    fields = WireFields(wire, where, ("table", "counts", "ranges", "spans"))
    items = items_from_wire(fields["table"], where=fields.path("table"))
    rows, spans = fields.array("ranges", "i", 2), fields.array("spans", "i", 2)
    for name, array, columns in (("ranges", rows, 4), ("spans", spans, 2)):
        if array.dtype != np.int32 or array.shape[1] != columns:
            raise wire_error(
                "an array of a sidecar is malformed", fields.path(name), f"int32 [n, {columns}]", array
            )
    entries = iter(ranges_from_array(rows, spans, len(items), fields.path("ranges")))
    sidecar = MultiModalData()
    for modality, count in _counts(fields["counts"], len(rows), fields.path("counts")).items():
        own = [next(entries) for _ in range(count)]
        for row, _ in own:
            if items[row].modality != modality:
                got = items[row].modality
                raise wire_error("an item is of another modality", fields.path("counts"), modality, got)
        sidecar = sidecar.merged(MultiModalData.of((found, items[row]) for row, found in own))
    return sidecar


def _counts(value: Any, total: int, where: str) -> dict[str, int]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wire_error("counts are malformed", where, "numbers by modality", value)
    counts = {key: checked_integer(count, f"{where}.{key}") for key, count in value.items()}
    if sum(counts.values()) != total:
        raise wire_error("counts do not add up", where, f"the sum {total}", sum(counts.values()))
    return counts


def _check_version(wire: Any, where: str) -> None:
    version = wire.get("version") if isinstance(wire, Mapping) else None
    if type(version) is not int or version != WIRE_VERSION:
        raise MediaError(
            "items of this version cannot be read",
            where=f"{where}.version",
            expected=str(WIRE_VERSION),
            got=repr(version)[:80],
            remedy="Write and read with the same release of mmrender",
        )
