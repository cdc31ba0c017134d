"""Fetch one `http(s)` URL under a `MediaPolicy`: URL in, bytes out.

httpcore speaks HTTP over connections that are opened here. The host is resolved once per hop, the addresses
are checked, and the connection goes to a checked address, so a name that changes between check and
connection (DNS rebinding) has no effect. The `Host` header, TLS server name and certificate check use the
name in the URL.

Rules:

- GET only, no retries, no cookies, no compression. `user:password@` in a URL is sent as basic authentication
  to that host only.
- Proxy settings of the environment are not used: a proxy resolves names out of reach of the address check.
- Each redirect is checked as a new URL. It may not leave `http(s)`, nor go from `https` to `http`.
- Every wait is bounded by its own timeout and by the rest of `total_timeout`.
- Errors print a URL without its user, password, query and fragment, which contain the secrets of signed URLs.
"""

import base64
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpcore2 as httpcore

from mmrender._version import __version__
from mmrender.errors import MediaBlockedError, MediaError, MediaFetchError, MediaLimitError
from mmrender.media.policy import MediaPolicy

Error = TypeVar("Error", bound=MediaError)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_SAFE = "%/:=&~+!$,;'@()*[]"
"""Characters of a URL that are not quoted, besides letters, digits and `_.-`."""


