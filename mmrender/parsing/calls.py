"""Finds and reads the tool calls of a text, alone or in sections.

A call that is wrong is an attempt with a status, never an error. A delimiter that is missing ends the attempt
where the next call begins, so one broken call does not swallow those after it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from mmrender.parsing.grammars import Field, Grammar, Pattern, Section
from mmrender.parsing.literals import CutShort, NotAValue, Reader, read_json
from mmrender.parsing.schema import ToolSchemas
from mmrender.parsing.text import TokenText, readable

CallStatus: TypeAlias = Literal["ok", "invalid_json", "unclosed", "missing_name", "unknown_tool", "malformed"]

_SPACE = re.compile(r"\s*")
# No tool is called so; text like this in the place of a name is something else.
_NO_NAME = re.compile(r"[\s<>{}()\[\]\"']")
_JSON_FIELDS = frozenset({Field.OBJECT, Field.JSON})


class Bounds(NamedTuple):
    """Where an attempt whose pattern does not hold ends: before and after its last delimiter, if any."""

    inner: int
    outer: int
    closed: bool


@dataclass
class Attempt:
    """What was read of one call, in characters `[start, stop)`."""

    start: int
    stop: int
    status: CallStatus = "ok"
    name: str | None = None
    arguments: dict[str, Any] | None = None
    id: str | None = None


@dataclass
class _Captured:
    """Fields of one call as they were written."""

    texts: dict[Field, str] = field(default_factory=dict)
    value: Any = None
    tagged: dict[str, str] | None = None


class _Fault(Exception):  # noqa: N818 - a finding about the text
    """The pattern does not hold at a character."""

    def __init__(self, position: int, status: CallStatus) -> None:
        self.position = position
        self.status: CallStatus = status
        super().__init__(status)


class CallReader:
    """Reads calls of one text.

    Args:
        grammar: How calls are written.
        source: The text.
        tools: The tools that were offered, or None where any name is good.
        bounds: Says, for a character, where an attempt that got so far ends.
    """

    def __init__(
        self, grammar: Grammar, source: TokenText, tools: ToolSchemas | None, bounds: Callable[[int], Bounds]
    ) -> None:
        self._grammar = grammar
        self._source = source
        self._text = source.text
        self._tools = tools
        self._bounds = bounds
        self._has_end = isinstance(grammar.call[-1], str)
        self._broken: CallStatus = "malformed" if _JSON_FIELDS.isdisjoint(grammar.call) else "invalid_json"

    def read(self, start: int) -> Attempt:
        """Read the call that begins at a character."""
        attempt = Attempt(start, start)
        captured = _Captured()
        first = self._grammar.call[0]
        bounds = self._bounds(start + len(first) if isinstance(first, str) else start)
        try:
            attempt.stop = self._run(self._grammar.call, start, bounds, captured)
        except _Fault as fault:
            if fault.position > bounds.inner:
                bounds = self._bounds(fault.position)
            attempt.stop = bounds.outer
            self._fill(attempt, captured)
            attempt.status = self._status(fault.status, bounds)
        else:
            attempt.status = self._fill(attempt, captured)
        return attempt

    def _status(self, status: CallStatus, bounds: Bounds) -> CallStatus:
        if self._has_end:
            cut_short = not bounds.closed
        else:
            cut_short = status == "unclosed" and bounds.inner == len(self._text)
        if cut_short:
            return "unclosed"
        return self._broken if status == "unclosed" else status

    # The pattern

    def _run(self, pattern: Pattern, position: int, bounds: Bounds, captured: _Captured) -> int:
        """Run a pattern, and return where it ends."""
        for index, part in enumerate(pattern):
            rest = pattern[index + 1 :]
            if isinstance(part, str):
                position = self._expect(part, position)
            elif part in _JSON_FIELDS:
                position = self._json(position, bounds, captured)
            elif part is Field.VALUES:
                position = self._values(position, captured)
            elif part is Field.TAGGED:
                position = self._tagged(position, bounds, captured)
            elif part is Field.TEXT:
                position = self._value_text(rest, position, bounds, captured)
            else:
                stop = self._until(self._ends_of(rest), position, bounds.inner)
                captured.texts[part] = readable(self._text[position:stop].strip())
                position = stop
        return position

    def _expect(self, delimiter: str, position: int) -> int:
        position = self.skip(position)
        if not self.at(delimiter, position):
            raise _Fault(position, "unclosed" if position == len(self._text) else "malformed")
        return position + len(delimiter)

    def _json(self, position: int, bounds: Bounds, captured: _Captured) -> int:
        position = self.skip(position)
        try:
            captured.value, position = read_json(self._source, position, max(position, bounds.inner))
        except CutShort:
            raise _Fault(position, "unclosed") from None
        except NotAValue:
            raise _Fault(position, "invalid_json") from None
        return position

    def _values(self, position: int, captured: _Captured) -> int:
        opening, joiner, closing = self._grammar.brackets
        position = self._expect(opening, position)
        if self._grammar.dialect is None:
            raise _Fault(position, "malformed")
        reader = Reader(self._source, position, len(self._text), self._grammar.dialect)
        try:
            captured.value = reader.members(closing, joiner, bare=True)
        except CutShort:
            raise _Fault(position, "unclosed") from None
        except NotAValue:
            raise _Fault(position, "malformed") from None
        return reader.position

    def _tagged(self, position: int, bounds: Bounds, captured: _Captured) -> int:
        captured.tagged = None
        found: dict[str, str] = {}
        opening = self._grammar.argument[0]
        while isinstance(opening, str) and self.at(opening, following := self.skip(position)):
            one = _Captured()
            position = self._run(self._grammar.argument, following, bounds, one)
            found[one.texts[Field.KEY]] = one.texts[Field.TEXT]
        captured.tagged = found
        return position

    def _value_text(self, rest: Pattern, position: int, bounds: Bounds, captured: _Captured) -> int:
        """Read a value up to its closing delimiter.

        Nothing is escaped in these formats, so a value may hold that delimiter itself. The one that closes it
        is the first after which the pattern goes on; where there is none, the first.
        """
        first = stop = self._until(self._ends_of(rest), position, bounds.inner)
        closing = str(rest[0])
        while not self._goes_on(stop + len(closing), bounds):
            stop = self._source.find(closing, stop + 1, bounds.inner)
            if stop < 0:
                stop = first
                break
        padding = self._grammar.padding
        text = self._text[position:stop].removeprefix(padding)
        captured.texts[Field.TEXT] = readable(text.removesuffix(padding) if padding else text)
        return stop

    def _goes_on(self, position: int, bounds: Bounds) -> bool:
        position = self.skip(position)
        after = self._grammar.call[self._grammar.call.index(Field.TAGGED) + 1]
        return (
            position >= bounds.inner
            or self.at(str(self._grammar.argument[0]), position)
            or self.at(str(after), position)
        )

    def _ends_of(self, rest: Pattern) -> list[str]:
        """Delimiters that may follow a text field."""
        following = rest[0]
        if isinstance(following, str):
            return [following]
        if following is Field.TAGGED:
            return [str(self._grammar.argument[0]), str(rest[1])]
        return [self._grammar.brackets[0]]

    def _until(self, delimiters: list[str], position: int, stop: int) -> int:
        """First of the delimiters; the last delimiter of the call stands at `stop`, outside."""
        places = [
            self._source.find(delimiter, position, min(stop + len(delimiter), len(self._text)))
            for delimiter in delimiters
        ]
        found = [place for place in places if place >= 0]
        if not found:
            raise _Fault(position, "unclosed")
        return min(found)

    def skip(self, position: int) -> int:
        """First character from `position` on that is no white space."""
        match = _SPACE.match(self._text, position)
        return position if match is None else match.end()

    def at(self, delimiter: str, position: int) -> bool:
        """Whether a delimiter stands at a character."""
        return self._source.at(delimiter, position, len(self._text))

    # The fields

    def _fill(self, attempt: Attempt, captured: _Captured) -> CallStatus:
        """Set name, arguments and id as far as they were read, and judge them."""
        if Field.OBJECT in self._grammar.call:
            if not isinstance(captured.value, dict):
                return "malformed"
            self._fill_from_object(attempt, captured.value)
        else:
            self._fill_from_fields(attempt, captured)
        if attempt.name is None:
            return "missing_name"
        if self._tools is not None and attempt.name not in self._tools:
            return "unknown_tool"
        if attempt.arguments is None or (Field.NAME in captured.texts and _NO_NAME.search(attempt.name)):
            return "malformed"
        return "ok"

    def _fill_from_object(self, attempt: Attempt, value: dict[str, Any]) -> None:
        name, call_id = value.get("name"), value.get("id")
        attempt.name = name if isinstance(name, str) and name else None
        attempt.id = call_id if isinstance(call_id, str) else None
        arguments = next((value[key] for key in self._grammar.argument_keys if key in value), None)
        attempt.arguments = arguments if isinstance(arguments, dict) else None

    def _fill_from_fields(self, attempt: Attempt, captured: _Captured) -> None:
        attempt.id = captured.texts.get(Field.ID) or None
        attempt.name = captured.texts.get(Field.NAME) or None
        if self._grammar.name_in_id is not None and attempt.id is not None:
            found = self._grammar.name_in_id.fullmatch(attempt.id)
            attempt.name = found.group(1) if found is not None else None
        if isinstance(captured.value, dict):
            attempt.arguments = captured.value
        elif captured.tagged is not None and self._tools is not None:
            attempt.arguments = self._tools.typed(attempt.name or "", captured.tagged)
        elif captured.tagged is not None:
            attempt.arguments = dict(captured.tagged)


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
