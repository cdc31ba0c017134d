r"""The wire, version 1: preamble, frame table, body, payloads. This docstring is its specification.

All integers are little-endian and unsigned unless said otherwise. A message is a **head** and **payload
frames**:

- *frames mode*: the head and each payload are separate byte strings `[head, payload 0, payload 1, ...]`;
- *single mode*: one byte string: the head, then the payloads, each at the next offset that is a multiple of
  64, counted from the start of the message. The gaps are zero bytes. Nothing follows the last payload.

**Head**

| offset | type | field |
|---|---|---|
| 0 | 8 bytes | magic: `89 6D 6D 63 6F 64 65 63` (`\x89mmcodec`) |
| 8 | u16 | version: 1 |
| 10 | u16 | flags: bit 0 single mode, bit 1 checksums; all others zero |
| 12 | u32 | n: number of payload frames |
| 16 | u64 | b: length of the body |
| 24 | u64 | t: length of the message: single mode, all of it; frames mode, head plus all payloads |
| 32 | u64 | capacity of the writer's table of shared arrays, in bytes; 0 without one |
| 40 | u64 | with checksums: XXH3-64 (seed 0) of the head with these eight bytes zero; else 0 |
| 48 | 16 bytes | zero |
| 64 | n x 24 bytes | frame table: u64 offset (frames mode: 0), u64 length, u64 XXH3-64 of payload or 0 |
| 64 + 24 n | b bytes | body |

**Body**: one msgpack value. Integers, floats, strings, booleans, nil, binaries, arrays and maps stand for
themselves. Maps have string keys only, each once. Everything else is an extension of one of these types, so
user data can never be mistaken for a record:

| type | stands for | payload |
|---|---|---|
| 1 | array | an array record, below |
| 2 | list of scalars | msgpack array of nil, booleans, integers, floats, strings; same as a plain array |
| 3 | tuple | msgpack array |
| 4, 5 | set, frozenset | msgpack array, no element twice |
| 6 | map whose keys are not all strings | msgpack array: key, value, key, value, ...; no key twice |
| 7 | long or special bytes | u8 kind (0 bytes, 1 bytearray, 2 memoryview, 3 UTF-8 text), u8 storage, data |
| 8 | integer beyond 64 bits | two's complement, little-endian, shortest form |
| 9 | complex number | two f64 |
| 10 | date and time | u8 fold (0 or 1), ISO 8601 text as Python's `isoformat` writes it |
| 11 | date | ISO 8601 text |
| 12 | time of day | u8 fold, ISO 8601 text |
| 13 | duration | i32 days, i32 seconds in [0, 86400), i32 microseconds in [0, 10^6) |
| 14 | UUID | 16 bytes, as printed |
| 15 | decimal | text |
| 16 | path | u8 flavour (0 native, 1 POSIX, 2 Windows), UTF-8 text; undecodable bytes stand as they are |

*Storage* is 0: the data is a u32, the index of a payload frame; or 1: the data is the bytes themselves.

**Array record**

| offset | type | field |
|---|---|---|
| 0 | u8 | dtype id (`dtypes.py`) |
| 1 | u8 | bits 0-1: sent as 0 array, 1 scalar, 2 tensor, 3 raw bits; bit 2: big-endian; bits 3-4: storage |
| 2 | u8 | d: number of dimensions |
| 3 | u8 | datetime64, timedelta64: unit id (`dtypes.UNITS`); else 0 |
| 4 | u32 | datetime64, timedelta64: multiple of the unit; bytes, str: width; else 0 |
| 8 | d x u64 | dimensions, outermost first |
| 8 + 8 d | | storage 0: u32 frame index. 1: the elements. 2: u32 frame index, then key. 3: key |

Elements lie in C order. Their bytes are exactly `product(dimensions) * itemsize` long: a frame, or what
follows inline. Several records may name one frame; each frame is named at least once. A scalar has no
dimensions and is inline. Storages 2 and 3 belong to the table of shared arrays (`shared.py`): 2 also enters
the array under its key, 3 means the array that was entered.

A reader refuses what does not hold to this, at whatever place, and checks `Limits` before it allocates.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcodecs.errors import ChecksumError, DecodeError, LimitError, TruncatedError, VersionError
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.optional import require

MAGIC = b"\x89mmcodec"
VERSION = 1
ALIGNMENT = 64
PREAMBLE_BYTES = 64
SINGLE, CHECKSUMS = 1, 2

_PREAMBLE = struct.Struct("<8sHHIQQQQ16s")
_ENTRY = struct.Struct("<QQQ")
_CHECKSUM_AT = 40


@dataclass(frozen=True, slots=True)
class Layout:
    """What a head says about its message, checked against itself and the limits.

    Attributes:
        single: Whether the payloads follow in the same byte string.
        body: Start and stop of the body within the head.
        offsets: Start of each payload in the message; all 0 in frames mode.
        lengths: Length of each payload.
        checksums: XXH3-64 of each payload, or None.
        total: Length of the message, as the preamble says.
        table_bytes: Capacity of the writer's table of shared arrays.
    """

    single: bool
    body: tuple[int, int]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    checksums: tuple[int, ...] | None
    total: int
    table_bytes: int


def align(offset: int) -> int:
    """Give the first multiple of 64 that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def hasher() -> Callable[[object], int]:
    """Give XXH3-64 with seed 0.

    Raises:
        FrameworkError: xxhash is not installed.
    """
    digest: Callable[[object], int] = require("xxhash", "a checksum").xxh3_64_intdigest
    return digest


