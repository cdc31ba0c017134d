r"""The wire, version 1, and its readers and writers: `encode`, `decode`, `Encoder`, `Decoder`.

All integers are little-endian and unsigned. A message is a **head** and **payload frames**:

- *frames mode*: the head and each payload are separate byte strings `[head, payload 0, payload 1, ...]`;
- *single mode*: one byte string: the head, then the payloads, each at the next offset that is a multiple of
  64, counted from the start of the message. The gaps are zero bytes. Nothing follows the last payload.

**Head**

| offset | type | field |
|---|---|---|
| 0 | 8 bytes | magic: `89 6D 6D 63 6F 64 65 63` (`\x89mmcodec`) |
| 8 | u16 | version: 1 |
| 10 | u16 | flags: bit 0 single mode, all others zero |
| 12 | u32 | n: number of payload frames |
| 16 | u64 | b: length of the body |
| 24 | u64 | t: length of the message (frames mode: head plus all payloads) |
| 32 | u64 | capacity of the writer's table of shared arrays, in bytes; 0 without one |
| 40 | 24 bytes | zero |
| 64 | n x 24 bytes | frame table: u64 offset (frames mode: 0), u64 length, u64 zero |
| 64 + 24 n | b bytes | body |

**Body**: one msgpack value. Maps have string keys. Types that msgpack lacks are extensions:

| type | value | payload |
|---|---|---|
| 1 | array | an array record, below |
| 2 | long list of scalars | msgpack array of nil, booleans, numbers, strings, as a plain array |
| 3 | tuple | msgpack array |
| 7 | long or special bytes | u8 kind (0 bytes, 1 bytearray, 2 memoryview, 3 UTF-8 text), u8 storage, data |

*Storage* 0: the data is a u32, the index of a payload frame. Storage 1: the data is the bytes themselves.

**Array record**

| offset | type | field |
|---|---|---|
| 0 | u8 | dtype id (`mmcodecs.arrays`) |
| 1 | u8 | bits 0-1: sent as 0 array, 1 scalar, 2 tensor, 3 raw bits. Bit 2: big-endian. Bits 3-4: storage |
| 2 | u8 | d: number of dimensions |
| 3 | 5 bytes | zero |
| 8 | d x u64 | dimensions, outermost first |
| 8 + 8 d | | storage 0: u32 frame index. 1: the elements. 2: u32 frame index, then key. 3: key |

Elements lie in C order. Their bytes are exactly `product(dimensions) * itemsize` long: a frame, or the rest
of an inline record. Several records may name one frame, and each frame is named at least once. A scalar is
inline, without dimensions. Storages 2 and 3 belong to the table of shared arrays (`mmcodecs.shared`): 2 also
enters the array under its key, 3 refers to the array that was entered.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from mmcodecs.arrays import AnyArray, Framework, contiguous
from mmcodecs.buffers import ALIGNMENT, Buffer, BufferPool, aligned_empty
from mmcodecs.errors import BufferTooSmallError, CodecError, DecodeError, EncodeError, limit_exceeded
from mmcodecs.shared import Entered, SharedTable, copied
from mmcodecs.structs import ready
from mmcodecs.values import DEFAULT_LIMITS, Limits, ValueReader, ValueWriter

MAGIC = b"\x89mmcodec"
VERSION = 1
SINGLE = 1

Readable: TypeAlias = bytes | bytearray | memoryview | np.ndarray[Any, Any]
TABLE_BYTES = 2 << 30
_PREAMBLE = struct.Struct("<8sHHIQQQ24s")
_ENTRY = struct.Struct("<QQQ")


def encode(
    value: Any, *, buffer: BufferPool | Buffer | None = None, limits: Limits = DEFAULT_LIMITS
) -> memoryview:
    """Write a value as one message in single mode. Each array is copied once, straight to its place.

    Args:
        value: See `docs/codec.md` for the types.
        buffer: Where to write: a pool, a writable buffer of the caller's (its start is used), or None for
            fresh memory. A pool's buffer returns when the result and everything decoded from it is gone.
        limits: Bounds to stay within.

    Returns:
        A view of exactly the message. Its payloads are aligned to 64 bytes if its start is, which holds for
        pools and fresh memory.

    Raises:
        EncodeError: Some value cannot be kept, or the buffer is too short.
        LimitError: A bound is exceeded.
    """
    return _message(value, limits).single(buffer)


def encode_frames(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> list[bytearray | memoryview]:
    """Write a value as `[head, payload, ...]` without copying a C-contiguous array.

    Payloads are views of the arrays' own memory: do not write to an array before its frames are sent. Raises
    as `encode`.
    """
    return _message(value, limits).frames()


def encode_keyed_frames(
    value: Any, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[list[bytearray | memoryview], list[bytes]]:
    """Write a value as `encode_frames` does, and return the key of each frame as well.

    A frame with a `Shared` array has its key, and any other frame an empty one. A transport need not send a
    frame again whose key its peer knows. Raises as `encode`.
    """
    writer = ValueWriter(limits)
    frames = Message(writer.write(value), writer.frames, limits).frames()
    return frames, [b"", *writer.keys]


def encode_parts(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> list[bytes | bytearray | memoryview]:
    """Write a value as pieces that join to the result of `encode`, without copying a C-contiguous array.

    For `sendmsg` and `writev`, towards a reader that receives into one buffer. Raises as `encode`.
    """
    return _message(value, limits).parts()


def decode(
    data: Readable | Sequence[Readable],
    *,
    copy: bool = False,
    framework: Framework = "numpy",
    type: Any = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Read a message in either mode.

    Args:
        data: One buffer, or the list of frames.
        copy: Copy arrays into writable memory. Otherwise they are read-only views of `data` and keep it
            alive.
        framework: Class of the arrays: "numpy" or "torch". Torch tensors are views if `data` is writable
            memory, else copies.
        type: A type to build, such as a Struct, dataclass or pydantic model; None for the neutral form.
        limits: Bounds to enforce.

    Raises:
        CodecError: Whatever is wrong, and nothing else.
    """
    value = read_message(data, copy=copy, framework=framework, limits=limits)
    return value if type is None else convert(value, type)


