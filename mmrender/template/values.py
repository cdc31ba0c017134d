"""Numbers, booleans, nulls and containers that remember where they came from.

Tool-call arguments reach a template as parsed JSON; a template may print a number, test a boolean, walk a
list or dump the whole object. These proxies behave as the values they stand for in every such use, and what
is printed from them is traced. `environment.py` replaces the few Jinja tests that compare by identity.
"""

from collections.abc import Mapping
from typing import Any

from mmrender.template.origin import Origin
from mmrender.template.traced import TracedStr


class TracedInt(int):
    """An `int` that prints as traced text."""

    _origin: Origin

    def __str__(self) -> TracedStr:
        return TracedStr.whole(int.__repr__(self), self._origin)

    __repr__ = __str__


class TracedFloat(float):
    """A `float` that prints as traced text."""

    _origin: Origin

    def __str__(self) -> TracedStr:
        return TracedStr.whole(float.__repr__(self), self._origin)

    __repr__ = __str__


class TracedBool(int):
    """A boolean that prints as traced text. `bool` cannot be subclassed; `int` compares and counts alike."""

    _origin: Origin

    def __str__(self) -> TracedStr:
        return TracedStr.whole("True" if self else "False", self._origin)

    __repr__ = __str__


class TracedNull:
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


class TracedDict(dict[Any, Any]):
    """A `dict` of one origin. `_source` is the untouched value, whose dump costs what a plain one does."""

    __slots__ = ("_origin", "_source")
    _origin: Origin
    _source: Mapping[Any, Any]


class TracedList(list[Any]):
    """A `list` of one origin, with `_source` as in `TracedDict`."""

    __slots__ = ("_origin", "_source")
    _origin: Origin
    _source: list[Any]


def traced(value: Any, origin: Origin) -> Any:
    """Wrap a JSON value, and all that it holds, in proxies of `origin`."""
    kind = type(value)
    if kind is str:
        return TracedStr.whole(value, origin)
    if kind is bool or kind is int or kind is float:
        number: Any = {bool: TracedBool, int: TracedInt, float: TracedFloat}[kind](value)
        number._origin = origin
        return number
    if value is None:
        return TracedNull(origin)
    if isinstance(value, Mapping):
        # Keys keep their place in the dict: a traced key hashes and compares as its text.
        mapping = TracedDict((traced(key, origin), traced(item, origin)) for key, item in value.items())
        mapping._origin, mapping._source = origin, value
        return mapping
    if isinstance(value, list | tuple):
        sequence = TracedList(traced(item, origin) for item in value)
        sequence._origin, sequence._source = origin, list(value)
        return sequence
    return value


def is_null(value: Any) -> bool:
    """Jinja's test `none`."""
    return value is None or type(value) is TracedNull


def is_boolean(value: Any) -> bool:
    """Jinja's test `boolean`."""
    return value is True or value is False or type(value) is TracedBool


def is_true(value: Any) -> bool:
    """Jinja's test `true`."""
    return value is True or (type(value) is TracedBool and value == 1)


def is_false(value: Any) -> bool:
    """Jinja's test `false`."""
    return value is False or (type(value) is TracedBool and value == 0)


def is_integer(value: Any) -> bool:
    """Jinja's test `integer`."""
    return isinstance(value, int) and not is_boolean(value)


def is_same(value: Any, other: Any) -> bool:
    """Jinja's test `sameas`, for values that stand for singletons."""
    return _single(value) is _single(other)


def _single(value: Any) -> Any:
    """The singleton that a proxy stands for; any other value as it is."""
    if type(value) is TracedNull:
        return None
    return bool(value) if type(value) is TracedBool else value


IDENTITY_TESTS = {
    "none": is_null,
    "boolean": is_boolean,
    "true": is_true,
    "false": is_false,
    "integer": is_integer,
    "sameas": is_same,
}
"""Jinja tests that compare by identity or type, replaced so that proxies pass them."""
