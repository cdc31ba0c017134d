"""Media items and sidecars as plain data for the codec, and back without copying an array.

```python
message = mmcodecs.encode(item_to_wire(item))
item_from_wire(mmcodecs.decode(message))  # tensors equal to the last bit; pixels are views of `message`
```

The plain form is dicts, lists, scalars and arrays: `{"version": 1, "arithmetics": [...], "items": [...]}`,
and for a sidecar the placeholder ranges beside them. The pixel arithmetic that items share is written once
and named by its row. Arrays are wrapped as `mmcodecs.Shared` unless `share=False`, under keys made of the
item's identity, so that `mmcodecs.Encoder` sends the pixels of an item once over a connection; readers take
either.

The structs below are the form. Data that does not fit them, or contradicts itself, is a `MediaError` with a
path.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

import mmcodecs
from mmrender.errors import MediaError
from mmrender.media.item import PatchItem, PatchLayout, ProcessedItem, ReferenceItem
from mmrender.media.levels import Compact, Floats, Integers, Levels, PixelArithmetic
from mmrender.media.pixels import ImageBackend
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, MultiModalData, PlaceholderRange, Repeat, Text

WIRE_VERSION: Final = 1
_MAX_VALUES: Final = 1 << 28
"""Most values that an item may claim to expand to, however few bytes it is made of."""

_Int: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Side: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
"""Pixels of a patch's side, and patches that one token merges, in one direction."""
_Shape: TypeAlias = Annotated[tuple[_Int, ...], Meta(max_length=8)]
_IntegerName: TypeAlias = Literal[
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"
]


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping with exactly these fields."""


class _ArithmeticForm(_Form):
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float
    backend: ImageBackend


class _ItemForm(_Form, kw_only=True, tag_field="kind"):
    modality: Modality
    identity: Annotated[bytes, Meta(min_length=32, max_length=32)]
    size: tuple[_Int, _Int]
    grid: tuple[_Int, ...]
    expansion: tuple[str | int | bool, ...]
    """Triples of text, count and embeds; the count of a piece of text is -1."""


class _PatchForm(_ItemForm, kw_only=True, tag="patches"):
    grid: tuple[_Int, _Int, _Int]
    layout: tuple[_Side, _Side, Annotated[int, Meta(ge=1, le=64)]]
    arithmetic: _Int
    frames: np.ndarray


class _ProcessedForm(_ItemForm, kw_only=True, tag="processed"):
    parts: dict[str, dict[str, Any]]


class _ReferenceForm(_ItemForm, kw_only=True, tag="reference"):
    expected_length: _Int
    source: Any
    """The URL, or an array of the encoded image's bytes."""


class _LevelsForm(_Form):
    levels: np.ndarray
    held: tuple[_Int, ...]
    shape: _Shape
    arithmetic: _Int


class _FloatsForm(_Form):
    floats: np.ndarray


class _IntegersForm(_Form):
    integers: np.ndarray
    shape: _Shape
    dtype: _IntegerName


class _TableForm(_Form):
    version: int
    arithmetics: list[_ArithmeticForm]
    items: list[_PatchForm | _ProcessedForm | _ReferenceForm]


class _SidecarForm(_Form):
    table: dict[str, Any]
    counts: dict[str, _Int]
    ranges: np.ndarray
    spans: np.ndarray


F = TypeVar("F")


def items_to_wire(items: Sequence[MediaItem], *, share: bool = True, where: str = "items") -> dict[str, Any]:
    """Return items as plain data; what they have in common is written once.

    Args:
        items: `PatchItem`s, `ProcessedItem`s and `ReferenceItem`s.
        share: Whether arrays are wrapped for an encoder with a table.
        where: Path for errors.

    Raises:
        MediaError: An item is of another class, or its identity is not a hex digest of 32 bytes.
    """
    rows: dict[PixelArithmetic, int] = {}
    written = [_write_item(item, rows, share, f"{where}[{index}]") for index, item in enumerate(items)]
    arithmetics = [
        {"mean": list(one.mean), "std": list(one.std), "rescale": one.rescale, "backend": one.backend}
        for one in rows
    ]
    return {"version": WIRE_VERSION, "arithmetics": arithmetics, "items": written}


