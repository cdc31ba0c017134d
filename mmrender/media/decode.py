"""Decode encoded videos with PyAV (extra `video`), under a `MediaPolicy`.

Nothing that a header announces is believed: frames are counted and timed by their packets before any of them
is decoded, so number and rate of frames are those of the data. Frames that were sampled are decoded one by
one, from the key frame before each of them where frames lie between.

The container format follows from the first bytes and is given to FFmpeg by name: left to guess, it would take
playlists too, which name other files and hosts.
"""

import io
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from mmrender.errors import MediaDecodeError, MediaError, MediaLimitError, MissingDependencyError
from mmrender.media.frames import Timeline
from mmrender.media.load import LoadedImage
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import describe

CONTAINERS = {
    "an MP4 or QuickTime video": "mp4",
    "a Matroska or WebM video": "matroska",
    "an AVI video": "avi",
}
"""Name of each container format to FFmpeg, by what its first bytes are described as."""
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg")
"""Codecs that are decoded."""
_THREADS = 4
"""Threads that decode one video, each with a frame of its own; FFmpeg itself would take all cores."""
_TOLERATED = Fraction(1, 100)
"""Share by which a frame rate that a container announces may differ from that of its frames."""


class _Packets(NamedTuple):
    """What the packets of a video say of its frames, in the order in which these are shown.

    Attributes:
        times: Time stamp of each frame; None where one is missing or given twice.
        keys: Rising time stamps of the frames at which decoding may begin.
        number: Of frames.
        seconds: From the first frame to the end of the last.
    """

    times: list[int] | None
    keys: list[int]
    number: int
    seconds: Fraction | None


