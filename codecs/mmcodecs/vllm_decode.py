"""Reading vLLM's multimodal items. The wire form is described in `vllm_items`."""

from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np

from mmcodecs.dtypes import by_name
from mmcodecs.errors import CodecError, DecodeError, LimitError
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.strict_base64 import decode_base64
from mmcodecs.strict_msgpack import Reader
from mmcodecs.tensors import TENSOR, Framework, restore
from mmcodecs.vllm_model import (
    RAW_VIEW,
    BatchedField,
    Field,
    FieldElem,
    FlatField,
    KwargsItem,
    NestedTensors,
    SharedField,
    Slices,
)

_PICKLES: Final = {1: "a pickle", 2: "a cloudpickle"}
_OUT_OF_BAND: Final = {
    "int": "an index of a buffer outside the message",
    "map": "a record of a tensor outside the message",
}


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
        framework: `"numpy"` gives arrays, and a `RawTensor` for bfloat16, float8 and other dtypes that numpy
            lacks; `"torch"` gives tensors.
        copy: Give each tensor memory of its own, aligned and writable. Otherwise numpy arrays are read-only
            views of the decoded message, which may be unaligned, and torch tensors are views where they are
            aligned.
        limits: `max_bytes`, `max_values`, `max_depth` and `max_ndim` apply.

    Raises:
        DecodeError: The text is no strict base64, or what it holds is no item; pickles and references to
            memory outside the message are among the things refused.
        LimitError: A limit is passed.
        FrameworkError: torch was asked for and is not installed.
    """
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise DecodeError("an item is base64 text", expected="str or bytes", got=type(data).__name__)
    if len(data) // 4 * 3 > limits.max_bytes:
        raise LimitError("the item is too large", expected=f"at most max_bytes={limits.max_bytes:,}")
    reader = Reader(decode_base64(data), limits)
    loader = _Loader(reader, framework, copy, limits)
    item: KwargsItem = {}
    for _ in range(reader.map_head("$")):
        key = reader.string("$")
        if key in item:
            raise DecodeError("a key stands twice", where="$", got=repr(key)[:80])
        item[key] = loader.elem(f"$.{key[:80]}")
    reader.finish()
    return item


class _Loader:
    def __init__(self, reader: Reader, framework: Framework, copy: bool, limits: Limits) -> None:
        self._reader = reader
        self._framework = framework
        self._copy = copy
        self._limits = limits

    def elem(self, where: str) -> FieldElem:
        entries = self._entries(where, {"data": self._data, "field": self._field}, {"data", "field"})
        return FieldElem(entries["data"], entries["field"])

    def _entries(
        self, where: str, readers: dict[str, Callable[[str], Any]], required: set[str]
    ) -> dict[str, Any]:
        """Read a map in which each key has its own reader, no other may stand, and `required` ones must."""
        found: dict[str, Any] = {}
        for _ in range(self._reader.map_head(where)):
            key = self._reader.string(where)
            if key not in readers or key in found:
                raise DecodeError(
                    "a key stands twice" if key in found else "an unknown key",
                    where=where,
                    expected=", ".join(readers),
                    got=repr(key)[:80],
                )
            found[key] = readers[key](f"{where}.{key}")
        if not required <= found.keys():
            raise DecodeError(
                "a key is missing", where=where, expected=", ".join(sorted(required - found.keys()))
            )
        return found

    def _data(self, where: str) -> NestedTensors | None:
        return None if self._reader.nil(where) else self._nested(where, 0)

    def _nested(self, where: str, depth: int) -> NestedTensors:
        kind = self._reader.peek(where)
        if kind in ("int", "float", "bool"):
            return self._reader.number(where)
        if kind == "ext":
            self._refuse_extension(self._reader.extension(where)[0], where)
        if kind != "array":
            self._reader.wrong(where, "a tensor, a number or an array of these")
        count = self._reader.array_head(where)
        if count and self._reader.peek(where) == "str":
            return self._tensor(count, where)
        if depth >= self._limits.max_depth:
            raise LimitError("too many arrays inside each other", where=where, expected=f"at most {depth}")
        return [self._nested(f"{where}[{index}]", depth + 1) for index in range(count)]

    def _tensor(self, count: int, where: str) -> Any:
        if count != 3:
            raise DecodeError(
                "a tensor has three parts", where=where, expected="dtype, shape, Ext", got=str(count)
            )
        try:
            row = by_name(self._reader.string(where))
        except CodecError as error:
            raise error.at(where) from None
        shape = self._shape(where)
        data = self._elements(where)
        # Python integers, so that no product overflows into the right length.
        if prod(shape) * row.itemsize != len(data):
            raise DecodeError(
                "shape and length differ",
                where=where,
                expected=f"{prod(shape) * row.itemsize} bytes for {row.name} {list(shape)}",
                got=str(len(data)),
            )
        dtype = np.dtype("<" + row.carrier)
        try:
            return restore(row, TENSOR, dtype, shape, data, framework=self._framework, copy=self._copy)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, CodecError):
                raise error.at(where) from None
            # An empty array may announce other dimensions beyond all bounds.
            raise DecodeError("no array can have this shape", where=where, got=str(list(shape))) from error

    def _shape(self, where: str) -> tuple[int, ...]:
        ndim = self._reader.array_head(where)
        if ndim > self._limits.max_ndim:
            raise LimitError(
                "too many dimensions", where=where, expected=f"at most max_ndim={self._limits.max_ndim}"
            )
        shape = tuple(self._reader.integer(where) for _ in range(ndim))
        if any(not 0 <= size < 1 << 63 for size in shape):
            raise DecodeError("a dimension is out of range", where=where, got=str(list(shape)))
        return shape

    def _elements(self, where: str) -> memoryview:
        kind = self._reader.peek(where)
        if kind in _OUT_OF_BAND:
            raise DecodeError(
                f"{_OUT_OF_BAND[kind]} stands in place of a tensor's elements",
                where=where,
                expected=f"Ext({RAW_VIEW}, elements)",
                remedy="Encode the item with all its tensors inside",
            )
        code, data = self._reader.extension(where)
        if code != RAW_VIEW:
            self._refuse_extension(code, where)
        return data

    def _refuse_extension(self, code: int, where: str) -> None:
        raise DecodeError(
            f"{_PICKLES[code]} is refused: reading one runs code"
            if code in _PICKLES
            else "an unexpected extension",
            where=where,
            expected=f"Ext({RAW_VIEW}, elements) in a tensor",
            got=f"Ext code {code}",
        )

    def _field(self, where: str) -> Field:
        count = self._reader.array_head(where)
        if count != 2:
            raise DecodeError("a field has two parts", where=where, expected="kind, options", got=str(count))
        kind = self._reader.string(where)
        keep: dict[str, Callable[[str], Any]] = {"keep_on_cpu": self._reader.boolean}
        if kind == "batched":
            return BatchedField(**self._entries(where, keep, set()))
        if kind == "flat":
            options = keep | {"slices": self._slices, "dim": self._reader.integer}
            return FlatField(**self._entries(where, options, {"slices"}))
        if kind == "shared":
            return SharedField(
                **self._entries(where, keep | {"batch_size": self._reader.integer}, {"batch_size"})
            )
        raise DecodeError(
            "an unknown kind of field", where=where, expected="batched, flat, shared", got=repr(kind)[:80]
        )

    def _slices(self, where: str, depth: int = 0) -> Slices:
        count = self._reader.array_head(where)
        if count == 0 or self._reader.peek(where) == "array":
            if depth >= self._limits.max_depth:
                raise LimitError(
                    "too many arrays inside each other", where=where, expected=f"at most {depth}"
                )
            return tuple(self._slices(where, depth + 1) for _ in range(count))
        if count != 3:
            raise DecodeError(
                "a slice has three bounds", where=where, expected="start, stop, step", got=str(count)
            )
        start, stop, step = (
            None if self._reader.nil(where) else self._reader.integer(where) for _ in range(3)
        )
        return slice(start, stop, step)
