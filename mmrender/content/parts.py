"""Read content: a string, or parts in the spellings of OpenAI, Hugging Face, Anthropic, MCP and vLLM.

A string stays a string and a list becomes a tuple of parts, because chat templates treat them differently.

Sources of media are reduced to the forms of `ImagePart.source`, and not opened or decoded. Base64 stays text,
as a `data:` URL, until the media layer reads it under its limits. A path in a `str` stays text, since only a
`pathlib.Path` is a file that the caller trusts.
"""

import math
import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
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
)
from mmrender.errors import MessageError, one_of
from mmrender.messages import (
    MODALITIES,
    AudioPart,
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
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text"), "thinking"),
}
PART_TYPES = tuple(_KIND_OF_TYPE)
"""Every `type` that a part may name."""
MEDIA_TYPES = frozenset(name for name, kind in _KIND_OF_TYPE.items() if kind in MODALITIES)
"""Types of images, videos and audio."""

MEDIA_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
"""Argument of a call that supplies parts without a source, by modality."""
_KEYS = {
    "text": ("text", "refusal"),
    "image": ("image", "image_url", "image_pil", "source"),
    "video": ("video", "video_url", "source"),
    "audio": ("audio", "audio_url", "input_audio", "source"),
    "thinking": ("thinking", "reasoning", "text"),
}
"""Keys under which a part of each kind holds its text or source."""
_TIMING = {
    "fps": ("fps is not a frame rate", "a number above 0", False, False),
    "times": ("not times", "the seconds of each frame, 0 or more", False, True),
    "frames_indices": ("not frame indices", "the index of each frame, 0 or more", True, True),
    "total_num_frames": ("not a frame count", "a whole number above 0", True, False),
    "duration": ("not a duration", "seconds, above 0", False, False),
}
"""Fields of a `VideoPart`: problem and expectation of an error, whether they are whole, and whether lists."""
_SETTINGS: dict[str, str] = dict.fromkeys(MODALITIES, ". A processor has the same settings for all parts")
_NAMES = {
    "text": "a text",
    "image": "an image",
    "video": "a video",
    "audio": "an audio",
    "thinking": "a thinking",
}
"""Kinds of parts, with their article."""
_CLIP = {"image": "", "video": "", "audio": " clip"}
_CONTENT_KEYS = tuple(key for keys in _KEYS.values() for key in keys if key in _KIND_OF_TYPE)
"""Keys that settle the kind of a part whose `type` is missing."""
_RECORD_KEYS = ("bytes", "path", "url", "base64", "data")
"""Keys of the source, in a dict that describes one."""
_MEDIA_TYPE_KEYS = ("media_type", "mimeType", "mime_type", "format")
"""Keys of the type of a source, by which it is not read."""

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
    "redacted_thinking": "Leave redacted reasoning out, since it has no text",
}
_SOURCES = {
    modality: f"{first}, numpy array, bytes, pathlib.Path, str (URL or path) or dict of one of "
    + ", ".join(f"'{key}'" for key in _RECORD_KEYS)
    for modality, first in (("image", "a PIL image"), ("video", "a list of frames"), ("audio", "a tensor"))
}


def is_pixels(value: object) -> bool:
    """Whether a value is a PIL image or a numpy array; imports neither library."""
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
    """Normalise one part of a content list. Canonical parts stay as they are."""
    if isinstance(value, (TextPart, ImagePart, VideoPart, AudioPart, ThinkingPart)):
        return value
    if isinstance(value, str):
        return TextPart(as_text(value, where))
    if is_pixels(value):
        return ImagePart(value)
    fields = as_fields(value, where, "a part: a dict with a type, a str, a PIL image or a numpy array")
    name = fields.pop("type", None)
    kind = _kind_of(name, fields, where)
    part: Part
    if kind == "text":
        part = TextPart(_take_text(kind, fields, where))
    elif kind == "thinking":
        part = ThinkingPart(_take_text(kind, fields, where))
    elif kind == "image":
        part = ImagePart(_take_source("image", name, fields, where))
    elif kind == "video":
        timing, sound = _take_timing(fields, where), None
        if fields.get("audio") is not None:
            keys = ("audio", "sampling_rate")
            sound = _take_audio("audio", {key: fields.pop(key) for key in keys if key in fields}, where)
        part = VideoPart(_take_source("video", name, fields, where), **timing, sound=sound)
    else:
        part = _take_audio(name, fields, where)
    for key, rest in fields.items():
        if key in _CONTENT_KEYS or key in _RECORD_KEYS:
            problem = f"the part is {kind}, yet it also holds {describe(key)}"
            raise MessageError(problem, where=where, expected="a part of one kind")
        if key not in IGNORED_KEYS:
            raise MessageError(
                "unknown key in a part",
                where=member(where, key),
                expected=f"the keys of {_NAMES[kind]} part",
                got=describe(rest),
                remedy="Remove the key, or set it to None" + _SETTINGS.get(kind, ""),
            )
    return part


