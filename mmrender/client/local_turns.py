"""Many pieces of work on one thread, each a step at a time in turn.

The thread starts with the first piece and ends with the last, so nothing has to be closed. A piece of work is
a generator that yields between its steps; what it returns is the result. A future that is cancelled ends its
work at the next step.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]


class TurnTaker:
    """Runs steps of many generators on one thread.

    Args:
        max_active: Pieces of work that are under way at once; further ones wait, in order.
    """

    def __init__(self, max_active: int) -> None:
        self._max_active = max_active
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._waiting: deque[tuple[Steps[Any], Future[Any]]] = deque()
        self._is_running = False

    def submit(self, steps: Steps[Result]) -> "Future[Result]":
        """Queue a piece of work; the future ends with what it returns or raises."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.append((steps, future))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="mmrender-local").start()
        return future

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold every piece of work between two of its steps."""
        with self._step_lock:
            yield

    def _run(self) -> None:
        active: deque[tuple[Steps[Any], Future[Any]]] = deque()
        while True:
            with self._lock:
                while self._waiting and len(active) < self._max_active:
                    active.append(self._waiting.popleft())
                if not active:
                    self._is_running = False
                    return
            steps, future = active.popleft()
            if self._step(steps, future):
                active.append((steps, future))
            # A future keeps its result alive, and this loop may wait long for its next.
            del steps, future

    def _step(self, steps: Steps[Any], future: "Future[Any]") -> bool:
        """Make one step; whether there are more."""
        if future.cancelled():
            steps.close()
            return False
        try:
            with self._step_lock:
                next(steps)
        except StopIteration as end:
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - whoever awaits the result gets it
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            return True
        return False
