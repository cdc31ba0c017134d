"""Decode encoded videos with PyAV (extra `video`), under a `MediaPolicy`.

Headers are not trusted: frames are counted and timed by their packets before any of them is decoded, so
number and rate of frames follow from the data. Sampled frames are decoded one by one, from the key frame
before each of them if frames lie between.

The container format follows from the first bytes and is passed to FFmpeg by name: FFmpeg's own guess would
accept playlists too, which name other files and hosts.
"""

import io
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mmrender.errors import MediaDecodeError, MediaError, importing
from mmrender.media.load import LoadedImage, damaged
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import format_name

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
    kind = format_name(data[:64])
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
