"""Which message the template was handling when it wrote a piece of scaffold.

The template's own loop over the messages says so. Each `for` body begins with a marker that carries the
message of this iteration, if the loop runs over messages, and the loop is followed by a marker that ends
it. Markers are empty text; `concat` consumes them and gives the text between them a scaffold origin.
"""

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes

from mmrender.template.origin import Origin, Span, append
from mmrender.template.traced import TracedStr, spans_of

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


def concat(pieces: Iterable[str]) -> TracedStr:
    """Join what a template wrote; scaffold between markers belongs to the message being handled."""
    held: list[str] = []
    spans: list[Span] = []
    position = 0
    owners: dict[int, Origin] = {}
    owner: Origin | None = None
    for piece in pieces:
        if type(piece) is Marker:
            if piece.origin is None:
                owners.pop(piece.loop, None)
            else:
                owners[piece.loop] = piece.origin
            owner = next(reversed(owners.values())) if owners else None
            continue
        if not piece:
            continue
        if owner is None:
            append(spans, spans_of(piece), position)
        elif type(piece) is str:
            append(spans, ((0, len(piece), owner),), position)
        else:
            _append_owned(spans, piece, position, owner)
        held.append(piece)
        position += len(piece)
    return TracedStr("".join(held), tuple(spans))


def _append_owned(spans: list[Span], piece: str, shift: int, owner: Origin) -> None:
    end = 0
    for span in spans_of(piece):
        if span[0] > end:
            append(spans, ((end, span[0], owner),), shift)
        append(spans, (span,), shift)
        end = span[1]
    if end < len(piece):
        append(spans, ((end, len(piece), owner),), shift)
