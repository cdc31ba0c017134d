"""Connections through shared memory on one host: a Unix socket carries headers, memory segments carry frames.

A segment is an anonymous file: the sender makes it and passes its descriptor over the socket, so the system
frees it when the last process that maps it is gone. The sender owns its segments and uses them again; the
receiver maps them for reading only, and says when the last view into one is gone. On Linux they are sealed,
so a sender cannot cut off memory that a receiver reads. Elsewhere they are unlinked temporary files.

Short messages, and those for which no segment is free or can be made, travel through the socket, so a full
pool slows down and never stops.
"""

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mmcodecs import BufferPool, Limits
from mmrender.errors import ShippingProtocolError
from mmrender.shipping.connection import ALIGNMENT, Connection, Stream
from mmrender.shipping.protocol import MAX_SEGMENTS, Data, Dropped, Freed, Message, Segment, pack

MIN_SHARED_BYTES: Final = 64 << 10
MIN_SEGMENT_BYTES: Final = 1 << 20
POOL_BYTES: Final = 2 << 30
_SEALS = "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"
_SEALED = all(hasattr(fcntl, name) for name in (*_SEALS, "F_ADD_SEALS")) and hasattr(os, "memfd_create")
_COPY_IN_THREAD: Final = 4 << 20
"""A copy of more bytes than this is made in a thread."""


class OwnSegment:
    """Memory of the sender: `data` is uint8 of shape `(num_bytes,)`."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.fd = _anonymous_file(num_bytes)
        try:
            self.data: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise


class SegmentPool:
    """The sender's segments of one connection."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._all: dict[int, OwnSegment] = {}
        self._idle: dict[int, OwnSegment] = {}
        self._next = 0

    def acquire(self, num_bytes: int) -> tuple[OwnSegment | None, bool, list[int]]:
        """Find or make a segment of at least `num_bytes`.

        Returns:
            The segment, or None where the bounds or the system allow none; whether it is new to the receiver;
            and the numbers of idle segments that were dropped for it.
        """
        idle = sorted(self._idle.values(), key=lambda segment: segment.num_bytes)
        for segment in idle:
            if num_bytes <= segment.num_bytes <= max(8 * num_bytes, MIN_SEGMENT_BYTES):
                return self._idle.pop(segment.number), False, []
        # Powers of two, so that the next message of about this size fits; unwritten pages take no memory.
        size = max(MIN_SEGMENT_BYTES, 1 << (num_bytes - 1).bit_length())
        dropped: list[int] = []
        while self.num_bytes + size > self.max_bytes or len(self._all) >= MAX_SEGMENTS:
            if not idle:
                return None, False, dropped
            dropped.append(self._drop(idle.pop(0)))
        self._next += 1
        try:
            made = self._all[self._next] = OwnSegment(self._next, size)
        except OSError:  # no memory or no descriptors: the message travels through the socket
            return None, False, dropped
        self.num_bytes += size
        return made, True, dropped

    def give_back(self, number: int) -> None:
        """Note that the receiver has no view of a segment any more."""
        if number in self._all:
            self._idle[number] = self._all[number]

    def close(self) -> None:
        """Drop all; the receiver's mappings stay until their last view is gone."""
        for segment in list(self._all.values()):
            self._drop(segment)

    def _drop(self, segment: OwnSegment) -> int:
        os.close(segment.fd)
        self._idle.pop(segment.number, None)
        self.num_bytes -= self._all.pop(segment.number).num_bytes
        return segment.number