def _write_item(item: MediaItem, rows: dict[PixelArithmetic, int], share: bool, where: str) -> dict[str, Any]:
    try:
        identity = bytes.fromhex(item.identity)
    except (ValueError, TypeError):
        identity = b""
    if len(identity) != 32 or identity.hex() != item.identity:
        _refuse(
            "an identity is malformed", f"{where}.identity", "64 lower-case hex digits", repr(item.identity)
        )

    def shared(name: str, array: npt.NDArray[Any]) -> Any:
        return mmcodecs.Shared(array, identity + xxhash.xxh3_64_digest(name.encode())) if share else array

    def written_part(name: str, part: Compact) -> dict[str, Any]:
        values = shared(name, part.values)
        if isinstance(part, Floats):
            return {"floats": values}
        if isinstance(part, Integers):
            return {"integers": values, "shape": list(part.shape), "dtype": part.dtype.name}
        row = rows.setdefault(part.arithmetic, len(rows))
        return {"levels": values, "held": list(part.held), "shape": list(part.shape), "arithmetic": row}

    if isinstance(item, PatchItem):
        kind = "patches"
        own = {
            "layout": [item.layout.patch, item.layout.merge, item.layout.temporal],
            "arithmetic": rows.setdefault(item.arithmetic, len(rows)),
            "frames": shared("frames", item.frames),
        }
    elif isinstance(item, ProcessedItem):
        kind = "processed"
        own = {"parts": {name: written_part(name, part) for name, part in item.parts.items()}}
    elif isinstance(item, ReferenceItem):
        kind = "reference"
        source: Any = item.source
        if isinstance(source, bytes):
            source = shared("source", np.frombuffer(source, np.uint8))
        own = {"expected_length": item.expected_length, "source": source}
    else:
        _refuse(
            "items of this class have no form on the wire",
            where,
            "PatchItem, ProcessedItem, ReferenceItem",
            type(item).__name__,
        )
    expansion: list[Any] = []
    for piece in item.expansion:
        if isinstance(piece, Text):
            expansion += [piece.text, -1, False]
        else:
            expansion += [piece.token, piece.count, piece.embeds]
    return {
        "kind": kind,
        "modality": item.modality,
        "identity": identity,
        "size": list(item.size),
        "grid": list(item.grid),
        "expansion": expansion,
        **own,
    }


def items_from_wire(wire: Mapping[str, Any], *, where: str = "wire") -> list[MediaItem]:
    """Return the items of `items_to_wire`. Their arrays are read-only views of those given.

    Raises:
        MediaError: The form is of another version, or anything in it is missing, malformed or does not fit.
    """
    version = _converted(wire, dict[str, Any], where).get("version")
    if type(version) is not int or version != WIRE_VERSION:
        raise MediaError(
            "items of this version cannot be read",
            where=f"{where}.version",
            expected=str(WIRE_VERSION),
            got=repr(version)[:80],
            remedy="Write and read with the same release of mmrender",
        )
    table = _converted(wire, _TableForm, where)
    arithmetics = []
    for index, row in enumerate(table.arithmetics):
        numbers = (*row.mean, *row.std, row.rescale)
        if 0.0 in (*row.std, row.rescale) or not all(map(math.isfinite, numbers)):
            expected = "finite numbers, std and rescale other than 0"
            path = f"{where}.arithmetics[{index}]"
            _refuse("an arithmetic is malformed", path, expected, str(list(numbers)))
        arithmetics.append(PixelArithmetic(row.mean, row.std, row.rescale, row.backend))
    return [
        _read_item(form, arithmetics, f"{where}.items[{index}]") for index, form in enumerate(table.items)
    ]


def _read_item(
    form: _PatchForm | _ProcessedForm | _ReferenceForm, arithmetics: Sequence[PixelArithmetic], where: str
) -> MediaItem:
    expansion = _read_expansion(form.expansion, f"{where}.expansion")
    if isinstance(form, _PatchForm):
        return _read_patches(form, expansion, _row(arithmetics, form.arithmetic, where), where)
    identity, size = form.identity.hex(), form.size
    if isinstance(form, _ProcessedForm):
        parts = {
            name: _read_part(part, arithmetics, f"{where}.parts.{name}") for name, part in form.parts.items()
        }
        return ProcessedItem(identity, size, form.grid, expansion, parts, form.modality)
    source = form.source
    if not isinstance(source, str):
        # Copied: decoders of images take nothing but bytes.
        source = _array(source, "u", 1, f"{where}.source").tobytes()
    return ReferenceItem(
        identity, size, form.grid, expansion, form.expected_length, source, modality=form.modality
    )


def _read_expansion(flat: tuple[str | int | bool, ...], where: str) -> Expansion:
    pieces: list[Text | Repeat] = []
    for index in range(0, len(flat), 3):
        match flat[index : index + 3]:
            case (str(text), -1, bool()):
                pieces.append(Text(text))
            case (str(text), int(count), bool(embeds)) if 0 <= count < 2**31 and count is not True:
                pieces.append(Repeat(text, count, embeds))
            case other:
                _refuse(
                    "an expansion is malformed", f"{where}[{index}]", "text, count, embeds", str(list(other))
                )
    return tuple(pieces)


