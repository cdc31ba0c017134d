"""Builds the parser of a model from what its template prints."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing.probes import TurnProber
from mmrender.parsing.prove import Prover, tools_for_probes
from mmrender.parsing.reasoning import ReasoningFormat
from mmrender.parsing.reasoning_probe import find_reasoning
from mmrender.parsing.response import ResponseParser
from mmrender.probing.profile import TemplateProfile
from mmrender.template.chat import ChatTemplate


def build_parser(
    template: ChatTemplate,
    profile: TemplateProfile,
    tokenizer: Tokenizer,
    stop_ids: Collection[int],
    *,
    grammar: str | None = None,
    reasoning: ReasoningFormat | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ResponseParser:
    """Build the parser for one template with one set of template arguments.

    Args:
        template: The template.
        profile: What was found out about it; says which shapes it takes.
        tokenizer: The model's tokenizer.
        stop_ids: Tokens that end the assistant's turn.
        grammar: Name of the tool-call grammar, for a model whose template prints no calls or an unknown kind;
            None to have it proved. `choice` of the parser says what was found.
        reasoning: How the model writes reasoning, where its template does not show it.
        arguments: Template variables, such as `enable_thinking`.

    Raises:
        InputError: There is no grammar of that name.
    """
    prober = TurnProber(template, tokenizer, profile.form, frozenset(stop_ids), dict(arguments or {}))
    prober = replace(prober, tools=tools_for_probes(prober))
    format_ = reasoning or find_reasoning(prober)
    prover = Prover(prober, format_)
    choice = prover.choose(grammar)
    return ResponseParser(
        tokenizer, choice.grammar, format_, stop_ids, prover.layout(choice.grammar), choice=choice
    )
