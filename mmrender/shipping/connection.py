"""`Connection`: headers and frames over one stream socket, both ways."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, TypeVar, cast

import msgspec

from mmcodecs import BufferPool
from mmcodecs.buffers import ALIGNMENT
from mmrender.errors import (
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.address import broken
from mmrender.shipping.protocol import (
    LONG_BYTES,
    VERSION,
    Bye,
    Data,
    Frames,
    Hello,
    Message,
    Ping,
    Timing,
    Welcome,
)
from mmrender.workers import Notifier

M = TypeVar("M", bound=msgspec.Struct)
_MAGIC: Final = b"mmsp"
_PREFIX: Final = struct.Struct("<4sI")
_MAX_HEADER_BYTES: Final = 512 << 10
_SHORT_FRAMES_BYTES: Final = 1 << 20
"""Maximum size of a buffer that shorter frames share."""
_NOTHING: Final = memoryview(b"")
_TLS_PIECE_BYTES: Final = 256 << 10
"""Bytes that are encrypted at a time."""
_SOCKET_BYTES: Final = 4 << 20
_LOCAL_SOCKET_BYTES: Final = 256 << 10
"""Buffer of a Unix socket: its content stays in the processor's cache, which makes the copy faster."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Write a message, without its frames."""
    header = _ENCODER.encode(message)
    return _PREFIX.pack(_MAGIC, len(header)) + header


