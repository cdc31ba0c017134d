"""Bounded caches in memory and on disk, and single-flight for threads and for coroutines.

`LRUCache` drops the least recently used entries beyond a bound, and computes an entry once for all threads.
`FileCache` keeps small values between processes. `SingleFlight` computes a value once for many threads,
`AsyncSingleFlight` once for the coroutines of an event loop.
"""

import functools
import logging
import os
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from blake3 import blake3

from mmcodecs.forks import watch_forks
from mmcodecs.structs import ready
from mmrender._version import __version__

if TYPE_CHECKING:
    import asyncio

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_log = logging.getLogger("mmrender.caching")
ENVIRONMENT: Final = "MMRENDER_CACHE"
MAX_FILES: Final = 4096
_PARTIAL: Final = ".partial"
_PARTIAL_SECONDS: Final = 600
"""Age in seconds from which on a partial file counts as left by a crash."""
_OFF: Final = ("", "0", "off", "no", "none")


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property  # noqa: PLC0414 - exported
else:

    class cached_property(functools.cached_property):  # noqa: N801
        """Without the lock of Python 3.11's class, which a fork during a computation would leave locked."""

        def __init__(self, method: Callable[[Any], Any]) -> None:
            super().__init__(method)
            self.lock = nullcontext()


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a cache since it was made.

    Attributes:
        hits: Look-ups that found their entry or waited for another thread to compute it.
        misses: Entries that were stored.
        evictions: Entries dropped to stay within the bound.
        entries: Present number of entries.
        size: Present sum of their sizes.
        max_size: Maximum of this sum.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    size: int
    max_size: int


class SingleFlight(Generic[K, V]):
    """Computes the value of a key once for all threads that ask for it at the same time."""

    def __init__(self) -> None:
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Forget the computations of the parent's threads, which never end in the child."""
        self._lock = threading.RLock()
        self._running: dict[K, Future[V]] = {}

    def run(self, key: K, find: Callable[[], V | None], compute: Callable[[], V]) -> V:
        """Return the result of `find`, or if that is None, of `compute` on one thread while others wait.

        If that thread fails, a waiting thread computes, so that each caller gets its own error.
        """
        while True:
            with self._lock:
                if (kept := find()) is not None:
                    return kept
                running = self._running.get(key)
                if running is None:
                    future = self._running[key] = Future()
                    break
            if running.exception() is None:
                kept = find()
                return running.result() if kept is None else kept
        failure: BaseException | None = None
        try:
            value = compute()
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._lock:
                # No thread waits for it if the process forked meanwhile.
                is_awaited = self._running.get(key) is future
                if is_awaited:
                    del self._running[key]
            if is_awaited:
                future.set_result(value) if failure is None else future.set_exception(failure)
        return value


