"""Cutting off a bridge's tail: the template's text from the end of the assistant's content on.

The text is rendered after the skeleton, the shortest history that the extension may follow.

Everything is read from provenance: the message of each character, and the characters that are content. A
completion that was cut off, in its content or inside reasoning, is closed with the text that the template
writes there.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from mmrender.caching import cached_property
from mmrender.errors import TemplateError
from mmrender.messages import MODALITIES, UNKNOWN_PARTS, Message, Part, RenderRequest, Role, TextPart
from mmrender.model.spelling import TokenText
from mmrender.template.known import KnownTemplate
from mmrender.template.probes import WORD, probe_call, with_reasoning
from mmrender.template.profile import ReasoningFormat, TemplateProfile
from mmrender.template.text import TracedStr, plain
from mmrender.tokens.encode import Layout, TokenWriter
from mmrender.turns.turns import PROMPT_TOKENS, Turn, TurnEnd, Turns, turns_of


class NotBridged(Exception):  # noqa: N818 - a refusal, not an error
    """The reason why turns are not bridged."""


class NotPrinted(NotBridged):
    """The template does not print the assistant's content, so its end cannot be found."""


MediaCounts: TypeAlias = tuple[int, ...]
"""Number of media of each of `MODALITIES` in a conversation."""
ONE_EACH: tuple[MediaCounts, ...] = tuple(
    tuple(int(other == modality) for other in MODALITIES) for modality in MODALITIES
)
"""For each modality the counts of a single medium."""


def unknown_parts(media: MediaCounts) -> tuple[Part, ...]:
    """As many parts of each modality, without known pixels."""
    numbers = zip(UNKNOWN_PARTS.values(), media, strict=True)
    return tuple(part for part, count in numbers for _ in range(count))


@dataclass(frozen=True)
class ProbeHistory:
    """A conversation up to and including the assistant turn that an extension follows.

    Attributes:
        user: The last user message.
        assistant: The turn that the extension follows.
        system: Messages before the first turn.
        earlier: Turns before the last user message.
        rounds: Tool rounds between it and the assistant's turn.
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

    def answering(self, **fields: Any) -> "ProbeHistory":
        """The history with other fields in the assistant's turn."""
        return replace(self, assistant=msgspec.structs.replace(self.assistant, **fields))


def skeleton(
    extension: Sequence[Message], profile: TemplateProfile, media: MediaCounts | None = None
) -> ProbeHistory:
    """The shortest history: one user turn with the conversation's media, one assistant turn.

    The assistant makes one call for each tool message that the extension begins with, under its name and id.
    """
    calls = []
    for index, message in enumerate(extension):
        if message.role != "tool":
            break
        call = probe_call(index, name=message.name or "probe")
        calls.append(msgspec.structs.replace(call, id=message.tool_call_id or call.id))
    text = f"{WORD}A" if not calls or profile.writes_content_before_results else None
    parts = () if media is None else unknown_parts(media)
    question = Message(role="user", content=(*parts, TextPart(f"{WORD}U")) if parts else f"{WORD}U")
    return ProbeHistory(question, Message(role="assistant", content=text, tool_calls=tuple(calls)))


@dataclass(frozen=True, slots=True)
class Tail:
    """Text after the assistant's content, and the end of its turn there."""

    layout: Layout
    end: TurnEnd

    @property
    def text(self) -> str:
        """The whole tail."""
        return plain(self.layout.text)

    @property
    def rest(self) -> int:
        """Start of the stop token, or end of the turn's own text without one."""
        return self.end.start if self.end.token_id is not None else self.end.message_stop

    @property
    def close(self) -> str:
        """Template text between content and stop token, such as a newline."""
        return self.text[: self.rest]


ReasoningState: TypeAlias = Literal["none", "empty", "alone", "written"]
"""Whether a turn has a reasoning block, whether the block has text, and whether text follows the block."""

WITH_REASONING: tuple[ReasoningState, ...] = ("alone", "written")
"""States of a turn whose reasoning block has text."""


