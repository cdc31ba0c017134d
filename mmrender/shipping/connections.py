"""A sender's connections, one after the other, for as long as it is open."""

import asyncio
import contextlib
import os
import random
import time

from mmcodecs import Encoder, Limits
from mmrender.errors import (
    MMRenderError,
    ShippingConnectionError,
    ShippingError,
    ShippingSecurityError,
)
from mmrender.shipping.channel import Channel
from mmrender.shipping.handshake import open_as_sender
from mmrender.shipping.links.base import Transport
from mmrender.shipping.messages import Bye, Welcome
from mmrender.shipping.options import Timing
from mmrender.shipping.outbox import Outbox
from mmrender.shipping.sending import SendingSession

_GOODBYE_S = 1.0


class Connections:
    """Connects, serves the outbox until the connection breaks, and connects again.

    Args:
        transport: Dials.
        outbox: What is to be sent. Its bell rings when a connection begins, and when there will be none.
        secret: Shared secret.
        table_bytes: Capacity of the table of shared arrays.
        share_from: As in `mmcodecs.Encoder`.
        limits: As in `mmcodecs.Encoder`.
        timing: How long things may take.

    Attributes:
        count: Connections so far.
        fatal: Why there will be no further one: the receiver does not let us in.
        last_error: Why the last attempt failed, or the last connection ended.
    """

    def __init__(
        self,
        transport: Transport,
        outbox: Outbox,
        *,
        secret: bytes | None,
        table_bytes: int,
        share_from: int | None,
        limits: Limits,
        timing: Timing,
    ) -> None:
        self.sender = os.urandom(16)
        self.count = 0
        self.fatal: ShippingSecurityError | None = None
        self.last_error: ShippingError | None = None
        self._transport = transport
        self._outbox = outbox
        self._secret = secret
        self._table_bytes = table_bytes
        self._share_from = share_from
        self._limits = limits
        self._timing = timing
        self._past_bytes = 0
        self._channel: Channel | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._channel is not None

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over all of them."""
        return self._past_bytes + (self._channel.sent_bytes if self._channel else 0)

    async def run(self) -> None:
        """Connect again and again; returns when the receiver does not let us in."""
        wait = self._timing.first_retry
        while True:
            started = time.monotonic()
            try:
                channel, welcome = await self._open()
            except ShippingSecurityError as error:
                self.fatal = error
                self._outbox.fail_all(error)
                self._outbox.bell.ring()
                return
            except ShippingError as error:
                self.last_error = error
            else:
                await self._serve(channel, welcome)
            if time.monotonic() - started > 2 * wait + 1.0:
                wait = self._timing.first_retry
            # Workers whose trainer is back must not all knock at the same moment.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311
            wait = min(2 * wait, self._timing.last_retry)

    async def _open(self) -> tuple[Channel, Welcome]:
        try:
            async with asyncio.timeout(self._timing.handshake):
                channel = Channel(await self._transport.dial())
                try:
                    welcome = await open_as_sender(
                        channel,
                        self.sender,
                        secret=self._secret,
                        table_bytes=self._table_bytes,
                        unacked=self._outbox.unacked(),
                    )
                except BaseException:
                    await channel.link.aclose()
                    raise
        except TimeoutError as error:
            raise ShippingConnectionError("no answer in time") from error
        return channel, welcome

    async def _serve(self, channel: Channel, welcome: Welcome) -> None:
        """Use a connection until it ends."""
        encoder = Encoder(
            table_bytes=min(self._table_bytes, welcome.table_bytes),
            share_from=self._share_from,
            limits=self._limits,
        )
        self.count += 1
        self._channel = channel
        try:
            self._outbox.connected(welcome)
            self._outbox.bell.ring()
            await SendingSession(channel, self._outbox, encoder, welcome.max_bytes, self._timing).run()
        except ShippingError as error:
            # Here a wrong tag, too, means only that this connection was tampered with.
            self.last_error = error
        except asyncio.CancelledError:
            with contextlib.suppress(MMRenderError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await channel.send(Bye("the sender was closed"))
            raise
        finally:
            self._channel = None
            self._past_bytes += channel.sent_bytes
            self._outbox.disconnected()
            await channel.link.aclose()
