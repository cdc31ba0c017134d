"""`SequenceShard`: one rank's tokens of a batch, for training that is parallel along the sequence.

Context and sequence parallel training split each row over ranks; attention alone exchanges what it needs of
the others. The vision tower runs on every rank over all images, and the rows are cut where the language model
takes them, with the features in their places, as verl and ms-swift do: an image may lie across two ranks, and
models look up the features of whole rows in order. Each rank's loss reaches the features through its own
tokens, so gradients add up over the ranks.

What belongs to a token's loss is held at the token before it, which predicts it and may be another rank's:
labels, log-probabilities, advantages, rewards and weights are shifted before the split, and each lies at one
rank only. A loss summed over the ranks is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from mmrender.caching import cached_property
from mmrender.errors import BatchError
from mmrender.training.allowed import allowed_logprobs, limited_tokens
from mmrender.training.segments import attention_mask as attention_mask_of
from mmrender.training.segments import (
    by_segment,
    recurrent_layers,
    recurrent_segments,
    row_bounds,
    same_sample,
    token_numbers,
    varlen_kwargs,
)
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import IGNORE_INDEX

if TYPE_CHECKING:
    from mmrender.training.batch import TrainingBatch
    from mmrender.training.families import SequenceSplit

_ALIGNED: Final = ("input_ids", "inputs_embeds", "per_layer_inputs", "position_ids", "visual_pos_masks")
"""What a language model takes for each token; the rows' dimension follows from the shape."""
_AT_IMAGES: Final = "deepstack_visual_embeds"
"""What it takes for each feature token of the rows, in order: a list of tensors."""
_LOSS: Final = ("shift_labels", "num_items_in_batch")
"""What passes through it to the loss of Transformers; a shard has the labels of its own tokens."""


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """One rank's tokens of all rows of a batch. Made by `TrainingBatch.shard`.

    Attributes:
        whole: The batch, filled up so that it can be split; the same on every rank.
        rank: The rank in its group.
        world_size: Ranks of the group.
        layout: Which tokens the rank has.
    """

    whole: TrainingBatch
    rank: int
    world_size: int
    layout: SequenceSplit

    @cached_property
    def columns(self) -> Any:
        """Columns of `whole` at this rank, in its order: int64 `(rows, tokens)`."""
        return self._columns_of(self.rank)

    @cached_property
    def shift_labels(self) -> Any:
        """The token after each one where it is trained on, else -100: int64 `(rows, tokens)`."""
        return torch.where(self.loss_mask, self._next_ids, IGNORE_INDEX)

    @cached_property
    def loss_mask(self) -> Any:
        """Whether the token after each one is trained on: bool `(rows, tokens)`."""
        return self.at_prediction(self.whole.loss_mask)

    @cached_property
    def logprobs(self) -> Any:
        """The sampler's log-probability of the token after each one: float32 `(rows, tokens)`, or None."""
        return self._at_prediction("logprobs")

    @cached_property
    def advantages(self) -> Any:
        """As `logprobs`."""
        return self._at_prediction("advantages")

    @cached_property
    def rewards(self) -> Any:
        """As `logprobs`."""
        return self._at_prediction("rewards")

    @cached_property
    def loss_weights(self) -> Any:
        """As `logprobs`."""
        return self._at_prediction("loss_weights")

    def take(self, values: Any) -> Any:
        """Return this rank's part of a tensor `(rows, width, ...)`, such as `whole.input_ids`.

        Raises:
            BatchError: It is not aligned to `whole`.
        """
        self.whole.check_aligned(values)
        return take_columns(values, self.columns, 0)

    def at_prediction(self, values: Any) -> Any:
        """Return of a tensor `(rows, width)` the values of the token after each of this rank's.

        Where none follows in the sample, 0. Raises as `take`.
        """
        self.whole.check_aligned(values)
        follows = token_numbers(self.whole.segments, self.whole.input_ids) > 0
        known = torch.where(follows, values, torch.zeros_like(values))
        return self.take(torch.nn.functional.pad(known[:, 1:], (0, 1)))

    def merge(self, parts: Sequence[Any]) -> Any:
        """Join the parts `(rows, tokens, ...)` of all ranks, in their order, to `(rows, width, ...)`."""
        order = torch.cat([self._columns_of(rank) for rank in range(self.world_size)], dim=1).argsort(1)
        return take_columns(torch.cat([*parts], dim=1), order, 0)

    def model_inputs(self, *, mask_dtype: Any = None) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward, which runs within `cut`.

        They are those of whole rows, alike on every rank, without a mask of padding: `flash_attention_kwargs`
        has the bounds. Whole masks stay for families whose images see themselves in both directions.

        Args:
            mask_dtype: As for `TrainingBatch.model_inputs`.
        """
        return replace(self.whole, packed=True).model_inputs(mask_dtype=mask_dtype, kept_apart=True)

    def flash_attention_kwargs(self) -> dict[str, Any]:
        """Return the bounds of the sequences that attention sees, as `TrainingBatch.flash_attention_kwargs`.

        `"ulysses"`: those of whole rows, which are seen after the exchange of heads; padding counts as a
        sequence. `"ring"`: those of this rank's tokens, each sequence's share with the padding after it.
        """
        share = self.world_size if self.layout == "ring" else 1
        bounds = [[bound // share for bound in row] for row in self._bounds]
        return varlen_kwargs(bounds, self.whole.input_ids.device)

    @contextmanager
    def cut(self, model: Any, *, group: Any = None) -> Iterator[None]:
        """Cut what the model's language model takes down to this rank's tokens, within the block.

        ```python
        with shard.cut(model, group=group):
            logits = model(**shard.model_inputs()).logits      # (rows, tokens, vocabulary)
        ```

        The language model's attention must be one that is parallel along the sequence, such as that of
        ring-flash-attention, DeepSpeed or torch. It is given `flash_attention_kwargs`; the vision tower is
        not. Recurrent layers run over whole rows, sample by sample, on every rank; where activations are
        recomputed, the backward pass must happen inside the block too.

        Args:
            model: Of Transformers, or a wrapper that holds one.
            group: The process group of the ranks, in their order; for families with recurrent layers only.

        Raises:
            BatchError: There is no language model to cut before, its attention sees this rank's tokens only,
                or it takes something that cannot be cut; recurrent layers are without a group, or the shard
                is that of another rank of it.
        """
        decoder = decoder_of(model)
        attention = getattr(getattr(decoder, "config", None), "_attn_implementation", None)
        if self.world_size > 1 and attention == "eager":
            raise BatchError(
                "eager attention sees the tokens of its own rank only",
                where=f"{type(decoder).__name__}.config",
                expected="an attention that is parallel along the sequence",
                remedy='Choose it with model.set_attn_implementation({"text_config": ...})',
            )
        family = self.whole.family
        if group is not None:
            own = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            if own != (self.rank, self.world_size):
                raise BatchError(
                    "the shard is another rank's",
                    where="group",
                    expected=f"rank {self.rank} of {self.world_size}",
                    got=f"rank {own[0]} of {own[1]}",
                )
        elif family.recurrent and self.world_size > 1:
            raise BatchError(
                f"the recurrent layers of {family.model_type} carry a state along the row, over all ranks",
                where="group",
                expected="the process group of the ranks, which gathers the row for them",
                got="None",
            )
        with (
            self._cut_before(decoder),
            recurrent_layers(model, family, partial(self._over_rows, group=group)),
        ):
            yield

    def difference(self, model: Any, *, group: Any = None) -> float:
        """Return by how much the split forward parts from an eager one over whole rows.

        The trainer's attention is proved so, once and on a small batch: every rank of the group calls it.

        Args:
            model: As for `cut`.
            group: As for `cut`.

        Returns:
            The largest difference of a logit of this rank's tokens, in standard deviations: rounding, unless
            attention does not exchange what it needs or keep samples apart; then about 1.

        Raises:
            BatchError: As `cut`.
        """
        config = decoder_of(model).config
        chosen = config._attn_implementation
        with torch.no_grad():
            with self.cut(model, group=group):
                own = model(**self.model_inputs()).logits
            whole = replace(self.whole, packed=True)
            config._attn_implementation = "eager"
            try:
                with recurrent_segments(model, whole):
                    expected = self.take(model(**whole.model_inputs(mask_dtype=own.dtype)).logits).float()
            finally:
                config._attn_implementation = chosen
        real = self.take(self.whole.attention_mask)
        apart = (own.float() - expected)[real].abs()
        return float(apart.max() / expected.std()) if apart.numel() else 0.0

    def token_logprobs(self, logits: Any, *, temperature: float = 1.0) -> Any:
        """Return the log-probability of the token after each one: float32 `(rows, tokens)`.

        0.0 where none follows in the sample.

        Args:
            logits: `(rows, tokens, vocabulary)`, from within `cut`.
            temperature: As for `mmrender.training.token_logprobs`.

        Raises:
            BatchError: The logits are not those of this shard.
        """
        self.check_aligned(logits)
        found = logprobs_of(logits, self._next_ids, temperature)
        numbers = torch.full_like(self.whole.input_ids, -1)
        own_numbers = torch.arange(self.columns.shape[1], device=numbers.device)
        numbers.scatter_(1, self.columns, own_numbers.expand_as(self.columns))
        for tokens in limited_tokens(self.whole.segments, logits.device):
            at = numbers[tokens.rows, tokens.columns - 1]
            limited = tokens.only(at >= 0)
            places = limited.rows, at[at >= 0]
            chosen = allowed_logprobs(logits, places, self._next_ids[places], limited, temperature)
            found = found.index_put(places, chosen)
        follows = self.at_prediction(torch.ones_like(self.whole.loss_mask))
        return torch.where(follows, found, 0.0)

    @cached_property
    def _bounds(self) -> list[list[int]]:
        """Where the sequences of each row of `whole` begin, and its width."""
        width, unit = self.whole.width, 2 * self.world_size
        if self.layout == "ulysses":
            return [row_bounds(segments, width) for segments in self.whole.segments]
        if not self.whole.packed:
            return [[0, width]] * len(self.whole)
        rows = []
        for segments in self.whole.segments:
            stops = {one.start + -(-one.length // unit) * unit for one in segments}
            rows.append(sorted({0, width, *(one.start for one in segments), *stops}))
        return rows

    @cached_property
    def _next_ids(self) -> Any:
        return self.at_prediction(self.whole.input_ids)

    def _at_prediction(self, name: str) -> Any:
        values = getattr(self.whole, name)
        return None if values is None else self.at_prediction(values)

    def check_aligned(self, values: Any) -> None:
        """Raise `BatchError` unless a tensor is `(rows, tokens, ...)`."""
        expected = [*self.columns.shape]
        if [*values.shape[:2]] != expected:
            got = str(list(values.shape))
            raise BatchError("a tensor is not aligned to the shard", expected=f"{expected} first", got=got)

    def _columns_of(self, rank: int) -> Any:
        parts, first, last = 2 * self.world_size, rank, 2 * self.world_size - 1 - rank
        rows = self._bounds
        if self.layout == "ulysses":
            parts, first, last = self.world_size, rank, rank
            rows = [[0, self.whole.width]] * len(self.whole)
        columns = []
        for bounds in rows:
            own = []
            for start, stop in pairwise(bounds):
                size = (stop - start) // parts
                starts = [start + part * size for part in dict.fromkeys((first, last))]
                own += [torch.arange(one, one + size) for one in starts]
            columns.append(torch.cat(own))
        return torch.stack(columns).to(self.whole.input_ids.device)

    @contextmanager
    def _cut_before(self, decoder: Any) -> Iterator[None]:
        handle = decoder.register_forward_pre_hook(self._cut_inputs, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _cut_inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cut = {name: self._cut_input(module, name, value) for name, value in kwargs.items()}
        if any(isinstance(one, torch.Tensor) for one in args):
            raise self._uncut(module, "a positional argument")
        if kwargs.get(_AT_IMAGES) is not None:
            at_images = kwargs["visual_pos_masks"]
            numbers = (at_images.flatten().cumsum(0) - 1).view_as(at_images)
            own = self.take(numbers)[cut["visual_pos_masks"]]
            cut[_AT_IMAGES] = [features[own.to(features.device)] for features in kwargs[_AT_IMAGES]]
        return args, cut | self.flash_attention_kwargs()

    def _cut_input(self, module: Any, name: str, value: Any) -> Any:
        if name in _ALIGNED and isinstance(value, torch.Tensor):
            rows = value.ndim - 2 if name == "position_ids" else 0
            if [*value.shape[rows : rows + 2]] != [len(self.whole), self.whole.width]:
                raise self._uncut(module, f"{name} {list(value.shape)}")
            return take_columns(value, self.columns, rows)
        held = [*value.values()] if isinstance(value, Mapping) else value
        held = held if isinstance(held, list | tuple) else [held]
        whole = name in (_AT_IMAGES, *_LOSS) or (name == "attention_mask" and isinstance(value, Mapping))
        if not whole and any(isinstance(one, torch.Tensor) for one in held):
            raise self._uncut(module, name)
        return value

    def _uncut(self, module: Any, name: str) -> BatchError:
        return BatchError(
            f"the language model takes {name}, which is not split over ranks",
            where=type(module).__name__,
            expected=", ".join((*_ALIGNED, _AT_IMAGES)),
            remedy="Train this model without context or sequence parallelism",
        )

    def _over_rows(self, forward: Callable[..., Any], group: Any) -> Callable[..., Any]:
        """Return a recurrent layer's forward that gathers the row, and gives back this rank's tokens."""
        bounds = [row_bounds(segments, self.whole.width) for segments in self.whole.segments]
        by_sample = by_segment(forward, bounds)

        def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return self.take(by_sample(self.merge(self._parts(hidden_states, group)), *args, **kwargs))

        return run

    def _parts(self, values: Any, group: Any) -> Sequence[Any]:
        """Return what each rank holds of a tensor whose own part is given."""
        if self.world_size == 1:
            return [values]
        parts: tuple[Any, ...] = _Gather.apply(values, group)
        return parts


class AllRanks(SequenceShard):
    """The shards of all ranks in one process, each in rows of its own: `(ranks * rows, tokens)`.

    Attention and recurrent layers see whole rows, and whatever else takes from other tokens sees those of one
    rank only, as in training. So one forward shows whether a model can be split.
    """

    @cached_property
    def columns(self) -> Any:
        """Columns of `whole` in the rows of the first rank, then in those of the second, and so on."""
        return torch.cat([self._columns_of(rank) for rank in range(self.world_size)])

    def ordered(self, values: Any) -> Any:
        """Return a tensor `(ranks * rows, tokens, ...)` in the order of `whole`."""
        return self.merge(self._parts(values, None))

    @contextmanager
    def cut(self, model: Any, *, group: Any = None) -> Iterator[None]:
        """Cut what the model's language model takes for each rank; attention is one that sees whole rows."""
        from transformers import AttentionInterface

        decoder, name = decoder_of(model), f"{__name__}.AllRanks"
        before = decoder.config._attn_implementation
        AttentionInterface.register(name, self._attention)
        decoder.config._attn_implementation = name
        try:
            over_rows = partial(self._over_rows, group=group)
            with self._cut_before(decoder), recurrent_layers(model, self.whole.family, over_rows):
                yield
        finally:
            decoder.config._attn_implementation = before

    def _parts(self, values: Any, group: Any) -> Sequence[Any]:
        parts: Sequence[Any] = values.chunk(self.world_size)
        return parts

    def _attention(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Any, None]:
        """Plain attention over whole rows; takes `(ranks * rows, heads, tokens, size)`."""
        queries, keys, values = (self.ordered(one.transpose(1, 2)) for one in (query, key, value))
        groups = queries.shape[2] // keys.shape[2]
        keys, values = (one.repeat_interleave(groups, dim=2) for one in (keys, values))
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        scores = torch.einsum("rqhd,rkhd->rhqk", queries, keys) * scaling
        if attention_mask is None:
            places = torch.arange(self.whole.width, device=query.device)
            distance = places[:, None] - places
            seen = same_sample(self.whole.segments, self.whole.input_ids) & (distance >= 0)
            if options.get("sliding_window") is not None:
                seen &= distance < options["sliding_window"]
            attention_mask = attention_mask_of(seen, scores.dtype)
        weights = (scores + attention_mask).softmax(-1, dtype=torch.float32).to(values.dtype)
        return self.take(torch.einsum("rhqk,rkhd->rqhd", weights, values)), None


