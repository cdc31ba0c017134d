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
import os
import time
from collections.abc import Sequence
from typing import Any

from mmcodecs import Limits
from mmrender.errors import (
    MissingDependencyError,
    ShippingConnectionError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.address import Address
from mmrender.shipping.links.base import Limit, Link, Listener, OnLink, Parcel, broken, too_long
from mmrender.shipping.links.sockets import SocketFile, clear_stale, resolve
from mmrender.shipping.options import MAX_HEADER_BYTES
from mmrender.shipping.security import CurveKeys, check_exposure

try:
    import zmq
    import zmq.asyncio
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise MissingDependencyError.of_extra("pyzmq", "zmq", "shipping over ZeroMQ") from error

_DOMAIN = "mmrender"
_LINGER_MS = 500
_MAX_QUEUED = 4096
_HIGH_WATER = 4096
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
        _close(self._socket, self._monitor)


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


class _Allowed:
    """The keys that may come in, as ZeroMQ's authenticator asks for them."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the holder of a public key may come in."""
        return key in self._keys


class ZmqTransport:
    """Dials and listens on `zmq+tcp://` and `zmq+ipc://`.

    Args:
        address: Where.
        keyed: Whether there is a shared secret.
        curve: CURVE keys.
        limits: Of the codec; `max_bytes` bounds each frame.
        handshake: Seconds that a connection may take.
    """

    def __init__(
        self, address: Address, *, keyed: bool, curve: CurveKeys | None, limits: Limits, handshake: float
    ) -> None:
        self.address = address
        self.keyed = keyed
        self.curve = curve
        self.limits = limits
        self.handshake = handshake
        self._context: zmq.asyncio.Context | None = None

    async def dial(self) -> Link:
        """Connect to a receiver."""
        endpoint = await self._endpoint(passive=False)
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket()
        try:
            if self.curve is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, self.curve.peers[0])
            socket.connect(endpoint)
            await asyncio.wait_for(self._connected(monitor), self.handshake)
        except TimeoutError as error:
            _close(socket, monitor)
            raise ShippingConnectionError("nobody answers", where=str(self.address)) from error
        except zmq.ZMQError as error:
            _close(socket, monitor)
            raise ShippingConnectionError(
                "nobody answers", where=str(self.address), got=str(error)
            ) from error
        except BaseException:
            _close(socket, monitor)
            raise
        return DealerLink(socket, monitor, str(self.address))

    async def listen(self, on_link: OnLink) -> Listener:
        """Open the door."""
        endpoint = await self._endpoint(passive=True)
        if not self.address.is_network:
            # ZeroMQ would take the path away from whoever listens there.
            await clear_stale(self.address.path, str(self.address))
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        guard = self._authenticator(socket)
        try:
            _bind(socket, endpoint)
        except zmq.ZMQError as error:
            socket.close()
            if guard is not None:
                guard.stop()
            raise ShippingConnectionError("cannot bind", where=str(self.address), got=str(error)) from error
        address = self.address
        if address.is_network:
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            address = address.with_port(int(bound.rpartition(":")[2]))
        file = None if address.is_network else SocketFile(address.path)
        return Router(socket, str(address), file, guard, on_link)

    async def aclose(self) -> None:
        """End ZeroMQ's threads."""
        context, self._context = self._context, None
        if context is not None:
            await asyncio.to_thread(context.term)

    async def _connected(self, monitor: "zmq.asyncio.Socket") -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                raise ShippingSecurityError(
                    "the receiver does not let us in",
                    where=str(self.address),
                    expected="a public key that the receiver lists" if self.curve else "no CURVE",
                    remedy="Add this sender's public key to the receiver's CurveKeys.peers",
                )
            if event in (
                zmq.EVENT_CLOSED,
                zmq.EVENT_DISCONNECTED,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                zmq.EVENT_CONNECT_RETRIED,
            ):
                raise ShippingConnectionError(
                    "nobody answers",
                    where=str(self.address),
                    remedy="Check the receiver's public key" if self.curve else None,
                )

    async def _endpoint(self, *, passive: bool) -> str:
        if not self.address.is_network:
            check_exposure(self.address, [], keyed=self.keyed, curve=self.curve, side="")
            return f"ipc://{self.address.path}"
        found = await resolve(self.address, passive=passive)
        hosts = [where[0] for _, where in found]
        side = "binding" if passive else "connecting"
        check_exposure(self.address, hosts, keyed=self.keyed, curve=self.curve, side=side)
        host = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
        return f"tcp://{host}:{self.address.port or '*'}"

    def _socket(self, kind: int) -> "zmq.asyncio.Socket":
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.MAXMSGSIZE, max(self.limits.max_bytes, MAX_HEADER_BYTES)),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.IPV6, int(":" in self.address.host)),
        ):
            socket.setsockopt(option, value)
        if self.curve is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.curve.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.curve.secret)
        return socket

    def _authenticator(self, socket: "zmq.asyncio.Socket") -> Any:
        if self.curve is None:
            return None
        from zmq.auth.asyncio import AsyncioAuthenticator

        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        guard = AsyncioAuthenticator(self._context)
        guard.start()
        guard.configure_curve_callback(_DOMAIN, _Allowed(self.curve.peers))
        return guard


def _bind(socket: "zmq.asyncio.Socket", endpoint: str) -> None:
    """Bind; a socket file is its owner's alone from the start."""
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)


def _close(socket: "zmq.asyncio.Socket", monitor: "zmq.asyncio.Socket") -> None:
    with contextlib.suppress(zmq.ZMQError):
        socket.disable_monitor()
    # The monitor has events left to tell that nobody will read, and must not hold up the end of the context.
    monitor.close(linger=0)
    socket.close()
