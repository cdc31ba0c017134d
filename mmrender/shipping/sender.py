"""`Sender`: ships messages to one receiver, over as many connections as it takes."""

import asyncio
import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import partial
from ssl import SSLContext
from types import TracebackType
from typing import Any, Final, Self, TypedDict

import msgspec

import mmcodecs
from mmcodecs import BufferPool, Encoder, Limits
from mmcodecs.values import DEFAULT_LIMITS
from mmrender.errors import (
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.address import Address, dial
from mmrender.shipping.connection import Connection
from mmrender.shipping.protocol import (
    DEFAULT_TIMING,
    MAX_KEY_BYTES,
    MAX_UNACKED,
    VERSION,
    Acked,
    Bye,
    Data,
    Hello,
    Notifier,
    Refused,
    Taken,
    Timing,
    Welcome,
    content_digest,
    expect,
    to_wire,
)
from mmrender.shipping.shared_memory import connect

_MAX_FAILURES: Final = 1024


@dataclass(slots=True, eq=False)
class Delivery:
    """One message in flight. `await` it for the receiver's acknowledgement.

    Awaiting raises `ShippingProtocolError` if the receiver cannot use the message, and `ShippingClosedError`
    if the sender was closed before it was acknowledged.

    Attributes:
        id: The idempotency key that was given, or else sender and sequence number.
        data: The header of the message.
        error: Why it failed.
        reported: Whether awaiting it has raised the error, which `Sender.flush` then leaves out.
        settled: Set once it was acknowledged or has failed.
    """

    id: str
    data: Data
    error: ShippingError | None = None
    reported: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    # The value until it is settled, and its frames as `_encoder` wrote them. The table of an encoder is that
    # of one connection: with another, or None, they must be written again.
    _wire: Any = None
    _frames: list[memoryview] = field(default_factory=list)
    _encoder: Encoder | None = None
    _num_bytes: int = 0
    _sent: bool = False

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has acknowledged it."""
        return self.done and self.error is None

    @property
    def done(self) -> bool:
        """Whether it was acknowledged or has failed."""
        return self.settled.is_set()

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
        # What is not settled, by number; of that, what has still to go out over this connection; and what the
        # receiver has in its window, with the bytes.
        self._unacked: dict[int, Delivery] = {}
        self._unacked_bytes = 0
        self._waiting: deque[Delivery] = deque()
        self._window: dict[int, int] = {}
        self._connection: Connection | None = None
        self._welcome: Welcome | None = None
        self._encoder: Encoder | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = Notifier()
        self._fatal: ShippingSecurityError | None = None
        self._last_error: ShippingError | None = None
        self._failures: deque[Delivery] = deque(maxlen=_MAX_FAILURES)
        self._stats = SenderStats()
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._welcome is not None

    @property
    def stats(self) -> SenderStats:
        """Figures so far."""
        sent_bytes = self._stats.sent_bytes + (self._connection.sent_bytes if self._connection else 0)
        return replace(self._stats, unacked=len(self._unacked), sent_bytes=sent_bytes)

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
                await self._changed.wait_until(lambda: self.connected or self._over)
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
            few = len(self._unacked) < self._max_unacked_messages
            room = not self._unacked or (few and self._unacked_bytes < self._max_unacked_bytes)
            return room or self._over

        await self._changed.wait_until(may_go_on)
        self._check()
        # Messages are encoded in the order in which they are sent. So while some wait to be encoded for the
        # next connection, this one is encoded without a table, to see that it can be.
        in_turn = not self._waiting or self._waiting[-1]._encoder is self._encoder
        seq = self._next + 1
        data = Data(seq, id or "", digest, kind, [])
        delivery = Delivery(id or f"{self._id.hex()}:{seq}", data, _wire=wire)
        self._encode(delivery, self._encoder if in_turn else None)
        delivery._num_bytes = sum(delivery.data.lengths)
        self._next = seq
        self._unacked[seq] = delivery
        self._unacked_bytes += delivery._num_bytes
        self._waiting.append(delivery)
        self._send_on()
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
                await self._changed.wait_until(lambda: not self._unacked or self._over)
        except TimeoutError as error:
            got = f"{len(self._unacked)} messages after {timeout:g} s"
            raise self._unreached(got) from (self._last_error or error)
        failures = [each for each in self._failures if not each.reported]
        self._failures.clear()
        if failures and failures[0].error is not None:
            raise failures[0].error
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
            if timeout != 0 and (self._unacked or self._failures):
                await self.flush(timeout)
        finally:
            self._closed = True
            closed = ShippingClosedError("the sender was closed before this was acknowledged")
            for delivery in list(self._unacked.values()):
                self._settle(delivery, closed)
            if self._connection is not None:
                await self._connection.finish(Bye("the sender was closed"), self._timing.goodbye)
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])

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

    @property
    def _over(self) -> bool:
        return self._closed or self._fatal is not None

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

    def _encode(self, delivery: Delivery, encoder: Encoder | None) -> None:
        write = encoder.encode_frames if encoder else partial(mmcodecs.encode_frames, limits=self._limits)
        delivery._frames = [memoryview(frame) for frame in write(delivery._wire)]
        delivery._encoder = encoder
        delivery.data = msgspec.structs.replace(
            delivery.data, lengths=[frame.nbytes for frame in delivery._frames]
        )

    async def _run(self) -> None:
        """Connect again and again; returns when the receiver does not let this sender in."""
        wait = self._timing.first_retry
        while not self._over:
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._timing.handshake):
                    sock = await dial(self.address, self._ssl)
                connection = connect(sock, str(self.address), self.address.scheme, self._pool, self._limits)
                await connection.run(self._serve(connection), self._timing)
            except ShippingSecurityError as error:
                self._fatal = error
                for delivery in list(self._unacked.values()):
                    self._fail(delivery, error)
            except ShippingError as error:
                self._last_error = error
                if self._ssl is not None and not self.connected:
                    error.remedy = "A receiver that does not know this side's certificate closes so, too"
            except TimeoutError:
                self._last_error = ShippingConnectionError("no answer in time", where=str(self.address))
            finally:
                if self._connection is not None:
                    self._stats.sent_bytes += self._connection.sent_bytes
                self._connection = self._welcome = self._encoder = None
                self._changed.notify()
            if time.monotonic() - started > 2 * wait + 1.0:
                wait = self._timing.first_retry
            # Workers whose trainer is back must not all connect at the same moment.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311
            wait = min(2 * wait, self._timing.last_retry)

    async def _serve(self, connection: Connection) -> None:
        """Use a connection until it ends."""
        self._connection = connection
        connection.post(Hello(VERSION, self._id, self._table_bytes))
        async with asyncio.timeout(self._timing.handshake):
            welcome = expect(Welcome, await connection.receive(), connection.peer)
        self._stats.connections += 1
        self._welcome = welcome
        table_bytes = min(self._table_bytes, welcome.table_bytes)
        self._encoder = Encoder(table_bytes=table_bytes, share_from=self._share_from, limits=self._limits)
        self._window.clear()
        self._waiting = deque(self._unacked.values())
        self._changed.notify()
        self._send_on()
        while True:
            message = expect(Taken, await connection.receive(), connection.peer)
            self._window.pop(message.seq, None)
            delivery = self._unacked.get(message.seq)
            if delivery is not None and isinstance(message, Acked):
                self._stats.acknowledged += 1
                self._settle(delivery, None)
            elif delivery is not None and isinstance(message, Refused):
                problem = ShippingProtocolError(
                    "the receiver cannot use this message",
                    where=f"message {delivery.id!r} to {connection.peer}",
                    got=message.reason,
                )
                self._fail(delivery, problem)
            self._send_on()

    def _send_on(self) -> None:
        """Hand what waits to the connection, as much as the receiver has room for."""
        connection, welcome, encoder = self._connection, self._welcome, self._encoder
        while self._waiting and connection is not None and welcome is not None and encoder is not None:
            delivery = self._waiting[0]
            try:
                if delivery._encoder is not encoder and not delivery.done:
                    self._encode(delivery, encoder)
            except mmcodecs.CodecError as error:
                problem = ShippingProtocolError(
                    "the message could be encoded when it was given, and cannot be any more",
                    where=f"message {delivery.id!r}",
                    got=str(error),
                    remedy="Leave a value alone until it is acknowledged",
                )
                self._fail(delivery, problem)
            num_bytes = sum(delivery.data.lengths)
            if num_bytes > welcome.max_bytes and not delivery.done:
                problem = ShippingProtocolError(
                    "the message is longer than the receiver takes",
                    where=f"message {delivery.id!r} to {connection.peer}",
                    expected=f"at most {welcome.max_bytes} bytes",
                    got=str(num_bytes),
                    remedy="Give the receiver limits=Limits(max_bytes=...), or ship it in pieces",
                )
                self._fail(delivery, problem)
                # The arrays that it would have brought are in no table of the receiver's.
                encoder.reset()
                for each in self._waiting:
                    each._encoder = None
            if not delivery.done:
                fits = sum(self._window.values()) + num_bytes <= welcome.window_bytes
                if self._window and not (fits and len(self._window) < welcome.window_messages):
                    return
                self._stats.resent += delivery._sent
                delivery._sent = True
                self._window[delivery.data.seq] = num_bytes
                connection.post(delivery.data, delivery._frames)
            self._waiting.popleft()

    def _fail(self, delivery: Delivery, error: ShippingError) -> None:
        self._stats.refused += 1
        self._failures.append(delivery)
        self._settle(delivery, error)

    def _settle(self, delivery: Delivery, error: ShippingError | None) -> None:
        del self._unacked[delivery.data.seq]
        self._unacked_bytes -= delivery._num_bytes
        self._window.pop(delivery.data.seq, None)
        delivery.error, delivery._wire, delivery._frames = error, None, []
        delivery.settled.set()
        self._changed.notify()
