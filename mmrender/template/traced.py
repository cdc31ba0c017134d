"""`TracedStr`: a `str` whose characters remember the value they came from.

Every operation gives the text that `str` gives, and spans for the characters that survive. Characters that
an operation adds (padding, separators) keep the origin of the string that brought them, if it has one.
An operation whose result no longer consists of text (`encode`, `hash`, `find`) gives what `str` gives.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, SupportsIndex

from mmrender.template.origin import NO_SPANS, Origin, Span, Spans, append, clip, sole_origin


class TracedStr(str):
    """Text with spans `(start, stop, origin)`.

    Args:
        text: The characters.
        spans: Rising, without overlap; text that no span covers was written by the template.
    """

    __slots__ = ("_spans",)
    _spans: Spans

    def __new__(cls, text: str = "", spans: Spans = NO_SPANS) -> Self:
        self = str.__new__(cls, text)
        self._spans = spans
        return self

    @classmethod
    def whole(cls, text: str, origin: Origin) -> Self:
        """Text that came from one value."""
        return cls(text, ((0, len(text), origin),) if text else NO_SPANS)

    def _like(self, text: str, spans: Spans) -> Self:
        return type(self)(text, spans)

    def _cut(self, start: int, stop: int) -> Self:
        if start == 0 and stop == len(self):
            return self
        return self._like(str.__getitem__(self, slice(start, stop)), clip(self._spans, start, stop))

    def __str__(self) -> Self:  # type: ignore[override]
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__str__(self),)

    def __getitem__(self, key: SupportsIndex | slice) -> Self:  # type: ignore[override]
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, max(start, stop))
            return self._joined([self._cut(i, i + 1) for i in range(start, stop, step)])
        index = key.__index__()
        text = str.__getitem__(self, index)
        start = index + len(self) if index < 0 else index
        return self._like(text, clip(self._spans, start, start + 1))

    def __iter__(self) -> Iterator[Self]:  # type: ignore[override]
        return (self[i] for i in range(len(self)))

    def _joined(self, pieces: list[str]) -> Self:
        text, spans = _lay_out(pieces)
        return self._like(text, spans)

    def __add__(self, other: str) -> Self:  # type: ignore[override]
        if type(other) is str:
            return self._like(str.__add__(self, other), self._spans)
        return self._joined([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Self:
        if type(other) is str:
            return self._within(other + str.__str__(self), len(other))
        return self._joined([other, self]) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Self:  # type: ignore[override]
        return self._joined([self] * count.__index__())

    __rmul__ = __mul__  # type: ignore[assignment]

    def __mod__(self, values: Any) -> "TracedStr":  # type: ignore[override]
        from mmrender.template.formatting import percent

        return percent(self, values)

    def __rmod__(self, template: Any) -> "TracedStr":
        from mmrender.template.formatting import percent

        return percent(template, self) if isinstance(template, str) else NotImplemented

    def __format__(self, spec: str) -> "TracedStr":  # type: ignore[override]
        from mmrender.template.formatting import padded

        return padded(self, spec)

    def join(self, pieces: Iterable[str]) -> Self:  # type: ignore[override]
        """Join `pieces`, which must all be strings, with this text between them."""
        laid: list[str] = []
        for index, piece in enumerate(pieces):
            if not isinstance(piece, str):
                raise TypeError(f"sequence item {index}: expected str instance, {type(piece).__name__} found")
            if index:
                laid.append(self)
            laid.append(piece)
        return self._joined(laid)

    # Trimming and splitting: every result is a slice.

    def lstrip(self, chars: str | None = None, /) -> Self:  # type: ignore[override]
        """Slice without leading `chars`."""
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Self:  # type: ignore[override]
        """Slice without trailing `chars`."""
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> Self:  # type: ignore[override]
        """Slice without leading and trailing `chars`."""
        kept = len(str.rstrip(self, chars))
        return self._cut(min(kept, len(self) - len(str.lstrip(self, chars))), kept)

    def removeprefix(self, prefix: str, /) -> Self:  # type: ignore[override]
        """Slice without `prefix`."""
        return self._cut(len(prefix), len(self)) if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str, /) -> Self:  # type: ignore[override]
        """Slice without `suffix`."""
        return self._cut(0, len(self) - len(suffix)) if suffix and str.endswith(self, suffix) else self

    def _slices(self, pieces: list[str]) -> list[Self]:
        found, position = [], 0
        for piece in pieces:
            position = str.index(self, piece, position)
            found.append(self._cut(position, position + len(piece)))
            position += len(piece)
        return found

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Self]:  # type: ignore[override]
        """Split as `str.split` does, into slices."""
        pieces = str.split(self, sep, maxsplit)
        return self._slices(pieces) if sep is None else self._separated(pieces, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Self]:  # type: ignore[override]
        """Split as `str.rsplit` does, into slices."""
        pieces = str.rsplit(self, sep, maxsplit)
        return self._slices(pieces) if sep is None else self._separated(pieces, len(sep))

    def _separated(self, pieces: list[str], gap: int) -> list[Self]:
        cuts, position = [], 0
        for piece in pieces:
            cuts.append(self._cut(position, position + len(piece)))
            position += len(piece) + gap
        return cuts

    def splitlines(self, keepends: bool = False) -> list[Self]:  # type: ignore[override]
        """Split at line ends, into slices."""
        whole = str.splitlines(self, True)
        kept = whole if keepends else str.splitlines(self)
        cuts, position = [], 0
        for line, text in zip(whole, kept, strict=True):
            cuts.append(self._cut(position, position + len(text)))
            position += len(line)
        return cuts

    def partition(self, sep: str, /) -> tuple[Self, Self, Self]:  # type: ignore[override]
        """Split at the first `sep`."""
        before, middle, _ = str.partition(self, sep)
        return self._thirds(len(before), len(middle))

    def rpartition(self, sep: str, /) -> tuple[Self, Self, Self]:  # type: ignore[override]
        """Split at the last `sep`."""
        before, middle, _ = str.rpartition(self, sep)
        return self._thirds(len(before), len(middle))

    def _thirds(self, first: int, second: int) -> tuple[Self, Self, Self]:
        end = first + second
        return self._cut(0, first), self._cut(first, end), self._cut(end, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Self:  # type: ignore[override]
        """Replace `old`; what `new` brings keeps the origin of `new`."""
        limit = count.__index__()
        if limit == 0 or (old and old not in self):
            return self
        starts = _occurrences(self, old, limit)
        pieces: list[str] = []
        position = 0
        for start in starts:
            pieces += (self._cut(position, start), new)
            position = start + len(old)
        return self._joined([*pieces, self._cut(position, len(self))])

    # Padding: the text itself is kept whole.

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> Self:  # type: ignore[override]
        """Pad on the right."""
        return self._within(str.ljust(self, width, fillchar), 0)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> Self:  # type: ignore[override]
        """Pad on the left."""
        result = str.rjust(self, width, fillchar)
        return self._within(result, len(result) - len(self))

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> Self:  # type: ignore[override]
        """Pad on both sides."""
        result = str.center(self, width, fillchar)
        # `str.center` puts the odd character left when the width is odd (CPython unicode_center_impl).
        margin = len(result) - len(self)
        return self._within(result, margin // 2 + (margin & width.__index__() & 1))

    def zfill(self, width: SupportsIndex, /) -> Self:  # type: ignore[override]
        """Pad with zeros after the sign."""
        result = str.zfill(self, width)
        sign = int(str.startswith(self, ("+", "-")))
        zeros = TracedStr("0" * (len(result) - len(self)))
        return self._joined([self._cut(0, sign), zeros, self._cut(sign, len(self))])

    def _within(self, result: str, shift: int) -> Self:
        return self._like(result, tuple((a + shift, b + shift, origin) for a, b, origin in self._spans))

    # Mapping character by character: the image of a prefix is a prefix of the image.

    def mapped(self, change: Callable[[str], str]) -> Self:
        """Apply `change`, for which `len(change(s[:i]))` is where the image of `s[i:]` begins."""
        plain = str.__str__(self)
        edges = {0: 0}

        def image(index: int) -> int:
            if index not in edges:
                edges[index] = len(change(plain[:index]))
            return edges[index]

        spans = tuple(
            (image(start), image(stop), origin)
            for start, stop, origin in self._spans
            if image(start) < image(stop)
        )
        return self._like(change(plain), spans)

    def lower(self) -> Self:  # type: ignore[override]
        """Lower case."""
        return self.mapped(str.lower)

    def upper(self) -> Self:  # type: ignore[override]
        """Upper case."""
        return self.mapped(str.upper)

    def casefold(self) -> Self:  # type: ignore[override]
        """Folded case."""
        return self.mapped(str.casefold)

    def swapcase(self) -> Self:  # type: ignore[override]
        """Swapped case."""
        return self.mapped(str.swapcase)

    def title(self) -> Self:  # type: ignore[override]
        """Title case."""
        return self.mapped(str.title)

    def capitalize(self) -> Self:  # type: ignore[override]
        """First character in title case, the rest in lower case."""
        return self.mapped(str.capitalize)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> Self:  # type: ignore[override]
        """Tabs as spaces."""
        return self.mapped(lambda text: str.expandtabs(text, tabsize))

    def translate(self, table: Any, /) -> Self:  # type: ignore[override]
        """Map characters by `table`."""
        return self.mapped(lambda text: str.translate(text, table))

    def format(self, *args: Any, **kwargs: Any) -> "TracedStr":  # type: ignore[override]
        """Format as `str.format` does."""
        from mmrender.template.formatting import TracingFormatter

        return TracingFormatter().traced(self, args, kwargs)

    def format_map(self, mapping: Mapping[str, Any], /) -> "TracedStr":  # type: ignore[override]
        """Format with the values of `mapping`."""
        from mmrender.template.formatting import TracingFormatter

        return TracingFormatter().traced(self, (), mapping)


def _occurrences(text: str, old: str, limit: int) -> list[int]:
    if not old:
        everywhere = list(range(len(text) + 1))
        return everywhere if limit < 0 else everywhere[:limit]
    starts, position = [], str.find(text, old)
    while position >= 0 and len(starts) != limit:
        starts.append(position)
        position = str.find(text, old, position + len(old))
    return starts


def _lay_out(pieces: Iterable[str]) -> tuple[str, Spans]:
    held = list(pieces)
    spans: list[Span] = []
    position = 0
    for piece in held:
        if type(piece) is not str and isinstance(piece, TracedStr):
            append(spans, piece._spans, position)
        position += len(piece)
    return "".join(held), tuple(spans)


def concat(pieces: Iterable[str]) -> TracedStr:
    """Join pieces of text, keeping their spans."""
    return TracedStr(*_lay_out(pieces))


def spans_of(text: str) -> Spans:
    """Spans of any string; a plain one has none."""
    return text._spans if isinstance(text, TracedStr) else NO_SPANS


def plain(text: str) -> str:
    """The characters alone, as a plain `str`."""
    return str.__str__(text) if type(text) is not str else text


def derived(text: str, *sources: str) -> TracedStr:
    """Text computed from `sources` in a way that has no map of characters.

    It keeps the origin that all of the sources share; where there are several origins it has none, and the
    loss shows as text that the profile cannot attribute.
    """
    origins = {sole_origin(spans_of(source), len(source)) for source in sources if source}
    if len(origins) == 1 and (origin := origins.pop()) is not None:
        return TracedStr.whole(text, origin)
    return TracedStr(text)
