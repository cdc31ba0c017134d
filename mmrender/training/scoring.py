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
more. On a GPU the steps over a large tile are compiled into few kernels, since one after another they take
longer than its products.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from mmrender.errors import BatchError
from mmrender.training.predictions import Predictions
from mmrender.training.tensor_list import torch

Result = TypeVar("Result")
TILE: Final = (2048, 8192)
"""Tokens and ids of a tile: 64 MiB of scores. Two or three tensors of this size are held at a time."""
GPU_TILE: Final = (4096, 16384)
"""The same on a GPU, where small tiles are slow: 128 MiB for each of two tensors in bfloat16."""
_COMPILED_FROM: Final = 1 << 22
"""Scores of a tile on a GPU from which its steps are compiled, which takes some seconds once."""
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


class _Tile(NamedTuple):
    """Products of some tokens with the weights of some ids, and their way to scores.

    Attributes:
        products: `(n, ids)`, or a model's logits.
        places: Place of each token in the tile, a column. Outside of it for tokens of other tiles.
        closed: Ids that a token could not have, bool `(n, ids)`, or None.
        temperature: A number, or a column.
        scale: Of `OutputHead`, as is the cap.
        softcap: Bound of the scaled products, or None.
        has_bias: Whether the products have a bias, whose gradient is the sum of theirs.
        are_logits: Whether they are a model's logits, which are not written over.
    """

    products: Any
    places: Any
    closed: Any
    temperature: Any
    scale: float = 1.0
    softcap: float | None = None
    has_bias: bool = False
    are_logits: bool = False


class _Sums(NamedTuple):
    """Sums over the tiles of some tokens so far, each a column. Exponentials are less the largest score."""

    largest: Any
    total: Any
    chosen: Any
    mean: Any
    cross: Any
    other_largest: Any
    other_total: Any


def _compiled_on_a_gpu(steps: Callable[..., Result]) -> Callable[..., Result]:
    """Return steps over a tile, their first argument, which torch compiles for large tiles on a GPU."""

    @wraps(steps)
    def run(tile: _Tile, *rest: Any) -> Result:
        if torch.compiler.is_compiling() or _failures or not _is_large(tile):
            return steps(tile, *rest)
        try:
            result: Result = _compiled(steps)(tile, *rest)
            return result
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler that is missing or fails costs time alone
            _failures.append(error)
            problem = f"torch cannot compile the scoring of tokens, which is slower without: {error}"
            warnings.warn(problem[:500], RuntimeWarning, stacklevel=2)
            return steps(tile, *rest)

    return run


_failures: list[Exception] = []


def _is_large(tile: _Tile) -> bool:
    return bool(tile.products.is_cuda) and tile.products.numel() >= _COMPILED_FROM


@cache
def _compiled(steps: Callable[..., Any]) -> Any:
    return torch.compile(steps, dynamic=True)


def _scores(tile: _Tile) -> Any:
    """Return the scores of a tile, in float32 or more."""
    products, temperature = tile.products, tile.temperature
    is_owned = not tile.are_logits and not torch.compiler.is_compiling()
    scores = products.to(wide(products.dtype), copy=not is_owned)
    if tile.scale != 1.0:
        scores.mul_(tile.scale)
    if tile.softcap is not None:
        scores.div_(tile.softcap).tanh_().mul_(tile.softcap)
    if not isinstance(temperature, float) or temperature != 1.0:
        scores.div_(temperature)
    scores.clamp_(min=_CLOSED)
    return scores if tile.closed is None else scores.masked_fill_(tile.closed, _CLOSED)


def _inside(tile: _Tile) -> tuple[Any, Any]:
    """Return the place of each token in a tile, and whether it is there."""
    places, width = tile.places, tile.products.shape[-1]
    return places.clamp(0, width - 1), (places >= 0) & (places < width)


