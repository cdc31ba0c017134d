"""Media items and sidecars as plain data for the codec, and back without copying an array.

```python
message = mmcodecs.encode(item_to_wire(item))
item_from_wire(mmcodecs.decode(message))  # tensors equal to the last bit; pixels are views of `message`
```

The plain form is dicts, lists, scalars and arrays: `{"version": 1, "arithmetics": [...], "items": [...]}`,
and for a sidecar the placeholder ranges beside them. Arrays stand as `mmcodecs.Shared` unless `share=False`,
so that `mmcodecs.Encoder` sends the pixels of an item once over a connection; readers take either.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
import xxhash

import mmcodecs
from mmrender.errors import MediaError
from mmrender.media.item import PatchItem, PatchLayout, ProcessedItem, ReferenceItem
from mmrender.media.levels import Compact, Floats, Integers, Levels, PixelArithmetic
from mmrender.media.pixels import IMAGE_BACKENDS, ImageBackend
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, MultiModalData, PlaceholderRange, Repeat, Text

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


_INT_MAX: Final = 2**31 - 1


def wire_error(problem: str, where: str, expected: str, got: Any) -> MediaError:
    """Build the error of a value at `where` that cannot be read."""
    return MediaError(problem, where=where, expected=expected, got=described(got))


def described(value: Any) -> str:
    """Say in a few characters what a value is."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | None) else ""
    return text if 0 < len(text) <= 80 else type(value).__name__


