"""From the media parts of a request to processed items, each image decoded and processed once.

An item is found again by its identity: a digest of decoded pixels and processor settings. A known source is
recognised by its fingerprint, which is cheap enough to take on every render, and is not decoded. A new source
with known pixels is decoded and not processed.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from PIL import Image, ImageFile

from mmrender.caching import CacheStats, LRUCache, SingleFlight
from mmrender.content.parts import MEDIA_ARGUMENTS
from mmrender.errors import MediaError, MessageError, located
from mmrender.media.audio import LoadedAudio, load_audio
from mmrender.media.encoded import keep_original
from mmrender.media.load import decode_in_place
from mmrender.media.pixels import raw_strips
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import AudioProcessor, MediaProcessor, Prepared
from mmrender.media.sources import read_source
from mmrender.media.tracks import has_track, interleaved, is_encoded, load_track
from mmrender.media.video import as_array
from mmrender.messages import MODALITIES, AudioPart, ImagePart, MediaPart, Modality, RequestMedia, VideoPart
from mmrender.sidecar import MediaItem, MultiModalData

Argument = TypeVar("Argument")
Result = TypeVar("Result")

DEFAULT_MAX_BYTES = 1 << 30
_MAX_SOURCES = 1 << 16
"""Maximum number of sources whose items are remembered."""
_EXPECTED_SOURCES: dict[Modality, str] = {
    "image": "an image, bytes, a path or a URL",
    "video": "frames or a video",
    "audio": "samples, bytes, a path or a URL",
}
# Fingerprints live in one process. Its own seed keeps anyone from preparing two images that share one.
_SEED = secrets.randbits(64)


class MediaCache:
    """Processed items. The least recently used are dropped first, and an item over the bound is never kept.

    Safe to share between threads and between processors: identities include the processor's settings. Threads
    that ask for the same item at once compute it once: the first works while others wait.

    Args:
        max_bytes: Bound on the sum of `item.nbytes`; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._items: LRUCache[str, MediaItem] = LRUCache(max_bytes, size_of=lambda item: item.nbytes)
        self._identities: LRUCache[Hashable, str] = LRUCache(_MAX_SOURCES)
        self.clip_lengths: LRUCache[Hashable, int] = LRUCache(_MAX_SOURCES)
        """Number of samples of audio clips, by a key that determines it."""
        self._loading: SingleFlight[Hashable, MediaItem] = SingleFlight()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy elsewhere makes its own items.
        return type(self), (self._items.max_size,)

    @property
    def stats(self) -> CacheStats:
        """Counters of items. Sizes are bytes."""
        return self._items.stats

    def get(self, identity: str) -> MediaItem | None:
        """Return the item of an identity, or None."""
        return self._items.get(identity)

    def finished(self, prepared: Prepared, source: Hashable | None = None) -> MediaItem:
        """Return the item of an identified medium, which is processed if its item is not kept.

        `source` is a key that determines the item, or None for a source that may change.
        """
        item = self._items.get_or_compute(prepared.identity, prepared.finish)
        if prepared.encoded is not None:
            keep_original(item, prepared.encoded)
        if source is not None:
            self._identities.put(source, item.identity)
        return item

    def get_or_load(self, source: Hashable | None, load: Callable[[], Prepared]) -> MediaItem:
        """Return the item of a source, as `finished` does. An unknown source is loaded and identified."""
        if source is None:
            return self.finished(load())
        return self._loading.run(
            source,
            lambda: self._items.get(self._identities.get(source) or ""),
            lambda: self.finished(load(), source),
        )

    def clear(self) -> None:
        """Drop all items. Counters stay."""
        self._items.clear()
        self._identities.clear()


