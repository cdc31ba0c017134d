"""Images of the Qwen2-VL kind (Qwen2-VL to 3.8, GLM-4V), natively and exactly: their processor and items.

An image becomes patches on a grid whose size follows from height and width. Its placeholder becomes one token
per merged square of patches. Families differ in numbers. Source: `image_processing_*.py` of Transformers 5.23
in `models/{qwen2_vl,glm4v,glm46v}`. `mmrender.media.processors.patch_videos` has their videos.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec import Meta

from mmrender.errors import MediaError, ProcessorError
from mmrender.media.item import TensorItem, TensorSpec
from mmrender.media.levels import STORAGE, PixelArithmetic
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend, image_identity, media_identity, resized_planes, rgb_planes
from mmrender.media.processor import Geometry, MediaProcessor, Prepared, ProcessorFiles, digest_settings
from mmrender.sidecar import Count, MediaItem, MediaSpan, PlaceholderRange, Repeat, TensorDtype

MAX_ASPECT_RATIO = 200
ARITHMETIC_VERSION = 1
"""Part of every identity. Raised when the same settings and pixels would produce other tensors."""

_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""Settings that turn off a step of processing."""
DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(_STEPS, True),
    "resample": 3,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "rescale_factor": 1 / 255,
}
"""Defaults of all classes of the reference, for settings that the files leave out."""
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
"""Defaults of each class of image processors."""
_WHOLE = {
    *(None, "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Qwen2_5OmniProcessor"),
    *("Qwen3OmniMoeProcessor", "Exaone4_5_Processor", "HyperCLOVAXVisionV2Processor", "Lfm3VlProcessor"),
    *("Glm4vProcessor", "Glm46VProcessor"),
}
"""Classes of the whole processor that write one token per merged square, and nothing else."""
_TENSORS: Final[Mapping[str, Sequence[str]]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
}
"""Names of tensors by modality: pixels, grid, and the seconds of a time step if the family needs them."""
_BLOCK_VALUES: Final = 1 << 15
"""Values of one channel that are expanded at once: 128 KiB as float32."""


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """How pixels are cut into patches.

    Attributes:
        patch: Side of a patch in pixels.
        merge: Side, in patches, of the square that the model merges into one token.
        temporal: Frames in a patch. An image is repeated as often.
    """

    patch: Annotated[int, Meta(ge=1, le=1024)]
    merge: Annotated[int, Meta(ge=1, le=1024)]
    temporal: Annotated[int, Meta(ge=1, le=64)]