class WireFields:
    """The entries of one mapping, read by name and type.

    Args:
        value: What stands at `where`.
        where: Path for errors.
        names: The keys that it must have, no others.

    Raises:
        MediaError: It is no mapping with these keys.
    """

    def __init__(self, value: Any, where: str, names: Collection[str]) -> None:
        if not isinstance(value, Mapping):
            raise wire_error("a part of an item is malformed", where, "a mapping", value)
        if set(value) != set(names):
            raise MediaError(
                "a part of an item has other fields",
                where=where,
                expected=", ".join(sorted(names)),
                got=", ".join(sorted(map(str, value))) or "none",
            )
        self._value = value
        self.where = where

    def __getitem__(self, name: str) -> Any:
        return self._value[name]

    def path(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.where}.{name}"

    def text(self, name: str, choices: Collection[str] = ()) -> str:
        """Return a text, one of `choices` if there are any."""
        value = self._value[name]
        if not isinstance(value, str) or (choices and value not in choices):
            expected = " or ".join(map(repr, choices)) if choices else "text"
            raise wire_error("a field of an item is malformed", self.path(name), expected, value)
        return value

    def integer(self, name: str, most: int = _INT_MAX, least: int = 0) -> int:
        """Return an integer in `least..most`."""
        return checked_integer(self._value[name], self.path(name), most, least)

    def integers(self, name: str, count: int | None = None, most: int = _INT_MAX) -> tuple[int, ...]:
        """Return `count` integers in `0..most`."""
        value, path = self._value[name], self.path(name)
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            expected = "integers" if count is None else f"{count} integers"
            raise wire_error("a field of an item is malformed", path, expected, value)
        return tuple(checked_integer(entry, f"{path}[{i}]", most) for i, entry in enumerate(value))

    def real(self, name: str) -> float:
        """Return a finite number."""
        return _checked_real(self._value[name], self.path(name))

    def reals(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` finite numbers."""
        value, path = self._value[name], self.path(name)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise wire_error("a field of an item is malformed", path, f"{count} numbers", value)
        return tuple(_checked_real(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    def digest(self, name: str) -> str:
        """Return an identity: 32 bytes on the wire, 64 hex digits here."""
        value = self._value[name]
        if not isinstance(value, bytes) or len(value) != 32:
            raise wire_error("an identity is malformed", self.path(name), "32 bytes", value)
        return value.hex()

    def array(self, name: str, kinds: str, ndim: int | None = None) -> npt.NDArray[Any]:
        """Return an array as a read-only view.

        Args:
            name: The field.
            kinds: numpy's letters of the kinds of dtype allowed.
            ndim: Number of dimensions, None for any.
        """
        value = self._value[name]
        if isinstance(value, mmcodecs.Shared):
            value = value.value
        fits = isinstance(value, np.ndarray) and value.dtype.kind in kinds and value.flags.c_contiguous
        if not fits or not value.dtype.isnative or ndim not in (None, value.ndim):
            expected = f"a C-contiguous array of kind {kinds!r}" + (f" and {ndim} dimensions" if ndim else "")
            raise wire_error("an array of an item is malformed", self.path(name), expected, value)
        view: npt.NDArray[Any] = value.view()
        view.flags.writeable = False
        return view


def checked_integer(value: Any, where: str, most: int = _INT_MAX, least: int = 0) -> int:
    """Return `value`, an integer in `least..most`.

    Raises:
        MediaError: It is none.
    """
    if type(value) is not int or not least <= value <= most:
        raise wire_error("a field of an item is malformed", where, f"an integer in {least}..{most}", value)
    return value


def _checked_real(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise wire_error("a field of an item is malformed", where, "a finite number", value)
    return float(value)


COMMON: Final = ("kind", "modality", "identity", "size", "grid", "expansion")
"""Fields of every item."""
_MODALITIES: Final = get_args(Modality)

Plain: TypeAlias = dict[str, Any]


class ArithmeticTable:
    """Distinct pixel arithmetics, by row."""

    def __init__(self) -> None:
        self.rows: list[Plain] = []
        self._known: dict[PixelArithmetic, int] = {}

    def row(self, arithmetic: PixelArithmetic) -> int:
        """Return the row of an arithmetic, a new one if it has none."""
        row = self._known.get(arithmetic)
        if row is None:
            row = self._known[arithmetic] = len(self.rows)
            self.rows.append(
                {
                    "mean": list(arithmetic.mean),
                    "std": list(arithmetic.std),
                    "rescale": arithmetic.rescale,
                    "backend": arithmetic.backend,
                }
            )
        return row


def read_arithmetics(value: Any, where: str) -> list[PixelArithmetic]:
    """Read the table back.

    Raises:
        MediaError: It is malformed, or a deviation or factor is zero.
    """
    if not isinstance(value, list | tuple):
        raise wire_error("a table of items is malformed", where, "a list", value)
    return [_arithmetic(row, f"{where}[{index}]") for index, row in enumerate(value)]


def _arithmetic(value: Any, where: str) -> PixelArithmetic:
    fields = WireFields(value, where, ("mean", "std", "rescale", "backend"))
    mean, std = fields.reals("mean", 3), fields.reals("std", 3)
    rescale = fields.real("rescale")
    if 0.0 in (*std, rescale):
        raise wire_error("pixels would be divided by zero", where, "std and rescale other than 0", list(std))
    backend = cast(ImageBackend, fields.text("backend", IMAGE_BACKENDS))
    return PixelArithmetic((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), rescale, backend)


def keyed(item: MediaItem, name: str, array: npt.NDArray[Any], share: bool) -> Any:
    """Return an array of an item under the key that stands for it, or as it is."""
    if not share:
        return array
    return mmcodecs.Shared(array, bytes.fromhex(item.identity) + xxhash.xxh3_64_digest(name.encode()))


def common_fields(item: MediaItem, where: str) -> Plain:
    """Return what every item has, in plain form.

    Raises:
        MediaError: The identity is no hex digest of 32 bytes.
    """
    try:
        identity = bytes.fromhex(item.identity)
    except (ValueError, TypeError):
        identity = b""
    if len(identity) != 32 or identity.hex() != item.identity:
        raise wire_error("an identity is malformed", where, "64 lower-case hex digits", item.identity)
    expansion: list[Any] = []
    for piece in item.expansion:
        is_text = isinstance(piece, Text)
        expansion += [piece.text, -1, False] if is_text else [piece.token, piece.count, piece.embeds]  # type: ignore[union-attr]
    return {
        "modality": item.modality,
        "identity": identity,
        "size": list(item.size),
        "grid": list(item.grid),
        "expansion": expansion,
    }


def read_expansion(value: Any, where: str) -> Expansion:
    """Read an expansion back from triples `text, count, embeds`, count -1 for a piece of text.

    Raises:
        MediaError: It is malformed.
    """
    if not isinstance(value, list | tuple) or len(value) % 3:
        raise wire_error("an expansion is malformed", where, "triples of text, count, embeds", value)
    pieces: list[Text | Repeat] = []
    for index in range(0, len(value), 3):
        text, count, embeds = value[index : index + 3]
        if not isinstance(text, str) or type(embeds) is not bool:
            got = [text, count, embeds]
            raise wire_error("an expansion is malformed", f"{where}[{index}]", "text, count, embeds", got)
        checked_integer(count, f"{where}[{index + 1}]", least=-1)
        pieces.append(Text(text) if count < 0 else Repeat(text, count, embeds))
    return tuple(pieces)


def num_embeds(expansion: Expansion) -> int:
    """Return how many tokens of an expansion stand for features."""
    return sum(piece.count for piece in expansion if isinstance(piece, Repeat) and piece.embeds)


def read_size(fields: WireFields) -> tuple[int, int]:
    """Return height and width."""
    height, width = fields.integers("size", 2)
    return height, width


def read_modality(fields: WireFields) -> Modality:
    """Return the modality."""
    return cast(Modality, fields.text("modality", _MODALITIES))


def arithmetic_of(arithmetics: Sequence[PixelArithmetic], fields: WireFields) -> PixelArithmetic:
    """Return the row of the table that the field `arithmetic` names."""
    return arithmetics[fields.integer("arithmetic", len(arithmetics) - 1)]


_MAX_SIDE: Final = 1024
"""Most pixels of a patch's side, and most patches that one token merges, in one direction."""
_MAX_TEMPORAL: Final = 64
_MAX_VALUES: Final = 1 << 28
"""Most values that an item may claim to expand to, whatever few bytes it is made of."""
_INTEGERS: Final = {
    np.dtype(name).name: np.dtype(name)
    for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}


class ItemForm(Protocol):
    """How items of one class are written as plain data and read back."""

    @property
    def kind(self) -> str:
        """What names the form on the wire."""
        ...

    @property
    def cls(self) -> type:
        """The class of the items."""
        ...

    def write(self, item: Any, table: ArithmeticTable, share: bool) -> Plain:
        """Return the fields of an item, `kind` left out; `share` wraps arrays by `keyed`."""
        ...

    def read(self, value: Plain, arithmetics: Sequence[PixelArithmetic], where: str) -> MediaItem:
        """Return the item. Arrays are views of those given.

        Raises:
            MediaError: Something is missing, malformed or does not fit; the message names its path.
        """
        ...


class PatchForm:
    """Form of `PatchItem`: uint8 planes, layout and arithmetic."""

    kind = "patches"
    cls = PatchItem

    def write(self, item: PatchItem, table: ArithmeticTable, share: bool) -> Plain:
        """See `ItemForm`."""
        layout = item.layout
        return {
            "layout": [layout.patch, layout.merge, layout.temporal],
            "arithmetic": table.row(item.arithmetic),
            "frames": keyed(item, "frames", item.frames, share),
        }

    def read(self, value: Plain, arithmetics: Sequence[PixelArithmetic], where: str) -> PatchItem:
        """See `ItemForm`."""
        fields = WireFields(value, where, (*COMMON, "layout", "arithmetic", "frames"))
        patch, merge, temporal = fields.integers("layout", 3, _MAX_SIDE)
        checked_integer(temporal, fields.path("layout[2]"), _MAX_TEMPORAL, least=1)
        if not patch or not merge:
            raise wire_error(
                "a patch layout is malformed", fields.path("layout"), "sides above 0", [patch, merge]
            )
        time, height, width = fields.integers("grid", 3)
        item = PatchItem(
            modality=read_modality(fields),
            identity=fields.digest("identity"),
            size=read_size(fields),
            grid=(time, height, width),
            expansion=read_expansion(fields["expansion"], fields.path("expansion")),
            frames=fields.array("frames", "u", 4),
            layout=PatchLayout(patch, merge, temporal),
            arithmetic=arithmetic_of(arithmetics, fields),
        )
        _check_patches(item, where)
        return item


def _check_patches(item: PatchItem, where: str) -> None:
    time, height, width = item.grid
    layout = item.layout
    count = 1 if item.modality == "image" else time * layout.temporal
    shape = (count, 3, height * layout.patch, width * layout.patch)
    if item.frames.shape != shape or item.frames.dtype != np.uint8:
        raise wire_error(
            "frames do not fit their grid", f"{where}.frames", f"uint8 {list(shape)}", item.frames
        )
    merged = height % layout.merge == 0 == width % layout.merge
    if not merged or 0 in item.grid or (item.modality == "image" and time != 1):
        expected = f"sides that are multiples of {layout.merge}, and one time step for an image"
        raise wire_error("a grid is malformed", f"{where}.grid", expected, list(item.grid))
    features = time * height * width // layout.merge**2
    if num_embeds(item.expansion) != features:
        got = num_embeds(item.expansion)
        raise wire_error(
            "an expansion does not fit its grid", f"{where}.expansion", f"{features} tokens", got
        )


class ProcessedForm:
    """Form of `ProcessedItem`: each tensor in its smallest exact form."""

    kind = "processed"
    cls = ProcessedItem

    def write(self, item: ProcessedItem, table: ArithmeticTable, share: bool) -> Plain:
        """See `ItemForm`."""
        return {
            "parts": {name: _write_part(item, name, part, table, share) for name, part in item.parts.items()}
        }

    def read(self, value: Plain, arithmetics: Sequence[PixelArithmetic], where: str) -> ProcessedItem:
        """See `ItemForm`."""
        fields = WireFields(value, where, (*COMMON, "parts"))
        parts = fields["parts"]
        if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
            raise wire_error("a part of an item is malformed", fields.path("parts"), "a mapping", parts)
        return ProcessedItem(
            identity=fields.digest("identity"),
            size=read_size(fields),
            grid=fields.integers("grid"),
            expansion=read_expansion(fields["expansion"], fields.path("expansion")),
            parts={
                name: _read_part(part, arithmetics, f"{fields.path('parts')}.{name}")
                for name, part in parts.items()
            },
            modality=read_modality(fields),
        )


def _write_part(item: ProcessedItem, name: str, part: Compact, table: ArithmeticTable, share: bool) -> Plain:
    if isinstance(part, Levels):
        return {
            "levels": keyed(item, name, part.levels, share),
            "held": list(part.held),
            "shape": list(part.shape),
            "arithmetic": table.row(part.arithmetic),
        }
    values = keyed(item, name, part.values, share)
    if isinstance(part, Floats):
        return {"floats": values}
    return {"integers": values, "shape": list(part.shape), "dtype": part.dtype.name}


def _read_part(value: Any, arithmetics: Sequence[PixelArithmetic], where: str) -> Compact:
    names = tuple(value) if isinstance(value, Mapping) else ()
    if "levels" in names:
        return _read_levels(value, arithmetics, where)
    if "floats" in names:
        return Floats(WireFields(value, where, ("floats",)).array("floats", "f"))
    fields = WireFields(value, where, ("integers", "shape", "dtype"))
    values, shape = fields.array("integers", "biu"), _shape(fields)
    try:
        fits = np.broadcast_shapes(values.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise wire_error("integers do not fit their shape", where, f"something like {list(shape)}", values)
    return Integers(values, shape, _INTEGERS[fields.text("dtype", _INTEGERS)])


def _read_levels(value: Any, arithmetics: Sequence[PixelArithmetic], where: str) -> Levels:
    fields = WireFields(value, where, ("levels", "held", "shape", "arithmetic"))
    levels, shape, held = fields.array("levels", "u", 4), _shape(fields), fields.integers("held")
    whole = (len(held), *shape[-3:])
    if levels.dtype != np.uint8 or len(shape) < 3 or shape[-3] != 3 or levels.shape != whole:
        expected = f"uint8 {list(whole)} of three channels"
        raise wire_error("levels do not fit their shape", fields.path("levels"), expected, levels)
    tiles = int(np.prod(shape[:-3], dtype=object))
    rising = all(first < second for first, second in pairwise(held))
    if not rising or (held and held[-1] >= tiles):
        raise wire_error(
            "tiles are misnumbered", fields.path("held"), f"rising numbers below {tiles}", list(held)
        )
    return Levels(levels, held, shape, arithmetic_of(arithmetics, fields))


def _shape(fields: WireFields) -> tuple[int, ...]:
    shape = fields.integers("shape")
    # In Python integers: a product of numpy's would wrap around.
    if len(shape) > 8 or int(np.prod(shape, dtype=object)) > _MAX_VALUES:
        expected = f"at most 8 dimensions and {_MAX_VALUES} values"
        raise wire_error("a shape is too large", fields.path("shape"), expected, list(shape))
    return shape


class ReferenceForm:
    """Form of `ReferenceItem`: the encoded image or its URL."""

    kind = "reference"
    cls = ReferenceItem

    def write(self, item: ReferenceItem, _table: ArithmeticTable, share: bool) -> Plain:
        """See `ItemForm`."""
        source: Any = item.source
        if isinstance(source, bytes):
            source = keyed(item, "source", np.frombuffer(source, np.uint8), share)
        return {"expected_length": item.expected_length, "source": source}

    def read(self, value: Plain, _arithmetics: Sequence[PixelArithmetic], where: str) -> ReferenceItem:
        """See `ItemForm`. The encoded image is copied: decoders of images take nothing but bytes."""
        fields = WireFields(value, where, (*COMMON, "expected_length", "source"))
        source = fields["source"]
        return ReferenceItem(
            identity=fields.digest("identity"),
            size=read_size(fields),
            grid=fields.integers("grid"),
            expansion=read_expansion(fields["expansion"], fields.path("expansion")),
            expected_length=fields.integer("expected_length"),
            source=source if isinstance(source, str) else fields.array("source", "u", 1).tobytes(),
            modality=read_modality(fields),
        )


_FORMS: list[ItemForm] = [PatchForm(), ProcessedForm(), ReferenceForm()]


def register_item_form(form: ItemForm) -> None:
    """Add the form of another class of items, in every process that writes or reads them.

    Raises:
        MediaError: Its kind or its class has a form already.
    """
    for known in _FORMS:
        if known.kind == form.kind or known.cls is form.cls:
            raise MediaError(
                "there is a form of this kind or class already",
                where=f"{type(form).__name__}.kind",
                got=f"{form.kind!r} for {form.cls.__name__}",
            )
    _FORMS.append(form)


def form_of(item: MediaItem, where: str) -> ItemForm:
    """Return the form of an item's class.

    Raises:
        MediaError: It has none.
    """
    for form in _FORMS:
        if type(item) is form.cls:
            return form
    raise MediaError(
        "items of this class have no form on the wire",
        where=where,
        expected=", ".join(form.cls.__name__ for form in _FORMS),
        got=type(item).__name__,
        remedy="Describe the class to mmrender.media.wire.register_item_form",
    )


def form_of_kind(kind: Any, where: str) -> ItemForm:
    """Return the form that is named so on the wire.

    Raises:
        MediaError: There is none.
    """
    for form in _FORMS:
        if isinstance(kind, str) and kind == form.kind:
            return form
    raise wire_error("an item is of an unknown kind", where, ", ".join(form.kind for form in _FORMS), kind)
