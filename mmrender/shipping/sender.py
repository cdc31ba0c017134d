"""`Sender`: gives messages to a receiver, over as many connections as it takes."""

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Literal, Self

import mmcodecs
from mmcodecs import BufferPool, Limits
from mmcodecs.values import DEFAULT_LIMITS
from mmrender.errors import ShippingClosedError, ShippingConnectionError, ShippingError
from mmrender.shipping.address import Address
from mmrender.shipping.connections import Connections
from mmrender.shipping.delivery import Delivery
from mmrender.shipping.links.base import Transport
from mmrender.shipping.links.choose import transport_of
from mmrender.shipping.options import DEFAULT_TIMING, MAX_ID_BYTES, MAX_UNACKED, Timing
from mmrender.shipping.outbox import Outbox, Outgoing
from mmrender.shipping.security import CurveKeys, key_bytes
from mmrender.shipping.stats import SenderStats
from mmrender.shipping.values import id_of, to_wire

_MOMENT_S = 1.0
Guarantee = Literal["at-least-once", "at-most-once"]


class Sender:
    """Sends trajectories, and anything else that the codec can write, to one receiver.

    It connects again when a connection breaks, for as long as it is open, and then sends what was not
    acknowledged. An array that the connection has carried is sent as a reference. For use on one event loop;
    `BlockingSender` serves threads.

    Args:
        url: Address of the receiver; see `Address`.
        key: Shared secret of at least 16 bytes; needed beyond loopback.
        curve: CURVE keys, for ZeroMQ.
        delivery: "at-least-once" sends again what may have been lost, and the receiver drops what it has
            already: together, exactly once. "at-most-once" sends nothing twice.
        max_unacked_messages: `send` waits while so many are unacknowledged. At most 4,096.
        max_unacked_bytes: The same in bytes, arrays that several messages share counted each time.
        table_bytes: Capacity of the table of shared arrays; the receiver may set a lower one.
        share_from: Hash arrays of at least this many bytes and share those, too, that come without a key.
        limits: Of the codec, for what is written.
        timing: How long things may take.
        transport: Takes the place of what the address stands for.

    Raises:
        ShippingError: The address or an option cannot be used.
        ShippingSecurityError: The key is too short.
    """

    def __init__(
        self,
        url: str | Address,
        *,
        key: str | bytes | None = None,
        curve: CurveKeys | None = None,
        delivery: Guarantee = "at-least-once",
        max_unacked_messages: int = 1024,
        max_unacked_bytes: int = 4 << 30,
        table_bytes: int = 256 << 20,
        share_from: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        timing: Timing = DEFAULT_TIMING,
        transport: Transport | None = None,
    ) -> None:
        self.address = Address.parse(url)
        if delivery not in ("at-least-once", "at-most-once"):
            raise ShippingError(
                "an unknown guarantee", where="delivery", expected='"at-least-once" or "at-most-once"',
                got=repr(delivery),
            )  # fmt: skip
        if not 1 <= max_unacked_messages <= MAX_UNACKED:
            raise ShippingError(
                "a bound out of range", where="max_unacked_messages", expected=f"1 to {MAX_UNACKED}",
                got=str(max_unacked_messages),
            )  # fmt: skip
        self.delivery: Guarantee = delivery
        self._transport = transport or transport_of(
            self.address, keyed=key is not None, curve=curve, pool=BufferPool(), limits=limits, timing=timing
        )
        self._outbox = Outbox(
            max_messages=max_unacked_messages,
            max_bytes=max_unacked_bytes,
            resend=delivery == "at-least-once",
        )
        self._connections = Connections(
            self._transport,
            self._outbox,
            secret=key_bytes(key),
            table_bytes=table_bytes,
            share_from=share_from,
            limits=limits,
            timing=timing,
        )
        self._limits = limits
        self._next = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._connections.connected

    @property
    def stats(self) -> SenderStats:
        """Figures so far."""
        counts = self._outbox.counts
        return SenderStats(
            counts.acknowledged,
            len(self._outbox),
            counts.resent,
            counts.refused,
            counts.lost,
            self._connections.count,
            self._connections.sent_bytes,
        )

    async def connect(self, timeout: float | None = 30.0) -> None:
        """Start connecting, and wait for the first connection.

        Args:
            timeout: Seconds; None waits for ever, 0 not at all.

        Raises:
            ShippingConnectionError: There was none in time. The sender goes on trying.
            ShippingSecurityError: The receiver does not let us in, or must not be spoken to.
            ShippingClosedError: The sender is closed.
        """
        self._start()
        if timeout == 0:
            return
        ready = self._outbox.bell.wait_until(lambda: self.connected or self._over())
        try:
            await asyncio.wait_for(ready, timeout)
        except TimeoutError as error:
            raise self._unreached(f"for {timeout:g} s") from (self._connections.last_error or error)
        self._check()

    async def send(self, value: Any, *, id: str | None = None) -> Delivery:
        """Take a message in, waiting while too much is unacknowledged.

        The value is held, not copied: leave it and its arrays alone until it is acknowledged. Appending to a
        `Trajectory` is fine; what was there when it was given is sent.

        Args:
            value: A `Trajectory`, a list of them (what they share travels once, and they arrive together), or
                anything that `mmcodecs.encode` takes.
            id: What the receiver tells it from others by; at most 256 bytes of printable text. Default: that
                of the trajectory, or else one that is never used again.

        Returns:
            A promise: `await` it for the acknowledgement.

        Raises:
            CodecError: The value has a part that the codec cannot write; nothing was taken in.
            TrajectoryError: The trajectory holds a message that has no plain form.
            MediaError: It holds a media item that has none.
            ShippingError: The id is none.
            ShippingSecurityError: The receiver does not let us in.
            ShippingClosedError: The sender is closed.
        """
        self._start()
        self._check()
        kind, wire = to_wire(value)
        name = id if id is not None else id_of(value)
        num_bytes = _size(wire, self._limits)
        await self._outbox.bell.wait_until(lambda: self._outbox.has_room(num_bytes) or self._over())
        self._check()
        self._next += 1
        delivery = Delivery(_checked_id(name) if name else f"{self._connections.sender.hex()}:{self._next}")
        self._outbox.add(Outgoing(self._next, kind, wire, num_bytes, delivery))
        return delivery

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was given is acknowledged.

        A message that failed is reported unless its `Delivery` was awaited and has raised. Of several, the
        first is raised, once; `stats` counts all.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            ShippingProtocolError: The receiver could not use a message.
            ShippingConnectionError: It took too long, or a message that is sent at most once may be lost.
            ShippingSecurityError: The receiver does not let us in.
        """
        empty = self._outbox.bell.wait_until(lambda: not len(self._outbox) or self._over())
        try:
            await asyncio.wait_for(empty, timeout)
        except TimeoutError as error:
            raise self._unreached(f"{len(self._outbox)} messages after {timeout:g} s") from (
                self._connections.last_error or error
            )
        failure = self._outbox.counts.failures.take()
        if failure is not None:
            raise failure
        if self._connections.fatal is not None:
            raise self._connections.fatal

    async def aclose(self, timeout: float | None = 30.0) -> None:
        """Wait for what is unacknowledged, then close.

        Args:
            timeout: Seconds to wait; 0 gives up what is unacknowledged without a word.

        Raises:
            ShippingError: As `flush`; the sender is closed in any case.
        """
        if self._closed:
            return
        try:
            if timeout != 0 and (len(self._outbox) or self._outbox.counts.failures):
                await self.flush(timeout)
        finally:
            self._closed = True
            self._outbox.close()
            await self._stop()

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
        # What was sent before the error has a moment to arrive; the error is what the caller must see.
        with contextlib.suppress(ShippingError):
            await self.aclose(_MOMENT_S)

    def _start(self) -> None:
        if self._closed:
            raise _closed()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._connections.run())

    def _over(self) -> bool:
        return self._closed or self._connections.fatal is not None

    def _check(self) -> None:
        if self._connections.fatal is not None:
            raise self._connections.fatal
        if self._closed:
            raise _closed()

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._transport.aclose()
        self._outbox.bell.ring()

    def _unreached(self, got: str) -> ShippingConnectionError:
        last = f"; last: {self._connections.last_error}" if self._connections.last_error else ""
        return ShippingConnectionError(
            "the receiver does not answer" if not self.connected else "the receiver does not acknowledge",
            where=str(self.address),
            got=f"{got}{last}",
        )


def _size(value: Any, limits: Limits) -> int:
    """Bytes that a value takes when nothing of it is shared; finds out, too, whether it can be written."""
    return sum(memoryview(frame).nbytes for frame in mmcodecs.encode_frames(value, limits=limits))


def _checked_id(id: str) -> str:
    if not id.isprintable() or not 1 <= len(id.encode()) <= MAX_ID_BYTES:
        raise ShippingError(
            "not an id",
            where="id",
            expected=f"printable text of 1 to {MAX_ID_BYTES} bytes",
            got=repr(id)[:80],
        )
    return id


def _closed() -> ShippingClosedError:
    return ShippingClosedError("the sender is closed")
