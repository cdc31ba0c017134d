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

import errno
import io
import os
import re
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import pybase64

from mmrender.errors import MediaBlockedError, MediaDecodeError, MediaFetchError, MediaLimitError
from mmrender.media.decode import sniff
from mmrender.media.fetch import fetch
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
        _check_bytes(memoryview(source).nbytes, policy, where)
        return bytes(source)
    if isinstance(source, str):
        return _read_str(source, policy, where)
    if isinstance(source, os.PathLike):
        return _read_file(_path_of(source, where), policy, where)
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


def type_name(value: object) -> str:
    """Return the type of `value` for an error message, such as `torch.Tensor`."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def printable(text: str, limit: int = 80) -> str:
    """Return `repr(text)`, shortened: a data URL may hold megabytes."""
    if len(text) <= limit:
        return repr(text)
    return f"{text[: limit - 20]!r}... ({len(text)} characters)"


def _remedy_for(source: object) -> str | None:
    if type(source).__module__.partition(".")[0] == "torch":
        return "Pass a uint8 array of shape (H, W, 3), such as tensor.permute(1, 2, 0).cpu().numpy()."
    return None


def _read_str(source: str, policy: MediaPolicy, where: str | None) -> bytes:
    scheme = _SCHEME.match(source)
    name = scheme.group(1).lower() if scheme else ""
    if name in ("http", "https", "data", "file"):
        _check_scheme(name, policy, where)
        if name == "data":
            return _read_data_url(source, policy, where)
        if name == "file":
            return _read_named_file(_path_of_file_url(source, where), policy, where)
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
    return _read_named_file(Path(source), policy, where)


def _check_scheme(name: str, policy: MediaPolicy, where: str | None) -> None:
    if name not in policy.schemes:
        raise MediaBlockedError(
            f"the media policy forbids {name}: URLs",
            where=where,
            expected=f"one of {sorted(policy.schemes)}",
            got=f"{name}:",
            remedy=f'Add "{name}" to MediaPolicy(schemes=...).',
        )


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
        _check_bytes(len(payload) - 2 * payload.count("%"), policy, where)
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
    _check_bytes(len(payload) * 3 // 4 - payload[-2:].count("="), policy, where)
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError as error:
        raise MediaDecodeError(
            f"the base64 is broken ({error})",
            where=where,
            expected="the standard alphabet, padded to a multiple of 4 characters",
            got=printable(payload),
        ) from None


def _path_of_file_url(url: str, where: str | None) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path, errors="surrogateescape")
    local = parts.netloc.lower() in ("", "localhost") and path.startswith("/") and "\0" not in path
    if local and not parts.query and not parts.fragment:
        return Path(path)
    raise MediaFetchError(
        "the file: URL does not name a file of this machine",
        where=where,
        expected="file:///absolute/path, with ?, # and % percent-encoded",
        got=printable(url),
    )


def _path_of(source: "os.PathLike[Any]", where: str | None) -> Path:
    try:
        return Path(os.fsdecode(source))
    except (TypeError, ValueError) as error:
        raise MediaFetchError(f"this is not a path ({error})", where=where, got=type_name(source)) from None


def _read_named_file(path: Path, policy: MediaPolicy, where: str | None) -> bytes:
    """Read a file that a string names: only below a root, with symbolic links resolved."""
    _check_scheme("file", policy, where)
    try:
        resolved = path.resolve()
        allowed = any(resolved.is_relative_to(root.resolve()) for root in policy.local_roots)
    except (OSError, RuntimeError, ValueError) as error:
        raise MediaFetchError(f"{printable(str(path))} is not a usable path ({error})", where=where) from None
    if not allowed:
        raise MediaBlockedError(
            f"the media policy forbids the local file {printable(str(path), 300)}",
            where=where,
            expected=_roots(policy),
            got="a path outside" if policy.local_roots else "a string that names a file",
            remedy="Pass a pathlib.Path object, or allow the folder: MediaPolicy(local_roots=(Path('DIR'),)).",
        )
    return _read_file(resolved, policy, where, follow=False)


def _roots(policy: MediaPolicy) -> str:
    if not policy.local_roots:
        return "a pathlib.Path, or a folder in local_roots"
    return "a path under " + " or ".join(repr(str(root)) for root in policy.local_roots)


def _read_file(path: Path, policy: MediaPolicy, where: str | None, *, follow: bool = True) -> bytes:
    # O_NONBLOCK so that opening a named pipe does not wait; O_NOFOLLOW because the checked path is resolved.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            _check_bytes(status.st_size, policy, where)
            data = file.read(policy.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, MediaLimitError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MediaFetchError(
            f"the file {printable(str(path), 300)} cannot be read ({reason})", where=where
        ) from error
    _check_bytes(len(data), policy, where)
    return data


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
    _check_bytes(len(data), policy, where)
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


def _check_bytes(count: int, policy: MediaPolicy, where: str | None) -> None:
    if count > policy.max_bytes:
        raise MediaLimitError(
            "the encoded image is too large",
            where=where,
            expected=f"at most {policy.max_bytes} bytes",
            got=f"{count} bytes",
            remedy="Raise MediaPolicy(max_bytes=...).",
        )
