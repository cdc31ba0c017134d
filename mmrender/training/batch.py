"""`TrainingBatch`: rows of tokens with everything aligned to them, and the images that belong to each row.

A row holds one sample and padding, or several packed samples. Images are rows of `TensorList`, so taking rows
takes their images along. A batch is never changed, and slices are views of it.

Padded batches have a mask `(rows, width)` for the model. Packed ones come without: the position ids of each
sample start at zero, from which Transformers builds a mask that keeps samples apart, for its eager, sdpa,
flex and flash attention. It does so only without a cache, hence `use_cache=False`, and for models with M-RoPE
only if a fourth axis, before these three, counts tokens. If images see themselves in both directions
(Gemma 3), Transformers 5.23 looks images up by their position within the sample, as if each sample were the
first of its row. So packed batches bring whole masks, one for each kind of layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from mmrender.errors import BatchError, check_count
from mmrender.training.families import ModelFamily
from mmrender.training.predictions import Predictions, Tokens, predicted
from mmrender.training.segments import (
    Rows,
    Segment,
    attention_mask,
    bounds_of,
    check_kept_apart,
    image_block_masks,
    in_completion,
    placed,
    row_bounds,
    same_sample,
    sample_numbers,
    take_columns,
    token_numbers,
    varlen_kwargs,
)
from mmrender.training.tensor_list import OutOfBand, TensorList, check_aligned, row_places, torch
from mmrender.trajectory.sample import IGNORE_INDEX

PaddingSide: TypeAlias = Literal["left", "right"]
OPTIONAL: Final = ("logprobs", "advantages", "rewards", "loss_weights", "routed_experts")
"""Fields that all samples of a batch have, or none."""
PER_TOKEN: Final[Mapping[str, Any]] = {
    "attention_mask": False,
    "loss_mask": False,
    "token_types": 0,
    "logprobs": 0.0,
    "advantages": 0.0,
    "rewards": 0.0,
    "loss_weights": 0.0,
}
"""Tensors `(rows, width)` and their value at padding; `input_ids` has the pad token there."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch(OutOfBand):
    """Rows to train on. Built by `collate`.

    A row without a segment is a padding row: a single pad token that is attended to, since attention and
    position functions of some models fail on rows without any. It has neither loss nor image.

    Attributes:
        family: The model's inputs.
        pad_token_id: The token that fills rows.
        padding_side: The side that it fills.
        packed: Whether rows may hold several samples, kept apart by position ids instead of a mask.
        segments: The samples in each row, with their names, weight versions and `extra`.
        input_ids: int64 `(rows, width)`.
        attention_mask: bool `(rows, width)`; False at padding.
        loss_mask: bool `(rows, width)`: tokens to train on, as targets of the token before them.
        token_types: int64 `(rows, width)`: 0 text, 1 image, 2 video, 3 audio, from placeholder ranges.
        positions: int64 `(axes, rows, width)`: time, height and width for models with M-RoPE, else one axis.
        fields: Images and videos by keyword of the model.
        logprobs: float32 `(rows, width)`: the sampler's, 0.0 at tokens that were not sampled, or None.
        advantages: float32 `(rows, width)`, or None.
        rewards: As `advantages`.
        loss_weights: float32 `(rows, width)`: the weight of each token's loss, 0.0 outside the loss mask, or
            None.
        routed_experts: Integers `(rows, width, layers, top_k)`, or None. Tokens without a row from the engine
            (the last of a sample) and padding have the experts 0 to top_k - 1.
    """

    family: ModelFamily
    pad_token_id: int
    padding_side: PaddingSide
    packed: bool
    segments: Rows
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    token_types: torch.Tensor
    positions: torch.Tensor
    fields: Mapping[str, TensorList] = field(default_factory=dict)
    logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def width(self) -> int:
        """Tokens of a row, padding included."""
        return int(self.input_ids.shape[1])

    @property
    def sample_ids(self) -> list[str]:
        """Names of the samples, row by row."""
        return [segment.sample_id for _, segment in placed(self.segments)]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sample, row by row."""
        return [segment.length for _, segment in placed(self.segments)]

    @property
    def sample_numbers(self) -> Any:
        """The number of each token's sample, as in `sample_ids`, int64 `(rows, width)`; -1 at padding."""
        return sample_numbers(self.segments, self.input_ids)

    @property
    def trained_tokens(self) -> Any:
        """Number of tokens to train on in each token's sample, int64 `(rows, width)`; 0 at padding."""
        counts = torch.zeros_like(self.input_ids)
        for row, segment in placed(self.segments):
            counts[row, segment.start : segment.stop] = self.loss_mask[
                row, segment.start : segment.stop
            ].sum()
        return counts

    def cu_seqlens(self, row: int = 0) -> Any:
        """Return the start of each sequence of a row, and its width: int32 `(sequences + 1,)`.

        Variable-length attention kernels take this. Padding counts as a sequence of its own.
        """
        bounds = row_bounds(self.segments[row], self.width)
        return torch.tensor(bounds, dtype=torch.int32, device=self.input_ids.device)

    def flash_attention_kwargs(self) -> dict[str, Any]:
        """Return the bounds of all sequences as Transformers' flash attention takes them, for packed rows.

        Returns:
            `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `(sequences + 1,)`, over the rows one after another;
            `max_length_q` and `max_length_k`, the tokens of the longest. Padding counts as a sequence.
        """
        return varlen_kwargs(bounds_of(self.segments, self.width), self.input_ids.device)

    def staleness(self, order: Mapping[str, int]) -> Any:
        """Return how many updates of the weights each token is behind the newest: int64 `(rows, width)`.

        Args:
            order: The number of each version of the weights, such as its training step. The largest is now.

        Returns:
            0 for tokens without a version, such as tokens of prompts.

        Raises:
            BatchError: A version is without a number.
        """
        behind = torch.zeros_like(self.input_ids)
        for row, segment in placed(self.segments):
            for version, start, stop in segment.in_row.weight_versions:
                if version not in order:
                    raise BatchError(
                        "a version of the weights lacks a number",
                        where=segment.sample_id,
                        expected=", ".join(map(repr, list(order)[-4:])),
                        got=repr(version),
                    )
                behind[row, start:stop] = max(order.values()) - order[version]
        return behind

    @property
    def position_ids(self) -> Any:
        """Position ids as the model takes them: int64 `(rows, width)`, or for M-RoPE `(3, rows, width)`.

        Packed rows of models with M-RoPE have a fourth axis, the first one, which counts tokens.
        """
        if self.family.mrope is None:
            return self.positions[0]
        if not self.packed or self.family.image_blocks:
            return self.positions
        numbers = token_numbers(self.segments, self.input_ids)
        return torch.cat([numbers[None], self.positions])

    def model_inputs(
        self, *, mask_dtype: Any = None, kept_apart: bool = False, flash_attention: bool = False
    ) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward.

        Args:
            mask_dtype: Dtype of the additive masks that packed batches of some families bring; sdpa asks for
                the model's. None takes the dtype of the pixels, float32 without pixels.
            kept_apart: Says that recurrent layers keep samples apart from samples and padding before them
                without `recurrent_segments`.
            flash_attention: Whether the model runs with flash attention. Packed batches then bring
                `flash_attention_kwargs`: Transformers 5.23 reads bounds from position ids for a single row
                only, and would let the samples of several rows see each other.

        Returns:
            `input_ids` int64 `(rows, width)`, `position_ids`, `attention_mask` int64 `(rows, width)` unless
            packed, `use_cache`, token types under the model's own keyword, and images, if the batch has any,
            under theirs.

        Raises:
            BatchError: The model's recurrent layers would run from one packed sample to the next, or from
                padding on the left into a sample. Packed rows need masks that flash attention does not take.
        """
        if flash_attention and self.packed and self.family.image_blocks:
            raise BatchError(
                f"packed rows of {self.family.model_type} bring masks, which flash attention does not take",
                where="flash_attention",
                expected="padded rows, or sdpa",
            )
        if self.family.recurrent and not kept_apart:
            check_kept_apart(self.segments, self.width, self.family)
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        inputs["position_ids"] = self.position_ids
        if not self.packed:
            inputs["attention_mask"] = self.attention_mask.to(torch.int64)
        elif self.family.image_blocks:
            dtypes = (rows.dtype for rows in self.fields.values() if rows.values.is_floating_point())
            dtype = mask_dtype or next(dtypes, torch.float32)
            inputs["attention_mask"] = image_block_masks(self.segments, self.token_types, self.family, dtype)
        elif flash_attention:
            inputs |= self.flash_attention_kwargs()
        if self.family.token_types is not None:
            types = in_completion(self.segments, self.input_ids) if self.family.prefix else self.token_types
            inputs[self.family.token_types] = types
        return inputs | self.family.model_kwargs(self.fields)

    def labels(self, ignore_index: int = IGNORE_INDEX) -> Any:
        """Return the tokens to train on, else `ignore_index`: int64 `(rows, width)`.

        They are not shifted: a model that computes a loss from labels shifts them itself.
        """
        return torch.where(self.loss_mask, self.input_ids, ignore_index)

    def predictions(self, tokens: Tokens = "trained") -> Predictions:
        """Return the places of some tokens, and of the hidden states or logits that predict them.

        Args:
            tokens: `"trained"` for the tokens of the loss mask, `"all"`, or a mask, bool `(rows, width)`.
        """
        places = predicted(self.segments, self.loss_mask, tokens).reshape(-1).nonzero()[0]
        shape = len(self), self.width
        return Predictions.of(self.segments, self.input_ids, places, places, shape=shape, shift=1)

    def block_diagonal_mask(self, dtype: Any = None) -> Any:
        """Return the tokens that each token sees: causal, within its own sample, `(rows, 1, width, width)`.

        For attention that takes a whole mask, and knows neither windows nor images that see themselves in
        both directions; `model_inputs` serves the rest.

        Args:
            dtype: Floating dtype of an additive mask (0 or the smallest value); None for a boolean one.
        """
        causal = torch.ones(self.width, self.width, dtype=torch.bool, device=self.input_ids.device).tril()
        return attention_mask(same_sample(self.segments, self.input_ids) & causal, dtype)

    def split(self, values: Any) -> list[Any]:
        """Cut a tensor `(rows, width, ...)`, such as losses, into one view `(tokens, ...)` for each sample.

        Raises:
            BatchError: The tensor is not aligned to the batch.
        """
        self.check_aligned(values)
        return [values[row, segment.start : segment.stop] for row, segment in placed(self.segments)]

    def rows(self, start: int, stop: int) -> "TrainingBatch":
        """Return the rows `[start, stop)` as views."""
        taken = slice(start, stop)
        views = self._map(lambda t, dim: t[taken] if dim == 0 else t[:, taken], lambda rows: rows[taken])
        return replace(views, segments=self.segments[taken])

    def select(self, indices: Sequence[int]) -> "TrainingBatch":
        """Return a copy of the rows of these indices, in their order. Raises as `TensorList.select`."""
        places = row_places(indices, len(self))
        gather = torch.tensor(places, dtype=torch.int64, device=self.input_ids.device)
        copies = self._map(lambda t, dim: t.index_select(dim, gather), lambda rows: rows[places])
        return replace(copies, segments=tuple(self.segments[place] for place in places))

    def with_padding_rows(self, count: int) -> "TrainingBatch":
        """Return the batch with that many padding rows after its own."""
        if count <= 0:
            return self
        grown = self._padded(rows=count)
        grown.attention_mask[-count:, 0 if self.padding_side == "right" else -1] = True
        return replace(grown, segments=self.segments + ((),) * count)

    def widened(self, width: int) -> "TrainingBatch":
        """Return the rows filled up to `width` tokens."""
        extra = width - self.width
        if extra <= 0:
            return self
        left = 0 if self.padding_side == "right" else extra
        return replace(self._padded(columns=extra, left=left), segments=_shifted(self.segments, left))

    def spaced(self, multiple: int) -> "TrainingBatch":
        """Return a copy of the rows with each sample followed by padding up to a multiple of tokens."""
        left = self.padding_side == "left"
        wide = self.widened(self.width + 1)  # its column of padding is copied to empty places
        lengths = [[-(-one.length // multiple) * multiple for one in row] for row in self.segments]
        width = max(multiple, *map(sum, lengths))
        columns = torch.full((len(self), width), 0 if left else self.width)
        segments: list[tuple[Segment, ...]] = []
        for row, spaces in enumerate(lengths):
            start = width - sum(spaces) if left else 0
            segments.append(())
            for one, length in zip(wide.segments[row], spaces, strict=True):
                columns[row, start : start + one.length] = torch.arange(one.start, one.stop)
                segments[row] += (replace(one, start=start),)
                start += length
            if not spaces:  # the token of a padding row that is attended to
                columns[row, -1 if left else 0] = wide.width - 1 if left else 0
        columns = columns.to(self.input_ids.device)
        copies = wide._map(lambda tensor, dim: take_columns(tensor, columns, dim))
        return replace(copies, segments=tuple(segments))

    def _trimmed(self) -> "TrainingBatch":
        """Cut off the columns that are padding in every row."""
        width = max((self._used(row) for row in range(len(self))), default=0)
        cut = slice(0, width) if self.padding_side == "right" else slice(self.width - width, self.width)
        views = self._map(lambda t, dim: t[:, cut] if dim == 0 else t[:, :, cut])
        return replace(views, segments=_shifted(self.segments, -cut.start))

    def chunk(self, parts: int) -> "list[TrainingBatch]":
        """Cut into batches of equally many rows, one for each rank. Padding rows fill up the last."""
        check_count("parts", parts, error=BatchError)
        size = -(-len(self) // parts)
        whole = self.with_padding_rows(size * parts - len(self))
        return [whole.rows(size * part, size * (part + 1)) for part in range(parts)]

    def micro_batches(self, max_tokens: int) -> "list[TrainingBatch]":
        """Cut into batches of at most `max_tokens` tokens, padding included. Rows of like length share one.

        Raises:
            BatchError: A row is longer.
        """
        lengths = [self._used(row) for row in range(len(self))]
        order = sorted(range(len(self)), key=lambda row: (-lengths[row], row))
        if order and lengths[order[0]] > max_tokens:
            raise BatchError(
                "a row does not fit a micro-batch, and samples are not split",
                where=f"row {order[0]}",
                expected=f"at most {max_tokens} tokens",
                got=str(lengths[order[0]]),
            )
        batches, start = [], 0
        while start < len(order):
            count = max(1, max_tokens // max(1, lengths[order[start]]))
            batches.append(self.select(sorted(order[start : start + count]))._trimmed())
            start += count
        return batches

    @staticmethod
    def cat(batches: "Sequence[TrainingBatch]") -> "TrainingBatch":
        """Return all rows, filled up to the widest. Batches with images and without may be mixed.

        Raises:
            BatchError: There is no batch, or they differ in family, padding, packing, optional tensors or
                the trailing dimensions of their images.
        """
        if not batches:
            raise BatchError("no batches to join", where="batches")
        first = batches[0]
        for name in ("family", "pad_token_id", "padding_side", "packed", *OPTIONAL):
            for index, batch in enumerate(batches):
                expected, got = getattr(first, name), getattr(batch, name)
                if name in OPTIONAL:
                    expected, got = ("none" if one is None else "some" for one in (expected, got))
                if got != expected:
                    where = f"batches[{index}].{name}"
                    raise BatchError("batches differ", where=where, expected=str(expected), got=str(got))
        width = max(batch.width for batch in batches)
        wide = [batch.widened(width) for batch in batches]
        fields = {}
        for name in dict.fromkeys(name for batch in batches for name in batch.fields):
            lists = [batch.fields.get(name, TensorList.empty(len(batch))) for batch in batches]
            try:
                fields[name] = TensorList.cat(lists, pad=first.family.rule(name).padded)
            except BatchError as error:
                error.where = f"fields[{name!r}]"
                raise
        tensors = [(name, dim) for name, _, dim in first._tensors()]
        joined = {name: torch.cat([getattr(one, name) for one in wide], dim=dim) for name, dim in tensors}
        segments = tuple(row for batch in wide for row in batch.segments)
        return replace(first, segments=segments, fields=fields, **joined)

    def to(self, device: Any = None, dtype: Any = None, *, non_blocking: bool = False) -> "TrainingBatch":
        """Return the batch on a device, with pixels in a dtype. Values of tokens keep theirs."""
        # Not `or`: a device may be given by number, and the first one is 0.
        target = self.input_ids.device if device is None else device
        return self._map(
            lambda t, _: t.to(device=target, non_blocking=non_blocking),
            lambda rows: rows.to(device, dtype, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "TrainingBatch":
        """Return the batch in page-locked memory, as a data loader of torch asks for."""
        return self._map(lambda t, _: t.pin_memory(), TensorList.pin_memory)

    def check_aligned(self, values: Any) -> None:
        """Raise `BatchError` unless a tensor is `(rows, width, ...)`."""
        check_aligned(values, self.input_ids.shape, "batch")

    def _tensors(self) -> Iterator[tuple[str, Any, int]]:
        """Yield name and value of each tensor that the batch has, and the dimension of its rows."""
        for name in ("input_ids", *PER_TOKEN, "routed_experts"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name), 0
        yield "positions", self.positions, 1

    def _map(
        self, change: Callable[[Any, int], Any], rows: Callable[[TensorList], TensorList] | None = None
    ) -> "TrainingBatch":
        """Change each tensor, passed with the dimension of its rows, and with `rows` the images."""
        fields = self.fields if rows is None else {name: rows(images) for name, images in self.fields.items()}
        tensors = {name: change(tensor, dim) for name, tensor, dim in self._tensors()}
        return replace(self, fields=fields, **tensors)

    def _padded(self, *, rows: int = 0, columns: int = 0, left: int = 0) -> "TrainingBatch":
        """Return tensors with padding rows at the end, and padding columns, `left` of them on the left."""
        fills: dict[str, Any] = {**PER_TOKEN, "input_ids": self.pad_token_id, "positions": 0}
        grown = {}
        for name, tensor, dim in self._tensors():
            shape = [*tensor.shape]
            shape[dim : dim + 2] = len(self) + rows, self.width + columns
            grown[name] = tensor.new_empty(shape)
            grown[name][:] = (
                torch.arange(shape[-1], device=tensor.device) if name == "routed_experts" else fills[name]
            )
            grown[name].narrow(dim, 0, len(self)).narrow(dim + 1, left, self.width).copy_(tensor)
        fields = {
            name: TensorList(images.values, images.lengths + (0,) * rows)
            for name, images in self.fields.items()
        }
        return replace(self, fields=fields, **grown)

    def _used(self, row: int) -> int:
        """Columns that a row needs."""
        if not self.segments[row]:
            return 1
        right = self.padding_side == "right"
        return self.segments[row][-1].stop if right else self.width - self.segments[row][0].start


def _shifted(rows: Rows, by: int) -> Rows:
    return tuple(tuple(replace(segment, start=segment.start + by) for segment in row) for row in rows)
