"""`str % values`, `str.format` and `repr`, with provenance kept.

Text is laid out piece by piece, each piece with the origin of the value it shows.
"""

import re
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.filters import _GroupTuple
from jinja2.utils import Namespace

from mmrender.template.limits import admit, attributes, weigh
from mmrender.template.origin import sole_origin
from mmrender.template.traced import TracedStr, concat, derived, mapped, plain

_EMPTY: dict[str, str] = {}
_VIEWS: Any = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
PRINTED_BY_ELEMENT: Any = (dict, list, tuple, Namespace, *_VIEWS)
"""What prints as the `repr` of its elements."""
_TUPLE_REPRS = (tuple.__repr__, _GroupTuple.__repr__)

# printf-style conversion, https://docs.python.org/3/library/stdtypes.html#printf-style-string-formatting
_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*(?:\([^()]*\)[^()]*)*)\))?"
    r"(?P<flags>[#0\- +]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<type>.)",
    re.DOTALL,
)
# [[fill]align][sign][z][#][0][width][grouping][.precision][type]
_SPEC = re.compile(
    r"(?:(?P<fill>.)?(?P<align>[<>=^]))?(?P<zero>0)?(?P<width>\d+)?(?:\.(?P<precision>\d+))?s?\Z", re.DOTALL
)
_NUMBER = re.compile(r"\d+")


def text_of(value: Any) -> TracedStr:
    """`str(value)` with provenance, containers included."""
    if isinstance(value, TracedStr):
        return value
    if isinstance(value, PRINTED_BY_ELEMENT):
        return representation(value)
    text = str(value)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def representation(value: Any) -> TracedStr:
    """`repr(value)` with provenance, for strings and the containers that hold them."""
    if isinstance(value, PRINTED_BY_ELEMENT):
        weigh(list(value) if isinstance(value, _VIEWS) else attributes(value))
    return _represented(value)


def _represented(value: Any) -> TracedStr:
    if isinstance(value, TracedStr):
        return concat(["Markup(", _quoted(value), ")"]) if hasattr(value, "__html__") else _quoted(value)
    shown_by: Any = type(value).__repr__
    if isinstance(value, list) and shown_by is list.__repr__:
        return concat(["[", *_separated([_represented(item) for item in value]), "]"])
    if isinstance(value, tuple) and shown_by in _TUPLE_REPRS:
        closing = ",)" if len(value) == 1 else ")"
        return concat(["(", *_separated([_represented(item) for item in value]), closing])
    if isinstance(value, dict) and shown_by is dict.__repr__:
        pairs = [concat([_represented(key), ": ", _represented(item)]) for key, item in value.items()]
        return concat(["{", *_separated(pairs), "}"])
    if isinstance(value, _VIEWS):
        return concat([f"{type(value).__name__}(", _represented(list(value)), ")"])
    if isinstance(value, Namespace):
        return concat(["<Namespace ", _represented(attributes(value)), ">"])
    text = repr(value)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def _separated(pieces: list[TracedStr]) -> list[str]:
    return [part for index, piece in enumerate(pieces) for part in ((", ", piece) if index else (piece,))]


def _quoted(value: TracedStr) -> TracedStr:
    quote = repr(plain(value))[0]

    def escaped(text: str) -> str:
        return "".join(
            f"\\{char}" if char in (quote, "\\") else char if char in "'\"" else repr(char)[1:-1]
            for char in text
        )

    return concat([quote, mapped(value, escaped), quote])


def _ascii(value: TracedStr) -> TracedStr:
    return mapped(value, lambda text: text.encode("ascii", "backslashreplace").decode())


