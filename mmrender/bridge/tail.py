"""A skeleton, and its tail: what a template writes from the end of the assistant's content on.

A skeleton is the shortest conversation that an extension can follow. Extensions of one shape share a proof;
texts count in it only in so far as the template tests them.

Everything is read from provenance: which message each character belongs to, and which characters are
content. A completion that was cut off, in its content or inside reasoning, is closed with what the template
writes there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from mmrender.errors import TemplateError
from mmrender.messages import UNKNOWN_SOURCE, ImagePart, Message, Part, TextPart, VideoPart
from mmrender.probing.probes import WORD, probe_call, with_reasoning
from mmrender.probing.profile import ReasoningFormat, TemplateProfile, close_ids, unstopped_closers
from mmrender.probing.templates import KnownTemplate
from mmrender.template.text import Span, TracedStr, plain
from mmrender.tokens.encode import Layout, TokenWriter

_PROMPT_TOKENS = 64
"""More than any generation prompt has."""


class MediaCount(NamedTuple):
    """Number of images and videos in a conversation."""

    images: int = 0
    videos: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return as many parts without a source."""
        return (*[ImagePart(UNKNOWN_SOURCE)] * self.images, *[VideoPart(UNKNOWN_SOURCE)] * self.videos)


NO_MEDIA = MediaCount()


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
    extension: Sequence[Message], profile: TemplateProfile, media: MediaCount = NO_MEDIA
) -> ProbeHistory:
    """The shortest history: one user turn with the conversation's media, one assistant turn.

    The assistant calls the tools that the extension answers: one for each tool message that it begins with,
    under the name and id that the answer states.
    """
    calls = []
    for index, message in enumerate(extension):
        if message.role != "tool":
            break
        call = probe_call(index, name=message.name or "probe")
        calls.append(msgspec.structs.replace(call, id=message.tool_call_id or call.id))
    text = f"{WORD}A" if not calls or profile.writes_content_before_results else None
    content: Any = f"{WORD}U" if media == NO_MEDIA else (*media.parts, TextPart(f"{WORD}U"))
    asked = Message(role="user", content=content)
    return ProbeHistory(asked, Message(role="assistant", content=text, tool_calls=tuple(calls)))


def shape_of(messages: Sequence[Message], marks: Sequence[str]) -> tuple[Any, ...]:
    """Shape that extensions with one proof share; more than three alike in a row count as three."""
    shapes = []
    for message in messages:
        content, kinds = message.content, None
        text = content if isinstance(content, str) else ""
        if isinstance(content, tuple):
            kinds = _without_repeats([type(part).__name__ for part in content], 2)
            text = "\n".join([part.text for part in content if isinstance(part, TextPart)])
        found = tuple([mark for mark in marks if mark in text])
        unnamed = message.name is None, message.tool_call_id is None
        shapes.append(
            (message.role, content is None, kinds, not text.strip(), found, *unnamed, *message.extra)
        )
    return _without_repeats(shapes, 3)


def _without_repeats(items: Sequence[Any], most: int) -> tuple[Any, ...]:
    """The items, at most `most` equal ones in a row."""
    return tuple(
        [
            item
            for index, item in enumerate(items)
            if index < most or any(other != item for other in items[index - most : index])
        ]
    )


class NotBridged(Exception):  # noqa: N818 - a refusal, not an error
    """The reason why turns are not bridged."""


class NotPrinted(NotBridged):
    """The template prints nothing of the assistant's content, so its end cannot be seen."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Text after the assistant's content, and the place of the stop token that ends the turn.

    Attributes:
        layout: The text with its syntax.
        own: Number of characters with which the template closes the turn where it writes no stop token.
        stop_id: The stop token, or None.
        start: Where that token begins; 0 without one.
        stop: Where it ends; 0 without one.
        is_opener: Whether it opens the next turn, and is not written where nothing follows.
        closer_id: The first special token that closes the turn, where that is no stop token, or None.
    """

    layout: Layout
    own: int
    stop_id: int | None = None
    start: int = 0
    stop: int = 0
    is_opener: bool = False
    closer_id: int | None = None

    @property
    def text(self) -> str:
        """The whole tail."""
        return plain(self.layout.text)

    @property
    def close(self) -> str:
        """Template text between content and stop token, such as a newline."""
        return self.text[: self.start if self.stop_id is not None else self.own]


