"""Which message the template was handling when it wrote a piece of scaffold.

The template's own loop over the messages says so. Each `for` body begins with a marker that carries the
message of this iteration, if the loop runs over messages, and the loop is followed by a marker that ends
it. Markers are empty text; `concat` consumes them and gives the text between them a scaffold origin.
"""

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes

from mmrender.template.origin import Origin, Span, Spans, append, clip
from mmrender.template.traced import TracedStr, plain, spans_of

ENTER = "mmrender_enter"
LEAVE = "mmrender_leave"


class Marker(TracedStr):
    """Empty text that begins (`origin` given) or ends the handling of a message by one loop."""

    __slots__ = ("loop", "origin")
    loop: int
    origin: Origin | None

    @classmethod
    def of(cls, loop: int, origin: Origin | None) -> "Marker":
        """Build the marker of loop number `loop`."""
        marker = cls("")
        marker.loop = loop
        marker.origin = origin
        return marker


def scaffold_origin(value: Any) -> Origin | None:
    """The scaffold origin of a message, read from its role; None for anything else."""
    if not isinstance(value, dict):
        return None
    role = value.get("role")
    if not isinstance(role, TracedStr) or not role._spans:
        return None
    return getattr(role._spans[0][2], "scaffold", None)


def instrument(tree: nodes.Template) -> nodes.Template:
    """Put markers into every loop of a parsed template."""
    count = 0
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for _, value in parent.iter_fields():
            if isinstance(value, list) and any(isinstance(item, nodes.For) for item in value):
                count = _mark_loops(value, count)
    return tree


def _mark_loops(body: list[nodes.Node], count: int) -> int:
    marked: list[nodes.Node] = []
    for node in body:
        marked.append(node)
        if isinstance(node, nodes.For):
            target = node.target
            shown: nodes.Expr = (
                nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else nodes.Const(None)
            )
            node.body.insert(0, _output(ENTER, shown, count, node))
            marked.append(_output(LEAVE, nodes.Const(None), count, node))
            count += 1
    body[:] = marked
    return count


def _output(filter_name: str, value: nodes.Expr, loop: int, near: nodes.Node) -> nodes.Output:
    marker = nodes.Filter(value, filter_name, [nodes.Const(loop)], [], None, None)
    return nodes.Output([marker]).set_lineno(near.lineno)


class _Joiner:
    """Lays pieces out one after the other, each with the scaffold origin of the message being handled."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.spans: list[Span] = []
        self.position = 0
        self._owners: dict[int, Origin] = {}
        self.owner: Origin | None = None

    def mark(self, marker: Marker) -> None:
        if marker.origin is None:
            self._owners.pop(marker.loop, None)
        else:
            self._owners[marker.loop] = marker.origin
        self.owner = next(reversed(self._owners.values())) if self._owners else None

    def add(self, piece: str) -> None:
        if self.owner is None:
            append(self.spans, spans_of(piece), self.position)
        elif type(piece) is str:
            append(self.spans, ((0, len(piece), self.owner),), self.position)
        else:
            append(self.spans, _filled(spans_of(piece), 0, len(piece), self.owner), self.position)
        self.held.append(piece)
        self.position += len(piece)

    def result(self) -> TracedStr:
        return TracedStr("".join(self.held), tuple(self.spans))


def concat(pieces: Iterable[str]) -> TracedStr:
    """Join what a macro or block wrote; scaffold between markers belongs to the message being handled."""
    joiner = _Joiner()
    for piece in pieces:
        if type(piece) is Marker:
            joiner.mark(piece)
        elif piece:
            joiner.add(piece)
    return joiner.result()


def concat_root(pieces: Iterable[str]) -> TracedStr:
    """Join what a whole template wrote.

    Templates often write the system turn before their loop. A stretch outside any message loop that holds the
    values of exactly one message is that message's turn; a stretch without any keeps no owner.
    """
    joiner = _Joiner()
    stretch: tuple[int, int] | None = (0, 0)  # where the current stretch begins: character, span
    for piece in pieces:
        if type(piece) is Marker:
            joiner.mark(piece)
        elif piece:
            if joiner.owner is not None and stretch is not None:
                _own_stretch(joiner, stretch)
                stretch = None
            elif joiner.owner is None and stretch is None:
                stretch = (joiner.position, len(joiner.spans))
            joiner.add(piece)
    if stretch is not None:
        _own_stretch(joiner, stretch)
    return joiner.result()


def _own_stretch(joiner: _Joiner, stretch: tuple[int, int]) -> None:
    start, index = stretch
    inside = tuple(joiner.spans[index:])
    messages = {origin.message: origin for _, _, origin in inside if origin.message >= 0}
    if len(messages) != 1:
        return
    scaffold = next(iter(messages.values())).scaffold
    if scaffold is not None:
        del joiner.spans[index:]
        append(joiner.spans, _filled(inside, start, joiner.position, scaffold), 0)


def _filled(spans: Spans, start: int, stop: int, owner: Origin) -> Spans:
    """The spans, with the gaps of `[start, stop)` given to `owner`."""
    filled: list[Span] = []
    for span in spans:
        if span[0] > start:
            filled.append((start, span[0], owner))
        filled.append(span)
        start = span[1]
    if start < stop:
        filled.append((start, stop, owner))
    return tuple(filled)


def disown_tail(text: TracedStr, length: int) -> TracedStr:
    """The text with the scaffold of its last `length` characters given to no message.

    A generation prompt that the template writes inside its loop belongs to the coming turn, not to the last.
    """
    cut = len(text) - length
    if length <= 0 or any(stop > cut and origin.is_content for _, stop, origin in text._spans):
        return text
    return TracedStr(plain(text), clip(text._spans, 0, cut))
