"""Jinja's filters that make text, with provenance kept or tainted.

Each gives the text of the built-in filter of the same name (jinja2.filters, 3.1). Filters that only pick or
order elements (`first`, `map`, ...) need no counterpart: the elements stay as they are. HTML is left out:
`safe` changes nothing, `escape` gives plain text, and `urlize`, `xmlattr` and `striptags` do not exist.
"""

import json
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2.filters as builtin
from jinja2 import Environment, pass_environment
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import make_attrgetter

from mmrender.template.limits import PER_ELEMENT, bounded, grow, weigh
from mmrender.template.text import TracedStr, plain, tainted, text_of
from mmrender.template.values import TracedNull, untraced

_MAX_INDENT = 1000


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> TracedStr:
    """Elements as text, with `d` between them."""
    if isinstance(value, str):
        grow(PER_ELEMENT * len(value))
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


def _indented(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> TracedStr:
    """Lines with `width` spaces, or the text `width`, before each but the first."""
    if not isinstance(s, str):
        raise TypeError(f"expected text, got {type(s).__name__}")
    if not isinstance(width, str):
        grow(PER_ELEMENT * width)
        width = " " * width
    # The filter appends a newline so that a trailing one is kept by splitlines.
    lines = (text_of(s) + "\n").splitlines()
    shown = [line if not number or not (line or blank) else width + line for number, line in enumerate(lines)]
    text = TracedStr("\n").join(shown)
    return width + text if first else text


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> TracedStr:
    """Dump as the `tojson` filter of Transformers does: no HTML escapes, non-ASCII text kept."""
    weigh(value)
    grow(2 * len(value) if isinstance(value, str) else 0)
    wide = indent if isinstance(indent, int) else len(indent or "")
    if max(wide, *map(len, separators or ("", ""))) > _MAX_INDENT:
        grow(1 << 60)
    indent = None if isinstance(indent, TracedNull) else indent
    text = json.dumps(
        untraced(value),
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators or None,
        sort_keys=bool(sort_keys),
    )
    return tainted(text, value)


def _tainting(filter_: Callable[..., Any], cost: int = 8) -> Callable[..., Any]:
    """Wrap a built-in filter of text; it takes its time for each character, so it gets less text."""
    first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, *others = args[first:]
        shown = text_of(value)
        grow(cost * len(shown))
        for argument in (*others, *kwargs.values()):
            if isinstance(argument, int):
                grow(PER_ELEMENT * abs(argument))
            elif isinstance(argument, str):
                grow(len(shown) * len(argument))
        given = plain(value) if isinstance(value, str) else value
        others = [None if isinstance(argument, TracedNull) else argument for argument in others]
        result = str(filter_(*args[:first], given, *others, **kwargs))
        return shown if result == shown else tainted(result, value, args[first + 1 :], kwargs)

    return call


def _sum(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `sum`: adding lists up copies what was added before, so few are added."""

    @wraps(filter_)
    def call(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            iterable = map(make_attrgetter(environment, attribute), iterable)
        items = list(iterable)
        lists = [len(item) for item in items if isinstance(item, list | tuple)]
        grow(sum(lists) * len(lists))
        return filter_(environment, items, start=start)

    return call


def _titled(value: Any) -> TracedStr:
    """Words in title case, by Jinja's rule: a word begins after white space, a dash or an opening bracket."""
    text = text_of(value)
    grow(8 * len(text))
    return text.changed(builtin.do_title(plain(text)))


def _strip(value: Any, chars: Any = None) -> TracedStr:
    return text_of(value).strip(None if isinstance(chars, TracedNull) else chars)


FILTERS: dict[str, Callable[..., Any]] = {
    "capitalize": lambda s: text_of(s).capitalize(),
    "format": _formatted,
    "indent": _indented,
    "join": _join,
    "lower": lambda s: text_of(s).lower(),
    "replace": _replace,
    "safe": text_of,
    "string": text_of,
    "sum": _sum(builtin.do_sum),
    "title": _titled,
    "tojson": to_json,
    "trim": _strip,
    "upper": lambda s: text_of(s).upper(),
    **{
        name: _tainting(builtin.FILTERS[name])
        for name in (
            "center",
            "e",
            "escape",
            "filesizeformat",
            "forceescape",
            "pprint",
            "truncate",
            "urlencode",
        )
    },
    "wordwrap": _tainting(builtin.FILTERS["wordwrap"], cost=128),
    **{
        name: bounded(builtin.FILTERS[name])
        for name in (
            *("batch", "dictsort", "groupby", "list", "max", "min", "reverse", "round", "slice", "sort"),
            *("unique", "wordcount"),
        )
    },
}
"""Filters of the tracing environment, in place of Jinja's own of the same names."""

LEFT_OUT = ("urlize", "xmlattr", "striptags")