@_compiled_on_a_gpu
def _added(tile: _Tile, other: _Tile | None, entropy: bool, sums: _Sums) -> _Sums:
    """Return the sums of some tokens with those of a tile, and of the reference's, if there is one."""
    before, total, chosen, mean, cross, start, other_total = sums
    scores = _scores(tile)
    at, inside = _inside(tile)
    chosen = chosen + torch.where(inside, scores.gather(-1, at), 0.0)
    largest, other_largest = torch.maximum(before, scores.amax(-1, keepdim=True)), start
    moved = before - largest
    fade = moved.exp()
    weights = scores.sub_(largest).exp()
    if other is not None:
        other_scores = _scores(other)
        other_largest = torch.maximum(start, other_scores.amax(-1, keepdim=True))
        other_moved = start - other_largest
        other_scores.sub_(other_largest)
        other_total = other_total * other_moved.exp() + other_scores.exp().sum(-1, keepdim=True)
        ratio = other_scores.neg_().add_(scores).mul_(weights)
        cross = fade * (cross + (moved - other_moved) * total) + ratio.sum(-1, keepdim=True)
    moved_mean, total = mean + moved * total, total * fade + weights.sum(-1, keepdim=True)
    if entropy:
        mean = fade * moved_mean + weights.mul_(scores).sum(-1, keepdim=True)
    return _Sums(largest, total, chosen, mean, cross, other_largest, other_total)


@_compiled_on_a_gpu
def _slopes(tile: _Tile, other: _Tile | None, entropy: bool, sums: Any, gradients: Any) -> tuple[Any, Any]:
    """Return the gradient by the products of a tile, `(n, ids)`, and by the bias, if there is one.

    Args:
        tile: Of the tokens.
        other: Of the reference, or None.
        entropy: Whether entropies are asked for.
        sums: What the forward kept, `(7, n)`.
        gradients: By log-probability, entropy and divergence, `(3, n)`.
    """
    _, of_entropies, kl, largest, log_total, other_largest, log_other = (one[:, None] for one in sums)
    of_logprobs, of_entropy, of_kl = (one[:, None] for one in gradients)
    scores, curve = _scores(tile), None
    if tile.softcap is not None:
        curve = (scores * tile.temperature).div_(tile.softcap).clamp_(-1, 1).square_().neg_().add_(1)
    logs = scores.sub_(largest).sub_(log_total)
    slopes = logs.exp()
    factor = -of_logprobs
    if other is not None:
        ratio = _scores(other).sub_(other_largest).sub_(log_other).neg_().add_(logs)
        factor = ratio.sub_(kl).mul_(of_kl).add_(factor)
    if entropy:
        factor = logs.add_(of_entropies).mul_(-of_entropy).add_(factor)
    slopes.mul_(factor)
    if torch.compiler.is_compiling():  # joins the other steps, which a scatter does not
        columns = torch.arange(slopes.shape[-1], device=slopes.device)
        slopes = torch.where(columns == tile.places, slopes + of_logprobs, slopes)
    else:
        at, inside = _inside(tile)
        slopes.scatter_add_(-1, at, of_logprobs * inside)
    if not isinstance(tile.temperature, float) or tile.temperature != 1.0:
        slopes.div_(tile.temperature)
    if curve is not None:
        slopes.mul_(curve)
    if tile.scale != 1.0:
        slopes.mul_(tile.scale)
    return slopes.to(tile.products.dtype), slopes.sum(0) if tile.has_bias else None


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
        tile: Number of tokens and of ids whose scores are held at a time. None for `TILE`, or on a GPU
            `GPU_TILE`.
    """

    predictions: Predictions
    temperature: Any = 1.0
    entropy: bool = False
    reference: HiddenStates | None = None
    dtype: Any = None
    tile: tuple[int, int] | None = None

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
        scoring = replace(self, temperature=temperature, dtype=dtype)
        # The dtype is decided above, so that the backward pass, which autocast does not see, has the same.
        with torch.autocast(device, enabled=False):
            logprobs, entropy, kl = _Tiled.apply(values, weight, bias, (scoring, head))
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

    def parts(self, values: Any) -> Iterator[slice]:
        """Yield the tokens of each row of tiles."""
        return _steps(len(self.predictions), self._tile_of(values)[0])

    def _tile_of(self, values: Any) -> tuple[int, int]:
        return self.tile or (TILE if values.device.type == "cpu" else GPU_TILE)

    def tiles(self, part: slice, rows: Any, head: OutputHead | None) -> Iterator[tuple[slice, _Tile]]:
        """Yield the ids of each tile of some tokens, and the tile."""
        vocabulary = rows.shape[-1] if head is None else head.weight.shape[0]
        limits, temperature = self.predictions.limits, self.temperature
        token_ids = self.predictions.token_ids[part, None]
        temperature = temperature if isinstance(temperature, float) else temperature[part]
        rows = rows if head is None else rows.to(self.dtype)
        for ids in _steps(vocabulary, self._tile_of(rows)[1]):
            closed = None if limits is None else limits.closed(part, ids)
            places = token_ids - ids.start
            if head is None:
                yield ids, _Tile(rows[:, ids], places, closed, temperature, are_logits=True)
                continue
            own = head.part(ids, self.dtype)
            products = torch.nn.functional.linear(rows, own.weight, own.bias)
            change = head.scale, head.softcap, head.bias is not None
            yield ids, _Tile(products, places, closed, temperature, *change)

    def others(self, part: slice) -> Iterator[_Tile]:
        """Yield the reference's tiles."""
        reference = self.reference
        if reference is not None:
            rows = flat(reference.values).index_select(0, reference.predictions.sources[part])
            yield from (tile for _, tile in self.tiles(part, rows, reference.head))

    def sums(self, part: slice, rows: Any, head: OutputHead | None, out: Any) -> None:
        """Write the values of some tokens, and the sums that the backward needs, to `out`, `(7, n)`."""
        others = self.others(part)
        starts = (_CLOSED, 0.0, 0.0, 0.0, 0.0, _CLOSED, 0.0)
        sums = _Sums(*(out.new_full((out.shape[1], 1), start) for start in starts))
        for _, tile in self.tiles(part, rows, head):
            sums = _added(tile, next(others, None), self.entropy, sums)
        largest, total, chosen, mean, cross, other_largest, other_total = sums
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
    ) -> Iterator[tuple[slice, Any, Any]]:
        """Yield for each tile its ids, the gradient by its products, `(n, ids)`, and by the bias."""
        others = self.others(part)
        for ids, tile in self.tiles(part, rows, head):
            yield ids, *_slopes(tile, next(others, None), self.entropy, out, gradients)


