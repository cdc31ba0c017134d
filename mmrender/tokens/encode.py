"""Traced text in, token ids with attribution out.

The text is cut at the special tokens that count as syntax: the template's own, and special tokens in content
whose rule is `parse`. It is also cut at the blanks and newlines of the vocabulary, which are never syntax.
Between two cuts one run is encoded whole, so that byte-pair merges fall as in the whole text. A placeholder
that the template wrote becomes the expansion of its media item, in token space. If an expansion begins or
ends in text, that text first joins its neighbours. Every token belongs to the origin of its first character.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple, TypeAlias

from mmrender.errors import ProcessorError, SpecialTokenError, TokenizerError
from mmrender.media.processor import Affixes, BosPlace, MediaProcessor
from mmrender.messages import Modality
from mmrender.model.engines import Before
from mmrender.model.tokenizer import Match, Tokenizer, is_blank
from mmrender.sidecar import MediaItem, PlaceholderRange, Repeat
from mmrender.template.text import Author, Origin, Span, TracedStr, concat, plain
from mmrender.tokens.expansion import SplitExpansion, split_expansion
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
"""Rules by role. `caller` covers tool definitions, documents, names, arguments of tools and templates."""

_TEMPLATE: TokenKind = "template"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder that the template wrote: characters `[start, stop)`, and its message and part or -1."""

    start: int
    stop: int
    modality: Modality
    message: int
    part: int = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered text with its syntax: special tokens and placeholders, in order."""

    text: TracedStr
    matches: tuple[Match, ...]
    placeholders: tuple[Placeholder, ...]

    def cut(self, start: int) -> "Layout":
        """Return the layout from a character on that lies in no match."""
        if not start:
            return self
        return Layout(
            self.text[start:],
            tuple(
                [
                    Match(low - start, high - start, token, own_low - start, own_high - start)
                    for low, high, token, own_low, own_high in self.matches
                    if low >= start
                ]
            ),
            tuple(
                [
                    replace(placeholder, start=placeholder.start - start, stop=placeholder.stop - start)
                    for placeholder in self.placeholders
                    if placeholder.start >= start
                ]
            ),
        )


class Cut(NamedTuple):
    """Index of the first token from a character on. `clean` is false if a token spans the character."""

    token: int
    clean: bool


@dataclass(slots=True)
class Encoded:
    """Token ids with their attribution before sampled spans are known.

    Attributes:
        ids: The tokens before the text, then its own, placeholders widened.
        spans: Of the text's tokens: rising, without gaps, and not marked as sampled.
        ranges: Token range of each placeholder, in order.
        cuts: Token index of each requested character position.
        is_closed: Whether a longer conversation does not begin with these tokens.
    """

    ids: list[int] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    ranges: list[PlaceholderRange] = field(default_factory=list)
    cuts: dict[int, Cut] = field(default_factory=dict)
    is_closed: bool = False

    def extend(self, ids: Sequence[int], message: int, kind: TokenKind) -> None:
        """Append tokens of one kind."""
        if not ids:
            return
        start, spans = len(self.ids), self.spans
        self.ids += ids
        if spans:
            last_start, _, last_message, last_kind, _ = spans[-1]
            if last_message == message and last_kind == kind:
                start = last_start
                del spans[-1]
        spans.append(TokenSpan(start, len(self.ids), message, kind, False))


class TokenWriter:
    """Turns traced text into tokens.

    Args:
        tokenizer: The model's tokenizer.
        processor: Knows the placeholders and tokens of media, which are text in content whatever the rules
            are, and its additions to prompts. Without it, prompts are the template's text.
        rules: The rule for special tokens in the content of each author.
        bos_token: A prompt that begins with it gets no tokens of the post-processor.

    Raises:
        TokenizerError: Runs of this tokenizer are not independent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        processor: MediaProcessor | None,
        *,
        rules: Mapping[Author, SpecialTokenRule],
        bos_token: str | None = None,
    ) -> None:
        if tokenizer.dependent_token is not None:
            raise TokenizerError(
                "this tokenizer encodes a run differently after other text",
                expected="an encoding between added tokens that only depends on the text between them",
                got=f"another encoding next to {tokenizer.dependent_token!r}",
                remedy="mmrender does not know this kind of tokenizer. Please report the model",
            )
        self.tokenizer = tokenizer
        self.rules = rules
        placeholders: Mapping[Modality, str] = {} if processor is None else processor.placeholder
        self.modalities: dict[str, Modality] = {text: modality for modality, text in placeholders.items()}
        media_tokens = () if processor is None else processor.placeholder_tokens
        self.media_tokens = frozenset((*media_tokens, *self.modalities))
        media_ids = (tokenizer.token_id(token) for token in self.media_tokens)
        self.media_ids = frozenset(token_id for token_id in media_ids if token_id is not None)
        ids = {modality: tokenizer.token_id(text) for modality, text in placeholders.items()}
        self.placeholder_ids: dict[str, int] = {
            modality: token_id for modality, token_id in ids.items() if token_id is not None
        }
        self._bos_token = bos_token
        self._processor = processor
        self.affixes = lru_cache(8)(self._affixes)
        """The additions to the text of a prompt, such as `<s>`, by the place of BOS in it and `images=`."""
        self._split = lru_cache(1024)(partial(split_expansion, tokenizer))

    def _affixes(self, bos: BosPlace, *, images: bool) -> Affixes:
        """Return the additions to the text of a prompt, such as `<s>`.

        Raises:
            ProcessorError: The model's processor refuses prompts of this kind.
        """
        if self._processor is None:
            return _NOTHING
        affixes = self._processor.affixes(bos, images=images)
        if affixes is None:
            first, last = ((), ()) if bos == "first" else self.tokenizer.affixes
            return Affixes(first=tuple(first), last=tuple(last))
        if affixes.refusal is not None:
            raise ProcessorError(
                f"the model's processor refuses a prompt {'with' if images else 'without'} images",
                expected="a prompt that it takes",
                got=affixes.refusal,
            )
        return affixes

    def lay_out(self, text: TracedStr) -> Layout:
        """Find the syntax of a rendered text.

        Raises:
            SpecialTokenError: Content holds a special token, and its rule is `error`.
        """
        spans, stops = text.spans, [stop for _, stop, _ in text.spans]
        matches = tuple(self.tokenizer.find(plain(text), partial(self._literal_character, spans, stops, ())))
        placeholders: list[Placeholder] = []
        for match in matches:
            if match.token in self.modalities:
                owner = -1, -1
                index = bisect_right(stops, match.own_start)
                if index < len(spans) and spans[index][0] < match.own_stop:
                    owner = spans[index][2].message, spans[index][2].part
                modality = self.modalities[match.token]
                placeholders.append(Placeholder(match.own_start, match.own_stop, modality, *owner))
        return Layout(text, matches, tuple(placeholders))

    def range_of(self, item: MediaItem, offset: int) -> PlaceholderRange:
        """Return the range of an item whose expansion begins at a token."""
        expansion = self._split(item.expansion)
        return PlaceholderRange(offset, expansion.length, expansion.embed_spans)

    def write(
        self,
        layout: Layout,
        items: Sequence[MediaItem | None],
        cuts: Sequence[int] = (),
        *,
        before: list[int] | None = None,
    ) -> Encoded:
        """Encode a text.

        Args:
            layout: The text and its syntax.
            items: The item of each placeholder. None leaves it as one token.
            cuts: Rising character positions whose token index is requested.
            before: Tokens that the text is appended to. The result takes over this list.

        Raises:
            TokenizerError: The vocabulary spells an added token in mere text.
            SpecialTokenError: The same, in content whose rule is `error`.
            PlaceholderError: The vocabulary lacks a token of an expansion.
            ProcessorError: The model's processor refuses prompts of this kind.
        """
        text = plain(layout.text)
        expansions: list[SplitExpansion] = []
        has_images = any(item is not None and item.modality == "image" for item in items)
        affixes = _NOTHING
        if not before:
            place: BosPlace = "none"
            if self._bos_token and text.startswith(self._bos_token):
                place = "first"
            elif any(match.token == self._bos_token for match in layout.matches):
                place = "later"
            affixes = self.affixes(place, images=has_images)
        is_wider = bool(affixes.opening or affixes.ending)
        for placeholder, item in zip(layout.placeholders, items, strict=True):
            token = text[placeholder.start : placeholder.stop]
            expansions.append(self._split((Repeat(token, 1),) if item is None else item.expansion))
            is_wider = is_wider or expansions[-1].text != token
        places = cuts
        if is_wider:
            layout, places = self._joined(layout, expansions, cuts, affixes)
        stream = _TokenStream(self, layout.text, places, before)
        stream.out.extend(affixes.first, -1, "template")
        queue = iter(zip(layout.placeholders, expansions, strict=True))
        for match in layout.matches:
            if match.token in self.modalities:
                placeholder, expansion = next(queue)
                stream.media(match, expansion, placeholder)
            else:
                stream.special(match)
        stream.write(len(layout.text), len(layout.text))
        stream.out.extend(affixes.last, -1, "template")
        stream.out.is_closed = affixes.closes
        stream.out.cuts = {cut: stream.out.cuts[place] for cut, place in zip(cuts, places, strict=True)}
        return stream.out

    def _joined(
        self, layout: Layout, expansions: Sequence[SplitExpansion], cuts: Sequence[int], affixes: Affixes
    ) -> tuple[Layout, list[int]]:
        """Write affixes and the edges of expansions into the text. Return its layout and the moved cuts."""
        pieces: list[str] = []
        places: list[Placeholder] = []
        images = [(each.start, each.stop) for each in layout.placeholders if each.modality == "image"]
        at, position = affixes.start(images), 0
        stops, shifts = [0], [0]
        if not at:
            pieces, shifts = [affixes.opening], [len(affixes.opening)]
        for placeholder, expansion in zip(layout.placeholders, expansions, strict=True):
            start = placeholder.start + shifts[-1] + len(expansion.head)
            spans = layout.text[placeholder.start : placeholder.stop].spans
            text = TracedStr.whole(expansion.text, spans[0][2]) if spans else expansion.text
            pieces += [layout.text[position : placeholder.start], text]
            places.append(replace(placeholder, start=start, stop=start + len(expansion.edges)))
            position = placeholder.stop
            stops.append(position)
            shifts.append(shifts[-1] + len(text) - (placeholder.stop - placeholder.start))
            if position == at:
                pieces.append(affixes.opening)
                shifts[-1] += len(affixes.opening)
        joined = concat([*pieces, layout.text[position:], affixes.ending])
        token = {modality: token for token, modality in self.modalities.items()}
        matches: list[Match] = []
        ends = [stop for _, stop, _ in joined.spans]
        refuse = partial(self._literal_character, joined.spans, ends, places)
        rest = self.tokenizer.find(plain(joined), refuse)
        for place in places:
            ahead = [match for match in rest if match.own_start < place.start]
            inside = [match for match in rest[len(ahead) :] if match.own_start < place.stop]
            start = min([place.start, *[match.start for match in inside]])
            stop = max([place.stop, *[match.stop for match in inside]])
            matches += [*ahead, Match(start, stop, token[place.modality], place.start, place.stop)]
            rest = rest[len(ahead) + len(inside) :]
        moved = [cut + shifts[bisect_right(stops, cut) - 1] for cut in cuts]
        return Layout(joined, (*matches, *rest), tuple(places)), moved

    def _literal_character(
        self, spans: Sequence[Span], stops: Sequence[int], places: Sequence[Placeholder], match: Match
    ) -> int | None:
        """Return the first character of content that must not be part of this token, or None.

        Only the token's own characters count, not the white space that it swallows. Expansions, at `places`,
        always count as syntax. `stops` are the ends of the spans.
        """
        index = bisect_right(stops, match.own_start)
        while index < len(spans) and spans[index][0] < match.own_stop:
            start, _, origin = spans[index]
            if origin.is_content:
                is_media = match.token in self.media_tokens
                rule = "parse" if is_blank(match.token) else self.rules[origin.author]
                if rule == "error" and not is_media:
                    raise _forbidden(match.token, origin)
                if rule == "text" or is_media:
                    return max(start, match.own_start)
            index += 1
        for place in places:
            # A token across an edge of an expansion would take the image's token with it.
            if (
                match.own_start < place.start < match.own_stop
                or match.own_start < place.stop < match.own_stop
            ):
                return max(match.own_start, place.start)
        return None


