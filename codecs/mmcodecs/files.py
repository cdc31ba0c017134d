r"""A file of messages: append one, read any by memory map. A power failure can lose only the last append.

Version 1 of the format: a row of blocks. Each starts at a multiple of 64 and is a header of 64 bytes, one
message in single mode (`mmcodecs.wire`), and zero bytes up to the next multiple. All integers are
little-endian and unsigned.

| offset | type | field of the header |
|---|---|---|
| 0 | 8 bytes | magic: `\x89mmcfile` |
| 8 | u16 | version: 1 |
| 10 | u16 | kind: 1 |
| 12 | u32 | zero |
| 16 | u64 | length of the message |
| 24 | u64 | number of messages before this one |
| 32 | u64 | XXH3-64 of the message |
| 40 | 16 bytes | zero |
| 56 | u64 | XXH3-64 of the 56 bytes before |

A reader follows the headers. If a header is damaged, it looks for the next sound block with a higher number:
the messages between are damaged, and keep their numbers. Without such a block an append was torn: readers
ignore it and the next writer cuts it off. Each message is compared with its checksum when it is read.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, overload

import numpy as np

from mmcodecs.arrays import Framework
from mmcodecs.errors import DecodeError, EncodeError, require
from mmcodecs.values import DEFAULT_LIMITS, Limits
from mmcodecs.wire import align, decode, encode_parts

MAGIC = b"\x89mmcfile"
VERSION = 1
BLOCK = 64
_MESSAGE = 1
_READ_AHEAD = 128 << 10
"""Bytes of one request to read pages. Linux cuts longer ones off, depending on the disk."""
_HEAD = 64 << 10
"""Bytes that are read ahead of a message of which more may not be looked at."""
_HEADER = struct.Struct("<8sHHIQQQ16s")
_SUM = struct.Struct("<Q")


class Block(NamedTuple):
    """Place of a message in the file, and its checksum, or None if the header is damaged."""

    start: int
    stop: int
    checksum: int | None


class Blocks(Sequence[Block]):
    """Places of messages, each in 24 bytes. A checksum of 0 stands for None.

    Args:
        blocks: The first places.
    """

    __slots__ = ("_numbers",)

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._numbers = array("Q")
        self.extend(blocks)

    def __len__(self) -> int:
        return len(self._numbers) // 3

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Blocks: ...
    def __getitem__(self, index: int | slice) -> Block | Blocks:
        if isinstance(index, slice):
            first, stop, _ = index.indices(len(self))
            part = Blocks()
            part._numbers = self._numbers[3 * first : 3 * stop]
            return part
        first = 3 * range(len(self))[index]
        start, stop, checksum = self._numbers[first : first + 3]
        return Block(start, stop, checksum or None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self._numbers == other._numbers

    __hash__ = None  # type: ignore[assignment]

    def extend(self, blocks: Iterable[Block]) -> None:
        """Add places after these."""
        if isinstance(blocks, Blocks):
            self._numbers.extend(blocks._numbers)
            return
        for start, stop, checksum in blocks:
            self._numbers.extend((start, stop, checksum or 0))

    def cut(self, count: int) -> None:
        """Keep the first places only."""
        del self._numbers[3 * count :]

    def add_numbers(self, numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        """Add places from an array `(n, 3)` of starts, stops and checksums."""
        self._numbers.frombytes(numbers.tobytes())


class Source(Protocol):
    """Bytes that are read by range, such as an object of a store. `str` of it names it in errors."""

    def refresh(self) -> int:
        """Take in later bytes, and return the length in bytes."""

    def read(self, start: int, stop: int, *, ahead: int = 0) -> memoryview:
        """Return a range of bytes within the length, of which the first `ahead` will be looked at."""


class MappedFile:
    """A file by memory map.

    Args:
        path: The file.
        sparse: Whether only some ranges will be read. The system then reads no pages from the disk beside
            them, where it can be asked to.
    """

    def __init__(self, path: str | os.PathLike[str], *, sparse: bool = False) -> None:
        self._path = Path(path)
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._is_sparse = sparse and hasattr(mmap, "MADV_RANDOM")

    def __str__(self) -> str:
        return str(self._path)

    def refresh(self) -> int:
        """Map the file as it is now, and return its length in bytes."""
        with self._path.open("rb") as file:
            is_empty = os.fstat(file.fileno()).st_size == 0
            self._map = None if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(b"" if self._map is None else self._map)
        if self._is_sparse and self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)
        return self._view.nbytes

    def read(self, start: int, stop: int, *, ahead: int = 0) -> memoryview:
        """Return a view of the map."""
        if self._is_sparse and self._map is not None:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            for at in range(first, min(stop, start + ahead), _READ_AHEAD):
                length = min(stop, start + ahead, at + _READ_AHEAD) - at
                self._map.madvise(mmap.MADV_WILLNEED, at, length)
        return self._view[start:stop]


class RecordReader:
    """The messages that a file held when it was opened, by number.

    Arrays are read-only views of the memory map, which stays as long as any of them does.

    Args:
        path: The file, or a source of its bytes.
        framework: As in `decode`.
        copy: As in `decode`.
        verify: Whether to compare each message with its checksum before it is decoded.
        tail: Whether to read the newest messages, and leave out torn ones. Otherwise only headers are read
            until `settle` is called.
        limits: Bounds to enforce.

    Attributes:
        torn_bytes: Length of a torn tail, 0 in a sound file.

    Raises:
        DecodeError: It is not a record file, or of another version.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Source,
        *,
        framework: Framework = "numpy",
        copy: bool = False,
        verify: bool = True,
        tail: bool = True,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.framework: Framework = framework
        self.copy = copy
        self.verify = verify
        self.tail = tail
        self.limits = limits
        self._source = MappedFile(path) if isinstance(path, str | os.PathLike) else path
        self._path = str(self._source)
        self._size = 0
        self._blocks = Blocks()
        self._whole = 0  # leading messages that are known not to be torn
        self.torn_bytes = 0
        self.refresh()

    def refresh(self, known: Sequence[Block] = ()) -> int:
        """Take in later appends, and return the number of messages. Raises as opening does.

        Args:
            known: Places of the first messages, such as from an index, whose headers need not be followed.
                The header of the last place is compared now, and each other header when its message is read.
                Places that differ from the file are replaced by the places of its headers.
        """
        self._size = self._source.refresh()
        blocks = self._blocks[: self._whole]
        if self._size < _end(blocks):
            raise DecodeError("the file has become shorter", expected=str(_end(blocks)), got=str(self._size))
        blocks.extend(known[self._whole :])
        if len(blocks) > self._whole and not self._agrees(len(blocks) - 1, blocks[-1]):
            numbers = range(self._whole, len(blocks))
            differ = bisect_left(numbers, True, key=lambda number: not self._agrees(number, blocks[number]))
            blocks.cut(self._whole + differ)
        _follow(self._source, self._size, blocks)
        self._blocks = blocks
        return self.settle() if self.tail else len(self._blocks)

    def settle(self) -> int:
        """Leave out the newest messages if they are torn, and return the number of messages."""
        # Only the newest appends can be torn: their headers may be on disk before their contents.
        while (count := len(self._blocks)) > self._whole and not self.holds(count - 1):
            if len(self._blocks) == count:  # the headers were not followed again
                self._blocks.cut(count - 1)
        self.torn_bytes = self._size - _end(self._blocks)
        return len(self._blocks)

    def holds(self, number: int) -> bool:
        """Return whether a message has the checksum of its header. Reads the message."""
        content = self._content(number, whole=True)
        return content is not None and self._is_sound(number, content)

    def block(self, number: int) -> Block:
        """Return the place of a message and the XXH3-64 in its header, or None if the header is damaged."""
        return self._blocks[number]

    def __str__(self) -> str:
        return self._path

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Any:
        return self.read(number)

    def __iter__(self) -> Iterator[Any]:
        return (self.read(number) for number in range(len(self)))

    def read(self, number: int, *, type: Any = None, verify: bool | None = None) -> Any:
        """Decode one message. Negative numbers count from the end. `verify` overrides the reader's option.

        Raises:
            IndexError: The number is out of range.
            CodecError: The message is damaged.
        """
        where, verify = f"byte {self._blocks[number].start}", self.verify if verify is None else verify
        content = self._content(number, whole=verify)
        if content is None:
            raise DecodeError("the header of a message is damaged", where=where)
        if verify and not self._is_sound(number, content):
            raise DecodeError("checksum mismatch in a message", where=where)
        return decode(content, copy=self.copy, framework=self.framework, type=type, limits=self.limits)

    def _content(self, number: int, *, whole: bool) -> memoryview | None:
        """Return the bytes of a message in the file, or None if its header is damaged. Reads them once."""
        number = range(len(self._blocks))[number]
        block = self._blocks[number]
        if block.checksum is None:
            return None
        if align(block.stop) <= self._size:
            start = block.start - BLOCK
            view = self._source.read(start, block.stop, ahead=block.stop - start if whole else _HEAD)
            if _block(view, block.start - BLOCK) == (number, block):
                return view[BLOCK:]
        # The place is from elsewhere, or the file was replaced: the headers say where its messages are.
        blocks = Blocks()
        _follow(self._source, self._size, blocks)
        self._whole, self._blocks = 0, blocks
        is_known = number < len(self._blocks) and self._blocks[number] != block
        return self._content(number, whole=whole) if is_known else None

    def _is_sound(self, number: int, content: memoryview) -> bool:
        is_sound = _checksum(content) == self._blocks[number].checksum
        self._whole = max(self._whole, range(len(self._blocks))[number] + 1) if is_sound else self._whole
        return is_sound

    def _agrees(self, number: int, block: Block) -> bool:
        """Return whether the file has the header of a place. A damaged header is compared with nothing."""
        if align(block.stop) > self._size:
            return False
        start = block.start - BLOCK
        header = self._source.read(start, block.start)
        return block.checksum is None or _block(header, start) == (number, block)


