"""Jinja's filters that make text from text, with provenance kept.

Each gives the text of the built-in filter of the same name (jinja2.filters, 3.1). Filters that only pick or
order elements (`first`, `sort`, `map`, ...) need no counterpart: the elements stay as they are.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jinja2.filters as builtin
from jinja2 import Environment, Undefined, pass_environment, pass_eval_context
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from markupsafe import Markup, escape

from mmrender.template.formatting import percent, representation, text_of
from mmrender.template.json_text import to_json
from mmrender.template.origin import Spans
from mmrender.template.traced import TracedStr, concat, derived, plain
from mmrender.template.values import traced


class TracedMarkup(TracedStr):
    """Traced text that counts as HTML: what is joined to it is escaped, as `markupsafe.Markup` does."""

    __slots__ = ()

    def __html__(self) -> Self:
        return self

    def __add__(self, other: str) -> Self:  # type: ignore[override]
        return self._joined([self, escaped(other)]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Self:
        return self._joined([escaped(other), self]) if isinstance(other, str) else NotImplemented

    def join(self, pieces: Iterable[str]) -> Self:  # type: ignore[override]
        """Join escaped `pieces`."""
        return super().join([escaped(piece) for piece in pieces])

    def replace(self, old: str, new: str, count: Any = -1, /) -> Self:  # type: ignore[override]
        """Replace `old` by escaped `new`."""
        return super().replace(old, escaped(new), count)

    def __mod__(self, values: Any) -> "TracedMarkup":  # type: ignore[override]
        if isinstance(values, tuple):
            safe: Any = tuple(_escaped_argument(value) for value in values)
        elif isinstance(values, Mapping):
            safe = {key: _escaped_argument(value) for key, value in values.items()}
        else:
            safe = _escaped_argument(values)
        return _markup(percent(self, safe))


def _escaped_argument(value: Any) -> Any:
    return escaped(value) if isinstance(value, str) else value


def _markup(value: TracedStr) -> TracedMarkup:
    return TracedMarkup(plain(value), value._spans)


def escaped(value: Any) -> TracedMarkup:
    """HTML-escaped text; markup stays as it is."""
    if isinstance(value, TracedMarkup):
        return value
    if hasattr(value, "__html__"):
        return TracedMarkup(value.__html__())
    return _markup(text_of(value).mapped(lambda text: str.__str__(str(escape(text)))))


def force_escaped(value: Any) -> TracedMarkup:
    """HTML-escaped text, markup included."""
    return _markup(TracedStr(plain(text_of(value)), text_of(value)._spans).mapped(lambda text: str(escape(text))))


def marked_safe(value: Any) -> TracedMarkup:
    """The same text, as markup."""
    return _markup(text_of(value))


def joined(value: Iterable[Any], d: str = "", attribute: str | int | None = None, *, environment: Environment) -> TracedStr:
    """Elements as text, with `d` between them."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    separator = text_of(d)
    return TracedStr(plain(separator), separator._spans).join([text_of(item) for item in value])


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> TracedStr:
    return joined(value, d, attribute, environment=environment)


def formatted(value: str, *args: Any, **kwargs: Any) -> TracedStr:
    """`value % args`."""
    if args and kwargs:
        raise builtin.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return text_of(value) % (kwargs or args)


