"""`Receiver`: takes messages from any number of senders, each once."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from ssl import SSLContext
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from mmcodecs import BufferPool, Limits, decode
from mmcodecs.arrays import Framework
from mmrender.errors import (
    MMRenderError,
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
    check_count,
    check_option,
)
from mmrender.shipping.address import Address, broken, check_tls, listen
from mmrender.shipping.connection import Connection
from mmrender.shipping.protocol import (
    DEFAULT_TIMING,
    PLAIN,
    VERSION,
    Acked,
    Bye,
    Data,
    End,
    Frames,
    Hello,
    Refused,
    Timing,
    Want,
    Welcome,
    from_wire,
)
from mmrender.shipping.store import FrameStore
from mmrender.trajectory.delivery import DeliveryId
from mmrender.workers import Notifier

Acknowledge: TypeAlias = Literal["taken", "explicit"]
LIMITS: Final = Limits(max_bytes=2 << 30)
_IDLE_SHARE: Final = 4
"""A receiver's buffers in reserve have at most this part of its memory, added to it."""
_log = logging.getLogger("mmrender.shipping")


@dataclass(slots=True, eq=False)
class Received:
    """A message that the consumer took.

    Attributes:
        value: The value that was sent. Its arrays are read-only views, whose memory is reused once the last
            view is gone.
        id: Sender and sequence number.
        sender: Name of the connection, for logs.
    """

    value: Any
    id: str
    sender: str
    _receiver: "Receiver" = field(repr=False)
    _source: "_Source" = field(repr=False)
    _data: Data = field(repr=False)

    def ack(self) -> None:
        """Acknowledge it: it is safe with the consumer, and the sender may forget it. Idempotent.

        Raises:
            ShippingClosedError: The receiver is closed. The sender keeps the message for the next receiver.
        """
        receiver, source, seq = self._receiver, self._source, self._data.seq
        receiver.claim()
        if seq not in source.unacked:
            return  # acknowledged before
        if receiver._closed:
            raise ShippingClosedError(
                "the receiver is closed, so the sender gets no answer",
                where=f"message {self.id!r}",
                remedy="Acknowledge before closing, or pass your ids to the next receiver as seen=",
            )
        source.unacked.discard(seq)
        if source.session is not None:
            source.session.connection.post(Acked(seq))
        elif not source.unacked and source.is_over:
            receiver._sources.pop(source.name, None)


@dataclass(slots=True)
class ReceiverStats:
    """Figures since a receiver was opened.

    Attributes:
        messages: Messages that arrived whole, duplicates included.
        duplicates: Messages that had arrived before, and were dropped.
        received_bytes: Bytes of their frames on the wire.
        queued: Messages that the consumer has not taken.
        connections: Open connections.
        refused: Connections that were closed because of an error of the peer.
    """

    messages: int = 0
    duplicates: int = 0
    received_bytes: int = 0
    queued: int = 0
    connections: int = 0
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Source:
    """A sender, over all of its connections.

    Attributes:
        name: Its id in hexadecimal.
        last: Number of its newest message. It sends again in order, so all up to here have arrived.
        seen: Runs of numbers of messages that the consumer has from earlier runs.
        unacked: Numbers of the messages that are not acknowledged.
        session: Its connection.
        is_over: Whether it has said goodbye, and does not come again.
    """

    name: str
    last: int = 0
    seen: list[range] = field(default_factory=list)
    unacked: set[int] = field(default_factory=set)
    session: "_Session | None" = None
    is_over: bool = False


