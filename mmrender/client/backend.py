"""What `generate` asks of a backend, and what a backend gives back.

A backend knows one engine's wire and nothing else; the way to the server is the transport's. A backend is a
plain value: frozen, picklable, shared by all calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from mmrender.client.transport import Transport
from mmrender.spans import MultiModalData
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: a stop token or string, the token budget, or an abort."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for one engine.

    Attributes:
        model: Name under which the server knows the model.
        prompt_ids: The prompt with placeholders widened, as the renderer gives it.
        multi_modal_data: Items and ranges within `prompt_ids`.
        sampling_params: In vLLM's names; `max_tokens` is always there.
        request_id: Unique for each call; what an abort names.
        cache_salt: Keeps the prefix cache of unlike requests apart.
        priority: Lower is served first, where the engine schedules by priority.
        extra_headers: HTTP headers besides the transport's own.
        vocab_size: Ids at or above it are refused before sending; None where it is not known.
        collapsed_ids: `prompt_ids` with each placeholder range as the single token that the template wrote,
            for engines that widen placeholders themselves; None without images.
        media_token_ids: Ids of the tokens that expansions are made of, by their text, to hold ranges against;
            empty where they are not known.
        eos_token_ids: Tokens on which the model itself ends a completion; None where they are not known. By
            them an end is told from an abort where the server does not tell.
        routed_experts: Whether to ask for router choices.
        routed_experts_prompt_start: Return rows from this position on; None keeps every row.
    """

    model: str
    prompt_ids: Sequence[int]
    sampling_params: Mapping[str, Any]
    request_id: str
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    cache_salt: str | None = None
    priority: int | None = None
    extra_headers: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None
    collapsed_ids: Sequence[int] | None = None
    media_token_ids: Mapping[str, int] = field(default_factory=dict)
    routed_experts: bool = False
    routed_experts_prompt_start: int | None = None
    eos_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call. `cached_tokens` is None where the engine does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """What an engine sampled.

    Attributes:
        completion_ids: The sampled tokens, stop token included where the model sampled one.
        logprobs: One finite number for each of `completion_ids`.
        finish_reason: Why sampling ended.
        stop_reason: The stop token or string that was met, where the engine says.
        usage: Token counts.
        routed_experts: Router choices, where asked for and given.
        weight_versions: Which weights sampled which completion tokens; empty where the engine does not say.
        request_id: The engine's own name of the request.
        top_logprobs: For each completion token the alternatives `(token_id, logprob)` that were asked for.
        raw: The decoded reply without its large fields, for those who look for more.
    """

    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: int | str | None = None
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    request_id: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class RendererBackend(Protocol):
    """One engine's wire."""

    @property
    def name(self) -> str:
        """Short name, such as `vllm`."""
        ...

    async def generate(self, request: EngineRequest, transport: Transport) -> EngineResponse:
        """Sample one completion.

        Raises:
            EngineError: The server could not be reached, refused, or gave an answer that cannot be used.
            PromptTooLongError: The server's reply says that the prompt is too long.
            SamplingParameterError: The engine does not know a parameter.
            PlaceholderError: Tokens, ranges and items do not fit together.
        """
        ...

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Ask the server how many prompt tokens it takes for `model`; None where it does not say.

        Raises:
            EngineError: The server could not be asked. Nothing about it is remembered.
        """
        ...

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether `exc` is this engine's way of saying that the prompt is too long."""
        ...
