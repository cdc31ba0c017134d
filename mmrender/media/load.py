"""Load an image or a video: any source in, upright 8-bit RGB pixels out.

`load_image` and `load_video` take what `ImagePart.source` and `VideoPart.source` may hold. How a source
becomes bytes is in `mmrender.media.sources`, which formats are decoded in `mmrender.media.decode`, how every
mode becomes RGB in `mmrender.media.rgb`, and the limits in `mmrender.media.policy`.

Both functions may be called from many threads, also with the same source object. They keep no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from mmrender.errors import MediaDecodeError, MediaLimitError
from mmrender.media.decode import check_pixels, named_errors, open_image
from mmrender.media.files import type_name
from mmrender.media.policy import MediaPolicy
from mmrender.media.rgb import rgb_of_array, rgb_of_image
from mmrender.media.sources import read_source

_ANIMATED = ("GIF", "WEBP", "AVIF", "PNG")


class LoadedImage:
    """Upright 8-bit RGB pixels, as a PIL image, as an array, or as both once both were asked for.

    It may share memory with the caller's image or array: it is valid until the caller changes that.
    """

    __slots__ = ("_array", "_image", "height", "width")

    height: int
    width: int

    def __init__(
        self, *, image: Image.Image | None = None, array: npt.NDArray[np.uint8] | None = None
    ) -> None:
        self._image = image
        self._array = array
        if array is not None:
            self.height, self.width = array.shape[:2]
        elif image is not None:
            self.width, self.height = image.size
        else:
            raise TypeError("LoadedImage needs an image or an array")

    def __repr__(self) -> str:
        return f"LoadedImage(height={self.height}, width={self.width})"

    @property
    def at_hand(self) -> "Image.Image | npt.NDArray[np.uint8]":
        """`image` or `array`, whichever is there without a conversion."""
        return self.array if self._image is None else self._image

    @property
    def image(self) -> Image.Image:
        """The pixels as a PIL image of mode RGB. Not to be changed: it may be the caller's own."""
        if self._image is None:
            self._image = Image.fromarray(self.array, "RGB")
        return self._image

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The pixels as a read-only C-contiguous uint8 array of shape (height, width, 3)."""
        if self._array is None:
            array = np.asarray(self._image)
            array.flags.writeable = False
            self._array = array
        return self._array


@dataclass(frozen=True, slots=True)
class LoadedVideo:
    """The frames of a video in order, all of one size.

    `fps` is the frame rate that the source itself states: 1000 divided by the frame duration in milliseconds
    of an animation whose frames all last equally long. Otherwise it is None.
    """

    frames: tuple[LoadedImage, ...]
    fps: float | None = None


def load_image(source: Any, policy: MediaPolicy | None = None, *, where: str | None = None) -> LoadedImage:
    """Load one image.

    Args:
        source: A PIL image, a uint8 array of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), or whatever
            `mmrender.media.sources` reads.
        policy: What may be read; the default policy if None.
        where: Path of the source for error messages, such as `messages[0].content[1]`.

    Raises:
        MediaBlockedError: the policy forbids the source.
        MediaLimitError: too many bytes or pixels, or too slow.
        MediaFetchError: a file or URL that cannot be read.
        MediaDecodeError: not an image, or one that is damaged or truncated.
    """
    policy = MediaPolicy() if policy is None else policy
    if isinstance(source, Image.Image):
        return LoadedImage(image=rgb_of_image(source, policy, where=where))
    if isinstance(source, np.ndarray):
        return LoadedImage(array=rgb_of_array(source, policy, where=where))
    opened = open_image(read_source(source, policy, where=where), policy, where=where)
    return LoadedImage(image=rgb_of_image(opened, policy, where=where))


def load_video(source: Any, policy: MediaPolicy | None = None, *, where: str | None = None) -> LoadedVideo:
    """Load one video.

    Args:
        source: A sequence of frames, each as for `load_image`; a uint8 array of shape (N, H, W, 3), or with 1
            or 4 channels; or whatever `mmrender.media.sources` reads, if that is a GIF, WebP, AVIF or PNG,
            animated or not. Every other video has to be decoded by the caller.
        policy: What may be read; the default policy if None.
        where: Path of the source for error messages; a frame of a sequence adds `.frames[i]`.

    Raises:
        MediaLimitError: also for more than `max_frames`, or more than `max_video_pixels` in all.
        MediaDecodeError: also for a video without frames, or with frames of different sizes.
        MediaBlockedError: the policy forbids the source.
        MediaFetchError: a file or URL that cannot be read.
    """
    policy = MediaPolicy() if policy is None else policy
    if isinstance(source, Image.Image):
        raise MediaDecodeError(
            "a PIL image is not a video",
            where=where,
            expected="a list of frames, or the encoded animation",
            got=type_name(source),
            remedy="Pass its bytes or path, or [f.copy() for f in PIL.ImageSequence.Iterator(image)].",
        )
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise MediaDecodeError(
            "this array is not a video",
            where=where,
            expected="uint8 of shape (N, H, W, 3)",
            got=f"{source.dtype} of shape {source.shape}",
        )
    if isinstance(source, np.ndarray) or _is_frame_sequence(source):
        return _video_of_frames(source, policy, where)
    opened = open_image(read_source(source, policy, where=where), policy, where=where)
    if opened.format not in _ANIMATED:
        raise MediaDecodeError(
            "this image format holds no video",
            where=where,
            expected="a GIF, WebP, AVIF or PNG, or a list of frames",
            got=str(opened.format),
            remedy="Pass [source] for a video of one frame.",
        )
    return _video_of_animation(opened, policy, where)


def _is_frame_sequence(source: Any) -> bool:
    return isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray | memoryview)


class _FrameBudget:
    """Counts the frames of one video against the policy, before each is decoded or kept."""

    def __init__(self, policy: MediaPolicy, where: str | None) -> None:
        self._policy = policy
        self._where = where
        self._size: tuple[int, int] | None = None
        self._count = 0

    def start(self) -> None:
        """Begin a frame."""
        self._count += 1
        if self._count > self._policy.max_frames:
            raise self._exceeded("frames", "max_frames", self._policy.max_frames)

    def add(self, frame: LoadedImage) -> LoadedImage:
        """Accept a loaded frame, which has to be as large as the first."""
        size = (frame.height, frame.width)
        self._size = self._size or size
        if size != self._size:
            raise MediaDecodeError(
                f"frame {self._count - 1} of the video differs in size",
                where=self._where,
                expected=f"height and width {self._size} as of the first",
                got=f"{size}",
            )
        if self._count * size[0] * size[1] > self._policy.max_video_pixels:
            raise self._exceeded("pixels in all", "max_video_pixels", self._policy.max_video_pixels)
        return frame

    def _exceeded(self, what: str, field: str, limit: int) -> MediaLimitError:
        return MediaLimitError(
            "the video is too long",
            where=self._where,
            expected=f"at most {limit} {what}",
            remedy=f"Sample fewer frames, or raise MediaPolicy({field}=...).",
        )


def _video_of_frames(source: Sequence[Any], policy: MediaPolicy, where: str | None) -> LoadedVideo:
    if len(source) == 0:
        raise MediaDecodeError("the video has no frames", where=where, expected="at least one frame")
    budget = _FrameBudget(policy, where)
    frames = []
    for index, frame in enumerate(source):
        budget.start()
        place = f"{where or 'video'}.frames[{index}]"
        frames.append(budget.add(load_image(frame, policy, where=place)))
    return LoadedVideo(tuple(frames))


def _video_of_animation(image: ImageFile.ImageFile, policy: MediaPolicy, where: str | None) -> LoadedVideo:
    budget = _FrameBudget(policy, where)
    frames: list[LoadedImage] = []
    durations: list[float | None] = []
    # An APNG may hold a still picture for readers that do not animate; Pillow counts it as frame 0.
    skipped = 1 if getattr(image, "default_image", False) else 0
    if skipped:
        with named_errors(f"first frame of the {image.format}", where):
            image.seek(skipped)
    while True:
        budget.start()
        check_pixels(image.size, policy, where)
        pixels = rgb_of_image(image, policy, where=where)
        # Seeking overwrites the opened image's own pixels.
        frames.append(budget.add(LoadedImage(image=pixels.copy() if pixels is image else pixels)))
        durations.append(image.info.get("duration"))
        with named_errors(f"frame {len(frames)} of the {image.format}", where):
            try:
                image.seek(len(frames) + skipped)
            except EOFError:
                break
    return LoadedVideo(tuple(frames), _frame_rate(durations))


def _frame_rate(durations: list[float | None]) -> float | None:
    first = durations[0]
    return 1000 / first if first and len(durations) > 1 and len(set(durations)) == 1 else None
