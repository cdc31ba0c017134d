"""Expansion of images on the device that trains: uint8 levels travel, and become floats there.

Levels are an eighth of the bytes of float32 patches that repeat an image for two time steps. Each becomes its
value by a table of 256 for each channel, computed once as the reference computes it, so the result has the
same bits on every device.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.media.item import PatchItem, ProcessedItem
from mmrender.media.levels import Levels, PixelArithmetic
from mmrender.sidecar import MediaItem
from mmrender.training.tensor_list import torch

_LEVELS: Final = 256


def can_expand(item: MediaItem, name: str) -> bool:
    """Return whether a tensor of an item is held as levels."""
    if isinstance(item, PatchItem):
        return name.startswith("pixel_values")
    return isinstance(item, ProcessedItem) and isinstance(item.parts.get(name), Levels)


def expand_on(item: MediaItem, name: str, out: Any, *, pin_memory: bool) -> None:
    """Write a tensor of an item that `can_expand` into `out`, of its shape, on the device of `out`."""
    if isinstance(item, PatchItem):
        levels = _moved(item.frames, out.device, pin_memory)
        out.copy_(_values(_patches(levels, item), item.arithmetic, out.dtype).reshape(out.shape))
        return
    part: Any = item.parts[name] if isinstance(item, ProcessedItem) else None
    tiles = out.view(-1, *part.shape[-3:])
    tiles.zero_()
    if part.held:
        levels = _moved(part.values, out.device, pin_memory)
        values = _values(levels.reshape(*levels.shape[:2], -1), part.arithmetic, out.dtype)
        held = torch.tensor(part.held, dtype=torch.int64, device=out.device)
        tiles.index_copy_(0, held, values.view(levels.shape))


def _moved(levels: npt.NDArray[np.uint8], device: Any, pin_memory: bool) -> Any:
    # Copied: items are read-only, and only memory that is page-locked is moved without waiting.
    staged = torch.empty(levels.shape, dtype=torch.uint8, pin_memory=pin_memory)
    staged.numpy()[...] = levels
    return staged.to(device, non_blocking=pin_memory)


def _patches(frames: Any, item: PatchItem) -> Any:
    """Return frames `(n, 3, height, width)` as patches `(patches, 3, temporal * patch ** 2)`."""
    (steps, height, width), layout = item.grid, item.layout
    merge, patch, temporal = layout.merge, layout.patch, layout.temporal
    cut = frames.view(-1, 3, height // merge, merge, patch, width // merge, merge, patch)
    by_patch = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, height * width, 3, patch**2)
    missing = steps * temporal - len(by_patch)  # the last frame fills its time step
    by_patch = torch.cat((by_patch, by_patch[-1:].expand(missing, -1, -1, -1))) if missing else by_patch
    whole = by_patch.view(steps, temporal, height * width, 3, patch**2).permute(0, 2, 3, 1, 4)
    return whole.reshape(steps * height * width, 3, temporal * patch**2)


def _values(levels: Any, arithmetic: PixelArithmetic, dtype: Any) -> Any:
    """Return the values of levels `(n, 3, m)` by the table of their channel."""
    table = torch.from_numpy(arithmetic.table().copy()).to(dtype).reshape(-1).to(levels.device)
    first = torch.arange(0, 3 * _LEVELS, _LEVELS, dtype=torch.int32, device=levels.device)
    places = levels.to(torch.int32) + first[:, None]
    return table.index_select(0, places.view(-1)).view(levels.shape)
