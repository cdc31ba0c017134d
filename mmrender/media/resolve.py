"""From the media parts of a conversation to processed items, each image decoded and processed once.

An item is found again by its identity. A source seen before is recognised by its fingerprint and not even
decoded; a new source with known pixels is decoded and not processed.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeAlias, TypeVar

from mmrender.errors import MessageError, MMRenderError, ProcessorError
from mmrender.media.cache import MediaCache, source_fingerprint
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import MediaProcessor, Prepared, UnavailableProcessor
from mmrender.messages import ImagePart, VideoPart
from mmrender.spans import MediaItem

MediaPart: TypeAlias = ImagePart | VideoPart
Given = TypeVar("Given")
Made = TypeVar("Made")


class MediaResolver:
    """Loads and processes media for one model, under one policy. Safe to use from many threads.

    Args:
        processor: The model's image processor.
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

    def with_executor(self, executor: Executor) -> "MediaResolver":
        """Return a resolver over the same processor, policy and cache that shares its work with threads."""
        return MediaResolver(self.processor, self.policy, self.cache, executor=executor)

    def require_processor(self, where: str) -> None:
        """Raise if the package that the model's images need is not installed.

        Raises:
            MissingDependencyError: It is not.
        """
        if isinstance(self.processor, UnavailableProcessor):
            raise copy.copy(self.processor.error).at(where)

    def resolve(
        self,
        media: Sequence[tuple[str, MediaPart]],
        *,
        num_images: int | None = None,
        fingerprints: Sequence[Hashable | None] | None = None,
    ) -> list[MediaItem]:
        """Return one item per part, in order; equal sources give the same item.

        Args:
            media: Each part with its path in the conversation, for errors.
            num_images: Number of images in the whole conversation where `media` holds only some of them.
            fingerprints: `source_fingerprint` of each source, where the caller has taken them already.

        Raises:
            MessageError: A part has no source; `where` is the part's path.
            MediaError: A part cannot be loaded or processed.
            ProcessorError: The model takes no such medium.
        """
        total = len(media) if num_images is None else num_images
        for where, part in media:
            if isinstance(part, VideoPart):
                raise ProcessorError(
                    f"videos are not supported for {self.processor.name}",
                    where=where,
                    expected="images",
                    remedy="Pass the frames as images.",
                )
            if part.source is None:
                raise MessageError(
                    "the image part has no source",
                    where=where,
                    expected="an image, bytes, a path or a URL",
                    got="None",
                    remedy="Put it into the part, or pass it beside the messages: images=[...]",
                )
        if fingerprints is None:
            fingerprints = [source_fingerprint(part.source) for _, part in media]
        # Within one call a source cannot change, so the object itself is a key where there is no other.
        keys = [
            _same_object(part.source) if fingerprint is None else fingerprint
            for (_, part), fingerprint in zip(media, fingerprints, strict=True)
        ]
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        order = [index for index, key in enumerate(keys) if first[key] == index]
        items = map_shared(
            lambda index: self._item(*media[index], fingerprints[index], total), order, self._executor
        )
        found = dict(zip(order, items, strict=True))
        return [found[first[key]] for key in keys]

    def _item(self, where: str, part: MediaPart, fingerprint: Hashable | None, num_images: int) -> MediaItem:
        # The policy is part of the key: what one resolver may load, another that shares the cache may not.
        counted = num_images if self.processor.depends_on_image_count else None
        settings = (counted, self.processor.settings_digest, self.policy)

        def prepare() -> Prepared:
            loaded = load_image(part.source, self.policy, where=where)
            return self.processor.prepare(loaded, num_images=num_images)

        try:
            if fingerprint is not None:
                return self.cache.get_or_load((fingerprint, settings), prepare)
            item = self.cache.get_or_finish(prepare())
            # An image that was opened lazily has a fingerprint once it is decoded.
            fingerprint = source_fingerprint(part.source)
            return item if fingerprint is None else self.cache.bind((fingerprint, settings), item)
        except MMRenderError as error:
            error.at(where)
            raise


def _same_object(source: Any) -> Hashable:
    return ("text", source) if isinstance(source, str) else ("object", id(source))


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
