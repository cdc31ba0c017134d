"""`HTTPTransport`: requests over pooled connections, with a deadline, bounded retries and hooks."""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import msgspec

from mmrender.client.hooks import ClientHooks, Moment, RequestEvent
from mmrender.client.transport import (
    MAX_ERROR_BYTES,
    Connections,
    JSONText,
    Reply,
    TransportConfig,
    may_repeat_status,
    status_error,
)
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    InputError,
    importing,
)

with importing(None, "client", "the HTTP client"):
    import aiohttp

_log = logging.getLogger("mmrender.client")
_NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BROKEN: Final = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionError)
_UNTRUSTED: Final = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ServerFingerprintMismatch,
)
_SLICE: Final = 256 << 10
"""Bytes of a body that are written before other tasks have their turn."""
_PIECE: Final = 64 << 10
"""Bytes of a file that are copied at a time while the socket is full."""
_MARK: Final = secrets.token_hex(16)
"""Stands for a `JSONText` while a request is encoded. Random and never sent, so no text contains it."""
_call_ids = itertools.count(1)
_connector_numbers = itertools.count(1)


class _Body(aiohttp.Payload):
    """A large body. Texts in a file go to the socket without a copy."""

    def __init__(self, pieces: Sequence[bytes | JSONText], size: int) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return joined(self._value).decode(encoding, errors)

    async def write(self, writer: Any) -> None:
        for piece in self._value:
            try:
                if isinstance(piece, JSONText) and await _send_file(writer, piece):
                    continue
            except ConnectionError:
                return  # the server closed it, and its reply, if it sent one, is still to be read
            view = memoryview(piece.data if isinstance(piece, JSONText) else piece)
            for start in range(0, max(1, len(view)), _SLICE):  # once at least: the headers go with it
                await writer.write(view[start : start + _SLICE])
                await asyncio.sleep(0)


async def _send_file(writer: Any, text: JSONText) -> bool:
    """Send a text from its file. False: it is not in a file, or the socket has TLS, and nothing was sent.

    `loop.sendfile` would stop reading meanwhile, and so miss the reply of a server that refuses a long body.
    """
    transport = writer.transport
    if text.file is None or transport is None or transport.get_extra_info("sslcontext") is not None:
        return False
    sock, done = transport.get_extra_info("socket"), 0
    transport.set_write_buffer_limits(0)  # so that `drain` waits until everything written has gone out
    try:
        while done < text.size:
            await writer.drain()
            try:
                done += os.sendfile(sock.fileno(), text.file, done, text.size - done)
                await asyncio.sleep(0)
            except BlockingIOError:  # the transport waits for the socket if it has something to write
                piece = os.pread(text.file, min(_PIECE, text.size - done), done)
                await writer.write(piece)
                done += len(piece)
    finally:
        transport.set_write_buffer_limits()
    return True


def joined(pieces: Sequence[bytes | JSONText]) -> bytes:
    """Return the pieces of a body as one."""
    return b"".join([piece.data if isinstance(piece, JSONText) else piece for piece in pieces])


def encode_json(value: Any) -> list[bytes | JSONText]:
    """Encode a value of JSON types and `JSONText` as pieces that follow each other.

    Each `JSONText` is a piece of its own, not copied.
    """
    texts: list[JSONText] = []

    def stand_in(other: Any) -> str:
        if not isinstance(other, JSONText):
            raise TypeError(f"Encoding objects of type {type(other).__name__} is unsupported")
        texts.append(other)
        return _MARK

    try:
        whole = msgspec.json.encode(value, enc_hook=stand_in)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            "the request cannot be written as JSON", where="json", expected="JSON values", got=str(error)
        ) from error
    first, *others = whole.split(f'"{_MARK}"'.encode()) if texts else (whole,)
    pieces: list[bytes | JSONText] = [first]
    for text, after in zip(texts, others, strict=True):
        pieces += [text, after]
    return pieces


