"""Connections: messages of the protocol over a socket, with or without TLS, both ways at once.

Frames go out straight from where they lie, and a long one comes in straight into a pooled buffer of its own.
"""

import asyncio
import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from ssl import SSLEOFError, SSLError, SSLSocket, SSLWantReadError, SSLWantWriteError
from typing import Any, Final

from mmcodecs import BufferPool
from mmrender.errors import (
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.protocol import (
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_UNACKED,
    PREFIX,
    Data,
    Message,
    Notifier,
    Ping,
    Timing,
    pack,
    unpack,
)

ALIGNMENT: Final = 64
_OWN_BUFFER_BYTES: Final = 64 << 10
"""Frames from this size on come into a buffer of their own, so that one of them keeps no other alive."""
_SOCKET_BUFFER_BYTES: Final = 4 << 20
_LOCAL_BUFFER_BYTES: Final = 256 << 10
"""Of a Unix socket: what is in flight stays in the processor's cache, which halves the time of a copy."""
_PATIENCE_MS: Final = 1
"""A peer on this machine goes on with a long frame sooner than the event loop would come round."""
_STEPS: Final = 16
"""Calls of the system in a row, after which other tasks have their turn."""
_PIECE_BYTES: Final = 1 << 20
_NOT_READY: Final = (BlockingIOError, InterruptedError, SSLWantReadError, SSLWantWriteError)


class Stream:
    """A connected socket. One task may read while another writes.

    Attributes:
        heard: When the last bytes came, by `time.monotonic`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.heard = time.monotonic()
        self.loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self.is_local = sock.family == socket.AF_UNIX
        size = _LOCAL_BUFFER_BYTES if self.is_local else _SOCKET_BUFFER_BYTES
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, size)
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def handshake(self) -> None:
        """Agree with the peer on TLS, where the socket has it."""
        if isinstance(self.sock, SSLSocket):
            sock = self.sock

            def agree(_: memoryview) -> int:
                sock.do_handshake()
                return 1

            await self.move(agree, memoryview(b" "), self.loop.add_reader, self.loop.remove_reader)

    async def read_into(self, view: memoryview, *, whole: bool) -> int:
        """Read some bytes, or with `whole` until the view is full; give their number."""
        read, add, remove = self.receive, self.loop.add_reader, self.loop.remove_reader
        return await self.move(read, view, add, remove, whole=whole)

    def receive(self, view: memoryview) -> int:
        """Read what has come, without waiting; 0 at the end."""
        count = self.sock.recv_into(view)
        self.heard = time.monotonic()
        return count

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all bytes."""
        await self.move(self.sock.send, memoryview(data), self.loop.add_writer, self.loop.remove_writer)

    def close(self) -> None:
        """Close the socket; no task may be reading or writing."""
        self.sock.close()

    async def move(
        self,
        call: Callable[[memoryview], int],
        view: memoryview,
        add: Callable[..., None],
        remove: Callable[[int], object],
        *,
        whole: bool = True,
    ) -> int:
        """Call the socket with what is left of a view, waiting in between; return how many bytes it moved.

        The event loop makes the calls itself: one task switch for a long frame, not one for each piece. For
        the next piece of a peer on this machine it waits a moment.
        """
        end: asyncio.Future[int] = self.loop.create_future()
        done = 0
        soon: select.poll | None = None
        if self.is_local and view.nbytes > _LOCAL_BUFFER_BYTES:
            soon = select.poll()
            soon.register(self.sock, select.POLLIN if add == self.loop.add_reader else select.POLLOUT)

        def advance() -> None:
            nonlocal done
            for _ in range(0 if end.done() else _STEPS):
                try:
                    count = call(view[done : done + _PIECE_BYTES])
                except _NOT_READY:
                    if soon is None or not soon.poll(_PATIENCE_MS):
                        return
                    continue
                except OSError as error:
                    end.set_exception(error)
                    return
                if not count:
                    end.set_exception(ConnectionResetError("the peer closed it"))
                    return
                done += count
                if done == view.nbytes or not whole:
                    end.set_result(done)
                    return

        advance()
        if not end.done():
            add(self.sock.fileno(), advance)
            try:
                await end
            finally:
                remove(self.sock.fileno())
        return end.result()


class Connection:
    """Messages over a stream: `post` them, and `receive` those of the peer, while `run` is under way.

    Attributes:
        peer: Its name, for errors.
        sent_bytes: Bytes written so far.
    """

    def __init__(self, stream: Stream, peer: str, pool: BufferPool) -> None:
        self.peer = peer
        self.sent_bytes = 0
        self._stream = stream
        self._pool = pool
        self._outbox: deque[tuple[Message, Sequence[memoryview]]] = deque()
        self._changed = Notifier()
        self._said = time.monotonic()
        self._running = False
        self._writing = False
        # Bytes that go out with the next ones; and bytes that came with those before.
        self._pending = bytearray()
        self._ahead = memoryview(b"")
        self._reads = 0

    async def run(self, work: Coroutine[Any, Any, None], timing: Timing) -> None:
        """Do the work while messages go out; then close, and raise the first error of any part."""
        parts = [work, self._write(), self._keep_alive(timing)]
        try:
            try:
                async with asyncio.timeout(timing.handshake):
                    await self._stream.handshake()
            except TimeoutError as error:
                raise ShippingConnectionError("no handshake in time", where=self.peer) from error
            except OSError as error:
                raise self._failed(error) from error
            self._running = True
            async with asyncio.TaskGroup() as group:
                while parts:
                    group.create_task(parts.pop(0))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for each in parts:
                each.close()
            self.close()

    def post(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        """Send a message when those before it have gone out; leave its frames alone until then."""
        self._outbox.append((message, frames))
        self._changed.notify()

    async def finish(self, message: Message, timeout: float) -> None:
        """Send a last message, if the peer reads it in time."""
        self.post(message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait_until(
                    lambda: not (self._outbox or self._writing) or not self._running
                )

    async def receive(self) -> Message:
        """Wait for the next message; a peer that does not read is not read from either.

        Raises:
            ShippingConnectionError: The connection broke.
            ShippingProtocolError: What came is not a message, or too long; no memory was taken for it.
            ShippingSecurityError: TLS failed.
        """
        while True:
            if len(self._outbox) > 2 * MAX_UNACKED:
                await self._changed.wait_until(lambda: len(self._outbox) <= MAX_UNACKED)
            prefix = memoryview(bytearray(PREFIX.size))
            await self.fill(prefix)
            magic, length = PREFIX.unpack(prefix)
            if magic != MAGIC or length > MAX_HEADER_BYTES:
                raise ShippingProtocolError(
                    "the peer does not speak this protocol",
                    where=self.peer,
                    expected=f"{MAGIC!r} and a header of at most {MAX_HEADER_BYTES} bytes",
                    got=repr(bytes(prefix)),
                )
            header = memoryview(bytearray(length))
            await self.fill(header)
            message = unpack(header)
            if not isinstance(message, Ping):
                return message

    def close(self) -> None:
        """Close the connection."""
        self._running = False
        self._changed.notify()
        self._stream.close()

    async def write_message(self, message: Message, frames: Sequence[memoryview]) -> None:
        """Write a message; short frames go out together, and the end of it with the next ones or `write`."""
        self._pending += pack(message)
        for frame in frames:
            if frame.nbytes < _OWN_BUFFER_BYTES:
                self._pending += frame
            else:
                await self.write(b"")
                await self._stream.write(frame)
                self.sent_bytes += frame.nbytes

    async def write(self, data: bytes) -> None:
        """Write what is pending, and more bytes."""
        pending, self._pending = self._pending + data, bytearray()
        self.sent_bytes += len(pending)
        if pending:
            await self._stream.write(pending)

    async def read_frames(self, data: Data) -> list[memoryview]:
        """Read the frames of a message, before anything else is received; their length must be checked."""
        if data.segment:
            raise ShippingProtocolError("frames in memory that is not shared", where=self.peer)
        short = [-(-each // ALIGNMENT) * ALIGNMENT for each in data.lengths if each < _OWN_BUFFER_BYTES]
        together = self._pool.acquire(sum(short)) if any(short) else memoryview(b"")
        frames = []
        for length in data.lengths:
            if length >= _OWN_BUFFER_BYTES:
                frame = self._pool.acquire(length)
            else:
                frame, together = together[:length], together[-(-length // ALIGNMENT) * ALIGNMENT :]
            await self.fill(frame)
            frames.append(frame)
        return frames

    async def fill(self, view: memoryview) -> None:
        """Fill a view with the next bytes; for a short one, what has come beyond it is kept."""
        while view.nbytes:
            if not self._ahead.nbytes:
                self._reads += 1
                if self._reads % _STEPS == 0:
                    await asyncio.sleep(0)  # other tasks have a turn, however fast the peer writes
                long = view.nbytes >= _OWN_BUFFER_BYTES
                target = view if long else memoryview(bytearray(_OWN_BUFFER_BYTES))
                try:
                    count = await self._stream.read_into(target, whole=long)
                except OSError as error:
                    raise self._failed(error) from error
                if long:
                    return
                self._ahead = target[:count]
            count = min(view.nbytes, self._ahead.nbytes)
            view[:count] = self._ahead[:count]
            view, self._ahead = view[count:], self._ahead[count:]

    async def _write(self) -> None:
        while True:
            await self._changed.wait_until(lambda: bool(self._outbox))
            self._writing = True
            try:
                while self._outbox and len(self._pending) < _OWN_BUFFER_BYTES:
                    await self.write_message(*self._outbox[0])
                    self._outbox.popleft()
                await self.write(b"")
            except OSError as error:
                raise self._failed(error) from error
            self._writing = False
            self._said = time.monotonic()
            self._changed.notify()

    async def _keep_alive(self, timing: Timing) -> None:
        """Send signs of life, and raise when the peer gives none."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(timing.heartbeat / 2)
            now = time.monotonic()
            # Where this side did not listen for long, what came meanwhile is still to be read.
            listened = now - before <= timing.heartbeat
            if listened and now - self._stream.heard > timing.silence:
                raise ShippingConnectionError(
                    "the peer is silent", where=self.peer, got=f"nothing for {timing.silence:g} s"
                )
            if not self._outbox and now - self._said > timing.heartbeat:
                self.post(Ping())

    def _failed(self, error: OSError) -> ShippingError:
        if isinstance(error, SSLError) and not isinstance(error, SSLEOFError):
            return ShippingSecurityError("TLS failed", where=self.peer, got=str(error))
        return ShippingConnectionError("the connection broke", where=self.peer, got=str(error)[:200] or None)
