"""Which step of a trajectory a conversation goes on from.

A trajectory keeps messages as plain data without pictures, to be saved and shipped. What a caller gave,
pictures included, is remembered here for as long as the trajectory lives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from mmrender.content import to_openai
from mmrender.messages import Message
from mmrender.rollout.matching import begins_with
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_step import Step


@dataclass(frozen=True, slots=True)
class Continues:
    """The conversation is that of a step and then `new_messages`, none of them an assistant's."""

    step: Step
    new_messages: Sequence[Message]
    left_out: frozenset[int]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The conversation is what a step was asked with: a further sample from the same prompt."""

    step: Step
    left_out: frozenset[int]


@dataclass(frozen=True, slots=True)
class StartsAnew:
    """There is no such step; `reason` says why not."""

    reason: str


Place: TypeAlias = Continues | Repeats | StartsAnew


@dataclass(frozen=True, slots=True)
class _Known:
    """What led to a step: its prompt's messages, the turn that was sampled, tools, and what was left out."""

    prompt: tuple[Message, ...]
    turn: Message
    tools: Any
    left_out: frozenset[int] = frozenset()


@dataclass(slots=True)
class Conversations:
    """Remembers what led to each step of each trajectory."""

    _known: WeakKeyDictionary[Trajectory, dict[int, _Known]] = field(default_factory=WeakKeyDictionary)

    def remember(
        self,
        trajectory: Trajectory,
        step: Step,
        prompt: Sequence[Message],
        turn: Message,
        *,
        tools: Any,
        left_out: frozenset[int],
    ) -> None:
        """Keep what led to a step.

        Args:
            trajectory: Whose step it is.
            step: The step.
            prompt: The messages that it was asked with, none left out that its prompt holds.
            turn: What was sampled.
            tools: Canonical tool definitions, or None.
            left_out: Indices of the messages of the caller's conversation that its prompt does not hold.
        """
        known = self._known.setdefault(trajectory, {})
        known[step.index] = _Known(tuple(prompt), turn, tools, left_out)

    def forget(self, trajectory: Trajectory) -> None:
        """Drop what is known of a trajectory, pictures included."""
        self._known.pop(trajectory, None)

    def place(
        self,
        trajectory: Trajectory | None,
        conversation: Sequence[Message],
        tools: Any,
        parent: Step | None = None,
    ) -> Place:
        """Find the newest step that a conversation goes on from.

        Args:
            trajectory: Where to look; None for a conversation by itself.
            conversation: All messages that the caller gave.
            tools: Canonical tool definitions, or None.
            parent: The only step to look at; None looks at all.
        """
        if trajectory is None or not len(trajectory):
            return StartsAnew("the conversation begins")
        reasons: list[str] = []
        for step in reversed(trajectory.steps) if parent is None else (parent,):
            known = self._known.get(trajectory, {}).get(step.index)
            if known is None:
                reasons.append(f"step {step.index} was not made by this client")
                continue
            place = _place(step, known, conversation, tools)
            if not isinstance(place, StartsAnew):
                return place
            reasons.append(place.reason)
        # Of the newest step that has something to say beyond not matching.
        telling = [reason for reason in reasons if reason != _NO_PREFIX]
        return StartsAnew(telling[0] if telling else _NO_PREFIX)


_NO_PREFIX = "the conversation goes on from no earlier step"


def _place(step: Step, known: _Known, conversation: Sequence[Message], tools: Any) -> Place:
    present = [message for index, message in enumerate(conversation) if index not in known.left_out]
    if not begins_with(present, known.prompt):
        return StartsAnew(_NO_PREFIX)
    if tools != known.tools:
        return StartsAnew(f"the tools differ from those of step {step.index}")
    if len(present) == len(known.prompt):
        return Repeats(step, known.left_out)
    if not begins_with(present[len(known.prompt) :], (known.turn,)):
        return StartsAnew(f"the conversation has another turn than step {step.index} sampled")
    new_messages = present[len(known.prompt) + 1 :]
    if not new_messages:
        return StartsAnew(f"nothing follows the turn of step {step.index}")
    if any(message.role == "assistant" for message in new_messages):
        return StartsAnew(f"a turn after step {step.index} was not sampled here")
    return Continues(step, new_messages, known.left_out)


def recorded(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as plain data: pictures and films without their sources, unless these are short text."""
    plain = [to_openai(message) for message in messages]
    for message in plain:
        if isinstance(message["content"], list):
            message["content"] = [_without_source(part) for part in message["content"]]
    return plain


def _without_source(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"].removesuffix("_url")
    if kind not in ("image", "video"):
        return part
    url = part.get(f"{kind}_url", {}).get("url", "data:")
    # What the picture is, is known by its place: the item in the trajectory's sidecar.
    return {"type": kind} if url.startswith("data:") else part