class LRUCache(Generic[K, V]):
    """A mapping of bounded size for many threads that drops the least recently used entry first.

    An entry that is larger than the bound is not kept.

    Args:
        max_size: Maximum sum of sizes; 0 keeps nothing.
        size_of: Returns the size of an entry, such as its bytes. By default every entry counts 1.
    """

    def __init__(self, max_size: int, *, size_of: Callable[[V], int] | None = None) -> None:
        self.max_size = max_size
        self._size_of = size_of
        self._lock = threading.RLock()
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._flight: SingleFlight[K, V] = SingleFlight()
        self._size = self._hits = self._misses = self._evictions = 0
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Replace the lock, and count the sizes again."""
        self._lock = threading.RLock()
        self._size = sum(size for _, size in self._entries.values())

    @property
    def stats(self) -> CacheStats:
        """Counters, taken at one moment."""
        with self._lock:
            return CacheStats(
                self._hits, self._misses, self._evictions, len(self._entries), self._size, self.max_size
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        with self._lock:
            return iter(list(self._entries))

    def get(self, key: K) -> V | None:
        """Return the entry of `key` and mark it as used, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            self._hits += 1
            return entry[0]

    def put(self, key: K, value: V) -> V:
        """Keep a value unless it is larger than the bound, and return it."""
        size = 1 if self._size_of is None else self._size_of(value)
        with self._lock:
            self._misses += 1
            if (replaced := self._entries.pop(key, None)) is not None:
                self._size -= replaced[1]
            if size <= self.max_size:
                self._entries[key] = value, size
                self._size += size
                while self._size > self.max_size:
                    _, (_, freed) = self._entries.popitem(last=False)
                    self._size -= freed
                    self._evictions += 1
        return value

    def pop(self, key: K) -> V | None:
        """Drop the entry of `key`, and return it or None."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._size -= entry[1]
            return entry[0]

    def clear(self) -> None:
        """Drop all entries but keep the counters."""
        with self._lock:
            self._entries.clear()
            self._size = 0

    def get_or_compute(self, key: K, compute: Callable[[], V]) -> V:
        """Return the entry of `key`, which one thread computes if it is missing. See `SingleFlight.run`."""
        if (value := self.get(key)) is not None:
            return value
        return self._flight.run(key, partial(self.get, key), lambda: self.put(key, compute()))


def cache_folder(name: str) -> Path | None:
    """Return a folder of the cache: `MMRENDER_CACHE`, or `mmrender` in the user's cache folder.

    None if `MMRENDER_CACHE` is `off`, or if the user does not have a home directory.
    """
    setting = os.environ.get(ENVIRONMENT)
    if setting is not None:
        return None if setting.strip().lower() in _OFF else Path(setting).expanduser() / name
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    # The specification of XDG_CACHE_HOME says to ignore relative paths.
    return home / "mmrender" / name if home.is_absolute() else None


@functools.cache
def digest_of_code(patterns: tuple[str, ...]) -> str:
    """Hash of the source files that match `patterns`; the version alone changes too rarely."""
    digest = blake3(__version__.encode())
    root = Path(__file__).parent
    for file in [file for pattern in patterns for file in sorted(root.glob(pattern))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest(length=16)


def release_of(package: str) -> str:
    """Return the release of an installed package, empty without it."""
    from importlib.metadata import PackageNotFoundError, version  # costs more than the rest of this module

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class _Entry(msgspec.Struct):
    digest: str
    value: msgspec.Raw


class FileCache:
    """Small values as JSON files of one folder, for many processes; drops the least recently used first.

    A damaged or unreadable file counts as missing. Without a folder, nothing is kept.
    """

    def __init__(self, folder: Path | None, max_files: int = MAX_FILES) -> None:
        self.folder = folder
        self._max_files = max_files

    def get(self, name: str, kind: type[V]) -> V | None:
        """Return the value of this name and mark it as used, or None."""
        if self.folder is None:
            return None
        file = self.folder / f"{name}.json"
        try:
            entry = msgspec.json.decode(file.read_bytes(), type=ready(_Entry))
            if blake3(entry.value).hexdigest() != entry.digest:
                raise msgspec.ValidationError("the digest belongs to another value")
            value = msgspec.json.decode(entry.value, type=ready(kind))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.debug("ignored cache entry %s: %s", file.name, error)
            return None
        with suppress(OSError):
            os.utime(file)
        return value

    def put(self, name: str, value: Any) -> None:
        """Write a value atomically. A value or folder that cannot be written is ignored."""
        if self.folder is None:
            return
        try:
            content = msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            _log.debug("cannot write cache entry %s: %s", name, error)
            return
        entry = _Entry(blake3(content).hexdigest(), msgspec.Raw(content))
        partial = self.folder / f"{name}.{secrets.token_hex(8)}{_PARTIAL}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(entry))
            partial.replace(self.folder / f"{name}.json")
            for crashed in self.folder.glob(f"*{_PARTIAL}"):
                if crashed.stat().st_mtime < time.time() - _PARTIAL_SECONDS:
                    crashed.unlink(missing_ok=True)
            files = list(self.folder.glob("*.json"))
            if len(files) > self._max_files:
                files.sort(key=lambda file: file.stat().st_mtime)
                for stale in files[: len(files) - self._max_files * 9 // 10]:
                    stale.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("cannot write cache entry %s: %s", name, error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


class AsyncSingleFlight(Generic[K, V]):
    """Shares one running coroutine per key among concurrent callers.

    An error reaches all callers and is not kept. Cancelling a caller leaves the coroutine to the other
    callers; cancelling the last caller cancels it.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[K, asyncio.AbstractEventLoop], _Flight[V]] = {}

    async def run(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        """Return the result of `ask`, or of the call that is in flight for `key` on this event loop."""
        import asyncio

        slot = (key, asyncio.get_running_loop())
        flight = self._running.get(slot)
        if flight is None:
            flight = self._running[slot] = _Flight(asyncio.ensure_future(ask()))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                if self._running.get(slot) is flight:
                    del self._running[slot]
                if not flight.task.done():
                    flight.task.cancel()
                    await asyncio.wait({flight.task})


@dataclass
class _Flight(Generic[V]):
    """A coroutine and the number of callers that wait for it."""

    task: "asyncio.Future[V]"
    waiting: int = 0
