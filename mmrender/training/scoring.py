r"""Log-probabilities, entropies and divergences of tokens, computed in tiles that never hold all logits.

With a head of weights $W$, bias $b$, scale $a$ and cap $c$, the hidden state $h$ before a token has the
scores

$$z = W h + b, \qquad y = c \tanh(a z / c), \qquad s = y / T, \qquad p = \operatorname{softmax}(s)$$

over the ids that the token could have; $y = a z$ without a cap. The values and their derivatives by $s_j$
are

- log-probability $s_t - \operatorname{lse}(s)$: $[j = t] - p_j$
- entropy $H = \operatorname{lse}(s) - \sum p s$: $-p_j (\log p_j + H)$
- divergence $K = \sum p \log (p / q)$ from a reference $q$: $p_j (\log p_j - \log q_j - K)$

A tile holds the scores of some tokens for some ids. The forward adds up exponentials over the tiles of a
token, less its largest score so far (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018), and keeps a few sums. The backward computes each tile again. Gradients are added up in float32 or
more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from mmrender.errors import BatchError
from mmrender.training.predictions import Predictions
from mmrender.training.tensor_list import torch

TILE: Final = (2048, 8192)
"""Tokens and ids of a tile: 64 MiB of scores. Two or three tensors of this size are held at a time."""
_CLOSED: Final = -1e30
"""Score of an id that a token could not have. Its exponential is 0, and sums of it are finite."""


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
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.to(wide(logits.dtype))
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def part(self, ids: slice, dtype: Any) -> "OutputHead":
        """Return the head of some ids, with weights in a dtype."""
        bias = None if self.bias is None else self.bias[ids].to(dtype)
        return replace(self, weight=self.weight[ids].to(dtype), bias=bias)


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
        tile: Number of tokens and of ids whose scores are held at a time.
    """

    predictions: Predictions
    temperature: Any = 1.0
    entropy: bool = False
    reference: HiddenStates | None = None
    dtype: Any = None
    tile: tuple[int, int] = TILE

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
        device = values.device.type
        dtype = self.dtype
        if dtype is None and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        weight, bias = None, None
        if head is not None:
            check_whole(head)
            weight, bias, dtype = head.weight, head.bias, dtype or head.weight.dtype
        work = _Work(replace(self, temperature=temperature, dtype=dtype), head)
        # The dtype is decided above, so that the backward pass, which autocast does not see, has the same.
        with torch.autocast(device, enabled=False):
            logprobs, entropy, kl = _Tiled.apply(values, weight, bias, work)
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


def flat(values: Any) -> Any:
    """Return `(..., n)` as rows."""
    return values.reshape(-1, values.shape[-1])


