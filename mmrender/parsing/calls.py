"""The tool calls of a text, alone or in sections.

A wrong call is an attempt with a status, never an error. An attempt without its closing delimiter ends where
the next call begins, so one broken call does not swallow the calls after it.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from mmrender.model.spelling import TokenText, readable
from mmrender.parsing.grammars import Field, Grammar, Pattern, Section
from mmrender.parsing.literals import CutShort, Reader, parse_json, read_json
from mmrender.parsing.schema import ToolSchemas, typed

CallStatus: TypeAlias = Literal["ok", "invalid_json", "unclosed", "missing_name", "unknown_tool", "malformed"]

_SPACE = re.compile(r"\s*")
# Text with these characters in place of a name is not a name.
_NO_NAME = re.compile(r"[\s<>{}()\[\]\"']")
_JSON_FIELDS = frozenset({Field.OBJECT, Field.JSON})
_ARGUMENTS = ("arguments", "parameters")
# The beginning of a call's object up to its arguments, with the name first, as templates write it.
_OBJECT_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.DOTALL
)


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


@dataclass
class Attempt:
    """A call as far as it was read, in characters `[start, stop)`."""

    start: int
    stop: int
    status: CallStatus = "ok"
    name: str | None = None
    arguments: dict[str, Any] | None = None
    arguments_text: str | None = None
    id: str | None = None


class Block(NamedTuple):
    """Characters `[start, stop)` of calls: a single call, or a section of them."""

    start: int
    stop: int
    attempts: list[Attempt]


_Captured: TypeAlias = dict[Field, Any]
"""Fields of one call: texts as written, values, and tagged arguments as texts by name."""


class _Fault(Exception):  # noqa: N818 - a finding about the text
    """The pattern does not hold at a character."""

    def __init__(self, position: int, status: CallStatus) -> None:
        self.position = position
        self.status: CallStatus = status
        super().__init__(status)


class CallScanner:
    """Scans one text by one grammar. Without `tools`, a call may have any name."""

    def __init__(self, grammar: Grammar, source: TokenText, tools: ToolSchemas | None = None) -> None:
        self._grammar = grammar
        self._section = grammar.section or Section()
        self._source = source
        self._text = source.text
        self._length = len(source.text)
        self._tools = tools
        self._call_begin, self._call_end = (
            part if isinstance(part, str) else None for part in (grammar.call[0], grammar.call[-1])
        )
        self._argument_begin = str(grammar.argument[0]) if grammar.argument else None

    def scan(self, position: int) -> list[Block]:
        """Find the calls from a character on, in order and without overlap."""
        blocks: list[Block] = []
        while (block := self._next(position)) is not None:
            blocks.append(block)
            position = block.stop
        return blocks

    def _next(self, position: int) -> Block | None:
        if self._section.head is not None:
            return self._headed(position, self._section.head)
        begin = self.first_delimiter(position)
        if begin == self._length:
            return None
        if self._section.begin is not None:
            return self._listed(begin, begin + len(self._section.begin))
        attempt = self._read(begin)
        return Block(begin, attempt.stop, [attempt])

    def first_delimiter(self, position: int = 0) -> int:
        """Position of the first delimiter that begins calls, or the length of the text."""
        return self._find(self._section.begin or self._call_begin, position, self._length)

    # Searching

    def _find(self, delimiter: str | None, position: int, stop: int) -> int:
        """First character of a delimiter within `[position, stop)`, or `stop`."""
        place = -1 if delimiter is None else self._source.find(delimiter, position, stop)
        return stop if place < 0 else place

    def _at(self, delimiter: str | None, position: int) -> bool:
        return delimiter is not None and self._source.at(delimiter, position, self._length)

    def _after(self, delimiter: str | None, position: int) -> int:
        """End of a delimiter that begins at `position` or after white space, or -1."""
        position = self._skip(position)
        return position + len(delimiter or "") if self._at(delimiter, position) else -1

    def _skip(self, position: int) -> int:
        """First character from `position` on that is not white space."""
        match = _SPACE.match(self._text, position)
        return position if match is None else match.end()

    def _bounds(self, position: int) -> tuple[int, int]:
        """Latest end of an attempt that was read up to `position`: before and after its last delimiter.

        Both are equal without that delimiter.
        """
        outside = self._section.end if self._call_begin is not None else self._section.begin
        inner = self._find(outside, position, self._find(self._call_begin, position, self._length))
        end = self._find(self._call_end, position, inner)
        return (inner, inner) if end == inner else (end, end + len(self._call_end or ""))

    # Sections

    def _headed(self, start: int, pattern: re.Pattern[str]) -> Block | None:
        """The next list of calls that begins with its first call, without a delimiter."""
        position = start
        while (head := pattern.search(self._text, position)) is not None:
            begin = head.start()
            before = begin
            while before > start and self._text[before - 1].isspace():
                before -= 1
            if before == start or self._source.added_before(before):
                places = {text: before - len(text) for text in self._section.opens}
                opened = [at for text, at in places.items() if at >= start and self._at(text, at)]
                block = self._listed(min(opened, default=begin), begin)
                # An answer may look like a call at first. It is content if it cannot be one.
                if all(attempt.status != "malformed" for attempt in block.attempts):
                    return block
            position = head.end()
        return None

    def _listed(self, begin: int, position: int) -> Block:
        """Read the calls of a section, the first of which lies at `position` or beyond a bracket."""
        section = self._section
        opening, closing = section.brackets or (None, None)
        bracketed = (inside := self._after(opening, position)) >= 0
        position = inside if bracketed else position
        # Without brackets and delimiters, a call without a separator after it is the last.
        end = closing if bracketed else section.end if section.begin is not None else None
        attempts: list[Attempt] = []
        closed = False
        while (position := self._skip(position)) < self._length and not self._at(section.begin, position):
            if closed := self._at(end, position):
                position += len(closing or "") if bracketed else 0
                break
            if self._call_begin is None or self._at(self._call_begin, position):
                attempts.append(self._read(position))
            else:
                stop = self._find(self._call_begin, position, self._find(end, position, self._length))
                attempts.append(Attempt(position, stop, "malformed" if stop < self._length else "unclosed"))
            position = attempts[-1].stop
            if (following := self._after(section.separator, position)) >= 0:
                position = following
            elif end is None:
                break
        stop = max(position, self._after(section.end, position))
        if not attempts:
            is_cut_short = position == self._length and not closed
            attempts.append(Attempt(begin, stop, "unclosed" if is_cut_short else "malformed"))
        return Block(begin, stop, attempts)

    # One call

    def _read(self, start: int) -> Attempt:
        """Read the call that begins at a character."""
        captured: _Captured = {}
        status: CallStatus | None = None
        wrong_json = start
        inner, outer = self._bounds(start + len(self._call_begin or ""))
        try:
            outer = self._run(self._grammar.call, start, inner, captured)
        except _Fault as fault:
            if fault.position > inner:
                inner, outer = self._bounds(fault.position)
            status, is_cut_short, wrong_json = fault.status, inner == outer, fault.position
            if self._call_end is None:
                is_cut_short = status == "unclosed" and inner == self._length
            if is_cut_short:
                status = "unclosed"
            elif status == "unclosed":
                status = "malformed" if _JSON_FIELDS.isdisjoint(self._grammar.call) else "invalid_json"
        attempt = Attempt(start, outer)
        read_status = self._fill(attempt, captured)
        attempt.status = status or read_status
        if attempt.status == "invalid_json":
            self._keep_text(attempt, self._text[wrong_json:inner])
        return attempt

    def _keep_text(self, attempt: Attempt, text: str) -> None:
        """Set the arguments of a call as text, from JSON that is wrong, and the name if it comes first."""
        if Field.OBJECT in self._grammar.call:
            head = _OBJECT_HEAD.match(text)
            if head is None or self._call_end is None:
                return
            try:
                attempt.name = readable(json.loads(head[1], strict=False))
            except ValueError:
                return
            text = text[head.end() :].rstrip()
            if text.endswith("}") and not _is_json(text):
                text = text[:-1]  # the brace that closes the object
        if attempt.name is not None:
            attempt.arguments_text = readable(text.strip()) or None

    def _run(self, pattern: Pattern, position: int, inner: int, captured: _Captured) -> int:
        """Run a pattern, and return its end."""
        for index, part in enumerate(pattern):
            if isinstance(part, str):
                after = self._after(part, position)
                if after < 0:
                    position = self._skip(position)
                    raise _Fault(position, "unclosed" if position == self._length else "malformed")
                position = after
            elif part in _JSON_FIELDS or part is Field.VALUES:
                captured[part], position = self._value(part, self._skip(position), inner)
            elif part is Field.TAGGED:
                position = self._tagged(position, inner, captured)
            else:
                stop = self._end_of_text(part, pattern[index + 1 :], position, inner)
                text, padding = self._text[position:stop], self._grammar.padding
                is_value = part is Field.TEXT
                text = text.removeprefix(padding).removesuffix(padding) if is_value else text.strip()
                captured[part] = readable(text)
                position = stop
        return position

    def _value(self, part: Field, position: int, inner: int) -> tuple[Any, int]:
        """Read a value of JSON or of the grammar's dialect, and return it with its end."""
        try:
            if part is not Field.VALUES:
                return read_json(self._source, position, max(position, inner))
            dialect = self._grammar.dialect
            reader = Reader(self._source, position, inner, dialect, lambda start: self._bounds(start)[0])
            return reader.call(), reader.position
        except CutShort:
            raise _Fault(position, "unclosed") from None
        except ValueError:
            raise _Fault(position, "malformed" if part is Field.VALUES else "invalid_json") from None

    def _tagged(self, position: int, inner: int, captured: _Captured) -> int:
        """Read arguments, each in its own delimiters. They only count if all of them are whole."""
        arguments: dict[str, str] = {}
        while self._after(self._argument_begin, position) >= 0:
            one: _Captured = {}
            position = self._run(self._grammar.argument, position, inner, one)
            arguments[one[Field.KEY]] = one[Field.TEXT]
        captured[Field.TAGGED] = arguments
        return position

    def _end_of_text(self, part: Field, rest: Pattern, position: int, inner: int) -> int:
        """End of a text field: the first delimiter that may follow it.

        Values escape nothing, so a value may contain its closing delimiter. The first delimiter after which
        the pattern continues closes it, or else the first of all.
        """
        if rest[0] is Field.TAGGED:
            follow = [self._argument_begin, rest[1]]
        else:
            follow = [self._grammar.dialect.call[0] if rest[0] is Field.VALUES else rest[0]]
        ends = [str(delimiter) for delimiter in follow]
        # The last delimiter of the call lies at the bound, outside.
        places = [self._source.find(end, position, min(inner + len(end), self._length)) for end in ends]
        first = min([place for place in places if place >= 0], default=-1)
        if first < 0:
            raise _Fault(position, "unclosed")
        if part is not Field.TEXT:
            return first
        closing, stop = ends[0], first
        after = self._grammar.call[self._grammar.call.index(Field.TAGGED) + 1]
        while stop >= 0 and (following := self._skip(stop + len(closing))) < inner:
            if self._at(self._argument_begin, following) or self._at(str(after), following):
                return stop
            stop = self._source.find(closing, stop + 1, inner)
        return stop if stop >= 0 else first

    def _fill(self, attempt: Attempt, captured: _Captured) -> CallStatus:
        """Set name, arguments and id as far as they were read, and return their status."""
        call, value = self._grammar.call, captured.get(Field.OBJECT)
        if Field.OBJECT in call:
            if not isinstance(value, dict):
                return "malformed"
            name, call_id = value.get("name"), value.get("id")
            attempt.name = name if isinstance(name, str) and name else None
            attempt.id = call_id if isinstance(call_id, str) else None
            value = next((value[key] for key in _ARGUMENTS if key in value), None)
        else:
            attempt.id = captured.get(Field.ID) or None
            attempt.name = captured.get(Field.NAME) or None
            if self._grammar.name_in_id is not None and attempt.id is not None:
                match = self._grammar.name_in_id.fullmatch(attempt.id)
                attempt.name = match.group(1) if match is not None else None
            value = captured.get(Field.VALUES, captured.get(Field.JSON))
        if Field.TAGGED in captured:
            schema = (self._tools or {}).get(attempt.name or "", {})
            value = typed(captured[Field.TAGGED], schema)
        attempt.arguments = value if isinstance(value, dict) else None
        if value is not None and attempt.arguments is None and not _JSON_FIELDS.isdisjoint(call):
            attempt.arguments_text = json.dumps(value, ensure_ascii=False)
        if attempt.name is None:
            return "missing_name"
        if self._tools is not None and attempt.name not in self._tools:
            return "unknown_tool"
        if attempt.arguments is None or (Field.NAME in captured and _NO_NAME.search(attempt.name)):
            return "malformed"
        return "ok"
