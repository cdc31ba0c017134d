"""Parcels through pooled shared memory: a Unix socket carries headers, segments carry frames.

Frames below 64 KiB in all, and those for which no segment is free because the consumer holds on to earlier
messages, travel through the socket, so that a full pool slows down and never stops. Besides the kinds of
`stream.py` there are:

| kind | header | meaning |
|---|---|---|
| 1 | u32 number, u64 bytes; a file descriptor attached | here is a segment |
| 2 | u32 number, then the header proper | the frames lie at the start of that segment |
| 3 | n x u32 number | sender: these segments are gone; receiver: nobody looks at these any more |
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmcodecs import BufferPool, Limits
from mmrender.errors import ShippingConnectionError, ShippingProtocolError
from mmrender.shipping.address import Address
from mmrender.shipping.channel import off_loop
from mmrender.shipping.links.base import Limit, Link, Listener, OnLink, Parcel, too_long
from mmrender.shipping.links.segments import MappedSegments, Segment, SegmentPool
from mmrender.shipping.links.sockets import SocketListener, SocketTransport, bind_path, connect_path
from mmrender.shipping.links.stream import StreamLink, layout, prefix

SEGMENT, PLACED, GONE = 1, 2, 3
MIN_SHARED_BYTES = 64 << 10
POOL_BYTES = 2 << 30
_SEGMENT = struct.Struct("<IQ")
_NUMBER = struct.Struct("<I")
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_FD_BYTES = array.array("i").itemsize


class SharedMemoryLink(StreamLink):
    """One connection on one host.

    Args:
        sock: Connected Unix socket; the link owns it.
        peer: Who is there, for messages.
        pool: Where payloads that come through the socket are received into.
        max_bytes: Most shared memory, in either direction.
        max_head_bytes: Bound on the first frame, which is copied before it is read: what is being checked
            must not change meanwhile.
    """

    def __init__(
        self, sock: socket.socket, peer: str, pool: BufferPool, max_bytes: int, max_head_bytes: int
    ) -> None:
        super().__init__(sock, peer, pool)
        self._max_head_bytes = max_head_bytes
        self._segments = SegmentPool(max_bytes)
        self._mapped = MappedSegments(peer, max_bytes, self._when_released)
        self._released: deque[int] = deque()
        self._wake = asyncio.Event()
        self._fds: list[int] = []
        self._answers: asyncio.Task[None] | None = None

    async def send(self, header: bytes, frames: Sequence[memoryview]) -> None:
        """Send a parcel, its frames copied once, into a segment."""
        offsets, total = layout([frame.nbytes for frame in frames])
        segment = await self._segment(total) if total >= MIN_SHARED_BYTES else None
        if segment is None:
            await super().send(header, frames)
            return
        await off_loop(total, lambda: _copy(segment, offsets, frames))
        head = _NUMBER.pack(segment.number) + header
        await self.write([memoryview(prefix(PLACED, 0, head, [frame.nbytes for frame in frames]))])

    async def take(
        self, kind: int, extra: int, header: memoryview, lengths: list[int], limit: Limit
    ) -> Parcel | None:
        """Make a parcel of what was announced; None where it was about segments."""
        try:
            if kind == PLACED:
                return self._placed(_NUMBER.unpack_from(header)[0], header[_NUMBER.size :], lengths, limit)
            if kind == SEGMENT:
                self._map(*_SEGMENT.unpack(header))
                return None
            if kind == GONE:
                for (number,) in _NUMBER.iter_unpack(header):
                    self._segments.give_back(number)
                    self._mapped.remove(number)
                return None
        except struct.error as error:
            raise ShippingProtocolError("a malformed word about segments", where=self.peer) from error
        return await super().take(kind, extra, header, lengths, limit)

    async def aclose(self) -> None:
        """Close the socket and drop the segments; views that somebody holds stay good."""
        if self._answers is not None:
            self._answers.cancel()
            await asyncio.wait([self._answers])
        await super().aclose()
        self._segments.close()
        self._mapped.close()
        while self._fds:
            os.close(self._fds.pop())

    def read_some(self, view: memoryview) -> int:
        """Receive what is there; descriptors that come along are kept for the parcel that they belong to."""
        space = socket.CMSG_SPACE(_FD_BYTES)
        count, ancillary, flags, _ = self._sock.recvmsg_into(
            [view], space, socket.MSG_DONTWAIT | _CLOSE_ON_EXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > 1:
            raise OSError("more descriptors than were announced")
        return count

    async def _segment(self, num_bytes: int) -> Segment | None:
        """Take a segment, and tell the receiver of one that it does not know."""
        segment, is_new, gone = self._segments.acquire(num_bytes)
        if gone:
            await self.write([memoryview(prefix(GONE, 0, b"".join(map(_NUMBER.pack, gone)), []))])
        if segment is not None and is_new:
            note = prefix(SEGMENT, 0, _SEGMENT.pack(segment.number, segment.num_bytes), [])
            await self.write([memoryview(note)], segment.fd)
            segment.close_fd()
        return segment

    def _map(self, number: int, num_bytes: int) -> None:
        if not self._fds:
            raise ShippingProtocolError("a segment without its descriptor", where=self.peer)
        fd = self._fds.pop()
        try:
            self._mapped.add(number, num_bytes, fd)
        finally:
            os.close(fd)
        if self._answers is None:
            self._answers = self._loop.create_task(self._answer())

    def _placed(self, number: int, header: memoryview, lengths: list[int], limit: Limit) -> Parcel:
        offsets, total = layout(lengths)
        if total > limit() + 64 * len(lengths):
            raise too_long(self.peer, "a message is", limit(), total)
        if not lengths or lengths[0] > self._max_head_bytes:
            raise too_long(self.peer, "a head is", self._max_head_bytes, lengths[0] if lengths else 0)
        lease = self._mapped.lease(number, total)
        frames = [lease[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
        return Parcel(header, [memoryview(bytes(frames[0])), *frames[1:]])

    def _when_released(self, number: int) -> None:
        """Pass on, from whatever thread the last view died on, that a segment is free."""
        self._released.append(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _answer(self) -> None:
        """Tell the sender which of its segments are free."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            numbers = [self._released.popleft() for _ in range(len(self._released))]
            for number in numbers:
                self._mapped.give_back(number)
            note = prefix(GONE, 0, b"".join(map(_NUMBER.pack, numbers)), [])
            try:
                await self.write([memoryview(note)])
            except ShippingConnectionError:
                return  # whoever receives will see it, too


