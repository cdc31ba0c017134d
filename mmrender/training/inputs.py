"""What a batch is to a model: the keyword arguments of its forward, labels and masks.

Padded batches come with a mask `(rows, width)`. Packed ones come without: the position ids of each sample
start at zero, from which Transformers builds a mask that keeps samples apart, for its eager, sdpa, flex and
flash attention alike. It does so only without a cache, hence `use_cache=False`, and for models with M-RoPE
only if a fourth axis, before the other three, counts tokens.

Two kinds of models need more. Where images see themselves in both directions (Gemma 3), Transformers 5.23
looks images up by their position within the sample, as if each sample were the first of its row; packed
batches bring whole masks instead, one for each kind of layer. Layers that carry a state along the row see no
mask at all: see `mmrender.training.recurrent`.
"""

from typing import Any

from mmrender.training._torch import torch
from mmrender.training.batch import TrainingBatch
from mmrender.training.fields import model_kwargs
from mmrender.training.recurrent import check_kept_apart

IGNORE_INDEX = -100
"""Label that cross-entropy of torch leaves out."""


def model_inputs(batch: TrainingBatch, *, mask_dtype: Any = None, kept_apart: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for a batch.

    Args:
        batch: Padded or packed.
        mask_dtype: Of the additive masks that packed batches of some families bring; the model's own, which
            sdpa asks for. None takes that of the pixels, float32 without any.
        kept_apart: Says that recurrent layers keep packed samples apart without `recurrent_segments`.

    Returns:
        `input_ids` int64 `(rows, width)`; `position_ids` int64 `(rows, width)`, for models with M-RoPE
        `(3, rows, width)` and if packed `(4, rows, width)`; `attention_mask` int64 `(rows, width)` unless
        packed; `use_cache`; token types under the model's own keyword; images as the model takes them, none
        where the batch has none.

    Raises:
        BatchError: The model's recurrent layers would run from one packed sample to the next.
    """
    if not kept_apart:
        check_kept_apart(batch)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if not batch.packed:
        inputs["attention_mask"] = batch.attention_mask.to(torch.int64)
        inputs["position_ids"] = batch.positions[0] if batch.family.mrope is None else batch.positions
    elif batch.family.image_blocks:
        inputs["position_ids"] = batch.positions[0]
        inputs["attention_mask"] = _masks_of_blocks(batch, mask_dtype or _pixel_dtype(batch))
    else:
        counted = _counted(batch)
        mrope = batch.family.mrope is not None
        inputs["position_ids"] = torch.cat([counted[None], batch.positions]) if mrope else counted
    if batch.family.token_types is not None:
        inputs[batch.family.token_types] = batch.token_types
    return inputs | model_kwargs(batch.fields, batch.family)


def labels(batch: TrainingBatch, ignore_index: int = IGNORE_INDEX) -> Any:
    """Return `input_ids` where `loss_mask` holds, else `ignore_index`: int64 `(rows, width)`.

    They are not shifted; a model that computes a loss from labels shifts them itself.
    """
    return torch.where(batch.loss_mask, batch.input_ids, ignore_index)


def block_diagonal_mask(batch: TrainingBatch, dtype: Any = None) -> Any:
    """Return which token each token sees: causal, within its own sample, `(rows, 1, width, width)`.

    For attention that takes a whole mask, and knows neither windows nor images that see themselves in both
    directions; `model_inputs` serves the others.

    Args:
        batch: Packed or padded.
        dtype: Floating dtype of an additive mask (0 or the least value); None for a boolean one. Padding
            sees itself, so that no softmax is empty.
    """
    causal = torch.ones(batch.width, batch.width, dtype=torch.bool, device=batch.input_ids.device).tril()
    return _finished(_same_sample(batch) & causal, dtype)


def _counted(batch: TrainingBatch) -> Any:
    """Return each token's number within its sample, int64 `(rows, width)`; 0 for padding."""
    counted = torch.zeros_like(batch.input_ids)
    for row, segments in enumerate(batch.segments):
        for segment in segments:
            counted[row, segment.start : segment.stop] = torch.arange(segment.length, device=counted.device)
    return counted


def _same_sample(batch: TrainingBatch) -> Any:
    """Return which tokens are of one sample, bool `(rows, width, width)`; padding is of none."""
    owner = torch.full_like(batch.input_ids, -1)
    for row, segments in enumerate(batch.segments):
        for number, segment in enumerate(segments):
            owner[row, segment.start : segment.stop] = number
    return (owner[:, :, None] == owner[:, None, :]) & (owner[:, :, None] >= 0)


def _masks_of_blocks(batch: TrainingBatch, dtype: Any) -> dict[str, Any]:
    """Return additive masks by kind of layer for images that see themselves in both directions.

    Full layers see what is before or in the same image; those with a window see of that what is within it.
    Source: `create_masks_for_vision_model` of Transformers 5.23 in `models/gemma3`.
    """
    image = batch.token_types == 1
    starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
    block = torch.where(image, starts.cumsum(1), 0)
    together = (block[:, :, None] == block[:, None, :]) & image[:, :, None]
    places = torch.arange(batch.width, device=image.device)
    causal = places[None, :] <= places[:, None]
    seen = _same_sample(batch) & (causal | together)
    masks = {"full_attention": _finished(seen, dtype)}
    window = batch.family.sliding_window
    if window is not None:
        masks["sliding_attention"] = _finished(seen & (places[None, :] > places[:, None] - window), dtype)
    return masks


def _finished(seen: Any, dtype: Any) -> Any:
    """Let every token see itself, add the axis of heads, and make the mask additive if a dtype is given."""
    seen = (seen | torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device))[:, None]
    if dtype is None:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _pixel_dtype(batch: TrainingBatch) -> Any:
    held = (rows.dtype for rows in batch.fields.values() if rows.values.is_floating_point())
    return next(held, torch.float32)
