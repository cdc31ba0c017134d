"""Load an image or a video: any source in, upright 8-bit RGB pixels out.

`load_image` and `load_video` take what `ImagePart.source` and `VideoPart.source` may hold. How a source
becomes bytes is in `mmrender.media.sources`, and the limits in
`mmrender.media.policy`.

Both functions may be called from many threads, also with the same source object. They keep no state.
"""

import importlib
import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile

from mmrender.errors import MediaDecodeError, MediaError, MediaLimitError
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import FORMATS, describe, read_source, sniff, type_name

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


_PLUGINS = {
    "PNG": ("PngImagePlugin", "PngImageFile"),
    # Not `jpeg_factory`: the first picture of an MPO file is the JPEG itself.
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "WebP": ("WebPImagePlugin", "WebPImageFile"),
    "AVIF": ("AvifImagePlugin", "AvifImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "TIFF": ("TiffImagePlugin", "TiffImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
}


def open_image(data: bytes, policy: MediaPolicy, *, where: str | None = None) -> ImageFile.ImageFile:
    """Open encoded bytes at their first frame; the header is read and checked, no pixel is decoded.

    Raises:
        MediaDecodeError: the bytes are not an image of `FORMATS`, or its header is broken.
        MediaLimitError: the image is larger than the policy allows.
    """
    name = sniff(data[:64])
    if name is None:
        raise _not_an_image(data, where)
    plugin, opener = _PLUGINS[name]
    with named_errors(name, where):
        if name == "PNG":
            check_png_header(data)
        factory: Callable[..., ImageFile.ImageFile] = getattr(
            importlib.import_module(f"PIL.{plugin}"), opener
        )
        image = factory(io.BytesIO(data), "")
    check_pixels(image.size, policy, where)
    return image


def load_pixels(image: Image.Image, *, where: str | None = None) -> None:
    """Decode the current frame of `image` completely.

    Raises:
        MediaDecodeError: it is truncated or damaged.
    """
    with named_errors(image.format or "image", where):
        load_whole(image)


def check_pixels(size: tuple[int, int], policy: MediaPolicy, where: str | None) -> None:
    """Refuse a width and height that the policy does not allow, or that hold no pixel."""
    width, height = size
    if width <= 0 or height <= 0:
        raise MediaDecodeError(
            "the image has no pixels", where=where, expected="at least 1x1", got=f"{width}x{height}"
        )
    if width * height > policy.max_pixels:
        raise MediaLimitError(
            "the image is too large to decode",
            where=where,
            expected=f"at most {policy.max_pixels} pixels",
            got=f"{width}x{height} = {width * height}",
            remedy="Raise MediaPolicy(max_pixels=...) if you trust the source.",
        )


@contextmanager
def named_errors(name: str, where: str | None) -> Iterator[None]:
    """Turn whatever Pillow raises on bad bytes into one named error.

    Pillow's plugins raise some dozen types on hostile input, warnings that the program has made errors
    included, so nothing narrower than `Exception` is complete.
    """
    try:
        yield
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaLimitError(
            f"the {name} is larger than Pillow itself allows ({error})",
            where=where,
            remedy="If you trust it, raise MediaPolicy(max_pixels=...) and PIL.Image.MAX_IMAGE_PIXELS.",
        ) from error
    except Exception as error:
        raise MediaDecodeError(
            f"the {name} is damaged or truncated ({type(error).__name__}: {str(error)[:200]})",
            where=where,
            remedy="Check that the file was written and transferred whole.",
        ) from error


def _not_an_image(data: bytes, where: str | None) -> MediaDecodeError:
    got = describe(data)
    if got.endswith("video"):
        remedy = (
            "mmrender ships no video decoder: decode it first, and pass a list of frames or a uint8 array of "
            "shape (N, H, W, 3)."
        )
    elif not data:
        remedy = "Check that the file or field is filled."
    else:
        remedy = "Pillow may read other formats: open it yourself and pass the PIL.Image."
    return MediaDecodeError(
        "this is not an image that can be decoded",
        where=where,
        expected=f"one of {', '.join(FORMATS)}",
        got=got,
        remedy=remedy,
    )


_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# One image always gets the same lock; two images rarely share one.
_IMAGE_LOCKS = tuple(threading.Lock() for _ in range(64))


def image_lock(image: Image.Image) -> threading.Lock:
    """Return the lock under which the lazy state of `image`, its pixels and EXIF block, is read."""
    return _IMAGE_LOCKS[id(image) // 16 % len(_IMAGE_LOCKS)]


def rgb_of_image(image: Image.Image, policy: MediaPolicy, *, where: str | None = None) -> Image.Image:
    """Return `image` upright and in mode RGB: the very same object where it is both already.

    The image may be shared between threads. A lazily opened one is decoded in place, as any use of it would.

    Raises:
        MediaLimitError: more pixels than the policy allows.
        MediaDecodeError: no pixels, pixel data that cannot be decoded, or a mode that has no rule.
    """
    check_pixels(image.size, policy, where)
    # Neither Pillow's lazy decoding nor its lazy EXIF parsing may run twice at once on one image.
    with image_lock(image):
        load_pixels(image, where=where)
        with named_errors("image's EXIF block", where):
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    method = _TRANSPOSE.get(orientation) if isinstance(orientation, int) else None
    upright = image if method is None else image.transpose(method)
    try:
        return _to_rgb(upright)
    except ValueError as error:
        raise MediaDecodeError(
            f"an image of mode {image.mode} has no conversion to RGB ({error})",
            where=where,
            remedy="Convert it yourself and pass the result.",
        ) from error


def rgb_of_array(
    array: npt.NDArray[Any], policy: MediaPolicy, *, where: str | None = None
) -> npt.NDArray[np.uint8]:
    """Return a read-only C-contiguous uint8 array of shape (H, W, 3): a view where `array` is that already.

    Raises:
        MediaLimitError: more pixels than the policy allows.
        MediaDecodeError: another dtype or shape, or no pixels.
    """
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        raise _unusable_array(array, where)
    check_pixels((array.shape[1], array.shape[0]), policy, where)
    if array.ndim == 2 or array.shape[2] == 1:
        array = np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    elif array.shape[2] == 4:
        array = np.asarray(_onto_white(Image.fromarray(np.ascontiguousarray(array), "RGBA")))
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    if image.mode == "La":
        image = image.convert("LA")
    # Not by the bands' names: the "A" of LAB is a colour.
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or image.info.get("transparency") is not None:
        return _onto_white(image.convert("RGBA"))
    return image.convert("RGB")


def _onto_white(image: Image.Image) -> Image.Image:
    """Composite an RGBA image onto white. A wholly opaque one, such as a screenshot, only loses its band."""
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _unusable_array(array: npt.NDArray[Any], where: str | None) -> MediaDecodeError:
    remedy = None
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        remedy = "Channels go last: array.transpose(1, 2, 0)."
    elif array.ndim == 4:
        remedy = "Four dimensions are a video: pass it as a video part, or one image array[i]."
    elif array.dtype == np.bool_:
        remedy = "Convert it yourself: array.astype('uint8') * 255."
    elif array.dtype.kind == "f":
        remedy = "Convert it yourself, for values in 0..1: (array * 255).round().astype('uint8')."
    elif array.dtype == np.uint16:
        remedy = "Convert it yourself, for values in 0..65535: (array >> 8).astype('uint8')."
    elif array.dtype != np.uint8:
        remedy = "Convert it to uint8 with values in 0..255 yourself."
    return MediaDecodeError(
        "this array is not an image",
        where=where,
        expected="uint8 of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)",
        got=f"{array.dtype} of shape {array.shape}",
        remedy=remedy,
    )


_CODEC = "mmrender_whole"


def check_png_header(data: bytes) -> None:
    """Check what stands before the pixel data of a PNG, if the flag makes Pillow skip some of the check.

    Raises:
        OSError: the checksum of a chunk is wrong, or a chunk is cut off.
    """
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        return
    start, name = 8, b""
    while name != b"IDAT":
        length = int.from_bytes(data[start : start + 4], "big")
        name, end = data[start + 4 : start + 8], start + 8 + length
        checksum = data[end : end + 4]
        if name != b"IDAT" and zlib.crc32(data[start + 4 : end]).to_bytes(4, "big") != checksum:
            raise OSError(f"broken PNG file (bad header checksum in {name!r})")
        start = end + 4


def load_whole(image: Image.Image) -> None:
    """Decode the current frame of `image` in place.

    Raises:
        OSError: the pixel data is truncated or damaged; Pillow's plugins raise other types too.
    """
    tiles = getattr(image, "tile", None)
    if (
        not tiles
        or not ImageFile.LOAD_TRUNCATED_IMAGES
        or not isinstance(image, ImageFile.ImageFile)
        or getattr(image, "use_load_libtiff", False)  # libtiff's errors are raised with the flag on as well
    ):
        _load_or_stay_unloaded(image, tiles)
        return
    image.tile = [tile._replace(codec_name=_CODEC, args=(tile.codec_name, tile.args)) for tile in tiles]
    image.__dict__["load_read"] = _whole_read(image)
    try:
        _load_or_stay_unloaded(image, tiles)
    finally:
        image.__dict__.pop("load_read", None)


def _load_or_stay_unloaded(image: Image.Image, tiles: Any) -> None:
    try:
        image.load()
    except BaseException:
        # Pillow forgets the tiles first and raises then: a second load() would give the half-decoded pixels.
        if isinstance(image, ImageFile.ImageFile):
            image.tile = tiles
        raise


def _whole_read(image: ImageFile.ImageFile) -> Callable[[int], bytes]:
    # The PNG plugin's own reader steps from chunk to chunk. The JPEG plugin's invents an end marker.
    read_chunk: Callable[[int], bytes] | None = (
        getattr(image, "load_read", None) if image.format == "PNG" else None
    )

    def whole(count: int) -> bytes:
        try:
            # `fp` is looked up on each call: some plugins replace it while they load.
            data: bytes = read_chunk(count) if read_chunk else image.fp.read(count)  # type: ignore[union-attr]
        except (IndexError, struct.error):
            data = b""
        if not data:
            raise OSError("image file is truncated")
        return data

    return whole


class _WholeDecoder:
    """A Pillow decoder that stands in for another and raises on its error codes."""

    def __init__(self, mode: str, codec: str, args: Any, *extra: Any) -> None:
        self._inner = Image._getdecoder(mode, codec, args, extra)
        self.pulls_fd = self._inner.pulls_fd

    def setimage(self, im: Any, extents: Any) -> None:
        self._inner.setimage(im, extents)

    def setfd(self, fd: Any) -> None:
        self._inner.setfd(fd)

    def decode(self, buffer: bytes) -> tuple[int, int]:
        consumed, code = self._inner.decode(buffer)
        if code < 0 and (consumed < 0 or self.pulls_fd):
            raise OSError(f"decoder error {code} when reading image file")
        return consumed, code

    def cleanup(self) -> None:
        self._inner.cleanup()


Image.register_decoder(_CODEC, _WholeDecoder)  # type: ignore[arg-type]
