"""Connections through shared memory on one host: a Unix socket carries headers, memory segments carry frames.

A segment is an anonymous file: the sender makes it and passes its descriptor over the socket, so the system
frees it when the last process that maps it is gone. The sender owns its segments and uses them again; the
receiver maps them for reading only, and says when the last view into one is gone. On Linux they are sealed,
so a sender cannot cut off memory that a receiver reads. Elsewhere they are unlinked temporary files.

Short messages, and those for which no segment is free or can be made, travel through the socket, so a full
pool slows down and never stops. Besides the parcels of `stream.py` there are:

| kind | header | meaning |
|---|---|---|
| 1 | u32 number, u64 bytes; a descriptor attached | here is a segment |
| 2 | u32 number, then the header proper | the frames lie at the start of that segment |
| 3 | n x u32 number | from the sender: these segments are gone; from the receiver: these are free again |
"""

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mmcodecs import BufferPool, Limits
from mmrender.errors import ShippingConnectionError, ShippingProtocolError
from mmrender.shipping.protocol import Message, pack
from mmrender.shipping.stream import (
    ALIGNMENT,
    FRAMES,
    Address,
    Connection,
    Limit,
    MakeConnection,
    SocketStream,
    broken,
    check_length,
    parcel_prefix,
)

SEGMENT, PLACED, GONE = 1, 2, 3
MIN_SHARED_BYTES: Final = 64 << 10
MIN_SEGMENT_BYTES: Final = 1 << 20
MAX_SEGMENTS: Final = 256
POOL_BYTES: Final = 2 << 30
_SEGMENT = struct.Struct("<IQ")
_NUMBER = struct.Struct("<I")
_SEALS = "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"
_SEALED = all(hasattr(fcntl, name) for name in (*_SEALS, "F_ADD_SEALS")) and hasattr(os, "memfd_create")
_COPY_IN_THREAD: Final = 4 << 20
"""A copy of more bytes than this is made in a thread."""


class Segment:
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
        self._segments: dict[int, Segment] = {}
        self._idle: set[int] = set()
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all segments."""
        return sum(segment.num_bytes for segment in self._segments.values())

    def acquire(self, num_bytes: int) -> tuple[Segment | None, bool, list[int]]:
        """Find or make a segment of at least `num_bytes`.

        Returns:
            The segment, or None where the bounds or the system allow none; whether it is new to the receiver;
            and the numbers of idle segments that were dropped for it.
        """
        largest = max(8 * num_bytes, MIN_SEGMENT_BYTES)
        idle = (self._segments[number] for number in self._idle)
        fits = [segment for segment in idle if num_bytes <= segment.num_bytes <= largest]
        if fits:
            best = min(fits, key=lambda segment: segment.num_bytes)
            self._idle.discard(best.number)
            return best, False, []
        # Powers of two, so that the next message of about this size fits; unwritten pages take no memory.
        size = max(MIN_SEGMENT_BYTES, 1 << (num_bytes - 1).bit_length())
        gone: list[int] = []
        while self._idle and not self._fits(size):
            number = min(self._idle, key=lambda each: self._segments[each].num_bytes)
            self._idle.discard(number)
            os.close(self._segments.pop(number).fd)
            gone.append(number)
        if not self._fits(size):
            return None, False, gone
        self._next += 1
        try:
            segment = self._segments[self._next] = Segment(self._next, size)
        except OSError:  # no memory or no descriptors: the message travels through the socket
            return None, False, gone
        return segment, True, gone

    def give_back(self, number: int) -> None:
        """Note that the receiver has no view of a segment any more."""
        if number in self._segments:
            self._idle.add(number)

    def close(self) -> None:
        """Drop all; the receiver's mappings stay until their last view is gone."""
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()
        self._idle.clear()

    def _fits(self, size: int) -> bool:
        return self.num_bytes + size <= self.max_bytes and len(self._segments) < MAX_SEGMENTS


