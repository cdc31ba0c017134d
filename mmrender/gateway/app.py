"""Routes of a gateway: three protocols of agents, and the sessions that record them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
from blake3 import blake3

from mmrender.errors import EngineError, MMRenderError, importing
from mmrender.gateway import work
from mmrender.gateway.call import Call, ProtocolName
from mmrender.gateway.failures import CallerLeftError, RequestError, failure_of
from mmrender.gateway.limits import Body, RateLimit, check_charge, check_page, is_one_of, key_of, read_body
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.gateway.reading import FormT, Strict, convert
from mmrender.gateway.replies import Caller, Reply, begin_stream, stream
from mmrender.gateway.session import Session
from mmrender.gateway.sessions import Sessions
from mmrender.gateway.writing import AgentProtocol

with importing(None, "serve", "the gateway"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_log = logging.getLogger("mmrender.gateway")

_SESSION_HEADERS: Final = ("x-session-id", "x-claude-code-session-id", "session-id")
_FORWARDED_HEADERS: Final = ("content-type", "accept", "anthropic-version", "anthropic-beta", "user-agent")
_WAIT_SECONDS: Final = 60.0
"""Seconds after which a request that waits for a session's end is answered anyway."""


App: TypeAlias = Starlette


def build(host: Sessions) -> App:
    """Return the ASGI application of a gateway."""
    return _Routes(host).app()


