"""`TokenSampler`: chooses the tokens of one completion of a model in this process, as vLLM would.

The steps are Transformers' own, in the order of `vllm/v1/sample/sampler.py` of vLLM 0.32: a grammar masks the
logits, then come allowed tokens, `min_tokens`, `logit_bias`, penalties, temperature, `min_p`, `top_k` and
`top_p`. Reported log-probabilities are of the raw logits, over the allowed tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from mmcodecs.structs import ready
from mmrender.client.sampling import MAX_BIAS, Limit, limit_in, spell, where
from mmrender.errors import EngineReplyError, SamplingParameterError
from mmrender.trajectory.engine_data import AllowedTokens

_GREEDY_BELOW: Final = 1e-5
"""Temperature below which vLLM takes the likeliest token."""


class _Choices(msgspec.Struct):
    """The only structured output that the local backend follows."""

    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


def checked_params(params: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the sampling parameters that are not None.

    Raises:
        SamplingParameterError: A name is unknown, or a value cannot be used.
    """
    checked, _ = spell(params, "local")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        outside = [token for token in map(int, checked.get(name) or ()) if token >= vocab_size]
        if outside:
            raise SamplingParameterError(
                "a token id is outside the vocabulary",
                where=where(name),
                expected=f"0 to {vocab_size - 1}",
                got=str(outside[0]),
            )
    try:
        msgspec.convert(checked.get("structured_outputs", {"choice": ["x"]}), ready(_Choices))
    except msgspec.ValidationError as error:
        raise SamplingParameterError(
            "the local backend does not know this structured output",
            where=where("structured_outputs"),
            expected="{'choice': [text, ...]}",
            got=repr(dict(checked["structured_outputs"]))[:200],
        ) from error
    return checked


