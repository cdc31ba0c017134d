"""A cache of processed items, bounded by the bytes they hold.

Items are found by identity. Sources that were seen before are found by fingerprint, without being decoded.
Threads that ask for the same item at once compute it once: the first one works, the others wait.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3
from PIL import ExifTags, Image, ImageFile

from mmrender.media.load import image_lock
from mmrender.media.pixels import raw_strips
from mmrender.spans import MediaItem

DEFAULT_MAX_BYTES = 1 << 30
_ALIASES_PER_ITEM = 8
_MIN_ALIASES = 4096


class Preparation(Protocol):
    """A medium whose identity is known and whose item is still to be made."""

    @property
    def identity(self) -> str:
        """The identity that the finished item will have."""
        ...

    def finish(self) -> MediaItem:
        """Make the item."""
        ...


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a cache since it was made.

    Attributes:
        hits: Look-ups that found their item, by fingerprint or by identity.
        misses: Items that were computed.
        evictions: Items dropped to stay within the bound.
        items: Items held now.
        nbytes: Bytes held now.
        max_bytes: The bound.
    """

    hits: int
    misses: int
    evictions: int
    items: int
    nbytes: int
    max_bytes: int


class MediaCache:
    """Least recently used items are dropped first; one that is larger than the bound is never kept.

    Safe to share between threads and between processors: identities hold the processor's settings.

    Args:
        max_bytes: Bound on the sum of `item.nbytes`; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._items: OrderedDict[str, MediaItem] = OrderedDict()
        self._identities: OrderedDict[Hashable, str] = OrderedDict()
        self._running: dict[Hashable, _Flight] = {}
        self._nbytes = self._hits = self._misses = self._evictions = 0

    @property
    def stats(self) -> CacheStats:
        """Counters, taken together."""
        with self._lock:
            return CacheStats(
                self._hits, self._misses, self._evictions, len(self._items), self._nbytes, self.max_bytes
            )

    def get(self, identity: str) -> MediaItem | None:
        """Return the item of this identity if it is held."""
        with self._lock:
            return self._found(identity)

    def get_or_compute(self, identity: str, compute: Callable[[], MediaItem]) -> MediaItem:
        """Return the item of this identity, computing it unless it is held or another thread is at it.

        Where that thread fails, one of those that waited computes it itself, so that each caller's error is
        about what that caller passed.
        """
        return self._once(
            ("identity", identity), lambda: self._found(identity), lambda: self._store(compute())
        )

    def get_or_prepare(self, source: Hashable, prepare: Callable[[], Preparation]) -> MediaItem:
        """Return the item that comes of a source, preparing it unless the source was seen before.

        Args:
            source: A key that determines the item, such as a fingerprint with the processor's settings.
            prepare: Loads the source and identifies it.
        """
        return self._once(
            ("source", source),
            lambda: self._found(self._identities.get(source)),
            lambda: self.bind(source, self.get_or_finish(prepare())),
        )

    def get_or_finish(self, preparation: Preparation) -> MediaItem:
        """Return the item of an identified medium, finishing it unless it is held."""
        return self.get_or_compute(preparation.identity, preparation.finish)

    def bind(self, source: Hashable, item: MediaItem) -> MediaItem:
        """Let a source's key lead to an item, which is returned."""
        with self._lock:
            self._identities[source] = item.identity
            self._identities.move_to_end(source)
            # Sources may outnumber items; the oldest keys go first.
            while len(self._identities) > max(_MIN_ALIASES, _ALIASES_PER_ITEM * len(self._items)):
                self._identities.popitem(last=False)
        return item

    def clear(self) -> None:
        """Drop all items; counters stay."""
        with self._lock:
            self._items.clear()
            self._identities.clear()
            self._nbytes = 0

    def _once(
        self, key: Hashable, find: Callable[[], MediaItem | None], compute: Callable[[], MediaItem]
    ) -> MediaItem:
        """Find or compute, with at most one thread computing for `key`; `find` runs under the lock."""
        while True:
            with self._lock:
                if (item := find()) is not None:
                    return item
                flight = self._running.get(key)
                if flight is None:
                    leading = self._running[key] = _Flight()
                    break
            flight.done.wait()
            if flight.item is not None:
                with self._lock:
                    self._hits += 1
                return flight.item
        try:
            leading.item = compute()
            return leading.item
        finally:
            with self._lock:
                del self._running[key]
            leading.done.set()

    def _found(self, identity: str | None) -> MediaItem | None:
        if identity is None or (item := self._items.get(identity)) is None:
            return None
        self._items.move_to_end(identity)
        self._hits += 1
        return item

    def _store(self, item: MediaItem) -> MediaItem:
        with self._lock:
            self._misses += 1
            if (held := self._items.pop(item.identity, None)) is not None:
                self._nbytes -= held.nbytes
            if item.nbytes > self.max_bytes:
                return item
            self._items[item.identity] = item
            self._nbytes += item.nbytes
            while self._nbytes > self.max_bytes:
                _, dropped = self._items.popitem(last=False)
                self._nbytes -= dropped.nbytes
                self._evictions += 1
        return item


class _Flight:
    """One computation that several threads wait for; `item` stays `None` where it failed."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.item: MediaItem | None = None


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
