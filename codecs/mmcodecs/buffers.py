"""Aligned memory that is used again.

Writing into fresh memory costs six to nine times a copy into warm memory, because the system hands the pages
out one by one. A pool keeps them. A buffer comes back when its last view is gone: a decoded array, a tensor
over it, or a slice of either.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mmcodecs.forks import watch_forks

ALIGNMENT = 64
_STEP = 4096
_HUGE = 2 << 20
_POOLED_FROM = 1 << 20
"""Bytes from which on an array reuses memory."""
_HUGE_FROM = 3 << 19
"""Bytes from which on a buffer consists of huge pages. It wastes at most a quarter of them."""

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
Buffer: TypeAlias = bytearray | memoryview | Bytes


def aligned_empty(nbytes: int) -> Bytes:
    """Return `nbytes` of uninitialised memory whose address is a multiple of 64."""
    slab = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -slab.ctypes.data % ALIGNMENT
    return slab[start : start + nbytes]


def _slab(nbytes: int) -> Bytes:
    """Return aligned memory for at least `nbytes`, in huge pages if it is long and the system has them.

    A huge page comes in a third of the time of the ordinary pages that it replaces.
    """
    if nbytes < _HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_empty(max(1, -(-nbytes // _STEP)) * _STEP)
    rounded = -(-nbytes // _HUGE) * _HUGE
    pages = mmap.mmap(-1, rounded + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(pages, np.uint8)
    start = -slab.ctypes.data % _HUGE
    return slab[start : start + rounded]


class BufferPool:
    """Buffers of any size, aligned to 64 bytes, which return when their last view is gone. Thread-safe.

    Args:
        max_idle_bytes: Memory that is kept while unused. Beyond it, the smallest buffers are freed.
    """

    def __init__(self, max_idle_bytes: int = 1 << 30) -> None:
        self.max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[Bytes] = []
        # A finalizer may run anywhere, even inside of acquire on its thread: it only appends (atomic).
        self._returned: deque[Bytes] = deque()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Replace the lock, which another thread may hold."""
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for its next use."""
        self._settle()
        return sum(slab.nbytes for slab in list(self._idle))

    def acquire(self, nbytes: int) -> memoryview:
        """Return a writable view of exactly `nbytes`, with old bytes in it.

        The smallest idle buffer of `nbytes` to twice as many is used. Without one, memory is allocated.
        """
        self._settle()
        with self._lock:
            fits = (i for i, slab in enumerate(self._idle) if nbytes <= slab.nbytes <= max(2 * nbytes, _STEP))
            best = next(fits, None)
            slab = None if best is None else self._idle.pop(best)
        if slab is None:
            slab = _slab(nbytes)
        # A view of its own, which every memoryview and array over it keeps alive, and nothing else does.
        lease = slab[:nbytes]
        weakref.finalize(lease, self._settle, slab).atexit = False
        return lease.data

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a writable array with any values. A small one is not from the pool."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _POOLED_FROM:
            return np.empty(shape, dtype)
        return np.frombuffer(self.acquire(nbytes), dtype).reshape(shape)

    def _settle(self, *returned: Bytes) -> None:
        """Sort returned buffers into the idle list, unless another thread does so, which sees these too."""
        self._returned.extend(returned)
        lock = self._lock  # a fork may replace it meanwhile
        while self._returned and lock.acquire(blocking=False):
            try:
                while self._returned:
                    insort(self._idle, self._returned.popleft(), key=lambda slab: slab.nbytes)
                while sum(slab.nbytes for slab in self._idle) > self.max_idle_bytes:
                    del self._idle[0]
            finally:
                lock.release()
