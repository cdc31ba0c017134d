"""Threads of a renderer, which start at the first call and again after a fork, and waits on event loops."""

import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from mmcodecs.forks import watch_forks
from mmrender.errors import PoolClosedError, PoolFullError, check_count

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")

_QUEUE_PER_WORKER: Final = 4


class Threads(Executor):
    """A bounded number of threads, started at the first call.

    Args:
        count: The number.
        name: Prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._start = partial(ThreadPoolExecutor, count, name)
        self._is_closed = False
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Start new threads at the next call, since the parent's do not live in the child."""
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
        """Refuse further calls, and end the threads after the accepted calls. Idempotent."""
        with self._lock:
            self._is_closed = True
            executor = self._executor
        if executor is not None:
            executor.shutdown(wait, cancel_futures=cancel_futures)


class Workers:
    """Threads that carry out calls for event loops, with a queue, and threads that help with images.

    Args:
        count: Number of workers, by default one per processor, at most four.
        queue_size: Calls that may wait for a worker, by default four for each worker.
        media_threads: Threads that help with images, by default as many as workers.

    Attributes:
        media: The threads that help with images, or None.

    Raises:
        InputError: A size is too small.
    """

    def __init__(self, count: int | None, queue_size: int | None, media_threads: int | None) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
        self.count = min(4, processors) if count is None else count
        check_count("workers", self.count)
        self.queue_size = self.count * _QUEUE_PER_WORKER if queue_size is None else queue_size
        check_count("queue_size", self.queue_size, minimum=0)
        helping = self.count if media_threads is None else media_threads
        check_count("media_threads", helping, minimum=0)
        self.media = Threads(helping, "mmrender-media") if helping else None
        self._threads = Threads(self.count, "mmrender-pool")
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, context: contextvars.Context, nowait: bool, function: Callable[[], Result]) -> Result:
        """Call a function on a worker, in a context.

        Cancelling removes a queued call. A running call finishes, and its result is dropped.

        Raises:
            PoolFullError: The queue is full, and `nowait` is set.
            PoolClosedError: The threads are closed.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.count + self.queue_size))
        if nowait and places.locked():
            raise PoolFullError(
                "the pool's queue is full",
                expected=f"fewer than {self.count + self.queue_size} calls running or waiting",
                remedy="Call again later, leave out nowait, or make the pool with a larger queue_size",
            )
        await places.acquire()
        waiter: asyncio.Future[Result] = loop.create_future()

        def settle(future: Future[Result]) -> None:
            places.release()
            if waiter.cancelled() or future.cancelled():
                waiter.cancel()
            elif (error := future.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(future.result())

        def wake(future: Future[Result]) -> None:
            if not loop.is_closed():  # no caller waits on a closed loop
                loop.call_soon_threadsafe(settle, future)

        try:
            future = self._threads.submit(context.run, function)
        except BaseException:
            places.release()
            raise
        future.add_done_callback(wake)
        try:
            return await waiter
        finally:
            future.cancel()  # no effect once it runs

    def close(self) -> None:
        """Finish the queued calls, refuse further ones, and end the threads. Idempotent."""
        self._threads.shutdown()
        if self.media is not None:
            self.media.shutdown()


class Notifier:
    """Wakes the tasks that wait for a condition. For one event loop after another."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Have every waiter look at its condition again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, or return False after `timeout` seconds."""
        import asyncio

        if condition():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
        return condition()


async def gather_all(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all concurrently and return results in order. The first error cancels the rest and is raised."""
    import asyncio

    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]
