"""Sampled tokens in, a message out: content, reasoning and tool calls.

What a model writes is never an error. Every tool call that it tried is reported with a status, and every
character is content, reasoning, part of an attempt, or scaffold that the template writes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrender.content import normalize_tools
from mmrender.messages import Message, TextPart, ThinkingPart, ToolCall
from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing.calls import Attempt, CallStatus
from mmrender.parsing.choice import GrammarChoice
from mmrender.parsing.grammar import Grammar
from mmrender.parsing.layout import Layout
from mmrender.parsing.parts import split
from mmrender.parsing.reasoning import (
    Carrier,
    Opening,
    ReasoningFormat,
    opening_by_text,
    opening_by_tokens,
)
from mmrender.parsing.schema import ToolSchemas
from mmrender.parsing.token_text import TokenSpeller, TokenText, readable


@dataclass(frozen=True, slots=True)
class ToolCallAttempt:
    """One call that the model tried to make.

    Attributes:
        status: `ok`; `invalid_json`: what should be JSON is not; `unclosed`: the completion ends, or the next
            call begins, inside it; `missing_name`; `unknown_tool`: no such tool was offered; `malformed`: its
            grammar does not hold otherwise.
        name: Name of the tool, where it could be read.
        arguments: Arguments, where they could be read, whatever the status.
        raw: The text of the attempt, delimiters included.
        span: Tokens `[start, stop)` of the given ids that hold any of that text. Where delimiters are
            ordinary text, two attempts may share a token.
        id: The call's id, where the format writes one.
    """

    status: CallStatus
    name: str | None
    arguments: dict[str, Any] | None
    raw: str
    span: tuple[int, int]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A completion, read.

    Attributes:
        content: The text that is neither reasoning nor calls; text after a call stands at its end.
        reasoning_content: The reasoning; None where there is none, also where the block is empty and closed.
        reasoning_closed: False where the completion ends inside reasoning, True otherwise.
        tool_calls: Every attempt, in order.
        stopped: Whether the completion ends in a stop token.
        carrier: Which field of a message the template prints reasoning from.
    """

    content: str
    reasoning_content: str | None = None
    reasoning_closed: bool = True
    tool_calls: tuple[ToolCallAttempt, ...] = ()
    stopped: bool = False
    carrier: Carrier = field(default="reasoning_content", repr=False)

    def to_message(self) -> Message:
        """The assistant message, with the calls whose status is `ok`.

        Beside calls, empty content is None, as OpenAI has it.
        """
        calls = tuple(
            [
                ToolCall(name=attempt.name, arguments=attempt.arguments, id=attempt.id)
                for attempt in self.tool_calls
                if attempt.status == "ok" and attempt.name is not None and attempt.arguments is not None
            ]
        )
        content = self.content if self.content or not calls else None
        if self.reasoning_content is None or self.carrier == "reasoning_content":
            return Message(
                role="assistant",
                content=content,
                reasoning_content=self.reasoning_content,
                tool_calls=calls,
            )
        thinking = ThinkingPart(self.reasoning_content)
        parts = (thinking,) if content is None else (thinking, TextPart(content))
        return Message(role="assistant", content=parts, tool_calls=calls)


class ResponseParser:
    """Reads completions of one model. Safe to use from many threads.

    Args:
        tokenizer: The model's tokenizer.
        grammar: How it writes tool calls; None where it writes none, and all text is content.
        reasoning_format: How it writes reasoning; None where it writes none.
        stop_token_ids: Tokens that end its turn.
        layout: Scaffold between the parts of a completion.
        choice: How the grammar was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammar: Grammar | None,
        reasoning_format: ReasoningFormat | None,
        stop_token_ids: Collection[int],
        layout: Layout | None = None,
        *,
        choice: GrammarChoice | None = None,
    ) -> None:
        self.grammar = grammar
        self.choice = choice
        self.reasoning_format = reasoning_format
        self.layout = layout or Layout()
        self._tokenizer = tokenizer
        self._speller = TokenSpeller(tokenizer)
        self._stop_ids = frozenset(stop_token_ids)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Read a completion.

        Args:
            token_ids: What the model sampled, with or without the stop token.
            tools: The tools that it was offered, as for rendering. They give types to arguments that are
                written as text, and make a call of any other tool `unknown_tool`.
            prompt_ids: The prompt, which tells whether the completion begins inside reasoning. Without it
                the generation prompt of the template is taken.

        Raises:
            MessageError: A tool is no tool definition.
        """
        definitions = normalize_tools(tools)
        schemas = None if definitions is None else ToolSchemas(definitions)
        ids = [int(token_id) for token_id in token_ids]
        length = len(ids)
        while length and ids[length - 1] in self._stop_ids:
            length -= 1
        source = TokenText(ids[:length], self._speller)
        return self._read(source, schemas, self._opening(prompt_ids), stopped=length < len(ids))

    def _opening(self, prompt_ids: Sequence[int] | None) -> Opening:
        if self.reasoning_format is None:
            return Opening(inside=False)
        if prompt_ids is None:
            return opening_by_text(self.reasoning_format, self.reasoning_format.prompt)
        return opening_by_tokens(self.reasoning_format, self._speller, self._tokenizer, prompt_ids)

    def _read(
        self, source: TokenText, schemas: ToolSchemas | None, opening: Opening, *, stopped: bool
    ) -> ParsedResponse:
        parts = split(source, self.grammar, self.reasoning_format, opening, schemas)
        attempts = [attempt for block in parts.blocks for attempt in block.attempts]
        reasoning = parts.reasoning.text
        return ParsedResponse(
            content=readable(self.layout.content(parts.pieces)),
            reasoning_content=None if reasoning is None else readable(reasoning),
            reasoning_closed=parts.reasoning.closed,
            tool_calls=tuple([_reported(attempt, source) for attempt in attempts]),
            stopped=stopped,
            carrier="reasoning_content" if self.reasoning_format is None else self.reasoning_format.carrier,
        )


def _reported(attempt: Attempt, source: TokenText) -> ToolCallAttempt:
    return ToolCallAttempt(
        status=attempt.status,
        name=attempt.name,
        arguments=attempt.arguments,
        raw=readable(source.text[attempt.start : attempt.stop]),
        span=source.tokens_of(attempt.start, attempt.stop),
        id=attempt.id,
    )
