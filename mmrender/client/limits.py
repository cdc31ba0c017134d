"""How many prompt tokens a server takes, asked once for each server, model and kind of engine."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias

from mmrender.client.backend import RendererBackend
from mmrender.client.transport import Transport

Key: TypeAlias = tuple[str, str, str]
_MOST: Final = 4096


class PromptLimits:
    """Remembers what servers said; calls that ask at the same time share one request.

    What a server said is kept, also that it says nothing. A look-up that failed is not: it is made again by
    the next call that comes after a pause.

    Args:
        pause: Seconds after a failure in which nothing is asked.
        clock: Seconds that only rise.
    """

    def __init__(self, *, pause: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, int | None] = OrderedDict()
        self._failed: dict[Key, float] = {}
        self._asking: dict[Key, asyncio.Task[int | None]] = {}

    async def get(self, backend: RendererBackend, model: str, transport: Transport) -> int | None:
        """Return the most tokens that a prompt may have; None where that is not known.

        Raises:
            EngineError: The server could not be asked.
        """
        # A transport that is no way to its URL has a name of its own.
        server = getattr(transport, "server_key", transport.base_url)
        key = (server, model, backend.name)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            if self._clock() < self._failed.get(key, -1.0):
                return None
        # One who gives up must not take the answer away from the others.
        return await asyncio.shield(self._asked(key, backend, model, transport))

    def forget(self) -> None:
        """Drop everything, such as after servers were restarted with other settings."""
        with self._lock:
            self._known.clear()
            self._failed.clear()

    def _asked(
        self, key: Key, backend: RendererBackend, model: str, transport: Transport
    ) -> "asyncio.Task[int | None]":
        task = self._asking.get(key)
        # A task of another event loop cannot be awaited here.
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.get_running_loop().create_task(_ask(backend, model, transport))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._note(key, done))
        return task

    def _note(self, key: Key, task: "asyncio.Task[int | None]") -> None:
        with self._lock:
            if self._asking.get(key) is task:
                del self._asking[key]
            if task.cancelled():
                return
            if task.exception() is not None:
                self._failed[key] = self._clock() + self._pause
                return
            self._failed.pop(key, None)
            self._known[key] = task.result()
            while len(self._known) > _MOST:
                self._known.popitem(last=False)


async def _ask(backend: RendererBackend, model: str, transport: Transport) -> int | None:
    return await backend.resolve_max_prompt_len(model, transport)


LIMITS: Final = PromptLimits()
"""What `generate` remembers, for this process."""
