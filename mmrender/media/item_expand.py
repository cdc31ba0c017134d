"""Expanding media items straight into buffers of the caller's, such as the rows of a training batch.

`tensor_specs` says, without expanding anything, which tensors an item has and of which shapes, so a batch can
be allocated; `expand_into` writes them there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError
from mmrender.media.processors.arithmetic import STORAGE
from mmrender.media.processors.compact import Compact, Floats, Integers
from mmrender.media.processors.huggingface import ProcessedItem
from mmrender.media.processors.patches import PatchItem
from mmrender.spans import MediaItem, TensorDtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an item.

    Attributes:
        shape: As `MediaItem.tensors` gives it.
        dtype: Of the numpy array that holds it; bfloat16 is held as uint16.
        floating: Whether it follows the dtype that was asked for; integers keep their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    floating: bool


def tensor_specs(item: MediaItem, dtype: TensorDtype = "float32") -> dict[str, TensorSpec]:
    """Return name and form of each tensor of an item, in the order of `item.tensors(dtype)`.

    An item of a class from elsewhere is expanded to find out.

    Raises:
        MediaError: The item has no tensors, being a reference.
    """
    storage = np.dtype(STORAGE[dtype])
    if isinstance(item, PatchItem):
        pixels, grid = _patch_names(item)
        return {
            pixels: TensorSpec(item.pixel_shape, storage, True),
            grid: TensorSpec((1, 3), np.dtype(np.int64), False),
        }
    if isinstance(item, ProcessedItem):
        return {name: _part_spec(part, storage) for name, part in item.parts.items()}
    return {
        name: TensorSpec(values.shape, values.dtype, values.dtype == storage)
        for name, values in item.tensors(dtype).items()
    }


def expand_into(item: MediaItem, out: Mapping[str, Any], dtype: TensorDtype = "float32") -> None:
    """Write an item's tensors into buffers, such as slices of a batch.

    Pixels that are kept compactly are expanded in place, so nothing but the buffers is written.

    Args:
        item: Any media item that has tensors.
        out: For each name of `tensor_specs(item, dtype)` a C-contiguous numpy array or torch CPU tensor of
            that shape and dtype; bfloat16 stands in uint16 arrays or bfloat16 tensors.
        dtype: Of the floating-point tensors.

    Raises:
        InputError: A buffer is missing, or has another shape, dtype or layout.
        MediaError: The item has no tensors, being a reference.
    """
    targets = _targets(item, out, dtype)
    if isinstance(item, PatchItem):
        pixels, grid = _patch_names(item)
        item.expand_into(targets[pixels], dtype)
        targets[grid][0] = item.grid
    elif isinstance(item, ProcessedItem):
        for name, part in item.parts.items():
            _expand_part(part, targets[name], dtype)
    else:
        for name, values in item.tensors(dtype).items():
            np.copyto(targets[name], values)


def _patch_names(item: PatchItem) -> tuple[str, str]:
    video = item.modality == "video"
    return ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")


def _part_spec(part: Compact, storage: np.dtype[Any]) -> TensorSpec:
    if isinstance(part, Integers):
        return TensorSpec(part.shape, part.dtype, False)
    shape = part.values.shape if isinstance(part, Floats) else part.shape
    return TensorSpec(shape, storage, True)


def _expand_part(part: Compact, target: npt.NDArray[Any], dtype: TensorDtype) -> None:
    if isinstance(part, Integers):
        np.copyto(target, part.values, casting="unsafe")
    elif isinstance(part, Floats):
        np.copyto(target, part.expanded(dtype))
    else:
        target[...] = 0
        tiles = target.reshape(-1, *part.shape[-3:])
        for index, tile in zip(part.held, part.levels, strict=True):
            for channel in range(3):
                part.arithmetic.write(tile[channel], channel, dtype, tiles[index, channel])


def _targets(item: MediaItem, out: Mapping[str, Any], dtype: TensorDtype) -> dict[str, npt.NDArray[Any]]:
    targets = {}
    for name, spec in tensor_specs(item, dtype).items():
        buffer = out.get(name)
        target = _as_numpy(buffer, spec)
        fits = target is not None and target.shape == spec.shape and target.dtype == spec.dtype
        if target is None or not fits or not target.flags.c_contiguous or not target.flags.writeable:
            raise InputError(
                "a buffer to expand into does not fit",
                where=f"out[{name!r}]",
                expected=f"a writable C-contiguous {spec.dtype} array {list(spec.shape)}",
                got=_described(buffer),
            )
        targets[name] = target
    return targets


def _as_numpy(buffer: Any, spec: TensorSpec) -> npt.NDArray[Any] | None:
    if isinstance(buffer, np.ndarray):
        return buffer
    if type(buffer).__module__.partition(".")[0] != "torch" or not hasattr(buffer, "numpy"):
        return None
    import torch

    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        return None
    bits = buffer.dtype == torch.bfloat16 and spec.floating and spec.dtype == np.uint16
    array: npt.NDArray[Any] = (buffer.detach().view(torch.uint16) if bits else buffer.detach()).numpy()
    return array


def _described(buffer: Any) -> str:
    if buffer is None:
        return "nothing"
    if not hasattr(buffer, "shape"):
        return type(buffer).__name__
    return f"{buffer.dtype} {list(buffer.shape)}"