_NOTHING = Affixes()


def _forbidden(token: str | None, origin: Origin) -> SpecialTokenError:
    return SpecialTokenError(
        "the content holds a special token",
        where=origin.path,
        expected=f"no special tokens in {origin.author} content",
        got=repr(token),
        remedy='Escape it, or set content_special_tokens="text" to encode it as text',
    )


_Edge: TypeAlias = tuple[int, int, TokenKind, int]
"""A place in a run at which the origin changes: character, message and kind, and a requested cut or -1."""


class _TokenStream:
    """Writes tokens from left to right: encodes the run between two cuts, and appends it attributed.

    Args:
        writer: The tokenizer that encodes the runs, and the rules.
        text: The rendered text. `special` and `media` consume it up to their match.
        cuts: Rising character positions whose token index is requested.
        before: Tokens that the text is appended to.
    """

    def __init__(
        self, writer: TokenWriter, text: TracedStr, cuts: Sequence[int], before: list[int] | None
    ) -> None:
        self._before: Before = "nothing"
        if before:
            self._before = "token" if before[-1] in writer.tokenizer.all_added_ids else "text"
        self._writer = writer
        self._text = plain(text)
        self._spans: Sequence[Span] = text.spans
        self._next_span = 0
        self._cuts = (*cuts, len(text) + 1)  # no position reaches the last
        self._next_cut = 0
        self._position = 0
        self._covered = 0
        self.out = Encoded(before or [])

    def special(self, match: Match) -> None:
        """Write a special token that counts as syntax."""
        self.write(match.start, match.own_start)
        origin, _ = self._origin(match.own_start, match.own_stop)
        token_id = self._writer.tokenizer.added_ids[match.token]
        if origin is None:
            self.out.extend([token_id], -1, "template")
        else:
            self.out.extend([token_id], origin.message, origin.kind)
        self._position, self._covered, self._before = match.stop, match.own_stop, "token"

    def media(self, match: Match, expansion: SplitExpansion, placeholder: Placeholder) -> None:
        """Write the expansion of a placeholder, from its first token through its last."""
        self.write(match.start, match.own_start)
        self._position, self._covered, self._before = match.stop, match.own_stop, "token"
        start = len(self.out.ids)
        self.out.ranges.append(PlaceholderRange(start, expansion.length, expansion.embed_spans))
        for ids, times, is_text in expansion.core:
            kind: TokenKind = "scaffold" if is_text else placeholder.modality
            self.out.extend(ids * times, placeholder.message, kind)

    def write(self, stop: int, token_start: int) -> None:
        """Encode the text up to `stop`, and record requested cuts up to `token_start`, where a token begins.

        The text is one run, with edges at changes of origin and at requested cuts.
        """
        begin = place = self._position
        edges: list[_Edge] = []
        guarded: Origin | None = None
        while place < stop:
            origin, end = self._origin(place, stop)
            message, kind = -1, _TEMPLATE
            if origin is not None:
                message, kind = origin.message, origin.kind
                if origin.is_content and self._writer.rules[origin.author] != "parse":
                    guarded = origin
            edges.append((place - begin, message, kind, -1))
            while (cut := self._cuts[self._next_cut]) <= place:
                edges.append((place - begin, message, kind, cut))
                self._next_cut += 1
            place = end if end < cut else cut
        if edges:
            self._encode(self._text[begin:stop], edges, guarded)
            self._position = self._covered = stop
        while (cut := self._cuts[self._next_cut]) <= token_start:
            self.out.cuts[cut] = Cut(len(self.out.ids), cut >= self._covered)
            self._next_cut += 1

    def _origin(self, position: int, stop: int) -> tuple[Origin | None, int]:
        """Return the origin of the character at `position`, and its end, up to `stop`."""
        spans = self._spans
        # A token whose white space another has swallowed begins before it.
        index = self._next_span
        while index and spans[index - 1][1] > position:
            index -= 1
        while index < len(spans) and spans[index][1] <= position:
            index += 1
        self._next_span = index
        if index == len(spans):
            return None, stop
        low, high, origin = spans[index]
        return (None, min(low, stop)) if position < low else (origin, min(high, stop))

    def _encode(self, text: str, edges: Sequence[_Edge], guarded: Origin | None) -> None:
        """Append a run. Guarded content must not produce an added token, nor any text a media token."""
        tokenizer, out = self._writer.tokenizer, self.out
        _, message, kind, cut = edges[0]
        is_whole = len(edges) == 1 and cut < 0
        starts_to = -1 if is_whole else edges[-1][0]
        forbidden = self._writer.media_ids if guarded is None else tokenizer.syntax_ids
        run = tokenizer.encode_run(text, before=self._before, forbidden=forbidden, starts_to=starts_to)
        if guarded is not None and self._writer.rules[guarded.author] == "error":
            spelled = tokenizer.encode_run(text, before=self._before).syntax - run.syntax
            if spelled:
                raise _forbidden(tokenizer.token(min(spelled)), guarded)
        if is_whole:
            out.extend(run.ids, message, kind)
            return
        starts = run.starts
        if starts is None:
            raise TokenizerError("a run was encoded without the places of its tokens")
        base, count = len(out.ids), len(run.ids)
        firsts = [bisect_left(starts, offset) for offset, *_ in edges]
        lasts = [*firsts[1:], count]
        for (offset, message, kind, cut), first, last in zip(edges, firsts, lasts, strict=True):
            if cut >= 0:
                begin = starts[first] if first < count else len(text)
                out.cuts[cut] = Cut(base + first, begin == offset)
            out.extend(run.ids[first:last], message, kind)
