"""Attribution of scaffold to the message that the template was handling.

The template's own loop over the messages says so. Each `for` body begins with a mark that carries the message
of this iteration, if the loop runs over messages, and the loop is followed by a mark that ends it. Where a
loop runs over something else (indices, say), the values that an iteration prints say whose it is; where it
prints none, the message that it looked up with `{% set message = messages[i] %}`.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

from jinja2 import nodes

from mmrender.template.limits import BUDGET, grow
from mmrender.template.text import Origin, Span, TracedStr

MarkKind: TypeAlias = Literal["enter", "look", "leave"]
Mark: TypeAlias = tuple[int, MarkKind, Origin | None]
"""Number of a loop; whether an iteration begins, looked a message up, or was the last; and that message."""


class MessageDict(dict[str, Any]):
    """A message as a template sees it; `_owner` is the origin of the scaffold around it."""

    __slots__ = ("_owner",)
    _owner: Origin


def instrument(tree: nodes.Template) -> nodes.Template:
    """Put marks into every loop of a parsed template."""
    _mark_bodies(tree, None, [0])
    return tree


def _mark_bodies(node: nodes.Node, loop: int | None, count: list[int]) -> None:
    """Mark the loops inside `node`, which lies in loop number `loop`; `count` numbers them."""
    for _, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for child in [child for child in children if isinstance(child, nodes.Node)]:
            if isinstance(child, nodes.For):
                count[0] += 1
                number = count[0]
                _mark_bodies(child, number, count)
                target = child.target if isinstance(child.target, nodes.Name) else None
                child.body.insert(0, _mark(number, "enter", target, child))
                value.insert(_place(value, child) + 1, _mark(number, "leave", None, child))
            else:
                inside = None if isinstance(child, nodes.Macro | nodes.CallBlock) else loop
                _mark_bodies(child, inside, count)
                if isinstance(child, nodes.Assign) and inside is not None and _looks_up(child):
                    value.insert(_place(value, child) + 1, _mark(inside, "look", child.target, child))


def _place(body: list[nodes.Node], node: nodes.Node) -> int:
    # By identity: nodes compare by value.
    return next(index for index, item in enumerate(body) if item is node)


def _looks_up(node: nodes.Assign) -> bool:
    """Whether `{% set name = sequence[index] %}`, with an index that is not a key."""
    source = node.node
    if not isinstance(node.target, nodes.Name) or not isinstance(source, nodes.Getitem):
        return False
    return not isinstance(source.arg, nodes.Slice) and not (
        isinstance(source.arg, nodes.Const) and isinstance(source.arg.value, str)
    )


def _mark(loop: int, kind: MarkKind, shown: nodes.Expr | None, near: nodes.Node) -> nodes.Output:
    value = nodes.Name(shown.name, "load") if isinstance(shown, nodes.Name) else nodes.Const(None)
    output = nodes.Output([value], lineno=near.lineno)
    output.mark = (loop, kind)  # type: ignore[attr-defined]
    return output


class _Stretch(NamedTuple):
    """Text from character `start` and span number `span` on, written by one iteration of a loop."""

    loop: int
    start: int
    span: int
    looked_up: list[Origin]


class Joiner:
    """Joins what a macro, a block or (`root`) a whole template wrote, once.

    Scaffold between marks belongs to the message being handled. Templates often write the system turn before
    their loop: in a whole template, a stretch outside any message loop that holds the values of exactly one
    message is that message's turn; a stretch without any keeps no owner.
    """

    def __init__(self, *, root: bool = False) -> None:
        self._held: list[str] = []
        self._spans: list[Span] = []
        self._position = 0
        self._owners: dict[int, Origin] = {}
        self._owner: Origin | None = None
        self._gap = 0  # where the owner's text without origin of its own begins
        self._open: list[_Stretch] = []
        # Text outside all loops over messages, since the last of them.
        self._outside: tuple[int, int] | None = (0, 0) if root else None

    def join(self, pieces: Iterable[str | Mark]) -> TracedStr:
        """Lay pieces out one after the other, each with the scaffold origin of its message."""
        budget = BUDGET.get()
        limit = budget.limits.max_characters if budget is not None else 1 << 60
        hold = self._held.append
        for piece in pieces:
            if type(piece) is str:
                hold(piece)
                self._position += len(piece)
            elif type(piece) is tuple:
                self._mark(*piece)
            elif piece:
                hold(piece)  # type: ignore[arg-type]
                position, owner, laid = self._position, self._owner, self._spans
                for low, high, origin in piece.spans:  # type: ignore[union-attr]
                    start = low + position
                    if owner is not None and self._gap < start:
                        self._push(self._gap, start, owner)
                    self._gap = high + position
                    if laid and laid[-1][1] == start and laid[-1][2] is origin:
                        start = laid.pop()[0]
                    laid.append((start, self._gap, origin))
                self._position += len(piece)
            if self._position > limit:
                grow(self._position)
        self._flush()
        while self._open:
            self._close(self._open.pop())
        self._own_outside(self._position, len(self._spans))
        grow(self._position)
        return TracedStr("".join(self._held), tuple(self._spans))

    def _push(self, start: int, stop: int, origin: Origin) -> None:
        spans = self._spans
        if spans and spans[-1][1] == start and spans[-1][2] is origin:
            start = spans.pop()[0]
        spans.append((start, stop, origin))

    def _flush(self) -> None:
        if self._owner is not None and self._gap < self._position:
            self._push(self._gap, self._position, self._owner)
        self._gap = self._position

    def _mark(self, loop: int, kind: MarkKind, origin: Origin | None) -> None:
        if kind == "look":
            if origin is not None and self._open and self._open[-1].loop == loop:
                self._open[-1].looked_up.append(origin)
            return
        self._flush()
        if self._open and self._open[-1].loop == loop:
            self._close(self._open.pop())
        if origin is not None:
            self._owners[loop] = origin
        else:
            self._owners.pop(loop, None)
        owner = next(reversed(self._owners.values()), None)
        if self._outside is not None and (owner is None) != (self._owner is None):
            if owner is not None:
                self._own_outside(self._position, len(self._spans))
            else:
                self._outside = self._position, len(self._spans)
        self._owner = owner
        if kind == "enter" and owner is None:
            self._open.append(_Stretch(loop, self._position, len(self._spans), []))

    def _close(self, stretch: _Stretch) -> None:
        """Give an iteration's text to the one message whose values it holds, or that it looked up."""
        if stretch.start == self._position:
            return
        owner = self._sole_message(stretch.span, len(self._spans))
        if owner is None and not any(span[2].message >= 0 for span in self._spans[stretch.span :]):
            looked_up = set(stretch.looked_up)
            owner = looked_up.pop() if len(looked_up) == 1 else None
        if owner is not None:
            self._own(stretch.start, stretch.span, self._position, owner)
            self._own_outside(stretch.start, stretch.span)
            if self._outside is not None:
                self._outside = self._position, len(self._spans)

    def _own_outside(self, stop: int, last: int) -> None:
        """Give text outside all loops to the one message whose values it holds, such as a system turn."""
        if self._outside is not None:
            start, index = self._outside
            owner = self._sole_message(index, last)
            if owner is not None:
                after = self._spans[last:]
                del self._spans[last:]
                self._own(start, index, stop, owner)
                self._spans += after

    def _sole_message(self, first: int, last: int) -> Origin | None:
        """Scaffold origin of the one message that the spans from `first` to `last` belong to."""
        found = {origin.message: origin for _, _, origin in self._spans[first:last] if origin.message >= 0}
        if len(found) != 1:
            return None
        origin = next(iter(found.values()))
        return origin if origin.kind == "scaffold" else origin.scaffold

    def _own(self, start: int, index: int, stop: int, owner: Origin) -> None:
        """Give the gaps from character `start` and span number `index` on to `owner`."""
        inside = self._spans[index:]
        del self._spans[index:]
        if self._spans:
            start = max(start, self._spans[-1][1])
        for low, high, origin in inside:
            if start < low:
                self._push(start, low, owner)
            self._push(low, high, origin)
            start = high
        if start < stop:
            self._push(start, stop, owner)
