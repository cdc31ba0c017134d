"""Thumbnails of media items, spectrograms of audio, and the grid of their tokens."""

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pybase64
from PIL import Image

from mmrender.errors import MediaError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Integers, Levels, expanded
from mmrender.media.load import load_image
from mmrender.media.pixels import picture_of
from mmrender.media.processors.patches import PatchItem
from mmrender.media.sources import format_name
from mmrender.sidecar import MediaItem

_SIDE: Final = 400
"""Longest side of a thumbnail in pixels: twice its size on the page, for fine screens."""
_QUALITY: Final = 82
_HEIGHT: Final = 64
"""Height of a spectrogram in pixels."""
_SOUNDS: Final = {
    "WAV audio": "audio/wav",
    "FLAC audio": "audio/flac",
    "Ogg audio": "audio/ogg",
    "MP3 audio": "audio/mpeg",
}
_MAX_SOUND: Final = 4 << 20
"""Maximum size of a clip that a page plays, in bytes."""
_MAX_PICTURES: Final = 8
"""Maximum number of frames or tiles shown of one item."""


def token_grid(item: MediaItem, count: int) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of an item's feature tokens, or None if they form no grid.

    Args:
        item: Its `grid` is `(frames, rows, columns)` in patches, some of which the model merges. Tokens of
            audio follow each other in time.
        count: Number of feature tokens.
    """
    if item.modality == "audio" and count:
        return 1, 1, count
    if len(item.grid) != 3 or not count:
        return None
    frames, rows, columns = item.grid
    merge = round((frames * rows * columns / count) ** 0.5)
    rows, columns = rows // max(merge, 1), columns // max(merge, 1)
    return (frames, rows, columns) if frames * rows * columns == count else None


def thumbnails(item: MediaItem) -> list[str]:
    """Return `data:` URLs of an image, its tiles, some frames or a spectrogram. Empty without any of them."""
    urls = []
    for picture in _pictures(item):
        picture.thumbnail((_SIDE, _SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, format="JPEG", quality=_QUALITY)
        urls.append(f"data:image/jpeg;base64,{pybase64.b64encode_as_string(buffer.getvalue())}")
    return urls


def sound_of(item: MediaItem) -> str | None:
    """Return the `data:` URL of a clip that is kept encoded, unless it is long. Features cannot be heard."""
    holder: object = item.parts if isinstance(item, ProcessedItem) else item
    source = getattr(holder, "source", None) if item.modality == "audio" else None
    if not isinstance(source, bytes) or len(source) > _MAX_SOUND:
        return None
    mime = _SOUNDS.get(format_name(source[:64]))
    return mime and f"data:{mime};base64,{pybase64.b64encode_as_string(source)}"


def shown_frames(count: int) -> list[int]:
    """Return the indices of the frames to show: evenly spaced, with the first and the last."""
    chosen: list[int] = np.linspace(0, count - 1, min(count, _MAX_PICTURES)).round().astype(int).tolist()
    return chosen


def _pictures(item: MediaItem) -> list[Image.Image]:
    if isinstance(item, PatchItem):
        return _of_planes(item.frames)
    if isinstance(item, ProcessedItem) and item.modality == "audio":
        return _spectrograms(item)
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


def _spectrograms(item: ProcessedItem) -> list[Image.Image]:
    """Return the features of a clip without their padding, low frequencies at the bottom."""
    masks = [part for part in item.parts.values() if isinstance(part, Integers) and len(part.shape) == 2]
    for part in item.parts.values():
        if isinstance(part, Integers) or len(part.shape) != 3:
            continue
        for mask in masks:
            windows, length = mask.shape
            if windows != part.shape[0] or length not in part.shape[1:]:
                continue
            values, marks = expanded(part, "float32"), expanded(mask, "float32").astype(bool)
            by_time = values if values.shape[2] == length else values.transpose(0, 2, 1)
            frames = np.concatenate([one[:, own] for one, own in zip(by_time, marks, strict=True)], axis=1)
            if not frames.size:
                continue
            low, high = float(frames.min()), float(frames.max())
            levels = ((frames[::-1] - low) * (255 / (high - low or 1))).astype(np.uint8)
            width = min(_SIDE, max(_HEIGHT, levels.shape[1]))
            return [Image.fromarray(np.ascontiguousarray(levels), "L").resize((width, _HEIGHT))]
    return []


def _of_planes(planes: npt.NDArray[Any]) -> list[Image.Image]:
    """Return pictures of some of `(n, 3, height, width)`."""
    return [picture_of(planes[index]) for index in shown_frames(len(planes))]
