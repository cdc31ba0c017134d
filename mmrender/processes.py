"""Child processes with limits of the operating system, for untrusted templates, images and videos."""

import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

from mmcodecs.forks import watch_forks
from mmrender.errors import MMRenderError, PoolClosedError, PoolError, check_number

_MEMORY = Path("/proc/self/statm")


class BoundedProcesses:
    """Processes that run templates and decode media, each with limits on its memory and processor time.

    Pass them to `Renderer.from_pretrained(template_processes=...)` and to `MediaPolicy(processes=...)`. A
    process that exceeds its limits is ended, and the calls in flight fail. The next call starts another
    process.

    Args:
        count: Number of processes, at least 1.
        memory_bytes: Maximum memory of each process, besides its memory at the start.
        cpu_seconds: Maximum processor time of one rendering, image or video, in seconds.

    Raises:
        InputError: `cpu_seconds` is not positive, or infinite.
        PoolError: This platform cannot bound a process.
    """

    def __init__(self, count: int = 1, *, memory_bytes: int = 1 << 30, cpu_seconds: float = 10) -> None:
        # Imported here, since most programs need no processes.
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        if not _MEMORY.exists():
            raise PoolError("this platform cannot bound the memory of a process", expected="Linux")
        check_number("cpu_seconds", cpu_seconds, above=0)
        self.limits = f"{memory_bytes:,} bytes of memory and {cpu_seconds:g} s of processor time"
        self.cpu_seconds = cpu_seconds
        self._start = partial(
            ProcessPoolExecutor,
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_bounded,
            initargs=(memory_bytes,),
        )
        self._executor: ProcessPoolExecutor | None = None
        self._inherited: list[ProcessPoolExecutor | None] = []
        self._closed = False
        self._again = partial(type(self), count, memory_bytes=memory_bytes, cpu_seconds=cpu_seconds)
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Leave the processes to the parent, and start new ones at the next call."""
        self._lock = threading.Lock()
        # Kept alive, since freeing it would take locks that threads of the parent may hold.
        self._inherited.append(self._executor)
        self._executor = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiver starts processes of its own.
        return self._again, ()

    def ask(self, work: str, error: type[MMRenderError], function: Callable[..., Any], *given: Any) -> Any:
        """Return the result of a function that runs in a process.

        Args:
            work: The function's work in words, for the error, such as `"ran the chat template"`.
            error: Raised if the process exceeds its limits.
            function: A function that a module defines.
            *given: Its arguments.

        Raises:
            MMRenderError: The process exceeded its limits, or the function raised an error.
            PoolClosedError: `close` ended the processes.
        """
        with self._lock:
            if self._closed:
                raise PoolClosedError("the bounded processes were closed")
            executor = self._executor = self._executor or self._start()
            future = executor.submit(_bounded, self.cpu_seconds, function, *given)
        try:
            return future.result()
        except (BrokenExecutor, MemoryError) as cause:
            with self._lock:
                if self._executor is executor and not self._closed:
                    executor.shutdown(wait=False)
                    self._executor = None
            raise error(
                f"the process that {work} was ended",
                expected=f"at most {self.limits}",
                got="more",
                remedy="If you trust it, pass larger limits to BoundedProcesses",
            ) from cause

    def close(self) -> None:
        """End the processes. Idempotent."""
        with self._lock:
            self._closed = True
            executor = self._executor
        if executor is not None:
            executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# In the child.


@cache
def _timer() -> Callable[[float], None]:
    """Return a function that sets the timer which ends this process, in seconds of its processor time.

    0 stops the timer (`man 2 timer_create`). `RLIMIT_CPU` and `ITIMER_PROF` count ticks of the scheduler
    instead, and may miss half of them on a busy machine.
    """
    try:
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    except OSError:  # as with musl, whose libc has it
        library = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), "no timer of processor time")

    def set_timer(seconds: float) -> None:
        whole, nanoseconds = divmod(math.ceil(seconds * 1e9), 10**9)
        # The interval, none, and the time until it fires.
        fields = (ctypes.c_long * 4)(0, 0, whole, nanoseconds)
        check(library.timer_settime(timer, 0, fields, None))

    # The timer sends SIGALRM by default, which the parent process may have ignored.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    check(library.timer_create(time.CLOCK_PROCESS_CPUTIME_ID, None, ctypes.byref(timer)))
    return set_timer


def _start_bounded(more: int) -> None:
    import resource

    _timer()
    bound = int(_MEMORY.read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _bounded(cpu_seconds: float, function: Callable[..., Any], *given: Any) -> Any:
    set_timer = _timer()
    set_timer(cpu_seconds)
    try:
        return function(*given)
    finally:
        set_timer(0)