class _Routes:
    def __init__(self, host: Sessions) -> None:
        self.host = host
        self.settings = host.settings
        self._created = int(time.time())
        self._rate = RateLimit(host.settings.max_requests)
        to = self._registry = CollectorRegistry()
        self._requests = Counter("mmrender_requests", "Requests answered.", ["route", "status"], registry=to)
        self._seconds = Histogram(
            "mmrender_request_seconds",
            "Seconds from request to end of answer.",
            ["route"],
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800),
            registry=to,
        )
        open_sessions = Gauge("mmrender_sessions_open", "Open sessions.", registry=to)
        open_sessions.set_function(lambda: float(len(host.sessions())))

    def app(self) -> Starlette:
        routes = [
            Route("/", _alive, methods=["GET"]),  # with HEAD
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._answered(self._metrics), methods=["GET"]),
            Route("/sessions", self._answered(self._open), methods=["POST"]),
            Route("/sessions", self._answered(self._list), methods=["GET"]),
            Route("/sessions/{session}", self._answered(self._open), methods=["POST"]),
            Route("/sessions/{session}", self._answered(self._describe), methods=["GET"]),
            Route("/sessions/{session}", self._answered(self._abandon), methods=["DELETE"]),
            Route("/sessions/{session}/reward", self._answered(self._reward), methods=["POST"]),
            Route("/sessions/{session}/finish", self._answered(self._finish), methods=["POST"]),
            Route("/sessions/{session}/wait", self._answered(self._wait), methods=["GET"]),
            Route("/sessions/{session}/trajectory", self._answered(self._trajectory), methods=["GET"]),
        ]
        calls = [
            *((protocol.path, protocol, self._call) for protocol in PROTOCOLS.values()),
            ("messages/count_tokens", PROTOCOLS["messages"], self._count),
            ("responses/input_tokens", PROTOCOLS["responses"], self._count),
        ]
        for root in ("/s/{session}/v1", "/v1"):
            for path in ("models", "models/{name:path}"):
                routes += [Route(f"{root}/{path}", self._answered(self._models), methods=["GET"])]
            for path, protocol, call in calls:
                answer = self._answered(partial(call, protocol), protocol)
                routes += [Route(f"{root}/{path}", answer, methods=["POST"])]
        routes.append(Route("/s/{session}", _alive, methods=["GET"]))

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self.host:
                yield

        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})

    def _answered(
        self, handler: Callable[[Request], Awaitable[Response]], protocol: AgentProtocol = PROTOCOLS["chat"]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer errors in the protocol's form, and count."""

        async def answer(request: Request) -> Response:
            begun = time.monotonic()
            try:
                if not self.settings.keys:
                    check_page(request)
                response = await handler(request)
            except Exception as error:  # noqa: BLE001 - every error is answered
                if not isinstance(error, MMRenderError | RequestError):
                    _log.exception("a request failed", exc_info=error)
                response = _failed(protocol, failure_of(error))
            if not isinstance(response, Reply):
                self._record(request, response.status_code, begun)
            return response

        return answer

    def _record(self, request: Request, status: int, begun: float) -> None:
        route = request.scope["route"].path
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(time.monotonic() - begun)

    # --- callers ---

    def _owner(self, request: Request) -> str:
        """Return the owner of sessions that a caller's key names. Session keys open no sessions.

        Raises:
            RequestError: The key is missing or wrong.
        """
        key = key_of(request)
        if not self.settings.keys:
            return ""
        if not is_one_of(key, self.settings.keys):
            raise RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
        return _digest(key)

    async def _session(self, request: Request) -> Session:
        """Return the session of a call: named by its path, else by its key, else by a header."""
        key, name = key_of(request), request.path_params.get("session")
        session = self.host.session_of_key(key) if key else None
        if session is not None:
            if name not in (None, session.name):
                message = f"this key belongs to another session than {name!r}"
                raise RequestError(403, message, code="wrong_session", param="session")
            return session
        owner = self._owner(request)
        if name is None:
            name = next(filter(None, map(request.headers.get, _SESSION_HEADERS)), None)
        if name is None:
            if self.settings.keys or not key:
                message = "the request names no session: put /s/NAME before /v1 in the base URL"
                raise RequestError(400, message, code="no_session")
            name = f"key-{_digest(key)}"
        return await self.host.session(name, owner, open=self.settings.open_sessions)

    async def _named(self, request: Request) -> Session:
        """Return the session of a control request, which needs a caller's key."""
        return await self.host.session(request.path_params["session"], owner=self._owner(request))

    async def _body(self, request: Request) -> Body:
        return await read_body(request, self.settings.max_body_bytes, self.settings.read_seconds)

    # --- calls ---

    async def _call(self, protocol: AgentProtocol, request: Request) -> Response:
        begun = time.monotonic()
        session = await self._session(request)
        body = await self._body(request)
        if (model := str(body.value.get("model"))) in self.host.aliases:
            return await self._forwarded(request, model, body.value)
        call = await self._read(protocol, body, request)
        with ExitStack() as stack:
            stack.enter_context(self._rate.charged(key_of(request), call.n))
            pending = await session.begin(call)
            stack.callback(pending.leave)
            caller = Caller(request)
            stack.callback(caller.close)
            reply: bytes | AsyncIterator[bytes]
            if call.stream:
                seconds = self.settings.keep_alive_seconds
                await caller.wait_for(begin_stream(pending, seconds))
                reply = stream(pending, protocol.events(call, pending.answer_ids), seconds)
                headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
            else:
                answers = await caller.wait_for(pending.answers())
                reply = msgspec.json.encode(protocol.reply(call, answers))
                headers = {"content-type": "application/json"}
            # The response closes what is open so far, once it is sent or its caller has left.
            resources = stack.pop_all()

        def close(error: BaseException | None) -> None:
            status = error.status if isinstance(error, RequestError) else CallerLeftError().status
            self._record(request, 200 if error is None else status, begun)
            if error is None:
                pending.delivered()
            resources.close()

        return Reply(caller, reply, headers, close)

    async def _read(self, protocol: AgentProtocol, body: Body, request: Request) -> Call:
        """Read a body into a call, and digest it."""
        check_charge(body.value, self.settings.max_messages)
        headers = dict(request.headers)

        def read() -> Call:
            call = protocol.read(body.value, headers)
            _ = call.digests
            return call

        call = await work.do(read, size=body.size)
        if self.settings.models and call.model not in self.settings.models:
            served = ", ".join(self.settings.models)
            message = f"the model {call.model!r} is not served here, only {served}"
            raise RequestError(404, message, code="model_not_found", param="model")
        return call

    async def _forwarded(self, request: Request, name: str, body: Mapping[str, Any]) -> Response:
        """Pass a call for another model on, unrecorded. The model's key takes the place of the caller's."""
        path = "/v1/" + request.url.path.partition("/v1/")[2]
        kept = {each: request.headers[each] for each in _FORWARDED_HEADERS if each in request.headers}
        if key := self.host.alias_keys.get(name):
            own = {"authorization": f"Bearer {key}", "x-api-key": key}
            kept |= {header: value for header, value in own.items() if header in request.headers}
        caller = Caller(request)
        try:
            forwarding = self.host.forward(self.host.aliases[name], path, kept, msgspec.json.encode(body))
            status, headers, pieces = await caller.wait_for(forwarding)
        except BaseException:
            caller.close()
            raise
        kept = {"content-type": headers.get("content-type", "application/json")}
        return Reply(caller, pieces, kept, lambda error: None, status)

    async def _count(self, protocol: AgentProtocol, request: Request) -> Response:
        await self._session(request)
        body = await self._body(request)
        count = await self.host.count_tokens(await self._read(protocol, body, request))
        return _json({"input_tokens": count})

    async def _models(self, request: Request) -> Response:
        """Return a model, or the list of them if the request names none."""
        key = key_of(request)
        if not (key and self.host.session_of_key(key)):
            self._owner(request)
        limit = await self.host.engine.max_prompt_len()
        more = {} if limit is None else {"max_model_len": limit + 1}

        def card(name: str) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "type": "model",
                "display_name": name,
                "created": self._created,
                "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
                "owned_by": "mmrender",
                **more,
            }

        names = [*(self.settings.models or [self.host.model]), *self.host.aliases]
        named = request.path_params.get("name")
        if named is None:
            return _json({"object": "list", "data": list(map(card, names)), "has_more": False})
        if self.settings.models and named not in names:
            raise RequestError(404, f"the model {named!r} is not served here", code="model_not_found")
        return _json(card(named))

    # --- sessions ---

    async def _open(self, request: Request) -> Response:
        wish = await self._wish(request, _Opening)
        name = request.path_params.get("session", wish.name)
        if wish.name not in (None, name):
            message = f"the path names another session than {wish.name!r}"
            raise RequestError(400, message, code="invalid_value", param="name")
        options = {**msgspec.structs.asdict(wish), "name": name}
        session = await self.host.open_session(owner=self._owner(request), **options)
        root = str(request.base_url).rstrip("/")
        return _json(
            {
                **session.describe(),
                "base_url": f"{root}/s/{session.name}/v1",
                "anthropic_base_url": f"{root}/s/{session.name}",
                "api_key": session.api_key,
            },
            201,
        )

    async def _list(self, request: Request) -> Response:
        return _json({"data": [each.describe() for each in self.host.sessions(self._owner(request))]})

    async def _describe(self, request: Request) -> Response:
        return _json((await self._named(request)).describe())

    async def _reward(self, request: Request) -> Response:
        session, wish = await self._named(request), await self._wish(request, _Reward)
        await session.reward(wish.value, step=wish.step, response_id=wish.response_id)
        return _json(session.describe())

    async def _finish(self, request: Request) -> Response:
        session, wish = await self._named(request), await self._wish(request, _Finish)
        await session.finish(reward=wish.reward)
        return _json(session.describe())

    async def _abandon(self, request: Request) -> Response:
        session = await self._named(request)
        await session.abandon()
        return _json(session.describe())

    async def _wait(self, request: Request) -> Response:
        """Answer once the session has ended, or after a minute."""
        session = await self._named(request)
        with suppress(TimeoutError), closing(Caller(request)) as caller:
            async with asyncio.timeout(_WAIT_SECONDS):
                await caller.wait_for(session.wait())
        return _json(session.describe())

    async def _trajectory(self, request: Request) -> Response:
        session = await self._named(request)
        data = await asyncio.to_thread((await session.trajectory()).to_bytes)
        return Response(bytes(data), media_type="application/octet-stream")

    async def _wish(self, request: Request, form: type[FormT]) -> FormT:
        self._owner(request)  # before the body is read
        is_empty = request.headers.get("content-length") == "0"
        return convert({} if is_empty else (await self._body(request)).value, form)

    # --- the gateway itself ---

    async def _health(self, request: Request) -> Response:
        try:
            await self.host.check_health()
        except EngineError:
            return _json({"status": "unavailable"}, 503)
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._owner(request)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Opening(Strict):
    """Body that opens a session. See `Gateway.open_session`."""

    name: str | None = None
    group: str | None = None
    metadata: dict[str, Any] | None = None
    sampling_params: dict[str, Any] | None = None
    template_arguments: dict[str, Any] | None = None
    max_turns: int | None = None
    max_tokens: int | None = None


class _Reward(Strict):
    """Body of a reward: of a step, of a response, or of the session."""

    value: float
    step: int | None = None
    response_id: str | None = None


class _Finish(Strict):
    """Body that finishes a session."""

    reward: float | None = None


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _failed(protocol: AgentProtocol, failure: RequestError) -> Response:
    headers = {
        503: {"retry-after": "1"},
        429: {"retry-after": "1"},
        401: {"www-authenticate": "Bearer"},
        409: {"x-should-retry": "false"},  # OpenAI's and Anthropic's clients repeat such a call otherwise
    }
    body = protocol.error(failure.status, failure.code, str(failure), failure.param)
    return _json(body, failure.status, headers.get(failure.status))


def _digest(key: str) -> str:
    return blake3(key.encode("utf-8", "replace")).hexdigest(length=8)


async def _alive(request: Request) -> Response:
    return _json({"status": "ok"})


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    message = f"there is no route {request.method} {request.url.path}"
    return refusal(request.url.path, RequestError(status, message, code=code))


def refusal(path: str, failure: RequestError) -> Response:
    """Return an error in the form of a path's protocol."""
    name: ProtocolName = "messages" if "/v1/messages" in path else "chat"
    return _failed(PROTOCOLS[name], failure)
