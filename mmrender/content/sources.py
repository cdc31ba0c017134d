"""What stands for an image or a video in loose input, reduced to what `ImagePart.source` holds.

Nothing is opened or decoded here; base64 stays text, as a `data:` URL, until the media layer reads it
under its limits. A path given as text stays text: only a caller who writes `pathlib.Path` vouches for it.
"""

from collections.abc import Mapping
from typing import Any

from mmrender.content.coerce import as_fields, as_sequence, as_text, describe, is_pixels, is_record, keys_of
from mmrender.errors import MessageError
from mmrender.messages import Modality

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
