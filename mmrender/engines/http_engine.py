"""`HTTPEngine`: one inference server, with the wire of its backend and its control routes."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from mmrender.client.engine import Engine
from mmrender.client.reply import decode_as, read_events
from mmrender.client.resolve import BackendName, as_transport, server_root
from mmrender.client.transport import Server, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.engines.interface import (
    Control,
    InferenceEngineInterface,
    NamedWeightsUpdate,
    OpenAICall,
    PauseMode,
    RequestPayload,
)
from mmrender.engines.routes import TABLES, Route, RouteTable
from mmrender.errors import (
    EngineReplyError,
    EngineStateError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
)
from mmrender.protocols import RendererProtocol

SESSION_HEADER: Final = "X-Session-ID"
_SESSION_HEADERS: Final = (SESSION_HEADER, "X-SMG-Routing-Key")
"""Headers by which routers keep a session at one server: vllm-router and Ray Serve, SGLang's gateway."""
_PATHS: Final = {"chat_completion": "/v1/chat/completions", "completion": "/v1/completions"}
_ONCE: Final = ("init_weight_update_communicator", "update_named_weights", "reports_pause")
"""Calls that must not be repeated, since they have an effect each time, or status 503 is an answer."""


class HTTPEngine(InferenceEngineInterface):
    """One vLLM, SGLang or Dynamo server, or a router in front of several.

    Each request is sent once, since a client retries. Pickled, it arrives as the same server, not paused.

    Args:
        backend: The server's wire, or its name.
        server: A URL, or another server as for `as_transport`. The caller closes a transport.
        model: Name under which the server knows the model.
        name: Name of the engine, by default the URL.
        control: The server with the control routes, if it is another one.
        renderer: Renders conversations and decodes completions.
        routes: Control routes, by default the routes of the backend's name.
        tp_size: Ranks that share each layer.
        pp_size: Pipeline stages.
        dp_size: Replicas behind the URL.

    Raises:
        InputError: The backend has no known routes, or the URL cannot be used.
    """

    def __init__(
        self,
        backend: RendererBackend | BackendName,
        server: Server,
        *,
        model: str,
        name: str | None = None,
        control: Server | None = None,
        renderer: RendererProtocol | None = None,
        routes: RouteTable | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
    ) -> None:
        self.transport = _own_transport(server)
        self.sampler = Engine(backend, self.transport, model=model, renderer=renderer)
        name_of_backend = self.sampler.backend.name
        table = routes or TABLES.get(name_of_backend)
        if table is None:
            raise InputError(
                "the control routes of this backend are unknown",
                where="backend",
                expected=", ".join(sorted(TABLES)),
                got=repr(name_of_backend),
                remedy="Pass routes=RouteTable(...)",
            )
        self.worker = None if control is None else _own_transport(control)
        transports = (self.transport, self.worker)
        self._own = [each for each in transports if each and each not in (server, control)]
        self.model = model
        self.name = name or self.transport.base_url
        self.tp, self.pp, self.dp = tp_size, pp_size, dp_size
        self._routes = table
        self._paused: bool | None = False

    def behind(self, router: str) -> "HTTPEngine":
        """Return an engine at the URL of a router before this server, with its keys and time limits."""
        from mmrender.client.http import HTTPTransport

        server: Server = router
        if isinstance(self.transport, HTTPTransport):
            server = replace(self.transport.config, base_url=server_root(router))
        backend, renderer = self.sampler.backend, self.sampler.renderer
        return HTTPEngine(backend, server, model=self.model, renderer=renderer, routes=self._routes)

    @property
    def renderer(self) -> RendererProtocol | None:
        """Renders conversations and decodes completions. A client lends its own."""
        return self.sampler.renderer

    @renderer.setter
    def renderer(self, renderer: RendererProtocol | None) -> None:
        self.sampler = Engine(self.sampler.backend, self.transport, model=self.model, renderer=renderer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_paused": False}

    # --- sampling ---

    async def complete(
        self, request: EngineRequest, *, session_id: Hashable | None = None, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion. An abort is returned to the caller."""
        headers = {**request.extra_headers, **_headers_of(session_id)}
        request = replace(request, model=self.model, request_id=uuid.uuid4().hex, extra_headers=headers)
        sent = self.sampler.tokens.added_to(request)
        return await self.sampler.backend.generate(sent, self.transport, on_tokens=on_tokens)

    async def max_prompt_len(self) -> int | None:
        """Return the server's maximum number of tokens of a prompt, asked once."""
        return await self.sampler.max_prompt_len()

    async def openai(self, call: OpenAICall, request_payload: RequestPayload) -> dict[str, Any]:
        """Ask the server's own route. An abort is returned to the caller."""
        body, headers = self._body_and_headers(request_payload)
        reply = await self.transport.request("POST", _PATHS[call], json=body, headers=headers)
        return decode_as(reply.body, dict[str, Any], where=f"{self.name}{_PATHS[call]}")

    def stream_openai(
        self, call: OpenAICall, request_payload: RequestPayload
    ) -> AsyncIterator[dict[str, Any]]:
        """Ask the server's own route for a stream."""
        body, headers = self._body_and_headers(request_payload)
        lines = self.transport.stream("POST", _PATHS[call], json={**body, "stream": True}, headers=headers)
        return read_events(lines, dict[str, Any], where=f"{self.name}{_PATHS[call]}")

    def _body_and_headers(self, payload: RequestPayload) -> tuple[dict[str, Any], dict[str, str]]:
        body, headers = dict(payload["json"]), dict(payload.get("headers") or {})
        session = body.pop("session_id", None)
        return {**body, "model": self.model}, {**headers, **_headers_of(session)}

    # --- control ---

    @property
    def pause_modes(self) -> frozenset[PauseMode]:  # type: ignore[override]
        """Modes that the server knows, including `abort` only if aborts can be distinguished from ends.

        Dynamo reports both as a stop, so it needs a renderer or `DynamoBackend(eos_token_ids=...)`.
        """
        if self._routes.on_worker and self.worker is None:
            return frozenset()
        known = getattr(self.sampler.backend, "eos_token_ids", None) is not None or self.renderer is not None
        unknown = {"abort"} if self._routes.engine == "dynamo" and not known else set()
        return frozenset(self._routes.pause_modes) - unknown

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause the server."""
        words, modes = self._routes.pause_modes, self.pause_modes
        if modes and mode not in modes:
            raise EngineUnsupportedError(
                f"{self._routes.engine} cannot be paused this way",
                where=f"{self.name}.pause_generation",
                expected=" or ".join(sorted(modes)),
                got=repr(mode),
                remedy="Pass a renderer, or DynamoBackend(eos_token_ids=...)" if mode in words else None,
            )
        if self._paused:
            raise EngineStateError("the engine is paused already", where=self.name)
        clear = clear_cache and mode != "keep"  # frozen requests keep theirs
        self._paused = None  # unknown until the server has answered
        await self.control("pause_generation", mode=words.get(mode, mode), clear_cache=clear)
        self._paused = True

    async def resume_generation(self) -> None:
        """Resume the server, also from a pause of another client that it reports."""
        if self._paused is False and not await self.reports_pause():
            raise EngineStateError("the engine is not paused", where=self.name)
        await self.control("resume_generation")
        self._paused = False

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let the server receive weights and return when it has received them."""
        missing = [name for name in ("names", "dtypes", "shapes") if name not in request]
        if missing:
            raise InputError("a part of the weight update is missing", where=f"request.{missing[0]}")
        await self.control("update_named_weights", **request)

    async def control(self, call: Control, /, **arguments: Any) -> Any:
        """Make the requests of a control call and return the result in the last reply, or None.

        Raises:
            EngineUnsupportedError: The engine lacks the call or an argument of it.
            EngineStateError: The engine says that the call does not fit its state.
            EngineError: The engine was not reached, or refused.
        """
        where, table = f"{self.name}.{call}", self._routes
        routes = table.controls.get(call, ())
        if not routes:
            raise EngineUnsupportedError(f"{table.engine} lacks this call", where=where)
        transport = self.transport
        if table.on_worker and call != "check_health":
            if self.worker is None:
                raise EngineUnsupportedError(
                    f"{table.engine} has this call on its worker only", where=where, remedy=table.remedy
                )
            transport = self.worker
        for name in {"level", "tags"} & arguments.keys():
            value = arguments[name]
            if value not in (None, 1) and not any(route.takes(name) for route in routes):  # 1 is the default
                problem = f"{table.engine} does not know this argument of {call}"
                raise EngineUnsupportedError(problem, where=f"{where}.{name}", got=repr(value))
        result = None
        for route in routes:
            if route.needs is None or arguments.get(route.needs):
                result = await self._request(transport, route, call, arguments)
        return result

    async def _request(
        self, transport: Transport, route: Route, call: Control, arguments: Mapping[str, Any]
    ) -> Any:
        """Make one request. Some routes answer in plain text, and some refuse with status 200."""
        where, remedy = f"{self.name}.{call}", "Pause first" if "cache" in route.path else None
        method, _, _ = route.path.partition(" ")
        path, body = route.filled(arguments)
        try:
            reply = await transport.request(method, path, json=body, idempotent=call not in _ONCE)
        except EngineStatusError as error:
            if error.status in route.statuses:
                return route.statuses[error.status]
            if error.status in (404, 405):
                problem = f"the server has no route {path.partition('?')[0]}"
                raise EngineUnsupportedError(problem, where=where, remedy=self._routes.remedy) from error
            if error.status in self._routes.busy and remedy:
                problem, got = "cached prefixes are in use", error.body[:200]
                raise EngineStateError(problem, where=where, got=got, remedy=remedy) from error
            raise
        if reply.status in route.statuses:
            return route.statuses[reply.status]
        content = None
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            content = msgspec.json.decode(reply.body)
        if isinstance(content, Mapping):
            if content.get("success") is False or content.get("status") == "error":
                got = str(content.get("message") or dict(content))[:300]
                raise EngineStateError("the engine refused", where=where, got=got, remedy=remedy)
            return None if route.answer is None else content.get(route.answer)
        if route.answer is not None:
            raise EngineReplyError("the reply is not a JSON object", where=where, got=repr(content)[:200])
        return None

    async def teardown(self) -> None:
        """Close the engine's own connections of this event loop. The server runs on."""
        for transport in self._own:
            await transport.aclose()


def _headers_of(session: Hashable | None) -> dict[str, str]:
    return {} if session is None else dict.fromkeys(_SESSION_HEADERS, str(session))


def _own_transport(server: Server) -> Transport:
    """Return a transport that the engine may close, or the caller's. `as_transport` returns shared ones."""
    transport = as_transport(server)
    if transport is not server:
        from mmrender.client.http import HTTPTransport

        if isinstance(transport, HTTPTransport):
            return HTTPTransport(transport.config)
    return transport


def at_router(url: str, engines: Sequence[InferenceEngineInterface]) -> HTTPEngine:
    """Return an engine at the URL of a router before these servers.

    Raises:
        InputError: They differ in backend or model, or are not all servers.
    """
    servers = [engine for engine in engines if isinstance(engine, HTTPEngine)]
    kinds = {f"{engine.sampler.backend.name} {engine.model}" for engine in servers}
    others = {type(engine).__name__ for engine in engines} - {type(engine).__name__ for engine in servers}
    if len(kinds) != 1 or others:
        raise InputError(
            "a router's URL does not say how these engines are asked",
            where="router",
            expected="HTTPEngine objects of one backend and model",
            got=", ".join(sorted(kinds | others)),
            remedy="Give router=HTTPEngine(...)",
        )
    return servers[0].behind(url)
