"""Videos of any other family, through the model's own video processor (extra `hf`, and torchvision).

The whole processor runs on each video, on a text of one placeholder between marks, as that of images does;
what it hands to its tokenizer between the marks is the expansion. If it replaces the tokens that the template
writes around the placeholder as well (Cosmos3-Edge), the expansion covers these. It says itself which frames
it samples, before they are decoded: its own method is asked, with the options that it is called with.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mmrender.caching import cached_property
from mmrender.errors import MediaError, ProcessorError
from mmrender.media.frames import Timeline, Video
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.media.pixels import media_identity
from mmrender.media.processor import Affixes, Prepared, ProcessorFiles, VideoProcessor, digest_settings
from mmrender.media.processors.reference import build_video_reference
from mmrender.media.processors.transformers import AFTER, BEFORE, BETWEEN, arithmetic_of, parse_expansion
from mmrender.media.processors.watched import ChosenError, Run, WatchedProcessor, as_numpy

_FORMAT_VERSION = 1
_BLANK, _TIMES = np.zeros((8, 128, 128, 3), np.uint8), Timeline(8, 1.0, indices=tuple(range(8)))
"""A video of eight seconds for probes, its frames sampled: some processors sample more frames than it has."""


class AdaptedVideoProcessor(VideoProcessor):
    """The model's own video processor behind the interface of `VideoProcessor`; loaded with the first video.

    Args:
        files: The model's settings.
        video_text: Text that the chat template writes for a video, placeholder included.
        trust_remote_code: Run processor code that the directory brings along.
    """

    def __init__(
        self, files: ProcessorFiles, video_text: str = "", *, trust_remote_code: bool = False
    ) -> None:
        self.name = str(files.video.get("video_processor_type") or "the model's own")
        self._files = files
        self._video_text = video_text
        build = partial(build_video_reference, files, trust_remote_code=trust_remote_code)
        self._watched = WatchedProcessor(build, files.model.special_tokens.get("bos_token") or "")

    @property
    def _reference(self) -> Any:
        return self._watched.reference

    @cached_property
    def covers(self) -> tuple[str, str]:  # type: ignore[override]
        """Text of the template around a placeholder that the processor replaces as well.

        Raises:
            ProcessorError: It writes more beside a video than beside text.
        """
        run = self._probe
        start, end = self._around
        is_kept = BEFORE + start in run.text and end + AFTER in run.text
        covered = ("", "") if is_kept else (start, end)
        opening, _, ending = self._parted(run.text, covered)
        affixes = self._watched.learn_affixes()["none"]
        first, last = self._watched.tokens_beside(run)
        found = Affixes(first, opening, "nothing", ending, last)
        if affixes.refusal is None and found != affixes:
            raise ProcessorError(
                "the model's processor adds another text to a prompt with a video than to others",
                expected=repr(affixes),
                got=repr(found),
            )
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
        one = self._probe.text
        opening, piece, _ = self._parted(one, self.covers)
        start, end = self._around
        between = end.removeprefix(self.covers[1]) + BETWEEN + start.removesuffix(self.covers[0])
        at = one.index(piece, len(opening) + len(BEFORE)) + len(piece)
        if pair != one[:at] + between + piece + one[at:]:
            raise ProcessorError(
                "the model's processor writes equal videos of one prompt differently",
                expected="one expansion for equal videos",
                got=repr(pair[-200:]),
            )
        return True

    @cached_property
    def _probe(self) -> Run:
        """The run on one video that the others are held against."""
        return self._run(_BLANK, _TIMES)

    @cached_property
    def _around(self) -> tuple[str, str]:
        """Text that the template writes around the placeholder; without one, the family's tokens."""
        processor = self._reference
        start, found, end = self._video_text.partition(processor.video_token)
        if found:
            return start, end
        names = ("vision_start_token", "vision_end_token")
        start, end = (getattr(processor, name, None) or "" for name in names)
        return (start, end) if start and end else ("", "")

    def _parted(self, text: str, covered: tuple[str, str]) -> tuple[str, str, str]:
        """Return the text before a prompt, the expansion within it, and the text after it."""
        start, end = self._around
        before = BEFORE + start.removesuffix(covered[0])
        after = end.removeprefix(covered[1]) + AFTER
        opening, found, rest = text.partition(before)
        piece, marked, ending = rest.rpartition(after)
        if not found or not marked:
            raise ProcessorError(
                "the model's processor moves or drops the text around a video",
                expected="the marks of the probe",
                got=repr(text)[:200],
            )
        return opening, piece, ending

    @cached_property
    def settings_digest(self) -> bytes:  # type: ignore[override]
        """Digest of the reference's release and of all its settings.

        Raises:
            MissingDependencyError: Something that it needs is not installed, such as torchvision.
            ProcessorError: The model has no video processor, or Transformers cannot build it.
        """
        import transformers

        videos = self._reference.video_processor
        described = {
            "version": _FORMAT_VERSION,
            "kind": "videos of transformers",
            "transformers": transformers.__version__,
            "video_processor": f"{type(videos).__module__}.{type(videos).__name__}",
            "settings": videos.to_json_string(),
            "processor": type(self._reference).__name__,
            "processor_settings": repr(sorted(self._files.processor.items(), key=lambda entry: entry[0])),
        }
        return digest_settings(described)

    def prepare(self, video: Video) -> Prepared:
        """Sample the frames that the model's own processor names; see `VideoProcessor`."""
        frames = video.sample(self._choose)
        frames.policy.check_video(len(frames), frames.height, frames.width)
        pixels = np.stack([image.array for image in frames.images])
        timeline = frames.timeline
        told = repr((timeline.total, timeline.fps, timeline.duration, timeline.indices)).encode()
        identity = media_identity(self.settings_digest, pixels.transpose(0, 3, 1, 2), told)

        def finish() -> ProcessedItem:
            run = self._run(pixels, timeline)
            text, tensors = self._parted(run.text, self.covers)[1], _tensors(run)
            arithmetic = arithmetic_of(self._reference.video_processor, "torch")
            return ProcessedItem(
                identity=identity,
                size=(frames.height, frames.width),
                grid=_grid(tensors, len(frames)),
                expansion=parse_expansion(text, self._feature_token(text)),
                modality="video",
                parts={name: compacted(values, arithmetic) for name, values in tensors.items()},
            )

        return Prepared(identity, finish)

    def _choose(self, timeline: Timeline) -> Sequence[int]:
        """Ask the video processor which frames it samples, and stop it there."""
        chosen: list[int] = []

        def note(*args: Any, **kwargs: Any) -> None:
            chosen.extend(int(index) for index in sample(*args, **kwargs))
            raise ChosenError

        blank = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (int(timeline.total), 1, 1, 3))
        with self._watched.lock:
            videos = self._reference.video_processor
            sample = videos.sample_frames
            videos.sample_frames = note
            try:
                if getattr(videos, "do_sample_frames", False):
                    self._run(blank, timeline)
            except ChosenError:
                return chosen
            finally:
                del videos.sample_frames
        return range(int(timeline.total))

    def _run(self, pixels: Any, timeline: Timeline, copies: int = 1) -> Run:
        """Run the whole processor on a text with a placeholder for each copy of a video."""
        metadata: dict[str, Any] = {
            "total_num_frames": timeline.total,
            "fps": timeline.fps,
            "duration": timeline.duration,
            "height": pixels.shape[1],
            "width": pixels.shape[2],
        }
        how: dict[str, Any] = {"return_metadata": True}  # Muse's processor writes times from it
        if timeline.indices is not None:
            metadata["frames_indices"] = list(timeline.indices)
            how["do_sample_frames"] = False
        start, end = self._around
        between = [end + BETWEEN + start] * (copies - 1)
        text = self._reference.video_token.join([BEFORE + start, *between, end + AFTER])
        medium = f"video {len(pixels)} frames of {pixels.shape[2]}x{pixels.shape[1]} pixels"
        return self._watched.run(
            text,
            medium,
            videos=[pixels] * copies,
            video_metadata=[metadata] * copies,
            return_tensors="pt",
            **how,
        )

    def _feature_token(self, text: str) -> str:
        """Return the token that holds features: one that the model's settings name, for videos first."""
        processor, files = self._reference, self._files
        ids = [*files.token_ids("video"), *files.token_ids("image")]
        named = [processor.tokenizer.convert_ids_to_tokens(index) for index in ids]
        for token in (*named, processor.video_token, getattr(processor, "image_token", None)):
            if isinstance(token, str) and token and token in text:
                return token
        raise ProcessorError(
            "no token of the expansion holds features of the video",
            expected="one that config.json names",
            got=repr(text[:200]),
        )


def _tensors(run: Run) -> Mapping[str, Any]:
    """Return the tensors of a video; one with a value for each token follows from the ids."""
    aligned = tuple(run.output["input_ids"].shape)
    return {
        name: as_numpy(value)
        for name, value in run.output.items()
        if name not in run.of_text and hasattr(value, "shape") and value.shape[:2] != aligned
    }


def _grid(tensors: Mapping[str, Any], frames: int) -> tuple[int, ...]:
    """Return `(t, h, w)` where the processor gives it, else the number of frames."""
    grid = tensors.get("video_grid_thw")
    return (frames,) if grid is None else tuple(int(value) for value in grid[0])
