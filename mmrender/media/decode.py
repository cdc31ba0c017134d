"""Encoded bytes in, opened Pillow image out: formats, limits, whole or not at all.

The format is told by its first bytes and its Pillow plugin is opened directly. `PIL.Image.open` is not used:
it tries some forty formats, one of which runs Ghostscript, and it enforces a process-wide pixel limit through
warnings. Nothing here reads or writes such a global (`Image.MAX_IMAGE_PIXELS`, warning filters).

A damaged or truncated image is an error. Where the program has set `PIL.ImageFile.LOAD_TRUNCATED_IMAGES`,
the rule stays the same; see `mmrender.media.whole`.
"""

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image, ImageFile

from mmrender.errors import MediaDecodeError, MediaError, MediaLimitError
from mmrender.media.policy import MediaPolicy
from mmrender.media.whole import check_png_header, load_whole

FORMATS = ("PNG", "JPEG", "WebP", "AVIF", "GIF", "TIFF", "BMP")

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
_AVIF_BRANDS = (b"avif", b"avis")
_STILL_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1")
_PREFIXES = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"BM", "BMP"),
)
_OTHERS = (
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"FLV\x01", "an FLV video"),
    (b"\x00\x00\x01\xba", "an MPEG video"),
    (b"\x00\x00\x01\xb3", "an MPEG video"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 image"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file it stands for"),
)


def sniff(data: bytes) -> str | None:
    """Return which of `FORMATS` the first bytes announce, or None. 32 bytes are enough."""
    for prefix, name in _PREFIXES:
        if data.startswith(prefix):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    # An AVIF file may name a general brand first and `avif` among the compatible ones.
    if data[4:8] == b"ftyp" and (data[8:12] in _AVIF_BRANDS or (_brands(data) & set(_AVIF_BRANDS))):
        return "AVIF"
    return None


def describe(data: bytes) -> str:
    """Say in a few words what bytes that are no image of `FORMATS` seem to be."""
    if not data:
        return "no bytes at all"
    for prefix, name in _OTHERS:
        if data.startswith(prefix):
            return name
    if data[4:8] == b"ftyp":
        return "a HEIC image" if data[8:12] in _STILL_BRANDS else "an MP4 or QuickTime video"
    if data[:4] == b"RIFF" and data[8:11] == b"AVI":
        return "an AVI video"
    start = data[:512].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith(b"<svg") or (start.startswith(b"<?xml") and b"<svg" in start):
        return "an SVG drawing"
    return f"{len(data)} bytes that begin with {data[:8]!r}"


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


def _brands(data: bytes) -> set[bytes]:
    end = min(int.from_bytes(data[:4], "big"), len(data))
    return {data[start : start + 4] for start in range(16, end - 3, 4)}


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
