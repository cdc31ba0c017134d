"""The one bounded cache, and the one single-flight.

`LRUCache` drops the least recently used entries beyond a bound, and computes an entry once however many
threads ask for it. `AsyncSingleFlight` does the latter for coroutines of one or several event loops.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import cachetools

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a cache since it was made.

    Attributes:
        hits: Look-ups that found their entry, those that waited for another thread's computation included.
        misses: Entries that were stored.
        evictions: Entries dropped to stay within the bound.
        entries: Entries held now.
        size: Sum of the sizes held now.
        max_size: The bound on that sum.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    size: int
    max_size: int


class LRUCache(Generic[K, V]):
    """A mapping of bounded size, safe to share between threads; the least recently used entry goes first.

    An entry that is larger than the bound is not kept.

    Args:
        max_size: Bound on the sum of sizes; 0 keeps nothing.
        size_of: Size of an entry, such as its bytes; without it every entry counts 1.
    """

    def __init__(self, max_size: int, *, size_of: Callable[[V], int] | None = None) -> None:
        self._size_of = size_of
        self._lock = threading.RLock()
        self._entries: _Counting[K, V] = _Counting(max_size, getsizeof=size_of)
        self._running: dict[K, Future[V]] = {}
        self._hits = self._misses = 0

    @property
    def max_size(self) -> int:
        """The bound on the sum of sizes."""
        return int(self._entries.maxsize)

    @property
    def stats(self) -> CacheStats:
        """Counters, taken at one moment."""
        with self._lock:
            held = self._entries
            return CacheStats(
                self._hits, self._misses, held.evictions, len(held), int(held.currsize), int(held.maxsize)
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
            value = self._entries.get(key)
            self._hits += value is not None
            return value

    def put(self, key: K, value: V) -> V:
        """Keep `value` unless it alone is larger than the bound, and return it."""
        with self._lock:
            self._misses += 1
            self._entries.pop(key, None)
            if (self._size_of(value) if self._size_of else 1) <= self._entries.maxsize:
                self._entries[key] = value
        return value

    def pop(self, key: K) -> V | None:
        """Drop the entry of `key`, and return it if it was held."""
        with self._lock:
            value: V | None = self._entries.pop(key, None)
            return value

    def clear(self) -> None:
        """Drop all entries; counters stay."""
        with self._lock:
            self._entries.clear()

    def get_or_compute(self, key: K, compute: Callable[[], V]) -> V:
        """Return the entry of `key`, computing it unless it is held; one thread computes, others wait.

        Where that thread fails, one of those that waited computes, so that each caller gets its own error.
        """
        while True:
            with self._lock:
                if (value := self.get(key)) is not None:
                    return value
                running = self._running.get(key)
                if running is None:
                    self._running[key] = Future()
                    break
            if running.exception() is None:
                return running.result()
        try:
            value = self.put(key, compute())
        except BaseException as error:
            self._land(key).set_exception(error)
            raise
        self._land(key).set_result(value)
        return value

    def _land(self, key: K) -> "Future[V]":
        with self._lock:
            return self._running.pop(key)


class _Counting(cachetools.LRUCache[K, V]):
    """Counts what it drops."""

    evictions = 0

    def popitem(self) -> tuple[K, V]:
        self.evictions += 1
        return super().popitem()


class AsyncSingleFlight(Generic[K, V]):
    """Runs one coroutine for each key at a time; callers that come meanwhile await the same result.

    An error reaches all who wait and is not kept. A caller that is cancelled does not cancel the others; when
    the last of them is cancelled, so is the coroutine.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[K, asyncio.AbstractEventLoop], _Flight[V]] = {}

    async def run(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        """Return the result of `ask`, or of the call that is in flight for `key` on this event loop."""
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


class _Flight(Generic[V]):
    """One coroutine and how many callers wait for it."""

    def __init__(self, task: "asyncio.Future[V]") -> None:
        self.task = task
        self.waiting = 0