class MappedSegments:
    """The receiver's segments of one connection, mapped for reading and leased to one message at a time.

    Attributes:
        released: Numbers of segments whose last view is gone; appended to from any thread.
        on_release: Called after that, from the same thread.
    """

    def __init__(self, peer: str, max_bytes: int) -> None:
        self.peer = peer
        self.max_bytes = max_bytes
        self.released: deque[int] = deque()
        self.on_release: Callable[[], None] | None = None
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._leased: set[int] = set()

    def add(self, number: int, num_bytes: int, fd: int) -> None:
        """Map a segment; the caller closes the descriptor."""
        total = sum(data.nbytes for data in self._maps.values()) + num_bytes
        if number in self._maps or len(self._maps) >= MAX_SEGMENTS or total > self.max_bytes:
            raise self._wrong("too many segments", f"at most {self.max_bytes} bytes", f"{total} bytes")
        try:
            sealed = not _SEALED or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size != num_bytes or num_bytes < 1:
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
        weakref.finalize(lease, self._released, number).atexit = False
        return lease.data

    def take_released(self) -> list[int]:
        """Return, on the event loop, the segments that are free again."""
        numbers = [self.released.popleft() for _ in range(len(self.released))]
        self._leased.difference_update(numbers)
        return numbers

    def close(self) -> None:
        """Unmap segments without views; the others are unmapped with their last view."""
        self._maps.clear()

    def _released(self, number: int) -> None:
        self.released.append(number)
        if self.on_release is not None:
            self.on_release()

    def _wrong(self, problem: str, expected: str, got: str) -> ShippingProtocolError:
        return ShippingProtocolError(problem, where=self.peer, expected=expected, got=got)


