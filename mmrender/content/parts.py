"""Content: a string, or parts in any of the OpenAI, Hugging Face, Anthropic, MCP and vLLM spellings.

The shape is kept, a string stays a string and a list becomes a tuple of parts, because chat templates
treat them differently.

Sources of media are reduced to what `ImagePart.source` holds. Nothing is opened or decoded here; base64 stays
text, as a `data:` URL, until the media layer reads it under its limits. A path given as text stays text: only
a caller who writes `pathlib.Path` vouches for it.
"""

import math
import numbers
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from mmrender.content.values import (
    as_fields,
    as_list,
    as_sequence,
    as_text,
    describe,
    is_record,
    keys_of,
    member,
    one_of,
)
from mmrender.errors import MessageError
from mmrender.messages import (
    MODALITIES,
    ImagePart,
    MediaPart,
    Message,
    Part,
    TextPart,
    ThinkingPart,
    VideoPart,
)

_KIND_OF_TYPE = {
    **dict.fromkeys(("text", "input_text", "output_text", "refusal"), "text"),
    **dict.fromkeys(("image", "image_url", "input_image", "image_pil"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text"), "thinking"),
}
PART_TYPES = tuple(_KIND_OF_TYPE)
"""Every `type` that a part may name."""
MEDIA_TYPES = frozenset(name for name, kind in _KIND_OF_TYPE.items() if kind in MODALITIES)
"""Those of images and videos; most are keys of such parts too."""

_KEYS = {
    "text": ("text", "refusal"),
    "image": ("image", "image_url", "image_pil", "source"),
    "video": ("video", "video_url", "source"),
    "thinking": ("thinking", "reasoning", "text"),
}
"""Keys under which a part of each kind holds its text or source."""
_TIMING = {
    "fps": ("fps is not a frame rate", "a number above 0", False, False),
    "times": ("these are not times", "the seconds of each frame, 0 or more", False, True),
    "frames_indices": ("these number no frames", "the number of each frame, 0 or more", True, True),
    "total_num_frames": ("this is no number of frames", "a whole number above 0", True, False),
    "duration": ("this is no duration", "seconds, above 0", False, False),
}
"""Fields of a `VideoPart`: what is wrong, what is expected, whether whole and whether a list."""
_SETTINGS: dict[str, str] = dict.fromkeys(MODALITIES, "; a processor has the same settings for all parts")
_ARTICLE = {"text": "a", "image": "an", "video": "a", "thinking": "a"}
_CONTENT_KEYS = tuple(key for keys in _KEYS.values() for key in keys if key in _KIND_OF_TYPE)
"""Keys that settle the kind of a part whose `type` is missing."""
_RECORD_KEYS = ("bytes", "path", "url", "base64", "data")
"""Keys of the source, in a dict that describes one."""
_MEDIA_TYPE_KEYS = ("media_type", "mimeType", "mime_type")

IGNORED_KEYS = frozenset(
    {"annotations", "cache_control", "detail", "id", "index", "logprobs", "signature", "status", "uuid"}
)
"""Keys of a part that concern an API, not the prompt, and are ignored."""

_REMEDIES = {
    **dict.fromkeys(
        ("tool_use", "tool_call", "function_call"), "Pass tool calls as tool_calls of an assistant message"
    ),
    **dict.fromkeys(("document", "file"), "Render its pages as images, or pass its text"),
    "tool_result": "Pass a tool's result as a message of role tool",
    "redacted_thinking": "Leave redacted reasoning out: there is no text to render",
}
_SOURCES = {
    modality: f"{first}, numpy array, bytes, pathlib.Path, str (URL or path) or dict of one of "
    + ", ".join(f"'{key}'" for key in _RECORD_KEYS)
    for modality, first in (("image", "a PIL image"), ("video", "a list of frames"))
}


def is_pixels(value: object) -> bool:
    """Tell whether a value is a PIL image or a numpy array, without importing either."""
    # A library that nobody imported cannot have made the value.
    pil, numpy = sys.modules.get("PIL.Image"), sys.modules.get("numpy")
    return (pil is not None and isinstance(value, pil.Image)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def normalize_content(value: Any, where: str) -> str | tuple[Part, ...] | None:
    """Normalise the content of one message: text, None, parts in a sequence, or a single part."""
    if value is None:
        return None
    if isinstance(value, str):
        return as_text(value, where)
    items = value if type(value) is list else as_sequence(value)
    if items is None:
        if not is_pixels(value) and not is_record(value):
            raise MessageError(
                "content cannot be read",
                where=where,
                expected="a str, None or a list of parts",
                got=describe(value),
            )
        return (normalize_part(value, where),)
    # The shapes that most parts have are read here, without building a path for each.
    parts: list[Part] = []
    for index, item in enumerate(items):
        if type(item) is dict and len(item) <= 2:
            text, source = item.get("text"), item.get("image")
            if item.get("type") == "text" and type(text) is str and text.isascii():
                parts.append(TextPart(text))
                continue
            if item.get("type") == "image" and (len(item) == 1 or is_pixels(source)):
                parts.append(ImagePart(source))
                continue
        parts.append(normalize_part(item, f"{where}[{index}]"))
    return tuple(parts)


def normalize_part(value: Any, where: str) -> Part:
    """Normalise one part of a content list; canonical parts are returned as they are."""
    if isinstance(value, (TextPart, ImagePart, VideoPart, ThinkingPart)):
        return value
    if isinstance(value, str):
        return TextPart(as_text(value, where))
    if is_pixels(value):
        return ImagePart(value)
    fields = as_fields(value, where, "a part: a dict with a type, a str, a PIL image or a numpy array")
    given_type = fields.pop("type", None)
    kind = _kind_of(given_type, fields, where)
    part: Part
    if kind == "text":
        part = TextPart(_take_text(kind, fields, where))
    elif kind == "thinking":
        part = ThinkingPart(_take_text(kind, fields, where))
    elif kind == "image":
        part = ImagePart(_take_source("image", given_type, fields, where))
    else:
        timing = _take_timing(fields, where)
        part = VideoPart(_take_source("video", given_type, fields, where), **timing)
    for key, left in fields.items():
        if key in _CONTENT_KEYS or key in _RECORD_KEYS:
            problem = f"the part is {kind}, yet it also holds {describe(key)}"
            raise MessageError(problem, where=where, expected="a part of one kind")
        if key not in IGNORED_KEYS:
            raise MessageError(
                "unknown key in a part",
                where=member(where, key),
                expected=f"the keys of {_ARTICLE[kind]} {kind} part",
                got=describe(left),
                remedy="Remove the key, or set it to None" + _SETTINGS.get(kind, ""),
            )
    return part


def _kind_of(given_type: Any, fields: dict[str, Any], where: str) -> str:
    if given_type is None:
        kinds = {_KIND_OF_TYPE[key] for key in _CONTENT_KEYS if key in fields}
        if len(kinds) == 1:
            return kinds.pop()
        raise MessageError(
            "the part names no type, and its keys do not settle it",
            where=where,
            expected="a 'type' key",
            got=keys_of(fields),
            remedy="To pass a tool's JSON result as text, use json.dumps",
        )
    name = given_type if isinstance(given_type, str) else ""
    if name not in _KIND_OF_TYPE:
        raise MessageError(
            "unknown part type",
            where=f"{where}.type",
            expected=one_of(PART_TYPES),
            got=describe(given_type),
            remedy=_REMEDIES.get(name),
        )
    return _KIND_OF_TYPE[name]


def _take_text(kind: str, fields: dict[str, Any], where: str) -> str:
    given = [key for key in _KEYS[kind] if key in fields]
    if len(given) != 1:
        raise MessageError(
            "the part holds two texts" if given else "the part holds no text",
            where=where,
            expected="one key of " + one_of([f"'{key}'" for key in _KEYS[kind]]),
            got=keys_of(fields),
        )
    return as_text(fields.pop(given[0]), f"{where}.{given[0]}")


def _take_timing(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Take the times of a video's frames, also from the metadata that Transformers and qwen-vl-utils give."""
    given = {name: (fields.pop(name), member(where, name)) for name in _TIMING if name in fields}
    for key in ("video_metadata", "metadata"):
        path = member(where, key)
        for name, value in as_fields(fields.pop(key, None) or {}, path, "a dict").items():
            if name in _TIMING:
                given.setdefault(name, (value, member(path, name)))
            elif name not in ("width", "height", "video_backend", "do_sample_frames"):
                raise MessageError(
                    "unknown key in the metadata of a video",
                    where=member(path, name),
                    expected=one_of(list(_TIMING)),
                    got=describe(value),
                )
    timing: dict[str, Any] = {}
    for name, (value, path) in given.items():
        if value is None:
            continue
        problem, expected, is_whole, is_list = _TIMING[name]
        listed: Sequence[Any] = [value]
        if is_list:
            listed = as_sequence(value.tolist() if hasattr(value, "tolist") else value) or ()
        # `numbers.Real` takes numpy's numbers too.
        numbers_ = [
            float(one)
            for one in listed
            if not isinstance(one, bool) and isinstance(one, numbers.Real) and 0 <= float(one) < math.inf
        ]
        fits = bool(listed) and len(numbers_) == len(listed) and (is_list or numbers_[0] > 0)
        if not fits or (is_whole and any(one % 1 for one in numbers_)):
            raise MessageError(problem, where=path, expected=expected, got=describe(value))
        read = [int(one) for one in numbers_] if is_whole else numbers_
        timing[name] = tuple(read) if is_list else read[0]
    return timing


def _take_source(modality: str, given_type: str | None, fields: dict[str, Any], where: str) -> Any:
    named = [key for key in _KEYS[modality] if key in fields]
    record = [key for key in _RECORD_KEYS if key in fields]
    if len(named) + bool(record) > 1:
        problem = f"the part gives more than one {modality}"
        raise MessageError(problem, where=where, expected="one source", got=keys_of(fields))
    if named:
        return media_source(fields.pop(named[0]), f"{where}.{named[0]}", modality)
    if record:
        keys = [key for key in (*_RECORD_KEYS, *_MEDIA_TYPE_KEYS) if key in fields]
        return _record_source({key: fields.pop(key) for key in keys}, where, modality)
    if given_type != modality:
        # Hugging Face supplies the images of bare parts beside the messages; no other spelling may be bare.
        raise MessageError(
            f"the part has no {modality}",
            where=where,
            expected=f"a key '{modality}_url'",
            got=keys_of(fields),
            remedy=f'Write {{"type": "{modality}"}} for one that is supplied beside the messages',
        )
    return None


def media_source(value: Any, where: str, modality: str) -> Any:
    """Reduce one description of an image or video to a source; a list of frames becomes a tuple.

    Objects that are not containers go to the media layer as they are.
    """
    if is_pixels(value):
        return value
    if isinstance(value, str | bytes | bytearray | memoryview) and len(value):
        return as_text(value, where) if isinstance(value, str) else bytes(value)
    if is_record(value):
        return _record_source(as_fields(value, where, _SOURCES[modality]), where, modality)
    frames = as_sequence(value) if modality == "video" else None
    if frames:
        return tuple(media_source(frame, f"{where}[{index}]", "image") for index, frame in enumerate(frames))
    refused = (bool, int, float, str, bytes, bytearray, memoryview, list, tuple, set, frozenset)
    if value is None or isinstance(value, refused):
        is_empty = isinstance(value, str | bytes | bytearray | memoryview)
        raise MessageError(
            f"the {modality} is empty" if is_empty else f"is not {_ARTICLE[modality]} {modality}",
            where=where,
            expected=_SOURCES[modality],
            got=describe(value),
        )
    return value


def _record_source(fields: dict[str, Any], where: str, modality: str) -> Any:
    """Reduce a dict such as `{"url": …}`, `{"bytes": …, "path": …}` or Anthropic's `source` to a source.

    `bytes` wins over `path` where both are given: Hugging Face datasets keep a file's name beside its
    content. Any other two sources at once are an error.
    """
    media_types = [fields.pop(key) for key in _MEDIA_TYPE_KEYS if key in fields]
    kind = fields.pop("type", None)
    given = [key for key in _RECORD_KEYS if key in fields]
    unknown = fields.keys() - {*_RECORD_KEYS, "detail", "uuid"}
    if given == ["bytes", "path"]:
        given = ["bytes"]
    if unknown or len(given) != 1 or kind not in (None, "base64", "url"):
        raise MessageError(
            f"does not say which {modality} it is",
            where=where,
            expected="exactly one of " + ", ".join(f"'{key}'" for key in _RECORD_KEYS),
            got=keys_of(fields) + ("" if kind is None else f" and type {describe(kind)}"),
        )
    key, value, where = given[0], fields[given[0]], f"{where}.{given[0]}"
    if key not in ("base64", "data"):
        return media_source(value, where, modality)
    text = value.decode("latin-1") if isinstance(value, bytes | bytearray) else as_text(value, where)
    if not text:
        raise MessageError("the base64 text is empty", where=where)
    media_type = as_text(media_types[0], where) if media_types else "application/octet-stream"
    return text if text.startswith("data:") else f"data:{media_type};base64,{text}"


def attach_media(
    messages: Sequence[Message],
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    *,
    where: str = "messages",
) -> tuple[Message, ...]:
    """Fill the parts that have no source, in order; parts that have one are skipped.

    Args:
        messages: Canonical messages.
        images: One source per `ImagePart(None)`, in any form that a part may give one; None leaves them.
        videos: The same for `VideoPart(None)`.
        where: What paths of parts in errors start with.

    Raises:
        MessageError: There are fewer or more of them than parts that wait for one.
    """
    sources: dict[type, Iterator[Any]] = {}
    for kind, modality, given in ((ImagePart, "image", images), (VideoPart, "video", videos)):
        if given is not None:
            slots = [
                f"{where}[{index}].content[{position}]"
                for index, message in enumerate(messages)
                for position, part in message.media()
                if type(part) is kind and part.source is None
            ]
            sources[kind] = _sources_for(modality, given, slots)

    def filled(part: Part) -> Part:
        waits = isinstance(part, MediaPart) and part.source is None and type(part) in sources
        return msgspec.structs.replace(part, source=next(sources[type(part)])) if waits else part

    return tuple([
        msgspec.structs.replace(message, content=tuple([filled(part) for part in message.content]))
        if isinstance(message.content, tuple)
        else message
        for message in messages
    ])  # fmt: skip


def _sources_for(modality: str, given: Any, slots: Sequence[str]) -> Iterator[Any]:
    """Read the sources that are given beside messages, one for each of the paths in `slots`."""
    name = f"{modality}s"
    items = as_list(given, name, f"{name} come in a list")
    if len(items) != len(slots):
        few = len(items) < len(slots)
        raise MessageError(
            f"no {modality} is left for this part" if few else f"no part waits for this {modality}",
            where=slots[len(items)] if few else f"{name}[{len(slots)}]",
            expected=f"{len(slots)} {modality if len(slots) == 1 else name}",
            got=str(len(items)),
            remedy=f'Each {{"type": "{modality}"}} part without a source of its own takes one, in order',
        )
    return iter([media_source(item, f"{name}[{index}]", modality) for index, item in enumerate(items)])
