"""A cache of processed items, bounded by the bytes they hold.

An item is found by its identity: a digest of decoded pixels and processor settings. A source that was seen
before is found by its fingerprint, which is cheap enough to be taken on every render and needs no decoding.
"""

import secrets
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3
from PIL import ExifTags, Image, ImageFile

from mmrender.caching import CacheStats, LRUCache
from mmrender.media.load import image_lock
from mmrender.media.pixels import raw_strips
from mmrender.media.processor import Prepared
from mmrender.spans import MediaItem

DEFAULT_MAX_BYTES = 1 << 30
_MAX_SOURCES = 1 << 16
# Fingerprints live in one process; a seed of its own keeps anyone from preparing two images that share one.
_SEED = secrets.randbits(64)


class MediaCache:
    """Least recently used items are dropped first; one that is larger than the bound is never kept.

    Safe to share between threads and between processors: identities hold the processor's settings. Threads
    that ask for the same item at once compute it once: the first one works, the others wait.

    Args:
        max_bytes: Bound on the sum of `item.nbytes`; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._items: LRUCache[str, MediaItem] = LRUCache(max_bytes, size_of=lambda item: item.nbytes)
        self._identities: LRUCache[Hashable, str] = LRUCache(_MAX_SOURCES)
        # Keeps nothing: it only lets threads that load the same source at once load it once.
        self._loading: LRUCache[Hashable, MediaItem] = LRUCache(0)

    @property
    def stats(self) -> CacheStats:
        """Counters of items; sizes are bytes."""
        return self._items.stats

    def find(self, source: Hashable) -> MediaItem | None:
        """Return the item that a source's key leads to, if it is held."""
        identity = self._identities.get(source)
        return None if identity is None else self._items.get(identity)

    def get_or_load(self, source: Hashable, prepare: Callable[[], Prepared]) -> MediaItem:
        """Return the item of a source, loading and processing it unless the source was seen before.

        Args:
            source: A key that determines the item, such as a fingerprint with the processor's settings.
            prepare: Loads the source and identifies it.
        """

        def load() -> MediaItem:
            # Another thread may have finished since this one looked.
            if (item := self.find(source)) is None:
                prepared = prepare()
                item = self._items.get_or_compute(prepared.identity, prepared.finish)
                self._identities.put(source, item.identity)
            return item

        return self.find(source) or self._loading.get_or_compute(source, load)

    def get_or_finish(self, prepared: Prepared) -> MediaItem:
        """Return the item of an identified medium, finishing it unless it is held."""
        return self._items.get_or_compute(prepared.identity, prepared.finish)

    def bind(self, source: Hashable, item: MediaItem) -> MediaItem:
        """Let a source's key lead to an item, which is returned."""
        self._identities.put(source, item.identity)
        return item

    def clear(self) -> None:
        """Drop all items; counters stay."""
        self._items.clear()
        self._identities.clear()


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

    - `bytes` and `data:` URLs give a seeded 128-bit digest of themselves, so no key keeps them alive.
    - A path gives the file as it is now: inode, size and times of change.
    - PIL images and numpy arrays, which can be written to, give a seeded 128-bit digest of their memory. An
      image file that is not decoded yet has no key: its size has not been checked against the policy.
    - A URL to fetch, a stream and anything else: `None`. Their content may change under the same name.
    """
    if isinstance(source, bytes):
        return "bytes", xxhash.xxh3_128_digest(source, seed=_SEED)
    if isinstance(source, str):
        is_data = source[:5].lower() == "data:"
        return ("text", xxhash.xxh3_128_digest(source.encode(), seed=_SEED)) if is_data else None
    if isinstance(source, Path):
        try:
            found = source.stat()
        except OSError:
            return None
        return "file", found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    if isinstance(source, Image.Image):
        return _image_fingerprint(source)
    if isinstance(source, np.ndarray) and not source.dtype.hasobject:
        memory = np.ascontiguousarray(source).reshape(-1).view(np.uint8).data
        return "array", xxhash.xxh3_128_digest(memory, seed=_SEED), source.shape, source.dtype.str
    if isinstance(source, list | tuple):
        frames = tuple(source_fingerprint(frame) for frame in source)
        return None if None in frames else ("frames", *frames)
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