def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of `host`, in the system resolver's order. Tests replace this function."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def fetch(url: str, policy: MediaPolicy) -> bytes:
    """Return the body of a URL, following redirects. Raises as `load_image` does."""
    deadline = time.monotonic() + policy.total_timeout
    for _ in range(policy.max_redirects + 1):
        answer = _Request(url, policy, deadline).send()
        if isinstance(answer, bytes):
            return answer
        target = urljoin(url, answer)
        before, after = urlsplit(url).scheme.lower(), target.partition(":")[0].lower()
        if after not in _PORTS or (before == "https" and after == "http"):
            raise MediaBlockedError(
                f"{printable_url(url)} redirects from {before}: to {after}:",
                expected="a redirect to https:" if before == "https" else "a redirect to http: or https:",
                remedy="Fetch it yourself and pass the bytes.",
            )
        url = target
    raise MediaLimitError(
        f"{printable_url(url)} is one redirect too many",
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


@lru_cache(maxsize=1)
def _tls_context(_process: int) -> ssl.SSLContext:
    # OpenSSL locks a context in use, so a forked child needs a new one.
    return ssl.create_default_context()


class _Request(httpcore.NetworkBackend):
    """One request for one URL, and the network backend of its connection."""

    def __init__(self, url: str, policy: MediaPolicy, deadline: float) -> None:
        self.url = url
        self.policy = policy
        self.deadline = deadline

    def error(self, kind: type[Error], problem: str, **details: str) -> Error:
        """Build an error about the URL."""
        return kind(f"{printable_url(self.url)} {problem}", **details)

    def wait(self, limit: float) -> float:
        """Return the smaller of `limit` and the seconds until the deadline. Raise after it."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self.too_slow("total_timeout")
        return min(limit, left)

    def too_slow(self, field: str) -> MediaLimitError:
        """Build the error for a wait without an answer."""
        policy = self.policy
        return self.error(
            MediaLimitError,
            f"was too slow ({field})",
            expected=f"connect {policy.connect_timeout:g} s, read {policy.read_timeout:g} s, "
            f"total {policy.total_timeout:g} s",
            remedy="Raise MediaPolicy(connect_timeout=..., read_timeout=..., total_timeout=...).",
        )

    def send(self) -> bytes | str:
        """Return the body, or the location of a redirect."""
        target, headers = self._target_and_headers()
        try:
            with (
                httpcore.ConnectionPool(ssl_context=_tls_context(os.getpid()), network_backend=self) as pool,
                pool.stream("GET", target, headers=headers) as response,
            ):
                return self._answer(response)
        except httpcore.TimeoutException:
            late = time.monotonic() >= self.deadline
            raise self.too_slow("total_timeout" if late else "connect_timeout or read_timeout") from None
        except (httpcore.NetworkError, httpcore.RemoteProtocolError) as error:
            problem = f"could not be fetched ({type(error).__name__}: {str(error)[:200]})"
            raise self.error(MediaFetchError, problem) from error
        except MediaError:
            raise
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, ValueError) as error:
            # Their texts may quote the request line, and with it a signature in the query.
            problem = f"could not be fetched ({type(error).__name__})"
            raise self.error(MediaFetchError, problem) from None

    def _target_and_headers(self) -> tuple[httpcore.URL, list[tuple[str, str]]]:
        try:
            parts = urlsplit(self.url)
            host = parts.hostname or ""
            host = host.encode("ascii" if ":" in host else "idna").decode()
            port = _PORTS[parts.scheme] if parts.port is None else parts.port
            path = quote(parts.path or "/", safe=_SAFE)  # a lone surrogate cannot be written
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
            query = quote(parts.query, safe=_SAFE + "?")
        except (ValueError, KeyError):
            host = ""
        if not host:
            raise self.error(MediaFetchError, "is not a URL with a host")
        self.policy.check_scheme(parts.scheme)
        if parts.query:
            path += "?" + query
        headers = [
            ("Host", (f"[{host}]" if ":" in host else host) + (f":{port}" if parts.port else "")),
            ("User-Agent", f"mmrender/{__version__}"),
            ("Accept", "image/*, */*;q=0.5"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        if parts.username is not None:
            headers.append(("Authorization", "Basic " + base64.b64encode(pair).decode()))
        return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=path), headers

    def _answer(self, response: httpcore.Response) -> bytes | str:
        fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in fields:
            return quote(fields[b"location"], safe=_SAFE + "?#")
        if response.status != 200:
            reason = response.extensions.get("reason_phrase", b"").decode("latin-1")
            problem = f"answered with status {response.status} {reason[:80]}".rstrip()
            raise self.error(MediaFetchError, problem)
        encoding = fields.get(b"content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            problem = f"came compressed ({encoding[:40]!r}) although that was not asked for"
            raise self.error(MediaFetchError, problem)
        limit = self.policy.max_bytes
        stated = int(fields.get(b"content-length", 0))
        body = bytearray()
        for chunk in response.iter_stream() if stated <= limit else ():
            body += chunk
            if len(body) > limit:
                break
        if max(stated, len(body)) > limit:
            raise self.error(
                MediaLimitError,
                "is too large",
                expected=f"at most {limit} bytes",
                got=f"{stated} bytes" if stated > limit else "more",
                remedy="Raise MediaPolicy(max_bytes=...).",
            )
        return bytes(body)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first checked address of `host` that answers."""
        addresses = self._checked_addresses(host, port)
        for address in addresses:
            try:
                stream = httpcore.SyncBackend().connect_tcp(
                    address, port, self.wait(self.policy.connect_timeout), socket_options=()
                )
                return _BoundedStream(stream, self)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if address == addresses[-1]:
                    raise
        raise self.error(MediaFetchError, "has a host that resolves to no address")

    def _checked_addresses(self, host: str, port: int) -> list[str]:
        # The system resolver has no timeout, so it runs in a thread that may be abandoned.
        answer: Future[list[str]] = Future()

        def run() -> None:
            try:
                answer.set_result(resolve(host, port))
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread
                answer.set_exception(error)

        threading.Thread(target=run, name="mmrender-resolve", daemon=True).start()
        try:
            addresses = answer.result(self.wait(self.policy.connect_timeout))
        except TimeoutError:
            raise self.too_slow("connect_timeout") from None
        except (OSError, UnicodeError) as error:
            problem = f"has a host that cannot be resolved ({error})"
            raise self.error(MediaFetchError, problem) from error
        refused = {address: reason for address in addresses if (reason := self.policy.refusal_of(address))}
        allowed = [address for address in addresses if address not in refused]
        if refused and not allowed:
            address, reason = next(iter(refused.items()))
            raise self.error(
                MediaBlockedError,
                "leads to an address that the media policy forbids",
                expected="a public address",
                got=f"{address} ({reason})",
                remedy=f'If you trust it, pass MediaPolicy(allow_networks=("{address.partition("%")[0]}",)).',
            )
        return allowed


class _BoundedStream(httpcore.NetworkStream):
    """A connection whose waits all end by the deadline of its request.

    A plain timeout bounds one read, so a server that sends a byte at a time would never exceed it.
    """

    def __init__(self, stream: httpcore.NetworkStream, request: _Request) -> None:
        self._stream = stream
        self._request = request

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._request.wait(self._request.policy.read_timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._request.wait(self._request.policy.read_timeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = self._request.wait(self._request.policy.connect_timeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, limit), self._request)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
