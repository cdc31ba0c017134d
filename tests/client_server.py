"""A small HTTP server for tests of the client, in the test's own event loop."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class StubServer:
    """Answers a few paths, and notes what it was asked.

    Attributes:
        url: Root of the server.
        seen: Method, path, headers and body of each request, in order.
        gone: Paths whose caller went away before the answer.
        connections: Client ports that requests came from.
    """

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.gone: list[str] = []
        self.connections: list[int] = []
        self.busy = 0
        self.busy_status = 503
        self.retry_after: str | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.path_qs, dict(request.headers), body))
        peer = request.transport.get_extra_info("peername") if request.transport else ("", 0)
        self.connections.append(peer[1])
        answer = getattr(self, "answer_" + request.path.strip("/").replace("/", "_"), None)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await answer(request, body)

    async def answer_echo(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def answer_chunked(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 65536):
            await response.write(body[start : start + 65536])
        return response

    async def answer_packed(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})

    async def answer_busy(self, request: web.Request, body: bytes) -> web.Response:
        if self.busy:
            self.busy -= 1
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return web.Response(status=self.busy_status, text="busy", headers=headers)
        return web.json_response({"ok": True})

    async def answer_slow(self, request: web.Request, body: bytes) -> web.Response:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.gone.append(request.path)
            raise
        return web.Response()

    async def answer_cut(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 10)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def answer_kept(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Serve one request of a connection, and close it when a second one comes."""
        if self.connections.count(self.connections[-1]) > 1:
            assert request.transport is not None
            request.transport.abort()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(body or b"{}")
        return response

    async def answer_moved(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=307, headers={"Location": "/echo"})

    async def answer_refuse(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=400, text='{"error": {"message": "no  such\nthing"}}' + "." * 20_000)

    async def answer_lines(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"one\r\ntw", b"o\n\nthr", b"ee", b"\nlast"):
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    async def answer_endless(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"more\n")
                await asyncio.sleep(0.001)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.append(request.path)
            raise


@asynccontextmanager
async def stub_server(kind: type[StubServer] = StubServer, **settings: Any) -> AsyncIterator[StubServer]:
    """Serve on a free port while the block runs."""
    stub = kind()
    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, **settings)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()
