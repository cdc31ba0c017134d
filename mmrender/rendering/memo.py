"""A memo of whole renderings, keyed by normalised messages and the content of their images.

A conversation is often rendered again unchanged: for another sample of a group, for a count, for a retry.
Images count by fingerprint; media that may change under the same name (a URL, an open file) are never
memoised.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from mmrender.caching import LRUCache
from mmrender.messages import ImagePart, Message, VideoPart
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens

_MAX_DEPTH = 32
_BYTES_PER_TOKEN = 64


class _NoKeyError(Exception):
    """Some value has no key."""


def conversation_key(
    messages: Sequence[Message], fingerprints: Sequence[Hashable | None], *options: Any
) -> Hashable | None:
    """Return a hashable that equal conversations share, or None if some value has no key.

    Args:
        messages: The conversation.
        fingerprints: That of each media part's source, in order; None for one that may change.
        *options: Tool definitions and whatever else the rendering depends on.
    """
    if None in fingerprints:
        return None
    media = iter(fingerprints)
    try:
        return (
            *[_message_key(message, media) for message in messages],
            *[_key(option, 0) for option in options],
        )
    except _NoKeyError:
        return None


def _message_key(message: Message, fingerprints: Iterator[Hashable]) -> Hashable:
    content: Hashable = message.content
    if type(content) is not tuple and not message.tool_calls and not message.extra:
        return message.role, content, message.reasoning_content, message.name, message.tool_call_id
    if type(message.content) is tuple:
        content = tuple(
            [
                (type(part), next(fingerprints), getattr(part, "fps", None))
                if isinstance(part, ImagePart | VideoPart)
                else part
                for part in message.content
            ]
        )
    return (
        message.role,
        content,
        message.reasoning_content,
        tuple([(call.name, _key(call.arguments, 1), call.id) for call in message.tool_calls]),
        message.name,
        message.tool_call_id,
        _key(message.extra, 1) if message.extra else None,
    )


def _key(value: Any, depth: int) -> Hashable:
    """Return a hashable that equal plain values of equal types share."""
    kind = type(value)
    if kind is str:
        return str(value)
    if kind is bool or kind is int or value is None:
        return kind, value
    if kind is float:
        return float, str(value.hex())  # 0.0 and -0.0 are equal, but not printed alike
    if depth < _MAX_DEPTH and kind is dict:
        # 1, 1.0 and True are one dict key, but three texts.
        return tuple([(_key(name, depth + 1), _key(item, depth + 1)) for name, item in value.items()])
    if depth < _MAX_DEPTH and (kind is list or kind is tuple):
        return kind, *[_key(item, depth + 1) for item in value]
    raise _NoKeyError


class RenderMemo:
    """Least recently used renderings, bounded by bytes. Safe to use from many threads.

    Each rendering goes in and comes out with lists of its own, so that callers may change theirs.

    Args:
        max_bytes: Bound on tokens and media items together, as estimated.
    """

    def __init__(self, max_bytes: int) -> None:
        self._entries: LRUCache[Hashable, RenderedTokens] = LRUCache(max_bytes, size_of=_size)

    def get(self, key: Hashable) -> RenderedTokens | None:
        """Return the rendering of `key`, or None."""
        known = self._entries.get(key)
        return None if known is None else _copied(known)

    def put(self, key: Hashable, rendered: RenderedTokens) -> None:
        """Keep a rendering, dropping the least recently used ones if it does not fit."""
        self._entries.put(key, _copied(rendered))


def _size(rendered: RenderedTokens) -> int:
    tokens = len(rendered.token_ids) * _BYTES_PER_TOKEN
    return tokens + len(rendered.text) + rendered.multi_modal_data.nbytes


def _copied(rendered: RenderedTokens) -> RenderedTokens:
    """Copy everything that can be changed; items are shared. Five times as fast as `dataclasses.replace`."""
    copy = object.__new__(RenderedTokens)
    copy.__dict__.update(rendered.__dict__)
    copy.__dict__["token_ids"] = rendered.token_ids.copy()
    if rendered.multi_modal_data:
        copy.__dict__["multi_modal_data"] = rendered.multi_modal_data.merged(MultiModalData())
    return copy
