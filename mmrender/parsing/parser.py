"""Sampled tokens in, a message out: content, reasoning and tool calls.

No completion is an error. Every tool call that the model tried is reported with a status, and every character
is content, reasoning, part of an attempt, or template text between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from mmrender.content import normalize_tools
from mmrender.messages import Message, ToolCall
from mmrender.model.spelling import TokenText, readable
from mmrender.parsing.calls import Block, CallScanner, CallStatus
from mmrender.parsing.grammars import Grammar
from mmrender.parsing.schema import ToolSchemas, tool_schemas
from mmrender.sidecar import common_prefix
from mmrender.template.probes import Carrier, with_reasoning
from mmrender.template.profile import ReasoningFormat
from mmrender.turns.turns import Opening, Turns


@dataclass(frozen=True, slots=True)
class ToolCallAttempt:
    """One call that the model tried to make.

    Attributes:
        status: `ok`, or the fault. `invalid_json`: the JSON is wrong. `unclosed`: the completion ends, or the
            next call begins, inside it. `missing_name`. `unknown_tool`: the tool was not offered.
            `malformed`: it breaks its grammar in another way.
        name: Name of the tool, or None if it could not be read.
        arguments: Arguments, or None if they could not be read, whatever the status.
        arguments_text: Arguments of a named call as the model wrote them, if they are no JSON object. None
            otherwise.
        raw: The text of the attempt, delimiters included.
        span: Tokens `[start, stop)` of the completion that contain any of that text. If delimiters are
            ordinary text, two attempts may share a token.
        id: The call's id, if the format has ids.
    """

    status: CallStatus
    name: str | None
    arguments: dict[str, Any] | None
    raw: str
    span: tuple[int, int]
    id: str | None = None
    arguments_text: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A completion as content, reasoning and tool calls.

    Attributes:
        content: The text that is neither reasoning nor calls. Text after a call comes at its end.
        reasoning_content: The reasoning, or None without any, also if the block is empty and closed.
        reasoning_closed: False if the completion ends inside reasoning, True otherwise.
        tool_calls: Every attempt, in order.
        stopped: Whether the completion ends in a stop token.
        carrier: Field of a message that the template prints reasoning from.
    """

    content: str
    reasoning_content: str | None = None
    reasoning_closed: bool = True
    tool_calls: tuple[ToolCallAttempt, ...] = ()
    stopped: bool = False
    carrier: Carrier = field(default="reasoning_content", repr=False)

    def to_message(self) -> Message:
        """Return the assistant message, with the calls whose status is `ok`.

        With calls, empty content is None, as in OpenAI's messages.
        """
        calls = tuple(
            ToolCall(attempt.name or "", attempt.arguments or {}, attempt.id)
            for attempt in self.tool_calls
            if attempt.status == "ok"
        )
        content = self.content if self.content or not calls else None
        message = Message(role="assistant", content=content, tool_calls=calls)
        if self.reasoning_content is None:
            return message
        return with_reasoning(message, self.reasoning_content, self.carrier)


Before: TypeAlias = Literal["start", "reasoning", "empty", "call"]
"""The part before content: nothing, reasoning, an empty reasoning block, or a call."""
After: TypeAlias = Literal["call", "end"]


class Edge(NamedTuple):
    """Template text in one place: before content, after content, and in place of content."""

    prefix: str = ""
    suffix: str = ""
    alone: str = ""


Edges: TypeAlias = Mapping[tuple[Before, After], Edge]
"""Template text around content, by place.

A template puts a line break before a call that follows content, two after reasoning, and so on. It is removed
from a completion exactly as the probes of the template printed it. All other white space is content. In a
place that no probe has shown, only blank text next to a call is removed.
"""


class Piece(NamedTuple):
    """A stretch of text that may hold content, and the parts before and after it."""

    before: Before
    text: str
    after: After

    def content(self, edges: Edges) -> str:
        """The text without template text."""
        text, edge = self.text, edges.get((self.before, self.after))
        is_next_to_call = self.before == "call" or (edge is None and self.after == "call")
        if is_next_to_call and not text.strip():
            return ""
        if edge is None:
            after_reasoning = edges.get(("reasoning", self.after), Edge())
            # Without reasoning here, the prompt may have held the whole block, and the text after it.
            by_part = {"start": Edge(suffix=after_reasoning.suffix), "empty": after_reasoning}
            edge = by_part.get(self.before) or edges.get(("empty", self.after), Edge())
        if text == edge.alone:
            return ""
        shared = common_prefix(text, edge.prefix)
        if shared < min(len(text), len(edge.prefix)) and not edge.prefix.isspace():
            # Other words than the template's are content, unless the text breaks off within them.
            shared = 0
        text = text[shared:]
        return text[: len(text) - common_prefix(text[::-1], edge.suffix[::-1])]


class Reasoning(NamedTuple):
    """Reasoning of a completion.

    Attributes:
        text: The reasoning, or None without any, or for an empty block that was closed.
        closed: Whether the completion does not end inside reasoning.
        before: Characters `[0, before)` come before the block, and are content.
        rest: First character after the block.
        seen: Whether the completion has a block, or the end of one.
    """

    text: str | None = None
    closed: bool = True
    before: int = 0
    rest: int = 0
    seen: bool = False