def indented(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> TracedStr:
    """Lines with `width` spaces, or the text `width`, before each but the first."""
    indention = text_of(width) if isinstance(width, str) else TracedStr(" " * width)
    # The filter appends a newline so that a trailing one is kept by splitlines.
    lines = (text_of(s) + "\n").splitlines()
    shown = [line if index == 0 or not (line or blank) else indention + line for index, line in enumerate(lines)]
    result = TracedStr("\n").join(shown)
    return indention + result if first else result


def replaced(s: Any, old: str, new: str, count: int | None = None) -> TracedStr:
    """`s` with `old` replaced by `new`."""
    return text_of(s).replace(plain(text_of(old)), text_of(new), -1 if count is None else count)


@pass_eval_context
def _replace(eval_ctx: EvalContext, s: Any, old: str, new: str, count: int | None = None) -> TracedStr:
    return replaced(s, old, new, count)


def titled(s: Any) -> TracedStr:
    """Words in title case, by Jinja's rule: a word begins after white space, a dash or an opening bracket."""
    return text_of(s).mapped(lambda text: builtin.do_title(text))


@pass_environment
def truncated(
    environment: Environment,
    s: str,
    length: int = 255,
    killwords: bool = False,
    end: str = "...",
    leeway: int | None = None,
) -> TracedStr:
    """At most `length` characters, `end` among them."""
    text = text_of(s)
    shown = plain(builtin.do_truncate(environment, plain(text), length, killwords, plain(end), leeway))
    if len(shown) == len(text):
        return text
    return text[: len(shown) - len(end)] + end


@pass_environment
def wrapped(
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
    for line in text_of(s).splitlines():
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


def _attributes(d: Mapping[str, Any], autospace: bool = True) -> TracedStr:
    builtin.do_xmlattr(EvalContext(Environment()), {plain(key): "" for key in d})  # refuses unusable keys
    items = [
        concat([_unmarked(escaped(key)), '="', _unmarked(escaped(value)), '"'])
        for key, value in d.items()
        if value is not None and not isinstance(value, Undefined)
    ]
    text = TracedStr(" ").join(items)
    return " " + text if autospace and text else text


def _unmarked(value: TracedStr) -> TracedStr:
    return TracedStr(plain(value), value._spans)


def _url_quoted(value: Any) -> str:
    if isinstance(value, str):
        return text_of(value).mapped(builtin.do_urlencode)
    return derived(builtin.do_urlencode(value))


def _whole(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result has no map of characters: it keeps the origin of a value that has just one."""

    def call(value: Any, *args: Any, **kwargs: Any) -> TracedStr:
        return derived(str(filter_(plain(value) if isinstance(value, str) else value, *args, **kwargs)), text_of(value))

    return call


def _number(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes a number: it prints with the origin of the value it was read from."""

    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = filter_(value, *args, **kwargs)
        spans: Spans = text_of(value)._spans if isinstance(value, str) or hasattr(value, "_origin") else ()
        return traced(result, spans[0][2]) if len(spans) == 1 and type(result) in (int, float) else result

    return call


@pass_eval_context
def _urlize(eval_ctx: EvalContext, value: str, *args: Any, **kwargs: Any) -> TracedStr:
    return derived(plain(builtin.do_urlize(eval_ctx, plain(value), *args, **kwargs)), text_of(value))


def _striptags(value: Any) -> TracedStr:
    return derived(Markup(plain(text_of(value))).striptags(), text_of(value))


TEXT_FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _number(abs),
    "capitalize": lambda s: text_of(s).capitalize(),
    "center": lambda value, width=80: text_of(value).center(width),
    "e": escaped,
    "escape": escaped,
    "filesizeformat": _whole(builtin.do_filesizeformat),
    "float": _number(builtin.do_float),
    "forceescape": force_escaped,
    "format": formatted,
    "indent": indented,
    "int": _number(builtin.do_int),
    "join": _join,
    "lower": lambda s: text_of(s).lower(),
    "pprint": lambda value: representation(value) if isinstance(value, str) else _whole(builtin.do_pprint)(value),
    "replace": _replace,
    "round": _number(builtin.do_round),
    "safe": marked_safe,
    "string": text_of,
    "striptags": _striptags,
    "title": titled,
    "tojson": to_json,
    "trim": lambda value, chars=None: text_of(value).strip(chars),
    "truncate": truncated,
    "upper": lambda s: text_of(s).upper(),
    "urlencode": _url_quoted,
    "urlize": _urlize,
    "wordwrap": wrapped,
    "xmlattr": _attributes,
}
"""Filters of the tracing environment, in place of Jinja's own of the same names."""
