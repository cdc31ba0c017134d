"""Histories that a bridge's tail must not depend on.

A proof renders the extension after a skeleton, the shortest history, and after histories that differ from it
in a single respect each. It holds for every extension of the same shape: all of it that can decide what a
template looks at. Texts count only in so far as the template tests them, so the texts that it looks for are
read from its source.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import msgspec
from jinja2 import nodes

from mmrender.bridge.tail import MediaCount, ProbeHistory, skeleton
from mmrender.messages import (
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
)
from mmrender.probing.probes import WORD, assistant, probe_call, tool_definition, tool_result, user
from mmrender.probing.profile import TemplateProfile

Change: TypeAlias = Callable[[ProbeHistory], ProbeHistory]


class Variation(NamedTuple):
    """One respect in which histories differ.

    Attributes:
        looks_at: What a template that notices has looked at.
        change: Makes the other history.
        combines: Whether it is also tried together with others.
        in_parts: Whether it gives content as a list of parts, which some templates print as Python does.
    """

    looks_at: str
    change: Change
    combines: bool = True
    in_parts: bool = False


def _tool_round(results: int, *, first: int, text: str = "") -> tuple[Message, ...]:
    calls = tuple(probe_call(90000 + first + index) for index in range(results))
    return (assistant(text, tool_calls=calls), *map(tool_result, calls))


_DOCUMENTS = ({"title": "probe", "text": f"{WORD}D"},)
_TURN = (user(f"{WORD}E"), assistant(f"{WORD}F"))
_TOOL_LOOP = (user(f"{WORD}L"), *_tool_round(1, first=0), assistant(f"{WORD}M"))


def _before(role: Role, text: str = f"{WORD}S") -> Change:
    message = Message(role=role, content=text)
    return lambda history: replace(history, system=(message, *history.system))


def _earlier(*messages: Message) -> Change:
    return lambda history: replace(history, earlier=(*history.earlier, *messages))


def _opening(message: Message) -> Change:
    return lambda history: replace(history, earlier=(message, *history.earlier))


def _round(messages: tuple[Message, ...]) -> Change:
    return lambda history: replace(history, rounds=(*history.rounds, *messages))


def _assistant_with(**fields: Any) -> Change:
    return lambda history: history.answering(**fields)


def _user_says(text: str) -> Change:
    def change(history: ProbeHistory) -> ProbeHistory:
        media = tuple(part for _, part in history.user.media())
        return history.asking(content=(*media, TextPart(text)) if media else text)

    return change


def variations(extension: Sequence[Message], profile: TemplateProfile) -> list[Variation]:
    """Everything that can be different while the number of media stays as it is."""
    calls = skeleton(extension, profile).assistant.tool_calls
    thought = assistant(f"{WORD}H", reasoning_content=f"{WORD}G")
    begin, close = "<think>", "</think>\n\n"
    if (reasoning := profile.reasoning) is not None:
        begin, close = reasoning.begin, reasoning.before_end + reasoning.end + reasoning.after_end
    found = [
        Variation("the number of earlier turns", _earlier(*_TURN)),
        Variation("the number of earlier turns", _earlier(*_TURN * 5)),
        Variation("the number of earlier turns", _earlier(*_TURN * 30), combines=False),
        Variation("the system prompt", _before("system")),
        Variation("a developer message", _before("developer")),
        Variation("how many user messages stand together", _earlier(user(f"{WORD}V"))),
        Variation("the role of the first message", _opening(assistant(f"{WORD}W"))),
        Variation("earlier tool calls", _earlier(*_TOOL_LOOP)),
        Variation("earlier reasoning", _earlier(user(f"{WORD}E"), thought)),
        Variation("tool results since the last user message", _round(_tool_round(1, first=10))),
        Variation("the number of tool results", _round(_tool_round(2, first=20, text=f"{WORD}N"))),
        Variation("the text of the last user message", _user_says(f"Another text.\n\n1. {WORD}\n")),
        Variation("the text of the last user message", _user_says(f"{WORD} " * 500)),
        Variation("the name of the user", lambda history: history.asking(name=f"n{WORD}")),
        Variation("the assistant's reasoning", _assistant_with(reasoning_content=f"{WORD}T")),
        *_call_variations(calls, extension),
        Variation(
            "the tool definitions", lambda history: replace(history, tools=(tool_definition("probe"),))
        ),
        Variation(
            "the tool definitions", lambda history: replace(history, tools=tuple(map(tool_definition, "abc")))
        ),
        Variation("the documents", lambda history: replace(history, documents=_DOCUMENTS)),
    ]
    if calls and not profile.writes_content_before_results:
        # Such content was not sampled before the call that ends the completion.
        return found
    said = TextPart(f"{WORD}A")
    thinking = (ThinkingPart(f"{WORD}T"), said)
    return [
        *found,
        Variation("the assistant's text", _assistant_with(content="Something else. " * 100)),
        Variation("the assistant's text", _assistant_with(content=f"{WORD} \n\n")),
        Variation("the assistant's text", _assistant_with(content=f'[{{"answer": 1}}] {WORD}?')),
        Variation("the assistant's reasoning", _assistant_with(content=f"{begin}{WORD}T{close}{WORD}A")),
        Variation("whether the assistant wrote text", _assistant_with(content="")),
        Variation("the shape of the assistant's content", _assistant_with(content=(said,)), in_parts=True),
        Variation("the assistant's reasoning", _assistant_with(content=thinking), in_parts=True),
    ]


def _call_variations(calls: Sequence[ToolCall], extension: Sequence[Message]) -> list[Variation]:
    """Other calls by the assistant, as far as the extension's tool messages leave them open."""
    extra = probe_call(90099, name="another", alpha="bravo")
    if not calls:
        return [Variation("tool calls that nothing answers", _assistant_with(tool_calls=(extra,)))]
    renamed = tuple(
        ToolCall(
            name=message.name or "another",
            arguments={"alpha": ["bravo", 7]},
            id=message.tool_call_id or probe_call(90050 + index).id,
        )
        for index, message in enumerate(extension[: len(calls)])
    )
    return [
        Variation("the number of tool calls", _assistant_with(tool_calls=(*calls, extra))),
        Variation("the name, id or arguments of a tool call", _assistant_with(tool_calls=renamed)),
    ]


