"""Videos of the Qwen2-VL kind of processors (Qwen2-VL to 3.8, GLM-4V), natively and exactly.

Sampled frames become patches of as many frames as the model merges in time, on one grid for all of them; the
last frame fills a patch that is left open. Three rules differ between families, each chosen by the name of a
class of the reference: which frames are sampled, to what size they are brought, and what is written for them.

The reference has video processors on its torchvision back end alone, so pixels equal that one whatever back
end images have. Source: `video_processing_*.py` and `processing_*.py` of Transformers 5.23 in
`models/{qwen2_vl,qwen2_5_vl,qwen3_vl,glm4v,glm46v}`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from mmrender.errors import MediaError, MissingDependencyError, ProcessorError
from mmrender.media.frames import Frames, Timeline, Video
from mmrender.media.item import PatchItem, PatchLayout
from mmrender.media.levels import PixelArithmetic
from mmrender.media.pixels import media_identity, resized_planes, rgb_planes
from mmrender.media.processor import Prepared, ProcessorFiles, VideoProcessor, digest_settings
from mmrender.media.processors.qwen import STEPS, smart_resize
from mmrender.sidecar import Expansion, MediaItem, Repeat, Text

_ARITHMETIC_VERSION = 1
"""Part of every identity; raised whenever the same settings and frames would give other tensors."""

_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(STEPS, True),
    "resample": 3,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "rescale_factor": 1 / 255,
    "do_sample_frames": True,
    "fps": None,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
    "max_duration": 300,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 768,
}
_GLM: Mapping[str, Any] = {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    "fps": 2,
    "num_frames": 16,
}
_CLASSES: Mapping[str, Mapping[str, Any]] = {
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
    "Glm4vVideoProcessor": _GLM,
    "Glm46VVideoProcessor": _GLM,
}
"""Defaults of each class of the reference's video processors."""
_QWEN3 = ("Qwen3VLVideoProcessor", "Qwen3VLProcessor")
_GLM4V = ("Glm4vVideoProcessor", "Glm4vProcessor")
_OF_MODEL_TYPE: Mapping[str, tuple[str, str]] = {
    "qwen2_vl": ("Qwen2VLVideoProcessor", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _GLM4V),
    "glm46v": ("Glm46VVideoProcessor", "Glm46VProcessor"),
}
"""Classes of the video processor and of the whole one, for files that name none."""


