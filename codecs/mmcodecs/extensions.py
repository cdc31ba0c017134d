"""Scalars that msgpack lacks: their extension types, how each is written, and how each is read back strictly.

Reading accepts exactly what writing gives: a text that `fromisoformat` would tolerate but `isoformat` would
not write is refused, so a value has one form.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from uuid import UUID

from mmcodecs.errors import DecodeError, UnsupportedTypeError

ARRAY_RECORD, LIST, TUPLE, SET, FROZENSET, MAP, DATA = 1, 2, 3, 4, 5, 6, 7
BIG_INT, COMPLEX, DATETIME, DATE, TIME, DURATION, UUID_, DECIMAL, PATH = 8, 9, 10, 11, 12, 13, 14, 15, 16

_COMPLEX = struct.Struct("<dd")
_DURATION = struct.Struct("<iii")
_PATHS: tuple[type[pathlib.PurePath], ...] = (pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath)


def write_int(value: int) -> bytes:
    """Write an integer beyond 64 bits in its shortest two's complement."""
    magnitude = value if value >= 0 else ~value
    return value.to_bytes(magnitude.bit_length() // 8 + 1, "little", signed=True)


def _read_int(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    if -(1 << 63) <= value < 1 << 64 or write_int(value) != data:
        raise DecodeError("an integer that fits msgpack, or is longer than it need be")
    return value


def _write_clock(value: dt.datetime | dt.time) -> bytes:
    return bytes([value.fold]) + value.isoformat().encode()


def _read_clock(kind: type[dt.datetime] | type[dt.time], data: bytes) -> dt.datetime | dt.time:
    if not data or data[0] > 1:
        raise ValueError
    value = kind.fromisoformat(data[1:].decode("ascii")).replace(fold=data[0])
    if _write_clock(value) != data:
        raise ValueError
    return value


def _read_date(data: bytes) -> dt.date:
    value = dt.date.fromisoformat(data.decode("ascii"))
    if value.isoformat().encode() != data:
        raise ValueError
    return value


def _read_duration(data: bytes) -> dt.timedelta:
    parts = _DURATION.unpack(data)
    value = dt.timedelta(*parts)
    if (value.days, value.seconds, value.microseconds) != parts:
        raise ValueError
    return value


def _read_decimal(data: bytes) -> Decimal:
    value = Decimal(data.decode("ascii"))
    if str(value).encode() != data:
        raise ValueError
    return value


def _write_path(value: pathlib.PurePath) -> bytes:
    flavours = {pathlib.PurePosixPath: 1, pathlib.PureWindowsPath: 2}
    return bytes([flavours.get(type(value), 0)]) + str(value).encode("utf-8", "surrogateescape")


def _read_path(data: bytes) -> pathlib.PurePath:
    if not data or data[0] >= len(_PATHS):
        raise ValueError
    value = _PATHS[data[0]](data[1:].decode("utf-8", "surrogateescape"))
    if data[0] and _write_path(value) != data:
        raise ValueError
    return value


def _read_complex(data: bytes) -> complex:
    return complex(*_COMPLEX.unpack(data))


def _read_uuid(data: bytes) -> UUID:
    return UUID(bytes=data)


WRITERS: dict[type, tuple[int, Callable[[object], bytes]]] = {}
READERS: dict[int, Callable[[bytes], object]] = {
    BIG_INT: _read_int,
    COMPLEX: _read_complex,
    DATETIME: lambda data: _read_clock(dt.datetime, data),
    DATE: _read_date,
    TIME: lambda data: _read_clock(dt.time, data),
    DURATION: _read_duration,
    UUID_: _read_uuid,
    DECIMAL: _read_decimal,
    PATH: _read_path,
}
_NAMES = {
    BIG_INT: "integer", COMPLEX: "complex number", DATETIME: "date and time", DATE: "date", TIME: "time",
    DURATION: "duration", UUID_: "UUID", DECIMAL: "decimal", PATH: "path",
}  # fmt: skip


def _register() -> None:
    def add(kind: type, code: int, write: Callable[..., bytes]) -> None:
        WRITERS[kind] = (code, write)

    add(complex, COMPLEX, lambda value: _COMPLEX.pack(value.real, value.imag))
    add(dt.datetime, DATETIME, _write_clock)
    add(dt.date, DATE, lambda value: value.isoformat().encode())
    add(dt.time, TIME, _write_clock)
    add(dt.timedelta, DURATION, lambda value: _DURATION.pack(value.days, value.seconds, value.microseconds))
    add(UUID, UUID_, lambda value: value.bytes)
    add(Decimal, DECIMAL, lambda value: str(value).encode())
    for kind in (*_PATHS, type(pathlib.Path())):
        add(kind, PATH, _write_path)


_register()


def write_scalar(value: object) -> tuple[int, bytes] | None:
    """Give type and payload of a scalar that msgpack lacks, or None for a value of another type.

    Raises:
        UnsupportedTypeError: A time whose zone has no fixed offset of its own.
    """
    found = WRITERS.get(type(value))
    if found is None:
        return None
    code, write = found
    if isinstance(value, dt.time) and value.tzinfo is not None and value.utcoffset() is None:
        raise UnsupportedTypeError("the zone of this time depends on a date", remedy="Give a datetime")
    return code, write(value)


def read_scalar(code: int, data: bytes) -> object:
    """Read the payload of one of these extension types.

    Raises:
        DecodeError: The type is unknown, or the payload is not what a writer gives.
    """
    reader = READERS.get(code)
    if reader is None:
        raise DecodeError("unknown extension type", expected="1 to 16", got=str(code))
    try:
        return reader(data)
    except DecodeError:
        raise
    except (ValueError, TypeError, OverflowError, ArithmeticError, InvalidOperation, struct.error) as error:
        raise DecodeError(f"malformed {_NAMES[code]}", got=f"{data[:40]!r}") from error
