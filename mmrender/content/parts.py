"""Content: a string, or parts in any of the OpenAI, Hugging Face, Anthropic, MCP and vLLM spellings.

The shape is kept, a string stays a string and a list becomes a tuple of parts, because chat templates
treat them differently.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mmrender.content.values import (
    as_fields,
    as_sequence,
    as_text,
    describe,
    is_pixels,
    is_record,
    keys_of,
    member,
    one_of,
)
from mmrender.errors import MessageError
from mmrender.messages import ImagePart, Message, Modality, Part, TextPart, ThinkingPart, VideoPart

_KIND_OF_TYPE = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "text",
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "thinking": "thinking",
    "reasoning": "thinking",
    "reasoning_text": "thinking",
}
PART_TYPES = tuple(_KIND_OF_TYPE)
"""Every `type` that a part may name."""

# Keys that settle what kind a part is, when `type` does not.
_KIND_OF_KEY = {
    "text": "text",
    "refusal": "text",
    "image": "image",
    "image_url": "image",
    "image_pil": "image",
    "video": "video",
    "video_url": "video",
    "thinking": "thinking",
    "reasoning": "thinking",
}

_SOURCE_KEYS: dict[Modality, tuple[str, ...]] = {
    "image": ("image", "image_url", "image_pil", "source"),
    "video": ("video", "video_url", "source"),
}

# Hugging Face supplies the images of such parts beside the messages.
_MAY_BE_BARE = ("image", "video")

IGNORED_KEYS = frozenset(
    {"annotations", "cache_control", "detail", "id", "index", "logprobs", "signature", "status", "uuid"}
)
"""Keys of a part that concern an API, not the prompt, and are passed over."""

# Qwen's, InternVL's and MiniCPM's tools take these for a single image; processors on the Hub do not.
_OVERRIDES = frozenset(
    {
        *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "do_resize", "size"),
        *("min_frames", "max_frames", "nframes", "num_frames", "video_start", "video_end"),
        *("sample_fps", "raw_fps", "do_sample_frames", "max_dynamic_patch", "max_slice_nums"),
    }
)

_REMEDIES = {
    "tool_use": "Pass tool calls as tool_calls of an assistant message",
    "tool_call": "Pass tool calls as tool_calls of an assistant message",
    "function_call": "Pass tool calls as tool_calls of an assistant message",
    "tool_result": "Pass a tool's result as a message of role tool",
    "redacted_thinking": "Leave redacted reasoning out: there is no text to render",
    "document": "Render its pages as images, or pass its text",
    "file": "Render its pages as images, or pass its text",
}


def normalize_content(value: Any, where: str) -> str | tuple[Part, ...] | None:
    """Normalise the content of one message.

    Args:
        value: A `str`, None, a sequence of parts (bare strings, PIL images and numpy arrays may stand among
            them), or a single part, which counts as a list of one.
        where: Path of the content, such as `messages[2].content`.

    Raises:
        MessageError: At the first part that cannot be read.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return as_text(value, where)
    items = value if type(value) is list else as_sequence(value)
    if items is not None:
        return _normalize_items(items, where)
    if is_pixels(value) or is_record(value):
        return (normalize_part(value, where),)
    raise MessageError(
        "content cannot be read", where=where, expected="a str, None or a list of parts", got=describe(value)
    )


def _normalize_items(items: Sequence[Any], where: str) -> tuple[Part, ...]:
    # The shapes that most parts have are read here, without building a path for each.
    parts: list[Part] = []
    for index, item in enumerate(items):
        if type(item) is dict and len(item) <= 2:
            kind = item.get("type")
            if kind == "text":
                text = item.get("text")
                if type(text) is str and text.isascii():
                    parts.append(TextPart(text))
                    continue
            elif kind == "image":
                source = item.get("image")
                if len(item) == 1 or is_pixels(source):
                    parts.append(ImagePart(source))
                    continue
        parts.append(normalize_part(item, f"{where}[{index}]"))
    return tuple(parts)


