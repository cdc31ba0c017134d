"""Lists of scalars, written without looking at each element from Python.

msgspec writes a hundred million scalars a second, but it also writes what is no scalar, and some of that as
something else: a Decimal as text, a tuple as a list. So the whole list is written, or checked, by C code that
tells the kinds apart, and only lists that mix kinds are asked for the type of each element.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

FRAMED_BYTES = 4096
"""Byte strings and texts from this length on get a frame of their own."""
PACKED_LENGTH = 16
"""Lists of scalars from this length on are packed: the reader counts one as a single leaf."""

_ENCODE = msgspec.msgpack.Encoder().encode
_SCALARS = frozenset((type(None), bool, int, float, str))
_FLOAT64 = 0xCB
_REFUSED = (TypeError, OverflowError, UnicodeEncodeError, msgspec.ValidationError, RecursionError)


def pack(items: list[Any]) -> bytes | None:
    """Write a list as msgpack if it is long and holds nothing but None, booleans, numbers and short texts.

    Enum members count as their values. Integers beyond 64 bits and lone surrogates make it None, too.
    """
    if len(items) < PACKED_LENGTH:
        return None
    first = type(items[0])
    try:
        if first is int:
            msgspec.convert(items, list[int])
            return _ENCODE(items)
        if first is float or first is bool:
            packed = _ENCODE(items)
            if _is_uniform(packed, len(items), first):
                return packed
        return _ENCODE(items) if _holds_scalars(items) else None
    except _REFUSED:
        return None


def holds_no_containers(items: list[Any]) -> bool:
    """Tell whether a list that a msgpack library built holds scalars only."""
    return _SCALARS.issuperset(map(type, items))


def _holds_scalars(items: list[Any]) -> bool:
    kinds = set(map(type, items))
    if not kinds <= _SCALARS:
        return False
    return str not in kinds or all(len(item) < FRAMED_BYTES for item in items if type(item) is str)


def _is_uniform(packed: bytes, count: int, kind: type) -> bool:
    """Tell from what was written whether each element was a float, or a boolean.

    The first value starts behind the array's head. Where every ninth byte from there says "float", or every
    byte says "boolean", each value ends where the next such byte is, so nothing else can be in between.
    """
    head = 3 if count < 1 << 16 else 5
    values = np.frombuffer(packed, np.uint8, offset=head)
    if kind is bool:
        return len(values) == count and bool(((values | 1) == 0xC3).all())
    return len(values) == 9 * count and bool((values[::9] == _FLOAT64).all())
