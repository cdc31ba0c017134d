"""Recurrent layers over packed rows, sample by sample.

Attention keeps packed samples apart by masks. Layers that carry a state along the row, such as the gated
delta nets of Qwen3.5, see no mask: the state of one sample runs into the next. Kernels for sequences of
varying length take the bounds (`cu_seqlens`), and the plain torch implementations ignore them. Running such
layers once for each sample is exact with either, and costs as much as the samples alone.

Rows that are padded on the left run by sample, too. The gated delta rule is computed in chunks of 64 tokens,
with differences of sums of decays over a chunk in float32, whose rounding (4e-4 of a logit) depends on the
place of the sample in its chunk.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from mmrender.errors import BatchError
from mmrender.training.batch import TrainingBatch
from mmrender.training.families import ModelFamily
from mmrender.training.segments import RUN_BY_SAMPLE, bounds_of
from mmrender.training.tensor_list import torch

_LAYER: Final = r"(^|\.)layers\.\d+\."
"""Path of a layer within its model, as a pattern."""
_VARLEN: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Bounds of whole rows, which do not hold for a sequence that is run alone."""


@contextmanager
def recurrent_segments(model: Any, batch: TrainingBatch) -> Iterator[None]:
    """Run the model's recurrent layers sample by sample over the rows of `batch`, within the block.

    ```python
    with recurrent_segments(model, batch):
        logits = model(**batch.model_inputs()).logits
    ```

    Models without recurrent layers and rows that are padded on the right are left as they are. Recomputation
    of activations in the backward pass must happen inside the block too.

    Raises:
        BatchError: The model's family has recurrent layers, and the model does not.
    """
    bounds = bounds_of(batch.segments, batch.width)
    by_sample = bool(batch.family.recurrent) and (batch.packed or batch.padding_side == "left")
    layers = recurrent_layers(model, batch.family) if by_sample else []
    originals = [layer.forward for layer in layers]
    token = RUN_BY_SAMPLE.set(bounds)
    try:
        for layer, forward in zip(layers, originals, strict=True):
            layer.forward = _by_segment(forward, bounds)
        yield
    finally:
        RUN_BY_SAMPLE.reset(token)
        for layer in layers:
            layer.__dict__.pop("forward", None)  # the class's own method shows again


def recurrent_layers(model: Any, family: ModelFamily) -> list[Any]:
    """Return the recurrent layers of the language model. A vision tower may have modules of the same name.

    Raises:
        BatchError: The model has none, and its family has.
    """
    pattern = re.compile(f"{_LAYER}({'|'.join(map(re.escape, family.recurrent.split('|')))})$")
    owner = next((module for module in model.modules() if hasattr(module, "get_decoder")), None)
    decoder = model if owner is None else owner.get_decoder()
    layers = [module for name, module in decoder.named_modules() if pattern.search(name)]
    if not layers:
        raise BatchError(
            f"the recurrent layers of {family.model_type} are not found",
            where=type(model).__name__,
            expected=f"modules named {family.recurrent}",
            remedy="Use padded batches",
        )
    return layers


def _by_segment(forward: Callable[..., Any], rows: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """Return a layer's forward that runs each sequence alone; `rows` are the bounds in each row."""

    def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        shape = hidden_states.shape[:2]
        positional = (hidden_states, *args)
        named = {name: value for name, value in kwargs.items() if name not in _VARLEN}

        def alone(row: int, start: int, stop: int) -> Any:
            def cut(value: Any) -> Any:
                aligned = isinstance(value, torch.Tensor) and value.shape[:2] == shape
                return value[row : row + 1, start:stop] if aligned else value

            return forward(*map(cut, positional), **{name: cut(value) for name, value in named.items()})

        return torch.cat(
            [
                torch.cat([alone(row, *sequence) for sequence in pairwise(bounds)], dim=1)
                for row, bounds in enumerate(rows)
            ]
        )

    return run
