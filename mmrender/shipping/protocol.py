"""The protocol between a sender and a receiver: msgpack headers, one kind of which carries frames.

```
sender                                   receiver
Hello     version, sender, table    ->
                                    <-   Welcome    version, longest message, table
Data + frames                       ->
                                    <-   Acked      acknowledged
                                    <-   Refused    this message cannot be used, and is not sent again
Ping                                <->  Ping       after a while of silence
Bye                                 <->  Bye        closing in good order
```

On the wire each is the magic `mmsp`, the length of the header as a little-endian u32, the header, and after a
`Data` its frames. A receiver with a full window stops reading, so the sender waits.

After a lost connection the sender sends all unacknowledged messages again, in order. The receiver drops
duplicates: it keeps the last sequence number of each sender.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn, TypeVar, cast

import msgspec
from msgspec import Meta

from mmcodecs import BufferPool
from mmcodecs.buffers import ALIGNMENT
from mmcodecs.values import DEFAULT_LIMITS
from mmrender.errors import (
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.address import broken
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire

VERSION: Final = 4
MAGIC: Final = b"mmsp"
PREFIX: Final = struct.Struct("<4sI")
MAX_HEADER_BYTES: Final = 256 << 10
MAX_FRAMES: Final = DEFAULT_LIMITS.max_frames + 1
"""Maximum frames of a message of the codec: its payloads and a head."""
PLAIN, TRAJECTORY, GROUP = "", "trajectory", "group"
_LONG_BYTES: Final = 64 << 10
"""Frames from this size on have a buffer of their own, so that they keep no others alive."""
_SHORT_FRAMES_BYTES: Final = 1 << 20
"""Maximum size of a buffer that shorter frames share."""
_NOTHING: Final = memoryview(b"")
_TLS_PIECE_BYTES: Final = 256 << 10
"""Bytes that are encrypted at a time."""
_SOCKET_BYTES: Final = 4 << 20
_LOCAL_SOCKET_BYTES: Final = 256 << 10
"""Buffer of a Unix socket: its content stays in the processor's cache, which makes the copy faster."""

SenderId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Nonce = Annotated[bytes, Meta(min_length=8, max_length=8)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=1000)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds.

    Attributes:
        handshake: From the connection to the Welcome.
        heartbeat: Of silence until a Ping is sent.
        silence: Of the peer's silence until the connection is closed.
        first_retry: Before the second attempt to connect. The wait doubles with each further attempt.
        last_retry: The maximum wait between attempts.
        goodbye: That closing waits for a peer that does not read.
    """

    handshake: float = 10.0
    heartbeat: float = 5.0
    silence: float = 30.0
    first_retry: float = 0.02
    last_retry: float = 2.0
    goodbye: float = 1.0


DEFAULT_TIMING: Final = Timing()


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class Hello(_Header, frozen=True):
    """Opens a connection. `sender` is the same for all connections of one `Sender`."""

    version: int
    sender: SenderId
    table_bytes: Number


class Welcome(_Header, frozen=True):
    """Answers a Hello: the longest message, and the capacity of the table of shared arrays."""

    version: int
    max_bytes: Positive
    table_bytes: Number


class Data(_Header, frozen=True):
    """A message.

    Attributes:
        seq: Its number, which rises with each message of a sender.
        nonce: Drawn once for the message, to tell it from another message under its number.
        kind: Form of the decoded value, see `from_wire`.
        lengths: Lengths of the frames that follow, in bytes.
    """

    seq: Positive
    nonce: Nonce
    kind: Annotated[str, Meta(max_length=32)]
    lengths: Annotated[list[Number], Meta(max_length=MAX_FRAMES)]


class Answer(_Header, frozen=True):
    """About message `seq`."""

    seq: Number


class Acked(Answer, frozen=True):
    """The message is acknowledged."""


class Refused(Answer, frozen=True):
    """The message cannot be used."""

    reason: Text


class Ping(_Header, frozen=True):
    """A sign of life."""


class Bye(_Header, frozen=True):
    """The last message. `denied` says that coming back would not help."""

    reason: Text
    denied: bool = False


Message = Hello | Welcome | Data | Acked | Refused | Ping | Bye

M = TypeVar("M", bound=_Header)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Write a message, without its frames."""
    header = _ENCODER.encode(message)
    return PREFIX.pack(MAGIC, len(header)) + header


def unpack(header: bytes | memoryview) -> Message:
    """Read the header of a message."""
    try:
        return _DECODER.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ShippingProtocolError("a header cannot be read", got=str(error)[:200]) from error


def expect(kind: type[M], message: Message, peer: str) -> M:
    """Require a message of one kind, and of this version of the protocol if it opens a connection."""
    if isinstance(message, Bye):
        if message.denied:
            raise ShippingSecurityError("the peer refused the connection", where=peer, got=message.reason)
        raise ShippingConnectionError("the peer said goodbye", where=peer, got=message.reason)
    if not isinstance(message, kind):
        raise ShippingProtocolError("a message out of turn", where=peer, got=type(message).__name__)
    if isinstance(message, Hello | Welcome) and message.version != VERSION:
        raise ShippingProtocolError(
            "the peer speaks another version of the protocol",
            where=peer,
            expected=str(VERSION),
            got=str(message.version),
            remedy="Install the same version of mmrender on both sides",
        )
    return message