class MediaResolver:
    """Loads and processes media for one model, under one policy. Safe to use from many threads.

    Args:
        processor: The model's processor of media.
        policy: Limits of loading.
        cache: Keeps items. May be shared with other resolvers.
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
        """Return a resolver with the same processor, policy and cache that shares its work with threads."""
        return MediaResolver(self.processor, self.policy, self.cache, executor=executor)

    def require_processor(self, where: str | None = None) -> None:
        """Load the model's processor, as the first image does.

        Args:
            where: Path of the part that needs it, for the error.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: It cannot be loaded.
        """
        with located(where):
            self.processor = self.processor.load()

    def resolve(
        self, media: Sequence[RequestMedia], *, earlier: MultiModalData | None = None
    ) -> list[tuple[MediaItem, ...]]:
        """Return the items of each media part: one, or two for a video with a sound track that is rendered.

        Equal sources have the same item.

        Args:
            media: The parts.
            earlier: Sidecar of the media of the conversation that `media` leaves out.

        Raises:
            MessageError: A part has no source; `where` is the part's path.
            MediaError: A part cannot be loaded or processed, or is one too many.
            ProcessorError: The model does not support this kind of medium.
        """
        counts = Counter({each: earlier.count(each) for each in MODALITIES} if earlier is not None else {})
        counts.update([entry.part.modality for entry in media])
        self.policy.check("max_items", counts.total(), where="messages")
        if self.processor.use_audio_in_video:
            media = [self._read(entry) for entry in media]
        distinct: dict[Hashable, RequestMedia] = {}
        keys: list[Hashable] = []
        for entry in media:
            key, source, modality = entry.fingerprint, entry.part.source, entry.part.modality
            if source is None:
                raise MessageError(
                    f"the {modality} part has no source",
                    where=entry.path,
                    expected=_EXPECTED_SOURCES[modality],
                    got="None",
                    remedy="Put it into the part, or pass it with the messages: "
                    f"{MEDIA_ARGUMENTS[modality]}=[...]",
                )
            if getattr(entry.part, "sound", None) is not None and not self.processor.use_audio_in_video:
                raise MediaError(
                    "this renderer leaves the sound tracks of videos out",
                    where=f"{entry.path}.audio",
                    remedy="Open it with use_audio_in_video=True, or leave the sound out.",
                )
            if key is None:
                # Within one call a source cannot change, so without a fingerprint the object itself is a key.
                same = source if isinstance(source, str) else id(source)
                key = ("object", modality, same, timing_of(entry.part))
            keys.append(key)
            distinct.setdefault(key, entry)
        videos, paths = self.processor.videos, [each.path for each in media if each.part.modality == "video"]
        if paths and counts["video"] > 1 and videos is not None and not videos.takes_several:
            raise MediaError(
                "the model's processor takes one video in a prompt",
                where=paths[-1],
                remedy="Pass the frames of further videos as images.",
            )
        longest = self.longest_clip(media, earlier) if counts.total() > counts["image"] else None
        item_of = partial(self._item, num_images=counts["image"], longest=longest)
        items = dict(zip(distinct, map_shared(item_of, list(distinct.values()), self._executor), strict=True))
        if not self.processor.use_audio_in_video:
            return [(items[key],) for key in keys]
        return [self._with_track(entry, items[key], longest) for entry, key in zip(media, keys, strict=True)]

    def _read(self, entry: RequestMedia) -> RequestMedia:
        """Read a video that may change, so that frames and sound track are of one reading."""
        part = entry.part
        if entry.fingerprint is not None or not isinstance(part, VideoPart) or not is_encoded(part):
            return entry
        with located(entry.path):
            part = msgspec.structs.replace(part, source=read_source(part.source, self.policy))
        return entry._replace(part=part, fingerprint=part_fingerprint(part))

    def _with_track(self, entry: RequestMedia, item: MediaItem, longest: int | None) -> tuple[MediaItem, ...]:
        """Return the items of a video and of its sound track, or any other item alone."""
        audio = self.processor.audio
        if audio is None or not isinstance(entry.part, VideoPart):
            return (item,)
        load: Any = cache(partial(self._load_sound, entry, audio))
        if not self._clip_length(entry, load):
            return (item,)
        key = ("track", entry.fingerprint, longest, audio.settings_digest, self.policy)
        with located(entry.path):
            track = self.cache.get_or_load(
                key if entry.fingerprint is not None else None,
                lambda: audio.prepare(load(), longest=longest),
            )
            pair = interleaved(audio, item, track)
        return tuple(map(self.cache.finished, pair))

    def brings_audio(self, entry: RequestMedia) -> bool:
        """Whether a part is audio, or a video that may have a sound track which is rendered."""
        part = entry.part
        if isinstance(part, VideoPart):
            return self.processor.use_audio_in_video and has_track(part)
        return isinstance(part, AudioPart)

    def longest_clip(self, media: Sequence[RequestMedia], earlier: MultiModalData | None) -> int | None:
        """Return the number of samples of a prompt's longest clip, if the processor pads the others to it.

        None for a single clip, and for a processor that treats each clip as if it were alone.

        Raises:
            MediaError: A clip cannot be loaded, or a prompt may have one clip.
        """
        audio = self.processor.audio
        known = [item.size[1] for item in (earlier.mm_items.get("audio", ()) if earlier is not None else ())]
        clips = [entry for entry in media if self.brings_audio(entry)]
        if audio is None or not clips or len(clips) + len(known) < 2 or audio.effect_of_others == "none":
            return None
        lengths = [*known, *filter(None, map(self._clip_length, clips))]
        if len(lengths) > 1 and audio.effect_of_others == "refused":
            raise MediaError(
                "the model's processor takes one audio clip in a prompt",
                where=clips[-1].path,
                remedy="Join the clips into one.",
            )
        return max(lengths) if len(lengths) > 1 else None

    def changes_earlier_clips(self, media: Sequence[RequestMedia], earlier: MultiModalData) -> bool:
        """Whether the clips of `media` change the tensors of the clips before them. Raises as `resolve`."""
        clips = earlier.mm_items.get("audio", ())
        longest = self.longest_clip(media, earlier) if clips else None
        if longest is None or self.processor.audio is None:
            return False
        is_longer = longest > max(item.size[1] for item in clips)
        return is_longer or (len(clips) == 1 and self.processor.audio.effect_of_others == "any")

    def _load_sound(self, entry: RequestMedia, audio: AudioProcessor) -> LoadedAudio | None:
        """Load a clip, or the sound track of a video if it has one."""
        part: Any = entry.part
        if isinstance(part, VideoPart):
            return load_track(part, audio.sampling_rate, self.policy, entry.path)
        rate = part.sampling_rate
        return load_audio(part.source, audio.sampling_rate, self.policy, source_rate=rate, where=entry.path)

    def _clip_length(self, entry: RequestMedia, load: Callable[[], LoadedAudio | None] | None = None) -> int:
        """Return the number of samples of a clip or track at the model's rate, which is remembered.

        0 for a video without a track. `load` loads it, if it is used for more than its length.
        """
        audio = self.processor.audio
        if audio is None:
            return 0
        key = None if entry.fingerprint is None else (entry.fingerprint, audio.sampling_rate, self.policy)
        length = None if key is None else self.cache.clip_lengths.get(key)
        if length is None:
            loaded = self._load_sound(entry, audio) if load is None else load()
            length = 0 if loaded is None else len(loaded.samples)
            if key is not None:
                self.cache.clip_lengths.put(key, length)
        return length

    def _item(self, entry: RequestMedia, num_images: int, longest: int | None) -> MediaItem:
        """Return the item of one part, from the cache or loaded, identified and processed."""
        part, processor, policy, fingerprint = entry.part, self.processor, self.policy, entry.fingerprint
        with located(entry.path):
            if fingerprint is None and isinstance(part.source, Image.Image):
                # An image that was opened lazily has a fingerprint once it is decoded.
                policy.check_pixels(*part.source.size)
                decode_in_place(part.source)
                fingerprint = source_fingerprint(part.source)
            others: int | None = longest if isinstance(part, AudioPart) else None
            if isinstance(part, ImagePart) and processor.depends_on_image_count:
                others = num_images
            # With the policy: a shared cache must not lend an item that a resolver's own policy forbids.
            key = (fingerprint, others, processor.of(part.modality).settings_digest, policy)
            load = partial(
                processor.load_part, part, policy, entry.path, num_images=num_images, longest=longest
            )
            return self.cache.get_or_load(None if fingerprint is None else key, load)


def part_fingerprint(part: MediaPart) -> Hashable | None:
    """Return `source_fingerprint` of a part's source, with the times of a video or the rate of audio."""
    source: Any = part.source
    if isinstance(part, ImagePart):
        return source_fingerprint(source)
    if isinstance(part, VideoPart) and part.sound is not None:
        both = part_fingerprint(msgspec.structs.replace(part, sound=None)), part_fingerprint(part.sound)
        return None if None in both else ("video with sound", *both)
    if isinstance(source, tuple | list):  # frames
        keys = tuple([source_fingerprint(frame) for frame in source])
        return None if None in keys else (part.modality, keys, timing_of(part))
    array = as_array(source)
    key = source_fingerprint(source if array is None else array)
    return None if key is None else (part.modality, key, timing_of(part))


