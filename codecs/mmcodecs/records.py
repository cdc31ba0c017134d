"""A file of messages: append one, read one by memory map, lose nothing but torn appends when the power goes.

The format is that of `blocks.py`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np

from mmcodecs.blocks import (
    BLOCK,
    END,
    INDEX,
    MAGIC,
    MESSAGE,
    check_content,
    from_index,
    pack_header,
    read_header,
    walk,
)
from mmcodecs.codec import decode, encode_parts
from mmcodecs.errors import DecodeError, EncodeError
from mmcodecs.frame import align
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.optional import require
from mmcodecs.tensors import Framework


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
        found = from_index(self._view)
        self.torn_bytes = 0
        if found is None:
            found = walk(self._view)
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
        block = read_header(self._view, at)
        if block.kind != MESSAGE:
            raise DecodeError("the index names no message", where=f"byte {at}")
        if self.verify:
            check_content(self._view, block)
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
            self._offsets, self._end = from_index(view) or walk(view)
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
            self._file.write(pack_header(kind, length, number, digest.intdigest()))
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
