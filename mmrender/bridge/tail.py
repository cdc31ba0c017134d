"""A tail: what a template writes from the end of the assistant's content on.

Everything is read from provenance: which message each character belongs to, and which characters are
content. A completion that was cut off, in its content or inside reasoning, is closed with what the template
writes there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from mmrender.bridge.histories import ProbeHistory
from mmrender.errors import TemplateError
from mmrender.messages import Message, RenderRequest
from mmrender.template.known import KnownTemplate
from mmrender.template.probes import WORD, with_reasoning
from mmrender.template.text import Span, TracedStr, plain
from mmrender.tokens.encode import Layout, TokenWriter
from mmrender.tokens.spelling import TokenText
from mmrender.tokens.turns import TurnEnd, TurnReader, read_opening


class NotBridged(Exception):  # noqa: N818 - a refusal, not an error
    """The reason why turns are not bridged."""


class NotPrinted(NotBridged):
    """The template prints nothing of the assistant's content, so its end cannot be seen."""


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
    def close(self) -> str:
        """Template text between content and stop token, such as a newline."""
        return self.text[: self.rest]

    @property
    def rest(self) -> int:
        """Where the stop token begins, or what follows the turn where there is none."""
        return self.end.start if self.end.token_id is not None else self.end.own


ReasoningState: TypeAlias = Literal["none", "empty", "alone", "written"]
"""Whether a turn holds a reasoning block, whether there is anything in it, and whether nothing follows it."""


HELD: tuple[ReasoningState, ...] = ("alone", "written")
"""States of a turn with reasoning in it."""


class Turn(NamedTuple):
    """A turn that ends a history, as the template writes it.

    Attributes:
        text: The history, up to the end of the turn's content.
        begin: Where the turn begins.
        said: The turn from its first content on.
        reasoning: State of its reasoning.
    """

    text: str
    begin: int
    said: str
    reasoning: ReasoningState

    def changed_in(self, other: "Turn") -> tuple[ReasoningState, ...]:
        """States of sampled reasoning in which the turn is not what `other`, the same later on, holds."""
        if self.reasoning in HELD:
            return () if other.text.startswith(self.text) else HELD
        if self.said != other.said:
            return ("none", "empty")
        return ("empty",) if other.reasoning == "none" else ("none",)


class Written(NamedTuple):
    """What a template writes for a history.

    Attributes:
        prompt: Added tokens before the assistant's turn.
        turn: Those of the turn, without stop tokens.
        prints_content: Whether any content of the turn is printed.
        text: The turn after its generation prompt; None where the template rewrites what it was asked with.
        opening: What of it comes before all content.
    """

    prompt: frozenset[int]
    turn: frozenset[int]
    prints_content: bool
    text: str | None
    opening: str


