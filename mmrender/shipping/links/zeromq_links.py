"""Parcels as ZeroMQ multipart messages, `[header, frame, ...]`, neither side copying large frames.

A sender is a DEALER, a receiver a ROUTER. ZeroMQ would reconnect behind our back and lose what was under way
without a word, so each link is a socket of its own that does not reconnect, and a monitor says when it is
gone.

ZeroMQ takes in whole messages before we see them: what a peer can make it hold is bounded by `MAXMSGSIZE` for
each frame, and by the high-water mark. Strangers are kept out by CURVE, which is why it is asked for beyond
loopback.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mmrender.errors import (
    ShippingProtocolError,
)
from mmrender.shipping.links.base import Limit, OnLink, Parcel, broken, too_long
from mmrender.shipping.links.sockets import SocketFile
from mmrender.shipping.options import MAX_HEADER_BYTES

_MAX_QUEUED = 4096
_FIRST = bytes(8)
"""A conversation begins with parcel number 0 (`channel.py`); whatever else a stranger says is dropped."""


class ZmqLink:
    """One conversation over a ZeroMQ socket.

    Args:
        socket: The socket.
        peer: Who is there, for messages.
        route: What a ROUTER puts in front of what it sends: the identity of the peer.
    """

    def __init__(self, socket: "zmq.asyncio.Socket", peer: str, route: list[bytes]) -> None:
        self.peer = peer
        self.heard = time.monotonic()
        self._socket = socket
        self._route = route
        self._inbox: asyncio.Queue[Parcel | Exception] = asyncio.Queue()
        self._queued_bytes = 0
        self._limit: Limit = lambda: 0
        self._error: Exception | None = None

    def deliver(self, frames: list["zmq.Frame"]) -> None:
        """Take in a multipart message, or break the link if it is more than the peer may send."""
        self.heard = time.monotonic()
        header, payload = frames[0].buffer, [frame.buffer for frame in frames[1:]]
        total = sum(view.nbytes for view in payload)
        if header.nbytes > MAX_HEADER_BYTES:
            self.fail(too_long(self.peer, "a header is", MAX_HEADER_BYTES, header.nbytes))
        elif total and self._queued_bytes + total > self._limit():
            self.fail(too_long(self.peer, "a message is", self._limit(), self._queued_bytes + total))
        elif self._inbox.qsize() >= _MAX_QUEUED:
            self.fail(ShippingProtocolError("too many messages at once", where=self.peer))
        elif self._error is None:
            self._queued_bytes += total
            self._inbox.put_nowait(Parcel(bytes(header), payload))

    def fail(self, error: Exception) -> None:
        """Let whoever receives, and then whoever sends, know that the link is broken."""
        if self._error is None:
            self._error = error
            self._inbox.put_nowait(error)

    async def send(self, header: bytes, frames: Sequence[memoryview]) -> None:
        """Send a parcel."""
        if self._error is not None:
            raise self._error
        try:
            await self._socket.send_multipart([*self._route, header, *frames], copy=False)
        except (zmq.ZMQError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._socket.closed:
                raise
            raise broken(self.peer, error) from error

    async def receive(self, limit: Limit) -> Parcel:
        """Wait for a parcel; its frames are views of ZeroMQ's own memory, at any address."""
        self._limit = limit
        found = await self._inbox.get()
        if isinstance(found, Exception):
            raise found
        self._queued_bytes -= sum(frame.nbytes for frame in found.frames)
        return found

    async def aclose(self) -> None:
        """Break the link."""
        self.fail(broken(self.peer, "closed"))


class DealerLink(ZmqLink):
    """The sender's link, with a socket of its own."""

    def __init__(self, socket: "zmq.asyncio.Socket", monitor: "zmq.asyncio.Socket", peer: str) -> None:
        super().__init__(socket, peer, [])
        self._monitor = monitor
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pump()), loop.create_task(self._watch())]

    async def _pump(self) -> None:
        while True:
            self.deliver(await self._socket.recv_multipart(copy=False))

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self.fail(broken(self.peer, "the peer closed it"))
                return

    async def aclose(self) -> None:
        """Close the socket; what was sent has half a second to leave."""
        await super().aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        close_dealer(self._socket, self._monitor)


class RouterLink(ZmqLink):
    """The receiver's link to one of the peers of its ROUTER."""

    def __init__(self, door: "Router", identity: bytes) -> None:
        super().__init__(door.socket, f"{door.url}#{identity.hex()}", [identity])
        self._door = door
        self._identity = identity

    async def aclose(self) -> None:
        """Forget the peer."""
        await super().aclose()
        self._door.links.pop(self._identity, None)


class Router:
    """The receiver's socket: hands each peer's messages to its link."""

    def __init__(
        self,
        socket: "zmq.asyncio.Socket",
        url: str,
        file: SocketFile | None,
        guard: Any,
        on_link: OnLink,
    ) -> None:
        self.socket = socket
        self.url = url
        self.links: dict[bytes, RouterLink] = {}
        self._file = file
        self._guard = guard
        self._on_link = on_link
        self._task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        while True:
            identity, *frames = await self.socket.recv_multipart(copy=False)
            name = bytes(identity.buffer)
            link = self.links.get(name)
            if link is None:
                if not frames or bytes(frames[0].buffer[:8]) != _FIRST or len(frames) > 1:
                    continue
                link = self.links[name] = RouterLink(self, name)
                self._on_link(link)
            if frames:
                link.deliver(frames)
            del frames

    async def aclose(self) -> None:
        """Close the socket, and with it every link; what was sent has half a second to leave."""
        self._task.cancel()
        await asyncio.wait([self._task])
        for link in list(self.links.values()):
            await link.aclose()
        self.socket.close()
        if self._file is not None:
            self._file.remove()  # ZeroMQ leaves it, or does so later
        if self._guard is not None:
            self._guard.stop()


def close_dealer(socket: "zmq.asyncio.Socket", monitor: "zmq.asyncio.Socket") -> None:
    """Close the socket of a sender, and its monitor."""
    with contextlib.suppress(zmq.ZMQError):
        socket.disable_monitor()
    # The monitor has events left to tell that nobody will read, and must not hold up the end of the context.
    monitor.close(linger=0)
    socket.close()
