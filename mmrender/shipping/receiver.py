"""`Receiver`: takes messages from any number of senders, each once."""

import asyncio
import contextlib
import logging
import socket
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from ssl import SSLContext
from types import TracebackType
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
from mmrender.shipping.address import Address, Listener, listen
from mmrender.shipping.connection import Connection
from mmrender.shipping.protocol import (
    DEFAULT_TIMING,
    PLAIN,
    VERSION,
    Acked,
    Bye,
    Data,
    Hello,
    Message,
    Notifier,
    Refused,
    Taken,
    Timing,
    Welcome,
    expect,
    from_wire,
)
from mmrender.shipping.shared_memory import connect

Acknowledge: TypeAlias = Literal["taken", "explicit"]
LIMITS: Final = Limits(max_bytes=2 << 30)
_ORPHANED_MESSAGES: Final = 4096
_ORPHANED_WINDOWS: Final = 4
_log = logging.getLogger("mmrender.shipping")


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A message that the consumer took.

    Attributes:
        value: The value that was sent. Its arrays are read-only views of memory that is reused once the last
            of them is gone.
        id: The sender's idempotency key, or else sender and sequence number.
        sender: Name of the connection, for logs.
    """

    value: Any
    id: str
    sender: str
    _acknowledge: Callable[[], None] = field(repr=False)

    def ack(self) -> None:
        """Acknowledge it: it is safe with the consumer, and the sender may forget it. Idempotent.

        Raises:
            ShippingClosedError: The receiver is closed, so the sender gets no answer: it keeps the message
                for the next receiver.
        """
        self._acknowledge()


@dataclass(slots=True)
class ReceiverStats:
    """Figures since a receiver was opened.

    Attributes:
        messages: Messages that arrived whole, duplicates included.
        duplicates: Those of them that had arrived before, and were not handed on.
        received_bytes: Bytes of their frames on the wire.
        queued: Messages that the consumer has not taken.
        connections: Open ones.
        refused: Connections that ended because of something that the peer sent.
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
    dedup_window: int
    window_messages: int
    window_bytes: int
    table_bytes: int
    max_connections: int
    framework: Framework
    limits: Limits
    timing: Timing


@dataclass(slots=True, eq=False)
class _Incoming:
    """A message until it is acknowledged.

    `origins` are the sessions that brought it, with its number there. The first one's window holds its place.
    """

    name: str
    digest: bytes
    value: Any
    num_bytes: int
    origins: "list[tuple[_Session, int]]"


