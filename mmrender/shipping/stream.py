"""Connections over stream sockets: Unix sockets, and TCP with the TLS of the standard library.

A parcel on the wire, integers little-endian:

| bytes | field |
|---|---|
| 4 | magic `mmsp` |
| u8, u8 | version 2, kind (0: frames follow; others belong to shared memory) |
| u16 | zero |
| u32 | h: length of the header |
| u32 | n: number of frames |
| n x u64 | length of each frame |
| h | header |
| | the frames, one after the other |

Frames go out straight from where they lie, and a long one comes in straight into a pooled buffer of its own.
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from ssl import CERT_REQUIRED, SSLContext, SSLEOFError, SSLError
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from mmcodecs import BufferPool
from mmrender.errors import (
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping.protocol import Data, Message, Ping, Timing, pack, unpack

MAGIC, VERSION, FRAMES = b"mmsp", 2, 0
MAX_HEADER_BYTES: Final = 256 << 10
MAX_FRAMES: Final = 4096 + 1
"""A message of the codec has at most 4,096 payloads, and a head."""
OWN_BUFFER_BYTES: Final = 64 << 10
"""Frames from this size on come into a buffer of their own, so that one of them keeps no other alive."""
ALIGNMENT: Final = 64
_PREFIX = struct.Struct("<4sBBHII")
_SOCKET_BUFFER_BYTES: Final = 4 << 20
_YIELD_BYTES: Final = 8 << 20
"""A peer that writes as fast as this side reads must not keep other tasks from the event loop."""
_BACKLOG: Final = 128
_PAUSE_S: Final = 0.05
_MAX_PATH_BYTES: Final = 107
"""The longest path in `sockaddr_un` on Linux."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FORMS: Final = {"unix": "unix:///path/to/socket", "tcp": "tcp://host:port", "shm": "shm://name"}
Limit = Callable[[], int]
"""Says, when asked, how many bytes the frames of the next message may have."""


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

    @property
    def socket_path(self) -> str:
        """Path of the socket file of `unix` and `shm`."""
        return str(runtime_folder() / f"{self.path}.sock") if self.scheme == "shm" else self.path


class SocketStream:
    """A connected socket. One task may read while another writes.

    Attributes:
        heard: When the last bytes came, by `time.monotonic`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.heard = time.monotonic()
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def read_into(self, view: memoryview, *, whole: bool) -> int:
        """Read some bytes, or with `whole` until the view is full; return fewer than that only at the end."""
        done = 0
        result: asyncio.Future[int] = self._loop.create_future()

        def read() -> None:
            nonlocal done
            if result.done():
                return
            try:
                count = self.receive(view[done:])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                result.set_exception(error)
                return
            self.heard = time.monotonic()
            done += count
            if not whole or not count or done == view.nbytes:
                result.set_result(done)

        read()
        if not result.done():
            # Read by the callback itself: one task switch for a long view, not one for each piece.
            self._loop.add_reader(self.sock.fileno(), read)
            try:
                await result
            finally:
                self._loop.remove_reader(self.sock.fileno())
        return await result

    def receive(self, view: memoryview) -> int:
        """Read what has come, without waiting; 0 at the end."""
        return self.sock.recv_into(view)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all bytes."""
        await self._loop.sock_sendall(self.sock, data)

    async def aclose(self) -> None:
        """Close the socket; no task may be reading or writing."""
        self.sock.close()


