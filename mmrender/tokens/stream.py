"""One pass from cut text to tokens: collect the run between two cuts, encode it, append it attributed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmrender.errors import PlaceholderError
from mmrender.messages import Modality
from mmrender.model.tokenizer import Match, Tokenizer
from mmrender.spans import Expansion, PlaceholderRange, Repeat, Text
from mmrender.template.traced import TracedStr, plain
from mmrender.tokens.rendered import TokenKind, TokenSpan


class Cut(NamedTuple):
    """Token index of a character: the first token that begins at it or later.

    `clean` says that a token begins exactly there, so that no token joins the text on both sides.
    """

    token: int
    clean: bool


@dataclass(slots=True)
class Encoded:
    """Token ids with their attribution before sampled spans are known.

    Attributes:
        ids: Tokens, placeholders widened.
        spans: Rising, without gaps; none is marked as sampled.
        ranges: One for each placeholder, in order.
        cuts: The token index of each character position that was asked for.
    """

    ids: list[int] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    ranges: list[PlaceholderRange] = field(default_factory=list)
    cuts: dict[int, Cut] = field(default_factory=dict)

    def extend(self, ids: Sequence[int], message: int, kind: TokenKind) -> None:
        """Append tokens of one kind."""
        if not ids:
            return
        start = len(self.ids)
        self.ids += ids
        last = self.spans[-1] if self.spans else None
        if last is not None and last.message == message and last.kind == kind:
            start = self.spans.pop().start
        self.spans.append(TokenSpan(start, len(self.ids), message, kind, False))


class _Edge(NamedTuple):
    """A place in the run where the origin changes, or whose token index is wanted (`cut`, else -1)."""

    offset: int
    message: int
    kind: TokenKind
    cut: int


class TokenStream:
    """Writes tokens from left to right.

    Args:
        tokenizer: Encodes the runs.
        text: The rendered text; `special` and `media` consume it up to their match.
        cuts: Rising character positions whose token index is wanted.
        begins: Whether the text begins the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, text: TracedStr, cuts: Sequence[int] = (), *, begins: bool = True
    ) -> None:
        self._begins = begins
        self._tokenizer = tokenizer
        self._text = plain(text)
        self._spans = text._spans
        self._next_span = 0
        self._cuts = cuts
        self._next_cut = 0
        self._position = 0
        self._pieces: list[str] = []
        self._length = 0
        self._edges: list[_Edge] = []
        self._out = Encoded()

    def special(self, match: Match) -> None:
        """Write a special token that counts as syntax."""
        self._take(match.start)
        self._flush()
        message, kind, _ = self._origin(match.start, match.stop)
        self._cut_here(match.start)
        self._out.extend([self._tokenizer.added_ids[match.token]], message, kind)
        self._position = match.stop

    def media(self, match: Match, expansion: Expansion, message: int, modality: Modality) -> None:
        """Write the expansion of a placeholder; its range runs from its first to its last special token."""
        self._take(match.start)
        self._position = match.stop
        pieces = [part for piece in expansion for part in self._parts(piece)]
        start, embeds = -1, list[tuple[int, int]]()
        stop = start
        for piece in pieces:
            if isinstance(piece, Text):
                self._mark_edge(self._length, match.start, message, "scaffold")
                self._append_text(piece.text)
                continue
            self._flush()
            begin = len(self._out.ids)
            self._cut_here(match.start)
            self._out.extend([self._token_id(piece.token)] * piece.count, message, modality)
            stop = len(self._out.ids)
            start = begin if start < 0 else start
            if piece.embeds:
                if embeds and embeds[-1][1] == begin - start:
                    embeds[-1] = (embeds[-1][0], stop - start)
                else:
                    embeds.append((begin - start, stop - start))
        whole = embeds == [(0, stop - start)]
        self._out.ranges.append(PlaceholderRange(start, stop - start, None if whole else tuple(embeds)))

    def _parts(self, piece: Text | Repeat) -> list[Text | Repeat]:
        """An expansion's text, cut at the added tokens that it holds."""
        if isinstance(piece, Repeat):
            return [piece]
        parts: list[Text | Repeat] = []
        position = 0
        for match in self._tokenizer.find(piece.text, lambda _: True):
            if match.start > position:
                parts.append(Text(piece.text[position : match.start]))
            parts.append(Repeat(match.token, 1, embeds=False))
            position = match.stop
        return [*parts, Text(piece.text[position:])] if position < len(piece.text) else parts

    def _token_id(self, token: str) -> int:
        token_id = self._tokenizer.token_id(token)
        if token_id is None:
            raise PlaceholderError(
                "the tokenizer does not know a token that the image processor writes",
                expected=f"{token!r} in the vocabulary",
                got=f"a vocabulary of {self._tokenizer.vocab_size} tokens without it",
                remedy="Tokenizer and processor settings must be of the same model",
            )
        return token_id

    def finish(self) -> Encoded:
        """Write the rest and return everything."""
        self._take(len(self._text))
        self._flush()
        self._cut_here(len(self._text))
        return self._out

    def _cut_here(self, position: int) -> None:
        """Answer the wanted positions up to `position`, where a token is about to begin."""
        while self._next_cut < len(self._cuts) and self._cuts[self._next_cut] <= position:
            wanted = self._cuts[self._next_cut]
            self._out.cuts[wanted] = Cut(len(self._out.ids), wanted == position)
            self._next_cut += 1

    def _take(self, stop: int) -> None:
        """Move the characters up to `stop` into the run, with an edge wherever origin or cut asks for one."""
        position = self._position
        if stop <= position:
            return
        shift = self._length - position
        begin = position
        while position < stop:
            message, kind, end = self._origin(position, stop)
            self._mark_edge(position + shift, position, message, kind)
            if self._next_cut < len(self._cuts):
                end = min(end, self._cuts[self._next_cut])
            position = end
        self._append_text(self._text[begin:stop])
        self._position = stop

    def _mark_edge(self, offset: int, position: int, message: int, kind: TokenKind) -> None:
        """Begin a stretch at `offset` of the run; answer there what is wanted up to `position`."""
        self._edges.append(_Edge(offset, message, kind, -1))
        while self._next_cut < len(self._cuts) and self._cuts[self._next_cut] <= position:
            self._edges.append(_Edge(offset, message, kind, self._cuts[self._next_cut]))
            self._next_cut += 1

    def _append_text(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)

    def _origin(self, position: int, stop: int) -> tuple[int, TokenKind, int]:
        """Message and kind of the character at `position`, and where that ends, `stop` at the latest."""
        spans = self._spans
        while self._next_span < len(spans) and spans[self._next_span][1] <= position:
            self._next_span += 1
        if self._next_span == len(spans):
            return -1, "template", stop
        low, high, origin = spans[self._next_span]
        if position < low:
            return -1, "template", min(low, stop)
        return origin.message, origin.kind, min(high, stop)

    def _flush(self) -> None:
        """Encode the collected run."""
        if not self._length:
            return
        run = self._tokenizer.encode_run("".join(self._pieces), first=self._begins and not self._out.ids)
        base, edges = len(self._out.ids), self._edges
        if len(edges) == 1:
            firsts = [0]
        else:
            firsts = np.searchsorted(run.starts, [edge.offset for edge in edges]).tolist()
        lasts = [*firsts[1:], len(run.ids)]
        for edge, first, last in zip(edges, firsts, lasts, strict=True):
            if edge.cut >= 0:
                begin = int(run.starts[first]) if first < len(run.ids) else self._length
                clean = begin == edge.offset
                self._out.cuts[edge.cut] = Cut(base + first, clean)
            self._out.extend(run.ids[first:last], edge.message, edge.kind)
        self._pieces, self._length, self._edges = [], 0, []