def normalize_part(value: Any, where: str) -> Part:
    """Normalise one part of a content list; canonical parts are returned as they are."""
    if type(value) is not dict:
        if isinstance(value, (TextPart, ImagePart, VideoPart, ThinkingPart)):
            return value
        if isinstance(value, str):
            return TextPart(as_text(value, where))
        if is_pixels(value):
            return ImagePart(value)
    fields = as_fields(value, where, "a part: a dict with a type, a str, a PIL image or a numpy array")
    given_type = fields.pop("type", None)
    kind = _kind_of(given_type, fields, where)
    part = _BUILDERS[kind](given_type, fields, where)
    if fields:
        _refuse_leftovers(fields, kind, where)
    return part


def _kind_of(given_type: Any, fields: dict[str, Any], where: str) -> str:
    if isinstance(given_type, str):
        kind = _KIND_OF_TYPE.get(given_type)
        if kind is not None:
            return kind
    elif given_type is None:
        kinds = {_KIND_OF_KEY[key] for key in fields if key in _KIND_OF_KEY}
        if len(kinds) == 1:
            return kinds.pop()
        raise MessageError(
            "the part names no type, and its keys do not settle it",
            where=where,
            expected="a 'type' key",
            got=keys_of(fields) if fields else "no keys",
            remedy="To pass a tool's JSON result as text, use json.dumps",
        )
    raise MessageError(
        "unknown part type",
        where=f"{where}.type",
        expected=one_of(PART_TYPES),
        got=describe(given_type),
        remedy=_REMEDIES.get(given_type) if isinstance(given_type, str) else None,
    )


def _take_text(keys: tuple[str, ...], fields: dict[str, Any], where: str) -> str:
    given = [key for key in keys if key in fields]
    if len(given) != 1:
        raise MessageError(
            "the part holds no text" if not given else "the part holds two texts",
            where=where,
            expected=("a key " if len(keys) == 1 else "one key of ") + one_of([f"'{key}'" for key in keys]),
            got=keys_of(fields) if fields else "no keys",
        )
    return as_text(fields.pop(given[0]), f"{where}.{given[0]}")


def _text_part(given_type: str | None, fields: dict[str, Any], where: str) -> Part:
    return TextPart(_take_text(("text", "refusal"), fields, where))


def _thinking_part(given_type: str | None, fields: dict[str, Any], where: str) -> Part:
    return ThinkingPart(_take_text(("thinking", "reasoning", "text"), fields, where))


def _take_source(modality: Modality, given_type: str | None, fields: dict[str, Any], where: str) -> Any:
    named = [key for key in _SOURCE_KEYS[modality] if key in fields]
    loose = [key for key in RECORD_KEYS if key in fields]
    if len(named) + bool(loose) > 1:
        raise MessageError(
            f"the part gives more than one {modality}",
            where=where,
            expected="one source",
            got=keys_of(fields),
        )
    if named:
        return media_source(fields.pop(named[0]), f"{where}.{named[0]}", modality)
    if loose:
        record = {key: fields.pop(key) for key in (*RECORD_KEYS, *MEDIA_TYPE_KEYS) if key in fields}
        return record_source(record, where, modality)
    if given_type not in _MAY_BE_BARE:
        raise MessageError(
            f"the part has no {modality}",
            where=where,
            expected=f"a key '{modality}_url'",
            got=keys_of(fields) if fields else "no keys",
            remedy=f'Write {{"type": "{modality}"}} for one that is supplied beside the messages',
        )
    return None


def _image_part(given_type: str | None, fields: dict[str, Any], where: str) -> Part:
    return ImagePart(_take_source("image", given_type, fields, where))


def _frame_rate(value: Any, where: str) -> float:
    # `numbers.Real` takes numpy's numbers too.
    if isinstance(value, numbers.Real) and value is not True:
        rate = float(value)
        if math.isfinite(rate) and rate > 0:
            return rate
    raise MessageError("fps is no frame rate", where=where, expected="a number above 0", got=describe(value))


