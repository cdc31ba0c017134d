"""What a rollout asks of an environment, and what the two tell each other."""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from mmrender.messages import Message
from mmrender.parsing import ToolCallAttempt

Result = TypeVar("Result")
MaybeAwaitable: TypeAlias = Result | Awaitable[Result]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the model, as an environment sees it.

    Attributes:
        message: The assistant message, with its well-formed calls, ids filled in.
        attempts: Every call that the model tried to make, malformed ones included, in order. Those with
            status `ok` are the message's calls.
        finish_reason: `stop`, `length` or `tool_calls`; at `length` the turn was cut off.
    """

    message: Message
    attempts: tuple[ToolCallAttempt, ...] = ()
    finish_reason: str = "stop"

    @property
    def text(self) -> str:
        """The content as one text, without reasoning."""
        content = self.message.content
        if content is None or isinstance(content, str):
            return content or ""
        return "".join(getattr(part, "text", "") for part in content)


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows, at the start and after each action.

    Attributes:
        messages: What joins the conversation: tool results and user turns with their images, in any form that
            a renderer takes; never an assistant's. May be empty only when `done`.
        reward: For the action; at a reset it is not looked at.
        done: Whether the episode is over.
        choices: Assistant messages of which the next turn is one, or None for a free turn. They are written
            with the model's own template, and the engine is held to them where it takes `structured_outputs`.
        sampling_params: For the next turn, over those of the rollout, in vLLM's names.
        info: What is kept with the step, such as counts that become metrics. Plain data.
    """

    messages: Sequence[Any] = ()
    reward: float = 0.0
    done: bool = False
    choices: Sequence[Any] | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode at a time. Methods may be plain or `async`; plain ones run in the event loop.

    Of the optional `close()`, plain or `async`, a rollout makes use when it ends in whatever way.
    """

    @property
    def tools(self) -> Sequence[Any] | None:
        """Definitions of the tools that the model may call; None for none."""
        ...

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> MaybeAwaitable[Observation]:
        """Begin an episode.

        Args:
            prompt: Messages that the data set gives; the environment shows them, or others.
            extras: What else the data set gives, such as a seed or the answer.

        Returns:
            The opening messages, all of them.
        """
        ...

    def step(self, action: Action) -> MaybeAwaitable[Observation]:
        """Act, and return what follows."""
        ...


async def resolved(value: MaybeAwaitable[Result]) -> Result:
    """The result of a method that may be plain or `async`."""
    if inspect.isawaitable(value):
        found: Result = await value
        return found
    return value


async def close_environment(environment: object) -> None:
    """Call `close` where an environment has one."""
    close = getattr(environment, "close", None)
    if callable(close):
        await resolved(close())
