"""Endpoint limits (keys, body sizes, timeouts, concurrency), and errors in OpenAI's envelope."""

import asyncio
import contextlib
import hmac
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from mmrender.engines.interface import Result
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineStateError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
    MissingDependencyError,
    MMRenderError,
    ModelError,
    PoolError,
    PromptTooLongError,
    RenderError,
    TemplateError,
)

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
except ImportError as error:
    raise MissingDependencyError.of_extra(error.name or "starlette", "serve", "the HTTP endpoint") from error


class RequestError(Exception):
    """The endpoint itself refuses a request."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class CallerLeftError(RequestError):
    """The caller closed the connection. 499 is nginx's status for that."""

    def __init__(self) -> None:
        super().__init__(499, "the caller left", code="caller_left")


_STATUSES: Final[tuple[tuple[type[MMRenderError], int, str], ...]] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (InputError, 400, "invalid_value"),
    (RenderError, 400, "render_error"),
    (TemplateError, 400, "template_error"),
    (EngineTimeoutError, 504, "engine_timeout"),
    (EngineUnavailableError, 503, "engine_unavailable"),
    (EngineStateError, 503, "engine_state"),
    (EngineUnsupportedError, 501, "unsupported"),
    (EngineConnectionError, 502, "engine_connection"),
    (EngineError, 502, "engine_error"),
    (PoolError, 503, "renderer_busy"),
    (ModelError, 500, "model_error"),
)


def failure_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and OpenAI's envelope of an error. Unexpected ones reveal nothing of our insides."""
    status, code, param, message = 500, "internal_error", None, "internal error"
    if isinstance(error, RequestError):
        status, code, param, message = error.status, error.code, error.param, str(error)
    elif isinstance(error, EngineStatusError) and error.status < 500:
        # Only refusals are passed on. An engine's failure is a failure of this endpoint.
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = msgspec.json.decode(error.body, type=dict[str, Any])
            if isinstance(body.get("error"), dict):
                return error.status, body
        status, code, message = error.status, "engine_refused", str(error)
    else:
        for kind, known_status, known_code in _STATUSES:
            if isinstance(error, kind):
                status, code, message, param = known_status, known_code, str(error), error.where
                break
    kind_name = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind_name, "param": param, "code": code}}


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Build a reply of JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Check a request's API key in constant time.

    Raises:
        RequestError: It is missing or wrong.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    found = [hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode()) for key in keys]
    if keys and not (any(found) and scheme.lower() == "bearer"):
        raise RequestError(401, "the API key is missing or wrong", code="invalid_api_key")


async def read_body(request: Request, limit: int, seconds: float) -> dict[str, Any]:
    """Read the JSON object of a request.

    Raises:
        RequestError: It is longer than `limit` bytes, late by `seconds`, or not a JSON object.
        CallerLeftError: The caller left before it was read.
    """
    too_long = RequestError(413, f"the request is longer than {limit} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_long
        return msgspec.json.decode(body, type=dict[str, Any])
    except ClientDisconnect as error:
        raise CallerLeftError from error
    except TimeoutError as error:
        raise RequestError(
            408, f"the request did not come within {seconds:g} s", code="request_timeout"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}", code="invalid_json") from error


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or cancel it if the caller leaves.

    Raises:
        CallerLeftError: The caller left.
    """

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerLeftError
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


class RequestLimit:
    """Refuses requests of a key that has too many under way. `/health` is always answered.

    Args:
        app: The application.
        limit: Requests of one key at a time. Callers without a key count as one.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._running: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self._app(scope, receive, send)
        key = dict(scope["headers"]).get(b"authorization", b"")
        if self._running[key] >= self._limit:
            refusal = RequestError(429, f"{self._limit} requests are under way", code="too_many_requests")
            reply = json_reply(failure_of(refusal)[1], refusal.status, {"retry-after": "1"})
            return await reply(scope, receive, send)
        self._running[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]


class TimedProtocol(H11Protocol):
    """h11 with a timeout for request heads, which uvicorn lacks."""

    def __init__(self, *arguments: Any, head_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_seconds = head_seconds
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._late = self.loop.call_later(self._head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Read on. Bound the time of a head that has begun."""
        before: RequestResponseCycle | None = self.cycle  # None before the first head
        super().data_received(data)
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is not before:
            self._end_wait()
        elif self._late is None and (cycle is None or cycle.response_complete):
            self._late = self.loop.call_later(self._head_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait with the connection."""
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
