r"""A file of messages: append one, read one by memory map, lose nothing but the last when the power goes.

The file is a row of blocks. Each starts at a multiple of 64 and is a header of 64 bytes, its content, and
zero bytes up to the next multiple. All integers are little-endian and unsigned.

| offset | type | field |
|---|---|---|
| 0 | 8 bytes | magic: `\x89mmcfile` |
| 8 | u16 | version: 1 |
| 10 | u16 | kind: 1 message, 2 index, 3 end |
| 12 | u32 | zero |
| 16 | u64 | length of the content |
| 24 | u64 | message: how many are before it; index: how many there are; end: where the index block starts |
| 32 | u64 | XXH3-64 of the content |
| 40 | 16 bytes | zero |
| 56 | u64 | XXH3-64 of the 56 bytes before |

The content of a message block is one message in single mode (`frame.py`). A file that was closed ends with an
index block, whose content is the offset of each message block as u64, and an end block without content. A
file that was not closed has neither: a reader then walks the headers, and what does not hold at the tail is a
torn append. It is left aside by readers and cut off by the next writer. Each content is checked against its
checksum when it is read.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, overload

import numpy as np

from mmcodecs.codec import decode, encode_parts
from mmcodecs.errors import ChecksumError, DecodeError, EncodeError, TruncatedError, VersionError
from mmcodecs.frame import align, hasher
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.optional import require
from mmcodecs.tensors import Framework

MAGIC = b"\x89mmcfile"
VERSION = 1
BLOCK = 64
MESSAGE, INDEX, END = 1, 2, 3
_HEADER = struct.Struct("<8sHHIQQQ16s")
_SUM = struct.Struct("<Q")


class _Block(NamedTuple):
    """One header: what kind it is, where its content lies, its number, and the checksum of the content."""

    kind: int
    start: int
    stop: int
    number: int
    checksum: int


def _header(kind: int, length: int, number: int, checksum: int) -> bytes:
    fields = _HEADER.pack(MAGIC, VERSION, kind, 0, length, number, checksum, bytes(16))
    return fields + _SUM.pack(hasher()(fields))


def _read_header(view: memoryview, at: int) -> _Block:
    """Read the header at `at`.

    Raises:
        DecodeError: There is no whole block.
    """
    where = f"byte {at}"
    if at < 0 or at % BLOCK or at + BLOCK > view.nbytes:
        raise TruncatedError("no room for a header", where=where, got=f"a file of {view.nbytes} bytes")
    fields = view[at : at + _HEADER.size]
    magic, version, kind, zero, length, number, checksum, rest = _HEADER.unpack(fields)
    if magic != MAGIC:
        raise DecodeError("not a block of a record file", where=where, expected=repr(MAGIC), got=repr(magic))
    if version != VERSION:
        raise VersionError("unknown version", where=where, expected=str(VERSION), got=str(version))
    if hasher()(fields) != _SUM.unpack(view[at + _HEADER.size : at + BLOCK])[0]:
        raise ChecksumError("checksum mismatch in a header", where=where)
    if kind not in (MESSAGE, INDEX, END) or zero or rest != bytes(16):
        raise DecodeError("unknown kind of block", where=where, got=str(kind))
    start = at + BLOCK
    if align(start + length) > view.nbytes:
        raise TruncatedError("the block ends beyond the file", where=where, got=f"{length} bytes of content")
    return _Block(kind, start, start + length, number, checksum)


def _check_content(view: memoryview, block: _Block) -> None:
    if hasher()(view[block.start : block.stop]) != block.checksum:
        raise ChecksumError("checksum mismatch in a block", where=f"byte {block.start - BLOCK}")


def _walk(view: memoryview) -> tuple[list[int], int]:
    """Follow the headers and give the offset of each message block, and where the last good one ends."""
    offsets: list[int] = []
    ends = [0]
    while ends[-1] < view.nbytes:
        try:
            block = _read_header(view, ends[-1])
        except VersionError:
            raise
        except DecodeError:
            break
        if block.kind != MESSAGE or block.number != len(offsets):
            break
        offsets.append(ends[-1])
        ends.append(align(block.stop))
    while offsets:
        # Only the newest appends can be torn: their headers may be on disk before their contents.
        try:
            _check_content(view, _read_header(view, offsets[-1]))
            break
        except ChecksumError:
            del offsets[-1], ends[-1]
    return offsets, ends[-1]


def _from_index(view: memoryview) -> tuple[list[int], int] | None:
    """Give what `_walk` gives from the index of a closed file, or None if there is none that holds."""
    try:
        end = _read_header(view, view.nbytes - BLOCK)
        if end.kind != END:
            return None
        index = _read_header(view, end.number)
        _check_content(view, index)
    except DecodeError:
        return None
    offsets = (
        np.frombuffer(view[index.start : index.stop], "<u8").tolist() if index.stop > index.start else []
    )
    if index.kind != INDEX or len(offsets) != index.number:
        return None
    return offsets, end.number


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class RecordReader:
    """The messages that a file held when it was opened, by number.

    Arrays are read-only views of the memory map, which stays as long as any of them does.

    Args:
        path: The file.
        framework: As in `decode`.
        copy: As in `decode`.
        verify: Whether to compare each content with its checksum before it is decoded.
        limits: Bounds to hold to.

    Attributes:
        torn_bytes: Length of a torn tail, 0 in a sound file.

    Raises:
        DecodeError: The file does not start with a block.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        framework: Framework = "numpy",
        copy: bool = False,
        verify: bool = True,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.framework: Framework = framework
        self.copy = copy
        self.verify = verify
        self.limits = limits
        self._view = _map(Path(path))
        if self._view.nbytes >= BLOCK and self._view[:8] != MAGIC:
            raise DecodeError("not a record file", where="byte 0", expected=repr(MAGIC))
        found = _from_index(self._view)
        self.torn_bytes = 0
        if found is None:
            found = _walk(self._view)
            self.torn_bytes = self._view.nbytes - found[1]
        self._offsets = found[0]

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> Any:
        return self.read(number)

    def __iter__(self) -> Iterator[Any]:
        return (self.read(number) for number in range(len(self)))

    def read(self, number: int, *, type: Any = None) -> Any:
        """Decode one message; negative numbers count from the end.

        Raises:
            IndexError: There is no such message.
            CodecError: The block or the message is damaged.
        """
        at = self._offsets[number]
        block = _read_header(self._view, at)
        if block.kind != MESSAGE:
            raise DecodeError("the index names no message", where=f"byte {at}")
        if self.verify:
            _check_content(self._view, block)
        content = self._view[block.start : block.stop]
        return decode(content, copy=self.copy, framework=self.framework, type=type, limits=self.limits)


