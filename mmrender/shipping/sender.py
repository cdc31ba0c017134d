"""`Sender`: ships messages to one receiver, over as many connections as it takes."""

import asyncio
import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self, TypedDict

import mmcodecs
from mmcodecs import BufferPool, Encoder, Limits
from mmcodecs.values import DEFAULT_LIMITS
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
    MAX_KEY_BYTES,
    MAX_UNACKED,
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
    content_digest,
    out_of_turn,
    run_until_error,
    to_wire,
)
from mmrender.shipping.shared_memory import connection_maker
from mmrender.shipping.stream import Address, Connection, dial

_MAX_FAILURES = 1024


class Delivery:
    """One message in flight. `await` it for the receiver's acknowledgement.

    Awaiting raises `ShippingProtocolError` if the receiver cannot use the message, and `ShippingClosedError`
    if the sender was closed before it was acknowledged.

    Attributes:
        id: The idempotency key that was given, or else sender and sequence number.
        error: Why it failed.
        reported: Whether awaiting it has raised the error, which `Sender.flush` then leaves out.
        settled: Set once it was acknowledged or has failed.
    """

    def __init__(self, id: str) -> None:
        self.id = id
        self.error: ShippingError | None = None
        self.reported = False
        self.settled = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether it was acknowledged or has failed."""
        return self.settled.is_set()

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has acknowledged it."""
        return self.done and self.error is None

    def check(self) -> None:
        """Raise the error of a message that has failed."""
        if self.error is not None:
            self.reported = True
            raise self.error

    def __await__(self) -> Generator[Any, None, None]:
        yield from self.settled.wait().__await__()
        self.check()


