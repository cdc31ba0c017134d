"""From the media parts of a conversation to processed items, each image decoded and processed once.

An item is found again by what it is. A source seen before is recognised by its fingerprint and not
even decoded; a new source with known pixels is decoded and not processed.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from mmrender.errors import MediaError, MMRenderError
from mmrender.media.cache import MediaCache, source_fingerprint
from mmrender.media.load import load_image, load_video
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.base import MediaProcessor, Prepared
from mmrender.messages import ImagePart, VideoPart
from mmrender.spans import MediaItem

MediaPart: TypeAlias = ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class _Task:
    """A part to resolve, for all parts of the call that are the same."""

    where: str
    part: MediaPart
    fingerprint: Hashable | None

    @property
    def key(self) -> Hashable:
        # Within one call a source cannot change, so the object itself will do where it has no fingerprint.
        source = self.fingerprint if self.fingerprint is not None else _same_object(self.part)
        return source, type(self.part), _frame_rate(self.part)


class MediaResolver:
    """Loads and processes media for one model, under one policy. Safe to use from many threads.

    Args:
        processor: What the model makes of an image.
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
        """A resolver over the same processor, policy and cache that shares its work with other threads."""
        return MediaResolver(self.processor, self.policy, self.cache, executor=executor)

    def resolve(
        self, media: Sequence[tuple[str, MediaPart]], *, company: int | None = None
    ) -> list[MediaItem]:
        """Return one item per part, in order; equal sources give the same item.

        Args:
            media: Each part with its path in the conversation, for errors.
            company: Number of images in the whole conversation where `media` holds only some of them.

        Raises:
            MediaError: A part cannot be loaded or processed, or has no source; `where` is the part's path.
            ProcessorError: The model takes no such medium.
        """
        images = sum(isinstance(part, ImagePart) for _, part in media)
        total = images if company is None else company
        tasks = [_task(where, part) for where, part in media]
        keys = [task.key for task in tasks]
        distinct = dict(zip(reversed(keys), reversed(tasks), strict=True))  # the first of each key stays
        order = list(dict.fromkeys(keys))
        items = map_shared(
            lambda task: self._resolve_one(task, total), [distinct[key] for key in order], self._executor
        )
        found = dict(zip(order, items, strict=True))
        return [found[key] for key in keys]

    def _resolve_one(self, task: _Task, company: int) -> MediaItem:
        try:
            return self._item(task.where, task.part, task.fingerprint, company)
        except MMRenderError as error:
            error.at(task.where)
            raise

    def _item(self, where: str, part: MediaPart, fingerprint: Hashable | None, company: int) -> MediaItem:
        if fingerprint is not None:
            key = self._key(fingerprint, part, company)
            return self.cache.get_or_prepare(key, lambda: self._prepare(where, part, company))
        item = self.cache.get_or_finish(self._prepare(where, part, company))
        # An image that was opened lazily has a fingerprint once it is decoded.
        fingerprint = source_fingerprint(part.source)
        return item if fingerprint is None else self.cache.bind(self._key(fingerprint, part, company), item)

    def _key(self, fingerprint: Hashable, part: MediaPart, company: int) -> Hashable:
        # The policy is part of the key: what one resolver may load, another that shares the cache may not.
        counted = company if self.processor.depends_on_company else None
        return (
            fingerprint,
            type(part),
            _frame_rate(part),
            counted,
            self.processor.settings_digest,
            self.policy,
        )

    def _prepare(self, where: str, part: MediaPart, company: int) -> Prepared:
        if isinstance(part, VideoPart):
            video = load_video(part.source, self.policy, where=where)
            stated = video if part.fps is None else replace(video, fps=part.fps)
            return self.processor.prepare(stated, company=company)
        return self.processor.prepare(load_image(part.source, self.policy, where=where), company=company)


def _task(where: str, part: MediaPart) -> _Task:
    if part.source is None:
        raise MediaError(
            "the image is not at hand",
            where=where,
            expected="a source to load",
            got="None",
            remedy="Give the image again, or render without media.",
        )
    try:
        return _Task(where, part, source_fingerprint(part.source))
    except MMRenderError as error:
        error.at(where)
        raise


def _frame_rate(part: MediaPart) -> float | None:
    return part.fps if isinstance(part, VideoPart) else None


def _same_object(part: MediaPart) -> Hashable:
    source = part.source
    return ("text", source) if isinstance(source, str) else ("object", id(source))


Given = TypeVar("Given")
Made = TypeVar("Made")


def map_shared(
    function: Callable[[Given], Made], given: Sequence[Given], executor: Executor | None = None
) -> list[Made]:
    """Return `function` of each, in order; threads of the executor take what the calling one has not begun.

    The calling thread never waits for work that nobody is doing, so it cannot be stalled by an executor that
    is busy or shut down, or whose threads call this themselves.

    Raises:
        Exception: That of the first in order that fails, after which the rest is not begun.
    """
    if executor is None or len(given) < 2:
        return [function(one) for one in given]
    futures = [_submit(executor, function, one) for one in given[1:]]
    try:
        made = [function(given[0])]
        for one, future in zip(given[1:], futures, strict=True):
            made.append(function(one) if future.cancel() else future.result())
        return made
    finally:
        for future in futures:
            future.cancel()


def _submit(executor: Executor, function: Callable[[Given], Made], one: Given) -> "Future[Made]":
    try:
        return executor.submit(function, one)
    except RuntimeError:  # shut down meanwhile: a future that nobody runs is left to the calling thread
        return Future()
