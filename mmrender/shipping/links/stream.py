"""Parcels over a stream socket: gathered by `sendmsg`, scattered by `recv_into` into one pooled buffer.

A parcel on the wire, integers little-endian:

| bytes | field |
|---|---|
| 4 | magic `mmsp` |
| u8, u8 | version 1, kind (0: frames follow; others belong to shared memory) |
| u16 | zero, or what the kind says |
| u32 | h: length of the header |
| u32 | n: number of frames |
| n x u64 | length of each frame |
| h | header |
| | frames, each at the next multiple of 64 from the start of the first, the gaps zero |
"""

import array
import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from mmcodecs import BufferPool
from mmrender.errors import ShippingConnectionError, ShippingProtocolError
from mmrender.shipping.links.base import Limit, Parcel, broken, too_long
from mmrender.shipping.options import MAX_HEADER_BYTES

MAGIC, VERSION, FRAMES = b"mmsp", 1, 0
MAX_FRAMES = 4096 + 1
"""A message of the codec has at most 4,096 payloads, and a head."""
SOCKET_BUFFER_BYTES = 4 << 20
_PREFIX = struct.Struct("<4sBBHII")
_ALIGNMENT = 64
_GAP = memoryview(bytes(_ALIGNMENT))
_IOV_MAX = 512
_LARGE = 1 << 20
_PIECE_BYTES = 4 << 20
_FLOW_BYTES = 256 << 10
_YIELD_PARCELS = 32
"""A peer that writes as fast as we read must not keep everybody else from the event loop."""
_MOMENT = struct.pack("ll", 0, 50_000)
"""50 milliseconds: how long a thread may sleep over a socket on which nothing moves."""
_TURN_S = 0.25
"""How long it may stay with one on which something does."""


def layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Give the offset of each frame from the start of the first, and the length of all with gaps."""
    offsets, end = [], 0
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + length
    return offsets, end


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of pieces after so many bytes."""
    at = 0
    while at < len(parts) and count >= parts[at].nbytes:
        count -= parts[at].nbytes
        at += 1
    rest = parts[at:]
    if count:
        rest[0] = rest[0][count:]
    return rest


def prefix(kind: int, extra: int, header: bytes, lengths: Sequence[int]) -> bytes:
    """Write everything of a parcel that comes before its frames."""
    start = _PREFIX.pack(MAGIC, VERSION, kind, extra, len(header), len(lengths))
    return start + struct.pack(f"<{len(lengths)}Q", *lengths) + header


