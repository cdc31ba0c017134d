"""Text with spans: where its parts came from, kept through slicing, splitting and joining."""

import re
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, Self, SupportsIndex

from mmrender.template.limits import ITEMS_PER_SPAN, LONG, METER, admit_items
from mmrender.template.origin import NO_SPANS, Origin, Span, Spans, append, clip, stepped


class SpannedStr(str):
    """A `str` with spans `(start, stop, origin)`, whose slices keep theirs.

    Args:
        text: The characters.
        spans: Rising, without overlap; text that no span covers was written by the template.
    """

    __slots__ = ("_spans",)
    _spans: Spans

    def __new__(cls, text: str = "", spans: Spans = NO_SPANS) -> Self:  # noqa: D102 - described by the class
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

    def __str__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__str__(self),)

    def __getitem__(self, key: SupportsIndex | slice) -> Self:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, max(start, stop))
            return self._like(str.__getitem__(self, key), stepped(self._spans, start, stop, step))
        text = str.__getitem__(self, key)
        at = index(key)
        start = at + len(self) if at < 0 else at
        return self._like(text, clip(self._spans, start, start + 1))

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def _joined(self, pieces: list[str]) -> Self:
        text, spans = lay_out(pieces)
        return self._like(text, spans)

    # Trimming and splitting: every result is a slice.

    def lstrip(self, chars: str | None = None, /) -> Self:
        """Slice without leading `chars`."""
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Self:
        """Slice without trailing `chars`."""
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> Self:
        """Slice without leading and trailing `chars`."""
        kept = len(str.rstrip(self, chars))
        return self._cut(min(kept, len(self) - len(str.lstrip(self, chars))), kept)

    def removeprefix(self, prefix: str, /) -> Self:
        """Slice without `prefix`."""
        return self._cut(len(prefix), len(self)) if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str, /) -> Self:
        """Slice without `suffix`."""
        return self._cut(0, len(self) - len(suffix)) if suffix and str.endswith(self, suffix) else self

    def _slices(self, pieces: list[str]) -> list[Self]:
        found, position = [], 0
        for piece in pieces:
            position = str.index(self, piece, position)
            found.append(self._cut(position, position + len(piece)))
            position += len(piece)
        return found

    def split(  # type: ignore[override]
        self, sep: str | None = None, maxsplit: SupportsIndex = -1
    ) -> list[Self]:
        """Split as `str.split` does, into slices."""
        self._admit_pieces(sep, maxsplit)
        pieces = str.split(self, sep, maxsplit)
        return self._slices(pieces) if sep is None else self._separated(pieces, len(sep))

    def rsplit(  # type: ignore[override]
        self, sep: str | None = None, maxsplit: SupportsIndex = -1
    ) -> list[Self]:
        """Split as `str.rsplit` does, into slices."""
        self._admit_pieces(sep, maxsplit)
        pieces = str.rsplit(self, sep, maxsplit)
        return self._slices(pieces) if sep is None else self._separated(pieces, len(sep))

    def _admit_pieces(self, sep: str | None, maxsplit: SupportsIndex) -> None:
        if len(self) < LONG:
            return
        limit = index(maxsplit)
        count = (
            sum(1 for _ in re.finditer(r"\S+", self)) if sep is None else str.count(self, sep) if sep else 0
        )
        admit_items(count if limit < 0 else min(count, limit))

    def _separated(self, pieces: list[str], gap: int) -> list[Self]:
        cuts, position = [], 0
        for piece in pieces:
            cuts.append(self._cut(position, position + len(piece)))
            position += len(piece) + gap
        return cuts

    def splitlines(self, keepends: bool = False) -> list[Self]:  # type: ignore[override]
        """Split at line ends, into slices."""
        if len(self) >= LONG:
            # The line boundaries of `str.splitlines`.
            admit_items(sum(str.count(self, end) for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
        whole = str.splitlines(self, True)
        kept = whole if keepends else str.splitlines(self)
        cuts, position = [], 0
        for line, text in zip(whole, kept, strict=True):
            cuts.append(self._cut(position, position + len(text)))
            position += len(line)
        return cuts

    def partition(self, sep: str, /) -> tuple[Self, Self, Self]:
        """Split at the first `sep`."""
        before, middle, _ = str.partition(self, sep)
        return self._thirds(len(before), len(middle))

    def rpartition(self, sep: str, /) -> tuple[Self, Self, Self]:
        """Split at the last `sep`."""
        before, middle, _ = str.rpartition(self, sep)
        return self._thirds(len(before), len(middle))

    def _thirds(self, first: int, second: int) -> tuple[Self, Self, Self]:
        end = first + second
        return self._cut(0, first), self._cut(first, end), self._cut(end, len(self))


def lay_out(pieces: Sequence[str]) -> tuple[str, Spans]:
    """Join pieces; return the text and the spans of the whole."""
    spans: list[Span] = []
    position = 0
    for piece in pieces:
        if type(piece) is not str and isinstance(piece, SpannedStr):
            append(spans, piece._spans, position)
        position += len(piece)
    if position < LONG:
        return "".join(pieces), tuple(spans)
    meter = METER.get()
    if meter is not None:
        meter.admit(position)
        meter.admit_items(ITEMS_PER_SPAN * len(spans))
    text = "".join(pieces)
    if meter is not None:
        meter.built(text, len(spans))
    return text, tuple(spans)


def spans_of(text: str) -> Spans:
    """Spans of any string; a plain one has none."""
    return text._spans if isinstance(text, SpannedStr) else NO_SPANS


def plain(text: str) -> str:
    """The characters alone, as a plain `str`."""
    return str.__str__(text) if type(text) is not str else text
