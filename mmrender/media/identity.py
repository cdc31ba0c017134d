"""What an image is, as opposed to where it came from.

An identity is a digest of decoded pixels and processor settings. A fingerprint is a key for a *source*, cheap
enough to be taken on every render; by it an identity that is known already is found without decoding.
"""

import secrets
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3
from PIL import ExifTags, Image, ImageFile

from mmrender.media.pixels import raw_strips
from mmrender.media.rgb import image_lock

# Fingerprints live in one process; a seed of its own keeps anyone from preparing two images that share one.
_SEED = secrets.randbits(64)


def media_identity(settings: bytes, frames: npt.NDArray[np.uint8], context: bytes = b"") -> str:
    """Return the identity of decoded pixels under given processor settings, as 64 hex digits.

    One thread hashes: the library's thread pool does not survive a fork, and data loaders fork.

    Args:
        settings: The processor's `settings_digest`.
        frames: Planes of shape `(3, height, width)` or `(frames, 3, height, width)`, uint8, C-contiguous.
        context: Whatever else the tensors depend on, such as the number of images beside this one.
    """
    digest = blake3(settings)
    digest.update(repr((frames.shape, context)).encode())
    digest.update(frames.reshape(-1).data)
    return digest.hexdigest()


def source_fingerprint(source: Any) -> Hashable | None:
    """Return a key that equal sources share and that changes when the source does, or `None`.

    - `bytes` and `data:` URLs stand for a seeded 128-bit digest of themselves, so no key keeps them alive.
    - A path stands for the file as it is now: inode, size and times of change.
    - PIL images and numpy arrays, which can be written to, stand for a seeded 128-bit digest of their memory.
      An image file that is not decoded yet has no key: its size has not been checked against the policy.
    - A URL to fetch, a stream and anything else: `None`. Their content may change under the same name.
    """
    if isinstance(source, bytes):
        return "bytes", xxhash.xxh3_128_digest(source, seed=_SEED)
    if isinstance(source, str):
        is_data = source[:5].lower() == "data:"
        return ("text", xxhash.xxh3_128_digest(source.encode(), seed=_SEED)) if is_data else None
    if isinstance(source, Path):
        return _file_fingerprint(source)
    if isinstance(source, Image.Image):
        return _image_fingerprint(source)
    if isinstance(source, np.ndarray):
        return _array_fingerprint(source)
    if isinstance(source, list | tuple):
        frames = tuple(source_fingerprint(frame) for frame in source)
        return None if None in frames else ("frames", *frames)
    return None


def _file_fingerprint(path: Path) -> Hashable | None:
    try:
        found = path.stat()
        return "file", found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    except OSError:
        return None


def _image_fingerprint(image: Image.Image) -> Hashable | None:
    if isinstance(image, ImageFile.ImageFile) and (image.tile or getattr(image, "is_animated", False)):
        return None
    with image_lock(image):
        image.load()
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    digest = xxhash.xxh3_128(seed=_SEED)
    for strip in raw_strips(image):
        digest.update(strip.reshape(-1).data)
    palette = image.palette
    described = (
        image.mode,
        image.size,
        None if palette is None else (palette.mode, bytes(palette.palette)),
        repr(image.info.get("transparency")),
        orientation,
    )
    return "image", digest.digest(), described


def _array_fingerprint(array: npt.NDArray[Any]) -> Hashable | None:
    if array.dtype.hasobject:
        return None
    contiguous = np.ascontiguousarray(array)
    digest = xxhash.xxh3_128_digest(contiguous.reshape(-1).view(np.uint8).data, seed=_SEED)
    return "array", digest, array.shape, array.dtype.str
