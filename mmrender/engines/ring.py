"""Consistent hashing: which engine a session belongs to, so that adding one moves few of them.

Each engine stands at many places of a ring, found by hashing its name; a session belongs to the first engine
after its own place. Places depend on names only, so every process agrees.
"""

from bisect import bisect
from collections.abc import Collection, Hashable, Iterable, Iterator

import xxhash


class HashRing:
    """Engines on a ring.

    Args:
        names: Names of the engines.
        virtual_nodes: Places of each engine. Shares of sessions differ between engines by about
            `1 / sqrt(virtual_nodes)`.
    """

    def __init__(self, names: Iterable[str], virtual_nodes: int) -> None:
        places = sorted(
            (_place(f"{name}#{number}"), name) for name in set(names) for number in range(virtual_nodes)
        )
        self._places = [place for place, _ in places]
        self._names = [name for _, name in places]
        self._count = len(set(self._names))

    def owner(self, session: Hashable, allowed: Collection[str]) -> str | None:
        """The engine of a session, or the next one on the ring where that is not allowed."""
        for name in self.order(session):
            if name in allowed:
                return name
        return None

    def order(self, session: Hashable) -> Iterator[str]:
        """Every engine once, in the order in which a session would use them."""
        start = bisect(self._places, _place(session_text(session)))
        seen: set[str] = set()
        for step in range(len(self._names)):
            name = self._names[(start + step) % len(self._names)]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == self._count:
                    return


def session_text(session: Hashable) -> str:
    """The text that a session id is hashed by; ids of different types never fall together."""
    return f"{type(session).__name__}:{session}"


def _place(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
