"""Packed rows through layers that carry a state along the row, such as the gated delta nets of Qwen3.5.

No attention mask keeps samples apart there: the state of one sample runs into the next. Kernels for sequences
of varying length take the bounds (`cu_seqlens`); the plain torch implementations ignore them. Here such
layers run once for each sample, which is exact with either, and costs what the samples cost alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from mmrender.errors import BatchError
from mmrender.training._torch import torch
from mmrender.training.batch import Rows, TrainingBatch

_LAYER_NAMES = ("linear_attn",)
_KEPT_APART: ContextVar[Rows | None] = ContextVar("mmrender_recurrent_segments", default=None)


@contextmanager
def recurrent_segments(model: Any, batch: TrainingBatch) -> Iterator[None]:
    """Within the block, the model's recurrent layers run sample by sample over the rows of `batch`.

    ```python
    with recurrent_segments(model, batch):
        logits = model(**batch.model_inputs()).logits
    ```

    A model without such layers, and a padded batch, are left as they are. Recomputation of activations in
    the backward pass has to happen inside of the block too.

    Raises:
        BatchError: The model was built for such layers, and none is found.
    """
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in _LAYER_NAMES]
    if batch.family.recurrent and batch.packed and not layers:
        raise BatchError(
            f"the recurrent layers of {batch.family.model_type} are not found",
            where=type(model).__name__,
            expected=f"modules named {' or '.join(_LAYER_NAMES)}",
            remedy="Use padded batches",
        )
    if not batch.packed:
        layers = []
    bounds = [_lengths(batch, row) for row in range(len(batch))]
    originals = [layer.forward for layer in layers]
    token = _KEPT_APART.set(batch.segments)
    try:
        for layer, forward in zip(layers, originals, strict=True):
            layer.forward = _by_segment(forward, bounds)
        yield
    finally:
        _KEPT_APART.reset(token)
        for layer in layers:
            # What was set on the instance goes; the class's own method shows again.
            layer.__dict__.pop("forward", None)


def check_kept_apart(batch: TrainingBatch) -> None:
    """Refuse a batch whose samples would run into each other in a model's recurrent layers.

    Raises:
        BatchError: It is packed, the model has such layers, and no block of `recurrent_segments` is entered.
    """
    mixing = batch.packed and batch.family.recurrent and any(len(row) > 1 for row in batch.segments)
    if mixing and _KEPT_APART.get() != batch.segments:
        raise BatchError(
            f"the recurrent layers of {batch.family.model_type} would run from one sample into the next",
            where=f"row {next(row for row, held in enumerate(batch.segments) if len(held) > 1)}",
            expected="a block `with recurrent_segments(model, batch)` around this call and the forward",
            remedy="Enter it, use a padded batch, or say kept_apart=True if your kernels take the bounds",
        )


def _lengths(batch: TrainingBatch, row: int) -> list[int]:
    starts = batch.cu_seqlens(row).tolist()
    return [stop - start for start, stop in pairwise(starts)]


def _by_segment(forward: Any, bounds: list[list[int]]) -> Any:
    def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [
            torch.cat([forward(part, *args, **kwargs) for part in row.split(lengths, dim=1)], dim=1)
            for row, lengths in zip(hidden_states.split(1), bounds, strict=True)
        ]
        return torch.cat(rows)

    return run
