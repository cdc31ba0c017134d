"""`TracedStr`: a `str` whose characters remember the value they came from.

Slicing, stripping, splitting, replacing, joining and concatenating keep the spans. If an operation cannot
keep characters apart, its result is tainted: it counts as content as a whole, never as syntax (law 7).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, Literal, Self, SupportsIndex, TypeAlias

from jinja2.utils import Namespace

from mmrender.messages import Role
from mmrender.template.limits import LONG, grow

Kind: TypeAlias = Literal[
    "content",  # text parts
    "reasoning",  # reasoning_content and thinking parts
    "tool_call",  # name, arguments and id of a call
    "name",  # the message's name and tool_call_id
    "extra",  # keys that belong to no standard
    "tools",  # tool definitions
    "documents",  # retrieved documents and other template variables
    "role",  # the role's own text
    "scaffold",  # written by the template while it handled the message
]
Author: TypeAlias = Role | Literal["caller"]
"""Author of content: a message's role, or the caller, who passes tool definitions, documents, template
variables, names and tool-call arguments."""

_SCAFFOLD: frozenset[Kind] = frozenset({"role", "scaffold"})
_BY_CALLER: frozenset[Kind] = frozenset({"tools", "documents", "name", "tool_call"})


class Origin:
    """The value that a piece of text was made from; compared by identity.

    Attributes:
        message: Index of the message, or -1 for tool definitions, documents and template variables.
        role: Role of the message, or None without one.
        kind: Kind of the field.
        path: Path for people, such as `messages[2].content[1].text`.
        scaffold: For a value of a message, the origin of the template text around the message.
        part: For the template text of a media part, the part's index in the content, or -1.
        is_content: Whether a caller or the model wrote the text, not the template.
        author: Author whose rule decides about special tokens in this content.
    """

    __slots__ = ("author", "is_content", "kind", "message", "part", "path", "role", "scaffold")

    def __init__(
        self,
        message: int,
        role: Role | None,
        kind: Kind,
        path: str,
        scaffold: "Origin | None" = None,
        *,
        part: int = -1,
    ) -> None:
        self.message = message
        self.role = role
        self.kind = kind
        self.path = path
        self.scaffold = scaffold
        self.part = part
        self.is_content = kind not in _SCAFFOLD
        self.author: Author = "caller" if role is None or kind in _BY_CALLER else role

    def __repr__(self) -> str:
        return f"Origin({self.path}, {self.kind})"


SEVERAL = Origin(-1, None, "content", "several messages")
"""Origin of tainted text that was made from several messages."""

Span: TypeAlias = tuple[int, int, Origin]
"""`(start, stop, origin)` in characters. The template wrote the text between spans, outside any message."""
Spans: TypeAlias = tuple[Span, ...]
"""Spans in rising order, without overlap."""


def clip(spans: Spans, start: int, stop: int) -> Spans:
    """Return the spans of the slice `[start, stop)`, relative to its start."""
    if not spans or start >= stop:
        return ()
    if len(spans) == 1:
        low, high, origin = spans[0]
        low, high = max(low, start), min(high, stop)
        return ((low - start, high - start, origin),) if low < high else ()
    return tuple(
        [
            ((low if low > start else start) - start, (high if high < stop else stop) - start, origin)
            for low, high, origin in spans
            if low < stop and high > start
        ]
    )


def _cased(method: Callable[[str], str]) -> Any:
    """A case mapping that keeps spans if the length stays, and else taints."""

    def cased(self: "TracedStr") -> "TracedStr":
        text = method(self)
        return TracedStr(text, self.spans) if len(text) == len(self) else tainted(text, self)

    return cased


def _padded(method: Callable[..., str]) -> Any:
    """A method that pads to a width, tainted."""

    def padded(self: "TracedStr", width: SupportsIndex, *fill: str) -> "TracedStr":
        grow(index(width))
        return tainted(method(self, width, *fill), self, fill)

    return padded


class Proxy:
    """Base of other values than text that remember their origin."""

    __slots__ = ()
    _origin: Origin


class TracedStr(str):
    """A `str` with spans `(start, stop, origin)`.

    Args:
        text: The characters.
        spans: Rising, without overlap. The template wrote the text that spans do not cover.
    """

    __slots__ = ("spans",)
    spans: Spans

    def __new__(cls, text: str = "", spans: Spans = ()) -> Self:  # noqa: D102 - described by the class
        self = str.__new__(cls, text)
        self.spans = spans
        return self

    @classmethod
    def whole(cls, text: str, origin: Origin) -> Self:
        """Build text that came from one value."""
        self = str.__new__(cls, text)  # without the call of `__new__`, since each value of a request is one
        self.spans = ((0, len(text), origin),) if text else ()
        return self

    def _cut(self, start: int, stop: int) -> Self:
        if start == 0 and stop == len(self):
            return self
        return type(self)(str.__getitem__(self, slice(start, stop)), clip(self.spans, start, stop))

    def __str__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__str__(self),)

    def __getitem__(self, key: SupportsIndex | slice) -> "TracedStr":
        if not isinstance(key, slice):
            start = index(key) + (len(self) if index(key) < 0 else 0)
            return TracedStr(str.__getitem__(self, key), clip(self.spans, start, start + 1))
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, max(start, stop))
        return tainted(str.__getitem__(self, key), self)

    def __iter__(self) -> Iterator["TracedStr"]:
        return (self[i] for i in range(len(self)))

    # Joining and replacing: pieces keep their spans.

    def __add__(self, other: Any) -> "TracedStr":
        if type(other) is str:
            grow(len(self) + len(other))
            return TracedStr(str.__add__(self, other), self.spans)
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> "TracedStr":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "TracedStr":
        times = max(index(count), 0)
        grow(len(self) * times)
        return concat([self] * times) if self.spans else TracedStr(str.__mul__(self, times))

    __rmul__ = __mul__

    def join(self, pieces: Iterable[str]) -> "TracedStr":
        """Join `pieces`, which must all be strings, with this text between them."""
        items = list(pieces)
        for number, piece in enumerate[Any](items):
            if not isinstance(piece, str):
                kind = type(piece).__name__
                raise TypeError(f"sequence item {number}: expected str instance, {kind} found")
        if not self:
            return concat(items)
        separated: list[str] = [self] * (2 * len(items) - 1)
        separated[::2] = items
        return concat(separated)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "TracedStr":
        """Replace `old` by `new`, which keeps its origin."""
        str.replace(self, old, new, 0)  # refuses arguments that are not text
        matches = str.count(self, old)
        times = index(count) if 0 <= index(count) < matches else matches
        if times == 0:
            return self
        grow(len(self) + times * (len(new) - len(old)))
        if old:
            return TracedStr.join(text_of(new), self.split(old, times))
        # An empty text occurs between all characters.
        places = [0, *range(times), len(self)]
        return TracedStr.join(text_of(new), [self._cut(*place) for place in pairwise(places)])

    # Trimming and splitting: every result is a slice.

    def lstrip(self, chars: str | None = None, /) -> Self:
        """Slice without leading `chars`."""
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Self:
        """Slice without trailing `chars`."""
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> Self:
        """Slice without leading and trailing `chars`."""
        kept = len(str.rstrip(self, chars))
        return self._cut(min(kept, len(self) - len(str.lstrip(self, chars))), kept)

    def removeprefix(self, prefix: str, /) -> Self:
        """Slice without `prefix`."""
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> Self:
        """Slice without `suffix`."""
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(  # type: ignore[override]
        self, sep: str | None = None, maxsplit: SupportsIndex = -1
    ) -> list[Self]:
        """Split as `str.split` does, into slices."""
        return self._separated(str.split(self, sep, maxsplit), sep)

    def rsplit(  # type: ignore[override]
        self, sep: str | None = None, maxsplit: SupportsIndex = -1
    ) -> list[Self]:
        """Split as `str.rsplit` does, into slices."""
        return self._separated(str.rsplit(self, sep, maxsplit), sep)

    def _separated(self, pieces: Iterable[str], sep: str | None) -> list[Self]:
        cuts, position = [], 0
        for piece in pieces:
            start = str.index(self, piece, position) if sep is None else position
            cuts.append(self._cut(start, start + len(piece)))
            position = start + len(piece) + len(sep or "")
        return cuts

    def splitlines(self, keepends: bool = False) -> list[Self]:  # type: ignore[override]
        """Split at line ends, into slices."""
        cuts, position = [], 0
        for line, text in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            cuts.append(self._cut(position, position + len(text)))
            position += len(line)
        return cuts

    def partition(self, sep: str, /) -> tuple[Self, Self, Self]:
        """Split at the first `sep`."""
        before, middle, after = self._separated(str.partition(self, sep), "")
        return before, middle, after

    def rpartition(self, sep: str, /) -> tuple[Self, Self, Self]:
        """Split at the last `sep`."""
        before, middle, after = self._separated(str.rpartition(self, sep), "")
        return before, middle, after

    # Case: spans stay if the length stays.

    lower = _cased(str.lower)
    upper = _cased(str.upper)
    casefold = _cased(str.casefold)
    swapcase = _cased(str.swapcase)
    title = _cased(str.title)
    capitalize = _cased(str.capitalize)

    # Padding and formatting: the result is tainted. Methods that the sandbox hides or replaces stay as in
    # `str`.

    ljust = _padded(str.ljust)
    rjust = _padded(str.rjust)
    center = _padded(str.center)
    zfill = _padded(str.zfill)

    def __mod__(self, values: Any) -> "TracedStr":
        return percent(self, values)


def concat(pieces: Iterable[str]) -> TracedStr:
    """Join pieces of text with their spans; adjacent pieces of one value become one span."""
    return TracedStr(*lay_out(pieces if isinstance(pieces, list | tuple) else list(pieces)))


def lay_out(pieces: Sequence[str]) -> tuple[str, Spans]:
    """Join pieces into one text and its spans."""
    spans: list[Span] = []
    position = 0
    for piece in pieces:
        if isinstance(piece, TracedStr):
            for low, high, origin in piece.spans:
                start = low + position
                if spans and spans[-1][1] == start and spans[-1][2] is origin:
                    start = spans.pop()[0]
                spans.append((start, high + position, origin))
        position += len(piece)
    if position > LONG:
        grow(position)
    return "".join(pieces), tuple(spans)


plain: Callable[[str], str] = str.__str__
"""Returns the characters alone, as a plain `str`."""


def tainted(text: str, *sources: Any) -> TracedStr:
    """Return text that was computed from `sources` without a map of characters.

    If any source has content, all of the text is content. Its origin is one of theirs, the caller's before
    the message's own, or `SEVERAL` if they belong to several messages.
    """
    grow(len(text))
    origins = dict.fromkeys(_origins_in(sources))
    content = [origin for origin in origins if origin.is_content]
    if not content:
        return TracedStr.whole(text, next(iter(origins))) if len(origins) == 1 else TracedStr(text)
    if len({origin.message for origin in content}) > 1:
        return TracedStr.whole(text, SEVERAL)
    by_caller = (origin for origin in content if origin.author == "caller")
    return TracedStr.whole(text, next(by_caller, content[0]))


def _origins_in(value: Any) -> Iterator[Origin]:
    """Yield the origins of all text and numbers in a value."""
    stack, seen = [value], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, TracedStr):
            yield from (origin for _, _, origin in item.spans)
        elif isinstance(item, Proxy):
            yield item._origin
        elif isinstance(item, _PRINTED_BY_ELEMENT) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            elif isinstance(item, Mapping):
                stack += [*item.values(), *item.keys()][::-1]
            else:
                stack += reversed(list(item))


_VIEWS: Any = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))  # type: ignore[var-annotated]
_PRINTED_BY_ELEMENT: Any = (dict, list, tuple, Namespace, *_VIEWS)
"""Types that print the `repr` of their elements."""


def text_of(value: Any) -> TracedStr:
    """Return `str(value)` with provenance; a container's text is tainted by its elements."""
    if isinstance(value, TracedStr):
        return value
    if isinstance(value, _PRINTED_BY_ELEMENT):
        return tainted(str(value), value)
    text = str(value)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def percent(template: str, values: Any) -> TracedStr:
    """Return `template % values`, tainted."""
    return tainted(str.__mod__(plain(template), values), template, values)
