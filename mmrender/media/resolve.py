"""From the media parts of a conversation to processed items, each image decoded and processed once.

An item is found again by its identity: a digest of decoded pixels and processor settings. A source seen
before is recognised by its fingerprint, which is cheap enough to be taken on every render, and not even
decoded; a new source with known pixels is decoded and not processed.
"""

import secrets
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from PIL import ExifTags, Image, ImageFile

from mmrender.caching import CacheStats, LRUCache
from mmrender.errors import MediaDecodeError, MessageError, MMRenderError, ProcessorError
from mmrender.media.load import LoadedImage, load_image, reading
from mmrender.media.pixels import raw_strips
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import MediaProcessor, Prepared
from mmrender.media.video import as_array, open_video
from mmrender.messages import ImagePart, MediaPart, Modality, VideoPart
from mmrender.sidecar import MediaItem

Given = TypeVar("Given")
Made = TypeVar("Made")

DEFAULT_MAX_BYTES = 1 << 30
_MAX_SOURCES = 1 << 16
# Fingerprints live in one process; a seed of its own keeps anyone from preparing two images that share one.
_SEED = secrets.randbits(64)


class MediaCache:
    """Processed items; the least recently used are dropped first, one larger than the bound is never kept.

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

    def __reduce__(self) -> tuple[Any, ...]:
        # Items are made anew where it arrives.
        return type(self), (self._items.max_size,)

    @property
    def stats(self) -> CacheStats:
        """Counters of items; sizes are bytes."""
        return self._items.stats

    def get(self, identity: str) -> MediaItem | None:
        """Return the item of an identity, if it is held."""
        return self._items.get(identity)

    def find(self, source: Hashable) -> MediaItem | None:
        """Return the item that a source's key leads to, if it is held."""
        identity = self._identities.get(source)
        return None if identity is None else self._items.get(identity)

    def get_or_load(self, source: Hashable | None, prepare: Callable[[], Prepared]) -> MediaItem:
        """Return the item of a source, loading and processing it unless the source was seen before.

        `source` is a key that determines the item, or None for a source that may change; `prepare` loads and
        identifies it.
        """

        def load() -> MediaItem:
            # Another thread may have finished since this one looked.
            item = None if source is None else self.find(source)
            if item is None:
                prepared = prepare()
                item = self._items.get_or_compute(prepared.identity, prepared.finish)
                if source is not None:
                    self._identities.put(source, item.identity)
            return item

        return load() if source is None else self.find(source) or self._loading.get_or_compute(source, load)

    def clear(self) -> None:
        """Drop all items; counters stay."""
        self._items.clear()
        self._identities.clear()


_EXPECTED_SOURCES: dict[Modality, str] = {
    "image": "an image, bytes, a path or a URL",
    "video": "frames or a video",
}


