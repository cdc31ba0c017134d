"""Encode and decode one message.

Three ways out, one value, no copy more than stated:

- `encode_frames`: `[head, payload, ...]`, payloads are views of the arrays' own memory (law of the sender: do
  not write to an array before its frames are sent). For transports that send many parts.
- `encode_parts`: the pieces whose concatenation is the single form, payloads again views. For `sendmsg` and
  `writev`, towards a reader that receives into one buffer.
- `encode`: the single form in one buffer, each array copied once, straight to its place.

`decode` reads either form. Arrays are read-only views of what it was given, which they keep alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmcodecs.buffers import Buffer, BufferPool, aligned_empty
from mmcodecs.errors import BufferTooSmallError, ChecksumError, DecodeError, EncodeError, LimitError
from mmcodecs.frame import fill_head, hasher, read_layout, split_single
from mmcodecs.head import BodyWriter
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.payloads import Payload
from mmcodecs.restore import Resolver, Table, read_body
from mmcodecs.tensors import Framework, Source
from mmcodecs.typed import convert

Readable = bytes | bytearray | memoryview | np.ndarray[Any, Any]


def encode(
    value: Any,
    *,
    buffer: BufferPool | Buffer | None = None,
    checksums: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> memoryview:
    """Write a value as one message in single mode.

    Args:
        value: What to write; see `docs/codec.md` for the types.
        buffer: Where to: a pool, a writable buffer of the caller's (its start is used), or None for fresh
            memory. A pool's buffer goes back when the result and everything decoded from it is gone.
        checksums: Whether to add XXH3-64 of head and payloads, at about 35 GB/s on each side.
        limits: Bounds to stay within.

    Returns:
        A view of exactly the message. Its payloads are aligned to 64 bytes if its start is, as that of pools
        and fresh memory is.

    Raises:
        EncodeError: Some value cannot be kept, or the buffer is too short.
        LimitError: A bound is passed.
    """
    writer = BodyWriter(limits)
    return write_single(writer, writer.write(value), buffer=buffer, checksums=checksums)


def encode_frames(
    value: Any, *, checksums: bool = False, limits: Limits = DEFAULT_LIMITS
) -> list[bytearray | memoryview]:
    """Write a value as `[head, payload, ...]` without copying a C-contiguous array.

    Raises:
        EncodeError: Some value cannot be kept.
        LimitError: A bound is passed.
    """
    writer = BodyWriter(limits)
    return write_frames(writer, writer.write(value), checksums=checksums)


def encode_parts(
    value: Any, *, checksums: bool = False, limits: Limits = DEFAULT_LIMITS
) -> list[bytes | bytearray | memoryview]:
    """Write a value as pieces that, joined, are what `encode` gives, without copying a C-contiguous array.

    Raises:
        EncodeError: Some value cannot be kept.
        LimitError: A bound is passed.
    """
    writer = BodyWriter(limits)
    head = writer.write(value)
    payloads = [_as_bytes(payload) for payload in writer.frames]
    offsets, _ = _fill(writer, head, payloads, single=True, checksums=checksums)
    parts: list[bytes | bytearray | memoryview] = [head]
    end = len(head)
    for offset, payload in zip(offsets, payloads, strict=True):
        if offset > end:
            parts.append(bytes(offset - end))
        parts.append(payload)
        end = offset + payload.nbytes
    return parts


def decode(
    data: Readable | Sequence[Readable],
    *,
    copy: bool = False,
    framework: Framework = "numpy",
    type: Any = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Read a message.

    Args:
        data: One buffer, or the list of frames.
        copy: Whether arrays get writable memory of their own, instead of being read-only views of `data`.
        framework: What arrays become: "numpy", "torch", or "source" for what the sender held. With torch,
            tensors are views if `data` is writable memory, else copies.
        type: A type to build, such as a Struct, dataclass or pydantic model; None for the neutral form.
        limits: Bounds to hold to.

    Raises:
        CodecError: Whatever is wrong, and nothing else.
    """
    value = read_message(data, copy=copy, framework=framework, limits=limits, table=None)
    return value if type is None else convert(value, type)


def write_single(
    writer: BodyWriter,
    head: bytearray,
    *,
    buffer: BufferPool | Buffer | None,
    checksums: bool,
    table_bytes: int = 0,
) -> memoryview:
    """Lay a written head and its payloads into one buffer."""
    # A checksum needs the elements in order before the head is written: others are copied here.
    payloads = [_as_bytes(payload) for payload in writer.frames] if checksums else writer.frames
    offsets, total = _fill(writer, head, payloads, single=True, checksums=checksums, table_bytes=table_bytes)
    out = _target(buffer, total)
    end = len(head)
    out[:end] = head
    for offset, payload in zip(offsets, payloads, strict=True):
        out[end:offset] = bytes(offset - end)
        end = offset + _nbytes(payload)
        if isinstance(payload, Source):
            payload.write_into(out[offset:end])
        else:
            np.copyto(np.frombuffer(out[offset:end], np.uint8), np.frombuffer(payload, np.uint8))
    return out


