"""Fetch one `http(s)` URL under a `MediaPolicy`: URL in, bytes out.

The host is resolved once per hop, the resolved addresses are checked, and the connection goes to a checked
address itself, so a name that changes between check and connection (DNS rebinding) gains nothing. The `Host`
header, TLS server name and certificate check still use the name in the URL.

Rules:

- GET only, no retries, no cookies, no compression; `user:password@` in a URL is sent as basic
  authentication to that host only.
- Proxy settings of the environment are not used: a proxy resolves names out of reach of the address check.
- A redirect is checked as a URL of its own. It may not leave `http(s)`, nor go from `https` to `http`.
- Every wait is bounded by a timeout of its own and by what is left of `total_timeout`.
- Errors print a URL without its user, password, query and fragment, since signed URLs keep secrets there.
"""

import base64
import contextlib
import http.client
import io
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from mmrender._version import __version__
from mmrender.errors import MediaBlockedError, MediaError, MediaFetchError, MediaLimitError
from mmrender.media.policy import MediaPolicy

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_CHUNK = 64 * 1024


def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of `host`, in the system resolver's order. Tests replace this function."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def fetch(url: str, policy: MediaPolicy, *, where: str | None = None) -> bytes:
    """Return the body behind `url`, following redirects.

    Raises:
        MediaBlockedError: the scheme, an address or a redirect is not allowed.
        MediaLimitError: more than `max_bytes`, more than `max_redirects`, or too slow.
        MediaFetchError: no such host, no connection, a status other than 200, a broken response.
    """
    hop = _Hop(policy, where, deadline=time.monotonic() + policy.total_timeout)
    for _ in range(policy.max_redirects + 1):
        body, location = hop.get(url)
        if body is not None:
            return body
        url = _redirected(url, location, where)
    raise MediaLimitError(
        f"{printable_url(url)} is one redirect too many",
        where=where,
        expected=f"at most {policy.max_redirects} redirects",
        remedy="Raise MediaPolicy(max_redirects=...), or pass the final URL.",
    )


def printable_url(url: str) -> str:
    """Return `url` without user, password, query and fragment, at most 200 characters long."""
    try:
        parts = urlsplit(url)
        netloc = parts.netloc.rpartition("@")[2]
    except ValueError:
        return f"{url.partition(':')[0]}: URL"
    text = f"{parts.scheme}://{netloc}{parts.path}" + ("?..." if parts.query else "")
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text)} characters)"


def _redirected(url: str, location: str, where: str | None) -> str:
    target = urljoin(url, location)
    before, after = urlsplit(url).scheme.lower(), target.partition(":")[0].lower()
    if after not in _PORTS or (before == "https" and after == "http"):
        raise MediaBlockedError(
            f"{printable_url(url)} redirects from {before}: to {after}:",
            where=where,
            expected="a redirect to https:" if before == "https" else "a redirect to http: or https:",
            remedy="Fetch it yourself and pass the bytes.",
        )
    return target