class Receiver(End):
    """Listens at an address and hands on each message once, in the order of its sender.

    For use on one event loop.

    Args:
        url: Address to listen at: `unix:///path` or `tcp://host:port`.
        ssl: TLS context, required for `tcp://` beyond loopback. It must require a certificate of senders.
        ack: "taken" acknowledges a message when the consumer takes it. With "explicit" the consumer calls
            `Received.ack()` when the message is safe. An unacknowledged message comes again after a restart.
        seen: Ids (`Received.id`) that the consumer has from earlier runs, such as from its own checkpoint.
            These messages are acknowledged and dropped. Other text is ignored. If the consumer has stored the
            messages of each sender in order, a mapping from senders to their last numbers is enough.
        window_messages: Maximum number of messages of all senders that wait for the consumer. The receiver
            stops reading when it is reached.
        memory_bytes: Maximum memory, in bytes on the wire, for messages that arrive or wait for the consumer,
            and for the arrays that are kept for later messages of all senders. Messages come first. A longer
            message is taken alone. A quarter more is kept in buffers for their next use.
        max_connections: Maximum number of senders at a time.
        framework: Class of arrays, see `mmcodecs.decode`. Arrays of trajectories are always numpy.
        limits: Bounds of the codec. `max_bytes` bounds one message.
        timing: Time limits.

    Attributes:
        url: The address, once it is open with the port that was chosen.
        errors: The last hundred errors that closed a connection.

    Raises:
        ShippingError: The address or an option cannot be used.
        ShippingSecurityError: The TLS context does not ask for the senders' certificates.
    """

    def __init__(
        self,
        url: str,
        *,
        ssl: SSLContext | None = None,
        ack: Acknowledge = "taken",
        seen: Iterable[str] | Mapping[str, int] = (),
        window_messages: int = 64,
        memory_bytes: int = 256 << 20,
        max_connections: int = 1024,
        framework: Framework = "numpy",
        limits: Limits = LIMITS,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.address = Address.parse(url)
        self.url = str(self.address)
        check_tls(self.address, ssl)
        check_option("ack", ack, get_args(Acknowledge), error=ShippingError)
        check_count("window_messages", window_messages, error=ShippingError)
        check_count("memory_bytes", memory_bytes, error=ShippingError)
        check_count("max_connections", max_connections, error=ShippingError)
        self.ack: Acknowledge = ack
        self.window_messages = window_messages
        self.memory_bytes = memory_bytes
        self.max_connections = max_connections
        self.framework: Framework = framework
        self.limits = limits
        self.timing = timing
        self.errors: deque[MMRenderError] = deque(maxlen=100)
        self._ssl = ssl
        self._sources = _sources(seen)
        self._queue: deque[Received] = deque()
        # Messages that are arriving or in the queue, and their bytes. `_turn` grants room in order.
        self._messages = self._bytes = 0
        self._turn = asyncio.Lock()
        self._pool = BufferPool(max_idle_bytes=memory_bytes // _IDLE_SHARE)
        self._store = FrameStore(memory_bytes)
        self._changed = Notifier()
        self._stop_listening: Callable[[], None] | None = None
        self._sessions: set[_Session] = set()
        self._stats = ReceiverStats()
        self._closed = False

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far."""
        received = self._stats.received_bytes + sum(each.connection.received_bytes for each in self._sessions)
        connections = sum(each.source is not None for each in self._sessions)
        return replace(self._stats, queued=len(self._queue), connections=connections, received_bytes=received)

    async def open(self) -> None:
        """Start to listen.

        Raises:
            ShippingSecurityError: Other machines can reach the address, and TLS does not identify them.
            ShippingConnectionError: The address cannot be bound.
            ShippingClosedError: The receiver was closed, or is in use in another process.
        """
        self.claim()
        if self._closed:
            raise ShippingClosedError("the receiver is closed")
        if self._stop_listening is None:
            self.url, self._stop_listening = await listen(self.address, self._ssl, self._accept)

    async def receive(self, timeout: float | None = None) -> Received:
        """Wait for the next message.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            TimeoutError: None came in time.
            ShippingClosedError: The receiver is closed, or in use in another process.
        """
        self.claim()
        async with asyncio.timeout(timeout):
            await self._changed.wait_until(lambda: bool(self._queue) or self._closed)
        if self._closed:
            raise ShippingClosedError("the receiver is closed")
        message = self._queue.popleft()
        self._leave(sum(message._data.lengths))
        if self.ack == "taken":
            message.ack()
        return message

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            try:
                message = await self.receive()
            except ShippingClosedError:
                return
            yield message

    async def aclose(self) -> None:
        """Close. Senders keep unacknowledged messages for the next receiver."""
        self.claim()
        if self._closed:
            return
        self._closed = True
        self._changed.notify()
        if self._stop_listening is not None:
            self._stop_listening()
        bye = Bye("the receiver was closed")
        await asyncio.gather(*(each.end(bye) for each in list(self._sessions)))

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _accept(self, sock: socket.socket, peer: str) -> None:
        session = _Session(self, sock, peer)
        self._sessions.add(session)
        session.task.add_done_callback(lambda _: self._dismiss(session))

    def _dismiss(self, session: "_Session") -> None:
        """Forget a connection that has ended, and its sender if nothing more is to be known of it."""
        self._sessions.discard(session)
        self._stats.received_bytes += session.connection.received_bytes
        source = session.source
        if source is None or source.session is not session:
            return
        source.session = None
        if not source.unacked and (source.is_over or not (source.last or source.seen)):
            self._sources.pop(source.name, None)

    async def _enter(self, num_bytes: int) -> None:
        """Wait for room for a message, in turn."""
        async with self._turn:
            room = self.memory_bytes - num_bytes
            await self._changed.wait_until(
                lambda: not self._messages or (self._messages < self.window_messages and self._bytes <= room)
            )
            self._messages += 1
            self._bytes += num_bytes
        self._store.limit(self.memory_bytes - self._bytes)

    def _leave(self, num_bytes: int) -> None:
        """Make room for other messages."""
        self._messages -= 1
        self._bytes -= num_bytes
        self._store.limit(self.memory_bytes - self._bytes)
        self._changed.notify()

    def _refuse(self, error: MMRenderError) -> None:
        """Note why a connection is closed."""
        if isinstance(error, ShippingConnectionError):
            _log.debug("%s", error)
            return
        self._stats.refused += 1
        self.errors.append(error)
        _log.warning("a connection was closed: %s", error)


class _Session:
    """One connection of a sender: takes in its messages, and answers.

    Attributes:
        source: The sender over all connections, None before its Hello.
        task: The task that serves the connection.
    """

    def __init__(self, receiver: Receiver, sock: socket.socket, peer: str) -> None:
        self.source: _Source | None = None
        self.connection = Connection(peer, receiver.timing)
        self._receiver = receiver
        self._sock = sock
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def end(self, bye: Bye | None = None) -> None:
        """Close the connection, with a last message if the sender reads it in time."""
        if bye is not None:
            await self.connection.finish(bye)
        self.task.cancel()
        await asyncio.wait([self.task])
        self._sock.close()  # a task that was cancelled before its first step has not done so

    async def _run(self) -> None:
        """Serve the connection. An error ends this connection only."""
        owner, connection = self._receiver, self.connection
        try:
            source = await self._greet()
            while True:
                await connection.drain()  # a sender that does not read answers is not read from
                await self._take_in(source, await connection.receive(Data))
        except MMRenderError as error:
            owner._refuse(error)
            if not isinstance(error, ShippingConnectionError):
                await connection.finish(Bye(str(error)[:1000], isinstance(error, ShippingSecurityError)))
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end silently
            owner._refuse(ShippingError("serving failed", where=connection.peer, got=repr(error)[:200]))
        finally:
            connection.close()
            if self.source is not None:
                self.source.is_over |= connection.is_over

    async def _greet(self) -> _Source:
        """Do the handshake, and end the sender's earlier session."""
        owner, connection = self._receiver, self.connection
        try:
            async with asyncio.timeout(owner.timing.handshake):
                make = asyncio.get_running_loop().connect_accepted_socket
                await make(lambda: connection, self._sock, ssl=owner._ssl)
                if owner._closed or len(owner._sessions) > owner.max_connections:
                    raise ShippingConnectionError("too many connections", where=connection.peer)
                name = (await connection.receive(Hello)).sender.hex()
                source = self.source = owner._sources.setdefault(name, _Source(name))
                # A sender that connects again has lost its earlier connection, even if it still looks open.
                earlier, source.session = source.session, self
                if earlier is not None:
                    await earlier.end()
        except TimeoutError as error:
            raise ShippingConnectionError("no handshake in time", where=connection.peer) from error
        except OSError as error:
            raise broken(error, connection.peer) from error
        connection.post(Welcome(VERSION, owner.limits.max_bytes))
        return source

    async def _take_in(self, source: _Source, data: Data) -> None:
        """Take in a message."""
        owner, connection, seq = self._receiver, self.connection, data.seq
        num_bytes, max_bytes = sum(data.lengths), owner.limits.max_bytes
        if num_bytes > max_bytes:
            raise ShippingProtocolError(
                "a message is too long",
                where=connection.peer,
                expected=f"at most {max_bytes} bytes",
                got=str(num_bytes),
            )
        # A sender sends again in order, so all numbers up to the last one have arrived.
        is_new = seq > source.last and not any(seq in run for run in source.seen)
        id, is_queued = str(DeliveryId(source.name, seq)), False
        await owner._enter(num_bytes)
        try:
            frames = await self._frames_of(source, data, is_new=is_new)
            owner._stats.messages += 1
            if not is_new:
                owner._stats.duplicates += 1
                if seq not in source.unacked:
                    connection.post(Acked(seq))
                return
            framework = owner.framework if data.kind == PLAIN else "numpy"
            try:
                value = from_wire(data.kind, decode(frames, framework=framework, limits=owner.limits))
            except Exception as error:
                # Without an answer the sender would send the same message again and again.
                connection.post(Refused(seq, str(error)[:1000]))
                raise ShippingProtocolError(
                    "a message that cannot be used",
                    where=f"message '{id}' from {connection.peer}",
                    got=str(error),
                ) from error
            source.last = seq
            source.unacked.add(seq)
            owner._queue.append(Received(value, id, connection.peer, owner, source, data))
            is_queued = True
            owner._changed.notify()
        finally:
            if not is_queued:
                owner._leave(num_bytes)

    async def _frames_of(self, source: _Source, data: Data, *, is_new: bool) -> list[memoryview]:
        """Read the frames that are not here, and return all frames. A duplicate lacks long ones."""
        owner, connection = self._receiver, self.connection
        short, long = data.parts()
        lengths = [data.lengths[number] for number in short]
        frames = dict(zip(short, await connection.read_frames(lengths, owner._pool), strict=True))
        if long:
            for number in long:
                frame = owner._store.find(source.name, data.keys.get(number), data.lengths[number])
                if frame is not None:
                    frames[number] = frame
            wanted = [number for number in long if is_new and number not in frames]
            connection.post(Want(data.seq, wanted))
            if (answer := await connection.receive(Frames)).seq != data.seq:
                raise ShippingProtocolError("a message out of turn", where=connection.peer, got=str(answer))
            lengths = [data.lengths[number] for number in wanted]
            for number, frame in zip(wanted, await connection.read_frames(lengths, owner._pool), strict=True):
                frames[number] = frame
                if (key := data.keys.get(number)) is not None:
                    frames[number] = frame.toreadonly()
                    owner._store.put(source.name, key, frames[number])
        return [frames[number] for number in sorted(frames)]


def _sources(seen: Iterable[str] | Mapping[str, int]) -> dict[str, _Source]:
    """Return the senders of messages that the consumer has, with their last numbers or runs of numbers."""
    if isinstance(seen, Mapping):
        return {name: _Source(name, last) for name, last in seen.items()}
    numbers: dict[str, set[int]] = {}
    for each in seen:
        if (id := DeliveryId.parse(each)) is not None:
            numbers.setdefault(id.sender, set()).add(id.number)
    sources = {}
    for name, seqs in numbers.items():
        source = sources[name] = _Source(name)
        for seq in sorted(seqs):
            if source.seen and source.seen[-1].stop == seq:
                source.seen[-1] = range(source.seen[-1].start, seq + 1)
            else:
                source.seen.append(range(seq, seq + 1))
    return sources
