"""Pixels against the two loaders of Transformers 5.23: equal where they agree, to one of them elsewhere.

`load_image` reads a path, URL or base64 and drops alpha. `convert_to_rgb` is what its image processors do to
a PIL image or an array: it composites onto white, and ignores EXIF orientation.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from image_law import png_of_16_bits
from kit import encoded
from mmrender.media.load import load_image

transformers = pytest.importorskip("transformers")

from transformers.image_transforms import convert_to_rgb  # noqa: E402
from transformers.image_utils import load_image as reference_load  # noqa: E402


def noise(shape: tuple[int, ...], top: int = 256, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(11).integers(0, top, shape).astype(dtype)


RGB = Image.fromarray(noise((31, 42, 3)))
RGBA = Image.fromarray(noise((31, 42, 4)))
LA = RGBA.convert("LA")
GREY16 = Image.fromarray(noise((31, 42), 65536, np.uint16))
GREY32 = Image.fromarray(noise((31, 42), 100_000, np.int32) - 1000)
FLOAT = Image.fromarray((noise((31, 42), 4000) / 10 - 50).astype(np.float32))
PALETTE = RGB.quantize(32)

OPAQUE = {
    "png rgb": encoded(RGB, "PNG"),
    "png grey": encoded(RGB.convert("L"), "PNG"),
    "png 1 bit": encoded(RGB.convert("1"), "PNG"),
    "png palette": encoded(PALETTE, "PNG"),
    "png 16-bit grey": encoded(GREY16, "PNG"),
    "png interlaced": encoded(RGB, "PNG", interlace=1),
    "jpeg": encoded(RGB, "JPEG"),
    "jpeg grey": encoded(RGB.convert("L"), "JPEG"),
    "jpeg progressive": encoded(RGB, "JPEG", progressive=True),
    "jpeg cmyk": encoded(RGB.convert("CMYK"), "JPEG"),
    "webp": encoded(RGB, "WEBP"),
    "webp lossless": encoded(RGB, "WEBP", lossless=True),
    "webp animated": encoded(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(90)]),
    "avif": encoded(RGB, "AVIF"),
    "avif animated": encoded(RGB, "AVIF", save_all=True, append_images=[RGB.rotate(90)]),
    "gif": encoded(RGB, "GIF"),
    "gif animated": encoded(RGB, "GIF", save_all=True, append_images=[RGB.rotate(90)]),
    "apng": encoded(RGB, "PNG", save_all=True, append_images=[RGB.rotate(90)]),
    "mpo": encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(90)]),
    "tiff": encoded(RGB, "TIFF"),
    "tiff lzw": encoded(RGB, "TIFF", compression="tiff_lzw"),
    "tiff pages": encoded(RGB, "TIFF", save_all=True, append_images=[RGB.rotate(90)]),
    "tiff 1 bit": encoded(RGB.convert("1"), "TIFF"),
    "tiff 16-bit grey": encoded(GREY16, "TIFF"),
    "tiff 32-bit grey": encoded(GREY32, "TIFF"),
    "tiff float": encoded(FLOAT, "TIFF"),
    "tiff cmyk": encoded(RGB.convert("CMYK"), "TIFF"),
    "tiff lab": encoded(RGB.convert("LAB"), "TIFF"),
    "tiff ycbcr": encoded(RGB, "TIFF", compression="jpeg"),
    "bmp": encoded(RGB, "BMP"),
}
TRANSPARENT = {
    "png rgba": encoded(RGBA, "PNG"),
    "png la": encoded(LA, "PNG"),
    "png palette": encoded(PALETTE, "PNG", transparency=3),
    "png palette with alpha table": encoded(PALETTE, "PNG", transparency=bytes(range(0, 256, 8))),
    "png grey with a transparent level": encoded(
        RGB.convert("L"), "PNG", transparency=RGB.convert("L").getpixel((1, 1))
    ),
    "png rgb with a transparent colour": encoded(RGB, "PNG", transparency=RGB.getpixel((1, 1))),
    "webp rgba": encoded(RGBA, "WEBP", lossless=True, exact=True),
    "avif rgba": encoded(RGBA, "AVIF"),
    "gif": encoded(PALETTE, "GIF", transparency=3),
    "tiff rgba": encoded(RGBA, "TIFF"),
    "tiff la": encoded(LA, "TIFF"),
}


def reference_pixels(data: bytes) -> np.ndarray[Any, Any]:
    """What the reference's loader of paths, URLs and base64 makes of `data`; a path could stay open."""
    return np.asarray(reference_load("data:image/x;base64," + base64.b64encode(data).decode()))


