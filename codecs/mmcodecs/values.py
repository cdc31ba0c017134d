"""Values as msgpack and back: `ValueWriter` for the body of a message, `ValueReader` for the way in.

None, booleans, integers of 64 bits, floats, texts, short byte strings, lists and dicts with string keys are
plain msgpack. Arrays, tuples, and byte strings and texts from 4096 bytes on are extensions (see
`mmcodecs.wire`), so user data can never be mistaken for a record.

Typed objects travel in neutral form, and the wire names no class: a msgspec Struct, a dataclass and a
pydantic model as a dict of their fields (an `array_like` Struct as a list), a named tuple as a tuple, an enum
member as its value. `convert` builds the classes that a reader asks for.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from mmcodecs.arrays import (
    ENTER,
    FRAME,
    INDEX,
    INLINE,
    REFER,
    Framework,
    Record,
    Source,
    check_length,
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
    require,
)
from mmcodecs.shared import ReaderTurn, Shared, SharedTable

ARRAY_RECORD, LIST, TUPLE, DATA = 1, 2, 3, 7
BYTES, BYTEARRAY, MEMORYVIEW, TEXT = range(4)
FRAMED_BYTES = 4096
"""Byte strings and texts from this length on get a payload frame of their own."""
INLINE_BYTES = 256
"""Arrays up to this size lie in the head: a frame costs more than it saves."""
LEAF_COST = 4
"""What an extension counts in `Limits.max_values`; a container counts one."""

Payload: TypeAlias = Source | memoryview
_ENCODER = msgspec.msgpack.Encoder()
_NUMBERS = frozenset((type(None), bool, int, float))
_SCALARS = _NUMBERS | {str}
_CONTAINERS = frozenset((list, dict, tuple))
_FLAT_LIST = msgspec.msgpack.Decoder(list[int | float | bool | str | None])
_BYTE_KINDS: dict[type, int] = {bytes: BYTES, bytearray: BYTEARRAY, memoryview: MEMORYVIEW}
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
    byte string four. Numbers and short texts do not count."""
    max_ndim: int = 8
    """Dimensions of one array. At most 32, which is what numpy holds everywhere."""
    max_key_bytes: int = 64
    """Length of the key of a shared array, in bytes."""


DEFAULT_LIMITS = Limits()


