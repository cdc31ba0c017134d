"""vLLM's multimodal item on the wire, without importing vLLM.

An item holds the processor's output for one image, video or sound: tensors by keyword, and for each how the
tensors of several items are joined. vLLM 0.20 to 0.32 write it as

    base64(msgpack({key: {"data": NT, "field": [kind, options]}}))

in standard padded base64, where

- NT is a tensor, an integer, a float, a boolean, or an array of NT. At the top also nil, for data that the
  receiver has cached.
- a tensor is `[dtype, [dimension, ...], Ext(3, elements)]`, the dtype by torch's name (`"bfloat16"`), the
  elements little-endian in C order.
- the kinds are `["batched", {keep_on_cpu}]`, `["flat", {keep_on_cpu, slices, dim}]` and
  `["shared", {keep_on_cpu, batch_size}]`. Readers take a missing `keep_on_cpu` or `dim` as false or 0.
- `slices` are of the whole batch that the item was cut from: one `[start, stop, step]`, or an array of these
per
  item.

Extension codes 1 and 2 are pickles, and an integer or map in place of the `Ext` refers to memory outside the
message. Both are refused. The bytes equal vLLM's own, up to the order of the keys.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pybase64
from msgspec.msgpack import Ext

from mmcodecs.arrays import (
    Dimension,
    Framework,
    RawTensor,
    Source,
    describe,
    dtype_named,
    restore,
)
from mmcodecs.errors import CodecError, DecodeError, UnsupportedTypeError, limit_exceeded
from mmcodecs.structs import ready
from mmcodecs.values import DEFAULT_LIMITS, Limits, pack, unsupported

RAW_VIEW: Final = 3
"""msgpack extension code of a tensor's elements."""

_WHOLE_TEXT: Final = 1 << 25
_PIECE: Final = 1 << 18

Slices: TypeAlias = slice | tuple["Slices", ...]
NestedTensors: TypeAlias = Any
"""A numpy array, a torch tensor, a `RawTensor`, a number, a bool, or a list of these, nested."""


class BatchedField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The items' data is stacked along a new first dimension."""

    keep_on_cpu: bool = False


class FlatField(msgspec.Struct, frozen=True):
    """The items' data is concatenated along `dim`. `slices` are each item's parts of the whole."""

    slices: Slices
    dim: int = 0
    keep_on_cpu: bool = False


class SharedField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All `batch_size` items hold the same data."""

    batch_size: int
    keep_on_cpu: bool = False


Field: TypeAlias = BatchedField | FlatField | SharedField
_KINDS: Final[dict[type, str]] = {BatchedField: "batched", FlatField: "flat", SharedField: "shared"}


class FieldElem(msgspec.Struct, frozen=True, eq=False):
    """One keyword of an item: its data, `None` if the receiver has it already, and how it is joined."""

    data: NestedTensors | None
    field: Field


KwargsItem: TypeAlias = dict[str, FieldElem]


def encode_mm_kwargs_item(item: Mapping[str, FieldElem], *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Write an item as vLLM's base64 text, all arrays in little-endian.

    Raises:
        UnsupportedTypeError: The format lacks a value's type or dtype.
        LimitError: The item is deeper or larger than `limits` allow.
    """
    return pybase64.b64encode_as_string(_message(item, limits).data)


