"""Pixels of a PIL image as numpy arrays, without Pillow's own byte encoder.

Pillow keeps an RGB pixel in four bytes, red first, the fourth one unused. Its Arrow export gives that memory
as it lies, so planes are three strided reads instead of an encoding pass followed by a transposition: a third
of the time of `numpy.asarray` on a 1024 x 1024 image.
"""

import ctypes
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.errors import MissingDependencyError
from mmrender.media.load import LoadedImage

ImageBackend: TypeAlias = Literal["torch", "pil"]
IMAGE_BACKENDS: tuple[ImageBackend, ...] = get_args(ImageBackend)


_STRIP_PIXELS = 1 << 20
_ROWS_PER_BLOCK = 32


class _ArrowArray(ctypes.Structure):
    """The `ArrowArray` structure of the Arrow C data interface."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

_BYTES_PER_ELEMENT = {"I": 4, "F": 4, "I;16": 2}


def raw_pixels(image: Image.Image) -> npt.NDArray[np.uint8] | None:
    """Return the memory of a loaded image as a view of shape `(height, width, bytes per pixel)`.

    The view keeps the image's memory alive and must not be written to. `None` where Pillow holds the image in
    several blocks (over 16 MiB by default) or its mode has no Arrow form of whole bytes.
    """
    image.load()
    width, height = image.size
    try:
        _, capsule = image.__arrow_c_array__()
    except (ValueError, MemoryError):
        return None
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    values = array.children[0].contents if array.n_children else array
    if values.n_buffers < 2 or values.offset or array.offset:
        return None
    size = values.length * _BYTES_PER_ELEMENT.get(image.mode, 1)
    memory: Any = (ctypes.c_ubyte * size).from_address(values.buffers[1])
    memory.owner = capsule
    return np.frombuffer(memory, np.uint8).reshape(height, width, size // (width * height))


def raw_strips(image: Image.Image) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the memory of a loaded image in bands of rows, each of shape `(rows, width, bytes per pixel)`.

    One band without a copy where the image lies in one block; else bands of about a million pixels, each
    copied once.
    """
    whole = raw_pixels(image)
    if whole is not None:
        yield whole
        return
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        pixels = raw_pixels(band)
        if pixels is None:
            pixels = np.frombuffer(band.tobytes(), np.uint8).reshape(band.height, width, -1)
        yield pixels


def rgb_planes(pixels: Image.Image | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return an RGB image, or an array `(height, width, 3)`, as a fresh array `(3, height, width)`, uint8."""
    if isinstance(pixels, np.ndarray):
        planes = np.empty((3, *pixels.shape[:2]), np.uint8)
        split_planes(pixels, planes)
        return planes
    width, height = pixels.size
    planes = np.empty((3, height, width), np.uint8)
    top = 0
    for strip in raw_strips(pixels):
        bottom = top + len(strip)
        split_planes(strip, planes[:, top:bottom])
        top = bottom
    return planes


def split_planes(pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Write pixels `(rows, width, 3 or 4)` into planes `(3, rows, width)`; a fourth channel is dropped."""
    if pixels.shape[-1] != 4 or not pixels.flags.c_contiguous:
        for channel in range(3):
            out[channel] = pixels[..., channel]
        return
    # A shift of whole pixels followed by a narrowing store runs at vector speed; a stride of four does not.
    words = pixels.view("<u4")[..., 0]
    shifted = np.empty((_ROWS_PER_BLOCK, words.shape[1]), "<u4")
    for top in range(0, len(words), _ROWS_PER_BLOCK):
        block = words[top : top + _ROWS_PER_BLOCK]
        scratch = shifted[: len(block)]
        np.copyto(out[0, top : top + len(block)], block, casting="unsafe")
        for channel in (1, 2):
            np.right_shift(block, 8 * channel, out=scratch)
            np.copyto(out[channel, top : top + len(block)], scratch, casting="unsafe")


def require_backend(backend: ImageBackend) -> None:
    """Check that what `backend` runs on is installed.

    Raises:
        MissingDependencyError: The torch back end without torch.
    """
    if backend == "torch" and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError.of_extra(
            "torch", "torch", 'image_backend="torch"', otherwise='choose image_backend="pil"'
        )


def resized_planes(
    loaded: LoadedImage, height: int, width: int, backend: ImageBackend
) -> npt.NDArray[np.uint8]:
    """Resample an image and return it as an array of shape `(3, height, width)`, uint8."""
    if backend == "pil":
        return rgb_planes(loaded.image.resize((width, height), Image.Resampling.BICUBIC))
    planes = np.empty((3, height, width), np.uint8)
    split_planes(_interpolated(loaded.at_hand, height, width), planes)
    return planes


def _interpolated(
    image: Image.Image | npt.NDArray[np.uint8], height: int, width: int
) -> npt.NDArray[np.uint8]:
    import torch
    from torch.nn.functional import interpolate

    strips = [image] if isinstance(image, np.ndarray) else list(raw_strips(image))
    # Pillow's four bytes a pixel are torch's channels-last layout, which its kernel need not repack;
    # torch tells the layout by the strides, that of the batch of one among them.
    pixels = strips[0] if len(strips) == 1 else np.concatenate(strips)
    if not pixels.flags.writeable:
        pixels = pixels.copy()
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resampled = interpolate(batch, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    result: npt.NDArray[np.uint8] = resampled[0].permute(1, 2, 0).contiguous().numpy()
    return result
