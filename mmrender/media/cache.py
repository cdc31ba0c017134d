"""A cache of processed items, bounded by the bytes they hold.

Items are found by identity. Sources that were seen before are found by fingerprint, without being decoded.
Threads that ask for the same item at once compute it once: the first one works, the others wait.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from mmrender.spans import MediaItem

DEFAULT_MAX_BYTES = 1 << 30
_ALIASES_PER_ITEM = 8
_MIN_ALIASES = 4096


class Preparation(Protocol):
    """A medium whose identity is known and whose item is still to be made."""

    @property
    def identity(self) -> str:
        """The identity that the finished item will have."""
        ...

    def finish(self) -> MediaItem:
        """Make the item."""
        ...


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a cache since it was made.

    Attributes:
        hits: Look-ups that found their item, by fingerprint or by identity.
        misses: Items that were computed.
        evictions: Items dropped to stay within the bound.
        items: Items held now.
        nbytes: Bytes held now.
        max_bytes: The bound.
    """

    hits: int
    misses: int
    evictions: int
    items: int
    nbytes: int
    max_bytes: int


class MediaCache:
    """Least recently used items are dropped first; one that is larger than the bound is never kept.

    Safe to share between threads and between processors: identities hold the processor's settings.

    Args:
        max_bytes: Bound on the sum of `item.nbytes`; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._items: OrderedDict[str, MediaItem] = OrderedDict()
        self._identities: OrderedDict[Hashable, str] = OrderedDict()
        self._running: dict[Hashable, _Flight] = {}
        self._nbytes = self._hits = self._misses = self._evictions = 0

    @property
    def stats(self) -> CacheStats:
        """Counters, taken together."""
        with self._lock:
            return CacheStats(
                self._hits, self._misses, self._evictions, len(self._items), self._nbytes, self.max_bytes
            )

    def get(self, identity: str) -> MediaItem | None:
        """Return the item of this identity if it is held."""
        with self._lock:
            return self._found(identity)

    def get_or_compute(self, identity: str, compute: Callable[[], MediaItem]) -> MediaItem:
        """Return the item of this identity, computing it unless it is held or another thread is at it.

        Where that thread fails, one of those that waited computes it itself, so that each caller's error is
        about what that caller passed.
        """
        return self._once(
            ("identity", identity), lambda: self._found(identity), lambda: self._store(compute())
        )

    def get_or_prepare(self, source: Hashable, prepare: Callable[[], Preparation]) -> MediaItem:
        """Return the item that comes of a source, preparing it unless the source was seen before.

        Args:
            source: A key that determines the item, such as a fingerprint with the processor's settings.
            prepare: Loads the source and identifies it.
        """
        return self._once(
            ("source", source),
            lambda: self._found(self._identities.get(source)),
            lambda: self.bind(source, self.get_or_finish(prepare())),
        )

    def get_or_finish(self, preparation: Preparation) -> MediaItem:
        """Return the item of an identified medium, finishing it unless it is held."""
        return self.get_or_compute(preparation.identity, preparation.finish)

    def bind(self, source: Hashable, item: MediaItem) -> MediaItem:
        """Let a source's key lead to an item, which is returned."""
        with self._lock:
            self._identities[source] = item.identity
            self._identities.move_to_end(source)
            # Sources may outnumber items; the oldest keys go first.
            while len(self._identities) > max(_MIN_ALIASES, _ALIASES_PER_ITEM * len(self._items)):
                self._identities.popitem(last=False)
        return item

    def clear(self) -> None:
        """Drop all items; counters stay."""
        with self._lock:
            self._items.clear()
            self._identities.clear()
            self._nbytes = 0

    def _once(
        self, key: Hashable, find: Callable[[], MediaItem | None], compute: Callable[[], MediaItem]
    ) -> MediaItem:
        """Find or compute, with at most one thread computing for `key`; `find` runs under the lock."""
        while True:
            with self._lock:
                if (item := find()) is not None:
                    return item
                flight = self._running.get(key)
                if flight is None:
                    leading = self._running[key] = _Flight()
                    break
            flight.done.wait()
            if flight.item is not None:
                with self._lock:
                    self._hits += 1
                return flight.item
        try:
            leading.item = compute()
            return leading.item
        finally:
            with self._lock:
                del self._running[key]
            leading.done.set()

    def _found(self, identity: str | None) -> MediaItem | None:
        if identity is None or (item := self._items.get(identity)) is None:
            return None
        self._items.move_to_end(identity)
        self._hits += 1
        return item

    def _store(self, item: MediaItem) -> MediaItem:
        with self._lock:
            self._misses += 1
            if (held := self._items.pop(item.identity, None)) is not None:
                self._nbytes -= held.nbytes
            if item.nbytes > self.max_bytes:
                return item
            self._items[item.identity] = item
            self._nbytes += item.nbytes
            while self._nbytes > self.max_bytes:
                _, dropped = self._items.popitem(last=False)
                self._nbytes -= dropped.nbytes
                self._evictions += 1
        return item


class _Flight:
    """One computation that several threads wait for; `item` stays `None` where it failed."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.item: MediaItem | None = None