class RecordWriter:
    """Append messages to a file. A lock admits one writer at a time, on systems that have file locks.

    Each append reaches the system at once, so it survives the process, and with `sync` the machine.
    `block` is the place of the newest message, and None without one.

    Args:
        path: The file, made if it does not exist. A torn tail is cut off.
        sync: Whether each append waits for the disk.
        limits: Bounds to stay within.

    Raises:
        EncodeError: Another writer has the file open.
        DecodeError: It is not a record file, or of another version.
        OSError: It cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, sync: bool = False, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.sync = sync
        self.limits = limits
        target = Path(path)
        target.touch()
        self._file = target.open("r+b")
        try:
            self._lock()
            blocks = RecordReader(target)._blocks
        except BaseException:
            self._file.close()
            raise
        self._count = len(blocks)
        self._end = _end(blocks)
        self.block: Block | None = blocks[-1] if blocks else None
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def __len__(self) -> int:
        return self._count

    def append(self, value: Any) -> int:
        """Write one message and return its number.

        Raises:
            EncodeError: Some value cannot be kept. The file is as it was.
            OSError: Writing failed. The part that was written is cut off.
        """
        parts = encode_parts(value, limits=self.limits)
        length = sum(len(part) for part in parts)
        digest = require("xxhash", "a record file").xxh3_64()
        for part in parts:
            digest.update(part)
        checksum, start = digest.intdigest(), self._end + BLOCK
        fields = _HEADER.pack(MAGIC, VERSION, _MESSAGE, 0, length, self._count, checksum, bytes(16))
        end = align(start + length)
        try:
            self._file.write(fields + _SUM.pack(_checksum(fields)))
            for part in parts:
                self._file.write(part)
            self._file.write(bytes(end - start - length))
            self._file.flush()
            if self.sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end, self.block = end, Block(start, start + length, checksum)
        self._count += 1
        return self._count - 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EncodeError("another writer has the file open", where=self._file.name) from error


def _checksum(data: bytes | memoryview) -> int:
    checksum: int = require("xxhash", "a record file").xxh3_64_intdigest(data)
    return checksum


def _end(blocks: Blocks) -> int:
    return align(blocks[-1].stop) if blocks else 0


def _follow(source: Source, size: int, blocks: Blocks) -> None:
    """Add the places of a file's later messages, by their headers. The last message may be torn."""
    while (at := _end(blocks)) + BLOCK <= size:
        match = _block(source.read(at, at + BLOCK), at)
        if match is None:
            match = _next_block(source.read(at, size), at, len(blocks))
        elif match[0] != len(blocks) or align(match[1].stop) > size:
            break
        if match is None:
            break
        number, block = match
        if number > len(blocks):
            blocks.extend([Block(at, block.start - BLOCK, None)] * (number - len(blocks)))
        blocks.extend([block])
    if not blocks and size >= BLOCK:
        magic, version, *_ = _HEADER.unpack(source.read(0, _HEADER.size))
        if magic != MAGIC:
            raise DecodeError("not a record file", where="byte 0", expected=repr(MAGIC))
        if version != VERSION:  # this release cannot check its header
            raise DecodeError("unknown version", where="byte 0", expected=str(VERSION), got=str(version))


