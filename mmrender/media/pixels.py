"""Pixels as arrays: Pillow's memory without a copy, colour planes, and exact resampling.

Pillow keeps an RGB pixel in four bytes, red first, the fourth one unused. Its Arrow export gives that memory
as it is: hashing it takes a third of the time of `image.tobytes()`, and torch resamples it without repacking.
"""

import ctypes
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from mmrender.errors import MissingDependencyError
from mmrender.media.load import LoadedImage

ImageBackend: TypeAlias = Literal["torch", "pil"]
"""Back end of the reference that pixels equal."""
IMAGE_BACKENDS: tuple[ImageBackend, ...] = get_args(ImageBackend)

_STRIP_PIXELS = 1 << 20
_ROWS_PER_BLOCK = 32
_BYTES_PER_ELEMENT = {"I": 4, "F": 4, "I;16": 2}


_ArrowArray = ctypes.c_int64 * 10
"""Structure of the Arrow C data interface in words: length, null count, offset, number of buffers, number of
children, buffers, children, dictionary, release, private data."""

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def raw_pixels(image: Image.Image) -> npt.NDArray[np.uint8] | None:
    """Return the memory of a loaded image as a view `(height, width, bytes per pixel)`, not to be written to.

    The view keeps the memory alive. None where Pillow holds the image in several blocks (over 16 MiB by
    default) or its mode has no Arrow form of whole bytes.
    """
    image.load()
    width, height = image.size
    try:
        _, capsule = image.__arrow_c_array__()
    except (ValueError, MemoryError):
        return None
    array = values = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    if array[4]:  # pixels of several bytes are the only child of a list of fixed size
        values = _ArrowArray.from_address(ctypes.c_int64.from_address(array[6]).value)
    if values[3] < 2 or values[2] or array[2]:
        return None
    size = values[0] * _BYTES_PER_ELEMENT.get(image.mode, 1)
    memory: Any = (ctypes.c_ubyte * size).from_address(ctypes.c_int64.from_address(values[5] + 8).value)
    memory.owner = capsule
    return np.frombuffer(memory, np.uint8).reshape(height, width, size // (width * height))


def raw_strips(image: Image.Image) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the memory of a loaded image in bands of rows, each of shape `(rows, width, bytes per pixel)`.

    An image in one block gives one band, without a copy; others give bands that are each copied once.
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


def rgb_planes(loaded: LoadedImage) -> npt.NDArray[np.uint8]:
    """Return the pixels as a fresh uint8 array of shape `(3, height, width)`."""
    planes = np.empty((3, loaded.height, loaded.width), np.uint8)
    if isinstance(loaded.pixels, np.ndarray):
        _split_planes(loaded.pixels, planes)
        return planes
    top = 0
    for strip in raw_strips(loaded.pixels):
        _split_planes(strip, planes[:, top : top + len(strip)])
        top += len(strip)
    return planes


def _split_planes(pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
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


def media_identity(settings: bytes, frames: npt.NDArray[np.uint8], context: bytes = b"") -> str:
    """Return the identity of pixels `(..., 3, height, width)`, uint8, under given settings: 64 hex digits.

    `context` is whatever else the tensors depend on. One thread hashes: the library's thread pool does not
    survive a fork, and data loaders fork.
    """
    digest = blake3(settings)
    digest.update(repr((frames.shape, context)).encode())
    digest.update(frames.reshape(-1).data)
    return digest.hexdigest()


def resized_planes(
    loaded: LoadedImage, height: int, width: int, backend: ImageBackend
) -> npt.NDArray[np.uint8]:
    """Resample to uint8 `(3, height, width)`, bicubic with antialiasing, bit for bit as the reference does.

    The two back ends differ by at most one level in about 0.2 % of the values. The torch one calls
    `interpolate` on uint8, as torchvision's `resize` does; torchvision itself is not needed.

    Raises:
        MissingDependencyError: The torch back end without torch.
    """
    if backend == "pil":
        resized = loaded.image.resize((width, height), Image.Resampling.BICUBIC)
        return rgb_planes(LoadedImage(resized, height, width))
    try:
        import torch
        from torch.nn.functional import interpolate
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            "torch", "torch", 'image_backend="torch"', otherwise='choose image_backend="pil"'
        ) from error

    planes = np.empty((3, height, width), np.uint8)
    # Pillow's four bytes a pixel are torch's channels-last layout, which its kernel need not repack;
    # torch tells the layout by the strides, that of the batch of one among them.
    batch = torch.from_numpy(_whole_pixels(loaded))[None].permute(0, 3, 1, 2)
    resampled = interpolate(batch, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    del batch
    _split_planes(resampled[0].permute(1, 2, 0).contiguous().numpy(), planes)
    return planes


def _whole_pixels(loaded: LoadedImage) -> npt.NDArray[np.uint8]:
    """Return a writable array `(height, width, 3 or 4)`, as torch asks for; nothing writes to it."""
    pixels = loaded.pixels if isinstance(loaded.pixels, np.ndarray) else raw_pixels(loaded.pixels)
    if pixels is not None:
        return pixels if pixels.flags.writeable else pixels.copy()
    whole = np.empty((loaded.height, loaded.width, 4), np.uint8)
    top = 0
    for strip in raw_strips(loaded.image):
        whole[top : top + len(strip)] = strip
        top += len(strip)
    return whole
