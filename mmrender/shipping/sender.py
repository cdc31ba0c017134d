"""`Sender`: ships messages to a receiver, over as many connections and to as many receivers as it takes."""

import asyncio
import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from ssl import SSLContext
from typing import Any, Final, Self

from mmcodecs import Limits
from mmcodecs.values import DEFAULT_LIMITS
from mmcodecs.wire import encode_keyed_frames
from mmrender.errors import (
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
    check_count,
)
from mmrender.shipping.address import Address, ReceiverList, Receivers, dial
from mmrender.shipping.connection import Connection
from mmrender.shipping.protocol import (
    DEFAULT_TIMING,
    LONG_BYTES,
    VERSION,
    Answer,
    Bye,
    Data,
    End,
    Frames,
    Hello,
    Refused,
    Timing,
    Want,
    Welcome,
    to_wire,
)
from mmrender.trajectory.delivery import DeliveryId
from mmrender.workers import Notifier

MAX_UNACKED: Final = 4096
_MAX_FAILURES: Final = 1024


@dataclass(slots=True, eq=False)
class Delivery:
    """One message in flight. `await` it for the receiver's acknowledgement.

    Awaiting raises `ShippingProtocolError` if the receiver cannot use the message, and `ShippingClosedError`
    if the sender was closed before it was acknowledged.

    Attributes:
        id: Sender and sequence number, as in `Received.id`.
        data: The header of the message.
        error: Why it failed.
    """

    id: str
    data: Data
    _sender: End = field(repr=False)
    # The frames until it is settled.
    _frames: Sequence[memoryview] = field(repr=False)
    error: ShippingError | None = None
    _settled: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    # Whether awaiting it has raised the error, and the connection that has carried it.
    _is_reported: bool = False
    _carrier: Connection | None = field(default=None, repr=False)

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has acknowledged it."""
        return self.done and self.error is None

    @property
    def done(self) -> bool:
        """Whether it was acknowledged or has failed."""
        return self._settled.is_set()

    def __await__(self) -> Generator[Any, None, None]:
        self._sender.claim()
        yield from self._settled.wait().__await__()
        if self.error is not None:
            self._is_reported = True
            raise self.error


@dataclass(slots=True)
class SenderStats:
    """Figures since a sender was made.

    Attributes:
        acknowledged: Messages that the receiver has acknowledged.
        unacked: Messages that it has not acknowledged.
        resent: Number of times that a message was sent again.
        refused: Messages that failed: the receiver could not use them, or does not let this sender in.
        connections: Connections so far, to all receivers.
        sent_bytes: Bytes written, headers included.
    """

    acknowledged: int = 0
    unacked: int = 0
    resent: int = 0
    refused: int = 0
    connections: int = 0
    sent_bytes: int = 0


class Sender(End):
    """Sends trajectories, and anything else that the codec can encode, to a receiver.

    It connects again when a connection breaks, and then sends unacknowledged messages again. The receiver
    drops duplicates, and asks only for arrays that it has not kept. For use on one event loop, in the process
    that used it first.

    Of several receivers a sender takes one, which its identity decides. The list may change at any time. When
    the sender's receiver leaves the list, or one joins that it prefers, the sender waits for acknowledgements
    up to `Timing.leave`, and goes there. It passes over a receiver that cannot be reached for
    `Timing.failover`. A message that was not acknowledged in time may then be in two places, under one id.
    `TrajectoryDataset` reads the files of all recorders, and each message once.

    Args:
        receivers: The address of the receiver, `unix:///path` or `tcp://host:port`. Or the addresses of
            several: a sequence, which is read at each look, a path of a file with one address on each line
            (replace the file as a whole), or a function that returns a sequence, which is called in a thread.
        ssl: TLS context, required for `tcp://` beyond loopback. It must require the receiver's certificate.
        max_unacked_messages: Maximum number of unacknowledged messages, up to 4,096. `send` waits at it.
        max_unacked_bytes: The same in bytes, all arrays included.
        limits: Bounds of the codec.
        timing: Time limits.

    Raises:
        ShippingError: An address or an option cannot be used.
        ShippingSecurityError: The TLS context does not ask for the receiver's certificate.
    """

    def __init__(
        self,
        receivers: Receivers,
        *,
        ssl: SSLContext | None = None,
        max_unacked_messages: int = 1024,
        max_unacked_bytes: int = 4 << 30,
        limits: Limits = DEFAULT_LIMITS,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.receivers = ReceiverList(receivers, ssl, timing.failover)
        check_count("max_unacked_messages", max_unacked_messages, maximum=MAX_UNACKED, error=ShippingError)
        check_count("max_unacked_bytes", max_unacked_bytes, error=ShippingError)
        self._ssl = ssl
        self._max_unacked_messages = max_unacked_messages
        self._max_unacked_bytes = max_unacked_bytes
        self._limits = limits
        self._timing = timing
        # Drawn at its first use: a sender that was made before a fork is another sender in each process.
        self._id = b""
        self._next = 1
        # Unsettled messages by number, and the messages among them that this connection has not sent.
        self._unacked: dict[int, Delivery] = {}
        self._unacked_bytes = 0
        self._waiting: deque[Delivery] = deque()
        self._wanted: asyncio.Future[Want] | None = None
        self._connection: Connection | None = None
        self._is_leaving = False
        self._task: asyncio.Task[None] | None = None
        self._changed = Notifier()
        self._fatal: ShippingError | None = None
        self._last_error: ShippingError | None = None
        self._failures: deque[Delivery] = deque(maxlen=_MAX_FAILURES)
        self._stats = SenderStats()
        self._closed = False
        self.connected = False

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
            ShippingClosedError: The sender is closed, or in use in another process.
            ShippingError: The sender has failed for another reason.
        """
        self._ensure_open()
        if timeout == 0:
            return
        await self._wait_until(lambda: self.connected, timeout, "for")
        self._ensure_open()

    async def send(self, value: Any) -> Delivery:
        """Accept a message, waiting while too much is unacknowledged.

        The value is not copied: do not change it and its arrays until it is acknowledged. A `Trajectory` may
        grow meanwhile. Its content at the time of this call is sent.

        Args:
            value: A `Trajectory`, a list of them (shared content travels once, and they arrive together), or
                anything that `mmcodecs.encode` takes.

        Returns:
            `await` it for the acknowledgement.

        Raises:
            CodecError: The value has a part that cannot be encoded. Nothing was accepted.
            InputError: It is a sample or a rendering. Nothing was accepted.
            TrajectoryError: A message of the trajectory cannot be encoded.
            MediaError: The class of a media item cannot travel.
            ShippingError: As `connect`, without `ShippingConnectionError`.
        """
        self._ensure_open()
        kind, wire = to_wire(value)
        await self._changed.wait_until(
            lambda: (
                (
                    len(self._unacked) < self._max_unacked_messages
                    and self._unacked_bytes < self._max_unacked_bytes
                )
                or self._is_over
            )
        )
        self._ensure_open()
        written, keys = encode_keyed_frames(wire, limits=self._limits)
        frames = [memoryview(frame) for frame in written]
        lengths = [frame.nbytes for frame in frames]
        keyed = {n: key for n, key in enumerate(keys) if key and lengths[n] >= LONG_BYTES}
        data = Data(self._next, kind, lengths, keyed)
        delivery = Delivery(str(DeliveryId(self._id.hex(), data.seq)), data, self, frames)
        self._next += 1
        self._unacked[data.seq] = delivery
        self._unacked_bytes += sum(lengths)
        self._waiting.append(delivery)
        self._changed.notify()
        return delivery

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all accepted messages are acknowledged.

        The first failed message whose `Delivery` has not raised is reported, once.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            ShippingProtocolError: The receiver could not use a message.
            ShippingConnectionError: It took too long.
            ShippingError: As `connect`.
        """
        self.claim()
        await self._wait_until(lambda: not self._unacked, timeout, "{} messages after")
        failures = [each for each in self._failures if not each._is_reported]
        self._failures.clear()
        if failures and failures[0].error is not None:
            raise failures[0].error
        if self._fatal is not None:
            raise self._fatal

    async def aclose(self, timeout: float | None = 30.0) -> None:
        """Wait for unacknowledged messages, then close.

        Args:
            timeout: Seconds to wait. 0 drops unacknowledged messages without an error.

        Raises:
            ShippingError: As `flush`. The sender is closed in any case.
        """
        self.claim()
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
                await self._connection.finish(Bye("the sender was closed"))
            if self._task is not None and not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.aclose(0)
            raise
        return self

    async def __aexit__(self, _kind: object, error: object, _trace: object) -> None:
        if error is None:
            await self.aclose()
            return
        # Messages sent before the error have a moment to arrive. The caller must see that error alone.
        with contextlib.suppress(ShippingError):
            await self.aclose(self._timing.goodbye)

    @property
    def _is_over(self) -> bool:
        return self._closed or self._fatal is not None

    def _ensure_open(self) -> None:
        """Refuse a sender that is over. Connect in the background, if that has not begun."""
        self.claim()
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise ShippingClosedError("the sender is closed")
        if self._task is None:
            self._id = uuid.uuid4().bytes
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _wait_until(self, condition: Callable[[], bool], timeout: float | None, got: str) -> None:
        """Wait until a condition holds or the sender is over. `got` is for the error."""
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait_until(lambda: condition() or self._is_over)
        except TimeoutError as error:
            last = f"; last: {self._last_error}" if self._last_error else ""
            raise ShippingConnectionError(
                "the receiver does not acknowledge" if self.connected else "the receiver does not answer",
                where=str(self.receivers),
                got=f"{got.format(len(self._unacked))} {timeout:g} s{last}",
            ) from (self._last_error or error)

    async def _run(self) -> None:
        """Keep a connection. If this fails, all unacknowledged messages fail, and all later ones."""
        try:
            await self._keep_connected()
        except BaseException as error:
            failure = error
            if not isinstance(failure, ShippingError):
                is_cancelled = isinstance(error, asyncio.CancelledError)
                reason = "the sender's task was cancelled" if is_cancelled else "the sender has failed"
                failure = ShippingError(reason, where=str(self.receivers), got=repr(error)[:200])
            if not self._closed:
                self._fatal = failure
                for delivery in list(self._unacked.values()):
                    self._fail(delivery, failure)
                self._changed.notify()
            if not isinstance(error, Exception):
                raise

    async def _keep_connected(self) -> None:
        """Connect again and again. Raises when the receiver does not let this sender in."""
        wait = self._timing.first_retry
        while not self._closed:
            started = time.monotonic()
            try:
                await self._use_connection()
            except ShippingSecurityError:
                raise
            except ShippingError as error:
                self._last_error = error
                if self._ssl is not None and not self.connected:
                    error.remedy = "A receiver that does not know this side's certificate closes so, too"
            except TimeoutError:
                self._last_error = ShippingConnectionError("no answer in time", where=str(self.receivers))
            finally:
                if self._connection is not None:
                    self._connection.close()
                    self._stats.sent_bytes += self._connection.sent_bytes
                self._connection = None
                self.connected = False
                self._changed.notify()
            if self.receivers.untried:
                continue
            if time.monotonic() - started > 2 * wait + 1.0:
                wait = self._timing.first_retry
            # After a restart of the trainer, workers must not connect all at once.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311
            wait = min(2 * wait, self._timing.last_retry)

    async def _use_connection(self) -> None:
        """Connect once, and use the connection until it ends."""
        address = await self.receivers.choose(self._id)
        async with asyncio.timeout(self._timing.handshake):
            connection = self._connection = await dial(
                address, self._ssl, lambda: Connection(str(address), self._timing)
            )
            connection.post(Hello(VERSION, self._id))
            welcome = await connection.receive(Welcome)
        self._stats.connections += 1
        self.connected = True
        self.receivers.settle()
        self._is_leaving = False
        self._waiting = deque(self._unacked.values())
        self._changed.notify()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(connection, welcome.max_bytes))
                group.create_task(self._read(connection))
                if not self.receivers.is_fixed:
                    group.create_task(self._leave_in_time(connection, address))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _leave_in_time(self, connection: Connection, address: Address) -> None:
        """Look at the list of receivers, and close the connection when this sender belongs elsewhere."""
        is_elsewhere = False
        while not is_elsewhere:
            await asyncio.sleep(self._timing.look)
            try:
                is_elsewhere = await self.receivers.prefers_another(self._id, address)
            except ShippingConnectionError as error:  # such as a file that is being replaced
                self._last_error = error
        self._is_leaving = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.leave):
                await self._changed.wait_until(
                    lambda: all(each._carrier is not connection for each in self._unacked.values())
                )
        connection.close(ShippingConnectionError("the sender goes to another receiver", where=str(address)))

    async def _read(self, connection: Connection) -> None:
        """Take the receiver's answers."""
        while True:
            message: Answer = await connection.receive(Answer)
            if isinstance(message, Want):
                if self._wanted is not None and not self._wanted.done():
                    self._wanted.set_result(message)
            elif (delivery := self._unacked.get(message.seq)) is None:
                continue
            elif isinstance(message, Refused):
                problem = ShippingProtocolError(
                    "the receiver cannot use this message",
                    where=f"message {delivery.id!r} to {connection.peer}",
                    got=message.reason,
                )
                self._fail(delivery, problem)
            else:
                self._stats.acknowledged += 1
                self._settle(delivery, None)

    async def _write(self, connection: Connection, max_bytes: int) -> None:
        """Send waiting messages in turn. The receiver answers none while its window is full."""
        while True:
            await self._changed.wait_until(lambda: bool(self._waiting) and not self._is_leaving)
            delivery = self._waiting.popleft()
            num_bytes = sum(delivery.data.lengths)
            if delivery.data.seq not in self._unacked:
                continue
            if num_bytes <= max_bytes:
                await self._send_over(connection, delivery)
                continue
            problem = ShippingProtocolError(
                "the message is longer than the receiver takes",
                where=f"message {delivery.id!r} to {connection.peer}",
                expected=f"at most {max_bytes} bytes",
                got=str(num_bytes),
                remedy="Pass limits=Limits(max_bytes=...) to the receiver, or ship it in pieces",
            )
            self._fail(delivery, problem)

    async def _send_over(self, connection: Connection, delivery: Delivery) -> None:
        """Announce a message, and send the long frames that the receiver wants once it has room for them."""
        data, frames = delivery.data, delivery._frames
        short, long = data.parts()
        self._stats.resent += delivery._carrier is not None
        delivery._carrier = connection
        wanted = self._wanted = asyncio.get_running_loop().create_future()
        await connection.send(data, [frames[number] for number in short])
        if not long:
            return
        want = await wanted
        if want.seq != data.seq or not set(want.frames) <= set(long):
            problem = "a message out of turn"
            raise ShippingProtocolError(problem, where=connection.peer, got=str(want)[:200])
        await connection.send(Frames(data.seq), [frames[number] for number in want.frames])

    def _fail(self, delivery: Delivery, error: ShippingError) -> None:
        self._stats.refused += 1
        self._failures.append(delivery)
        self._settle(delivery, error)

    def _settle(self, delivery: Delivery, error: ShippingError | None) -> None:
        del self._unacked[delivery.data.seq]
        self._unacked_bytes -= sum(delivery.data.lengths)
        delivery.error, delivery._frames = error, ()
        delivery._settled.set()
        self._changed.notify()