class MediaResolver:
    """Loads and processes media for one model, under one policy. Safe to use from many threads.

    Args:
        processor: The model's processor of images and videos.
        policy: What may be loaded.
        cache: Where items are kept; may be shared with other resolvers.
        executor: Threads that share the work of one call with the calling thread, item by item.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        policy: MediaPolicy,
        cache: MediaCache,
        *,
        executor: Executor | None = None,
    ) -> None:
        self.processor = processor
        self.policy = policy
        self.cache = cache
        self._executor = executor

    def with_executor(self, executor: Executor | None) -> "MediaResolver":
        """Return a resolver over the same processor, policy and cache that shares its work with threads."""
        return MediaResolver(self.processor, self.policy, self.cache, executor=executor)

    def require_processor(self, where: str | None = None) -> None:
        """Load the model's processor unless that is done, as the first image does.

        Args:
            where: What needs it, for the error.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: It cannot be loaded.
        """
        try:
            self.processor = self.processor.load()
        except MMRenderError as error:
            if where is not None:
                error.at(where)
            raise

    def resolve(
        self,
        media: Sequence[tuple[str, MediaPart]],
        *,
        num_images: int | None = None,
        num_earlier: int = 0,
        fingerprints: Sequence[Hashable | None] | None = None,
    ) -> list[MediaItem]:
        """Return one item per part, in order; equal sources give the same item.

        Args:
            media: Each part with its path in the conversation, for errors.
            num_images: Number of images in the whole conversation; by default the images in `media`.
            num_earlier: Number of images and videos of the conversation that `media` leaves out.
            fingerprints: `source_fingerprint` of each source, where the caller has taken them already.

        Raises:
            MessageError: A part has no source; `where` is the part's path.
            MediaError: A part cannot be loaded or processed.
            ProcessorError: The model takes no such medium.
        """
        self.policy.check_items(len(media) + num_earlier)
        if num_images is None:
            num_images = sum(isinstance(part, ImagePart) for _, part in media)
        for where, part in media:
            if part.modality == "video" and self.processor.videos is None:
                raise ProcessorError(
                    f"videos are not supported for {self.processor.name}",
                    where=where,
                    expected="images",
                    remedy="Pass the frames as images.",
                )
            if part.source is None:
                raise MessageError(
                    f"the {part.modality} part has no source",
                    where=where,
                    expected=_EXPECTED_SOURCES[part.modality],
                    got="None",
                    remedy=f"Put it into the part, or pass it beside the messages: {part.modality}s=[...]",
                )
        if fingerprints is None:
            fingerprints = [part_fingerprint(part) for _, part in media]
        keys: list[Hashable] = []
        jobs: dict[Hashable, tuple[str, MediaPart, Hashable | None]] = {}
        for (where, part), fingerprint in zip(media, fingerprints, strict=True):
            # Within one call a source cannot change, so the object itself is a key where there is no other.
            same = part.source if isinstance(part.source, str) else id(part.source)
            keys.append(("object", same, _timing(part)) if fingerprint is None else fingerprint)
            jobs.setdefault(keys[-1], (where, part, fingerprint))
        items = map_shared(lambda job: self._item(*job, num_images), list(jobs.values()), self._executor)
        found = dict(zip(jobs, items, strict=True))
        return [found[key] for key in keys]

    def _item(self, where: str, part: MediaPart, fingerprint: Hashable | None, num_images: int) -> MediaItem:
        if isinstance(part, VideoPart):
            return self._video(where, part, fingerprint)
        # The policy is part of the key: what one resolver may load, another that shares the cache may not.
        counted = num_images if self.processor.depends_on_image_count else None
        settings = (counted, self.processor.settings_digest, self.policy)
        loaded: LoadedImage | None = None

        def prepare() -> Prepared:
            pixels = loaded or load_image(part.source, self.policy, where=where)
            return self.processor.prepare(pixels, num_images=num_images)

        try:
            if fingerprint is None:
                loaded = load_image(part.source, self.policy, where=where)
                # An image that was opened lazily has a fingerprint once it is decoded.
                fingerprint = source_fingerprint(part.source)
            return self.cache.get_or_load(None if fingerprint is None else (fingerprint, settings), prepare)
        except MMRenderError as error:
            error.at(where)
            raise

    def _video(self, where: str, part: VideoPart, fingerprint: Hashable | None) -> MediaItem:
        videos = self.processor.videos
        if videos is None:
            raise ProcessorError("videos are not supported", where=where)

        def prepare() -> Prepared:
            with open_video(part, self.policy, where) as video:
                return videos.prepare(video)

        try:
            settings = (videos.settings_digest, self.policy)
            return self.cache.get_or_load(None if fingerprint is None else (fingerprint, settings), prepare)
        except MMRenderError as error:
            error.at(where)
            raise


def part_fingerprint(part: MediaPart) -> Hashable | None:
    """Return `source_fingerprint` of a part's source, with the times of a video."""
    if isinstance(part, ImagePart):
        return source_fingerprint(part.source)
    source: Any = as_array(part.source)
    if source is None and isinstance(part.source, tuple | list):
        frames = tuple([source_fingerprint(frame) for frame in part.source])
        return None if None in frames else ("video", frames, _timing(part))
    fingerprint = source_fingerprint(part.source if source is None else source)
    return None if fingerprint is None else ("video", fingerprint, _timing(part))


def _timing(part: MediaPart) -> Hashable:
    if not isinstance(part, VideoPart):
        return None
    return part.fps, part.times, part.frames_indices, part.total_num_frames, part.duration


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
        return (
            ("text", xxhash.xxh3_128_digest(source.encode("utf-8", "surrogatepass"), seed=_SEED))
            if is_data
            else None
        )
    if isinstance(source, Path):
        try:
            found = source.stat()
        except (OSError, ValueError):  # a null byte in the name
            return None
        return "file", found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    if isinstance(source, Image.Image):
        return _image_fingerprint(source)
    if isinstance(source, np.ndarray) and not source.dtype.hasobject:
        memory = np.ascontiguousarray(source).reshape(-1).view(np.uint8).data
        return "array", xxhash.xxh3_128_digest(memory, seed=_SEED), source.shape, source.dtype.str
    return None


def _image_fingerprint(image: Image.Image) -> Hashable | None:
    if isinstance(image, ImageFile.ImageFile) and (image.tile or getattr(image, "is_animated", False)):
        return None
    try:
        with reading(image):
            image.load()
            orientation = image.getexif().get(ExifTags.Base.Orientation)
    except MediaDecodeError:  # loading it says the same, and where
        return None
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


def map_shared(
    function: Callable[[Given], Made], given: Sequence[Given], executor: Executor | None = None
) -> list[Made]:
    """Return `function` of each, in order; threads of the executor take what the calling one has not begun.

    The calling thread only waits for work that has begun, so it cannot be stalled by an executor that is busy
    or shut down, or whose threads call this themselves.

    Raises:
        Exception: That of the first in order that fails, after which the rest is not begun.
    """
    if executor is None or len(given) < 2:
        return [function(one) for one in given]
    futures: list[Future[Made]] = []
    for one in given[1:]:
        try:
            futures.append(executor.submit(function, one))
        except RuntimeError:  # shut down meanwhile: a future that nobody runs is left to the calling thread
            futures.append(Future())
    try:
        made = [function(given[0])]
        for one, future in zip(given[1:], futures, strict=True):
            made.append(function(one) if future.cancel() else future.result())
        return made
    finally:
        for future in futures:
            future.cancel()
