"""Writing vLLM's multimodal items. The wire form is described in `vllm_items`."""

import operator
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from mmcodecs.errors import CodecError, LimitError, UnsupportedTypeError
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.strict_msgpack import ext_head
from mmcodecs.tensors import RawTensor, Source, of_array, of_raw, of_scalar, of_tensor
from mmcodecs.vllm_model import (
    RAW_VIEW,
    BatchedField,
    FieldElem,
    FlatField,
    NestedTensors,
    SharedField,
)

msgpack = msgspec.msgpack.Encoder().encode
# Writes a value in its shortest form, floats as float64.


def encode_mm_kwargs_item(item: Mapping[str, FieldElem], *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Write an item as vLLM's base64 text.

    Tensors that lie in C order are copied once, straight into the message. Tuples are written as lists, and
    arrays of the other byte order in little-endian.

    Raises:
        UnsupportedTypeError: A value or dtype that the format does not have.
        LimitError: The item is deeper or larger than `limits` allow.
    """
    return pybase64.b64encode_as_string(_message(item, limits).data)


def encode_mm_kwargs_item_as_bytes(
    item: Mapping[str, FieldElem], *, limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """Write an item as vLLM's base64 text, in ASCII bytes; see `encode_mm_kwargs_item`."""
    return pybase64.b64encode(_message(item, limits).data)


def _message(item: Mapping[str, FieldElem], limits: Limits) -> npt.NDArray[np.uint8]:
    writer = _Writer(limits)
    writer.head(_map_head(len(item)))
    given: Mapping[Any, Any] = item  # a caller without a type checker may pass anything
    for key, elem in given.items():
        if not isinstance(key, str) or not isinstance(elem, FieldElem):
            raise UnsupportedTypeError(
                "an item maps text to FieldElem", where="$", got=f"{key!r}: {type(elem).__name__}"[:80]
            )
        writer.head(_text(key) + b"\x82\xa4data")
        if elem.data is None:
            writer.head(b"\xc0")
        else:
            writer.nested(elem.data, f"$.{key}", 0)
        writer.head(b"\xa5field" + _field(elem.field, f"$.{key}.field"))
    return writer.assemble()


class _Writer:
    """Collects heads as bytes and tensors as they are, then lays them out once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: list[bytes | Source] = []
        self._size = 0

    def head(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)

    def nested(self, value: NestedTensors, where: str, depth: int) -> None:
        source = _source_of(value, where)
        if source is not None:
            self._tensor(source, where)
        elif isinstance(value, bool | int | float):
            try:
                self.head(msgpack(value))
            except OverflowError:
                raise UnsupportedTypeError("an integer needs more than 64 bits", where=where) from None
        elif isinstance(value, list | tuple):
            if depth >= self._limits.max_depth:
                raise LimitError("too many lists inside each other", where=where, expected=f"at most {depth}")
            self.head(_array_head(len(value)))
            for index, entry in enumerate(value):
                self.nested(entry, f"{where}[{index}]", depth + 1)
        else:
            raise UnsupportedTypeError(
                "vLLM's items do not hold such values",
                where=where,
                expected="a tensor, a number or a list of these",
                got=type(value).__name__,
            )

    def _tensor(self, source: Source, where: str) -> None:
        if not source.row.torch:
            raise UnsupportedTypeError(f"torch has no dtype {source.row.name}", where=where)
        if source.array.ndim > self._limits.max_ndim:
            raise LimitError("too many dimensions", where=where, expected=f"at most {self._limits.max_ndim}")
        head = b"\x93" + msgpack(source.row.name) + msgpack(source.array.shape)
        self.head(head + ext_head(RAW_VIEW, source.array.nbytes))
        self._parts.append(source)
        self._size += source.array.nbytes

    def assemble(self) -> npt.NDArray[np.uint8]:
        if self._size > self._limits.max_bytes:
            raise LimitError("the item is too large", expected=f"at most {self._limits.max_bytes:,} bytes")
        message = np.empty(self._size, np.uint8)
        target = message.data
        position = 0
        for part in self._parts:
            if isinstance(part, bytes):
                target[position : position + len(part)] = part
                position += len(part)
                continue
            array = part.array
            little = array.dtype.newbyteorder("<")
            np.copyto(np.ndarray(array.shape, little, buffer=message, offset=position), array)
            position += array.nbytes
        return message


def _source_of(value: object, where: str) -> Source | None:
    torch = sys.modules.get("torch")
    try:
        if isinstance(value, np.ndarray):
            return of_array(value)
        if isinstance(value, np.generic):
            return of_scalar(value)
        if isinstance(value, RawTensor):
            return of_raw(value)
        if torch is not None and isinstance(value, torch.Tensor):
            return of_tensor(value)
    except CodecError as error:
        raise error.at(where) from None
    return None


def _text(key: str) -> bytes:
    try:
        return msgpack(key)
    except UnicodeEncodeError:
        raise UnsupportedTypeError(
            "a key cannot be written as UTF-8", where="$", got=ascii(key)[:80]
        ) from None


def _field(field: object, where: str) -> bytes:
    if not isinstance(field, BatchedField | FlatField | SharedField):
        raise UnsupportedTypeError("this is no field", where=where, got=type(field).__name__)
    options: dict[str, object] = {"keep_on_cpu": bool(field.keep_on_cpu)}
    if isinstance(field, BatchedField):
        kind = "batched"
    elif isinstance(field, SharedField):
        kind = "shared"
        options["batch_size"] = _integer(field.batch_size, where)
    else:
        kind = "flat"
        options |= {"slices": _slices(field.slices, where), "dim": _integer(field.dim, where)}
    return msgpack((kind, options))


def _slices(slices: object, where: str) -> list[object]:
    if isinstance(slices, slice):
        bounds = (slices.start, slices.stop, slices.step)
        return [None if bound is None else _integer(bound, where) for bound in bounds]
    if isinstance(slices, list | tuple):
        return [_slices(part, where) for part in slices]
    raise UnsupportedTypeError(
        "slices must be slices or lists of them", where=where, got=type(slices).__name__
    )


def _integer(value: object, where: str) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is no integer raises here
    except TypeError:
        number = 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise UnsupportedTypeError("an integer of 64 bits is needed", where=where, got=repr(value)[:80])
    return number


def _map_head(count: int) -> bytes:
    if count < 16:
        return bytes((0x80 + count,))
    return b"\xde" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdf" + count.to_bytes(4, "big")


def _array_head(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 + count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")
