"""The Qwen2-VL kind of processors (Qwen2-VL to 3.8, GLM-4V), natively and exactly.

One image becomes patches on a grid whose size follows from height and width; its placeholder becomes one pad
token per merged square of patches. Families differ in the resizing rule and in numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import MediaError, ProcessorError
from mmrender.media.cache import media_identity
from mmrender.media.item import PatchItem, PatchLayout
from mmrender.media.levels import PixelArithmetic
from mmrender.media.load import LoadedImage, LoadedVideo
from mmrender.media.pixels import ImageBackend, resized_planes, rgb_planes
from mmrender.media.processors.base import Geometry, Prepared, ProcessorFiles, digest_settings
from mmrender.messages import Modality
from mmrender.spans import MediaItem, Repeat

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_ARITHMETIC_VERSION = 1
"""Part of every identity; raised whenever the same settings and pixels would give other tensors."""


@dataclass(frozen=True, slots=True)
class PatchFamily:
    """What the classes of the reference fix where the settings files are silent.

    Attributes:
        min_pixels: Default of `size.shortest_edge`.
        max_pixels: Default of `size.longest_edge`.
        image_token: Default placeholder of an image.
        video_token: Default placeholder of a video.
        counts_frames: Whether the bounds on pixels count them over the frames, as GLM-4V does.
        takes_pixel_bounds: Whether top-level `min_pixels` and `max_pixels` override `size`.
    """

    min_pixels: int
    max_pixels: int
    image_token: str
    video_token: str
    counts_frames: bool = False
    takes_pixel_bounds: bool = False


_GLM = PatchFamily(112 * 112, 28 * 28 * 15000, "<|image|>", "<|video|>", counts_frames=True)
PATCH_FAMILIES: Mapping[str, PatchFamily] = {
    "Qwen2VLImageProcessor": PatchFamily(
        56 * 56, 28 * 28 * 1280, "<|image_pad|>", "<|video_pad|>", takes_pixel_bounds=True
    ),
    "Glm4vImageProcessor": _GLM,
    "Glm46VImageProcessor": _GLM,
}


@dataclass(frozen=True)
class PatchProcessor:
    """A processor of the Qwen2-VL kind with its settings fixed. See `MediaProcessor`."""

    name: str
    image_backend: ImageBackend
    image_token: str
    video_token: str
    layout: PatchLayout
    arithmetic: PixelArithmetic
    min_pixels: int
    max_pixels: int
    counts_frames: bool

    depends_on_company = False

    @classmethod
    def from_files(cls, files: ProcessorFiles, backend: ImageBackend) -> "PatchProcessor | None":
        """Build the processor, or return `None` where the settings leave the rules that are native here.

        Raises:
            ProcessorError: The settings contradict themselves.
        """
        name = files.image_processor_type
        family = PATCH_FAMILIES.get(name or "")
        settings = files.image
        steps = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        if name is None or family is None or settings.get("resample", 3) != 3:
            return None
        if not all(settings.get(step, True) for step in steps):
            return None
        min_pixels, max_pixels = _pixel_bounds(settings, family, str(files.directory))
        return cls(
            name=name,
            image_backend=backend,
            image_token=files.named_token("image_token", family.image_token),
            video_token=files.named_token("video_token", family.video_token),
            layout=PatchLayout(
                settings.get("patch_size", 14),
                settings.get("merge_size", 2),
                settings.get("temporal_patch_size", 2),
            ),
            arithmetic=PixelArithmetic(
                mean=_per_channel(settings.get("image_mean", _CLIP_MEAN)),
                std=_per_channel(settings.get("image_std", _CLIP_STD)),
                rescale=settings.get("rescale_factor", 1 / 255),
                backend=backend,
            ),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            counts_frames=family.counts_frames,
        )

    @cached_property
    def settings_digest(self) -> bytes:
        """Digest of every field; the pixel arithmetic carries the back end."""
        return digest_settings({"version": _ARITHMETIC_VERSION, "kind": "patches", **asdict(self)})

    @property
    def placeholder(self) -> Mapping[Modality, str]:
        """The pad token of each modality."""
        return {"image": self.image_token, "video": self.video_token}

    @property
    def placeholder_tokens(self) -> frozenset[str]:
        """The two pad tokens."""
        return frozenset((self.image_token, self.video_token))

    def geometry(self, height: int, width: int, *, company: int = 1) -> Geometry:
        """Return grid, expansion and resized size of an image; `company` makes no difference.

        Raises:
            MediaError: One side is over 200 times the other.
        """
        del company
        layout = self.layout
        if self.counts_frames:
            resized = smart_resize_frames(
                layout.temporal,
                height,
                width,
                factor=layout.factor,
                temporal=layout.temporal,
                min_pixels=self.min_pixels,
                max_pixels=self.max_pixels,
            )
        else:
            resized = smart_resize(
                height,
                width,
                factor=layout.factor,
                min_pixels=self.min_pixels,
                max_pixels=self.max_pixels,
            )
        grid = (1, resized[0] // layout.patch, resized[1] // layout.patch)
        count = grid[1] * grid[2] // layout.merge**2
        return Geometry(grid, (Repeat(self.image_token, count),), resized)

    def prepare(self, loaded: LoadedImage | LoadedVideo, *, company: int = 1) -> Prepared:
        """Check the size of one image and identify its pixels.

        Raises:
            MediaError: One side is over 200 times the other.
            ProcessorError: A video, which this processor does not take.
        """
        del company
        if not isinstance(loaded, LoadedImage):
            raise ProcessorError(
                f"videos are not supported for {self.name}",
                expected="images",
                remedy="Pass the frames as images.",
            )
        geometry = self.geometry(loaded.height, loaded.width)
        planes = rgb_planes(loaded.at_hand)
        identity = media_identity(self.settings_digest, planes)
        return Prepared(identity, lambda: self._finish(loaded, planes, geometry, identity))

    def process(self, loaded: LoadedImage | LoadedVideo, *, company: int = 1) -> MediaItem:
        """Resize one image and keep it as planes. Raises what `prepare` raises."""
        return self.prepare(loaded, company=company).finish()

    def _finish(
        self, loaded: LoadedImage, planes: npt.NDArray[np.uint8], geometry: Geometry, identity: str
    ) -> PatchItem:
        size = (loaded.height, loaded.width)
        if geometry.resized is not None and geometry.resized != size:
            planes = resized_planes(loaded, *geometry.resized, self.image_backend)
        frames = planes[None]
        frames.flags.writeable = False
        time, height, width = geometry.grid
        return PatchItem(
            modality="image",
            identity=identity,
            size=size,
            grid=(time, height, width),
            expansion=geometry.expansion,
            frames=frames,
            layout=self.layout,
            arithmetic=self.arithmetic,
        )


def _pixel_bounds(settings: Mapping[str, Any], family: PatchFamily, where: str) -> tuple[int, int]:
    size = settings.get("size") or {"shortest_edge": family.min_pixels, "longest_edge": family.max_pixels}
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if family.takes_pixel_bounds:
        least = settings["min_pixels"] if settings.get("min_pixels") is not None else least
        most = settings["max_pixels"] if settings.get("max_pixels") is not None else most
    if not least or not most:
        raise ProcessorError(
            "the image processor's bounds on pixels are incomplete",
            where=where,
            expected="`size` with `shortest_edge` and `longest_edge`",
            got=repr(size),
        )
    return int(least), int(most)


def _per_channel(values: Any) -> tuple[float, float, float]:
    if isinstance(values, int | float):
        return float(values), float(values), float(values)
    red, green, blue = values
    return float(red), float(green), float(blue)


MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that the Qwen2-VL kind of processors resizes an image to.

    Both sides become multiples of `factor`, their product falls within `[min_pixels, max_pixels]` where that
    is possible, and the aspect ratio is kept as well as that allows. Source: `smart_resize` of
    `transformers.models.qwen2_vl`.

    Raises:
        MediaError: One side is over 200 times the other.
    """
    _check_aspect_ratio(height, width)
    resized_height = round(height / factor) * factor
    resized_width = round(width / factor) * factor
    if resized_height * resized_width > max_pixels:
        return _shrunk(height, width, math.sqrt((height * width) / max_pixels), factor)
    if resized_height * resized_width < min_pixels:
        return _grown(height, width, math.sqrt(min_pixels / (height * width)), factor)
    return resized_height, resized_width


