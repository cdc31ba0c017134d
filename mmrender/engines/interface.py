"""`InferenceEngineInterface`: one inference engine, or many that act as one. Its method names are SkyRL's.

An engine implements `complete`, `control` for its control calls, and `openai` if it answers OpenAI requests.
Batches are split and merged here.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from mmrender.client.generation import render_prompt
from mmrender.client.sampling import token_budget
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.errors import EngineStateError, EngineUnsupportedError, InputError
from mmrender.protocols import RendererProtocol, RenderOptions
from mmrender.sidecar import MultiModalData
from mmrender.workers import gather_all

Result = TypeVar("Result")
Chunk: TypeAlias = dict[str, Any]
"""A reply to an OpenAI request, or a piece of its stream."""

PauseMode: TypeAlias = Literal["abort", "keep", "wait"]
"""How a pause treats running requests: they return their tokens so far, are frozen, or run to their end."""

Control: TypeAlias = Literal[
    "pause_generation", "resume_generation", "abort_generation", "reports_pause", "sleep", "wake_up",
    "reset_prefix_cache", "init_weight_update_communicator", "update_named_weights", "load_weights",
    "weight_version", "set_weight_version", "check_health",
]  # fmt: skip
"""Control calls, by the names of their methods."""

Outcome: TypeAlias = Literal["ok", "failed", "timed out"]


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The result of a control call on one engine.

    Attributes:
        name: Name of the engine, by default its URL.
        outcome: Whether it obeyed, failed, or did not answer in time.
        value: Its answer, if the call has one.
        error: Why it did not obey, or None.
    """

    name: str
    outcome: Outcome = "ok"
    value: Any = None
    error: Exception | None = None


OpenAICall: TypeAlias = Literal["chat_completion", "completion"]


class InferenceEngineInput(TypedDict, total=False):
    """Prompts to sample from, as either `prompts` or `prompt_token_ids`.

    Attributes:
        prompts: Conversations, each a list of messages. They need an engine with a renderer.
        prompt_token_ids: Prompts as token ids, with widened placeholders.
        multi_modal_data: With `prompt_token_ids`: the sidecar of each prompt, or None.
        sampling_params: In vLLM's names, including `max_tokens`: one mapping for all prompts, or one each.
        session_ids: Prompts of one session go to one engine. None without a session.
        tools: With `prompts`: tool definitions of all conversations.
        template_arguments: With `prompts`: further template variables.
    """

    prompts: Sequence[Sequence[Any]] | None
    prompt_token_ids: Sequence[Sequence[int]] | None
    multi_modal_data: Sequence[MultiModalData | None] | None
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    session_ids: Sequence[Hashable | None] | None
    tools: Sequence[Any] | None
    template_arguments: Mapping[str, Any] | None


class InferenceEngineOutput(TypedDict):
    """Sampled completions. Every list has one entry per prompt, in the order of the input.

    Attributes:
        responses: Text of each completion with special tokens, or None without a renderer.
        response_ids: Sampled tokens, including a sampled stop token.
        stop_reasons: `stop`, `length` or `abort`.
        response_logprobs: One finite number per sampled token.
        engine_responses: Everything else that the engine reported, such as usage and weight versions.
    """

    responses: list[str] | None
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]]
    engine_responses: list[EngineResponse]


class RequestPayload(TypedDict, total=False):
    """An OpenAI request: its body, in which `session_id` routes it, and further headers."""

    json: Mapping[str, Any]
    headers: Mapping[str, str]


