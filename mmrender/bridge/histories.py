"""Variations of the skeleton: other histories that an extension may follow, for its proof.

A proof renders the extension after the skeleton, and after histories that differ from it in one respect each.
It holds for every extension of the same shape: the properties of the extension that a template can test. The
texts that a template looks for are read from its source, and no other text counts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from jinja2 import nodes

from mmrender.bridge.tail import ONE_EACH, MediaCounts, ProbeHistory, skeleton, unknown_parts
from mmrender.messages import Message, TextPart, ThinkingPart, ToolCall
from mmrender.template.probes import (
    WORD,
    assistant,
    probe_call,
    tool_definition,
    tool_result,
    user,
    with_reasoning,
)
from mmrender.template.profile import TemplateProfile


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One respect in which histories differ.

    Attributes:
        looks_at: The respect, in words.
        system: Messages before all others.
        opening: Messages before the earlier turns.
        earlier: Messages after them.
        rounds: Messages between the last user message and the assistant's turn.
        question: Fields of the last user message.
        says: Text of the last user message, next to its media.
        answer: Fields of the assistant's turn.
        tools: Tool definitions.
        documents: Documents.
        moves_media: Whether it takes the media out of the last user message, if there are any.
        combines: Whether it is also tried together with others.
        in_parts: Whether content is a list of parts, which some templates print as Python does.
        is_reasoning_alone: Whether the assistant's turn consists of reasoning.
    """

    looks_at: str
    system: tuple[Message, ...] = ()
    opening: tuple[Message, ...] = ()
    earlier: tuple[Message, ...] = ()
    rounds: tuple[Message, ...] = ()
    question: Mapping[str, Any] = field(default_factory=dict)
    says: str | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] | None = None
    documents: tuple[Mapping[str, Any], ...] | None = None
    moves_media: bool = False
    combines: bool = True
    in_parts: bool = False
    is_reasoning_alone: bool = False

    def of(self, history: ProbeHistory) -> ProbeHistory:
        """Return a history like `history` that differs in this respect."""
        media = tuple(part for _, part in history.user.media())
        if self.moves_media and not media:
            return history
        question = dict(self.question)
        if self.says is not None:
            media = () if self.moves_media else media
            question["content"] = (*media, TextPart(self.says)) if media else self.says
        return replace(
            history,
            system=(*self.system, *history.system),
            earlier=(*self.opening, *history.earlier, *self.earlier),
            user=msgspec.structs.replace(history.user, **question),
            rounds=(*history.rounds, *self.rounds),
            assistant=msgspec.structs.replace(history.assistant, **self.answer),
            tools=history.tools if self.tools is None else self.tools,
            documents=history.documents if self.documents is None else self.documents,
        )


def _tool_round(results: int, *, first: int, text: str = "") -> tuple[Message, ...]:
    calls = tuple(probe_call(90000 + first + index) for index in range(results))
    return (assistant(text, tool_calls=calls), *map(tool_result, calls))


_SYSTEM = Message(role="system", content=f"{WORD}S")
_DEVELOPER = Message(role="developer", content=f"{WORD}S")
_THOUGHT = assistant(f"{WORD}H", reasoning_content=f"{WORD}G")
_TURN = (user(f"{WORD}E"), assistant(f"{WORD}F"))
_TOOL_LOOP = (user(f"{WORD}L"), *_tool_round(1, first=0), assistant(f"{WORD}M"))