@pytest.mark.parametrize("case", OPAQUE)
def test_opaque_images_equal_both_loaders(case: str) -> None:
    data = OPAQUE[case]
    ours = load_image(data).array
    np.testing.assert_array_equal(ours, reference_pixels(data))
    np.testing.assert_array_equal(ours, convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))
    np.testing.assert_array_equal(load_image(Image.open(io.BytesIO(data))).array, ours)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("case", TRANSPARENT)
def test_transparency_equals_the_processors_and_not_the_file_loader(case: str) -> None:
    data = TRANSPARENT[case]
    ours = load_image(data).array
    np.testing.assert_array_equal(ours, convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))
    np.testing.assert_array_equal(load_image(Image.open(io.BytesIO(data))).array, ours)
    without_alpha = reference_pixels(data)
    assert (ours != without_alpha).any()
    # Only pixels that are not wholly opaque may differ.
    alpha = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))[..., 3]
    assert (alpha[(ours != without_alpha).any(axis=-1)] < 255).all()


MODES = [RGB.convert(mode) for mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")]
MODES += [RGBA, LA, PALETTE.convert("PA"), GREY16, GREY32, FLOAT]


@pytest.mark.parametrize("image", MODES, ids=lambda image: image.mode)
def test_modes_of_a_pil_image(image: Image.Image) -> None:
    np.testing.assert_array_equal(load_image(image).array, convert_to_rgb(image, return_numpy=True))


def test_premultiplied_modes() -> None:
    # The reference composites neither: it converts RGBa to RGB, and fails on La.
    ours = load_image(RGBA.convert("RGBa")).array
    np.testing.assert_array_equal(ours, load_image(RGBA.convert("RGBa").convert("RGBA")).array)
    np.testing.assert_array_equal(
        load_image(LA.convert("La")).array, load_image(LA.convert("La").convert("LA")).array
    )
    with pytest.raises(ValueError, match="conversion"):
        convert_to_rgb(LA.convert("La"), return_numpy=True)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_arrays(channels: int) -> None:
    array = noise((31, 42, channels))
    np.testing.assert_array_equal(load_image(array).array, convert_to_rgb(array, return_numpy=True))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_orientation(fmt: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(RGB, fmt, exif=exif)
    ours = load_image(data)
    assert (ours.height, ours.width) == ((31, 42) if orientation < 5 else (42, 31))
    np.testing.assert_array_equal(ours.array, reference_pixels(data))
    opened = Image.open(io.BytesIO(data))
    for _ in range(2):
        np.testing.assert_array_equal(load_image(opened).array, ours.array)
    np.testing.assert_array_equal(np.asarray(reference_load(Image.open(io.BytesIO(data)))), ours.array)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_orientation_of_a_transparent_image(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(RGBA, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(load_image(data).array, convert_to_rgb(upright, return_numpy=True))


def test_orientation_in_xmp() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for fmt in ("JPEG", "WEBP"):
        data = encoded(RGB, fmt, xmp=xmp)
        ours = load_image(data)
        assert (ours.height, ours.width) == (42, 31)
        np.testing.assert_array_equal(ours.array, reference_pixels(data))


def test_photographs(shared_images: Path) -> None:
    for path in sorted(shared_images.iterdir()):
        ours = load_image(path).array
        np.testing.assert_array_equal(ours, reference_pixels(path.read_bytes()), err_msg=path.name)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bit_png(channels: int) -> None:
    pixels = noise((5, 7, channels), 65536, np.uint16)
    data = png_of_16_bits(pixels)
    ours = load_image(data).array
    np.testing.assert_array_equal(ours, convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))
    if channels == 3:
        np.testing.assert_array_equal(ours, pixels >> 8)
