"""The routes."""

import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.endpoint.chat import TokenChat
from mmrender.engines.endpoint.failures import RequestError, failure_of
from mmrender.engines.endpoint.http import (
    CallerLeftError,
    EventStream,
    JSONReply,
    check_key,
    first_of,
    read_body,
    while_connected,
)
from mmrender.engines.endpoint.metrics import ServerMetrics
from mmrender.engines.endpoint.requests import read_chat
from mmrender.engines.endpoint.settings import ServerSettings
from mmrender.engines.interface import RequestPayload
from mmrender.errors import EngineError, MMRenderError

_log = logging.getLogger("mmrender.engines")
_CALLER_LEFT = 499
"""What nginx counts a request as whose caller left."""


class Endpoint:
    """Answers requests over one client. All state is its own.

    Args:
        client: Samples.
        settings: What is served, and to whom.
        renderer: With it, chat is rendered here and sampled in tokens; without, it is passed to the engines'
            own chat routes. Completions are always passed on.
    """

    def __init__(self, client: InferenceEngineClient, settings: ServerSettings, renderer: Any = None) -> None:
        self.client = client
        self.settings = settings
        self.metrics = ServerMetrics(client)
        self._chat = None if renderer is None else TokenChat(client, renderer, settings)
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._counted(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._counted(self._model), methods=["GET"]),
            Route("/v1/chat/completions", self._counted(self._chat_completions), methods=["POST"]),
            Route("/v1/completions", self._counted(self._completions), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _not_found})

    # --- what is around every route ---

    def _counted(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            begun = time.monotonic()
            route = request.scope["route"].path
            try:
                check_key(request, self.settings.api_key)
                response = await handler(request)
            except CallerLeftError:
                response = Response(status_code=_CALLER_LEFT)
            except Exception as error:  # noqa: BLE001 - every error is answered
                response = _answered(error)
            if not isinstance(response, EventStream):
                self.metrics.answered(route, response.status_code, time.monotonic() - begun)
            return response

        return answer

    async def _opened(self, request: Request) -> tuple[dict[str, Any], Hashable | None]:
        """Body and session of a request that names the right model."""
        body = await read_body(request, self.settings.max_body_bytes)
        model = body.get("model")
        if model not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise RequestError(
                404,
                f"the model {model!r} is not served here, only {known}",
                code="model_not_found",
                param="model",
            )
        session = body.pop("session_id", None) or request.headers.get("x-session-id")
        if session is not None and not isinstance(session, str | int):
            raise RequestError(
                400, "session_id must be text or a number", code="invalid_value", param="session_id"
            )
        return body, session

    # --- routes ---

    async def _health(self, request: Request) -> Response:
        try:
            await self.client.check_health()
        except EngineError as error:
            return JSONReply({"status": "unavailable", "reason": str(error)}, 503)
        return JSONReply({"status": "paused" if self.client.is_paused else "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _models(self, request: Request) -> Response:
        return JSONReply({"object": "list", "data": [await self._card(n) for n in self.settings.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.settings.names:
            raise RequestError(404, f"the model {name!r} is not served here", code="model_not_found")
        return JSONReply(await self._card(name))

    async def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "mmrender"}
        try:
            limit = await self.client.max_prompt_len()
        except EngineError:
            limit = None
        return card if limit is None else {**card, "max_model_len": limit + 1}

    async def _chat_completions(self, request: Request) -> Response:
        body, session = await self._opened(request)
        if self._chat is None:
            return await self._passed_on(request, body, session, chat=True)
        chat = read_chat(body)
        if not chat.stream:
            reply = await while_connected(request, self._chat.reply(chat, session))
            return self._replied(reply)
        return await self._streamed(request, self._chat.stream(chat, session))

    async def _completions(self, request: Request) -> Response:
        body, session = await self._opened(request)
        return await self._passed_on(request, body, session, chat=False)

    async def _passed_on(
        self, request: Request, body: dict[str, Any], session: Hashable | None, *, chat: bool
    ) -> Response:
        wants_stream = body.pop("stream", None)
        payload: RequestPayload = {"json": {**body, "session_id": session}}
        client = self.client
        if wants_stream:
            stream = client.stream_chat_completion if chat else client.stream_completion
            return await self._streamed(request, stream(payload))
        body.pop("stream_options", None)
        whole = client.chat_completion if chat else client.completion
        reply = await while_connected(request, whole(payload))
        return self._replied({**reply, "model": self.settings.model})

    def _replied(self, reply: Mapping[str, Any]) -> Response:
        self._used(reply)
        return JSONReply(reply)

    async def _streamed(self, request: Request, values: Any) -> Response:
        begun = time.monotonic()
        route = request.scope["route"].path
        first, rest = await while_connected(request, first_of(self._watched(values)))

        def ended(error: Exception | None) -> None:
            status = 200 if error is None else _CALLER_LEFT
            self.metrics.answered(route, status, time.monotonic() - begun)

        return EventStream(first, rest, ended)

    async def _watched(self, values: Any) -> Any:
        try:
            async for value in values:
                self._used(value)
                yield {**value, "model": self.settings.model}
        finally:
            await values.aclose()

    def _used(self, reply: Mapping[str, Any]) -> None:
        usage = reply.get("usage")
        if isinstance(usage, Mapping):
            self.metrics.used(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)


def _answered(error: Exception) -> Response:
    failure = failure_of(error)
    if not isinstance(error, MMRenderError | RequestError):
        _log.exception("a request failed", exc_info=error)
    headers = {"retry-after": "1"} if failure.status == 503 else {}
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONReply(failure.envelope(), failure.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    problem = f"there is no route {request.method} {request.url.path}"
    return JSONReply(RequestError(status, problem, code=code or "http_error").failure.envelope(), status)
