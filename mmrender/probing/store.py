"""What probing found out, kept in memory and on disk, so that no process probes what another one has.

An entry's name is a digest of everything that its content depends on: the template, the special and added
tokens that it is used with, the template arguments that it reads, its limits, and this library's own code. So
entries never go stale. A file that cannot be read counts as missing and is written again. Both memory and
disk are bounded; the least recently used entries go first.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from mmrender._version import __version__
from mmrender.caching import LRUCache

_log = logging.getLogger("mmrender.probing.store")

Value = TypeVar("Value")

ENVIRONMENT = "MMRENDER_CACHE"
_OFF = ("", "0", "off", "no", "none")
_CODE = (
    "template/*.py",
    "bridge/*.py",
    "probing/*.py",
    "tokens/*.py",
    "rendering.py",
    "model/tokenizer.py",
)
_MEMORY_ENTRIES = 1024
_FILES = 4096


def cache_folder() -> Path | None:
    """The folder that `MMRENDER_CACHE` names, or `mmrender` in the user's cache folder.

    None where `MMRENDER_CACHE` is `off`, or where the user has no home directory.
    """
    given = os.environ.get(ENVIRONMENT)
    if given is not None:
        return None if given.strip().lower() in _OFF else Path(given).expanduser() / "profiles"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    # The specification of XDG_CACHE_HOME says to ignore relative paths.
    return home / "mmrender" / "profiles" if home.is_absolute() else None


class Findings:
    """What is known about one template with one set of arguments, for many threads and processes.

    Args:
        folder: Where it is kept between processes, as small JSON files.
        facts: Everything that it depends on, as plain values. Without folder or facts, only memory is used.
        max_files: Number of files in the folder beyond which the least recently used are removed.
    """

    def __init__(
        self, folder: Path | None = None, facts: dict[str, Any] | None = None, *, max_files: int = _FILES
    ) -> None:
        self._memory: LRUCache[Hashable, Any] = LRUCache(_MEMORY_ENTRIES)
        self._folder = folder if facts is not None else None
        self._max_files = max_files
        self._digest = ""
        if self._folder is not None:
            content = msgspec.msgpack.encode([code_digest(), facts], order="deterministic")
            self._digest = blake3(content).hexdigest(length=16)

    def get_or_find(self, about: Hashable, kind: type[Value], find: Callable[[], Value]) -> Value:
        """Return what is known about something, or find it out and keep it; its `repr` names it on disk."""
        known: Value | None = self._memory.get(about)
        if known is None:
            known = self._memory.get_or_compute(about, lambda: self._load(about, kind, find))
        return known

    def _load(self, about: Hashable, kind: type[Value], find: Callable[[], Value]) -> Value:
        if self._folder is None:
            return find()
        name = blake3(repr(about).encode("utf-8", "surrogatepass")).hexdigest(length=8)
        file = self._folder / f"{self._digest}-{name}.json"
        value = self._read(file, kind)
        if value is None:
            value = find()
            self._write(file, value)
        return value

    def _read(self, file: Path, kind: type[Value]) -> Value | None:
        """Read an entry and mark it as used; None where it is missing or unreadable."""
        try:
            value = msgspec.json.decode(file.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.debug("ignored cache entry %s: %s", file.name, error)
            return None
        with suppress(OSError):
            os.utime(file)
        return value

    def _write(self, file: Path, value: Any) -> None:
        """Write an entry atomically; a folder that cannot be written to is ignored."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as temporary:
                    temporary.write(msgspec.json.encode(value))
                Path(path).replace(file)
            except BaseException:
                Path(path).unlink(missing_ok=True)
                raise
            files = list(file.parent.glob("*.json"))
            if len(files) > self._max_files:
                files.sort(key=lambda found: found.stat().st_mtime)
                for stale in files[: len(files) - self._max_files * 9 // 10]:
                    stale.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("cannot write cache entry %s: %s", file.name, error)


@cache
def code_digest() -> str:
    """Digest of the code that probes, since a version number alone does not move with every change."""
    digest = blake3(__version__.encode())
    root = Path(__file__).parents[1]
    for pattern in _CODE:
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest(length=16)
