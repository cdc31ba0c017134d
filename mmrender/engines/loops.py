"""Waiting that works across event loops and threads.

A trainer pauses from its own loop while an HTTP endpoint samples on another, so what guards engines cannot
belong to one loop, as asyncio's own locks do. Nothing here is tied to a loop before somebody waits on it.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Loop: TypeAlias = asyncio.AbstractEventLoop


def _wake(loop: Loop, future: "asyncio.Future[None]") -> bool:
    """Let whoever awaits the future go on; False where its loop is gone."""

    def release() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(release)
    except RuntimeError:  # closed
        return False
    return True


class Signal:
    """Wakes coroutines when something that they wait for may have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], Loop] = {}

    def notify(self) -> None:
        """Let all who wait look again. To be called after the change."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future, loop in waiting.items():
            _wake(loop, future)

    async def wait_until(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` holds; False where `timeout` seconds pass before it does."""
        if predicate():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wait(predicate)
                return True
        return predicate()

    async def _wait(self, predicate: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if predicate():
                    return
                future: asyncio.Future[None] = loop.create_future()
                self._waiting[future] = loop
            try:
                await future
            finally:
                with self._lock:
                    self._waiting.pop(future, None)


class _Place:
    """Somebody in the queue for a slot."""

    __slots__ = ("future", "granted", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.granted = False


class Slots:
    """A bounded number of places, given in the order in which they were asked for.

    Args:
        limit: Number of places; None for any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self._queue: deque[_Place] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._queue)

    async def acquire(self) -> None:
        """Take a place, waiting for one if need be."""
        with self._lock:
            if self.limit is None or (self.used < self.limit and not self._queue):
                self.used += 1
                return
            place = _Place()
            self._queue.append(place)
        try:
            await place.future
        except BaseException:
            with self._lock:
                granted = place.granted
                if not granted:
                    with contextlib.suppress(ValueError):  # passed over by `release` already
                        self._queue.remove(place)
            if granted:  # cancelled between being called and coming
                self.release()
            raise

    def release(self) -> None:
        """Give a place back: to the first in the queue, if there is one."""
        with self._lock:
            while self._queue:
                place = self._queue.popleft()
                if place.future.done():
                    continue
                place.granted = True
                if _wake(place.loop, place.future):
                    return
            self.used -= 1
