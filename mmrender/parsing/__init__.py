"""Completions read back into messages: content, reasoning, and every tool call that the model tried."""

from mmrender.parsing.build import build_parser
from mmrender.parsing.calls import CallStatus
from mmrender.parsing.choice import GrammarChoice
from mmrender.parsing.grammar import Field, Grammar, Section
from mmrender.parsing.grammars import GRAMMARS
from mmrender.parsing.layout import Edge, Layout
from mmrender.parsing.reasoning import ReasoningFormat
from mmrender.parsing.response import ParsedResponse, ResponseParser, ToolCallAttempt

__all__ = [
    "GRAMMARS",
    "CallStatus",
    "Edge",
    "Field",
    "Grammar",
    "GrammarChoice",
    "Layout",
    "ParsedResponse",
    "ReasoningFormat",
    "ResponseParser",
    "Section",
    "ToolCallAttempt",
    "build_parser",
]
