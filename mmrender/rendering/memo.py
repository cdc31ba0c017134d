"""A memo of whole renderings, keyed by the value of what was passed.

A conversation is often rendered again unchanged: for another sample of a group, for a count, for a retry. The
key is built straight from the caller's objects, before any of the work, and covers image contents by
fingerprint. Media that may change under the same name (a URL, a path in a string, an open file) are never
memoised; elsewhere, in a tool's arguments say, a URL is text like any other.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec

from mmrender.media.cache import source_fingerprint
from mmrender.tokens.rendered import RenderedTokens

_EXACT = (bool, int, type(None))
_SOURCES = frozenset(
    {
        *("image", "image_pil", "image_url", "images", "input_image"),
        *("video", "video_url", "videos", "input_video"),
        *("file", "path", "source", "url"),
    }
)
"""Keys of a part under which a string names a place to load from."""
_ENCODED = frozenset({"base64", "data"})
"""Keys of a part whose strings are long, and stand in the key by their digest."""
_DEPTH = 32
_BYTES_PER_TOKEN = 64


class _NoKeyError(Exception):
    """Some value has no key."""


def conversation_key(
    messages: Any, tools: Any, documents: Any, images: Any, videos: Any, *options: Any
) -> Hashable | None:
    """A hashable that equal input shares, or None where the input cannot be keyed by value.

    Args:
        messages: Messages as the caller passed them.
        tools: Tool definitions.
        documents: Documents.
        images: Sources of image parts that have none of their own.
        videos: The same for video parts.
        *options: Whatever else the rendering depends on.
    """
    try:
        return (
            tuple([_message_key(message) for message in _sequence(messages)]),
            None if images is None else _source_key(_sequence(images), 0),
            None if videos is None else _source_key(_sequence(videos), 0),
            *[None if option is None else _key(option, 0) for option in (tools, documents, *options)],
        )
    except _NoKeyError:
        return None


def value_key(value: Any) -> Hashable | None:
    """A hashable that equal values share, or None where there is none; 1, 1.0 and True are not equal here."""
    try:
        return _key(value, 0)
    except _NoKeyError:
        return None


def _sequence(given: Any) -> list[Any] | tuple[Any, ...]:
    if type(given) is not list and type(given) is not tuple:
        raise _NoKeyError  # an iterator would be used up
    return given


def _message_key(message: Any) -> Hashable:
    if type(message) is not dict:
        if not isinstance(message, msgspec.Struct):
            raise _NoKeyError
        return type(message), _message_key(msgspec.structs.asdict(message))
    return tuple([
        (name, item if type(item) is str else _content_key(item) if name == "content" else _key(item, 1))
        for name, item in message.items()
    ])  # fmt: skip


def _content_key(content: Any) -> Hashable:
    kind = type(content)
    if kind is list or kind is tuple:
        return kind, *[part if type(part) is str else _part_key(part, 1) for part in content]
    return None if content is None else _part_key(content, 1)


def _part_key(part: Any, depth: int) -> Hashable:
    """Key of a part, or of a nested object of one that says where its medium is."""
    if depth > _DEPTH:
        raise _NoKeyError
    if isinstance(part, msgspec.Struct):
        return type(part), _part_key(msgspec.structs.asdict(part), depth)
    if type(part) is not dict:
        return _source_key(part, depth)
    # Bytes win over a path beside them, as in Hugging Face's {"bytes", "path"}.
    loaded = part.get("bytes") is not None
    return tuple([
        (
            name,
            _source_key(item, depth + 1)
            if name in _SOURCES and not (loaded and name == "path")
            else _digest(item)
            if name in _ENCODED and type(item) is str
            else _key(item, depth + 1),
        )
        for name, item in part.items()
    ])  # fmt: skip


def _source_key(source: Any, depth: int) -> Hashable:
    kind = type(source)
    if source is None:
        return None
    if kind is dict or isinstance(source, msgspec.Struct):
        return _part_key(source, depth)
    if depth > _DEPTH:
        raise _NoKeyError
    if kind is list or kind is tuple:
        return kind, *[_source_key(item, depth + 1) for item in source]
    return _fingerprint(source)


def _fingerprint(source: Any) -> Hashable:
    fingerprint = source_fingerprint(source)
    if fingerprint is None:
        raise _NoKeyError
    return fingerprint


def _digest(text: str) -> Hashable:
    try:
        return _fingerprint(text.encode())
    except UnicodeEncodeError:
        raise _NoKeyError from None


def _key(value: Any, depth: int) -> Hashable:
    kind = type(value)
    if kind is str:
        return str(value)
    if kind in _EXACT:
        return kind, value
    if kind is float:
        return float, str(value.hex())  # 0.0 and -0.0 are equal, but not printed alike
    if depth > _DEPTH:
        raise _NoKeyError
    if kind is dict:
        return tuple([(_name(name), _key(item, depth + 1)) for name, item in value.items()])
    if kind is list or kind is tuple:
        return kind, *[_key(item, depth + 1) for item in value]
    if isinstance(value, msgspec.Struct):
        return kind, _key(msgspec.structs.asdict(value), depth + 1)
    if isinstance(value, Mapping):
        return kind, _key(dict(value), depth + 1)
    return _fingerprint(value)


def _name(name: Any) -> Hashable:
    # 1, 1.0 and True are one dict key, but three texts.
    return name if type(name) is str else _key(name, _DEPTH)


class RenderMemo:
    """Least recently used renderings, bounded by bytes. Safe to use from many threads.

    Callers may extend their list of ids, so each rendering goes in and comes out with a list of its own.

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
        return _with_own_ids(entry[0])

    def put(self, key: Hashable, rendered: RenderedTokens) -> None:
        """Keep a rendering, dropping the ones least recently used where it does not fit."""
        tokens = len(rendered.token_ids) * _BYTES_PER_TOKEN
        size = tokens + len(rendered.text) + rendered.multi_modal_data.nbytes
        with self._lock:
            if key not in self._entries:
                self._entries[key] = (_with_own_ids(rendered), size)
                self._left -= size
            while self._left < 0 and self._entries:
                _, (_, freed) = self._entries.popitem(last=False)
                self._left += freed


def _with_own_ids(rendered: RenderedTokens) -> RenderedTokens:
    """A shallow copy with its own list of ids, five times as fast as `dataclasses.replace`."""
    copy = object.__new__(RenderedTokens)
    copy.__dict__.update(rendered.__dict__)
    copy.__dict__["token_ids"] = rendered.token_ids.copy()
    return copy