def _read_patches(
    form: _PatchForm, expansion: Expansion, arithmetic: PixelArithmetic, where: str
) -> PatchItem:
    frames = _array(form.frames, "u", 4, f"{where}.frames")
    time, height, width = form.grid
    layout = PatchLayout(*form.layout)
    image = form.modality == "image"
    shape = (1 if image else time * layout.temporal, 3, height * layout.patch, width * layout.patch)
    if frames.shape != shape or frames.dtype != np.uint8:
        _refuse("frames do not fit their grid", f"{where}.frames", f"uint8 {list(shape)}", _form_of(frames))
    merged = height % layout.merge == 0 == width % layout.merge
    if not merged or 0 in form.grid or (image and time != 1):
        expected = f"sides that are multiples of {layout.merge}, and one time step for an image"
        _refuse("a grid is malformed", f"{where}.grid", expected, str(list(form.grid)))
    features = time * height * width // layout.merge**2
    embeds = sum(piece.count for piece in expansion if isinstance(piece, Repeat) and piece.embeds)
    if embeds != features:
        _refuse("an expansion does not fit its grid", f"{where}.expansion", f"{features} tokens", str(embeds))
    return PatchItem(
        modality=form.modality,
        identity=form.identity.hex(),
        size=form.size,
        grid=form.grid,
        expansion=expansion,
        frames=frames,
        layout=layout,
        arithmetic=arithmetic,
    )


def _read_part(value: dict[str, Any], arithmetics: Sequence[PixelArithmetic], where: str) -> Compact:
    if "floats" in value:
        return Floats(_array(_converted(value, _FloatsForm, where).floats, "f", None, f"{where}.floats"))
    if "levels" in value:
        form = _converted(value, _LevelsForm, where)
        levels = _array(form.levels, "u", 4, f"{where}.levels")
        _check_volume(form.shape, where)
        whole = (len(form.held), *form.shape[-3:])
        if levels.dtype != np.uint8 or len(whole) != 4 or whole[1] != 3 or levels.shape != whole:
            expected = f"uint8 {list(whole)} of three channels"
            _refuse("levels do not fit their shape", f"{where}.levels", expected, _form_of(levels))
        tiles = math.prod(form.shape[:-3])
        if any(one >= other for one, other in pairwise((-1, *form.held, tiles))):
            expected = f"rising numbers below {tiles}"
            _refuse("tiles are misnumbered", f"{where}.held", expected, str(list(form.held)))
        return Levels(levels, form.held, form.shape, _row(arithmetics, form.arithmetic, where))
    integers = _converted(value, _IntegersForm, where)
    values = _array(integers.integers, "biu", None, f"{where}.integers")
    _check_volume(integers.shape, where)
    try:
        fits = np.broadcast_shapes(values.shape, integers.shape) == integers.shape
    except ValueError:
        fits = False
    if not fits:
        expected = f"an array that broadcasts to {list(integers.shape)}"
        _refuse("integers do not fit their shape", where, expected, _form_of(values))
    return Integers(values, integers.shape, np.dtype(integers.dtype))


def _row(arithmetics: Sequence[PixelArithmetic], row: int, where: str) -> PixelArithmetic:
    if row >= len(arithmetics):
        _refuse(
            "an arithmetic is missing", f"{where}.arithmetic", f"a row below {len(arithmetics)}", str(row)
        )
    return arithmetics[row]


def _check_volume(shape: tuple[int, ...], where: str) -> None:
    if math.prod(shape) > _MAX_VALUES:
        _refuse("a shape is too large", f"{where}.shape", f"at most {_MAX_VALUES} values", str(list(shape)))


def item_to_wire(item: MediaItem, *, share: bool = True) -> dict[str, Any]:
    """Return one item as plain data: `items_to_wire` of a single one.

    Raises:
        MediaError: As `items_to_wire`.
    """
    return items_to_wire([item], share=share)


def item_from_wire(wire: Mapping[str, Any]) -> MediaItem:
    """Return the item of `item_to_wire`.

    Raises:
        MediaError: As `items_from_wire`, or the wire form does not hold exactly one item.
    """
    items = items_from_wire(wire)
    if len(items) != 1:
        _refuse("this is not one item", "wire.items", "1 item", str(len(items)))
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
            _refuse("a placeholder range is malformed", path, expected, str([row, offset, length, count]))
        own = tuple((start, stop) for start, stop in spans[taken : taken + max(count, 0)].tolist())
        bounds = [0, *(bound for span in own for bound in span), length]
        if len(own) != max(count, 0) or any(a > b for a, b in pairwise(bounds)):
            expected = f"{count} spans within {length} tokens"
            _refuse("embed spans are malformed", path, expected, str(list(own)))
        taken += len(own)
        entries.append((row, PlaceholderRange(offset, length, None if count < 0 else own)))
    if taken != len(spans):
        _refuse("embed spans are left over", where, str(taken), str(len(spans)))
    return entries


