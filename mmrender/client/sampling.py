"""Sampling parameters: spelled once, in the names of vLLM's `SamplingParams`, and checked before sending.

Engines ignore or refuse a name that they do not know, each in its own way, so names and values are checked
here. Names, types and ranges were read from vLLM 0.32's `vllm/sampling_params.py`. How each engine spells
them is `mmrender.client.spelling`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from mmrender.errors import SamplingParameterError

DEFAULT_MAX_TOKENS: Final = 1024
"""`max_tokens` where neither the caller nor the engine's limit says how long a completion may be."""

Accepts: TypeAlias = Callable[[Any], bool]


class Parameter(NamedTuple):
    """What a parameter may be: a test, and the same in words."""

    accepts: Accepts
    expected: str


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _integer(least: int, most: int | None = None) -> Parameter:
    bound = f"an integer of {least} or more" if most is None else f"an integer in [{least}, {most}]"
    return Parameter(
        lambda value: _is_int(value) and value >= least and (most is None or value <= most), bound
    )


def _number(least: float, most: float, *, open_below: bool = False) -> Parameter:
    def accepts(value: Any) -> bool:
        return _is_number(value) and (least < value if open_below else least <= value) and value <= most

    shown = f"{least:g}, {most:g}" if math.isfinite(most) else f"{least:g}, inf"
    return Parameter(accepts, f"a finite number in {'(' if open_below else '['}{shown}]")


def _list_of(accepts: Accepts, what: str, *, least: int = 0) -> Parameter:
    return Parameter(
        lambda value: isinstance(value, list | tuple) and len(value) >= least and all(map(accepts, value)),
        what,
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_id(int(key) if isinstance(key, str) and key.isdecimal() else key) and _is_number(bias)
        for key, bias in value.items()
    )


def _is_structure(value: Any) -> bool:
    kinds = [kind for kind in STRUCTURES if isinstance(value, Mapping) and value.get(kind) is not None]
    return len(kinds) == 1


STRUCTURES: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""What `structured_outputs` may ask for; one of them."""

_FLAG: Final = Parameter(lambda value: isinstance(value, bool), "True or False")
_IDS: Final = _list_of(_is_id, "a list of token ids")
_MAPPING: Final = Parameter(lambda value: isinstance(value, Mapping), "a mapping")

PARAMETERS: Final[Mapping[str, Parameter]] = {
    "n": Parameter(
        lambda value: _is_int(value) and value == 1, "1; ask several times for several completions"
    ),
    "temperature": _number(0.0, 2.0),
    "top_p": _number(0.0, 1.0, open_below=True),
    "top_k": _integer(-1),
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, math.inf, open_below=True),
    "seed": _integer(-(2**63), 2**63 - 1),
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "stop": Parameter(
        lambda value: _is_text(value) or (isinstance(value, list | tuple) and all(map(_is_text, value))),
        "text, or a list of texts, none of them empty",
    ),
    "stop_token_ids": _IDS,
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "logprobs": _integer(-1),
    "prompt_logprobs": _integer(-1),
    "prompt_logprob_start": _integer(0),
    "prompt_logprob_token_ids": _list_of(
        lambda row: isinstance(row, list | tuple) and all(map(_is_int, row)), "a list of lists of token ids"
    ),
    "logprob_token_ids": _IDS,
    "flat_logprobs": _FLAG,
    "detokenize": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "stream_interval": _integer(1),
    "structured_outputs": Parameter(_is_structure, f"a mapping with one of {', '.join(STRUCTURES)}"),
    "logit_bias": Parameter(_is_bias, "a mapping of token ids to finite numbers"),
    "allowed_token_ids": _list_of(_is_id, "a list of token ids, not empty", least=1),
    "bad_words": _list_of(_is_text, "a list of texts, none of them empty"),
    "extra_args": _MAPPING,
    "skip_reading_prefix_cache": _FLAG,
    "thinking_token_budget": _integer(0),
    "repetition_detection": _MAPPING,
    "watermarking": _FLAG,
    "trace_decode_token_ids": _IDS,
}
"""Every name that a caller may use. `SamplingParams` has a few more, which engines set for themselves."""

_CALLED_HERE: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "structured_outputs={'json': ...}",
    "guided_json": "structured_outputs={'json': ...}",
    "guided_regex": "structured_outputs={'regex': ...}",
    "guided_choice": "structured_outputs={'choice': ...}",
    "guided_grammar": "structured_outputs={'grammar': ...}",
    "regex": "structured_outputs={'regex': ...}",
    "ebnf": "structured_outputs={'grammar': ...}",
}
_ARGUMENTS: Final = ("routed_experts_prompt_start", "cache_salt", "priority")


def check_sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are set, each of a known name and a value that it may have.

    A value of None stands for a parameter that is not set.

    Raises:
        SamplingParameterError: A name is unknown, or a value is not one that it may have; `where` names it.
    """
    checked: dict[str, Any] = {}
    for name, value in params.items():
        if name not in PARAMETERS:
            raise _unknown(name)
        if value is None:
            continue
        parameter = PARAMETERS[name]
        if not parameter.accepts(value):
            raise SamplingParameterError(
                "is not a value that this sampling parameter may have",
                where=where(name),
                expected=parameter.expected,
                got=repr(value)[:200],
            )
        checked[name] = value
    _check_together(checked)
    return checked


def _check_together(params: Mapping[str, Any]) -> None:
    least, most = params.get("min_tokens", 0), params.get("max_tokens")
    if most is not None and least > most:
        raise SamplingParameterError(
            "is more than max_tokens", where=where("min_tokens"), expected=f"at most {most}", got=str(least)
        )
    if params.get("stop") and params.get("detokenize") is False:
        raise SamplingParameterError(
            "stop strings are looked for in text, which is not made",
            where=where("stop"),
            remedy="Leave out detokenize=False, or name stop_token_ids",
        )


def where(name: str) -> str:
    """A parameter in errors."""
    return f"sampling_params[{name!r}]"


def _unknown(name: Any) -> SamplingParameterError:
    here = _CALLED_HERE.get(name)
    if here is not None:
        remedy = f"Sampling parameters have vLLM's names for every engine; this one is {here}"
    elif name in _ARGUMENTS:
        remedy = f"It is an argument of generate: {name}=..."
    else:
        remedy = f"Known are: {', '.join(sorted(PARAMETERS))}"
    return SamplingParameterError("no engine knows this sampling parameter", where=where(name), remedy=remedy)


def with_max_tokens(params: Mapping[str, Any], room: int | None) -> dict[str, Any]:
    """Add `max_tokens` where it is missing.

    Args:
        params: Checked parameters.
        room: How many tokens fit behind the prompt; None where that is not known.
    """
    if params.get("max_tokens") is not None:
        return dict(params)
    return {**params, "max_tokens": DEFAULT_MAX_TOKENS if room is None else max(1, room)}


def with_stop_token_ids(params: Mapping[str, Any], stop_token_ids: Iterable[int]) -> dict[str, Any]:
    """Add stop tokens to those that the caller named; none where `ignore_eos` is set."""
    if params.get("ignore_eos"):
        return dict(params)
    named: Sequence[int] = params.get("stop_token_ids") or ()
    return {**params, "stop_token_ids": list(dict.fromkeys([*named, *stop_token_ids]))}
