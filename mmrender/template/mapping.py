"""Spans of text that was changed character by character: case, quoting, escaping."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mmrender.template.origin import Origin, Spans

if TYPE_CHECKING:
    from mmrender.template.traced import TracedStr


def mapped_spans(text: str, spans: Spans, change: Callable[[str], str]) -> tuple[str, Spans]:
    """Return `change(text)` and where the spans of `text` lie in it.

    Args:
        text: The text before.
        spans: Its spans.
        change: Gives each character an image whose length depends on at most the character before it.
            Case mappings do: only `title` and `capitalize` ask whether a word begins, and the final sigma,
            which asks more, is one character in either form.
    """
    image = change(text)
    if len(spans) == 1 and spans[0][0] == 0 and spans[0][1] == len(text):
        return image, _one(len(image), spans[0][2])
    found = []
    position = end = 0  # in the text, and of its image
    for start, stop, origin in spans:
        low = end + _length(text, position, start, change)
        high = low + _length(text, start, stop, change)
        if low < high:
            found.append((low, high, origin))
        position, end = stop, high
    return image, tuple(found)


def _one(length: int, origin: Origin) -> Spans:
    return ((0, length, origin),) if length else ()


def _length(text: str, start: int, stop: int, change: Callable[[str], str]) -> int:
    """Length of the image of `text[start:stop]`, where it stands."""
    if start == stop:
        return 0
    before = text[max(start - 1, 0) : start]
    return len(change(before + text[start:stop])) - len(change(before))


def tabs_expanded(text: "TracedStr", size: int) -> Iterator["TracedStr"]:
    """Yield the pieces of `text.expandtabs(size)`; each space keeps the origin of its tab."""
    position = column = 0
    for found in re.finditer(r"[\t\n\r]", text):
        start = found.start()
        yield text[position:start]
        column += start - position
        position = start + 1
        char = text[start]
        if char == "\t":
            wide = size - column % size if size else 0
            yield _spread(char, " " * wide)
            column += wide
        else:
            yield char
            column = 0
    yield text[position:]


def translated(text: "TracedStr", table: Any) -> Iterator[str]:
    """Yield the pieces of `text.translate(table)`; text that the table holds keeps its own origin."""
    for char in text:
        try:
            given = table[ord(char)]
        except LookupError:
            yield char
            continue
        if isinstance(given, str):
            yield given
        elif given != None:  # noqa: E711 - a traced null equals None
            yield _spread(char, str.translate(char, {ord(char): given}))


def _spread(char: "TracedStr", image: str) -> "TracedStr":
    return char._like(image, _one(len(image), char._spans[0][2]) if char._spans else ())