def encode_mm_kwargs_item_as_bytes(
    item: Mapping[str, FieldElem], *, limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """Write an item as vLLM's base64 text, in ASCII bytes, as `encode_mm_kwargs_item`."""
    return pybase64.b64encode(_message(item, limits).data)


def _message(item: Mapping[str, FieldElem], limits: Limits) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Write the msgpack of an item, each tensor copied once.

    msgspec writes the message with a random marker in place of each tensor's elements, and numpy, which takes
    large memory in huge pages, puts it together: a buffer that grows costs several times the copy.
    """
    tree = {}
    tensors = _Tensors(os.urandom(16), [])
    given: Mapping[Any, Any] = item  # a caller without a type checker may pass anything
    for key, elem in given.items():
        if not isinstance(key, str) or not isinstance(elem, FieldElem):
            got = f"{key!r}: {type(elem).__name__}"[:80]
            raise UnsupportedTypeError("an item maps text to FieldElem", where="$", got=got)
        data = None if elem.data is None else _nested(elem.data, tensors, f"$.{key}", limits)
        kind = _KINDS.get(type(elem.field))
        if kind is None:
            raise unsupported(elem.field).at(f"$.{key}.field")
        options = {"keep_on_cpu": elem.field.keep_on_cpu} | msgspec.structs.asdict(elem.field)
        if isinstance(elem.field, FlatField):
            options["slices"] = _bounds(elem.field.slices)
        tree[key] = {"data": data, "field": (kind, options)}
    heads = pack(tree).split(tensors.marker)
    nbytes = sum(map(len, heads)) + sum(source.array.nbytes for source in tensors.sources)
    if nbytes > limits.max_bytes:
        raise limit_exceeded("max_bytes", limits.max_bytes, nbytes)
    message = np.empty(nbytes, np.uint8)
    end = len(heads[0])
    message[:end] = np.frombuffer(heads[0], np.uint8)
    for source, head in zip(tensors.sources, heads[1:], strict=True):
        start, end = end, end + source.array.nbytes
        little = source.array.dtype.newbyteorder("<")
        np.copyto(np.ndarray(source.array.shape, little, buffer=message, offset=start), source.array)
        start, end = end, end + len(head)
        message[start:end] = np.frombuffer(head, np.uint8)
    return message


class _Tensors(NamedTuple):
    """The tensors of an item in order, and the marker of their places in the message."""

    marker: bytes
    sources: list[Source]


def _nested(value: NestedTensors, tensors: _Tensors, where: str, limits: Limits, depth: int = 0) -> Any:
    """Return the msgpack form of a tensor, a number, or a list of these."""
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, list | tuple):
        if depth >= limits.max_depth:
            raise limit_exceeded("max_depth", limits.max_depth).at(where)
        return [_nested(entry, tensors, f"{where}[{i}]", limits, depth + 1) for i, entry in enumerate(value)]
    try:
        source = describe(value)
    except CodecError as error:
        raise error.at(where) from None
    if source is None:
        raise unsupported(value).at(where)
    if source.array.ndim > limits.max_ndim:
        raise limit_exceeded("max_ndim", limits.max_ndim, source.array.ndim).at(where)
    nbytes = source.array.nbytes
    # The head of an extension: its length, in the shortest of msgpack's forms, and its code.
    if nbytes in (1, 2, 4, 8, 16):
        head = bytes((0xD3 + nbytes.bit_length(),))
    else:
        width = 1 if nbytes < 1 << 8 else 2 if nbytes < 1 << 16 else 4
        head = bytes((0xC6 + width.bit_length(),)) + nbytes.to_bytes(width, "big")
    tensors.sources.append(source)
    return source.row.name, source.array.shape, msgspec.Raw(head + bytes((RAW_VIEW,)) + tensors.marker)


def _bounds(slices: Slices) -> list[Any]:
    if isinstance(slices, slice):
        return [slices.start, slices.stop, slices.step]
    return [_bounds(part) for part in slices]


class _Elem(msgspec.Struct, forbid_unknown_fields=True):
    data: msgspec.Raw
    field: tuple[str, msgspec.Raw]


class _FlatOptions(msgspec.Struct, forbid_unknown_fields=True):
    slices: list[Any]
    dim: int = 0
    keep_on_cpu: bool = False


# Types of the options of each kind of field.
_OPTIONS: Final[dict[str, Any]] = {"batched": BatchedField, "flat": _FlatOptions, "shared": SharedField}


def decode_mm_kwargs_item(
    data: str | bytes | bytearray | memoryview,
    *,
    framework: Framework = "numpy",
    copy: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> KwargsItem:
    """Read an item from vLLM's base64 text.

    Args:
        data: The text, as `str` or as ASCII bytes.
        framework: `"numpy"` returns arrays, and a `RawTensor` for bfloat16, float8 and other dtypes that
            numpy lacks. `"torch"` returns tensors.
        copy: Copy each tensor to memory of its own, aligned and writable. Otherwise numpy arrays are
            read-only views of the decoded message, which may be unaligned, and torch tensors are views if
            aligned.
        limits: `max_bytes`, `max_values`, `max_depth`, `max_ndim`. `max_head_bytes` for a field's options.

    Raises:
        DecodeError: The text is not base64, or does not hold an item. Pickles and references to memory
            outside the message are refused, too.
        LimitError: A bound is exceeded.
        MissingPackageError: torch was asked for and is not installed.
    """
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise DecodeError("an item is base64 text", expected="str or bytes", got=type(data).__name__)
    if len(data) // 4 * 3 > limits.max_bytes:
        raise limit_exceeded("max_bytes", limits.max_bytes, len(data) // 4 * 3)
    try:
        message = _decoded_base64(data if isinstance(data, str) else memoryview(data).cast("B"))
    except (binascii.Error, ValueError, TypeError, BufferError) as error:
        raise DecodeError(f"not standard padded base64: {error}") from error
    reader = _ItemReader(message, framework, limits, copy=copy)
    entries = _converted(message, dict[str, _Elem], "$")
    return {
        key: FieldElem(
            reader.data(elem.data, f"$.{key[:80]}.data"), reader.field(elem.field, f"$.{key[:80]}.field")
        )
        for key, elem in entries.items()
    }


def _decoded_base64(text: str | memoryview) -> memoryview:
    """Decode base64. Long text in pieces into huge pages, since small ones cost several times as much."""
    if len(text) <= _WHOLE_TEXT:
        return memoryview(pybase64.b64decode_as_bytearray(text, validate=True))
    message = np.empty(len(text) // 4 * 3, np.uint8).data
    end = 0
    for start in range(0, len(text), _PIECE):
        piece = pybase64.b64decode_as_bytearray(text[start : start + _PIECE], validate=True)
        if len(piece) != _PIECE // 4 * 3 and start + _PIECE < len(text):
            raise ValueError("padding before the end")
        message[end : end + len(piece)] = piece
        end += len(piece)
    return message[:end]


class _ItemReader:
    """Read the parts of one decoded message.

    `Raw` parts cost nothing until they are read, and the number of elements is checked before an array of
    them is: ten megabytes of empty arrays take ten megabytes of memory.
    """

    def __init__(self, message: memoryview, framework: Framework, limits: Limits, *, copy: bool) -> None:
        self._message = message
        self._address = np.frombuffer(message, np.uint8).ctypes.data
        self._framework: Framework = framework
        self._limits = limits
        self._copy = copy
        self._budget = limits.max_values

    def data(self, raw: msgspec.Raw, where: str, depth: int = 0) -> NestedTensors | None:
        view = memoryview(raw)
        count = _array_length(view)
        if count is None:
            value = _converted(view, bool | int | float | None, where)
            if value is None and depth:
                raise DecodeError("nil can only be a whole item", where=where)
            return value
        self._budget -= count + 1
        if self._budget < 0:
            raise limit_exceeded("max_values", self._limits.max_values).at(where)
        parts = _converted(view, list[msgspec.Raw], where)
        first = memoryview(parts[0])[0] if parts else 0
        if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB:  # a text, which names the dtype of a tensor
            return self._tensor(parts, where)
        if depth >= self._limits.max_depth:
            raise limit_exceeded("max_depth", self._limits.max_depth).at(where)
        return [self.data(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(parts)]

    def _tensor(self, parts: list[msgspec.Raw], where: str) -> Any:
        if len(parts) != 3:
            raise DecodeError(
                "a tensor has three parts", where=where, expected="dtype, shape, Ext", got=str(len(parts))
            )
        ndim = _array_length(memoryview(parts[1])) or 0
        if ndim > self._limits.max_ndim:
            raise limit_exceeded("max_ndim", self._limits.max_ndim, ndim).at(where)
        name, shape = _converted(parts[0], str, where), tuple(_converted(parts[1], list[Dimension], where))
        ext = _converted(parts[2], Any, where)
        if not isinstance(ext, Ext) or ext.code != RAW_VIEW:
            raise DecodeError(
                "not a tensor's elements. Pickles and references to memory outside the message are refused",
                where=where,
                expected=f"Ext({RAW_VIEW}, elements)",
                got=f"Ext code {ext.code}" if isinstance(ext, Ext) else type(ext).__name__,
                remedy="Encode the item with all its tensors inside",
            )
        # A view of Raw is read-only. The message is our own, so that torch tensors can be views of it.
        elements = np.frombuffer(ext.data, np.uint8)  # type: ignore[call-overload]
        start = elements.ctypes.data - self._address if elements.size else 0
        data = self._message[start : start + elements.size]
        try:
            row = dtype_named(name)
            dtype = np.dtype("<" + row.carrier)
            return restore(row, dtype, shape, data, framework=self._framework, copy=self._copy)
        except CodecError as error:
            raise error.at(where) from error.__cause__

    def field(self, raw: tuple[str, msgspec.Raw], where: str) -> Field:
        kind, options = raw
        if kind not in _OPTIONS:
            expected = ", ".join(_OPTIONS)
            raise DecodeError("an unknown kind of field", where=where, expected=expected, got=repr(kind)[:80])
        nbytes = memoryview(options).nbytes
        if nbytes > self._limits.max_head_bytes:
            raise limit_exceeded("max_head_bytes", self._limits.max_head_bytes, nbytes).at(where)
        field: Field | _FlatOptions = _converted(options, _OPTIONS[kind], where)
        if isinstance(field, _FlatOptions):
            return FlatField(self._slices(field.slices, where, 0), field.dim, field.keep_on_cpu)
        return field

    def _slices(self, bounds: list[Any], where: str, depth: int) -> Slices:
        if depth >= self._limits.max_depth:
            raise limit_exceeded("max_depth", self._limits.max_depth).at(where)
        if all(type(part) is list for part in bounds):
            return tuple(self._slices(part, where, depth + 1) for part in bounds)
        if len(bounds) != 3 or any(bound is not None and type(bound) is not int for bound in bounds):
            raise DecodeError("not a slice", where=where, expected="start, stop, step", got=repr(bounds)[:80])
        return slice(*bounds)


def _converted(data: Any, kind: Any, where: str) -> Any:
    """Decode msgpack as a type, extensions as `Ext` over the same memory."""
    try:
        return msgspec.msgpack.decode(data, type=ready(kind), ext_hook=Ext)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise DecodeError(f"malformed item: {error}", where=where) from error


def _array_length(view: memoryview) -> int | None:
    """Read the length of a msgpack array from its head. None for a value of another type."""
    first = view[0]
    if 0x90 <= first <= 0x9F:
        return first & 15
    return int.from_bytes(view[1 : 3 if first == 0xDC else 5], "big") if first in (0xDC, 0xDD) else None


def join_items(items: Sequence[Mapping[str, FieldElem]]) -> dict[str, Any]:
    """Join the items of one modality to the model's keyword arguments, as vLLM's engine does.

    Batched tensors of one shape are stacked, of several shapes listed. Flat tensors are concatenated along
    their dimension. Shared tensors are taken from the first item.

    Raises:
        DecodeError: The items differ in their fields, lack data, or cannot be concatenated.
    """
    joined = {}
    for key in items[0] if items else ():
        kind = type(items[0][key].field)
        for index, item in enumerate(items):
            if item.keys() != items[0].keys() or type(item[key].field) is not kind or item[key].data is None:
                raise DecodeError(
                    "each item of a batch must have data for the same fields", where=f"$[{index}].{key}"
                )
        try:
            joined[key] = _join(items[0][key].field, [item[key].data for item in items])
        except (ValueError, RuntimeError, TypeError) as error:
            raise DecodeError("the items cannot be joined", where=f"$.{key}", got=str(error)) from error
    return joined


def _join(field: Field, data: list[Any]) -> Any:
    if isinstance(field, SharedField):
        return data[0]
    stacked = isinstance(field, BatchedField)
    if not all(hasattr(entry, "shape") for entry in data):
        return data if stacked else [row for entry in data for row in entry]
    if stacked and len({(tuple(entry.shape), str(entry.dtype)) for entry in data}) > 1:
        return data
    dim = field.dim if isinstance(field, FlatField) else 0
    if len(dtypes := {str(entry.dtype) for entry in data}) != 1:
        raise ValueError(f"dtypes differ: {', '.join(sorted(dtypes))}")
    if isinstance(data[0], RawTensor):
        return RawTensor(data[0].dtype, _join(field, [entry.bits for entry in data]))
    if len(data) == 1:  # a view, where joining would copy
        return data[0][None] if stacked else data[0]
    if isinstance(data[0], np.ndarray):
        return np.stack(data) if stacked else np.concatenate(data, axis=dim)
    import torch

    return torch.stack(data) if stacked else torch.cat(data, dim=dim)
