"""`HTTPEngine`: one inference server, by its backend's wire and its control routes."""

import uuid
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from mmrender.client.generation import BackendName, as_transport, resolve_backend
from mmrender.client.placeholders import known_tokens
from mmrender.client.server_facts import prompt_limit
from mmrender.client.transport import Transport, read_events
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.engines.interface import (
    InferenceEngineInterface,
    NamedWeightsUpdate,
    PauseMode,
    RequestPayload,
)
from mmrender.engines.routes import TABLES, Controller, RouteTable
from mmrender.errors import EngineReplyError, EngineStateError, EngineUnsupportedError, InputError
from mmrender.protocols import RendererProtocol

SESSION_HEADER: Final = "X-Session-ID"


class HTTPEngine(InferenceEngineInterface):
    """One vLLM, SGLang or Dynamo server, or a router in front of several.

    It asks once: retries over engines are the client's. Pickled, it arrives as the same server, not paused.

    Args:
        backend: The server's wire, or its name.
        server: A transport, which the caller closes, a URL, or what else `as_transport` takes.
        model: Name under which the server knows the model.
        name: Name of the engine; the URL by default.
        control: The server that has the control routes, where it is another one.
        renderer: Renders conversations and decodes completions.
        routes: Control routes, where they are not those of the backend's name.
        tp_size: Ranks that share each layer.
        pp_size: Pipeline stages.
        dp_size: Replicas behind the URL.

    Raises:
        InputError: The backend has no known routes, or the URL cannot be used.
    """

    def __init__(
        self,
        backend: RendererBackend | BackendName,
        server: Any,
        *,
        model: str,
        name: str | None = None,
        control: Any = None,
        renderer: RendererProtocol | None = None,
        routes: RouteTable | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
    ) -> None:
        self.backend = resolve_backend(backend, None, model)
        if routes is None and self.backend.name not in TABLES:
            raise InputError(
                "the control routes of this backend are unknown",
                where="backend",
                expected=", ".join(sorted(TABLES)),
                got=repr(self.backend.name),
                remedy="Give routes=RouteTable(...)",
            )
        self.transport = _own_transport(server)
        self.worker = None if control is None else _own_transport(control)
        transports = (self.transport, self.worker)
        self._own = [each for each in transports if each and each not in (server, control)]
        self.model = model
        self.renderer = renderer
        self.name = name or self.transport.base_url
        self.tp, self.pp, self.dp = tp_size, pp_size, dp_size
        self._routes = routes or TABLES[self.backend.name]
        self._controller = Controller(self._routes, self.transport, self.worker, self.name)
        self._paused: bool | None = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_paused": False}

    @property
    def pause_modes(self) -> frozenset[PauseMode]:  # type: ignore[override]
        """Modes that the server knows; `abort` only where aborted and finished completions can be told apart.

        Dynamo reports an abort as a stop, so that takes a renderer or `DynamoBackend(eos_token_ids=...)`.
        """
        modes = frozenset(self._routes.pause_modes if "pause" in self._controller else ())
        return modes if self._knows_aborts else modes - {"abort"}

    @property
    def _knows_aborts(self) -> bool:
        known = getattr(self.backend, "eos_token_ids", None) is not None or self.renderer is not None
        return known or self._routes.engine != "dynamo"

    # --- sampling ---

    async def complete(
        self,
        request: EngineRequest,
        *,
        session_id: Hashable | None = None,
        on_tokens: OnTokens | None = None,
    ) -> EngineResponse:
        """Sample one completion; an abort is returned as such."""
        known: Mapping[str, Any] = {}
        if self.renderer is not None and request.vocab_size is None:
            known = known_tokens(self.renderer, request.multi_modal_data)
        headers = dict(request.extra_headers)
        if session_id is not None:
            headers[SESSION_HEADER] = str(session_id)
        sent = replace(request, model=self.model, request_id=uuid.uuid4().hex, extra_headers=headers, **known)
        return await self.backend.generate(sent, self.transport, on_tokens=on_tokens)

    async def max_prompt_len(self) -> int | None:
        """Return the most tokens that a prompt may have, as the server says; asked once."""
        return await prompt_limit(self.backend, self.model, self.transport)

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Ask the server's own chat route; an abort is returned as such."""
        return await self._post("/v1/chat/completions", request_payload)

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Ask the server's own completion route."""
        return await self._post("/v1/completions", request_payload)

    def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Ask the server's own chat route for a stream."""
        return self._stream("/v1/chat/completions", request_payload)

    def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Ask the server's own completion route for a stream."""
        return self._stream("/v1/completions", request_payload)

    async def _post(self, path: str, payload: RequestPayload) -> dict[str, Any]:
        body, headers = self._opened(payload)
        reply = await self.transport.request("POST", path, json=body, headers=headers)
        try:
            return msgspec.json.decode(reply.body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineReplyError("the reply is not a JSON object", where=f"{self.name}{path}") from error

    def _stream(self, path: str, payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        body, headers = self._opened(payload)
        lines = self.transport.stream("POST", path, json={**body, "stream": True}, headers=headers)
        return read_events(lines, where=f"{self.name}{path}")

    def _opened(self, payload: RequestPayload) -> tuple[dict[str, Any], dict[str, str]]:
        """Body and headers of a payload, the session among the latter."""
        body, headers = dict(payload["json"]), dict(payload.get("headers") or {})
        session = body.pop("session_id", None)
        if session is not None:
            headers[SESSION_HEADER] = str(session)
        return {**body, "model": self.model}, headers

    # --- control ---

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause the server."""
        words = self._routes.pause_modes
        if mode not in words or (mode == "abort" and not self._knows_aborts):
            raise EngineUnsupportedError(
                f"{self._routes.engine} cannot be paused this way",
                where=f"{self.name}.pause",
                expected=" or ".join(sorted(self.pause_modes)),
                got=repr(mode),
                remedy="Give a renderer, or DynamoBackend(eos_token_ids=...)" if mode in words else None,
            )
        if self._paused:
            raise EngineStateError("the engine is paused already", where=self.name)
        clear = clear_cache and mode != "keep"  # frozen requests keep theirs
        self._paused = None  # unknown until the server has answered
        await self._controller.call("pause", mode=words[mode], clear_cache=clear)
        self._paused = True

    async def resume_generation(self) -> None:
        """Resume the server."""
        if self._paused is False:
            raise EngineStateError("the engine is not paused", where=self.name)
        await self._controller.call("resume")
        self._paused = False

    async def abort_generation(self) -> None:
        """Abort every request on the server, other clients' too."""
        if not self._knows_aborts:
            raise EngineUnsupportedError(
                "an aborted completion would look like a finished one",
                where=f"{self.name}.abort",
                remedy="Give a renderer, or DynamoBackend(eos_token_ids=...)",
            )
        await self._controller.call("abort_all")

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Free the server's memory."""
        await self._controller.call("sleep", level=level, tags=tags and list(tags))

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Take the memory back."""
        await self._controller.call("wake_up", tags=tags and list(tags))

    async def reset_prefix_cache(self) -> None:
        """Drop the server's cached prefixes."""
        await self._controller.call("reset_prefix_cache")

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Let the server join the trainer's group."""
        await self._controller.call("init_weights", init_info=dict(init_info))

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let the server receive weights; return when it has them."""
        missing = [name for name in ("names", "dtypes", "shapes") if name not in request]
        if missing:
            raise InputError("a part of the weight update is missing", where=f"request.{missing[0]}")
        await self._controller.call(
            "update_weights",
            names=list(request["names"]),
            dtypes=list(request["dtypes"]),
            shapes=[list(shape) for shape in request["shapes"]],
            version=request.get("weight_version"),
            extras=dict(request.get("extras") or {}),
        )

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Let the server read weights from a model directory that it can reach."""
        await self._controller.call("load_weights", path=path, version=weight_version)

    async def weight_version(self) -> str | None:
        """Return the server's name of its weights."""
        version = await self._controller.call("get_version")
        return None if version is None else str(version)

    async def set_weight_version(self, version: str) -> None:
        """Name the server's weights."""
        await self._controller.call("set_version", version=version)

    async def check_health(self) -> None:
        """Return if the server says that it serves."""
        await self._controller.call("health")

    async def teardown(self) -> None:
        """Close the engine's own connections of this event loop; the server runs on."""
        for transport in self._own:
            await transport.aclose()


def _own_transport(server: Any) -> Transport:
    """Return the given transport, or a new one: those of `as_transport` are shared, and not ours to close."""
    transport = as_transport(server)
    if transport is not server:
        from mmrender.client.http import HTTPTransport

        if isinstance(transport, HTTPTransport):
            return HTTPTransport(transport.config)
    return transport