class PatchItem(TensorItem, frozen=True, eq=False, kw_only=True, tag="patches"):
    """One image or video of the Qwen2-VL kind: the resized pixels as uint8 planes.

    Its tensors are `pixel_values` `(patches, features)` and `image_grid_thw` `(1, 3)`, int64. For a video
    `pixel_values_videos` and `video_grid_thw`, and `second_per_grid_ts` `(1,)`, float32, if the family counts
    time in seconds.

    Attributes:
        frames: `(1, 3, height, width)` for an image; `(n, 3, height, width)` for the `n` sampled frames of a
            video; uint8, read-only. The last frame fills the patches of its time step.
        layout: How they are cut into patches.
        arithmetic: How levels become values.
        times: Time of each frame of a video, in seconds.
        second_per_grid: Duration of a time step of a video in seconds, for families that need it.
    """

    grid: tuple[Count, Count, Count]
    frames: npt.NDArray[np.uint8]
    layout: PatchLayout
    arithmetic: PixelArithmetic
    times: tuple[float, ...] = ()
    second_per_grid: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.frames.nbytes

    @property
    def pixel_shape(self) -> tuple[int, int]:
        """Shape of the expanded pixel tensor: `(patches, features)`."""
        return math.prod(self.grid), 3 * self.layout.temporal * self.layout.patch**2

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        specs = (
            TensorSpec(self.pixel_shape, np.dtype(STORAGE[dtype]), True),
            TensorSpec((1, 3), np.dtype(np.int64), False),
            TensorSpec((1,), np.dtype(np.float32), False),
        )
        count = 2 if self.second_per_grid is None else 3
        return dict(zip(_TENSORS[self.modality][:count], specs, strict=False))

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the tensors that `out` names into its arrays, which follow the specs."""
        pixels, *others = _TENSORS[self.modality]
        if pixels in out:
            self._write_patches(out[pixels], dtype)
        for name, value in zip(others, (self.grid, self.second_per_grid), strict=False):
            if name in out:
                out[name][0] = value

    def levels(self) -> npt.NDArray[np.uint8]:
        """Return patches before rescaling and normalising, a new uint8 array of `pixel_shape`.

        For servers that normalise on the device.
        """
        patches = np.empty(self.pixel_shape, np.uint8)
        self._write_patches(patches, "uint8")
        return patches

    def steps(self) -> list["PatchItem"]:
        """Return each time step of a video with text between steps as an image. Planes are views.

        Families that write text between steps attend within a step and number it like an image, so the image
        has the same features.
        """
        images = []
        steps = [piece for piece in self.expansion if isinstance(piece, Repeat) and piece.embeds]
        for step, features in enumerate(steps):
            start, stop = step * self.layout.temporal, (step + 1) * self.layout.temporal
            image = msgspec.structs.replace(
                self,
                identity=blake3(f"{self.identity} step {step}".encode()).hexdigest(),
                modality="image",
                grid=(1, *self.grid[1:]),
                expansion=(features,),
                frames=self.frames[start:stop],
                times=self.times[start:stop],
            )
            images.append(image)
        return images

    def _write_patches(self, out: npt.NDArray[Any], dtype: TensorDtype | Literal["uint8"]) -> None:
        layout, patch, merge = self.layout, self.layout.patch, self.layout.merge
        steps, height, width = self.grid
        # (time, patches of a frame, channel, frame of the patch, values of the patch)
        target = out.reshape(steps, height * width, 3, layout.temporal, patch**2)
        per_band = width * merge
        bands = max(1, _BLOCK_VALUES // (per_band * patch**2))
        scratch = np.empty(3 * bands * per_band * patch**2, target.dtype)
        for index, planes in enumerate(self.frames):
            step, offset = divmod(index, layout.temporal)
            repeats = slice(offset, None if index == len(self.frames) - 1 else offset + 1)
            # One element is one row of a patch, so the transposition moves whole rows.
            rows = planes.view(f"V{patch}").reshape(3, height // merge, merge, patch, width // merge, merge)
            for band in range(0, rows.shape[1], bands):
                block = np.ascontiguousarray(rows[:, band : band + bands].transpose(0, 1, 4, 2, 5, 3))
                levels = block.view(np.uint8).reshape(3, -1, patch**2)
                values: npt.NDArray[Any] = levels
                if dtype != "uint8":
                    values = scratch[: levels.size].reshape(levels.shape)
                    for channel in range(3):
                        self.arithmetic.write(levels[channel], channel, dtype, values[channel])
                start = band * per_band
                # One store in the order of the target. Channel by channel would fetch each line three times.
                part = target[step, start : start + levels.shape[1], :, repeats]
                part[...] = values.transpose(1, 0, 2)[:, :, None]


def time_steps(span: MediaSpan) -> list[MediaSpan] | None:
    """Return each time step of a video as an image at its own tokens; None if the video has no such steps."""
    item, runs = span.item, span.range.embed_spans
    if runs is None or not isinstance(item, PatchItem) or len(runs) != item.grid[0]:
        return None
    ranges = [PlaceholderRange(span.start + start, stop - start) for start, stop in runs]
    return [MediaSpan(span.modality, span.position, *pair) for pair in zip(ranges, item.steps(), strict=True)]


def patch_numbers(
    medium: str, settings: Mapping[str, Any], backend: ImageBackend, *, reads_pixel_names: bool
) -> dict[str, Any] | None:
    """Return layout, arithmetic and bounds on pixels; None if a step of processing is not the native one."""
    if settings["resample"] != 3 or not all(settings[step] for step in _STEPS):
        return None
    # Only Qwen2-VL's classes read bounds with these names.
    named = settings if reads_pixel_names else {}
    min_pixels = named.get("min_pixels") or settings["size"].get("shortest_edge")
    max_pixels = named.get("max_pixels") or settings["size"].get("longest_edge")
    if not min_pixels or not max_pixels:
        raise ProcessorError(
            f"the {medium} processor's bounds on pixels are incomplete",
            expected="`size` with `shortest_edge` and `longest_edge`",
            got=repr(settings["size"]),
        )
    return {
        "layout": PatchLayout(
            settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
        ),
        "arithmetic": PixelArithmetic.of(
            settings["image_mean"], settings["image_std"], settings["rescale_factor"], backend
        ),
        "min_pixels": int(min_pixels),
        "max_pixels": int(max_pixels),
    }


@dataclass(eq=False)
class PatchProcessor(MediaProcessor):
    """Images of the Qwen2-VL kind. See `MediaProcessor`."""

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
        settings = {"version": ARITHMETIC_VERSION, "kind": "patches", **asdict(self)}
        self.settings_digest = digest_settings(settings)
        self.placeholder = {"image": self.image_token, "video": self.video_token}
        self.placeholder_tokens = frozenset(self.placeholder.values())

    @classmethod
    def from_files(cls, files: ProcessorFiles, backend: ImageBackend) -> "PatchProcessor | None":
        """Build the processor, or return None if the settings are not native here."""
        name = files.image_processor_type or ""
        family = _FAMILIES.get(name)
        if family is None or files.processor_class not in _WHOLE:
            return None
        values = {key: value for key, value in files.image.items() if value not in (None, {})}
        settings = {**DEFAULTS, **family, **values}
        numbers = patch_numbers("image", settings, backend, reads_pixel_names=family is _QWEN)
        if numbers is None:
            return None
        tokens = {**family, **files.model.special_tokens}
        return cls(
            name=name,
            image_backend=backend,
            image_token=tokens["image_token"],
            video_token=tokens["video_token"],
            counts_frames=family is _GLM,
            **numbers,
        )

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return grid, expansion and resized size of an image. See `MediaProcessor`."""
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
        """Check the size of one image and identify its pixels. See `MediaProcessor`."""
        size = (loaded.height, loaded.width)
        geometry = self.geometry(*size)
        # Planes of an image that is resized are only hashed.
        planes = rgb_planes(loaded) if geometry.resized == size else None
        identity = (
            image_identity(self.settings_digest, loaded)
            if planes is None
            else media_identity(self.settings_digest, planes)
        )

        def finish() -> MediaItem:
            height, width = geometry.resized or size
            frames = resized_planes(loaded, height, width, self.image_backend) if planes is None else planes
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
    """Return the size to which an image is resized, in pixels.

    Both sides become multiples of `factor`, their product falls within `[min_pixels, max_pixels]` if that
    is possible, and the aspect ratio is kept as well as that allows. The order of floating-point operations
    is the reference's: a quotient that is off by one unit in the last place would move an image by a row of
    patches. Source: `smart_resize` of `transformers.models.qwen2_vl` and, with `frames`, of
    `transformers.models.glm4v` and the video processor of `qwen3_vl`.

    Args:
        height: Of the image.
        width: Of the image.
        factor: Side of a token's square, in pixels.
        min_pixels: Lower bound.
        max_pixels: Upper bound.
        frames: For GLM-4V, and for videos of other families: the bounds count the pixels of this many
            frames, as which an image counts, and a side below `factor` is scaled up first.
        temporal: Frames of a patch. The bounds count whole patches.

    Raises:
        MediaError: One side is over 200 times as long as the other.
    """
    given = f"{width}x{height} pixels"
    if frames is not None and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(
            "the image is too long and thin for this model",
            expected=f"an aspect ratio of at most {MAX_ASPECT_RATIO}",
            got=f"{given}, a ratio of {ratio:.1f}",
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
