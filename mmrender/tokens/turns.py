"""Where an assistant's turn begins in a prompt, and where it ends in a rendering.

Which tokens end a turn, and how reasoning opens, are findings of the profile. Where they lie in a text or in
its tokens is decided here, for sampled spans, bridges, training samples and the parser alike.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from mmrender.model.tokenizer import Tokenizer
from mmrender.template.profile import ReasoningFormat, TemplateProfile
from mmrender.template.text import TracedStr, plain
from mmrender.tokens.encode import Layout
from mmrender.tokens.rendered import TokenSpan
from mmrender.tokens.spelling import TokenSpeller, TokenText

PROMPT_TOKENS = 64
"""More than any generation prompt has."""


class TurnEnd(NamedTuple):
    """End of a turn in the text that follows its content.

    Attributes:
        own: Number of characters of it that belong to the turn's message.
        token_id: The token that ends the turn, or None.
        start: Where that token begins; 0 without one.
        stop: Where it ends; 0 without one.
        is_opener: Whether it opens the next turn, and is not written where nothing follows.
        closer_id: Without such a token, the first special token among the turn's own, or None.
    """

    own: int
    token_id: int | None = None
    start: int = 0
    stop: int = 0
    is_opener: bool = False
    closer_id: int | None = None


class TurnReader:
    """Reads the turns of one template with one set of template arguments."""

    def __init__(self, profile: TemplateProfile, tokenizer: Tokenizer) -> None:
        self.profile = profile
        self.speller = TokenSpeller(tokenizer)
        self._tokenizer = tokenizer
        # The token that begins an assistant's turn: the first that its generation prompt writes.
        header = profile.generation_prompt
        if profile.reasoning is not None:
            header = header.partition(profile.reasoning.begin)[0]
        first = next(iter(tokenizer.find(header)), None)
        self._begin_id = None if first is None else tokenizer.added_ids[first.token]
        opener = profile.reasoning.begin if profile.reasoning is not None else ""
        self._opener_ids = {tokenizer.added_ids[match.token] for match in tokenizer.find(opener)}

    # In tokens

    def text_of(self, token_ids: Sequence[int]) -> TokenText:
        """The text of tokens."""
        return TokenText(token_ids, self.speller)

    def is_fresh(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends where a turn begins, rather than within a turn that it continues."""
        return self.profile.opens_answer(self.text_of(prompt_ids[-PROMPT_TOKENS:]).text)

    def begun(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The tokens of a prompt since its last turn, the assistant's, began.

        Where a template writes no token to begin it, those since the last stop token; none where they cannot
        hold reasoning.
        """
        if self._begin_id is None and self._opener_ids and self._opener_ids.isdisjoint(prompt_ids):
            return ()
        for index in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[index] == self._begin_id:
                return prompt_ids[index:]
            if self._begin_id is None and prompt_ids[index] in self.profile.stop_ids:
                return prompt_ids[index + 1 :]
        return prompt_ids if self._begin_id is None else prompt_ids[-PROMPT_TOKENS:]

    # In a text

    def sampled_end(self, text: TracedStr, message: int, content_stop: int) -> int:
        """Character after a turn's last content before its first stop token.

        A template may print results within the turn, and what it takes from the call again with them.
        """
        stops = self.profile.stop_ids
        contents = [
            span
            for span in text.spans
            if span[2].message == message and span[2].is_content and span[1] <= content_stop
        ]
        for (_, low, _), (high, _, _) in pairwise(contents):
            between = self._tokenizer.find(plain(text[low:high]))
            if any(self._tokenizer.added_ids[match.token] in stops for match in between):
                return low
        return content_stop

    def end(self, layout: Layout, message: int, limit: int) -> TurnEnd:
        """The end of a turn in the text after its content, before character `limit`.

        A stop token inside the next turn does not end this one.
        """
        spans, ends = layout.text.spans, self.profile.stop_ids | self.profile.closer_ids
        own = 0
        for start, stop, origin in spans:
            if start != own or origin.message != message:
                break
            own = stop
        for match in layout.matches:
            if match.start >= limit:
                break
            token_id = self._tokenizer.added_ids[match.token]
            if token_id not in ends:
                continue
            # The message that the token belongs to, -1 where unknown, and where text of later ones begins.
            owner = next((o.message for low, high, o in spans if low < match.stop and high > match.start), -1)
            later = [low for low, _, o in spans if o.message > message and low < match.stop]
            if owner > message and layout.text[min(later) : match.start].strip():
                break
            is_opener = owner > message or (owner != message and token_id not in self.profile.end_ids)
            return TurnEnd(own, token_id, match.start, match.stop, is_opener)
        ids = [self._tokenizer.added_ids[match.token] for match in layout.matches if match.stop <= own]
        closer = next((token_id for token_id in ids if token_id in self._tokenizer.special_ids), None)
        return TurnEnd(own, closer_id=closer)


def turn_stop(
    ids: Sequence[int], spans: Sequence[TokenSpan], message: int, start: int, stop_ids: Collection[int]
) -> int:
    """Return the index after the first stop token that a turn has from `start` on, else after its tokens.

    A stop token that opens the next turn follows right after the turn's own tokens.
    """
    end, begun = start, False
    for span in spans:
        if span.message == message:
            end, begun = span.stop, True
        elif begun and span.message >= 0:
            break
    tail = ids[start : end + 1]
    places = [tail.index(stop_id) for stop_id in stop_ids if stop_id in tail]
    return start + min(places) + 1 if places else end


class Opening(NamedTuple):
    """Whether a prompt ends inside reasoning, and the text still missing before the reasoning begins."""

    inside: bool = False
    missing: str = ""


def read_opening(format_: ReasoningFormat | None, turn: TokenText) -> Opening:
    """Read where a turn, its generation prompt included, leaves the model."""
    begin = -1 if format_ is None else turn.find_last(format_.begin)
    if format_ is None or begin < 0 or turn.find_last(format_.end) > begin:
        return Opening()
    written, expected = turn.text[begin + len(format_.begin) :], format_.after_begin
    return Opening(inside=True, missing=expected[len(written) :] if expected.startswith(written) else "")
