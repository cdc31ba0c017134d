"""Histories that a bridge's tail must not depend on: the plain one, and what can be different about another.

Each variation changes a single respect in which a template could look back. They combine freely.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import msgspec

from mmrender.bridge.shape import Reads
from mmrender.messages import ImagePart, Message, Part, Role, TextPart, ThinkingPart, ToolCall, VideoPart

_WORD = "qwertz"
_CALL_ID = "call9{:04d}"


class MediaCount(NamedTuple):
    """Images and videos that stand in a conversation."""

    images: int = 0
    videos: int = 0


@dataclass(frozen=True)
class History:
    """A conversation up to and including the assistant turn that an extension follows.

    Attributes:
        system: Messages before the first turn.
        earlier: Turns before the last user message.
        user: The last user message.
        rounds: Tool rounds between it and the assistant's turn.
        assistant: The turn that the extension follows.
        tools: Tool definitions, or None.
        documents: Documents, or None.
    """

    user: Message
    assistant: Message
    system: tuple[Message, ...] = ()
    earlier: tuple[Message, ...] = ()
    rounds: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    documents: tuple[Mapping[str, Any], ...] | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation."""
        return (*self.system, *self.earlier, self.user, *self.rounds, self.assistant)


Change: TypeAlias = Callable[[History], History]


class Variation(NamedTuple):
    """One respect in which histories differ: what a template must look at to notice, and the change.

    `joins` says that it is also tried together with others.
    """

    looks_at: str
    change: Change
    joins: bool = True


def skeleton(extension: Sequence[Message], media: MediaCount = MediaCount()) -> History:  # noqa: B008 - immutable
    """The shortest history: one user turn with the conversation's media, one assistant turn.

    The assistant calls the tools that the extension answers: one for each tool message that it begins with,
    under the name and id that the answer states.
    """
    assistant = Message(role="assistant", content=f"A{_WORD}", tool_calls=_calls_for(extension))
    return History(_user(f"U{_WORD}", media), assistant)


def _calls_for(extension: Sequence[Message]) -> tuple[ToolCall, ...]:
    calls = []
    for index, message in enumerate(extension):
        if message.role != "tool":
            break
        call_id = message.tool_call_id or f"call{index:05d}"
        calls.append(ToolCall(name=message.name or "probe", arguments={}, id=call_id))
    return tuple(calls)


def _user(text: str, media: MediaCount = MediaCount()) -> Message:  # noqa: B008 - immutable
    if not any(media):
        return Message(role="user", content=text)
    return Message(role="user", content=(*_media_parts(media), TextPart(text)))


def _media_parts(media: MediaCount) -> tuple[Part, ...]:
    return (*[ImagePart(None)] * media.images, *[VideoPart(None)] * media.videos)


def _assistant(text: str, **fields: Any) -> Message:
    return Message(role="assistant", content=text, **fields)


def _tool_round(results: int, *, first: int, text: str = "") -> tuple[Message, ...]:
    calls = [
        ToolCall(name="probe", arguments={}, id=_CALL_ID.format(first + index)) for index in range(results)
    ]
    answers = [
        Message(role="tool", content=f"R{_WORD}", name="probe", tool_call_id=call.id) for call in calls
    ]
    return (_assistant(text, tool_calls=tuple(calls)), *answers)


_STRING_METHODS = frozenset(dir(str)) | frozenset(dir(dict)) | frozenset(dir(list))
_LOOP_FIELDS = frozenset(
    [
        "index",
        "index0",
        "revindex",
        "revindex0",
        "first",
        "last",
        "length",
        "previtem",
        "nextitem",
        "depth",
        "changed",
    ]
)
_KNOWN_FIELDS = (
    frozenset(Message.__struct_fields__)
    | frozenset(
        [
            "type",
            "text",
            "image",
            "video",
            "function",
            "arguments",
            "id",
            "parameters",
            "thinking",
            "properties",
        ]
    )
    | _STRING_METHODS
    | _LOOP_FIELDS
)
"""Names that are no message's own field: those of the schema, of loops, and of Python's types."""
_DOCUMENTS = ({"title": "probe", "text": f"D{_WORD}"},)
_TURN = (_user(f"E{_WORD}"), _assistant(f"F{_WORD}"))


