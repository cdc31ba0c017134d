"""Read the encoded bytes of a source, under a `MediaPolicy`; `docs/media.md` lists the sources.

The file system never decides how a string is read, and no file stays open. A path object is read because only
the program can make one. A path in a string may come from a dataset or a web page, so it has to lie under one
of `local_roots` after symbolic links are resolved, and an error never tells whether a file outside exists.
"""

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import pybase64

from mmcodecs.forks import watch_forks
from mmrender.errors import MediaBlockedError, MediaDecodeError, MediaFetchError, MediaLimitError
from mmrender.media.policy import MediaPolicy

FORMATS = ("PNG", "JPEG", "WebP", "AVIF", "GIF", "TIFF", "BMP")
"""Image formats that are decoded."""
AUDIO_FORMATS = ("WAV audio", "FLAC audio", "Ogg audio", "MP3 audio")
"""Audio formats that are decoded."""

_KINDS = tuple(
    (name, re.compile(pattern, re.DOTALL))
    for name, pattern in (
        ("PNG", rb"\x89PNG\r\n\x1a\n"),
        ("JPEG", rb"\xff\xd8\xff"),
        ("WebP", rb"RIFF....WEBP"),
        # An AVIF file may name a general brand first and `avif` among the compatible ones.
        ("AVIF", rb"....ftyp(?:....){0,12}?avi[fs]"),
        ("GIF", rb"GIF8[79]a"),
        ("TIFF", rb"II[*+]\x00|MM\x00[*+]"),
        ("BMP", rb"BM"),
        ("a HEIC image", rb"....ftyp(?:hei[cx]|hev[cx]|m[is]f1)"),
        ("M4A audio", rb"....ftypM4[AB]"),
        ("an MP4 or QuickTime video", rb"....ftyp"),
        ("an AVI video", rb"RIFF....AVI"),
        ("WAV audio", rb"RIFF....WAVE"),
        ("FLAC audio", rb"fLaC"),
        ("Ogg audio", rb"OggS"),
        ("MP3 audio", rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]"),
        ("AAC audio", rb"\xff[\xf0\xf1\xf8\xf9]"),
        ("AIFF audio", rb"FORM....AIF[FC]"),
        ("a Matroska or WebM video", rb"\x1aE\xdf\xa3"),
        ("an MPEG video", rb"\x00\x00\x01"),
        ("a PDF document", rb"%PDF"),
        ("a ZIP archive", rb"PK\x03\x04"),
        ("gzip data", rb"\x1f\x8b"),
        ("a Git LFS pointer, not the file itself", rb"version https://git-lfs"),
        ("an HTML page", rb"(?i)\s*<(?:!doctype html|html)"),
        ("an SVG drawing", rb"(?i)\s*(?:<\?xml.*)?<svg"),
        ("no bytes at all", rb"\Z"),
    )
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_MAX_PATH = 4096
_SNIFFED = 64
"""Bytes, or characters of base64, from which the format is known."""
_PIECE = 1 << 16
"""Characters of a percent-encoded payload that are decoded at once."""


class ReadLocks:
    """Lets one thread at a time read a caller's object that reading changes.

    If another thread was reading an object when the process forked, its state in the child is unknown, so the
    child refuses it.
    """

    def __init__(self) -> None:
        self._reading: dict[int, object] = {}
        self._interrupted: list[object] = []
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Replace the locks, and record the objects that other threads were reading."""
        # One object always has the same lock. Two objects rarely share one.
        self._locks = tuple(threading.Lock() for _ in range(64))
        self._reading.pop(threading.get_ident(), None)
        self._interrupted += self._reading.values()
        self._reading = {}

    @contextmanager
    def reading(self, source: object, is_changed: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Hold the lock of an object, which this reading changes unless `is_changed` returns False.

        Raises:
            MediaDecodeError: A fork has interrupted the reading of the object.
        """
        if any(source is each for each in self._interrupted):
            raise MediaDecodeError(
                "another thread was reading this object when the process forked",
                expected="an object that this process opened, or that was loaded before the fork",
                got=type(source).__name__,
                remedy="Open it again in this process",
            )
        with self._locks[id(source) // 16 % len(self._locks)]:
            reading, thread = self._reading, threading.get_ident()
            if is_changed():
                reading[thread] = source
            try:
                yield
            finally:
                reading.pop(thread, None)


_stream_locks = ReadLocks()


def sniff(data: bytes) -> str | None:
    """Return the image format of the first bytes, one of `FORMATS`, or None. 32 bytes are enough."""
    name = format_name(data[:_SNIFFED])
    return name if name in FORMATS else None


def format_name(data: bytes) -> str:
    """Return the format of data, one of the formats above or a few words, by its first bytes."""
    start = data[:512]
    name = next((name for name, pattern in _KINDS if pattern.match(start)), None)
    return name or f"{len(data)} bytes that begin with {data[:8]!r}"


def read_source(source: Any, policy: MediaPolicy) -> bytes:
    """Return the encoded bytes of a source.

    Raises:
        MediaError: As for `load_image`.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        policy.check("max_bytes", memoryview(source).nbytes)
        return bytes(source)
    if isinstance(source, str):
        return _read_str(source, policy)
    if isinstance(source, os.PathLike):
        return _read_file(Path(os.fsdecode(source)), policy)
    if callable(getattr(source, "read", None)):
        return _read_stream(source, policy)
    kind = type(source)
    is_tensor = kind.__module__.partition(".")[0] == "torch"
    raise MediaDecodeError(
        "this names no file",
        expected="a PIL.Image, uint8 array, bytes, path, URL or binary stream",
        got=kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}",
        remedy="Pass a uint8 array of shape (H, W, 3), such as tensor.permute(1, 2, 0).cpu().numpy()."
        if is_tensor
        else None,
    )


def _read_str(source: str, policy: MediaPolicy) -> bytes:
    scheme = _SCHEME.match(source)
    name = scheme.group(1).lower() if scheme else ""
    if name in ("http", "https", "data", "file"):
        policy.check_scheme(name)
    if name in ("http", "https"):
        # An HTTP client would be a tenth of the package's import time, and many programs never fetch.
        from mmrender.media.fetch import fetch

        return fetch(source.strip(), policy)
    if name == "data":
        return _read_data_url(source, policy)
    if name == "file":
        parts = urlsplit(source)
        path = unquote(parts.path, errors="surrogateescape")
        local = parts.netloc.lower() in ("", "localhost") and path.startswith("/") and "\0" not in path
        if not local or parts.query or parts.fragment:
            raise MediaFetchError(
                "the file: URL does not name a file of this machine",
                expected="file:///absolute/path, with ?, # and % percent-encoded",
                got=_printable(source),
            )
        return _read_named_file(Path(path), policy)
    if scheme and scheme.group(2):
        raise MediaBlockedError(
            f"{name}: URLs cannot be read",
            expected="http:, https:, data: or file:",
            got=f"{name}:",
            remedy="Read it yourself and pass the bytes.",
        )
    # A path never begins like base64 of a file, but for formats that begin with two letters or a slash.
    start = source[: 2 * _SNIFFED].replace("\n", "").replace("\r", "")[:_SNIFFED]
    try:
        data = pybase64.b64decode(start[: len(start) // 4 * 4], validate=True)
    except ValueError:
        data = b""
    kind = format_name(data) if data else ""
    if kind in (*FORMATS, *AUDIO_FORMATS) and kind != "BMP" and not source.startswith("//"):
        return _decode_base64(source, policy)
    if not source or len(source) > _MAX_PATH or "\0" in source:
        raise MediaDecodeError(
            "this string names no file",
            expected="a URL, a path, or base64 of an image or audio",
            got=_printable(source),
        )
    return _read_named_file(Path(source), policy)


def _read_data_url(url: str, policy: MediaPolicy) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaDecodeError(
            "the data: URL holds no comma",
            expected="data:image/png;base64,...",
            got=_printable(url),
        )
    if header.lower().endswith(";base64"):
        if "%" in payload:
            payload = _percent_decoded(payload).decode("latin-1")
        return _decode_base64(payload, policy)
    policy.check("max_bytes", len(payload) - 2 * payload.count("%"))
    return _percent_decoded(payload)


def _percent_decoded(payload: str) -> bytes:
    """Decode piece by piece: the standard library makes several objects of each escape."""
    data = bytearray()
    start = 0
    while start < len(payload):
        stop = start + _PIECE
        if stop < len(payload) and (escape := payload.rfind("%", stop - 2, stop)) > 0:
            stop = escape
        data += unquote_to_bytes(payload[start:stop])
        start = stop
    return bytes(data)


def _decode_base64(payload: str, policy: MediaPolicy) -> bytes:
    if "\n" in payload or "\r" in payload:
        payload = payload.replace("\n", "").replace("\r", "")
    policy.check("max_bytes", len(payload) * 3 // 4 - payload[-2:].count("="))
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError:
        raise MediaDecodeError(
            "the base64 is broken",
            expected="the standard alphabet, padded to a multiple of 4 characters",
            got=_printable(payload),
        ) from None


def _read_stream(stream: Any, policy: MediaPolicy) -> bytes:
    data = bytearray()
    try:
        with _stream_locks.reading(stream):
            position = stream.tell() if getattr(stream, "seekable", lambda: False)() else None
            if position is not None:
                stream.seek(0)
            while len(data) <= policy.max_bytes and (part := stream.read(policy.max_bytes + 1 - len(data))):
                if not isinstance(part, bytes):
                    raise MediaDecodeError(
                        "the stream is not binary",
                        expected="read() to return bytes",
                        got=type(part).__name__,
                    )
                data += part
            if position is not None:
                stream.seek(position)
    except MediaDecodeError:
        raise
    except (OSError, ValueError) as error:
        raise MediaFetchError(f"the stream cannot be read ({error})") from error
    policy.check("max_bytes", len(data))
    return bytes(data)


def _read_named_file(path: Path, policy: MediaPolicy) -> bytes:
    """Read a file named by a string, only under a root of the policy."""
    policy.check_scheme("file")
    try:
        resolved = path.resolve()
        allowed = any(resolved.is_relative_to(root.resolve()) for root in policy.local_roots)
    except (OSError, RuntimeError, ValueError) as error:
        raise MediaFetchError(f"{_printable(str(path))} is not a usable path ({error})") from None
    if not allowed:
        roots = " or ".join(repr(str(root)) for root in policy.local_roots)
        raise MediaBlockedError(
            f"the media policy forbids the local file {_printable(str(path), 300)}",
            expected=f"a path under {roots}" if roots else "a pathlib.Path, or a folder in local_roots",
            got="a path outside" if roots else "a string that names a file",
            remedy="Pass a pathlib.Path object, or allow its folder: MediaPolicy(local_roots=(Path(DIR),)).",
        )
    # The path is resolved: a link that replaces its last part meanwhile is not followed.
    return _read_file(resolved, policy, os.O_NOFOLLOW)


def _read_file(path: Path, policy: MediaPolicy, flags: int = 0) -> bytes:
    # O_NONBLOCK: opening a named pipe must not wait.
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            policy.check("max_bytes", status.st_size)
            data = file.read(policy.max_bytes + 1)
    except MediaLimitError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MediaFetchError(f"the file {_printable(str(path), 300)} cannot be read ({reason})") from error
    policy.check("max_bytes", len(data))
    return data


def _printable(text: str, limit: int = 80) -> str:
    """Return `repr(text)`, shortened: a data URL may hold megabytes."""
    if len(text) <= limit:
        return repr(text)
    return f"{text[: limit - 20]!r}... ({len(text)} characters)"
