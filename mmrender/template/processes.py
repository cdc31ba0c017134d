"""Chat templates in child processes that the operating system bounds, for templates that nobody vouches for.

A child compiles and runs the template; text with its spans comes back, or an error of the one tree. Media do
not cross, since no template reads them.
"""

import ctypes
import math
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Self

import msgspec

from mmcodecs.forks import watch_forks
from mmrender.errors import InputError, PoolClosedError, PoolError, TemplateLimitError
from mmrender.messages import UNKNOWN_SOURCE, ImagePart, Message, VideoPart
from mmrender.template.chat import ChatTemplate
from mmrender.template.text import Spans, TracedStr, plain

_MEMORY = Path("/proc/self/statm")


class TemplateProcesses:
    """Processes that run templates; pass them to `Renderer.from_pretrained(template_processes=...)`.

    One that exceeds its limits is ended, and the calls in flight fail; the next call starts another one.

    Args:
        count: Number of processes, at least 1.
        memory_bytes: What each may take beyond what it starts with.
        cpu_seconds: Processor time of one rendering, in seconds.

    Raises:
        InputError: `cpu_seconds` is not positive, or infinite.
        PoolError: This platform cannot bound a process.
    """

    def __init__(self, count: int = 1, *, memory_bytes: int = 1 << 30, cpu_seconds: float = 10) -> None:
        if not _MEMORY.exists():
            raise PoolError("this platform cannot bound the memory of a process", expected="Linux")
        if not 0 < cpu_seconds < math.inf:
            raise InputError(
                "not a bound on processor time",
                where="cpu_seconds",
                expected="a positive number of seconds",
                got=repr(cpu_seconds),
            )
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
        """Leave the processes to the parent that started them; the next call starts others."""
        self._lock = threading.Lock()
        # Kept alive: freed, it would take locks that threads of the parent may hold.
        self._inherited.append(self._executor)
        self._executor = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes are started where it arrives.
        return self._again, ()

    def ask(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return what a function gives in a process.

        Raises:
            TemplateLimitError: The process exceeded its limits.
            PoolClosedError: The processes were ended by `close`.
        """
        with self._lock:
            if self._closed:
                raise PoolClosedError("the processes of chat templates were closed")
            executor = self._executor = self._executor or self._start()
            future = executor.submit(_bounded, self.cpu_seconds, function, *given)
        try:
            return future.result()
        except (BrokenProcessPool, MemoryError) as error:
            with self._lock:
                if self._executor is executor and not self._closed:
                    executor.shutdown(wait=False)
                    self._executor = None
            raise TemplateLimitError(
                "the process that ran the chat template was ended",
                expected=f"at most {self.limits}",
                got="more",
                remedy="If you trust the template, pass larger limits to TemplateProcesses",
            ) from error

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


class IsolatedTemplate(ChatTemplate):
    """A chat template that is compiled and run in child processes; errors as for `ChatTemplate`.

    Args:
        source: Jinja text.
        processes: Where it runs.
        **options: Those of `ChatTemplate`; `clock` must be a function that a module defines.
    """

    def __init__(self, source: str, *, processes: TemplateProcesses, **options: Any) -> None:
        self._processes = processes
        self._recipe = _pickled(partial(ChatTemplate, source, **options), "clock")
        super().__init__(source, **options)

    def _compile(self) -> None:
        self.arguments = self._processes.ask(_arguments, self._recipe)

    def render(self, messages: Sequence[Message], **options: Any) -> TracedStr:
        """Render in a process; see `ChatTemplate.render`."""
        given = _pickled(([_without_media(message) for message in messages], options), "chat_template_kwargs")
        text, spans = self._processes.ask(_rendered, self._recipe, given)
        return TracedStr(text, spans)


def _pickled(value: Any, where: str) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        problem = "this value cannot be sent to the process that runs the chat template"
        raise InputError(problem, where=where, expected="plain values", got=str(error)) from error


def _without_media(message: Message) -> Message:
    if not any(message.media()):
        return message
    content = [
        msgspec.structs.replace(part, source=UNKNOWN_SOURCE)
        if isinstance(part, ImagePart | VideoPart)
        else part
        for part in message.content or ()
    ]
    return msgspec.structs.replace(message, content=tuple(content))


# In the child.


@cache
def _timer() -> Callable[[float], None]:
    """Return what sets the timer of this process's processor time, which ends it (`man 2 timer_create`).

    It takes seconds; 0 stops the timer. `RLIMIT_CPU` and `ITIMER_PROF` count ticks of the scheduler instead,
    and may miss half of them on a busy machine.
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

    # Without a description of its event it is SIGALRM, which whoever started this process may have ignored.
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


@lru_cache(maxsize=8)
def _template(recipe: bytes) -> ChatTemplate:
    template: ChatTemplate = pickle.loads(recipe)()  # noqa: S301 - the parent wrote it
    return template


def _arguments(recipe: bytes) -> tuple[str, ...]:
    return _template(recipe).arguments


def _rendered(recipe: bytes, given: bytes) -> tuple[str, Spans]:
    messages, options = pickle.loads(given)  # noqa: S301
    text = _template(recipe).render(messages, **options)
    return plain(text), text.spans