def head_room(frames: int) -> int:
    """Give the length of what comes before the body, for so many frames."""
    return PREAMBLE_BYTES + _ENTRY.size * frames


def fill_head(
    head: bytearray,
    lengths: Sequence[int],
    *,
    single: bool,
    checksums: Sequence[int] | None,
    table_bytes: int,
) -> tuple[list[int], int]:
    """Lay out a message, and write preamble and frame table.

    Args:
        head: `head_room(len(lengths))` bytes, then the body.
        lengths: Length of each payload.
        single: Whether the payloads follow in the same byte string.
        checksums: XXH3-64 of each payload, or None for a message without.
        table_bytes: Capacity of the writer's table of shared arrays.

    Returns:
        The offset of each payload (0 in frames mode), and the length of the message.
    """
    body_bytes = len(head) - head_room(len(lengths))
    offsets, end = [], len(head)
    for length in lengths:
        start = align(end) if single else end
        offsets.append(start if single else 0)
        end = start + length
    flags = (SINGLE if single else 0) | (CHECKSUMS if checksums is not None else 0)
    _PREAMBLE.pack_into(
        head, 0, MAGIC, VERSION, flags, len(lengths), body_bytes, end, table_bytes, 0, bytes(16)
    )
    at = PREAMBLE_BYTES
    for offset, length, checksum in zip(offsets, lengths, checksums or [0] * len(lengths), strict=True):
        _ENTRY.pack_into(head, at, offset, length, checksum)
        at += _ENTRY.size
    if checksums is not None:
        struct.pack_into("<Q", head, _CHECKSUM_AT, hasher()(head))
    return offsets, end


