"""`HTTPTransport`: requests over pooled connections, with a deadline, bounded retries and hooks."""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from mmrender.client.hooks import ClientHooks, ObservedCall
from mmrender.client.transport import MAX_ERROR_BYTES, JSONText, Reply, TransportConfig, status_error
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    InputError,
    MissingDependencyError,
)

try:
    import aiohttp
    from aiohttp.abc import AbstractStreamWriter
except ImportError as error:
    raise MissingDependencyError.of_extra("aiohttp", "client", "the HTTP client") from error

_log = logging.getLogger("mmrender.client")
_NEVER_MADE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_UNTRUSTED: Final = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ServerFingerprintMismatch,
)
_BUSY: Final = frozenset({502, 503, 504})
_SLICE: Final = 256 << 10
"""Larger bodies are written in slices, so that other tasks have their turn."""


class Body:
    """A JSON text in pieces that follow each other; large ones are the caller's own bytes, not copied."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size

    def joined(self) -> bytes:
        """Return the text in one piece."""
        return b"".join(self.pieces)


class _SlicedPayload(aiohttp.Payload):
    """Writes a body as slices of its pieces, so that the socket may drain between two."""

    _value: Body
    _autoclose = True

    def __init__(self, body: Body) -> None:
        super().__init__(body, content_type="application/json")
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text, for aiohttp's own diagnostics."""
        return self._value.joined().decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all of it."""
        for piece in self._value.pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _SLICE):
                await writer.write(view[start : start + _SLICE])
                # A socket with a large buffer takes slice after slice at once; let others have their turn.
                await asyncio.sleep(0)


def encode_json(value: Any) -> Body:
    """Encode a JSON value: what msgspec takes, and `JSONText`, which is not copied."""
    texts: list[JSONText] = []
    # Random, so that no text of the request can hold it.
    mark = secrets.token_hex(16)

    def stand_in(other: Any) -> str:
        if not isinstance(other, JSONText):
            raise TypeError(f"Encoding objects of type {type(other).__name__} is unsupported")
        texts.append(other)
        return mark

    try:
        whole = msgspec.json.encode(value, enc_hook=stand_in)
        first, *others = whole.split(f'"{mark}"'.encode()) if texts else (whole,)
        pieces = [first]
        for text, after in zip(texts, others, strict=True):
            pieces += [text.data, after]
        return Body(pieces)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            "the request cannot be written as JSON", where="json", expected="JSON values", got=str(error)
        ) from error


class HTTPTransport:
    """Requests to one server over HTTP/1.1.

    It may be shared by threads, each with its event loop, and pickled where its hooks can be. Connections
    are pooled for each loop, and closed by `aclose` or when the loop ends. Redirects are not followed,
    cookies are not kept, and proxy settings of the environment are not used.

    Args:
        config: The server's base URL, or that and all other settings.
        hooks: Called at the begin, the retries and the end of each call.

    Raises:
        InputError: The base URL cannot be used.
    """

    def __init__(self, config: TransportConfig | str, *, hooks: Sequence[ClientHooks] = ()) -> None:
        self.config = TransportConfig(config) if isinstance(config, str) else config
        self.hooks = tuple(hooks)
        self._sessions = _LoopSessions(self.config)

    def __reduce__(self) -> tuple[object, ...]:
        return _reconstruct, (self.config, self.hooks)

    def __repr__(self) -> str:
        return f"HTTPTransport({self.config.base_url!r})"

    @property
    def base_url(self) -> str:
        """Root of the server, without a trailing slash."""
        return self.config.base_url

    async def aclose(self) -> None:
        """Close the connections of the running event loop; a later call opens new ones."""
        await self._sessions.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        idempotent: bool | None = None,
    ) -> Reply:
        """Send a request and read the whole reply; see `Transport.request`.

        A connection that was never made is tried again. After a status of 502, 503 or 504 the call is
        repeated only if it is idempotent, since a gateway gives these also for requests that it passed on.

        Raises:
            EngineConnectionError: The server was not reached, or the connection broke.
            EngineTimeoutError: The call took longer than `timeout`.
            EngineStatusError: The status of the reply is outside 2xx.
            EngineReplyError: The reply is longer than `max_reply_bytes`.
            InputError: The body cannot be written as JSON, or a header cannot be sent.
        """
        repeatable = method in ("GET", "HEAD") if idempotent is None else idempotent
        seconds = self.config.timeout if timeout is None else timeout
        body = None if json is None else encode_json(json)
        call = ObservedCall(method, self.base_url + path, 0 if body is None else len(body), self.hooks)
        sent = _headers(call, body, headers)
        policy = self.config.retries
        failure: EngineError | None = None
        try:
            async with asyncio.timeout(seconds):
                async for attempt in policy.attempts_on(_retry_rule(repeatable, policy.wait_max)):
                    with attempt:
                        if attempt.num > 1:
                            _log.debug("%s: attempt %d after: %s", call.where, attempt.num, failure)
                            call.attempt = attempt.num
                            call.report("on_retry", error=failure)
                            call.status = None
                        try:
                            reply = await self._once(call, body, sent)
                        except EngineError as error:
                            failure = error
                            raise
        except TimeoutError as error:
            late = EngineTimeoutError(f"the server did not answer within {seconds:g} s", where=call.where)
            call.report("on_error", error=late)
            raise late from error
        except BaseException as error:
            call.report("on_error", error=error)
            raise
        call.report("on_response", reply_bytes=len(reply.body))
        return reply

    async def _once(self, call: ObservedCall, body: Body | None, headers: Mapping[str, str]) -> Reply:
        async with self._opened(call, body, headers) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > self.config.max_reply_bytes:
                    raise _too_long(self.config.max_reply_bytes, call.where)
            return Reply(response.status, response.headers, bytes(content))

    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Send a request, once, and yield the lines of the reply as they come, without line ends.

        The connection is closed when the iterator is. `timeout` of the configuration bounds the wait for each
        piece, not the whole.

        Raises:
            EngineError: As for `request`.
        """
        body = None if json is None else encode_json(json)
        call = ObservedCall(method, self.base_url + path, 0 if body is None else len(body), self.hooks)
        sent = _headers(call, body, headers)
        total = 0
        try:
            async with self._opened(call, body, sent, silence=self.config.timeout) as response:
                pending = bytearray()
                async for chunk in response.content.iter_any():
                    total += len(chunk)
                    pending += chunk
                    if b"\n" in chunk:
                        *lines, rest = bytes(pending).split(b"\n")
                        pending = bytearray(rest)
                        for line in lines:
                            yield line.removesuffix(b"\r")
                    if len(pending) > self.config.max_reply_bytes:
                        raise _too_long(self.config.max_reply_bytes, call.where)
                if pending:
                    yield bytes(pending).removesuffix(b"\r")
        except BaseException as error:
            call.report("on_error", error=error)
            raise
        call.report("on_response", reply_bytes=total)

    @contextlib.asynccontextmanager
    async def _opened(
        self,
        call: ObservedCall,
        body: Body | None,
        headers: Mapping[str, str],
        *,
        silence: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one attempt and yield its reply, of status 2xx; errors of aiohttp become ours."""
        with _engine_errors(call.where):
            session = await self._sessions.get()
            waits = aiohttp.ClientTimeout(sock_connect=self.config.connect_timeout, sock_read=silence)
            # aiohttp writes bytes with the headers in one piece.
            data = None if body is None else body.joined() if len(body) <= _SLICE else _SlicedPayload(body)
            async with session.request(
                call.method, call.target, data=data, headers=headers, timeout=waits, allow_redirects=False
            ) as response:
                call.status = response.status
                if 200 <= response.status < 300:
                    yield response
                    return
                start = b""
                async for chunk in response.content.iter_any():
                    start += chunk
                    if len(start) >= MAX_ERROR_BYTES:
                        break
            raise status_error(call.method, call.url, response.status, start, response.headers)


def _headers(call: ObservedCall, body: Body | None, given: Mapping[str, str] | None) -> dict[str, str]:
    """Report the begin of a call and return its headers; the caller's override those of hooks."""
    content_type = {} if body is None else {"Content-Type": "application/json"}
    return {**call.report("on_request"), **content_type, **(given or {})}


def _too_long(limit: int, where: str) -> EngineReplyError:
    return EngineReplyError(
        "the server's reply is too long",
        where=where,
        expected=f"at most {limit} bytes",
        remedy="Raise max_reply_bytes of the transport",
    )


def _retry_rule(idempotent: bool, wait_max: float) -> Callable[[Exception], bool | float]:
    """Decide whether an error is tried again, or after how many seconds."""

    def decide(error: Exception) -> bool | float:
        if isinstance(error, EngineConnectionError):
            cause = error.__cause__
            return isinstance(cause, _NEVER_MADE) and not isinstance(cause, _UNTRUSTED)
        if not idempotent or not isinstance(error, EngineStatusError) or error.status not in _BUSY:
            return False
        return True if error.retry_after is None else min(error.retry_after, wait_max)

    return decide


@contextmanager
def _engine_errors(where: str) -> Iterator[None]:
    """Turn aiohttp's errors into errors that name the call; the cause stays beneath."""
    try:
        yield
    except EngineError:
        raise
    except _UNTRUSTED as error:
        raise EngineConnectionError("the server cannot be trusted", where=where, got=str(error)) from error
    except _NEVER_MADE as error:
        raise EngineConnectionError("the server was not reached", where=where, got=_text(error)) from error
    except aiohttp.SocketTimeoutError as error:
        raise EngineTimeoutError("the server went silent", where=where, got=_text(error)) from error
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise InputError("the path cannot be requested", where=where, got=str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineConnectionError("the connection broke", where=where, got=_text(error)) from error
    except (ValueError, TypeError) as error:
        raise InputError("the request cannot be sent", where=where, got=str(error)) from error


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _Entry(NamedTuple):
    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    keeper: AsyncGenerator[None, None]


class _LoopSessions:
    """One aiohttp session for each event loop.

    A session is closed by `aclose` in its loop; by `asyncio.run` at the loop's end, since a suspended
    asynchronous generator keeps it; or, where this object is dropped first, by that generator's finalizer.
    """

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    async def get(self) -> aiohttp.ClientSession:
        """Return the session of the running loop."""
        loop = asyncio.get_running_loop()
        entry = self._entries.get(id(loop))
        # A loop that ended may have left its address to another one.
        if entry is not None and entry.loop is loop and not entry.session.closed:
            return entry.session
        config = self._config
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=config.max_connections, limit_per_host=0, keepalive_timeout=config.keepalive
            ),
            headers={"Accept": "application/json", "Accept-Encoding": "identity", **config.all_headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 20,
        )
        keeper = _close_at_end(session)
        # Runs to its first `yield` without giving way, so no second task can open another session meanwhile.
        await anext(keeper)
        with self._lock:
            ended = [key for key, entry in self._entries.items() if entry.loop.is_closed()]
            dropped = [self._entries.pop(key) for key in ended]
            self._entries[id(loop)] = _Entry(loop, session, keeper)
        for entry in dropped:
            # Its loop ended without ending its generators, so nothing can be awaited there.
            with contextlib.suppress(StopIteration):
                entry.session.close().send(None)
        return session

    async def aclose(self) -> None:
        """Close the session of the running loop; a later `get` opens another."""
        with self._lock:
            entry = self._entries.pop(id(asyncio.get_running_loop()), None)
        if entry is not None:
            await entry.keeper.aclose()


async def _close_at_end(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await session.close()


def _reconstruct(config: TransportConfig, hooks: tuple[ClientHooks, ...]) -> HTTPTransport:
    return HTTPTransport(config, hooks=hooks)
