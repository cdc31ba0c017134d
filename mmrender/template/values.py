"""Numbers, booleans, nulls and containers that remember their origin.

Tool-call arguments reach a template as parsed JSON. A template may print a number, test a boolean, walk a
list or dump the whole object. These proxies behave as their values, and text printed from them is traced.
`IDENTITY_TESTS` replaces the Jinja tests that compare by identity.
"""

import sys
from collections.abc import Mapping
from typing import Any

from mmrender.content.values import MAX_DEPTH, as_text, is_record, record_fields, too_deep
from mmrender.template.text import Origin, Proxy, TracedStr


class TracedInt(Proxy, int):
    """An `int` that prints as traced text."""

    def __str__(self) -> TracedStr:
        return TracedStr.whole(int.__repr__(self), self._origin)

    __repr__ = __str__


class TracedFloat(Proxy, float):
    """A `float` that prints as traced text."""

    def __str__(self) -> TracedStr:
        return TracedStr.whole(float.__repr__(self), self._origin)

    __repr__ = __str__


class TracedBool(Proxy, int):
    """A boolean that prints as traced text. `bool` cannot be subclassed; `int` compares equal."""

    def __str__(self) -> TracedStr:
        return TracedStr.whole("True" if self else "False", self._origin)

    __repr__ = __str__


class TracedNull(Proxy):
    """`None` that prints as traced text."""

    __slots__ = ("_origin",)

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    def __str__(self) -> TracedStr:
        return TracedStr.whole("None", self._origin)

    __repr__ = __str__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, TracedNull)

    def __hash__(self) -> int:
        return hash(None)


class TracedDict(Proxy, dict[Any, Any]):
    """A `dict` of one origin. `_source` is the plain value, which is faster to dump."""

    __slots__ = ("_origin", "_source")
    _source: Mapping[Any, Any]


class TracedList(Proxy, list[Any]):
    """A `list` of one origin, with `_source` as in `TracedDict`."""

    __slots__ = ("_origin", "_source")
    _source: list[Any]


_NUMBERS: dict[type, Any] = {bool: TracedBool, int: TracedInt, float: TracedFloat}


def traced(value: Any, origin: Origin, depth: int = MAX_DEPTH) -> Any:
    """Wrap a value and its elements in proxies of `origin`.

    Raises:
        MessageError: The value nests deeper than `depth`, or its text is not UTF-8.
    """
    kind = type(value)
    if kind is str:
        return TracedStr.whole(value if value.isascii() else as_text(value, origin.path), origin)
    if kind in _NUMBERS:
        number = _NUMBERS[kind](value)
        number._origin = origin
        return number
    if value is None:
        return TracedNull(origin)
    if not depth:
        raise too_deep(origin.path)
    depth -= 1
    if isinstance(value, Mapping):
        # Keys keep their place in the dict: a traced key hashes and compares as its text.
        mapping = TracedDict(
            (traced(key, origin, depth), traced(item, origin, depth)) for key, item in value.items()
        )
        mapping._origin, mapping._source = origin, value
        return mapping
    if isinstance(value, list | tuple):
        sequence = TracedList(traced(item, origin, depth) for item in value)
        sequence._origin, sequence._source = origin, list(value)
        return sequence
    return traced(_json_value(value, origin.path), origin, depth)


def _json_value(value: Any, where: str) -> Any:
    """Return the JSON value of a foreign object, or its type in angle brackets.

    These are Transformers' rules (`_plain_template_data`): a template cannot call methods of a foreign
    object.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if is_record(value):
        return record_fields(value, where)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        return f"<{type(item).__name__}>" if isinstance(item, numpy.generic) else item
    return f"<{type(value).__name__}>"


def untraced(value: Any) -> Any:
    """Return the JSON value of a proxy or of a container of proxies."""
    if isinstance(value, TracedDict | TracedList):
        return value._source
    if isinstance(value, TracedNull | TracedBool):
        return single(value)
    if isinstance(value, Mapping):
        return {untraced(key): untraced(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [untraced(item) for item in value]
    return value


def single(value: Any) -> Any:
    """Return the singleton of a proxy, or the value itself."""
    if type(value) is TracedNull:
        return None
    return bool(value) if type(value) is TracedBool else value


def _is_boolean(value: Any) -> bool:
    return isinstance(single(value), bool)


IDENTITY_TESTS = {
    "none": lambda value: value is None or type(value) is TracedNull,
    "boolean": _is_boolean,
    "true": lambda value: single(value) is True,
    "false": lambda value: single(value) is False,
    "integer": lambda value: isinstance(value, int) and not _is_boolean(value),
    "sameas": lambda value, other: single(value) is single(other),
}
"""Jinja tests that compare by identity or type, replaced so that proxies pass them."""