def message_length(start: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> int:
    """Read from the first 64 bytes how long the message is, to receive it into one buffer.

    Raises:
        DecodeError: These are not the first bytes of a message.
        LimitError: It is longer than `limits.max_bytes`.
    """
    return _preamble(memoryview(start), limits)[3]


def _preamble(view: memoryview, limits: Limits) -> tuple[int, int, int, int, int, int]:
    """Check the preamble and give flags, frame count, body length, message length, capacity and checksum."""
    if view.nbytes < PREAMBLE_BYTES:
        raise TruncatedError(
            "no room for a preamble", where="head", expected="64 bytes", got=str(view.nbytes)
        )
    magic, version, flags, count, body, total, table, checksum, rest = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError("not a message", where="head", expected=repr(MAGIC), got=repr(magic))
    if version != VERSION:
        raise VersionError("unknown version", where="head", expected=str(VERSION), got=str(version))
    if flags & ~(SINGLE | CHECKSUMS) or rest != bytes(16) or (checksum and not flags & CHECKSUMS):
        raise DecodeError("reserved bits of the preamble are set", where="head", got=f"flags {flags:#06x}")
    head_bytes = head_room(count) + body
    for name, value, bound in (
        ("max_frames", count, limits.max_frames),
        ("max_head_bytes", head_bytes, limits.max_head_bytes),
        ("max_bytes", total, limits.max_bytes),
    ):
        if value > bound:
            raise LimitError(
                f"Limits.{name} is passed", where="head", expected=f"at most {bound}", got=str(value)
            )
    return flags, count, body, total, table, checksum


def read_layout(view: memoryview, limits: Limits) -> Layout:
    """Check a head, or a whole message in single mode, and give its layout.

    Args:
        view: Contiguous bytes: exactly the head in frames mode, the whole message in single mode.
        limits: Bounds to hold to.

    Raises:
        DecodeError: Anything that the specification does not allow.
        LimitError: A bound is passed.
    """
    flags, count, body_bytes, total, table_bytes, checksum = _preamble(view, limits)
    single = bool(flags & SINGLE)
    body_at = head_room(count)
    head_bytes = body_at + body_bytes
    if view.nbytes < head_bytes or (single and view.nbytes < total):
        needed = total if single else head_bytes
        raise TruncatedError(
            "the message ends early", where="head", expected=f"{needed} bytes", got=str(view.nbytes)
        )
    if view.nbytes > (total if single else head_bytes):
        raise DecodeError("bytes follow the message", where="head", got=f"{view.nbytes} bytes")
    if flags & CHECKSUMS:
        _check_head(view[:head_bytes], checksum)
    entries = list(_ENTRY.iter_unpack(view[PREAMBLE_BYTES:body_at]))
    end = head_bytes
    for index, (offset, length, payload_sum) in enumerate(entries):
        start = align(end) if single else end
        if offset != (start if single else 0) or (payload_sum and not flags & CHECKSUMS):
            raise DecodeError(
                "offset or checksum out of place", where=f"frame {index}", got=f"offset {offset}"
            )
        end = start + length
        if end > total:
            raise DecodeError(
                "the frame ends beyond the message", where=f"frame {index}", got=f"length {length}"
            )
    if end != total:
        raise DecodeError(
            "the frames do not fill the message", where="head", expected=str(end), got=str(total)
        )
    offsets, lengths, sums = zip(*entries, strict=True) if entries else ((), (), ())
    checked = tuple(sums) if flags & CHECKSUMS else None
    return Layout(single, (body_at, head_bytes), tuple(offsets), tuple(lengths), checked, total, table_bytes)


def _check_head(head: memoryview, expected: int) -> None:
    plain = bytearray(head)
    plain[_CHECKSUM_AT : _CHECKSUM_AT + 8] = bytes(8)
    got = hasher()(plain)
    if got != expected:
        raise ChecksumError(
            "checksum mismatch", where="head", expected=f"{expected:#018x}", got=f"{got:#018x}"
        )


def split_single(view: memoryview, layout: Layout) -> list[memoryview]:
    """Cut a message in single mode into its payloads, and check that the gaps are zero.

    Raises:
        DecodeError: A byte of a gap is not zero.
    """
    payloads, end = [], layout.body[1]
    for index, (offset, length) in enumerate(zip(layout.offsets, layout.lengths, strict=True)):
        if any(view[end:offset]):
            raise DecodeError("the gap before a frame is not zero", where=f"frame {index}")
        end = offset + length
        payloads.append(view[offset:end])
    return payloads