def timing_of(part: MediaPart) -> Hashable:
    """Return the times of a video or the rate of audio as a key; None for an image."""
    if isinstance(part, AudioPart):
        return part.sampling_rate
    if not isinstance(part, VideoPart):
        return None
    sound = part.sound and (id(part.sound.source), part.sound.sampling_rate)
    return part.fps, part.times, part.frames_indices, part.total_num_frames, part.duration, sound


def source_fingerprint(source: Any) -> Hashable | None:
    """Return a key that equal sources share and that changes when the source does, or None.

    - `bytes` and `data:` URLs: a seeded 128-bit digest of their content, so no key keeps them alive.
    - A path: the file's inode, size and times of change.
    - PIL images and numpy arrays, which can be written to: a seeded 128-bit digest of their memory. An image
      file that is not decoded yet has no key: its size has not been checked against the policy.
    - A URL to fetch, a stream and anything else: None. Their content may change under the same name.
    """
    if isinstance(source, bytes):
        return "bytes", xxhash.xxh3_128_digest(source, seed=_SEED)
    if isinstance(source, str):
        if source[:5].lower() != "data:":
            return None
        return "text", xxhash.xxh3_128_digest(source.encode("utf-8", "surrogatepass"), seed=_SEED)
    if isinstance(source, Path):
        try:
            status = source.stat()
        except (OSError, ValueError):  # a null byte in the name
            return None
        return "file", status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if isinstance(source, Image.Image):
        if isinstance(source, ImageFile.ImageFile) and (source.tile or getattr(source, "is_animated", False)):
            return None
        try:
            orientation = decode_in_place(source)
        except MediaError:  # loading it raises the same error, with its path
            return None
        digest = xxhash.xxh3_128(seed=_SEED)
        for strip in raw_strips(source):
            digest.update(strip.reshape(-1).data)
        palette = source.palette
        colours = None if palette is None else (palette.mode, bytes(palette.palette))
        transparency = repr(source.info.get("transparency"))
        return "image", digest.digest(), source.mode, source.size, colours, transparency, orientation
    if isinstance(source, np.ndarray) and not source.dtype.hasobject:
        memory = np.ascontiguousarray(source).reshape(-1).view(np.uint8).data
        return "array", xxhash.xxh3_128_digest(memory, seed=_SEED), source.shape, source.dtype.str
    return None


def map_shared(
    function: Callable[[Argument], Result], arguments: Sequence[Argument], executor: Executor | None = None
) -> list[Result]:
    """Return `function` of each, in order. Threads of the executor take calls that are not begun yet.

    The calling thread only waits for calls that have begun, so it cannot be stalled by an executor that is
    busy or shut down, or whose threads call this themselves.

    Raises:
        Exception: The error of the first call in order that fails, after which no other call begins.
    """
    if executor is None or len(arguments) < 2:
        return [function(argument) for argument in arguments]
    first, *others = arguments
    futures: list[Future[Result]] = []
    for argument in others:
        try:
            futures.append(executor.submit(function, argument))
        except RuntimeError:  # shut down meanwhile: the calling thread runs the rest
            futures.append(Future())
    try:
        results = [function(first)]
        for argument, future in zip(others, futures, strict=True):
            results.append(function(argument) if future.cancel() else future.result())
        return results
    finally:
        for future in futures:
            future.cancel()
