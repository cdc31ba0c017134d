"""The engines of a client, each with what the client knows of it at run time."""

import asyncio
from collections.abc import Awaitable
from typing import Final, Literal, TypeAlias, TypeVar

from mmrender.engines.interface import InferenceEngineInterface
from mmrender.engines.loops import Signal, Slots
from mmrender.errors import EngineTimeoutError, EngineUnavailableError

Result = TypeVar("Result")
Ending: TypeAlias = Literal["paused", "aborted", "ejected"]
"""Why a client ends a request of its own accord."""


FAILED: Final = -1
"""Stands for the count of weight updates of an engine that may have half of one."""


class EndedError(Exception):
    """A request was ended by its own client, for a pause or an abort, and gave nothing."""


class Call:
    """One request under way, which any thread can end. Made and awaited on one event loop.

    Args:
        limit: Seconds it may take; None for any time.
    """

    def __init__(self, limit: float | None) -> None:
        self.ending: Ending | None = None
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(limit)

    async def run(self, request: Awaitable[Result], name: str) -> Result:
        """Await the request.

        Raises:
            EndedError: It was ended for a pause or an abort.
            EngineUnavailableError: It was ended because its engine was ejected.
            EngineTimeoutError: It took too long.
        """
        try:
            async with self._scope:
                return await request
        except TimeoutError as error:
            if not self._scope.expired():
                raise
            if self.ending in ("paused", "aborted"):
                raise EndedError from error
            if self.ending == "ejected":
                raise EngineUnavailableError("the engine does not answer", where=name) from error
            raise EngineTimeoutError(
                f"the engine did not answer within {self._limit:g} s", where=name
            ) from error

    def end(self, reason: Ending) -> None:
        """End it, for a reason."""
        self._reschedule(0.0, reason)

    def hold(self) -> None:
        """Let no time count against its limit."""
        self._reschedule(None)

    def go_on(self) -> None:
        """Count time again, from now."""
        self._reschedule(self._limit)

    def _reschedule(self, seconds: float | None, ending: Ending | None = None) -> None:
        def change() -> None:
            if ending is not None:
                self.ending = self.ending or ending
            elif self.ending is not None:
                return
            try:
                self._scope.reschedule(None if seconds is None else self._loop.time() + seconds)
            except RuntimeError:  # it has ended, or not begun
                return

        try:
            self._loop.call_soon_threadsafe(change)
        except RuntimeError:  # its loop is closed, and it with it
            return


class Member:
    """One engine.

    Args:
        engine: The engine.
        concurrency: Requests at a time; None for any number.

    Attributes:
        calls: Requests under way.
        quiet: Told when one of them ends.
        ill: Why it gets no work; None while it does.
        failures: Failures in a row.
        removed: Whether it was taken out of the client.
        suspected: Whether it is just being asked for its health because of them.
        weights: How many weight updates of the client it has received; `FAILED` after one that failed on all.
    """

    def __init__(self, engine: InferenceEngineInterface, concurrency: int | None) -> None:
        self.engine = engine
        self.name = engine.name
        self.slots = Slots(concurrency)
        self.calls: set[Call] = set()
        self.quiet = Signal()
        self.ill: str | None = None
        self.failures = 0
        self.removed = False
        self.suspected = False
        self.weights = 0

    @property
    def load(self) -> int:
        """Requests that run there or wait for a place."""
        return self.slots.used + self.slots.waiting

    def leave(self, call: Call) -> None:
        """Note that a request has ended."""
        self.calls.discard(call)
        self.quiet.notify()
