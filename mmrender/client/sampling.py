"""Sampling parameters: named once, as in vLLM's `SamplingParams`, checked and spelled for each engine.

Engines ignore or refuse a name that they do not know, each in its own way, so names and values are checked
before sending. `PARAMETERS` is the table for all engines. Types and
ranges were read from vLLM 0.32's `sampling_params.py`, SGLang's names from its 0.5.23, Dynamo's from 1.6.1.
Parameters that this version does not know go into `extra`, a mapping that is sent unchecked.

vLLM reports log-probabilities of the raw logits, before `allowed_token_ids` and `logit_bias`. The
log-probabilities of all allowed tokens, or of all forbidden ones, are asked for too, and show the probability
of the rest: see `Limit`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from mmcodecs.structs import ready
from mmrender.client.types import EngineRequest, EngineResponse
from mmrender.errors import SamplingParameterError
from mmrender.trajectory.engine_data import AllowedTokens

DEFAULT_MAX_TOKENS: Final = 1024
"""`max_tokens` if neither the caller nor the engine's limit bounds a completion."""
MAX_BIAS: Final = 100.0
"""Engines clamp `logit_bias` to this distance from 0."""

EngineName: TypeAlias = Literal["vllm", "sglang", "dynamo", "local"]
Spelling: TypeAlias = bool | str | Callable[[Any], Mapping[str, Any]]
"""How an engine spells a parameter: by its own name, by vLLM's (True), or as members that a function of the
value returns. False: the engine does not know it."""