@contextmanager
def decoder(data: bytes, policy: MediaPolicy) -> Iterator["Decoder"]:
    """Open an encoded video, to be used within the context.

    Raises:
        MediaDecodeError: Not a video, or one that is damaged, truncated, or announces more than it holds.
        MediaLimitError: Too many frames or pixels, or too slow.
        MissingDependencyError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            "av", "video", "an encoded video", otherwise="decode it yourself and pass its frames"
        ) from error
    kind = describe(data[:64])
    if kind not in CONTAINERS:
        raise MediaDecodeError(
            "this is not a video that can be decoded",
            expected="MP4, QuickTime, Matroska, WebM or AVI",
            got=kind,
            remedy="Decode it yourself, and pass its frames.",
        )
    deadline = time.monotonic() + policy.decode_timeout
    try:
        # FFmpeg decodes first frames to learn what headers leave out: the last two are options of that.
        options = {"protocol_whitelist": "", "threads": "1", "max_pixels": str(policy.max_pixels)}
        with av.open(io.BytesIO(data), format=CONTAINERS[kind], options=options) as container:
            yield Decoder(container, policy, deadline)
    except MediaError:
        raise
    except (av.FFmpegError, EOFError, ValueError) as error:
        raise MediaDecodeError(
            f"the video is damaged or truncated ({type(error).__name__}: {str(error)[:200]})",
            remedy="Check that the file was written and transferred whole.",
        ) from error


class Decoder:
    """An open container; `timeline` holds what its packets say.

    Args:
        container: As PyAV opens it.
        policy: Its limits.
        deadline: When decoding must have ended, by the monotonic clock.
    """

    def __init__(self, container: Any, policy: MediaPolicy, deadline: float) -> None:
        self._container, self._policy, self._deadline = container, policy, deadline
        # The first may be a cover.
        self._stream = container.streams.best("video")
        if self._stream is None:
            raise MediaDecodeError("the file holds no video", expected="a video track", got="none")
        context = self._stream.codec_context
        if context is None or context.codec.canonical_name not in CODECS:
            raise MediaDecodeError(
                "the codec of the video is not one that is decoded",
                expected=", ".join(CODECS),
                got="an unknown one" if context is None else context.codec.canonical_name,
                remedy="Decode it yourself, and pass its frames.",
            )
        self._check_size(context.width, context.height)
        context.options = {"max_pixels": str(policy.max_pixels), "err_detect": "explode"}
        context.thread_type, context.thread_count = "AUTO", _THREADS
        self._packets = self._scan()
        count, seconds = self._packets.number, self._packets.seconds
        fps = self._stream.average_rate or self._stream.guessed_rate
        # A rate of whole numbers is finer than time stamps, but believed only where these bear it out.
        if seconds and (not fps or abs(count / fps - seconds) > max(1 / fps, seconds * _TOLERATED)):
            fps = count / seconds
        duration = float(count / fps) if fps else None
        self.timeline = Timeline(count, float(fps) if fps else None, duration)

    def frames(self, wanted: Sequence[int]) -> Iterator[LoadedImage]:
        """Yield the frames of these numbers, which do not fall."""
        times, keys = self._packets.times, self._packets.keys
        decoded = self._decoded(0)
        at, image, has_sought = -1, None, False
        for index in wanted:
            if times is not None and index > at + 1:
                key = bisect_right(keys, times[index]) - 1
                if key >= 0 and (at < 0 or keys[key] > times[at]):
                    self._container.seek(keys[key], stream=self._stream, backward=True)
                    decoded, has_sought = self._decoded(None), True
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
        """Return the frame of a number, which is above `at`, that of the frame decoded last."""
        times = self._packets.times
        for frame in decoded:
            at += 1
            if times is None and at < index:
                continue
            if times is None or frame.pts == times[index]:
                return self._image(frame)
            if frame.pts is None or frame.pts > times[index]:
                raise _short(f"a frame at {times[index]}", f"one at {frame.pts}")
        raise _short(f"{self._packets.number} frames", f"no frame {index}")

    def _decoded(self, seek: int | None) -> Iterator[Any]:
        if seek is not None:
            self._container.seek(seek, stream=self._stream, backward=True)
        for frame in self._container.decode(self._stream):
            self._check_time()
            if frame.is_corrupt:
                raise _short("whole frames", "a damaged one")
            yield frame

    def _image(self, frame: Any) -> LoadedImage:
        self._check_size(frame.width, frame.height)
        pixels = frame.to_ndarray(format="rgb24")
        if frame.rotation % 90 == 0:
            pixels = np.rot90(pixels, frame.rotation // 90)
        pixels = np.ascontiguousarray(pixels)
        return LoadedImage(pixels, *pixels.shape[:2])

    def _scan(self) -> _Packets:
        """Read every packet, and check what the container announces."""
        count, seconds = 0, Fraction(0)
        times: list[int | None] = []
        keys: list[int] = []
        ends: list[int] = []
        rate = self._stream.average_rate or self._stream.guessed_rate
        usual = int(1 / rate / self._stream.time_base) if rate else 0
        for packet in self._container.demux():
            self._check_time()
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.is_corrupt:
                raise _short("whole packets", "a damaged one")
            is_frame = packet.stream.index == self._stream.index
            start = packet.pts if packet.pts is not None else packet.dts
            end = (start or 0) + (packet.duration or (usual if is_frame else 0))
            seconds = max(seconds, end * packet.time_base)
            if not is_frame:
                continue
            count += 1
            self._policy.check_frames(count)
            times.append(packet.pts)
            if packet.pts is not None:
                ends.append(end)
                if packet.is_keyframe:
                    keys.append(packet.pts)
        if not count:
            raise MediaDecodeError("the video has no frames", expected="at least 1", got="0")
        announced = self._stream.frames
        if announced > count:
            raise _short(f"the {announced} frames that it announces", f"{count}")
        # Matroska announces no number of frames, only a duration, which is that of its longest track.
        lasting = Fraction(self._container.duration or 0, 1_000_000)
        if not announced and lasting > seconds * (1 + Fraction(1, 2 * count)):
            raise _short(f"the {float(lasting):.3f} s that it announces", f"{float(seconds):.3f} s")
        shown = sorted(one for one in times if one is not None)
        if len(set(shown)) != count:
            return _Packets(None, [], count, None)
        lasting = (max(ends) - shown[0]) * self._stream.time_base
        return _Packets(shown, sorted(keys), count, lasting)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._policy.max_pixels:
            raise MediaLimitError(
                "the video is too large to decode",
                expected=f"at most {self._policy.max_pixels} pixels in a frame",
                got=f"{width}x{height} = {width * height}",
                remedy="Raise MediaPolicy(max_pixels=...) if you trust the source.",
            )

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise MediaLimitError(
                "decoding the video takes too long",
                expected=f"at most {self._policy.decode_timeout} s",
                remedy="Raise MediaPolicy(decode_timeout=...), or pass a shorter video.",
            )


def _short(expected: str, got: str) -> MediaError:
    return MediaDecodeError(
        "the video is damaged or truncated",
        expected=expected,
        got=got,
        remedy="Check that the file was written and transferred whole.",
    )
