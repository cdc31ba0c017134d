"""Values as msgpack and back: `ValueWriter` for the body of a message, `ValueReader` for the way in.

None, booleans, integers of 64 bits, floats, texts, short byte strings, lists and dicts with string keys are
plain msgpack. Arrays, tuples, and byte strings and texts from 4096 bytes on are extensions (see
`mmcodecs.wire`), so user data can never be mistaken for a record.

Typed objects travel in neutral form, and the wire names no class: a msgspec Struct, a dataclass and a
pydantic model as a dict of their fields (an `array_like` Struct as a list), a named tuple as a tuple, an enum
member as its value. `mmcodecs.wire.convert` builds the classes that a reader asks for.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from mmcodecs.arrays import (
    ENTER,
    FRAME,
    INDEX,
    INLINE,
    REFER,
    AnyArray,
    Framework,
    Record,
    Source,
    contiguous,
    describe,
    read_record,
    restore,
)
from mmcodecs.errors import (
    CodecError,
    DecodeError,
    EncodeError,
    MissingKeyError,
    UnsupportedTypeError,
    limit_exceeded,
)
from mmcodecs.shared import Entered, Shared, SharedTable, Uses

ARRAY_RECORD, LIST, TUPLE, DATA = 1, 2, 3, 7
BYTES, BYTEARRAY, MEMORYVIEW, TEXT = range(4)
FRAMED_BYTES = 4096
"""Byte strings and texts from this length on get a payload frame of their own."""
INLINE_BYTES = 256
"""Arrays up to this size lie in the head: a frame costs more than it saves."""
LEAF_COST = 4
"""Cost of an extension in `Limits.max_values`. A container costs one."""

_ENCODER = msgspec.msgpack.Encoder()
_NUMBERS = frozenset((type(None), bool, int, float))
_SCALARS = _NUMBERS | {str}
_CONTAINERS = frozenset((list, dict, tuple))
_FLAT_LIST = msgspec.msgpack.Decoder(list[int | float | bool | str | None])
_TEXTS = frozenset((str, bytes))
_BYTE_KINDS: dict[type, int] = {bytes: BYTES, bytearray: BYTEARRAY, memoryview: MEMORYVIEW, str: TEXT}
_KINDS = _CONTAINERS | _BYTE_KINDS.keys() | {Shared}
_GARBAGE_FROM = 1 << 16
_FLAT_FROM = 16  # below, a look at each element costs less than a call of msgspec


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message. Writers check them too, so that a default reader refuses nothing that is sent.

    With these bounds, reading allocates at most 90 bytes for a byte of the head, and nothing for payloads
    before they are there, whatever the input.
    """

    max_bytes: int = 16 << 30
    """Length of the whole message, in bytes."""
    max_head_bytes: int = 4 << 20
    """Length of preamble, frame table and body, in bytes."""
    max_frames: int = 4096
    """Payload frames in one message."""
    max_depth: int = 64
    """Containers inside each other."""
    max_values: int = 65_536
    """Containers and extensions in the head: a list, tuple or dict counts one, an array or a framed text or
    byte string four, numbers and short texts nothing."""
    max_ndim: int = 8
    """Dimensions of one array. At most 32, numpy's own limit."""
    max_key_bytes: int = 64
    """Length of the key of a shared array, in bytes."""


DEFAULT_LIMITS = Limits()


