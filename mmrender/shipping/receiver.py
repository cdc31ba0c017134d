"""`Receiver`: takes messages from any number of senders, each once."""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Literal, Self

from mmcodecs import BufferPool, Decoder, Limits
from mmcodecs.arrays import Framework
from mmrender.errors import (
    MMRenderError,
    ShippingClosedError,
    ShippingConnectionError,
    ShippingError,
    ShippingSecurityError,
)
from mmrender.shipping.address import Address
from mmrender.shipping.channel import Channel
from mmrender.shipping.delivery import Received
from mmrender.shipping.handshake import open_as_receiver
from mmrender.shipping.inbox import Inbox
from mmrender.shipping.links.base import Link, Listener, Transport
from mmrender.shipping.links.choose import transport_of
from mmrender.shipping.messages import Bye
from mmrender.shipping.options import DEFAULT_TIMING, DEFAULT_WINDOW, Timing, Window
from mmrender.shipping.receiving import ReceivingSession
from mmrender.shipping.security import CurveKeys, key_bytes
from mmrender.shipping.seen import WINDOW, SeenIds
from mmrender.shipping.stats import ReceiverStats

Acknowledge = Literal["taken", "explicit"]
LIMITS = Limits(max_bytes=2 << 30)
_ORPHANS = 4096
_ORPHAN_WINDOWS = 4
_log = logging.getLogger("mmrender.shipping")


