"""Places of samples in their rows, and masks that keep packed samples apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeAlias

from mmrender.errors import BatchError
from mmrender.training.families import ModelFamily
from mmrender.training.tensor_list import torch
from mmrender.trajectory.aligned import Aligned
from mmrender.trajectory.engine_data import AllowedTokens, WeightVersionSpan


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's tokens in its row, `[start, start + length)`, and further data of the sample.

    Attributes:
        start: Column of its first token.
        length: Number of its tokens.
        sample_id: Its name.
        weight_versions: Weights that sampled its tokens, counted from its own first token.
        allowed: Tokens that could be sampled, counted likewise.
        extra: Further data of the sample.
        prompt_length: Number of its tokens before the first one to train on.
    """

    start: int
    length: int
    sample_id: str
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    allowed: tuple[AllowedTokens, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt_length: int = 0

    @property
    def stop(self) -> int:
        """Column after its last token."""
        return self.start + self.length

    @property
    def in_row(self) -> Aligned:
        """Its weight versions and allowed tokens by column."""
        return Aligned(weight_versions=self.weight_versions, allowed=self.allowed).shift(self.start)


Rows: TypeAlias = tuple[tuple[Segment, ...], ...]
"""The samples in each row."""
Bounds: TypeAlias = tuple[tuple[int, ...], ...]
"""For each row the start of each of its sequences, and its width."""
RUN_BY_SAMPLE: Final[ContextVar[Bounds | None]] = ContextVar("mmrender_recurrent_segments", default=None)
"""Bounds of the batch whose block `recurrent_segments` was entered."""


def placed(rows: Rows) -> Iterator[tuple[int, Segment]]:
    """Yield each sample with the number of its row."""
    return ((row, segment) for row, segments in enumerate(rows) for segment in segments)


def token_numbers(rows: Rows, like: Any) -> Any:
    """Return each token's number within its sample, shaped as `like` `(rows, width)`; 0 for padding."""
    numbers = torch.zeros_like(like)
    for row, segment in placed(rows):
        numbers[row, segment.start : segment.stop] = torch.arange(segment.length, device=like.device)
    return numbers


def in_completion(rows: Rows, like: Any) -> Any:
    """Return 0 for the tokens of prompts, else 1, padding included, shaped as `like` `(rows, width)`."""
    marks = torch.ones_like(like)
    for row, segment in placed(rows):
        marks[row, segment.start : segment.start + segment.prompt_length] = 0
    return marks


def sample_numbers(rows: Rows, like: Any) -> Any:
    """Return the number of each token's sample, shaped as `like` `(rows, width)`; -1 for padding."""
    numbers = torch.full_like(like, -1)
    for number, (row, segment) in enumerate(placed(rows)):
        numbers[row, segment.start : segment.stop] = number
    return numbers


def same_sample(rows: Rows, like: Any) -> Any:
    """Return which tokens share a sample, bool `(rows, width, width)`; False at padding."""
    owner = sample_numbers(rows, like)
    return (owner[:, :, None] == owner[:, None, :]) & (owner[:, :, None] >= 0)


def attention_mask(seen: Any, dtype: Any = None) -> Any:
    """Return `(rows, 1, width, width)`: the tokens that each token sees, and itself, so no softmax is empty.

    Args:
        seen: bool `(rows, width, width)`.
        dtype: Floating dtype of an additive mask (0 or the smallest value); None for a boolean one.
    """
    seen = (seen | torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device))[:, None]
    if dtype is None:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def image_block_masks(rows: Rows, token_types: Any, family: ModelFamily, dtype: Any) -> dict[str, Any]:
    """Return additive masks by kind of layer, for images that see themselves in both directions.

    Layers see earlier tokens and, if the family says so, tokens of the same image. Layers with a window see
    the last ones of these. Source: `create_masks_for_vision_model` of Transformers 5.23 in
    `models/{gemma3,gemma4}`.
    """
    image = token_types > 0
    starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
    block = torch.where(image, starts.cumsum(1), 0)
    same_image = (block[:, :, None] == block[:, None, :]) & image[:, :, None]
    places = torch.arange(token_types.shape[1], device=image.device)
    causal = places[None, :] <= places[:, None]
    near: dict[str, Any] = {"full_attention": True}
    if family.sliding_window is not None:
        near["sliding_attention"] = places[None, :] > places[:, None] - family.sliding_window
    within = same_sample(rows, token_types)
    return {
        kind: attention_mask(
            within & near[kind] & (causal | (same_image & (kind in family.image_blocks))), dtype
        )
        for kind in near
    }


def row_bounds(segments: Sequence[Segment], width: int) -> list[int]:
    """Return the start of each sequence of a row, and its width. Padding counts as a sequence of its own."""
    return sorted({0, width, *(bound for segment in segments for bound in (segment.start, segment.stop))})


def bounds_of(rows: Rows, width: int) -> Bounds:
    """Return the bounds of all rows."""
    return tuple(tuple(row_bounds(segments, width)) for segments in rows)


def varlen_kwargs(rows: Sequence[Sequence[int]], device: Any) -> dict[str, Any]:
    """Return the bounds of all sequences as Transformers' flash attention takes them.

    Args:
        rows: For each row the start of each of its sequences, and its width.
        device: The device of the offsets.
    """
    width = rows[0][-1]
    bounds = [0, *(number * width + bound for number, row in enumerate(rows) for bound in row[1:])]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(bounds))
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **lengths}


def take_columns(values: Any, columns: Any, dim: int = 0) -> Any:
    """Return the columns of each row: `(..., rows, n, ...)`.

    Args:
        values: `(..., rows, width, ...)`.
        columns: int64 `(rows, n)`.
        dim: Dimension of the rows.
    """
    columns = columns.to(values.device)
    rows = torch.arange(len(columns), device=values.device)[:, None]
    return values[(slice(None),) * dim + (rows, columns)]


def check_kept_apart(rows: Rows, width: int, family: ModelFamily) -> None:
    """Refuse samples after others or after padding, for recurrent layers outside of `recurrent_segments`."""
    shared = [row for row, segments in enumerate(rows) if any(one.start for one in segments)]
    if shared and RUN_BY_SAMPLE.get() != bounds_of(rows, width):
        raise BatchError(
            f"the recurrent layers of {family.model_type} would run from a sample or padding into the next",
            where=f"row {shared[0]}",
            expected="a block `with recurrent_segments(model, batch)` around this call and the forward",
            remedy="Enter it, pad on the right, or say kept_apart=True if your kernels take the bounds",
        )