class NamedWeightsUpdate(TypedDict, total=False):
    """One transfer of weights, which the trainer sends at the same time through the communicator.

    Attributes:
        names: Parameter names.
        dtypes: Their dtypes by torch's names without `torch.`, such as `bfloat16`.
        shapes: Their shapes.
        weight_version: Name of the new weights.
        extras: Further fields, in the engine's own names.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    weight_version: str | None
    extras: Mapping[str, Any]


class InferenceEngineInterface(ABC):
    """One engine, or many that act as one.

    A call that an engine lacks raises `EngineUnsupportedError`, any other failure another `EngineError`.
    Cancelling the task that awaits a completion ends it on the engine.

    Attributes:
        name: Name in errors, metrics and routing, unique among the engines of a client.
        pause_modes: Modes that the engine itself knows.
        renderer: Renders conversations and decodes completions. None samples from token ids alone.
        tp, pp, dp: Ranks that share each layer, pipeline stages, replicas.
    """

    name: str
    pause_modes: frozenset[PauseMode] = frozenset()
    renderer: RendererProtocol | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1

    # --- implemented by an engine ---

    @abstractmethod
    async def complete(
        self, request: EngineRequest, *, session_id: Hashable | None = None, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion of one prompt.

        Args:
            request: The request. The engine sets its `model` and `request_id`.
            session_id: Requests of one session go to one engine.
            on_tokens: Called with tokens as they arrive, each once and in order.
        """

    async def control(self, call: Control, /, **arguments: Any) -> Any:
        """Carry out a control call with the arguments of its method and return the result."""
        raise EngineUnsupportedError("the engine lacks this call", where=f"{self.name}.{call}")

    async def openai(self, call: OpenAICall, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI request with its JSON reply.

        Raises:
            EngineStatusError: The engine refused, with its own `status` and `body`.
        """
        raise EngineUnsupportedError("the engine lacks this call", where=f"{self.name}.{call}")

    def stream_openai(
        self, call: OpenAICall, request_payload: RequestPayload
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI request with the chunks of its stream. Errors as for `openai`."""
        raise EngineUnsupportedError("the engine lacks this call", where=f"{self.name}.stream_{call}")

    async def max_prompt_len(self) -> int | None:
        """Return the maximum number of tokens of a prompt, or None if unknown."""
        return None

    async def teardown(self) -> None:
        """Close connections. Idempotent."""
        return

    # --- sampling ---

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample one completion for each prompt, concurrently and in order.

        Raises:
            InputError: The input is malformed. `where` names the field.
            EngineError: A prompt could not be completed. The others are cancelled then.
        """
        requests, sessions = await split_batch(input_batch, self.renderer)
        responses = await gather_all(
            [
                self.complete(request, session_id=session)
                for request, session in zip(requests, sessions, strict=True)
            ]
        )
        decode = None if self.renderer is None else self.renderer.decode
        return {
            "responses": None if decode is None else [decode(each.completion_ids) for each in responses],
            "response_ids": [each.completion_ids for each in responses],
            "stop_reasons": [each.finish_reason for each in responses],
            "response_logprobs": [each.logprobs for each in responses],
            "engine_responses": responses,
        }

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: Mapping[str, Any],
        *,
        multi_modal_data: MultiModalData | None = None,
        session_id: Hashable | None = None,
    ) -> InferenceEngineOutput:
        """Sample several independent completions of one prompt. A `seed` is raised by one for each."""
        return await self.generate(
            {
                "prompt_token_ids": [prompt_token_ids] * num_samples,
                "multi_modal_data": [multi_modal_data] * num_samples,
                "sampling_params": with_own_seeds(sampling_params, num_samples),
                "session_ids": [session_id] * num_samples,
            }
        )

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI chat request. See `openai`."""
        return await self.openai("chat_completion", request_payload)

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI completion request. See `openai`."""
        return await self.openai("completion", request_payload)

    def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI chat request with the chunks of its stream."""
        return self.stream_openai("chat_completion", request_payload)

    def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI completion request with the chunks of its stream."""
        return self.stream_openai("completion", request_payload)

    # --- control: a client of several engines returns one `EngineResult` for each ---

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> object:
        """Stop generating until `resume_generation`.

        Args:
            mode: How running requests are paused.
            clear_cache: Drop cached prefixes too, as new weights need. Frozen requests keep theirs.

        Raises:
            EngineStateError: It is paused already.
        """
        return await self.control("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> object:
        """Resume generating. `EngineStateError` if it is not paused."""
        return await self.control("resume_generation")

    async def abort_generation(self) -> object:
        """End every request in flight. Each returns its tokens so far, with the stop reason `abort`."""
        return await self.control("abort_generation")

    async def reports_pause(self) -> bool | None:
        """Return whether any client has paused the engine, or None if it does not say."""
        try:
            paused: bool | None = await self.control("reports_pause")
        except EngineUnsupportedError:
            return None
        return paused

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> object:
        """Free memory. `level` 1 keeps weights on the host, 2 drops them. `tags` names single parts."""
        return await self.control("sleep", level=level, tags=tags)

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> object:
        """Take the memory back, or only the parts that `tags` names, such as `weights`."""
        return await self.control("wake_up", tags=tags)

    async def reset_prefix_cache(self) -> object:
        """Drop cached prefixes. `EngineStateError` if they are in use."""
        return await self.control("reset_prefix_cache")

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> object:
        """Join the group through which the trainer sends weights. Fields have the engine's own names."""
        return await self.control("init_weight_update_communicator", init_info=init_info)

    async def update_named_weights(self, request: NamedWeightsUpdate) -> object:
        """Receive weights from the trainer and return when the engine has them."""
        return await self.control("update_named_weights", request=request)

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> object:
        """Read weights from a model directory that the engine can reach."""
        return await self.control("load_weights", path=path, weight_version=weight_version)

    async def weight_version(self) -> str | None:
        """Return the name of the weights, or None if they are unnamed."""
        version = await self.control("weight_version")
        return None if version is None else str(version)

    async def set_weight_version(self, version: str) -> object:
        """Name the weights."""
        return await self.control("set_weight_version", version=version)

    async def check_health(self) -> object:
        """Return if the engine serves and raise an `EngineError` if it does not."""
        return await self.control("check_health")

    def tp_size(self) -> int:
        """Ranks that share each layer."""
        return self.tp

    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.pp

    def dp_size(self) -> int:
        """Replicas."""
        return self.dp


async def split_batch(
    batch: InferenceEngineInput, renderer: RendererProtocol | None = None
) -> tuple[list[EngineRequest], list[Hashable | None]]:
    """Split a batch into requests and their sessions. Conversations are rendered off the event loop.

    Raises:
        InputError: The batch is malformed. `where` names the field.
        SamplingParameterError: A token budget is missing or unusable.
        RenderError, MediaError, MessageError: A conversation cannot be rendered.
    """
    known = InferenceEngineInput.__annotations__
    if unknown := sorted(set(batch) - set(known)):
        raise InputError("unknown field", where=unknown[0], expected=f"one of {', '.join(sorted(known))}")
    ids, conversations = batch.get("prompt_token_ids"), batch.get("prompts")
    prompts: Sequence[Any] | None = conversations if ids is None else ids
    if prompts is None or (ids is not None and conversations is not None):
        raise InputError(
            "prompts must be passed in one form",
            expected="either 'prompts' or 'prompt_token_ids'",
            got="neither" if prompts is None else "both",
        )
    form = "prompts" if ids is None else "prompt_token_ids"
    if prompts and isinstance(prompts[0], Mapping | int):
        raise InputError("expected a list of prompts, got a single one", where=form, remedy="Write [prompt]")
    if batch.get("sampling_params") is None:
        remedy = "Pass at least {'max_tokens': N}"
        raise InputError("sampling parameters are missing", where="sampling_params", remedy=remedy)
    params, sessions, sidecars = (
        one_each("prompt", len(prompts), batch.get(name), where=name)
        for name in ("sampling_params", "session_ids", "multi_modal_data")
    )
    for each in params:
        token_budget(each)
    if ids is None:
        if renderer is None:
            remedy = "Give the engine or client a renderer, or pass prompt_token_ids"
            raise InputError("conversations need a renderer", where="prompts", remedy=remedy)
        options: RenderOptions = {
            "tools": batch.get("tools"),
            "chat_template_kwargs": batch.get("template_arguments"),
        }
        rendered = await gather_all(
            [render_prompt(renderer, each, in_thread=True, **options) for each in prompts]
        )
        # A rendering may be memoised, and the caller may change the prompt's list.
        prompts = [list(each.token_ids) for each in rendered]
        sidecars = [each.multi_modal_data for each in rendered]
    for index, each in enumerate(prompts):
        if not len(each):
            raise InputError("the prompt is empty", where=f"{form}[{index}]")
    return [new_request(*each) for each in zip(prompts, params, sidecars, strict=True)], sessions


def one_each(owner: str, count: int, values: Any, *, where: str) -> list[Any]:
    """Return a value for each of `count` owners, such as prompts. One mapping, or None, is for all."""
    if values is None or isinstance(values, Mapping):
        return [values] * count
    if len(values) != count:
        problem = f"must have one entry for each {owner}"
        raise InputError(problem, where=where, expected=str(count), got=str(len(values)))
    return list(values)


def new_request(
    prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], data: MultiModalData | None = None
) -> EngineRequest:
    """Build a request. The engine sets its model and id."""
    return EngineRequest("", prompt_ids, sampling_params, "", multi_modal_data=data or MultiModalData())


def with_own_seeds(params: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """Return the sampling parameters of several samples of one prompt: each its own seed, and no `n`."""
    rest = {name: value for name, value in params.items() if name != "n"}
    seed = params.get("seed")
    return [rest if seed is None else {**rest, "seed": seed + index} for index in range(count)]


def common(fact: str, values: Mapping[str, Result]) -> Result:
    """Return the value of all engines, which `values` has by their names."""
    if len(set(values.values())) > 1:
        got = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise EngineStateError(f"engines have different {fact}", got=got)
    return next(iter(values.values()))


async def emitted(
    produce: Callable[[Callable[[Chunk], None]], Awaitable[object]],
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a coroutine as it emits them. Ending the stream cancels the coroutine."""
    queue: asyncio.Queue[Chunk | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await produce(queue.put_nowait)
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
