"""A completion taken apart: reasoning, calls, and the stretches between them."""

from typing import NamedTuple

from mmrender.parsing.grammar import Grammar
from mmrender.parsing.layout import Piece, pieces_of
from mmrender.parsing.reasoning import Opening, Reasoning, ReasoningFormat, read_reasoning
from mmrender.parsing.scanner import Block, Scanner
from mmrender.parsing.schema import ToolSchemas
from mmrender.parsing.token_text import TokenText


class Parts(NamedTuple):
    """What a completion consists of; `pieces` still hold the template's scaffold."""

    reasoning: Reasoning
    blocks: list[Block]
    pieces: list[Piece]


def split(
    source: TokenText,
    grammar: Grammar | None,
    reasoning_format: ReasoningFormat | None,
    opening: Opening,
    tools: ToolSchemas | None = None,
) -> Parts:
    """Take a completion apart. Calls count only outside reasoning."""
    scanner = Scanner(grammar, source, tools) if grammar is not None else None
    first_call = scanner.first_delimiter() if scanner is not None else len(source.text)
    reasoning = read_reasoning(reasoning_format, source, opening, first_call)
    blocks = scanner.scan(reasoning.rest) if scanner is not None else []
    return Parts(reasoning, blocks, pieces_of(source.text, reasoning, blocks))