_Work: TypeAlias = tuple[Scoring, OutputHead | None]


class _Tiled(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, values: Any, weight: Any, bias: Any, work: _Work) -> tuple[Any, Any, Any]:
        scoring, head = work
        rows, predictions = flat(values), scoring.predictions
        dtype = wide(rows.dtype if head is None else scoring.dtype)
        out = torch.zeros(7, len(predictions), dtype=dtype, device=rows.device)
        for part in scoring.parts(rows):
            own = rows.index_select(0, predictions.sources[part])
            scoring.sums(part, own, head, out[:, part])
        # The backward takes the weights that torch has saved.
        ctx.work = scoring, head and replace(head, weight=None, bias=None)
        ctx.save_for_backward(values, weight, bias, out)
        return tuple(out[:3].clone())

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any, Any, None]:
        values, weight, bias, out = ctx.saved_tensors
        scoring, head = ctx.work
        rows, predictions = flat(values), scoring.predictions
        head = head and replace(head, weight=weight, bias=bias)
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        of_rows: Any = torch.zeros_like(rows, memory_format=torch.contiguous_format) if for_rows else None
        of_weight = torch.zeros_like(weight, dtype=out.dtype) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=out.dtype) if for_bias else None
        for part in scoring.parts(rows):
            sources = predictions.sources[part]
            own = rows.index_select(0, sources)
            hidden = None if head is None else own.to(scoring.dtype)
            slopes_of = scoring.slopes(
                part, own, head, out[:, part], torch.stack([one[part] for one in gradients])
            )
            of_own = torch.zeros_like(own, dtype=out.dtype) if head is not None and for_rows else None
            for ids, slopes, for_these in slopes_of:
                if head is None:
                    of_rows[:, ids].index_copy_(0, sources, slopes)
                    continue
                if of_bias is not None:
                    of_bias[ids] += for_these
                if of_own is not None:
                    _add_product(of_own, slopes, head.weight[ids].to(scoring.dtype))
                if of_weight is not None:
                    _add_product(of_weight[ids], slopes.T, hidden)
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
    elif left.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):  # torch 2.8, which writes no product
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.add_(left @ right)