_WITHOUT_BUDGET: Final = {
    "vllm": "vLLM would fill the context",
    "sglang": "SGLang would stop after 128 tokens",
    "dynamo": "how long a completion may be is then the worker's choice",
}
_MAX_REPORTED: Final = 19
"""Bounds the tokens that vLLM reports besides the sampled token, without `--max-logprobs`."""
_MAX_FORBIDDEN: Final = math.log(0.999)
"""Bounds the forbidden probability. Above it the rounding of float32 would show in the rest."""
_MOST: Final = 2**31 - 1  # fits every engine's integers
_Count = Annotated[int, Meta(ge=0, le=_MOST)]
_Positive = Annotated[int, Meta(ge=1, le=_MOST)]
_CountOrAll = Annotated[int, Meta(ge=-1, le=_MOST)]
_Text = Annotated[str, Meta(min_length=1)]
_Texts = list[_Text]
_Digits = Annotated[str, Meta(pattern="^[0-9]+$", max_length=10)]
_AboveZero = Annotated[float, Meta(gt=0)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter: a row of the table `PARAMETERS`.

    Attributes:
        type: Type that msgspec converts a value to, strictly.
        sglang: SGLang's spelling.
        dynamo: Dynamo's spelling.
        local: Whether `LocalBackend` follows it.
        memoryless: Whether it means the same after sampled tokens have been appended to the prompt, so that
            an aborted completion can be continued. `max_tokens`, `min_tokens` and `seed` are adapted.
        top_level: Whether SGLang takes it in the request instead of its `sampling_params`.
    """

    type: Any
    sglang: Spelling = False
    dynamo: Spelling = False
    local: bool = False
    memoryless: bool = False
    top_level: bool = False


def _listed(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: [value] if isinstance(value, str) else list(value)}


def _logit_bias(value: Mapping[Any, float]) -> dict[str, Any]:
    return {"logit_bias": {str(token): bias for token, bias in value.items()}}


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


STRUCTURES: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Kinds of `structured_outputs`. A request has one of them."""

_Structures: TypeAlias = Mapping[str, Callable[[Any], dict[str, Any]]]
_SGLANG_STRUCTURES: Final[_Structures] = {
    # An object in place of the schema's text is a 400.
    "json": lambda schema: {"json_schema": _json_text(schema)},
    "json_object": lambda _: {"json_schema": '{"type":"object"}'},
    "regex": lambda pattern: {"regex": pattern},
    "grammar": lambda grammar: {"ebnf": grammar},
    "structural_tag": lambda tag: {"structural_tag": _json_text(tag)},
}
_DYNAMO_STRUCTURES: Final[_Structures] = {
    "json": lambda schema: {"guided_json": schema},
    "json_object": lambda _: {"guided_json": {"type": "object"}},
    "regex": lambda pattern: {"guided_regex": pattern},
    "grammar": lambda grammar: {"guided_grammar": grammar},
    "choice": lambda choices: {"guided_choice": list(choices)},
}


def _structure(engine: str, kinds: _Structures) -> Callable[[Any], dict[str, Any]]:
    """Spell the structure that is asked for. Engines other than vLLM refuse its options."""

    def spell(value: Mapping[str, Any]) -> dict[str, Any]:
        spelled: dict[str, Any] = {}
        for name, wish in value.items():
            if name in kinds:
                spelled |= kinds[name](wish) if wish is not None else {}
            elif wish:
                raise SamplingParameterError(
                    f"{engine} does not know this structured output",
                    where=f"{where('structured_outputs')}[{name!r}]",
                    remedy=f"It knows: {', '.join(kinds)}",
                )
        return spelled

    return spell


# fmt: off
PARAMETERS: Final[Mapping[str, Parameter]] = {
    #                              type                  SGLang  Dynamo  local  memoryless
    # Several completions of one prompt are several requests.
    "n": Parameter(Annotated[int, Meta(ge=1, le=1)],       True,  True,  True,  True),
    "temperature": Parameter(Annotated[float, Meta(ge=0, le=2)], True, True, True, True),
    "top_p": Parameter(Annotated[float, Meta(gt=0, le=1)], True,  True,  True,  True),
    # All tokens are 0 or -1 for vLLM, and only -1 for SGLang.
    "top_k": Parameter(_CountOrAll, lambda value: {"top_k": value or -1}, True, True, True),
    "min_p": Parameter(Annotated[float, Meta(ge=0, le=1)], True,  True,  True,  True),
    "presence_penalty": Parameter(_Penalty,                True,  True,  True),
    "frequency_penalty": Parameter(_Penalty,               True,  True,  True),
    # It applies to prompt and output, so a longer prompt changes nothing.
    "repetition_penalty": Parameter(_AboveZero,            True,  True,  True,  True),
    "seed": Parameter(Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], "sampling_seed", True, True, True),
    "max_tokens": Parameter(_Positive, "max_new_tokens", "max_completion_tokens", True, True),
    "min_tokens": Parameter(_Count, "min_new_tokens",      True,  True,  True),
    "stop": Parameter(_Text | _Texts, _listed("stop"), _listed("stop")),
    "stop_token_ids": Parameter(list[_Count],              True,  True,  True,  True),
    "include_stop_str_in_output": Parameter(bool, "no_stop_trim", True, False, True),
    "ignore_eos": Parameter(bool,                          True,  True,  True,  True),
    "logprobs": Parameter(
        _CountOrAll,
        lambda value: {"return_logprob": True, "top_logprobs_num": value},
        lambda value: {"logprobs": True, "top_logprobs": value},
        True, True, top_level=True,
    ),
    "prompt_logprobs": Parameter(_CountOrAll,              False, True,  False, True),
    "prompt_logprob_start": Parameter(_Count),
    "prompt_logprob_token_ids": Parameter(list[list[int]]),
    "logprob_token_ids": Parameter(list[_Count]),
    "flat_logprobs": Parameter(bool),
    # The local backend samples tokens, and these change only how an engine writes them as text.
    "detokenize": Parameter(bool,                          False, True,  True,  True),
    "skip_special_tokens": Parameter(bool,                 True,  True,  True,  True),
    "spaces_between_special_tokens": Parameter(bool,       True,  False, True,  True),
    "stream_interval": Parameter(_Positive,                True),
    "structured_outputs": Parameter(
        dict[str, Any],
        _structure("sglang", _SGLANG_STRUCTURES),
        _structure("dynamo", _DYNAMO_STRUCTURES),
        True,
    ),
    # Keys of JSON are text, so the tokens may be.
    "logit_bias": Parameter(dict[_Count | _Digits, float], _logit_bias, _logit_bias, True, True),
    "allowed_token_ids": Parameter(Annotated[list[_Count], Meta(min_length=1)], False, True, True, True),
    "bad_words": Parameter(_Texts),
    "extra_args": Parameter(dict[str, Any]),
    "skip_reading_prefix_cache": Parameter(bool),
    "thinking_token_budget": Parameter(_Count),
    "repetition_detection": Parameter(dict[str, Any]),
    "watermarking": Parameter(bool),
    "trace_decode_token_ids": Parameter(list[_Count]),
}
# fmt: on
"""Every known name. `SamplingParams` has a few more, which engines set for themselves."""

SPELLINGS: Final[Mapping[EngineName, Mapping[str, Spelling]]] = {
    "vllm": dict.fromkeys(PARAMETERS, True),
    "sglang": {name: row.sglang for name, row in PARAMETERS.items() if row.sglang is not False},
    "dynamo": {name: row.dynamo for name, row in PARAMETERS.items() if row.dynamo is not False},
    "local": {name: True for name, row in PARAMETERS.items() if row.local},
}
"""Parameters that each engine knows, and how it spells them."""

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    **{
        name: f"structured_outputs={{{kind!r}: ...}}"
        for kind, names in {
            "json": ("json_schema", "guided_json"),
            "regex": ("regex", "guided_regex"),
            "choice": ("guided_choice",),
            "grammar": ("ebnf", "guided_grammar"),
        }.items()
        for name in names
    },
}
_ARGUMENTS: Final = ("routed_experts_prompt_start", "cache_salt", "priority", "extra_body")


