"""`EngineServer`: OpenAI's routes over an engine client, as an HTTP server that starts and stops.

Needs the `serve` extra: starlette, uvicorn and prometheus-client.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self, cast

import msgspec

from mmrender.client.resolve import BackendName
from mmrender.client.transport import check_number
from mmrender.engines.callers import (
    CallerLeftError,
    RequestError,
    RequestLimit,
    TimedProtocol,
    check_key,
    failure_of,
    json_reply,
    read_body,
    while_connected,
)
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.interface import OpenAICall, Result
from mmrender.engines.replicas import Replica
from mmrender.errors import (
    EngineError,
    EngineStateError,
    InputError,
    MissingDependencyError,
    MMRenderError,
)
from mmrender.protocols import RendererProtocol

try:
    import uvicorn
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise MissingDependencyError.of_extra(error.name or "starlette", "serve", "the HTTP endpoint") from error

_log = logging.getLogger("mmrender.engines")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of an `EngineServer`.

    Attributes:
        model: Name of the model. A request that names another one is refused.
        host: Address to listen on. Without a key only loopback is allowed.
        port: Port. 0 for any free one.
        api_key: Requests to `/v1/...` and `/metrics` must bring it, or one of several, as `Authorization:
            Bearer ...`.
        open_to_all: Allow any address without a key.
        max_body_bytes: A longer request is refused.
        max_requests: Requests of one key at a time. Callers without a key count as one.
        read_seconds: How long the head of a request may take to come, and its body.
        stop_seconds: How long running requests may go on when the server stops.

    Raises:
        InputError: The address is open to others without a key, or a key is empty.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | Sequence[str] | None = field(default=None, repr=False)
    open_to_all: bool = False
    max_body_bytes: int = 64 << 20
    max_requests: int = 1024
    read_seconds: float = 60.0
    stop_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.keys and all(self.keys)):
            raise InputError("the key is empty", where="settings.api_key", expected="a key, or None")
        for name in ("max_body_bytes", "max_requests", "read_seconds", "stop_seconds"):
            check_number(f"settings.{name}", getattr(self, name), above=0)
        is_loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        if self.api_key is None and not self.open_to_all and not is_loopback:
            raise InputError(
                "the endpoint would be open to everybody",
                where="settings.host",
                expected="a loopback address, or a key",
                got=self.host,
                remedy="Pass api_key, or open_to_all=True if the network keeps others out",
            )

    @property
    def keys(self) -> Sequence[str]:
        """Accepted keys, empty if every caller is accepted."""
        return [self.api_key] if isinstance(self.api_key, str) else self.api_key or []


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _is_up(replica: Replica) -> float:
    return float(replica.down is None)


def _in_flight(replica: Replica) -> float:
    return len(replica.calls)


# --- routes ---


class Endpoint:
    """The routes over one client, and their metrics in a registry of its own.

    Args:
        client: Samples, in tokens if it has a renderer, otherwise on the engines' own routes.
        settings: Name of the model, and limits.
    """

    def __init__(self, client: InferenceEngineClient, settings: ServerSettings) -> None:
        self.client = client
        self.settings = settings
        self._created = int(time.time())
        to = self._registry = CollectorRegistry()
        self._requests = Counter("mmrender_requests", "Requests answered.", ["route", "status"], registry=to)
        self._seconds = Histogram(
            "mmrender_request_seconds",
            "Seconds from request to end of answer.",
            ["route"],
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800),
            registry=to,
        )
        self._tokens = Counter("mmrender_tokens", "Tokens.", ["kind"], registry=to)
        up = Gauge("mmrender_engine_up", "Whether an engine gets requests.", ["engine"], registry=to)
        running = Gauge("mmrender_engine_requests_running", "Requests in flight.", ["engine"], registry=to)
        for replica in client.replicas:
            up.labels(replica.name).set_function(partial(_is_up, replica))
            running.labels(replica.name).set_function(partial(_in_flight, replica))
        paused = Gauge("mmrender_paused", "Whether the client is paused.", registry=to)
        paused.set_function(lambda: float(client.is_paused))

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._counted(self._metrics), methods=["GET"]),
            Route("/v1/models", self._counted(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._counted(self._models), methods=["GET"]),
            Route("/v1/chat/completions", self._counted(self._answer("chat_completion")), methods=["POST"]),
            Route("/v1/completions", self._counted(self._answer("completion")), methods=["POST"]),
        ]
        limit = Middleware(RequestLimit, limit=self.settings.max_requests)
        return Starlette(routes=routes, middleware=[limit], exception_handlers={HTTPException: _no_route})

    def _counted(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Check the key, answer errors, and count."""

        async def answer(request: Request) -> Response:
            begun = time.monotonic()
            try:
                check_key(request, self.settings.keys)
                response = await handler(request)
            except Exception as error:  # noqa: BLE001 - every error is answered
                if not isinstance(error, MMRenderError | RequestError):
                    _log.exception("a request failed", exc_info=error)
                status, envelope = failure_of(error)
                headers = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}
                response = json_reply(envelope, status, headers.get(status))
            if not isinstance(response, StreamingResponse):
                self._count(request, response.status_code, begun)
            return response

        return answer

    def _count(self, request: Request, status: int, begun: float) -> None:
        route = request.scope["route"].path
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(time.monotonic() - begun)

    async def _health(self, request: Request) -> Response:
        try:
            await self.client.check_health()
        except EngineError:
            return json_reply({"status": "unavailable"}, 503)
        return json_reply({"status": "paused" if self.client.is_paused else "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _models(self, request: Request) -> Response:
        """Return the served model, in a list if the request names none."""
        named = request.path_params.get("name")
        if named is not None:
            self._check_model(named)
        card = {"id": self.settings.model, "object": "model", "created": self._created}
        limit = await self.client.max_prompt_len()
        more = {} if limit is None else {"max_model_len": limit + 1}
        card = {**card, "owned_by": "mmrender", **more}
        return json_reply({"object": "list", "data": [card]} if named is None else card)

    def _check_model(self, name: object) -> None:
        served = self.settings.model
        if name != served:
            message = f"the model {name!r} is not served here, only {served}"
            raise RequestError(404, message, code="model_not_found", param="model")

    def _answer(self, call: OpenAICall) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            begun = time.monotonic()
            body, streams = await self._body(request)
            if not streams:
                reply = await while_connected(request, self.client.openai(call, {"json": body}))
                return json_reply(self._own(reply))
            chunks = self.client.stream_openai(call, {"json": body})
            try:
                first = await while_connected(request, anext(chunks))
            except BaseException:
                await chunks.aclose()
                raise
            events = self._events(first, chunks, request, begun)
            headers = {"cache-control": "no-cache"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)

        return answer

    async def _body(self, request: Request) -> tuple[dict[str, Any], bool]:
        """Body of a request without members that are null, and whether a stream is asked for."""
        body = await read_body(request, self.settings.max_body_bytes, self.settings.read_seconds)
        self._check_model(body.get("model"))
        body = {name: value for name, value in body.items() if value is not None}
        if session := request.headers.get("x-session-id"):
            body.setdefault("session_id", session)
        streams = body.pop("stream", False)
        for name, value, kinds in (
            ("session_id", body.get("session_id", ""), str | int),
            ("stream", streams, bool),
        ):
            if not isinstance(value, kinds):
                raise RequestError(400, f"{name} has a wrong type", code="invalid_value", param=name)
        if not streams:
            body.pop("stream_options", None)
        return body, streams

    def _own(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Count the tokens that a reply or chunk reports, and name the served model in it."""
        usage = reply.get("usage")
        if isinstance(usage, Mapping):
            for kind in ("prompt", "completion"):
                self._tokens.labels(kind).inc(usage.get(f"{kind}_tokens") or 0)
        return {**reply, "model": self.settings.model}

    async def _events(
        self,
        first: dict[str, Any],
        chunks: AsyncGenerator[dict[str, Any], None],
        request: Request,
        begun: float,
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events. The source always ends with them."""
        status = CallerLeftError().status
        try:
            yield _event(self._own(first))
            try:
                async for chunk in chunks:
                    yield _event(self._own(chunk))
            except Exception as error:  # noqa: BLE001 - the status is sent, so it goes into the stream
                yield _event(failure_of(error)[1])
            yield b"data: [DONE]\n\n"
            status = 200
        finally:
            await chunks.aclose()
            self._count(request, status, begun)


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    message = f"there is no route {request.method} {request.url.path}"
    return json_reply(failure_of(RequestError(status, message, code=code))[1], status)


# --- the server ---


_LOOK_AGAIN: Final = 1.0
"""Seconds after which a call from another thread checks that the server still runs."""


class EngineServer:
    """Serves OpenAI's routes over a client. Several may run in one process, independent of each other.

    With a renderer, the client's chat is rendered here, and callers may name media by data: and http(s) URLs
    only. The renderer's `MediaPolicy` decides which addresses are reached.

    Args:
        client: Samples. It outlives the server.
        settings: Name of the model, address and limits.
    """

    def __init__(self, client: InferenceEngineClient, settings: ServerSettings) -> None:
        self.client = client
        self.settings = settings
        self.app: Starlette = Endpoint(client, settings).app()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._url: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Root of the running server.

        Raises:
            EngineStateError: It does not run.
        """
        if self._url is None:
            raise EngineStateError("the server is not running")
        return self._url

    async def serve(self, *, started: Callable[[str], None] | None = None) -> None:
        """Serve on this event loop until cancelled, or until a signal ends the process's main thread.

        Args:
            started: Called with the URL once it listens.

        Raises:
            EngineStateError: It cannot listen.
        """
        await self._serve(*self._listen(), started)

    def start(self) -> str:
        """Serve on a thread of its own, and return the URL.

        Raises:
            EngineStateError: It runs already, or cannot listen.
        """
        if self._thread is not None:
            raise EngineStateError("the server is running already")
        serving, url = self._serve(*self._listen()), self.url
        loop = self._loop = asyncio.new_event_loop()  # at once, so that `run` finds it

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(serving)

        self._thread = threading.Thread(target=run, name="mmrender-engines-server", daemon=True)
        self._thread.start()
        return url  # connections made before it accepts them wait in the socket's queue

    def stop(self) -> None:
        """Stop a server that `start` began, and wait for its thread. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._server = None

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Run a call of the client on the server's event loop, from another thread, and return its result.

        Raises:
            EngineStateError: The server does not run, or stops before the call ends.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            call.close()
            raise EngineStateError("the server is not running")
        future = asyncio.run_coroutine_threadsafe(call, loop)
        while True:
            try:
                return future.result(_LOOK_AGAIN)
            except CancelledError:
                break
            except TimeoutError:
                if future.done():
                    raise
                if loop.is_closed():
                    break
        raise EngineStateError("the server stopped before the call ended")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _listen(self) -> tuple[socket.socket, uvicorn.Server]:
        """Bind the address, since uvicorn would end the process if the port is taken."""
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise EngineStateError(
                "the server cannot listen", where=f"{host}:{port}", got=str(error)
            ) from error
        address, number = listener.getsockname()[:2]
        self._url = f"http://[{address}]:{number}" if ":" in address else f"http://{address}:{number}"
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            http=cast(Any, partial(TimedProtocol, head_seconds=self.settings.read_seconds)),
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(self.settings.stop_seconds)),
        )
        self._server = uvicorn.Server(config)
        return listener, self._server

    async def _serve(
        self, listener: socket.socket, server: uvicorn.Server, started: Callable[[str], None] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        with listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                if started is not None:
                    started(self.url)
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                server.should_exit = True
                await serving
                raise
            finally:
                self._url = self._loop = None


def serve(
    urls: Sequence[str],
    *,
    engine_model: str,
    settings: ServerSettings,
    backend: BackendName = "vllm",
    renderer: RendererProtocol | None = None,
    started: Callable[[str], None] = print,
) -> None:
    """Serve OpenAI's routes over running inference servers until interrupted. `mmrender serve` calls it.

    Args:
        urls: The inference servers, or the URL of a router.
        engine_model: Name under which they know the model.
        settings: Name of the model, address and limits.
        backend: Their engine.
        renderer: Renders chat here, to sample in tokens. None passes chat on to the servers.
        started: Called with the URL once it listens.

    Raises:
        InputError: There is no server.
        EngineStateError: It cannot listen.
    """
    engines = [HTTPEngine(backend, url, model=engine_model) for url in urls]
    client = InferenceEngineClient(engines, renderer=renderer)

    async def run() -> None:
        try:
            await EngineServer(client, settings).serve(started=started)
        finally:
            await client.teardown(wait=settings.stop_seconds)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
