"""Media items of every class, small, for tests of wires and batches."""

import io
from typing import Any

import numpy as np

from kit import noise
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Floats, Integers, Levels, PixelArithmetic, compacted, padded
from mmrender.media.load import LoadedImage, load_image
from mmrender.media.pixels import media_identity
from mmrender.media.processors.patches import PatchItem, PatchLayout, PatchProcessor
from mmrender.media.resolve import part_fingerprint
from mmrender.messages import MediaPart, RequestMedia
from mmrender.sidecar import MediaItem, Repeat, Text

ARITHMETIC = PixelArithmetic((0.5, 0.4, 0.3), (0.5, 0.2, 0.1), 1 / 255, "pil")
PROCESSOR = PatchProcessor(
    name="Qwen2VLImageProcessor",
    image_backend="pil",
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    layout=PatchLayout(16, 2, 2),
    arithmetic=ARITHMETIC,
    min_pixels=1024,
    max_pixels=16777216,
    counts_frames=False,
)


def picture(height: int = 64, width: int = 96, seed: int = 0) -> LoadedImage:
    return load_image(noise(seed, width, height))


class Unseekable(io.RawIOBase):
    """A stream that gives ten bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        part, self.rest = self.rest[: min(size, 10)], self.rest[min(size, 10) :]
        return part


def patch_item(height: int = 64, width: int = 96, seed: int = 0) -> PatchItem:
    """An image as the native processor of the Qwen family keeps it."""
    item = PROCESSOR.process(picture(height, width, seed))
    assert isinstance(item, PatchItem)
    return item


def video_item(seed: int = 0) -> PatchItem:
    frames = np.random.default_rng(seed).integers(0, 256, (4, 3, 64, 32), dtype=np.uint8)
    return PatchItem(
        modality="video",
        identity=media_identity(b"video", frames),
        size=(64, 32),
        grid=(2, 4, 2),
        expansion=(Text("<0.0 s>"), Repeat("<|video_pad|>", 2), Text("<1.0 s>"), Repeat("<|video_pad|>", 2)),
        frames=frames,
        layout=PatchLayout(16, 2, 2),
        arithmetic=ARITHMETIC,
        times=(0.0, 0.5, 1.0, 1.5),
    )


def processed_item(seed: int = 0) -> ProcessedItem:
    """An image in tiles, one of them padding, with a mask and with floats that have no smaller form."""
    random = np.random.default_rng(seed)
    levels = random.integers(0, 256, (3, 3, 6, 5), dtype=np.uint8)
    tiles = ARITHMETIC.table()[np.arange(3)[None, :, None, None], levels]
    tiles[1] = 0
    parts = {
        "pixel_values": compacted(tiles[None].astype(np.float32), ARITHMETIC),
        "pixel_attention_mask": compacted(np.ones((1, 3, 6, 5), np.int64), None),
        "image_sizes": compacted(np.array([[12, 300 + seed]], np.int64), None),
        "features": compacted(random.normal(size=(2, 3)).astype(np.float32), None),
        "flags": compacted(np.array([True, False]), None),
    }
    assert [type(part) for part in parts.values()] == [Levels, Integers, Integers, Floats, Integers]
    return ProcessedItem(
        identity=media_identity(b"processed", levels),
        size=(12, 300 + seed),
        grid=(3,),
        expansion=(
            Text("<row>"),
            Repeat("<image>", 8),
            Repeat("<sep>", 1, embeds=False),
            Repeat("<image>", 4),
        ),
        parts=parts,
    )


def audio_item(seed: int = 0) -> ProcessedItem:
    """Features of an audio clip, without their padding, and their mask."""
    features = np.random.default_rng(seed).normal(size=(1, 4, 12)).astype(np.float32)
    features[..., 7:] = -1.5
    return ProcessedItem(
        identity=media_identity(b"audio", features.view(np.uint8)),
        size=(1, 1000 + seed),
        grid=(5,),
        expansion=(Repeat("<|audio|>", 5),),
        modality="audio",
        parts={
            "input_features": padded(features),
            "feature_attention_mask": compacted(np.arange(12)[None] < 7, None),
        },
    )


def reference_item(seed: int = 0, source: bytes | str = b"\x89PNG" * 100) -> ReferenceItem:
    return ReferenceItem.of(patch_item(seed=seed), source, 6)


ITEMS: dict[str, Any] = {
    "patches": patch_item,
    "video": video_item,
    "processed": processed_item,
    "audio": audio_item,
    "reference": reference_item,
}


def same_tensors(first: MediaItem, second: MediaItem) -> bool:
    """Whether two items expand to the same bits, in every dtype."""
    for dtype in ("float32", "bfloat16", "float16"):
        left, right = first.tensors(dtype), second.tensors(dtype)  # type: ignore[arg-type]
        if list(left) != list(right):
            return False
        for name in left:
            same = left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
            if not same or left[name].tobytes() != right[name].tobytes():
                return False
    return True


def media_part(part: MediaPart, path: str = "part") -> RequestMedia:
    """Return a media part of a request at some path."""
    return RequestMedia(path, 0, 0, "user", part, part_fingerprint(part))
