"""Media items as plain data for the codec, and back without copying an array.

```python
message = mmcodecs.encode(item_to_wire(item))
item_from_wire(mmcodecs.decode(message))  # tensors equal to the last bit; pixels are views of `message`
```

The plain form is `{"version": 2, "items": [...]}`: for each item its `kind` and the fields of its class, with
dicts for nested classes and lists for tuples. Arrays are wrapped as `mmcodecs.Shared` unless `share=False`,
under keys made of the item's identity, so `mmcodecs.Encoder` sends the pixels of an item once over a
connection. Readers accept both forms. Data that does not fit the classes, or contradicts itself, is a
`MediaError` with a path.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, NoReturn, get_args, get_origin

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta

import mmcodecs
from mmcodecs.structs import ready
from mmrender.errors import MediaError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import Item, ProcessedItem
from mmrender.media.levels import Compact, Integers, Levels, Padded, PixelArithmetic
from mmrender.media.processors.patches import PatchItem
from mmrender.sidecar import MediaItem, feature_count

WIRE_VERSION: Final = 2
_MAX_VALUES: Final = 1 << 28
"""Maximum number of values of an expanded tensor, however few bytes encode it."""
_INTEGERS: Final = ("bool", *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")))
_STRUCTS: Final = (Item, *get_args(Compact))
_EXPECTED_GOT = re.compile(r"(?s)Expected (?P<expected>.*?)(?:, got (?P<got>.*))?")


class _Reference(ReferenceItem, frozen=True, eq=False, kw_only=True, tag="reference"):
    source: Any
    """The URL, or an array of the encoded image's bytes."""


class _Table(msgspec.Struct):
    version: Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
    items: list[PatchItem | ProcessedItem | _Reference]


def items_to_wire(items: Sequence[MediaItem], *, share: bool = True) -> dict[str, Any]:
    """Return items as plain data, arrays wrapped for an encoder with a table if `share`.

    Raises:
        MediaError: The class of an item is not one of mmrender's.
    """
    for index, item in enumerate(items):
        if not isinstance(item, Item):
            problem, got = "items of this class have no form on the wire", type(item).__name__
            _refuse(problem, f"items[{index}]", "PatchItem, ProcessedItem, ReferenceItem", got)
    return {
        "version": WIRE_VERSION,
        "items": [_plain(item, item.identity if share else None, "") for item in items],
    }