def _tools(*names: str) -> tuple[Mapping[str, Any], ...]:
    parameters = {"type": "object", "properties": {}}
    functions = [{"name": name, "description": "A probe.", "parameters": parameters} for name in names]
    return tuple({"type": "function", "function": function} for function in functions)


def _before(role: Role, text: str = f"S{_WORD}") -> Change:
    message = Message(role=role, content=text)
    return lambda history: replace(history, system=(message, *history.system))


def _earlier(*messages: Message) -> Change:
    return lambda history: replace(history, earlier=(*history.earlier, *messages))


def _opening(message: Message) -> Change:
    return lambda history: replace(history, earlier=(message, *history.earlier))


def _round(messages: tuple[Message, ...]) -> Change:
    return lambda history: replace(history, rounds=(*history.rounds, *messages))


def _assistant_with(**fields: Any) -> Change:
    return lambda history: replace(history, assistant=msgspec.structs.replace(history.assistant, **fields))


def _user_with(**fields: Any) -> Change:
    return lambda history: replace(history, user=msgspec.structs.replace(history.user, **fields))


def _user_says(text: str) -> Change:
    def change(history: History) -> History:
        content = history.user.content
        if isinstance(content, tuple):
            content = (*[part for part in content if not isinstance(part, TextPart)], TextPart(text))
        return replace(
            history,
            user=msgspec.structs.replace(
                history.user, content=content if isinstance(content, tuple) else text
            ),
        )

    return change


def variations(extension: Sequence[Message], reasoning: tuple[str, str] | None) -> list[Variation]:
    """Everything that can be different while the number of media stays as it is.

    Args:
        extension: The new messages.
        reasoning: Marks round a reasoning block, if the template prints any.
    """
    loop = (_user(f"L{_WORD}"), *_tool_round(1, first=0), _assistant(f"M{_WORD}"))
    thought = _assistant(f"H{_WORD}", reasoning_content=f"G{_WORD}")
    opener, closer = reasoning or ("<think>", "</think>\n\n")
    return [
        Variation("the number of earlier turns", _earlier(*_TURN)),
        Variation("the number of earlier turns", _earlier(*_TURN * 5)),
        Variation("the number of earlier turns", _earlier(*_TURN * 30), joins=False),
        Variation("the system prompt", _before("system")),
        Variation("a developer message", _before("developer")),
        Variation("how many user messages stand together", _earlier(_user(f"V{_WORD}"))),
        Variation("the role of the first message", _opening(_assistant(f"W{_WORD}"))),
        Variation("earlier tool calls", _earlier(*loop)),
        Variation("earlier reasoning", _earlier(_user(f"E{_WORD}"), thought)),
        Variation("tool results since the last user message", _round(_tool_round(1, first=10))),
        Variation("the number of tool results", _round(_tool_round(2, first=20, text=f"N{_WORD}"))),
        Variation("the text of the last user message", _user_says(f"Another text.\n\n1. {_WORD}\n")),
        Variation("the text of the last user message", _user_says(f"{_WORD} " * 500)),
        Variation("the name of the user", _user_with(name=f"n{_WORD}")),
        Variation("the assistant's text", _assistant_with(content="Something else. " * 100)),
        Variation("the assistant's text", _assistant_with(content=f"{_WORD} \n\n")),
        Variation("the assistant's text", _assistant_with(content=f'[{{"answer": 1}}] {_WORD}?')),
        Variation("the assistant's reasoning", _assistant_with(reasoning_content=f"T{_WORD}")),
        Variation("the assistant's reasoning", _assistant_with(content=f"{opener}T{_WORD}{closer}A{_WORD}")),
        *_call_variations(extension),
        Variation("the tool definitions", lambda history: replace(history, tools=_tools("probe"))),
        Variation("the tool definitions", lambda history: replace(history, tools=_tools("a", "b", "c"))),
        Variation("the documents", lambda history: replace(history, documents=_DOCUMENTS)),
    ]


