"""The threads of a renderer: they open at the first call, open again after a fork, and are closed by name."""

import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from mmcodecs.forks import watch_forks
from mmrender.errors import InputError, PoolClosedError, PoolFullError

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")

_QUEUE_PER_WORKER: Final = 4


class Threads(Executor):
    """A bounded number of threads, opened at the first call.

    Args:
        count: The number.
        name: What their names begin with.
    """

    def __init__(self, count: int, name: str) -> None:
        self._start = partial(ThreadPoolExecutor, count, name)
        self._is_closed = False
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Open other threads at the next call: the parent's are not alive in the child."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        """Call a function on a thread.

        Raises:
            PoolClosedError: The threads are closed.
        """
        with self._lock:
            if self._is_closed:
                raise PoolClosedError(
                    "the pool is closed", remedy="Make another one, or keep it open until all calls are done"
                )
            self._executor = self._executor or self._start()
            return self._executor.submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls, and end the threads after the calls that were taken. Idempotent."""
        with self._lock:
            self._is_closed = True
            executor = self._executor
        if executor is not None:
            executor.shutdown(wait, cancel_futures=cancel_futures)


class Workers:
    """Threads that carry out calls for event loops, with a queue, and threads that help with images.

    Args:
        count: Calls carried out at once; by default one per processor, at most four.
        queue_size: Calls that may wait for a worker; by default four for each worker.
        media_threads: Threads that help with images, by default as many as workers.

    Attributes:
        media: Those threads, or None.

    Raises:
        InputError: A size is too small.
    """

    def __init__(self, count: int | None, queue_size: int | None, media_threads: int | None) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
        self.count = _size(count, min(4, processors), 1, "workers")
        self.queue_size = _size(queue_size, self.count * _QUEUE_PER_WORKER, 0, "queue_size")
        helping = _size(media_threads, self.count, 0, "media_threads")
        self.media = Threads(helping, "mmrender-media") if helping else None
        self._threads = Threads(self.count, "mmrender-pool")
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, context: contextvars.Context, nowait: bool, function: Callable[[], Result]) -> Result:
        """Call a function on a worker, in a context.

        A caller that is cancelled leaves the queue. A call that has begun runs to its end, and its result is
        dropped.

        Raises:
            PoolFullError: `nowait`, and every place is taken.
            PoolClosedError: The threads are closed.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.count + self.queue_size))
        if nowait and places.locked():
            raise PoolFullError(
                "every place in the pool is taken",
                expected=f"fewer than {self.count + self.queue_size} calls running or waiting",
                remedy="Call again later, leave out nowait, or make the pool with a larger queue_size",
            )
        await places.acquire()
        try:
            future = self._threads.submit(context.run, function)
        except BaseException:
            places.release()
            raise

        def release(_: object) -> None:
            if not loop.is_closed():  # nobody waits on a closed loop
                loop.call_soon_threadsafe(places.release)

        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish the calls that have a place, refuse all others, and end the threads. Idempotent."""
        self._threads.shutdown()
        if self.media is not None:
            self.media.shutdown()


def _size(size: int | None, default: int, minimum: int, where: str) -> int:
    if size is None:
        return default
    if type(size) is not int or size < minimum:
        expected = f"a whole number, {minimum} at least"
        raise InputError("not a size of a pool", where=where, expected=expected, got=repr(size))
    return size