_ANY_TURN = (
    Variation(looks_at="the number of earlier turns", earlier=_TURN),
    Variation(looks_at="the number of earlier turns", earlier=_TURN * 5),
    Variation(looks_at="the number of earlier turns", earlier=_TURN * 30, combines=False),
    Variation(looks_at="the system prompt", system=(_SYSTEM,)),
    Variation(looks_at="a developer message", system=(_DEVELOPER,)),
    Variation(looks_at="how many user messages follow each other", earlier=(user(f"{WORD}V"),)),
    Variation(looks_at="the role of the first message", opening=(assistant(f"{WORD}W"),)),
    Variation(looks_at="earlier tool calls", earlier=_TOOL_LOOP),
    Variation(looks_at="earlier reasoning", earlier=(user(f"{WORD}E"), _THOUGHT)),
    Variation(looks_at="tool results since the last user message", rounds=_tool_round(1, first=10)),
    Variation(looks_at="the number of tool results", rounds=_tool_round(2, first=20, text=f"{WORD}N")),
    Variation(looks_at="the text of the last user message", says=f"Another text.\n\n1. {WORD}\n"),
    Variation(looks_at="the text of the last user message", says=f"{WORD} " * 500),
    Variation(looks_at="the name of the user", question={"name": f"n{WORD}"}),
    Variation(looks_at="the assistant's reasoning", answer={"reasoning_content": f"{WORD}T"}),
    Variation(looks_at="the tool definitions", tools=(tool_definition("probe"),)),
    Variation(looks_at="the tool definitions", tools=tuple(map(tool_definition, "abc"))),
    Variation(looks_at="the documents", documents=({"title": "probe", "text": f"{WORD}D"},)),
)


def all_variations(
    extension: Sequence[Message], profile: TemplateProfile, reads: "Reads", media: MediaCounts | None
) -> list[Variation]:
    """Every variation. Media come last, so the other indexes do not depend on their number."""
    return [*variations(extension, profile), *reads.variations(), *media_placements(media)]


def varied_skeleton(
    extension: Sequence[Message],
    profile: TemplateProfile,
    reads: "Reads",
    media: MediaCounts | None,
    base: Sequence[int],
) -> ProbeHistory:
    """The skeleton with these media and some of `all_variations`, by their indexes."""
    history = skeleton(extension, profile, media)
    for index in base:
        history = all_variations(extension, profile, reads, media)[index].of(history)
    return history


def variations(extension: Sequence[Message], profile: TemplateProfile) -> list[Variation]:
    """All respects in which histories with the same number of media may differ."""
    calls = skeleton(extension, profile).assistant.tool_calls
    reasoning = profile.reasoning
    carrier = reasoning.carrier if reasoning is not None else "reasoning_content"
    calling, *results = _tool_round(1, first=40)
    rounds = (with_reasoning(calling, f"{WORD}G", carrier), *results)
    answer_part = TextPart(f"{WORD}A")
    begin, close = "<think>", "</think>\n\n"
    if reasoning is not None:
        begin, close = reasoning.begin, reasoning.before_end + reasoning.end + reasoning.after_end
    contents: list[tuple[str, Any]] = [
        ("the assistant's text", "Something else. " * 100),
        ("the assistant's text", f"{WORD} \n\n"),
        ("the assistant's text", f'[{{"answer": 1}}] {WORD}?'),
        ("the assistant's reasoning", f"{begin}{WORD}T{close}{WORD}A"),
        ("whether the assistant wrote text", ""),
        ("the shape of the assistant's content", (answer_part,)),
        ("the assistant's reasoning", (ThinkingPart(f"{WORD}T"), answer_part)),
    ]
    respects = [
        *_ANY_TURN,
        Variation(looks_at="reasoning since the last user message", rounds=rounds),
        *_call_variations(calls, extension),
        *[
            Variation(looks_at=name, answer={"content": content}, in_parts=isinstance(content, tuple))
            for name, content in contents
        ],
    ]
    if reasoning is not None and not calls:
        turn = with_reasoning(assistant(""), f"{WORD}T", carrier)
        alone = {"content": turn.content, "reasoning_content": turn.reasoning_content}
        looks_at = "whether the assistant wrote text after its reasoning"
        respects.append(Variation(looks_at=looks_at, answer=alone, combines=False, is_reasoning_alone=True))
    return respects


