"""A memo of whole renderings, keyed by the value of what was passed.

A conversation is often rendered again unchanged: for another sample of a group, for a count, for a retry. The
key is built straight from the caller's objects, before any of the work, and covers image contents by
fingerprint. Input that may change under the same name (a URL, an open file) is never memoised.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec

from mmrender.media.identity import source_fingerprint
from mmrender.rendered import RenderedTokens

_SCALARS = (bool, int, float, type(None))
_SOURCE_KEYS = frozenset({"image", "image_url", "url", "video", "video_url", "path", "input_image", "file"})
_DEPTH = 32
_BYTES_PER_TOKEN = 64


class Unkeyable(Exception):
    """Some value has no key."""


def conversation_key(*values: Any) -> Hashable | None:
    """A hashable that equal input shares, or None where the input cannot be keyed by value."""
    try:
        return tuple([_key(value, 0) for value in values])
    except Unkeyable:
        return None


def _key(value: Any, depth: int) -> Hashable:
    kind = type(value)
    if kind is str:
        return value
    if kind in _SCALARS:
        return (kind, value)
    if depth > _DEPTH:
        raise Unkeyable
    if kind is dict:
        return tuple([_item_key(name, item, depth) for name, item in value.items()])
    if kind is list or kind is tuple:
        return (kind, *[_key(item, depth + 1) for item in value])
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value).items()
        return (kind, *[_item_key(name, item, depth) for name, item in fields])
    if isinstance(value, Mapping):
        return (kind, *[_item_key(name, item, depth) for name, item in value.items()])
    fingerprint = source_fingerprint(value)
    if fingerprint is None:
        raise Unkeyable
    return fingerprint


def _item_key(name: Any, item: Any, depth: int) -> Hashable:
    if type(item) is str:
        if (name in _SOURCE_KEYS or name == "source") and item[:5].lower() != "data:":
            raise Unkeyable
        return (name, item)
    return (name, _key(item, depth + 1))


class RenderMemo:
    """Least recently used renderings, bounded by bytes. Safe to use from many threads.

    Args:
        max_bytes: Bound on tokens and media items together, as estimated.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._entries: OrderedDict[Hashable, tuple[RenderedTokens, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> RenderedTokens | None:
        """The rendering of `key`, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, rendered: RenderedTokens) -> None:
        """Keep a rendering, dropping the ones least recently used where it does not fit."""
        size = len(rendered.token_ids) * _BYTES_PER_TOKEN + len(rendered.text) + rendered.multi_modal_data.nbytes
        with self._lock:
            if key not in self._entries:
                self._entries[key] = (rendered, size)
                self._left -= size
            while self._left < 0 and self._entries:
                _, (_, freed) = self._entries.popitem(last=False)
                self._left += freed
