"""The tail of a skeleton: what a template writes after the assistant's content, from the turn's close on.

Everything is read from provenance: which message each character belongs to, and which of them are content.
"""

from dataclasses import dataclass

from mmrender.model.tokenizer import Match
from mmrender.probing.profile import TemplateProfile
from mmrender.template.origin import Origin, Span
from mmrender.template.traced import TracedStr
from mmrender.tokens.encode import Layout, Placeholder, TokenWriter


class NotBridged(Exception):  # noqa: N818 - a refusal, not an error
    """Why there is no bridge."""


class NotPrinted(NotBridged):
    """The template prints nothing of the assistant's content, so its end cannot be seen."""


@dataclass(frozen=True, slots=True)
class Close:
    """The stop token that the template writes: characters `[start, stop)` of the tail.

    `is_opener` says that it opens the next turn, and is not written where nothing follows.
    """

    start: int
    stop: int
    token_id: int
    is_opener: bool


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the assistant's content, with its syntax, and the stop token that ends the turn."""

    layout: Layout
    close: Close | None

    @property
    def text(self) -> TracedStr:
        """What the template writes after the assistant's content."""
        return self.layout.text


def content_end(spans: tuple[Span, ...], last: int) -> int:
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
    if end < 0:
        if any(origin.message == last and origin.is_content for _, _, origin in spans):
            raise NotBridged("the template writes a new message before the assistant's turn")
        raise NotPrinted("the template does not print the assistant's content")
    return end


class TailFinder:
    """Finds the tails of one template.

    Args:
        writer: Knows what is syntax.
        profile: What is known about the template.
        stop_ids: Tokens that end an assistant's turn.
    """

    def __init__(self, writer: TokenWriter, profile: TemplateProfile, stop_ids: frozenset[int]) -> None:
        self._writer = writer
        self._stop_ids = stop_ids
        end = profile.closes.get("end", "")
        self._end_ids = [self._id(match) for match in writer.tokenizer.find(end, lambda _: True)]

    def find(self, text: TracedStr, last: int) -> Tail:
        """Cut a rendering after the content of message `last`, the assistant's.

        Raises:
            NotPrinted: The template does not print that content.
            NotBridged: It writes new messages before the assistant's turn, or earlier ones after it.
            SpecialTokenError: Content holds a special token, and its role is set to `error`.
        """
        tail = text[content_end(text._spans, last) :]
        limit = len(tail)
        for start, _, origin in reversed(tail._spans):
            if origin.is_content:
                # A call is known as far as its result states it; the proof varies the rest.
                if origin.message <= last and (origin.message < last or origin.kind != "tool_call"):
                    raise NotBridged(f"the template writes {_name(origin)} again after the assistant's turn")
                limit = start
        layout = self._writer.lay_out(tail)
        if any(0 <= placeholder.message <= last for placeholder in layout.placeholders):
            raise NotBridged("the template writes earlier images again after the assistant's turn")
        return Tail(layout, self._close(layout, last, limit))

    def _close(self, layout: Layout, last: int, limit: int) -> Close | None:
        """The first stop token before `limit`, where new content begins, unless inside the next turn."""
        for match in layout.matches:
            if match.start >= limit:
                return None
            token_id = self._id(match)
            if token_id not in self._stop_ids:
                continue
            owner, opening = _owner(layout.text, match, last)
            if owner > last:
                begins_turn = not layout.text[opening : match.start].strip()
                return Close(match.start, match.stop, token_id, is_opener=True) if begins_turn else None
            written_alone = owner == last or token_id in self._end_ids
            return Close(match.start, match.stop, token_id, is_opener=not written_alone)
        return None

    def _id(self, match: Match) -> int:
        return self._writer.tokenizer.added_ids[match.token]


def _name(origin: Origin) -> str:
    return {"tools": "the tool definitions", "documents": "the documents"}.get(
        origin.kind, "earlier messages"
    )


def _owner(text: TracedStr, match: Match, last: int) -> tuple[int, int]:
    """Message that a match belongs to, -1 where unknown, and where the text of later messages begins."""
    opening, owner = match.start, -1
    for start, stop, origin in text._spans:
        if start >= match.stop:
            break
        if origin.message > last:
            opening = min(opening, start)
        if stop > match.start:
            owner = origin.message
            break
    return owner, opening


def rest_of(layout: Layout, start: int) -> Layout:
    """The layout of the text from `start` on; no match may cross it."""
    if not start:
        return layout
    matches = [Match(low - start, high - start, token) for low, high, token in layout.matches if low >= start]
    placeholders = [
        Placeholder(found.start - start, found.stop - start, found.modality, found.message)
        for found in layout.placeholders
        if found.start >= start
    ]
    return Layout(layout.text[start:], tuple(matches), tuple(placeholders))
