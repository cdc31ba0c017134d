"""Types between `generate`, a backend and an engine: requests, responses, and one sampled turn.

A backend knows one engine's wire and nothing else. A `Transport` carries its requests. Backends are plain
values: frozen, picklable, shared by all calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

from mmrender.client.transport import Transport
from mmrender.errors import PromptTooLongError
from mmrender.messages import Message
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.engine_data import AllowedTokens, RoutedExperts, WeightVersionSpan

if TYPE_CHECKING:
    from mmrender.parsing import ToolCallAttempt
    from mmrender.parsing.parser import ParsedResponse

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: a stop token or string, the token budget, or an abort."""

TurnFinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls"]

TopLogprobs: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""Alternatives `(token_id, logprob)` of each completion token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to sample from. `attribution` is None if only ids were given."""

    ids: list[int]
    data: MultiModalData
    attribution: RenderedTokens | None


class RequestOptions(TypedDict, total=False):
    """Options of a request besides its prompt and its sampling parameters. See `EngineRequest`.

    `forbid_media_tokens`: never sample a token of media, such as `<|image_pad|>`. Only untrained
    models sample them, and a trainer cannot take them.
    """

    cache_salt: str | None
    priority: int | None
    extra_headers: Mapping[str, str] | None
    extra_body: Mapping[str, Any] | None
    routed_experts: bool
    routed_experts_prompt_start: int | None
    forbid_media_tokens: bool


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for one engine.

    Attributes:
        model: Name under which the server knows the model.
        prompt_ids: The prompt, placeholders widened.
        sampling_params: In vLLM's names. `max_tokens` is required.
        request_id: Unique for each call. An abort names it.
        multi_modal_data: Items and ranges within `prompt_ids`.
        cache_salt: Separates the prefix caches of requests that must not share one.
        priority: Lower is served first, if the engine schedules by priority.
        extra_headers: HTTP headers besides the transport's.
        extra_body: Members of the request body that this version does not know. Sent unchecked.
        routed_experts: Whether to ask for router choices.
        routed_experts_prompt_start: Ask for router choices from this position of the prompt on. None asks for
            all.
        vocab_size: Ids at or above it are refused before sending. None if unknown.
        placeholder_ids: Token that the template writes for an item, by modality, for engines that widen
            placeholders themselves.
        media_token_ids: Ids of the tokens that expansions consist of, by their text, to check ranges against.
        eos_token_ids: Tokens on which the model itself ends a completion. None if unknown. They distinguish
            an end from an abort if the server does not.
        forbidden_token_ids: Tokens that are never sampled.
    """

    model: str
    prompt_ids: Sequence[int]
    sampling_params: Mapping[str, Any]
    request_id: str
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    cache_salt: str | None = None
    priority: int | None = None
    extra_headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: bool = False
    routed_experts_prompt_start: int | None = None
    vocab_size: int | None = None
    placeholder_ids: Mapping[str, int] = field(default_factory=dict)
    media_token_ids: Mapping[str, int] = field(default_factory=dict)
    eos_token_ids: Sequence[int] | None = None
    forbidden_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call. `cached_tokens` is None if the engine does not report it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """One sampled completion.

    Attributes:
        completion_ids: The sampled tokens, with the stop token if the model sampled one.
        logprobs: One finite number for each of `completion_ids`.
        finish_reason: Why sampling ended.
        usage: Token counts.
        stop_reason: The stop token or string that was met, if the engine reports it.
        routed_experts: Router choices, if asked for.
        weight_versions: Weights that sampled each span of the completion. Empty if not reported.
        allowed: Allowed or forbidden tokens of spans of the completion, if they were limited and are known.
            `logprobs` are then renormalised over the allowed tokens.
        request_id: The engine's own name of the request.
        top_logprobs: Alternatives of each completion token, if asked for.
        sampler: Facts about the program that sampled, such as its `dtype`, as far as they are known.
    """

    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: int | str | None = None
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    allowed: tuple[AllowedTokens, ...] = ()
    request_id: str | None = None
    top_logprobs: TopLogprobs | None = None
    sampler: Mapping[str, str] = field(default_factory=dict)


class OnTokens(Protocol):
    """Callback for sampled tokens as they arrive, each token once and in order.

    The last call of a completed request carries its finish reason. Its tokens may be empty. An engine that
    does not stream makes one call, at the end.
    """

    def __call__(
        self, token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: FinishReason | None, /
    ) -> None:
        """Take checked tokens and a logprob for each. It runs on the event loop, so it must be quick."""
        ...


@runtime_checkable
class RendererBackend(Protocol):
    """The wire of one engine.

    A backend without a server of its own has a `transport`, `mmrender.client.transport.NullTransport()`.
    """

    @property
    def name(self) -> str:
        """Short name, such as `vllm`."""
        ...

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion of a request on the server behind `transport`.

        `on_tokens` is called with tokens as they arrive. They stay valid if the call fails.

        Raises:
            EngineError: The server could not be reached, refused, or returned an unusable answer.
            PromptTooLongError: The server's reply says that the prompt is too long.
            SamplingParameterError: The engine does not know a parameter.
            PlaceholderError: Tokens, ranges and items do not fit together.
        """
        ...

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Ask the server for the maximum length of a prompt of `model`. None if it does not say.

        Raises:
            EngineError: The server could not be asked. Nothing about it is remembered.
        """
        ...

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether `exc` means that the prompt is too long. By default only `PromptTooLongError` does."""
        return isinstance(exc, PromptTooLongError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(EngineResponse):
    """One sampled turn, parsed, ready to be trained on or continued. It has all attributes of its response.

    Attributes:
        prompt_ids: The prompt, placeholders widened.
        finish_reason: Why sampling ended, or `tool_calls` if a well-formed call ended in a stop.
        parsed: The parsed completion.
        message: The assistant message, ready to be appended to the conversation.
        multi_modal_data: The sidecar of the prompt.
        prompt_attribution: Attribution of the prompt's tokens. None if only ids were given.
        response: The engine's response.
        restricted: Kinds of grammar or choices that limited the completion, such as `json`, if the engine
            does not report the tokens that they allowed. Log-probabilities are then of these alone.
    """

    prompt_ids: list[int]
    finish_reason: TurnFinishReason  # type: ignore[assignment]  # a response's, and one more
    parsed: "ParsedResponse"
    message: Message
    multi_modal_data: MultiModalData
    prompt_attribution: RenderedTokens | None
    response: EngineResponse
    restricted: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """Text outside of reasoning and tool calls."""
        return self.parsed.content

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning, or None."""
        return self.parsed.reasoning_content

    @property
    def tool_calls(self) -> "tuple[ToolCallAttempt, ...]":
        """Every attempted call with its status. `message` holds the well-formed ones."""
        return self.parsed.tool_calls
