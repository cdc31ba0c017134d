"""Reading a body, first half: walk the msgpack bytes once, and check every one before anything is built.

What a msgpack library leaves open is decided here: depth, number of values, lengths against what is left,
string keys, duplicate keys, extension types, and the bytes behind the last value. The walk hands the payload
of each extension that is no container to `Leaves`, in the order of the body, and keeps what comes back. A
msgpack library then builds the containers and takes those values in the same order (`restore.py`).

A walk, and not a walk of what was built: ten megabytes of empty maps are refused before one exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mmcodecs.errors import CodecError, DecodeError, LimitError, TruncatedError
from mmcodecs.extensions import FROZENSET, MAP, SET, TUPLE
from mmcodecs.limits import Limits

CONTAINERS = (TUPLE, SET, FROZENSET, MAP)
# Classes of first bytes: FIXED has all of its length in the table, the others say it themselves.
FIXED, STRING, BINARY, ARRAY, MAPPING, EXTENSION, INVALID = range(7)

LEAF_COST, CONTAINER_COST = 4, 2
"""What an extension that is no container, and a container that holds something, count in
`Limits.max_values`."""

Leaves = Callable[[int, memoryview], object]


def _tables() -> tuple[list[int], list[int], list[int]]:
    """Give for each first byte its class, the width of its length field, and the length it says itself."""
    kinds, fields, sizes = [FIXED] * 256, [0] * 256, [1] * 256
    for byte in range(0x80, 0x90):
        kinds[byte], sizes[byte] = MAPPING, byte & 15
    for byte in range(0x90, 0xA0):
        kinds[byte], sizes[byte] = ARRAY, byte & 15
    for byte in range(0xA0, 0xC0):
        sizes[byte] = 1 + (byte & 31)
    kinds[0x80] = kinds[0x90] = FIXED  # an empty container has nothing to go into
    sizes[0x80] = sizes[0x90] = 1
    kinds[0xC1] = INVALID
    for first, kind, widths in (
        (0xC4, BINARY, (1, 2, 4)), (0xC7, EXTENSION, (1, 2, 4)), (0xD9, STRING, (1, 2, 4)),
        (0xDC, ARRAY, (2, 4)), (0xDE, MAPPING, (2, 4)),
    ):  # fmt: skip
        for step, width in enumerate(widths):
            kinds[first + step], fields[first + step] = kind, width
    for byte, size in {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.items():
        sizes[byte] = size
    for step in range(4):
        sizes[0xD0 + step] = 1 + (1 << step)
    for step in range(5):
        kinds[0xD4 + step], sizes[0xD4 + step] = EXTENSION, 1 << step
    return kinds, fields, sizes


KIND, FIELD, SIZE = _tables()


class Level:
    """One container that the walk is inside of."""

    __slots__ = ("count", "end", "key", "keys", "left")

    def __init__(self, count: int, keys: set[bytes] | None, end: int | None) -> None:
        self.count = count  # values in all, to tell an index in an error's path
        self.left = count
        self.keys = keys  # of a map: those seen so far
        self.key = b""
        self.end = end  # where the extension around it must end

    def path(self) -> str:
        """Write the step to the value that is being read, nothing behind the last."""
        if not self.left:
            return ""
        if self.keys is not None:
            return f".{self.key.decode('utf-8', 'replace')}"
        return f"[{self.count - self.left}]"


class Scanner:
    """One walk over one body.

    Args:
        body: The bytes of the body.
        limits: Bounds to hold to.
        leaves: Called with type and payload of every extension that is no container, in order.
    """

    def __init__(self, body: bytes, limits: Limits, leaves: Leaves) -> None:
        self.body = body
        self.view = memoryview(body)
        self.limits = limits
        self.leaves = leaves
        self.values: list[Any] = []
        self.levels: list[Level] = []
        self.level = Level(1, None, None)
        self.budget = limits.max_values

    def run(self) -> list[Any]:
        """Check the body and give the values of its leaves, in order.

        Raises:
            CodecError: With the path of the first thing that is wrong.
        """
        try:
            end = self._walk()
            if end > len(self.body):
                self._ends_early(end)
            if end < len(self.body):
                raise DecodeError("bytes follow the value", where="body", got=f"{len(self.body) - end} bytes")
        except CodecError as error:
            # The outermost level holds the body's one value, which the path calls "$".
            steps = [level.path() for level in (*self.levels, self.level)][1:]
            raise error.at("$" + "".join(steps)) from error.__cause__
        return self.values

    def _walk(self) -> int:
        body, levels, size = self.body, self.levels, len(self.body)
        at = 0
        level = self.level
        while True:
            if level.keys is not None:
                at = self._key(level, at)
            if at >= size:
                self._ends_early(at)
            self.budget -= 1
            if self.budget < 0:
                raise LimitError("Limits.max_values is passed", expected=f"at most {self.limits.max_values}")
            byte = body[at]
            kind = KIND[byte]
            if kind == FIXED:
                at += SIZE[byte]
                inner = None
            else:
                at, inner = self._long(byte, kind, at)
            if inner is None:
                level.left -= 1
            else:
                self.budget -= CONTAINER_COST - 1
                levels.append(level)
                if len(levels) > self.limits.max_depth:
                    raise LimitError(
                        "Limits.max_depth is passed", expected=f"at most {self.limits.max_depth}"
                    )
                level = self.level = inner
            while not level.left:
                if level.end is not None and at != level.end:
                    raise DecodeError(
                        "the value in an extension does not fill it", got=f"{at - level.end:+} bytes"
                    )
                if not levels:
                    return at
                level = self.level = levels.pop()
                level.left -= 1

    def _key(self, level: Level, at: int) -> int:
        """Read one key of a map and give where its value starts."""
        body = self.body
        if at >= len(body):
            self._ends_early(at)
        byte = body[at]
        if 0xA0 <= byte < 0xC0:
            start, length = at + 1, byte & 31
        elif KIND[byte] == STRING:
            start, length = self._length(byte, at)
        else:
            raise DecodeError("a key is a string", got=f"first byte {byte:#04x}")
        end = start + length
        if end > len(body):
            self._ends_early(end)
        keys = level.keys
        key = level.key = body[start:end]
        if keys is not None:
            if key in keys:
                raise DecodeError("duplicate key", got=repr(key[:80]))
            keys.add(key)
        return end

    def _length(self, byte: int, at: int) -> tuple[int, int]:
        """Give where the content behind a length field starts, and the length."""
        width = FIELD[byte]
        start = at + 1 + width
        if start > len(self.body):
            self._ends_early(start)
        return start, int.from_bytes(self.body[at + 1 : start], "big") if width else SIZE[byte]

    def _long(self, byte: int, kind: int, at: int) -> tuple[int, Level | None]:
        """Read a value of varying length: give where it ends, or where its inside starts and the inside."""
        if kind == INVALID:
            raise DecodeError("no msgpack value starts with 0xc1")
        start, length = self._length(byte, at)
        if kind == EXTENSION:
            return self._extension(start, length)
        if kind in (STRING, BINARY):
            if start + length > len(self.body):
                self._ends_early(start + length)
            return start + length, None
        needed = length * (2 if kind == MAPPING else 1)
        if start + needed > len(self.body):
            # Each value has at least a byte: a count beyond that would only make the reader allocate.
            self._ends_early(start + needed)
        if kind == MAPPING:
            return start, Level(length, set(), None)
        return start, Level(length, None, None)

    def _extension(self, at: int, length: int) -> tuple[int, Level | None]:
        end = at + 1 + length
        if end > len(self.body):
            self._ends_early(end)
        code = self.body[at]
        if code in CONTAINERS:
            byte = self.body[at + 1] if length else 0xC1
            if not _is_array(byte):
                raise DecodeError("a tuple, set or map extension holds an array", got=f"type {code}")
            start, count = (at + 2, 0) if byte == 0x90 else self._length(byte, at + 1)
            if start + count > end or (code == MAP and count % 2):
                raise DecodeError("the array in an extension does not fit it", got=f"{count} elements")
            return start, Level(count, None, end)
        self.budget -= LEAF_COST - 1
        self.values.append(self.leaves(code, self.view[at + 1 : end]))
        return end, None

    def _ends_early(self, needed: int) -> NoReturn:
        raise TruncatedError(
            "the body ends inside a value", expected=f"at least {needed} bytes", got=str(len(self.body))
        )


def _is_array(byte: int) -> bool:
    return byte == 0x90 or KIND[byte] == ARRAY


def check_packed(payload: memoryview) -> None:
    """Check that the count of a packed list fits its bytes, before a reader allocates for it.

    Raises:
        DecodeError: It is no array, or announces more elements than it has bytes.
    """
    byte = payload[0] if payload.nbytes else 0xC1
    if not _is_array(byte) or payload.nbytes < 1 + FIELD[byte]:
        raise DecodeError("a list of scalars is an array", got=f"first byte {byte:#04x}")
    width = FIELD[byte]
    count = int.from_bytes(payload[1 : 1 + width], "big") if width else byte & 15
    if count > payload.nbytes - 1 - width:
        raise TruncatedError("a list announces more than it holds", expected=f"{count} elements")