class Tails:
    """Renders and cuts the tails of one template with one set of template arguments.

    Args:
        known: The template, and what is known about it.
        writer: Tells what is syntax.
    """

    def __init__(self, known: KnownTemplate, writer: TokenWriter) -> None:
        self.profile = known.profile
        self.turns = TurnReader(known.profile, writer.tokenizer)
        self._known = known
        self._writer = writer
        self._tokenizer = writer.tokenizer

    def render(
        self, history: ProbeHistory, following: Sequence[Message] = (), *, unanswered: bool = False
    ) -> TracedStr:
        """Render a history, without the assistant's turn if `unanswered`, and what follows it."""
        messages = history.messages[:-1] if unanswered else history.messages
        try:
            return self._known.render(
                RenderRequest(
                    (*messages, *following),
                    tools=history.tools,
                    documents=history.documents,
                    add_generation_prompt=unanswered or bool(following),
                    variables=self._known.arguments,
                )
            )
        except TemplateError as error:
            error.where = place_of_new(error.where, len(messages))
            raise

    def turn(self, history: ProbeHistory, following: Sequence[Message]) -> Turn:
        """The assistant's turn, once something follows."""
        last = len(history.messages) - 1
        text = self.render(history, following)
        end = self._sampled_end(text, last)
        begin = next(start for start, _, origin in text.spans if origin.message == last)
        turn = text[begin:end]
        first = next(start for start, _, origin in turn.spans if origin.is_content)
        return Turn(plain(text[:end]), begin, plain(turn[first:]), self.reasoning_state(plain(turn)))

    def reasoning_state(self, turn: str) -> ReasoningState:
        """The state of the reasoning in the text of a turn, its generation prompt included."""
        found = self.profile.reasoning
        if found is None or found.begin not in turn:
            return "none"
        inside, _, after = turn.partition(found.begin)[2].partition(found.end)
        if not inside.strip():
            return "empty"
        return "written" if after.strip() else "alone"

    def written(self, history: ProbeHistory, following: Sequence[Message]) -> "Written":
        """What the template writes for a history, and for the turn that ends it once something follows."""
        last = len(history.messages) - 1
        prompt = self.render(history, unanswered=True)
        text = self.render(history, following)
        edges = [
            [start for start, _, origin in text.spans if origin.message >= at] for at in (last, last + 1)
        ]
        begin, end = (min(starts, default=len(text)) for starts in edges)
        turn = text[begin:end]
        contents = [start for start, _, o in turn.spans if o.message == last and o.is_content]
        said = end if not contents else begin + contents[0]
        asked = len(prompt) if plain(text).startswith(plain(prompt)) else -1
        # The template may write another stop token than was sampled.
        syntax = self._syntax(turn) - self.profile.stop_ids
        if asked < 0:
            return Written(self._syntax(prompt), syntax, bool(contents), None, "")
        opening = plain(text[asked : max(said, asked)])
        return Written(self._syntax(prompt), syntax, bool(contents), plain(text[asked:end]), opening)

    def _syntax(self, text: TracedStr) -> frozenset[int]:
        matches = self._writer.lay_out(text).matches
        return frozenset([self._tokenizer.added_ids[match.token] for match in matches])

    def find(self, history: ProbeHistory, following: Sequence[Message]) -> Tail:
        """Render what follows a history, and cut it after the assistant's content.

        Raises:
            TemplateError: The template refuses the conversation.
            NotPrinted: It does not print the assistant's content.
            NotBridged: It writes new messages before the assistant's turn, or earlier ones after it.
            SpecialTokenError: Content holds a special token, and its role is set to `error`.
        """
        last = len(history.messages) - 1
        text = self.render(history, following)
        tail = text[self._sampled_end(text, last) :]
        # Where the first new content begins.
        limit = len(tail)
        for start, _, origin in reversed(tail.spans):
            if origin.is_content:
                # A call is known as far as its result states it; the proof varies the rest.
                if origin.message <= last and (origin.message < last or origin.kind != "tool_call"):
                    named = {"tools": "the tool definitions", "documents": "the documents"}
                    what = named.get(origin.kind, "earlier messages")
                    raise NotBridged(f"the template writes {what} again after the assistant's turn")
                limit = start
        layout = self._writer.lay_out(tail)
        if any(0 <= placeholder.message <= last for placeholder in layout.placeholders):
            raise NotBridged("the template writes earlier images again after the assistant's turn")
        end = self.turns.end(layout, last, limit)
        calls = history.assistant.tool_calls and self.profile.prints_tool_calls
        if end.token_id is None and calls and following:
            raise NotBridged("the template writes no stop token after a tool call")
        return Tail(layout, end)

    def _sampled_end(self, text: TracedStr, last: int) -> int:
        return self.turns.sampled_end(text, last, content_end(text.spans, last))

    def closing(
        self,
        tail: Tail,
        history: ProbeHistory,
        extension: Sequence[Message],
        prompt: Sequence[int],
        completion: Sequence[int],
    ) -> tuple[str, int]:
        """Text that closes a completion without a stop token, and where the tail goes on from there."""
        written, reasoning = self.turns.text_of(completion).text, self.profile.reasoning
        turn = self.turn_text(prompt, completion)
        history = history.answering(content=f"{WORD}A", tool_calls=())
        if self.turns.is_fresh(prompt):
            rest = self._rest_of_nothing(written, history, extension)
            if rest is not None:
                return rest, tail.rest
        if read_opening(reasoning, turn).inside:
            return self._reasoning_close(history, extension, written), tail.rest
        if reasoning is not None and (end := turn.find_last(reasoning.end)) >= 0:
            # Nothing but reasoning: what the template writes after its end is still to come, or a part of it.
            said = turn.text[end + len(reasoning.end) :]
            _, found, after = self._reasoning_close(history, extension, "").partition(reasoning.end)
            if found and after.startswith(said):
                return after[len(said) :], tail.rest
            if tail.end.token_id is None and not said.strip():
                return "", tail.rest
        if tail.end.token_id is None:
            return "", tail.rest if written.endswith(tail.close) else 0
        close = tail.close
        if any(message.role == "tool" for message in extension[:1]):
            # The tail begins after a call; this completion may have been cut off before one.
            close = self._close_after(history, extension) or ""
        return "" if written.endswith(close) else close, tail.end.start

    def turn_text(self, prompt: Sequence[int], completion: Sequence[int]) -> TokenText:
        """The text of a turn, its generation prompt included."""
        return self.turns.text_of([*self.turns.begun(prompt), *completion])

    def _rest_of_nothing(
        self, written: str, history: ProbeHistory, extension: Sequence[Message]
    ) -> str | None:
        """Rest of what the template writes for a turn without content, of which it begins with `written`."""
        history = history.answering(content="", reasoning_content=None)
        try:
            prompt = plain(self.render(history, unanswered=True))
            text = self.render(history, extension)
        except TemplateError:
            return None
        if not plain(text).startswith(prompt + written):
            return None
        layout = self._writer.lay_out(text[len(prompt) :])
        last, spans = len(history.messages) - 1, layout.text.spans
        new = (start for start, _, origin in spans if origin.message > last and origin.is_content)
        close = Tail(layout, self.turns.end(layout, last, next(new, len(layout.text)))).close
        return close[len(written) :] if close.startswith(written) else None

    def _reasoning_close(self, history: ProbeHistory, extension: Sequence[Message], written: str) -> str:
        """Template text between reasoning without content and its stop token.

        White space that ends `written` is left out where the template would write no other.
        """
        reasoning = self.profile.reasoning
        if reasoning is None:
            return ""
        blank = written[len(written.rstrip()) :]
        silent = history.answering(content="")

        def thinking(text: str) -> ProbeHistory:
            answer = with_reasoning(silent.assistant, text, reasoning.carrier)
            return silent.answering(content=answer.content, reasoning_content=answer.reasoning_content)

        thoughtful = thinking(f"{WORD}T")
        for following in (extension, ()):
            # A template may drop reasoning once something follows it.
            close = self._close_after(thoughtful, following)
            if close is None:
                continue
            if blank and close.startswith(blank):
                with_blank = self.render(thinking(f"{WORD}T{blank}"), following)
                if len(with_blank) == len(self.render(thoughtful, following)):
                    return close[len(blank) :]
            return close
        after_content = self._close_after(history, extension) or ""
        return reasoning.before_end + reasoning.end + reasoning.after_end + after_content

    def _close_after(self, history: ProbeHistory, following: Sequence[Message]) -> str | None:
        try:
            return self.find(history, following).close
        except (TemplateError, NotBridged):
            return None


def content_end(spans: Sequence[Span], last: int) -> int:
    """Character after the content of message `last`, the assistant's.

    Raises:
        NotPrinted: The template does not print it.
        NotBridged: The template writes something of a later message before it.
    """
    end = -1
    for _, stop, origin in spans:
        if origin.message > last:
            break
        if origin.message == last and origin.is_content:
            end = stop
    if end >= 0:
        return end
    if any(origin.message == last and origin.is_content for _, _, origin in spans):
        raise NotBridged("the template writes a new message before the assistant's turn")
    raise NotPrinted("the template does not print the assistant's content")


def place_of_new(where: str | None, first: int) -> str | None:
    """The path of a message after a history as the caller knows it; one of the history itself is left out."""
    found = re.match(r"messages\[(\d+)\][^,]*(, )?", where or "")
    if found is None or where is None:
        return where
    number = int(found.group(1)) - first
    if number < 0:
        return where[found.end() :] or None
    return f"new_messages[{number}]{where[found.end(1) + 1 :]}"
