"""Sampled frames of a video and their times, each frame loaded when its turn comes.

Times are told in the terms of Transformers' `VideoMetadata`: number of frames, frames in a second, and the
numbers of the frames that were sampled. Which frames are sampled is the processor's to say, before any of
them is decoded; a video that was sampled elsewhere says so by its times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from mmrender.errors import MediaDecodeError
from mmrender.media.load import LoadedImage
from mmrender.media.policy import MediaPolicy

DEFAULT_FPS = 24.0
"""Frames in a second that Transformers assumes where nothing says how many there are."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of the frames of a video.

    Attributes:
        total: Number of its frames.
        fps: Frames in a second, or None where nothing says.
        duration: In seconds, or None.
        indices: Number of each frame that was sampled, or None where none was chosen yet.
    """

    total: float
    fps: float | None
    duration: float | None = None
    indices: tuple[float, ...] | None = None

    @property
    def seconds(self) -> list[float]:
        """When each sampled frame is shown."""
        return [index / (self.fps or DEFAULT_FPS) for index in self.indices or ()]

    @property
    def sampled_fps(self) -> float:
        """Sampled frames in a second."""
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
        policy: Bounds what may be kept of them.
        images: The frames in order, to be taken once.
    """

    height: int
    width: int
    timeline: Timeline
    policy: MediaPolicy
    images: Iterator[LoadedImage] = field(repr=False)

    def __len__(self) -> int:
        return len(self.timeline.indices or ())


@dataclass(frozen=True, slots=True)
class Video:
    """An open video, of which no frame was sampled yet.

    Attributes:
        timeline: Times of its frames, or of those that it holds where it was sampled elsewhere.
    """

    timeline: Timeline
    _frames: Callable[[Sequence[int]], Iterator[LoadedImage]] = field(repr=False)
    _policy: MediaPolicy = field(repr=False)

    def sample(self, choose: Callable[[Timeline], Sequence[int]] | None = None) -> Frames:
        """Return the frames that `choose` numbers, or all; those of a video that was sampled as they are.

        Raises:
            MediaError: A frame cannot be loaded, or has another size than the first.
        """
        timeline = self.timeline
        if timeline.indices is not None:
            wanted: Sequence[int] = range(len(timeline.indices))
        else:
            wanted = range(int(timeline.total))
            if choose is not None:
                wanted = [int(index) for index in choose(timeline)]
            timeline = replace(timeline, indices=tuple(wanted))
        images = self._frames(wanted)
        first = next(images, None)
        if first is None:
            raise MediaDecodeError("no frame of the video is sampled", expected="one or more", got="0")
        same = _alike(chain([first], images), first)
        return Frames(first.height, first.width, timeline, self._policy, same)


def _alike(images: Iterator[LoadedImage], first: LoadedImage) -> Iterator[LoadedImage]:
    for image in images:
        if (image.height, image.width) != (first.height, first.width):
            raise MediaDecodeError(
                "the frames of a video are of different sizes",
                expected=f"{first.width}x{first.height}, as the first",
                got=f"{image.width}x{image.height}",
                remedy="Resize or crop them to one size first",
            )
        yield image
