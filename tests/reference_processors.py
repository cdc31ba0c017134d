"""What parity tests compare with: the reference processor on each back end, as far as it can run here."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrender.media.pixels import ImageBackend
from mmrender.sidecar import Expansion, Text
from mmrender.testing.reference import has_reference_backend, load_reference_image_processor

PATCH_MODELS = ("qwen2_5_vl", "qwen3_vl", "glm4_5v")
"""One shared model of each processor with patches."""
ADAPTED_MODELS = ("idefics3", "internvl3")


@cache
def reference_processor(directory: Path, backend: ImageBackend) -> Any:
    """Return the reference image processor, or for the torch back end without torchvision its replica."""
    if backend == "torch" and not has_reference_backend("torch"):
        return TorchReplica(load_reference_image_processor(directory, "pil"))
    return load_reference_image_processor(directory, backend)


def expansion_text(expansion: Expansion) -> str:
    """Return the text of an expansion."""
    return "".join(
        piece.text if isinstance(piece, Text) else piece.token * piece.count for piece in expansion
    )


class TorchReplica:
    """The torch back end of the Qwen2-VL kind in plain torch, step by step and slow.

    `test_replica_equals_the_torchvision_back_end` compares it with the real one wherever that can run.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __call__(self, image: Image.Image, *, return_tensors: str) -> dict[str, torch.Tensor]:
        del return_tensors
        s = self._settings
        patches = s.get_number_of_image_patches(image.height, image.width)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None]
        height, width = self._resized_to(image)
        if (height, width) != (image.height, image.width):
            pixels = torch.nn.functional.interpolate(
                pixels, size=(height, width), mode="bicubic", antialias=True, align_corners=False
            )
        scale = 1.0 / s.rescale_factor
        mean, std = torch.tensor(s.image_mean) * scale, torch.tensor(s.image_std) * scale
        values = pixels.to(torch.float32).sub_(mean[:, None, None]).div_(std[:, None, None])
        rows, columns = height // s.patch_size, width // s.patch_size
        merge, patch, time = s.merge_size, s.patch_size, s.temporal_patch_size
        values = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        values = values.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(-1, -1, -1, -1, -1, time, -1, -1)
        assert rows * columns == patches
        return {
            "pixel_values": values.reshape(rows * columns, -1),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }

    def _resized_to(self, image: Image.Image) -> tuple[int, int]:
        # The PIL back end resizes to the same size; asking it keeps the rule out of this file.
        s = self._settings
        grid = s(image, return_tensors="np")["image_grid_thw"][0]
        return int(grid[1]) * s.patch_size, int(grid[2]) * s.patch_size
