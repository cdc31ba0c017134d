"""`HTTPTransport`: requests over pooled connections, with a deadline, bounded retries and hooks."""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec

from mmcodecs.forks import watch_forks
from mmrender.client.hooks import ClientHooks, ObservedCall
from mmrender.client.transport import (
    GATEWAY_STATUSES,
    MAX_ERROR_BYTES,
    JSONText,
    Reply,
    TransportConfig,
    status_error,
)
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
except ImportError as error:
    raise MissingDependencyError.of_extra(error.name or "aiohttp", "client", "the HTTP client") from error

_log = logging.getLogger("mmrender.client")
_NEVER_MADE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BROKEN: Final = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionError)
_UNTRUSTED: Final = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ServerFingerprintMismatch,
)
_SLICE: Final = 256 << 10
"""Larger bodies are written in slices, so that other tasks have their turn."""
_PIECE: Final = 64 << 10
"""What is copied of a file where the socket is full."""


class _Body(aiohttp.Payload):
    """A large body; what lies in a file goes to the socket without a copy."""

    def __init__(self, pieces: Sequence[bytes | JSONText]) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return joined(self._value).decode(encoding, errors)

    async def write(self, writer: Any) -> None:
        for piece in self._value:
            try:
                if isinstance(piece, JSONText) and await _send_file(writer, piece):
                    continue
            except ConnectionError:
                return  # the server closed it; its reply, if it sent one, is still to be read
            view = memoryview(joined([piece]))
            for start in range(0, max(1, len(view)), _SLICE):  # once at least: the headers go with it
                await writer.write(view[start : start + _SLICE])
                await asyncio.sleep(0)


async def _send_file(writer: Any, text: JSONText) -> bool:
    """Send a text from its file; False, and nothing is sent, where it has none or the socket has TLS.

    `loop.sendfile` would stop reading meanwhile, and so miss the reply of a server that refuses a long body.
    """
    transport = writer.transport
    if text.file is None or transport is None or transport.get_extra_info("sslcontext") is not None:
        return False
    sock, done = transport.get_extra_info("socket"), 0
    transport.set_write_buffer_limits(0)  # so that `drain` waits until what was written has gone out
    try:
        while done < len(text):
            await writer.drain()
            try:
                done += os.sendfile(sock.fileno(), text.file, done, len(text) - done)
                await asyncio.sleep(0)
            except BlockingIOError:  # the transport waits for the socket where it has something to write
                piece = os.pread(text.file, min(_PIECE, len(text) - done), done)
                await writer.write(piece)
                done += len(piece)
    finally:
        transport.set_write_buffer_limits()
    return True


def joined(pieces: Sequence[bytes | JSONText]) -> bytes:
    """Return the pieces of a body as one."""
    return b"".join([piece.data if isinstance(piece, JSONText) else piece for piece in pieces])