def take_columns(values: Any, columns: Any, dim: int) -> Any:
    """Return the columns of each row: `(..., rows, n, ...)`.

    Args:
        values: `(..., rows, width, ...)`.
        columns: int64 `(rows, n)`; or more, for all rows several times over.
        dim: Dimension of the rows.
    """
    columns = columns.to(values.device)
    rows = torch.arange(len(columns), device=values.device)[:, None] % values.shape[dim]
    return values[(slice(None),) * dim + (rows, columns)]


def logprobs_of(logits: Any, token_ids: Any, temperature: float) -> Any:
    """Return the log-probability of each token at its logits `(rows, n, vocabulary)`: float32 `(rows, n)`."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, token_ids[..., None])[..., 0] - scaled.logsumexp(-1)


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """The tensors of all ranks of a group, in their order; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Any, group: Any) -> Any:
        ctx.group = group
        parts = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, values.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed = torch.stack(gradients)
        torch.distributed.all_reduce(summed, group=ctx.group)
        return summed[torch.distributed.get_rank(ctx.group)], None


def decoder_of(model: Any) -> Any:
    """Return the language model within a model of Transformers, or within a wrapper of one."""
    for module in model.modules():
        found = module.get_decoder() if hasattr(module, "get_decoder") else None
        if found is not None and found is not module:
            return found
    raise BatchError(
        "the model has no language model to cut rows before",
        where=type(model).__name__,
        expected="a model of Transformers, whose get_decoder() gives it",
    )