ReasoningState: TypeAlias = Literal["none", "empty", "written"]
"""Whether a turn holds a reasoning block, and whether there is anything in it."""


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
        if self.reasoning == "written":
            return () if other.text.startswith(self.text) else ("written",)
        if self.said != other.said:
            return ("none", "empty")
        return ("empty",) if other.reasoning == "none" else ("none",)


class Written(NamedTuple):
    """What a template writes for a history.

    Attributes:
        prompt: Added tokens before the assistant's turn.
        turn: Those of the turn, without stop tokens.
        prints_content: Whether any content of the turn is printed.
    """

    prompt: frozenset[int]
    turn: frozenset[int]
    prints_content: bool


class Tails:
    """Renders and cuts the tails of one template with one set of template arguments.

    Args:
        known: The template, and what is known about it.
        writer: Tells what is syntax.
    """

    def __init__(self, known: KnownTemplate, writer: TokenWriter) -> None:
        self.profile = known.profile
        self._known = known
        self._writer = writer
        self._tokenizer = writer.tokenizer
        closes, stop_ids = self.profile.closes, self.profile.stop_ids
        self.end_ids = frozenset(close_ids(closes, self._tokenizer).get("end", ()))
        # In history, some templates end a turn in a token that no model stops on.
        self._ends = stop_ids | unstopped_closers(closes, self._tokenizer, stop_ids)

    def render(
        self, history: ProbeHistory, following: Sequence[Message] = (), *, unanswered: bool = False
    ) -> TracedStr:
        """Render a history, without the assistant's turn if `unanswered`, and what follows it."""
        messages = history.messages[:-1] if unanswered else history.messages
        return self._known.render(
            [*messages, *following],
            tools=history.tools,
            documents=history.documents,
            add_generation_prompt=unanswered or bool(following),
        )

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
        inside = turn.partition(found.begin)[2].partition(found.end)[0]
        return "written" if inside.strip() else "empty"

    def written(self, history: ProbeHistory, following: Sequence[Message]) -> "Written":
        """What the template writes for a history, and for the turn that ends it once something follows."""
        last = len(history.messages) - 1
        prompt = self._syntax(self.render(history, unanswered=True))
        text = self.render(history, following)
        edges = [
            [start for start, _, origin in text.spans if origin.message >= at] for at in (last, last + 1)
        ]
        begin, end = (min(starts, default=len(text)) for starts in edges)
        turn = text[begin:end]
        printed = any(origin.message == last and origin.is_content for _, _, origin in turn.spans)
        # The template may write another stop token than was sampled.
        return Written(prompt, self._syntax(turn) - self.profile.stop_ids, printed)

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
        found = self._with_stop(layout, last, limit)
        calls = history.assistant.tool_calls and self.profile.prints_tool_calls
        if found.stop_id is None and calls and following:
            raise NotBridged("the template writes no stop token after a tool call")
        return found

    def _sampled_end(self, text: TracedStr, last: int) -> int:
        """Character after the content of message `last` that lies before its first stop token.

        A template may print results within the turn, and what it takes from the call again with them.
        """
        end = content_end(text.spans, last)
        mine = [
            span for span in text.spans if span[2].message == last and span[2].is_content and span[1] <= end
        ]
        for (_, low, _), (high, _, _) in pairwise(mine):
            between = self._tokenizer.find(plain(text[low:high]))
            if any(self._tokenizer.added_ids[match.token] in self.profile.stop_ids for match in between):
                return low
        return end

    def _with_stop(self, layout: Layout, last: int, limit: int) -> Tail:
        """The tail with the first stop token before `limit`, unless it lies inside the next turn."""
        own = 0
        for start, stop, origin in layout.text.spans:
            if start != own or origin.message != last:
                break
            own = stop
        for match in layout.matches:
            if match.start >= limit:
                break
            token_id = self._tokenizer.added_ids[match.token]
            if token_id not in self._ends:
                continue
            # The message that the token belongs to, -1 where unknown, and where text of later ones begins.
            owner, opening = -1, match.start
            for low, high, origin in layout.text.spans:
                if low >= match.stop:
                    break
                if origin.message > last:
                    opening = min(opening, low)
                if high > match.start:
                    owner = origin.message
                    break
            if owner > last:
                if layout.text[opening : match.start].strip():
                    break
                return Tail(layout, own, token_id, match.start, match.stop, is_opener=True)
            is_opener = owner != last and token_id not in self.end_ids
            return Tail(layout, own, token_id, match.start, match.stop, is_opener)
        ids = [self._tokenizer.added_ids[match.token] for match in layout.matches if match.stop <= own]
        other = next((token_id for token_id in ids if token_id in self._tokenizer.special_ids), None)
        return Tail(layout, own, closer_id=other)

    def closing(
        self, tail: Tail, extension: Sequence[Message], prompt: Sequence[int], completion: Sequence[int]
    ) -> tuple[str, int]:
        """Text that closes a completion without a stop token, and where the tail goes on from there."""
        header, written = (
            self.opened(prompt),
            self._tokenizer.decode(completion, before=prompt[-_PROMPT_TOKENS:]),
        )
        reasoning = self.profile.reasoning
        if not header and any(self.profile.generation_prompts):
            # The prompt ends within a turn that it continues.
            header = self._begun_reasoning(prompt)
        else:
            rest = self._rest_of_nothing(written, extension)
            if rest is not None:
                return rest, tail.start if tail.stop_id is not None else tail.own
        if reasoning is not None and reasoning.is_open(header + written):
            return self._reasoning_close(reasoning, extension, written), tail.start
        if tail.stop_id is None:
            return "", tail.own if written.endswith(tail.close) else 0
        if reasoning is not None and written.rstrip().endswith(reasoning.end):
            # Nothing but reasoning: what the template writes after its end is still to come, or a part of it.
            blank = written[len(written.rstrip()) :]
            _, end, after = self._reasoning_close(reasoning, extension, "").rpartition(reasoning.end)
            if end and after.startswith(blank):
                return after[len(blank) :], tail.start
        close = tail.close
        if any(message.role == "tool" for message in extension[:1]):
            # The tail begins after a call; this completion may have been cut off before one.
            close = self._close_after(_without_calls(extension, self.profile), extension) or ""
        return "" if written.endswith(close) else close, tail.start

    def _begun_reasoning(self, prompt: Sequence[int]) -> str:
        """The delimiter of the reasoning that a prompt ends in; by its token, which no content can forge."""
        reasoning = self.profile.reasoning
        if reasoning is not None:
            begin, end = map(self._tokenizer.token_id, (reasoning.begin, reasoning.end))
            for token in reversed(prompt):
                if token == begin:
                    return reasoning.begin
                if token == end or token in self.profile.stop_ids:
                    break
        return ""

    def opened(self, prompt: Sequence[int]) -> str:
        """The generation prompt that a prompt ends in; empty where it ends in none."""
        before = self._tokenizer.decode(prompt[-_PROMPT_TOKENS:])
        opened = [text for text in self.profile.generation_prompts if before.endswith(text)]
        return max(opened, key=len, default="")

    def _rest_of_nothing(self, written: str, extension: Sequence[Message]) -> str | None:
        """Rest of what the template writes for a turn without content, of which it begins with `written`."""
        history = _without_calls(extension, self.profile).answering(content="")
        try:
            prompt = plain(self.render(history, unanswered=True))
            text = self.render(history, extension)
        except TemplateError:
            return None
        if not plain(text).startswith(prompt + written):
            return None
        layout = self._writer.lay_out(text[len(prompt) :])
        last = len(history.messages) - 1
        limit = next((start for start, _, origin in layout.text.spans if origin.message > last), 0)
        close = self._with_stop(layout, last, limit + 1).close
        return close[len(written) :] if close.startswith(written) else None

    def _reasoning_close(self, reasoning: ReasoningFormat, extension: Sequence[Message], written: str) -> str:
        """Template text between reasoning without content and its stop token.

        White space that ends `written` is left out where the template would write no other.
        """
        plain_history = _without_calls(extension, self.profile)
        blank = written[len(written.rstrip()) :]
        silent = plain_history.answering(content="")

        def thinking(text: str) -> ProbeHistory:
            turn = with_reasoning(silent.assistant, text, reasoning.carrier)
            return silent.answering(content=turn.content, reasoning_content=turn.reasoning_content)

        history = thinking(f"{WORD}T")
        for following in (extension, ()):
            # A template may drop reasoning once something follows it.
            close = self._close_after(history, following)
            if close is None:
                continue
            if blank and close.startswith(blank):
                with_blank = self.render(thinking(f"{WORD}T{blank}"), following)
                if len(with_blank) == len(self.render(history, following)):
                    return close[len(blank) :]
            return close
        after_content = self._close_after(plain_history, extension) or ""
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


def _without_calls(extension: Sequence[Message], profile: TemplateProfile) -> ProbeHistory:
    return skeleton(extension, profile).answering(content=f"{WORD}A", tool_calls=())
