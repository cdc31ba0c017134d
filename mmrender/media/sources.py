"""Whatever names an encoded image, to its bytes, under a `MediaPolicy`.

| source | rule |
|---|---|
| `bytes`, `bytearray`, `memoryview` | taken as they are |
| mapping with `bytes` and `path` (Hugging Face `Image` feature) | `bytes` if filled, else `path` as below |
| binary stream | read from its beginning if it can seek, and put back where it stood |
| `os.PathLike` object | read; no root needed |
| `str`, `http:` or `https:` | fetched; see `mmrender.media.fetch` |
| `str`, `data:` | strict base64, line breaks allowed; or percent-encoded |
| `str`, `file:` | percent-decoded absolute path, under a root of the policy |
| `str` that is strict base64 of an image of a known format | decoded, line breaks allowed |
| any other `str` | a path, under a root of the policy |

No rule looks at the file system to tell what a string is. No source outlives the call: no file stays open.
"""

import io
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import pybase64

from mmrender.errors import MediaBlockedError, MediaDecodeError, MediaFetchError
from mmrender.media.decode import sniff
from mmrender.media.files import path_of_file_url, printable, read_file, read_named_file, type_name
from mmrender.media.policy import MediaPolicy

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_LONGEST_PATH = 4096
# A base64 group holds 3 bytes in 4 characters: 64 characters are enough for `sniff`.
_SNIFFED = 64
_STREAM_LOCKS = tuple(threading.Lock() for _ in range(64))


def read_source(source: Any, policy: MediaPolicy, *, where: str | None = None) -> bytes:
    """Return the encoded bytes that `source` names.

    Raises:
        MediaBlockedError: the policy forbids the scheme, path or address.
        MediaLimitError: more than `max_bytes`, or too slow.
        MediaFetchError: a file or URL that cannot be read.
        MediaDecodeError: a type that names no image, a mapping without content, or broken base64.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        policy.check_bytes(memoryview(source).nbytes, where)
        return bytes(source)
    if isinstance(source, str):
        return _read_str(source, policy, where)
    if isinstance(source, os.PathLike):
        return read_file(source, policy, where)
    if isinstance(source, Mapping):
        return _read_mapping(source, policy, where)
    if callable(getattr(source, "read", None)):
        return _read_stream(source, policy, where)
    raise MediaDecodeError(
        "this names no image",
        where=where,
        expected="a PIL.Image, uint8 array, bytes, path, URL, binary stream or {'bytes': ..., 'path': ...}",
        got=type_name(source),
        remedy=_remedy_for(source),
    )


def _remedy_for(source: object) -> str | None:
    if type(source).__module__.partition(".")[0] == "torch":
        return "Pass a uint8 array of shape (H, W, 3), such as tensor.permute(1, 2, 0).cpu().numpy()."
    return None


def _read_str(source: str, policy: MediaPolicy, where: str | None) -> bytes:
    scheme = _SCHEME.match(source)
    name = scheme.group(1).lower() if scheme else ""
    if name in ("http", "https", "data", "file"):
        policy.check_scheme(name, where)
        if name == "data":
            return _read_data_url(source, policy, where)
        if name == "file":
            return read_named_file(path_of_file_url(source, where), policy, where)
        # http.client and ssl would be a tenth of the package's import time, and many programs never fetch.
        from mmrender.media.fetch import fetch

        return fetch(source.strip(), policy, where=where)
    if scheme and scheme.group(2):
        raise MediaBlockedError(
            f"{name}: URLs cannot be read",
            where=where,
            expected="http:, https:, data: or file:",
            got=f"{name}:",
            remedy="Read it yourself and pass the bytes.",
        )
    if (data := _bare_base64(source, policy, where)) is not None:
        return data
    if not source or len(source) > _LONGEST_PATH or "\0" in source:
        raise MediaDecodeError(
            "this string names no image",
            where=where,
            expected="a URL, a path, or base64 of an image",
            got=printable(source),
        )
    return read_named_file(Path(source), policy, where)


def _read_data_url(url: str, policy: MediaPolicy, where: str | None) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaDecodeError(
            "the data: URL holds no comma",
            where=where,
            expected="data:image/png;base64,...",
            got=printable(url),
        )
    if not header.lower().endswith(";base64"):
        policy.check_bytes(len(payload) - 2 * payload.count("%"), where)
        return unquote_to_bytes(payload)
    if "%" in payload:
        payload = unquote(payload)
    return _decode_base64(payload, policy, where)


def _bare_base64(text: str, policy: MediaPolicy, where: str | None) -> bytes | None:
    """Decode `text` if it begins like an image in base64; no path that a person writes does."""
    start = text[: 2 * _SNIFFED].replace("\n", "").replace("\r", "")[:_SNIFFED]
    try:
        name = sniff(pybase64.b64decode(start[: len(start) // 4 * 4], validate=True))
    except ValueError:
        return None
    # Two letters announce a BMP, and far too many words do that.
    return None if name is None or name == "BMP" else _decode_base64(text, policy, where)


def _decode_base64(payload: str, policy: MediaPolicy, where: str | None) -> bytes:
    if "\n" in payload or "\r" in payload:
        payload = payload.replace("\n", "").replace("\r", "")
    policy.check_bytes(len(payload) * 3 // 4 - payload[-2:].count("="), where)
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError:
        raise MediaDecodeError(
            "the base64 is broken",
            where=where,
            expected="the standard alphabet, padded to a multiple of 4 characters",
            got=printable(payload),
        ) from None


def _read_mapping(source: Mapping[Any, Any], policy: MediaPolicy, where: str | None) -> bytes:
    data, path = source.get("bytes"), source.get("path")
    if data is not None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise MediaDecodeError(
                "the mapping's 'bytes' cannot be used", where=where, expected="bytes", got=type_name(data)
            )
        return read_source(data, policy, where=where)
    if isinstance(path, str | os.PathLike):
        return read_source(path, policy, where=where)
    raise MediaDecodeError(
        "the mapping holds no image",
        where=where,
        expected="'bytes' or 'path' to be filled",
        got=f"keys {sorted(map(str, source))}",
    )


def _read_stream(stream: Any, policy: MediaPolicy, where: str | None) -> bytes:
    if isinstance(stream, io.BytesIO):
        # getvalue() does not move the position, so threads may share the stream.
        return read_source(stream.getvalue(), policy, where=where)
    try:
        with _STREAM_LOCKS[id(stream) // 16 % len(_STREAM_LOCKS)]:
            data = _drain(stream, policy.max_bytes + 1)
    except MediaDecodeError as error:
        raise error.at(where or "stream") from None
    except (OSError, ValueError) as error:
        raise MediaFetchError(f"the stream cannot be read ({error})", where=where) from error
    policy.check_bytes(len(data), where)
    return data


def _drain(stream: Any, most: int) -> bytes:
    """Read a stream whole, from its beginning where it can seek, up to `most` bytes."""
    position = stream.tell() if getattr(stream, "seekable", lambda: False)() else None
    if position is not None:
        stream.seek(0)
    parts: list[bytes] = []
    held = 0
    while held < most and (part := stream.read(most - held)):
        if not isinstance(part, bytes):
            raise MediaDecodeError(
                "the stream is not binary", expected="read() to give bytes", got=type_name(part)
            )
        parts.append(part)
        held += len(part)
    if position is not None:
        stream.seek(position)
    return b"".join(parts)
