"""Pixels as arrays: Pillow's memory without a copy, colour planes, and exact resampling.

Pillow keeps an RGB pixel in four bytes, red first, the fourth one unused. Its Arrow export shares that
memory: hashing it takes a third of the time of `image.tobytes()`, and torch resamples it without repacking.
"""

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from mmrender.errors import importing
from mmrender.media.load import LoadedImage

ImageBackend: TypeAlias = Literal["torch", "pil"]
"""Back end of the reference whose pixels are reproduced."""
IMAGE_BACKENDS: tuple[ImageBackend, ...] = get_args(ImageBackend)

_STRIP_PIXELS = 1 << 20
"""Pixels of a band of an image in several blocks."""
_BLOCK_PIXELS = 1 << 16
"""Pixels that are split at once: 256 KiB, which fit the second-level cache."""
_MAPPED_BYTES = 8 << 20
"""Minimum size of an array outside the heap of malloc."""
_BYTES_PER_ELEMENT = {"I": 4, "F": 4, "I;16": 2}


_ArrowArray = ctypes.c_int64 * 10
"""Structure of the Arrow C data interface in words: length, null count, offset, number of buffers, number of
children, buffers, children, dictionary, release, private data."""

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def raw_pixels(image: Image.Image) -> npt.NDArray[np.uint8] | None:
    """Return the memory of a loaded image as a view `(height, width, bytes per pixel)`, not to be written to.

    The view keeps the memory alive. None if Pillow keeps the image in several blocks (over 16 MiB by default)
    or its mode has no Arrow form of whole bytes.
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
    pixels = _at_address(ctypes.c_int64.from_address(values[5] + 8).value, size, owner=capsule)
    return pixels.reshape(height, width, size // (width * height))


def raw_strips(image: Image.Image) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the memory of a loaded image in bands of rows, each of shape `(rows, width, bytes per pixel)`.

    An image in one block is one band, without a copy. Bands of other images are each copied once.
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


def rgb_planes(loaded: LoadedImage, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
    """Return the pixels as a uint8 array of shape `(3, height, width)`: `out`, or a new one."""
    planes = _new_array(3, loaded.height, loaded.width) if out is None else out
    rows = max(1, _BLOCK_PIXELS // loaded.width)
    scratch = np.empty((rows, loaded.width), "<u4")
    top = 0
    for strip in [loaded.pixels] if isinstance(loaded.pixels, np.ndarray) else raw_strips(loaded.pixels):
        for start in range(0, len(strip), rows):
            block = strip[start : start + rows]
            for channel in range(3):
                _copy_channel(block, channel, planes[channel, top : top + len(block)], scratch)
            top += len(block)
    return planes


def picture_of(planes: npt.NDArray[np.uint8]) -> Image.Image:
    """Return planes `(3, height, width)` as a PIL image. Faster than by a transposed copy."""
    return Image.merge("RGB", [Image.fromarray(plane) for plane in planes])


def _new_array(*shape: int) -> npt.NDArray[np.uint8]:
    """Return an uninitialised uint8 array. A large one is mapped.

    In the heap of malloc, long-lived items would lie among the temporaries of resampling, and keep as much
    memory again from being freed.
    """
    size = math.prod(shape)
    if size < _MAPPED_BYTES:
        return np.empty(shape, np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on macOS, nor in every kernel
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(shape)


def _copy_channel(
    block: npt.NDArray[np.uint8],
    channel: int,
    out: npt.NDArray[np.uint8],
    scratch: npt.NDArray[np.uint32],
) -> None:
    """Copy one channel of pixels `(rows, width, 3 or 4)` to `(rows, width)`."""
    if block.shape[-1] != 4 or not block.flags.c_contiguous:
        np.copyto(out, block[..., channel])
        return
    # A shift of whole pixels and a narrowing store run at vector speed. A stride of four does not.
    words = block.view("<u4")[..., 0]
    if channel:
        words = np.right_shift(words, 8 * channel, out=scratch[: len(words)])
    np.copyto(out, words, casting="unsafe")


def media_identity(settings: bytes, frames: npt.NDArray[np.uint8], context: bytes = b"") -> str:
    """Return the identity of pixels `(..., 3, height, width)`, uint8, under settings: 64 hex digits.

    The tensors may depend on `context` as well. One thread hashes: the library's thread pool does not survive
    a fork, and data loaders fork.
    """
    digest = blake3(settings).update(repr((frames.shape, context)).encode())
    digest.update(frames.reshape(-1).data)
    return digest.hexdigest()


def image_identity(settings: bytes, loaded: LoadedImage, context: bytes = b"") -> str:
    """Return `media_identity` of the planes of an image, without keeping the planes."""
    digest = blake3(settings).update(repr(((3, loaded.height, loaded.width), context)).encode())
    pixels = loaded.pixels if isinstance(loaded.pixels, np.ndarray) else raw_pixels(loaded.pixels)
    if pixels is None:
        # Copying an image in several blocks band by band three times would take longer than Pillow.
        for channel in range(3):
            for strip in raw_strips(loaded.image.getchannel(channel)):
                digest.update(strip.reshape(-1).data)
        return digest.hexdigest()
    rows = max(1, _BLOCK_PIXELS // loaded.width)
    scratch, plane = (np.empty((rows, loaded.width), dtype) for dtype in ("<u4", np.uint8))
    for channel in range(3):
        for top in range(0, len(pixels), rows):
            block = pixels[top : top + rows]
            _copy_channel(block, channel, plane[: len(block)], scratch)
            digest.update(plane[: len(block)].reshape(-1).data)
    return digest.hexdigest()


def resized_planes(
    loaded: LoadedImage,
    height: int,
    width: int,
    backend: ImageBackend,
    out: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """Resample to uint8 `(3, height, width)`, bicubic with antialiasing, bit for bit as the reference does.

    The result is `out`, or a new array. The two back ends differ by at most one level in about 0.2 % of the
    values. The torch back end runs the kernel of `interpolate` on uint8, as torchvision's `resize` does,
    without torchvision.

    Raises:
        MissingDependencyError: The torch back end without torch.
    """
    planes = _new_array(3, height, width) if out is None else out
    if backend == "pil":
        resized = loaded.image.resize((width, height), Image.Resampling.BICUBIC)
        return rgb_planes(LoadedImage(resized, height, width), planes)
    with importing("torch", "torch", 'image_backend="torch"', otherwise='choose image_backend="pil"'):
        import torch

    # Pillow's four bytes a pixel are torch's channels-last layout, which its kernel does not repack. Torch
    # recognises the layout by all strides, including the stride of the batch of one.
    source = _whole_pixels(loaded)
    resampled = _new_array(height, width, source.shape[-1])
    source_view, out_view = (torch.from_numpy(each)[None].permute(0, 3, 1, 2) for each in (source, resampled))
    # `interpolate` calls this kernel but has no `out`, and its own allocation would stay in the heap.
    torch.ops.aten._upsample_bicubic2d_aa.out(source_view, [height, width], False, None, None, out=out_view)
    del source, source_view
    return rgb_planes(LoadedImage(resampled, height, width), planes)


def _whole_pixels(loaded: LoadedImage) -> npt.NDArray[np.uint8]:
    """Return an array `(height, width, 3 or 4)` that is not marked read-only, as torch requires."""
    pixels = loaded.pixels if isinstance(loaded.pixels, np.ndarray) else raw_pixels(loaded.pixels)
    if pixels is not None:
        if pixels.flags.writeable:
            return pixels
        array = np.ascontiguousarray(pixels)
        return _at_address(array.ctypes.data, array.size, owner=array).reshape(array.shape)
    whole = _new_array(loaded.height, loaded.width, 4)
    top = 0
    for strip in raw_strips(loaded.image):
        whole[top : top + len(strip)] = strip
        top += len(strip)
    return whole


def _at_address(address: int, size: int, *, owner: object) -> npt.NDArray[np.uint8]:
    """Return memory as an array that is not marked read-only, and keeps the memory's owner alive."""
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = owner
    return np.frombuffer(memory, np.uint8)
