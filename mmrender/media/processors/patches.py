"""Items of the Qwen2-VL kind: the resized pixels as uint8, expanded to patches on demand.

The reference's `pixel_values` repeats an image for each time step of a patch and holds float32: eight times
the bytes of the pixels it was made from. An item keeps the pixels as planes and expands them by a
transposition of whole patch rows in uint8, then by the reference's arithmetic on blocks that fit the cache.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError
from mmrender.media.processors.arithmetic import STORAGE, PixelArithmetic
from mmrender.messages import Modality
from mmrender.spans import Expansion, Framework, TensorDtype

_BLOCK_VALUES = 1 << 15
"""Values of one channel per block: 128 KiB as float32."""


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """How pixels are cut into patches.

    Attributes:
        patch: Side of a patch in pixels.
        merge: Side, in patches, of the square that the model merges into one token.
        temporal: Frames in a patch; an image is repeated that often.
    """

    patch: int
    merge: int
    temporal: int

    @property
    def factor(self) -> int:
        """Side in pixels of what becomes one token."""
        return self.patch * self.merge

    @property
    def features(self) -> int:
        """Values in one patch: channels x time x height x width."""
        return 3 * self.temporal * self.patch**2


@dataclass(frozen=True, slots=True)
class PatchItem:
    """One image or video as uint8 planes.

    Attributes:
        frames: `(1, 3, height, width)` for an image; `(n, 3, height, width)` with `n` a multiple of
            `layout.temporal` for a video; uint8, read-only.
    """

    modality: Modality
    identity: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    expansion: Expansion
    # Equal identities mean equal pixels; arrays do not compare to a truth value.
    frames: npt.NDArray[np.uint8] = field(compare=False, repr=False)
    layout: PatchLayout = field(compare=False, repr=False)
    arithmetic: PixelArithmetic = field(compare=False, repr=False)

    @property
    def compact(self) -> bool:
        """Whether less than the expanded tensors is kept: always."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.frames.nbytes

    @property
    def pixel_shape(self) -> tuple[int, int]:
        """Shape of the expanded pixel tensor: `(patches, features)`."""
        frames, height, width = self.grid
        return frames * height * width, self.layout.features

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to `pixel_values` `(patches, features)` and `image_grid_thw` `(1, 3)`, int64.

        A video has `pixel_values_videos` and `video_grid_thw` instead. Nothing is memoised: each call writes
        new arrays, which the caller owns.
        """
        pixels = np.empty(self.pixel_shape, STORAGE[dtype])
        self.expand_into(pixels, dtype)
        grid = np.array([self.grid], np.int64)
        if framework == "torch":
            import torch

            tensor = torch.from_numpy(pixels)
            values: Any = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
            thw: Any = torch.from_numpy(grid)
        else:
            values, thw = pixels, grid
        if self.modality == "video":
            return {"pixel_values_videos": values, "video_grid_thw": thw}
        return {"pixel_values": values, "image_grid_thw": thw}

    def levels(self) -> npt.NDArray[np.uint8]:
        """Expand to patches that are neither rescaled nor normalised: uint8 of `pixel_shape`, a new array.

        It is what servers take that normalise on the device.
        """
        patches = np.empty(self.pixel_shape, np.uint8)
        self.expand_into(patches, "uint8")
        return patches

    def expand_into(self, out: npt.NDArray[Any], dtype: TensorDtype | Literal["uint8"] = "float32") -> None:
        """Write the expanded pixels into `out`, such as a slice of a batch.

        Args:
            out: C-contiguous, of `pixel_shape`, float32, float16, (for bfloat16) uint16, or uint8.
            dtype: What `out` holds; `"uint8"` leaves out rescaling and normalising.

        Raises:
            InputError: `out` has another shape, type or layout.
        """
        storage = np.dtype(np.uint8 if dtype == "uint8" else STORAGE[dtype])
        if out.shape != self.pixel_shape or out.dtype != storage or not out.flags.c_contiguous:
            raise InputError(
                "the buffer to expand into does not fit",
                expected=f"a C-contiguous {storage} array of shape {self.pixel_shape}",
                got=f"a {out.dtype} array of shape {out.shape} and strides {out.strides}",
            )
        layout = self.layout
        steps, height, width = self.grid
        # (time, patches of a frame, channel, frame of the patch, values of the patch)
        target = out.reshape(steps, height * width, 3, layout.temporal, layout.patch**2)
        if self.modality == "image":
            _expand_frame(self.frames[0], layout, self.arithmetic, dtype, target[0])
            return
        for index, planes in enumerate(self.frames):
            step, offset = divmod(index, layout.temporal)
            _expand_frame(planes, layout, self.arithmetic, dtype, target[step, :, :, offset : offset + 1])


def _expand_frame(
    planes: npt.NDArray[np.uint8],
    layout: PatchLayout,
    arithmetic: PixelArithmetic,
    dtype: TensorDtype | Literal["uint8"],
    target: npt.NDArray[Any],
) -> None:
    """Write the patches of planes `(3, height, width)` into `target` `(patches, 3, repeats, patch**2)`."""
    patch, merge = layout.patch, layout.merge
    _, height, width = planes.shape
    # One element is one row of a patch, so the transposition moves whole rows and never splits them.
    rows = planes.view(f"V{patch}").reshape(
        3, height // layout.factor, merge, patch, width // layout.factor, merge
    )
    per_band = (width // patch) * merge
    bands = max(1, _BLOCK_VALUES // (per_band * patch**2))
    scratch = np.empty(3 * bands * per_band * patch**2, target.dtype)
    for band in range(0, rows.shape[1], bands):
        block = np.ascontiguousarray(rows[:, band : band + bands].transpose(0, 1, 4, 2, 5, 3))
        levels = block.view(np.uint8).reshape(3, -1, patch**2)
        count = levels.shape[1]
        values: npt.NDArray[Any] = levels
        if dtype != "uint8":
            values = scratch[: levels.size].reshape(levels.shape)
            for channel in range(3):
                arithmetic.write(levels[channel], channel, dtype, values[channel])
        start = band * per_band
        # One store in the order of the target: written channel by channel, each line is fetched three times.
        target[start : start + count] = values.transpose(1, 0, 2)[:, :, None]
