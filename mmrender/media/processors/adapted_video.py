"""Videos of any other family, through the model's own video processor (extra `hf`, and torchvision).

The whole processor runs on each video, on a text of one placeholder between marks, as that of images does;
what it hands to its tokenizer between the marks is the expansion. It says itself which frames it samples,
before they are decoded: its own method is asked, with the options that it is called with.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmcodecs.forks import watch_forks
from mmrender.caching import cached_property
from mmrender.errors import MediaError, MMRenderError, ProcessorError
from mmrender.media.frames import Timeline, Video
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.media.pixels import media_identity
from mmrender.media.processor import Prepared, ProcessorFiles, VideoProcessor, digest_settings
from mmrender.media.processors.reference import build_video_reference, missing_package, use_one_torch_thread
from mmrender.media.processors.transformers import (
    AFTER,
    BEFORE,
    Recorder,
    arithmetic_of,
    as_numpy,
    parse_expansion,
)

_FORMAT_VERSION = 1


class _ChosenError(Exception):
    """Ends a run of a processor once it has said which frames it samples."""


class AdaptedVideoProcessor(VideoProcessor):
    """The model's own video processor behind the interface of `VideoProcessor`; loaded with the first video.

    Args:
        files: The model's settings.
        trust_remote_code: Run processor code that the directory brings along.
    """

    def __init__(self, files: ProcessorFiles, *, trust_remote_code: bool = False) -> None:
        self.name = str(files.video.get("video_processor_type") or "the model's own")
        self._files = files
        self._trusts = trust_remote_code
        self._lock = threading.RLock()
        self._is_proved = False
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Build the processor anew if another thread was in the middle of a run, which changes it."""
        use_one_torch_thread()
        if not self._lock.acquire(blocking=False):
            self.__dict__.pop("_reference", None)
        self._lock = threading.RLock()

    @cached_property
    def _reference(self) -> Any:
        with self._lock:
            return build_video_reference(self._files, trust_remote_code=self._trusts)

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
            text, tensors = self._run(pixels, timeline)
            self._prove_beside(text, pixels, timeline)
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
            raise _ChosenError

        blank = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (int(timeline.total), 1, 1, 3))
        with self._lock:
            videos = self._reference.video_processor
            sample = videos.sample_frames
            videos.sample_frames = note
            try:
                if getattr(videos, "do_sample_frames", False):
                    self._run(blank, timeline)
            except _ChosenError:
                return chosen
            finally:
                del videos.sample_frames
        return range(int(timeline.total))

    def _prove_beside(self, text: str, pixels: Any, timeline: Timeline) -> None:
        """Prove, with the first video, that its expansion is the same between the family's own tokens.

        Raises:
            ProcessorError: The processor replaces these tokens, too.
        """
        processor = self._reference
        start: str = getattr(processor, "vision_start_token", None) or ""
        end: str = getattr(processor, "vision_end_token", None) or ""
        if self._is_proved or not (start and end):
            return
        written, _ = self._run(pixels, timeline, start, end)
        if written != text:
            raise ProcessorError(
                f"{type(processor).__name__} writes a video differently between {start} and {end}",
                expected=repr(text[:200]),
                got=repr(written[:200]),
            )
        self._is_proved = True

    def _run(
        self, pixels: Any, timeline: Timeline, start: str = "", end: str = ""
    ) -> tuple[str, Mapping[str, Any]]:
        """Return the text that replaced the placeholder between two texts, and the tensors."""
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
        processor = self._reference
        before, after = BEFORE + start, end + AFTER
        text = before + processor.video_token + after
        with self._lock:
            recorder = Recorder(processor.tokenizer)
            processor.tokenizer = recorder
            try:
                output = processor(
                    text=[text], videos=[pixels], video_metadata=[metadata], return_tensors="pt", **how
                )
            except (_ChosenError, MMRenderError):
                raise
            except ImportError as error:
                raise missing_package(error) from error
            except Exception as error:
                raise MediaError(
                    "the model's own processor cannot process this video",
                    got=f"{len(pixels)} frames of {pixels.shape[2]}x{pixels.shape[1]} pixels: "
                    f"{type(error).__name__}: {error}",
                ) from error
            finally:
                processor.tokenizer = recorder.part
        written = recorder.args[0] if recorder.args else recorder.options.get("text")
        written = written[0] if isinstance(written, list) and len(written) == 1 else written
        if not isinstance(written, str) or not (written.startswith(before) and written.endswith(after)):
            raise ProcessorError(
                "the model's processor moves or drops the text around a video",
                expected="the marks of the probe",
                got=repr(written)[:200],
            )
        # A tensor with a value for each token follows from the ids.
        aligned = tuple(output["input_ids"].shape)
        tensors = {
            name: as_numpy(value)
            for name, value in output.items()
            if name not in recorder.returned and hasattr(value, "shape") and value.shape[:2] != aligned
        }
        return written[len(before) : -len(after)], tensors

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


def _grid(tensors: Mapping[str, Any], frames: int) -> tuple[int, ...]:
    """Return `(t, h, w)` where the processor gives it, else the number of frames."""
    grid = tensors.get("video_grid_thw")
    return (frames,) if grid is None else tuple(int(value) for value in grid[0])
