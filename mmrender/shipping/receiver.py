"""`Receiver`: takes messages from any number of senders, each once."""

import asyncio
import logging
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from ssl import SSLContext
from typing import Any, Final, Literal, Self, TypeAlias, TypedDict

from mmcodecs import BufferPool, Decoder, Limits
from mmcodecs.arrays import Framework
from mmrender.errors import (
    MMRenderError,
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.address import Address, broken, check_tls, listen
from mmrender.shipping.protocol import (
    DEFAULT_TIMING,
    PLAIN,
    VERSION,
    Acked,
    Bye,
    Connection,
    Data,
    End,
    Hello,
    Notifier,
    Refused,
    Timing,
    Welcome,
    check_options,
    expect,
    from_wire,
)

Acknowledge: TypeAlias = Literal["taken", "explicit"]
LIMITS: Final = Limits(max_bytes=2 << 30)
_ID: Final = re.compile(r"([0-9a-f]{32}):([1-9][0-9]{0,18})")
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
    _source: "_Source" = field(repr=False)
    _data: Data = field(repr=False)
    _acknowledge: Callable[["Received"], None] = field(repr=False)

    def ack(self) -> None:
        """Acknowledge it: it is safe with the consumer, and the sender may forget it. Idempotent.

        Raises:
            ShippingClosedError: The receiver is closed. The sender keeps the message for the next receiver.
        """
        self._acknowledge(self)


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


class ReceiverOptions(TypedDict, total=False):
    """Options of `Receiver`."""

    ssl: SSLContext | None
    ack: Acknowledge
    seen: Iterable[str]
    window_messages: int
    window_bytes: int
    table_bytes: int
    max_connections: int
    framework: Framework
    limits: Limits
    timing: Timing


@dataclass(slots=True, eq=False)
class _Source:
    """A sender, over all of its connections.

    Attributes:
        name: Its id in hexadecimal.
        last: Number of its newest message. It sends again in order, so all up to here have arrived.
        last_nonce: Nonce of the newest message.
        seen: Runs of numbers of messages that the consumer has from earlier runs.
        unacked: Nonces of the messages that are not acknowledged, by number.
        session: Its connection.
        is_closed: Whether it has said goodbye, and does not come again.
    """

    name: str
    last: int = 0
    last_nonce: bytes | None = None
    seen: list[range] = field(default_factory=list)
    unacked: dict[int, bytes] = field(default_factory=dict)
    session: "_Session | None" = None
    is_closed: bool = False


class Receiver(End):
    """Listens at an address and hands on each message once, in the order of its sender.

    For use on one event loop. `BlockingReceiver` serves threads.

    Args:
        url: Address to listen at: `unix:///path` or `tcp://host:port`.
        ssl: TLS context, required for `tcp://` beyond loopback. It must require a certificate of senders.
        ack: "taken" acknowledges a message when the consumer takes it. With "explicit" the consumer calls
            `Received.ack()` when the message is safe. An unacknowledged message comes again after a restart.
        seen: Ids (`Received.id`) that the consumer has from earlier runs, such as from its own checkpoint.
            These messages are acknowledged and dropped. Other text is ignored.
        window_messages: Maximum number of messages of all senders that wait for the consumer. The receiver
            stops reading when it is reached.
        window_bytes: The same in bytes on the wire. A longer message is taken alone.
        table_bytes: Maximum memory for arrays that senders share between messages, over all connections. A
            connection is granted its sender's wish, or the rest.
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
        seen: Iterable[str] = (),
        window_messages: int = 64,
        window_bytes: int = 256 << 20,
        table_bytes: int = 256 << 20,
        max_connections: int = 1024,
        framework: Framework = "numpy",
        limits: Limits = LIMITS,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.address = Address.parse(url)
        self.url = str(self.address)
        check_tls(self.address, ssl)
        if ack not in ("taken", "explicit"):
            expected = "'taken' or 'explicit'"
            raise ShippingError("an option is out of range", where="ack", expected=expected, got=repr(ack))
        check_options(
            window_messages=(window_messages, 1, None),
            window_bytes=(window_bytes, 1, None),
            table_bytes=(table_bytes, 0, None),
            max_connections=(max_connections, 1, None),
        )
        self.ack: Acknowledge = ack
        self.window_messages = window_messages
        self.window_bytes = window_bytes
        self.table_bytes = table_bytes
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
        self._pool = BufferPool(max_idle_bytes=window_bytes)
        self._changed = Notifier()
        self._stop_listening: Callable[[], None] | None = None
        self._sessions: set[_Session] = set()
        self._stats = ReceiverStats()
        self._closed = False

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far."""
        connections = sum(each.source is not None for each in list(self._sessions))
        return replace(self._stats, queued=len(self._queue), connections=connections)

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
            self._acknowledge(message)
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
        session.task.add_done_callback(lambda _: self._sessions.discard(session))

    def _leave(self, num_bytes: int) -> None:
        """Make room in the window."""
        self._messages -= 1
        self._bytes -= num_bytes
        self._changed.notify()

    def _acknowledge(self, message: Received) -> None:
        self.claim()
        source, seq = message._source, message._data.seq
        if seq not in source.unacked:
            return  # acknowledged before
        if self._closed:
            raise ShippingClosedError(
                "the receiver is closed, so the sender gets no answer",
                where=f"message {message.id!r}",
                remedy="Acknowledge before closing, or pass your ids to the next receiver as seen=",
            )
        del source.unacked[seq]
        if source.session is not None:
            source.session.connection.post(Acked(seq))
        if source.is_closed:
            self._forget(source)

    def _forget(self, source: _Source) -> None:
        """Forget a sender that said goodbye and has all messages acknowledged, or that never sent any."""
        has_sent = source.last or source.seen
        if not source.unacked and (source.is_closed or not (has_sent or source.session)):
            self._sources.pop(source.name, None)

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
        table_bytes: Capacity of the connection's table of shared arrays.
        task: The task that serves the connection.
    """

    def __init__(self, receiver: Receiver, sock: socket.socket, peer: str) -> None:
        self.source: _Source | None = None
        self.table_bytes = 0
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
            await self._serve()
        except MMRenderError as error:
            owner._refuse(error)
            if not isinstance(error, ShippingConnectionError):
                await connection.finish(Bye(str(error)[:1000], isinstance(error, ShippingSecurityError)))
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end silently
            owner._refuse(ShippingError("serving failed", where=connection.peer, got=repr(error)[:200]))
        finally:
            connection.close()
            if self.source is not None and self.source.session is self:
                self.source.session = None
                owner._forget(self.source)

    async def _serve(self) -> None:
        owner, connection = self._receiver, self.connection
        try:
            async with asyncio.timeout(owner.timing.handshake):
                make = asyncio.get_running_loop().connect_accepted_socket
                await make(lambda: connection, self._sock, ssl=owner._ssl)
                source = await self._greet()
        except TimeoutError as error:
            raise ShippingConnectionError("no handshake in time", where=connection.peer) from error
        except OSError as error:
            raise broken(error, connection.peer) from error
        # Long frames have buffers of their own, which the table may hold.
        decoder = Decoder(table_bytes=self.table_bytes, keep_views=True, limits=owner.limits)
        while True:
            await connection.drain()  # a sender that does not read answers is not read from
            message = await connection.receive()
            if isinstance(message, Bye):
                source.is_closed = True
                owner._forget(source)
            await self._take_in(source, decoder, expect(Data, message, connection.peer))

    async def _greet(self) -> _Source:
        """Answer the Hello of a sender, and end its earlier session."""
        owner, connection = self._receiver, self.connection
        if owner._closed or len(owner._sessions) > owner.max_connections:
            raise ShippingConnectionError("too many connections", where=connection.peer)
        hello = expect(Hello, await connection.receive(), connection.peer)
        name = hello.sender.hex()
        source = self.source = owner._sources.setdefault(name, _Source(name))
        # A sender that connects again has lost its earlier connection, even if it still looks open here.
        earlier, source.session = source.session, self
        if earlier is not None:
            await earlier.end()
        granted = sum(each.table_bytes for each in owner._sessions)
        self.table_bytes = min(hello.table_bytes, owner.table_bytes - granted)
        connection.post(Welcome(VERSION, owner.limits.max_bytes, self.table_bytes))
        return source

    async def _take_in(self, source: _Source, decoder: Decoder, data: Data) -> None:
        """Take in a message."""
        owner, connection = self._receiver, self.connection
        num_bytes, max_bytes = sum(data.lengths), owner.limits.max_bytes
        if num_bytes > max_bytes:
            raise ShippingProtocolError(
                "a message is too long",
                where=connection.peer,
                expected=f"at most {max_bytes} bytes",
                got=str(num_bytes),
            )
        async with owner._turn:
            # A message that is longer than the window is taken alone.
            room = owner.window_bytes - num_bytes
            await owner._changed.wait_until(
                lambda: (
                    not owner._messages or (owner._messages < owner.window_messages and owner._bytes <= room)
                )
            )
            owner._messages += 1
            owner._bytes += num_bytes
        is_new = False
        try:
            frames = await connection.read_frames(data.lengths, owner._pool)
            try:
                decoder.framework = owner.framework if data.kind == PLAIN else "numpy"
                value = from_wire(data.kind, decoder.decode(frames))
            except Exception as error:
                # Without an answer the sender would send the same message again and again.
                connection.post(Refused(data.seq, str(error)[:1000]))
                raise ShippingProtocolError(
                    "a message that cannot be used",
                    where=f"message '{source.name}:{data.seq}' from {connection.peer}",
                    got=str(error),
                ) from error
            owner._stats.messages += 1
            owner._stats.received_bytes += num_bytes
            is_new = self._put(source, data, value)
        finally:
            if not is_new:
                owner._leave(num_bytes)

    def _put(self, source: _Source, data: Data, value: Any) -> bool:
        """Queue a message that has arrived whole. A duplicate is dropped and answered: False."""
        owner, seq, nonce, name = self._receiver, data.seq, data.nonce, f"{source.name}:{data.seq}"
        if seq > source.last and not any(seq in run for run in source.seen):
            source.last, source.last_nonce = seq, nonce
            source.unacked[seq] = nonce
            owner._queue.append(Received(value, name, self.connection.peer, source, data, owner._acknowledge))
            owner._changed.notify()
            return True
        if nonce != (source.last_nonce if seq == source.last else source.unacked.get(seq, nonce)):
            problem = ShippingProtocolError(
                "another message has arrived under this number",
                where=f"message {name!r}",
                remedy="Make another sender in each process: two of them have one identity",
            )
            self.connection.post(Refused(seq, str(problem)[:1000]))
            return False
        owner._stats.duplicates += 1
        if seq not in source.unacked:
            self.connection.post(Acked(seq))
        return False


def _sources(ids: Iterable[str]) -> dict[str, _Source]:
    """Return the senders of messages with these ids, with runs of the numbers."""
    numbers: dict[str, set[int]] = {}
    for each in ids:
        if match := _ID.fullmatch(each):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    sources = {}
    for name, seqs in numbers.items():
        source = sources[name] = _Source(name)
        for seq in sorted(seqs):
            if source.seen and source.seen[-1].stop == seq:
                source.seen[-1] = range(source.seen[-1].start, seq + 1)
            else:
                source.seen.append(range(seq, seq + 1))
    return sources