def where(name: str) -> str:
    """Path of a parameter in errors."""
    return f"sampling_params[{name!r}]"


def check_sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are set. A value of None means that one is not set."""
    checked: dict[str, Any] = {}
    for name, value in params.items():
        if name == "extra" and isinstance(value, Mapping):
            checked[name] = value
            continue
        if name not in PARAMETERS:
            raise _unknown(name)
        if value is None:
            continue
        expected = None
        try:
            msgspec.convert(value, ready(PARAMETERS[name].type))
        except msgspec.ValidationError as error:
            expected = str(error).removeprefix("Expected ").partition(", got")[0]
        else:
            if isinstance(value, float | Mapping) and not _is_finite(value):
                expected = "finite numbers"
            elif (
                name == "structured_outputs" and sum(value.get(kind) is not None for kind in STRUCTURES) != 1
            ):
                expected = f"one of {', '.join(STRUCTURES)}"
        if expected is not None:
            raise SamplingParameterError(
                "this sampling parameter cannot have this value",
                where=where(name),
                expected=expected,
                got=repr(value)[:200],
            )
        checked[name] = value
    minimum, budget = checked.get("min_tokens", 0), checked.get("max_tokens")
    if budget is not None and minimum > budget:
        problem, expected = "is more than max_tokens", f"at most {budget}"
        raise SamplingParameterError(problem, where=where("min_tokens"), expected=expected, got=str(minimum))
    if checked.get("stop") and checked.get("detokenize") is False:
        raise SamplingParameterError(
            "stop strings are looked for in text, which detokenize=False turns off",
            where=where("stop"),
            remedy="Leave out detokenize=False, or name stop_token_ids",
        )
    return checked


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def _unknown(name: str) -> SamplingParameterError:
    if name in _ARGUMENTS:
        remedy = f"It is an argument of generate: {name}=..."
    elif name in _OTHER_NAMES:
        remedy = "Sampling parameters have vLLM's names for every engine. This one is " + _OTHER_NAMES[name]
    else:
        remedy = (
            f"Known are: {', '.join(sorted(PARAMETERS))}. To send another, put it into "
            "sampling_params['extra'], or into extra_body as a member of the request"
        )
    return SamplingParameterError("unknown sampling parameter", where=where(name), remedy=remedy)


def token_budget(params: Mapping[str, Any]) -> int:
    """Return `max_tokens`, checked for all engines.

    Raises:
        SamplingParameterError: It is missing or not a positive integer, or `n` asks for several completions.
    """
    budget = params.get("max_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise _without_budget(budget)
    if params.get("n") not in (None, 1):
        raise SamplingParameterError(
            "one prompt has one completion",
            where=where("n"),
            expected="1",
            got=repr(params["n"]),
            remedy="Use sample(), or repeat the prompt",
        )
    return budget


def _without_budget(budget: Any, consequence: str | None = None) -> SamplingParameterError:
    return SamplingParameterError(
        "the token budget is missing or unusable" + (f", and {consequence}" if consequence else ""),
        where=where("max_tokens"),
        expected="an integer of 1 or more",
        got="none" if budget is None else repr(budget),
    )


def spell(params: Mapping[str, Any], engine: EngineName) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check sampling parameters, given in vLLM's names, and spell them as an engine does.

    Returns:
        Members of the request's `sampling_params` (Dynamo's: of the request), and members
        of the top level of the request.
    """
    checked = check_sampling_params(params)
    if "max_tokens" not in checked:
        raise _without_budget(None, _WITHOUT_BUDGET.get(engine))
    sampling: dict[str, Any] = {}
    request: dict[str, Any] = {}
    extra = {} if engine == "local" else checked.pop("extra", {})
    for name, value in checked.items():
        spelling = SPELLINGS[engine].get(name)
        if spelling is None:
            remedy = f"It knows: {', '.join(sorted(SPELLINGS[engine]))}"
            if engine != "local":
                remedy += ". sampling_params['extra'] sends others unchecked"
            problem = f"{engine} does not know this sampling parameter"
            raise SamplingParameterError(problem, where=where(name), remedy=remedy)
        target = request if engine == "sglang" and PARAMETERS[name].top_level else sampling
        if callable(spelling):
            target.update(spelling(value))
        else:
            target[spelling if isinstance(spelling, str) else name] = value
    if taken := sorted(extra.keys() & sampling.keys()):
        raise SamplingParameterError("is set twice", where=f"{where('extra')}[{taken[0]!r}]")
    return sampling | extra, request


