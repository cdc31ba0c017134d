"""What an inference engine is to those who sample from it.

`InferenceEngineClient` is itself such an engine, over many others, so either stands where the other does.
"""

from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

from mmrender.client.types import EngineResponse, Usage
from mmrender.spans import MultiModalData
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

PauseMode: TypeAlias = Literal["abort", "keep", "wait"]
"""What becomes of running requests: they end with what they have, are frozen, or run to their end."""


class OnTokens(Protocol):
    """Told of sampled tokens, and of as many logprobs.

    A listener that also has a method `ended` is told the finish reason, `stop` or `length`, by engines that
    stream, so that a connection which breaks after it loses nothing.
    """

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take them; must be quick, as it runs on the event loop."""
        ...


class InferenceEngineInput(TypedDict, total=False):
    """Prompts to sample from. Exactly one of `prompts` and `prompt_token_ids` is given.

    Attributes:
        prompts: Conversations, each a list of messages; they need an engine that has a renderer.
        prompt_token_ids: Prompts as token ids, placeholders widened.
        multi_modal_data: With `prompt_token_ids`: the sidecar of each prompt, or None.
        collapsed_ids: With `prompt_token_ids`: each prompt with every placeholder range as the single token
            that the template wrote, for engines that widen placeholders themselves, or None.
        sampling_params: In vLLM's names, `max_tokens` among them: one mapping for all prompts, or one each.
        session_ids: Prompts of one session go to one engine; None for none.
        tools: With `prompts`: tool definitions of all conversations.
        template_arguments: With `prompts`: further arguments of the renderer.
        cache_salt: Keeps the prefix cache of unlike requests apart.
        priority: Lower is served first, where the engine schedules by priority.
        extra_headers: HTTP headers besides the transport's own.
        routed_experts: Whether to ask for router choices.
        timeout: Seconds for each whole completion, with waiting, retries and pauses.
        on_tokens: For a single prompt: told of its tokens as they come, each once and in order; in one piece
            where the engine does not stream, or where the work could not be continued after an abort.
    """

    prompts: Sequence[Sequence[Any]] | None
    prompt_token_ids: Sequence[Sequence[int]] | None
    multi_modal_data: Sequence[MultiModalData | None] | None
    collapsed_ids: Sequence[Sequence[int] | None] | None
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    session_ids: Sequence[Hashable | None] | None
    tools: Sequence[Any] | None
    template_arguments: Mapping[str, Any] | None
    cache_salt: str | None
    priority: int | None
    extra_headers: Mapping[str, str] | None
    routed_experts: bool
    timeout: float | None
    on_tokens: "OnTokens | None"


class InferenceEngineOutput(TypedDict):
    """What was sampled; every list has one entry for each prompt, in the order of the input.

    Attributes:
        responses: Text of each completion, special tokens included; None where the engine has no tokenizer.
        response_ids: Sampled tokens, stop token included where the model sampled one.
        response_logprobs: One finite number for each sampled token.
        stop_reasons: `stop`, `length` or `abort`.
        matched_stops: The stop token or string that was met, where the engine says.
        prompt_token_ids: The prompts as the engine was asked.
        multi_modal_data: Their sidecars.
        usages: Token counts.
        weight_versions: Which weights sampled which completion tokens.
        routed_experts: Router choices, where asked for and given.
        engine_responses: The same, one object for each prompt, with whatever else the engine said.
    """

    responses: list[str] | None
    response_ids: list[list[int]]
    response_logprobs: list[list[float]]
    stop_reasons: list[str]
    matched_stops: list[int | str | None]
    prompt_token_ids: list[list[int]]
    multi_modal_data: list[MultiModalData]
    usages: list[Usage]
    weight_versions: list[tuple[WeightVersionSpan, ...]]
    routed_experts: list[RoutedExperts | None]
    engine_responses: list[EngineResponse]


class RequestPayload(TypedDict, total=False):
    """An OpenAI request on its way through: the body as sent, and headers to send with it.

    The body may hold `session_id`, which routes the request and is not sent.
    """

    json: Mapping[str, Any]
    headers: Mapping[str, str]


class NamedWeightsUpdate(TypedDict, total=False):
    """One transfer of weights, which the trainer sends at the same time through the communicator.

    Attributes:
        names: Parameter names.
        dtypes: Their dtypes by torch's names without `torch.`, such as `bfloat16`.
        shapes: Their shapes.
        weight_version: What the weights are called from then on.
        extras: Further fields, in the engine's own names.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    weight_version: str | None
    extras: Mapping[str, Any]


@runtime_checkable
class InferenceEngineInterface(Protocol):
    """One engine, or many behind one face.

    A call that an engine lacks raises `EngineUnsupportedError`; none passes silently. Cancelling the task
    that awaits a generation ends it on the engine.
    """

    @property
    def name(self) -> str:
        """Names the engine in errors, metrics and routing; unique among the engines of a client."""
        ...

    @property
    def pause_modes(self) -> frozenset[PauseMode]:
        """Modes that the engine itself knows."""
        ...

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample one completion for each prompt.

        Raises:
            InputError: The input is not understood.
            EngineError: An engine failed; `where` names the prompt.
        """
        ...

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
        ...

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI chat request, as its JSON reply.

        Raises:
            EngineStatusError: The engine refused; `status` and `body` are its own.
        """
        ...

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI completion request, as its JSON reply; errors as for `chat_completion`."""
        ...

    def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI chat request as the chunks of its stream."""
        ...

    def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI completion request as the chunks of its stream."""
        ...

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Take back the memory that `sleep` gave up; only the parts that `tags` names, such as `weights`."""
        ...

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Give up memory: `level` 1 keeps weights on the host, 2 drops them; or the parts `tags` names."""
        ...

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Join the group through which the trainer sends weights; fields in the engine's own names."""
        ...

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Receive weights from the trainer."""
        ...

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Read weights from a model directory that the engine can reach."""
        ...

    async def teardown(self) -> None:
        """End what is under way and close connections. Calling it again does nothing."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes.

        Raises:
            EngineStateError: They are in use.
        """
        ...

    def tp_size(self) -> int:
        """Ranks that share each layer."""
        ...

    def pp_size(self) -> int:
        """Pipeline stages."""
        ...

    def dp_size(self) -> int:
        """Replicas."""
        ...

    async def abort_generation(self) -> None:
        """End every request under way: each returns what it has, with the stop reason `abort`."""
        ...

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stop generating, and take no further work until `resume_generation`.

        Args:
            mode: What becomes of running requests.
            clear_cache: Forget cached prefixes too, as new weights need; frozen requests keep theirs.

        Raises:
            EngineStateError: It is paused already.
        """
        ...

    async def resume_generation(self) -> None:
        """Go on.

        Raises:
            EngineStateError: It is not paused.
        """
        ...

    async def weight_version(self) -> str | None:
        """What the weights are called; None where nobody named them."""
        ...

    async def set_weight_version(self, version: str) -> None:
        """Name the weights."""
        ...

    async def check_health(self) -> None:
        """Return if the engine serves.

        Raises:
            EngineError: It does not.
        """
        ...
