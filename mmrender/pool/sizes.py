"""How large a pool is."""

import os
from dataclasses import dataclass
from typing import Any, Self

from mmrender.errors import InputError

_QUEUE_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How large a pool is.

    Attributes:
        workers: Threads that carry out calls.
        queue_size: Calls that may wait for a worker.
        media_threads: Threads that help a call with its images, whatever thread it runs on; 0 for none.
    """

    workers: int
    queue_size: int
    media_threads: int

    @classmethod
    def of(cls, workers: int | None, queue_size: int | None, media_threads: int | None) -> Self:
        """Fill in defaults, for which see `RendererPool`.

        Raises:
            InputError: A size is too small.
        """
        workers = min(4, _processors()) if workers is None else _at_least(1, workers, "workers")
        queue = workers * _QUEUE_PER_WORKER if queue_size is None else _at_least(0, queue_size, "queue_size")
        media = workers if media_threads is None else _at_least(0, media_threads, "media_threads")
        return cls(workers, queue, media)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _at_least(least: int, given: Any, where: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        expected = f"a whole number, {least} at least"
        raise InputError("not a size of a pool", where=where, expected=expected, got=repr(given))
    return int(given)
