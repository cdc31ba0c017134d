"""Any decoded image or array to upright 8-bit RGB, each mode by one stated rule.

The reference is Transformers 5.23, which has two loaders that disagree where there is transparency:
`image_utils.load_image` (used for a path, URL or base64) drops alpha, and `image_transforms.convert_to_rgb`
(used by image processors for a PIL image or an array) composites onto white. Here the pixels of an image do
not depend on how it was handed over, so one had to be picked:

| image | rule | reference |
|---|---|---|
| EXIF orientation 1 to 8, from EXIF or XMP | applied | `load_image`; not `convert_to_rgb` |
| alpha (RGBA, LA, PA, RGBa, La), transparent colour | put onto white | `convert_to_rgb`; not `load_image` |
| palette | looked up | both |
| CMYK, YCbCr, LAB, HSV | Pillow's conversion, no ICC profile | both |
| 16-bit and 32-bit grey (I;16, I), float grey (F) | clipped to 0..255, not scaled, fraction cut off | both |
| 1 bit | 0 or 255 | both |
| grey | repeated three times | both |
| 16 bits a channel, colour (PNG) | high byte, as Pillow decodes it | both |
| animated, as an image | first frame of encoded bytes; the current frame of a PIL image | `load_image` |
| array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), uint8 | as grey, grey, RGB, RGBA above | `convert_to_rgb` |
| any other array: float, bool, other integers, channels first | refused by name | accepted, by guessing |
"""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from mmrender.errors import MediaDecodeError
from mmrender.media.decode import check_pixels, load_pixels, named_errors
from mmrender.media.policy import MediaPolicy

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