class Connection(asyncio.BufferedProtocol):
    """Messages over one connection, both ways.

    Frames go out from their own memory. A long frame comes in straight into a pooled buffer of its own.

    Args:
        peer: Its name, for errors.
        timing: Time limits.

    Attributes:
        sent_bytes: Bytes written so far.
        received_bytes: Bytes of the frames read so far.
        is_over: Whether the peer has said goodbye.
        lost: Why the connection has ended; None while it lasts.
    """

    def __init__(self, peer: str, timing: Timing) -> None:
        self.peer = peer
        self.sent_bytes = self.received_bytes = 0
        self.is_over = False
        self.lost: ShippingError | None = None
        self._timing = timing
        self._changed = Notifier()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Bytes that came before they were asked for, and the rest of the long frame that is coming.
        self._ahead = memoryview(bytearray(LONG_BYTES))
        self._start = self._stop = 0
        self._target = _NOTHING
        self._is_blocked = self._is_mid_message = False
        self._last_received = self._last_sent = self._last_tick = time.monotonic()

    def post(self, message: Message) -> None:
        """Send a message without frames. Does nothing after the connection has ended."""
        if self._transport is not None and self.lost is None:
            data = pack(message)
            self._transport.write(data)
            self.sent_bytes += len(data)
            self._last_sent = time.monotonic()

    async def send(self, header: Data | Frames, frames: Sequence[memoryview]) -> None:
        """Send a header and its frames, which must not change until this returns.

        Raises:
            ShippingError: The connection has ended.
        """
        if self._transport is None or self._transport.is_closing():
            raise self.lost or broken(None, self.peer)
        is_plain = self._transport.get_extra_info("ssl_object") is None
        pieces: list[bytearray | memoryview] = [bytearray(pack(header))]
        for frame in frames:
            if frame.nbytes >= LONG_BYTES:
                size = frame.nbytes if is_plain else _TLS_PIECE_BYTES
                pieces += [frame[start : start + size] for start in range(0, frame.nbytes, size)]
            elif isinstance(pieces[-1], bytearray):
                pieces[-1] += frame
            else:
                pieces.append(bytearray(frame))
        self._is_mid_message = True
        # A transport copies bytes for which the socket has no room. A second descriptor takes views as they
        # are, while the transport is idle.
        try:
            with contextlib.ExitStack() as stack:
                sock = is_plain and stack.enter_context(self._transport.get_extra_info("socket").dup())
                for piece in pieces:
                    if sock and isinstance(piece, memoryview):
                        await asyncio.get_running_loop().sock_sendall(sock, piece)
                    else:
                        self._transport.write(piece)
                    self.sent_bytes += len(piece)
                    await asyncio.sleep(0)  # other tasks have a turn, however fast the peer reads
                    await self.drain()
                    if self.lost is not None:
                        raise self.lost
        except OSError as error:
            raise self.lost or broken(error, self.peer) from error
        self._is_mid_message = False
        self._last_sent = time.monotonic()

    async def drain(self) -> None:
        """Wait until the socket has taken everything, or the connection has ended."""
        await self._changed.wait_until(lambda: not self._is_blocked or self.lost is not None)

    async def receive(self, kind: type[M]) -> M:
        """Wait for the next message, which is of this kind, and if it opens a connection of this version.

        Raises:
            ShippingConnectionError: The connection broke, or the peer said goodbye.
            ShippingProtocolError: The bytes are not a message, or too long, and no memory was taken for them.
                Or the message is of another kind.
            ShippingSecurityError: TLS failed, or the peer refused the connection.
        """
        message: Message = Ping()
        while isinstance(message, Ping):
            prefix = memoryview(bytearray(_PREFIX.size))
            await self._fill(prefix)
            magic, length = _PREFIX.unpack(prefix)
            if magic != _MAGIC or length > _MAX_HEADER_BYTES:
                raise ShippingProtocolError(
                    "the peer does not speak this protocol",
                    where=self.peer,
                    expected=f"{_MAGIC!r} and a header of at most {_MAX_HEADER_BYTES} bytes",
                    got=repr(bytes(prefix)),
                )
            header = memoryview(bytearray(length))
            await self._fill(header)
            try:
                message = _DECODER.decode(header)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                problem = "a header cannot be read"
                raise ShippingProtocolError(problem, where=self.peer, got=str(error)[:200]) from error
        if isinstance(message, Bye):
            self.is_over = True
            if message.denied:
                raise ShippingSecurityError(
                    "the peer refused the connection", where=self.peer, got=message.reason
                )
            raise ShippingConnectionError("the peer said goodbye", where=self.peer, got=message.reason)
        if not isinstance(message, kind):
            got = type(message).__name__
            raise ShippingProtocolError("a message out of turn", where=self.peer, got=got)
        if isinstance(message, Hello | Welcome) and message.version != VERSION:
            raise ShippingProtocolError(
                "the peer speaks another version of the protocol",
                where=self.peer,
                expected=str(VERSION),
                got=str(message.version),
                remedy="Install the same version of mmrender on both sides",
            )
        return message

    async def read_frames(self, lengths: Sequence[int], pool: BufferPool) -> list[memoryview]:
        """Read the frames of a message whose lengths are checked, before anything else is received."""
        sizes = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        short_bytes = sum(size for size, length in zip(sizes, lengths, strict=True) if length < LONG_BYTES)
        room, frames = _NOTHING, []
        for size, length in zip(sizes, lengths, strict=True):
            if length >= LONG_BYTES:
                frame = pool.acquire(length)
            else:
                if size > room.nbytes:
                    room = pool.acquire(min(short_bytes, _SHORT_FRAMES_BYTES))
                frame, room, short_bytes = room[:length], room[size:], short_bytes - size
            await self._fill(frame)
            self.received_bytes += length
            frames.append(frame)
        return frames

    async def finish(self, message: Message) -> None:
        """Send a last message if the peer reads it in time, and close."""
        if self._transport is not None and not self._is_mid_message:
            self.post(message)
            self._transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.goodbye):
                    await self._changed.wait_until(lambda: self.lost is not None)
        self.close()

    def close(self, reason: ShippingError | None = None) -> None:
        """Close the connection at once."""
        self.lost = self.lost or reason
        if self._transport is not None:
            self._transport.abort()

    async def _fill(self, view: memoryview) -> None:
        """Fill a view with the next bytes."""
        while view.nbytes:
            if self._start < self._stop:
                count = min(view.nbytes, self._stop - self._start)
                view[:count] = self._ahead[self._start : self._start + count]
                view, self._start = view[count:], self._start + count
                continue
            if self.lost is not None:
                raise self.lost
            self._start = self._stop = 0
            if self._transport is not None:
                self._transport.resume_reading()
            if view.nbytes < LONG_BYTES:
                await self._changed.wait_until(lambda: self._stop > 0 or self.lost is not None)
                continue
            self._target = view
            await self._changed.wait_until(lambda: not self._target.nbytes or self.lost is not None)
            view = self._target

    def _tick(self) -> None:
        """Send a sign of life if it is time, and close the connection if the peer is silent."""
        now, timing = time.monotonic(), self._timing
        if self._transport is None or self.lost is not None:
            return
        if now - self._last_tick > timing.heartbeat or not self._transport.is_reading():
            # This side did not read meanwhile, so bytes of the peer may wait.
            self._last_received = now
        if now - self._last_received > timing.silence:
            got = f"nothing for {timing.silence:g} s"
            self.close(ShippingConnectionError("the peer is silent", where=self.peer, got=got))
        elif now - self._last_sent > timing.heartbeat and not (self._is_mid_message or self._is_blocked):
            self.post(Ping())
        self._last_tick = now
        self._timer = asyncio.get_running_loop().call_later(timing.heartbeat / 2, self._tick)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        transport = cast(asyncio.Transport, transport)  # of a stream socket; uvloop's are of no such class
        self._transport = transport
        # Writers wait for an empty buffer. With TLS a limit of 0 would never be reached.
        transport.set_write_buffer_limits(int(transport.get_extra_info("ssl_object") is not None), 0)
        sock: socket.socket = transport.get_extra_info("socket")
        is_local = sock.family == socket.AF_UNIX
        size = _LOCAL_SOCKET_BYTES if is_local else _SOCKET_BYTES
        options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, size), (socket.SOL_SOCKET, socket.SO_RCVBUF, size)]
        # An answer must not wait for the other side to confirm the one before.
        options += [] if is_local else [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        for level, option, value in options:
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)
        self._tick()

    def connection_lost(self, error: Exception | None) -> None:
        """End, and wake all waiters."""
        self.lost = self.lost or broken(error, self.peer)
        if self._timer is not None:
            self._timer.cancel()
        self._changed.notify()

    def pause_writing(self) -> None:
        """Let writers wait."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._is_blocked = False
        self._changed.notify()

    def get_buffer(self, _: int) -> memoryview:
        """Return the memory for the next bytes."""
        return self._target if self._target.nbytes else self._ahead[self._stop :]

    def buffer_updated(self, count: int) -> None:
        """Take note of the bytes that came."""
        self._last_received = time.monotonic()
        if self._target.nbytes:
            self._target = self._target[count:]
            if self._target.nbytes:
                return
            self._target = _NOTHING  # an empty slice would still hold the buffer
        else:
            self._stop += count
            if self._stop == self._ahead.nbytes and self._transport is not None:
                self._transport.pause_reading()
        self._changed.notify()
