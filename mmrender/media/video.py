"""Videos: any source in, sampled frames and their times out, under a `MediaPolicy`.

Times follow Transformers' `VideoMetadata`: number of frames, frame rate, and indices of the sampled frames.
The processor chooses the frames before any of them is decoded. A video that was sampled elsewhere has its
indices already. Each frame is loaded when it is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from mmrender.errors import MediaDecodeError, located
from mmrender.media.decode import Timeline, decoder
from mmrender.media.load import LoadedImage, load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import read_source
from mmrender.messages import VideoPart


@dataclass(frozen=True, slots=True)
class Frames:
    """Sampled frames of one video, all of one size.

    Attributes:
        height: In pixels.
        width: In pixels.
        timeline: Their times.
        images: The frames in order, to be iterated once.
    """

    height: int
    width: int
    timeline: Timeline
    images: Iterator[LoadedImage] = field(repr=False)
    _policy: MediaPolicy

    def __len__(self) -> int:
        return len(self.timeline.indices or ())

    def check_size(self, height: int, width: int) -> None:
        """Raise MediaLimitError if these frames, resized to RGB frames of this size, exceed the policy."""
        size = len(self) * height * width * 3
        self._policy.check("max_video_bytes", size, got=f"{len(self)} frames of {width}x{height} = {size}")


@dataclass(frozen=True, slots=True)
class Video:
    """An open video before sampling.

    Attributes:
        timeline: Times of its frames. With indices if it was sampled elsewhere.
    """

    timeline: Timeline
    _frames: Callable[[Sequence[int]], Iterator[LoadedImage]] = field(repr=False)
    _policy: MediaPolicy = field(repr=False)

    def sample(self, choose: Callable[[Timeline], Sequence[int]] | None = None) -> Frames:
        """Return the frames that `choose` returns, or all. A video that was sampled elsewhere is kept.

        Raises:
            MediaError: A frame cannot be loaded, or differs in size from the first.
        """
        timeline = self.timeline
        if timeline.indices is not None:
            indices: Sequence[int] = range(len(timeline.indices))
        else:
            indices = range(int(timeline.total))
            if choose is not None:
                indices = [int(index) for index in choose(timeline)]
            timeline = replace(timeline, indices=tuple(indices))
        images = self._frames(indices)
        first = next(images, None)
        if first is None:
            raise MediaDecodeError("no frame of the video is sampled", expected="one or more", got="0")
        same_size = _require_size(chain([first], images), first.height, first.width)
        return Frames(first.height, first.width, timeline, same_size, self._policy)


def _require_size(images: Iterator[LoadedImage], height: int, width: int) -> Iterator[LoadedImage]:
    for image in images:
        if (image.height, image.width) != (height, width):
            raise MediaDecodeError(
                "the frames of a video are of different sizes",
                expected=f"{width}x{height}, as the first",
                got=f"{image.width}x{image.height}",
                remedy="Resize or crop them to one size first",
            )
        yield image


@contextmanager
def open_video(part: VideoPart, policy: MediaPolicy, where: str) -> Iterator[Video]:
    """Open a video, to be used within the context.

    Raises:
        MediaError: As for `load_image`. Or it has no frames, or times that do not fit its frames.
        MissingDependencyError: It is encoded, and PyAV is not installed (extra `video`).
    """
    with located(where):
        array = as_array(part.source)
        if array is None and not isinstance(part.source, tuple | list):
            with _open_encoded(part, policy) as video:
                yield video
            return
        if array is not None:
            _check_array(array)
        images: Sequence[Any] = part.source if array is None else array
        if not len(images):
            raise MediaDecodeError("the video has no frames", expected="at least 1", got="0")
        policy.check("max_frames", len(images))
        timeline = _timeline_of_part(part, len(images))
        yield Video(timeline, lambda indices: _loaded(images, indices, policy), policy)


@contextmanager
def _open_encoded(part: VideoPart, policy: MediaPolicy) -> Iterator[Video]:
    for name in ("fps", "times", "frames_indices", "total_num_frames", "duration"):
        if getattr(part, name) is not None:
            raise MediaDecodeError(
                f"{name} cannot be set for an encoded video, which contains its own times",
                expected="no times; the processor's settings control the sampling",
                got=repr(getattr(part, name))[:80],
                remedy="Leave it out, or decode the video yourself and pass its frames",
            )
    data = read_source(part.source, policy)
    if policy.processes is None:
        with decoder(data, policy) as video:
            yield Video(video.timeline, video.frames, policy)
    else:
        timeline = policy.decode(_decode_timeline, data)
        yield Video(timeline, lambda indices: iter(policy.decode(_decode_frames, data, [*indices])), policy)


def _decode_timeline(data: bytes, policy: MediaPolicy) -> Timeline:
    with decoder(data, policy) as video:
        return video.timeline


def _decode_frames(data: bytes, policy: MediaPolicy, indices: list[int]) -> list[LoadedImage]:
    with decoder(data, policy) as video:
        return list(video.frames(indices))


def _loaded(frames: Sequence[Any], indices: Sequence[int], policy: MediaPolicy) -> Iterator[LoadedImage]:
    for index in indices:
        yield load_image(frames[index], policy, where=f"frame {index}")


def as_array(source: Any) -> Any:
    """Return an array or torch tensor as a numpy array, without importing torch; None for anything else."""
    if isinstance(source, np.ndarray):
        return source
    if type(source).__module__.partition(".")[0] == "torch" and hasattr(source, "detach"):
        return source.detach().cpu().numpy()
    return None


def _check_array(array: Any) -> None:
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
        return
    remedy = "Convert it to uint8 with values in 0..255 yourself"
    if array.ndim == 4 and array.shape[1] == 3 and array.shape[3] != 3:
        remedy = "Channels go last: video.transpose(0, 2, 3, 1), or permute(0, 2, 3, 1) in torch"
    elif array.ndim == 3:
        remedy = "Three dimensions are an image: pass [image] for a video of one frame"
    raise MediaDecodeError(
        "this array is not a video",
        expected="uint8 of shape (frames, height, width, 3)",
        got=f"{array.dtype} of shape {array.shape}",
        remedy=remedy,
    )


def _timeline_of_part(part: VideoPart, count: int) -> Timeline:
    """Return the times of frames that are passed one by one."""
    times, indices, total = part.times, part.frames_indices, part.total_num_frames
    for name, numbers in (("times", times), ("frames_indices", indices)):
        if numbers is not None and (len(numbers) != count or list(numbers) != sorted(numbers)):
            raise MediaDecodeError(
                f"{name} do not fit the frames",
                expected=f"{count} numbers in rising order, one for each frame",
                got=f"{len(numbers)} numbers" + ("" if len(numbers) != count else " that fall"),
            )
    if times is not None:
        if (part.fps, indices, total) != (None, None, None):
            raise MediaDecodeError(
                "times already define when frames are shown",
                expected="times alone, or fps with frames_indices",
                got="both",
            )
        # At one frame per second an index is a time.
        duration = (times[-1] - times[0]) * count / (count - 1) if count > 1 else 0.0
        return Timeline(duration or 1.0, 1.0, part.duration, tuple(times))
    if indices is None and total not in (None, count):
        raise MediaDecodeError(
            "the number of frames differs from the video's",
            expected=f"total_num_frames={count}, or frames_indices of the sampled frames",
            got=str(total),
        )
    if indices is not None and total is not None and indices[-1] >= total:
        raise MediaDecodeError(
            "an index of a frame lies beyond the end of its video",
            expected=f"indices below {total}",
            got=str(indices[-1]),
        )
    if total is None:
        total = count if indices is None else max(count, indices[-1] + 1)
    return Timeline(total, part.fps, part.duration, indices)