def _video_part(given_type: str | None, fields: dict[str, Any], where: str) -> Part:
    fps = fields.pop("fps", None)
    if fps is not None:
        fps = _frame_rate(fps, f"{where}.fps")
    return VideoPart(_take_source("video", given_type, fields, where), fps)


_BUILDERS: dict[str, Callable[[str | None, dict[str, Any], str], Part]] = {
    "text": _text_part,
    "image": _image_part,
    "video": _video_part,
    "thinking": _thinking_part,
}


def _refuse_leftovers(fields: dict[str, Any], kind: str, where: str) -> None:
    for key, value in fields.items():
        if key in IGNORED_KEYS:
            continue
        if key in _KIND_OF_KEY or key in RECORD_KEYS:
            raise MessageError(
                f"the part is {kind}, yet it also holds {describe(key)}",
                where=where,
                expected="a part of one kind",
            )
        if key in _OVERRIDES:
            raise MessageError(
                "settings of the processor cannot be given for a single part",
                where=member(where, key),
                remedy="Set it for the whole processor, or resize the image before passing it",
            )
        raise MessageError(
            "unknown key in a part",
            where=member(where, key),
            expected=f"the keys of {'an' if kind == 'image' else 'a'} {kind} part",
            got=describe(value),
            remedy="Remove the key, or set it to None",
        )


RECORD_KEYS = ("bytes", "path", "url", "base64", "data")
"""Keys that hold a source, in a dict that describes one."""

MEDIA_TYPE_KEYS = ("media_type", "mimeType", "mime_type")

_UNUSED_KEYS = ("detail", "uuid")
_EXPECTED = {
    "image": "a PIL image, numpy array, bytes, pathlib.Path, str (URL or path) or dict of one of 'bytes', "
    "'path', 'url', 'base64', 'data'",
    "video": "a list of frames, numpy array, bytes, pathlib.Path, str (URL or path) or dict of one of "
    "'bytes', 'path', 'url', 'base64', 'data'",
}


def media_source(value: Any, where: str, modality: Modality) -> Any:
    """Reduce one description of an image or video to a source.

    Args:
        value: What the caller gave. Objects that are no container pass through for the media layer to judge.
        where: Path of the value.
        modality: `"video"` also takes a list of frames, each as an image is given; it becomes a tuple.

    Raises:
        MessageError: The value is empty or can be no image or video.
    """
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return _raw_source(value, where, modality)
    if is_pixels(value):
        return value
    if is_record(value):
        return record_source(as_fields(value, where, _EXPECTED[modality]), where, modality)
    frames = as_sequence(value) if modality == "video" else None
    if frames:
        return tuple(media_source(frame, f"{where}[{index}]", "image") for index, frame in enumerate(frames))
    if value is None or isinstance(value, bool | int | float | list | tuple | set | frozenset):
        raise MessageError(
            f"is no {modality}", where=where, expected=_EXPECTED[modality], got=describe(value)
        )
    return value


def _raw_source(value: str | bytes | bytearray | memoryview, where: str, modality: Modality) -> str | bytes:
    if len(value) == 0:
        raise MessageError(
            f"the {modality} is empty", where=where, expected=_EXPECTED[modality], got=describe(value)
        )
    if isinstance(value, str):
        return as_text(value, where)
    return value if type(value) is bytes else bytes(value)


def record_source(fields: dict[str, Any], where: str, modality: Modality) -> Any:
    """Reduce a dict such as `{"url": …}`, `{"bytes": …, "path": …}` or Anthropic's `source` to a source.

    `bytes` wins over `path` where both are given: Hugging Face datasets keep a file's name beside its
    content. Any other two sources at once are an error.
    """
    media_type = next(
        (fields.pop(key) for key in MEDIA_TYPE_KEYS if key in fields), "application/octet-stream"
    )
    kind = fields.pop("type", None)
    for key in _UNUSED_KEYS:
        fields.pop(key, None)
    given = [key for key in RECORD_KEYS if key in fields]
    unknown = [key for key in fields if key not in RECORD_KEYS]
    if given == ["bytes", "path"]:
        given = ["bytes"]
    if unknown or len(given) != 1 or (kind is not None and kind not in ("base64", "url")):
        raise _unreadable_record(fields, kind, where, modality)
    key = given[0]
    if key in ("base64", "data"):
        return _data_url(fields[key], as_text(media_type, where), f"{where}.{key}")
    return media_source(fields[key], f"{where}.{key}", modality)


