"""Reading a body, second half: extensions become values, and msgspec builds the containers around them.

The walk (`scan.py`) resolves arrays, byte strings and scalars through `Resolver`; msgspec then decodes the
checked body and asks `Builder` for each extension in the same order. Tuples, sets and maps with other keys
are built from the arrays that their extensions hold.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from mmcodecs.errors import CodecError, DecodeError, LimitError, MissingKeyError
from mmcodecs.extensions import ARRAY_RECORD, DATA, LIST, MAP, SET, TUPLE, read_scalar
from mmcodecs.limits import Limits
from mmcodecs.record import ENTER, FRAME, INDEX, INLINE, REFER, Record, check_length, read_index, read_record
from mmcodecs.scan import CONTAINERS, Scanner, check_packed
from mmcodecs.tensors import Framework, restore

_PACKED = msgspec.msgpack.Decoder(list[int | float | bool | str | None])
_BYTES, _BYTEARRAY, _MEMORYVIEW, _TEXT = range(4)


class Table(Protocol):
    """What the resolver asks of a table of shared arrays (`shared.py`)."""

    def begin(self, capacity: int) -> None:
        """Take the capacity that the message says."""

    def find(self, key: bytes) -> tuple[Record, memoryview] | None:
        """Give the record and the elements entered under a key."""

    def enter(self, key: bytes, record: Record, data: memoryview) -> None:
        """Note that a key was sent with its elements."""


class Resolver:
    """Turn the payload of an extension that is no container into a value, each frame viewed once.

    Args:
        frames: The payload frames, contiguous bytes.
        framework: What arrays become.
        copy: Whether arrays get memory of their own.
        limits: Bounds to hold to.
        table: The table of shared arrays of this connection, if there is one.
    """

    def __init__(
        self,
        frames: list[memoryview],
        *,
        framework: Framework,
        copy: bool,
        limits: Limits,
        table: Table | None,
    ) -> None:
        self.frames = frames
        self.framework = framework
        self.copy = copy
        self.limits = limits
        self.table = table
        self.unused = set(range(len(frames)))
        self.missing: dict[bytes, None] = {}
        self._seen: dict[bytes, Any] = {}

    def __call__(self, code: int, payload: memoryview) -> Any:
        """Give the value of one extension.

        Raises:
            CodecError: It is malformed, or of an unknown type.
        """
        if code == ARRAY_RECORD:
            return self._array(payload)
        if code == LIST:
            return _packed(payload)
        if code == DATA:
            return self._data(payload)
        return read_scalar(code, bytes(payload))

    def _array(self, payload: memoryview) -> Any:
        # The same record twice is one object sent twice: it comes out as one object, too.
        key = bytes(payload[:1024])
        if payload.nbytes <= 1024 and key in self._seen:
            return self._seen[key]
        record = read_record(payload, self.limits)
        if record.storage == INLINE:
            check_length(record, record.rest)
            return self._inline(record)
        value = self._shared(record) if record.storage == REFER else self._framed(record)
        self._seen[key] = value
        return value

    def _inline(self, record: Record) -> Any:
        # Elements in the head lie at any address, so they get aligned memory of their own.
        return self._restore(record, memoryview(bytearray(record.rest)), copy=self.copy)

    def _framed(self, record: Record) -> Any:
        index = read_index(record.rest[: INDEX.size])
        data = self._frame(index)
        check_length(record, data)
        if record.storage == ENTER:
            key = self._key(record.rest[INDEX.size :])
            if self.table is not None:
                self.table.enter(key, record, data)
        elif record.rest.nbytes != INDEX.size:
            raise DecodeError("bytes follow a frame index", got=f"{record.rest.nbytes} bytes")
        return self._restore(record, data, copy=self.copy)

    def _shared(self, record: Record) -> Any:
        key = self._key(record.rest)
        found = self.table.find(key) if self.table is not None else None
        if found is None:
            self.missing[key] = None
            return None
        kept, data = found
        if (kept.row, kept.dtype, kept.shape) != (record.row, record.dtype, record.shape):
            raise DecodeError(
                "a shared array is not what its reference says",
                expected=f"{record.row.name} of shape {record.shape}",
                got=f"{kept.row.name} of shape {kept.shape}",
            )
        return self._restore(record, data, copy=self.copy)

    def _key(self, data: memoryview) -> bytes:
        if not 1 <= data.nbytes <= self.limits.max_key_bytes:
            raise LimitError(
                "Limits.max_key_bytes is passed",
                expected=f"1 to {self.limits.max_key_bytes}",
                got=str(data.nbytes),
            )
        return bytes(data)

    def _restore(self, record: Record, data: memoryview, *, copy: bool) -> Any:
        return restore(
            record.row, record.kind, record.dtype, record.shape, data, framework=self.framework, copy=copy
        )

    def _frame(self, index: int) -> memoryview:
        if index >= len(self.frames):
            raise DecodeError("no such frame", expected=f"below {len(self.frames)}", got=str(index))
        self.unused.discard(index)
        return self.frames[index]

    def _data(self, payload: memoryview) -> Any:
        if payload.nbytes < 2 or payload[0] > _TEXT or payload[1] not in (FRAME, INLINE):
            raise DecodeError("malformed byte string", got=f"{bytes(payload[:8])!r}")
        rest = payload[2:]
        data = self._frame(read_index(rest)) if payload[1] == FRAME else rest
        kind = payload[0]
        if kind == _MEMORYVIEW:
            return memoryview(bytes(data)) if self.copy else data.toreadonly()
        if kind == _TEXT:
            try:
                return str(data, "utf-8")
            except UnicodeDecodeError as error:
                raise DecodeError("text is not UTF-8", got=str(error)) from error
        return bytes(data) if kind == _BYTES else bytearray(data)


def _packed(payload: memoryview) -> list[Any]:
    check_packed(payload)
    try:
        return _PACKED.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"malformed list of scalars: {error}") from error


class Builder:
    """Build the value of a checked body, taking the values of its extensions in order.

    Args:
        values: What `Scanner.run` gave.
    """

    def __init__(self, values: list[Any]) -> None:
        self._next = iter(values).__next__

    def build(self, body: bytes | memoryview) -> Any:
        """Give the value.

        Raises:
            DecodeError: A string is not UTF-8, or an element of a set or a key cannot be one.
        """
        try:
            return self._decode(body)
        except CodecError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
            raise DecodeError(f"malformed body: {error}", where="body") from error

    def _decode(self, data: bytes | memoryview) -> Any:
        # A decoder kept in an attribute would make a cycle, and hold the message until it is collected.
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> Any:
        if code not in CONTAINERS:
            return self._next()
        items = self._decode(data)
        if code == TUPLE:
            return tuple(items)
        out: Any
        if code == MAP:
            out = dict(zip(items[::2], items[1::2], strict=True))
            count = len(items) // 2
        else:
            out = set(items) if code == SET else frozenset(items)
            count = len(items)
        if len(out) != count:
            raise DecodeError("an element or key stands twice", where="body")
        return out


def read_body(body: bytes, resolver: Resolver) -> Any:
    """Check a body and build its value.

    Raises:
        MissingKeyError: The body refers to shared arrays that the table lacks.
        CodecError: Anything else that is wrong.
    """
    values = Scanner(body, resolver.limits, resolver).run()
    if resolver.unused:
        raise DecodeError("no record names this frame", where=f"frame {min(resolver.unused)}")
    value = Builder(values).build(body)
    if resolver.missing:
        raise MissingKeyError(resolver.missing)
    return value