class Receiver:
    """Listens at an address and hands on what senders send, in the order of each, every id once.

    For use on one event loop; `BlockingReceiver` serves threads.

    Args:
        url: Where to listen; see `Address`.
        key: Shared secret of at least 16 bytes; needed beyond loopback.
        curve: CURVE keys, for ZeroMQ; needed beyond loopback.
        ack: "taken" acknowledges a message when the consumer takes it. With "explicit" the consumer calls
            `Received.ack()` when the message is safe with it; what was not acknowledged comes again after the
            receiver was restarted.
        folder: Keep the ids of acknowledged messages there, so that a receiver that is started again with the
            same folder knows them. None remembers them while it runs.
        seen: Ids that the consumer has from earlier runs, such as those in its own files.
        dedup_window: How many ids to remember.
        sync: Whether each note in the folder waits for the disk.
        window: What each sender may have under way.
        table_bytes: Most memory for the arrays that one sender shares.
        max_connections: Senders at a time.
        framework: What arrays become; see `mmcodecs.decode`. Those of trajectories stay numpy arrays.
        limits: Of the codec, for what is read; `max_bytes` bounds one message.
        timing: How long things may take.
        transport: Takes the place of what the address stands for.

    Attributes:
        errors: Why connections were closed, the last hundred: what peers sent, or could not show.

    Raises:
        ShippingError: The address or an option cannot be used, or another receiver uses the folder.
        ShippingSecurityError: The key is too short.
        OSError: The folder cannot be used.
    """

    def __init__(
        self,
        url: str | Address,
        *,
        key: str | bytes | None = None,
        curve: CurveKeys | None = None,
        ack: Acknowledge = "taken",
        folder: str | os.PathLike[str] | None = None,
        seen: Iterable[str] = (),
        dedup_window: int = WINDOW,
        sync: bool = False,
        window: Window = DEFAULT_WINDOW,
        table_bytes: int = 256 << 20,
        max_connections: int = 1024,
        framework: Framework = "numpy",
        limits: Limits = LIMITS,
        timing: Timing = DEFAULT_TIMING,
        transport: Transport | None = None,
    ) -> None:
        self.address = Address.parse(url)
        if ack not in ("taken", "explicit"):
            raise ShippingError(
                "an unknown way to acknowledge", where="ack", expected='"taken" or "explicit"', got=repr(ack)
            )
        self.ack: Acknowledge = ack
        self._secret = key_bytes(key)
        self._window = window
        self._table_bytes = table_bytes
        self._max_connections = max_connections
        self._framework: Framework = framework
        self._limits = limits
        self._timing = timing
        self._transport = transport or transport_of(
            self.address, keyed=key is not None, curve=curve, pool=BufferPool(), limits=limits, timing=timing
        )
        self._inbox = Inbox(SeenIds(folder, window=dedup_window, known=seen, sync=sync))
        self._listener: Listener | None = None
        self._tasks: dict[asyncio.Task[None], Link] = {}
        self._sessions: dict[bytes, tuple[ReceivingSession, asyncio.Task[None]]] = {}
        self._past = [0, 0]
        self._refused = 0
        self._closed = False
        self.errors: deque[ShippingError] = deque(maxlen=100)

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        return self._listener.url if self._listener is not None else str(self.address)

    @property
    def stats(self) -> ReceiverStats:
        """Figures so far."""
        sessions = [session for session, _ in self._sessions.values()]
        return ReceiverStats(
            self._past[0] + sum(session.received_messages for session in sessions),
            self._inbox.duplicates,
            self._past[1] + sum(session.received_bytes for session in sessions),
            len(self._inbox),
            len(sessions),
            self._refused,
        )

    async def open(self) -> None:
        """Start to listen.

        Raises:
            ShippingSecurityError: The address can be reached from elsewhere, and nothing guards it.
            ShippingConnectionError: The address cannot be bound.
            ShippingClosedError: The receiver was closed.
        """
        if self._closed:
            raise _closed()
        if self._listener is None:
            self._listener = await self._transport.listen(self._meet)

    async def receive(self, timeout: float | None = None) -> Received:
        """Wait for the next message.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            TimeoutError: None came in time.
            ShippingClosedError: The receiver is closed.
            OSError: With `ack="taken"`, the note in the folder cannot be written; the message stays with its
                sender, for the next receiver.
        """
        entry = None
        async with asyncio.timeout(timeout):
            while entry is None:
                if self._closed:
                    raise _closed()
                entry = self._inbox.take()
                if entry is None:
                    await self._inbox.bell.wait()
        message = Received(entry.value, entry.id, entry.owner[0].peer, self._inbox.ack)
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

    def drop_tables(self) -> None:
        """Free the memory of shared arrays; what is named from now on is asked for again."""
        for session, _ in self._sessions.values():
            session.decoder.reset()

    async def aclose(self) -> None:
        """Close. What was not acknowledged, its senders keep for the next receiver."""
        if self._closed:
            return
        self._closed = True
        self._inbox.bell.ring()
        try:
            await self._hang_up()
        finally:
            self._inbox.seen.close()

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

    async def _hang_up(self) -> None:
        await self._end_all()
        if self._listener is not None:
            await self._listener.aclose()
        await self._end_all()  # those that came in meanwhile
        await self._transport.aclose()

    async def _end_all(self) -> None:
        tasks = dict(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for link in tasks.values():
            await link.aclose()  # a task that was cancelled before its first step has not done so

    def _meet(self, link: Link) -> None:
        """Take in a connection."""
        task = asyncio.get_running_loop().create_task(self._converse(link))
        self._tasks[task] = link
        task.add_done_callback(self._tasks.pop)

    async def _converse(self, link: Link) -> None:
        """Serve one connection; whatever goes wrong ends that one only."""
        channel = Channel(link)
        try:
            if self._closed or len(self._tasks) > self._max_connections:
                raise ShippingConnectionError("too many connections", where=channel.peer)
            await self._serve(channel)
        except ShippingConnectionError as error:
            _log.debug("%s", error)
        except MMRenderError as error:
            await self._turn_away(channel, error)
        finally:
            await link.aclose()

    async def _serve(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(self._timing.handshake):
                hello, resume = await open_as_receiver(channel, secret=self._secret)
        except TimeoutError as error:
            raise ShippingConnectionError("no handshake in time", where=channel.peer) from error
        await self._end_earlier(hello.sender)
        await self._wait_for_room(channel)
        decoder = Decoder(table_bytes=self._table_bytes, framework=self._framework, limits=self._limits)
        session = ReceivingSession(
            channel,
            self._inbox,
            decoder,
            window=self._window,
            max_bytes=self._limits.max_bytes,
            timing=self._timing,
        )
        task = asyncio.current_task()
        if task is None:
            raise ShippingClosedError("no task to serve in")
        self._sessions[hello.sender] = session, task
        try:
            await channel.send(session.welcome(resume, min(hello.table_bytes, self._table_bytes)))
            await session.run()
        except asyncio.CancelledError:
            if not session.closed:
                await session.say_goodbye()
            raise
        finally:
            if self._sessions.get(hello.sender, (None,))[0] is session:
                del self._sessions[hello.sender]
            self._past = [self._past[0] + session.received_messages, self._past[1] + session.received_bytes]
            session.closed = True

    async def _end_earlier(self, sender: bytes) -> None:
        """A sender that comes again has lost its earlier connection, however that looks from here."""
        earlier = self._sessions.get(sender)
        if earlier is not None:
            earlier[0].closed = True
            earlier[1].cancel()
            await asyncio.wait([earlier[1]])

    async def _wait_for_room(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(self._timing.handshake):
                await self._inbox.bell.wait_until(self._may_grow)
        except TimeoutError as error:
            raise ShippingConnectionError(
                "too many messages of earlier connections are not taken yet", where=channel.peer
            ) from error

    def _may_grow(self) -> bool:
        """Whether so little is in line from connections that are gone that a new one may add to it."""
        messages, num_bytes = self._inbox.orphaned
        return messages < _ORPHANS and num_bytes < _ORPHAN_WINDOWS * self._window.num_bytes

    async def _turn_away(self, channel: Channel, error: MMRenderError) -> None:
        self._refused += 1
        if isinstance(error, ShippingError):
            self.errors.append(error)
        _log.warning("a connection was closed: %s", error)
        denied = isinstance(error, ShippingSecurityError)
        with contextlib.suppress(MMRenderError, TimeoutError):
            async with asyncio.timeout(1.0):
                await channel.send(Bye(str(error)[:1000], denied))


def _closed() -> ShippingClosedError:
    return ShippingClosedError("the receiver is closed")
