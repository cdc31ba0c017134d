"""Places of samples in their rows, and masks that keep packed samples apart.

Attention keeps them apart by masks. Layers that carry a state along the row, such as the gated delta nets of
Qwen3.5, see no mask: the state of one sample runs into the next. Kernels for sequences of varying length take
the bounds (`cu_seqlens`); the plain torch implementations ignore them. `recurrent_segments` runs such layers
once for each sample, which is exact with either, and costs what the samples cost alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mmrender.errors import BatchError
from mmrender.training.tensor_list import torch
from mmrender.trajectory.engine_data import AllowedTokens, WeightVersionSpan

if TYPE_CHECKING:
    from mmrender.training.batch import TrainingBatch
    from mmrender.training.families import ModelFamily

_LAYER: Final = r"(^|\.)layers\.\d+\."
"""Path of a layer within its model, as a pattern."""
_VARLEN: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Bounds of whole rows, which do not hold for a sequence that is run alone."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's tokens in its row, `[start, start + length)`, and what the sample says of itself.

    Attributes:
        start: Column of its first token.
        length: Number of its tokens.
        sample_id: Its name.
        weight_versions: Which weights sampled which of its tokens, counted from its own first token.
        allowed: What sampled tokens were chosen among, counted likewise.
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


Rows: TypeAlias = tuple[tuple[Segment, ...], ...]
"""The samples in each row."""
_Bounds: TypeAlias = tuple[tuple[int, ...], ...]
_ENTERED: ContextVar[_Bounds | None] = ContextVar("mmrender_recurrent_segments", default=None)


def token_numbers(rows: Rows, like: Any) -> Any:
    """Return each token's number within its sample, shaped as `like` `(rows, width)`; 0 for padding."""
    numbers = torch.zeros_like(like)
    for row, segments in enumerate(rows):
        for segment in segments:
            own = torch.arange(segment.length, device=like.device)
            numbers[row, segment.start : segment.stop] = own
    return numbers


def in_completion(rows: Rows, like: Any) -> Any:
    """Return which tokens do not belong to a prompt, shaped as `like` `(rows, width)`; padding does not."""
    found = torch.ones_like(like)
    for row, segments in enumerate(rows):
        for segment in segments:
            found[row, segment.start : segment.start + segment.prompt_length] = 0
    return found


def same_sample(rows: Rows, like: Any) -> Any:
    """Return which tokens are of one sample, bool `(rows, width, width)`; padding is of none."""
    owner = torch.full_like(like, -1)
    for row, segments in enumerate(rows):
        for number, segment in enumerate(segments):
            owner[row, segment.start : segment.stop] = number
    return (owner[:, :, None] == owner[:, None, :]) & (owner[:, :, None] >= 0)


