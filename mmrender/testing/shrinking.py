"""Make a failing conversation smaller while it fails in the same way, for a person to read and report."""

from collections.abc import Callable, Iterator
from typing import Any

_MAX_TRIES = 250
_FIXED = ("role", "type")
_KEPT = (*_FIXED, "content", "text", "function", "arguments")
"""Keys that every message keeps."""


def shrink(value: Any, fails: Callable[[Any], bool]) -> Any:
    """Return a value with less in it for which `fails` still holds, until no step makes it smaller.

    Args:
        value: Nested lists, dicts and texts. Anything else stays or leaves as a whole.
        fails: Called at most some hundreds of times, the biggest steps first.
    """
    tries = 0
    candidates = _smaller(value)
    while (candidate := next(candidates, None)) is not None and tries < _MAX_TRIES:
        tries += 1
        if fails(candidate):
            value, candidates = candidate, _smaller(candidate)
    return value


def _smaller(value: Any) -> Iterator[Any]:
    """Yield values with one thing less in them."""
    if isinstance(value, (str, list)):
        size = len(value)
        while size:
            for start in range(0, len(value), size):
                rest: Any = value[start + size :]
                yield value[:start] + rest
            size //= 2
    if isinstance(value, list):
        for index, item in enumerate(value):
            for less in _smaller(item):
                yield [*value[:index], less, *value[index + 1 :]]
    if isinstance(value, dict):
        for name in [name for name in value if name not in _KEPT]:
            yield {key: item for key, item in value.items() if key != name}
        for name in [name for name in value if name not in _FIXED]:
            for less in _smaller(value[name]):
                yield {**value, name: less}