class TLSStream:
    """A TLS connection of asyncio; otherwise as `SocketStream`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard = time.monotonic()
        self._reader = reader
        self._writer = writer

    async def read_into(self, view: memoryview, *, whole: bool) -> int:
        """Read some bytes, or with `whole` until the view is full; return fewer than that only at the end."""
        done = 0
        while data := await self._reader.read(view.nbytes - done):
            self.heard = time.monotonic()
            view[done : done + len(data)] = data
            done += len(data)
            if not whole or done == view.nbytes:
                break
        return done

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def aclose(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _PAUSE_S)


class Connection:
    """Messages over a stream. One task may send while another receives.

    After an error, or a call that was cancelled, a connection can only be closed.

    Attributes:
        sent_bytes: Bytes written so far.
    """

    def __init__(self, stream: SocketStream | TLSStream, peer: str, pool: BufferPool) -> None:
        self.peer = peer
        self.sent_bytes = 0
        self._stream = stream
        self._pool = pool
        self._said = time.monotonic()
        self._writing = asyncio.Lock()
        self._ahead = memoryview(b"")
        self._since_yield = 0

    async def send(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        """Send a message."""
        async with self._writing:
            await self.write_parcel(FRAMES, pack(message), frames)

    async def receive(self, limit: Limit) -> tuple[Message, list[memoryview]]:
        """Wait for the next message. No memory is taken for frames beyond the limit."""
        while True:
            prefix = memoryview(bytearray(_PREFIX.size))
            await self._fill(prefix)
            magic, version, kind, reserved, header_bytes, count = _PREFIX.unpack(prefix)
            if magic != MAGIC or version != VERSION or reserved:
                raise ShippingProtocolError(
                    "the peer does not speak this protocol",
                    where=self.peer,
                    expected=f"{MAGIC!r}, version {VERSION}",
                    got=repr(bytes(prefix[:6])),
                )
            if header_bytes > MAX_HEADER_BYTES or count > MAX_FRAMES:
                raise ShippingProtocolError(
                    "a header is too long",
                    where=self.peer,
                    expected=f"at most {MAX_HEADER_BYTES} bytes, {MAX_FRAMES} frames",
                    got=f"{header_bytes} bytes, {count} frames",
                )
            rest = memoryview(bytearray(8 * count + header_bytes))
            await self._fill(rest)
            lengths = list(struct.unpack_from(f"<{count}Q", rest))
            parcel = await self.read_parcel(kind, rest[8 * count :], lengths, limit)
            if parcel is None:
                continue
            header, frames = parcel
            message = unpack(header)
            if frames and not isinstance(message, Data):
                raise ShippingProtocolError(
                    "frames belong to no message", where=self.peer, got=type(message).__name__
                )
            return message, frames

    async def keep_alive(self, timing: Timing) -> None:
        """Send signs of life, and raise when the peer gives none."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(timing.heartbeat / 2)
            now = time.monotonic()
            if now - before > timing.heartbeat:
                # This side did not listen; what came meanwhile is read now.
                await self.send(Ping())
                continue
            if now - self._stream.heard > timing.silence:
                raise ShippingConnectionError(
                    "the peer is silent", where=self.peer, got=f"nothing for {timing.silence:g} s"
                )
            if now - self._said > timing.heartbeat:
                await self.send(Ping())

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    async def write_parcel(self, kind: int, header: bytes, frames: Sequence[memoryview] = ()) -> None:
        """Write a parcel; short frames go out together. The caller holds the lock of this direction."""
        lengths = [frame.nbytes for frame in frames]
        pending = bytearray(parcel_prefix(kind, header, lengths))
        size = len(pending) + sum(lengths)
        try:
            for frame in frames:
                if frame.nbytes < OWN_BUFFER_BYTES:
                    pending += frame
                    continue
                await self._stream.write(pending)
                await self._stream.write(frame)
                pending = bytearray()
            if pending:
                await self._stream.write(pending)
        except OSError as error:
            raise broken(self.peer, error) from error
        self._said = time.monotonic()
        self.sent_bytes += size

    async def read_parcel(
        self, kind: int, header: memoryview, lengths: list[int], limit: Limit
    ) -> tuple[memoryview, list[memoryview]] | None:
        """Return header and frames of a parcel, or None if it was for the connection itself."""
        if kind != FRAMES:
            raise ShippingProtocolError("a parcel of unknown kind", where=self.peer, got=str(kind))
        check_length(sum(lengths), limit(), self.peer)
        short = sum(-(-each // ALIGNMENT) * ALIGNMENT for each in lengths if each < OWN_BUFFER_BYTES)
        together = self._pool.acquire(short) if short else memoryview(b"")
        frames = []
        for length in lengths:
            if length >= OWN_BUFFER_BYTES:
                frame = self._pool.acquire(length)
            else:
                frame, together = together[:length], together[-(-length // ALIGNMENT) * ALIGNMENT :]
            await self._fill(frame)
            frames.append(frame)
        return header, frames

    async def _fill(self, view: memoryview) -> None:
        """Read until the view is full; for a short one, what has come beyond it is kept for the next."""
        while view.nbytes:
            if not self._ahead.nbytes and view.nbytes >= OWN_BUFFER_BYTES:
                await self._read_into(view, whole=True)
                return
            if not self._ahead.nbytes:
                ahead = memoryview(bytearray(OWN_BUFFER_BYTES))
                self._ahead = ahead[: await self._read_into(ahead, whole=False)]
            count = min(view.nbytes, self._ahead.nbytes)
            view[:count] = self._ahead[:count]
            view, self._ahead = view[count:], self._ahead[count:]

    async def _read_into(self, view: memoryview, *, whole: bool) -> int:
        if self._since_yield > _YIELD_BYTES:
            self._since_yield = 0
            await asyncio.sleep(0)
        try:
            count = await self._stream.read_into(view, whole=whole)
        except SSLEOFError as error:
            raise broken(self.peer, error) from error
        except SSLError as error:
            raise ShippingSecurityError("TLS failed", where=self.peer, got=str(error)) from error
        except OSError as error:
            raise broken(self.peer, error) from error
        if not count or (whole and count < view.nbytes):
            raise broken(self.peer, "the peer closed it")
        self._since_yield += max(count, _YIELD_BYTES // 32)
        return count


def parcel_prefix(kind: int, header: bytes, lengths: Sequence[int]) -> bytes:
    """Return everything of a parcel that comes before its frames."""
    start = _PREFIX.pack(MAGIC, VERSION, kind, 0, len(header), len(lengths))
    return start + struct.pack(f"<{len(lengths)}Q", *lengths) + header


def check_length(length: int, limit: int, peer: str) -> None:
    """Require that the frames of a message are within the limit."""
    if length > limit:
        raise ShippingProtocolError(
            "a message is too long", where=peer, expected=f"at most {limit} bytes", got=str(length)
        )


def broken(peer: str, why: object) -> ShippingConnectionError:
    """Return the error of a lost connection."""
    return ShippingConnectionError("the connection broke", where=peer, got=str(why)[:200] or None)


MakeConnection = Callable[[socket.socket, str], Connection]
"""Makes a connection of a connected socket and the name of the peer."""


async def dial(
    address: Address, *, ssl: SSLContext | None, pool: BufferPool, make: MakeConnection
) -> Connection:
    """Connect to a receiver.

    Raises:
        ShippingConnectionError: Nobody answers.
        ShippingSecurityError: The address is on another machine and there is no TLS that identifies it, or
            TLS failed.
    """
    url = str(address)
    found = await _resolve(address, ssl)
    try:
        if ssl is not None:
            limit = _SOCKET_BUFFER_BYTES
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=ssl, limit=limit)
            return Connection(TLSStream(reader, writer), url, pool)
        for number, (family, where) in enumerate(found, 1):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, where)
                return make(sock, url)
            except BaseException as error:
                sock.close()
                if number == len(found) or not isinstance(error, OSError):
                    raise
    except SSLEOFError as error:
        raise broken(url, error) from error
    except SSLError as error:
        raise ShippingSecurityError("TLS failed", where=url, got=str(error)) from error
    except OSError as error:
        raise ShippingConnectionError("nobody answers", where=url, got=str(error)) from error
    raise ShippingConnectionError("unknown host", where=url)


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
    address: Address,
    on_connection: Callable[[Connection], None],
    *,
    ssl: SSLContext | None,
    pool: BufferPool,
    make: MakeConnection,
) -> Listener:
    """Accept connections; `on_connection` is called on the event loop with each.

    Raises:
        ShippingConnectionError: The address cannot be bound.
        ShippingSecurityError: Other machines could reach it, and TLS does not identify them.
    """
    sock, where = await _bind(address, ssl)
    if address.scheme == "tcp":
        address = replace(address, port=sock.getsockname()[1])
    url = str(address)

    def named(peer: Any) -> str:
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else url

    if ssl is not None:

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = TLSStream(reader, writer)
            on_connection(Connection(stream, named(writer.get_extra_info("peername")), pool))

        server = await asyncio.start_server(accepted, sock=sock, ssl=ssl, limit=_SOCKET_BUFFER_BYTES)
        return Listener(url, server.close)

    loop = asyncio.get_running_loop()

    async def accept() -> None:
        while True:
            try:
                connected, peer = await loop.sock_accept(sock)
            except ConnectionAbortedError:
                continue
            except OSError:  # most likely out of descriptors: neither stop nor try without pause
                await asyncio.sleep(_PAUSE_S)
                continue
            on_connection(make(connected, named(peer)))

    task = loop.create_task(accept())
    inode = os.stat(where).st_ino if isinstance(where, str) else None

    def close() -> None:
        task.cancel()
        loop.remove_reader(sock.fileno())
        sock.close()
        with contextlib.suppress(OSError):
            # A file that another receiver has put in place stays.
            if isinstance(where, str) and os.stat(where).st_ino == inode:
                os.unlink(where)

    return Listener(url, close)


async def _bind(address: Address, ssl: SSLContext | None) -> tuple[socket.socket, str | tuple[str, int]]:
    found = await _resolve(address, ssl)
    family, where = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(where, str):
            _remove_stale(where, str(address))
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(where)
        if isinstance(where, str):
            # Nobody can connect before listen(), so nobody comes in with other rights than these.
            os.chmod(where, 0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ShippingConnectionError("cannot bind", where=str(address), got=str(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock, where


async def _resolve(
    address: Address, ssl: SSLContext | None
) -> list[tuple[socket.AddressFamily, str | tuple[str, int]]]:
    """Return the numeric addresses or the socket file, if this TLS context guards them well enough."""
    if ssl is not None and address.scheme != "tcp":
        raise ShippingError(
            "TLS is for tcp:// only; socket files are for their owner", where="ssl", got=str(address)
        )
    if ssl is not None and ssl.verify_mode != CERT_REQUIRED:
        raise ShippingSecurityError(
            "the TLS context does not ask the peer for a certificate, so anyone could be there",
            where=str(address),
            expected="verify_mode=ssl.CERT_REQUIRED and the CA of the peers' certificates",
            got=ssl.verify_mode.name,
        )
    if address.scheme != "tcp":
        return [(socket.AF_UNIX, address.socket_path)]
    host = None if address.host == "*" else address.host
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if host is None else 0
        )
    except OSError as error:
        raise ShippingConnectionError("unknown host", where=str(address), got=str(error)) from error
    for *_, where in found if ssl is None else ():
        if not ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback:
            raise ShippingSecurityError(
                "other machines can reach this address, and nothing guards it",
                where=str(address),
                expected="a loopback address, or TLS",
                got=str(where[0]),
                remedy="Give ssl=, an ssl.SSLContext with a certificate and verify_mode=ssl.CERT_REQUIRED",
            )
    return [(family, (str(where[0]), int(where[1]))) for family, _, _, _, where in found]


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


def runtime_folder() -> Path:
    """Return the folder of socket files of `shm://`, which belongs to the user alone.

    `$XDG_RUNTIME_DIR/mmrender`, or else `mmrender-<uid>` in the folder for temporary files.

    Raises:
        ShippingConnectionError: It belongs to somebody else, or others may write to it.
    """
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
