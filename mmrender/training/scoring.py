r"""Log-probabilities, entropies and divergences of tokens, computed in chunks that never hold all logits.

With a head of weights $W$, bias $b$, scale $a$ and cap $c$, the hidden state $h$ before a token has the
scores

$$z = W h + b, \qquad y = c \tanh(a z / c), \qquad s = y / T, \qquad p = \operatorname{softmax}(s)$$

over the ids that the token could have; $y = a z$ without a cap. The values and their derivatives by $s_j$ are

- log-probability $s_t - \operatorname{lse}(s)$: $[j = t] - p_j$
- entropy $H = \operatorname{lse}(s) - \sum p s$: $-p_j (\log p_j + H)$
- divergence $K = \sum p \log (p / q)$ from a reference $q$: $p_j (\log p_j - \log q_j - K)$

The forward keeps one sum for each token. The backward computes the scores of a chunk again, and adds up the
gradient of the weights in float32 or more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from mmrender.errors import BatchError
from mmrender.training.predictions import Predictions
from mmrender.training.tensor_list import torch

CHUNK_BYTES: Final = 1 << 28
"""Size of the scores of a chunk, in bytes. Two or three tensors of this size are held at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """The last step of a model, from hidden states to logits.

    Attributes:
        weight: `(vocabulary, hidden)`.
        bias: `(vocabulary,)`, or None.
        scale: Factor of the logits, such as Cohere's `logit_scale`.
        softcap: Bound of the scaled logits (Gemma Team, "Gemma 2", 2024, section 2), or None.
    """

    weight: Any
    bias: Any = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Any) -> Any:
        """Return the logits `(n, vocabulary)` of hidden states `(n, hidden)`, in float32 or more."""
        logits = torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        logits = logits.to(wide(logits.dtype))
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def cast(self, dtype: Any) -> "OutputHead":
        """Return the head with weights in a dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)


class HiddenStates(NamedTuple):
    """Hidden states before the tokens of a batch.

    Attributes:
        values: `(..., hidden)`. Flattened, `predictions.sources` are their places.
        head: Makes logits of them.
        predictions: The tokens that they predict.
    """

    values: Any
    head: OutputHead
    predictions: Predictions


class TokenScores(NamedTuple):
    """Values of tokens, each float32 `(rows, columns)`, 0.0 at tokens that were not asked for.

    Attributes:
        logprobs: Log-probability of each token, given the tokens before it in its sample.
        entropy: Entropy of the distribution that it was drawn from, in nats, or None.
        kl: Divergence of this distribution from the reference's, in nats, or None.
    """

    logprobs: Any
    entropy: Any = None
    kl: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The values to compute of each token.

    Attributes:
        predictions: The tokens.
        temperature: Divides logits: a number, or a tensor `(rows, columns)` with a value for each token.
        entropy: Whether to compute entropies.
        reference: Hidden states of another model before the same tokens, or None. It gets no gradient.
        dtype: Dtype in which hidden states and weights are multiplied; None for the weights' own, or
            autocast's.
        chunk_tokens: Tokens of a chunk, or None for `CHUNK_BYTES`.
    """

    predictions: Predictions
    temperature: Any = 1.0
    entropy: bool = False
    reference: HiddenStates | None = None
    dtype: Any = None
    chunk_tokens: int | None = None

    def of(self, values: Any, head: OutputHead | None) -> TokenScores:
        """Return the scores of the tokens, each `(n,)`.

        Args:
            values: Hidden states `(..., hidden)`, or logits `(..., vocabulary)` if `head` is None.
            head: Makes logits of hidden states.

        Raises:
            BatchError: The weights are sharded, a temperature is not above 0, or the reference has other
                tokens.
        """
        temperature = self._temperatures(values.device)
        if self.reference is not None and len(self.reference.predictions) != len(self.predictions):
            raise BatchError(
                "the reference has other tokens",
                where="reference",
                expected=f"hidden states before {len(self.predictions)} tokens",
                got=str(len(self.reference.predictions)),
            )
        weight, bias = (None, None) if head is None else (head.weight, head.bias)
        device = values.device.type
        dtype = self.dtype
        if head is not None:
            check_whole(head)
            if dtype is None and torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
        reference = self.reference
        if reference is not None and dtype is not None:
            reference = reference._replace(head=reference.head.cast(dtype))
        work = _Work(replace(self, temperature=temperature, dtype=dtype, reference=reference), head)
        # The dtype is decided above, so that the backward pass, which autocast does not see, has the same.
        with torch.autocast(device, enabled=False):
            logprobs, entropy, kl = _Chunked.apply(values, weight, bias, work)
        return TokenScores(
            logprobs, entropy if self.entropy else None, None if self.reference is None else kl
        )

    def spread(self, values: Any, head: OutputHead | None) -> TokenScores:
        """Return `of`, each in its place: `(rows, columns)`."""
        scores = self.of(values, head)
        return TokenScores(*(None if one is None else self.predictions.spread(one) for one in scores))

    def _temperatures(self, device: Any) -> Any:
        """Return the temperature as a number or as a column `(n, 1)`."""
        value = self.temperature
        if isinstance(value, torch.Tensor) and value.ndim:
            if tuple(value.shape) != self.predictions.shape:
                raise BatchError(
                    "a temperature for each token is not aligned to the tokens",
                    where="temperature",
                    expected=str([*self.predictions.shape]),
                    got=str([*value.shape]),
                )
            value = value.detach().to(device).reshape(-1)[self.predictions.places.to(device), None]
            lowest = float(value.min()) if len(value) else 1.0
        else:
            lowest = value = float(value)
        if not lowest > 0:
            raise BatchError("a temperature is not above 0", where="temperature", got=str(lowest))
        return value


