"""Finds the tool calls of a text, alone or in sections.

A delimiter that is missing ends the attempt where the next call begins, so one broken call does not swallow
those after it.
"""

from typing import NamedTuple

from mmrender.parsing.calls import Attempt, Bounds, CallReader
from mmrender.parsing.grammar import Grammar, Section
from mmrender.parsing.schema import ToolSchemas
from mmrender.parsing.token_text import TokenText


class Block(NamedTuple):
    """A stretch of the text, `[start, stop)`, that is no content: one call, or a section of calls."""

    start: int
    stop: int
    attempts: list[Attempt]


class Scanner:
    """Scans one text by one grammar.

    Args:
        grammar: How calls are written.
        source: The text.
        tools: The tools that were offered, or None where any name is good.
    """

    def __init__(self, grammar: Grammar, source: TokenText, tools: ToolSchemas | None = None) -> None:
        self._section = grammar.section or Section()
        self._source = source
        self._length = len(source.text)
        self._reader = CallReader(grammar, source, tools, self._bounds)
        first, last = grammar.call[0], grammar.call[-1]
        self._call_begin = first if isinstance(first, str) else None
        self._call_end = last if isinstance(last, str) else None

    def scan(self, start: int) -> list[Block]:
        """Find the calls from a character on, in order and without overlap."""
        blocks: list[Block] = []
        position = start
        while (block := self._next_block(position)) is not None:
            blocks.append(block)
            position = block.stop
        return blocks

    def first_delimiter(self) -> int:
        """Where the first delimiter that begins calls stands, or the length of the text."""
        return self._found_or(self._section.begin or self._call_begin, 0, self._length)

    def _next_block(self, position: int) -> Block | None:
        section = self._section
        if section.begin is not None:
            begin = self._find(section.begin, position)
            if begin < 0:
                return None
            inside = begin + len(section.begin)
            read = self._listed if self._call_begin is None else self._wrapped
            return read(begin, inside)
        if section.head is not None:
            return self._headed(position)
        begin = self._find(self._call_begin, position)
        if begin < 0:
            return None
        attempt = self._reader.read(begin)
        return Block(begin, attempt.stop, [attempt])

    def _find(self, delimiter: str | None, position: int, stop: int | None = None) -> int:
        if delimiter is None:
            return -1
        return self._source.find(delimiter, position, self._length if stop is None else stop)

    def _found_or(self, delimiter: str | None, position: int, stop: int) -> int:
        found = self._find(delimiter, position, stop)
        return stop if found < 0 else found

    def _bounds(self, position: int) -> Bounds:
        """Where an attempt that got as far as `position` ends at the latest."""
        outside = self._section.end if self._call_begin is not None else self._section.begin
        region = self._found_or(outside, position, self._length)
        inner = self._found_or(self._call_begin, position, region)
        end = self._find(self._call_end, position, inner)
        if end < 0 or self._call_end is None:
            return Bounds(inner, inner, closed=False)
        return Bounds(end, end + len(self._call_end), closed=True)

    def _wrapped(self, begin: int, position: int) -> Block:
        """Read a section whose calls have delimiters of their own."""
        attempts: list[Attempt] = []
        while (position := self._reader.skip(position)) < self._length:
            if self._section.end is not None and self._reader.at(self._section.end, position):
                stop = position + len(self._section.end)
                return Block(begin, stop, attempts or [Attempt(begin, stop, "malformed")])
            attempts.append(self._call_or_garbage(position))
            position = attempts[-1].stop
        return Block(begin, position, attempts or [Attempt(begin, position, "unclosed")])

    def _call_or_garbage(self, position: int) -> Attempt:
        if self._call_begin is not None and self._reader.at(self._call_begin, position):
            return self._reader.read(position)
        region = self._found_or(self._section.end, position, self._length)
        stop = self._found_or(self._call_begin, position, region)
        return Attempt(position, stop, "malformed" if stop < self._length else "unclosed")

    def _listed(self, begin: int, position: int) -> Block:
        """Read calls that are told apart by brackets and separators only."""
        opening, closing = self._section.brackets or ("", "")
        position = self._reader.skip(position)
        bracketed = bool(opening) and self._reader.at(opening, position)
        position += len(opening) if bracketed else 0
        framed = self._section.begin is not None and self._section.end is not None
        attempts: list[Attempt] = []
        closed = False
        while (position := self._reader.skip(position)) < self._length:
            if self._section.begin is not None and self._reader.at(self._section.begin, position):
                break
            if not bracketed and framed and self._reader.at(str(self._section.end), position):
                closed = True
                break
            if bracketed and self._reader.at(closing, position):
                position, closed = position + len(closing), True
                break
            attempts.append(self._reader.read(position))
            position = attempts[-1].stop
            following = self._reader.skip(position)
            if self._section.separator is not None and self._reader.at(self._section.separator, following):
                position = following + len(self._section.separator)
            elif not bracketed and not framed:
                break
        if not attempts:
            cut_short = position == self._length and not closed
            attempts.append(Attempt(begin, position, "unclosed" if cut_short else "malformed"))
        return Block(begin, self._past_end(position), attempts)

    def _past_end(self, position: int) -> int:
        following = self._reader.skip(position)
        if self._section.end is None or not self._reader.at(self._section.end, following):
            return position
        return following + len(self._section.end)

    def _headed(self, position: int) -> Block | None:
        """The next list of calls that nothing but its first call begins."""
        start, pattern = position, self._section.head
        while pattern is not None and (head := pattern.search(self._source.text, position)) is not None:
            begin = before = head.start()
            while before > start and self._source.text[before - 1].isspace():
                before -= 1
            if before == start or self._source.added_before(before):
                block = self._listed(self._with_opening(start, before, begin), begin)
                # An answer may look like a call at first; what cannot be one is content.
                if all(attempt.status != "malformed" for attempt in block.attempts):
                    return block
            position = head.end()
        return None

    def _with_opening(self, start: int, before: int, begin: int) -> int:
        """Where a list begins, with the delimiter that may open it."""
        for opening in self._section.opens:
            place = before - len(opening)
            if place >= start and self._reader.at(opening, place):
                return place
        return begin