def read_reasoning(
    format_: ReasoningFormat | None, source: TokenText, opening: Opening, first_call: int
) -> Reasoning:
    """Find the reasoning of a completion.

    The block begins in the prompt or with its first delimiter. If only its end is present, all text before it
    is reasoning, as templates read it, too. Delimiters inside a tool call do not count.
    """
    if format_ is None:
        return Reasoning()
    text, length = source.text, len(source.text)

    def after(expected: str, position: int) -> int:
        return position + len(expected) if text.startswith(expected, position) else position

    begin = source.find(format_.begin, 0, first_call)
    end = -1 if opening.inside else source.find(format_.end, 0, first_call)
    before, start = 0, after(opening.missing, 0)
    # If the prompt has opened the block, only a delimiter that repeats the prompt's begins it.
    if begin >= 0 and (not text[:begin].strip() if opening.inside else end < 0 or begin < end):
        before = 0 if opening.inside else begin
        start = after(format_.after_begin, begin + len(format_.begin))
        end = source.find(format_.end, start, length)
    elif opening.inside:
        end = source.find(format_.end, start, length)
    elif end < 0:
        return Reasoning(rest=length) if source.ends_inside(format_.begin) else Reasoning()
    if end < 0:
        return Reasoning(text[start:], closed=False, before=before, rest=length, seen=True)
    thought = text[start:end].removesuffix(format_.before_end)
    return Reasoning(thought or None, before=before, rest=end + len(format_.end), seen=True)


class CompletionParts(NamedTuple):
    """The parts of a completion. `pieces` still contain the template's text around content."""

    reasoning: Reasoning
    blocks: list[Block]
    pieces: list[Piece]


def split(
    source: TokenText,
    grammar: Grammar | None,
    reasoning_format: ReasoningFormat | None,
    opening: Opening,
    tools: ToolSchemas | None = None,
) -> CompletionParts:
    """Split a completion into reasoning, calls outside reasoning, and the stretches between them."""
    scanner = CallScanner(grammar, source, tools) if grammar is not None else None
    first_call = scanner.first_delimiter() if scanner is not None else len(source.text)
    reasoning = read_reasoning(reasoning_format, source, opening, first_call)
    blocks = scanner.scan(reasoning.rest) if scanner is not None else []
    pieces = []
    if source.text[: reasoning.before].strip():
        pieces.append(Piece("start", source.text[: reasoning.before], "end"))
    position = reasoning.rest
    before: Before = "start"
    if reasoning.seen:
        before = "empty" if reasoning.text is None else "reasoning"
    for block in blocks:
        pieces.append(Piece(before, source.text[position : block.start], "call"))
        position, before = block.stop, "call"
    pieces.append(Piece(before, source.text[position:], "end"))
    return CompletionParts(reasoning, blocks, pieces)


Outcome: TypeAlias = Literal["proved", "named", "none", "ambiguous", "not_printed"]


@dataclass(frozen=True)
class GrammarChoice:
    """The grammar that reads a template's calls, and how it was found.

    Attributes:
        outcome: `proved` by reading back every probe, or `named` by the caller. Otherwise the reason
            for its absence: `none` or several (`ambiguous`) read them back, or calls are `not_printed`.
        grammar: The chosen grammar, or None.
        proved: Names of the grammars that read every probe back.
        reasons: The first difference of each other grammar.
        refused: Probes that the template refuses, such as two calls in one turn.
    """

    outcome: Outcome
    grammar: Grammar | None = None
    proved: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.grammar.name if self.grammar is not None else "none"
        why_not = self.reasons.get(name, "the template prints no calls")
        return {
            "proved": f"{name}, proved",
            "named": f"{name}, named by the caller"
            + (" and proved" if name in self.proved else f", not proved: {why_not}"),
            "ambiguous": f"not chosen: {' and '.join(self.proved)} read the calls equally",
            "not_printed": "none: the template prints no tool calls",
            "none": "none: no known grammar reads back the calls that the template prints",
        }[self.outcome]


class ResponseParser:
    """Reads completions of one model. Without a grammar, all is content. Safe to use from many threads."""

    def __init__(self, turns: Turns, choice: GrammarChoice, edges: Edges) -> None:
        self.profile = turns.profile
        self.choice = choice
        self.edges = edges
        self._turns = turns
        self._prompt_ids = turns.speller.tokenizer.encode(self.profile.generation_prompt)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Read a completion.

        Args:
            token_ids: The sampled tokens, with or without the stop token.
            tools: The tools offered to the model, as for rendering. They decide the types of arguments that
                are written as text, and make a call of any other tool `unknown_tool`.
            prompt_ids: The prompt, which decides whether the completion begins inside reasoning. The default
                is the generation prompt of the template.

        Raises:
            MessageError: A tool definition is malformed.
        """
        schemas = None if tools is None else tool_schemas(normalize_tools(tools) or ())
        ids = [int(token_id) for token_id in token_ids]
        length = len(ids)
        while length and ids[length - 1] in self.profile.stop_ids:
            length -= 1
        source = self._turns.text_of(ids[:length])
        format_, opening = self.profile.reasoning, Opening()
        if format_ is not None:
            turn = self._turns.open(self._prompt_ids if prompt_ids is None else prompt_ids)
            opening = self._turns.opening(self._turns.text_of(turn))
        parts = split(source, self.choice.grammar, format_, opening, schemas)
        reasoning = parts.reasoning.text
        attempts = [
            ToolCallAttempt(
                status=attempt.status,
                name=attempt.name,
                arguments=attempt.arguments,
                raw=readable(source.text[attempt.start : attempt.stop]),
                span=source.tokens_of(attempt.start, attempt.stop),
                id=attempt.id,
                arguments_text=attempt.arguments_text,
            )
            for block in parts.blocks
            for attempt in block.attempts
        ]
        return ParsedResponse(
            content=readable("".join([piece.content(self.edges) for piece in parts.pieces])),
            reasoning_content=None if reasoning is None else readable(reasoning),
            reasoning_closed=parts.reasoning.closed,
            tool_calls=tuple(attempts),
            stopped=length < len(ids),
            carrier="reasoning_content" if format_ is None else format_.carrier,
        )
