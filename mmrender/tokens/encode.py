"""Traced text in, token ids with attribution out.

The text is cut at the special tokens that count as syntax: those that the template wrote, and those in
content whose rule is `parse`. Between two cuts one run is encoded whole, so that byte-pair merges fall as
they do in the whole text. A placeholder that the template wrote becomes the expansion of its media item, in
token space. Every token belongs to the origin of its first character.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from mmrender.errors import PlaceholderError, SpecialTokenError, TokenizerError
from mmrender.messages import Modality
from mmrender.model.tokenizer import Match, Tokenizer
from mmrender.spans import Expansion, MediaItem, PlaceholderRange, Repeat, Text
from mmrender.template.text import Author, Origin, Span, TracedStr, plain
from mmrender.tokens.rendered import TokenKind, TokenSpan

SpecialTokenRule: TypeAlias = Literal["text", "parse", "error"]
"""Rule for a special token in content: it is text, syntax, or an error."""

DEFAULT_RULES: Mapping[Author, SpecialTokenRule] = {
    "system": "parse",
    "developer": "parse",
    "user": "text",
    "assistant": "parse",
    "tool": "text",
    "caller": "text",
}
"""Rules by role; `caller`: tool definitions, documents, names, tool arguments and template arguments."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder that the template wrote: characters `[start, stop)`, and its message or -1."""

    start: int
    stop: int
    modality: Modality
    message: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered text with its syntax: special tokens and placeholders, in order."""

    text: TracedStr
    matches: tuple[Match, ...]
    placeholders: tuple[Placeholder, ...]


class Cut(NamedTuple):
    """Index of the first token that starts at or after a character. `clean` is false if a token spans it."""

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


class TokenWriter:
    """Turns traced text into tokens.

    Args:
        tokenizer: The model's tokenizer.
        placeholders: Text that the template writes for one item of each modality.
        placeholder_tokens: Every token of media; in content it is text whatever the rules say.
        rules: What a special token in the content of each author is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        placeholders: Mapping[Modality, str],
        placeholder_tokens: Iterable[str],
        rules: Mapping[Author, SpecialTokenRule],
    ) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._modality: dict[str, Modality] = {text: modality for modality, text in placeholders.items()}
        self.media_tokens = frozenset(placeholder_tokens) | set(self._modality)
        known = (tokenizer.token_id(token) for token in self.media_tokens)
        self.media_ids = frozenset(token_id for token_id in known if token_id is not None)

    def lay_out(self, text: TracedStr) -> Layout:
        """Find the syntax of a rendered text.

        Raises:
            SpecialTokenError: Content holds a special token, and its rule is `error`.
        """
        spans = text.spans
        first = 0
        placeholders: list[Placeholder] = []

        def accept(match: Match) -> bool:
            nonlocal first
            # Matches rise, but a token that swallows white space may reach back by a few spans.
            while first and spans[first - 1][1] > match.start:
                first -= 1
            while first < len(spans) and spans[first][1] <= match.start:
                first += 1
            index = first
            while index < len(spans) and spans[index][0] < match.stop:
                origin = spans[index][2]
                if origin.is_content and not self._is_syntax(match, origin):
                    return False
                index += 1
            if match.token in self._modality:
                message = spans[first][2].message if index > first else -1
                modality = self._modality[match.token]
                placeholders.append(Placeholder(match.start, match.stop, modality, message))
            return True

        matches = tuple(self.tokenizer.find(plain(text), accept))
        return Layout(text, matches, tuple(placeholders))

    def _is_syntax(self, match: Match, origin: Origin) -> bool:
        if match.token in self.media_tokens:
            return False
        rule = self.rules[origin.author]
        if rule == "error" and not match.token.isspace():
            raise SpecialTokenError(
                "the content holds a special token",
                where=origin.path,
                expected=f"no special tokens in {origin.author} content",
                got=repr(match.token),
                remedy='Escape it, or set content_special_tokens="text" to encode it as text',
            )
        # Blanks and newlines in the vocabulary are not syntax: they encode as in any text.
        return rule == "parse" or match.token.isspace()

    def write(
        self,
        layout: Layout,
        items: Sequence[MediaItem | None],
        cuts: Sequence[int] = (),
        *,
        begins: bool = True,
    ) -> Encoded:
        """Encode a text.

        Args:
            layout: The text and its syntax.
            items: The item of each placeholder; None leaves it as one token.
            cuts: Rising character positions whose token index is wanted.
            begins: Whether the text begins the prompt.

        Raises:
            TokenizerError: Runs of this tokenizer are not independent.
            PlaceholderError: The vocabulary lacks a token of an expansion.
        """
        if not self.tokenizer.runs_are_independent:
            raise TokenizerError(
                "this tokenizer encodes a run differently after other text",
                expected="an encoding between special tokens that depends on nothing outside",
                remedy="mmrender does not know this kind of pre-tokenizer; please report the model",
            )
        stream = _TokenStream(self.tokenizer, layout.text, cuts, begins=begins)
        queue = iter(zip(layout.placeholders, items, strict=True))
        for match in layout.matches:
            if match.token not in self._modality:
                stream.special(match)
                continue
            placeholder, item = next(queue)
            expansion: Expansion = (Repeat(match.token, 1),) if item is None else item.expansion
            stream.media(match, expansion, placeholder.message, placeholder.modality)
        stream.take(len(layout.text))
        stream.flush(len(layout.text))
        return stream.out


