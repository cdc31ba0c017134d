"""Addresses of receivers, and the sockets behind them: Unix sockets, and TCP with or without TLS."""

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from ssl import CERT_REQUIRED, SSLContext
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from mmrender.errors import ShippingConnectionError, ShippingError, ShippingSecurityError

_BACKLOG: Final = 128
_PAUSE_S: Final = 0.05
_MAX_PATH_BYTES: Final = 107
"""The longest path in `sockaddr_un` on Linux."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FORMS: Final = {"unix": "unix:///path/to/socket", "tcp": "tcp://host:port", "shm": "shm://name"}
_Place: TypeAlias = str | tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL of a receiver: `unix:///path`, `tcp://host:port`, or `shm://name`.

    Attributes:
        scheme: How bytes travel.
        path: Of the socket file; for `shm` the name.
        host: As written, without brackets; `*` is every interface.
        port: 0 asks the system for a free one.
    """

    scheme: Literal["unix", "tcp", "shm"]
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read a URL.

        Raises:
            ShippingError: It has another form.
        """
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except (ValueError, AttributeError, TypeError):
            scheme, host, port = "", None, None
        if scheme in _FORMS and not (parts.query or parts.fragment or parts.username is not None):
            bare = parts.path in ("", "/")
            if scheme == "tcp" and host and port is not None and bare:
                return cls("tcp", host=host, port=port)
            short = len(parts.path) >= 2 and len(parts.path.encode()) <= _MAX_PATH_BYTES
            if scheme == "unix" and not parts.netloc and short:
                return cls("unix", path=parts.path)
            if scheme == "shm" and bare and _NAME.fullmatch(parts.netloc):
                return cls("shm", path=parts.netloc)
        expected = _FORMS.get(scheme, ", ".join(_FORMS.values()))
        raise ShippingError("malformed address", where="url", expected=expected, got=repr(url)[:200])

    def __str__(self) -> str:
        if self.scheme == "tcp":
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"tcp://{host}:{self.port}"
        return f"{self.scheme}://{self.path}"


async def dial(address: Address, ssl: SSLContext | None) -> socket.socket:
    """Connect a socket to a receiver; the TLS handshake is still to come.

    Raises:
        ShippingConnectionError: Nobody answers.
        ShippingSecurityError: The address is on another machine, and TLS does not identify it.
    """
    problem: OSError | None = None
    for family, place in await _resolve(address, ssl):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, place)
            return _guarded(sock, ssl, address.host)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    raise ShippingConnectionError("nobody answers", where=str(address), got=str(problem)) from problem


@dataclass(frozen=True, slots=True)
class Listener:
    """Accepts connections until it is closed.

    Attributes:
        url: The address with the port that was chosen.
        close: Takes no more connections.
    """

    url: str
    close: Callable[[], None]


async def listen(
    address: Address, ssl: SSLContext | None, on_connection: Callable[[socket.socket, str], None]
) -> Listener:
    """Accept connections; `on_connection` is called on the event loop with each, and the name of the peer.

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
                guarded = _guarded(connected, ssl, None)
            except ConnectionError:  # it has gone already
                continue
            except OSError:  # most likely out of descriptors: neither stop nor try without pause
                await asyncio.sleep(_PAUSE_S)
                continue
            on_connection(guarded, f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else url)

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

    return Listener(url, close)


def _guarded(sock: socket.socket, ssl: SSLContext | None, host: str | None) -> socket.socket:
    """Wrap a connected socket in TLS, towards a host or on the receiver's side."""
    if ssl is None:
        return sock
    return ssl.wrap_socket(
        sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
    )


def _bound(family: socket.AddressFamily, place: _Place, address: Address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(place, str):
            _remove_stale(place, str(address))
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(place)
        if isinstance(place, str):
            # Nobody can connect before listen(), so nobody comes in with other rights than these.
            os.chmod(place, 0o600)
        sock.listen(_BACKLOG)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise ShippingConnectionError("cannot bind", where=str(address), got=str(error)) from error
        raise
    return sock


async def _resolve(address: Address, ssl: SSLContext | None) -> list[tuple[socket.AddressFamily, _Place]]:
    """Return the numeric addresses or the socket file, if this TLS context guards them well enough."""
    url = str(address)
    if ssl is not None and address.scheme != "tcp":
        raise ShippingError("TLS is for tcp:// only; socket files are for their owner", where="ssl", got=url)
    if ssl is not None and ssl.verify_mode != CERT_REQUIRED:
        raise ShippingSecurityError(
            "the TLS context does not ask the peer for a certificate, so anyone could be there",
            where=url,
            expected="verify_mode=ssl.CERT_REQUIRED and the CA of the peers' certificates",
            got=ssl.verify_mode.name,
        )
    if address.scheme == "unix":
        return [(socket.AF_UNIX, address.path)]
    if address.scheme == "shm":
        return [(socket.AF_UNIX, str(_runtime_folder() / f"{address.path}.sock"))]
    host = None if address.host == "*" else address.host
    try:
        found: list[tuple[Any, ...]] = await asyncio.get_running_loop().getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if host is None else 0
        )
    except OSError as error:
        raise ShippingConnectionError("unknown host", where=url, got=str(error)) from error
    for *_, place in found if ssl is None else ():
        if not ipaddress.ip_address(place[0].partition("%")[0]).is_loopback:
            raise ShippingSecurityError(
                "other machines can reach this address, and nothing guards it",
                where=url,
                expected="a loopback address, or TLS",
                got=place[0],
                remedy="Give ssl=, an ssl.SSLContext with a certificate and verify_mode=ssl.CERT_REQUIRED",
            )
    return [(family, (place[0], place[1])) for family, *_, place in found]


def _remove_stale(path: str, url: str) -> None:
    """Remove a socket file that a dead process left behind."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
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


def _runtime_folder() -> Path:
    """Return the folder of socket files of `shm://`, which must be the user's alone."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "mmrender" if base else Path(tempfile.gettempdir()) / f"mmrender-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ShippingConnectionError("no folder for sockets", where=str(folder), got=str(error)) from error
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ShippingConnectionError(
            "the folder for sockets is not this user's alone",
            where=str(folder),
            expected=f"owner {os.getuid()}, mode 0700",
            got=f"owner {found.st_uid}, mode {found.st_mode & 0o777:04o}",
            remedy="Remove it, or set XDG_RUNTIME_DIR",
        )
    return folder