class _Hop:
    """One request after another for the same source, under one deadline."""

    def __init__(self, policy: MediaPolicy, where: str | None, *, deadline: float) -> None:
        self.policy = policy
        self.where = where
        self.deadline = deadline
        self.url = ""

    def get(self, url: str) -> tuple[bytes | None, str]:
        """Return `(body, "")`, or `(None, location)` for a redirect."""
        self.url = url
        parts, host, port = self._split(url)
        addresses = self._checked_addresses(host, port)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._named_errors())
            sock = self._connect(addresses, host, port, secure=parts.scheme == "https")
            stack.callback(sock.release)
            connection = http.client.HTTPConnection(host, port)
            # The connection only speaks over the checked socket: it may not open one of its own.
            connection.auto_open = 0
            connection.default_port = _PORTS[parts.scheme]
            connection.sock = sock
            connection.request("GET", _target(parts), headers=_headers(parts))
            return self._answer(connection.getresponse())

    def wait(self, limit: float) -> float:
        """Return `limit` or what is left of the deadline, whichever is less; raise when nothing is left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._too_slow("total_timeout")
        return min(limit, left)

    def _split(self, url: str) -> tuple[SplitResult, str, int]:
        try:
            parts = urlsplit(url)
            host = (
                (parts.hostname or "").encode("ascii" if ":" in (parts.hostname or "") else "idna").decode()
            )
            port = _PORTS[parts.scheme] if parts.port is None else parts.port
        except (ValueError, KeyError):
            host = ""
        if not host:
            raise self._failed("is not a URL with a host")
        self.policy.check_scheme(parts.scheme, self.where)
        return parts, host, port

    def _checked_addresses(self, host: str, port: int) -> list[str]:
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise self._failed(f"has a host that cannot be resolved ({error})") from error
        refused = {address: reason for address in addresses if (reason := self.policy.refusal_of(address))}
        allowed = [address for address in addresses if address not in refused]
        if allowed:
            return allowed
        if not refused:
            raise self._failed("has a host that resolves to no address")
        address, reason = next(iter(refused.items()))
        raise MediaBlockedError(
            f"{printable_url(self.url)} leads to an address that the media policy forbids",
            where=self.where,
            expected="a public address",
            got=f"{address} ({reason})",
            remedy=f'If you trust it, pass MediaPolicy(allow_networks=("{address.partition("%")[0]}",)).',
        )

    def _resolve(self, host: str, port: int) -> list[str]:
        # The system resolver takes no timeout, so it runs in a thread of its own that may be left behind.
        answer: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(resolve(host, port))
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread
                answer.put(error)

        limit = self.wait(self.policy.connect_timeout)
        threading.Thread(target=run, name="mmrender-resolve", daemon=True).start()
        try:
            found = answer.get(timeout=limit)
        except queue.Empty:
            raise self._too_slow("connect_timeout") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _connect(self, addresses: list[str], host: str, port: int, *, secure: bool) -> "DeadlineSocket":
        for position, address in enumerate(addresses):
            try:
                sock = socket.create_connection((address, port), self.wait(self.policy.connect_timeout))
                break
            except OSError:
                if position == len(addresses) - 1:
                    raise
        try:
            if secure:
                sock.settimeout(self.wait(self.policy.connect_timeout))
                sock = _tls_context().wrap_socket(sock, server_hostname=host)
            sock.settimeout(self.wait(self.policy.read_timeout))
        except BaseException:
            sock.close()
            raise
        return DeadlineSocket(sock, lambda: self.wait(self.policy.read_timeout))

    def _answer(self, response: http.client.HTTPResponse) -> tuple[bytes | None, str]:
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location:
            return None, quote(location, safe="%/:=&?~#+!$,;'@()*[]")
        if response.status != 200:
            raise self._failed(f"answered with status {response.status} {response.reason[:80]}".rstrip())
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise self._failed(f"came compressed ({encoding[:40]!r}) although that was not asked for")
        length = response.length
        if length is not None and length > self.policy.max_bytes:
            raise self._too_large(f"{length} bytes")
        body = self._body(response)
        if length is not None and len(body) < length:
            raise self._failed(f"broke off after {len(body)} of {length} bytes")
        return body, ""

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        body = io.BytesIO()
        while chunk := response.read1(_CHUNK):
            if body.tell() + len(chunk) > self.policy.max_bytes:
                raise self._too_large("more")
            body.write(chunk)
        return body.getvalue()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            late = time.monotonic() >= self.deadline
            raise self._too_slow("total_timeout" if late else "connect_timeout or read_timeout") from None
        except MediaError:
            raise
        except OSError as error:
            raise self._failed(
                f"could not be fetched ({type(error).__name__}: {str(error)[:200]})"
            ) from error
        except (http.client.HTTPException, ValueError) as error:
            # Their texts may quote the request line, and with it a signature in the query.
            raise self._failed(f"could not be fetched ({type(error).__name__})") from None

    def _failed(self, problem: str) -> MediaFetchError:
        return MediaFetchError(f"{printable_url(self.url)} {problem}", where=self.where)

    def _too_slow(self, field: str) -> MediaLimitError:
        policy = self.policy
        limits = (
            f"connect {policy.connect_timeout:g} s, read {policy.read_timeout:g} s, "
            f"total {policy.total_timeout:g} s"
        )
        return MediaLimitError(
            f"{printable_url(self.url)} was too slow ({field})",
            where=self.where,
            expected=limits,
            remedy="Raise MediaPolicy(connect_timeout=..., read_timeout=..., total_timeout=...).",
        )

    def _too_large(self, got: str) -> MediaLimitError:
        return MediaLimitError(
            f"{printable_url(self.url)} is too large",
            where=self.where,
            expected=f"at most {self.policy.max_bytes} bytes",
            got=got,
            remedy="Raise MediaPolicy(max_bytes=...).",
        )


def _target(parts: SplitResult) -> str:
    path = quote(parts.path or "/", safe="%/:=&~+!$,;'@()*[]")
    query = quote(parts.query, safe="%/:=&?~+!$,;'@()*[]")
    return f"{path}?{query}" if query else path


def _headers(parts: SplitResult) -> dict[str, str]:
    headers = {
        "User-Agent": f"mmrender/{__version__}",
        "Accept": "image/*, */*;q=0.5",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    return headers


@lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


_BUFFER = 64 * 1024


class DeadlineSocket:
    """A socket whose every read waits no longer than `timeout()` says at that moment.

    A plain socket timeout bounds one read, so a server that sends a byte now and then would never be late.
    """

    def __init__(self, sock: socket.socket, timeout: Callable[[], float]) -> None:
        self._sock = sock
        self._timeout = timeout

    def sendall(self, data: Any) -> None:
        """Send all of a bytes-like object."""
        self._sock.settimeout(self._timeout())
        self._sock.sendall(data)

    def makefile(self, mode: str, *_: object, **__: object) -> io.BufferedReader:
        """Return a buffered reader; `http.client` asks for no other mode."""
        return io.BufferedReader(_DeadlineReader(self._sock, self._timeout), _BUFFER)

    def close(self) -> None:
        """Do nothing: the connection closes its socket before the body is read."""

    def release(self) -> None:
        """Close the socket in truth."""
        self._sock.close()


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, timeout: Callable[[], float]) -> None:
        self._sock = sock
        self._timeout = timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._timeout())
        return self._sock.recv_into(buffer)
