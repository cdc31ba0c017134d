"""Constraints that an engine samples under, and log-probabilities of what they leave over.

vLLM reports log-probabilities of the raw logits, before `allowed_token_ids` and `logit_bias`. Given those of
the tokens that are allowed, or of those that are forbidden, each is renormalised.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from mmrender.client.sampling import MAX_BIAS
from mmrender.client.types import EngineRequest, EngineResponse
from mmrender.trajectory.engine_data import AllowedTokens

_MOST_REPORTED: Final = 19
"""Tokens whose log-probabilities vLLM reports besides the sampled one's without `--max-logprobs`."""
_MOST_FORBIDDEN: Final = math.log(0.999)
"""Forbidden probability beyond which the rounding of float32 would show in the logarithm of the rest."""


class Limit(NamedTuple):
    """What every token of a completion is chosen among; with `forbids` what it is not."""

    token_ids: tuple[int, ...]
    forbids: bool


def forbidding(params: Mapping[str, Any] | None, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return sampling parameters with a bias against tokens, which every engine follows."""
    given = dict(params or {})
    if token_ids:
        bias = dict.fromkeys(map(str, token_ids), -MAX_BIAS)
        given["logit_bias"] = {
            **{str(key): value for key, value in (given.get("logit_bias") or {}).items()},
            **bias,
        }
    return given


def truncates(params: Mapping[str, Any]) -> bool:
    """Whether tokens are sampled among a part of the vocabulary that depends on their probabilities."""
    few = (params.get("top_k") or 0) > 0 or (params.get("min_p") or 0) > 0
    return params.get("temperature") != 0 and (few or (params.get("top_p") or 1) < 1)


def limit_of(request: EngineRequest) -> Limit | None:
    """Return the limit of a request; None without one, or where the log-probabilities stay the engine's.

    They do under a grammar, whose mask engines do not report, where the caller asks for alternatives of its
    own, and where the set is larger than what vLLM reports by default.
    """
    params = request.sampling_params
    if any(params.get(name) for name in ("structured_outputs", "logprobs", "logprob_token_ids")):
        return None
    allowed = params.get("allowed_token_ids")
    forbidden = {*request.forbidden_token_ids}
    limit = Limit(tuple(sorted(forbidden)), True)
    if allowed is not None:
        limit = Limit(tuple(sorted({*allowed} - forbidden)), False)
    return limit if 0 < len(limit.token_ids) <= _MOST_REPORTED else None


def reporting(request: EngineRequest, limit: Limit) -> EngineRequest:
    """Return the request with the log-probabilities asked for that `renormalised` needs, in vLLM's names."""
    # The sampled token takes a place of its own among as many as are asked for, so one is named twice.
    listed = [*limit.token_ids, limit.token_ids[-1]]
    wanted = {"logprob_token_ids": listed, "logprobs": len(listed)}
    return replace(request, sampling_params={**request.sampling_params, **wanted})


def renormalised(response: EngineResponse, limit: Limit) -> EngineResponse:
    """Return the response with log-probabilities of what the limit leaves over.

    It stays as it is, its log-probabilities of all tokens and `allowed` empty, where the server does not
    report those of the limit, as before vLLM 0.31, or where what is forbidden leaves too little over to be
    known from them. With a sampling mask they are of what was allowed already.
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
        if limit.forbids and listed > _MOST_FORBIDDEN:
            return plain
        left = math.log1p(-math.exp(listed)) if limit.forbids else listed
        logprobs.append(min(0.0, raw - left))
    allowed = (AllowedTokens(0, len(logprobs), *limit),) if logprobs else ()
    return replace(plain, logprobs=logprobs, allowed=allowed)