def padded(value: TracedStr, spec: str) -> TracedStr:
    """`format(value, spec)` for text."""
    if not spec:
        return value
    admit_widths(spec)
    expected = format(plain(value), spec)
    match = _SPEC.match(spec)
    if match is None:
        return derived(expected, value)
    shown = value if match["precision"] is None else value[: int(match["precision"])]
    margin = len(expected) - len(shown)
    left = {"<": 0, ">": margin, "^": margin // 2}[match["align"] or "<"]
    return concat([expected[:left], shown, expected[left + len(shown) :]])


def admit_widths(spec: str) -> None:
    """Refuse a width or precision that would pad beyond the limit."""
    for digits in _NUMBER.findall(spec):
        admit(int(digits[:18]))


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

    source = text_of(template)
    pieces: list[str] = []
    position = length = 0
    for match in _CONVERSION.finditer(plain(template)):
        pieces += (source[position : match.start()], _converted(match, source, values, take))
        position = match.end()
        length += len(pieces[-1])
        admit(length)
    if "%" in source[position:]:
        raise ValueError("incomplete format")
    if not keyed and taken < len(positional):
        raise TypeError("not all arguments converted during string formatting")
    return concat([*pieces, source[position:]])


def _converted(match: re.Match[str], source: TracedStr, values: Any, take: Callable[[], Any]) -> TracedStr:
    if match.group() == "%%":
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
            shown = _ascii(shown)
        if precision is not None:
            shown = shown[: max(_integer(precision), 0)]
        if width is None:
            return shown
        size = _integer(width)
        return shown.ljust(abs(size)) if size < 0 or "-" in match["flags"] else shown.rjust(size)
    spec = f"%{match['flags']}{'' if width is None else _integer(width)}"
    spec += f"{'' if precision is None else f'.{_integer(precision)}'}{kind}"
    admit_widths(spec)
    # A tuple, so that a traced value is not asked to format the spec.
    return derived(spec % (plain(value) if isinstance(value, str) else value,), text_of(value))


def _integer(size: Any) -> int:
    """A width or precision: digits of the template, perhaps none, or the value that a `*` takes."""
    if isinstance(size, str):
        return int(size[:18] or 0)
    if not isinstance(size, int):
        raise TypeError("* wants int")
    return size


class TracingFormatter(string.Formatter):
    """`str.format` that keeps provenance; `lookup` guards attribute and item access.

    Args:
        lookup: `(value, is_attribute, name) -> value`. Without it only plain arguments may be named.
        escape: What to do to each value's text; by default nothing.
    """

    def __init__(
        self,
        lookup: Callable[[Any, bool, Any], Any] | None = None,
        escape: Callable[[TracedStr], TracedStr] | None = None,
    ) -> None:
        self._lookup = lookup
        self._escape = escape

    def traced(self, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedStr:
        """Format `template`."""
        self._automatic: int | None = None
        return self._formatted(text_of(template), args, kwargs, 2)

    def _formatted(
        self, template: TracedStr, args: Sequence[Any], kwargs: Mapping[str, Any], depth: int
    ) -> TracedStr:
        if depth < 0:
            raise ValueError("Max string recursion exceeded")
        origin = sole_origin(template._spans, len(template))
        pieces: list[str] = []
        length = 0
        for literal, field, spec, conversion in self.parse(plain(template)):
            if literal:
                pieces.append(TracedStr.whole(literal, origin) if origin else literal)
            if field is not None:
                value = self._convert(self._value(field, args, kwargs), conversion)
                inner = self._formatted(TracedStr(spec or ""), args, kwargs, depth - 1)
                shown = self._shown(value, plain(inner))
                pieces.append(shown if self._escape is None else self._escape(shown))
                length += len(pieces[-1])
                admit(length)
        return concat(pieces)

    def _value(self, field: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first, rest = formatter_field_name_split(field)
        value = self._argument(first, args, kwargs)
        for is_attribute, name in rest:
            if self._lookup is None:
                raise ValueError(f"attribute and item access is not available in {field!r}")
            value = self._lookup(value, is_attribute, name)
        return value

    def _argument(self, name: str | int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "":
            if self._automatic == -1:
                raise ValueError("cannot switch from manual field specification to automatic field numbering")
            name = 0 if self._automatic is None else self._automatic
            self._automatic = name + 1
        elif isinstance(name, int):
            if self._automatic is not None and self._automatic >= 0:
                raise ValueError("cannot switch from automatic field numbering to manual field specification")
            self._automatic = -1
        return args[name] if isinstance(name, int) else kwargs[name]

    @staticmethod
    def _convert(value: Any, conversion: str | None) -> Any:
        if conversion is None:
            return value
        if conversion == "s":
            return text_of(value)
        if conversion not in ("r", "a"):
            raise ValueError(f"Unknown conversion specifier {conversion!s}")
        return _ascii(representation(value)) if conversion == "a" else representation(value)

    @staticmethod
    def _shown(value: Any, spec: str) -> TracedStr:
        if isinstance(value, TracedStr):
            return padded(value, spec)
        if not spec:
            return text_of(value)
        admit_widths(spec)
        return derived(format(value, spec), text_of(value))