class ValueWriter:
    """Turn one value into msgpack and payload frames; the arguments are those of `mmcodecs.wire.Message`.

    Attributes:
        frames: The payloads that the body names, in the order of their indices.
        uses: Key and length of each shared array in the message; the flag says whether it enters the table.
    """

    def __init__(
        self, limits: Limits, table: SharedTable[bool] | None = None, share_from: int | None = None
    ) -> None:
        self.frames: list[Payload] = []
        self.uses: dict[bytes, tuple[int, bool | None]] = {}
        self._limits = limits
        self._table = table
        self._share_from = share_from
        self._budget = limits.max_values
        # The objects are kept beside their records, or an id might come to mean another object.
        self._written: dict[int, tuple[Any, bytes]] = {}
        self._keys: dict[bytes, tuple[bytes, int, bytes]] = {}

    def write(self, value: Any) -> Any:
        """Give the body as a tree for `pack`; errors name the path of the value."""
        try:
            return self._walk(value, 0)
        except CodecError as error:
            raise error.at("$") from error.__cause__

    def _walk(self, value: Any, depth: int) -> Any:
        """Give the msgpack form of a value: itself, or with extensions in place of what msgpack lacks."""
        kind = type(value)
        if kind in _NUMBERS:
            return value
        if kind is str:
            if len(value) < FRAMED_BYTES:
                return value
            try:
                return self._data(TEXT, value.encode(), value)
            except UnicodeEncodeError:
                raise _culprit(value) from None
        if kind is dict:
            return self._dict(value, self._enter(depth))
        if kind is list:
            inner = self._enter(depth)
            packed = pack_flat(value)
            return self._each(value, inner) if packed is None else Ext(LIST, packed)
        if kind is tuple:
            return Ext(TUPLE, pack(self._each(value, self._enter(depth))))
        if kind is bytes and len(value) < FRAMED_BYTES:
            return value
        if kind in _BYTE_KINDS:
            if kind is memoryview and (value.format != "B" or value.ndim != 1 or not value.c_contiguous):
                raise UnsupportedTypeError("a memoryview must be contiguous bytes", remedy="Cast it to 'B'")
            return self._data(_BYTE_KINDS[kind], value, value)
        if kind is Shared:
            return self._array(value.value, value.key)
        if (source := describe(value)) is not None:
            return self._array(value, None, source)
        return self._walk(neutral_form(value), depth)

    def _enter(self, depth: int) -> int:
        if depth >= self._limits.max_depth:
            error = limit_exceeded("max_depth", self._limits.max_depth)
            error.problem += ", or the value holds itself"
            raise error
        self._spend(1)
        return depth + 1

    def _spend(self, values: int) -> None:
        self._budget -= values
        if self._budget < 0:
            remedy = "Give arrays in place of nested lists; or raise the limit on both sides"
            raise limit_exceeded("max_values", self._limits.max_values, remedy=remedy)

    def _each(self, items: Iterable[Any], depth: int) -> list[Any]:
        out: list[Any] = []
        try:
            for item in items:
                # Not a comprehension: its length is the index that an error's path needs.
                out.append(item if type(item) in _NUMBERS else self._walk(item, depth))  # noqa: PERF401
        except CodecError as error:
            raise error.under(f"[{len(out)}]") from error.__cause__
        return out

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        key: Any = None
        try:
            for key, item in value.items():
                if type(key) is not str:
                    raise UnsupportedTypeError("a key must be a string", remedy="Convert the keys with str()")
                out[key] = item if type(item) in _NUMBERS else self._walk(item, depth)
        except CodecError as error:
            raise error.under(f".{key}") from error.__cause__
        return out

    def _data(self, kind: int, data: bytes | bytearray | memoryview, value: Any) -> Ext:
        """Write a byte string, or a text in UTF-8."""
        self._spend(LEAF_COST)
        if len(data) < FRAMED_BYTES:
            return Ext(DATA, bytes((kind, INLINE)) + bytes(data))
        done = self._written.get(id(value))
        if done is None:
            record = bytes((kind, FRAME)) + self._add(memoryview(data).toreadonly())
            done = self._written[id(value)] = value, record
        return Ext(DATA, done[1])

    def _array(self, value: Any, key: bytes | None, source: Source | None = None) -> Ext:
        """Write an array: inline, in a frame, or by its key in the table of shared arrays."""
        self._spend(LEAF_COST)
        done = self._written.get(id(value))
        if done is not None:
            return Ext(ARRAY_RECORD, done[1])
        source = source or describe(value)
        if source is None:
            raise UnsupportedTypeError("only an array can be Shared", got=type(value).__name__)
        array = source.array
        if array.ndim > self._limits.max_ndim:
            raise limit_exceeded("max_ndim", self._limits.max_ndim, array.ndim)
        if array.nbytes <= INLINE_BYTES:
            return Ext(ARRAY_RECORD, source.record(INLINE, bytes(source.contiguous())))
        if key is None and self._share_from is not None and array.nbytes >= self._share_from:
            blake3 = require("blake3", "hashing arrays").blake3
            key = bytes(blake3(source.form()).update(source.contiguous()).digest())
        if key is None:
            record = source.record(FRAME, self._add(source))
        else:
            form = source.form()
            known, storage, rest = self._keys.get(key) or self._enter_key(source, key, form)
            if known != form:
                raise EncodeError("two arrays of different dtype or shape under one key", got=key.hex())
            record = source.record(storage, rest)
        self._written[id(value)] = value, record
        return Ext(ARRAY_RECORD, record)

    def _enter_key(self, source: Source, key: bytes, form: bytes) -> tuple[bytes, int, bytes]:
        """Give the form of an array that is new in this message, and the storage and rest of its record."""
        if len(key) > self._limits.max_key_bytes:
            raise limit_exceeded("max_key_bytes", self._limits.max_key_bytes, len(key))
        nbytes = source.array.nbytes
        if self._table is None or nbytes > self._table.capacity_bytes:
            storage, rest = FRAME, self._add(source)
        elif key in self._table:
            self.uses[key] = nbytes, None
            storage, rest = REFER, key
        else:
            self.uses[key] = nbytes, True
            storage, rest = ENTER, self._add(source) + key
        self._keys[key] = form, storage, rest
        return self._keys[key]

    def _add(self, payload: Payload) -> bytes:
        """Add a frame, and give its index as a record holds it."""
        self.frames.append(payload)
        return INDEX.pack(len(self.frames) - 1)


