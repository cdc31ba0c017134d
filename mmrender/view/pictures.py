"""Thumbnails of media items, and the grid of their tokens."""

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pybase64
from PIL import Image

from mmrender.errors import MediaError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Levels
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchItem
from mmrender.sidecar import MediaItem

_SIDE: Final = 400
"""Longest side of a thumbnail in pixels: twice its size on the page, for fine screens."""
_QUALITY: Final = 82
_MAX_PICTURES: Final = 8
"""Maximum number of frames or tiles shown of one item."""


def token_grid(item: MediaItem, count: int) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of an item's feature tokens, or None if they form no grid.

    Args:
        item: Its `grid` is `(frames, rows, columns)` in patches, some of which the model merges.
        count: Number of feature tokens.
    """
    if len(item.grid) != 3 or not count:
        return None
    frames, rows, columns = item.grid
    merge = round((frames * rows * columns / count) ** 0.5)
    rows, columns = rows // max(merge, 1), columns // max(merge, 1)
    return (frames, rows, columns) if frames * rows * columns == count else None


def thumbnails(item: MediaItem) -> list[str]:
    """Return `data:` URLs of an image, its tiles or some frames. Empty for an item without pixels."""
    urls = []
    for picture in _pictures(item):
        picture.thumbnail((_SIDE, _SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, format="JPEG", quality=_QUALITY)
        urls.append(f"data:image/jpeg;base64,{pybase64.b64encode_as_string(buffer.getvalue())}")
    return urls


def shown_frames(count: int) -> list[int]:
    """Return the indices of the frames to show: evenly spaced, with the first and the last."""
    chosen: list[int] = np.linspace(0, count - 1, min(count, _MAX_PICTURES)).round().astype(int).tolist()
    return chosen


def _pictures(item: MediaItem) -> list[Image.Image]:
    if isinstance(item, PatchItem):
        return _of_planes(item.frames)
    if isinstance(item, ProcessedItem):
        for part in item.parts.values():
            if isinstance(part, Levels) and part.values.ndim == 4 and part.values.shape[1] == 3:
                return _of_planes(part.values)
    if isinstance(item, ReferenceItem) and isinstance(item.source, bytes):
        try:
            return [load_image(item.source).image.convert("RGB")]
        except MediaError:
            return []
    return []


def _of_planes(planes: npt.NDArray[Any]) -> list[Image.Image]:
    """Return pictures of some of `(n, 3, height, width)`."""
    chosen = shown_frames(len(planes))
    return [
        Image.fromarray(np.ascontiguousarray(planes[index].transpose(1, 2, 0)), "RGB") for index in chosen
    ]
