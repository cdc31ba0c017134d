"""`Receiver`: takes messages from any number of senders, each once."""

import asyncio
import contextlib
import logging
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
from mmrender.shipping.protocol import (
    DEFAULT_TIMING,
    MAX_UNACKED,
    PLAIN,
    VERSION,
    Bye,
    Data,
    Hello,
    Notifier,
    Ping,
    Progress,
    Refused,
    Timing,
    Welcome,
    check_version,
    from_wire,
    out_of_turn,
    run_until_error,
)
from mmrender.shipping.shared_memory import connection_maker
from mmrender.shipping.stream import Address, Connection, Listener, listen

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
            ShippingClosedError: The receiver is closed, so the sender cannot be told: it keeps the message
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
    taken: bool = False


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
        self._changed = Notifier()
        self._listener: Listener | None = None
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._stats = ReceiverStats()
        self._closed = False

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        return self._listener.url if self._listener is not None else str(self.address)

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far."""
        return replace(self._stats, queued=len(self._queue), connections=len(self._sessions))

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
            pool = BufferPool()
            make = connection_maker(self.address, pool, self.limits)
            self._listener = await listen(self.address, self._accept, ssl=self._ssl, pool=pool, make=make)

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
        entry.taken = True
        session, seq = entry.origins[0]
        session.took(seq)
        self._changed.notify()
        message = Received(entry.value, entry.name, session.connection.peer, lambda: self._acknowledge(entry))
        entry.value = None
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
        """Close. What was not acknowledged, its senders keep for the next receiver."""
        if self._closed:
            return
        self._closed = True
        self._changed.notify()
        if self._listener is not None:
            self._listener.close()
        tasks = dict(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in tasks.values():
            await connection.aclose()  # a task that was cancelled before its first step has not done so

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

    def put(
        self, name: str, digest: bytes, value: Any, num_bytes: int, origin: "tuple[_Session, int]"
    ) -> None:
        """Take in a message that has arrived whole, unless it is there already."""
        self._stats.messages += 1
        self._stats.received_bytes += num_bytes
        entry = self._open.get(name)
        known = self._seen.get(name) if entry is None else entry.digest
        if known is None:
            self._open[name] = entry = _Incoming(name, digest, value, num_bytes, [origin])
            self._queue.append(entry)
            self._changed.notify()
            return
        if known and digest != known:
            raise ShippingProtocolError(
                "the idempotency key was used for other content",
                where=f"id {name!r}",
                remedy="Give each message a key of its own, or none",
            )
        self._stats.duplicates += 1
        session, seq = origin
        session.took(seq)
        if entry is None:
            session.finished(seq)
        else:
            # The first one's window holds the place in the queue; the others hear of the acknowledgement.
            first, *others = entry.origins
            entry.origins = [first, *(each for each in others if not each[0].closed), origin]

    def _acknowledge(self, entry: _Incoming) -> None:
        if self._open.get(entry.name) is not entry:
            return  # acknowledged before
        if self._closed:
            raise ShippingClosedError(
                "the receiver is closed, so the sender cannot be told",
                where=f"message {entry.name!r}",
                remedy="Acknowledge before closing; or give the next receiver the ids you have, as seen=",
            )
        del self._open[entry.name]
        self._seen[entry.name] = entry.digest
        while len(self._seen) > self._dedup_window:
            self._seen.popitem(last=False)
        for session, seq in entry.origins:
            session.finished(seq)

    def _accept(self, connection: Connection) -> None:
        async def converse() -> None:
            await self._converse(connection, task)

        task = asyncio.get_running_loop().create_task(converse())
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def _converse(self, connection: Connection, task: asyncio.Task[None]) -> None:
        """Serve one connection; an error ends that one only."""
        try:
            await self._serve(connection, task)
        except ShippingConnectionError as error:
            _log.debug("%s", error)
        except MMRenderError as error:
            self._stats.refused += 1
            self.errors.append(error)
            _log.warning("a connection was closed: %s", error)
            bye = Bye(str(error)[:1000], isinstance(error, ShippingSecurityError))
            with contextlib.suppress(MMRenderError, TimeoutError):
                async with asyncio.timeout(self.timing.goodbye):
                    await connection.send(bye)
        finally:
            await connection.aclose()

    async def _serve(self, connection: Connection, task: asyncio.Task[None]) -> None:
        def may_grow() -> bool:
            # No window bounds what lost connections have left in the queue.
            orphaned = [entry.num_bytes for entry in self._queue if entry.origins[0][0].closed]
            few = len(orphaned) < _ORPHANED_MESSAGES
            return few and sum(orphaned) < _ORPHANED_WINDOWS * self.window_bytes

        if self._closed or len(self._tasks) > self._max_connections:
            raise ShippingConnectionError("too many connections", where=connection.peer)
        try:
            async with asyncio.timeout(self.timing.handshake):
                hello, _ = await connection.receive(lambda: 0)
                if not isinstance(hello, Hello):
                    raise out_of_turn(hello, connection.peer)
                check_version(hello.version, connection.peer)
                earlier = self._sessions.get(hello.sender)
                if earlier is not None:
                    # A sender that comes again has lost its earlier connection, however that looks from here.
                    earlier.closed = True
                    earlier.task.cancel()
                    await asyncio.wait([earlier.task])
                await self._changed.wait_until(may_grow)
        except TimeoutError as error:
            raise ShippingConnectionError("no handshake in time", where=connection.peer) from error
        session = self._sessions[hello.sender] = _Session(self, connection, task, hello.sender.hex())
        try:
            await session.run(min(hello.table_bytes, self.table_bytes))
        finally:
            if self._sessions.get(hello.sender) is session:
                del self._sessions[hello.sender]
            session.closed = True
            self._changed.notify()


class _Session:
    """One connection of a sender, after its Hello: takes in its messages, and answers."""

    def __init__(
        self, receiver: Receiver, connection: Connection, task: "asyncio.Task[None]", sender: str
    ) -> None:
        self.task = task
        self.connection = connection
        self.closed = False
        self._receiver = receiver
        self._sender = sender
        # Long frames have buffers of their own, which the table may hold; segments go back to their sender.
        own_buffers = receiver.address.scheme != "shm"
        self._decoder = Decoder(
            table_bytes=receiver.table_bytes, keep_views=own_buffers, limits=receiver.limits
        )
        self._in_window: dict[int, int] = {}
        self._taken: list[int] = []
        self._acked: list[int] = []
        self._changed = Notifier()

    async def run(self, table_bytes: int) -> None:
        """Serve the connection."""
        owner = self._receiver
        welcome = Welcome(
            VERSION, owner.window_messages, owner.window_bytes, owner.limits.max_bytes, table_bytes
        )
        try:
            await self.connection.send(welcome)
            await run_until_error(self._read(), self._answer(), self.connection.keep_alive(owner.timing))
        except asyncio.CancelledError:
            if not self.closed:
                with contextlib.suppress(MMRenderError, TimeoutError):
                    async with asyncio.timeout(owner.timing.goodbye):
                        await self._tell_progress()
                        await self.connection.send(Bye("the receiver was closed"))
            raise

    def took(self, seq: int) -> None:
        """The consumer took a message: its place in the window is free."""
        self._in_window.pop(seq, None)
        self._taken.append(seq)
        self._changed.notify()

    def finished(self, seq: int) -> None:
        """A message is acknowledged."""
        self._acked.append(seq)
        self._changed.notify()

    async def _read(self) -> None:
        owner = self._receiver

        def allowance() -> int:
            if not self._in_window:
                return owner.limits.max_bytes
            return max(0, owner.window_bytes - sum(self._in_window.values()))

        while True:
            message, frames = await self.connection.receive(allowance)
            if isinstance(message, Data):
                await self._take_in(message, frames)
            elif not isinstance(message, Ping):
                raise out_of_turn(message, self.connection.peer)
            # Or the last message would keep its memory from the pool until the next one comes.
            del message, frames

    async def _take_in(self, data: Data, frames: list[memoryview]) -> None:
        owner, peer = self._receiver, self.connection.peer
        name = data.key or f"{self._sender}:{data.seq}"
        full = len(self._in_window) >= owner.window_messages
        if full or data.seq in self._in_window or not name.isprintable():
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
            # The sender is told, or it would come back with the same message again and again.
            with contextlib.suppress(ShippingError):
                await self.connection.send(Refused(data.seq, str(error)[:1000]))
            raise ShippingProtocolError(
                "a message that cannot be used", where=f"message {name!r} from {peer}", got=str(error)
            ) from error
        num_bytes = sum(frame.nbytes for frame in frames)
        self._in_window[data.seq] = num_bytes
        try:
            owner.put(name, data.digest, value, num_bytes, (self, data.seq))
        except ShippingProtocolError as error:
            self._in_window.pop(data.seq)
            await self.connection.send(Refused(data.seq, str(error)[:1000]))

    async def _answer(self) -> None:
        while True:
            await self._changed.wait_until(lambda: bool(self._taken or self._acked))
            await self._tell_progress()

    async def _tell_progress(self) -> None:
        while self._taken or self._acked:
            taken, self._taken = self._taken[:MAX_UNACKED], self._taken[MAX_UNACKED:]
            acked, self._acked = self._acked[:MAX_UNACKED], self._acked[MAX_UNACKED:]
            await self.connection.send(Progress(taken, acked))
