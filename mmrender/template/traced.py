"""`TracedStr`: a `str` whose characters remember the value they came from.

Every operation gives the text that `str` gives, and spans for the characters that survive. Characters that
an operation adds (padding, separators) keep the origin of the string that brought them, if it has one.
An operation whose result no longer consists of text (`encode`, `hash`, `find`) gives what `str` gives.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import Any, Self, SupportsIndex

from mmrender.template.limits import admit, admit_items
from mmrender.template.mapping import mapped_spans, tabs_expanded, translated
from mmrender.template.origin import NO_SPANS, sole_origin
from mmrender.template.spanned import SpannedStr, lay_out, plain, spans_of


def _not_text(number: int, piece: object) -> str:
    return f"sequence item {number}: expected str instance, {type(piece).__name__} found"


class TracedStr(SpannedStr):
    """Text with spans `(start, stop, origin)`: `SpannedStr` with the rest of what a `str` can do."""

    __slots__ = ()

    def __add__(self, other: Any) -> Self:
        if type(other) is str:
            return self._like(str.__add__(self, other), self._spans)
        return self._joined([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Self:
        return self._joined([other, self]) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Self:
        times = max(index(count), 0)
        admit(len(self) * times)
        origin = sole_origin(self._spans, len(self))
        text = str.__mul__(self, times)
        if origin is not None:
            return self._like(text, ((0, len(text), origin),) if text else NO_SPANS)
        if not self._spans:
            return self._like(text, NO_SPANS)
        admit_items(times)
        return self._joined([self] * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> "TracedStr":
        from mmrender.template.formatting import percent

        return percent(self, values)

    def __rmod__(self, template: Any) -> "TracedStr":
        from mmrender.template.formatting import percent

        return percent(template, self) if isinstance(template, str) else NotImplemented

    def __format__(self, spec: str) -> "TracedStr":
        from mmrender.template.formatting import padded

        return padded(self, spec)

    def join(self, pieces: Iterable[str]) -> Self:
        """Join `pieces`, which must all be strings, with this text between them."""
        held = _listed(pieces)
        for number, piece in enumerate(held):
            if not isinstance(piece, str):
                raise TypeError(_not_text(number, piece))
        if not self:
            return self._joined(held)
        laid: list[str] = [self] * (2 * len(held) - 1)
        laid[::2] = held
        return self._joined(laid)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Self:
        """Replace `old`; what `new` brings keeps the origin of `new`."""
        limit = index(count)
        found = str.count(self, old)
        times = found if limit < 0 else min(found, limit)
        if times == 0:
            str.replace(self, old, new, 0)  # refuses what is not text
            return self
        admit(len(self) + times * (len(new) - len(old)))
        if not self._spans and not spans_of(new):
            return self._like(str.replace(self, old, new, limit), NO_SPANS)
        admit_items(times)
        pieces: list[str] = []
        position = 0
        for start in _occurrences(self, old, times):
            pieces += (self._cut(position, start), new)
            position = start + len(old)
        return self._joined([*pieces, self._cut(position, len(self))])

    # Padding: the text itself is kept whole.

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> Self:
        """Pad on the right."""
        return self._padded(str.ljust, width, fillchar, 0.0)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> Self:
        """Pad on the left."""
        return self._padded(str.rjust, width, fillchar, 1.0)

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> Self:
        """Pad on both sides."""
        return self._padded(str.center, width, fillchar, 0.5)

    def _padded(self, pad: Callable[..., str], width: SupportsIndex, fill: str, share: float) -> Self:
        """Pad as `pad` does, with this `share` of the padding on the left."""
        size = index(width)
        admit(size)
        text = pad(str.__str__(self), size, fill)
        margin = len(text) - len(self)
        if margin == 0:
            return self
        # `str.center` puts the odd character left when the width is odd (CPython unicode_center_impl).
        left = margin // 2 + (margin & size & 1) if share == 0.5 else int(margin * share)
        filling = fill if isinstance(fill, TracedStr) else TracedStr(fill)
        return self._joined([filling * left, self, filling * (margin - left)])

    def zfill(self, width: SupportsIndex, /) -> Self:
        """Pad with zeros after the sign."""
        size = index(width)
        admit(size)
        sign = int(str.startswith(self, ("+", "-")))
        return self._joined([self._cut(0, sign), "0" * (size - len(self)), self._cut(sign, len(self))])

    # Mapping character by character.

    def _mapped(self, change: Callable[[str], str]) -> Self:
        return self._like(*mapped_spans(str.__str__(self), self._spans, change))

    def lower(self) -> Self:
        """Lower case."""
        return self._mapped(str.lower)

    def upper(self) -> Self:
        """Upper case."""
        return self._mapped(str.upper)

    def casefold(self) -> Self:
        """Folded case."""
        return self._mapped(str.casefold)

    def swapcase(self) -> Self:
        """Swapped case."""
        return self._mapped(str.swapcase)

    def title(self) -> Self:
        """Title case."""
        return self._mapped(str.title)

    def capitalize(self) -> Self:
        """First character in title case, the rest in lower case."""
        return self._mapped(str.capitalize)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> Self:
        """Tabs as spaces; each space keeps the origin of its tab."""
        size = max(index(tabsize), 0)
        tabs = str.count(self, "\t")
        admit(len(self) + tabs * size)
        admit_items(tabs)
        return self._joined(list(tabs_expanded(self, size)))

    def translate(self, table: Any, /) -> Self:
        """Map characters by `table`; text that the table holds keeps its own origin."""
        admit_items(len(self))
        return self._joined(list(translated(self, table)))

    def format(self, *args: Any, **kwargs: Any) -> "TracedStr":
        """Format as `str.format` does."""
        from mmrender.template.formatting import TracingFormatter

        return TracingFormatter().traced(self, args, kwargs)

    def format_map(self, mapping: Any, /) -> "TracedStr":
        """Format with the values of `mapping`."""
        from mmrender.template.formatting import TracingFormatter

        return TracingFormatter().traced(self, (), mapping)


def _listed(pieces: Iterable[str]) -> list[str]:
    if isinstance(pieces, str):
        admit_items(len(pieces))
    return list(pieces)


def _occurrences(text: str, old: str, times: int) -> Iterator[int]:
    """Where the first `times` occurrences of `old` begin; an empty one stands between all characters."""
    position = 0
    for _ in range(times):
        start = str.find(text, old, position)
        yield start
        position = start + (len(old) or 1)


def concat(pieces: Iterable[str]) -> TracedStr:
    """Join pieces of text, keeping their spans."""
    return TracedStr(*lay_out(list(pieces)))


def mapped(text: TracedStr, change: Callable[[str], str]) -> TracedStr:
    """Apply a change of characters one by one, as `mapped_spans` describes it."""
    return text._mapped(change)


def derived(text: str, *sources: str) -> TracedStr:
    """Text computed from `sources` in a way that has no map of characters.

    It keeps the origin that all of the sources share; where there are several origins it has none, and the
    loss shows as text that the profile cannot attribute.
    """
    origins = {sole_origin(spans_of(source), len(source)) for source in sources if source}
    if len(origins) == 1 and (origin := origins.pop()) is not None:
        return TracedStr.whole(text, origin)
    return TracedStr(text)


__all__ = ["TracedStr", "concat", "derived", "mapped", "plain", "spans_of"]
