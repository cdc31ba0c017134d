"""What a template writes between reasoning, content and calls, learned from its own probes.

A template puts a line break before a call that follows content, two after reasoning, and so on. That is
scaffold, so it is taken away from a completion, exactly as it was seen; all other white space is content.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from mmrender.parsing.reasoning import Reasoning
from mmrender.parsing.scanner import Block

Before: TypeAlias = Literal["start", "reasoning", "empty", "call"]
"""What stands before content: nothing, reasoning, a reasoning block without any, or a call."""
After: TypeAlias = Literal["call", "end"]


class Edge(NamedTuple):
    """Scaffold in one place: before content, after content, and where there is no content."""

    prefix: str = ""
    suffix: str = ""
    alone: str = ""


class Piece(NamedTuple):
    """A stretch of text that may hold content, and what stands round it."""

    before: Before
    text: str
    after: After


@dataclass(frozen=True)
class Layout:
    """Scaffold by place. A place that no probe has shown has none, and blank text there is nothing."""

    edges: Mapping[tuple[Before, After], Edge] = field(default_factory=dict)

    def content(self, pieces: Iterable[Piece]) -> str:
        """Content of a completion: all that is neither scaffold, reasoning nor call, in order."""
        return "".join([self._stripped(piece) for piece in pieces])

    def _stripped(self, piece: Piece) -> str:
        edge = self.edges.get((piece.before, piece.after))
        is_blank = not piece.text.strip()
        if is_blank and (piece.before == "call" or (edge is None and piece.after == "call")):
            return ""
        if edge is None:
            edge = self._kindred(piece)
        if piece.text == edge.alone:
            return ""
        text = piece.text[_common(piece.text, edge.prefix) :]
        return text[: len(text) - _common(text[::-1], edge.suffix[::-1])]

    def _kindred(self, piece: Piece) -> Edge:
        """Scaffold of a place that no probe has shown, from the place most like it."""
        known = self.edges.get(("reasoning", piece.after), Edge())
        if piece.before == "start":
            # The prompt may have held the whole reasoning block, and the scaffold after it.
            return Edge(suffix=known.suffix)
        return known if piece.before == "empty" else self.edges.get(("empty", piece.after), Edge())

    def after_reasoning(self, scaffold: str) -> "Layout":
        """The layout, with what follows reasoning where no probe has shown that."""
        edges: dict[tuple[Before, After], Edge] = {
            ("reasoning", "end"): Edge(prefix=scaffold, alone=scaffold),
            ("reasoning", "call"): self.edges.get(("start", "call"), Edge())._replace(
                prefix=scaffold, alone=scaffold
            ),
        }
        return Layout({**edges, **self.edges})


def pieces_of(text: str, reasoning: Reasoning, blocks: Sequence[Block]) -> list[Piece]:
    """Stretches of a text that are neither reasoning nor calls, which all come after it."""
    pieces = []
    if text[: reasoning.before].strip():
        pieces.append(Piece("start", text[: reasoning.before], "end"))
    position = reasoning.rest
    left: Before = "start"
    if reasoning.seen:
        left = "empty" if reasoning.text is None else "reasoning"
    for block in blocks:
        pieces.append(Piece(left, text[position : block.start], "call"))
        position, left = block.stop, "call"
    pieces.append(Piece(left, text[position:], "end"))
    return pieces


def learn_layout(probes: Iterable[Sequence[Piece]], content: str) -> Layout:
    """Learn what a template writes round a known content, and where there is none."""
    found: dict[tuple[Before, After], Edge] = {}
    shown: set[tuple[Before, After]] = set()
    for pieces in probes:
        for piece in pieces:
            place = (piece.before, piece.after)
            edge = found.get(place, Edge())
            if content not in piece.text:
                found[place] = edge._replace(alone=piece.text)
            elif place not in shown:
                shown.add(place)
                prefix, _, suffix = piece.text.partition(content)
                found[place] = edge._replace(prefix=prefix, suffix=suffix)
    return Layout(found)


def _common(text: str, expected: str) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(text), len(expected)) and text[length] == expected[length]:
        length += 1
    return length
