"""Jinja's filters that make text from text, with provenance kept.

Each gives the text of the built-in filter of the same name (jinja2.filters, 3.1). Filters that only pick or
order elements (`first`, `sort`, `map`, ...) need no counterpart: the elements stay as they are.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2.filters as builtin
from jinja2 import Environment, Undefined, pass_environment, pass_eval_context
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.utils import url_quote
from markupsafe import Markup

from mmrender.template.formatting import representation, text_of
from mmrender.template.json_text import to_json
from mmrender.template.limits import admit
from mmrender.template.markup import escaped, force_escaped, marked_safe, unmarked
from mmrender.template.traced import TracedStr, concat, derived, mapped, plain
from mmrender.template.values import is_null, traced


@pass_eval_context
def _join(
    eval_ctx: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> TracedStr:
    """Elements as text, with `d` between them."""
    if attribute is not None:
        value = map(make_attrgetter(eval_ctx.environment, attribute), value)
    if not eval_ctx.autoescape:
        return unmarked(d).join([text_of(item) for item in value])
    items = list(value)
    has_markup = any(hasattr(item, "__html__") for item in items)
    separator = escaped(d) if has_markup or hasattr(d, "__html__") else text_of(d)
    return separator.join([item if hasattr(item, "__html__") else text_of(item) for item in items])


@pass_eval_context
def _replace(eval_ctx: EvalContext, s: Any, old: str, new: str, count: int | None = None) -> TracedStr:
    """`s` with `old` replaced by `new`."""
    times = -1 if count is None else count
    if not eval_ctx.autoescape:
        return unmarked(s).replace(plain(text_of(old)), text_of(new), times)
    has_markup = hasattr(old, "__html__") or (hasattr(new, "__html__") and not hasattr(s, "__html__"))
    text = escaped(s) if has_markup else text_of(s)
    return text.replace(plain(text_of(old)), text_of(new), times)


def _formatted(value: str, *args: Any, **kwargs: Any) -> TracedStr:
    """`value % args`."""
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return text_of(value) % (kwargs or args)


def _only_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _indented(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> TracedStr:
    """Lines with `width` spaces, or the text `width`, before each but the first."""
    if not isinstance(width, str):
        admit(width)
    indention = text_of(width) if isinstance(width, str) else TracedStr(" " * width)
    text = text_of(_only_text(s))
    # The filter appends a newline so that a trailing one is kept by splitlines.
    lines = (text + "\n").splitlines()
    shown = [
        line if index == 0 or not (line or blank) else indention + line for index, line in enumerate(lines)
    ]
    result = text._like("\n", ()).join(shown)
    return indention + result if first else result


def _titled(s: Any) -> TracedStr:
    """Words in title case, by Jinja's rule: a word begins after white space, a dash or an opening bracket."""
    return unmarked(mapped(text_of(s), builtin.do_title))


@pass_environment
def _truncated(environment: Environment, s: Any, length: int = 255, *args: Any, **kwargs: Any) -> str:
    """At most `length` characters, the text that marks the cut among them."""
    if not isinstance(s, str):
        return builtin.do_truncate(environment, s, length, *args, **kwargs)
    shown = builtin.do_truncate(environment, plain(s), length, *args, **kwargs)
    text = text_of(s)
    if shown == text:
        return text
    end = text_of(args[1] if len(args) > 1 else kwargs.get("end", "..."))
    return concat([text[: len(shown) - len(end)], end])


