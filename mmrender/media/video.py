"""Videos: any source in, sampled frames and their times out, under a `MediaPolicy`.

Times follow Transformers' `VideoMetadata`: number of frames, frame rate, and indices of the sampled frames.
The processor chooses the frames before any of them is decoded. A video that was sampled elsewhere has its
indices already. Each frame is loaded when it is needed.

PyAV (extra `video`) decodes encoded videos. Headers are not trusted: frames are counted and timed by their
packets before any of them is decoded, so number and rate of frames follow from the data. Sampled frames are
decoded one by one, from the key frame before each of them if frames lie between. The container format follows
from the first bytes and is passed to FFmpeg by name: FFmpeg's own guess would accept playlists too, which
name other files and hosts.
"""

import io
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from mmrender.errors import MediaDecodeError, MediaError, importing, located
from mmrender.media.load import LoadedImage, damaged, load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import format_name, read_source
from mmrender.messages import VideoPart

CONTAINERS = {
    "an MP4 or QuickTime video": "mp4",
    "a Matroska or WebM video": "matroska",
    "an AVI video": "avi",
}
"""FFmpeg's name of each container format, by `format_name`."""
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg")
"""Codecs that are decoded."""
_THREADS = 4
"""Threads that decode one video, each with a frame of its own; FFmpeg itself would take all cores."""
_TOLERANCE = Fraction(1, 100)
"""Maximum relative difference between the frame rate in a header and the rate of the frames."""
DEFAULT_FPS = 24.0
"""Frame rate that Transformers assumes if it is unknown."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of the frames of a video.

    Attributes:
        total: Number of frames.
        fps: Frames per second, or None if it is unknown.
        duration: In seconds, or None.
        indices: Index of each sampled frame, or None before sampling.
    """

    total: float
    fps: float | None
    duration: float | None = None
    indices: tuple[float, ...] | None = None

    @property
    def seconds(self) -> list[float]:
        """Time of each sampled frame."""
        return [index / (self.fps or DEFAULT_FPS) for index in self.indices or ()]

    @property
    def sampled_fps(self) -> float:
        """Sampled frames per second."""
        if self.fps is None or self.indices is None:
            return self.fps or DEFAULT_FPS
        return len(self.indices) / self.total * self.fps


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


@contextmanager
def decoder(data: bytes, policy: MediaPolicy) -> Iterator["Decoder"]:
    """Open an encoded video, to be used within the context.

    Raises:
        MediaDecodeError: Not a video, or damaged, truncated, or shorter than its header states.
        MediaLimitError: Too many frames or pixels, or too slow.
        MissingDependencyError: PyAV is not installed.
    """
    started = time.monotonic()
    with open_container(data, policy) as container:
        yield Decoder(container, policy, started)


@contextmanager
def open_container(data: bytes, policy: MediaPolicy) -> Iterator[Any]:
    """Open an encoded video as PyAV's container. Raises as `decoder`, also for errors within the context."""
    with importing("av", "video", "an encoded video", otherwise="decode it yourself and pass its frames"):
        import av
    kind = format_name(data)
    if kind not in CONTAINERS:
        raise MediaDecodeError(
            "this is not a video that can be decoded",
            expected="MP4, QuickTime, Matroska, WebM or AVI",
            got=kind,
            remedy="Decode it yourself, and pass its frames.",
        )
    try:
        # FFmpeg decodes first frames if headers are incomplete. The last two options apply to that.
        options = {"protocol_whitelist": "", "threads": "1", "max_pixels": str(policy.max_pixels)}
        with av.open(io.BytesIO(data), format=CONTAINERS[kind], options=options) as container:
            yield container
    except MediaError:
        raise
    except (av.FFmpegError, EOFError, ValueError) as error:
        raise damaged("video", cause=error) from error