class DescriptorStream(SocketStream):
    """A Unix socket that keeps the descriptors which come along with the bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._descriptors: deque[int] = deque()

    def take_descriptor(self) -> int | None:
        """Return the oldest descriptor that came, None if there is none."""
        return self._descriptors.popleft() if self._descriptors else None

    def receive(self, view: memoryview) -> int:
        """Read what has come, without waiting; 0 at the end."""
        size = array.array("i").itemsize
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        count, ancillary, found, _ = self.sock.recvmsg_into([view], socket.CMSG_SPACE(size), flags)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors.extend(array.array("i", data[: len(data) - len(data) % size]))
        if found & socket.MSG_CTRUNC or len(self._descriptors) > MAX_SEGMENTS:
            raise OSError("more descriptors than were announced")
        return count

    async def write_descriptor(self, data: bytes, fd: int) -> None:
        """Write bytes with a descriptor attached to the first of them."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while True:
            try:
                count = socket.send_fds(self.sock, [data], [fd])
                break
            except (BlockingIOError, InterruptedError):
                ready.clear()
                loop.add_writer(self.sock.fileno(), ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_writer(self.sock.fileno())
        if count < len(data):
            await self.write(data[count:])

    async def aclose(self) -> None:
        """Close the socket and the descriptors that nobody took."""
        await super().aclose()
        while self._descriptors:
            os.close(self._descriptors.popleft())


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
        self._mapped = MappedSegments(peer, max_bytes)
        self._released = asyncio.Event()
        self._answers: asyncio.Task[None] | None = None

    async def send(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        """Send a message, its frames copied once, into a segment."""
        offsets, total = _layout([frame.nbytes for frame in frames])
        if total < MIN_SHARED_BYTES:
            await super().send(message, frames)
            return
        async with self._writing:
            segment, is_new, gone = self._segments.acquire(total)
            if gone:
                await self.write_parcel(GONE, b"".join(map(_NUMBER.pack, gone)))
            if segment is not None and is_new:
                header = _SEGMENT.pack(segment.number, segment.num_bytes)
                try:
                    await self._descriptors.write_descriptor(parcel_prefix(SEGMENT, header, []), segment.fd)
                except OSError as error:
                    raise broken(self.peer, error) from error
            if segment is None:
                await self.write_parcel(FRAMES, pack(message), frames)
                return

            def copy(data: npt.NDArray[np.uint8] = segment.data) -> None:
                for start, frame in zip(offsets, frames, strict=True):
                    if frame.nbytes:
                        data[start : start + frame.nbytes] = np.frombuffer(frame, np.uint8)

            if total > _COPY_IN_THREAD:
                await asyncio.to_thread(copy)
            else:
                copy()
            lengths = [frame.nbytes for frame in frames]
            placed = struct.pack(f"<{len(lengths)}Q", *lengths)
            header = _NUMBER.pack(segment.number) + _NUMBER.pack(len(lengths)) + placed + pack(message)
            await self.write_parcel(PLACED, header)
            self.sent_bytes += total

    async def read_parcel(
        self, kind: int, header: memoryview, lengths: list[int], limit: Limit
    ) -> tuple[memoryview, list[memoryview]] | None:
        """Return header and frames of a message, or None for a parcel about segments."""
        try:
            if kind == PLACED:
                return self._placed(header, limit)
            if kind == SEGMENT:
                number, num_bytes = _SEGMENT.unpack(header)
                fd = self._descriptors.take_descriptor()
                if fd is None:
                    raise ShippingProtocolError("a segment without its descriptor", where=self.peer)
                try:
                    self._mapped.add(number, num_bytes, fd)
                finally:
                    os.close(fd)
                if self._answers is None:
                    self._answers = asyncio.get_running_loop().create_task(self._tell_released())
                return None
            if kind == GONE:
                for (gone,) in _NUMBER.iter_unpack(header):
                    self._segments.give_back(gone)
                    self._mapped.remove(gone)
                return None
        except struct.error as error:
            raise ShippingProtocolError("a malformed parcel about segments", where=self.peer) from error
        return await super().read_parcel(kind, header, lengths, limit)

    async def aclose(self) -> None:
        """Close the socket and drop the segments; views that somebody holds stay valid."""
        if self._answers is not None:
            self._answers.cancel()
            await asyncio.wait([self._answers])
        await super().aclose()
        self._segments.close()
        self._mapped.close()

    def _placed(self, header: memoryview, limit: Limit) -> tuple[memoryview, list[memoryview]]:
        number, count = struct.unpack_from("<II", header)
        lengths = list(struct.unpack_from(f"<{count}Q", header, 8))
        offsets, total = _layout(lengths)
        check_length(sum(lengths), limit(), self.peer)
        if not lengths or lengths[0] > self._max_head_bytes:
            raise ShippingProtocolError(
                "the head of a message is missing or too long",
                where=self.peer,
                expected=f"at most {self._max_head_bytes} bytes",
                got=str(lengths[:1]),
            )
        lease = self._mapped.lease(number, total)
        frames = [lease[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
        return header[8 + 8 * count :], [memoryview(bytes(frames[0])), *frames[1:]]

    async def _tell_released(self) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:  # from the thread on which the last view of a message died
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
                loop.call_soon_threadsafe(self._released.set)

        self._mapped.on_release = wake
        self._released.set()  # a view may have died before
        while True:
            await self._released.wait()
            self._released.clear()
            numbers = self._mapped.take_released()
            if not numbers:
                continue
            try:
                async with self._writing:
                    await self.write_parcel(GONE, b"".join(map(_NUMBER.pack, numbers)))
            except ShippingConnectionError:
                return  # whoever receives will see it, too


def connection_maker(address: Address, pool: BufferPool, limits: Limits) -> MakeConnection:
    """Return how a connected socket of an address becomes a connection."""
    if address.scheme == "shm":
        return lambda sock, peer: SharedMemoryConnection(DescriptorStream(sock), peer, pool, limits)
    return lambda sock, peer: Connection(SocketStream(sock), peer, pool)


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