def encode_json(value: Any) -> list[bytes | JSONText]:
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
        pieces: list[bytes | JSONText] = [first]
        for text, after in zip(texts, others, strict=True):
            pieces += [text, after]
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
        hooks: Called at the beginning, the retries and the end of each call.

    Raises:
        InputError: The base URL cannot be used.
    """

    def __init__(self, config: TransportConfig | str, *, hooks: Sequence[ClientHooks] = ()) -> None:
        self.config = TransportConfig(config) if isinstance(config, str) else config
        self.hooks = tuple(hooks)
        self.base_url = self.config.base_url
        self._sessions: dict[int, _LoopSession] = {}
        self.renew_after_fork()
        watch_forks(self)
        # Sessions outlive a dropped transport until their loops have closed them, as that takes an `await`.
        weakref.finalize(self, _close_sessions, self._sessions).atexit = False

    def renew_after_fork(self) -> None:
        """Replace the lock; connections stay with the parent's event loops."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return partial(HTTPTransport, self.config, hooks=self.hooks), ()

    def __repr__(self) -> str:
        return f"HTTPTransport({self.base_url!r})"

    async def aclose(self) -> None:
        """Close the connections of the running event loop; a later call opens new ones."""
        with self._lock:
            entry = self._sessions.pop(id(asyncio.get_running_loop()), None)
        if entry is not None:
            await entry.keeper.aclose()

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
        """Send a request and read the whole reply; see `Transport.request`.

        See `_may_repeat` for the attempts that are repeated.

        Raises:
            EngineConnectionError: The server was not reached, or the connection broke.
            EngineTimeoutError: The call took longer than `timeout`.
            EngineStatusError: The status of the reply is outside 2xx.
            EngineReplyError: The reply is longer than `max_reply_bytes`.
            InputError: The body cannot be written as JSON, or a header cannot be sent.
        """
        seconds = self.config.timeout if timeout is None else timeout
        call = self._begun(method, path, json, headers)
        try:
            async with asyncio.timeout(seconds):
                reply = await self._repeated(call, max_reply_bytes, idempotent)
        except TimeoutError as error:
            late = EngineTimeoutError(f"the server did not answer within {seconds:g} s", where=call.where)
            call.report("on_error", error=late)
            raise late from error
        except BaseException as error:
            call.report("on_error", error=error)
            raise
        call.report("on_response", reply_bytes=len(reply.body))
        return reply

    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Send a request and yield the lines of the reply as they come, without line ends.

        The connection is closed when the iterator is. `timeout` of the configuration bounds the wait for each
        piece, not the whole. A request that was not taken is sent again, as by `request`; an answer that has
        begun is not asked for again.

        Raises:
            EngineError: As for `request`.
        """
        call = self._begun(method, path, json, headers)
        total = 0
        pending = bytearray()
        try:
            while call.status is None:
                try:
                    async with self._opened(call, silence=self.config.timeout) as response:
                        async for chunk in response.content.iter_any():
                            total += len(chunk)
                            pending += chunk
                            if b"\n" in chunk:
                                *lines, pending = pending.split(b"\n")
                                for line in lines:
                                    yield bytes(line.removesuffix(b"\r"))
                            self._check_size(len(pending), call)
                except EngineConnectionError as error:
                    await self._before_next(call, error, None)
            if pending:
                yield bytes(pending.removesuffix(b"\r"))
        except BaseException as error:
            call.report("on_error", error=error)
            raise
        call.report("on_response", reply_bytes=total)

    def _begun(self, method: str, path: str, json: Any, headers: Mapping[str, str] | None) -> ObservedCall:
        """Encode and report a call; the caller's headers override those of hooks."""
        body = [] if json is None else encode_json(json)
        call = ObservedCall(method, self.base_url + path, body, self.hooks)
        content_type = {"Content-Type": "application/json"} if body else {}
        call.headers = {**call.report("on_request"), **content_type, **(headers or {})}
        return call

    async def _repeated(self, call: ObservedCall, most: int | None, idempotent: bool | None) -> Reply:
        """Make attempts until one succeeds, fails in a way that is not retried, or is the last."""
        while True:
            try:
                return await self._once(call, most)
            except (EngineConnectionError, EngineStatusError) as error:
                await self._before_next(call, error, idempotent)

    async def _before_next(
        self, call: ObservedCall, error: EngineConnectionError | EngineStatusError, idempotent: bool | None
    ) -> None:
        """Wait before the next attempt of a call; raise the error of the last one if none is to be made."""
        policy = self.config.retries
        if call.attempt >= policy.attempts or not _may_repeat(call, error, idempotent):
            raise error
        call.attempt += 1
        wait = policy.wait_before(call.attempt)
        if isinstance(error, EngineStatusError) and error.retry_after is not None:
            wait = min(error.retry_after, policy.wait_max)
        _log.debug("%s: attempt %d after: %s", call.where, call.attempt, error)
        call.report("on_retry", error=error)
        call.status = None
        await asyncio.sleep(wait)

    async def _once(self, call: ObservedCall, most: int | None) -> Reply:
        async with self._opened(call) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                self._check_size(len(content), call, most)
            return Reply(response.status, response.headers, bytes(content))

    def _check_size(self, size: int, call: ObservedCall, most: int | None = None) -> None:
        own = self.config.max_reply_bytes
        if size > (bound := own if most is None else min(most, own)):
            raise EngineReplyError(
                "the server's reply is too long",
                where=call.where,
                expected=f"at most {bound} bytes",
                remedy="Raise max_reply_bytes of the transport" if bound == own else None,
            )

    @contextlib.asynccontextmanager
    async def _opened(
        self, call: ObservedCall, *, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one attempt and yield its reply, of status 2xx; errors of aiohttp become ours."""
        short = call.size <= _SLICE
        # aiohttp writes bytes with the headers in one piece.
        data = joined(call.body) if short else _Body(call.body)
        waits = aiohttp.ClientTimeout(sock_connect=self.config.connect_timeout, sock_read=silence)
        start = b""
        call.is_kept = False
        try:
            session = await self._session()
            async with session.request(
                call.method,
                call.target,
                data=data or None,
                headers=call.headers,
                timeout=waits,
                allow_redirects=False,
                trace_request_ctx=call,
            ) as response:
                call.status = response.status
                if 200 <= response.status < 300:
                    yield response
                    return
                async for chunk in response.content.iter_any():
                    start += chunk
                    if len(start) >= MAX_ERROR_BYTES:
                        break
        except EngineError:
            raise
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise _engine_error(error, call.where) from error
        raise status_error(call.method, call.url, response.status, start, response.headers)

    async def _session(self) -> aiohttp.ClientSession:
        """Return the session of the running event loop."""
        loop = asyncio.get_running_loop()
        entry = self._sessions.get(id(loop))
        # A loop that ended may have left its address to another one.
        if entry is not None and entry.loop is loop and not entry.session.closed:
            return entry.session
        keeper = _open_session(self.config)
        # Runs to its first `yield` without giving way, so no second task can open another session meanwhile.
        session = await anext(keeper)
        with self._lock:
            ended = [key for key, entry in self._sessions.items() if entry.loop.is_closed()]
            dropped = [self._sessions.pop(key) for key in ended]
            self._sessions[id(loop)] = _LoopSession(loop, session, keeper)
        for entry in dropped:
            # Its loop ended without ending its generators, so nothing can be awaited there.
            with contextlib.suppress(StopIteration):
                entry.session.close().send(None)
        return session


class _LoopSession(NamedTuple):
    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    keeper: AsyncGenerator[aiohttp.ClientSession, None]


async def _open_session(config: TransportConfig) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """Yield a session, and close it when the generator ends: by hand, or by `asyncio.run` at its end."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_kept)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=config.max_connections, limit_per_host=0, keepalive_timeout=config.keepalive
        ),
        headers={"Accept": "application/json", "Accept-Encoding": "identity", **config.all_headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=1 << 20,
        trace_configs=[trace],
    ) as session:
        yield session


