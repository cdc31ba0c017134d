"""Addresses of receivers, lists of them that may change, and sockets: Unix, and TCP with or without TLS."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from ssl import CERT_REQUIRED, SSLContext, SSLEOFError, SSLError
from typing import Any, Final, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from blake3 import blake3

from mmrender.errors import ShippingConnectionError, ShippingError, ShippingSecurityError

_BACKLOG: Final = 128
_ACCEPT_PAUSE_S: Final = 0.05
_MAX_PATH_BYTES: Final = 107
"""Maximum length of a path in `sockaddr_un` on Linux."""
_FORMS: Final = {"unix": "unix:///path/to/socket", "tcp": "tcp://host:port"}
_Place: TypeAlias = str | tuple[str, int]
P = TypeVar("P", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL of a receiver: `unix:///path` or `tcp://host:port`.

    Attributes:
        scheme: Kind of the socket.
        path: Of the socket file.
        host: As written, without brackets; `*` is every interface.
        port: 0 asks the system for a free one.
    """

    scheme: Literal["unix", "tcp"]
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read a URL.

        Raises:
            ShippingError: It has another form, or no resolver could take its host.
        """
        scheme = ""
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            # urlsplit drops line breaks without a word, and resolvers choke on empty labels.
            is_sound = url.isprintable() and bool((host or "*").encode("idna"))
            scheme = parts.scheme if is_sound else ""
            if not (parts.query or parts.fragment or parts.username is not None):
                if scheme == "tcp" and host and port is not None and parts.path in ("", "/"):
                    return cls("tcp", host=host, port=port)
                if scheme == "unix" and not parts.netloc and 2 <= len(parts.path.encode()) <= _MAX_PATH_BYTES:
                    return cls("unix", path=parts.path)
        expected = _FORMS.get(scheme, ", ".join(_FORMS.values()))
        raise ShippingError("malformed address", where="url", expected=expected, got=repr(url)[:200])

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def check_tls(address: Address, ssl: SSLContext | None) -> None:
    """Check that a TLS context fits an address.

    Raises:
        ShippingError: The address is a socket file, or the context is something else.
        ShippingSecurityError: The context does not ask the peer for a certificate.
    """
    if ssl is None:
        return
    if not isinstance(ssl, SSLContext):
        raise ShippingError(
            "not a TLS context", where="ssl", expected="an ssl.SSLContext", got=repr(ssl)[:80]
        )
    if address.scheme != "tcp":
        raise ShippingError(
            "TLS is for tcp:// only, since socket files are for their owner", where="ssl", got=str(address)
        )
    if ssl.verify_mode != CERT_REQUIRED:
        raise ShippingSecurityError(
            "the TLS context does not ask the peer for a certificate, so anyone could be there",
            where=str(address),
            expected="verify_mode=ssl.CERT_REQUIRED and the CA of the peers' certificates",
            got=ssl.verify_mode.name,
        )


Receivers: TypeAlias = str | Sequence[str] | os.PathLike[str] | Callable[[], Sequence[str]]
"""A URL, several of them, a file with one on each line, or a function that returns them."""


class ReceiverList:
    """Where the receivers are, and which of them a sender takes.

    Args:
        receivers: See `Receivers`. A file may have empty lines, and comments after `#`. A function is called
            in a thread.
        ssl: As for `Sender`.
        failover: As in `Timing`.

    Attributes:
        is_fixed: Whether it is a single URL.
        untried: Addresses that are still to be tried at once.

    Raises:
        ShippingError: A URL is malformed, or a TLS context does not fit it.
        ShippingSecurityError: The TLS context does not ask for the receivers' certificates.
    """

    def __init__(self, receivers: Receivers, ssl: SSLContext | None, failover: float = 0.0) -> None:
        self._is_source = callable(receivers) or isinstance(receivers, os.PathLike)
        is_sequence = isinstance(receivers, Sequence) and not isinstance(receivers, str | bytes)
        self.is_fixed = not self._is_source and not is_sequence
        # A file, a function, or a sequence that may change.
        self._receivers: Any = [receivers] if self.is_fixed else receivers
        self._ssl = ssl
        self._failover = failover
        self.untried: deque[Address] = deque()
        self._listed: list[Address] = []  # at the last look
        self._unreachable_since: float | None = None
        if not self._is_source:
            self._parse(self._receivers)

    def __str__(self) -> str:
        if self._is_source:
            return getattr(self._receivers, "__qualname__", str(self._receivers))
        return ", ".join(map(str, self._receivers))[:200]

    async def read(self) -> list[Address]:
        """Return the addresses as they are now.

        Raises:
            ShippingConnectionError: They cannot be read at the moment, or there are none.
        """
        try:
            urls = await asyncio.to_thread(self._urls) if self._is_source else self._receivers
            addresses = self._parse(urls)
        except Exception as error:
            problem = "the list of receivers cannot be read"
            raise ShippingConnectionError(problem, where=str(self), got=str(error)[:500]) from error
        if not addresses:
            raise ShippingConnectionError("the list of receivers is empty", where=str(self))
        return addresses

    async def choose(self, sender: bytes) -> Address:
        """Return the address to try next: the sender's own, and others once it was unreachable for long."""
        if not self.untried:
            self._listed = await self.read()
            ordered, now = order_for(sender, self._listed), time.monotonic()
            self._unreachable_since = self._unreachable_since or now
            is_late = now - self._unreachable_since >= self._failover
            self.untried = deque(ordered if is_late else ordered[:1])
        return self.untried.popleft()

    def settle(self) -> None:
        """Take note that a receiver was reached."""
        self._unreachable_since = None
        self.untried.clear()

    async def prefers_another(self, sender: bytes, address: Address) -> bool:
        """Look at the list: has the address left it, or a receiver joined that the sender prefers?"""
        listed = await self.read()
        joined = [each for each in listed if each not in self._listed]
        self._listed = listed
        return address not in listed or order_for(sender, [address, *joined])[0] != address

    def _urls(self) -> Any:
        if callable(self._receivers):
            return self._receivers()
        lines = Path(self._receivers).read_text("utf-8").splitlines()
        return [url for line in lines if (url := line.partition("#")[0].strip())]

    def _parse(self, urls: Any) -> list[Address]:
        if isinstance(urls, str | bytes):
            raise ShippingError("a list of URLs is needed", where="receivers", got=repr(urls)[:200])
        addresses = dict.fromkeys(map(Address.parse, urls))
        for address in addresses:
            check_tls(address, self._ssl)
        return [*addresses]


