"""Replies of a gateway: streams of events, and bodies whose delivery is known."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from mmrender.errors import MissingDependencyError
from mmrender.gateway.call import Delta, EventWriter
from mmrender.gateway.limits import CallerLeftError, failure_of, while_connected
from mmrender.gateway.pending import Pending

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingDependencyError.of_extra(error.name or "starlette", "serve", "the gateway") from error


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
        """Yield all events. An error is the last event."""
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
        except Exception as error:  # noqa: BLE001 - the status is sent, so it goes into the stream
            failure = failure_of(error)
            yield writer.failure(failure.status, failure.code, failure.message)
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
        request: The request.
        pieces: The body.
        headers: Headers of the reply.
        close: Called once, with None if all was sent.
        status: Status of the reply.
    """

    def __init__(
        self,
        request: Request,
        pieces: AsyncIterator[bytes],
        headers: Mapping[str, str],
        close: Callable[[BaseException | None], None],
        status: int = 200,
    ) -> None:
        super().__init__(None, status, headers)
        del self.headers["content-length"]
        self._request = request
        self._pieces = pieces
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def write() -> None:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await while_connected(self._request, write())
        except CallerLeftError as error:
            self._close(error)
        except BaseException as error:
            self._close(error)
            raise
        else:
            self._close(None)


async def once(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in one piece."""
    yield body
