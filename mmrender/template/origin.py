"""Where a piece of rendered text came from: a message and a field of it.

An `Origin` is made once for each value that a caller passed, and compared by identity, so that adjacent
pieces of the same value coalesce into one span.
"""

from typing import Literal, TypeAlias

from mmrender.messages import Role

Kind: TypeAlias = Literal[
    "content",  # text parts
    "reasoning",  # reasoning_content and thinking parts
    "tool_call",  # name, arguments and id of a call
    "name",  # the message's name and tool_call_id
    "extra",  # keys that belong to no standard
    "tools",  # tool definitions
    "documents",  # retrieved documents and other template arguments
    "role",  # the role's own text
    "scaffold",  # written by the template while it handled the message
]

SCAFFOLD_KINDS: frozenset[Kind] = frozenset({"role", "scaffold"})


class Origin:
    """The value that a piece of text was made from.

    Attributes:
        message: Index of the message, or -1 for tool definitions and documents.
        role: Role of that message, or None where there is no message.
        kind: Which field, see `Kind`.
        path: For people: `messages[2].content[1].text`.
        scaffold: For a value of a message, the origin of what the template writes around that message.
    """

    __slots__ = ("is_content", "kind", "message", "path", "role", "scaffold")

    def __init__(
        self, message: int, role: Role | None, kind: Kind, path: str, scaffold: "Origin | None" = None
    ) -> None:
        self.message = message
        self.role = role
        self.kind = kind
        self.path = path
        self.scaffold = scaffold
        self.is_content = kind not in SCAFFOLD_KINDS

    def __repr__(self) -> str:
        return f"Origin({self.path}, {self.kind})"


Span: TypeAlias = tuple[int, int, Origin]
"""`(start, stop, origin)` in characters; text between spans is the template's, outside any message."""
Spans: TypeAlias = tuple[Span, ...]
"""Spans in rising order, without overlap."""
NO_SPANS: Spans = ()


def clip(spans: Spans, start: int, stop: int) -> Spans:
    """Spans of the slice `[start, stop)`, relative to its start."""
    if not spans or start >= stop:
        return NO_SPANS
    if len(spans) == 1:
        low, high, origin = spans[0]
        low = max(low, start)
        high = min(high, stop)
        return ((low - start, high - start, origin),) if low < high else NO_SPANS
    return tuple(
        (max(low, start) - start, min(high, stop) - start, origin)
        for low, high, origin in spans
        if low < stop and high > start
    )


def append(spans: list[Span], more: Spans, shift: int) -> None:
    """Append `more`, moved by `shift`, to a growing list, coalescing where two pieces of one value meet."""
    for low, high, origin in more:
        start = low + shift
        if spans and spans[-1][1] == start and spans[-1][2] is origin:
            spans[-1] = (spans[-1][0], high + shift, origin)
        else:
            spans.append((start, high + shift, origin))


def sole_origin(spans: Spans, length: int) -> Origin | None:
    """The one origin of all `length` characters, or None where there are several or none."""
    if len(spans) == 1 and spans[0][0] == 0 and spans[0][1] == length:
        return spans[0][2]
    return None


def stepped(spans: Spans, start: int, stop: int, step: int) -> Spans:
    """Spans of the characters `start, start + step, ...` before `stop`, relative to the first of them."""
    count = len(range(start, stop, step))
    found: list[Span] = []
    for low, high, origin in spans if step > 0 else reversed(spans):
        # The indices whose character `start + index * step` lies in [low, high).
        near, far = (low, high - 1) if step > 0 else (high - 1, low)
        first = max(0, -((start - near) // step) if step > 0 else -((near - start) // -step))
        last = min(count - 1, (far - start) // step)
        if first <= last:
            append(found, ((first, last + 1, origin),), 0)
    return tuple(found)
