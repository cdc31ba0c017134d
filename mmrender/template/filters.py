"""Jinja's filters that produce text, with provenance kept or tainted.

Each returns the text of the built-in filter of the same name (jinja2.filters, 3.1). Filters that only pick or
order elements (`first`, `map`, ...) are not replaced, since the elements stay as they are. HTML is left out:
`safe` changes nothing, `escape` returns plain text, and `urlize`, `xmlattr` and `striptags` do not exist.
"""

import json
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2.filters as builtin
from jinja2 import Environment, pass_environment
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import make_attrgetter

from mmrender.template.text import TracedStr, plain, tainted, text_of
from mmrender.template.values import single, untraced


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> TracedStr:
    """Elements as text, with `d` between them."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return text_of(d).join([text_of(item) for item in value])


def _replace(s: Any, old: str, new: str, count: int | None = None) -> TracedStr:
    """`s` with `old` replaced by `new`."""
    return text_of(s).replace(plain(text_of(old)), text_of(new), -1 if count is None else count)


def _formatted(value: str, *args: Any, **kwargs: Any) -> TracedStr:
    """`value % args`."""
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return text_of(value) % (kwargs or args)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> TracedStr:
    """Dump as the `tojson` filter of Transformers does: no HTML escapes, non-ASCII text kept."""
    text = json.dumps(
        untraced(value),
        ensure_ascii=bool(ensure_ascii),
        indent=single(indent),
        separators=separators or None,
        sort_keys=bool(sort_keys),
    )
    return tainted(text, value, indent, separators)


def _tainting(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a built-in filter: if it changes the text, the result is tainted by every argument."""
    first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, *others = args[first:]
        argument = plain(value) if isinstance(value, str) else value
        result = str(filter_(*args[:first], argument, *map(single, others), **kwargs))
        text = text_of(value)
        return text if result == text else tainted(result, value, others, kwargs)

    return call


_TAINTING = (
    *("e", "escape", "filesizeformat", "forceescape", "indent", "pprint", "title", "truncate"),
    *("urlencode", "wordwrap"),
)

FILTERS: dict[str, Callable[..., Any]] = {
    "capitalize": lambda s: text_of(s).capitalize(),
    "center": lambda value, width=80: text_of(value).center(single(width)),
    "format": _formatted,
    "join": _join,
    "lower": lambda s: text_of(s).lower(),
    "replace": _replace,
    "safe": text_of,
    "string": text_of,
    "tojson": to_json,
    "trim": lambda value, chars=None: text_of(value).strip(single(chars)),
    "upper": lambda s: text_of(s).upper(),
    **{name: _tainting(builtin.FILTERS[name]) for name in _TAINTING},
}
"""Filters of the tracing environment, in place of Jinja's own of the same names."""

LEFT_OUT = ("urlize", "xmlattr", "striptags")
