"""The plain form of each class of media item, and back.

What many items have in common, their pixel arithmetic, is written once into a table and named by its row. An
item's arrays are wrapped as `mmcodecs.Shared` under keys made of its identity, so an encoder with a table
sends each of them once over a connection.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np

from mmrender.errors import MediaError
from mmrender.media.item_fields import WireFields, checked_integer, wire_error
from mmrender.media.item_plain import (
    COMMON,
    ArithmeticTable,
    Plain,
    arithmetic_of,
    keyed,
    num_embeds,
    read_expansion,
    read_modality,
    read_size,
)
from mmrender.media.item_reference import ReferenceItem
from mmrender.media.processors.arithmetic import PixelArithmetic
from mmrender.media.processors.compact import Compact, Floats, Integers, Levels
from mmrender.media.processors.huggingface import ProcessedItem
from mmrender.media.processors.patches import PatchItem, PatchLayout
from mmrender.spans import MediaItem

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
        remedy="Describe the class to mmrender.media.item_forms.register_item_form",
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
