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
from mmrender.media.policy import MediaPolicy

FORMATS = ("PNG", "JPEG", "WebP", "AVIF", "GIF", "TIFF", "BMP")

_AVIF_BRANDS = (b"avif", b"avis")
_STILL_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1")
_PREFIXES = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"BM", "BMP"),
)
_OTHERS = (
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"FLV\x01", "an FLV video"),
    (b"\x00\x00\x01\xba", "an MPEG video"),
    (b"\x00\x00\x01\xb3", "an MPEG video"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 image"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file it stands for"),
)


def sniff(data: bytes) -> str | None:
    """Return which of `FORMATS` the first bytes announce, or None. 32 bytes are enough."""
    for prefix, name in _PREFIXES:
        if data.startswith(prefix):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    # An AVIF file may name a general brand first and `avif` among the compatible ones.
    if data[4:8] == b"ftyp" and (data[8:12] in _AVIF_BRANDS or (_brands(data) & set(_AVIF_BRANDS))):
        return "AVIF"
    return None


def describe(data: bytes) -> str:
    """Say in a few words what bytes that are no image of `FORMATS` seem to be."""
    if not data:
        return "no bytes at all"
    for prefix, name in _OTHERS:
        if data.startswith(prefix):
            return name
    if data[4:8] == b"ftyp":
        return "a HEIC image" if data[8:12] in _STILL_BRANDS else "an MP4 or QuickTime video"
    if data[:4] == b"RIFF" and data[8:11] == b"AVI":
        return "an AVI video"
    start = data[:512].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith(b"<svg") or (start.startswith(b"<?xml") and b"<svg" in start):
        return "an SVG drawing"
    return f"{len(data)} bytes that begin with {data[:8]!r}"


def _brands(data: bytes) -> set[bytes]:
    end = min(int.from_bytes(data[:4], "big"), len(data))
    return {data[start : start + 4] for start in range(16, end - 3, 4)}


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


def type_name(value: object) -> str:
    """Return the type of `value` for an error message, such as `torch.Tensor`."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def printable(text: str, limit: int = 80) -> str:
    """Return `repr(text)`, shortened: a data URL may hold megabytes."""
    if len(text) <= limit:
        return repr(text)
    return f"{text[: limit - 20]!r}... ({len(text)} characters)"


def path_of_file_url(url: str, where: str | None) -> Path:
    """Return the absolute path that a `file:` URL names, percent-decoded.

    Raises:
        MediaFetchError: it names another host, no absolute path, or has a query or fragment.
    """
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


def read_file(path: "os.PathLike[Any]", policy: MediaPolicy, where: str | None) -> bytes:
    """Return the bytes of a file that the program itself names by a path object.

    Raises:
        MediaFetchError: it cannot be read.
        MediaLimitError: it holds more than `max_bytes`.
    """
    try:
        usable = Path(os.fsdecode(path))
    except (TypeError, ValueError) as error:
        raise MediaFetchError(f"this is not a path ({error})", where=where, got=type_name(path)) from None
    return _read(usable, policy, where)


def read_named_file(path: Path, policy: MediaPolicy, where: str | None) -> bytes:
    """Return the bytes of a file that a string names.

    Raises:
        MediaBlockedError: it is under no root of the policy, or `file` is not among its schemes.
        MediaFetchError: it cannot be read.
        MediaLimitError: it holds more than `max_bytes`.
    """
    policy.check_scheme("file", where)
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
            remedy="Pass a pathlib.Path object, or allow its folder: MediaPolicy(local_roots=(Path(DIR),)).",
        )
    return _read(resolved, policy, where, follow=False)


def _roots(policy: MediaPolicy) -> str:
    if not policy.local_roots:
        return "a pathlib.Path, or a folder in local_roots"
    return "a path under " + " or ".join(repr(str(root)) for root in policy.local_roots)


def _read(path: Path, policy: MediaPolicy, where: str | None, *, follow: bool = True) -> bytes:
    # O_NONBLOCK so that opening a named pipe does not wait; O_NOFOLLOW because the checked path is resolved.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            policy.check_bytes(status.st_size, where)
            data = file.read(policy.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, MediaLimitError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MediaFetchError(
            f"the file {printable(str(path), 300)} cannot be read ({reason})", where=where
        ) from error
    policy.check_bytes(len(data), where)
    return data
