"""Engines as a client sees them: requests in flight, which any thread can end, and calls to several."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal, TypeAlias

from mmrender.engines.interface import InferenceEngineInterface, Result
from mmrender.errors import EngineTimeoutError, EngineUnavailableError

Action: TypeAlias = Callable[[InferenceEngineInterface], Awaitable[Any]]
Ending: TypeAlias = Literal["paused", "aborted", "down", "late"]
"""Why the client itself ended a request."""


class Condition:
    """Like `asyncio.Condition`, for waiters on several event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def notify_all(self) -> None:
        """Let all waiters test their predicates again. To be called after the change."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for event, loop in waiting.items():
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(event.set)

    async def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` holds; return False if `timeout` seconds pass before it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    event = asyncio.Event()
                    with self._lock:
                        if predicate():
                            return True
                        self._waiting[event] = asyncio.get_running_loop()
                    try:
                        await event.wait()
                    finally:
                        with self._lock:
                            self._waiting.pop(event, None)
        return predicate()


class Call:
    """One request in flight, which any thread can end; made and awaited on one event loop.

    `limit` is the seconds it may take, pauses not counted; `about` describes it in errors.
    """

    def __init__(self, limit: float | None, about: str = "a request") -> None:
        self.limit = limit
        self.about = about
        self.begun = time.monotonic()
        self.clock: asyncio.TimerHandle | None = None
        self.ending: Ending | None = None
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)

    async def run(self, request: Awaitable[Result], name: str) -> Result | None:
        """Await the request to an engine; None where it was ended for a pause or an abort.

        Raises:
            EngineUnavailableError: It was ended because its engine is down.
            EngineTimeoutError: It was ended because it took too long.
        """
        try:
            async with self._scope:
                return await request
        except TimeoutError as error:
            if not self._scope.expired():
                raise EngineTimeoutError("the engine timed out", where=name) from error
            if self.ending == "down":
                raise EngineUnavailableError("the engine does not answer", where=name) from error
            if self.ending == "late":
                problem = f"the engine did not answer within {self.limit:g} s"
                raise EngineTimeoutError(problem, where=name) from error
            return None
        finally:
            if self.clock is not None:
                self.clock.cancel()

    def end(self, reason: Ending) -> None:
        """End it."""

        def end() -> None:
            self.ending = self.ending or reason
            with contextlib.suppress(RuntimeError):  # it has ended, or not begun
                self._scope.reschedule(self._loop.time())

        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(end)


class Replica:
    """One engine.

    Attributes:
        engine: The engine.
        name: Its name.
        calls: Requests in flight.
        down: Why it gets no requests; None while it does.
        stale: Whether it missed a weight update, or failed within one.
    """

    def __init__(self, engine: InferenceEngineInterface) -> None:
        self.engine = engine
        self.name = engine.name
        self.calls: set[Call] = set()
        self.down: str | None = None
        self.stale = False


async def answers(
    replicas: Collection[Replica], action: Action, *, within: float | None = None
) -> list[Any | BaseException]:
    """Act on engines concurrently; return each answer or error. `within` bounds each, in seconds."""

    async def ask(replica: Replica) -> Any:
        scope = asyncio.timeout(within)
        try:
            async with scope:
                return await action(replica.engine)
        except TimeoutError as error:
            bound = f" within {within:g} s" if scope.expired() else ""
            raise EngineTimeoutError(f"the engine did not answer{bound}", where=replica.name) from error

    return await asyncio.gather(*map(ask, replicas), return_exceptions=True)


async def failures(
    replicas: Collection[Replica], action: Action, *, within: float | None = None
) -> list[tuple[Replica, BaseException]]:
    """Act on engines concurrently; return those that failed, with their errors. `within` is in seconds."""
    failed = []
    for replica, answer in zip(replicas, await answers(replicas, action, within=within), strict=True):
        if isinstance(answer, BaseException):
            answer.add_note(f"engine {replica.name}")
            failed.append((replica, answer))
    return failed
