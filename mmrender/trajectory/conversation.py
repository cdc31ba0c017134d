"""Messages of recorded conversations: their plain form, without pixels, and when they are equal."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from mmrender.content.messages import to_openai
from mmrender.content.parts import MEDIA_TYPES, is_pixels
from mmrender.errors import TrajectoryError
from mmrender.messages import MediaPart, Message, TextPart, ThinkingPart, VideoPart

MediaSources: TypeAlias = Literal["drop", "keep"]
"""Whether messages keep the sources of their media, or hold None in their place."""

_MAX_DEPTH: Final = 60
"""Maximum nesting of a message."""
_JSON_TYPES: Final[tuple[tuple[Any, type], ...]] = (
    (str, str),
    ((int, float), float),
    ((list, tuple), list),
    (Mapping, dict),
)
_SCALARS: Final = frozenset((type(None), bool, int, float, str, bytes))
"""Scalars that msgpack keeps as they are."""
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def plain_message(message: Any, sources: MediaSources, where: str = "message") -> tuple[Any, bool]:
    """Return a message as dicts, lists and scalars, with or without the sources of its media.

    The second value is whether msgpack keeps it as it is.

    Raises:
        TrajectoryError: The message is nested too deeply.
    """
    others: list[Any] = []
    plain = _plain(message, 0, where, others)
    if sources == "drop" and isinstance(plain, dict) and "content" in plain:
        parts = plain["content"]
        plain["content"] = (
            [_without_source(part) for part in parts] if isinstance(parts, list) else _without_source(parts)
        )
    return plain, not others or _is_exact(plain)


def recorded_message(message: Message) -> dict[str, Any]:
    """Return a message as trajectories record it: in OpenAI's form, with None in place of pixels.

    Bytes, arrays, images and `data:` URLs are pixels. Paths and other URLs stay. The items of a trajectory
    hold the pixels, in the same order.
    """
    if isinstance(message.content, tuple):
        content = tuple(map(_without_pixels, message.content))
        message = msgspec.structs.replace(message, content=content)
    return to_openai(message)


def _without_pixels(part: Any) -> Any:
    if not isinstance(part, MediaPart):
        return part
    part = msgspec.structs.replace(part, source=_blanked(part.source))
    if isinstance(part, VideoPart) and part.sound is not None:
        part = msgspec.structs.replace(part, sound=_without_pixels(part.sound))
    return part


def same_message(later: Message, earlier: Message) -> bool:
    """Whether two messages mean the same, whatever form a client library echoes them in.

    Tool arguments compare as JSON, see `same_value`. Empty equals absent. A text equals its one text part.
    `later` may lack the reasoning and the ids of calls, which client libraries often lose. Another reasoning
    or id is a difference.
    """
    if later is earlier:  # as the client passes messages that were not changed
        return True
    (thoughts, role, body), (earlier_thoughts, earlier_role, earlier_body) = map(_meaning, (later, earlier))
    calls = zip(later.tool_calls, earlier.tool_calls, strict=False)
    return (
        role == earlier_role
        and (not thoughts or thoughts == earlier_thoughts)
        and all(not a.id or not b.id or a.id == b.id for a, b in calls)
        and same_value(body, earlier_body, as_json=True)
    )


def is_unchanged(value: Any, copy: Any) -> bool:
    """Whether a value is as it was when its dicts and lists were copied, as far as that is quickly seen.

    Its text must be equal. Other values must be identical, and of a type that cannot change or that `Message`
    holds as it is: images and arrays.
    """
    kind = type(value)
    if value is copy:
        return kind in _SCALARS or is_pixels(value)
    if kind is not type(copy):
        return False
    if kind is dict:
        if len(value) != len(copy):
            return False
        for (name, entry), (old, before) in zip(value.items(), copy.items(), strict=True):
            # Texts that are the same object need no call. They are all that most messages hold.
            if name != old or (
                (entry is not before or type(entry) is not str) and not is_unchanged(entry, before)
            ):
                return False
        return True
    if kind is list:
        return len(value) == len(copy) and all(map(is_unchanged, value, copy))
    return kind is str and bool(value == copy)


def shared_messages(known: Sequence[Any], messages: Sequence[Any]) -> int:
    """Return how many leading messages of two conversations are equal."""
    for index, (first, second) in enumerate(zip(known, messages, strict=False)):
        if first is second:
            continue
        try:
            same = _ENCODE(first) == _ENCODE(second)  # plain data, compared at C speed with its types
        except (TypeError, ValueError, OverflowError, RecursionError):
            same = False
        if not same and not same_value(first, second):
            return index
    return min(len(known), len(messages))


def same_value(first: Any, second: Any, *, as_json: bool = False) -> bool:
    """Whether two values have equal content: one object, equal identities, or equal values and arrays.

    Types must be equal too. `as_json` compares numbers, lists, mappings and texts as JSON does: 1 equals 1.0,
    and true equals neither.
    """
    if first is second:
        return True
    kind = _json_type(first) if as_json else type(first)
    if kind is not (_json_type(second) if as_json else type(second)):
        return False
    if kind is str or kind is float:
        return bool(first == second)
    identity = getattr(first, "identity", None)
    if isinstance(identity, str):
        return bool(identity == second.identity)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(
            same_value(first[key], second[key], as_json=as_json) for key in first
        )
    if isinstance(first, msgspec.Struct):
        first, second = msgspec.structs.astuple(first), msgspec.structs.astuple(second)
    if isinstance(first, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(same_value(*pair, as_json=as_json) for pair in pairs)
    if hasattr(first, "dtype") and hasattr(first, "shape"):
        if first.dtype != second.dtype or tuple(first.shape) != tuple(second.shape):
            return False
        if isinstance(first, np.ndarray):
            return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
        return bool(first.equal(second))  # a torch tensor
    return bool(first == second)


def _json_type(value: Any) -> type:
    """Return one type for each kind of JSON value, and the own type of bool and other values."""
    if isinstance(value, bool):
        return bool
    return next((kind for base, kind in _JSON_TYPES if isinstance(value, base)), type(value))


def _meaning(message: Message) -> tuple[str, tuple[str | None, ...], list[Any]]:
    """Return the reasoning of a message, its role and names, and the rest that is not empty, without ids."""
    content = message.content
    parts = content if isinstance(content, tuple) else (TextPart(content or ""),)
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
    role = (message.role, message.name or None, message.tool_call_id or None)
    return (
        (message.reasoning_content or "") + "".join(thoughts),
        role,
        [
            [(call.name, call.arguments) for call in message.tool_calls],
            [part for part in parts if not isinstance(part, ThinkingPart) and part != TextPart("")],
            {key: value for key, value in message.extra.items() if value not in (None, "", [], {})},
        ],
    )


def _plain(value: Any, depth: int, where: str, others: list[Any]) -> Any:
    """Return a value as dicts, lists and scalars. Values that msgpack does not keep are added to `others`."""
    if depth > _MAX_DEPTH:
        raise TrajectoryError("a message is nested too deeply, or holds itself", where=where)
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        value = fields if tag is None else {str(value.__struct_config__.tag_field): tag, **fields}
    if isinstance(value, Mapping):
        others += [key for key in value if type(key) is not str]
        return {key: _plain(entry, depth + 1, where, others) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1, where, others) for entry in value]
    if type(value) not in _SCALARS:
        others.append(value)
    return value


def _is_exact(value: Any) -> bool:
    """Whether msgpack keeps a plain value as it is."""
    if isinstance(value, dict):
        return all(type(key) is str and _is_exact(entry) for key, entry in value.items())
    return type(value) in _SCALARS or (isinstance(value, list) and all(map(_is_exact, value)))


def _without_source(part: Any) -> Any:
    """Return a content part without its image or video. Other parts are returned as they are."""
    if not isinstance(part, dict):
        return {"type": "image"} if _is_pixels(part) else part
    kind = part.get("type")
    media = kind in MEDIA_TYPES if kind is not None else not MEDIA_TYPES.isdisjoint(part)
    return {key: _blanked(value, key) for key, value in part.items()} if media else part


def _blanked(value: Any, key: str = "") -> Any:
    """Return a source, or a value of a media part, with None in place of pixels."""
    if isinstance(value, dict):
        return {name: _blanked(entry, name) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_blanked(entry) for entry in value]
        pairs = zip(entries, value, strict=True)
        return None if any(entry is None and old is not None for entry, old in pairs) else entries
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_data = isinstance(value, str) and (key == "data" or value[:5].lower() == "data:")
    return None if is_data or _is_pixels(value) else value


def _is_pixels(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview | np.ndarray):
        return True
    return any(base.__module__.partition(".")[0] in ("PIL", "torch") for base in type(value).__mro__)