def reasoning_state(format_: ReasoningFormat | None, turn: str) -> ReasoningState:
    """Return the state of the reasoning in the text of a turn, its generation prompt included."""
    if format_ is None or format_.begin not in turn:
        return "none"
    inside, _, after = turn.partition(format_.begin)[2].partition(format_.end)
    if not inside.strip():
        return "empty"
    return "written" if after.strip() else "alone"


class BridgedTurn:
    """The sampled turn that a bridge continues.

    Args:
        turns: Finds turns in tokens.
        prompt: Token ids of the prompt.
        completion: Token ids sampled after it.
        roles: Roles of the conversation so far, or None if they are not known.
    """

    def __init__(
        self,
        turns: Turns,
        prompt: Sequence[int],
        completion: Sequence[int],
        roles: Collection[Role] | None,
    ) -> None:
        self.prompt = prompt
        self.completion = completion
        self.roles = roles
        self.last_id = completion[-1] if completion else None
        self.stop_id = self.last_id if self.last_id in turns.profile.stop_ids else None
        self.answer_ids = completion if self.stop_id is None else completion[:-1]
        """The completion without its stop token."""
        self.turns = turns

    @cached_property
    def is_fresh(self) -> bool:
        """Whether the completion begins a turn, rather than continues the turn of the prompt."""
        return self.turns.is_fresh(self.prompt)

    @cached_property
    def turn(self) -> TokenText:
        """The text of the turn without its stop token, its generation prompt included."""
        return self.turns.text_of([*self.turns.open(self.prompt), *self.answer_ids])

    @cached_property
    def reasoning(self) -> ReasoningState:
        """State of the turn's reasoning."""
        return reasoning_state(self.turns.profile.reasoning, self.turn.text)

    def begins_with(self, opening: str) -> bool:
        """Whether the completion is known to begin with a text, or is cut off within it."""
        text = self.turns.text_of(self.answer_ids[:PROMPT_TOKENS]).text if self.is_fresh else ""
        is_cut_off = self.is_fresh and self.stop_id is None
        return text.startswith(opening) or (is_cut_off and opening.startswith(text))