def multi_modal_data_to_wire(sidecar: MultiModalData, *, share: bool = True) -> dict[str, Any]:
    """Return a sidecar as plain data, each distinct item once.

    Raises:
        MediaError: As `items_to_wire`.
        PlaceholderError: Hashes, ranges and items do not belong together.
    """
    rows: dict[tuple[str, type], int] = {}
    items: list[MediaItem] = []
    entries: list[tuple[int, PlaceholderRange]] = []
    counts = {modality: len(held) for modality, held in sidecar.mm_items.items()}
    order = list(counts)
    for span in sorted(sidecar.spans(), key=lambda span: order.index(span.modality)):
        row = rows.setdefault((span.item.identity, type(span.item)), len(items))
        if row == len(items):
            items.append(span.item)
        entries.append((row, span.range))
    ranges, spans = ranges_to_array(entries)
    table = items_to_wire(items, share=share, where="mm_items")
    return {"table": table, "counts": counts, "ranges": ranges, "spans": spans}


def multi_modal_data_from_wire(wire: Mapping[str, Any], *, where: str = "multi_modal_data") -> MultiModalData:
    """Return the sidecar of `multi_modal_data_to_wire`; an item in two places is one object.

    Raises:
        MediaError: As `items_from_wire`, or ranges do not fit the items.
    """
    form = _converted(wire, _SidecarForm, where)
    items = items_from_wire(form.table, where=f"{where}.table")
    rows = _array(form.ranges, "i", 2, f"{where}.ranges")
    spans = _array(form.spans, "i", 2, f"{where}.spans")
    for name, array, columns in (("ranges", rows, 4), ("spans", spans, 2)):
        if array.dtype != np.int32 or array.shape[1] != columns:
            expected = f"int32 [n, {columns}]"
            _refuse("an array of a sidecar is malformed", f"{where}.{name}", expected, _form_of(array))
    if sum(form.counts.values()) != len(rows):
        expected = f"the sum {len(rows)}"
        _refuse("counts do not add up", f"{where}.counts", expected, str(sum(form.counts.values())))
    entries = iter(ranges_from_array(rows, spans, len(items), f"{where}.ranges"))
    sidecar = MultiModalData()
    for modality, count in form.counts.items():
        own = [(found, items[row]) for row, found in (next(entries) for _ in range(count))]
        for _, item in own:
            if item.modality != modality:
                _refuse("an item is of another modality", f"{where}.counts", modality, repr(item.modality))
        sidecar = sidecar.merged(MultiModalData.of(own))
    return sidecar


_EXPECTED_GOT = re.compile(r"(?s)Expected (?P<expected>.*?)(?:, got (?P<got>.*))?")


def _converted(value: Any, form: type[F], where: str) -> F:
    """Read plain data as `form`, strictly; arrays stay as they are."""
    try:
        return msgspec.convert(value, form, dec_hook=_unshared)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        match = _EXPECTED_GOT.fullmatch(problem)
        raise MediaError(
            "an item is malformed" if match else f"an item is malformed ({problem})",
            where=where + path.removesuffix("`"),
            expected=match["expected"] if match else None,
            got=match["got"] if match else None,
        ) from None


def _unshared(kind: type, value: Any) -> Any:
    if isinstance(value, mmcodecs.Shared):
        value = value.value
    if isinstance(value, kind):
        return value
    raise ValueError(f"Expected `array`, got `{type(value).__name__}`")


def _array(value: Any, kinds: str, ndim: int | None, where: str) -> npt.NDArray[Any]:
    """Return an array as a read-only view.

    Args:
        value: The array, `Shared` or not.
        kinds: numpy's letters of the kinds of dtype allowed.
        ndim: Number of dimensions, None for any.
        where: Path for errors.
    """
    if isinstance(value, mmcodecs.Shared):
        value = value.value
    fits = isinstance(value, np.ndarray) and value.dtype.kind in kinds and value.flags.c_contiguous
    if not fits or not value.dtype.isnative or ndim not in (None, value.ndim):
        expected = f"a C-contiguous array of kind {kinds!r}" + (f" and {ndim} dimensions" if ndim else "")
        _refuse("an array of an item is malformed", where, expected, _form_of(value))
    view: npt.NDArray[Any] = value.view()
    view.flags.writeable = False
    return view


def _form_of(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _refuse(problem: str, where: str, expected: str, got: str) -> NoReturn:
    raise MediaError(problem, where=where, expected=expected, got=got[:200])