class StreamLink:
    """One connected stream socket.

    Args:
        sock: Connected; the link owns it.
        peer: Who is there, for messages.
        pool: Where payloads are received into. Buffers go back when the last view of them is gone.
    """

    def __init__(self, sock: socket.socket, peer: str, pool: BufferPool) -> None:
        self.peer = peer
        self.heard = time.monotonic()
        self._sock = sock
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()
        self._prefix = memoryview(bytearray(_PREFIX.size))
        self._parcels = 0
        self._busy: set[asyncio.Future[int]] = set()
        # Calls on the event loop say each time that they do not wait; those in threads may, for a moment.
        sock.setblocking(True)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _MOMENT)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    async def send(self, header: bytes, frames: Sequence[memoryview]) -> None:
        """Send a parcel, its frames straight from where they lie."""
        lengths = [frame.nbytes for frame in frames]
        parts = [memoryview(prefix(FRAMES, 0, header, lengths))]
        end = 0
        for start, frame in zip(layout(lengths)[0], frames, strict=True):
            if start > end:
                parts.append(_GAP[: start - end])
            parts.append(frame)
            end = start + frame.nbytes
        await self.write(parts)

    async def receive(self, limit: Limit) -> Parcel:
        """Wait for a parcel. Its frames are views of one pooled buffer, aligned to 64 bytes."""
        while True:
            self._parcels += 1
            if self._parcels % _YIELD_PARCELS == 0:
                await asyncio.sleep(0)
            kind, extra, header_bytes, count = await self._read_prefix()
            lengths, header = await self._read_rest(count, header_bytes)
            parcel = await self.take(kind, extra, header, lengths, limit)
            if parcel is not None:
                return parcel

    async def take(
        self, kind: int, extra: int, header: memoryview, lengths: list[int], limit: Limit
    ) -> Parcel | None:
        """Make a parcel of what was announced; None where it was for the link itself."""
        if kind != FRAMES or extra:
            raise ShippingProtocolError("an unknown kind of parcel", where=self.peer, got=str(kind))
        offsets, total = layout(lengths)
        if total > limit() + _ALIGNMENT * len(lengths):
            raise too_long(self.peer, "a message is", limit(), total)
        buffer = self._pool.acquire(total) if total else memoryview(b"")
        if total:
            await self._fill(buffer)
        frames = [buffer[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
        return Parcel(header, frames)

    async def aclose(self) -> None:
        """Close the socket; the system goes on sending what it has taken."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self._busy:
            # A thread must not find itself reading from another file that got the same number.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            await asyncio.wait(self._busy)
        self._sock.close()

    async def write(self, parts: list[memoryview], fd: int | None = None) -> None:
        """Send pieces one after the other, with a file descriptor attached to the first byte."""
        async with self._writing:
            await self._write([part for part in parts if part.nbytes], fd)

    async def _write(self, parts: list[memoryview], fd: int | None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        left = sum(part.nbytes for part in parts)
        while parts:
            # What fills the system's buffers many times is handed over by a thread that sleeps there.
            large = left >= _LARGE and not rights
            try:
                if large:
                    count = await self._in_thread(self._push, parts)
                else:
                    count = self._sock.sendmsg(parts[:_IOV_MAX], rights, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                await self._ready(writing=True)
                continue
            except OSError as error:
                raise broken(self.peer, error) from error
            rights = []
            left -= count
            parts = _after(parts, count)

    async def _read_prefix(self) -> tuple[int, int, int, int]:
        await self._fill(self._prefix)
        magic, version, kind, extra, header_bytes, count = _PREFIX.unpack(self._prefix)
        if magic != MAGIC or version != VERSION:
            raise ShippingProtocolError(
                "not a parcel", where=self.peer, expected=repr(MAGIC), got=repr(bytes(self._prefix[:5]))
            )
        if header_bytes > MAX_HEADER_BYTES:
            raise too_long(self.peer, "a header is", MAX_HEADER_BYTES, header_bytes)
        if count > MAX_FRAMES:
            raise ShippingProtocolError(
                "too many frames", where=self.peer, expected=f"at most {MAX_FRAMES}", got=str(count)
            )
        return kind, extra, header_bytes, count

    async def _read_rest(self, count: int, header_bytes: int) -> tuple[list[int], memoryview]:
        rest = memoryview(bytearray(8 * count + header_bytes))
        await self._fill(rest)
        return list(struct.unpack_from(f"<{count}Q", rest)), rest[8 * count :]

    async def _fill(self, view: memoryview) -> None:
        """Receive until the view is full."""
        flows = True
        while view.nbytes:
            large = flows and view.nbytes >= _LARGE
            try:
                count = await self._in_thread(self._pull, view) if large else self.read_some(view)
            except (BlockingIOError, InterruptedError):
                await self._ready(writing=False)
                continue
            except OSError as error:
                raise broken(self.peer, error) from error
            if not count:
                raise broken(self.peer, "the peer closed it")
            self.heard = time.monotonic()
            # A peer that trickles must not keep a thread.
            flows = not large or count >= _FLOW_BYTES
            view = view[count:]

    def read_some(self, view: memoryview) -> int:
        """Receive what is there, without waiting."""
        return self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)

    def _pull(self, view: memoryview) -> int:
        """Receive as long as it flows, asleep in the system meanwhile; runs in a thread."""
        end, done = time.monotonic() + _TURN_S, 0
        while done < view.nbytes:
            piece = view[done : done + _PIECE_BYTES]
            try:
                count = self._sock.recv_into(piece, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                break
            done += count
            self.heard = time.monotonic()
            if count < piece.nbytes or self.heard > end:
                break
        else:
            return done
        # Nothing at all may mean that nothing has come yet, which the event loop finds out.
        return done or self.read_some(view)

    def _push(self, parts: list[memoryview]) -> int:
        """Send as long as it flows, asleep in the system meanwhile; runs in a thread."""
        end, done = time.monotonic() + _TURN_S, 0
        while parts and time.monotonic() < end:
            try:
                count = self._sock.sendmsg(parts[:_IOV_MAX])
            except BlockingIOError:
                if not done:
                    raise
                break
            done += count
            parts = _after(parts, count)
        return done

    async def _in_thread(self, call: Callable[[Any], int], argument: Any) -> int:
        """Make a call that lasts a moment at most, which the socket's time limits see to."""
        future = self._loop.run_in_executor(None, call, argument)
        self._busy.add(future)
        future.add_done_callback(self._idle)
        return await asyncio.shield(future)

    def _idle(self, future: asyncio.Future[int]) -> None:
        self._busy.discard(future)
        if not future.cancelled():
            future.exception()  # whoever waited for it may be gone

    async def _ready(self, *, writing: bool) -> None:
        """Wait until the socket can be read from, or written to."""
        fd = self._sock.fileno()
        if fd < 0:
            raise ShippingConnectionError("the connection was closed", where=self.peer)
        done = self._loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        add, remove = (
            (self._loop.add_writer, self._loop.remove_writer)
            if writing
            else (self._loop.add_reader, self._loop.remove_reader)
        )
        add(fd, wake)
        try:
            await done
        finally:
            # A link that was closed meanwhile has removed it, and the number may be another file's.
            if self._sock.fileno() == fd:
                remove(fd)
