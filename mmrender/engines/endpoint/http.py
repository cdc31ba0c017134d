"""Bodies read up to a limit, streams of events, and requests that end when their caller leaves."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from mmrender.engines.endpoint.failures import RequestError, failure_of
from mmrender.engines.sse import DONE, event_of
from mmrender.errors import MissingDependencyError

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingDependencyError.of_extra("starlette", "serve", "the HTTP endpoint") from error

Result = TypeVar("Result")


class CallerLeftError(Exception):
    """The caller closed the connection."""


class JSONReply(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return msgspec.json.encode(content)


def check_key(request: Request, key: str | None) -> None:
    """Check the key that a request brings, in a time that tells nothing of where it differs.

    Raises:
        RequestError: It is missing or wrong.
    """
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())
    if scheme.lower() != "bearer" or not same:
        raise RequestError(401, "the API key is missing or wrong", code="invalid_api_key")


async def read_body(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        RequestError: It is longer than `limit` bytes, or no JSON object.
        CallerLeftError: The caller left before it was read.
    """
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_long(limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise _too_long(limit)
            pieces.append(piece)
    except ClientDisconnect as error:
        raise CallerLeftError from error
    try:
        body = msgspec.json.decode(b"".join(pieces))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(400, "the body is no JSON object", code="invalid_json")
    return body


def _too_long(limit: int) -> RequestError:
    return RequestError(413, f"the request is longer than {limit} bytes", code="request_too_large")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or end it where the caller leaves.

    Raises:
        CallerLeftError: The caller left.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerLeftError
        return await task
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of events; it ends its source when it ends, for whatever reason.

    Args:
        first: The first value, which has been awaited already, so that what fails before it has a status.
        values: The others.
        ended: Told how many seconds after the request, and how, the stream ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: dict[str, Any],
        values: AsyncIterator[dict[str, Any]],
        ended: Callable[[Exception | None], None],
    ) -> None:
        super().__init__(status_code=200, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._values = values
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        request = Request(scope, receive)
        failed: Exception | None = None
        try:
            await while_connected(request, self._send(send))
        except CallerLeftError as error:
            failed = error
        except OSError as error:  # the connection broke
            failed = error
        finally:
            await _close(self._values)
            self._ended(failed)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await _body(send, event_of(self._first))
        try:
            async for value in self._values:
                await _body(send, event_of(value))
        except Exception as error:  # noqa: BLE001 - headers are sent, so it can only be told within the stream
            await _body(send, event_of(failure_of(error).envelope()))
        await _body(send, DONE, more=False)


async def _body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _close(values: AsyncIterator[Any]) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(values, "aclose", None)
    if close is not None:
        await close()


async def first_of(
    values: AsyncIterator[dict[str, Any]],
) -> tuple[dict[str, Any], AsyncIterator[dict[str, Any]]]:
    """The first value of a stream, and the rest."""
    try:
        return await anext(values), values
    except BaseException:
        await _close(values)
        raise
