"""`SequenceShard`: one rank's tokens of a batch, for context and sequence parallel training.

It splits each row over ranks, and attention exchanges keys and values. A token's loss belongs to the
token before it, which predicts it and may be another rank's. So labels, log-probabilities, advantages,
rewards and weights are shifted before the split. Each lies at one rank only, and losses summed over the ranks
are the loss of the whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mmrender.caching import cached_property
from mmrender.errors import BatchError, check_count
from mmrender.training.batch import TrainingBatch
from mmrender.training.families import SequenceSplit
from mmrender.training.logprobs import token_logprobs
from mmrender.training.predictions import Predictions, Tokens, predicted
from mmrender.training.segments import row_bounds, take_columns, token_numbers, varlen_kwargs
from mmrender.training.tensor_list import check_aligned, torch
from mmrender.trajectory.sample import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """One rank's tokens of all rows of a batch. Made by `SequenceShard.of`.

    Attributes:
        whole: The batch with rows filled up so that they can be split, the same on every rank.
        rank: The rank in its group.
        world_size: Ranks of the group.
        layout: Which tokens the rank has.
    """

    whole: TrainingBatch
    rank: int
    world_size: int
    layout: SequenceSplit

    @classmethod
    def of(
        cls, batch: TrainingBatch, *, rank: int, world_size: int, layout: SequenceSplit
    ) -> "SequenceShard":
        """Return one rank's tokens of all rows. Every rank of the group takes its shard of the same batch.

        Rows are filled up first: to a multiple of the ranks for `"ulysses"`, of twice the ranks for `"ring"`,
        and packed rows sample by sample.

        Args:
            batch: The same on every rank.
            rank: The rank in its group, from 0.
            world_size: Ranks of the group.
            layout: `"ulysses"`: each rank has one run of tokens, as DeepSpeed's sequence parallelism splits.
                `"ring"`: the first and the last of 2 * `world_size` parts go to the first rank, and so on
                inwards, so that causal attention costs all ranks the same. A padded row is split whole, as by
                torch's context parallelism and Accelerate; packed rows sample by sample, as by Megatron and
                ring-flash-attention for variable lengths.

        Raises:
            BatchError: The family's rows are not split this way, the rank is not of the group, or rows are
                padded on the left and the layout is a ring, whose attention would see the padding.
        """
        batch.family.check_layout(layout)
        check_count("rank", rank, minimum=0, maximum=world_size - 1, error=BatchError)
        parts = world_size if layout == "ulysses" else 2 * world_size
        if layout == "ring" and batch.packed:
            return cls(batch.spaced(parts), rank, world_size, layout)
        if layout == "ring" and batch.padding_side == "left":
            raise BatchError(
                "attention in a ring would see padding before the tokens",
                where="padding_side",
                expected="'right', or packed rows",
                got="'left'",
            )
        return cls(batch.widened(-(-batch.width // parts) * parts), rank, world_size, layout)

    @cached_property
    def columns(self) -> Any:
        """Columns of `whole` at this rank, in its order: int64 `(rows, tokens)`."""
        return self._columns_of(self.rank)

    @cached_property
    def position_ids(self) -> Any:
        """This rank's part of the position ids: int64 `(rows, tokens)`, or `(3 or 4, rows, tokens)`."""
        position_ids = replace(self.whole, packed=True).position_ids
        return take_columns(position_ids, self.columns, position_ids.ndim - 2)

    @cached_property
    def shift_labels(self) -> Any:
        """The token after each one if it is trained on, else -100: int64 `(rows, tokens)`."""
        return torch.where(self.loss_mask, self.at_prediction(self.whole.input_ids), IGNORE_INDEX)

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

    @cached_property
    def sample_numbers(self) -> Any:
        """The number of the next token's sample in `whole`, int64 `(rows, tokens)`; -1 if none follows."""
        return self.at_prediction(self.whole.sample_numbers + 1) - 1

    @cached_property
    def trained_tokens(self) -> Any:
        """Number of tokens to train on in the next token's sample, over all ranks: int64 `(rows, tokens)`."""
        return self.at_prediction(self.whole.trained_tokens)

    @property
    def sample_ids(self) -> list[str]:
        """Names of the samples of `whole`."""
        return self.whole.sample_ids

    def _at_prediction(self, name: str) -> Any:
        values = getattr(self.whole, name)
        return None if values is None else self.at_prediction(values)

    def take(self, values: Any) -> Any:
        """Return this rank's part of a tensor `(rows, width, ...)`, such as `whole.input_ids`.

        Raises:
            BatchError: It is not aligned to `whole`.
        """
        self.whole.check_aligned(values)
        return take_columns(values, self.columns)

    def at_prediction(self, values: Any) -> Any:
        """Return the values of the token after each token of this rank, from a tensor `(rows, width)`.

        0 if none follows in the sample. Raises as `take`.
        """
        self.whole.check_aligned(values)
        follows = token_numbers(self.whole.segments, self.whole.input_ids) > 0
        values = torch.where(follows, values, torch.zeros_like(values))
        return self.take(torch.nn.functional.pad(values[:, 1:], (0, 1)))

    def merge(self, parts: Sequence[Any]) -> Any:
        """Join the parts `(rows, tokens, ...)` of all ranks, in their order, to `(rows, width, ...)`."""
        order = torch.cat([self._columns_of(rank) for rank in range(self.world_size)], dim=1).argsort(1)
        return take_columns(torch.cat([*parts], dim=1), order)

    def model_inputs(self, *, mask_dtype: Any = None, kept_apart: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of a forward over whole rows, the same on every rank.

        Padding is not masked: `flash_attention_kwargs` has the bounds. Families whose images see themselves
        in both directions have whole masks. Arguments and errors as for `TrainingBatch.model_inputs`;
        `kept_apart` holds over all ranks.
        """
        whole = replace(self.whole, packed=True)
        return whole.model_inputs(mask_dtype=mask_dtype, kept_apart=kept_apart)

    def flash_attention_kwargs(self) -> dict[str, Any]:
        """Return the bounds of the sequences that attention sees, as `TrainingBatch.flash_attention_kwargs`.

        For `"ulysses"` the bounds in whole rows, which are seen after the exchange of heads. Padding counts
        as a sequence. For `"ring"` the bounds among this rank's tokens: its share of each sequence, with the
        padding after it.
        """
        share = self.world_size if self.layout == "ring" else 1
        bounds = [[bound // share for bound in row] for row in self._bounds]
        return varlen_kwargs(bounds, self.whole.input_ids.device)

    def token_logprobs(self, logits: Any, *, temperature: float = 1.0) -> Any:
        """Return the log-probability of the token after each one: float32 `(rows, tokens)`.

        0.0 if none follows in the sample. As `mmrender.training.token_logprobs`, of this rank's logits.
        """
        return token_logprobs(logits, self, temperature=temperature)

    def predictions(self, tokens: Tokens = "trained") -> Predictions:
        """Return the predictions of some tokens of `whole` at this rank, each at the token before it."""
        whole, columns = self.whole, self.columns.cpu().numpy()
        mask = predicted(whole.segments, whole.loss_mask, tokens)
        follows = np.take_along_axis(np.pad(mask, ((0, 0), (0, 1))), columns + 1, axis=1)
        rows, places = follows.nonzero()
        nexts = rows * whole.width + columns[rows, places] + 1
        own = rows * columns.shape[1] + places
        return Predictions.of(whole.segments, whole.input_ids, nexts, own, shape=columns.shape, shift=0)

    def check_aligned(self, values: Any) -> None:
        """Raise `BatchError` unless a tensor is `(rows, tokens, ...)`."""
        check_aligned(values, self.columns.shape, "shard")

    @cached_property
    def _bounds(self) -> list[list[int]]:
        """Start of each sequence in each row of `whole`, and its width."""
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

    def _columns_of(self, rank: int) -> Any:
        if self.layout == "ulysses":
            parts, chosen = self.world_size, [rank]
            rows = [[0, self.whole.width]] * len(self.whole)
        else:
            parts, chosen = 2 * self.world_size, [rank, 2 * self.world_size - 1 - rank]
            rows = self._bounds
        columns = [
            torch.cat(
                [
                    torch.arange(size) + start + part * size
                    for start, size in ((start, (stop - start) // parts) for start, stop in pairwise(bounds))
                    for part in chosen
                ]
            )
            for bounds in rows
        ]
        return torch.stack(columns).to(self.whole.input_ids.device)
