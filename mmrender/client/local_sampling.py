"""Sampling parameters of `LocalBackend`, in vLLM's names and with vLLM's meaning, and the choice of a token.

The order of steps, and what reported logprobs are computed from, follow `vllm/v1/sample/sampler.py` of vLLM
0.32 (`logprobs_mode="raw_logprobs"`, its default): a grammar masks the logits first; logprobs are the
log-softmax of these, without temperature, bias or penalties; then come allowed tokens, `min_tokens`,
`logit_bias`, penalties, temperature, `min_p`, `top_k` and `top_p`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrender.client.sampling import check_sampling_params, where
from mmrender.errors import SamplingParameterError

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this one mean greedy sampling."""

_AS_THEY_ARE: Final = frozenset(
    {
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    }
)  # fmt: skip
_OF_TEXT: Final = frozenset({"detokenize", "skip_special_tokens", "spaces_between_special_tokens"})
"""How an engine would write the tokens as text; tokens and logprobs do not depend on it."""

_KNOWN: Final = frozenset(
    {*_AS_THEY_ARE, *_OF_TEXT, "n", "stop_token_ids", "allowed_token_ids", "logit_bias", "logprobs"}
    | {"structured_outputs"}
)


@dataclass(frozen=True, slots=True)
class LocalSampling:
    """What `LocalBackend` knows; names, ranges and defaults are those of vLLM's `SamplingParams`.

    `top_logprobs` is vLLM's `logprobs`: how many alternatives to report beside each sampled token. `choices`
    is `structured_outputs={"choice": [...]}`: the texts of which the completion is one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    top_logprobs: int = 0
    choices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], vocab_size: int) -> "LocalSampling":
        """Read parameters in vLLM's names.

        Raises:
            SamplingParameterError: A name is not known, or a value is not one that the name may have.
        """
        params = check_sampling_params(given)
        for name in params:
            if name not in _KNOWN:
                raise SamplingParameterError(
                    "the local back end has no such sampling parameter",
                    where=where(name),
                    remedy=f"It has: {', '.join(sorted(_KNOWN))}",
                )
        if "max_tokens" not in params:
            raise SamplingParameterError(
                "there is no bound of the completion", where="sampling_params", expected="max_tokens"
            )
        read = {name: value for name, value in params.items() if name in _AS_THEY_ARE}
        for name in ("stop_token_ids", "allowed_token_ids"):
            if name in params:
                read[name] = _in_vocabulary(name, params[name], vocab_size)
        if "logit_bias" in params:
            bias = params["logit_bias"]
            # vLLM clamps as OpenAI does.
            amounts = [min(100.0, max(-100.0, amount)) for amount in bias.values()]
            read["logit_bias"] = tuple(
                zip(_in_vocabulary("logit_bias", bias, vocab_size), amounts, strict=True)
            )
        if "logprobs" in params:
            read["top_logprobs"] = vocab_size if params["logprobs"] == -1 else params["logprobs"]
        if "structured_outputs" in params:
            read["choices"] = _choices(params["structured_outputs"])
        return cls(**{**read, "stop_token_ids": frozenset(read.get("stop_token_ids", ()))})

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW


class TokenSampler:
    """Chooses the tokens of one completion. Equal seeds and equal logits give equal tokens.

    Args:
        sampling: How.
        prompt_ids: The prompt, which `repetition_penalty` looks at.
        stop_ids: Tokens that end the completion; `min_tokens` forbids them at first.
    """

    def __init__(self, sampling: LocalSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]) -> None:
        import torch

        self._sampling = sampling
        self._stop_ids = sorted(stop_ids)
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._prompt_ids = sorted(set(prompt_ids)) if sampling.repetition_penalty != 1.0 else []
        self._counts: dict[int, int] = {}

    def choose(
        self, logits: Any, allowed: Sequence[int] | None
    ) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """Sample one token.

        Args:
            logits: float32 of shape `(vocabulary,)`; may be changed.
            allowed: The tokens that a grammar allows here, or None for all.

        Returns:
            The token, its logprob, and the alternatives that were asked for with theirs, likeliest first.
        """
        if allowed is not None:
            _keep_only(logits, allowed)
        logprobs = logits.log_softmax(-1)
        token = self._sampled(logits)
        self._counts[token] = self._counts.get(token, 0) + 1
        count = min(self._sampling.top_logprobs, len(logprobs))
        best = logprobs.topk(count) if count else None
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else ()
        return token, float(logprobs[token]), top

    def _sampled(self, logits: Any) -> int:
        import torch

        sampling = self._sampling
        self._adjust(logits)
        likeliest = int(logits.argmax())
        if logits[likeliest] == -math.inf:
            raise SamplingParameterError(
                "the parameters together leave no token to sample",
                where="sampling_params",
                remedy="Look at allowed_token_ids, logit_bias, min_tokens and structured_outputs",
            )
        if sampling.is_greedy:
            return likeliest
        logits = logits / sampling.temperature
        if sampling.min_p:
            logits[logits < logits.max() + math.log(sampling.min_p)] = -math.inf
        _keep_likely(logits, sampling.top_k, sampling.top_p)
        noise = torch.empty_like(logits).exponential_(generator=self._generator)
        # The largest p / Exp(1) is distributed as p: one draw a token of the vocabulary, no cumulative sum.
        return int((logits.softmax(-1) / noise).argmax())

    def _adjust(self, logits: Any) -> None:
        """Apply in place what may change even the likeliest token."""
        sampling = self._sampling
        if sampling.allowed_token_ids is not None:
            _keep_only(logits, sampling.allowed_token_ids)
        if sum(self._counts.values()) < sampling.min_tokens:
            logits[self._stop_ids] = -math.inf
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        seen = list(self._counts)
        if sampling.repetition_penalty != 1.0:
            repeated = sorted({*self._prompt_ids, *seen})
            values = logits[repeated]
            penalty = sampling.repetition_penalty
            logits[repeated] = (values / penalty).where(values > 0, values * penalty)
        if seen:
            counts = logits.new_tensor([self._counts[token] for token in seen])
            logits[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _keep_only(logits: Any, tokens: Sequence[int]) -> None:
    kept = logits[list(tokens)]
    logits.fill_(-math.inf)
    logits[list(tokens)] = kept


def _keep_likely(logits: Any, top_k: int, top_p: float) -> None:
    """Mask in place all but the `top_k` likeliest, and of these all but those that make up `top_p`."""
    if not (0 < top_k < len(logits)) and top_p >= 1.0:
        return
    ordered, places = logits.sort()
    if 0 < top_k < len(logits):
        ordered[ordered < ordered[-top_k].clone()] = -math.inf
    if top_p < 1.0:
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[-1] = False
        ordered[outside] = -math.inf
    logits.scatter_(0, places, ordered)


def _in_vocabulary(name: str, tokens: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    # JSON has no integer keys, so the tokens of a bias may be text.
    found = tuple(map(int, tokens))
    for token in found:
        if token >= vocab_size:
            raise SamplingParameterError(
                "a token id is outside the vocabulary",
                where=where(name),
                expected=f"0 to {vocab_size - 1}",
                got=str(token),
            )
    return found


def _choices(structure: Mapping[str, Any]) -> tuple[str, ...]:
    choices = structure.get("choice")
    is_list = isinstance(choices, list | tuple) and len(choices) > 0
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices or ()):
        raise SamplingParameterError(
            "the local back end has no such structured output",
            where=where("structured_outputs"),
            expected="{'choice': [text, ...]}",
            got=repr(dict(structure))[:200],
        )
    return tuple(choices or ())