def _steps(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The settings of one call, and the steps that its forward and backward share."""

    scoring: Scoring
    head: OutputHead | None

    def with_weights(self, weight: Any, bias: Any) -> OutputHead | None:
        """Return the head with the weights that torch passes to the forward or saved for the backward."""
        return None if self.head is None else replace(self.head, weight=weight, bias=bias)

    def parts(self) -> Iterator[slice]:
        """Yield the tokens of each row of tiles."""
        return _steps(len(self.scoring.predictions), self.scoring.tile[0])

    def tiles(self, part: slice, rows: Any, head: OutputHead | None) -> Iterator[tuple[slice, Any]]:
        """Yield the ids of each tile of some tokens, and the scores of the ids."""
        vocabulary = rows.shape[-1] if head is None else head.weight.shape[0]
        limits = self.scoring.predictions.limits
        rows = rows if head is None else rows.to(self.scoring.dtype)
        for ids in _steps(vocabulary, self.scoring.tile[1]):
            if head is None:
                scores = rows[:, ids].to(wide(rows.dtype), copy=True)
            else:
                scores = head.part(ids, self.scoring.dtype).logits(rows)
            scores.div_(self.temperature(part)).clamp_(min=_CLOSED)
            closed = None if limits is None else limits.closed(part, ids)
            yield ids, scores if closed is None else scores.masked_fill_(closed, _CLOSED)

    def temperature(self, part: slice) -> Any:
        value = self.scoring.temperature
        return value if isinstance(value, float) else value[part]

    def other(self, part: slice) -> Iterator[Any]:
        """Yield the reference's scores, tile by tile."""
        reference = self.scoring.reference
        if reference is not None:
            rows = flat(reference.values).index_select(0, reference.predictions.sources[part])
            yield from (scores for _, scores in self.tiles(part, rows, reference.head))

    def sums(self, part: slice, rows: Any, head: OutputHead | None, out: Any) -> None:
        """Write the values of some tokens, and the sums that the backward needs, to `out`, `(7, n)`."""
        token_ids = self.scoring.predictions.token_ids[part, None]
        largest = out.new_full((out.shape[1], 1), _CLOSED)
        total, chosen, mean, cross, other_total = (torch.zeros_like(largest) for _ in range(5))
        other_largest, others = largest, self.other(part)
        for ids, scores in self.tiles(part, rows, head):
            at, inside = _places(token_ids, ids)
            chosen += torch.where(inside, scores.gather(-1, at), 0.0)
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            moved = before - largest
            fade = moved.exp()
            weights = scores.sub_(largest).exp()
            if self.scoring.reference is not None:
                other = next(others)
                start, other_largest = (
                    other_largest,
                    torch.maximum(other_largest, other.amax(-1, keepdim=True)),
                )
                other_moved = start - other_largest
                other.sub_(other_largest)
                other_total = other_total * other_moved.exp() + other.exp().sum(-1, keepdim=True)
                ratio = other.neg_().add_(scores).mul_(weights)
                cross = fade * (cross + (moved - other_moved) * total) + ratio.sum(-1, keepdim=True)
            moved_mean, total = mean + moved * total, total * fade + weights.sum(-1, keepdim=True)
            if self.scoring.entropy:
                mean = fade * moved_mean + weights.mul_(scores).sum(-1, keepdim=True)
        log_total, log_other = total.log(), other_total.log()
        columns = (
            (chosen - largest) - log_total,
            log_total - mean / total,
            (cross / total - log_total) + log_other,
            *(largest, log_total, other_largest, log_other),
        )
        out.copy_(torch.cat(columns, -1).T)

    def slopes(
        self, part: slice, rows: Any, head: OutputHead | None, out: Any, gradients: Any
    ) -> Iterator[tuple[slice, Any]]:
        """Yield for each tile its ids, and the gradient by the head's products `z`, `(n, ids)`."""
        _, entropy, kl, largest, log_total, other_largest, log_other = (one[:, None] for one in out)
        of_logprobs, of_entropy, of_kl = (one[:, None] for one in gradients)
        temperature, others = self.temperature(part), self.other(part)
        softcap = None if head is None else head.softcap
        for ids, scores in self.tiles(part, rows, head):
            curve = None
            if softcap is not None:
                curve = (scores * temperature).div_(softcap).clamp_(-1, 1).square_().neg_().add_(1)
            logs = scores.sub_(largest).sub_(log_total)
            slopes = logs.exp()
            factor = -of_logprobs
            if self.scoring.reference is not None:
                ratio = next(others).sub_(other_largest).sub_(log_other).neg_().add_(logs)
                factor = ratio.sub_(kl).mul_(of_kl).add_(factor)
            if self.scoring.entropy:
                factor = logs.add_(entropy).mul_(-of_entropy).add_(factor)
            slopes.mul_(factor)
            at, inside = _places(self.scoring.predictions.token_ids[part, None], ids)
            slopes.scatter_add_(-1, at, of_logprobs * inside)
            slopes.div_(temperature)
            if curve is not None:
                slopes.mul_(curve)
            if head is not None and head.scale != 1.0:
                slopes.mul_(head.scale)
            yield ids, slopes


def _places(token_ids: Any, ids: slice) -> tuple[Any, Any]:
    """Return the place of each token in a tile, and whether it is there."""
    inside = (token_ids >= ids.start) & (token_ids < ids.stop)
    return (token_ids - ids.start).clamp(0, ids.stop - ids.start - 1), inside


class _Tiled(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, values: Any, weight: Any, bias: Any, work: _Work) -> tuple[Any, Any, Any]:
        rows, predictions, head = flat(values), work.scoring.predictions, work.with_weights(weight, bias)
        dtype = wide(rows.dtype if head is None else work.scoring.dtype)
        out = torch.zeros(7, len(predictions), dtype=dtype, device=rows.device)
        for part in work.parts():
            own = rows.index_select(0, predictions.sources[part])
            work.sums(part, own, head, out[:, part])
        ctx.work = work
        ctx.save_for_backward(values, weight, bias, out)
        return tuple(out[:3].clone())

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any, Any, None]:
        values, weight, bias, out = ctx.saved_tensors
        work: _Work = ctx.work
        rows, predictions, head = flat(values), work.scoring.predictions, work.with_weights(weight, bias)
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        of_rows: Any = torch.zeros_like(rows, memory_format=torch.contiguous_format) if for_rows else None
        of_weight = torch.zeros_like(weight, dtype=out.dtype) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=out.dtype) if for_bias else None
        for part in work.parts():
            sources = predictions.sources[part]
            own = rows.index_select(0, sources)
            hidden = None if head is None else own.to(work.scoring.dtype)
            of_own = torch.zeros_like(own, dtype=out.dtype) if head is not None and for_rows else None
            slopes_of = work.slopes(part, own, head, out[:, part], [one[part] for one in gradients])
            for ids, slopes in slopes_of:
                if head is None:
                    of_rows[:, ids].index_copy_(0, sources, slopes.to(rows.dtype))
                    continue
                if of_bias is not None:
                    of_bias[ids] += slopes.sum(0)
                narrow = slopes.to(work.scoring.dtype)
                if of_own is not None:
                    _add_product(of_own, narrow, head.weight[ids].to(work.scoring.dtype))
                if of_weight is not None:
                    _add_product(of_weight[ids], narrow.T, hidden)
            if of_own is not None:
                of_rows.index_copy_(0, sources, of_own.to(rows.dtype))
        return (
            None if of_rows is None else of_rows.view(values.shape),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
        )


def _add_product(total: Any, left: Any, right: Any) -> None:
    """Add a product to a total that may have more digits."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
