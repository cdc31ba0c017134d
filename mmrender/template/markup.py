"""Text that counts as HTML: what the filters `escape` and `safe` give, with provenance kept."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from markupsafe import escape

from mmrender.template.formatting import TracingFormatter, percent, text_of
from mmrender.template.traced import TracedStr, mapped, plain


class TracedMarkup(TracedStr):
    """Traced text to which everything is joined escaped, as `markupsafe.Markup` does."""

    __slots__ = ()

    def __html__(self) -> Self:
        return self

    def __iter__(self) -> Iterator[Any]:
        # `Markup` leaves this to `str`, whose characters are no markup.
        return (unmarked(char) for char in super().__iter__())

    def __add__(self, other: Any) -> Self:
        return self._joined([self, escaped(other)]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Self:
        return self._joined([escaped(other), self]) if isinstance(other, str) else NotImplemented

    def __mod__(self, values: Any) -> "TracedMarkup":
        if isinstance(values, tuple):
            safe: Any = tuple(_argument(value) for value in values)
        elif isinstance(values, Mapping):
            safe = {key: _argument(value) for key, value in values.items()}
        else:
            safe = _argument(values)
        return marked_safe(percent(self, safe))

    def join(self, pieces: Iterable[Any]) -> Self:
        """Join escaped `pieces`."""
        return super().join([escaped(piece) for piece in pieces])

    def replace(self, old: str, new: str, count: Any = -1, /) -> Self:
        """Replace `old` by escaped `new`."""
        return super().replace(old, escaped(new), count)

    def _padded(self, pad: Callable[..., str], width: Any, fill: str, share: float) -> Self:
        return super()._padded(pad, width, escaped(fill), share)

    def format(self, *args: Any, **kwargs: Any) -> "TracedMarkup":
        """Format with escaped values."""
        return marked_safe(TracingFormatter(escape=escaped).traced(self, args, kwargs))

    def format_map(self, mapping: Any, /) -> "TracedMarkup":
        """Format with the escaped values of `mapping`."""
        return marked_safe(TracingFormatter(escape=escaped).traced(self, (), mapping))


def _argument(value: Any) -> Any:
    return value if isinstance(value, int | float) else escaped(value)


def _escape(text: str) -> str:
    return str.__str__(str(escape(text)))


def escaped(value: Any) -> TracedMarkup:
    """HTML-escaped text; markup stays as it is."""
    if isinstance(value, TracedMarkup):
        return value
    if hasattr(value, "__html__"):
        return TracedMarkup(value.__html__())
    return marked_safe(mapped(text_of(value), _escape))


def force_escaped(value: Any) -> TracedMarkup:
    """HTML-escaped text, markup included."""
    return marked_safe(mapped(unmarked(value), _escape))


def marked_safe(value: Any) -> TracedMarkup:
    """The same text, as markup."""
    text = text_of(value)
    return text if isinstance(text, TracedMarkup) else TracedMarkup(plain(text), text._spans)


def unmarked(value: Any) -> TracedStr:
    """The same text, as no markup."""
    text = text_of(value)
    return TracedStr(plain(text), text._spans) if isinstance(text, TracedMarkup) else text
