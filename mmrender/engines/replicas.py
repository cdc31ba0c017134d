"""`Replica`: one engine of a client, and `Work`: a completion, which may take several requests to engines."""

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from mmrender.engines.interface import Control, InferenceEngineInterface, Result
from mmrender.errors import EngineTimeoutError, EngineUnavailableError

Ending: TypeAlias = Literal["stopped", "down"]
"""Why the client itself ended a request: for a pause or an abort, or since its engine is down."""


class Replica:
    """One engine, and the client's knowledge of it.

    Attributes:
        engine: The engine.
        name: Its name.
        calls: Work with a request in flight here.
        down: Why it gets no requests, or None if it serves.
        lost: Whether another process may have taken its place since it went down.
        stale: Whether it missed a weight update, or failed within one.
        halted: Whether it is paused by this client, or may be.
        left: Whether it went down since another client keeps it paused alone.
        owed: Control calls that it missed and that can be made up for.
        limit: Maximum tokens of a prompt, once it has said.
    """

    def __init__(self, engine: InferenceEngineInterface) -> None:
        self.engine = engine
        self.name = engine.name
        self.calls: set[Work] = set()
        self.down: str | None = None
        self.lost = False
        self.stale = False
        self.halted = False
        self.left = False
        self.owed: list[tuple[Control, Mapping[str, Any]]] = []
        self.limit: int | None = None

    def owe(self, call: Control, arguments: Mapping[str, Any]) -> None:
        """Note a call to be made up for. Sleep makes earlier sleeps and wakes unnecessary."""
        if call == "sleep":
            self.owed = [each for each in self.owed if each[0] not in ("sleep", "wake_up")]
        if (call, arguments) not in self.owed:
            self.owed.append((call, arguments))


class Work:
    """A completion, which may take several requests, one after another.

    Attributes:
        about: Its description in errors.
        order: Replicas in the order in which they are asked.
        aborts: The pool's count of aborts when the work began.
        limit: Seconds for one request, pauses not counted.
        last: The replica that had the last request.
        paused: Whether the client was paused during the last request.
    """

    def __init__(self, about: str, order: Sequence[Replica], aborts: int, limit: float | None) -> None:
        self.about, self.order, self.aborts, self.limit = about, order, aborts, limit
        self.last: Replica | None = None
        self.paused = False

    def _renew(self) -> None:
        self._ending: Ending | None = None
        self._scope = asyncio.timeout(self.limit)

    async def run(self, request: Awaitable[Result], name: str) -> Result | None:
        """Await a request to an engine. Return None if a pause or an abort ended it. Errors as for `bounded`.

        Raises:
            EngineUnavailableError: It was ended because its engine is down.
        """
        self._renew()
        try:
            return await bounded(request, self.limit, name, scope=self._scope)
        except EngineTimeoutError as error:
            if self._ending is None or not self._scope.expired():
                raise
            if self._ending == "down":
                raise EngineUnavailableError("the engine does not answer", where=name) from error
            return None

    def end(self, reason: Ending) -> None:
        """End the request in flight."""
        self._ending = self._ending or reason
        self.set_time(0.0)

    def set_time(self, seconds: float | None) -> None:
        """Bound the seconds that the request may still take. None stops its clock."""
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        with contextlib.suppress(RuntimeError):  # it has ended
            self._scope.reschedule(until)


async def bounded(
    call: Awaitable[Result], within: float | None, name: str, *, scope: asyncio.Timeout | None = None
) -> Result:
    """Await an engine's answer for at most `within` seconds, or until `scope` expires, if it is passed.

    Raises:
        EngineTimeoutError: It did not come.
        EngineUnavailableError: The engine cancelled its own call.
    """
    scope = scope or asyncio.timeout(within)
    try:
        async with scope:
            return await call
    except TimeoutError as error:
        has_expired = within is not None and scope.expired()
        problem = f"the engine did not answer within {within:g} s" if has_expired else "the engine timed out"
        raise EngineTimeoutError(problem, where=name) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineUnavailableError("the engine cancelled the call", where=name) from error
