"""Unix and TCP sockets: dialling, listening, and who may."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable

from mmcodecs import BufferPool
from mmrender.errors import ShippingConnectionError
from mmrender.shipping.address import Address
from mmrender.shipping.links.base import Link, Listener, OnLink
from mmrender.shipping.links.stream import StreamLink
from mmrender.shipping.security import check_exposure

_BACKLOG = 128
_PAUSE_S = 0.05
MakeLink = Callable[[socket.socket, str], Link]


async def resolve(address: Address, *, passive: bool) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Give the numeric addresses that a host name stands for, in the system's order.

    Raises:
        ShippingConnectionError: There are none.
    """
    host = None if address.host == "*" else address.host
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=flags
        )
    except OSError as error:
        raise ShippingConnectionError("the host is not known", where=str(address), got=str(error)) from error
    return [(family, (str(where[0]), int(where[1]))) for family, _, _, _, where in found]


class SocketFile:
    """A socket file that this process has just made."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = os.stat(path).st_ino

    def remove(self) -> None:
        """Remove it, unless another receiver has put its own in place."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)


class SocketListener:
    """Accepts connections until it is closed.

    Args:
        sock: Listening, non-blocking; the listener owns it.
        url: The address with the port that was chosen.
        path: Of a socket file, which goes with the listener.
        make_link: Makes the link of a connection.
        on_link: Called with each.
    """

    def __init__(
        self, sock: socket.socket, url: str, path: str | None, make_link: MakeLink, on_link: OnLink
    ) -> None:
        self.url = url
        self._sock = sock
        self._file = SocketFile(path) if path else None
        self._make_link = make_link
        self._on_link = on_link
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._accept)

    def _accept(self) -> None:
        """Take in one connection: here and not in a task, which could be cancelled with it in its hands."""
        try:
            sock, where = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors, most likely: no reason to close the door, nor to knock without pause.
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(_PAUSE_S, self._resume)
            return
        sock.setblocking(False)
        _no_delay(sock)
        peer = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else self.url
        self._on_link(self._make_link(sock, peer))

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    async def aclose(self) -> None:
        """Close the door, and remove its file if it is still ours."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        if self._file is not None:
            self._file.remove()


class SocketTransport:
    """Dials and listens on `unix://` and `tcp://`.

    Args:
        address: Where.
        keyed: Whether there is a shared secret.
        pool: Where payloads are received into.
    """

    def __init__(self, address: Address, *, keyed: bool, pool: BufferPool) -> None:
        self.address = address
        self.keyed = keyed
        self.pool = pool

    def make_link(self, sock: socket.socket, peer: str) -> Link:
        """Make the link of a connected socket."""
        return StreamLink(sock, peer, self.pool)

    async def dial(self) -> Link:
        """Connect to a receiver."""
        if not self.address.is_network:
            return self.make_link(await connect_path(self.address.path, str(self.address)), str(self.address))
        found = await resolve(self.address, passive=False)
        self._check([where[0] for _, where in found], "connecting")
        errors: list[ShippingConnectionError] = []
        for family, where in found:
            try:
                return self.make_link(await _connect(family, where, str(self.address)), str(self.address))
            except ShippingConnectionError as error:
                errors.append(error)
        raise errors[-1]

    async def listen(self, on_link: OnLink) -> Listener:
        """Open the door."""
        if not self.address.is_network:
            sock = await bind_path(self.address.path, str(self.address))
            return SocketListener(sock, str(self.address), self.address.path, self.make_link, on_link)
        found = await resolve(self.address, passive=True)
        self._check([where[0] for _, where in found], "binding")
        family, where = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise ShippingConnectionError("cannot bind", where=str(self.address), got=str(error)) from error
        url = str(self.address.with_port(sock.getsockname()[1]))
        return SocketListener(sock, url, None, self.make_link, on_link)

    async def aclose(self) -> None:
        """Nothing is shared."""

    def _check(self, hosts: list[str], side: str) -> None:
        check_exposure(self.address, hosts, keyed=self.keyed, curve=None, side=side)


async def connect_path(path: str, url: str) -> socket.socket:
    """Connect to a socket file.

    Raises:
        ShippingConnectionError: Nobody listens there.
    """
    return await _connect(socket.AF_UNIX, path, url)


async def _connect(family: socket.AddressFamily, where: str | tuple[str, int], url: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
        _no_delay(sock)
    except OSError as error:
        sock.close()
        raise ShippingConnectionError("nobody answers", where=url, got=str(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _no_delay(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def bind_path(path: str, url: str) -> socket.socket:
    """Listen on a socket file that its owner alone may use; one that a dead process left behind is replaced.

    Raises:
        ShippingConnectionError: Another process listens there, or the file cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await clear_stale(path, url)
        sock.bind(path)
        # Nobody can connect before listen(), so nobody comes in with other rights than these.
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ShippingConnectionError("cannot bind", where=url, got=str(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock


async def clear_stale(path: str, url: str) -> None:
    """Remove a socket file that a dead process left behind.

    Raises:
        ShippingConnectionError: Somebody listens there, or it is another kind of file.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ShippingConnectionError(
            "the path is taken", where=url, expected="nothing, or a socket file that nobody listens on",
            got="another kind of file",
        )  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(probe, path), 1.0)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except (OSError, TimeoutError):
            pass
    raise ShippingConnectionError("another receiver listens there", where=url)
