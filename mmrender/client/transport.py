"""`Transport`: requests to one server, its configuration, and the rule of repetition.

Needs no HTTP library.
"""

import contextlib
import http
import os
import random
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
    check_number,
)

MAX_ERROR_BYTES: Final = 8192
"""Bytes of an error reply that are read and kept."""

LONG_TEXT: Final = 2 << 20
"""Bytes above which a JSON text is kept in a file."""

GATEWAY_STATUSES: Final = frozenset({502, 503, 504})
"""Errors of a gateway, which may have passed the request on."""
_TRANSIENT_STATUSES: Final = GATEWAY_STATUSES | {408, 425, 429, 500}


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful HTTP answer with its whole body.

    Attributes:
        status: HTTP status.
        headers: HTTP headers.
        body: The body.
        is_first: Whether its connection was made for it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_first: bool = False


class Connections(NamedTuple):
    """The connections that a transport has made on one event loop.

    While they are the same and one is open, the process that was asked before answers, unless a proxy or a
    balancer is in between.

    Attributes:
        pool: Number of the pool of connections, unique in this process. 0 if there is none.
        made: Connections that the pool has made.
        is_open: Whether one is open.
    """

    pool: int = 0
    made: int = 0
    is_open: bool = False


class JSONText:
    """A member of a request that is JSON text, such as base64 in quotes. Neither checked nor copied.

    Long text is kept in an unnamed file in memory, if the system has them. Sockets send it without a copy.

    Attributes:
        size: Its bytes.
        file: The file that has it, or None.
    """

    __slots__ = ("__weakref__", "_data", "file", "size")  # not a dataclass, which msgspec would write

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.file: int | None = None
        if len(data) < LONG_TEXT or not hasattr(os, "memfd_create"):
            return
        with contextlib.suppress(OSError):  # no more files, or no more memory for them
            file = os.memfd_create("mmrender")
            weakref.finalize(self, os.close, file).atexit = False
            if os.write(file, data) == len(data):
                self.file, self._data = file, b""

    @property
    def data(self) -> bytes:
        """The text."""
        return self._data if self.file is None else os.pread(self.file, self.size, 0)


@runtime_checkable
class Transport(Protocol):
    """Sends requests to one server.

    One that has `connections` too, a `Connections`, is asked less often which process answers. Errors are
    `EngineConnectionError`, `EngineTimeoutError`, and `EngineStatusError` for every status outside
    2xx. Cancelling the awaiting task closes the request's connection.
    """

    @property
    def base_url(self) -> str:
        """Root of the server without a trailing slash, such as `http://127.0.0.1:8000`."""
        ...

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        idempotent: bool | None = None,
        max_reply_bytes: int | None = None,
    ) -> Reply:
        """Send a request and read the whole answer.

        Args:
            method: HTTP method.
            path: Path below `base_url`, query included.
            json: Body, encoded by msgspec. `JSONText` members are sent as they are.
            headers: Besides the transport's own.
            timeout: Seconds for the whole call. None takes the transport's setting.
            idempotent: Whether the call may be repeated after it may have reached the server. By default GET
                may, and any call whose kept connection turns out to be closed. A connection that was never
                made is always tried again.
            max_reply_bytes: A longer answer is an `EngineReplyError`, and so is an answer beyond the
                transport's bound.
        """
        ...

    def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Send a request and yield the lines of its answer as they come, without line ends."""
        ...

    async def aclose(self) -> None:
        """Close connections that belong to the running event loop."""
        ...


class NullTransport:
    """A transport to nowhere, for backends without a server of their own."""

    def __init__(self, base_url: str = "local:") -> None:
        self.base_url = base_url

    def stream(self, method: str, path: str, **options: Any) -> Any:
        """Raise `EngineUnsupportedError`, always."""
        raise EngineUnsupportedError("a model in this process has no server", where=f"{method} {path}")

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """Raise `EngineUnsupportedError`, always."""
        return self.stream(method, path)

    async def aclose(self) -> None:
        """Do nothing."""


class NamedServer(Protocol):
    """An object with a server's base URL: a `Transport`, a `TransportConfig`, an `openai.AsyncOpenAI`."""

    @property
    def base_url(self) -> object:
        """Root of the server, as text or as an object that prints as such."""
        ...