class RecordWriter:
    """Append messages to a file; one writer at a time, which a lock sees to where the system has one.

    Each append reaches the system at once, so it survives the process; with `sync` it survives the machine.

    Args:
        path: The file, made if it is not there. A torn tail is cut off.
        sync: Whether each append waits for the disk.
        limits: Bounds to stay within.

    Raises:
        EncodeError: Another writer has the file open.
        DecodeError: It is not a record file.
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
            view = _map(target)
            if view.nbytes >= BLOCK and view[:8] != MAGIC:
                raise DecodeError("not a record file", where="byte 0", expected=repr(MAGIC))
            self._offsets, self._end = _from_index(view) or _walk(view)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, value: Any) -> int:
        """Write one message and give its number.

        Raises:
            EncodeError: Some value cannot be kept; the file is as it was.
            OSError: Writing failed; what was written of the message is cut off.
        """
        parts = encode_parts(value, limits=self.limits)
        offset = self._end
        self._write(MESSAGE, parts, len(self._offsets))
        self._offsets.append(offset)
        return len(self._offsets) - 1

    def close(self) -> None:
        """Write the index and close the file."""
        if self._file.closed:
            return
        index_at = self._end
        self._write(INDEX, [np.array(self._offsets, "<u8").tobytes()], len(self._offsets))
        self._write(END, [], index_at)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: int, parts: list[bytes | bytearray | memoryview], number: int) -> None:
        digest = require("xxhash", "a record file").xxh3_64()
        for part in parts:
            digest.update(part)
        length = sum(len(part) for part in parts)
        end = align(self._end + BLOCK + length)
        try:
            self._file.write(_header(kind, length, number, digest.intdigest()))
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

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EncodeError("another writer has the file open", where=self._file.name) from error


@overload
def open(path: str | os.PathLike[str], mode: Literal["r"] = "r") -> RecordReader: ...
@overload
def open(path: str | os.PathLike[str], mode: Literal["a", "w"]) -> RecordWriter: ...
def open(path: str | os.PathLike[str], mode: str = "r") -> RecordReader | RecordWriter:
    """Open a file of messages: "r" to read, "a" to append, "w" to start a new one.

    Raises:
        EncodeError: The mode is another, or another writer has the file open.
        DecodeError: It is not a record file.
        OSError: It cannot be opened.
    """
    if mode == "r":
        return RecordReader(path)
    if mode not in ("a", "w"):
        raise EncodeError("unknown mode", where="mode", expected='"r", "a" or "w"', got=repr(mode))
    if mode == "w":
        Path(path).unlink(missing_ok=True)
    return RecordWriter(path)
