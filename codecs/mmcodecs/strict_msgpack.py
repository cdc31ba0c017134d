"""Reading msgpack one value at a time, for formats whose shape is known.

The caller says what must come next, so nothing is built that was not asked for: ten megabytes of empty arrays
cost no more than the first of them. Positions are kept, so that payloads stay views of the input.
"""

import struct
from typing import Final, NoReturn

from mmcodecs.errors import DecodeError, LimitError, TruncatedError
from mmcodecs.limits import DEFAULT_LIMITS, Limits

_NIL: Final = 0xC0
_NUMBERS: Final = {
    0xCA: struct.Struct(">f"), 0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"), 0xCD: struct.Struct(">H"), 0xCE: struct.Struct(">I"), 0xCF:
    struct.Struct(">Q"), 0xD0: struct.Struct(">b"), 0xD1: struct.Struct(">h"), 0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}  # fmt: skip
_LENGTHS: Final = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
# First byte -> bytes of the length that follows.
_STR: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY: Final = {0xDC: 2, 0xDD: 4}
_MAP: Final = {0xDE: 2, 0xDF: 4}
_EXT: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXEXT: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def kind_of(first: int) -> str:
    """Name the msgpack type of a value by its first byte."""
    if first < 0x80 or first >= 0xE0 or 0xCC <= first <= 0xD3:
        return "int"
    if first < 0x90 or first in _MAP:
        return "map"
    if first < 0xA0 or first in _ARRAY:
        return "array"
    if first < 0xC0 or first in _STR:
        return "str"
    if first in _EXT or first in _FIXEXT:
        return "ext"
    others = {_NIL: "nil", 0xC2: "bool", 0xC3: "bool", 0xCA: "float", 0xCB: "float"}
    return others.get(first, "bin" if 0xC4 <= first <= 0xC6 else "reserved byte")


_KINDS: Final = [kind_of(first) for first in range(256)]


class Reader:
    """A position in a msgpack message, and the values read from there.

    Every method raises `DecodeError` naming `where` if another value comes, `TruncatedError` if the input
    ends, and `LimitError` once more than `limits.max_values` values were read.
    """

    def __init__(self, data: memoryview, limits: Limits = DEFAULT_LIMITS) -> None:
        self._data = data
        self._end = len(data)
        self._limits = limits
        self._values_left = limits.max_values
        self.position = 0

    def peek(self, where: str) -> str:
        """Name the type of the next value, and leave it to be read."""
        if self.position >= self._end:
            raise TruncatedError("the message ends where a value should be", where=where)
        return _KINDS[self._data[self.position]]

    def wrong(self, where: str, expected: str) -> NoReturn:
        """Raise the error that says that the next value is not what is expected."""
        raise DecodeError(
            "another type of value is needed", where=where, expected=expected, got=self.peek(where)
        )

    def map_head(self, where: str) -> int:
        """Read the head of a map, and return how many entries follow."""
        return self._head(where, "map", 0x80, 0x10, _MAP)

    def array_head(self, where: str) -> int:
        """Read the head of an array, and return how many values follow."""
        return self._head(where, "array", 0x90, 0x10, _ARRAY)

    def string(self, where: str) -> str:
        """Read text."""
        raw = self._take(self._head(where, "str", 0xA0, 0x20, _STR), where)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError("text is not UTF-8", where=where, got=error.reason) from None

    def number(self, where: str) -> int | float | bool:
        """Read an integer, a float or a boolean."""
        first = self._first(where)
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first in (0xC2, 0xC3):
            return first == 0xC3
        form = _NUMBERS.get(first)
        if form is None:
            self.position -= 1
            self.wrong(where, "a number")
        value: int | float = form.unpack(self._take(form.size, where))[0]
        return value

    def integer(self, where: str) -> int:
        """Read an integer; a boolean is none."""
        first = self._first(where)
        if first < 0x80:
            return first
        self.position -= 1
        if _KINDS[first] != "int":
            self.wrong(where, "int")
        return int(self.number(where))

    def boolean(self, where: str) -> bool:
        """Read a boolean."""
        if self.peek(where) != "bool":
            self.wrong(where, "bool")
        return bool(self.number(where))

    def nil(self, where: str) -> bool:
        """Read a nil if one comes next, and say whether it did."""
        if self.peek(where) != "nil":
            return False
        self._first(where)
        return True

    def extension(self, where: str) -> tuple[int, memoryview]:
        """Read an extension: its code, and a view of its bytes."""
        first = self._first(where)
        if first in _FIXEXT:
            length = _FIXEXT[first]
        elif first in _EXT:
            length = self._length(_EXT[first], where)
        else:
            self.position -= 1
            self.wrong(where, "ext")
        code = self._take(1, where)[0]
        return code - 0x100 if code >= 0x80 else code, self._take(length, where)

    def finish(self) -> None:
        """Raise `DecodeError` unless all of the message was read."""
        if self.position != self._end:
            raise DecodeError("bytes are left after the message", got=f"{self._end - self.position} bytes")

    def _head(self, where: str, kind: str, fix: int, count: int, sizes: dict[int, int]) -> int:
        first = self._first(where)
        if fix <= first < fix + count:
            return first - fix
        size = sizes.get(first)
        if size is None:
            self.position -= 1
            self.wrong(where, kind)
        return self._length(size, where)

    def _length(self, size: int, where: str) -> int:
        length: int = _LENGTHS[size].unpack(self._take(size, where))[0]
        return length

    def _first(self, where: str) -> int:
        self._values_left -= 1
        if self._values_left < 0:
            raise LimitError(
                "too many values", where=where, expected=f"at most max_values={self._limits.max_values}"
            )
        position = self.position
        if position >= self._end:
            raise TruncatedError("the message ends where a value should be", where=where)
        self.position = position + 1
        return self._data[position]

    def _take(self, count: int, where: str) -> memoryview:
        start = self.position
        if count > self._end - start:
            raise TruncatedError(
                "the message ends inside a value",
                where=where,
                expected=f"{count} bytes",
                got=str(self._end - start),
            )
        self.position = start + count
        return self._data[start : start + count]


def ext_head(code: int, length: int) -> bytes:
    """Write the head of an extension with `length` bytes in its shortest form.

    Raises:
        LimitError: msgpack has no length so large.
    """
    for first, size in _FIXEXT.items():
        if size == length:
            return bytes((first, code))
    for first, size in _EXT.items():
        if length < 1 << 8 * size:
            return bytes((first,)) + length.to_bytes(size, "big") + bytes((code,))
    raise LimitError("msgpack has no length so large", got=f"{length:,} bytes")