@dataclass(slots=True)
class ValueWriter:
    """Turns one value into msgpack and payload frames. Errors name the path of the value.

    Attributes:
        limits: Bounds to stay within.
        table: The table of shared arrays of this connection, or None.
        frames: The payloads that the body names, in the order of their indices.
        keys: The key of each payload that is a shared array, and an empty one of any other payload.
        uses: Effects of the message on the table.
    """

    limits: Limits
    table: SharedTable[bool] | None = None
    frames: list[AnyArray] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    uses: Uses[bool] = field(default_factory=dict)
    _num_values: int = 0
    # By identity, with the objects, so that no id can come to mean another object.
    _written: dict[int, tuple[Any, bytes]] = field(default_factory=dict)
    _keyed: dict[bytes, tuple[tuple[Any, ...], int, bytes]] = field(default_factory=dict)

    def write(self, value: Any) -> bytes:
        """Write the body."""
        try:
            return pack(self._walk(value, 0))
        except CodecError as error:
            raise error.at("$") from error.__cause__

    def _walk(self, value: Any, depth: int) -> Any:
        """Return the msgpack form of a value: itself, or with extensions for types that msgpack lacks."""
        kind = type(value)
        if kind in _NUMBERS or (kind in _TEXTS and len(value) < FRAMED_BYTES):
            return value
        source = None
        if kind not in _KINDS and (source := describe(value)) is None:
            return self._walk(neutral_form(value), depth)
        self._num_values += 1 if kind in _CONTAINERS else LEAF_COST
        if self._num_values > self.limits.max_values:
            remedy = "Pass arrays in place of nested lists, or raise the limit on both sides"
            raise limit_exceeded("max_values", self.limits.max_values, remedy=remedy)
        if kind in _CONTAINERS:
            return self._container(value, kind, depth)
        if source is not None:
            return self._array(value, None, source)
        if kind is Shared:
            return self._array(value.value, value.key)
        if kind is memoryview and (value.format != "B" or value.ndim != 1 or not value.c_contiguous):
            raise UnsupportedTypeError("a memoryview must be contiguous bytes", remedy="Cast it to 'B'")
        return self._data(value, _BYTE_KINDS[kind])

    def _container(self, value: Any, kind: type, depth: int) -> Any:
        if depth >= self.limits.max_depth:
            error = limit_exceeded("max_depth", self.limits.max_depth)
            error.problem += ", or the value holds itself"
            raise error
        if kind is list and (packed := pack_flat(value)) is not None:
            return Ext(LIST, packed)
        fields: dict[str, Any] = {}
        items: list[Any] = []
        key: Any = None
        try:
            if kind is dict:
                for key, item in value.items():
                    if type(key) is not str:
                        raise UnsupportedTypeError(
                            "a key must be a string", remedy="Convert the keys with str()"
                        )
                    fields[key] = item if type(item) in _NUMBERS else self._walk(item, depth + 1)
                return fields
            for item in value:
                # Not a comprehension: its length is the index that an error's path needs.
                items.append(item if type(item) in _NUMBERS else self._walk(item, depth + 1))  # noqa: PERF401
        except CodecError as error:
            raise error.under(f".{key}" if kind is dict else f"[{len(items)}]") from error.__cause__
        return Ext(TUPLE, pack(items)) if kind is tuple else items

    def _data(self, value: Any, kind: int) -> Ext:
        """Write a byte string, or a text in UTF-8."""
        if len(value) < FRAMED_BYTES:
            return Ext(DATA, bytes((kind, INLINE)) + bytes(value))
        done = self._written.get(id(value))
        if done is None:
            try:
                data = value.encode() if kind == TEXT else value
            except UnicodeEncodeError:
                raise _culprit(value) from None
            record = bytes((kind, FRAME)) + self._add(np.frombuffer(data, np.uint8))
            done = self._written[id(value)] = value, record
        return Ext(DATA, done[1])

    def _array(self, value: Any, key: bytes | None, source: Source | None = None) -> Ext:
        """Write an array: inline, in a frame, or by its key in the table of shared arrays."""
        done = self._written.get(id(value))
        if done is not None:
            return Ext(ARRAY_RECORD, done[1])
        source = source or describe(value)
        if source is None:
            raise UnsupportedTypeError("only an array can be Shared", got=type(value).__name__)
        array = source.array
        if array.ndim > self.limits.max_ndim:
            raise limit_exceeded("max_ndim", self.limits.max_ndim, array.ndim)
        if array.nbytes <= INLINE_BYTES:
            return Ext(ARRAY_RECORD, source.record(INLINE, bytes(contiguous(array))))
        if key is None:
            record = source.record(FRAME, self._add(array))
        else:
            record = source.record(*self._by_key(key, source))
        self._written[id(value)] = value, record
        return Ext(ARRAY_RECORD, record)

    def _by_key(self, key: bytes, source: Source) -> tuple[int, bytes]:
        """Return the storage and the rest of the record of an array under a key."""
        form, nbytes = (source.row, source.array.dtype.str, source.array.shape), source.array.nbytes
        if key not in self._keyed:
            if len(key) > self.limits.max_key_bytes:
                raise limit_exceeded("max_key_bytes", self.limits.max_key_bytes, len(key))
            if self.table is None or nbytes > self.table.capacity_bytes:
                storage, rest = FRAME, self._add(source.array, key)
            elif key in self.table.entries:
                self.uses[key] = nbytes, None
                storage, rest = REFER, key
            else:
                self.uses[key] = nbytes, True
                storage, rest = ENTER, self._add(source.array, key) + key
            self._keyed[key] = form, storage, rest
        known, storage, rest = self._keyed[key]
        if known != form:
            raise EncodeError("two arrays of different dtype or shape under one key", got=key.hex())
        return storage, rest

    def _add(self, payload: AnyArray, key: bytes = b"") -> bytes:
        """Add a frame, and return its index in the form of a record."""
        self.frames.append(payload)
        self.keys.append(key)
        return INDEX.pack(len(self.frames) - 1)


