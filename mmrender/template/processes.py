"""Chat templates in child processes that the operating system bounds, for templates that nobody vouches for.

A child compiles and runs the template; text with its spans comes back, or an error of the one tree. Media do
not cross, since no template reads them.
"""

import math
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import msgspec

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
        cpu_seconds: Processor time of one rendering, in whole seconds.

    Raises:
        PoolError: This platform cannot bound a process.
    """

    def __init__(self, count: int = 1, *, memory_bytes: int = 1 << 30, cpu_seconds: int = 10) -> None:
        if not _MEMORY.exists():
            raise PoolError("this platform cannot bound the memory of a process", expected="Linux")
        self.limits = f"{memory_bytes:,} bytes of memory and {cpu_seconds} s of processor time"
        self.cpu_seconds = cpu_seconds
        self._start = partial(
            ProcessPoolExecutor,
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_bound_memory,
            initargs=(memory_bytes,),
        )
        self._executor = self._start()
        self._lock = threading.Lock()
        self._closed = False
        self._settings = {"count": count, "memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds}

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes are started where it arrives.
        return partial(type(self), **self._settings), ()

    def ask(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return what a function gives in a process.

        Raises:
            TemplateLimitError: The process exceeded its limits.
            PoolClosedError: The processes were ended by `close`.
        """
        with self._lock:
            if self._closed:
                raise PoolClosedError("the processes of chat templates were closed")
            executor = self._executor
            future = executor.submit(_bounded, self.cpu_seconds, function, *given)
        try:
            return future.result()
        except (BrokenProcessPool, MemoryError) as error:
            with self._lock:
                if self._executor is executor and not self._closed:
                    executor.shutdown(wait=False)
                    self._executor = self._start()
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
        self._executor.shutdown()

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


def _bound_memory(more: int) -> None:
    import resource

    bound = int(_MEMORY.read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _bounded(cpu_seconds: int, function: Callable[..., Any], *given: Any) -> Any:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    return function(*given)


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
