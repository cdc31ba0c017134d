"""Types that msgspec reads.

msgspec 0.22 reads the annotations of a struct when it meets the struct first. Two threads that meet one at
once crash the process, so types are shown to it one after another.
"""

import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from mmcodecs.forks import watch_forks

Kind = TypeVar("Kind")


class _FirstReading:
    """One type at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        self._lock = threading.Lock()

    def of(self, kind: Any) -> None:
        with self._lock, suppress(TypeError):  # the reading that follows reports a type without a form
            msgspec.msgpack.Decoder(kind)


_first = _FirstReading()
_read_once = lru_cache(maxsize=1024)(_first.of)


def ready(kind: Kind) -> Kind:
    """Return a type once msgspec has read it. To be used for each type that threads may read."""
    try:
        _read_once(kind)
    except TypeError:  # without a hash
        _first.of(kind)
    return kind