def pack_flat(items: list[Any]) -> bytes | None:
    """Write a long list of numbers, None and short texts as msgpack, without a look at each from Python.

    Returns None for any other list. msgspec checks integers in C. It would take a Decimal for a float, so for
    floats and booleans the bytes are checked: every ninth is "float64", or every one "true" or "false".
    """
    if len(items) < _FLAT_FROM:
        return None
    first = type(items[0])
    try:
        if first is int:
            msgspec.convert(items, list[int])
            return _ENCODER.encode(items)
        if first is float or first is bool:
            packed = _ENCODER.encode(items)
            values = np.frombuffer(packed, np.uint8)[3 if len(items) < 1 << 16 else 5 :]
            if first is float and len(values) == 9 * len(items) and bool((values[::9] == 0xCB).all()):
                return packed
            if first is bool and len(values) == len(items) and bool(((values | 1) == 0xC3).all()):
                return packed
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError, msgspec.ValidationError):
        pass
    kinds = set(map(type, items))
    texts = (item for item in items if type(item) is str)
    if kinds <= _NUMBERS or (kinds <= _SCALARS and all(len(text) < FRAMED_BYTES for text in texts)):
        return pack(items)
    return None


def pack(tree: Any) -> bytes:
    """Write a tree of scalars, lists, dicts and extensions as msgpack."""
    try:
        return _ENCODER.encode(tree)
    except (OverflowError, UnicodeEncodeError, TypeError):
        raise _culprit(tree).at("$") from None


def unpack(data: memoryview, extension: Callable[[int, memoryview], Any]) -> Any:
    """Read msgpack. Garbage collection is off meanwhile: it costs ten times as much for many containers."""
    collects = data.nbytes > _GARBAGE_FROM and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return msgspec.msgpack.decode(data, ext_hook=extension)
    finally:
        if collects:
            gc.enable()


def _culprit(tree: Any) -> UnsupportedTypeError:
    """Find the value in a tree that msgspec cannot encode, and build its error."""
    if type(tree) in _CONTAINERS:
        for step, item in tree.items() if type(tree) is dict else enumerate(tree):
            for part in (step, item):
                try:
                    _ENCODER.encode(part)
                except (OverflowError, UnicodeEncodeError, TypeError):
                    return _culprit(part).under(f"[{step}]" if type(step) is int else f".{step}")
    if type(tree) is int:
        return UnsupportedTypeError("an integer beyond 64 bits", got=repr(tree)[:80])
    if type(tree) is str:
        return UnsupportedTypeError("a lone surrogate is not text", got=ascii(tree)[:80])
    return unsupported(tree)