def media_placements(media: MediaCount | None) -> list[Variation]:
    """Media in other places: those of the skeleton where the tail depends on their number, else one more."""
    parts = (MediaCount(1, 1) if media is None else media).parts
    if not parts:
        return []
    call, result = _tool_round(1, first=30)
    answer = msgspec.structs.replace(result, content=(*parts, TextPart(f"{WORD}R")))
    shown = Message(role="user", content=(*parts, TextPart(f"{WORD}I")))

    def placed(place: Change) -> Change:
        def move(history: ProbeHistory) -> ProbeHistory:
            return place(history.asking(content=f"{WORD}U")) if any(history.user.media()) else history

        return place if media is None else move

    return [
        Variation("which turn holds the images", placed(_earlier(shown, _TURN[1]))),
        Variation("images in tool results", placed(_round((call, answer)))),
    ]


@dataclass(frozen=True, slots=True)
class Reads:
    """What a template's source says that it reads.

    Attributes:
        marks: Texts that it looks for: `mark in x`, `x == mark`, `x.startswith(mark)` and their like.
        fields: Names that it reads as attributes or keys and that belong to no schema or Python type.
    """

    marks: tuple[str, ...]
    fields: frozenset[str]

    @classmethod
    def of(cls, tree: nodes.Template) -> "Reads":
        """Read the marks and fields off a parsed template."""
        marks = {text for compare in tree.find_all(nodes.Compare) for text in _compared(compare)}
        fields = {node.attr for node in tree.find_all(nodes.Getattr)}
        fields |= {text for node in tree.find_all(nodes.Getitem) for text in _texts(node.arg)}
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and _SEARCHES.fullmatch(call.node.attr):
                marks |= {text for argument in call.args for text in _texts(argument)}
            if isinstance(call.node, nodes.Getattr) and call.node.attr == "get" and call.args:
                fields |= _texts(call.args[0])
        own = {node.attr for node in tree.find_all(nodes.NSRef)}
        return cls(tuple(sorted(marks - _SCHEMA - {""})), frozenset(fields - own - _KNOWN_FIELDS))

    def variations(self) -> list[Variation]:
        """Histories that hold the texts which the template looks for, and the fields that only it knows."""
        found = []
        for mark in self.marks:
            for text in (mark, f"{mark}{WORD}{mark}"):
                found += [
                    Variation(f"{mark!r} in the system prompt", _before("system", text)),
                    Variation(f"{mark!r} in the last user message", _user_says(text)),
                    Variation(f"{mark!r} in an earlier message", _earlier(user(text), assistant(text))),
                ]
            found.append(
                Variation(f"{mark!r} in the assistant's text", _assistant_with(content=f"{mark}{WORD}"))
            )
        for field in sorted(self.fields):
            extra = {field: f"{WORD}X"}
            system = Message(role="system", content=f"{WORD}S", extra=extra)

            def extended(history: ProbeHistory, extra: dict[str, Any] = extra) -> ProbeHistory:
                return history.asking(extra=extra).answering(extra=extra)

            found += [
                Variation(f"the field {field!r} of earlier messages", extended, combines=False),
                Variation(f"the field {field!r} of the system prompt", _opening(system), combines=False),
            ]
        return found


_SEARCHES = re.compile(r"startswith|endswith|r?find|r?index|count|r?split|r?partition|remove(pre|suf)fix")
"""Methods of text that look for another."""
_SCHEMA = frozenset(
    ("text", "image", "image_url", "video", "video_url", "audio", "type", "content", "thinking")
)
"""Keys of parts and messages; `'image' in part` asks for a key, not for text."""
_LOOP_FIELDS = "index index0 revindex revindex0 first last length previtem nextitem depth changed"
_PART_FIELDS = "type text image video function arguments id parameters thinking properties"
_KNOWN_FIELDS = frozenset(
    [
        *Message.__struct_fields__,
        *_LOOP_FIELDS.split(),
        *_PART_FIELDS.split(),
        *dir(str),
        *dir(dict),
        *dir(list),
    ]
)


def _compared(compare: nodes.Compare) -> set[str]:
    """Texts sought by `in`, and texts of several words or with punctuation that `==` compares with."""
    if {operand.op for operand in compare.ops} <= {"in", "notin"}:
        return _texts(compare.expr)
    operands = [compare.expr, *[operand.expr for operand in compare.ops]]
    return {text for operand in operands for text in _texts(operand) if not text.isidentifier()}


def _texts(node: nodes.Node) -> set[str]:
    if isinstance(node, nodes.Const):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, nodes.Tuple | nodes.List):
        return {text for item in node.items for text in _texts(item)}
    return set()
