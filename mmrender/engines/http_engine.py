"""`HTTPEngine`: one inference server, as a backend's wire and a transport make it reachable."""

import uuid
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from mmrender.client.placeholders import known_tokens
from mmrender.client.server_facts import prompt_limit
from mmrender.client.transport import Transport, as_transport
from mmrender.client.transport import read_events as events
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, RendererBackend
from mmrender.engines.control import Controller
from mmrender.engines.interface import (
    InferenceEngineInput,
    InferenceEngineOutput,
    NamedWeightsUpdate,
    PauseMode,
    RequestPayload,
)
from mmrender.engines.openai_bodies import opened
from mmrender.engines.routes import TABLES, RouteTable
from mmrender.engines.seeds import several
from mmrender.engines.together import together
from mmrender.engines.work import Work, joined, taken_apart
from mmrender.errors import EngineReplyError, EngineStateError, EngineUnsupportedError, InputError
from mmrender.spans import MultiModalData


class HTTPEngine:
    """One vLLM, SGLang or Dynamo server.

    It asks once: retries over engines are the client's. Pickled, it arrives as the same server, not paused.

    Args:
        backend: The server's wire, such as `VLLMBackend()`.
        server: The way to it: a transport, which stays the caller's to close, a URL, or what else
            `as_transport` takes.
        model: Name under which it knows the model.
        name: Names the engine; the URL by default.
        control: The way to the worker, for engines whose control routes are there.
        renderer: Renders conversations and decodes completions.
        routes: Control routes, where they are not those of the backend's name.
        tp_size: Ranks that share each layer.
        pp_size: Pipeline stages.
        dp_size: Replicas behind the URL.
        vocab_size: Ids at or above it are refused; the renderer's, or that of the client, by default.

    Raises:
        InputError: There are no routes for the backend, or the URL cannot be used.
    """

    def __init__(
        self,
        backend: RendererBackend,
        server: Any,
        *,
        model: str,
        name: str | None = None,
        control: Any = None,
        renderer: Any = None,
        routes: RouteTable | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        self.backend = backend
        self.transport = _own_transport(server)
        self.worker = None if control is None else _own_transport(control)
        ways = ((self.transport, server), (self.worker, control))
        self._own = [way for way, given in ways if way is not None and way is not given]
        self.model = model
        self.renderer = renderer
        self._name = name or self.transport.base_url
        self._routes = routes or _routes_of(backend)
        self._sizes = (tp_size, pp_size, dp_size)
        self._vocab_size = vocab_size
        self._tokens_of: Any = None
        if renderer is not None:
            self.learn_tokens(renderer)
        self._controller = Controller(self._routes, self.transport, self.worker, self._name)
        self._paused: bool | None = False

    def __repr__(self) -> str:
        return f"HTTPEngine({self.backend.name!r}, {self._name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_paused": False}

    @property
    def name(self) -> str:
        """Names the engine."""
        return self._name

    @property
    def pause_modes(self) -> frozenset[PauseMode]:
        """Modes that the server knows, as far as it can be told."""
        return frozenset(self._routes.pause_modes if "pause" in self._controller else ())

    def tp_size(self) -> int:
        """Ranks that share each layer."""
        return self._sizes[0]

    def pp_size(self) -> int:
        """Pipeline stages."""
        return self._sizes[1]

    def dp_size(self) -> int:
        """Replicas."""
        return self._sizes[2]

    def learn_tokens(self, renderer: Any) -> None:
        """Take from a renderer what ids prompts may hold, where the engine has no renderer of its own."""
        if self._tokens_of is not None:
            return
        self._tokens_of = renderer
        if self._vocab_size is None:
            self._vocab_size = getattr(renderer, "vocab_size", None)

    # --- sampling ---

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample one completion for each prompt, all at once; an abort is returned as such."""
        work = await taken_apart(input_batch, self.renderer)
        responses = await together([self._complete(each) for each in work])
        return joined(work, responses, None if self.renderer is None else self.renderer.decode)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: Mapping[str, Any],
        *,
        multi_modal_data: MultiModalData | None = None,
        session_id: Hashable | None = None,
    ) -> InferenceEngineOutput:
        """Sample several independent completions of one prompt."""
        return await self.generate(
            several(prompt_token_ids, num_samples, sampling_params, multi_modal_data, session_id)
        )

    async def _complete(self, work: Work) -> EngineResponse:
        return await self.backend.generate(
            self._request(work), self.transport, on_tokens=_listener(work.on_tokens)
        )

    def _request(self, work: Work) -> EngineRequest:
        options = work.options
        known = known_tokens(self._tokens_of, work.multi_modal_data)
        known["vocab_size"] = self._vocab_size
        return EngineRequest(
            model=self.model,
            prompt_ids=work.prompt_ids,
            multi_modal_data=work.multi_modal_data,
            sampling_params=work.params,
            request_id=uuid.uuid4().hex,
            cache_salt=options.get("cache_salt"),
            priority=options.get("priority"),
            extra_headers=options.get("extra_headers") or {},
            routed_experts=bool(options.get("routed_experts")),
            **known,
        )

    async def max_prompt_len(self) -> int | None:
        """The most tokens that a prompt may have, as the server says; asked once."""
        return await prompt_limit(self.backend, self.model, self.transport)

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Ask the server's own chat route; an abort is returned as such."""
        return await self._passed("/v1/chat/completions", request_payload)

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Ask the server's own completion route."""
        return await self._passed("/v1/completions", request_payload)

    async def _passed(self, path: str, payload: RequestPayload) -> dict[str, Any]:
        body, _, headers = opened(payload)
        reply = await self.transport.request("POST", path, json=self._named(body), headers=headers)
        try:
            content = msgspec.json.decode(reply.body)
        except msgspec.DecodeError as error:
            raise EngineReplyError("the reply is no JSON", where=f"{self._name}{path}") from error
        if not isinstance(content, dict):
            raise EngineReplyError(
                "the reply is no JSON object", where=f"{self._name}{path}", got=type(content).__name__
            )
        return content

    def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Ask the server's own chat route for a stream."""
        return self._streamed("/v1/chat/completions", request_payload)

    def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Ask the server's own completion route for a stream."""
        return self._streamed("/v1/completions", request_payload)

    def _streamed(self, path: str, payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        body, _, headers = opened(payload)
        lines = self.transport.stream(
            "POST", path, json={**self._named(body), "stream": True}, headers=headers
        )
        return events(lines, where=f"{self._name}{path}")

    def _named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**body, "model": self.model}

    # --- control ---

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause the server."""
        words = self._routes.pause_modes
        if mode not in words:
            raise EngineUnsupportedError(
                f"{self._routes.engine} has no such way to pause",
                where=f"{self._name}.pause",
                expected=" or ".join(sorted(words)),
                got=repr(mode),
            )
        if self._paused:
            raise EngineStateError("the engine is paused already", where=self._name)
        clear = clear_cache and mode != "keep"  # frozen requests keep theirs
        self._paused = None  # until the server has said so
        await self._controller.call("pause", mode=words[mode], clear_cache=clear, flush=clear)
        self._paused = True

    async def resume_generation(self) -> None:
        """Let the server go on."""
        if self._paused is False:
            raise EngineStateError("the engine is not paused", where=self._name)
        await self._controller.call("resume")
        self._paused = False

    async def abort_generation(self) -> None:
        """Abort every request on the server, other clients' too."""
        await self._controller.call("abort_all")

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Let the server give up memory."""
        by_level = "level" in self._routes.options["sleep"]
        await self._controller.call(
            "sleep", level=level if by_level or level != 1 else None, tags=_listed(tags)
        )

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Let the server take it back."""
        await self._controller.call("wake_up", tags=_listed(tags))

    async def reset_prefix_cache(self) -> None:
        """Let the server forget cached prefixes."""
        await self._controller.call("reset_prefix_cache")

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Let the server join the trainer's group."""
        await self._controller.call("init_weights", init_info=dict(init_info))

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let the server receive weights; returns when it has them."""
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
        """What the server calls its weights."""
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
    """The transport that was given, or one of the engine's own to what else names a server."""
    transport = as_transport(server)
    if transport is not server:
        from mmrender.client.http import HTTPTransport

        # `as_transport` gives everyone in the process the same, whose connections are not ours to close.
        if isinstance(transport, HTTPTransport):
            return HTTPTransport(transport.config)
    return transport


def _routes_of(backend: RendererBackend) -> RouteTable:
    if backend.name not in TABLES:
        raise InputError(
            "the control routes of this backend are not known",
            where="backend",
            expected=", ".join(sorted(TABLES)),
            got=repr(backend.name),
            remedy="Give routes=RouteTable(...)",
        )
    return TABLES[backend.name]


def _listener(listener: Any) -> OnTokens | None:
    """Adapt a listener that takes the finish reason by its method `ended`, where it has one."""
    if listener is None:
        return None

    def tell(ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason | None) -> None:
        if ids:
            listener(ids, logprobs)
        if reason in ("stop", "length") and hasattr(listener, "ended"):
            listener.ended(reason)

    return tell


def _listed(tags: Sequence[str] | None) -> list[str] | None:
    return None if tags is None else list(tags)
