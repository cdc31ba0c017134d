"""Values as models write them: JSON, and the dialects of Python calls and of Gemma's calls.

JSON is read by the standard library. The reader here reads the dialects, and tells JSON that was cut short
from JSON that is wrong. No value is ever evaluated.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mmrender.parsing.text import TokenText, readable

_MAX_DEPTH = 100
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,:=\[\]{}()\"']+")
_KEY = re.compile(r"[^:={}\[\](),]+")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BEGUN_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]*)?)?")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)


class CutShort(Exception):  # noqa: N818 - says what the text is, not what the program did
    """The text ends inside a value."""


class NotAValue(Exception):  # noqa: N818
    """The text is not a value of the dialect."""


@dataclass(frozen=True)
class Dialect:
    """How values are spelled.

    Attributes:
        quotes: What opens and closes a text; the same on both sides.
        escapes: Characters by the letter that spells them after a backslash; None where nothing is escaped.
        constants: Words and their values.
        bare_keys: Whether keys of objects are written without quotes.
    """

    quotes: tuple[str, ...]
    escapes: Mapping[str, str] | None = None
    constants: Mapping[str, Any] = field(default_factory=lambda: {"true": True, "false": False, "null": None})
    bare_keys: bool = False


_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\"}

JSON = Dialect(quotes=('"',), escapes=_SHORT | {"/": "/"})
PYTHON = Dialect(
    quotes=("'", '"'), escapes=_SHORT | {"'": "'", "a": "\a", "v": "\v", "\n": ""}, constants=_WORDS
)
GEMMA = Dialect(quotes=('<|"|>',), constants=_WORDS, bare_keys=True)
FUNCTION_GEMMA = Dialect(quotes=("<escape>",), constants=_WORDS, bare_keys=True)


class Reader:
    """Reads values of one dialect from `position` on.

    Raises:
        CutShort: The text ends inside a value.
        NotAValue: The text is not a value.
    """

    def __init__(self, source: TokenText, position: int, stop: int, dialect: Dialect) -> None:
        self._source = source
        self._text = source.text
        self.position = position
        self._stop = stop
        self._dialect = dialect
        self._depth = 0

    def value(self) -> Any:
        """Read one value."""
        self._skip()
        for quote in self._dialect.quotes:
            if self._source.at(quote, self.position, self._stop):
                return self._quoted(quote)
        if self._take("{"):
            return self.members("}", ":", bare=self._dialect.bare_keys)
        if self._take("["):
            return [self.value() for _ in self._items("]")]
        return self._word()

    def members(self, close: str, joiner: str, *, bare: bool) -> dict[str, Any]:
        """Read `key joiner value, ...` through `close`; the opening bracket has been read."""
        found: dict[str, Any] = {}
        for _ in self._items(close):
            key = self._key(bare)
            self._expect(joiner)
            found[key] = self.value()
        return found

    def _items(self, close: str) -> Iterator[None]:
        """Yield where each item begins, reading the commas between them and `close`."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotAValue
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
        start = self.position + len(quote)
        stop = self._source.find(quote, start, self._stop)
        while stop >= 0 and self._dialect.escapes is not None and _is_escaped(self._text, start, stop):
            stop = self._source.find(quote, stop + 1, self._stop)
        if stop < 0:
            raise CutShort
        self.position = stop + len(quote)
        inside = readable(self._text[start:stop])
        return inside if self._dialect.escapes is None else self._unescaped(inside, self._dialect.escapes)

    def _unescaped(self, text: str, escapes: Mapping[str, str]) -> str:
        def char(match: re.Match[str]) -> str:
            code = match.group(1)
            if code in escapes:
                return escapes[code]
            if code[0] in "uxU" and len(code) > 1:
                return chr(min(int(code[1:], 16), 0x10FFFF))
            return chr(int(code, 8)) if code.isdigit() else match.group()

        return whole_characters(_ESCAPE.sub(char, text))

    def _word(self) -> Any:
        match = _WORD.match(self._text, self.position, self._stop)
        if match is None:
            self._fail()
        word = match.group()
        if match.end() == self._stop and self._may_go_on(word):
            raise CutShort
        self.position = match.end()
        if word in self._dialect.constants:
            return self._dialect.constants[word]
        if _NUMBER.fullmatch(word) is None:
            raise NotAValue
        return number(word)

    def _may_go_on(self, word: str) -> bool:
        begun = any(constant.startswith(word) for constant in self._dialect.constants)
        return begun or _BEGUN_NUMBER.fullmatch(word) is not None

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
        raise CutShort if self.position >= self._stop else NotAValue


def _is_escaped(text: str, start: int, position: int) -> bool:
    backslashes = position
    while backslashes > start and text[backslashes - 1] == "\\":
        backslashes -= 1
    return (position - backslashes) % 2 == 1


def number(word: str) -> int | float:
    """Read a number.

    Raises:
        NotAValue: It is too long or too large to be one.
    """
    try:
        value = int(word) if word.lstrip("-").isdigit() else float(word)
    except ValueError:
        raise NotAValue from None
    if not math.isfinite(value):
        raise NotAValue
    return value


def whole_characters(text: str) -> str:
    """The text, if it can be written as UTF-8 apart from bytes that never were UTF-8.

    Raises:
        NotAValue: It holds half of a surrogate pair.
    """
    try:
        return readable(text)
    except UnicodeEncodeError:
        raise NotAValue from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


# NaN and Infinity are no JSON (RFC 8259, section 6), though Python reads them.
_decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def read_json(source: TokenText, start: int, stop: int) -> tuple[Any, int]:
    """Read JSON that begins at a character, and say where it ends.

    Args:
        source: The text.
        start: Where the value begins.
        stop: Where the call ends by its delimiters. A value that is whole may go beyond, since a text in it
            may hold those delimiters; one that is not is judged up to here.

    Raises:
        CutShort: The text before `stop` begins a value.
        NotAValue: It does not.
    """
    try:
        value, end = _decoder.raw_decode(source.text, start)
    except (ValueError, RecursionError):
        Reader(source, start, stop, JSON).value()
        # The two readers differ: this one was the tolerant one, about control characters, say.
        raise NotAValue from None
    written = source.text[start:end]
    return (value if written.isascii() and "\\u" not in written else _cleaned(value)), end


def parse_json(text: str) -> Any:
    """Read a text that is one JSON value and nothing else.

    Raises:
        NotAValue: It is not.
    """
    try:
        return _cleaned(_decoder.decode(text))
    except (ValueError, RecursionError):
        raise NotAValue from None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return value
