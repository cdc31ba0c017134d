"""Values as models write them: JSON, and the dialects of Python calls and of Gemma's calls.

JSON is read by the standard library. `Reader` reads the dialects, and distinguishes JSON that was cut short
from wrong JSON. Nothing is ever evaluated. A text that is not a value raises `ValueError`.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mmrender.model.spelling import TokenText, readable

_MAX_DEPTH = 100
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,:=\[\]{}()\"']+")
_KEY = re.compile(r"[^:={}\[\](),]+")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BEGUN_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]*)?)?")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED_TEXT = {
    quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*(?={quote})", re.DOTALL) for quote in "\"'"
}


class CutShort(Exception):  # noqa: N818 - a finding about the text
    """The text ends inside a value."""


@dataclass(frozen=True)
class Dialect:
    """Spelling of values.

    Attributes:
        quotes: Delimiters of a text, the same on both sides.
        constants: Words and their values.
        escapes: Characters by the letter that spells them after a backslash. None without escapes.
        bare_keys: Whether keys of objects are written without quotes.
        call: Delimiters that open the arguments of a call, join key and value, and close the arguments.
    """

    quotes: tuple[str, ...]
    constants: Mapping[str, Any]
    escapes: Mapping[str, str] | None = None
    bare_keys: bool = False
    call: tuple[str, str, str] = ("{", ":", "}")


_JSON_WORDS = {"true": True, "false": False, "null": None}
_WORDS = {**_JSON_WORDS, "True": True, "False": False, "None": None}
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\"}
_PYTHON_SHORT = {**_SHORT, "'": "'", "a": "\a", "v": "\v", "\n": ""}

JSON = Dialect(('"',), _JSON_WORDS, escapes={**_SHORT, "/": "/"})
PYTHON = Dialect(("'", '"'), _WORDS, escapes=_PYTHON_SHORT, call=("(", "=", ")"))
GEMMA = Dialect(('<|"|>',), _WORDS, bare_keys=True)
FUNCTION_GEMMA = Dialect(("<escape>",), _WORDS, bare_keys=True)


class Reader:
    """Reads values of one dialect within `[position, stop)`, or raises `CutShort` or `ValueError`.

    With `stop_after`, a quoted text may pass `stop`: the values after it end at `stop_after` of its end.
    """

    def __init__(
        self,
        source: TokenText,
        position: int,
        stop: int,
        dialect: Dialect,
        stop_after: Callable[[int], int] | None = None,
    ) -> None:
        self._source = source
        self._text = source.text
        self.position = position
        self._stop = stop
        self._dialect = dialect
        self._stop_after = stop_after
        self._depth = 0

    def call(self) -> dict[str, Any]:
        """Read the arguments of a call, brackets included."""
        opening, joiner, closing = self._dialect.call
        self._expect(opening)
        return self._members(closing, joiner, bare=True)

    def value(self) -> Any:
        """Read one value."""
        self._skip()
        for quote in self._dialect.quotes:
            if self._source.at(quote, self.position, self._stop):
                return self._quoted(quote)
        if self._take("{"):
            return self._members("}", ":", bare=self._dialect.bare_keys)
        if self._take("["):
            return [self.value() for _ in self._items("]")]
        return self._word()

    def _members(self, close: str, joiner: str, *, bare: bool) -> dict[str, Any]:
        """Read `key joiner value, ...` through `close`, after the opening bracket."""
        members: dict[str, Any] = {}
        for _ in self._items(close):
            key = self._key(bare)
            self._expect(joiner)
            members[key] = self.value()
        return members

    def _items(self, close: str) -> Iterator[None]:
        """Yield where each item begins, reading the commas between them and `close`."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError
        separated = False
        while not self._take(close):
            if separated:
                self._expect(",")
            yield
            separated = True
        self._depth -= 1

    def _key(self, bare: bool) -> str:
        self._skip()
        for quote in self._dialect.quotes:
            if self._source.at(quote, self.position, self._stop):
                return self._quoted(quote)
        match = _KEY.match(self._text, self.position, self._stop) if bare else None
        if match is None:
            self._fail()
        self.position = match.end()
        return readable(match.group().strip())

    def _quoted(self, quote: str) -> str:
        start, escapes = self.position + len(quote), self._dialect.escapes
        limit = self._stop if self._stop_after is None else len(self._text)
        if escapes is None:
            stop = self._source.find(quote, start, limit)
        else:
            match = _ESCAPED_TEXT[quote].match(self._text, start, limit)
            stop = -1 if match is None else match.end()
        if stop < 0:
            raise CutShort
        self.position = stop + len(quote)
        if self._stop_after is not None and self.position > self._stop:
            self._stop = self._stop_after(self.position)
        text = self._text[start:stop]
        return readable(text if escapes is None else _ESCAPE.sub(lambda match: _char(match, escapes), text))

    def _word(self) -> Any:
        match = _WORD.match(self._text, self.position, self._stop)
        if match is None:
            self._fail()
        word, constants = match.group(), self._dialect.constants
        if match.end() == self._stop and (
            _BEGUN_NUMBER.fullmatch(word) or any(constant.startswith(word) for constant in constants)
        ):
            raise CutShort
        self.position = match.end()
        if word in constants:
            return constants[word]
        if _NUMBER.fullmatch(word) is None:
            raise ValueError(word)
        return number(word)

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self.position, self._stop)
        self.position = match.end() if match is not None else self.position

    def _take(self, symbol: str) -> bool:
        self._skip()
        if self.position >= self._stop:
            raise CutShort
        if not self._text.startswith(symbol, self.position, self._stop):
            return False
        self.position += len(symbol)
        return True

    def _expect(self, symbol: str) -> None:
        if not self._take(symbol):
            self._fail()

    def _fail(self) -> NoReturn:
        raise CutShort if self.position >= self._stop else ValueError


def _char(match: re.Match[str], escapes: Mapping[str, str]) -> str:
    """The character that an escape spells. An unknown escape is text."""
    code = match.group(1)
    if code in escapes:
        return escapes[code]
    if code[0] in "uxU" and len(code) > 1:
        return chr(min(int(code[1:], 16), 0x10FFFF))
    return chr(int(code, 8)) if code.isdigit() else match.group()


def number(word: str) -> int | float:
    """Read a number that is neither too long nor too large, or raise `ValueError`."""
    if word.lstrip("-").isdigit():
        return int(word)
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


# NaN and Infinity are not JSON (RFC 8259, section 6), though Python reads them.
_decoder = json.JSONDecoder(parse_constant=number, parse_float=number)


def read_json(source: TokenText, start: int, stop: int) -> tuple[Any, int]:
    """Read JSON that begins at a character, and return the value with its end.

    A whole value may reach beyond `stop`, the end of the call by its delimiters, since its texts may contain
    them. Other text is only read up to `stop`. It raises `CutShort` if it begins a value, or `ValueError`.
    """
    try:
        value, end = _decoder.raw_decode(source.text, start)
        return _cleaned(value), end
    except (ValueError, RecursionError):
        Reader(source, start, stop, JSON).value()
        # This reader is the more tolerant of the two, about control characters for example.
        raise ValueError from None


def parse_json(text: str) -> Any:
    """Read a text that is one JSON value and nothing else, or raise `ValueError`."""
    try:
        return _cleaned(_decoder.decode(text))
    except RecursionError:
        raise ValueError from None


def _cleaned(value: Any) -> Any:
    """The value with `readable` texts."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {readable(key): _cleaned(item) for key, item in value.items()}
    return value