class MappedSegments:
    """The receiver's segments of one connection, mapped for reading and leased to one message at a time.

    Args:
        peer: Its name, for errors.
        max_bytes: Bound on the memory of all segments.
        on_release: A method that is called with the number of a segment when the last view of its lease
            dies, from any thread. Held weakly: all that a finalizer reaches lives as long as the view.
    """

    def __init__(self, peer: str, max_bytes: int, on_release: Callable[[int], None]) -> None:
        self.peer = peer
        self.max_bytes = max_bytes
        self._on_release = weakref.WeakMethod(on_release)
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._leased: set[int] = set()

    def add(self, number: int, num_bytes: int, fd: int) -> None:
        """Map a segment; the caller closes the descriptor."""
        total = sum(data.nbytes for data in self._maps.values()) + num_bytes
        if number in self._maps or len(self._maps) >= MAX_SEGMENTS or total > self.max_bytes:
            raise self._wrong("too many segments", f"at most {self.max_bytes} bytes", f"{total} bytes")
        try:
            sealed = not _SEALED or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size != num_bytes:
                raise OSError(f"{os.fstat(fd).st_size} bytes, {'sealed' if sealed else 'not sealed'}")
            mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            expected = f"{num_bytes} bytes of sealed memory"
            raise self._wrong("a segment that cannot be used", expected, str(error)) from error
        self._maps[number] = np.frombuffer(mapped, np.uint8)

    def remove(self, number: int) -> None:
        """Forget a segment that the sender has dropped."""
        self._maps.pop(number, None)
        self._leased.discard(number)

    def lease(self, number: int, num_bytes: int) -> memoryview:
        """Return a read-only view of the start of a segment; the lease ends with the last view of it."""
        data = self._maps.get(number)
        if data is None or number in self._leased or num_bytes > data.nbytes:
            raise self._wrong("a segment that cannot hold a message now", "a free segment", str(number))
        self._leased.add(number)
        lease = data[:num_bytes]
        weakref.finalize(lease, _call, self._on_release, number).atexit = False
        return lease.data

    def give_back(self, number: int) -> None:
        """Note, on the event loop, that the last view of a lease is gone."""
        self._leased.discard(number)

    def close(self) -> None:
        """Unmap segments without views; the others are unmapped with their last view."""
        self._maps.clear()

    def _wrong(self, problem: str, expected: str, got: str) -> ShippingProtocolError:
        return ShippingProtocolError(problem, where=self.peer, expected=expected, got=got)


def _call(method: "weakref.WeakMethod[Callable[[int], None]]", number: int) -> None:
    found = method()
    if found is not None:
        found(number)


class DescriptorStream(Stream):
    """A Unix socket that keeps the descriptors which come along with the bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.descriptors: deque[int] = deque()

    def receive(self, view: memoryview) -> int:
        """Read what has come, without waiting; 0 at the end."""
        size = array.array("i").itemsize
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        count, ancillary, found, _ = self.sock.recvmsg_into([view], socket.CMSG_SPACE(size), flags)
        self.heard = time.monotonic()
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors.extend(array.array("i", data[: len(data) - len(data) % size]))
        if found & socket.MSG_CTRUNC or len(self.descriptors) > MAX_SEGMENTS:
            raise OSError("more descriptors than were announced")
        return count

    async def write_descriptor(self, data: bytes, fd: int) -> None:
        """Write bytes with a descriptor attached to the first of them."""

        def send(view: memoryview) -> int:
            return socket.send_fds(self.sock, [view], [fd])

        add, remove = self.loop.add_writer, self.loop.remove_writer
        sent = await self.move(send, memoryview(data), add, remove, whole=False)
        if sent < len(data):
            await self.write(data[sent:])

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took."""
        super().close()
        while self.descriptors:
            os.close(self.descriptors.popleft())


