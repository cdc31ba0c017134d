"""Videos of the Qwen2-VL kind (Qwen2-VL to 3.8, GLM-4V), natively and exactly.

Sampled frames become patches of several frames on one grid, and the last frame fills a patch that is left
open. Families differ in numbers and in three rules, each chosen by a class name of the reference: which
frames are sampled, how they are resized, and the text around features.

The reference processes videos on its torchvision back end alone, so their pixels equal that back end whatever
back end images have. Source: `video_processing_*.py` and `processing_*.py` of Transformers 5.23 in
`models/{qwen2_vl,qwen2_5_vl,qwen3_vl,glm4v,glm46v}`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmrender.errors import MediaError, ProcessorError, importing
from mmrender.media.levels import PixelArithmetic
from mmrender.media.pixels import media_identity, resized_planes, rgb_planes
from mmrender.media.processor import Prepared, ProcessorFiles, VideoProcessor, digest_settings
from mmrender.media.processors.patches import (
    ARITHMETIC_VERSION,
    DEFAULTS,
    PatchItem,
    PatchLayout,
    patch_numbers,
    smart_resize,
)
from mmrender.media.video import Frames, Timeline, Video
from mmrender.sidecar import Expansion, MediaItem, Repeat, Text

_SAMPLING: Mapping[str, Any] = {
    "do_sample_frames": True,
    "fps": None,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
    "max_duration": 300,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 768,
}
"""Settings of sampling frames and their defaults."""
_GLM_VIDEO: Mapping[str, Any] = {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    "fps": 2,
    "num_frames": 16,
}
_VIDEO_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "do_sample_frames": False,
        "max_video_tokens": 128000,
    },
    "Qwen3VLVideoProcessor": {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "patch_size": 16,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "fps": 2,
    },
    "Glm4vVideoProcessor": _GLM_VIDEO,
    "Glm46VVideoProcessor": _GLM_VIDEO,
}
"""Defaults of each class of video processors."""
_QWEN3_CLASSES = ("Qwen3VLVideoProcessor", "Qwen3VLProcessor")
_GLM4V_CLASSES = ("Glm4vVideoProcessor", "Glm4vProcessor")
_OF_MODEL_TYPE: Mapping[str, tuple[str, str]] = {
    "qwen2_vl": ("Qwen2VLVideoProcessor", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3_CLASSES),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _GLM4V_CLASSES),
    "glm46v": ("Glm46VVideoProcessor", "Glm46VProcessor"),
}
"""Classes of the video processor and of the whole processor, if the files do not name them."""


@dataclass(eq=False)
class PatchVideoProcessor(VideoProcessor):
    """Videos of the Qwen2-VL kind. See `VideoProcessor`.

    Attributes:
        name: Class of the reference's video processor, which samples and resizes.
        spelling: Class of the reference's whole processor, which writes the expansion.
        image_token: The feature token, for families that use it for videos as well.
        video_token: The token that the template writes.
        edges: Tokens before and after the features of a time step, for families that write them.
        settings: The settings of sampling and resizing.
    """

    name: str
    spelling: str
    image_token: str
    video_token: str
    edges: tuple[str, str]
    layout: PatchLayout
    arithmetic: PixelArithmetic
    min_pixels: int
    max_pixels: int
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        described = {"version": ARITHMETIC_VERSION, "kind": "patches of videos", **asdict(self)}
        self.settings_digest = digest_settings(described)

    @classmethod
    def from_files(
        cls, files: ProcessorFiles, *, image_token: str, video_token: str
    ) -> "PatchVideoProcessor | None":
        """Build the processor, or return None if the settings are not native here."""
        default_name, default_spelling = _OF_MODEL_TYPE.get(
            str(files.model.config.get("model_type")), ("", "")
        )
        name = files.video_processor_type or ""
        name = name if name in _VIDEO_FAMILIES else default_name
        spelling = files.processor_class or default_spelling
        if not files.video or name not in _VIDEO_FAMILIES or spelling not in _SPELLINGS:
            return None
        # These two may be set to null, which differs from leaving them out.
        values = {
            key: value
            for key, value in files.video.items()
            if value not in (None, {}) or key in ("fps", "num_frames")
        }
        settings = {**DEFAULTS, **_SAMPLING, **_VIDEO_FAMILIES[name], **values}
        if name == "Glm4vVideoProcessor" and not settings["fps"]:
            return None
        is_qwen2 = name == "Qwen2VLVideoProcessor"
        numbers = patch_numbers("video", settings, "torch", reads_pixel_names=is_qwen2)
        if numbers is None:
            return None
        edges = ("<|begin_of_image|>", "<|end_of_image|>")
        if name.startswith("Qwen"):
            tokens = files.model.special_tokens
            edges = (
                tokens.get("vision_start_token", "<|vision_start|>"),
                tokens.get("vision_end_token", "<|vision_end|>"),
            )
        return cls(
            name=name,
            spelling=spelling,
            image_token=image_token,
            video_token=video_token,
            edges=edges,
            settings={key: settings[key] for key in _SAMPLING},
            **numbers,
        )

    def choose(self, timeline: Timeline) -> Sequence[int]:
        """Return the indices of the frames that the reference samples.

        Raises:
            MediaError: The video is too short, or its frame rate is needed and unknown.
        """
        if not self.settings["do_sample_frames"]:
            return range(int(timeline.total))
        indices = _CHOICES[self.name](self, timeline)
        if not indices:
            raise MediaError(
                "no frame of this video would be sampled",
                expected=f"settings of {self.name} that sample one or more",
                got=f"{timeline.total} frames at {timeline.fps} a second",
                remedy="Sample it yourself, and pass the frames with times or frames_indices",
            )
        return indices

    def resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the size to which each of `frames` frames is resized.

        Raises:
            MediaError: There are too few frames, or they are too long and thin.
        """
        layout, max_pixels = self.layout, self.max_pixels
        factor, is_capped = layout.patch * layout.merge, self.settings["cap_pixels_per_frame"]
        max_tokens = self.settings["max_video_tokens"]
        counts: dict[str, int] = {}
        if self.name == "Qwen2VLVideoProcessor":
            if is_capped:
                total = int(max_tokens * factor * factor * 0.9)
                max_pixels = max(
                    min(max_pixels, total * layout.temporal // frames), int(self.min_pixels * 1.05)
                )
        elif frames < layout.temporal:
            raise MediaError(
                "the video has too few frames for this model",
                expected=f"at least {layout.temporal}",
                got=str(frames),
                remedy="Pass more frames, or pass the frame as an image",
            )
        else:
            counts = {"frames": frames, "temporal": layout.temporal}
            if is_capped and self.name == "Qwen3VLVideoProcessor":
                per_frame = min(max_tokens * factor * factor, max_pixels // frames)
                max_pixels = max(per_frame, int(self.min_pixels * 1.05)) * frames
        return smart_resize(
            height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=max_pixels, **counts
        )

    def expansion(self, timeline: Timeline, grid: tuple[int, int, int]) -> Expansion:
        """Return the replacement of the placeholder."""
        return _SPELLINGS[self.spelling](self, timeline, grid)

    def prepare(self, video: Video) -> Prepared:
        """Sample and resize the frames one by one. See `VideoProcessor`."""
        frames = video.sample(self.choose)
        count, size = len(frames), (frames.height, frames.width)
        resized = self.resized(count, *size)
        frames.check_size(*resized)
        planes = _resized(frames, resized)
        patch, timeline = self.layout.patch, frames.timeline
        grid = (-(-count // self.layout.temporal), resized[0] // patch, resized[1] // patch)
        expansion = self.expansion(timeline, grid)
        step_seconds = None
        if self.spelling == "Qwen2_5_VLProcessor":
            step_seconds = self.layout.temporal / timeline.sampled_fps
        # The tensors follow from these, so a video in another encoding is the same item.
        context = repr((size, expansion, step_seconds, timeline.seconds)).encode()
        identity = media_identity(self.settings_digest, planes, context)

        def finish() -> MediaItem:
            return PatchItem(
                identity=identity,
                size=size,
                grid=grid,
                expansion=expansion,
                modality="video",
                frames=planes,
                layout=self.layout,
                arithmetic=self.arithmetic,
                times=tuple(timeline.seconds),
                second_per_grid=step_seconds,
            )

        return Prepared(identity, finish)


def _resized(frames: Frames, size: tuple[int, int]) -> Any:
    """Return the frames as read-only uint8 planes `(frames, 3, height, width)`."""
    if (frames.height, frames.width) != size:
        with _importing_torch():
            import torch  # noqa: F401 - refused before a frame is decoded
    planes = np.empty((len(frames), 3, *size), np.uint8)
    last = None
    for index, image in enumerate(frames.images):
        if image is last:
            planes[index] = planes[index - 1]
        elif (image.height, image.width) == size:
            rgb_planes(image, planes[index])
        else:
            resized_planes(image, *size, "torch", planes[index])
        last = image
    planes.flags.writeable = False
    return planes


def _importing_torch() -> AbstractContextManager[None]:
    otherwise = "pass its frames as images, with image_backend='pil'"
    return importing("torch", "torch", "a video", otherwise=otherwise)


# --- sampling of frames ---


def _known_fps(timeline: Timeline) -> float:
    if timeline.fps is None:
        raise MediaError(
            "this model samples frames by time, and the frame rate is unknown",
            expected="fps with the frames",
            got="none",
            remedy='Add it: {"type": "video", "video": frames, "fps": 24}, or times of sampled frames',
        )
    return timeline.fps


def _choose_qwen2(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    settings, temporal, total = processor.settings, processor.layout.temporal, int(timeline.total)
    count, fps = settings["num_frames"], settings["fps"]
    if (count is None) == (fps is None):
        raise ProcessorError(
            "the settings of sampling need a number of frames or a rate",
            expected="num_frames or fps",
            got="neither" if count is None else "both",
        )
    if count is not None:
        count = round(count / temporal) * temporal
    else:
        max_count = math.floor(min(settings["max_frames"], total) / temporal) * temporal
        count = total / _known_fps(timeline) * fps
        count = min(max(count, settings["min_frames"]), max_count, total)
        count = math.floor(count / temporal) * temporal
    if not 0 < count <= total:
        raise MediaError(
            "the video cannot be sampled by the model's settings",
            expected=f"at least {max(count, 1)} frames",
            got=str(total),
            remedy="Pass a longer video, or sample it yourself and pass times or frames_indices",
        )
    # The reference adds up steps in float32, whose rounding decides between two frames.
    with _importing_torch():
        import torch

    return [int(index) for index in torch.arange(0, total, total / count).int()]


def _choose_qwen3(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    settings, total = processor.settings, int(timeline.total)
    count, fps = settings["num_frames"], settings["fps"]
    if count is None and fps is not None:
        count = int(total / (timeline.fps or 24) * fps)
        count = min(max(count, settings["min_frames"]), settings["max_frames"], total)
    elif count is None:
        count = min(max(total, settings["min_frames"]), settings["max_frames"])
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def _choose_glm4v(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    settings, total, fps = processor.settings, int(timeline.total), _known_fps(timeline)
    last = total - 1
    duration = timeline.duration or round(last / fps) + 1
    target_fps, max_duration = settings["fps"], settings["max_duration"]
    if duration <= max_duration:
        count = max(math.floor(duration * target_fps), 1)
        indices = [min(last, math.ceil(index * fps / target_fps)) for index in range(count)]
    elif (count := int(max_duration * target_fps)) >= total:
        indices = list(range(total))
    else:
        seconds = np.linspace(0, duration, count, endpoint=True)
        indices = [min(last, math.ceil(second * fps)) for second in seconds]
    return _even(indices)


_DYNAMIC_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""GLM-4.6V: maximum duration in seconds, and the sampling rate of such videos."""
_MAX_DYNAMIC = 640
"""GLM-4.6V: maximum number of sampled frames."""


def _choose_glm46v(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    temporal, total, fps = processor.layout.temporal, int(timeline.total), _known_fps(timeline)
    duration = timeline.duration or round((total - 1) / fps) + 1
    bounded = min(duration, _DYNAMIC_RATES[-1][0])
    rate = next(rate for seconds, rate in _DYNAMIC_RATES if bounded <= seconds)
    count = min(int(bounded * rate * temporal), _MAX_DYNAMIC)
    indices: list[int] = []
    if total < count:
        indices = np.linspace(0, total - 1, count, dtype=int).tolist()
    else:
        second, step, frame_seconds = 0.0, 1 / (temporal * rate), 1 / fps
        for index in range(total):
            if index * frame_seconds >= second:
                second += step
                indices.append(index)
                if second >= int(duration):
                    break
    if len(indices) < count:
        first, last = (indices[0], indices[-1]) if indices else (0, max(total - 1, 0))
        indices = np.linspace(first, last, count, dtype=int).tolist()
    elif len(indices) > count:
        indices = np.linspace(0, total - 1, count, dtype=int).tolist()
    return _even(indices)


def _even(indices: Sequence[int]) -> list[int]:
    """Return each index once, and the last one twice if their number is odd."""
    once = list(dict.fromkeys(indices))
    return [*once, once[-1]] if len(once) & 1 else once


_CHOICES: Mapping[str, Callable[[PatchVideoProcessor, Timeline], list[int]]] = {
    "Qwen2VLVideoProcessor": _choose_qwen2,
    "Qwen3VLVideoProcessor": _choose_qwen3,
    "Glm4vVideoProcessor": _choose_glm4v,
    "Glm46VVideoProcessor": _choose_glm46v,
}


# --- expansions of placeholders ---


def _spell_whole(processor: PatchVideoProcessor, _: Timeline, grid: tuple[int, int, int]) -> Expansion:
    return (Repeat(processor.video_token, math.prod(grid) // processor.layout.merge**2),)


def _spell_qwen3(processor: PatchVideoProcessor, timeline: Timeline, grid: tuple[int, int, int]) -> Expansion:
    """Write the middle time of each time step before its features."""
    temporal, seconds = processor.layout.temporal, timeline.seconds
    seconds += seconds[-1:] * (-len(seconds) % temporal)
    opening, closing = processor.edges
    pieces: list[Text | Repeat] = []
    text = ""
    for step in range(grid[0]):
        first, last = seconds[step * temporal], seconds[(step + 1) * temporal - 1]
        pieces.append(Text(f"{text}<{(first + last) / 2:.1f} seconds>{opening}"))
        pieces.append(Repeat(processor.video_token, grid[1] * grid[2] // processor.layout.merge**2))
        text = closing
    return (*pieces, Text(text))


def _spell_glm(processor: PatchVideoProcessor, timeline: Timeline, grid: tuple[int, int, int]) -> Expansion:
    """Write the time of every second frame after the features of a time step."""
    seconds = timeline.seconds[::2][: grid[0]]
    seconds += (seconds[-1:] or [0.0]) * (grid[0] - len(seconds))
    opening, closing = processor.edges
    pieces: list[Text | Repeat] = []
    text = opening
    for second in seconds:
        pieces.append(Text(text))
        pieces.append(Repeat(processor.image_token, grid[1] * grid[2] // processor.layout.merge**2))
        time = f"{second:.1f} seconds" if processor.spelling == "Glm46VProcessor" else int(second)
        text = f"{closing}{time}{opening}"
    return (*pieces, Text(text.removesuffix(opening)))


_SPELLINGS: Mapping[str, Callable[[PatchVideoProcessor, Timeline, tuple[int, int, int]], Expansion]] = {
    "Qwen2VLProcessor": _spell_whole,
    "Qwen2_5_VLProcessor": _spell_whole,
    "Qwen3VLProcessor": _spell_qwen3,
    "Glm4vProcessor": _spell_glm,
    "Glm46VProcessor": _spell_glm,
}