def to_wire(value: Any) -> tuple[str, Any]:
    """Return the kind of a value, and the form in which the codec writes it."""
    if isinstance(value, Trajectory):
        return TRAJECTORY, trajectories_to_wire([value])
    if type(value) is list and value and all(isinstance(each, Trajectory) for each in value):
        return GROUP, trajectories_to_wire(value)
    return PLAIN, value


def from_wire(kind: str, value: Any) -> Any:
    """Undo `to_wire`."""
    if kind == PLAIN:
        return value
    group = trajectories_from_wire(value) if kind in (TRAJECTORY, GROUP) else None
    if group is None or (kind == TRAJECTORY and len(group) != 1):
        got = f"{kind!r} of {0 if group is None else len(group)}"
        raise ShippingProtocolError("a value of unknown kind", expected="a trajectory or a group", got=got)
    return group if kind == GROUP else group[0]


def check_options(**options: tuple[Any, int, int | None]) -> None:
    """Check numbers, each with its minimum and its maximum."""
    for name, (value, minimum, maximum) in options.items():
        if not isinstance(value, int) or value < minimum or (maximum is not None and value > maximum):
            expected = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
            raise ShippingError("an option is out of range", where=name, expected=expected, got=repr(value))


class Notifier:
    """Wakes the tasks of one event loop that wait for a condition."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Have every waiter look at its condition again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class End:
    """One end of shipping. It belongs to the process that used it first, and is not copied."""

    _pid: int = 0

    def claim(self) -> None:
        """Use it in this process from now on.

        Raises:
            ShippingClosedError: It is in use in another process, from which this one was forked.
        """
        pid = os.getpid()
        self._pid = self._pid or pid
        if self._pid != pid:  # neither its event loop nor its threads run here
            raise ShippingClosedError(
                "in use in the process from which this one was forked",
                where=type(self).__name__,
                expected=f"process {self._pid}",
                got=f"process {pid}",
                remedy="Make another one in each process, or use it first after the fork",
            )

    def __reduce__(self) -> NoReturn:
        raise ShippingError(
            "an end of shipping cannot be copied or pickled: messages of two copies would be taken for one",
            where=type(self).__name__,
            remedy="Pass the address, and make another one there",
        )


class Connection(asyncio.BufferedProtocol):
    """Messages over one connection, both ways.

    Frames go out from their own memory. A long frame comes in straight into a pooled buffer of its own.

    Args:
        peer: Its name, for errors.
        timing: Time limits.

    Attributes:
        sent_bytes: Bytes written so far.
        lost: Why the connection has ended; None while it lasts.
    """

    def __init__(self, peer: str, timing: Timing) -> None:
        self.peer = peer
        self.sent_bytes = 0
        self.lost: ShippingError | None = None
        self._timing = timing
        self._changed = Notifier()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Bytes that came before they were asked for, and the rest of the long frame that is coming.
        self._ahead = memoryview(bytearray(_LONG_BYTES))
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

    async def send(self, data: Data, frames: Sequence[memoryview]) -> None:
        """Send a message with frames, which must not change until this returns.

        Raises:
            ShippingError: The connection has ended.
        """
        if self._transport is None or self._transport.is_closing():
            raise self.lost or broken(None, self.peer)
        is_plain = self._transport.get_extra_info("ssl_object") is None
        pieces: list[bytearray | memoryview] = [bytearray(pack(data))]
        for frame in frames:
            if frame.nbytes >= _LONG_BYTES:
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

    async def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ShippingConnectionError: The connection broke.
            ShippingProtocolError: The bytes are not a message, or too long, and no memory was taken for them.
            ShippingSecurityError: TLS failed.
        """
        while True:
            prefix = memoryview(bytearray(PREFIX.size))
            await self._fill(prefix)
            magic, length = PREFIX.unpack(prefix)
            if magic != MAGIC or length > MAX_HEADER_BYTES:
                raise ShippingProtocolError(
                    "the peer does not speak this protocol",
                    where=self.peer,
                    expected=f"{MAGIC!r} and a header of at most {MAX_HEADER_BYTES} bytes",
                    got=repr(bytes(prefix)),
                )
            header = memoryview(bytearray(length))
            await self._fill(header)
            message = unpack(header)
            if not isinstance(message, Ping):
                return message

    async def read_frames(self, lengths: Sequence[int], pool: BufferPool) -> list[memoryview]:
        """Read the frames of a message whose lengths are checked, before anything else is received."""
        sizes = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        short_bytes = sum(size for size, length in zip(sizes, lengths, strict=True) if length < _LONG_BYTES)
        room, frames = _NOTHING, []
        for size, length in zip(sizes, lengths, strict=True):
            if length >= _LONG_BYTES:
                frame = pool.acquire(length)
            else:
                if size > room.nbytes:
                    room = pool.acquire(min(short_bytes, _SHORT_FRAMES_BYTES))
                frame, room, short_bytes = room[:length], room[size:], short_bytes - size
            await self._fill(frame)
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

    def close(self) -> None:
        """Close the connection at once."""
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
            if view.nbytes < _LONG_BYTES:
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
            self.lost = ShippingConnectionError("the peer is silent", where=self.peer, got=got)
            self.close()
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
        size = _LOCAL_SOCKET_BYTES if sock.family == socket.AF_UNIX else _SOCKET_BYTES
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, size)
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