@dataclass(slots=True)
class SenderStats:
    """Figures since a sender was made.

    Attributes:
        acknowledged: Messages that the receiver has acknowledged.
        unacked: Messages that it has not.
        resent: How often a message was sent again.
        refused: Messages that failed: the receiver could not use them, or does not let this sender in.
        connections: Connections so far.
        sent_bytes: Bytes written, headers included.
    """

    acknowledged: int = 0
    unacked: int = 0
    resent: int = 0
    refused: int = 0
    connections: int = 0
    sent_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A message until it is settled.

    `frames` were written by `encoder`, whose table is that of one connection; with another encoder, or None,
    they must be written again.
    """

    seq: int
    kind: str
    wire: Any
    key: str
    digest: bytes
    delivery: Delivery
    frames: list[memoryview]
    encoder: Encoder | None
    num_bytes: int
    attempts: int = 0


class SenderOptions(TypedDict, total=False):
    """Options of `Sender`."""

    ssl: SSLContext | None
    max_unacked_messages: int
    max_unacked_bytes: int
    table_bytes: int
    share_from: int | None
    limits: Limits
    timing: Timing


class Sender:
    """Sends trajectories, and anything else that the codec can encode, to one receiver.

    It connects again when a connection breaks, for as long as it is open, and then sends again what was not
    acknowledged; the receiver drops what it has already. An array that the connection has carried is sent as
    a reference. For use on one event loop; `BlockingSender` serves threads.

    Args:
        url: Address of the receiver: `unix:///path`, `tcp://host:port` or `shm://name`.
        ssl: TLS context, needed for `tcp://` beyond loopback; it must require the receiver's certificate.
        max_unacked_messages: `send` waits while so many are unacknowledged. At most 4,096.
        max_unacked_bytes: `send` waits while messages of so many bytes on the wire are unacknowledged.
        table_bytes: Capacity of the table of shared arrays; the receiver may set a lower one.
        share_from: Hash arrays of at least this many bytes and share those, too, that come without a key.
        limits: Of the codec, for what is encoded.
        timing: Time limits.

    Raises:
        ShippingError: The address or an option cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        ssl: SSLContext | None = None,
        max_unacked_messages: int = 1024,
        max_unacked_bytes: int = 4 << 30,
        table_bytes: int = 256 << 20,
        share_from: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.address = Address.parse(url)
        if not 1 <= max_unacked_messages <= MAX_UNACKED:
            raise ShippingError(
                "an option is out of range",
                where="max_unacked_messages",
                expected=f"1 to {MAX_UNACKED}",
                got=str(max_unacked_messages),
            )
        self._ssl = ssl
        self._max_unacked_messages = max_unacked_messages
        self._max_unacked_bytes = max_unacked_bytes
        self._table_bytes = table_bytes
        self._share_from = share_from
        self._limits = limits
        self._timing = timing
        self._pool = BufferPool()
        self._id = uuid.uuid4().bytes
        self._next = 0
        self._entries: dict[int, _Outgoing] = {}
        self._unacked_bytes = 0
        self._waiting: deque[_Outgoing] = deque()
        self._window: dict[int, int] = {}
        self._encoder: Encoder | None = None
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = Notifier()
        self._fatal: ShippingSecurityError | None = None
        self._last_error: ShippingError | None = None
        self._failures: list[Delivery] = []
        self._stats = SenderStats()
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._connection is not None

    @property
    def stats(self) -> SenderStats:
        """Figures so far."""
        sent_bytes = self._stats.sent_bytes + (self._connection.sent_bytes if self._connection else 0)
        return replace(self._stats, unacked=len(self._entries), sent_bytes=sent_bytes)

    async def connect(self, timeout: float | None = 30.0) -> None:
        """Start connecting, and wait for the first connection.

        Args:
            timeout: Seconds; None waits without limit, 0 not at all.

        Raises:
            ShippingConnectionError: There was none in time. The sender goes on trying.
            ShippingSecurityError: The receiver does not let this sender in, or its address needs TLS.
            ShippingClosedError: The sender is closed.
        """
        self._start()
        if timeout == 0:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait_until(lambda: bool(self.connected or self._closed or self._fatal))
        except TimeoutError as error:
            raise self._unreached(f"for {timeout:g} s") from (self._last_error or error)
        self._check()

    async def send(self, value: Any, *, id: str | None = None) -> Delivery:
        """Accept a message, waiting while too much is unacknowledged.

        The value is held, not copied: leave it and its arrays alone until it is acknowledged. Appending to a
        `Trajectory` is fine; its content at the time of this call is sent.

        Args:
            value: A `Trajectory`, a list of them (shared content travels once, and they arrive together), or
                anything that `mmcodecs.encode` takes.
            id: Idempotency key, at most 256 bytes of printable text: messages with one key are delivered
                once, also from several senders. The same key with other content is an error.

        Returns:
            `await` it for the acknowledgement.

        Raises:
            CodecError: The value has a part that cannot be encoded; nothing was accepted.
            TrajectoryError: A message of the trajectory cannot be encoded.
            MediaError: The class of a media item has no form on the wire.
            ShippingError: The key is malformed.
            ShippingSecurityError: The receiver does not let this sender in.
            ShippingClosedError: The sender is closed.
        """
        self._start()
        if id is not None and not (id.isprintable() and 1 <= len(id.encode()) <= MAX_KEY_BYTES):
            raise ShippingError(
                "malformed idempotency key",
                where="id",
                expected=f"printable text of 1 to {MAX_KEY_BYTES} bytes",
                got=repr(id)[:80],
            )
        kind, wire = to_wire(value)
        digest = b"" if id is None else content_digest(wire, self._limits)

        def may_go_on() -> bool:
            few = len(self._entries) < self._max_unacked_messages
            room = not self._entries or (few and self._unacked_bytes < self._max_unacked_bytes)
            return room or self._closed or self._fatal is not None

        await self._changed.wait_until(may_go_on)
        self._check()
        # Messages are encoded in the order in which they are sent. So while some wait to be encoded for the
        # next connection, this one is encoded without a table, to see that it can be.
        in_turn = not self._waiting or self._waiting[-1].encoder is self._encoder
        encoder = self._encoder if in_turn else None
        frames = self._encoded(wire, encoder)
        self._next += 1
        delivery = Delivery(id or f"{self._id.hex()}:{self._next}")
        num_bytes = sum(frame.nbytes for frame in frames)
        entry = _Outgoing(self._next, kind, wire, id or "", digest, delivery, frames, encoder, num_bytes)
        self._entries[entry.seq] = entry
        self._unacked_bytes += num_bytes
        self._waiting.append(entry)
        self._changed.notify()
        return delivery

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was accepted is acknowledged.

        Of messages that failed, the first whose `Delivery` has not raised is reported, once.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            ShippingProtocolError: The receiver could not use a message.
            ShippingConnectionError: It took too long.
            ShippingSecurityError: The receiver does not let this sender in.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait_until(lambda: bool(not self._entries or self._closed or self._fatal))
        except TimeoutError as error:
            got = f"{len(self._entries)} messages after {timeout:g} s"
            raise self._unreached(got) from (self._last_error or error)
        failures, self._failures = self._failures, []
        for delivery in failures:
            if not delivery.reported and delivery.error is not None:
                raise delivery.error
        if self._fatal is not None:
            raise self._fatal

    async def aclose(self, timeout: float | None = 30.0) -> None:
        """Wait for what is unacknowledged, then close.

        Args:
            timeout: Seconds to wait; 0 gives up what is unacknowledged without an error.

        Raises:
            ShippingError: As `flush`; the sender is closed in any case.
        """
        if self._closed:
            return
        try:
            if timeout != 0 and (self._entries or self._failures):
                await self.flush(timeout)
        finally:
            self._closed = True
            for entry in list(self._entries.values()):
                self._settle(entry, ShippingClosedError("the sender was closed before this was acknowledged"))
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            self._changed.notify()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.aclose(0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            return
        # Messages sent before the error have a moment to arrive; the error is what the caller must see.
        with contextlib.suppress(ShippingError):
            await self.aclose(self._timing.goodbye)

    def _start(self) -> None:
        """Connect in the background, if that has not begun."""
        self._check()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise ShippingClosedError("the sender is closed")

    def _unreached(self, got: str) -> ShippingConnectionError:
        last = f"; last: {self._last_error}" if self._last_error else ""
        return ShippingConnectionError(
            "the receiver does not acknowledge" if self.connected else "the receiver does not answer",
            where=str(self.address),
            got=f"{got}{last}",
        )

    def _encoded(self, wire: Any, encoder: Encoder | None) -> list[memoryview]:
        if encoder is not None:
            frames = encoder.encode_frames(wire)
        else:
            frames = mmcodecs.encode_frames(wire, limits=self._limits)
        return [memoryview(frame) for frame in frames]

    async def _run(self) -> None:
        """Connect again and again; returns when the receiver does not let this sender in."""
        wait = self._timing.first_retry
        while True:
            started = time.monotonic()
            try:
                connection, welcome = await self._open()
            except ShippingSecurityError as error:
                self._fatal = error
                for entry in list(self._entries.values()):
                    self._fail(entry, error)
                self._changed.notify()
                return
            except ShippingError as error:
                self._last_error = error
            else:
                await self._serve(connection, welcome)
            if self._closed:  # a cancellation is lost where the connection breaks at the same moment
                return
            if time.monotonic() - started > 2 * wait + 1.0:
                wait = self._timing.first_retry
            # Workers whose trainer is back must not all connect at the same moment.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311
            wait = min(2 * wait, self._timing.last_retry)

    async def _open(self) -> tuple[Connection, Welcome]:
        make = connection_maker(self.address, self._pool, self._limits)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._timing.handshake):
                connection = await dial(self.address, ssl=self._ssl, pool=self._pool, make=make)
                await connection.send(Hello(VERSION, self._id, self._table_bytes))
                welcome, _ = await connection.receive(lambda: 0)
            if not isinstance(welcome, Welcome):
                raise out_of_turn(welcome, connection.peer)
            check_version(welcome.version, connection.peer)
            return connection, welcome
        except BaseException as error:
            if connection is not None:
                await connection.aclose()
                if self._ssl is not None and isinstance(error, ShippingConnectionError):
                    error.remedy = "A receiver that does not know this side's certificate closes so, too"
            if isinstance(error, TimeoutError):
                raise ShippingConnectionError("no answer in time", where=str(self.address)) from error
            raise

    async def _serve(self, connection: Connection, welcome: Welcome) -> None:
        """Use a connection until it ends."""
        self._stats.connections += 1
        self._connection = connection
        self._encoder = Encoder(
            table_bytes=min(self._table_bytes, welcome.table_bytes),
            share_from=self._share_from,
            limits=self._limits,
        )
        self._window.clear()
        self._waiting = deque(self._entries.values())
        self._changed.notify()
        try:
            await run_until_error(
                self._write(connection, welcome, self._encoder),
                self._read(connection),
                connection.keep_alive(self._timing),
            )
        except ShippingError as error:
            self._last_error = error
        except asyncio.CancelledError:
            with contextlib.suppress(MMRenderError, TimeoutError):
                async with asyncio.timeout(self._timing.goodbye):
                    await connection.send(Bye("the sender was closed"))
            raise
        finally:
            self._connection = None
            self._encoder = None
            self._stats.sent_bytes += connection.sent_bytes
            await connection.aclose()

    async def _write(self, connection: Connection, welcome: Welcome, encoder: Encoder) -> None:
        while True:
            await self._changed.wait_until(lambda: bool(self._waiting))
            entry = self._waiting[0]
            if entry.seq not in self._entries:  # it has failed
                self._waiting.popleft()
                continue
            try:
                if entry.encoder is not encoder:
                    entry.frames, entry.encoder = self._encoded(entry.wire, encoder), encoder
            except mmcodecs.CodecError as error:
                problem = ShippingProtocolError(
                    "the message could be encoded when it was given, and cannot be any more",
                    where=f"message {entry.delivery.id!r}",
                    got=str(error),
                    remedy="Leave a value alone until it is acknowledged",
                )
                self._fail(entry, problem)
                continue
            wire_bytes = sum(frame.nbytes for frame in entry.frames)
            if wire_bytes > welcome.max_bytes:
                problem = ShippingProtocolError(
                    "the message is longer than the receiver takes",
                    where=f"message {entry.delivery.id!r} to {connection.peer}",
                    expected=f"at most {welcome.max_bytes} bytes",
                    got=str(wire_bytes),
                    remedy="Give the receiver limits=Limits(max_bytes=...), or ship it in pieces",
                )
                self._fail(entry, problem)
                # The arrays that it would have brought are in no table of the receiver's.
                encoder.reset()
                for each in self._waiting:
                    each.encoder = None
                continue

            def may_send(wire_bytes: int = wire_bytes) -> bool:
                few = len(self._window) < welcome.window_messages
                fits = sum(self._window.values()) + wire_bytes <= welcome.window_bytes
                return not self._window or (few and fits)

            await self._changed.wait_until(may_send)
            self._waiting.popleft()
            self._window[entry.seq] = wire_bytes
            entry.attempts += 1
            self._stats.resent += entry.attempts > 1
            await connection.send(Data(entry.seq, entry.key, entry.digest, entry.kind), entry.frames)

    async def _read(self, connection: Connection) -> None:
        while True:
            message, _ = await connection.receive(lambda: 0)
            if isinstance(message, Progress):
                for seq in [*message.taken, *message.acked]:
                    self._window.pop(seq, None)
                for seq in message.acked:
                    if seq in self._entries:
                        self._stats.acknowledged += 1
                        self._settle(self._entries[seq], None)
                self._changed.notify()
            elif isinstance(message, Refused):
                entry = self._entries.get(message.seq)
                if entry is not None:
                    problem = ShippingProtocolError(
                        "the receiver cannot use this message",
                        where=f"message {entry.delivery.id!r} to {connection.peer}",
                        got=message.reason,
                    )
                    self._fail(entry, problem)
            elif not isinstance(message, Ping):
                raise out_of_turn(message, connection.peer)

    def _fail(self, entry: _Outgoing, error: ShippingError) -> None:
        self._stats.refused += 1
        self._settle(entry, error)
        if len(self._failures) >= _MAX_FAILURES:
            self._failures = [each for each in self._failures if not each.reported]
        if len(self._failures) < _MAX_FAILURES:
            self._failures.append(entry.delivery)

    def _settle(self, entry: _Outgoing, error: ShippingError | None) -> None:
        del self._entries[entry.seq]
        self._unacked_bytes -= entry.num_bytes
        self._window.pop(entry.seq, None)
        entry.delivery.error = error
        entry.delivery.settled.set()
        self._changed.notify()