def _block(view: memoryview, at: int) -> tuple[int, Block] | None:
    """Return number and place of the message whose header begins `view`, which is at `at` in the file.

    None without a sound header.
    """
    fields = view[: _HEADER.size]
    magic, version, kind, zero, length, number, checksum, rest = _HEADER.unpack(fields)
    if magic != MAGIC or _SUM.unpack(view[_HEADER.size : BLOCK])[0] != _checksum(fields):
        return None
    if version != VERSION:
        raise DecodeError("unknown version", where=f"byte {at}", expected=str(VERSION), got=str(version))
    if (kind, zero, rest) != (_MESSAGE, 0, bytes(16)):
        return None
    start = at + BLOCK
    return number, Block(start, start + length, checksum)


def _next_block(view: memoryview, at: int, number: int) -> tuple[int, Block] | None:
    """Return the first message after the damaged header of message `number`, which begins `view`."""
    firsts = np.frombuffer(view, np.uint64, view.nbytes // BLOCK * (BLOCK // 8))[:: BLOCK // 8]
    later = np.flatnonzero(firsts[1:] == np.frombuffer(MAGIC, np.uint64))
    for place in ((later + 1) * BLOCK).tolist():
        match = _block(view[place:], at + place)
        # A message may hold a file of messages. Each message between takes at least two blocks.
        if match and 0 < match[0] - number <= place // (2 * BLOCK):
            start, stop, checksum = match[1]
            content = view[start - at : stop - at]
            if align(stop) <= at + view.nbytes and _checksum(content) == checksum:
                return match
    return None
