"""`str % values`, `str.format` and `repr`, with provenance kept.

Text is laid out piece by piece, each piece with the origin of the value it shows.
"""

import re
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrender.template.origin import sole_origin
from mmrender.template.traced import TracedStr, concat, derived, plain, spans_of

# printf-style conversion, https://docs.python.org/3/library/stdtypes.html#printf-style-string-formatting
_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*(?:\([^()]*\)[^()]*)*)\))?"
    r"(?P<flags>[#0\- +]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<type>.)",
    re.DOTALL,
)
# [[fill]align][sign][z][#][0][width][grouping][.precision][type]
_SPEC = re.compile(r"(?:(?P<fill>.)?(?P<align>[<>=^]))?(?P<zero>0)?(?P<width>\d+)?(?:\.(?P<precision>\d+))?s?\Z", re.DOTALL)


def text_of(value: Any) -> TracedStr:
    """`str(value)` with provenance, containers included."""
    if isinstance(value, TracedStr):
        return value
    if isinstance(value, dict | list | tuple):
        return representation(value)
    text = str(value)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def representation(value: Any) -> TracedStr:
    """`repr(value)` with provenance, for strings and the containers that hold them."""
    if isinstance(value, TracedStr):
        return _quoted(value)
    if type(value) is list or (isinstance(value, list) and type(value).__repr__ is list.__repr__):
        return concat(["[", *_separated([representation(item) for item in value]), "]"])
    if type(value) is tuple:
        closing = ",)" if len(value) == 1 else ")"
        return concat(["(", *_separated([representation(item) for item in value]), closing])
    if isinstance(value, dict) and type(value).__repr__ is dict.__repr__:
        pairs = [concat([representation(key), ": ", representation(item)]) for key, item in value.items()]
        return concat(["{", *_separated(pairs), "}"])
    text = repr(value)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def _separated(pieces: list[TracedStr]) -> list[str]:
    return [part for index, piece in enumerate(pieces) for part in ((", ", piece) if index else (piece,))]


def _quoted(value: TracedStr) -> TracedStr:
    quote = repr(plain(value))[0]

    def escaped(text: str) -> str:
        return "".join(
            f"\\{char}" if char in (quote, "\\") else char if char in "'\"" else repr(char)[1:-1] for char in text
        )

    return concat([quote, value.mapped(escaped), quote])


def padded(value: TracedStr, spec: str) -> TracedStr:
    """`format(value, spec)` for text."""
    if not spec:
        return value
    expected = format(plain(value), spec)
    match = _SPEC.match(spec)
    if match is None:
        return derived(expected, value)
    shown = value if match["precision"] is None else value[: int(match["precision"])]
    margin = len(expected) - len(shown)
    align = match["align"] or "<"
    left = {"<": 0, ">": margin, "^": margin // 2, "=": margin}[align]
    return concat([expected[:left], shown, expected[left + len(shown) :]])


def percent(template: str, values: Any) -> TracedStr:
    """`template % values`."""
    taken = 0
    positional: Sequence[Any] = values if isinstance(values, tuple) else (values,)
    # CPython takes anything with item access, other than str and tuple, for a mapping that may go unused.
    keyed = hasattr(type(values), "__getitem__") and not isinstance(values, str | tuple)

    def take() -> Any:
        nonlocal taken
        if taken >= len(positional):
            raise TypeError("not enough arguments for format string")
        taken += 1
        return positional[taken - 1]

    source = template if isinstance(template, TracedStr) else TracedStr(template)
    pieces: list[str] = []
    position = 0
    for match in _CONVERSION.finditer(plain(template)):
        pieces.append(source[position : match.start()])
        position = match.end()
        pieces.append(_converted(match, source, values, take))
    if "%" in source[position:]:
        raise ValueError("incomplete format")
    if not keyed and taken < len(positional):
        raise TypeError("not all arguments converted during string formatting")
    return concat([*pieces, source[position:]])


def _converted(match: re.Match[str], source: TracedStr, values: Any, take: Callable[[], Any]) -> TracedStr:
    if match["type"] == "%":
        return source[match.end() - 1 : match.end()]
    width = take() if match["width"] == "*" else match["width"]
    precision = take() if match["precision"] == "*" else match["precision"]
    if match["key"] is not None and not isinstance(values, Mapping):
        raise TypeError("format requires a mapping")
    value = values[match["key"]] if match["key"] is not None else take()
    kind = match["type"]
    if kind in "sra":
        shown = text_of(value) if kind == "s" else representation(value)
        if kind == "a":
            shown = shown.mapped(lambda text: text.encode("ascii", "backslashreplace").decode())
        if precision is not None:
            shown = shown[: int(precision or 0)]
        if width is None:
            return shown
        size = int(width)
        return shown.ljust(abs(size)) if size < 0 or "-" in match["flags"] else shown.rjust(size)
    spec = f"%{match['flags']}{'' if width is None else width}{'' if precision is None else f'.{precision}'}{kind}"
    return derived(spec % value, text_of(value))


class TracingFormatter(string.Formatter):
    """`str.format` that keeps provenance; `lookup` guards attribute and item access.

    Args:
        lookup: `(value, is_attribute, name) -> value`. Without it only plain arguments may be named.
    """

    def __init__(self, lookup: Callable[[Any, bool, Any], Any] | None = None) -> None:
        self._lookup = lookup

    def traced(self, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedStr:
        """Format `template`."""
        self._automatic = 0
        return self._formatted(template, args, kwargs, 2)

    def _formatted(self, template: str, args: Sequence[Any], kwargs: Mapping[str, Any], depth: int) -> TracedStr:
        if depth < 0:
            raise ValueError("Max string recursion exceeded")
        origin = sole_origin(spans_of(template), len(template))
        pieces: list[str] = []
        for literal, field, spec, conversion in self.parse(plain(template)):
            if literal:
                pieces.append(TracedStr.whole(literal, origin) if origin else literal)
            if field is not None:
                value = self._convert(self._value(field, args, kwargs), conversion)
                inner = self._formatted(spec or "", args, kwargs, depth - 1)
                pieces.append(self._shown(value, plain(inner)))
        return concat(pieces)

    def _value(self, field: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first, rest = formatter_field_name_split(field)
        if first == "":
            first = self._automatic
            self._automatic += 1
        value = args[first] if isinstance(first, int) else kwargs[first]
        for is_attribute, name in rest:
            if self._lookup is None:
                raise ValueError(f"attribute and item access is not available in {field!r}")
            value = self._lookup(value, is_attribute, name)
        return value

    @staticmethod
    def _convert(value: Any, conversion: str | None) -> Any:
        if conversion is None:
            return value
        if conversion == "s":
            return text_of(value)
        shown = representation(value)
        if conversion == "a":
            return shown.mapped(lambda text: text.encode("ascii", "backslashreplace").decode())
        return shown

    @staticmethod
    def _shown(value: Any, spec: str) -> str:
        if isinstance(value, TracedStr):
            return padded(value, spec)
        if not spec:
            return text_of(value)
        return derived(format(value, spec), text_of(value))