@dataclass(eq=False)
class PatchVideoProcessor(VideoProcessor):
    """A video processor of the Qwen2-VL kind. See `VideoProcessor`.

    Attributes:
        name: Class of the reference's video processor, which samples and resizes.
        spelling: Class of the reference's whole processor, which writes the expansion.
        image_token: The feature token where the family has but one.
        video_token: The token that the template writes.
        edges: Tokens before and after the features of a time step, for families that write these.
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
        described = {"version": _ARITHMETIC_VERSION, "kind": "patches of videos", **asdict(self)}
        self.settings_digest = digest_settings(described)

    @classmethod
    def from_files(
        cls, files: ProcessorFiles, *, image_token: str, video_token: str
    ) -> "PatchVideoProcessor | None":
        """Build the processor, or return `None` where the settings leave the rules that are native here."""
        by_type = _OF_MODEL_TYPE.get(str(files.model.config.get("model_type")), ("", ""))
        name = files.video_processor_type or ""
        name = name if name in _CLASSES else by_type[0]
        spelling = files.processor_class or by_type[1]
        # Two of them may be set to nothing, which is not the same as not set.
        given = {
            key: value
            for key, value in files.video.items()
            if value not in (None, {}) or key in ("fps", "num_frames")
        }
        settings = {**_DEFAULTS, **_CLASSES.get(name, {}), **given}
        if not files.video or name not in _CLASSES or spelling not in _SPELLINGS:
            return None
        if name == "Glm4vVideoProcessor" and not settings["fps"]:
            return None
        if settings["resample"] != 3 or not all(settings[step] for step in STEPS):
            return None
        # Only Qwen2-VL's class reads bounds that are named so.
        bounds = settings if name == "Qwen2VLVideoProcessor" else {}
        least = bounds.get("min_pixels") or settings["size"].get("shortest_edge")
        most = bounds.get("max_pixels") or settings["size"].get("longest_edge")
        if not least or not most:
            raise ProcessorError(
                "the video processor's bounds on pixels are incomplete",
                expected="`size` with `shortest_edge` and `longest_edge`",
                got=repr(settings["size"]),
            )
        tokens = files.model.special_tokens
        edges = ("<|begin_of_image|>", "<|end_of_image|>")
        if name.startswith("Qwen"):
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
            layout=PatchLayout(
                settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
            ),
            arithmetic=PixelArithmetic.of(
                settings["image_mean"], settings["image_std"], settings["rescale_factor"], "torch"
            ),
            min_pixels=int(least),
            max_pixels=int(most),
            settings={key: settings[key] for key in _SAMPLING},
        )

    def choose(self, timeline: Timeline) -> Sequence[int]:
        """Return the numbers of the frames that the reference samples.

        Raises:
            MediaError: The video is too short, or its frame rate is not known and needed.
        """
        if not self.settings["do_sample_frames"]:
            return range(int(timeline.total))
        chosen = _CHOICES[self.name](self, timeline)
        if not chosen:
            raise MediaError(
                "no frame of this video would be sampled",
                expected=f"settings of {self.name} that sample one or more",
                got=f"{timeline.total} frames at {timeline.fps} a second",
                remedy="Sample it yourself, and pass the frames with times or frames_indices",
            )
        return chosen

    def resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the size that each of so many frames is brought to.

        Raises:
            MediaError: They are too few, or too long and thin.
        """
        layout, most = self.layout, self.max_pixels
        factor, capped = layout.patch * layout.merge, self.settings["cap_pixels_per_frame"]
        if self.name == "Qwen2VLVideoProcessor":
            if capped:
                total = int(self.settings["max_video_tokens"] * factor * factor * 0.9)
                most = max(min(most, total * layout.temporal // frames), int(self.min_pixels * 1.05))
            return smart_resize(height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=most)
        if frames < layout.temporal:
            raise MediaError(
                "the video has too few frames for this model",
                expected=f"at least {layout.temporal}",
                got=str(frames),
                remedy="Pass more frames, or pass the one as an image",
            )
        if capped and self.name == "Qwen3VLVideoProcessor":
            own = min(self.settings["max_video_tokens"] * factor * factor, most // frames)
            most = max(own, int(self.min_pixels * 1.05)) * frames
        return smart_resize(
            height,
            width,
            factor=factor,
            min_pixels=self.min_pixels,
            max_pixels=most,
            frames=frames,
            temporal=layout.temporal,
        )

    def expansion(self, timeline: Timeline, grid: tuple[int, int, int]) -> Expansion:
        """Return what is written in place of the placeholder."""
        return _SPELLINGS[self.spelling](self, timeline, grid)

    def prepare(self, video: Video) -> Prepared:
        """Sample and resize the frames one by one; see `VideoProcessor`."""
        frames = video.sample(self.choose)
        count, size = len(frames), (frames.height, frames.width)
        resized = self.resized(count, *size)
        frames.policy.check_video(count, *resized)
        planes = _resized(frames, resized)
        patch, timeline = self.layout.patch, frames.timeline
        grid = (-(-count // self.layout.temporal), resized[0] // patch, resized[1] // patch)
        expansion = self.expansion(timeline, grid)
        lasting = None
        if self.spelling == "Qwen2_5_VLProcessor":
            lasting = self.layout.temporal / timeline.sampled_fps
        # The tensors follow from these, so that a video in another encoding is the same item.
        identity = media_identity(
            self.settings_digest, planes, repr((size, expansion, lasting, timeline.seconds)).encode()
        )

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
                second_per_grid=lasting,
            )

        return Prepared(identity, finish)


def _resized(frames: Frames, size: tuple[int, int]) -> Any:
    """Return the frames as read-only uint8 planes `(frames, 3, height, width)`."""
    if (frames.height, frames.width) != size and find_spec("torch") is None:
        raise _torch_missing()
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


def _torch_missing() -> MissingDependencyError:
    return MissingDependencyError.of_extra(
        "torch", "torch", "a video", otherwise="pass its frames as images, with image_backend='pil'"
    )


# --- which frames are sampled ---

_SAMPLING = (
    "do_sample_frames",
    "fps",
    "num_frames",
    "min_frames",
    "max_frames",
    "max_duration",
    "cap_pixels_per_frame",
    "max_video_tokens",
)
"""Settings of sampling and of budgets."""


def _known_fps(timeline: Timeline) -> float:
    if timeline.fps is None:
        raise MediaError(
            "this model samples frames by time, and nothing says how fast they follow each other",
            expected="fps beside the frames",
            got="none",
            remedy='Give it: {"type": "video", "video": frames, "fps": 24}, or times where they are sampled',
        )
    return timeline.fps


def _choose_qwen2(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    settings, temporal, total = processor.settings, processor.layout.temporal, int(timeline.total)
    count = settings["num_frames"]
    if count is not None and settings["fps"] is not None:
        raise ProcessorError(
            "the settings name both a number of frames and a rate", expected="num_frames or fps", got="both"
        )
    if count is not None:
        count = round(count / temporal) * temporal
    elif settings["fps"] is not None:
        most = math.floor(min(settings["max_frames"], total) / temporal) * temporal
        count = total / _known_fps(timeline) * settings["fps"]
        count = min(max(count, settings["min_frames"]), most, total)
        count = math.floor(count / temporal) * temporal
    else:
        raise ProcessorError(
            "the settings ask for sampling and do not say how", expected="num_frames or fps", got="neither"
        )
    if not 0 < count <= total:
        raise _too_short(count, total)
    # Steps are summed up in float32 there, whose rounding decides between two frames.
    try:
        import torch
    except ImportError as error:
        raise _torch_missing() from error

    return [int(index) for index in torch.arange(0, total, total / count).int()]


def _choose_qwen3(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    settings, total = processor.settings, int(timeline.total)
    count, fps = settings["num_frames"], settings["fps"]
    if count is None and fps is not None:
        count = int(total / (timeline.fps or 24) * fps)
        count = min(max(count, settings["min_frames"]), settings["max_frames"], total)
    elif count is None:
        count = min(max(total, settings["min_frames"]), settings["max_frames"])
    chosen = np.linspace(0, total - 1, count).round().astype(int)
    return [int(index) for index in chosen]


def _choose_glm4v(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    settings, total, fps = processor.settings, int(timeline.total), _known_fps(timeline)
    last = total - 1
    duration = timeline.duration or round(last / fps) + 1
    wanted, longest = settings["fps"], settings["max_duration"]
    if duration <= longest:
        count = max(math.floor(duration * wanted), 1)
        chosen = [min(last, math.ceil(index * fps / wanted)) for index in range(count)]
    elif (count := int(longest * wanted)) >= total:
        chosen = list(range(total))
    else:
        seconds = np.linspace(0, duration, count, endpoint=True)
        chosen = [min(last, math.ceil(second * fps)) for second in seconds]
    return _even(chosen)


_DYNAMIC_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Seconds up to which a video is sampled at a rate in GLM-4.6V."""
_MOST_DYNAMIC = 640


def _choose_glm46v(processor: PatchVideoProcessor, timeline: Timeline) -> list[int]:
    temporal, total, fps = processor.layout.temporal, int(timeline.total), _known_fps(timeline)
    duration = timeline.duration or round((total - 1) / fps) + 1
    bounded = min(duration, _DYNAMIC_RATES[-1][0])
    rate = next(rate for seconds, rate in _DYNAMIC_RATES if bounded <= seconds)
    count = min(int(bounded * rate * temporal), _MOST_DYNAMIC)
    chosen: list[int] = []
    if total < count:
        chosen = np.linspace(0, total - 1, count, dtype=int).tolist()
    else:
        second, step, frame_lasts = 0.0, 1 / (temporal * rate), 1 / fps
        for index in range(total):
            if index * frame_lasts >= second:
                second += step
                chosen.append(index)
                if second >= int(duration):
                    break
    if len(chosen) < count:
        first, last = (chosen[0], chosen[-1]) if chosen else (0, max(total - 1, 0))
        chosen = np.linspace(first, last, count, dtype=int).tolist()
    elif len(chosen) > count:
        chosen = np.linspace(0, total - 1, count, dtype=int).tolist()
    return _even(chosen)


def _even(chosen: Sequence[int]) -> list[int]:
    """Return each number once, and the last one twice where they are odd."""
    once = list(dict.fromkeys(chosen))
    return [*once, once[-1]] if len(once) & 1 else once


def _too_short(count: float, total: int) -> MediaError:
    return MediaError(
        "the video cannot be sampled by the model's settings",
        expected=f"at least {max(count, 1)} frames",
        got=str(total),
        remedy="Pass a longer video, or sample it yourself and pass times or frames_indices",
    )


_CHOICES: Mapping[str, Callable[[PatchVideoProcessor, Timeline], list[int]]] = {
    "Qwen2VLVideoProcessor": _choose_qwen2,
    "Qwen3VLVideoProcessor": _choose_qwen3,
    "Glm4vVideoProcessor": _choose_glm4v,
    "Glm46VVideoProcessor": _choose_glm46v,
}


# --- what is written for them ---


def _spell_whole(processor: PatchVideoProcessor, _: Timeline, grid: tuple[int, int, int]) -> Expansion:
    return (Repeat(processor.video_token, math.prod(grid) // processor.layout.merge**2),)


def _spell_qwen3(processor: PatchVideoProcessor, timeline: Timeline, grid: tuple[int, int, int]) -> Expansion:
    """Write the time between first and last frame of each time step before its features."""
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
    """Write the second of every other frame after the features of a time step, as the image's are written."""
    seconds = timeline.seconds[::2][: grid[0]]
    seconds += (seconds[-1:] or [0.0]) * (grid[0] - len(seconds))
    opening, closing = processor.edges
    pieces: list[Text | Repeat] = []
    text = opening
    for second in seconds:
        pieces.append(Text(text))
        pieces.append(Repeat(processor.image_token, grid[1] * grid[2] // processor.layout.merge**2))
        shown = f"{second:.1f} seconds" if processor.spelling == "Glm46VProcessor" else int(second)
        text = f"{closing}{shown}{opening}"
    return (*pieces, Text(text.removesuffix(opening)))


_SPELLINGS: Mapping[str, Callable[[PatchVideoProcessor, Timeline, tuple[int, int, int]], Expansion]] = {
    "Qwen2VLProcessor": _spell_whole,
    "Qwen2_5_VLProcessor": _spell_whole,
    "Qwen3VLProcessor": _spell_qwen3,
    "Glm4vProcessor": _spell_glm,
    "Glm46VProcessor": _spell_glm,
}