def wide(dtype: Any) -> Any:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def check_whole(head: OutputHead) -> None:
    """Raise `BatchError` if the head's weights are sharded."""
    if hasattr(head.weight, "full_tensor"):
        raise BatchError(
            "the weights of the output head are sharded",
            where="head.weight",
            expected="a whole tensor",
            got=type(head.weight).__name__,
            remedy="Call `score_tokens`, which computes within the forward, where FSDP has them whole",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The settings of one call, and the steps that its forward and backward share."""

    scoring: Scoring
    head: OutputHead | None

    def chunks(self, vocabulary: int) -> Iterator[slice]:
        count = len(self.scoring.predictions)
        size = self.scoring.chunk_tokens or max(1, CHUNK_BYTES // (4 * vocabulary))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def ready(self, weight: Any, bias: Any) -> OutputHead | None:
        """Return the head with the weights that a pass saved, in the dtype of its products."""
        if self.head is None:
            return None
        head = replace(self.head, weight=weight, bias=bias)
        return head if self.scoring.dtype is None else head.cast(self.scoring.dtype)

    def scores(self, values: Any, head: OutputHead | None, part: slice, closed: Any) -> Any:
        """Return the scores `s` of a chunk, minus infinity at ids that a token could not have."""
        rows = values.index_select(0, self.scoring.predictions.sources[part])
        scores = rows.to(wide(rows.dtype), copy=True) if head is None else head.logits(rows)
        scores.div_(self.temperature(part))
        return scores if closed is None else scores.masked_fill_(closed, -torch.inf)

    def temperature(self, part: slice) -> Any:
        value = self.scoring.temperature
        return value if isinstance(value, float) else value[part]

    def closed(self, part: slice, vocabulary: int) -> Any:
        limits = self.scoring.predictions.limits
        return None if limits is None else limits.closed(part.start, part.stop, vocabulary)

    def log_ratio(self, log_probabilities: Any, part: slice, closed: Any) -> Any:
        """Return `log p - log q` for every id of a chunk, 0 at ids that a token could not have."""
        reference: Any = self.scoring.reference
        other = replace(self, scoring=replace(self.scoring, predictions=reference.predictions))
        scores = other.scores(flat(reference.values), reference.head, part, closed)
        scores.sub_(scores.amax(-1, keepdim=True))
        scores.sub_(scores.exp().sum(-1, keepdim=True).log_()).neg_().add_(log_probabilities)
        return scores if closed is None else scores.masked_fill_(closed, 0.0)

    def slopes(self, rows: Any, head: OutputHead | None, part: slice, out: Any, gradients: Any) -> Any:
        """Return the gradient of a chunk by the head's products `z`: `(n, vocabulary)`."""
        scoring = self.scoring
        _, entropy, kl, largest, log_sums = (one[:, None] for one in out)
        of_logprobs, of_entropy, of_kl = (one[:, None] for one in gradients)
        vocabulary = rows.shape[-1] if head is None else head.weight.shape[0]
        closed = self.closed(part, vocabulary)
        scores = self.scores(rows, head, part, closed)
        softcap = None if head is None else head.softcap
        curve = (
            None
            if softcap is None
            else (scores * (self.temperature(part) / softcap)).square_().neg_().add_(1)
        )
        logs = scores.sub_(largest).sub_(log_sums)
        slopes = logs.exp()
        if not scoring.entropy and scoring.reference is None:
            slopes.mul_(-of_logprobs)
        else:
            if closed is not None:
                logs.masked_fill_(closed, 0.0)
            factor = -of_logprobs
            if scoring.reference is not None:
                factor = self.log_ratio(logs, part, closed).sub_(kl).mul_(of_kl).add_(factor)
            if scoring.entropy:
                factor = logs.add_(entropy).mul_(-of_entropy).add_(factor)
            slopes.mul_(factor)
        slopes.scatter_add_(-1, scoring.predictions.token_ids[part, None], of_logprobs)
        slopes.div_(self.temperature(part))
        if curve is not None:
            slopes.mul_(curve if closed is None else curve.masked_fill_(closed, 0.0))
        if head is not None and head.scale != 1.0:
            slopes.mul_(head.scale)
        return slopes


def flat(values: Any) -> Any:
    """Return `(..., n)` as rows."""
    return values.reshape(-1, values.shape[-1])


class _Chunked(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, values: Any, weight: Any, bias: Any, work: _Work) -> tuple[Any, Any, Any]:
        rows, head, scoring = flat(values), work.ready(weight, bias), work.scoring
        vocabulary = rows.shape[-1] if weight is None else weight.shape[0]
        count = len(scoring.predictions)
        dtype = wide(rows.dtype if head is None else head.weight.dtype)
        # Log-probability, entropy and divergence of each token, its largest score and the log of its sum.
        out = torch.zeros(5, count, dtype=dtype, device=rows.device)
        for part in work.chunks(vocabulary):
            closed = work.closed(part, vocabulary)
            scores = work.scores(rows, head, part, closed)
            # Small numbers are subtracted one after another, which keeps more digits than their sum.
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp()
            sums = weights.sum(-1, keepdim=True)
            logs = scores.sub_(sums.log())
            out[0, part] = logs.gather(-1, scoring.predictions.token_ids[part, None])[:, 0]
            out[3, part], out[4, part] = largest[:, 0], sums.log()[:, 0]
            if scoring.entropy or scoring.reference is not None:
                weights.div_(sums)
                if closed is not None:
                    logs.masked_fill_(closed, 0.0)
                if scoring.reference is not None:
                    out[2, part] = work.log_ratio(logs, part, closed).mul_(weights).sum(-1)
                out[1, part] = -weights.mul_(logs).sum(-1)
        ctx.work, ctx.vocabulary = work, vocabulary
        ctx.save_for_backward(values, weight, bias, out)
        return tuple(out[:3].clone())

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any, Any, None]:
        values, weight, bias, out = ctx.saved_tensors
        work, scoring = ctx.work, ctx.work.scoring
        rows, head = flat(values), work.ready(weight, bias)
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        of_rows: Any = torch.zeros_like(rows, memory_format=torch.contiguous_format) if for_rows else None
        of_weight = torch.zeros_like(weight, dtype=out.dtype) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=out.dtype) if for_bias else None
        for part in work.chunks(ctx.vocabulary):
            slopes = work.slopes(rows, head, part, out[:, part], [one[part] for one in gradients])
            sources = scoring.predictions.sources[part]
            if head is None:
                of_rows.index_copy_(0, sources, slopes.to(rows.dtype))
                continue
            if of_bias is not None:
                of_bias.add_(slopes.sum(0))
            slopes = slopes.to(head.weight.dtype)
            if of_rows is not None:
                of_rows.index_copy_(0, sources, (slopes @ head.weight).to(rows.dtype))
            if of_weight is not None:
                hidden = rows.index_select(0, sources).to(head.weight.dtype)
                if hidden.dtype == of_weight.dtype:
                    of_weight.addmm_(slopes.T, hidden)
                else:
                    of_weight.add_(slopes.T @ hidden)
        return (
            None if of_rows is None else of_rows.view(values.shape),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
        )