class Receiver:
    """Listens at an address and hands on each message once, those of one sender in order.

    A message is known by its sender and sequence number, or by the idempotency key that its sender gave. For
    use on one event loop; `BlockingReceiver` serves threads.

    Args:
        url: Where to listen: `unix:///path`, `tcp://host:port` or `shm://name`.
        ssl: TLS context, needed for `tcp://` beyond loopback; it must require a certificate of senders.
        ack: "taken" acknowledges a message when the consumer takes it. With "explicit" the consumer calls
            `Received.ack()` when the message is safe with it; a message that was not acknowledged comes again
            after the receiver was restarted.
        seen: Ids (`Received.id`) that the consumer has from earlier runs, such as from its own checkpoint;
            these messages are acknowledged and not handed on.
        dedup_window: Number of acknowledged ids to remember.
        window_messages: Messages that one sender may have sent and the consumer not taken.
        window_bytes: The same in bytes on the wire; one message may be longer.
        table_bytes: Bound on the memory for the arrays that one sender shares.
        max_connections: Senders at a time.
        framework: What arrays become; see `mmcodecs.decode`. Those of trajectories stay numpy arrays.
        limits: Of the codec, for what is decoded; `max_bytes` bounds one message.
        timing: Time limits.

    Attributes:
        errors: Why connections were closed, the last hundred.

    Raises:
        ShippingError: The address or an option cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        ssl: SSLContext | None = None,
        ack: Acknowledge = "taken",
        seen: Iterable[str] = (),
        dedup_window: int = 1 << 20,
        window_messages: int = 64,
        window_bytes: int = 256 << 20,
        table_bytes: int = 256 << 20,
        max_connections: int = 1024,
        framework: Framework = "numpy",
        limits: Limits = LIMITS,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.address = Address.parse(url)
        for name, value, right, expected in (
            ("ack", ack, ack in ("taken", "explicit"), "'taken' or 'explicit'"),
            ("window_messages", window_messages, window_messages >= 1, "1 or more"),
            ("window_bytes", window_bytes, window_bytes >= 1, "1 or more"),
        ):
            if not right:
                raise ShippingError(
                    "an option is out of range", where=name, expected=expected, got=repr(value)
                )
        self.ack: Acknowledge = ack
        self.window_messages = window_messages
        self.window_bytes = window_bytes
        self.table_bytes = table_bytes
        self.framework: Framework = framework
        self.limits = limits
        self.timing = timing
        self.errors: deque[MMRenderError] = deque(maxlen=100)
        self._ssl = ssl
        self._max_connections = max_connections
        self._dedup_window = dedup_window
        self._seen: OrderedDict[str, bytes] = OrderedDict((name, b"") for name in seen)
        self._queue: deque[_Incoming] = deque()
        self._open: dict[str, _Incoming] = {}
        self._pool = BufferPool()
        self._changed = Notifier()
        self._listener: Listener | None = None
        self._sessions: set[_Session] = set()
        self._stats = ReceiverStats()
        self._closed = False

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        return self._listener.url if self._listener is not None else str(self.address)

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far."""
        connections = sum(each.sender != b"" for each in list(self._sessions))
        return replace(self._stats, queued=len(self._queue), connections=connections)

    async def open(self) -> None:
        """Start to listen.

        Raises:
            ShippingSecurityError: Other machines can reach the address, and TLS does not identify them.
            ShippingConnectionError: The address cannot be bound.
            ShippingClosedError: The receiver was closed.
        """
        if self._closed:
            raise ShippingClosedError("the receiver is closed")
        if self._listener is None:
            self._listener = await listen(self.address, self._ssl, self._accept)

    async def receive(self, timeout: float | None = None) -> Received:
        """Wait for the next message.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            TimeoutError: None came in time.
            ShippingClosedError: The receiver is closed.
        """
        async with asyncio.timeout(timeout):
            await self._changed.wait_until(lambda: bool(self._queue) or self._closed)
        if self._closed:
            raise ShippingClosedError("the receiver is closed")
        entry = self._queue.popleft()
        session, seq = entry.origins[0]
        session.took(seq, tell=self.ack == "explicit")
        self._changed.notify()
        if self.ack == "taken":
            self._acknowledge(entry)
        value, entry.value = entry.value, None
        return Received(value, entry.name, session.connection.peer, lambda: self._acknowledge(entry))

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            try:
                message = await self.receive()
            except ShippingClosedError:
                return
            yield message

    async def aclose(self) -> None:
        """Close; senders keep unacknowledged messages for the next receiver."""
        if self._closed:
            return
        self._closed = True
        self._changed.notify()
        if self._listener is not None:
            self._listener.close()
        sessions = list(self._sessions)
        await asyncio.gather(*(each.finish(Bye("the receiver was closed")) for each in sessions))
        for session in sessions:
            await session.end()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _accept(self, sock: socket.socket, peer: str) -> None:
        session = _Session(self, connect(sock, peer, self.address.scheme, self._pool, self.limits))
        self._sessions.add(session)
        session.task.add_done_callback(lambda _: self._left(session))

    def _left(self, session: "_Session") -> None:
        self._sessions.discard(session)
        self._changed.notify()

    def _put(self, session: "_Session", data: Data, name: str, value: Any) -> None:
        """Take in a message that has arrived whole, unless it is there already."""
        num_bytes = sum(data.lengths)
        self._stats.messages += 1
        self._stats.received_bytes += num_bytes
        entry = self._open.get(name)
        known = self._seen.get(name) if entry is None else entry.digest
        if known is None:
            entry = _Incoming(name, data.digest, value, num_bytes, [(session, data.seq)])
            self._open[name] = entry
            self._queue.append(entry)
            self._changed.notify()
            return
        if known and data.digest != known:
            raise ShippingProtocolError(
                "the idempotency key was used for other content",
                where=f"id {name!r}",
                remedy="Give each message a key of its own, or none",
            )
        self._stats.duplicates += 1
        session.took(data.seq, tell=entry is not None)
        if entry is None:
            session.connection.post(Acked(data.seq))
        else:
            # The first one's window holds the place in the queue; the others hear of the acknowledgement.
            first, *others = entry.origins
            live = [origin for origin in others if origin[0] in self._sessions]
            entry.origins = [first, *live, (session, data.seq)]

    def _acknowledge(self, entry: _Incoming) -> None:
        if self._open.get(entry.name) is not entry:
            return  # acknowledged before
        if self._closed:
            raise ShippingClosedError(
                "the receiver is closed, so the sender gets no answer",
                where=f"message {entry.name!r}",
                remedy="Acknowledge before closing; or give the next receiver the ids you have, as seen=",
            )
        del self._open[entry.name]
        self._seen[entry.name] = entry.digest
        while len(self._seen) > self._dedup_window:
            self._seen.popitem(last=False)
        for session, seq in entry.origins:
            session.connection.post(Acked(seq))

    async def _admit(self, session: "_Session", sender: bytes) -> None:
        """Let a sender in once it has no other session, and dead ones have not left too much in the queue."""

        def may_grow() -> bool:
            left = [each.num_bytes for each in self._queue if each.origins[0][0] not in self._sessions]
            return len(left) < _ORPHANED_MESSAGES and sum(left) < _ORPHANED_WINDOWS * self.window_bytes

        for earlier in [each for each in self._sessions if each.sender == sender]:
            # A sender that comes again has lost its earlier connection, however that looks from here.
            await earlier.end()
        session.sender = sender
        await self._changed.wait_until(may_grow)

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
        sender: Its id; empty until it has said Hello.
        task: Ends with the connection.
    """

    def __init__(self, receiver: Receiver, connection: Connection) -> None:
        self.sender = b""
        self.connection = connection
        self._receiver = receiver
        # Long frames have buffers of their own, which the table may hold; segments go back to their sender.
        own_buffers = receiver.address.scheme != "shm"
        self._decoder = Decoder(
            table_bytes=receiver.table_bytes, keep_views=own_buffers, limits=receiver.limits
        )
        self._window: dict[int, int] = {}
        self.task = asyncio.get_running_loop().create_task(self._run())

    def took(self, seq: int, *, tell: bool) -> None:
        """Note that the consumer took a message: its place in the window is free, as an Acked says, too."""
        self._window.pop(seq, None)
        if tell:
            self.connection.post(Taken(seq))

    async def finish(self, message: Message) -> None:
        """Send a last message, if the sender reads it in time."""
        await self.connection.finish(message, self._receiver.timing.goodbye)

    async def end(self) -> None:
        """Close the connection at once."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self.connection.close()  # a task that was cancelled before its first step has not done so

    async def _run(self) -> None:
        """Serve the connection; an error ends this one only."""
        with contextlib.suppress(MMRenderError):
            await self.connection.run(self._serve(), self._receiver.timing)

    async def _serve(self) -> None:
        try:
            await self._greet()
            while True:
                await self._take_in()
        except MMRenderError as error:
            self._receiver._refuse(error)
            if not isinstance(error, ShippingConnectionError):
                await self.finish(Bye(str(error)[:1000], isinstance(error, ShippingSecurityError)))
            raise

    async def _greet(self) -> None:
        owner, connection = self._receiver, self.connection
        if owner._closed or len(owner._sessions) > owner._max_connections:
            raise ShippingConnectionError("too many connections", where=connection.peer)
        try:
            async with asyncio.timeout(owner.timing.handshake):
                hello = expect(Hello, await connection.receive(), connection.peer)
                await owner._admit(self, hello.sender)
        except TimeoutError as error:
            raise ShippingConnectionError("no handshake in time", where=connection.peer) from error
        table_bytes = min(hello.table_bytes, owner.table_bytes)
        self.connection.post(
            Welcome(VERSION, owner.window_messages, owner.window_bytes, owner.limits.max_bytes, table_bytes)
        )

    async def _take_in(self) -> None:
        """Take in the next message."""
        owner, peer = self._receiver, self.connection.peer

        data = expect(Data, await self.connection.receive(), peer)
        num_bytes, bound = sum(data.lengths), owner.limits.max_bytes
        if self._window:
            bound = min(bound, max(0, owner.window_bytes - sum(self._window.values())))
        if num_bytes > bound:
            raise ShippingProtocolError(
                "a message is too long", where=peer, expected=f"at most {bound} bytes", got=str(num_bytes)
            )
        frames = await self.connection.read_frames(data)
        name = data.key or f"{self.sender.hex()}:{data.seq}"
        full = len(self._window) >= owner.window_messages
        if full or data.seq in self._window or not name.isprintable():
            raise ShippingProtocolError(
                "a message beyond the window",
                where=peer,
                expected=f"{owner.window_messages} messages, each number once, and a printable key",
                got=f"message {data.seq} with key {data.key!r}"[:200],
            )
        try:
            self._decoder.framework = owner.framework if data.kind == PLAIN else "numpy"
            value = from_wire(data.kind, self._decoder.decode(frames))
        except Exception as error:
            # Without an answer the sender would come back with the same message again and again.
            self.connection.post(Refused(data.seq, str(error)[:1000]))
            raise ShippingProtocolError(
                "a message that cannot be used", where=f"message {name!r} from {peer}", got=str(error)
            ) from error
        self._window[data.seq] = num_bytes
        try:
            owner._put(self, data, name, value)
        except ShippingProtocolError as error:
            self._window.pop(data.seq)
            self.connection.post(Refused(data.seq, str(error)[:1000]))
