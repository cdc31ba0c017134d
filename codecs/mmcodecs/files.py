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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from mmcodecs.arrays import Framework
from mmcodecs.errors import DecodeError, EncodeError, require
from mmcodecs.values import DEFAULT_LIMITS, Limits
from mmcodecs.wire import align, decode, encode_parts

MAGIC = b"\x89mmcfile"
VERSION = 1
BLOCK = 64
_MESSAGE = 1
_HEADER = struct.Struct("<8sHHIQQQ16s")
_SUM = struct.Struct("<Q")


class _Block(NamedTuple):
    """Place of a message in the file, and its checksum, or None if the header is damaged."""

    start: int
    stop: int
    checksum: int | None


class RecordReader:
    """The messages that a file held when it was opened, by number.

    Arrays are read-only views of the memory map, which stays as long as any of them does.

    Args:
        path: The file.
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
        path: str | os.PathLike[str],
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
        self._path = Path(path)
        self._blocks: list[_Block] = []
        self._whole = 0  # leading messages that are known not to be torn
        self.torn_bytes = 0
        self.refresh()

    def refresh(self) -> int:
        """Take in later appends, and return the number of messages. Raises as opening does."""
        self._view = _map(self._path)
        self._blocks = _follow(self._view, self._blocks[: self._whole])
        return self.settle() if self.tail else len(self._blocks)

    def settle(self) -> int:
        """Leave out the newest messages if they are torn, and return the number of messages."""
        # Only the newest appends can be torn: their headers may be on disk before their contents.
        while len(self._blocks) > self._whole and not self.holds(len(self._blocks) - 1):
            del self._blocks[-1]
        self.torn_bytes = self._view.nbytes - _end(self._blocks)
        return len(self._blocks)

    def holds(self, number: int) -> bool:
        """Return whether a message has the checksum of its header. Reads the message."""
        block = self._blocks[number]
        is_sound = block.checksum is not None and _holds(self._view, block)
        self._whole = max(self._whole, range(len(self._blocks))[number] + 1) if is_sound else self._whole
        return is_sound

    def checksum(self, number: int) -> int | None:
        """Return the XXH3-64 in the header of a message, or None if the header is damaged."""
        return self._blocks[number].checksum

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
        block = self._blocks[number]
        if block.checksum is None:
            raise DecodeError("the header of a message is damaged", where=f"byte {block.start}")
        content = self._view[block.start : block.stop]
        if (self.verify if verify is None else verify) and not self.holds(number):
            raise DecodeError("checksum mismatch in a message", where=f"byte {block.start}")
        return decode(content, copy=self.copy, framework=self.framework, type=type, limits=self.limits)


class RecordWriter:
    """Append messages to a file. A lock admits one writer at a time, on systems that have file locks.

    Each append reaches the system at once, so it survives the process, and with `sync` the machine.

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
        fields = _HEADER.pack(MAGIC, VERSION, _MESSAGE, 0, length, self._count, digest.intdigest(), bytes(16))
        end = align(self._end + BLOCK + length)
        try:
            self._file.write(fields + _SUM.pack(_checksum(fields)))
            for part in parts:
                self._file.write(part)
            self._file.write(bytes(end - self._end - BLOCK - length))
            self._file.flush()
            if self.sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end = end
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


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _checksum(data: bytes | memoryview) -> int:
    checksum: int = require("xxhash", "a record file").xxh3_64_intdigest(data)
    return checksum


def _end(blocks: list[_Block]) -> int:
    return align(blocks[-1].stop) if blocks else 0


def _follow(view: memoryview, known: list[_Block]) -> list[_Block]:
    """Return the messages of a file by their headers, the known ones first. The last may be torn."""
    blocks = known.copy()
    if view.nbytes < _end(blocks):
        raise DecodeError("the file has become shorter", expected=str(_end(blocks)), got=str(view.nbytes))
    while (at := _end(blocks)) + BLOCK <= view.nbytes:
        match = _block(view, at)
        if match is None:
            match = _next_block(view, at, len(blocks))
        elif match[0] != len(blocks) or align(match[1].stop) > view.nbytes:
            break
        if match is None:
            break
        number, block = match
        if number > len(blocks):
            blocks += [_Block(at, block.start - BLOCK, None)] * (number - len(blocks))
        blocks.append(block)
    if not blocks and view.nbytes >= BLOCK:
        magic, version, *_ = _HEADER.unpack(view[: _HEADER.size])
        if magic != MAGIC:
            raise DecodeError("not a record file", where="byte 0", expected=repr(MAGIC))
        if version != VERSION:  # this release cannot check its header
            raise DecodeError("unknown version", where="byte 0", expected=str(VERSION), got=str(version))
    return blocks


def _block(view: memoryview, at: int) -> tuple[int, _Block] | None:
    """Return number and place of the message whose header is at `at`, or None without a sound header."""
    start = at + BLOCK
    fields = view[at : at + _HEADER.size]
    magic, version, kind, zero, length, number, checksum, rest = _HEADER.unpack(fields)
    if magic != MAGIC or _SUM.unpack(view[at + _HEADER.size : start])[0] != _checksum(fields):
        return None
    if version != VERSION:
        raise DecodeError("unknown version", where=f"byte {at}", expected=str(VERSION), got=str(version))
    if (kind, zero, rest) != (_MESSAGE, 0, bytes(16)):
        return None
    return number, _Block(start, start + length, checksum)


def _next_block(view: memoryview, at: int, number: int) -> tuple[int, _Block] | None:
    """Return the first message after the damaged header of message `number` at `at`."""
    firsts = np.frombuffer(view, np.uint64, view.nbytes // BLOCK * (BLOCK // 8))[:: BLOCK // 8]
    later = np.flatnonzero(firsts[at // BLOCK + 1 :] == np.frombuffer(MAGIC, np.uint64))
    for place in ((later + at // BLOCK + 1) * BLOCK).tolist():
        match = _block(view, place)
        # A message may hold a file of messages. Each message between takes at least two blocks.
        if match and 0 < match[0] - number <= (place - at) // (2 * BLOCK) and _holds(view, match[1]):
            return match
    return None


def _holds(view: memoryview, block: _Block) -> bool:
    return align(block.stop) <= view.nbytes and _checksum(view[block.start : block.stop]) == block.checksum