class _Edge(NamedTuple):
    """A place in the run where the origin changes, or whose token index is wanted (`cut`, else -1)."""

    offset: int
    message: int
    kind: TokenKind
    cut: int


class _TokenStream:
    """Writes tokens from left to right: collects the run between two cuts, encodes it, appends it attributed.

    Args:
        tokenizer: Encodes the runs.
        text: The rendered text; `special` and `media` consume it up to their match.
        cuts: Rising character positions whose token index is wanted.
        begins: Whether the text begins the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, text: TracedStr, cuts: Sequence[int], *, begins: bool) -> None:
        self._begins = begins
        self._tokenizer = tokenizer
        self._text = plain(text)
        self._spans: Sequence[Span] = text.spans
        self._next_span = 0
        self._cuts = cuts
        self._next_cut = 0
        self._position = 0
        self._pieces: list[str] = []
        self._length = 0
        self._edges: list[_Edge] = []
        self.out = Encoded()

    def special(self, match: Match) -> None:
        """Write a special token that counts as syntax."""
        self.take(match.start)
        self.flush(match.start)
        message, kind, _ = self._origin(match.start, match.stop)
        self.out.extend([self._tokenizer.added_ids[match.token]], message, kind)
        self._position = match.stop

    def media(self, match: Match, expansion: Expansion, message: int, modality: Modality) -> None:
        """Write the expansion of a placeholder; its range runs from its first to its last special token."""
        self.take(match.start)
        self._position = match.stop
        start = stop = -1
        embeds: list[tuple[int, int]] = []
        for piece in self._parts(expansion):
            if isinstance(piece, Text):
                self._mark_edge(self._length, match.start, message, "scaffold")
                self._pieces.append(piece.text)
                self._length += len(piece.text)
                continue
            token_id = self._tokenizer.token_id(piece.token)
            if token_id is None:
                raise PlaceholderError(
                    "the tokenizer does not know a token that the image processor writes",
                    expected=f"{piece.token!r} in the vocabulary",
                    got=f"a vocabulary of {self._tokenizer.vocab_size} tokens without it",
                    remedy="Tokenizer and processor settings must be of the same model",
                )
            self.flush(match.start)
            begin = len(self.out.ids)
            self.out.extend([token_id] * piece.count, message, modality)
            stop = len(self.out.ids)
            start = begin if start < 0 else start
            if piece.embeds:
                if embeds and embeds[-1][1] == begin - start:
                    embeds[-1] = (embeds[-1][0], stop - start)
                else:
                    embeds.append((begin - start, stop - start))
        whole = embeds == [(0, stop - start)]
        self.out.ranges.append(PlaceholderRange(start, stop - start, None if whole else tuple(embeds)))

    def _parts(self, expansion: Expansion) -> Iterable[Text | Repeat]:
        """Yield the pieces of an expansion, its text cut at the added tokens that it holds."""
        for piece in expansion:
            if isinstance(piece, Repeat):
                yield piece
                continue
            position = 0
            for match in self._tokenizer.find(piece.text, lambda _: True):
                if match.start > position:
                    yield Text(piece.text[position : match.start])
                yield Repeat(match.token, 1, embeds=False)
                position = match.stop
            if position < len(piece.text):
                yield Text(piece.text[position:])

    def take(self, stop: int) -> None:
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
        self._pieces.append(self._text[begin:stop])
        self._length += stop - begin
        self._position = stop

    def _mark_edge(self, offset: int, position: int, message: int, kind: TokenKind) -> None:
        """Begin a stretch at `offset` of the run; answer there the wanted positions up to `position`."""
        self._edges.append(_Edge(offset, message, kind, -1))
        while self._next_cut < len(self._cuts) and self._cuts[self._next_cut] <= position:
            self._edges.append(_Edge(offset, message, kind, self._cuts[self._next_cut]))
            self._next_cut += 1

    def _origin(self, position: int, stop: int) -> tuple[int, TokenKind, int]:
        """Return message and kind of the character at `position`, and where they end, at most `stop`."""
        spans = self._spans
        while self._next_span < len(spans) and spans[self._next_span][1] <= position:
            self._next_span += 1
        if self._next_span == len(spans):
            return -1, "template", stop
        low, high, origin = spans[self._next_span]
        if position < low:
            return -1, "template", min(low, stop)
        return origin.message, origin.kind, min(high, stop)

    def flush(self, position: int) -> None:
        """Encode the collected run; answer the wanted positions up to `position`, where a token begins."""
        if self._length:
            run = self._tokenizer.encode_run("".join(self._pieces), first=self._begins and not self.out.ids)
            base, edges = len(self.out.ids), self._edges
            if len(edges) == 1:
                firsts = [0]
            else:
                firsts = np.searchsorted(run.starts, [edge.offset for edge in edges]).tolist()
            lasts = [*firsts[1:], len(run.ids)]
            for edge, first, last in zip(edges, firsts, lasts, strict=True):
                if edge.cut >= 0:
                    begin = int(run.starts[first]) if first < len(run.ids) else self._length
                    self.out.cuts[edge.cut] = Cut(base + first, begin == edge.offset)
                self.out.extend(run.ids[first:last], edge.message, edge.kind)
            self._pieces, self._length, self._edges = [], 0, []
        while self._next_cut < len(self._cuts) and self._cuts[self._next_cut] <= position:
            wanted = self._cuts[self._next_cut]
            self.out.cuts[wanted] = Cut(len(self.out.ids), wanted == position)
            self._next_cut += 1
