"""From the media parts of a conversation to processed items, each image decoded and processed once.

Law 5: an item is found again by what it is. A source seen before is recognised by its fingerprint and not
even decoded; a new source with known pixels is decoded and not processed.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeAlias

from mmrender.errors import MediaError, MMRenderError
from mmrender.media.cache import MediaCache
from mmrender.media.identity import source_fingerprint
from mmrender.media.item import MediaItem
from mmrender.media.load import load_image, load_video
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.base import MediaProcessor, Prepared
from mmrender.messages import ImagePart, VideoPart

MediaPart: TypeAlias = ImagePart | VideoPart


class MediaResolver:
    """Loads and processes media for one model, under one policy. Safe to use from many threads.

    Args:
        processor: What the model makes of an image.
        policy: What may be loaded.
        cache: Where items are kept; may be shared with other resolvers.
    """

    def __init__(self, processor: MediaProcessor, policy: MediaPolicy, cache: MediaCache) -> None:
        self.processor = processor
        self.policy = policy
        self.cache = cache

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
        company = images if company is None else company
        seen: dict[Hashable, MediaItem] = {}
        items = []
        for where, part in media:
            try:
                items.append(self._resolve_one(where, part, company, seen))
            except MMRenderError as error:
                error.at(where)
                raise
        return items

    def _resolve_one(
        self, where: str, part: MediaPart, company: int, seen: dict[Hashable, MediaItem]
    ) -> MediaItem:
        if part.source is None:
            raise MediaError(
                "the image is not at hand",
                where=where,
                expected="a source to load",
                got="None",
                remedy="Give the image again, or render without media.",
            )
        # Within one call a source cannot change, so the object itself will do where it has no fingerprint.
        fingerprint = source_fingerprint(part.source)
        local = fingerprint if fingerprint is not None else _same_object(part)
        if local in seen:
            return seen[local]
        if fingerprint is None:
            item = self.cache.get_or_finish(self._prepare(where, part, company))
            fingerprint = source_fingerprint(part.source)
            if fingerprint is not None:
                self.cache.bind(self._key(fingerprint, part, company), item)
        else:
            key = self._key(fingerprint, part, company)
            item = self.cache.get_or_prepare(key, lambda: self._prepare(where, part, company))
        seen[local] = item
        return item

    def _key(self, fingerprint: Hashable, part: MediaPart, company: int) -> Hashable:
        # The policy is part of the key: what one resolver may load, another that shares the cache may not.
        counted = company if self.processor.depends_on_company else None
        rate = part.fps if isinstance(part, VideoPart) else None
        return fingerprint, type(part), rate, counted, self.processor.settings_digest, self.policy

    def _prepare(self, where: str, part: MediaPart, company: int) -> Prepared:
        if isinstance(part, VideoPart):
            video = load_video(part.source, self.policy, where=where)
            stated = video if part.fps is None else replace(video, fps=part.fps)
            return self.processor.prepare(stated, company=company)
        return self.processor.prepare(load_image(part.source, self.policy, where=where), company=company)


def _same_object(part: MediaPart) -> Hashable:
    source = part.source
    return ("text", source) if isinstance(source, str) else ("object", id(source))