def attention_mask(seen: Any, dtype: Any = None) -> Any:
    """Return `(rows, 1, width, width)`: what each token sees, and itself, so that no softmax is empty.

    Args:
        seen: bool `(rows, width, width)`.
        dtype: Floating dtype of an additive mask (0 or the least value); None for a boolean one.
    """
    seen = (seen | torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device))[:, None]
    if dtype is None:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def image_block_masks(rows: Rows, token_types: Any, family: ModelFamily, dtype: Any) -> dict[str, Any]:
    """Return additive masks by kind of layer, for images that see themselves in both directions.

    Layers see earlier tokens and, where the family says so, those of the same image; layers with a window see
    of that the last ones. Source: `create_masks_for_vision_model` of Transformers 5.23 in
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
    own = same_sample(rows, token_types)
    return {
        kind: attention_mask(
            own & near[kind] & (causal | (same_image & (kind in family.image_blocks))), dtype
        )
        for kind in near
    }


def row_bounds(segments: tuple[Segment, ...], width: int) -> list[int]:
    """Return where the sequences of a row begin, and its width; padding counts as a sequence of its own."""
    bounds = {0, width}
    for segment in segments:
        bounds |= {segment.start, segment.stop}
    return sorted(bounds)


def varlen_kwargs(rows: Sequence[Sequence[int]], device: Any) -> dict[str, Any]:
    """Return the bounds of all sequences as Transformers' flash attention takes them.

    Args:
        rows: For each row where its sequences begin, and its width.
        device: Where the offsets go.
    """
    width = rows[0][-1]
    bounds = [0, *(row * width + bound for row, own in enumerate(rows) for bound in own[1:])]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(bounds))
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **lengths}


@contextmanager
def recurrent_segments(model: Any, batch: TrainingBatch) -> Iterator[None]:
    """Run the model's recurrent layers sample by sample over the rows of `batch`, within the block.

    ```python
    with recurrent_segments(model, batch):
        logits = model(**batch.model_inputs()).logits
    ```

    Models without such layers and padded batches are left as they are. Recomputation of activations in the
    backward pass must happen inside the block too.

    Raises:
        BatchError: The model's family has recurrent layers, and none is found.
    """
    bounds = _bounds(batch)
    by_sample = partial(by_segment, rows=bounds)
    token = _ENTERED.set(bounds)
    try:
        with recurrent_layers(model, batch.family if batch.packed else None, by_sample):
            yield
    finally:
        _ENTERED.reset(token)


@contextmanager
def recurrent_layers(model: Any, family: ModelFamily | None, change: Callable[[Any], Any]) -> Iterator[None]:
    """Run what `change` makes of each recurrent layer's forward in its place, within the block.

    Layers of the language model only: a vision tower may have modules of the same name, and no samples.

    Raises:
        BatchError: The family has recurrent layers, and none is found.
    """
    layers = []
    if family is not None and family.recurrent:
        named = re.compile(f"{_LAYER}({'|'.join(map(re.escape, family.recurrent.split('|')))})$")
        owner = next((one for one in model.modules() if hasattr(one, "get_decoder")), None)
        decoder = model if owner is None else owner.get_decoder()
        layers = [one for name, one in decoder.named_modules() if named.search(name)]
        if not layers:
            raise BatchError(
                f"the recurrent layers of {family.model_type} are not found",
                where=type(model).__name__,
                expected=f"modules named {family.recurrent}",
                remedy="Use padded batches",
            )
    originals = [layer.forward for layer in layers]
    try:
        for layer, forward in zip(layers, originals, strict=True):
            layer.forward = change(forward)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)  # the class's own method shows again


def check_kept_apart(batch: TrainingBatch) -> None:
    """Refuse a packed batch for a model with recurrent layers outside of `recurrent_segments`."""
    shared = [row for row, segments in enumerate(batch.segments) if len(segments) > 1]
    if shared and _ENTERED.get() != _bounds(batch):
        raise BatchError(
            f"the recurrent layers of {batch.family.model_type} would run from one sample into the next",
            where=f"row {shared[0]}",
            expected="a block `with recurrent_segments(model, batch)` around this call and the forward",
            remedy="Enter it, use a padded batch, or say kept_apart=True if your kernels take the bounds",
        )


def _bounds(batch: TrainingBatch) -> _Bounds:
    return tuple(tuple(row_bounds(segments, batch.width)) for segments in batch.segments)


def by_segment(forward: Any, rows: Sequence[Sequence[int]]) -> Any:
    """Return a layer's forward that runs each sequence alone; `rows` are the bounds in each row."""

    def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        own_kwargs = {name: value for name, value in kwargs.items() if name not in _VARLEN}
        shape = hidden_states.shape[:2]

        def cut(value: Any, row: int, start: int, stop: int) -> Any:
            aligned = isinstance(value, torch.Tensor) and value.shape[:2] == shape
            return value[row : row + 1, start:stop] if aligned else value

        parts = [
            torch.cat(
                [
                    forward(
                        *(cut(one, row, start, stop) for one in (hidden_states, *args)),
                        **{name: cut(one, row, start, stop) for name, one in own_kwargs.items()},
                    )
                    for start, stop in pairwise(bounds)
                ],
                dim=1,
            )
            for row, bounds in enumerate(rows)
        ]
        return torch.cat(parts)

    return run
