"""A bounded number of places, waited for by coroutines of any event loop."""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future

from mmrender.errors import PoolClosedError, PoolFullError


class Admission:
    """Hands out places in the order in which they were asked for. Safe to use from many threads and loops.

    Args:
        places: How many there are.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self._free = places
        self._waiting: deque[Future[None]] = deque()
        self._closed = False
        self._lock = threading.Lock()

    def enter_now(self) -> None:
        """Take a place.

        Raises:
            PoolFullError: None is free.
            PoolClosedError: `close` was called.
        """
        if self._enter(wait=False) is not None:
            raise PoolFullError(
                "every place in the pool is taken",
                expected=f"fewer than {self.places} calls running or waiting",
                remedy="Call again later, leave out nowait, or make the pool with a larger queue_size",
            )

    async def enter(self) -> None:
        """Take a place, waiting for one if need be.

        Raises:
            PoolClosedError: `close` was called before or meanwhile.
        """
        turn = self._enter(wait=True)
        if turn is None:
            return
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            # A turn that can no longer be cancelled was granted at the same moment: pass it on.
            if not turn.cancel() and turn.exception() is None:
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back, to whoever has waited longest."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        turn.set_result(None)

    def close(self) -> None:
        """Refuse all who wait and all who come."""
        with self._lock:
            self._closed = True
            waiting = [turn for turn in self._waiting if turn.set_running_or_notify_cancel()]
            self._waiting.clear()
        for turn in waiting:
            turn.set_exception(closed_error())

    def _enter(self, *, wait: bool) -> "Future[None] | None":
        """Take a place and return None, or return the turn that is waited for."""
        with self._lock:
            if self._closed:
                raise closed_error()
            if self._free:
                self._free -= 1
                return None
            turn: Future[None] = Future()
            if wait:
                self._waiting.append(turn)
            return turn


def closed_error() -> PoolClosedError:
    """The error for a call on a closed pool."""
    return PoolClosedError(
        "the pool is closed", remedy="Make another one, or keep it open until all calls are done"
    )