class SharedMemoryConnection(Connection):
    """A connection whose frames lie in shared memory."""

    def __init__(
        self,
        stream: DescriptorStream,
        peer: str,
        pool: BufferPool,
        limits: Limits,
        max_bytes: int = POOL_BYTES,
    ) -> None:
        super().__init__(stream, peer, pool)
        self._descriptors = stream
        self._max_head_bytes = limits.max_head_bytes
        self._segments = SegmentPool(max_bytes)
        self._mapped = MappedSegments(peer, max_bytes, self._on_release)

    async def write_message(self, message: Message, frames: Sequence[memoryview]) -> None:
        """Write a message now, its frames copied once, into a segment."""
        segment = None
        if isinstance(message, Data):
            offsets, total = _layout(message.lengths)
            if total >= MIN_SHARED_BYTES:
                segment = await self._segment(total)
        if segment is None:
            await super().write_message(message, frames)
            return

        def copy(data: npt.NDArray[np.uint8] = segment.data) -> None:
            for start, frame in zip(offsets, frames, strict=True):
                if frame.nbytes:
                    data[start : start + frame.nbytes] = np.frombuffer(frame, np.uint8)

        if total > _COPY_IN_THREAD:
            await asyncio.to_thread(copy)
        else:
            copy()
        self.sent_bytes += total
        await super().write_message(msgspec.structs.replace(message, segment=segment.number), ())

    async def read_frames(self, data: Data) -> list[memoryview]:
        """Return the frames of a message; the head is copied, so that it is what will be checked."""
        if not data.segment:
            return await super().read_frames(data)
        if not data.lengths or data.lengths[0] > self._max_head_bytes:
            raise ShippingProtocolError(
                "the head of a message is missing or too long",
                where=self.peer,
                expected=f"at most {self._max_head_bytes} bytes",
                got=str(data.lengths[:1]),
            )
        offsets, total = _layout(data.lengths)
        lease = self._mapped.lease(data.segment, total)
        frames = [lease[at : at + length] for at, length in zip(offsets, data.lengths, strict=True)]
        return [memoryview(bytes(frames[0])), *frames[1:]]

    async def receive(self) -> Message:
        """Wait for the next message that is not about segments; otherwise as in `Connection`."""
        while isinstance(message := await super().receive(), Segment | Freed | Dropped):
            if isinstance(message, Segment):
                if not self._descriptors.descriptors:
                    raise ShippingProtocolError("a segment without its descriptor", where=self.peer)
                fd = self._descriptors.descriptors.popleft()
                try:
                    self._mapped.add(message.number, message.num_bytes, fd)
                finally:
                    os.close(fd)
                continue
            act = self._segments.give_back if isinstance(message, Freed) else self._mapped.remove
            for number in message.numbers:
                act(number)
        return message

    def close(self) -> None:
        """Close the socket and drop the segments; views that somebody holds stay valid."""
        super().close()
        self._segments.close()
        self._mapped.close()

    async def _segment(self, num_bytes: int) -> OwnSegment | None:
        """Return a segment that the receiver knows, if there may be one."""
        segment, is_new, dropped = self._segments.acquire(num_bytes)
        if dropped:
            await super().write_message(Dropped(dropped), ())
        if segment is not None and is_new:
            await self.write(b"")
            announced = pack(Segment(segment.number, segment.num_bytes))
            await self._descriptors.write_descriptor(announced, segment.fd)
        return segment

    def _on_release(self, number: int) -> None:
        def free() -> None:
            self._mapped.give_back(number)
            self.post(Freed([number]))

        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._descriptors.loop.call_soon_threadsafe(free)


def connect(sock: socket.socket, peer: str, scheme: str, pool: BufferPool, limits: Limits) -> Connection:
    """Make a connection of a connected socket, for addresses of this scheme."""
    if scheme == "shm":
        return SharedMemoryConnection(DescriptorStream(sock), peer, pool, limits)
    return Connection(Stream(sock), peer, pool)


def _layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offset of each frame in a segment, and the length of all."""
    offsets, end = [], 0
    for length in lengths:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + length
    return offsets, end


def _anonymous_file(num_bytes: int) -> int:
    if _SEALED:
        fd = os.memfd_create("mmrender", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, num_bytes)
        if _SEALED:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
    except BaseException:
        os.close(fd)
        raise
    return fd