class ExtendedHistory:
    """A history and its extension in the template's text, which is rendered once, when first asked for.

    The last message of the history is the assistant's turn that the extension follows. Every property
    raises `TemplateError` if the template refuses the conversation.
    """

    def __init__(self, tails: "Tails", history: ProbeHistory, extension: Sequence[Message]) -> None:
        self.history = history
        self._tails = tails
        self._extension = extension
        self._last = len(history.messages) - 1

    @cached_property
    def text(self) -> TracedStr:
        """The whole text, with the generation prompt after an extension."""
        return self._tails.render(self.history, self._extension)

    @cached_property
    def prompt(self) -> TracedStr:
        """The text that the assistant was asked with: the history without its turn."""
        return self._tails.render(self.history, is_prompt=True)

    @cached_property
    def turn(self) -> Turn:
        """Places of the assistant's turn in the text."""
        return self._tails.turns.of(self.text, self._last)

    @property
    def stop(self) -> int:
        """End of the content that was sampled.

        Raises:
            NotPrinted: The template does not print it.
            NotBridged: The template writes a new message before it.
        """
        if self.turn.stop is not None:
            return self.turn.stop
        if self.turn.content is not None:
            raise NotBridged("the template writes a new message before the assistant's turn")
        raise NotPrinted("the template does not print the assistant's content")

    @property
    def answer(self) -> str:
        """The turn from its first content on."""
        turn = self.text[self.turn.begin : self.stop]
        return plain(turn[next(start for start, _, origin in turn.spans if origin.is_content) :])

    @property
    def reasoning(self) -> ReasoningState:
        """State of the turn's reasoning."""
        turn = plain(self.text[self.turn.begin : self.stop])
        return reasoning_state(self._tails.profile.reasoning, turn)

    @property
    def prints_content(self) -> bool:
        """Whether any content of the turn is printed within it."""
        return self.turn.content is not None and self.turn.content < self.turn.end

    @property
    def sampled(self) -> str | None:
        """The turn after its generation prompt. None if the template rewrites the prompt."""
        text = plain(self.text)
        return text[len(self.prompt) : self.turn.end] if text.startswith(plain(self.prompt)) else None

    @property
    def opening(self) -> str:
        """The part of `sampled` before all content."""
        content = self.turn.content if self.prints_content else self.turn.end
        return "" if self.sampled is None else self.sampled[: max(0, (content or 0) - len(self.prompt))]

    @cached_property
    def prompt_ids(self) -> frozenset[int]:
        """Added tokens of the prompt."""
        return self._tails.syntax(self.prompt)

    @cached_property
    def turn_ids(self) -> frozenset[int]:
        """Added tokens of the turn. Stop tokens are left out, as another one may have been sampled."""
        turn = self.text[self.turn.begin : self.turn.end]
        return self._tails.syntax(turn) - self._tails.profile.stop_ids

    @cached_property
    def tail(self) -> Tail:
        """The text after the content.

        Raises:
            NotPrinted: The template does not print the assistant's content.
            NotBridged: It writes new messages before the assistant's turn, or earlier ones after it.
            SpecialTokenError: Content holds a special token, and its role is set to `error`.
        """
        tail = self.text[self.stop :]
        limit = len(tail)
        for start, _, origin in reversed(tail.spans):
            if origin.is_content:
                # The extension states a call as far as its result names it, and the proof varies the rest.
                if origin.message <= self._last and (
                    origin.message < self._last or origin.kind != "tool_call"
                ):
                    names = {"tools": "the tool definitions", "documents": "the documents"}
                    name = names.get(origin.kind, "earlier messages")
                    raise NotBridged(f"the template writes {name} again after the assistant's turn")
                limit = start
        layout = self._tails.writer.lay_out(tail)
        if any(0 <= placeholder.message <= self._last for placeholder in layout.placeholders):
            raise NotBridged("the template writes earlier images again after the assistant's turn")
        end = self._tails.turns.end(tail, layout.matches, self._last, limit)
        calls = self.history.assistant.tool_calls and self._tails.profile.prints_tool_calls
        if end.token_id is None and calls and self._extension:
            raise NotBridged("the template writes no stop token after a tool call")
        return Tail(layout, end)

    @property
    def close(self) -> str | None:
        """Template text between content and stop token. None without a tail."""
        try:
            return self.tail.close
        except (TemplateError, NotBridged):
            return None

    @property
    def ending(self) -> tuple[int | None, str | None]:
        """The turn's stop token, and the tail from there on. Both are None without a tail."""
        try:
            return self.tail.end.token_id, self.tail.text[self.tail.end.start :]
        except (TemplateError, NotBridged):
            return None, None

    def rest_of_empty_turn(self, begun: str) -> str | None:
        """Template text of a turn that says nothing, after `begun`. None if it does not begin like that."""
        try:
            prompt, text = plain(self.prompt), self.text
        except TemplateError:
            return None
        if not plain(text).startswith(prompt + begun):
            return None
        layout = self._tails.writer.lay_out(text[len(prompt) :])
        spans = layout.text.spans
        new = (start for start, _, origin in spans if origin.message > self._last and origin.is_content)
        limit = next(new, len(layout.text))
        end = self._tails.turns.end(layout.text, layout.matches, self._last, limit)
        close = Tail(layout, end).close
        return close[len(begun) :] if close.startswith(begun) else None