def pack_flat(items: list[Any]) -> bytes | None:
    """Write a long list of numbers, None and short texts as msgpack, without a look at each from Python.

    Give None for any other list. msgspec checks a list of integers in C. It would take a Decimal for a float,
    so of floats and booleans the written bytes are checked: where every ninth byte says "float64", or every
    byte "true" or "false", nothing else can lie in between.
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


def pack(tree: Any, head: bytearray | None = None) -> bytes:
    """Write a tree of scalars, lists, dicts and extensions as msgpack, behind a head if there is one."""
    try:
        if head is None:
            return _ENCODER.encode(tree)
        _ENCODER.encode_into(tree, head, len(head))
    except (OverflowError, UnicodeEncodeError, TypeError):
        raise _culprit(tree).at("$") from None
    return b""


def _culprit(tree: Any) -> UnsupportedTypeError:
    """Build the error for the part of a tree that msgspec cannot write, by trying each."""
    if type(tree) in _CONTAINERS:
        steps = tree.items() if type(tree) is dict else enumerate(tree)
        for step, item in steps:
            path = f"[{step}]" if type(step) is int else f".{step}"
            for part in (step, item):
                try:
                    _ENCODER.encode(part)
                except (OverflowError, UnicodeEncodeError, TypeError):
                    return _culprit(part).under(path)
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
                f"{name} is a subclass of {base.__name__}, and what it adds would be lost",
                remedy=f"Give {base.__name__}(value)",
            )
    return UnsupportedTypeError(
        f"{name} has no form on the wire",
        remedy="Give numbers, text, bytes, arrays, lists, dicts, or a dataclass or msgspec Struct of these",
    )


def neutral_form(value: Any) -> Any:
    """Give the neutral form of a typed object, one level deep, or raise `UnsupportedTypeError`."""
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


class ValueReader:
    """Read one body over its payload frames; `turn` is what the message does to its connection's table."""

    def __init__(
        self,
        frames: list[memoryview],
        *,
        framework: Framework,
        copy: bool,
        limits: Limits,
        turn: ReaderTurn | None,
    ) -> None:
        self._frames = frames
        self._framework: Framework = framework
        self._copy = copy
        self._limits = limits
        self._turn = turn
        self._budget = limits.max_values
        self._extensions = 0
        self._unused = set(range(len(frames)))
        self._missing: dict[bytes, None] = {}
        self._seen: dict[bytes, Any] = {}
        # By identity, and kept alive here, so that an id cannot come to mean another list.
        self._flat: dict[int, list[Any]] = {}

    def read(self, body: memoryview) -> Any:
        """Give the value, or raise nothing but `CodecError`."""
        try:
            value = self._decode(body)
        except CodecError as error:
            raise error.at(f"extension {self._extensions} of the body") from error.__cause__
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
            raise DecodeError(f"malformed body: {error}", where="body") from error
        if type(value) in _CONTAINERS:
            self._check(value, 0)
        if self._unused:
            raise DecodeError("no record names this frame", where=f"frame {min(self._unused)}")
        if self._missing:
            raise MissingKeyError(self._missing)
        return value

    def _decode(self, data: memoryview) -> Any:
        # A decoder kept in an attribute would make a cycle, and hold the message until it is collected.
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _check(self, value: Any, depth: int) -> None:
        """Check depth, number and keys of the containers that msgspec built."""
        if depth >= self._limits.max_depth:
            raise limit_exceeded("max_depth", self._limits.max_depth).at("body")
        self._spend(1)
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

    def _spend(self, values: int) -> None:
        self._budget -= values
        if self._budget < 0:
            raise limit_exceeded("max_values", self._limits.max_values).at("body")

    def _extension(self, code: int, payload: memoryview) -> Any:
        """Give the value of one extension; called by msgspec in the order of the body."""
        self._extensions += 1
        if code == TUPLE:
            items = self._decode(payload)
            if type(items) is not list:
                raise DecodeError("a tuple extension holds an array", got=type(items).__name__)
            return tuple(items)
        if code == LIST:
            flat = _FLAT_LIST.decode(payload)
            self._flat[id(flat)] = flat
            return flat
        self._spend(LEAF_COST)
        if code == ARRAY_RECORD:
            # The same record twice is one object sent twice: it comes out as one object, too.
            key = bytes(payload[:1024])
            if payload.nbytes <= 1024 and key in self._seen:
                return self._seen[key]
            record = read_record(payload, self._limits.max_ndim)
            value = self._array(record)
            if record.storage != INLINE:
                self._seen[key] = value
            return value
        if code == DATA:
            return self._data(payload)
        expected = "1 (array), 2 (list), 3 (tuple) or 7 (bytes, text)"
        raise DecodeError("unknown extension type", expected=expected, got=str(code))

    def _array(self, record: Record) -> Any:
        row, dtype, shape, rest = record.row, record.dtype, record.shape, record.rest
        if record.storage == REFER:
            key = self._key(rest)
            found = self._turn.find(key) if self._turn is not None else None
            if found is None:
                self._missing[key] = None
                return None
            kept, data = found
            if (kept.row, kept.dtype, kept.shape) != (row, dtype, shape):
                raise DecodeError(
                    "a shared array is not what its reference says",
                    expected=f"{row.name} of shape {shape}",
                    got=f"{kept.row.name} of shape {kept.shape}",
                )
        elif record.storage == INLINE:
            check_length(row, shape, record.nbytes, rest)
            # Elements in the head lie at any address, so they get aligned memory of their own.
            data = memoryview(bytearray(rest))
        else:
            data = self._frame(rest[: INDEX.size] if record.storage == ENTER else rest)
            check_length(row, shape, record.nbytes, data)
            if record.storage == ENTER:
                key = self._key(rest[INDEX.size :])
                data = data if self._turn is None else self._turn.enter(key, record, data)
        if record.scalar:
            return np.frombuffer(data, dtype)[0]
        return restore(row, dtype, shape, data, framework=self._framework, copy=self._copy)

    def _key(self, data: memoryview) -> bytes:
        if not 1 <= data.nbytes <= self._limits.max_key_bytes:
            raise limit_exceeded("max_key_bytes", self._limits.max_key_bytes, data.nbytes)
        return bytes(data)

    def _frame(self, index_bytes: memoryview) -> memoryview:
        if index_bytes.nbytes != INDEX.size:
            raise DecodeError("a frame index is four bytes", got=f"{index_bytes.nbytes} bytes")
        index: int = INDEX.unpack(index_bytes)[0]
        if index >= len(self._frames):
            raise DecodeError("no such frame", expected=f"below {len(self._frames)}", got=str(index))
        self._unused.discard(index)
        return self._frames[index]

    def _data(self, payload: memoryview) -> Any:
        if payload.nbytes < 2 or payload[0] > TEXT or payload[1] not in (FRAME, INLINE):
            raise DecodeError("malformed byte string", got=f"{bytes(payload[:8])!r}")
        kind, data = payload[0], payload[2:]
        if payload[1] == FRAME:
            data = self._frame(data)
        if kind == MEMORYVIEW:
            return memoryview(bytes(data)) if self._copy else data.toreadonly()
        if kind == TEXT:
            return str(data, "utf-8")
        return bytes(data) if kind == BYTES else bytearray(data)


def convert(value: Any, target: Any) -> Any:
    """Build `target`, such as a Struct, dataclass or pydantic model, from a decoded value.

    Raises:
        DecodeError: The value does not fit; the message says where.
    """

    def fill(kind: Any, item: Any) -> Any:
        """Fill a type that msgspec does not know: an array as it is, a model by pydantic."""
        return item if isinstance(kind, type) and isinstance(item, kind) else kind.model_validate(item)

    try:
        return msgspec.convert(value, target, dec_hook=fill)
    except CodecError:
        raise
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        raise DecodeError(problem, where=where.rstrip("`") or "$") from error
    except Exception as error:  # a validator or constructor of the caller's may raise anything
        raise DecodeError(f"cannot build {target}: {error}") from error
