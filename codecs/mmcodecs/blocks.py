r"""The file of messages, version 1: a row of blocks. This docstring is its specification.

Each block starts at a multiple of 64 and is a header of 64 bytes, its content, and
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

import struct
from typing import NamedTuple

import numpy as np

from mmcodecs.errors import ChecksumError, DecodeError, TruncatedError, VersionError
from mmcodecs.frame import align, hasher

MAGIC = b"\x89mmcfile"
VERSION = 1
BLOCK = 64
MESSAGE, INDEX, END = 1, 2, 3
_HEADER = struct.Struct("<8sHHIQQQ16s")
_SUM = struct.Struct("<Q")


class Block(NamedTuple):
    """One header: what kind it is, where its content lies, its number, and the checksum of the content."""

    kind: int
    start: int
    stop: int
    number: int
    checksum: int


def pack_header(kind: int, length: int, number: int, checksum: int) -> bytes:
    """Write the header of a block."""
    fields = _HEADER.pack(MAGIC, VERSION, kind, 0, length, number, checksum, bytes(16))
    return fields + _SUM.pack(hasher()(fields))


def read_header(view: memoryview, at: int) -> Block:
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
    return Block(kind, start, start + length, number, checksum)


def check_content(view: memoryview, block: Block) -> None:
    """Compare a content with its checksum.

    Raises:
        ChecksumError: They differ.
    """
    if hasher()(view[block.start : block.stop]) != block.checksum:
        raise ChecksumError("checksum mismatch in a block", where=f"byte {block.start - BLOCK}")


def walk(view: memoryview) -> tuple[list[int], int]:
    """Follow the headers and give the offset of each message block, and where the last good one ends."""
    offsets: list[int] = []
    ends = [0]
    while ends[-1] < view.nbytes:
        try:
            block = read_header(view, ends[-1])
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
            check_content(view, read_header(view, offsets[-1]))
            break
        except ChecksumError:
            del offsets[-1], ends[-1]
    return offsets, ends[-1]


def from_index(view: memoryview) -> tuple[list[int], int] | None:
    """Give what `walk` gives from the index of a closed file, or None if there is none that holds."""
    try:
        end = read_header(view, view.nbytes - BLOCK)
        if end.kind != END:
            return None
        index = read_header(view, end.number)
        check_content(view, index)
    except DecodeError:
        return None
    offsets = (
        np.frombuffer(view[index.start : index.stop], "<u8").tolist() if index.stop > index.start else []
    )
    if index.kind != INDEX or len(offsets) != index.number:
        return None
    return offsets, end.number