class Decoder:
    """An open container.

    Args:
        container: As PyAV opens it.
        policy: Limits of decoding.
        started: Time at which decoding began, by the monotonic clock.

    Attributes:
        timeline: Times of the frames.
    """

    def __init__(self, container: Any, policy: MediaPolicy, started: float) -> None:
        self._container, self._policy, self._started = container, policy, started
        # The first may be a cover.
        self._stream = container.streams.best("video")
        if self._stream is None:
            raise MediaDecodeError("the file holds no video", expected="a video track", got="none")
        context = self._stream.codec_context
        if context is None or context.codec.canonical_name not in CODECS:
            raise MediaDecodeError(
                "the codec of the video is not supported",
                expected=", ".join(CODECS),
                got="an unknown codec" if context is None else context.codec.canonical_name,
                remedy="Decode it yourself, and pass its frames.",
            )
        policy.check_pixels(context.width, context.height)
        context.options = {"max_pixels": str(policy.max_pixels), "err_detect": "explode"}
        context.thread_type, context.thread_count = "AUTO", _THREADS
        self._times, self._keys, count, seconds = self._scan()
        fps = self._stream.average_rate or self._stream.guessed_rate
        # A rate of whole numbers is finer than time stamps, but is used only if they agree.
        if seconds and (not fps or abs(count / fps - seconds) > max(1 / fps, seconds * _TOLERANCE)):
            fps = count / seconds
        self.timeline = Timeline(count, float(fps), float(count / fps)) if fps else Timeline(count, None)

    def frames(self, indices: Sequence[int]) -> Iterator[LoadedImage]:
        """Yield the frames of these indices, which are in rising order."""
        times, keys = self._times, self._keys
        decoded = self._decoded(0)
        at, image, has_sought = -1, None, False
        for index in indices:
            if times is not None and index > at + 1:
                key = bisect_right(keys, times[index]) - 1
                if key >= 0 and (at < 0 or keys[key] > times[at]):
                    decoded, has_sought = self._decoded(keys[key]), True
            if at < index:
                try:
                    image = self._frame(decoded, index, at)
                except (MediaDecodeError, ValueError, EOFError):
                    if not has_sought:
                        raise
                    # In an open group of pictures, frames after a key frame refer to those before it.
                    keys, has_sought = [], False
                    decoded = self._decoded(0)
                    image = self._frame(decoded, index, -1)
                at = index
            if image is not None:
                yield image

    def _frame(self, decoded: Iterator[Any], index: int, at: int) -> LoadedImage:
        """Return the frame of an index, which is above `at`, the index of the last decoded frame."""
        times = self._times
        for frame in decoded:
            at += 1
            if times is None and at < index:
                continue
            if times is None or frame.pts == times[index]:
                return self._image(frame)
            if frame.pts is None or frame.pts > times[index]:
                raise damaged("video", f"a frame at {times[index]}", f"one at {frame.pts}")
        raise damaged("video", f"{self.timeline.total} frames", f"no frame {index}")

    def _decoded(self, seek: int) -> Iterator[Any]:
        self._container.seek(seek, stream=self._stream, backward=True)
        for frame in self._container.decode(self._stream):
            self._policy.check_time(self._started, "video")
            if frame.is_corrupt:
                raise damaged("video", "whole frames", "a damaged one")
            yield frame

    def _image(self, frame: Any) -> LoadedImage:
        self._policy.check_pixels(frame.width, frame.height)
        pixels = frame.to_ndarray(format="rgb24")
        if frame.rotation % 90 == 0:
            pixels = np.rot90(pixels, frame.rotation // 90)
        pixels = np.ascontiguousarray(pixels)
        return LoadedImage(pixels, *pixels.shape[:2])

    def _scan(self) -> tuple[list[int] | None, list[int], int, Fraction | None]:
        """Read every packet, and check the header against them.

        Returns the time stamp of each frame in the order of presentation, or None if one is missing or occurs
        twice, the rising time stamps of the frames at which decoding may begin, the number of frames, and the
        seconds from the first frame to the end of the last.
        """
        count, seconds = 0, Fraction(0)
        times: list[int | None] = []
        keys: list[int] = []
        ends: list[int] = []
        rate = self._stream.average_rate or self._stream.guessed_rate
        frame_ticks = int(1 / rate / self._stream.time_base) if rate else 0
        for packet in self._container.demux():
            self._policy.check_time(self._started, "video")
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.is_corrupt:
                raise damaged("video", "whole packets", "a damaged one")
            is_frame = packet.stream.index == self._stream.index
            start = packet.pts if packet.pts is not None else packet.dts
            end = (start or 0) + (packet.duration or (frame_ticks if is_frame else 0))
            seconds = max(seconds, end * packet.time_base)
            if not is_frame:
                continue
            count += 1
            self._policy.check("max_frames", count)
            times.append(packet.pts)
            if packet.pts is not None:
                ends.append(end)
                if packet.is_keyframe:
                    keys.append(packet.pts)
        if not count:
            raise MediaDecodeError("the video has no frames", expected="at least 1", got="0")
        stated = self._stream.frames
        if stated > count:
            raise damaged("video", f"the {stated} frames that its header states", f"{count}")
        # Matroska states no number of frames, only the duration of its longest track.
        duration = Fraction(self._container.duration or 0, 1_000_000)
        if not stated and duration > seconds * (1 + Fraction(1, 2 * count)):
            raise damaged(
                "video", f"the {float(duration):.3f} s that its header states", f"{float(seconds):.3f} s"
            )
        shown = sorted(stamp for stamp in times if stamp is not None)
        if len(set(shown)) != count:
            return None, [], count, None
        duration = (max(ends) - shown[0]) * self._stream.time_base
        return shown, sorted(keys), count, duration