def _unreadable_record(
    fields: Mapping[str, Any], kind: object, where: str, modality: Modality
) -> MessageError:
    got = keys_of(fields) if fields else "no such key"
    if kind is not None:
        got += f" and type {describe(kind)}"
    return MessageError(
        f"does not say what the {modality} is",
        where=where,
        expected="exactly one of " + ", ".join(f"'{key}'" for key in RECORD_KEYS),
        got=got,
    )


def _data_url(value: Any, media_type: str, where: str) -> Any:
    if isinstance(value, bytes | bytearray):
        value = value.decode("latin-1")
    text = as_text(value, where)
    if not text:
        raise MessageError("the base64 text is empty", where=where)
    return text if text.startswith("data:") else f"data:{media_type};base64,{text}"


def attach_media(
    messages: Sequence[Message],
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    *,
    where: str = "messages",
) -> tuple[Message, ...]:
    """Fill the parts that have no source, in order; parts that have one are passed over.

    Args:
        messages: Canonical messages.
        images: One source per `ImagePart(None)`, in any form that a part may give one; None leaves them.
        videos: The same for `VideoPart(None)`.
        where: What paths of parts in errors start with.

    Raises:
        MessageError: There are fewer or more of them than parts that wait for one.
    """
    queues: dict[type, _Queue] = {}
    if images is not None:
        queues[ImagePart] = _Queue("image", images, messages, where)
    if videos is not None:
        queues[VideoPart] = _Queue("video", videos, messages, where)
    if not any(queue.slots for queue in queues.values()):
        return tuple(messages)
    return tuple([_fill(message, queues) for message in messages])


class _Queue:
    """Sources of one modality that wait for their parts."""

    def __init__(self, modality: Modality, sources: Any, messages: Sequence[Message], where: str) -> None:
        items = as_sequence(sources)
        if items is None:
            raise MessageError(
                f"{modality}s come in a list", where=f"{modality}s", expected="a list", got=describe(sources)
            )
        self.slots = _slots(modality, messages, where)
        if len(items) != len(self.slots):
            raise _miscount(modality, len(items), self.slots)
        self._sources = iter(
            [media_source(item, f"{modality}s[{i}]", modality) for i, item in enumerate(items)]
        )

    def take(self) -> Any:
        return next(self._sources)


def _slots(modality: Modality, messages: Sequence[Message], where: str) -> list[str]:
    kind = ImagePart if modality == "image" else VideoPart
    return [
        f"{where}[{index}].content[{position}]"
        for index, message in enumerate(messages)
        for position, part in message.media()
        if type(part) is kind and part.source is None
    ]


def _miscount(modality: Modality, given: int, slots: list[str]) -> MessageError:
    few = given < len(slots)
    return MessageError(
        f"no {modality} is left for this part" if few else f"no part waits for this {modality}",
        where=slots[given] if few else f"{modality}s[{len(slots)}]",
        expected=f"{len(slots)} {modality}{'' if len(slots) == 1 else 's'}",
        got=str(given),
        remedy=f'Each {{"type": "{modality}"}} part without a source of its own takes one, in order',
    )


def _fill(message: Message, queues: dict[type, _Queue]) -> Message:
    if not isinstance(message.content, tuple):
        return message
    parts = [_take_turn(part, queues.get(type(part))) for part in message.content]
    return msgspec.structs.replace(message, content=tuple(parts))


def _take_turn(part: Part, queue: _Queue | None) -> Part:
    if queue is None or not isinstance(part, ImagePart | VideoPart) or part.source is not None:
        return part
    return msgspec.structs.replace(part, source=queue.take())
