"""Proof that a bridge's tail does not depend on what came before it.

Each history differs from the plain one in a single respect; a template that looks back in that respect
writes another tail, and the difference names what it looks at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.messages import ImagePart, Message, Part, TextPart, ToolCall

_TOOLS: tuple[Mapping[str, Any], ...] = (
    {"type": "function", "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object"}}},
)


@dataclass(frozen=True)
class ProbedHistory:
    """A conversation up to and including the assistant turn that the extension follows.

    Attributes:
        looks_at: What a template must look at for this history to matter.
        messages: The conversation.
        tools: Tool definitions, or None.
        has_calls: Whether its last turn calls the tools that the extension answers for.
    """

    looks_at: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    has_calls: bool = False


def skeleton(extension: Sequence[Message], images: int) -> ProbedHistory:
    """The shortest history: one user turn with the conversation's images, one assistant turn."""
    calls = _calls_for(extension)
    assistant = Message(role="assistant", content="Aqwertz", tool_calls=calls)
    return ProbedHistory("nothing", (_user("Uqwertz", images), assistant), has_calls=bool(calls))


def _user(text: str, images: int = 0) -> Message:
    if not images:
        return Message(role="user", content=text)
    parts: tuple[Part, ...] = (*[ImagePart(None)] * images, TextPart(text))
    return Message(role="user", content=parts)


def _calls_for(extension: Sequence[Message]) -> tuple[ToolCall, ...]:
    """One call for each tool message that the extension begins with."""
    calls = []
    for index, message in enumerate(extension):
        if message.role != "tool":
            break
        calls.append(
            ToolCall(name=message.name or "probe", arguments={}, id=message.tool_call_id or f"call{index:05d}")
        )
    return tuple(calls)


def histories(extension: Sequence[Message], images: int) -> Iterator[ProbedHistory]:
    """The plain history first, then one for each thing that a template could look back at."""
    plain = skeleton(extension, images)
    user, last = plain.messages
    calls = last.tool_calls
    earlier = (_user("Eqwertz"), Message(role="assistant", content="Fqwertz"))
    probe = ToolCall(name="probe", arguments={}, id="call90000")
    loop = (
        _user("Lqwertz"),
        Message(role="assistant", content="", tool_calls=(probe,)),
        Message(role="tool", content="Rqwertz", name="probe", tool_call_id="call90000"),
        Message(role="assistant", content="Mqwertz"),
    )
    longer = Message(role="assistant", content="Something else, and longer.", tool_calls=calls)
    thinking = Message(role="assistant", content="Aqwertz", reasoning_content="Tqwertz", tool_calls=calls)
    system = Message(role="system", content="Sqwertz")
    yield plain
    for looks_at, messages in (
        ("the system prompt", (system, user, last)),
        ("the number of earlier turns", (user, earlier[1], earlier[0], last)),
        ("earlier tool calls", (user, loop[3], *loop, earlier[0], last)),
        ("the assistant's text", (user, longer)),
        ("the assistant's reasoning", (user, thinking)),
    ):
        yield ProbedHistory(looks_at, messages, has_calls=bool(calls))
    yield ProbedHistory("the tool definitions", plain.messages, _TOOLS, has_calls=bool(calls))


def independence_failure(
    probes: Iterator[ProbedHistory], tail_after: Callable[[ProbedHistory], str | None]
) -> str | None:
    """Why the tail cannot be taken from the skeleton, or None.

    Args:
        probes: The plain history, then the others.
        tail_after: The tail that follows a history; None where the template refuses the conversation.
    """
    expected = tail_after(next(probes))
    if expected is None:
        return "the template does not take this extension after a short conversation"
    for probe in probes:
        found = tail_after(probe)
        if found is not None and found != expected:
            return f"what the template writes for this extension depends on {probe.looks_at}"
    return None


def rewriting_failure(
    extension: Sequence[Message], images: int, text_of: Callable[[Sequence[Message], bool], str | None]
) -> str | None:
    """Why the template would write earlier turns differently once the extension follows, or None."""
    calls = _calls_for(extension)
    user = _user("Uqwertz", images)
    for reasoning in (None, "Tqwertz"):
        last = Message(role="assistant", content="Aqwertz", reasoning_content=reasoning, tool_calls=calls)
        prompt = text_of([user], True)
        full = text_of([user, last, *extension], True)
        alone = text_of([user, last], False)
        if prompt is None or full is None or alone is None:
            continue
        kept = alone[: alone.rfind("Aqwertz")]
        if not full.startswith(prompt) or not full.startswith(kept):
            return "the template would write the previous turn differently once this extension follows"
    return None