def convert(value: Any, target: Any) -> Any:
    """Build `target`, such as a Struct, dataclass or pydantic model, from a decoded value.

    Raises:
        DecodeError: The value does not fit. The message names the place.
    """

    def fill(kind: Any, item: Any) -> Any:
        """Fill a type that msgspec does not know: an array as it is, a model by pydantic."""
        return item if isinstance(kind, type) and isinstance(item, kind) else kind.model_validate(item)

    try:
        return msgspec.convert(value, ready(target), dec_hook=fill)
    except CodecError:
        raise
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        raise DecodeError(problem, where=where.rstrip("`") or "$") from error
    except Exception as error:  # a validator or constructor of the caller's may raise anything
        raise DecodeError(f"cannot build {target}: {error}") from error


def align(offset: int) -> int:
    """Return the first multiple of 64 that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Message:
    """One value as a body, and payloads that are still in the memory of their arrays.

    Attributes:
        body: The msgpack of `ValueWriter`.
        payloads: The frames that the body names.
        limits: Bounds to stay within.
        table_bytes: Capacity of the writer's table of shared arrays, or 0.
    """

    body: bytes
    payloads: Sequence[AnyArray]
    limits: Limits
    table_bytes: int = 0

    def single(self, buffer: BufferPool | Buffer | None) -> memoryview:
        """Write the message into one buffer, see `encode`."""
        head, (*offsets, total) = self.head(single=True)
        out = _writable(buffer, total)
        end = len(head)
        out[:end] = head
        for start, array in zip(offsets, self.payloads, strict=True):
            out[end:start] = bytes(start - end)
            end = start + array.nbytes
            np.copyto(np.ndarray(array.shape, array.dtype, buffer=out[start:end]), array)
        return out

    def frames(self) -> list[bytearray | memoryview]:
        """Return head and payloads as frames, see `encode_frames`."""
        head, _ = self.head(single=False)
        return [head, *map(contiguous, self.payloads)]

    def parts(self) -> list[bytes | bytearray | memoryview]:
        """Return the pieces of the single form, see `encode_parts`."""
        head, (*offsets, _) = self.head(single=True)
        parts: list[bytes | bytearray | memoryview] = [head]
        end = len(head)
        for start, array in zip(offsets, self.payloads, strict=True):
            parts += [bytes(start - end)] * (start > end) + [contiguous(array)]
            end = start + array.nbytes
        return parts

    def head(self, *, single: bool) -> tuple[bytearray, list[int]]:
        """Return the head, and the offset of each payload in single mode and of the end."""
        head = bytearray(_PREAMBLE.size + _ENTRY.size * len(self.payloads))
        end = len(head) + len(self.body)
        offsets = []
        for index, array in enumerate(self.payloads):
            start = align(end) if single else end
            offsets.append(start)
            _ENTRY.pack_into(
                head, _PREAMBLE.size + _ENTRY.size * index, start if single else 0, array.nbytes, 0
            )
            end = start + array.nbytes
        flags = SINGLE if single else 0
        numbers = len(self.payloads), len(self.body), end, self.table_bytes
        _PREAMBLE.pack_into(head, 0, MAGIC, VERSION, flags, *numbers, bytes(24))
        head += self.body
        _check_limits(self.limits, len(self.payloads), len(head), end)
        return head, [*offsets, end]


def _message(value: Any, limits: Limits) -> Message:
    writer = ValueWriter(limits)
    return Message(writer.write(value), writer.frames, limits)


def _check_limits(limits: Limits, frames: int, head_bytes: int, total: int) -> None:
    for name, value, bound in (
        ("max_frames", frames, limits.max_frames),
        ("max_head_bytes", head_bytes, limits.max_head_bytes),
        ("max_bytes", total, limits.max_bytes),
    ):
        if value > bound:
            raise limit_exceeded(name, bound, value, "Raise the limit on both sides").at("head")


class _Preamble(NamedTuple):
    single: bool
    frames: int
    table_end: int
    head_bytes: int
    total: int
    table_bytes: int


def _read_preamble(view: memoryview, limits: Limits) -> _Preamble:
    if view.nbytes < _PREAMBLE.size:
        raise DecodeError("no room for a preamble", where="head", expected="64 bytes", got=str(view.nbytes))
    magic, version, flags, count, body, total, table_bytes, rest = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError("not a message", where="head", expected=repr(MAGIC), got=repr(magic))
    if version != VERSION:
        raise DecodeError("unknown version", where="head", expected=str(VERSION), got=str(version))
    if flags & ~SINGLE or rest != bytes(24):
        raise DecodeError("reserved bits of the preamble are set", where="head", got=f"flags {flags:#06x}")
    table_end = _PREAMBLE.size + _ENTRY.size * count
    _check_limits(limits, count, table_end + body, total)
    return _Preamble(bool(flags & SINGLE), count, table_end, table_end + body, total, table_bytes)


def read_message(
    data: Readable | Sequence[Readable],
    *,
    copy: bool,
    framework: Framework,
    limits: Limits,
    table: SharedTable[Entered] | None = None,
) -> Any:
    """Read a message, with the table of a connection or without, see `decode`."""
    if framework not in ("numpy", "torch"):
        raise DecodeError("unknown framework", expected='"numpy" or "torch"', got=repr(framework))
    if isinstance(data, list | tuple):
        if not data:
            raise DecodeError("no frames", expected="a head and its payloads")
        head, *frames = [as_bytes(part, f"frame {index}") for index, part in enumerate(data)]
    else:
        head, frames = as_bytes(data, "data"), []
    preamble = _read_preamble(head, limits)
    if preamble.single and isinstance(data, list | tuple):
        raise DecodeError("a message in single mode is one buffer, not a list of frames")
    expected = max(preamble.total, preamble.head_bytes) if preamble.single else preamble.head_bytes
    if head.nbytes != expected:
        problem = "the message ends early" if head.nbytes < expected else "bytes follow the message"
        raise DecodeError(problem, where="head", expected=f"{expected} bytes", got=str(head.nbytes))
    payloads = _read_payloads(head, preamble, frames)
    capacity = preamble.table_bytes
    if table is not None and capacity > table.capacity_bytes:
        raise DecodeError(
            "the writer's table is larger than this reader allows",
            where="head",
            expected=f"at most {table.capacity_bytes} bytes",
            got=str(capacity),
        )
    reader = ValueReader(payloads, framework, copy, limits, table, capacity)
    value = reader.read(head[preamble.table_end : preamble.head_bytes])
    if table is not None and capacity:
        # A view keeps its whole message alive, which must not be much more than the table accounts for.
        entered = sum(nbytes for nbytes, content in reader.uses.values() if content is not None)
        views = table.keep_views and 2 * entered >= preamble.total
        table.commit(reader.uses if views else copied(reader.uses), capacity)
    return value


def _read_payloads(head: memoryview, preamble: _Preamble, frames: list[memoryview]) -> list[memoryview]:
    """Check the frame table, and return the payloads: the frames, or slices of a message in single mode."""
    entries = list(_ENTRY.iter_unpack(head[_PREAMBLE.size : preamble.table_end]))
    payloads = frames
    end = preamble.head_bytes
    if preamble.single:
        payloads = []
    elif [frame.nbytes for frame in frames] != [length for _, length, _ in entries]:
        raise DecodeError(
            "the frames do not match the head",
            expected=f"lengths {[length for _, length, _ in entries][:8]}",
            got=str([frame.nbytes for frame in frames][:8]),
        )
    for index, (offset, length, zero) in enumerate(entries):
        start = align(end) if preamble.single else end
        if offset != (start if preamble.single else 0) or zero:
            raise DecodeError("offset out of place", where=f"frame {index}", got=f"offset {offset}")
        if start + length > preamble.total:
            raise DecodeError(
                "the frame ends beyond the message", where=f"frame {index}", got=f"length {length}"
            )
        if preamble.single:
            if any(head[end:start]):
                raise DecodeError("the gap before a frame is not zero", where=f"frame {index}")
            payloads.append(head[start : start + length])
        end = start + length
    if end != preamble.total:
        raise DecodeError(
            "the frames do not fill the message", where="head", expected=str(end), got=str(preamble.total)
        )
    return payloads


def as_bytes(data: Any, where: str | None, error: type[CodecError] = DecodeError) -> memoryview:
    """View a buffer as bytes, or raise `error` if it is not contiguous memory."""
    try:
        view = memoryview(data)
        is_plain = view.ndim == 1 and view.format == "B" and view.c_contiguous
        return view[:] if is_plain else view.cast("B")
    except (TypeError, ValueError, BufferError) as cause:
        raise error("not contiguous bytes", where=where, got=type(data).__name__) from cause


def _writable(buffer: BufferPool | Buffer | None, total: int) -> memoryview:
    if buffer is None:
        return aligned_empty(total).data
    if isinstance(buffer, BufferPool):
        return buffer.acquire(total)
    view = as_bytes(buffer, "buffer", EncodeError)
    if view.readonly:
        raise EncodeError("the buffer is read-only", where="buffer")
    if view.nbytes < total:
        raise BufferTooSmallError(total, view.nbytes)
    return view[:total]


class Encoder:
    """The writing end of a connection that sends each array once, by the rule of `mmcodecs.shared`.

    The messages must be decoded in order, all by one `Decoder`. After a lost message both ends `reset()`.
    Neither end may be used from two threads at once.

    Args:
        table_bytes: Capacity of the table. The reader must allow at least as much.
        limits: Bounds to stay within.
    """

    def __init__(self, *, table_bytes: int = TABLE_BYTES, limits: Limits = DEFAULT_LIMITS) -> None:
        self.table_bytes = table_bytes
        self.limits = limits
        self._table: SharedTable[bool] = SharedTable(table_bytes)

    def encode(self, value: Any, *, buffer: BufferPool | Buffer | None = None) -> memoryview:
        """Write a value as one buffer, see `mmcodecs.encode`."""
        writer = ValueWriter(self.limits, self._table)
        out = Message(writer.write(value), writer.frames, self.limits, self.table_bytes).single(buffer)
        self._table.commit(writer.uses, self.table_bytes)
        return out

    def encode_frames(self, value: Any) -> list[bytearray | memoryview]:
        """Write a value as frames, see `mmcodecs.encode_frames`."""
        writer = ValueWriter(self.limits, self._table)
        frames = Message(writer.write(value), writer.frames, self.limits, self.table_bytes).frames()
        self._table.commit(writer.uses, self.table_bytes)
        return frames

    def reset(self) -> None:
        """Empty the table, as towards a new reader."""
        self._table.clear()


class Decoder:
    """The reading end of a connection, see `Encoder`.

    Args:
        table_bytes: The largest capacity to accept from a writer.
        copy: As in `decode`.
        framework: As in `decode`. A torch tensor of an array in the table is always a copy.
        keep_views: Let the table hold views of a message that consists of shared arrays for at least a half,
            instead of copies. For a caller that never writes to the memory of a message again: one that
            receives each message into a buffer of a `BufferPool`, or hands over `bytes`.
        limits: Bounds to enforce.
    """

    def __init__(
        self,
        *,
        table_bytes: int = TABLE_BYTES,
        copy: bool = False,
        framework: Framework = "numpy",
        keep_views: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.table_bytes = table_bytes
        self.copy = copy
        self.framework: Framework = framework
        self.limits = limits
        self._table: SharedTable[Entered] = SharedTable(table_bytes, keep_views=keep_views)

    def decode(self, data: Readable | Sequence[Readable], *, type: Any = None) -> Any:
        """Read a message, see `mmcodecs.decode`.

        Raises:
            MissingKeyError: It refers to arrays that are not in the table.
            CodecError: Anything else. The table is then as it was.
        """
        value = read_message(
            data, copy=self.copy, framework=self.framework, limits=self.limits, table=self._table
        )
        return value if type is None else convert(value, type)

    def reset(self) -> None:
        """Empty the table, as towards a new writer."""
        self._table.clear()