def _copy(segment: Segment, offsets: list[int], frames: Sequence[memoryview]) -> None:
    for start, frame in zip(offsets, frames, strict=True):
        if frame.nbytes:
            np.copyto(segment.data[start : start + frame.nbytes], np.frombuffer(frame, np.uint8))


class SharedMemoryTransport(SocketTransport):
    """Dials and listens on `shm://name`: a socket file of that name in the user's runtime folder.

    Args:
        address: Where.
        keyed: Whether there is a shared secret.
        pool: Where payloads that come through the socket are received into.
        limits: Of the codec.
        max_bytes: Most shared memory of one connection.
    """

    def __init__(
        self, address: Address, *, keyed: bool, pool: BufferPool, limits: Limits, max_bytes: int = POOL_BYTES
    ) -> None:
        super().__init__(address, keyed=keyed, pool=pool)
        self.limits = limits
        self.max_bytes = max_bytes

    def make_link(self, sock: socket.socket, peer: str) -> Link:
        """Make the link of a connected socket."""
        return SharedMemoryLink(sock, peer, self.pool, self.max_bytes, self.limits.max_head_bytes)

    async def dial(self) -> Link:
        """Connect to a receiver on this host."""
        path = str(runtime_folder() / f"{self.address.path}.sock")
        return self.make_link(await connect_path(path, str(self.address)), str(self.address))

    async def listen(self, on_link: OnLink) -> Listener:
        """Open the door."""
        path = str(runtime_folder() / f"{self.address.path}.sock")
        sock = await bind_path(path, str(self.address))
        return SocketListener(sock, str(self.address), path, self.make_link, on_link)


def runtime_folder() -> Path:
    """Give the folder of socket files, which belongs to the user alone.

    `$XDG_RUNTIME_DIR/mmrender`, or else `mmrender-<uid>` in the folder for temporary files.

    Raises:
        ShippingConnectionError: It belongs to somebody else, or others may write to it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "mmrender" if base else Path(tempfile.gettempdir()) / f"mmrender-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ShippingConnectionError("no folder for sockets", where=str(folder), got=str(error)) from error
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ShippingConnectionError(
            "the folder for sockets is not this user's alone",
            where=str(folder),
            expected=f"owner {os.getuid()}, mode 0700",
            got=f"owner {found.st_uid}, mode {found.st_mode & 0o777:04o}",
            remedy="Remove it, or set XDG_RUNTIME_DIR",
        )
    return folder
