"""The Qwen2-VL kind of processors (Qwen2-VL to 3.8, GLM-4V), natively and exactly.

One image becomes patches on a grid whose size follows from height and width; its placeholder becomes one pad
token per merged square of patches. Families differ in the resizing rule and in numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmrender.errors import MediaError, ProcessorError
from mmrender.media.item import PatchItem, PatchLayout
from mmrender.media.levels import PixelArithmetic
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import (
    ImageBackend,
    image_identity,
    media_identity,
    resized_planes,
    rgb_planes,
)
from mmrender.media.processor import (
    Geometry,
    MediaProcessor,
    Prepared,
    ProcessorFiles,
    digest_settings,
)
from mmrender.sidecar import MediaItem, Repeat

MAX_ASPECT_RATIO = 200
_ARITHMETIC_VERSION = 1
"""Part of every identity; raised whenever the same settings and pixels would give other tensors."""


STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""Settings that turn off what is done to every picture."""
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(STEPS, True),
    "resample": 3,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "rescale_factor": 1 / 255,
}
"""Defaults of the reference's classes for all families, for settings that the files leave out."""
_QWEN: Mapping[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
_GLM: Mapping[str, Any] = {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
    "image_token": "<|image|>",
    "video_token": "<|video|>",
}
_FAMILIES = {"Qwen2VLImageProcessor": _QWEN, "Glm4vImageProcessor": _GLM, "Glm46VImageProcessor": _GLM}
"""Defaults for one family."""
_WHOLE = {
    *(None, "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Qwen2_5OmniProcessor"),
    *("Qwen3OmniMoeProcessor", "Exaone4_5_Processor", "HyperCLOVAXVisionV2Processor", "Lfm3VlProcessor"),
    *("Glm4vProcessor", "Glm46VProcessor"),
}
"""Classes of the whole processor that write one pad token per merged square, and nothing else."""


@dataclass(eq=False)
class PatchProcessor(MediaProcessor):
    """A processor of the Qwen2-VL kind. See `MediaProcessor`."""

    name: str
    image_backend: ImageBackend
    image_token: str
    video_token: str
    layout: PatchLayout
    arithmetic: PixelArithmetic
    min_pixels: int
    max_pixels: int
    counts_frames: bool

    def __post_init__(self) -> None:
        settings = {"version": _ARITHMETIC_VERSION, "kind": "patches", **asdict(self)}
        self.settings_digest = digest_settings(settings)
        self.placeholder = {"image": self.image_token, "video": self.video_token}
        self.placeholder_tokens = frozenset(self.placeholder.values())

    @classmethod
    def from_files(cls, files: ProcessorFiles, backend: ImageBackend) -> "PatchProcessor | None":
        """Build the processor, or return `None` where the settings leave the rules that are native here."""
        name = files.image_processor_type or ""
        family = _FAMILIES.get(name)
        if family is None or files.processor_class not in _WHOLE:
            return None
        given = {key: value for key, value in files.image.items() if value not in (None, {})}
        settings = {**_DEFAULTS, **family, **given}
        if settings["resample"] != 3 or not all(settings[step] for step in STEPS):
            return None
        # Only Qwen's classes read bounds that are named so.
        bounds = settings if family is _QWEN else {}
        least = bounds.get("min_pixels") or settings["size"].get("shortest_edge")
        most = bounds.get("max_pixels") or settings["size"].get("longest_edge")
        if not least or not most:
            raise ProcessorError(
                "the image processor's bounds on pixels are incomplete",
                expected="`size` with `shortest_edge` and `longest_edge`",
                got=repr(settings["size"]),
            )
        tokens = {**family, **files.model.special_tokens}
        return cls(
            name=name,
            image_backend=backend,
            image_token=tokens["image_token"],
            video_token=tokens["video_token"],
            layout=PatchLayout(
                settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
            ),
            arithmetic=PixelArithmetic.of(
                settings["image_mean"], settings["image_std"], settings["rescale_factor"], backend
            ),
            min_pixels=int(least),
            max_pixels=int(most),
            counts_frames=family is _GLM,
        )

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return grid, expansion and resized size of an image; see `MediaProcessor`."""
        patch, merge = self.layout.patch, self.layout.merge
        resized = smart_resize(
            height,
            width,
            factor=patch * merge,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            frames=self.layout.temporal if self.counts_frames else None,
        )
        rows, columns = resized[0] // patch, resized[1] // patch
        return Geometry((1, rows, columns), (Repeat(self.image_token, rows * columns // merge**2),), resized)

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Check the size of one image and identify its pixels; see `MediaProcessor`."""
        size = (loaded.height, loaded.width)
        geometry = self.geometry(*size)
        # Planes of an image that is resized are only hashed.
        kept = rgb_planes(loaded) if geometry.resized == size else None
        identity = (
            image_identity(self.settings_digest, loaded)
            if kept is None
            else media_identity(self.settings_digest, kept)
        )

        def finish() -> MediaItem:
            height, width = geometry.resized or size
            frames = resized_planes(loaded, height, width, self.image_backend) if kept is None else kept
            frames.flags.writeable = False
            _, rows, columns = geometry.grid
            return PatchItem(
                identity=identity,
                size=size,
                grid=(1, rows, columns),
                expansion=geometry.expansion,
                frames=frames[None],
                layout=self.layout,
                arithmetic=self.arithmetic,
            )

        return Prepared(identity, finish)


def smart_resize(
    height: int,
    width: int,
    *,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    frames: int | None = None,
    temporal: int = 1,
) -> tuple[int, int]:
    """Return the size that an image is resized to.

    Both sides become multiples of `factor`, their product falls within `[min_pixels, max_pixels]` where that
    is possible, and the aspect ratio is kept as well as that allows. Computed in the reference's order of
    floating-point operations: `floor` and `ceil` of a quotient that is off by one unit in the last place
    would move an image by a row of patches. Source: `smart_resize` of `transformers.models.qwen2_vl` and,
    with `frames`, of `transformers.models.glm4v` and the video processor of `qwen3_vl`.

    Args:
        height: Of the image, in pixels.
        width: The same.
        factor: Side in pixels of what becomes one token.
        min_pixels: Lower bound.
        max_pixels: Upper bound.
        frames: Given for GLM-4V, and for the videos of others: the bounds count the pixels of this many
            frames, which is how many an image counts as, and a side below `factor` is scaled up first.
        temporal: Frames of a patch: so many pixels are bounded as whole patches hold.

    Raises:
        MediaError: One side is over 200 times the other.
    """
    if frames is not None and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(
            "the image is too long and thin for this model",
            expected=f"an aspect ratio of at most {MAX_ASPECT_RATIO}",
            got=f"{width}x{height} pixels, a ratio of {ratio:.1f}",
            remedy="Crop or pad it before rendering.",
        )
    resized_height = round(height / factor) * factor
    resized_width = round(width / factor) * factor
    counted = frames or 1
    pixels = round(counted / temporal) * temporal * resized_height * resized_width
    if pixels > max_pixels:
        beta = math.sqrt((counted * height * width) / max_pixels)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if pixels < min_pixels:
        beta = math.sqrt(min_pixels / (counted * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return resized_height, resized_width