def order_for(sender: bytes, addresses: Sequence[Address]) -> list[Address]:
    """Return addresses in a sender's order of preference, the same whatever else is in the list.

    The order of each sender is a random one, so an address that joins or leaves moves its own share of the
    senders and no others (rendezvous hashing, Thaler and Ravishankar, 1998).
    """
    return sorted(addresses, key=lambda address: blake3(sender + str(address).encode()).digest())


async def dial(address: Address, ssl: SSLContext | None, make_protocol: Callable[[], P]) -> P:
    """Connect to a receiver, TLS included, and return the protocol of the connection.

    Raises:
        ShippingConnectionError: Nobody answers.
        ShippingSecurityError: The address is on another machine without TLS, or TLS failed.
    """
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    for _, place in await _resolve(address, ssl):
        try:
            if isinstance(place, str):
                return (await loop.create_unix_connection(make_protocol, place))[1]
            host = address.host if ssl else None
            return (await loop.create_connection(make_protocol, *place, ssl=ssl, server_hostname=host))[1]
        except OSError as error:
            problem = error
    if isinstance(problem, SSLError):
        raise broken(problem, str(address)) from problem
    raise ShippingConnectionError("nobody answers", where=str(address), got=str(problem)) from problem


async def listen(
    address: Address, ssl: SSLContext | None, on_socket: Callable[[socket.socket, str], None]
) -> tuple[str, Callable[[], None]]:
    """Accept connections: `on_socket` is called on the event loop with each, and the name of the peer.

    The TLS handshake is left to `on_socket`, whose session reports its errors.

    Returns:
        The address with the port that was chosen, and a function that closes the socket.

    Raises:
        ShippingConnectionError: The address cannot be bound.
        ShippingSecurityError: Other machines could reach it, and TLS does not identify them.
    """
    family, place = (await _resolve(address, ssl))[0]
    sock = _bound(family, place, address)
    if address.scheme == "tcp":
        address = replace(address, port=sock.getsockname()[1])
    loop, url = asyncio.get_running_loop(), str(address)

    async def accept() -> None:
        while True:
            try:
                connected, peer = await loop.sock_accept(sock)
            except ConnectionError:  # the peer has gone already
                continue
            except OSError:  # probably out of descriptors
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            on_socket(connected, f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else url)

    task = loop.create_task(accept())
    inode = os.stat(place).st_ino if isinstance(place, str) else None

    def close() -> None:
        task.cancel()
        loop.remove_reader(sock.fileno())
        sock.close()
        with contextlib.suppress(OSError):
            # A file that another receiver has put in place stays.
            if isinstance(place, str) and os.stat(place).st_ino == inode:
                os.unlink(place)

    return url, close


