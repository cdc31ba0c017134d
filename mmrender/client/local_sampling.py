"""Sampling parameters of `LocalBackend`, in vLLM's names and with vLLM's meaning, and the choice of a token.

The order of steps, and what reported logprobs are computed from, follow `vllm/v1/sample/sampler.py` of vLLM
0.32 (`logprobs_mode="raw_logprobs"`, its default): a grammar masks the logits first; logprobs are the
log-softmax of these, without temperature, bias or penalties; then come allowed tokens, `min_tokens`,
`logit_bias`, penalties, temperature, `min_p`, `top_k` and `top_p`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrender.errors import SamplingParameterError

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this one mean greedy sampling."""

_NO_EFFECT = frozenset({"detokenize", "skip_special_tokens", "spaces_between_special_tokens"})
"""How an engine would write the tokens as text; tokens and logprobs do not depend on it."""


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
        read: dict[str, Any] = {}
        for name, value in given.items():
            if name in _NO_EFFECT or value is None:
                continue
            if name not in _READERS:
                raise _unknown(name)
            field, reader = _READERS[name]
            read[field] = reader(f"sampling_params[{name!r}]", value, vocab_size)
        read.pop("n", None)
        if "max_tokens" not in read:
            raise SamplingParameterError(
                "there is no bound of the completion", where="sampling_params", expected="max_tokens"
            )
        if read.get("min_tokens", 0) > read["max_tokens"]:
            raise SamplingParameterError(
                "is more than max_tokens",
                where="sampling_params['min_tokens']",
                expected=f"at most {read['max_tokens']}",
                got=str(read["min_tokens"]),
            )
        return cls(**read)

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


def _unknown(name: str) -> SamplingParameterError:
    return SamplingParameterError(
        "the local back end does not know this parameter",
        where=f"sampling_params[{name!r}]",
        expected=f"one of {', '.join(sorted({*_READERS, *_NO_EFFECT}))}",
    )


def _wrong(where: str, expected: str, value: Any) -> SamplingParameterError:
    return SamplingParameterError(
        "the value is not one that this parameter may have", where=where, expected=expected, got=repr(value)
    )


_Reader = Callable[[str, Any, int], Any]


def _number(low: float, high: float, expected: str, *, above: bool = False) -> _Reader:
    def read(where: str, value: Any, _: int) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            raise _wrong(where, expected, value)
        return float(value)

    return read


def _integer(low: int, high: int, expected: str) -> _Reader:
    def read(where: str, value: Any, _: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(where, expected, value)
        return value

    return read


def _flag(where: str, value: Any, _: int) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "True or False", value)
    return value


def _token(where: str, value: Any, vocab_size: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise _wrong(where, f"token ids from 0 to {vocab_size - 1}", value)
    return value


def _tokens(where: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(where, "a list of token ids", value)
    return tuple(_token(f"{where}[{index}]", token, vocab_size) for index, token in enumerate(value))


def _some_tokens(where: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    tokens = _tokens(where, value, vocab_size)
    if not tokens:
        raise _wrong(where, "at least one token id", value)
    return tokens


def _bias(where: str, value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "a mapping of token ids to numbers", value)
    read = _number(-math.inf, math.inf, "a number")
    pairs = []
    for key, bias in value.items():
        # JSON has no integer keys.
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        # vLLM clamps a bias as OpenAI does.
        amount = min(100.0, max(-100.0, read(f"{where}[{key!r}]", bias, vocab_size)))
        pairs.append((_token(where, token, vocab_size), amount))
    return tuple(pairs)


def _choices(where: str, value: Any, _: int) -> tuple[str, ...]:
    choices = value.get("choice") if isinstance(value, Mapping) and set(value) == {"choice"} else None
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str) and len(choices) > 0
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices or ()):
        raise _wrong(where, "{'choice': [text, ...]}, the one grammar of the local back end", value)
    return tuple(choices or ())


_MANY = 2**63 - 1
_READERS: Mapping[str, tuple[str, _Reader]] = {
    "n": ("n", _integer(1, 1, "1: each completion is a call of its own")),
    "max_tokens": ("max_tokens", _integer(1, _MANY, "1 or more")),
    "min_tokens": ("min_tokens", _integer(0, _MANY, "0 or more")),
    "temperature": ("temperature", _number(0.0, 2.0, "a number from 0 to 2")),
    "top_p": ("top_p", _number(0.0, 1.0, "a number above 0, at most 1", above=True)),
    "top_k": ("top_k", _integer(-1, _MANY, "0 or -1 for all tokens, or 1 or more")),
    "min_p": ("min_p", _number(0.0, 1.0, "a number from 0 to 1")),
    "seed": ("seed", _integer(-_MANY - 1, _MANY, "an integer of 64 bits")),
    "ignore_eos": ("ignore_eos", _flag),
    "stop_token_ids": (
        "stop_token_ids",
        lambda where, value, vocab_size: frozenset(_tokens(where, value, vocab_size)),
    ),
    "repetition_penalty": (
        "repetition_penalty",
        _number(0.0, math.inf, "a number above 0", above=True),
    ),
    "presence_penalty": ("presence_penalty", _number(-2.0, 2.0, "a number from -2 to 2")),
    "frequency_penalty": ("frequency_penalty", _number(-2.0, 2.0, "a number from -2 to 2")),
    "logit_bias": ("logit_bias", _bias),
    "allowed_token_ids": ("allowed_token_ids", _some_tokens),
    "logprobs": ("top_logprobs", _integer(0, _MANY, "0 or more")),
    "structured_outputs": ("choices", _choices),
}