def unsupported(value: Any) -> UnsupportedTypeError:
    """Build the error for a value of a type that the wire does not keep."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in (str, int, float, dict, list, tuple, bytes, bytearray):
        if isinstance(value, base):
            return UnsupportedTypeError(
                f"{name} is a subclass of {base.__name__}, and its additions would be lost",
                remedy=f"Pass {base.__name__}(value)",
            )
    return UnsupportedTypeError(
        f"{name} has no form on the wire",
        remedy="Pass numbers, text, bytes, arrays, lists, dicts, or a dataclass or msgspec Struct of these",
    )


def neutral_form(value: Any) -> Any:
    """Return the neutral form of a typed object, one level deep, or raise `UnsupportedTypeError`."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        fields = {key: getattr(value, name) for key, name in names}
        if config.array_like:
            return ([] if config.tag is None else [config.tag]) + list(fields.values())
        kept = {key: item for key, item in fields.items() if item is not msgspec.UNSET}
        return kept if config.tag is None else {str(config.tag_field): config.tag, **kept}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump(by_alias=True)
    raise unsupported(value)


@dataclass(slots=True)
class ValueReader:
    """Reads one body over its payload frames.

    Args:
        frames: The payloads.
        framework, copy: As in `mmcodecs.decode`.
        limits: Bounds to enforce.
        table: The table of shared arrays of this connection, or None.
        capacity: The capacity of the writer's table, or 0.

    Attributes:
        uses: Effects of the message on the table.
    """

    frames: list[memoryview]
    framework: Framework
    copy: bool
    limits: Limits
    table: SharedTable[Entered] | None = None
    capacity: int = 0
    uses: Uses[Entered] = field(default_factory=dict)
    _num_values: int = 0
    _extensions: int = 0
    _used: set[int] = field(default_factory=set)
    _missing: dict[bytes, None] = field(default_factory=dict)
    _seen: dict[bytes, Any] = field(default_factory=dict)
    # By identity, with the lists, so that no id can come to mean another list.
    _flat: dict[int, list[Any]] = field(default_factory=dict)

    def read(self, body: memoryview) -> Any:
        """Return the value. Raises nothing but `CodecError`."""
        try:
            # A decoder kept in an attribute would make a cycle, and hold the message until it is collected.
            value = unpack(body, self._extension)
        except CodecError as error:
            raise error.at(f"extension {self._extensions} of the body") from error.__cause__
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
            raise DecodeError(f"malformed body: {error}", where="body") from error
        if type(value) in _CONTAINERS:
            self._check(value, 0)
        if len(self._used) < len(self.frames):
            unused = min(set(range(len(self.frames))) - self._used)
            raise DecodeError("no record names this frame", where=f"frame {unused}")
        if self._missing:
            raise MissingKeyError(self._missing)
        return value

    def _check(self, value: Any, depth: int) -> None:
        """Check depth, number and keys of the containers that msgspec built."""
        if depth >= self.limits.max_depth:
            raise limit_exceeded("max_depth", self.limits.max_depth).at("body")
        self._num_values += 1
        if self._num_values > self.limits.max_values:
            raise limit_exceeded("max_values", self.limits.max_values).at("body")
        items = value
        if type(value) is dict:
            for key in value:
                if type(key) is not str:
                    raise DecodeError("a key is not a string", where="body", got=repr(key)[:80])
            items = value.values()
        elif id(value) in self._flat:
            return
        for item in items:
            if type(item) in _CONTAINERS:
                self._check(item, depth + 1)

    def _extension(self, code: int, payload: memoryview) -> Any:
        """Return the value of one extension. msgspec calls it in the order of the body."""
        self._extensions += 1
        if code == TUPLE:
            items = unpack(payload, self._extension)
            if type(items) is not list:
                raise DecodeError("a tuple extension holds an array", got=type(items).__name__)
            return tuple(items)
        if code == LIST:
            flat = _FLAT_LIST.decode(payload)
            self._flat[id(flat)] = flat
            return flat
        self._num_values += LEAF_COST
        if self._num_values > self.limits.max_values:
            raise limit_exceeded("max_values", self.limits.max_values).at("body")
        if code == DATA:
            return self._data(payload)
        if code != ARRAY_RECORD:
            expected = "1 (array), 2 (list), 3 (tuple) or 7 (bytes, text)"
            raise DecodeError("unknown extension type", expected=expected, got=str(code))
        # The same record twice is one object sent twice: it comes out as one object, too.
        content = bytes(payload[:1024])
        if payload.nbytes <= 1024 and content in self._seen:
            return self._seen[content]
        record = read_record(payload, self.limits.max_ndim)
        data: memoryview | None
        if record.storage == INLINE:
            # Elements in the head lie at any address, so they get aligned memory of their own.
            data = memoryview(bytearray(record.rest))
        else:
            data = self._frame(record.rest) if record.storage == FRAME else self._by_key(record)
        if data is None:
            return None
        framework: Framework = "numpy" if record.scalar else self.framework
        value = restore(record.row, record.dtype, record.shape, data, framework=framework, copy=self.copy)
        if record.storage != INLINE:
            self._seen[content] = value
        return value[()] if record.scalar else value

    def _by_key(self, record: Record) -> memoryview | None:
        """Return the elements of a shared array, from the record or the table, or None if missing."""
        start = INDEX.size if record.storage == ENTER else 0
        key, table = bytes(record.rest[start:]), self.table
        if not 1 <= len(key) <= self.limits.max_key_bytes:
            raise limit_exceeded("max_key_bytes", self.limits.max_key_bytes, len(key))
        if record.storage == ENTER:
            data = self._frame(record.rest[:start])
            if table is not None:
                if data.nbytes > self.capacity:
                    raise DecodeError("an array longer than the table", got=str(data.nbytes))
                data = data.toreadonly() if table.keep_views else data
                entered = record._replace(rest=memoryview(b"")), data
                self.uses.setdefault(key, (data.nbytes, entered))
            return data
        if table is None or key not in table.entries:
            self._missing[key] = None
            return None
        nbytes, (kept, data) = table.entries[key]
        self.uses.setdefault(key, (nbytes, None))
        if (kept.row, kept.dtype, kept.shape) != (record.row, record.dtype, record.shape):
            raise DecodeError(
                "a shared array differs from its reference",
                expected=f"{record.row.name} of shape {record.shape}",
                got=f"{kept.row.name} of shape {kept.shape}",
            )
        return data

    def _frame(self, index_bytes: memoryview) -> memoryview:
        if index_bytes.nbytes != INDEX.size:
            raise DecodeError("a frame index is four bytes", got=f"{index_bytes.nbytes} bytes")
        index: int = INDEX.unpack(index_bytes)[0]
        if index >= len(self.frames):
            raise DecodeError("no such frame", expected=f"below {len(self.frames)}", got=str(index))
        self._used.add(index)
        return self.frames[index]

    def _data(self, payload: memoryview) -> Any:
        if payload.nbytes < 2 or payload[0] > TEXT or payload[1] not in (FRAME, INLINE):
            raise DecodeError("malformed byte string", got=f"{bytes(payload[:8])!r}")
        kind, data = payload[0], payload[2:]
        if payload[1] == FRAME:
            data = self._frame(data)
        if kind == MEMORYVIEW:
            return memoryview(bytes(data)) if self.copy else data.toreadonly()
        if kind == TEXT:
            return str(data, "utf-8")
        return bytes(data) if kind == BYTES else bytearray(data)
