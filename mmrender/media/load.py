"""Load an image: any source in, upright 8-bit RGB pixels out, each mode by one stated rule.

The reference is Transformers 5.23, whose two loaders disagree about transparency: `load_image` drops alpha,
`convert_to_rgb` composites onto white. Here the pixels of an image do not depend on how it was passed:
orientation is applied as by the first, transparency as by the second. `docs/media.md` lists all modes.

The format of encoded bytes follows from their first bytes, and its Pillow plugin is opened directly:
`PIL.Image.open` tries some forty formats, one of which runs Ghostscript, and enforces a process-wide pixel
limit through warnings. No global decides anything here, except one: while
`PIL.ImageFile.LOAD_TRUNCATED_IMAGES` is set, Pillow fills the gaps of a damaged file with grey, so decoding
is refused.

`load_image` may be called from many threads, also with the same source object.
"""

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile

from mmrender.errors import MediaDecodeError, MediaError, MediaLimitError, located
from mmrender.media.bounds import check_passes, check_pieces
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import FORMATS, ReadLocks, format_name, read_source, sniff

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SAMPLINGS: Final = {(1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0"}
"""Names of the ways in which a JPEG stores colour, by the factors of its brightness."""
image_locks = ReadLocks()
"""Locks of the lazy state of images: their pixels and EXIF blocks."""


class Coding(NamedTuple):
    """The parts of a decoder that an encoded image needs.

    Attributes:
        mime: Its MIME type, `image/jpeg` or `image/png`.
        sampling: How a JPEG stores colour, such as `4:2:0`.
        is_progressive: Whether a JPEG comes in passes.
    """

    mime: str
    sampling: str = ""
    is_progressive: bool = False


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """Upright 8-bit RGB pixels.

    They may share memory with the caller's image or array, and are valid until the caller changes it.

    Attributes:
        pixels: A PIL image of mode RGB, or a read-only C-contiguous uint8 array of shape (height, width, 3).
        height: In pixels.
        width: In pixels.
        encoded: The bytes that they were decoded from, and their coding, if other decoders of that coding
            read the same pixels from them.
    """

    pixels: Image.Image | npt.NDArray[np.uint8] = field(repr=False)
    height: int
    width: int
    encoded: tuple[bytes, Coding] | None = field(default=None, repr=False)

    @property
    def image(self) -> Image.Image:
        """The pixels as a PIL image of mode RGB. Not to be changed: it may be the caller's own."""
        return Image.fromarray(self.pixels, "RGB") if isinstance(self.pixels, np.ndarray) else self.pixels

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The pixels as a read-only C-contiguous uint8 array of shape (height, width, 3)."""
        array = np.asarray(self.pixels)
        array.flags.writeable = False
        return array


def load_image(source: Any, policy: MediaPolicy | None = None, *, where: str | None = None) -> LoadedImage:
    """Load one image.

    Args:
        source: A PIL image, a uint8 array of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), or a source
            that `mmrender.media.sources` reads.
        policy: Limits of reading. The default policy if None.
        where: Path of the source for error messages, such as `messages[0].content[1]`.

    Raises:
        MediaBlockedError: The policy forbids the source.
        MediaLimitError: Too many bytes or pixels, or too slow.
        MediaFetchError: A file or URL that cannot be read.
        MediaDecodeError: Not an image, or damaged or truncated.
    """
    policy = MediaPolicy() if policy is None else policy
    with located(where):
        if isinstance(source, np.ndarray):
            return _of_array(source, policy)
        if isinstance(source, Image.Image):
            policy.check_pixels(*source.size)
            return _of_image(source)
        return policy.decode(_of_bytes, read_source(source, policy))


def _of_bytes(data: bytes, policy: MediaPolicy) -> LoadedImage:
    opened = open_image(data, policy)
    loaded = _of_image(opened)
    coding = _coding_of(opened, data) if loaded.pixels is opened else None
    return loaded if coding is None else replace(loaded, encoded=(data, coding))


def _coding_of(image: ImageFile.ImageFile, data: bytes) -> Coding | None:
    """Return the coding of an image that needed no conversion.

    None if a decoder may apply a colour profile, or show another picture of several.
    """
    info = image.info
    if info.keys() & {"icc_profile", "gamma", "chromaticity", "mpoffset"} or image.mode != "RGB":
        return None
    if image.format == "PNG":
        is_plain = data[24] == 8 and not getattr(image, "is_animated", False)  # bits of a channel
        return Coding("image/png") if is_plain else None
    layers = getattr(image, "layer", ()) if image.format == "JPEG" else ()
    factors = {number: (across, down) for number, across, down, _ in layers}
    is_usual = list(factors) == [1, 2, 3] and factors[2] == factors[3] == (1, 1)
    sampling = _SAMPLINGS.get(factors[1]) if is_usual else None
    if sampling is None or info.get("adobe_transform", 1) != 1:  # its channels are not brightness and colour
        return None
    return Coding("image/jpeg", sampling, bool(info.get("progressive")))


def open_image(data: bytes, policy: MediaPolicy) -> ImageFile.ImageFile:
    """Open encoded bytes at their first frame. The header is read and checked, no pixel is decoded."""
    name = sniff(data[:64])
    if name is None:
        got = format_name(data)
        remedy = "Check what the file, field or address holds."
        if got.endswith("video"):
            remedy = "Decode it first, and pass its frames as images."
        elif got.endswith("image") or "that begin with" in got:
            remedy = "Pillow may read other formats: open it yourself and pass the PIL.Image."
        raise MediaDecodeError(
            "this is not an image that can be decoded",
            expected=f"one of {', '.join(FORMATS)}",
            got=got,
            remedy=remedy,
        )
    _refuse_lenient_pillow()
    check_pieces(name, data)
    plugin = name if name == "WebP" else name.capitalize()
    with named_errors(name):
        # Not `jpeg_factory`: the first picture of an MPO file is the JPEG itself.
        opener = getattr(importlib.import_module(f"PIL.{plugin}ImagePlugin"), f"{plugin}ImageFile")
        image: ImageFile.ImageFile = opener(io.BytesIO(data), "")
    policy.check_pixels(*image.size)
    if name == "JPEG":
        check_passes(data, image.width * image.height, policy)
    return image


def decode_in_place(image: Image.Image) -> Image.Transpose | None:
    """Decode a lazily opened image, as any use of it would, and return its `orientation_of`.

    Raises:
        MediaDecodeError: It is damaged or truncated, or a fork has interrupted its decoding.
        MediaLimitError: It is too large for Pillow or for the memory.
    """
    exif = getattr(image, "_exif", None)
    if type(image) is Image.Image and not image.info and image.palette is None and exif is None:
        return None  # it was made in memory

    def is_lazy() -> bool:
        return bool(getattr(image, "tile", None) or (image.info and getattr(image, "_exif", None) is None))

    # Neither Pillow's lazy decoding nor its lazy EXIF parsing may run twice at once on one image.
    with image_locks.reading(image, is_lazy), named_errors(image.format or "image"):
        tiles = getattr(image, "tile", None)
        if tiles:
            _refuse_lenient_pillow()
        try:
            image.load()
        except BaseException:
            # Pillow forgets the tiles first: a second load() would return the half-decoded pixels.
            if isinstance(image, ImageFile.ImageFile):
                image.tile = tiles or []
            raise
        return orientation_of(image)


def orientation_of(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes an image upright by its EXIF block, or None."""
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _of_image(image: Image.Image) -> LoadedImage:
    """Return an image upright and in mode RGB: the same object if it is both already.

    The image may be shared between threads.
    """
    orientation = decode_in_place(image)
    upright = image if orientation is None else image.transpose(orientation)
    is_transparent = upright.info.get("transparency") is not None
    try:
        # Not by the bands' names: the "A" of LAB is a colour.
        if is_transparent or upright.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
            rgba = (upright.convert("LA") if upright.mode == "La" else upright).convert("RGBA")
            upright = _onto_white(rgba)
        elif upright.mode != "RGB":
            upright = upright.convert("RGB")
    except ValueError as error:
        raise MediaDecodeError(
            f"an image of mode {image.mode} has no conversion to RGB ({error})",
            remedy="Convert it yourself and pass the result.",
        ) from error
    return LoadedImage(upright, upright.height, upright.width)


def _refuse_lenient_pillow() -> None:
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise MediaDecodeError(
            "a damaged image could pass for a whole one",
            expected="PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False",
            got="True, set by this program or a library it uses",
            remedy="Set it to False, or decode the image yourself and pass a loaded PIL.Image.",
        )


def _onto_white(image: Image.Image) -> Image.Image:
    """Composite an RGBA image onto white. An opaque image, such as a screenshot, only loses its band."""
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _of_array(array: npt.NDArray[Any], policy: MediaPolicy) -> LoadedImage:
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        remedy = "Convert it to uint8 with values in 0..255 yourself."
        if array.ndim == 4:
            remedy = "Four dimensions are a video: pass its frames as images, array[i]."
        elif array.ndim == 3 and array.shape[2] not in (1, 3, 4):
            remedy = "Channels go last: array.transpose(1, 2, 0)."
        elif array.dtype.kind == "f":
            remedy = "Convert it yourself, for values in 0..1: (array * 255).round().astype('uint8')."
        raise MediaDecodeError(
            "this array is not an image",
            expected="uint8 of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)",
            got=f"{array.dtype} of shape {array.shape}",
            remedy=remedy,
        )
    policy.check_pixels(array.shape[1], array.shape[0])
    if array.ndim == 2 or array.shape[2] == 1:
        array = np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    elif array.shape[2] == 4:
        array = np.asarray(_onto_white(Image.fromarray(np.ascontiguousarray(array), "RGBA")))
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return LoadedImage(view, *view.shape[:2])


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Turn any exception of Pillow or libsndfile on bad bytes into an error with a name.

    Pillow's plugins raise a dozen types on hostile input, including warnings that the program has made
    errors, so nothing narrower than `Exception` is complete.
    """
    try:
        yield
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaLimitError(
            f"the {name} is larger than Pillow itself allows ({error})",
            remedy="If you trust it, raise MediaPolicy(max_pixels=...) and PIL.Image.MAX_IMAGE_PIXELS.",
        ) from error
    except MemoryError as error:
        raise MediaLimitError(
            f"there is too little memory to decode the {name}",
            remedy="If you trust the source, allow the process more memory.",
        ) from error
    except Exception as error:
        raise damaged(name, cause=error) from error


def damaged(
    kind: str, expected: str | None = None, got: str | None = None, *, cause: Exception | None = None
) -> MediaDecodeError:
    """Build the error for a file of a kind that cannot be decoded to its end."""
    reason = "" if cause is None else f" ({type(cause).__name__}: {str(cause)[:200]})"
    return MediaDecodeError(
        f"the {kind} is damaged or truncated{reason}",
        expected=expected,
        got=got,
        remedy="Check that the file was written and transferred whole.",
    )