Server: TypeAlias = str | NamedServer
"""A server: its base URL, or an object that has it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number and delay of repeated attempts.

    Attributes:
        attempts: Attempts in all. 1 turns retries off.
        wait_initial: Seconds before the second attempt. Doubled for each further one.
        wait_jitter: Maximum of the random seconds that are added to each wait.
        wait_max: The longest wait in seconds, also for a wait that the server names by `Retry-After`.

    Raises:
        InputError: A value is out of range.
    """

    attempts: int = 4
    wait_initial: float = 0.1
    wait_jitter: float = 0.5
    wait_max: float = 5.0

    def __post_init__(self) -> None:
        check_number("attempts", self.attempts, above=0)
        for name in ("wait_initial", "wait_jitter", "wait_max"):
            check_number(name, getattr(self, name), minimum=0)

    def wait_before(self, attempt: int) -> float:
        """Return the seconds to wait before an attempt, of which the first is 1."""
        jitter = self.wait_jitter * random.random()  # noqa: S311 - no secret
        doublings = min(attempt - 2, 64)  # a larger power would overflow
        return min(self.wait_max, self.wait_initial * 2.0**doublings + jitter)


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings of the connection to one server. Picklable.

    Attributes:
        base_url: Root of the server. `http` or `https`, perhaps with a path.
        api_key: Sent as `Authorization: Bearer ...`. Never printed.
        headers: Sent with every request.
        timeout: Seconds for a whole call, its retries included. None waits for ever.
        connect_timeout: Seconds for making one connection.
        retries: How often and when failed attempts are repeated. The transport decides which ones.
        max_connections: Open connections of one event loop. 0 turns the bound off. Calls beyond it wait.
        keepalive: Seconds that an idle connection is kept. Less than the server's. Uvicorn, under vLLM and
            SGLang, closes one after 5, and a request that meets the closing is lost.
        max_reply_bytes: A longer reply, decompressed, is an error and is not read to its end.

    Raises:
        InputError: A value is out of range, or the URL or a header cannot be used.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float | None = 3600.0
    connect_timeout: float = 10.0
    retries: RetryPolicy = RetryPolicy()
    max_connections: int = 1024
    keepalive: float = 4.0
    max_reply_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(
                "the address of the server is not usable",
                where="base_url",
                expected="http://HOST[:PORT][/PATH] or https://...",
                got=repr(self.base_url),
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))
        object.__setattr__(self, "headers", dict(self.headers))
        for name, value in self.all_headers.items():
            texts: tuple[object, ...] = (name, value)
            if not all(isinstance(text, str) and not set(text) & {"\r", "\n", "\0"} for text in texts):
                raise InputError(
                    "a header is not usable",
                    where=f"headers[{name!r}]",
                    expected="text without line breaks",
                    got=type(value).__name__,
                )
        if self.timeout is not None:
            check_number("timeout", self.timeout, above=0)
        for name in ("connect_timeout", "max_reply_bytes"):
            check_number(name, getattr(self, name), above=0)
        for name in ("max_connections", "keepalive"):
            check_number(name, getattr(self, name), minimum=0)

    @property
    def all_headers(self) -> dict[str, str]:
        """Headers of every request, the key among them."""
        bearer = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {**bearer, **self.headers}

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable form. Configurations with equal keys may share connections."""
        values = (getattr(self, name) for name in self.__slots__ if name != "headers")
        return (*values, tuple(sorted(self.headers.items())))


def may_repeat_status(error: EngineStatusError, method: str, idempotent: bool | None) -> bool:
    """Whether a call may be repeated after a status: an idempotent one (GET by default), at a gateway's."""
    may_repeat = method in ("GET", "HEAD") if idempotent is None else idempotent
    return may_repeat and error.status in GATEWAY_STATUSES


def is_lost(error: BaseException) -> bool:
    """Whether a server may have ended, or another taken its place, after an error of one of its requests.

    Facts about it are then dropped, and its health is asked for.
    """
    if isinstance(error, EngineStatusError):
        return error.status in GATEWAY_STATUSES
    return isinstance(error, EngineConnectionError | EngineTimeoutError)


def is_transient(error: BaseException) -> bool:
    """Whether a completion may succeed at another server, or later, if the request is sent again."""
    if isinstance(error, EngineStatusError):
        return error.status in _TRANSIENT_STATUSES
    return isinstance(
        error, EngineConnectionError | EngineTimeoutError | EngineReplyError | EngineUnavailableError
    )


def status_error(
    method: str, url: str, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> EngineStatusError:
    """Build the error of a reply whose status is outside 2xx. Only the start of `body` is kept."""
    text = body[:MAX_ERROR_BYTES].decode("utf-8", "replace")
    excerpt = " ".join(text.split())[:300]
    phrase = next((known.phrase for known in http.HTTPStatus if known == status), "")
    # `Retry-After` in its other form, a date, is rare and depends on two clocks.
    wait = (headers or {}).get("Retry-After", "")
    return EngineStatusError(
        f"the server answered {status}{phrase and f' {phrase}'}{excerpt and f': {excerpt}'}",
        status=status,
        body=text,
        retry_after=float(wait) if wait.isascii() and wait.isdigit() else None,
        where=f"{method} {url}",
    )