def _plain(value: Any, share: str | None, name: str) -> Any:
    """Return the plain form of the value at `name` in an item; `share` and `name` make the keys of arrays."""
    if isinstance(value, _STRUCTS):
        config, plain = value.__struct_config__, {}
        for field in value.__struct_fields__:
            plain[field] = _plain(getattr(value, field), share, f"{name}.{field}")
        return {config.tag_field: config.tag, **plain}
    if isinstance(value, Mapping):
        return {key: _plain(one, share, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        return msgspec.to_builtins(value, enc_hook=str)  # str: of the dtype of integers
    return value if share is None else mmcodecs.Shared(value, blake3(f"{share} {name}".encode()).digest())


def items_from_wire(wire: Mapping[str, Any], *, where: str = "wire") -> list[MediaItem]:
    """Return the items of `items_to_wire`. Their arrays are read-only views of the arrays in `wire`.

    Raises:
        MediaError: The form has another version, or anything in it is missing, malformed or inconsistent.
    """
    try:
        table = msgspec.convert(wire, ready(_Table), dec_hook=_decoded)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        match = _EXPECTED_GOT.fullmatch(problem)
        version = path == ".version`" and match
        raise MediaError(
            "an item is malformed" if match else f"an item is malformed ({problem})",
            where=where + path.removesuffix("`"),
            expected=match["expected"] if match else None,
            got=match["got"] if match else None,
            remedy="Write and read with the same release of mmrender" if version else None,
        ) from None
    items: list[MediaItem] = []
    for index, item in enumerate(table.items):
        path = f"{where}.items[{index}]"
        if isinstance(item, _Reference):
            items.append(_reference(item, f"{path}.source"))
            continue
        if isinstance(item, PatchItem):
            _check_patches(item, path)
        else:
            for name, part in item.parts.items():
                _check_part(part, f"{path}.parts.{name}")
        items.append(item)
    return items


def _reference(item: _Reference, where: str) -> ReferenceItem:
    source = item.source.value if isinstance(item.source, mmcodecs.Shared) else item.source
    if isinstance(source, np.ndarray) and source.dtype == np.uint8:
        source = source.tobytes()  # copied: decoders of images need bytes
    if not isinstance(source, str | bytes):
        _refuse("a source is malformed", where, "a URL or uint8 [n]", _form_of(source))
    return ReferenceItem.of(item, source, item.expected_length)


def _decoded(kind: Any, value: Any) -> Any:
    """Read a dtype of integers, or an array as a read-only view."""
    if get_origin(kind) is np.dtype:
        if value not in _INTEGERS:
            raise ValueError(f"Expected a dtype of integers, got {value!r:.80}")
        return np.dtype(value)
    array = value.value if isinstance(value, mmcodecs.Shared) else value
    (dtype,) = get_args(get_args(kind)[1])
    if not isinstance(array, np.ndarray) or (dtype is not Any and array.dtype != dtype):
        expected = "an array" if dtype is Any else f"an array of {dtype.__name__}"
        raise ValueError(f"Expected {expected}, got {_form_of(array)}")
    if not array.flags.c_contiguous or not array.dtype.isnative or array.dtype.kind not in "biuf":
        raise ValueError(f"Expected a C-contiguous array of native numbers, got {_form_of(array)}")
    view = array.view()
    view.flags.writeable = False
    return view


def _check_patches(item: PatchItem, where: str) -> None:
    (time, height, width), layout, image = item.grid, item.layout, item.modality == "image"
    merged = height % layout.merge == 0 == width % layout.merge
    if not merged or 0 in item.grid or (image and time != 1):
        expected = f"sides that are multiples of {layout.merge}, and one time step for an image"
        _refuse("a grid is malformed", f"{where}.grid", expected, str(list(item.grid)))
    count = 1 if image else max(len(item.times), 1)
    if not image and -(-count // layout.temporal) != time:
        expected = f"{time * layout.temporal} times, or fewer by less than {layout.temporal}"
        _refuse("the times of a video do not fit its grid", f"{where}.times", expected, str(len(item.times)))
    shape = (count, 3, height * layout.patch, width * layout.patch)
    if item.frames.shape != shape:
        expected = f"uint8 {list(shape)}"
        _refuse("frames do not fit their grid", f"{where}.frames", expected, _form_of(item.frames))
    features = time * height * width // layout.merge**2
    if (embeds := feature_count(item.expansion)) != features:
        _refuse("an expansion does not fit its grid", f"{where}.expansion", f"{features} tokens", str(embeds))
    _check_arithmetic(item.arithmetic, f"{where}.arithmetic")


def _check_part(part: Compact, where: str) -> None:
    shape, values, kinds = part.shape, part.values, "u"
    if isinstance(part, Padded) and part.axis >= values.ndim:
        _refuse("an axis is missing", f"{where}.axis", f"below {values.ndim}", str(part.axis))
    if math.prod(shape) > _MAX_VALUES:
        _refuse("a shape is too large", f"{where}.shape", f"at most {_MAX_VALUES} values", str(list(shape)))
    if isinstance(part, Levels):
        _check_arithmetic(part.arithmetic, f"{where}.arithmetic")
        expected = f"uint8 {[len(part.held), *shape[-3:]]} of three channels"
        fits = shape[-3:-2] == (3,) and values.shape == (len(part.held), *shape[-3:])
        tiles = math.prod(shape[:-3])
        if any(one >= other for one, other in pairwise((-1, *part.held, tiles))):
            got = str(list(part.held))
            _refuse("tiles are misnumbered", f"{where}.held", f"rising numbers below {tiles}", got)
    elif isinstance(part, Integers):
        kinds, expected = "biu", f"integers that broadcast to {list(shape)}"
        try:
            fits = np.broadcast_shapes(values.shape, shape) == shape
        except ValueError:
            fits = False
    elif isinstance(part, Padded):
        kinds, expected = "f", f"fewer than {part.length} rows along axis {part.axis}, and a finite fill"
        fits = values.shape[part.axis] < part.length and math.isfinite(part.fill)
    else:
        kinds, expected, fits = "f", "floating-point values", True
    if not fits or values.dtype.kind not in kinds:
        _refuse("values do not fit their form", f"{where}.values", expected, _form_of(values))


def _check_arithmetic(arithmetic: PixelArithmetic, where: str) -> None:
    numbers = (*arithmetic.mean, *arithmetic.std, arithmetic.rescale)
    if 0.0 in (*arithmetic.std, arithmetic.rescale) or not all(map(math.isfinite, numbers)):
        expected = "finite numbers, std and rescale other than 0"
        _refuse("an arithmetic is malformed", where, expected, str(list(numbers)))


def item_to_wire(item: MediaItem, *, share: bool = True) -> dict[str, Any]:
    """Return one item as plain data. Arguments and errors as for `items_to_wire`."""
    return items_to_wire([item], share=share)


def item_from_wire(wire: Mapping[str, Any]) -> MediaItem:
    """Return the item of `item_to_wire`. Raises as `items_from_wire` does, and unless there is one item."""
    items = items_from_wire(wire)
    if len(items) != 1:
        _refuse("the number of items is wrong", "wire.items", "1 item", str(len(items)))
    return items[0]


def _form_of(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _refuse(problem: str, where: str, expected: str, got: str) -> NoReturn:
    raise MediaError(problem, where=where, expected=expected, got=got[:200])