def broken(error: Exception | None, peer: str) -> ShippingError:
    """Return the error of a connection that broke, or whose TLS failed."""
    if isinstance(error, SSLError) and not isinstance(error, SSLEOFError):
        return ShippingSecurityError("TLS failed", where=peer, got=str(error))
    got = str(error)[:200] if error is not None else "the peer closed it"
    return ShippingConnectionError("the connection broke", where=peer, got=got)


def _bound(family: socket.AddressFamily, place: _Place, address: Address) -> socket.socket:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        try:
            if isinstance(place, str):
                _remove_stale(place, str(address))
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            sock.bind(place)
            if isinstance(place, str):
                # A peer can connect only after listen(), so only with these rights.
                os.chmod(place, 0o600)
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ShippingConnectionError("cannot bind", where=str(address), got=str(error)) from error
        stack.pop_all()
    return sock


async def _resolve(address: Address, ssl: SSLContext | None) -> list[tuple[socket.AddressFamily, _Place]]:
    """Return the numeric addresses or the socket file. Beyond loopback TLS is required."""
    url = str(address)
    if address.scheme == "unix":
        return [(socket.AF_UNIX, address.path)]
    host = None if address.host == "*" else address.host
    try:
        infos: list[tuple[Any, ...]] = await asyncio.get_running_loop().getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if host is None else 0
        )
    except (OSError, ValueError) as error:
        raise ShippingConnectionError("unknown host", where=url, got=str(error)) from error
    for *_, place in infos if ssl is None else ():
        if not is_loopback(place[0]):
            raise ShippingSecurityError(
                "other machines can reach this address, and nothing guards it",
                where=url,
                expected="a loopback address, or TLS",
                got=place[0],
                remedy="Pass ssl=, an ssl.SSLContext with a certificate and verify_mode=ssl.CERT_REQUIRED",
            )
    return [(family, (place[0], place[1])) for family, *_, place in infos]


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches an address. Of names only `localhost` is known to be one."""
    name = host.strip("[]").partition("%")[0].rstrip(".").lower()
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def _remove_stale(path: str, url: str) -> None:
    """Remove a socket file that a dead process left behind."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ShippingConnectionError(
            "the path is taken by a file of another kind", where=url, remedy="Remove it, or take another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError:  # its backlog is full, so somebody listens
            pass
    raise ShippingConnectionError("another receiver listens there", where=url)