def spell_in_process(params: Mapping[str, Any]) -> dict[str, Any]:
    """Spell sampling parameters for vLLM's class `SamplingParams`, which refuses token ids as text.

    Errors are as for `spell`.
    """
    sampling, _ = spell(params, "vllm")
    if bias := sampling.get("logit_bias"):
        sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
    return sampling


def complete_sampling(
    params: Mapping[str, Any] | None,
    *,
    room: int | None = None,
    stop_token_ids: Iterable[int] = (),
    forbidden: Iterable[int] = (),
) -> dict[str, Any]:
    """Add `max_tokens` if it is missing, stop tokens unless `ignore_eos` is set, and a bias against tokens.

    `room` is the number of tokens that fit behind the prompt, None if unknown. Every engine follows the bias
    against `forbidden` tokens. Backends check the parameters.
    """
    completed = dict(params or {})
    if completed.get("max_tokens") is None:
        completed["max_tokens"] = DEFAULT_MAX_TOKENS if room is None else max(1, room)
    stops = completed.get("stop_token_ids")
    if not completed.get("ignore_eos") and (stops is None or isinstance(stops, list | tuple)):
        completed["stop_token_ids"] = list(dict.fromkeys([*(stops or ()), *stop_token_ids]))
    if bias := dict.fromkeys(map(str, forbidden), -MAX_BIAS):
        given = completed.get("logit_bias") or {}
        completed["logit_bias"] = {**{str(token): value for token, value in given.items()}, **bias}
    return completed


def truncates(params: Mapping[str, Any]) -> bool:
    """Whether tokens are sampled among a part of the vocabulary that depends on their probabilities."""
    few = (params.get("top_k") or 0) > 0 or (params.get("min_p") or 0) > 0
    return params.get("temperature") != 0 and (few or (params.get("top_p") or 1) < 1)


# --- log-probabilities over the allowed tokens ---


class Limit(NamedTuple):
    """Allowed token ids of a completion. Forbidden ones if `forbids`."""

    token_ids: tuple[int, ...]
    forbids: bool


def limit_in(params: Mapping[str, Any], forbidden: Iterable[int]) -> Limit | None:
    """Return the limit that `allowed_token_ids` and forbidden tokens set together, or None without one."""
    allowed, excluded = params.get("allowed_token_ids"), {*forbidden}
    if allowed is not None:
        return Limit(tuple(sorted({*allowed} - excluded)), False)
    return Limit(tuple(sorted(excluded)), True) if excluded else None


def limit_of(request: EngineRequest) -> Limit | None:
    """Return the limit of a request. None without one, or if the log-probabilities stay the engine's.

    They do under a grammar, whose mask engines do not report, if the caller asks for alternatives itself, and
    if the set is larger than vLLM reports by default.
    """
    params = request.sampling_params
    if any(params.get(name) for name in ("structured_outputs", "logprobs", "logprob_token_ids")):
        return None
    limit = limit_in(params, request.forbidden_token_ids)
    return limit if limit is not None and 0 < len(limit.token_ids) <= _MAX_REPORTED else None


def reporting(request: EngineRequest, limit: Limit) -> EngineRequest:
    """Return the request with the parameters, in vLLM's names, that `renormalised` needs."""
    # The sampled token takes one place among the alternatives, so one is named twice.
    listed = [*limit.token_ids, limit.token_ids[-1]]
    wanted = {"logprob_token_ids": listed, "logprobs": len(listed)}
    return replace(request, sampling_params={**request.sampling_params, **wanted})


def renormalised(response: EngineResponse, limit: Limit) -> EngineResponse:
    """Renormalise the response's log-probabilities over the tokens that the limit allows.

    It stays as it is, `allowed` empty, if the server does not report the limit's tokens, as before vLLM 0.31,
    or if the forbidden tokens leave too little probability to be known from them. With a sampling mask the
    log-probabilities are renormalised already.
    """
    reported = [dict(top) for top in response.top_logprobs or ()]
    plain = replace(response, top_logprobs=None)
    if (
        response.allowed
        or len(reported) != len(response.logprobs)
        or any(set(limit.token_ids) - top.keys() for top in reported)
    ):
        return plain
    logprobs = []
    for raw, top in zip(response.logprobs, reported, strict=True):
        listed = float(np.logaddexp.reduce([top[token] for token in limit.token_ids]))
        if limit.forbids and listed > _MAX_FORBIDDEN:
            return plain
        left = math.log1p(-math.exp(listed)) if limit.forbids else listed
        logprobs.append(min(0.0, raw - left))
    allowed = (AllowedTokens(0, len(logprobs), *limit),) if logprobs else ()
    return replace(plain, logprobs=logprobs, allowed=allowed)
