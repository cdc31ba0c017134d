"""Log-probabilities of vLLM, renormalised over the tokens that a request allows.

vLLM reports log-probabilities of the raw logits, before `allowed_token_ids` and `logit_bias`. The
log-probabilities of all allowed tokens, or of all forbidden ones, are asked for too, and show the probability
of the rest.
"""

import math
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from mmrender.client.types import EngineRequest, EngineResponse
from mmrender.trajectory.engine_data import AllowedTokens

_MAX_REPORTED: Final = 19
"""Bounds the tokens that vLLM reports besides the sampled token, without `--max-logprobs`."""
_MAX_FORBIDDEN: Final = math.log(0.999)
"""Bounds the forbidden probability. Above it the rounding of float32 would show in the rest."""


class Limit(NamedTuple):
    """Allowed token ids of a completion. Forbidden ones if `forbids`."""

    token_ids: tuple[int, ...]
    forbids: bool


def limit_of(request: EngineRequest) -> Limit | None:
    """Return the limit of a request. None without one, or if the log-probabilities stay the engine's.

    They do under a grammar, whose mask engines do not report, if the caller asks for alternatives itself, and
    if the set is larger than vLLM reports by default.
    """
    params = request.sampling_params
    if any(params.get(name) for name in ("structured_outputs", "logprobs", "logprob_token_ids")):
        return None
    allowed = params.get("allowed_token_ids")
    forbidden = {*request.forbidden_token_ids}
    limit = Limit(tuple(sorted(forbidden)), True)
    if allowed is not None:
        limit = Limit(tuple(sorted({*allowed} - forbidden)), False)
    return limit if 0 < len(limit.token_ids) <= _MAX_REPORTED else None


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
