"""From samples to what a model takes for their images: `pixel_values`, `image_grid_thw` and the like."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from mmrender.training._torch import torch
from mmrender.training.families import ModelFamily
from mmrender.training.fields import collate_fields, model_kwargs
from mmrender.training.placing import placed_items
from mmrender.trajectory.sample import TrainingSample


def collate_mm_kwargs(
    samples: Sequence[TrainingSample],
    family: ModelFamily,
    *,
    rows: Sequence[Sequence[int]] | None = None,
    dtype: Any = torch.float32,
    device: Any = None,
    pin_memory: bool | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Return the images of samples as the keyword arguments of their model.

    Compact items are expanded straight into the tensors that are returned, each distinct one once.

    Args:
        samples: Whose items are taken, in the order of their tokens.
        family: How the tensors of several images become one.
        rows: Indices of the samples in each row of the batch; each sample a row of its own if None. Makes a
            difference only for families whose tensors have a row per text, such as Idefics3.
        dtype: Of floating tensors: torch's float32, float16 or bfloat16. Integers keep theirs.
        device: Where the tensors go; page-locked ones without waiting for them.
        pin_memory: Whether to write into page-locked memory; None for where CUDA is available.
        executor: Threads that share the expansion.

    Returns:
        Such as `pixel_values` `(patches, features)` and `image_grid_thw` int64 `(images, 3)`; empty where no
        sample has an image.

    Raises:
        BatchError: Placeholders and items do not match, an item is by reference only, or tensors of two
            images cannot be joined.
    """
    pin = torch.cuda.is_available() if pin_memory is None else pin_memory
    rows = [[index] for index in range(len(samples))] if rows is None else rows
    items = [placed_items(sample, name_of(sample, index)) for index, sample in enumerate(samples)]
    by_row = [[items[index] for index in row] for row in rows]
    fields = collate_fields(by_row, family, dtype=dtype, pin_memory=pin, executor=executor)
    if device is not None:
        fields = {name: values.to(device, non_blocking=pin) for name, values in fields.items()}
    return model_kwargs(fields, family)


def name_of(sample: TrainingSample, index: int) -> str:
    """Return what a sample is called in errors: its `sample_id`, else its place."""
    return sample.sample_id or f"samples[{index}]"
