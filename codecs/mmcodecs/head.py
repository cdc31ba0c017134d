"""Writing a body: the value becomes msgpack, its arrays and long byte strings become frames.

One walk over the value. It visits containers, and of a long list of scalars no element (`packing.py`). What
the wire cannot keep raises with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from mmcodecs.describe import array_describer, unsupported, utf8
from mmcodecs.errors import CodecError, LimitError, UnsupportedTypeError
from mmcodecs.extensions import (
    ARRAY_RECORD,
    BIG_INT,
    DATA,
    FROZENSET,
    LIST,
    MAP,
    SET,
    TUPLE,
    write_int,
    write_scalar,
)
from mmcodecs.frame import head_room
from mmcodecs.keys import check_keys
from mmcodecs.limits import Limits
from mmcodecs.packing import FRAMED_BYTES, pack
from mmcodecs.payloads import Payload, Payloads, inline
from mmcodecs.scan import CONTAINER_COST, LEAF_COST
from mmcodecs.shared import Shared, SharedTable
from mmcodecs.tensors import RawTensor, of_array, of_raw, of_scalar
from mmcodecs.typed import neutral_form

_ENCODER = msgspec.msgpack.Encoder()
_ENCODE = _ENCODER.encode
_PLAIN = frozenset((type(None), bool, int, float))
_BYTES, _BYTEARRAY, _MEMORYVIEW, _TEXT = range(4)


class BodyWriter:
    """Write one value.

    Args:
        limits: Bounds to stay within.
        table: The table of shared arrays of this connection, if there is one.
        share_from: Hash and share arrays from this many bytes on; None for declared keys only.
    """

    def __init__(
        self, limits: Limits, table: SharedTable[bool] | None = None, share_from: int | None = None
    ) -> None:
        self.limits = limits
        self.table = table
        self.share_from = share_from
        self._reset(careful=False)

    def _reset(self, *, careful: bool) -> None:
        self._payloads = Payloads(self.limits, self.table, self.share_from)
        self._careful = careful
        self._budget = self.limits.max_values

    @property
    def frames(self) -> list[Payload]:
        """The payloads that the body names, in order."""
        return self._payloads.frames

    @property
    def uses(self) -> dict[bytes, tuple[bytes, int, bool | None]]:
        """What the table of shared arrays has to note once the message is complete."""
        return self._payloads.uses

    def write(self, value: Any) -> bytearray:
        """Give the body, with room before it for the preamble and the table of its frames.

        Raises:
            EncodeError: The wire cannot keep some value; the message names its path.
            LimitError: A bound is passed.
        """
        try:
            return self._write(value)
        except (OverflowError, UnicodeEncodeError):
            # Rare: an integer beyond 64 bits, or a lone surrogate. Look at every scalar this time.
            self._reset(careful=True)
            return self._write(value)

    def _write(self, value: Any) -> bytearray:
        try:
            self._spend(1)
            tree = self._walk(value, 0)
            room = head_room(len(self.frames))
            head = bytearray(room)
            _ENCODER.encode_into(tree, head, room)
            return head
        except CodecError as error:
            raise error.at("$") from error.__cause__

    def _spend(self, values: int) -> None:
        self._budget -= values
        if self._budget < 0:
            raise LimitError(
                "Limits.max_values is passed",
                expected=f"at most {self.limits.max_values} values outside of packed lists",
                remedy="Give arrays, or lists of scalars; or raise the limit on both sides",
            )

    def _leaf(self, code: int, payload: bytes) -> Ext:
        self._spend(LEAF_COST - 1)
        return Ext(code, payload)

    def _walk(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN and not self._careful:
            return value
        handler = _HANDLERS.get(kind)
        return self._other(value, depth) if handler is None else handler(self, value, depth)

    def _enter(self, depth: int, values: int) -> int:
        if depth >= self.limits.max_depth:
            raise LimitError(
                "Limits.max_depth is passed, or the value holds itself",
                expected=f"at most {self.limits.max_depth} containers inside each other",
            )
        self._spend(values + CONTAINER_COST - 1)
        return depth + 1

    def _each(self, items: Iterable[Any], depth: int) -> list[Any]:
        out: list[Any] = []
        try:
            for item in items:
                # Not a comprehension: its length is the index that an error's path needs.
                out.append(item if type(item) in _PLAIN and not self._careful else self._walk(item, depth))  # noqa: PERF401
        except CodecError as error:
            raise error.under(f"[{len(out)}]") from error.__cause__
        return out

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        for key in value:
            if type(key) is not str:
                return self._map(value, depth)
        inner = self._enter(depth, len(value))
        out = {}
        key = ""
        try:
            for key, item in value.items():
                if self._careful:
                    utf8(key)
                out[key] = item if type(item) in _PLAIN and not self._careful else self._walk(item, inner)
        except CodecError as error:
            raise error.under(f".{key}") from error.__cause__
        return out

    def _map(self, value: dict[Any, Any], depth: int) -> Ext:
        inner = self._enter(depth, 2 * len(value))
        check_keys(value)
        flat = []
        key: Any = None
        try:
            for key, item in value.items():
                flat += [self._walk(key, inner), self._walk(item, inner)]
        except CodecError as error:
            raise error.under(f"[{key!r}]") from error.__cause__
        return Ext(MAP, _ENCODE(flat))

    def _list(self, value: list[Any], depth: int) -> Any:
        packed = pack(value)
        if packed is not None:
            return self._leaf(LIST, packed)
        return self._each(value, self._enter(depth, len(value)))

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Ext:
        return Ext(TUPLE, _ENCODE(self._each(value, self._enter(depth, len(value)))))

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> Ext:
        code = SET if type(value) is set else FROZENSET
        check_keys(value)
        return Ext(code, _ENCODE(self._each(value, self._enter(depth, len(value)))))

    def _int(self, value: int, _depth: int) -> int | Ext:
        return value if -(1 << 63) <= value < 1 << 64 else self._leaf(BIG_INT, write_int(value))

    def _same(self, value: Any, _depth: int) -> Any:
        return value

    def _text(self, value: str, _depth: int) -> str | Ext:
        if len(value) >= FRAMED_BYTES:
            return self._data(_TEXT, utf8(value))
        if self._careful:
            utf8(value)
        return value

    def _bytes(self, value: bytes, _depth: int) -> bytes | Ext:
        return value if len(value) < FRAMED_BYTES else self._data(_BYTES, value)

    def _bytearray(self, value: bytearray, _depth: int) -> Ext:
        return self._data(_BYTEARRAY, value)

    def _memoryview(self, value: memoryview, _depth: int) -> Ext:
        if value.format != "B" or value.ndim != 1 or not value.c_contiguous:
            raise UnsupportedTypeError("a memoryview of other than contiguous bytes", remedy="Cast it to 'B'")
        return self._data(_MEMORYVIEW, value)

    def _data(self, kind: int, value: bytes | bytearray | memoryview) -> Ext:
        return self._leaf(DATA, self._payloads.data(kind, value))

    def _ndarray(self, value: Any, _depth: int) -> Ext:
        return self._leaf(ARRAY_RECORD, self._payloads.array(value, of_array))

    def _raw(self, value: RawTensor, _depth: int) -> Ext:
        return self._leaf(ARRAY_RECORD, self._payloads.array(value, of_raw))

    def _shared(self, value: Shared, _depth: int) -> Ext:
        describe = array_describer(value.value)
        if describe is None:
            raise UnsupportedTypeError("only an array can be Shared", got=type(value.value).__name__)
        return self._leaf(ARRAY_RECORD, self._payloads.array(value.value, describe, value.key))

    def _other(self, value: Any, depth: int) -> Any:
        """Write a value whose exact type has no handler."""
        if isinstance(value, np.generic):
            return self._leaf(ARRAY_RECORD, inline(of_scalar(value)))
        describe = array_describer(value)
        if describe is not None:
            return self._leaf(ARRAY_RECORD, self._payloads.array(value, describe))
        scalar = write_scalar(value)
        if scalar is not None:
            return self._leaf(*scalar)
        neutral = neutral_form(value)
        if neutral is not NotImplemented:
            return self._walk(neutral, depth)
        raise unsupported(value)


_HANDLERS: dict[type, Callable[[BodyWriter, Any, int], Any]] = {
    type(None): BodyWriter._same,
    bool: BodyWriter._same,
    float: BodyWriter._same,
    int: BodyWriter._int,
    str: BodyWriter._text,
    bytes: BodyWriter._bytes,
    bytearray: BodyWriter._bytearray,
    memoryview: BodyWriter._memoryview,
    dict: BodyWriter._dict,
    list: BodyWriter._list,
    tuple: BodyWriter._tuple,
    set: BodyWriter._set,
    frozenset: BodyWriter._set,
    np.ndarray: BodyWriter._ndarray,
    RawTensor: BodyWriter._raw,
    Shared: BodyWriter._shared,
}
