"""Replies of a gateway: streams of events, and bodies whose delivery is known."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from mmrender.errors import importing
from mmrender.gateway.failures import CallerLeftError, RequestError, failure_of
from mmrender.gateway.pending import Pending
from mmrender.gateway.writing import EventWriter

with importing(None, "serve", "the gateway"):
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class StreamBrokenError(RequestError):
    """A stream ends without its last event, so that clients repeat the call."""


class Caller:
    """The caller of a request whose body has been read. It may leave before it has its reply.

    Args:
        request: The request.
    """

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._leaving: asyncio.Task[None] | None = None

    @property
    def has_left(self) -> bool:
        """Whether the connection was seen to close."""
        return self._leaving is not None and self._leaving.done()

    async def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work, or cancel it if the caller leaves.

        Raises:
            CallerLeftError: The caller left.
        """
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise CallerLeftError
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """End the watch over the connection."""
        if self._leaving is not None:
            self._leaving.cancel()


async def begin_stream(pending: Pending, keep_alive_seconds: float) -> None:
    """Wait for the first text of an answer, so that an error before it has a status of its own.

    The stream begins without a text after `keep_alive_seconds`.
    """
    if await pending.more(0, keep_alive_seconds) is None:
        await pending.answers()


async def stream(
    pending: Pending, writer: EventWriter, keep_alive_seconds: float
) -> AsyncGenerator[bytes, None]:
    """Yield all events of an answer that is sampled. An error is the last event, or breaks the stream.

    Raises:
        StreamBrokenError: The protocol has no event for the error that clients repeat a call after.
    """
    yield writer.begin()
    position = 0
    while (deltas := await pending.more(position, keep_alive_seconds)) is not None:
        for delta in deltas:
            yield writer.delta(delta)
        if not deltas:
            yield writer.keep_alive()
        position += len(deltas)
    try:
        answers = await pending.answers()
    except Exception as error:  # the status is sent, so it goes into the stream
        failure = failure_of(error)
        if not (last := writer.failure(failure.status, failure.code, str(failure))):
            message = f"a stream broke off: {failure}"
            raise StreamBrokenError(failure.status, message, code=failure.code) from error
        yield last
    else:
        yield writer.end(answers)


class Reply(Response):
    """A reply whose end is known: sent whole, or left by its caller.

    Args:
        caller: The caller, which the reply closes.
        body: The body, whole or in pieces as they come.
        headers: Headers of the reply.
        close: Called once, with None if all was sent.
        status: Status of the reply.
    """

    def __init__(
        self,
        caller: Caller,
        body: bytes | AsyncIterator[bytes],
        headers: Mapping[str, str],
        close: Callable[[BaseException | None], None],
        status: int = 200,
    ) -> None:
        super().__init__(body if isinstance(body, bytes) else None, status, headers)
        self._caller = caller
        self._pieces = None if isinstance(body, bytes) else body
        self._close = close
        if self._pieces is not None:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            if self._caller.has_left:
                raise CallerLeftError
            if self._pieces is None:
                await super().__call__(scope, receive, send)
            else:
                await self._caller.wait_for(self._write(self._pieces, send))
        except CallerLeftError as error:
            self._close(error)
        except BaseException as error:
            self._close(error)
            raise
        else:
            self._close(None)
        finally:
            self._caller.close()

    async def _write(self, pieces: AsyncIterator[bytes], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