def _close_sessions(sessions: dict[int, _LoopSession]) -> None:
    for entry in sessions.values():
        if not entry.loop.is_closed():
            entry.loop.call_soon_threadsafe(entry.loop.create_task, entry.keeper.aclose())


def _may_repeat(
    call: ObservedCall, error: EngineConnectionError | EngineStatusError, idempotent: bool | None
) -> bool:
    """Whether a failed attempt may be made again: the one decision for all calls and streams.

    - A connection that was never made: always.
    - A kept connection that breaks before any answer: unless the call says that it is not idempotent. Such
      a connection was closed, by the server or a proxy, before the request came; a sampled turn that was
      begun all the same ends with its connection.
    - A status of 502, 503 or 504: only an idempotent call, since a gateway gives these also for requests
      that it passed on.
    """
    if isinstance(error, EngineStatusError):
        known = call.method in ("GET", "HEAD") if idempotent is None else idempotent
        return known and error.status in GATEWAY_STATUSES
    cause = error.__cause__
    if isinstance(cause, _UNTRUSTED):
        return False
    was_closed = call.is_kept and call.status is None and isinstance(cause, _BROKEN)
    return isinstance(cause, _NEVER_MADE) or (was_closed and idempotent is not False)


async def _note_kept(_: object, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.is_kept = True


def _engine_error(error: Exception, where: str) -> EngineError | InputError:
    """Return the error that names the call, for one of aiohttp's."""
    text = str(error) or type(error).__name__
    if isinstance(error, _UNTRUSTED):
        return EngineConnectionError("the server cannot be trusted", where=where, got=text)
    if isinstance(error, _NEVER_MADE):
        return EngineConnectionError("the server was not reached", where=where, got=text)
    if isinstance(error, aiohttp.SocketTimeoutError):
        return EngineTimeoutError("the server went silent", where=where, got=text)
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return InputError("the path cannot be requested", where=where, got=text)
    if isinstance(error, aiohttp.ClientError | OSError):
        return EngineConnectionError("the connection broke", where=where, got=text)
    return InputError("the request cannot be sent", where=where, got=text)
