"""Read local files under a `MediaPolicy`, and print strings and types in error messages.

A path that a program hands over as an object is read. A path that a string names may come from a dataset or a
web page, so it has to lie under one of `local_roots`, after symbolic links are resolved. Whether a file
outside of them exists does not show in the error. Only regular files are read: no device, no pipe.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mmrender.errors import MediaBlockedError, MediaFetchError, MediaLimitError
from mmrender.media.policy import MediaPolicy


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
