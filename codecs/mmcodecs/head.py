"""Writing a body: the value becomes msgpack, its arrays and long byte strings become frames.

One walk over the value. It visits containers, not scalars: a list is first asked whether all of it is plain
scalars, which C code answers, and is then written as it stands. What the wire cannot keep raises with its
path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from mmcodecs.describe import array_describer, unsupported, utf8
from mmcodecs.errors import CodecError, EncodeError, LimitError, UnsupportedTypeError
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
from mmcodecs.limits import Limits
from mmcodecs.packing import FRAMED_BYTES, pack
from mmcodecs.record import ENTER, FRAME, INDEX, INLINE, REFER, write_record
from mmcodecs.scan import LEAF_COST
from mmcodecs.shared import Shared, SharedTable, array_form, content_key
from mmcodecs.tensors import RawTensor, Source, of_array, of_raw, of_scalar
from mmcodecs.typed import neutral_form

INLINE_BYTES = 256
"""Arrays up to this size lie in the head: a frame costs more than it saves."""

_ENCODER = msgspec.msgpack.Encoder()
_ENCODE = _ENCODER.encode
_PLAIN = frozenset((type(None), bool, int, float))
_BYTES, _BYTEARRAY, _MEMORYVIEW, _TEXT = range(4)

Payload = Source | memoryview


class BodyWriter:
    """Write one value.

    Args:
        limits: Bounds to stay within.
        table: The table of shared arrays of this connection, if there is one.
        share_from: Hash and share arrays from this many bytes on; None for declared keys only.

    Attributes:
        frames: The payloads that the body names, in order.
        uses: What the table has to note once the message is complete.
    """

    def __init__(
        self, limits: Limits, table: SharedTable[bool] | None = None, share_from: int | None = None
    ) -> None:
        self.limits = limits
        self.table = table
        self.share_from = share_from
        self._reset(careful=False)

    def _reset(self, *, careful: bool) -> None:
        self.frames: list[Payload] = []
        self.uses: dict[bytes, tuple[bytes, int, bool | None]] = {}
        self._careful = careful
        self._budget = self.limits.max_values
        # The objects are kept beside their records, or an id might come to mean another object.
        self._written: dict[int, tuple[Any, Ext]] = {}
        self._keys: dict[bytes, tuple[bytes, int, bytes]] = {}

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
        self._spend(values)
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
        return Ext(code, _ENCODE(self._each(value, self._enter(depth, len(value)))))

    def _int(self, value: int, _depth: int) -> int | Ext:
        return value if -(1 << 63) <= value < 1 << 64 else self._leaf(BIG_INT, write_int(value))

    def _same(self, value: Any, _depth: int) -> Any:
        return value

    def _text(self, value: str, _depth: int) -> str | Ext:
        if len(value) >= FRAMED_BYTES:
            return self._frame_data(_TEXT, memoryview(utf8(value)))
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
        if len(value) < FRAMED_BYTES:
            return self._leaf(DATA, bytes((kind, INLINE)) + bytes(value))
        done = self._written.get(id(value))
        if done is None:
            done = self._written[id(value)] = value, self._frame_data(kind, memoryview(value))
        else:
            self._spend(LEAF_COST - 1)
        return done[1]

    def _frame_data(self, kind: int, data: memoryview) -> Ext:
        return self._leaf(DATA, bytes((kind, FRAME)) + self._payload(data.toreadonly()))

    def _ndarray(self, value: Any, _depth: int) -> Ext:
        return self._array(value, of_array)

    def _raw(self, value: RawTensor, _depth: int) -> Ext:
        return self._array(value, of_raw)

    def _array(self, value: Any, describe: Callable[[Any], Source], key: bytes | None = None) -> Ext:
        done = self._written.get(id(value))
        if done is not None:
            self._spend(LEAF_COST - 1)
            return done[1]
        source = describe(value)
        if source.array.ndim > self.limits.max_ndim:
            raise LimitError(
                "Limits.max_ndim is passed",
                expected=f"at most {self.limits.max_ndim}",
                got=str(source.array.ndim),
            )
        if source.array.nbytes <= INLINE_BYTES:
            return self._record(source, INLINE, bytes(source.contiguous()))
        if key is None and self.share_from is not None and source.array.nbytes >= self.share_from:
            key = content_key(source)
        if key is None:
            record = self._record(source, FRAME, self._payload(source))
        else:
            record = self._keyed(source, key)
        self._written[id(value)] = value, record
        return record

    def _keyed(self, source: Source, key: bytes) -> Ext:
        """Write an array under a key: by reference if the peer has it, and once in any case."""
        nbytes, form = source.array.nbytes, array_form(source)
        done = self._keys.get(key)
        if done is not None:
            if done[0] != form:
                raise EncodeError("two arrays of different dtype or shape under one key", got=key.hex())
            return self._record(source, *done[1:])
        storage, rest = REFER, key
        if self.table is None or nbytes > self.table.capacity_bytes:
            storage, rest = FRAME, self._payload(source)
        elif key in self.table:
            self.uses[key] = (key, nbytes, None)
        else:
            self.uses[key] = (key, nbytes, True)
            storage, rest = ENTER, self._payload(source) + key
        self._keys[key] = form, storage, rest
        return self._record(source, storage, rest)

    def _record(self, source: Source, storage: int, rest: bytes) -> Ext:
        return self._leaf(ARRAY_RECORD, write_record(source, storage, rest))

    def _payload(self, payload: Payload) -> bytes:
        """Add a payload and give its index as it stands in a record."""
        self.frames.append(payload)
        return INDEX.pack(len(self.frames) - 1)

    def _shared(self, value: Shared, _depth: int) -> Ext:
        describe = array_describer(value.value)
        if describe is None:
            raise UnsupportedTypeError("only an array can be Shared", got=type(value.value).__name__)
        if len(value.key) > self.limits.max_key_bytes:
            raise LimitError(
                "Limits.max_key_bytes is passed", expected=f"at most {self.limits.max_key_bytes}"
            )
        return self._array(value.value, describe, value.key)

    def _other(self, value: Any, depth: int) -> Any:
        """Write a value whose exact type has no handler."""
        if isinstance(value, np.generic):
            source = of_scalar(value)
            return self._record(source, INLINE, bytes(source.contiguous()))
        describe = array_describer(value)
        if describe is not None:
            return self._array(value, describe)
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
