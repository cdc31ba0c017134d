"""The beginning and the end of an assistant's turn, in a rendered text and in token ids.

The profile holds the findings about a template: its generation prompts, its stop tokens, its reasoning
delimiters. Their places are decided here, for sampled spans, bridges, training samples and the parser.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple, Protocol

from mmrender.model.spelling import TokenSpeller, TokenText
from mmrender.model.tokenizer import Match, Tokenizer
from mmrender.template.known import KnownTemplate
from mmrender.template.profile import TemplateProfile
from mmrender.template.text import TracedStr, plain

PROMPT_TOKENS = 64
"""Upper bound of the length of a generation prompt, in tokens."""


class Turn(NamedTuple):
    """An assistant message in a rendered text, in characters.

    Attributes:
        begin: Start of the message.
        content: Start of its content, or None if the template prints none.
        stop: End of the content that precedes the turn's first stop token. None if the content is not
            printed, or only after a later message.
        end: Start of the next message, or the length of the text.
    """

    begin: int
    content: int | None
    stop: int | None
    end: int


class TurnEnd(NamedTuple):
    """End of a turn in the text that follows its content.

    Attributes:
        message_stop: End of the characters of the turn's message.
        token_id: The token that ends the turn, or None.
        start: Start of that token, or 0.
        stop: End of that token, or 0.
        is_opener: Whether the token opens the next turn, and is only written if one follows.
        closer_id: The first special token of the message's own text if `token_id` is None, or None.
    """

    message_stop: int
    token_id: int | None = None
    start: int = 0
    stop: int = 0
    is_opener: bool = False
    closer_id: int | None = None


class Opening(NamedTuple):
    """Whether a prompt ends inside reasoning, and the text still missing before the reasoning begins."""

    inside: bool = False
    missing: str = ""


class Turns:
    """Finds the turns of one template with one set of template arguments. See `turns_of`."""

    def __init__(self, profile: TemplateProfile, tokenizer: Tokenizer) -> None:
        self.profile = profile
        self.speller = TokenSpeller(tokenizer)
        self._tokenizer = tokenizer
        begin = "" if profile.reasoning is None else profile.reasoning.begin
        header = profile.generation_prompt
        header_ids = self._added(header.partition(begin)[0] if begin else header)
        self._begin_id = header_ids[0] if header_ids else None
        self._reasoning_ids = frozenset(self._added(begin))

    def _added(self, text: str) -> list[int]:
        """Added tokens of a text."""
        return [self._tokenizer.added_ids[match.token] for match in self._tokenizer.find(text)]

    # In tokens

    def text_of(self, token_ids: Sequence[int]) -> TokenText:
        """Spell tokens as text."""
        return TokenText(token_ids, self.speller)

    def is_fresh(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends at the beginning of a turn, rather than within a turn that it continues."""
        text = self.text_of(prompt_ids[-PROMPT_TOKENS:]).text
        prompts = tuple(filter(None, self.profile.generation_prompts))
        return text.endswith(prompts or self.profile.openings)

    def open(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of the assistant's turn in which a prompt ends.

        If no token begins a turn, these are the tokens after the last stop token. The result is empty if they
        cannot hold reasoning.
        """
        if self._begin_id is None and self._reasoning_ids and self._reasoning_ids.isdisjoint(prompt_ids):
            return ()
        for index in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[index] == self._begin_id:
                return prompt_ids[index:]
            if self._begin_id is None and prompt_ids[index] in self.profile.stop_ids:
                return prompt_ids[index + 1 :]
        return prompt_ids if self._begin_id is None else prompt_ids[-PROMPT_TOKENS:]

    def opening(self, turn: TokenText) -> Opening:
        """Read whether a turn, its generation prompt included, has opened a reasoning block."""
        format_ = self.profile.reasoning
        begin = -1 if format_ is None else turn.find_last(format_.begin)
        if format_ is None or begin < 0 or turn.find_last(format_.end) > begin:
            return Opening()
        text, expected = turn.text[begin + len(format_.begin) :], format_.after_begin
        return Opening(inside=True, missing=expected[len(text) :] if expected.startswith(text) else "")

    # In a text

    def of(self, text: TracedStr, message: int) -> Turn:
        """Find the turn of an assistant message in a rendered text."""
        begin = next((low for low, _, origin in text.spans if origin.message >= message), len(text))
        end = next((low for low, _, origin in text.spans if origin.message > message), len(text))
        contents = [
            (low, high) for low, high, origin in text.spans if origin.message == message and origin.is_content
        ]
        first = contents[0][0] if contents else None
        contents = [content for content in contents if content[0] < end]
        if not contents:
            return Turn(begin, first, None, end)
        # A template may print results within the turn, and repeat values of the call with them.
        for (_, low), (high, _) in pairwise(contents):
            if not self.profile.stop_ids.isdisjoint(self._added(plain(text[low:high]))):
                return Turn(begin, first, low, end)
        return Turn(begin, first, contents[-1][1], end)

    def end(self, text: TracedStr, matches: Sequence[Match], message: int, limit: int) -> TurnEnd:
        """Find the end of a turn in the text after its content.

        Args:
            text: The rendered text after the content.
            matches: Its added tokens that are syntax.
            message: Index of the turn's message.
            limit: Character before which the turn must end. A stop token inside the next turn is not its end.
        """
        ends = self.profile.stop_ids | self.profile.closer_ids
        message_stop = 0
        for start, stop, origin in text.spans:
            if start != message_stop or origin.message != message:
                break
            message_stop = stop
        ids = [self._tokenizer.added_ids[match.token] for match in matches]
        for token_id, match in zip(ids, matches, strict=True):
            if match.start >= limit:
                break
            if token_id not in ends:
                continue
            spans = [span for span in text.spans if span[0] < match.stop]
            owner = next((origin.message for _, high, origin in spans if high > match.start), -1)
            if owner > message:
                later = next(low for low, _, origin in spans if origin.message > message)
                if text[later : match.start].strip():
                    break
            is_opener = owner > message or (owner != message and token_id not in self.profile.end_ids)
            return TurnEnd(message_stop, token_id, match.start, match.stop, is_opener)
        closers = (
            token_id
            for token_id, match in zip(ids, matches, strict=True)
            if match.stop <= message_stop and token_id in self._tokenizer.special_ids
        )
        return TurnEnd(message_stop, closer_id=next(closers, None))


def turns_of(known: KnownTemplate) -> Turns:
    """Return the turns of a template, which bridges and parsers share with their spelling of tokens."""
    return known.findings.remember("turns", lambda: Turns(known.profile, known.tokenizer))


class OwnedTokens(Protocol):
    """Tokens of one message, such as a `mmrender.tokens.rendered.TokenSpan`."""

    @property
    def stop(self) -> int:
        """Index after the last token."""
        ...

    @property
    def message(self) -> int:
        """Index of the message, or -1."""
        ...


def turn_ends(spans: Iterable[OwnedTokens]) -> dict[int, int]:
    """Return by message the index after its tokens, up to the next message that the template writes."""
    ends: dict[int, int] = {}
    current = -1
    for span in spans:
        if span.message >= 0 and (span.message == current or span.message not in ends):
            current = span.message
            ends[current] = span.stop
        elif span.message >= 0:
            current = -1  # values of an earlier message within a later one
    return ends


def turn_stop(ids: Sequence[int], start: int, end: int, stop_ids: Collection[int]) -> int:
    """Return the index after the first stop token of the tokens `[start, end)` of a turn, or `end`.

    A stop token that opens the next turn follows directly after the turn's own tokens.
    """
    first = end + 1
    for stop_id in stop_ids:
        with suppress(ValueError):
            first = ids.index(stop_id, start, first)
    return first + 1 if first <= end else end
