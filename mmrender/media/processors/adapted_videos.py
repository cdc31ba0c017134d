"""Videos of any other family, through the model's own Transformers processor (extra `hf` and torchvision).

The processor runs whole, as for images. It chooses the frames before they are decoded: its own method is
called with the options that it would get. If it replaces the tokens that the template writes around a video
(Cosmos3-Edge), the expansion covers them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.caching import cached_property
from mmrender.errors import MediaError, ProcessorError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.media.pixels import media_identity
from mmrender.media.processor import Prepared, ProcessorFiles, VideoProcessor
from mmrender.media.processors.adapter import (
    AFTER,
    BEFORE,
    Tensors,
    arithmetic_of,
    grid_of,
    marks_of,
    parse_expansion,
    split_at,
)
from mmrender.media.processors.reference import build_video_reference
from mmrender.media.processors.watched import ChosenError, Run, WatchedProcessor, as_numpy
from mmrender.media.video import Timeline, Video

_BLANK, _TIMES = np.zeros((8, 128, 128, 3), np.uint8), Timeline(8, 1.0, indices=tuple(range(8)))
"""A video of eight seconds for probes. Its frames count as sampled: some processors sample more frames."""


class AdaptedVideoProcessor(VideoProcessor):
    """The model's own video processor behind the interface of `VideoProcessor`. Loaded with the first video.

    Args:
        files: The model's settings.
        video_text: Text that the chat template writes for a video, placeholder included.
        trust_remote_code: Run processor code of the directory.
    """

    def __init__(
        self, files: ProcessorFiles, video_text: str = "", *, trust_remote_code: bool = False
    ) -> None:
        self.name = str(files.video.get("video_processor_type") or "the model's own")
        self._video_text = video_text
        build = partial(build_video_reference, files, trust_remote_code=trust_remote_code)
        self._watched = WatchedProcessor(build, files)

    @cached_property
    def settings_digest(self) -> bytes:  # type: ignore[override]
        """Digest of the reference's release and of all its settings.

        Raises:
            MissingDependencyError: A package that it needs is not installed, such as torchvision.
            ProcessorError: The model has no video processor, or Transformers cannot build it.
        """
        part = self._watched.reference.video_processor
        return self._watched.digest("video_processor", part, "videos of transformers")

    @cached_property
    def covers(self) -> tuple[str, str]:  # type: ignore[override]
        """Text of the template around a placeholder that the processor replaces as well.

        Raises:
            ProcessorError: It adds other text to a prompt with a video than to other prompts.
        """
        run = self._probe
        start, end = self._around
        is_kept = BEFORE + start in run.text and end + AFTER in run.text
        covered = ("", "") if is_kept else (start, end)
        opening, _, ending = self._pieces(run.text, covered)
        self._watched.require_same_affixes(run, opening, ending, "a video")
        return covered

    @cached_property
    def takes_several(self) -> bool:  # type: ignore[override]
        """Whether it takes two videos in a prompt.

        Raises:
            ProcessorError: It writes equal videos of one prompt differently.
        """
        try:
            pair = self._run(_BLANK, _TIMES, 2).text
        except MediaError:
            return False
        opening, (piece,), ending = self._pieces(self._probe.text, self.covers)
        if self._pieces(pair, self.covers, 2) != (opening, [piece, piece], ending):
            raise ProcessorError(
                "the model's processor writes equal videos of one prompt differently",
                expected="one expansion for equal videos",
                got=repr(pair[-200:]),
            )
        return True

    @cached_property
    def _probe(self) -> Run:
        """The run on one video with which other runs are compared."""
        return self._run(_BLANK, _TIMES)

    @cached_property
    def _around(self) -> tuple[str, str]:
        """Text that the template writes around the placeholder. Without a template, the family's tokens."""
        reference = self._watched.reference
        start, token, end = self._video_text.partition(reference.video_token)
        if not token:
            names = ("vision_start_token", "vision_end_token")
            start, end = (getattr(reference, name, None) or "" for name in names)
        return (start, end) if token or (start and end) else ("", "")

    def _pieces(self, text: str, covered: tuple[str, str], copies: int = 1) -> tuple[str, list[str], str]:
        """Return the text before a prompt, the expansions within it, and the text after it."""
        start, end = self._around
        marks = marks_of((start.removesuffix(covered[0]), end.removeprefix(covered[1])), copies)
        return split_at(text, marks, "a video", "the marks of the probe")

    def prepare(self, video: Video) -> Prepared:
        """Sample the frames that the model's own processor chooses. See `VideoProcessor`."""
        frames = video.sample(self._choose)
        frames.check_size(frames.height, frames.width)
        pixels = np.stack([image.array for image in frames.images])
        timeline = frames.timeline
        times = repr((timeline.total, timeline.fps, timeline.duration, timeline.indices)).encode()
        identity = media_identity(self.settings_digest, pixels.transpose(0, 3, 1, 2), times)
        return Prepared(identity, partial(self._finish, identity, pixels, timeline))

    def _finish(self, identity: str, pixels: npt.NDArray[np.uint8], timeline: Timeline) -> ProcessedItem:
        run = self._run(pixels, timeline)
        (piece,), tensors = self._pieces(run.text, self.covers)[1], _video_tensors(run)
        arithmetic = arithmetic_of(self._watched.reference.video_processor, "torch")
        return ProcessedItem(
            identity=identity,
            size=(pixels.shape[1], pixels.shape[2]),
            grid=grid_of(tensors, "video_grid_thw", len(pixels)),
            expansion=parse_expansion(piece, self._feature_token(piece)),
            modality="video",
            parts={name: compacted(values, arithmetic) for name, values in tensors.items()},
        )

    def _choose(self, timeline: Timeline) -> Sequence[int]:
        """Run the processor until it has chosen the frames."""
        indices: list[int] = []

        def record(*args: Any, **kwargs: Any) -> None:
            indices.extend(int(index) for index in sample(*args, **kwargs))
            raise ChosenError("the frames are chosen")

        blank = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (int(timeline.total), 1, 1, 3))
        with self._watched.lock:
            videos = self._watched.reference.video_processor
            sample = videos.sample_frames
            videos.sample_frames = record
            try:
                if getattr(videos, "do_sample_frames", False):
                    self._run(blank, timeline)
            except ChosenError:
                return indices
            finally:
                del videos.sample_frames
        return range(int(timeline.total))

    def _run(self, pixels: Any, timeline: Timeline, copies: int = 1) -> Run:
        """Run the whole processor on a text with a placeholder for each copy of a video."""
        height, width = pixels.shape[1:3]
        metadata: dict[str, Any] = {
            "total_num_frames": timeline.total,
            "fps": timeline.fps,
            "duration": timeline.duration,
            "height": height,
            "width": width,
        }
        options: dict[str, Any] = {"return_metadata": True}  # Muse's processor writes times from it
        if timeline.indices is not None:
            metadata["frames_indices"] = list(timeline.indices)
            options["do_sample_frames"] = False
        return self._watched.run(
            self._watched.reference.video_token.join(marks_of(self._around, copies)),
            f"video {len(pixels)} frames of {width}x{height} pixels",
            videos=[pixels] * copies,
            video_metadata=[metadata] * copies,
            return_tensors="pt",
            **options,
        )

    def _feature_token(self, text: str) -> str:
        """Return the token that holds video features in an expansion."""
        reference = self._watched.reference
        others = reference.video_token, getattr(reference, "image_token", None)
        return self._watched.feature_token(("video", "image"), text, *others)


def _video_tensors(run: Run) -> Tensors:
    """Return the tensors of a video, without tensors that have a value for each token."""
    aligned = tuple(run.output["input_ids"].shape)
    return {
        name: as_numpy(value)
        for name, value in run.output.items()
        if name not in run.of_text and hasattr(value, "shape") and value.shape[:2] != aligned
    }