def smart_resize_frames(
    frames: int, height: int, width: int, *, factor: int, temporal: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that the GLM-4V kind of processors resizes an image or the frames of a video to.

    The bounds count pixels over all frames; an image counts as `temporal` frames. A side below `factor` is
    scaled up first, and the aspect ratio is checked after that. Source: `smart_resize` of
    `transformers.models.glm4v`.

    Raises:
        MediaError: One side is over 200 times the other, or there are fewer than `temporal` frames.
    """
    if frames < temporal:
        raise MediaError(
            "the video is too short for this model", expected=f"at least {temporal} frames", got=str(frames)
        )
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width)
    resized_height = round(height / factor) * factor
    resized_width = round(width / factor) * factor
    volume = round(frames / temporal) * temporal * resized_height * resized_width
    if volume > max_pixels:
        return _shrunk(height, width, math.sqrt((frames * height * width) / max_pixels), factor)
    if volume < min_pixels:
        return _grown(height, width, math.sqrt(min_pixels / (frames * height * width)), factor)
    return resized_height, resized_width


def _shrunk(height: int, width: int, beta: float, factor: int) -> tuple[int, int]:
    return (
        max(factor, math.floor(height / beta / factor) * factor),
        max(factor, math.floor(width / beta / factor) * factor),
    )


def _grown(height: int, width: int, beta: float, factor: int) -> tuple[int, int]:
    return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor


def _check_aspect_ratio(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(
            "the image is too long and thin for this model",
            expected=f"an aspect ratio of at most {MAX_ASPECT_RATIO}",
            got=f"{width}x{height} pixels, a ratio of {ratio:.1f}",
            remedy="Crop or pad it before rendering.",
        )
