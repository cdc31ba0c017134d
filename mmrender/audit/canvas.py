"""An image before it became the pixels of an item, and how it became them."""

import io
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from mmrender.audit.case import Array, Case
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Levels
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchItem
from mmrender.sidecar import MediaItem, Repeat, feature_count

_ROUNDED: Final = 1
"""Levels by which filters of different releases differ."""


class Canvas(NamedTuple):
    """How an image becomes the pixels of an item: resized once, and cut into tiles if the family has them.

    Attributes:
        size: Width and height to which the image is resized.
        tile: Height and width of a tile; None for patches.
        thumbnail: Whether the whole image follows as a last tile.
        method: The filter.
    """

    size: tuple[int, int]
    tile: tuple[int, int] | None = None
    thumbnail: bool = False
    method: Any = Image.Resampling.BICUBIC

    def frames(self, image: Image.Image, method: Any = None) -> Array:
        """Return the levels of an image: uint8 `(frames or tiles, 3, height, width)`."""
        (width, height), method = self.size, self.method if method is None else method
        own = levels(image, self.size, method)
        if self.tile is None:
            return own
        high, wide = self.tile
        cut = own[0].reshape(3, height // high, high, width // wide, wide).transpose(1, 3, 0, 2, 4)
        whole = [levels(image, (wide, high), method)] if self.thumbnail else []
        return np.concatenate([cut.reshape(-1, 3, high, wide), *whole])


def pictures(item: Any) -> Array | None:
    """Return the levels of an item's frames or tiles, uint8 `(n, 3, height, width)`, if it keeps levels."""
    if isinstance(item, PatchItem):
        return item.frames
    pixels = item.parts.get("pixel_values") if isinstance(item, ProcessedItem) else None
    if not isinstance(pixels, Levels):
        return None
    shape = pixels.shape[-3:]
    is_whole = len(pixels.held) * np.prod(shape) == np.prod(pixels.shape)
    return pixels.values.reshape(-1, *shape) if is_whole else None


def canvas_of(case: Case, item: Any, source: Image.Image) -> Canvas | None:
    """Return how an image becomes the pixels of an item, proved by its own pixels for tiles."""
    frames = pictures(item)
    if frames is None or (isinstance(item, PatchItem) and len(frames) != 1):
        return None
    count, _, height, width = frames.shape
    if isinstance(item, PatchItem):
        return Canvas((width, height))

    def found() -> Canvas | None:
        for method in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS):
            for cut in (count, count - 1)[: 1 + (count > 1)]:
                for rows in (rows for rows in range(1, cut + 1) if cut % rows == 0):
                    size = cut // rows * width, rows * height
                    canvas = Canvas(size, (height, width), cut < count, method)
                    if np.abs(canvas.frames(source).astype(int) - frames).max() <= _ROUNDED:
                        return canvas
        return None

    return case.once(("canvas", item.identity), found)


def levels(image: Image.Image, size: tuple[int, ...], method: Any = Image.Resampling.BICUBIC) -> Array:
    """Return the levels of a resized image: `(1, 3, height, width)`. A name is a filter of torch."""
    width, height = size
    if isinstance(method, str) and image.size != (width, height):
        import torch

        data = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float()
        mode = method.removesuffix("-antialias")
        resized = torch.nn.functional.interpolate(data, (height, width), mode=mode, antialias=method != mode)
        return np.asarray(resized.round().clamp(0, 255).byte().numpy())
    resized = image if image.size == (width, height) else image.resize((width, height), method)
    return np.asarray(resized).transpose(2, 0, 1)[None]


def renewed(item: Any, frames: Array) -> MediaItem:
    """Return an item of other levels, maybe more or fewer."""
    frames = np.ascontiguousarray(frames)
    identity = f"{id(frames):064x}"  # which no real item has
    if isinstance(item, PatchItem):
        grid = (item.grid[0], *(side // item.layout.patch for side in frames.shape[-2:]))
        tokens = grid[0] * grid[1] * grid[2] // item.layout.merge**2
        share, fields = tokens / max(feature_count(item.expansion), 1), {"frames": frames, "grid": grid}
    else:
        own = item.parts["pixel_values"]
        share = len(frames) / len(own.values)
        shape = (*own.shape[:-4], len(frames), *frames.shape[1:]) if share != 1 else own.shape
        held = Levels(frames, tuple(range(len(frames))), shape, own.arithmetic)
        fields = {"parts": {**item.parts, "pixel_values": held}}
    expansion = tuple(
        msgspec.structs.replace(piece, count=round(piece.count * share))
        if isinstance(piece, Repeat) and piece.embeds
        else piece
        for piece in item.expansion
    )
    renewed: MediaItem = msgspec.structs.replace(item, **fields, identity=identity, expansion=expansion)
    return renewed


def source_of(case: Case, item: Any, *, stored: bool = False) -> Image.Image | None:
    """Return the image before it was resized, if it is known: from the sources, or if it was not resized."""
    frames = pictures(item)
    if frames is None or (isinstance(item, PatchItem) and len(frames) != 1):
        return None
    given = case.sources.get(item.identity)
    if stored:
        try:
            return given if given is None or isinstance(given, Image.Image) else Image.open(io.BytesIO(given))
        except (OSError, TypeError):
            return None  # of another form than bytes, which only `load_image` reads
    if given is not None:
        return case.once(("source", item.identity), lambda: load_image(given).image.convert("RGB"))
    if tuple(frames.shape[-2:]) != tuple(item.size) or len(frames) > 1:
        return None
    return Image.fromarray(np.ascontiguousarray(frames[0].transpose(1, 2, 0)), "RGB")


def shrunk(side: float, method: Any, image: Image.Image) -> Image.Image | None:
    """Return an image of a share of both sides, or of a longer side of so many pixels, if it is smaller."""
    share = side if side <= 1 else side / max(image.size)
    width, height = (max(1, int(length * share)) for length in image.size)
    return image.resize((width, height), method) if share < 1 else None
