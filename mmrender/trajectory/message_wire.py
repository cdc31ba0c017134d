"""Messages as plain data in a table of distinct ones.

The pixels of a trajectory travel in its media items. So by default the sources of media in content parts
(encoded bytes, arrays, PIL images, `data:` URLs) stand as None, which is how a message says that an image is
there but not at hand. Names of images (paths, URLs), text, tool calls and everything else stay as they are.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

import mmcodecs
from mmrender.errors import TrajectoryError
from mmrender.messages import Message

MediaSources: TypeAlias = Literal["drop", "keep"]
"""Whether messages keep the sources of their media, or hold None in their place."""

_MESSAGE: Final = "message"
_PLAIN: Final = "plain"
_DEPTH: Final = 60
_MEDIA_TYPES: Final = frozenset(
    {"image", "image_url", "input_image", "image_pil", "video", "video_url", "input_video"}
)
_MEDIA_KEYS: Final = frozenset({"image", "image_url", "image_pil", "video", "video_url"})
"""What tells a content part that shows a medium, as `mmrender.content` reads parts."""


class MessageTable:
    """Collects distinct messages; equal ones get one row."""

    def __init__(self, sources: MediaSources) -> None:
        if sources not in ("drop", "keep"):
            raise TrajectoryError(
                "there is no such treatment of sources",
                where="media_sources",
                expected="'drop' or 'keep'",
                got=repr(sources),
            )
        self.rows: list[list[Any]] = []
        self._sources = sources
        # The objects are kept beside their rows, or an id might come to mean another object.
        self._by_object: dict[int, tuple[Any, int]] = {}
        self._by_content: dict[bytes, int] = {}

    def row(self, message: Any, where: str) -> int:
        """Return the row of a message.

        Raises:
            TrajectoryError: It holds something that has no plain form.
        """
        known = self._by_object.get(id(message))
        if known is not None:
            return known[1]
        plain = [
            _MESSAGE if isinstance(message, Message) else _PLAIN,
            plain_message(message, self._sources, where),
        ]
        try:
            digest = blake3(mmcodecs.encode(plain)).digest()
        except mmcodecs.CodecError as error:
            raise TrajectoryError(
                "a message holds something that has no plain form",
                where=where,
                got=str(error),
                remedy="Give media as bytes or URLs, or pack with media_sources='drop'",
            ) from error
        row = self._by_content.setdefault(digest, len(self.rows))
        if row == len(self.rows):
            self.rows.append(plain)
        self._by_object[id(message)] = message, row
        return row


def plain_message(message: Any, sources: MediaSources, where: str = "message") -> Any:
    """Return a message as dicts, lists and scalars, its media sources treated as `sources` says.

    Raises:
        TrajectoryError: It is nested too deeply, or holds itself.
    """
    plain = _plain(message, 0, where)
    if sources == "drop" and isinstance(plain, dict) and "content" in plain:
        content = plain["content"]
        parts = [_without_source(part) for part in content] if isinstance(content, list) else content
        plain["content"] = _without_source(parts)
    return plain


def _plain(value: Any, depth: int, where: str) -> Any:
    if depth > _DEPTH:
        raise TrajectoryError("a message is nested too deeply, or holds itself", where=where)
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        value = fields if tag is None else {str(value.__struct_config__.tag_field): tag, **fields}
    if isinstance(value, Mapping):
        return {key: _plain(entry, depth + 1, where) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1, where) for entry in value]
    return value


def _without_source(part: Any) -> Any:
    """Return a content part without its image or video; any other is returned as it is."""
    if _is_binary(part):
        return {"type": "image"}
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    media = kind in _MEDIA_TYPES if kind is not None else not _MEDIA_KEYS.isdisjoint(part)
    return {key: _blanked(value, key) for key, value in part.items()} if media else part


def _blanked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _blanked(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return None if any(_blanked(entry) is not entry for entry in value) else value
    is_data = isinstance(value, str) and (key == "data" or value[:5].lower() == "data:")
    return None if is_data or _is_binary(value) else value


def _is_binary(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview | np.ndarray):
        return True
    return type(value).__module__.partition(".")[0] in ("PIL", "torch")


def read_message(row: Any, where: str) -> Any:
    """Return the message of a row of the table.

    Raises:
        TrajectoryError: It is malformed.
    """
    kind, value = row if isinstance(row, list | tuple) and len(row) == 2 else (None, None)
    kind = kind if isinstance(kind, str) else None  # an array, say, would not compare to a truth value
    if kind == _PLAIN:
        return value
    if kind == _MESSAGE:
        try:
            return msgspec.convert(value, Message)
        except msgspec.ValidationError as error:
            raise TrajectoryError("a message is malformed", where=where, got=str(error)) from error
    raise TrajectoryError(
        "a row of the message table is malformed",
        where=where,
        expected=f"{_MESSAGE!r} or {_PLAIN!r}, and its content",
        got=repr(row)[:80],
    )
