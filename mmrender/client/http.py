"""`HTTPTransport`: requests over pooled connections, with a deadline, bounded retries and hooks."""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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


class _SlicedPayload(aiohttp.Payload):
    """Writes a body as slices of its pieces, so that the socket may drain between two."""

    _value: list[bytes]
    _autoclose = True

    def __init__(self, pieces: list[bytes], size: int) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text, for aiohttp's own diagnostics."""
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all of it."""
        for piece in self._value:
            view = memoryview(piece)
            for start in range(0, len(view), _SLICE):
                await writer.write(view[start : start + _SLICE])
                # A socket with a large buffer takes slice after slice at once; let others have their turn.
                await asyncio.sleep(0)


def encode_json(value: Any) -> list[bytes]:
    """Encode a JSON value, of what msgspec takes and `JSONText`, as pieces that follow each other.

    A `JSONText` is a piece of its own, not copied.
    """
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
        return pieces
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
        return partial(HTTPTransport, self.config, hooks=self.hooks), ()

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
        call = self._begun(method, path, json, headers)
        policy = self.config.retries

        def is_retried(error: Exception) -> bool | float:
            """Whether to try again, or after how many seconds."""
            if isinstance(error, EngineConnectionError):
                cause = error.__cause__
                return isinstance(cause, _NEVER_MADE) and not isinstance(cause, _UNTRUSTED)
            if not repeatable or not isinstance(error, EngineStatusError) or error.status not in _BUSY:
                return False
            return True if error.retry_after is None else min(error.retry_after, policy.wait_max)

        failure: EngineError | None = None
        try:
            async with asyncio.timeout(seconds):
                async for attempt in policy.attempts_on(is_retried):
                    with attempt:
                        if attempt.num > 1:
                            _log.debug("%s: attempt %d after: %s", call.where, attempt.num, failure)
                            call.attempt = attempt.num
                            call.report("on_retry", error=failure)
                            call.status = None
                        try:
                            reply = await self._once(call)
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

    def _begun(self, method: str, path: str, json: Any, headers: Mapping[str, str] | None) -> ObservedCall:
        """Encode and report a call; the caller's headers override those of hooks."""
        body = [] if json is None else encode_json(json)
        call = ObservedCall(method, self.config.base_url + path, body, self.hooks)
        content_type = {"Content-Type": "application/json"} if body else {}
        call.headers = {**call.report("on_request"), **content_type, **(headers or {})}
        return call

    async def _once(self, call: ObservedCall) -> Reply:
        async with self._opened(call) as response:
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
        call = self._begun(method, path, json, headers)
        total = 0
        try:
            async with self._opened(call, silence=self.config.timeout) as response:
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
        self, call: ObservedCall, *, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one attempt and yield its reply, of status 2xx; errors of aiohttp become ours."""
        with _engine_errors(call.where):
            session = await self._sessions.get()
            waits = aiohttp.ClientTimeout(sock_connect=self.config.connect_timeout, sock_read=silence)
            # aiohttp writes bytes with the headers in one piece.
            large = call.size > _SLICE
            data = _SlicedPayload(call.body, call.size) if large else b"".join(call.body) or None
            async with session.request(
                call.method,
                call.target,
                data=data,
                headers=call.headers,
                timeout=waits,
                allow_redirects=False,
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


def _too_long(limit: int, where: str) -> EngineReplyError:
    return EngineReplyError(
        "the server's reply is too long",
        where=where,
        expected=f"at most {limit} bytes",
        remedy="Raise max_reply_bytes of the transport",
    )


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