class Tails:
    """Renders histories with one template and one set of template arguments, and closes completions.

    Args:
        known: The template, and the findings about it.
        writer: Finds the syntax of a text.
    """

    def __init__(self, known: KnownTemplate, writer: TokenWriter) -> None:
        self.profile = known.profile
        self.turns = turns_of(known)
        self.writer = writer
        self._known = known

    def render(
        self, history: ProbeHistory, extension: Sequence[Message] = (), *, is_prompt: bool = False
    ) -> TracedStr:
        """Render a history and its extension, or the prompt of the history's last turn."""
        messages = history.messages[:-1] if is_prompt else history.messages
        try:
            return self._known.render(
                RenderRequest(
                    (*messages, *extension),
                    tools=history.tools,
                    documents=history.documents,
                    add_generation_prompt=is_prompt or bool(extension),
                    variables=self._known.variables,
                )
            )
        except TemplateError as error:
            error.where = place_of_new(error.where, len(messages))
            raise

    def syntax(self, text: TracedStr) -> frozenset[int]:
        """Added tokens of a text that are syntax."""
        matches = self.writer.lay_out(text).matches
        return frozenset([self.writer.tokenizer.added_ids[match.token] for match in matches])

    def closing(
        self, tail: Tail, history: ProbeHistory, extension: Sequence[Message], sampled: BridgedTurn
    ) -> tuple[str, int]:
        """Text that closes a completion, and the character of the tail that follows."""
        if sampled.stop_id is not None:
            # Only the next turn's opener itself can stand for it.
            is_other = tail.end.is_opener and sampled.stop_id != tail.end.token_id
            return "", tail.end.start if is_other else tail.end.stop
        completion, reasoning = self.turns.text_of(sampled.completion).text, self.profile.reasoning
        history = history.answering(content=f"{WORD}A", tool_calls=())
        if sampled.is_fresh:
            silent = ExtendedHistory(self, history.answering(content="", reasoning_content=None), extension)
            close = silent.rest_of_empty_turn(completion)
            if close is not None:
                return close, tail.rest
        if self.turns.opening(sampled.turn).inside:
            return self._reasoning_close(history, extension, completion), tail.rest
        if reasoning is not None and (end := sampled.turn.find_last(reasoning.end)) >= 0:
            # Nothing but reasoning: the text after its end is still missing, or a part of that text.
            rest = sampled.turn.text[end + len(reasoning.end) :]
            _, delimiter, after = self._reasoning_close(history, extension, "").partition(reasoning.end)
            if delimiter and after.startswith(rest):
                return after[len(rest) :], tail.rest
            if tail.end.token_id is None and not rest.strip():
                return "", tail.rest
        if tail.end.token_id is None:
            return "", tail.rest if completion.endswith(tail.close) else 0
        close = tail.close
        if any(message.role == "tool" for message in extension[:1]):
            # The tail begins after a call, but this completion may have been cut off before one.
            close = ExtendedHistory(self, history, extension).close or ""
        return "" if completion.endswith(close) else close, tail.end.start

    def _reasoning_close(self, history: ProbeHistory, extension: Sequence[Message], completion: str) -> str:
        """Template text between reasoning without content and its stop token.

        White space that ends the completion is left out if the template would trim it.
        """
        reasoning = self.profile.reasoning
        if reasoning is None:
            return ""
        blank = completion[len(completion.rstrip()) :]
        silent = history.answering(content="")

        def thinking(text: str) -> ProbeHistory:
            return replace(silent, assistant=with_reasoning(silent.assistant, text, reasoning.carrier))

        # A template may drop reasoning once a message follows it.
        for following in (extension, ()):
            thought = ExtendedHistory(self, thinking(f"{WORD}T"), following)
            close = thought.close
            if close is None:
                continue
            if blank and close.startswith(blank):
                with_blank = ExtendedHistory(self, thinking(f"{WORD}T{blank}"), following)
                if len(with_blank.text) == len(thought.text):
                    return close[len(blank) :]
            return close
        after_content = ExtendedHistory(self, history, extension).close or ""
        return reasoning.before_end + reasoning.end + reasoning.after_end + after_content


def place_of_new(where: str | None, first: int) -> str | None:
    """Return the caller's path of a message after a history. A path within the history is left out."""
    path = re.match(r"messages\[(\d+)\][^,]*(, )?", where or "")
    if path is None or where is None:
        return where
    number = int(path.group(1)) - first
    if number < 0:
        return where[path.end() :] or None
    return f"new_messages[{number}]{where[path.end(1) + 1 :]}"