def _kind_of(name: Any, fields: dict[str, Any], where: str) -> str:
    """Kind of a part with a type of this name, or with these keys if it has no type."""
    if name is None:
        kinds = {_KIND_OF_TYPE[key] for key in _CONTENT_KEYS if key in fields}
        if len(kinds) == 1:
            return kinds.pop()
        raise MessageError(
            "the part has no type, and its keys are ambiguous",
            where=where,
            expected="a 'type' key",
            got=keys_of(fields),
            remedy="To pass a tool's JSON result as text, use json.dumps",
        )
    kind = _KIND_OF_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        raise MessageError(
            "unknown part type",
            where=f"{where}.type",
            expected=one_of(PART_TYPES),
            got=describe(name),
            remedy=_REMEDIES.get(name) if isinstance(name, str) else None,
        )
    return kind


def _take_text(kind: str, fields: dict[str, Any], where: str) -> str:
    keys = [key for key in _KEYS[kind] if key in fields]
    if len(keys) != 1:
        raise MessageError(
            "the part has two texts" if keys else "the part lacks a text",
            where=where,
            expected="one key of " + one_of([f"'{key}'" for key in _KEYS[kind]]),
            got=keys_of(fields),
        )
    return as_text(fields.pop(keys[0]), f"{where}.{keys[0]}")


def _take_timing(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Take the times of a video's frames, also from the metadata of Transformers and qwen-vl-utils."""
    entries = {name: (fields.pop(name), member(where, name)) for name in _TIMING if name in fields}
    for key in ("video_metadata", "metadata"):
        path = member(where, key)
        for name, value in as_fields(fields.pop(key, None) or {}, path, "a dict").items():
            if name in _TIMING:
                entries.setdefault(name, (value, member(path, name)))
            elif name not in ("width", "height", "video_backend", "do_sample_frames"):
                raise MessageError(
                    "unknown key in the metadata of a video",
                    where=member(path, name),
                    expected=one_of(list(_TIMING)),
                    got=describe(value),
                )
    timing: dict[str, Any] = {}
    for name, (value, path) in entries.items():
        if value is None:
            continue
        problem, expected, is_whole, is_list = _TIMING[name]
        listed: Sequence[Any] = [value]
        if is_list:
            listed = as_sequence(value.tolist() if hasattr(value, "tolist") else value) or ()
        figures = [
            float(one)
            for one in listed  # `numbers.Real` includes numpy's numbers
            if not isinstance(one, bool) and isinstance(one, numbers.Real) and 0 <= float(one) < math.inf
        ]
        fits = bool(listed) and len(figures) == len(listed) and (is_list or figures[0] > 0)
        if not fits or (is_whole and any(one % 1 for one in figures)):
            raise MessageError(problem, where=path, expected=expected, got=describe(value))
        exact = [int(one) for one in figures] if is_whole else figures
        timing[name] = tuple(exact) if is_list else exact[0]
    return timing


def _take_audio(name: str | None, fields: dict[str, Any], where: str) -> AudioPart:
    """Take an audio clip and its rate, which may lie next to an array or in the part."""
    rate, path = fields.pop("sampling_rate", None), member(where, "sampling_rate")
    key = next((key for key in ("audio", "source") if key in fields), None)
    if key is not None:
        fields[key], rate, path = _split_rate(fields[key], rate, path, f"{where}.{key}")
    source = _take_source("audio", name, fields, where)
    return AudioPart(source, _sampling_rate(rate, path))


def _split_rate(value: Any, rate: Any, rate_path: str, where: str) -> tuple[Any, Any, str]:
    """Return samples, their rate and the path of the rate, also of samples and rate in one value.

    Datasets of Hugging Face hold `{"array", "sampling_rate", "path"}`, vLLM and torchaudio `(array, rate)`.
    """
    if isinstance(value, Mapping) and "array" in value and not {*value} - {"array", "path", "sampling_rate"}:
        return value["array"], value.get("sampling_rate", rate), f"{where}.sampling_rate"
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1], f"{where}[1]"
    return value, rate, rate_path


def _sampling_rate(rate: Any, where: str) -> int | None:
    if rate is None:
        return None
    is_flag = isinstance(rate, bool)
    number = float(rate) if isinstance(rate, numbers.Real) and not is_flag else 0.0
    if not 0 < number < math.inf or number % 1:
        expected = "samples per second, a whole number above 0"
        raise MessageError("not a sampling rate", where=where, expected=expected, got=describe(rate))
    return int(number)