class _Call:
    """One call: its request, its progress, and its hooks."""

    def __init__(
        self, transport: "HTTPTransport", method: str, path: str, json: Any, headers: Mapping[str, str] | None
    ) -> None:
        self.method = method
        self.target = target = transport.base_url + path
        self.url = target.partition("?")[0]
        self.where = f"{method} {self.url}"
        self.body = [] if json is None else encode_json(json)
        self.size = sum(each.size if isinstance(each, JSONText) else len(each) for each in self.body)
        self.attempt = 1
        self.status: int | None = None
        self.is_kept = True
        """Whether the attempt uses a connection that served an earlier call, unless it had to make one."""
        self._hooks = transport.hooks
        self._begun = time.perf_counter()
        self._id = next(_call_ids)
        content_type = {"Content-Type": "application/json"} if self.body else {}
        # The caller's headers override the hooks' headers.
        self.headers = {**self.report("on_request"), **content_type, **(headers or {})}

    def report(
        self, moment: Moment, *, error: BaseException | None = None, reply_bytes: int | None = None
    ) -> dict[str, str]:
        """Call every hook. Return the headers that they want to send."""
        headers: dict[str, str] = {}
        if not self._hooks:
            return headers
        seconds = time.perf_counter() - self._begun
        event = RequestEvent(
            self._id, self.method, self.url, self.attempt, self.size, seconds, self.status, reply_bytes, error
        )
        for hook in self._hooks:
            try:
                headers.update(getattr(hook, moment)(event) or {})
            except Exception:  # noqa: BLE001 - a hook is foreign code
                _log.exception("the hook %s.%s failed", type(hook).__name__, moment)
        return headers

    def may_repeat(self, error: EngineConnectionError | EngineStatusError, idempotent: bool | None) -> bool:
        """Whether the attempt that failed may be made again. It decides for all calls and streams.

        - A connection that was never made: always.
        - A kept connection that breaks before any answer: unless the call is not idempotent. The server or
          a proxy closed it before the request came. A sampled turn that was begun all the same ends with its
          connection.
        - A status: see `may_repeat_status`.
        """
        if isinstance(error, EngineStatusError):
            return may_repeat_status(error, self.method, idempotent)
        cause = error.__cause__
        if isinstance(cause, _UNTRUSTED):
            return False
        was_closed = self.is_kept and self.status is None and isinstance(cause, _BROKEN)
        return isinstance(cause, _NOT_CONNECTED) or (was_closed and idempotent is not False)


