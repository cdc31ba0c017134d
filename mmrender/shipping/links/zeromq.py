"""Dialling and listening by ZeroMQ; what a link is stands in `zeromq_links.py`."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from mmcodecs import Limits
from mmrender.errors import (
    MissingDependencyError,
    ShippingConnectionError,
    ShippingSecurityError,
)
from mmrender.shipping.address import Address
from mmrender.shipping.links.base import Link, Listener, OnLink
from mmrender.shipping.links.sockets import SocketFile, clear_stale, resolve
from mmrender.shipping.options import MAX_HEADER_BYTES
from mmrender.shipping.security import CurveKeys, check_exposure

try:
    import zmq
    import zmq.asyncio
    from zmq.utils.monitor import recv_monitor_message

    from mmrender.shipping.links.zeromq_links import DealerLink, Router, close_dealer
except ImportError as error:
    raise MissingDependencyError.of_extra("pyzmq", "zmq", "shipping over ZeroMQ") from error

_DOMAIN = "mmrender"
_LINGER_MS = 500
_HIGH_WATER = 4096


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
            close_dealer(socket, monitor)
            raise ShippingConnectionError("nobody answers", where=str(self.address)) from error
        except zmq.ZMQError as error:
            close_dealer(socket, monitor)
            raise ShippingConnectionError(
                "nobody answers", where=str(self.address), got=str(error)
            ) from error
        except BaseException:
            close_dealer(socket, monitor)
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
