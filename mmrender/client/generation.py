"""`Generation`: one sampled turn, read and ready to be trained on or continued."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mmrender.client.backend import EngineResponse, Usage
from mmrender.messages import Message
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

if TYPE_CHECKING:
    from mmrender.parsing import ParsedResponse, ToolCallAttempt

TurnFinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` gives.

    Attributes:
        prompt_ids: The prompt, placeholders widened.
        completion_ids: The sampled tokens, stop token included where the model sampled one.
        logprobs: One finite number for each of `completion_ids`.
        finish_reason: `tool_calls` where a well-formed call ended in a stop; else why sampling ended.
        usage: Token counts.
        parsed: The completion, read.
        message: The assistant message, ready to be appended to the conversation.
        multi_modal_data: The sidecar of the prompt.
        prompt_attribution: What is known of each token of the prompt; None where only ids were given.
        response: What the engine said.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: TurnFinishReason
    usage: Usage
    parsed: "ParsedResponse"
    message: Message
    multi_modal_data: MultiModalData
    prompt_attribution: RenderedTokens | None
    response: EngineResponse

    @property
    def content(self) -> str:
        """The text that is neither reasoning nor calls."""
        return self.parsed.content

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning; None where there is none."""
        return self.parsed.reasoning_content

    @property
    def tool_calls(self) -> "tuple[ToolCallAttempt, ...]":
        """Every call that the model tried, each with a status; `message` holds those that are well-formed."""
        return self.parsed.tool_calls

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Router choices, where they were asked for and given."""
        return self.response.routed_experts

    @property
    def weight_versions(self) -> tuple[WeightVersionSpan, ...]:
        """Which weights sampled which completion tokens; empty where the engine does not say."""
        return self.response.weight_versions

    @property
    def raw(self) -> Mapping[str, Any]:
        """The engine's decoded reply without its large fields."""
        return self.response.raw


def finish_reason_of(response: EngineResponse, parsed: "ParsedResponse") -> TurnFinishReason:
    """Why the turn ended: `tool_calls` where a well-formed call ended in a stop."""
    called = any(attempt.status == "ok" for attempt in parsed.tool_calls)
    return "tool_calls" if called and response.finish_reason == "stop" else response.finish_reason