class TokenSampler:
    """Chooses the tokens of one completion. Equal seeds and equal logits produce equal tokens.

    Args:
        params: Checked sampling parameters.
        prompt_ids: The prompt, which `repetition_penalty` looks at.
        stop_ids: Tokens that end the completion. `min_tokens` forbids them at first.
        choices: The completion is one of these token sequences, followed by a stop token.
        forbidden: Tokens that are never sampled.
        processed_logprobs: Report log-probabilities of the distribution that is sampled from.

    Attributes:
        tokens: Sampled tokens.
        logprobs: Log-probability of each sampled token over the allowed set.
        top: By sampled token, the likeliest tokens with their logprobs, likeliest first, if requested.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        prompt_ids: Sequence[int],
        stop_ids: frozenset[int],
        choices: Sequence[Sequence[int]] | None = None,
        forbidden: Sequence[int] = (),
        *,
        processed_logprobs: bool = False,
    ) -> None:
        import torch

        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self._stop_ids = stop_ids
        self._choices = choices
        self._processed = processed_logprobs
        self._limit = limit_in(params, forbidden)
        self._limits: list[Limit | None] = []
        self._num_top = params.get("logprobs") or 0
        self._prompt_ids = torch.tensor(list(prompt_ids))
        self._generator = torch.Generator()
        if params.get("seed") is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params["seed"])
        self._is_greedy = params.get("temperature", 1.0) < _GREEDY_BELOW
        self._steps = _steps(params, len(prompt_ids), sorted(stop_ids), self._is_greedy)

    def following(self) -> list[int] | None:
        """Return the tokens that continue a choice (none after its end), or None without choices."""
        if self._choices is None:
            return None
        count = len(self.tokens)
        fitting = [choice for choice in self._choices if list(choice[:count]) == self.tokens]
        following = {choice[count] for choice in fitting if len(choice) > count}
        return sorted(following.union(*(self._stop_ids for choice in fitting if len(choice) == count)))

    @property
    def has_ended(self) -> bool:
        """Whether a stop token was sampled, or a choice is complete."""
        return bool(self.tokens and self.tokens[-1] in self._stop_ids) or self.following() == []

    @property
    def allowed(self) -> tuple[AllowedTokens, ...]:
        """Spans of sampled tokens with their allowed or forbidden tokens."""
        spans: list[AllowedTokens] = []
        start = 0
        for limit, tokens in groupby(self._limits):
            stop = start + len(list(tokens))
            if limit is not None:
                spans.append(AllowedTokens(start, stop, *limit))
            start = stop
        return tuple(spans)

    def sample(self, logits: Any) -> int:
        """Sample one token, and record its logprob and its alternatives.

        Args:
            logits: Logits of the next token, float32 of shape `(vocabulary,)` on the CPU.

        Raises:
            EngineReplyError: A logit is NaN.
            SamplingParameterError: The parameters leave no token to sample.
        """
        import torch

        if bool(logits.isnan().any()):
            raise EngineReplyError(
                "the model returned NaN as a logit",
                where=f"token {len(self.tokens)} of the completion",
                expected="finite logits, or -inf",
                got=f"NaN for {int(logits.isnan().sum())} of {logits.shape[-1]} tokens",
                remedy="Look at the weights, or at the dtype, in which a value may be too large",
            )
        limit = self._next_limit()
        if limit is not None:
            logits = masked(logits, *limit)
        logprobs, logits = logits.log_softmax(-1), logits[None]
        if self._steps:
            ids = torch.cat([self._prompt_ids, torch.tensor(self.tokens, dtype=torch.int64)])[None]
            for step in self._steps:
                logits = step(ids, logits)
            if self._processed:
                logprobs = logits[0].log_softmax(-1)
        if not self._is_greedy:
            # The largest p / Exp(1) is distributed as p, with one draw for each token of the vocabulary.
            logits = logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=self._generator)
        best, likeliest = logits[0].max(-1)
        if not float(best) > -math.inf:  # NaN if all probabilities are 0
            raise SamplingParameterError(
                "the parameters together leave no token to sample",
                where="sampling_params",
                remedy="Look at allowed_token_ids, logit_bias, min_tokens and structured_outputs",
            )
        token = int(likeliest)
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        self._limits.append(limit)
        if self._num_top:
            count = len(logprobs) if self._num_top < 0 else min(self._num_top, len(logprobs))
            top = logprobs.topk(count)
            self.top.append(tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        return token

    def _next_limit(self) -> Limit | None:
        """Return the limit of the next token, to which choices belong. None without one."""
        following, limit = self.following(), self._limit
        if following is None or limit is None:
            return limit if following is None else Limit(tuple(following), False)
        token_ids = [token for token in following if (token in limit.token_ids) != limit.forbids]
        return Limit(tuple(token_ids), False)


def _steps(
    params: Mapping[str, Any], prompt_len: int, stop_ids: list[int], is_greedy: bool
) -> list[Callable[[Any, Any], Any]]:
    """Return the functions that change the logits `(1, vocabulary)` of ids `(1, n)`, in vLLM's order."""
    import torch
    from transformers.generation import logits_process as hf

    steps: list[Callable[[Any, Any], Any]] = []
    if params.get("min_tokens") and stop_ids:
        steps.append(hf.MinNewTokensLengthLogitsProcessor(prompt_len, params["min_tokens"], stop_ids))
    if params.get("logit_bias"):
        # vLLM clamps as OpenAI does. Transformers' own step refuses token 0.
        biases = {int(token): float(bias) for token, bias in params["logit_bias"].items()}
        tokens, values = torch.tensor(list(biases)), torch.tensor(list(biases.values()))
        values = values.clamp(-MAX_BIAS, MAX_BIAS)
        steps.append(lambda _, logits: logits.index_add(-1, tokens, values.expand(len(logits), -1)))
    if (penalty := float(params.get("repetition_penalty", 1.0))) != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(penalty))
    frequency, presence = params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0)
    if frequency or presence:

        def penalize(ids: Any, logits: Any) -> Any:
            counts = ids[0, prompt_len:].bincount(minlength=logits.shape[-1])
            return logits - (frequency * counts + presence * (counts > 0))

        steps.append(penalize)
    if is_greedy:
        return steps
    if (temperature := float(params.get("temperature", 1.0))) != 1.0:
        steps.append(hf.TemperatureLogitsWarper(temperature))
    if params.get("min_p"):
        steps.append(hf.MinPLogitsWarper(float(params["min_p"])))
    if params.get("top_k", 0) > 0:
        steps.append(hf.TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1.0) < 1.0:
        steps.append(hf.TopPLogitsWarper(float(params["top_p"])))
    return steps


def masked(logits: Any, token_ids: Sequence[int], forbids: bool) -> Any:
    """Return logits `(vocabulary,)` with minus infinity for tokens that are not allowed."""
    import torch

    if forbids:
        return logits.index_fill(-1, torch.tensor(token_ids), -math.inf)
    kept = torch.full_like(logits, -math.inf)
    kept[list(token_ids)] = logits[list(token_ids)]
    return kept
