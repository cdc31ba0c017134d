"""Finds and reads the tool calls of a text, alone or in sections.

A call that is wrong is an attempt with a status, never an error. A delimiter that is missing ends the attempt
where the next call begins, so one broken call does not swallow those after it.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from mmrender.parsing.grammars import Field, Grammar, Pattern, Section
from mmrender.parsing.literals import CutShort, NotAValue, Reader, read_json
from mmrender.parsing.schema import ToolSchemas
from mmrender.parsing.text import TokenText, readable

CallStatus: TypeAlias = Literal["ok", "invalid_json", "unclosed", "missing_name", "unknown_tool", "malformed"]

_SPACE = re.compile(r"\s*")
# No tool has such a name; text like this in the place of a name is something else.
_NO_NAME = re.compile(r"[\s<>{}()\[\]\"']")
_JSON_FIELDS = frozenset({Field.OBJECT, Field.JSON})


@dataclass
class Attempt:
    """A call as far as it was read, in characters `[start, stop)`."""

    start: int
    stop: int
    status: CallStatus = "ok"
    name: str | None = None
    arguments: dict[str, Any] | None = None
    id: str | None = None


class Block(NamedTuple):
    """A stretch of the text, `[start, stop)`, of calls: a single one, or a section of them."""

    start: int
    stop: int
    attempts: list[Attempt]


class _Bounds(NamedTuple):
    """Where an attempt whose pattern does not hold ends: before and after its last delimiter, if any."""

    inner: int
    outer: int
    closed: bool


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


class CallScanner:
    """Scans one text by one grammar.

    Args:
        grammar: How calls are written.
        source: The text.
        tools: The tools that were offered, or None where any name is good.
    """

    def __init__(self, grammar: Grammar, source: TokenText, tools: ToolSchemas | None = None) -> None:
        self._grammar = grammar
        self._section = grammar.section or Section()
        self._source = source
        self._text = source.text
        self._length = len(source.text)
        self._tools = tools
        first, last = grammar.call[0], grammar.call[-1]
        self._call_begin = first if isinstance(first, str) else None
        self._call_end = last if isinstance(last, str) else None

    def scan(self, position: int) -> list[Block]:
        """Find the calls from a character on, in order and without overlap."""
        section = self._section
        blocks: list[Block] = []
        while True:
            begin = self._find(section.begin or self._call_begin, position, self._length)
            block: Block | None = None
            if section.begin is None and section.head is not None:
                block = self._headed(position, section.head)
            elif begin < self._length and section.begin is None:
                attempt = self._read(begin)
                block = Block(begin, attempt.stop, [attempt])
            elif begin < self._length and section.begin is not None:
                read = self._listed if self._call_begin is None else self._wrapped
                block = read(begin, begin + len(section.begin))
            if block is None:
                return blocks
            blocks.append(block)
            position = block.stop

    def first_delimiter(self) -> int:
        """Where the first delimiter that begins calls lies, or the length of the text."""
        return self._find(self._section.begin or self._call_begin, 0, self._length)

    # Searching

    def _find(self, delimiter: str | None, position: int, stop: int) -> int:
        """First character of a delimiter within `[position, stop)`, or `stop`."""
        found = -1 if delimiter is None else self._source.find(delimiter, position, stop)
        return stop if found < 0 else found

    def _at(self, delimiter: str | None, position: int) -> bool:
        return delimiter is not None and self._source.at(delimiter, position, self._length)

    def _skip(self, position: int) -> int:
        """First character from `position` on that is not white space."""
        match = _SPACE.match(self._text, position)
        return position if match is None else match.end()

    def _bounds(self, position: int) -> _Bounds:
        """Where an attempt that got as far as `position` ends at the latest."""
        outside = self._section.end if self._call_begin is not None else self._section.begin
        region = self._find(outside, position, self._length)
        inner = self._find(self._call_begin, position, region)
        end = self._find(self._call_end, position, inner)
        if end == inner or self._call_end is None:
            return _Bounds(inner, inner, closed=False)
        return _Bounds(end, end + len(self._call_end), closed=True)

    # Sections

    def _wrapped(self, begin: int, position: int) -> Block:
        """Read a section whose calls have delimiters of their own."""
        attempts: list[Attempt] = []
        while (position := self._skip(position)) < self._length:
            if self._at(self._section.end, position):
                stop = position + len(self._section.end or "")
                return Block(begin, stop, attempts or [Attempt(begin, stop, "malformed")])
            if self._at(self._call_begin, position):
                attempts.append(self._read(position))
            else:
                region = self._find(self._section.end, position, self._length)
                stop = self._find(self._call_begin, position, region)
                attempts.append(Attempt(position, stop, "malformed" if stop < self._length else "unclosed"))
            position = attempts[-1].stop
        return Block(begin, position, attempts or [Attempt(begin, position, "unclosed")])

    def _listed(self, begin: int, position: int) -> Block:
        """Read calls that only brackets and separators set apart."""
        section = self._section
        opening, closing = section.brackets or ("", "")
        position = self._skip(position)
        bracketed = bool(opening) and self._at(opening, position)
        position += len(opening) if bracketed else 0
        framed = section.begin is not None and section.end is not None
        attempts: list[Attempt] = []
        closed = False
        while (position := self._skip(position)) < self._length:
            if self._at(section.begin, position):
                break
            if not bracketed and framed and self._at(section.end, position):
                closed = True
                break
            if bracketed and self._at(closing, position):
                position, closed = position + len(closing), True
                break
            attempts.append(self._read(position))
            position = attempts[-1].stop
            following = self._skip(position)
            if self._at(section.separator, following):
                position = following + len(section.separator or "")
            elif not bracketed and not framed:
                break
        if not attempts:
            cut_short = position == self._length and not closed
            attempts.append(Attempt(begin, position, "unclosed" if cut_short else "malformed"))
        end = self._skip(position)
        return Block(
            begin, end + len(section.end or "") if self._at(section.end, end) else position, attempts
        )

    def _headed(self, start: int, pattern: re.Pattern[str]) -> Block | None:
        """The next list of calls that nothing but its first call begins."""
        position = start
        while (head := pattern.search(self._text, position)) is not None:
            begin = before = head.start()
            while before > start and self._text[before - 1].isspace():
                before -= 1
            if before == start or self._source.added_before(before):
                openings = (before - len(text) for text in self._section.opens)
                opened = (
                    place
                    for place, text in zip(openings, self._section.opens, strict=True)
                    if place >= start and self._at(text, place)
                )
                block = self._listed(next(opened, begin), begin)
                # An answer may look like a call at first; what cannot be one is content.
                if all(attempt.status != "malformed" for attempt in block.attempts):
                    return block
            position = head.end()
        return None

    # One call

    def _read(self, start: int) -> Attempt:
        """Read the call that begins at a character."""
        attempt = Attempt(start, start)
        captured = _Captured()
        bounds = self._bounds(start + len(self._call_begin or ""))
        try:
            attempt.stop = self._run(self._grammar.call, start, bounds, captured)
        except _Fault as fault:
            if fault.position > bounds.inner:
                bounds = self._bounds(fault.position)
            attempt.stop = bounds.outer
            self._fill(attempt, captured)
            is_cut_short = not bounds.closed
            if self._call_end is None:
                is_cut_short = fault.status == "unclosed" and bounds.inner == self._length
            if is_cut_short or fault.status != "unclosed":
                attempt.status = "unclosed" if is_cut_short else fault.status
            else:
                has_json = not _JSON_FIELDS.isdisjoint(self._grammar.call)
                attempt.status = "invalid_json" if has_json else "malformed"
        else:
            attempt.status = self._fill(attempt, captured)
        return attempt

    def _run(self, pattern: Pattern, position: int, bounds: _Bounds, captured: _Captured) -> int:
        """Run a pattern, and return where it ends."""
        for index, part in enumerate(pattern):
            rest = pattern[index + 1 :]
            if isinstance(part, str):
                position = self._expect(part, position)
            elif part in _JSON_FIELDS or part is Field.VALUES:
                position = self._value(part, position, bounds, captured)
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
        position = self._skip(position)
        if not self._at(delimiter, position):
            raise _Fault(position, "unclosed" if position == self._length else "malformed")
        return position + len(delimiter)

    def _value(self, part: Field, position: int, bounds: _Bounds, captured: _Captured) -> int:
        """Read a value of JSON or of the grammar's dialect."""
        wrong: CallStatus = "malformed"
        try:
            if part is not Field.VALUES:
                wrong, position = "invalid_json", self._skip(position)
                captured.value, stop = read_json(self._source, position, max(position, bounds.inner))
                return stop
            opening, joiner, closing = self._grammar.brackets
            position = self._expect(opening, position)
            reader = Reader(self._source, position, self._length, self._grammar.dialect)
            captured.value = reader.members(closing, joiner, bare=True)
        except CutShort:
            raise _Fault(position, "unclosed") from None
        except NotAValue:
            raise _Fault(position, wrong) from None
        return reader.position

    def _tagged(self, position: int, bounds: _Bounds, captured: _Captured) -> int:
        captured.tagged = None
        found: dict[str, str] = {}
        while self._at(str(self._grammar.argument[0]), following := self._skip(position)):
            one = _Captured()
            position = self._run(self._grammar.argument, following, bounds, one)
            found[one.texts[Field.KEY]] = one.texts[Field.TEXT]
        captured.tagged = found
        return position

    def _value_text(self, rest: Pattern, position: int, bounds: _Bounds, captured: _Captured) -> int:
        """Read a value up to its closing delimiter.

        Nothing is escaped in these formats, so a value may hold that delimiter itself. The one that closes it
        is the first after which the pattern goes on; without such a one, the first.
        """
        first = stop = self._until(self._ends_of(rest), position, bounds.inner)
        closing = str(rest[0])
        after = self._grammar.call[self._grammar.call.index(Field.TAGGED) + 1]
        while (following := self._skip(stop + len(closing))) < bounds.inner:
            if self._at(str(self._grammar.argument[0]), following) or self._at(str(after), following):
                break
            stop = self._source.find(closing, stop + 1, bounds.inner)
            if stop < 0:
                stop = first
                break
        padding = self._grammar.padding
        text = self._text[position:stop].removeprefix(padding)
        captured.texts[Field.TEXT] = readable(text.removesuffix(padding) if padding else text)
        return stop

    def _ends_of(self, rest: Pattern) -> list[str]:
        """Delimiters that may follow a text field."""
        following = rest[0]
        if isinstance(following, str):
            return [following]
        if following is Field.TAGGED:
            return [str(self._grammar.argument[0]), str(rest[1])]
        return [self._grammar.brackets[0]]

    def _until(self, delimiters: list[str], position: int, stop: int) -> int:
        """First of the delimiters; the last delimiter of the call lies at `stop`, outside."""
        places = [
            self._source.find(delimiter, position, min(stop + len(delimiter), self._length))
            for delimiter in delimiters
        ]
        found = [place for place in places if place >= 0]
        if not found:
            raise _Fault(position, "unclosed")
        return min(found)

    def _fill(self, attempt: Attempt, captured: _Captured) -> CallStatus:
        """Set name, arguments and id as far as they were read, and judge them."""
        value, texts = captured.value, captured.texts
        if Field.OBJECT in self._grammar.call:
            if not isinstance(value, dict):
                return "malformed"
            name, call_id = value.get("name"), value.get("id")
            attempt.name = name if isinstance(name, str) and name else None
            attempt.id = call_id if isinstance(call_id, str) else None
            value = next((value[key] for key in self._grammar.argument_keys if key in value), None)
        else:
            attempt.id = texts.get(Field.ID) or None
            attempt.name = texts.get(Field.NAME) or None
            if self._grammar.name_in_id is not None and attempt.id is not None:
                found = self._grammar.name_in_id.fullmatch(attempt.id)
                attempt.name = found.group(1) if found is not None else None
        if captured.tagged is not None:
            value = captured.tagged
            value = self._tools.typed(attempt.name or "", value) if self._tools is not None else dict(value)
        attempt.arguments = value if isinstance(value, dict) else None
        if attempt.name is None:
            return "missing_name"
        if self._tools is not None and attempt.name not in self._tools:
            return "unknown_tool"
        if attempt.arguments is None or (Field.NAME in texts and _NO_NAME.search(attempt.name)):
            return "malformed"
        return "ok"