def _take_source(modality: str, name: str | None, fields: dict[str, Any], where: str) -> Any:
    """Take the source of a part whose type has this name; None if an argument of the call supplies it."""
    keys = [key for key in _KEYS[modality] if key in fields]
    record = [key for key in _RECORD_KEYS if key in fields]
    if len(keys) + bool(record) > 1:
        problem = f"the part has more than one {modality}"
        raise MessageError(problem, where=where, expected="one source", got=keys_of(fields))
    if keys:
        return media_source(fields.pop(keys[0]), f"{where}.{keys[0]}", modality)
    if record:
        record += [key for key in _MEDIA_TYPE_KEYS if key in fields]
        return _record_source({key: fields.pop(key) for key in record}, where, modality)
    if name != modality:
        # Only Hugging Face's spelling lacks a source, which the call supplies.
        raise MessageError(
            f"the part lacks its {modality}",
            where=where,
            expected=f"a key '{modality}_url'",
            got=keys_of(fields),
            remedy=f'Write {{"type": "{modality}"}} if {MEDIA_ARGUMENTS[modality]}= of the call supplies it',
        )
    return None


def media_source(value: Any, where: str, modality: str) -> Any:
    """Reduce one description of a medium to a source; a list of frames becomes a tuple.

    Other objects stay as they are for the media layer.
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
            f"the {modality} is empty" if is_empty else f"is not {_NAMES[modality]}{_CLIP[modality]}",
            where=where,
            expected=_SOURCES[modality],
            got=describe(value),
        )
    return value


def _record_source(fields: dict[str, Any], where: str, modality: str) -> Any:
    """Reduce a dict such as `{"url": …}`, `{"bytes": …, "path": …}` or Anthropic's `source` to a source.

    `bytes` wins over `path`, since Hugging Face datasets keep a file's name next to its content. Any other
    two sources are an error.
    """
    media_types = [fields.pop(key) for key in _MEDIA_TYPE_KEYS if key in fields]
    kind = fields.pop("type", None)
    keys = [key for key in _RECORD_KEYS if key in fields]
    if keys == ["bytes", "path"]:
        keys = ["bytes"]
    unknown = fields.keys() - {*_RECORD_KEYS, "detail", "uuid"}
    if unknown or len(keys) != 1 or kind not in (None, "base64", "url"):
        raise MessageError(
            f"needs exactly one {modality} source",
            where=where,
            expected="exactly one of " + ", ".join(f"'{key}'" for key in _RECORD_KEYS),
            got=keys_of(fields) + ("" if kind is None else f" and type {describe(kind)}"),
        )
    key, value, where = keys[0], fields[keys[0]], f"{where}.{keys[0]}"
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
    audio: Sequence[Any] | None = None,
    *,
    where: str = "messages",
) -> tuple[Message, ...]:
    """Fill the parts without a source, in order.

    Args:
        messages: Canonical messages.
        images: One source for each `ImagePart(None)`, in any form; None leaves the parts empty.
        videos: The same for `VideoPart(None)`.
        audio: The same for `AudioPart(None)`. An array comes with its rate, as `(array, rate)`.
        where: Start of the paths in errors.

    Raises:
        MessageError: There are fewer or more sources than parts without one.
    """
    parts: dict[type, Iterator[MediaPart]] = {}
    for kind, values in ((ImagePart, images), (VideoPart, videos), (AudioPart, audio)):
        if values is not None:
            slots = [
                f"{where}[{index}].content[{position}]"
                for index, message in enumerate(messages)
                for position, part in message.media()
                if type(part) is kind and part.source is None
            ]
            parts[kind] = _parts_for(kind, values, slots)

    def filled(part: Part) -> Part:
        if not isinstance(part, MediaPart) or part.source is not None or type(part) not in parts:
            return part
        new = next(parts[type(part)])
        rate = getattr(new, "sampling_rate", None)
        return msgspec.structs.replace(
            part, source=new.source, **({} if rate is None else {"sampling_rate": rate})
        )

    return tuple([
        msgspec.structs.replace(message, content=tuple([filled(part) for part in message.content]))
        if isinstance(message.content, tuple)
        else message
        for message in messages
    ])  # fmt: skip


def _parts_for(
    kind: type[ImagePart | VideoPart | AudioPart], values: Any, slots: Sequence[str]
) -> Iterator[MediaPart]:
    """Read the sources for the parts at some paths."""
    modality, name = kind.modality, MEDIA_ARGUMENTS[kind.modality]
    items = as_list(values, name, f"{name} come in a list")
    if len(items) != len(slots):
        few = len(items) < len(slots)
        raise MessageError(
            f"fewer {name} than {modality} parts without a source"
            if few
            else f"more {name} than {modality} parts without a source",
            where=slots[len(items)] if few else f"{name}[{len(slots)}]",
            expected=f"{len(slots)} {modality if len(slots) == 1 else name}",
            got=str(len(items)),
            remedy=f'Each {{"type": "{modality}"}} part without a source takes one, in order',
        )
    parts: list[MediaPart] = []
    for index, item in enumerate(items):
        where = f"{name}[{index}]"
        if modality == "audio":
            source, rate, path = _split_rate(item, None, where, where)
            parts.append(AudioPart(media_source(source, where, modality), _sampling_rate(rate, path)))
        else:
            parts.append(kind(media_source(item, where, modality)))
    return iter(parts)