def in_parts() -> list[Variation]:
    """The assistant's content as a list of parts, for templates that take one."""
    said = TextPart(f"A{_WORD}")
    return [
        Variation("the shape of the assistant's content", _assistant_with(content=(said,))),
        Variation("the assistant's reasoning", _assistant_with(content=(ThinkingPart(f"T{_WORD}"), said))),
    ]


def marked(reads: Reads) -> list[Variation]:
    """Histories that hold the texts which the template looks for, and the fields that only it knows."""
    found = []
    for mark in reads.marks:
        for text in (mark, f"{mark}{_WORD}{mark}"):
            found += [
                Variation(f"{mark!r} in the system prompt", _before("system", text)),
                Variation(f"{mark!r} in the last user message", _user_says(text)),
                Variation(f"{mark!r} in an earlier message", _earlier(_user(text), _assistant(text))),
            ]
        found.append(
            Variation(f"{mark!r} in the assistant's text", _assistant_with(content=f"{mark}{_WORD}"))
        )
    for field in sorted(reads.fields - _KNOWN_FIELDS):
        extra = {field: f"X{_WORD}"}
        system = Message(role="system", content=f"S{_WORD}", extra=extra)
        change = _all_of(_user_with(extra=extra), _assistant_with(extra=extra))
        found += [
            Variation(f"the field {field!r} of earlier messages", change, joins=False),
            Variation(f"the field {field!r} of the system prompt", _opening(system), joins=False),
        ]
    return found


def _all_of(*changes: Change) -> Change:
    def change(history: History) -> History:
        for step in changes:
            history = step(history)
        return history

    return change


def _call_variations(extension: Sequence[Message]) -> list[Variation]:
    """Other calls by the assistant, as far as the extension's tool messages leave them open."""
    calls = _calls_for(extension)
    extra = ToolCall(name="another", arguments={"alpha": "bravo"}, id=_CALL_ID.format(99))
    if not calls:
        return [Variation("tool calls that nothing answers", _assistant_with(tool_calls=(extra,)))]
    found = [Variation("the number of tool calls", _assistant_with(tool_calls=(*calls, extra)))]
    renamed = tuple(
        msgspec.structs.replace(
            call,
            name=message.name or "another",
            id=message.tool_call_id or _CALL_ID.format(50 + index),
            arguments={"alpha": ["bravo", 7]},
        )
        for index, (call, message) in enumerate(zip(calls, extension, strict=False))
    )
    found.append(Variation("the name, id or arguments of a tool call", _assistant_with(tool_calls=renamed)))
    found.append(Variation("whether the assistant wrote text", _assistant_with(content="")))
    return found


def media_placements(media: MediaCount, *, counted: bool) -> list[Variation]:
    """Media in other places: where their number counts the same number, else one more.

    Args:
        media: What the skeleton holds.
        counted: Whether the tail depends on their number.
    """
    parts = _media_parts(media if counted else MediaCount(1, 1))
    if not parts:
        return []
    shown = Message(role="user", content=(*parts, TextPart(f"I{_WORD}")))
    call, result = _tool_round(1, first=30)
    answer = msgspec.structs.replace(result, content=(*parts, TextPart(f"R{_WORD}")))
    in_turn, in_result = _earlier(shown, _TURN[1]), _round((call, answer))
    return [
        Variation("which turn holds the images", _moving_media(in_turn) if counted else in_turn),
        Variation("images in tool results", _moving_media(in_result) if counted else in_result),
    ]


def _moving_media(place: Change) -> Change:
    """Put the last user message's media elsewhere, once."""

    def change(history: History) -> History:
        if not any(history.user.media()):
            return history
        return place(_user_with(content=f"U{_WORD}")(history))

    return change