def write_frames(
    writer: BodyWriter, head: bytearray, *, checksums: bool, table_bytes: int = 0
) -> list[bytearray | memoryview]:
    """Give a written head and its payloads as frames."""
    payloads = [_as_bytes(payload) for payload in writer.frames]
    _fill(writer, head, payloads, single=False, checksums=checksums, table_bytes=table_bytes)
    return [head, *payloads]


def read_message(
    data: Readable | Sequence[Readable],
    *,
    copy: bool,
    framework: Framework,
    limits: Limits,
    table: Table | None,
) -> Any:
    """Read a message, with the table of a connection or without."""
    if framework not in ("numpy", "torch", "source"):
        raise DecodeError("unknown framework", expected='"numpy", "torch" or "source"', got=repr(framework))
    if isinstance(data, list | tuple):
        if not data:
            raise DecodeError("no frames", expected="a head and its payloads")
        head, *frames = [_view(part, f"frame {index}") for index, part in enumerate(data)]
    else:
        head, frames = _view(data, "data"), []
    layout = read_layout(head, limits)
    if layout.single:
        if isinstance(data, list | tuple):
            raise DecodeError("a message in single mode is one buffer, not a list of frames")
        frames = split_single(head, layout)
    elif [frame.nbytes for frame in frames] != list(layout.lengths):
        raise DecodeError(
            "the frames are not those of the head",
            expected=f"lengths {list(layout.lengths)[:8]}",
            got=str([frame.nbytes for frame in frames][:8]),
        )
    if layout.checksums is not None:
        _verify(frames, layout.checksums)
    if table is not None:
        table.begin(layout.table_bytes)
    resolver = Resolver(frames, framework=framework, copy=copy, limits=limits, table=table)
    return read_body(bytes(head[slice(*layout.body)]), resolver)


def _fill(
    writer: BodyWriter,
    head: bytearray,
    payloads: Sequence[Payload],
    *,
    single: bool,
    checksums: bool,
    table_bytes: int = 0,
) -> tuple[list[int], int]:
    limits = writer.limits
    lengths = [_nbytes(payload) for payload in payloads]
    digest = hasher() if checksums else None
    sums = None if digest is None else [digest(payload) for payload in payloads]
    offsets, total = fill_head(head, lengths, single=single, checksums=sums, table_bytes=table_bytes)
    for name, value, bound, remedy in (
        ("max_frames", len(lengths), limits.max_frames, "Stack arrays of one shape"),
        ("max_head_bytes", len(head), limits.max_head_bytes, "Give long lists of numbers as arrays"),
        ("max_bytes", total, limits.max_bytes, "Send several messages"),
    ):
        if value > bound:
            raise LimitError(
                f"Limits.{name} is passed",
                where="head",
                expected=f"at most {bound}",
                got=str(value),
                remedy=f"{remedy}, or raise the limit on both sides",
            )
    return offsets, total


def _nbytes(payload: Payload) -> int:
    return payload.array.nbytes if isinstance(payload, Source) else payload.nbytes


def _as_bytes(payload: Payload) -> memoryview:
    return payload.contiguous() if isinstance(payload, Source) else payload


def _target(buffer: BufferPool | Buffer | None, total: int) -> memoryview:
    if buffer is None:
        return aligned_empty(total).data
    if isinstance(buffer, BufferPool):
        return buffer.acquire(total)
    try:
        view = _view(buffer, "buffer")
    except DecodeError as error:
        raise EncodeError(error.problem, where="buffer", got=error.got) from error
    if view.readonly:
        raise EncodeError("the buffer is read-only", where="buffer")
    if view.nbytes < total:
        raise BufferTooSmallError(total, view.nbytes)
    return view[:total]


def _view(data: Any, where: str) -> memoryview:
    try:
        view = memoryview(data)
        return view.cast("B") if view.ndim != 1 or view.format != "B" else view[:]
    except (TypeError, ValueError, BufferError) as error:
        raise DecodeError("not contiguous bytes", where=where, got=type(data).__name__) from error


def _verify(frames: Sequence[memoryview], expected: Sequence[int]) -> None:
    digest = hasher()
    for index, (frame, wanted) in enumerate(zip(frames, expected, strict=True)):
        got = digest(frame)
        if got != wanted:
            raise ChecksumError(
                "checksum mismatch", where=f"frame {index}", expected=f"{wanted:#018x}", got=f"{got:#018x}"
            )
