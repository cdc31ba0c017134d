"""`ReplicaPool`: the engines of a client, the requests in flight on each, and the choice among them.

A trainer pauses from its own event loop while an endpoint samples on another, so nothing here belongs to one
loop.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, TypeVar

from mmrender.client.transport import RetryPolicy
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineReplyError,
    EngineStateError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
)

Result = TypeVar("Result")
State: TypeAlias = Literal["open", "pausing", "paused", "resuming", "closed"]
Ending: TypeAlias = Literal["paused", "aborted", "down"]
"""Why the client itself ended a request."""

FAILED: Final = -1
"""Update count of an engine whose last weight update may be incomplete."""

_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_HEALTH_TIMEOUT: Final = 5.0
_COOLDOWN: Final = 5.0
"""Seconds before an engine that is down is looked at again, as long as others serve."""
_SLACK: Final = 8
"""An engine with this many requests more than the least loaded one loses work whose prefix it has cached."""

_log = logging.getLogger("mmrender.engines")


class Condition:
    """Like `asyncio.Condition`, for waiters on several event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def notify_all(self) -> None:
        """Let all waiters test their predicates again. To be called after the change."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future, loop in waiting.items():
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(_release, future)

    async def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` holds; return False if `timeout` seconds pass before it does."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    with self._lock:
                        if predicate():
                            return True
                        future: asyncio.Future[None] = loop.create_future()
                        self._waiting[future] = loop
                    try:
                        await future
                    finally:
                        with self._lock:
                            self._waiting.pop(future, None)
        return predicate()


def _release(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Call:
    """One request in flight, which any thread can end; made and awaited on one event loop.

    `limit` is the seconds it may take, pauses not counted.
    """

    def __init__(self, limit: float | None) -> None:
        self.ending: Ending | None = None
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(limit)

    async def run(self, request: Awaitable[Result], name: str) -> Result | None:
        """Await the request; None where it was ended for a pause or an abort.

        Raises:
            EngineUnavailableError: It was ended because its engine is down.
            EngineTimeoutError: It took too long.
        """
        try:
            async with self._scope:
                return await request
        except TimeoutError as error:
            if not self._scope.expired():
                raise
            if self.ending in ("paused", "aborted"):
                return None
            if self.ending == "down":
                raise EngineUnavailableError("the engine does not answer", where=name) from error
            raise EngineTimeoutError(
                f"the engine did not answer within {self._limit:g} s", where=name
            ) from error

    def end(self, reason: Ending) -> None:
        """End it."""
        self._reschedule(0.0, reason)

    def stop_clock(self) -> None:
        """Stop counting time against its limit."""
        self._reschedule(None)

    def restart_clock(self) -> None:
        """Count time again, from now."""
        self._reschedule(self._limit)

    def _reschedule(self, seconds: float | None, ending: Ending | None = None) -> None:
        def change() -> None:
            if ending is None and self.ending is not None:
                return
            self.ending = self.ending or ending
            with contextlib.suppress(RuntimeError):  # it has ended, or not begun
                self._scope.reschedule(None if seconds is None else self._loop.time() + seconds)

        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(change)


class Replica:
    """One engine.

    Attributes:
        engine: The engine.
        name: Its name.
        calls: Requests in flight.
        idle: Notified when one of them ends.
        down: Why it gets no requests; None while it does.
        retry_at: Monotonic time at which it is looked at again.
        updates: How many of the client's weight updates it has received; `FAILED` if the last failed on all.
    """

    def __init__(self, engine: InferenceEngineInterface) -> None:
        self.engine = engine
        self.name = engine.name
        self.calls: set[Call] = set()
        self.idle = Condition()
        self.down: str | None = None
        self.retry_at = 0.0
        self.updates = 0

    async def wait_idle(self, calls: Iterable[Call] | None = None, timeout: float | None = None) -> bool:
        """Wait until none of `calls`, by default of all, is in flight."""
        return await self.idle.wait_for(lambda: not self.calls.intersection(calls or self.calls), timeout)


@dataclass(slots=True)
class Route:
    """Where one piece of work goes, from request to request.

    Attributes:
        session: Its session, or None.
        aborts: The pool's count of aborts when the work began.
        preferred: The replica that had it last, whose caches hold its prefix.
        paused: Whether the client was paused during the last request.
    """

    session: Hashable | None
    aborts: int
    preferred: Replica | None = None
    paused: bool = False


class ReplicaPool:
    """Sends requests to engines: waits while the client is paused, chooses, and fails over.

    Attributes:
        replicas: The engines, which control calls go to.
        targets: Where requests go: the engines, or the router.
        state: Requests pass while it is `open`.
        aborts: How often all work was aborted.
        updates: How many weight updates were carried out.
        version: Name of the weights since the last one.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        router: InferenceEngineInterface | None,
        retries: RetryPolicy,
        attempt_timeout: float | None,
    ) -> None:
        if not engines:
            raise InputError("there is no engine", where="engines", expected="one or more")
        names = Counter(engine.name for engine in engines)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise InputError(
                "two engines have one name", where="engines", got=repr(name), remedy="Name them apart"
            )
        self.replicas = [Replica(engine) for engine in engines]
        self.targets = self.replicas if router is None else [Replica(router)]
        self.state: State = "open"
        self.aborts = 0
        self.updates = 0
        self.version: str | None = None
        self._retries = retries
        self._attempt_timeout = attempt_timeout
        self._lock = threading.Lock()
        self._changed = Condition()
        self._turns = itertools.count()

    # --- state ---

    def move(self, before: State, after: State, refusal: str) -> None:
        """Change state.

        Raises:
            EngineStateError: The state is not `before`; `refusal` says what that means.
        """
        with self._lock:
            if self.state == "closed":
                raise _torn_down()
            if self.state != before:
                raise EngineStateError(refusal, expected=f"a client that is {before}", got=self.state)
            self.state = after
        self._changed.notify_all()

    def close(self) -> bool:
        """Let nothing pass any more; return False if it was closed already."""
        with self._lock:
            was, self.state = self.state, "closed"
        self._changed.notify_all()
        return was != "closed"

    def abort(self) -> None:
        """Tell all work, waiting or in flight, that it was aborted."""
        with self._lock:
            self.aborts += 1
        self._changed.notify_all()

    def route(self, session: Hashable | None = None) -> Route:
        """Return the route of work that begins."""
        return Route(session, self.aborts)

    def is_aborted(self, route: Route) -> bool:
        """Whether all work was aborted since the route's began."""
        return route.aborts != self.aborts

    # --- requests ---

    async def send(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], route: Route
    ) -> Result | None:
        """Ask an engine, and others after it where it fails; None where the client ended the request.

        Raises:
            MMRenderError: An engine refused, or every attempt failed.
        """
        avoided: set[Replica] = set()
        try:
            return await self._attempt(ask, route, avoided)
        except EngineError as error:
            left = self._retries.attempts - 1
            if not left or not is_transient(error):
                raise

        def others() -> bool:
            return any(each.down is None and each not in avoided for each in self.targets)

        def rule(error: Exception) -> bool | float:
            if not is_transient(error):
                return False
            if others():
                return 0.001  # at once
            avoided.clear()
            return True

        if not others():
            await asyncio.sleep(self._retries.wait_initial)
        async for attempt in replace(self._retries, attempts=left).attempts_on(rule):
            with attempt:
                return await self._attempt(ask, route, avoided)
        raise RuntimeError("unreachable: the last attempt returns or raises")

    async def _attempt(
        self,
        ask: Callable[[InferenceEngineInterface], Awaitable[Result]],
        route: Route,
        avoided: set[Replica],
    ) -> Result | None:
        route.paused = False
        while True:
            await self._changed.wait_for(lambda: self.state in ("open", "closed") or self.is_aborted(route))
            if self.state == "closed":
                raise _torn_down()
            if self.is_aborted(route):
                return None
            replica = await self._choose(route, avoided)
            call = Call(self._attempt_timeout)
            with self._lock:  # so that a pause knows exactly which requests are in flight
                if self.state == "open" and not self.is_aborted(route):
                    replica.calls.add(call)
                    break
        try:
            value = await call.run(ask(replica.engine), replica.name)
        except EngineError as error:
            avoided.add(replica)
            asked_lately = replica.down is not None or time.monotonic() < replica.retry_at
            if isinstance(error, EngineConnectionError | EngineTimeoutError) and not asked_lately:
                await self.look_at(replica, again=0.1)  # one question answers for all that fail together
            raise
        finally:
            route.paused = self.state != "open"
            replica.calls.discard(call)
            replica.idle.notify_all()
        route.preferred = replica
        return value

    async def _choose(self, route: Route, avoided: set[Replica]) -> Replica:
        """Choose a replica by session, else one that knows the work, else by load.

        Raises:
            EngineUnavailableError: All are down.
        """
        now = time.monotonic()
        up = [each for each in self.targets if each.down is None]
        looked_at = [each for each in self.targets if each.down is not None and now >= each.retry_at]
        if not up:
            looked_at = self.targets
        if looked_at:
            await asyncio.gather(*[self.look_at(each) for each in looked_at])
            up = [each for each in self.targets if each.down is None]
        if not up:
            raise self.unavailable()
        choices = [each for each in up if each not in avoided] or up
        if route.session is not None:
            # Rendezvous hashing: where an engine is down, only its own sessions move.
            return max(
                choices,
                key=lambda each: hashlib.blake2b(f"{route.session!r}@{each.name}".encode()).digest(),
            )
        least = min(len(each.calls) for each in choices)
        if route.preferred in choices and len(route.preferred.calls) <= least + _SLACK:
            return route.preferred
        idlest = [each for each in choices if len(each.calls) == least]
        return idlest[next(self._turns) % len(idlest)]

    # --- health ---

    def healthy(self) -> list[Replica]:
        """Engines that may get requests."""
        return [each for each in self.replicas if each.down is None]

    def unavailable(self) -> EngineUnavailableError:
        """Build the error of a pool whose engines are all down."""
        reasons = "; ".join(f"{each.name}: {each.down}" for each in self.targets)
        return EngineUnavailableError(
            "no healthy engine is left", got=reasons, remedy="Start one, and check that its URL is right"
        )

    def take_down(self, replica: Replica, reason: str) -> None:
        """Give an engine no more requests, and end those it has: they are sent elsewhere."""
        if replica.down is None:
            _log.warning("engine %s is down: %s", replica.name, reason)
        replica.down = reason
        replica.retry_at = time.monotonic() + _COOLDOWN
        for call in list(replica.calls):
            call.end("down")

    async def look_at(self, replica: Replica, *, again: float = _COOLDOWN) -> bool:
        """Ask an engine for its health; one that comes back needs current weights, and is resumed.

        Return whether it may get requests; where it may, it is asked `again` seconds later at the earliest.
        """
        replica.retry_at = time.monotonic() + again
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT):
                await replica.engine.check_health()
                if replica.down is not None:
                    await self._bring_back(replica)
        except (EngineError, TimeoutError) as error:
            self.take_down(replica, str(error) or "it did not answer in time")
            return False
        return True

    async def _bring_back(self, replica: Replica) -> None:
        """Resume an engine that serves again; it must have the weights of the others, and the client run."""
        if replica in self.replicas and replica.updates != self.updates:
            raise EngineStateError(
                "the engine missed a weight update", where=replica.name, remedy="Update the weights again"
            )
        with contextlib.suppress(EngineUnsupportedError):
            version = None if self.version is None else await replica.engine.weight_version()
            if version not in (None, self.version):
                raise EngineStateError(
                    "the engine has other weights", where=replica.name, expected=self.version, got=version
                )
        if self.state != "open":
            raise EngineStateError("the client is not running", got=self.state)
        with contextlib.suppress(EngineStateError, EngineUnsupportedError):
            await replica.engine.resume_generation()  # it may have missed the end of a pause
        _log.info("engine %s is back", replica.name)
        replica.down = None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed at another time or engine."""
    if isinstance(error, EngineStatusError):
        return error.status in _TRANSIENT
    return isinstance(
        error, EngineConnectionError | EngineTimeoutError | EngineReplyError | EngineUnavailableError
    )


def _torn_down() -> EngineStateError:
    return EngineStateError("the client was torn down", remedy="Make another one, or a copy by pickling")
