"""Replies of a gateway: streams of events, and bodies whose delivery is known."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from mmrender.errors import MissingDependencyError
from mmrender.gateway.call import Delta
from mmrender.gateway.limits import CallerLeftError, Failure, RequestError, failure_of
from mmrender.gateway.pending import Pending
from mmrender.gateway.writing import EventWriter

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingDependencyError.of_extra(error.name or "starlette", "serve", "the gateway") from error

Result = TypeVar("Result")


class StreamBrokenError(RequestError):
    """A stream ends without its last event, so that clients repeat the call."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.status, f"a stream broke off: {failure.message}", code=failure.code)


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


class AnswerStream:
    """The texts of an answer that is sampled, one after another."""

    def __init__(self, pending: Pending, keep_alive_seconds: float) -> None:
        self._pending = pending
        self._deltas = pending.deltas()
        self._seconds = keep_alive_seconds
        self._coming: asyncio.Future[Delta | None] | None = None

    async def begin(self) -> None:
        """Wait for the first text, so that an error before it has a status of its own.

        The stream begins without a text after `keep_alive_seconds`.
        """
        coming = await self._wait()
        if coming.done() and coming.result() is None:
            await self._pending.answers()

    async def events(self, writer: EventWriter) -> AsyncGenerator[bytes, None]:
        """Yield all events. An error is the last event, or breaks the stream.

        Raises:
            StreamBrokenError: The protocol has no event for the error that clients repeat a call after.
        """
        yield writer.begin()
        while True:
            coming = await self._wait()
            if not coming.done():
                yield writer.keep_alive()
                continue
            self._coming = None
            if (delta := coming.result()) is None:
                break
            yield writer.delta(delta)
        try:
            answers = await self._pending.answers()
        except Exception as error:  # the status is sent, so it goes into the stream
            failure = failure_of(error)
            if not (last := writer.failure(failure.status, failure.code, failure.message)):
                raise StreamBrokenError(failure) from error
            yield last
        else:
            yield writer.end(answers)

    def close(self) -> None:
        """End the wait for the next text."""
        if self._coming is not None:
            self._coming.cancel()

    async def _wait(self) -> "asyncio.Future[Delta | None]":
        """Wait `keep_alive_seconds` for the next text, or None at the end."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._next())
        await asyncio.wait({self._coming}, timeout=self._seconds)
        return self._coming

    async def _next(self) -> Delta | None:
        return await anext(self._deltas, None)


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