class _Connector(aiohttp.TCPConnector):
    """Counts its connections.

    Attributes:
        number: Its own number, unique in this process.
        made: Connections that it has made.
        open: Those that were open when the last one was made.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.number = next(_connector_numbers)
        self.made = 0
        self.open: set[asyncio.BaseTransport] = set()

    async def connect(self, *args: Any, **options: Any) -> aiohttp.connector.Connection:
        """Return a connection from the pool, or a new one."""
        connection = await super().connect(*args, **options)
        transport = connection.transport
        if transport is not None and transport not in self.open:
            self.made += 1
            self.open = {each for each in self.open if not each.is_closing()} | {transport}
        return connection


_Session: TypeAlias = tuple[aiohttp.ClientSession, AsyncGenerator[aiohttp.ClientSession, None]]
"""A session, and the generator that closes it at its end."""


class HTTPTransport:
    """Requests to one server over HTTP/1.1.

    It may be shared by threads, each with its event loop, and pickled if its hooks can be. Connections are
    pooled for each loop, and closed by `aclose` or when the loop ends. Redirects are not followed, cookies
    are not kept, and proxy settings of the environment are not used.

    Args:
        config: The server's base URL, or all settings.
        hooks: Called at the beginning, the retries and the end of each call.

    Raises:
        InputError: The base URL cannot be used.
    """

    def __init__(self, config: TransportConfig | str, *, hooks: Sequence[ClientHooks] = ()) -> None:
        self.config = TransportConfig(config) if isinstance(config, str) else config
        self.hooks = tuple(hooks)
        self.base_url = self.config.base_url
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}
        # Sessions outlive a dropped transport until their loops have closed them, as that takes an `await`.
        weakref.finalize(self, _close_sessions, self._sessions).atexit = False

    def __reduce__(self) -> tuple[object, ...]:
        return partial(HTTPTransport, self.config, hooks=self.hooks), ()

    def __repr__(self) -> str:
        return f"HTTPTransport({self.base_url!r})"

    async def aclose(self) -> None:
        """Close the connections of the running event loop. A later call opens new ones."""
        entry = self._sessions.pop(asyncio.get_running_loop(), None)
        if entry is not None:
            await entry[1].aclose()

    @property
    def connections(self) -> Connections:
        """The connections of the running event loop so far."""
        try:
            entry = self._sessions.get(asyncio.get_running_loop())
        except RuntimeError:  # there is none
            return Connections()
        connector = None if entry is None else entry[0].connector
        if not isinstance(connector, _Connector):
            return Connections()
        is_open = any(not each.is_closing() for each in connector.open)
        return Connections(connector.number, connector.made, is_open)

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
        """Send a request and read the whole reply. See `Transport.request`.

        Raises:
            EngineError: As for `Transport.request`, or the reply is longer than `max_reply_bytes`.
            InputError: The body cannot be written as JSON, or a header cannot be sent.
        """
        seconds = self.config.timeout if timeout is None else timeout
        bound = self.config.max_reply_bytes
        max_bytes = bound if max_reply_bytes is None else min(max_reply_bytes, bound)
        call = _Call(self, method, path, json, headers)
        content = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while call.status is None:
                    try:
                        async with self._attempt(call) as response:
                            async for chunk in response.content.iter_any():
                                content += chunk
                                if len(content) > max_bytes:
                                    raise self._too_long(call, max_bytes)
                    except (EngineConnectionError, EngineStatusError) as error:
                        await self._prepare_retry(call, error, idempotent)
        except TimeoutError as error:
            late = EngineTimeoutError(f"the server did not answer within {seconds:g} s", where=call.where)
            call.report("on_error", error=late)
            raise late from error
        except BaseException as error:
            call.report("on_error", error=error)
            raise
        call.report("on_response", reply_bytes=len(content))
        return Reply(response.status, response.headers, bytes(content), not call.is_kept)

    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Send a request and yield the lines of the reply as they come, without line ends.

        The connection is closed when the iterator is. `timeout` of the configuration bounds the wait for each
        piece, not the whole. A request that was not taken is sent again, as by `request`. An answer that has
        begun is not asked for again.

        Raises:
            EngineError: As for `request`.
        """
        call = _Call(self, method, path, json, headers)
        max_bytes = self.config.max_reply_bytes
        total = 0
        pending = bytearray()
        try:
            while call.status is None:
                try:
                    async with self._attempt(call, read_timeout=self.config.timeout) as response:
                        async for chunk in response.content.iter_any():
                            total += len(chunk)
                            pending += chunk
                            if b"\n" in chunk:
                                *lines, pending = pending.split(b"\n")
                                for line in lines:
                                    yield bytes(line.removesuffix(b"\r"))
                            if len(pending) > max_bytes:
                                raise self._too_long(call, max_bytes)
                except EngineConnectionError as error:
                    await self._prepare_retry(call, error, None)
            if pending:
                yield bytes(pending.removesuffix(b"\r"))
        except BaseException as error:
            call.report("on_error", error=error)
            raise
        call.report("on_response", reply_bytes=total)

    async def _prepare_retry(
        self, call: _Call, error: EngineConnectionError | EngineStatusError, idempotent: bool | None
    ) -> None:
        """Wait before the next attempt of a call. Raise the error of the last one if there is to be none."""
        policy = self.config.retries
        if call.attempt >= policy.attempts or not call.may_repeat(error, idempotent):
            raise error
        call.attempt += 1
        wait = policy.wait_before(call.attempt)
        if isinstance(error, EngineStatusError) and error.retry_after is not None:
            wait = min(error.retry_after, policy.wait_max)
        _log.debug("%s: attempt %d after: %s", call.where, call.attempt, error)
        call.report("on_retry", error=error)
        call.status = None
        await asyncio.sleep(wait)

    def _too_long(self, call: _Call, max_bytes: int) -> EngineReplyError:
        may_raise = max_bytes == self.config.max_reply_bytes
        return EngineReplyError(
            "the server's reply is too long",
            where=call.where,
            expected=f"at most {max_bytes} bytes",
            remedy="Raise max_reply_bytes of the transport" if may_raise else None,
        )

    @contextlib.asynccontextmanager
    async def _attempt(
        self, call: _Call, *, read_timeout: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one attempt and yield its reply, of status 2xx. Errors of aiohttp become ours."""
        # aiohttp writes bytes with the headers in one piece.
        data = joined(call.body) if call.size <= _SLICE else _Body(call.body, call.size)
        timeout = aiohttp.ClientTimeout(sock_connect=self.config.connect_timeout, sock_read=read_timeout)
        excerpt = b""
        call.is_kept = True
        entry = self._sessions.get(asyncio.get_running_loop())
        try:
            session = await self._open_session() if entry is None or entry[0].closed else entry[0]
            async with session.request(
                call.method,
                call.target,
                data=data or None,
                headers=call.headers,
                timeout=timeout,
                allow_redirects=False,
                trace_request_ctx=call,
            ) as response:
                call.status = response.status
                if 200 <= response.status < 300:
                    yield response
                    return
                async for chunk in response.content.iter_any():
                    excerpt += chunk
                    if len(excerpt) >= MAX_ERROR_BYTES:
                        break
        except EngineError:
            raise
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise _engine_error(error, call.where) from error
        raise status_error(call.method, call.url, response.status, excerpt, response.headers)

    async def _open_session(self) -> aiohttp.ClientSession:
        """Open the session of the running event loop, and drop sessions whose loops have ended."""
        keeper = _kept_session(self.config)
        # Runs to its first `yield` without giving way, so no second task can open another session meanwhile.
        session = await anext(keeper)
        for ended in [each for each in list(self._sessions) if each.is_closed()]:
            dropped = self._sessions.pop(ended, None)
            if dropped is not None:
                # Its loop ended without ending its generators, so nothing can be awaited there.
                with contextlib.suppress(StopIteration):
                    dropped[0].close().send(None)
        self._sessions[asyncio.get_running_loop()] = session, keeper
        return session


async def _kept_session(config: TransportConfig) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """Yield a session, and close it when the generator ends: by hand, or by `asyncio.run` at its end."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(_note_new)
    async with aiohttp.ClientSession(
        connector=_Connector(
            limit=config.max_connections, limit_per_host=0, keepalive_timeout=config.keepalive
        ),
        headers={"Accept": "application/json", "Accept-Encoding": "identity", **config.all_headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=1 << 20,
        trace_configs=[trace],
    ) as session:
        yield session


def _close_sessions(sessions: dict[asyncio.AbstractEventLoop, _Session]) -> None:
    for loop, (_, keeper) in sessions.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.create_task, keeper.aclose())


async def _note_new(_: object, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.is_kept = False


def _engine_error(error: Exception, where: str) -> EngineError | InputError:
    """Return the error that names the call, for one of aiohttp's."""
    text = str(error) or type(error).__name__
    if isinstance(error, _UNTRUSTED):
        return EngineConnectionError("the server cannot be trusted", where=where, got=text)
    if isinstance(error, _NOT_CONNECTED):
        return EngineConnectionError("the server was not reached", where=where, got=text)
    if isinstance(error, aiohttp.SocketTimeoutError):
        return EngineTimeoutError("the server went silent", where=where, got=text)
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return InputError("the path cannot be requested", where=where, got=text)
    if isinstance(error, aiohttp.ClientError | OSError):
        return EngineConnectionError("the connection broke", where=where, got=text)
    return InputError("the request cannot be sent", where=where, got=text)