def _call_variations(calls: Sequence[ToolCall], extension: Sequence[Message]) -> list[Variation]:
    """Other calls by the assistant that the extension's tool messages allow."""
    extra = probe_call(90099, name="another", alpha="bravo")
    if not calls:
        return [Variation(looks_at="tool calls that nothing answers", answer={"tool_calls": (extra,)})]
    renamed = tuple(
        ToolCall(
            name=message.name or "another",
            arguments={"alpha": ["bravo", 7]},
            id=message.tool_call_id or probe_call(90050 + index).id,
        )
        for index, message in enumerate(extension[: len(calls)])
    )
    return [
        Variation(looks_at="the number of tool calls", answer={"tool_calls": (*calls, extra)}),
        Variation(looks_at="the name, id or arguments of a tool call", answer={"tool_calls": renamed}),
    ]


def media_placements(media: MediaCounts | None) -> list[Variation]:
    """The skeleton's media in other places. If their number does not matter, one more of each modality.

    Modalities are tried one by one, since a template may refuse some of them.
    """
    call, result = _tool_round(1, first=30)
    moved: dict[str, Any] = {} if media is None else {"moves_media": True, "says": f"{WORD}U"}
    respects = []
    for parts in filter(None, map(unknown_parts, ONE_EACH if media is None else (media,))):
        answer = msgspec.structs.replace(result, content=(*parts, TextPart(f"{WORD}R")))
        picture = Message(role="user", content=(*parts, TextPart(f"{WORD}I")))
        respects += [
            Variation(looks_at="which turn holds the images", earlier=(picture, _TURN[1]), **moved),
            Variation(looks_at="images in tool results", rounds=(call, answer), **moved),
        ]
    return respects


@dataclass(frozen=True, slots=True)
class Reads:
    """Texts and fields that a template's source tests.

    Attributes:
        marks: Texts that it looks for: `mark in x`, `x == mark`, `x.startswith(mark)` and similar tests.
        fields: Attributes or keys that it reads and that belong to no schema or Python type.
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
        namespaces = {node.attr for node in tree.find_all(nodes.NSRef)}
        return cls(tuple(sorted(marks - _SCHEMA - {""})), frozenset(fields - namespaces - _KNOWN_FIELDS))

    def variations(self) -> list[Variation]:
        """Histories with the texts that the template looks for, and with fields of its own."""
        respects = []
        for mark in self.marks:
            for text in (mark, f"{mark}{WORD}{mark}"):
                system = Message(role="system", content=text)
                earlier = (user(text), assistant(text))
                respects += [
                    Variation(looks_at=f"{mark!r} in the system prompt", system=(system,)),
                    Variation(looks_at=f"{mark!r} in the last user message", says=text),
                    Variation(looks_at=f"{mark!r} in an earlier message", earlier=earlier),
                ]
            answer = {"content": f"{mark}{WORD}"}
            respects.append(Variation(looks_at=f"{mark!r} in the assistant's text", answer=answer))
        for name in sorted(self.fields):
            extra, where = {name: f"{WORD}X"}, f"the field {name!r} of"
            system, fields = Message(role="system", content=f"{WORD}S", extra=extra), {"extra": extra}
            respects += [
                Variation(
                    looks_at=f"{where} earlier messages", question=fields, answer=fields, combines=False
                ),
                Variation(looks_at=f"{where} the system prompt", opening=(system,), combines=False),
            ]
        return respects


_SEARCHES = re.compile(r"startswith|endswith|r?find|r?index|count|r?split|r?partition|remove(pre|suf)fix")
"""Methods of text that look for another text."""
_SCHEMA = frozenset(
    ("text", "image", "image_url", "video", "video_url", "audio", "type", "content", "thinking")
)
"""Keys of parts and messages, since `'image' in part` looks for a key, not for text."""
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
    """Texts that `in` looks for, and texts of several words or with punctuation on a side of `==`."""
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
