"""How each engine spells sampling parameters.

vLLM takes all of `mmrender.client.sampling.PARAMETERS` within `sampling_params`. SGLang's names were read
from its 0.5.23 `srt/sampling/sampling_params.py`, which answers 400 to any other. Dynamo 1.6 takes them at
the top level of a chat request, and answers 400 to most others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

from mmrender.client.sampling import PARAMETERS, check_sampling_params, where
from mmrender.errors import SamplingParameterError

EngineName: TypeAlias = Literal["vllm", "sglang", "dynamo"]
Place: TypeAlias = Literal["sampling", "request"]


@dataclass(frozen=True, slots=True)
class Spelled:
    """Parameters as one engine takes them.

    Attributes:
        sampling: What goes into the request's `sampling_params`.
        request: What goes to the top level of the request.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)


Write: TypeAlias = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Spelling:
    place: Place
    write: Write


def translate(params: Mapping[str, Any], engine: EngineName) -> Spelled:
    """Check sampling parameters and spell them as an engine does.

    Args:
        params: In vLLM's names; None stands for a parameter that is not set.
        engine: Whose spelling.

    Raises:
        SamplingParameterError: A name is not known, or not to this engine; or a value is not one that it may
            have.
    """
    table = SPELLINGS[engine]
    spelled = Spelled()
    for name, value in check_sampling_params(params).items():
        if name not in table:
            raise SamplingParameterError(
                f"{engine} has no such sampling parameter",
                where=where(name),
                remedy=f"It has: {', '.join(sorted(table))}",
            )
        target = spelled.sampling if table[name].place == "sampling" else spelled.request
        target.update(table[name].write(value))
    return spelled


def _named(name: str) -> Write:
    return lambda value: {name: value}


def _same(place: Place, *names: str) -> dict[str, _Spelling]:
    return {name: _Spelling(place, _named(name)) for name in names}


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _sglang_structure(value: Mapping[str, Any]) -> dict[str, Any]:
    kinds: Mapping[str, Callable[[Any], dict[str, Any]]] = {
        # An object in place of the schema's text is a 400.
        "json": lambda schema: {"json_schema": _json_text(schema)},
        "json_object": lambda _: {"json_schema": '{"type":"object"}'},
        "regex": lambda pattern: {"regex": pattern},
        "grammar": lambda grammar: {"ebnf": grammar},
        "structural_tag": lambda tag: {"structural_tag": _json_text(tag)},
    }
    return _structure(value, kinds, "sglang")


def _dynamo_structure(value: Mapping[str, Any]) -> dict[str, Any]:
    kinds: Mapping[str, Callable[[Any], dict[str, Any]]] = {
        "json": lambda schema: {"guided_json": schema},
        "json_object": lambda _: {"guided_json": {"type": "object"}},
        "regex": lambda pattern: {"guided_regex": pattern},
        "grammar": lambda grammar: {"guided_grammar": grammar},
        "choice": lambda choices: {"guided_choice": list(choices)},
    }
    return _structure(value, kinds, "dynamo")


def _structure(
    value: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], dict[str, Any]]], engine: str
) -> dict[str, Any]:
    """Write the one kind of structure that is asked for; engines other than vLLM take no options with it."""
    others = [name for name, asked in value.items() if name not in kinds and asked]
    if others:
        raise SamplingParameterError(
            f"{engine} has no such structured output",
            where=f"{where('structured_outputs')}[{others[0]!r}]",
            remedy=f"It has: {', '.join(kinds)}",
        )
    return next(write(value[kind]) for kind, write in kinds.items() if value.get(kind) is not None)


def _sglang_top_k(value: int) -> dict[str, int]:
    return {"top_k": value or -1}  # all tokens: 0 or -1 in vLLM, only -1 here


def _dynamo_logprobs(value: int) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": value}


SPELLINGS: Final[Mapping[EngineName, Mapping[str, _Spelling]]] = {
    "vllm": _same("sampling", *PARAMETERS),
    "sglang": {
        **_same(
            "sampling",
            "n",
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stream_interval",
        ),
        "top_k": _Spelling("sampling", _sglang_top_k),
        "stop": _Spelling("sampling", lambda value: {"stop": _listed(value)}),
        "max_tokens": _Spelling("sampling", _named("max_new_tokens")),
        "min_tokens": _Spelling("sampling", _named("min_new_tokens")),
        "seed": _Spelling("sampling", _named("sampling_seed")),
        "include_stop_str_in_output": _Spelling("sampling", _named("no_stop_trim")),
        "logit_bias": _Spelling(
            "sampling", lambda value: {"logit_bias": {str(key): bias for key, bias in value.items()}}
        ),
        "structured_outputs": _Spelling("sampling", _sglang_structure),
        "logprobs": _Spelling("request", lambda value: {"return_logprob": True, "top_logprobs_num": value}),
    },
    "dynamo": {
        **_same(
            "request",
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
            "min_tokens",
            "stop_token_ids",
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
            "allowed_token_ids",
            "prompt_logprobs",
        ),
        "stop": _Spelling("request", lambda value: {"stop": _listed(value)}),
        "max_tokens": _Spelling("request", _named("max_completion_tokens")),
        "logprobs": _Spelling("request", _dynamo_logprobs),
        "logit_bias": _Spelling(
            "request", lambda value: {"logit_bias": {str(key): bias for key, bias in value.items()}}
        ),
        "structured_outputs": _Spelling("request", _dynamo_structure),
    },
}