@pass_environment
def _wrapped(  # noqa: PLR0917 - Jinja's own signature
    environment: Environment,
    s: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> TracedStr:
    """Lines of at most `width` characters; each is a slice of the text."""
    separator = text_of(environment.newline_sequence if wrapstring is None else wrapstring)
    paragraphs = []
    for line in text_of(_only_text(s)).splitlines():
        pieces = textwrap.wrap(
            plain(line),
            width=width,
            expand_tabs=False,
            replace_whitespace=False,
            break_long_words=break_long_words,
            break_on_hyphens=break_on_hyphens,
        )
        paragraphs.append(separator.join(line._slices(pieces)))
    return separator.join(paragraphs)


@pass_eval_context
def _attributes(eval_ctx: EvalContext, d: Mapping[str, Any], autospace: bool = True) -> TracedStr:
    """Attributes of an XML element."""
    shown = {
        key: value for key, value in d.items() if not is_null(value) and not isinstance(value, Undefined)
    }
    builtin.do_xmlattr(eval_ctx, dict.fromkeys(shown, ""))  # refuses unusable keys
    items = [
        concat([unmarked(escaped(key)), '="', unmarked(escaped(value)), '"']) for key, value in shown.items()
    ]
    text = TracedStr(" ").join(items)
    spaced = " " + text if autospace and text else text
    return marked_safe(spaced) if eval_ctx.autoescape else spaced


def _url_quoted(value: Any) -> TracedStr:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return mapped(text_of(value), builtin.do_urlencode)
    pairs = value.items() if isinstance(value, Mapping) else value
    quoted = [concat([_query_quoted(key), "=", _query_quoted(item)]) for key, item in pairs]
    return TracedStr("&").join(quoted)


def _query_quoted(value: Any) -> TracedStr:
    return mapped(text_of(value), lambda text: url_quote(text, for_qs=True))


def _whole(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result has no map of characters: it keeps the origin of a value that has just one."""

    def call(value: Any, *args: Any, **kwargs: Any) -> TracedStr:
        given = plain(value) if isinstance(value, str) else value
        return derived(str(filter_(given, *args, **kwargs)), text_of(value))

    return call


def _number(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes a number: it prints with the origin of the value it was read from."""

    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = filter_(value, *args, **kwargs)
        spans = text_of(value)._spans if isinstance(value, str) or hasattr(value, "_origin") else ()
        return traced(result, spans[0][2]) if len(spans) == 1 and type(result) in (int, float) else result

    return call


@pass_eval_context
def _urlize(eval_ctx: EvalContext, value: Any, *args: Any, **kwargs: Any) -> TracedStr:
    given = plain(value) if isinstance(value, str) else value
    text = derived(plain(builtin.do_urlize(eval_ctx, given, *args, **kwargs)), text_of(value))
    return marked_safe(text) if eval_ctx.autoescape else text


def _striptags(value: Any) -> TracedStr:
    text = text_of(value)
    return derived(Markup(plain(text)).striptags(), text)  # noqa: S704 - the tags are taken out


def _pretty(value: Any) -> TracedStr:
    shown = representation(value)
    text = builtin.do_pprint(plain(value) if isinstance(value, str) else value)
    return shown if text == shown else derived(text, text_of(value))


TEXT_FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _number(abs),
    "capitalize": lambda s: text_of(s).capitalize(),
    "center": lambda value, width=80: text_of(value).center(width),
    "e": escaped,
    "escape": escaped,
    "filesizeformat": _whole(builtin.do_filesizeformat),
    "float": _number(builtin.do_float),
    "forceescape": force_escaped,
    "format": _formatted,
    "indent": _indented,
    "int": _number(builtin.do_int),
    "join": _join,
    "lower": lambda s: text_of(s).lower(),
    "pprint": _pretty,
    "replace": _replace,
    "round": _number(builtin.do_round),
    "safe": marked_safe,
    "string": text_of,
    "striptags": _striptags,
    "title": _titled,
    "tojson": to_json,
    "trim": lambda value, chars=None: text_of(value).strip(chars),
    "truncate": _truncated,
    "upper": lambda s: text_of(s).upper(),
    "urlencode": _url_quoted,
    "urlize": _urlize,
    "wordwrap": _wrapped,
    "xmlattr": _attributes,
}
"""Filters of the tracing environment, in place of Jinja's own of the same names."""
