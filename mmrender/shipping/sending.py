"""One connection of a sender: what goes out, what comes back, and signs of life."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from mmcodecs import CodecError, Encoder
from mmrender.errors import ShippingConnectionError, ShippingProtocolError
from mmrender.shipping.channel import Channel, off_loop, total_bytes
from mmrender.shipping.handshake import farewell
from mmrender.shipping.messages import Bye, Data, Missing, Ping, Progress, Refused
from mmrender.shipping.options import Timing
from mmrender.shipping.outbox import Outbox, Outgoing


class SendingSession:
    """Sends what the outbox lines up until the connection ends.

    Args:
        channel: After its handshake.
        outbox: Which `connected` has been called on.
        encoder: With an empty table, as the receiver's.
        max_bytes: Longest message that the receiver takes.
        timing: Heartbeat and silence.
    """

    def __init__(
        self, channel: Channel, outbox: Outbox, encoder: Encoder, max_bytes: int, timing: Timing
    ) -> None:
        self.channel = channel
        self.outbox = outbox
        self.encoder = encoder
        self.max_bytes = max_bytes
        self.timing = timing
        self._forget: list[bytes] = []

    async def run(self) -> None:
        """Serve the connection.

        Raises:
            ShippingError: Why it ended; it always does so by an error.
        """
        await first_to_end(self._write(), self._read(), keep_alive(self.channel, self.timing))

    async def _write(self) -> None:
        while True:
            entry = self.outbox.next()
            if entry is None:
                await self.outbox.bell.wait()
            elif entry.num_bytes > self.max_bytes:
                self.outbox.fail(entry.seq, _too_long(entry, self.max_bytes, self.channel.peer))
            else:
                await self._send(entry)

    async def _send(self, entry: Outgoing) -> None:
        # The table of shared arrays changes with each message, so what was encoded must be what is sent next.
        self.encoder.forget(self._forget)
        self._forget.clear()
        try:
            # No array is copied, so only hashing takes time that grows with their size.
            work = entry.num_bytes if self.encoder.share_from is not None else 0
            frames = await off_loop(work, lambda: self.encoder.encode_frames(entry.value))
        except CodecError as error:
            self.outbox.fail(entry.seq, _changed(entry, error))
            return
        views = [memoryview(frame) for frame in frames]
        wire_bytes = total_bytes(views)
        is_missing = self.outbox.is_missing(entry)
        await self.outbox.bell.wait_until(lambda: is_missing or self.outbox.may_send(entry, wire_bytes))
        self.outbox.sent(entry, wire_bytes)
        await self.channel.send(Data(entry.seq, entry.delivery.id, entry.kind), views)

    async def _read(self) -> None:
        while True:
            message, _ = await self.channel.receive(lambda: 0)
            if isinstance(message, Progress):
                self.outbox.taken(message.taken)
                self.outbox.acked(message.acked)
            elif isinstance(message, Missing):
                self._forget += message.keys
                self.outbox.missing(message.seq)
            elif isinstance(message, Refused):
                self.outbox.refused(message.seq, message.reason, self.channel.peer)
            elif isinstance(message, Bye):
                raise farewell(self.channel.peer, message)
            elif not isinstance(message, Ping):
                raise ShippingProtocolError(
                    "a message out of turn", where=self.channel.peer, got=type(message).__name__
                )


async def keep_alive(channel: Channel, timing: Timing) -> None:
    """Show signs of life, and look for those of the peer.

    Raises:
        ShippingConnectionError: There were none for too long.
    """
    while True:
        before = time.monotonic()
        await asyncio.sleep(timing.heartbeat / 2)
        now = time.monotonic()
        if now - before > timing.heartbeat:
            # It was this side that did not listen; what came meanwhile is read now.
            await channel.send(Ping())
            continue
        if now - channel.link.heard > timing.silence:
            raise ShippingConnectionError(
                "the peer has gone silent", where=channel.peer, got=f"nothing for {timing.silence:g} s"
            )
        if now - channel.said > timing.heartbeat:
            await channel.send(Ping())


async def first_to_end(*work: Coroutine[Any, Any, None]) -> None:
    """Run until one of them ends, end the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        # Whatever the others raise now follows from the first.
        await asyncio.gather(*tasks, return_exceptions=True)


def _too_long(entry: Outgoing, bound: int, peer: str) -> ShippingProtocolError:
    return ShippingProtocolError(
        "the message is longer than the receiver takes",
        where=f"message {entry.delivery.id!r} to {peer}",
        expected=f"at most {bound} bytes",
        got=str(entry.num_bytes),
        remedy="Give the receiver limits=Limits(max_bytes=...), or ship it in pieces",
    )


def _changed(entry: Outgoing, error: CodecError) -> ShippingProtocolError:
    return ShippingProtocolError(
        "the message could be written when it was given, and cannot be any more",
        where=f"message {entry.delivery.id!r}",
        got=str(error),
        remedy="Leave a value alone until it is acknowledged",
    )
