"""What became of the search for a template's tool-call grammar."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mmrender.parsing.grammar import Grammar

Outcome: TypeAlias = Literal["proved", "named", "none", "ambiguous", "not_printed"]


@dataclass(frozen=True)
class GrammarChoice:
    """Which grammar reads a template's calls, and why.

    Attributes:
        outcome: `proved` by reading back every probe; `named` by the caller; `none` of the grammars does, or
            more than one (`ambiguous`); `not_printed`: the template prints no calls.
        grammar: The chosen one, or None.
        proved: Names of the grammars that read every probe back.
        reasons: For each grammar that does not, the first difference.
        refused: Probes that the template refuses, such as two calls in one turn.
    """

    outcome: Outcome
    grammar: Grammar | None = None
    proved: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.grammar.name if self.grammar is not None else "none"
        match self.outcome:
            case "proved":
                return f"{name}, proved"
            case "named" if name in self.proved:
                return f"{name}, named by the caller and proved"
            case "named":
                reason = self.reasons.get(name, "the template prints no calls")
                return f"{name}, named by the caller, not proved: {reason}"
            case "ambiguous":
                return f"not chosen: {' and '.join(self.proved)} read the calls equally"
            case "not_printed":
                return "none: the template prints no tool calls"
            case "none":
                return "none: no known grammar reads back the calls that the template prints"
