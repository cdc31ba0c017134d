"""What probing found out, kept in memory and on disk, so that no process probes what another one has.

An entry's name is a digest of everything that its content depends on: the template, the special and added
tokens that it is used with, the template arguments that it reads, its limits, and this library's own code. So
entries never go stale. A file that cannot be read counts as missing and is written again. Both memory and
disk are bounded; the least recently used entries go first.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
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
    "rendering/*.py",
    "model/tokenizer.py",
)
_MEMORY_ENTRIES = 1024
_DISK_ENTRIES = 4096


class DiskCache:
    """A folder of small JSON files. Safe to use from many threads and processes.

    Args:
        folder: Where they are; made when the first one is written.
        max_entries: Number of files beyond which the oldest are removed.
    """

    def __init__(self, folder: Path, *, max_entries: int = _DISK_ENTRIES) -> None:
        self.folder = folder
        self._max_entries = max_entries

    @classmethod
    def default(cls) -> "DiskCache | None":
        """The folder that `MMRENDER_CACHE` names, or `mmrender` in the user's cache folder.

        None where `MMRENDER_CACHE` is `off`, or where the user has no home directory.
        """
        given = os.environ.get(ENVIRONMENT)
        if given is not None:
            return None if given.strip().lower() in _OFF else cls(Path(given).expanduser() / "profiles")
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            home = Path(base) if base else Path.home() / ".cache"
        except RuntimeError:
            return None
        # The specification of XDG_CACHE_HOME says to ignore relative paths.
        return cls(home / "mmrender" / "profiles") if home.is_absolute() else None

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """Read an entry and mark it as used; None where it is missing or unreadable."""
        file = self.folder / f"{name}.json"
        try:
            value = msgspec.json.decode(file.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.debug("ignored cache entry %s: %s", name, error)
            return None
        with suppress(OSError):
            os.utime(file)
        return value

    def put(self, name: str, value: Any) -> None:
        """Write an entry atomically; a folder that cannot be written to is ignored."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(msgspec.json.encode(value))
                Path(path).replace(self.folder / f"{name}.json")
            except BaseException:
                Path(path).unlink(missing_ok=True)
                raise
            for stale in self._beyond_bound():
                stale.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("cannot write cache entry %s: %s", name, error)

    def _beyond_bound(self) -> Iterator[Path]:
        """The oldest tenth of the files, once there are more than the bound."""
        files = [entry for entry in os.scandir(self.folder) if entry.name.endswith(".json")]
        if len(files) > self._max_entries:
            files.sort(key=lambda entry: entry.stat().st_mtime)
            yield from map(Path, files[: len(files) - self._max_entries * 9 // 10])


class Findings:
    """What is known about one template with one set of arguments.

    Args:
        disk: Where findings are kept between processes, or None.
        facts: Everything that they depend on, as plain values; None keeps them in memory alone.
    """

    def __init__(self, disk: DiskCache | None = None, facts: dict[str, Any] | None = None) -> None:
        self._memory: LRUCache[str, Any] = LRUCache(_MEMORY_ENTRIES)
        self._disk = disk if facts is not None else None
        self._digest = ""
        if self._disk is not None:
            self._digest = blake3(
                msgspec.msgpack.encode([code_digest(), facts], order="deterministic")
            ).hexdigest(length=16)

    def get_or_find(self, about: str, kind: type[Value], find: Callable[[], Value]) -> Value:
        """Return what is known about something, or find it out and keep it."""
        known: Value | None = self._memory.get(about)
        return (
            known
            if known is not None
            else self._memory.get_or_compute(about, lambda: self._load(about, kind, find))
        )

    def _load(self, about: str, kind: type[Value], find: Callable[[], Value]) -> Value:
        if self._disk is None:
            return find()
        name = f"{self._digest}-{blake3(about.encode('utf-8', 'surrogatepass')).hexdigest(length=8)}"
        value = self._disk.get(name, kind)
        if value is None:
            value = find()
            self._disk.put(name, value)
        return value


@cache
def code_digest() -> str:
    """Digest of the code that probes, since a version number alone does not move with every change."""
    digest = blake3(__version__.encode())
    root = Path(__file__).parents[1]
    for pattern in _CODE:
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest(length=16)
