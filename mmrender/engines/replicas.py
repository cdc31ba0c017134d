"""`ReplicaPool`: which engine gets a request, the requests in flight, and which engines serve.

One event loop owns a pool at a time, so its state needs no locks.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from mmcodecs.forks import watch_forks
from mmrender.caching import AsyncSingleFlight
from mmrender.client.transport import RetryPolicy, is_lost, is_transient
from mmrender.engines.interface import InferenceEngineInterface, Result
from mmrender.errors import (
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
)

State: TypeAlias = Literal["open", "pausing", "paused", "resuming", "closed"]
Action: TypeAlias = Callable[[InferenceEngineInterface], Awaitable[Any]]
Ending: TypeAlias = Literal["stopped", "down"]
"""Why the client itself ended a request: for a pause or an abort, or since its engine is down."""

HEALTH_TIMEOUT: Final = 5.0
"""Seconds that an engine may take to answer for its health, its limit or a pause."""


_log = logging.getLogger("mmrender.engines")


class Condition:
    """Like `asyncio.Condition`, without a lock, and for one event loop after another."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        """Wake all waiters, after a change of state."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` is true, or return False after `timeout` seconds."""
        if predicate():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not predicate():
                    future = asyncio.get_running_loop().create_future()
                    self._waiting.add(future)
                    try:
                        await future
                    finally:
                        self._waiting.discard(future)
        return predicate()


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

    def __init__(self, about: str, order: "Sequence[Replica]", aborts: int, limit: float | None) -> None:
        self.about, self.order, self.aborts, self.limit = about, order, aborts, limit
        self.last: Replica | None = None
        self.paused = False

    def _renew(self) -> None:
        self._ending: Ending | None = None
        self._scope = asyncio.timeout(self.limit)

    async def run(self, request: Awaitable[Result], name: str) -> Result | None:
        """Await a request to an engine. Return None if a pause or an abort ended it.

        Raises:
            EngineUnavailableError: It was ended because its engine is down.
            EngineTimeoutError: It took too long.
        """
        self._renew()
        try:
            async with self._scope:
                return await request
        except TimeoutError as error:
            if not self._scope.expired():
                raise EngineTimeoutError("the engine timed out", where=name) from error
            if self._ending == "down":
                raise EngineUnavailableError("the engine does not answer", where=name) from error
            if self._ending is None:
                problem = f"the engine did not answer within {self.limit:g} s"
                raise EngineTimeoutError(problem, where=name) from error
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


class Replica:
    """One engine.

    Attributes:
        engine: The engine.
        name: Its name.
        calls: Work with a request in flight here.
        down: Why it gets no requests, or None if it serves.
        stale: Whether it missed a weight update, or failed within one.
        halted: Whether the last pause paused it.
    """

    def __init__(self, engine: InferenceEngineInterface) -> None:
        self.engine = engine
        self.name = engine.name
        self.calls: set[Work] = set()
        self.down: str | None = None
        self.stale = False
        self.halted = False


class ReplicaPool:
    """Sends requests to engines. It waits while the client is paused, and asks the next engine if one fails.

    Pickled, it arrives open and without requests.

    Attributes:
        replicas: The engines, to which control calls go.
        targets: The targets of requests: the engines, or the router.
        state: Requests pass while it is `open`.
        changed: Wakes waiting work after a change of `state` or `aborts`.
        retries: How often and how soon failed requests are repeated.
        pause_timeout: Seconds that engines may take to obey a pause.
        version: Name of the weights since the last update.
        aborts: How often all work was aborted.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        router: InferenceEngineInterface | None,
        retries: RetryPolicy,
        attempt_timeout: float | None,
        pause_timeout: float,
    ) -> None:
        if not engines:
            raise InputError("there is no engine", where="engines", expected="one or more")
        (name, count), *_ = Counter(engine.name for engine in engines).most_common(1)
        if count > 1:
            problem, remedy = "two engines have the same name", "Pass different names"
            raise InputError(problem, where="engines", got=repr(name), remedy=remedy)
        self.replicas = [Replica(engine) for engine in engines]
        self.targets = self.replicas if router is None else [Replica(router)]
        self.state: State = "open"
        self.version: str | None = None
        self.retries = retries
        self.pause_timeout = pause_timeout
        self._arguments = (engines, router, retries, attempt_timeout, pause_timeout)
        self._attempt_timeout = attempt_timeout
        self.aborts = 0
        self._turns = itertools.count()
        self.renew_after_fork()
        watch_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaPool, self._arguments

    def renew_after_fork(self) -> None:
        """Forget the parent's event loop and its requests in flight."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.changed, self._ended = Condition(), Condition()
        self._looks: AsyncSingleFlight[Replica, bool] = AsyncSingleFlight()
        for target in self.targets:
            target.calls.clear()

    def enter(self) -> None:
        """Let the running event loop own the pool.

        Raises:
            EngineStateError: Another event loop owns it and still runs.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise EngineStateError(
                "the client is used by another event loop",
                expected="one event loop at a time",
                remedy="Call asyncio.run_coroutine_threadsafe(client.METHOD(...), loop) with that loop, or "
                "make another client",
            )
        self.renew_after_fork()
        self._loop = loop

    def move(self, before: State, after: State, refusal: str = "the client changed state") -> None:
        """Change state.

        Raises:
            EngineStateError: The state is not `before`, which `refusal` explains.
        """
        self.enter()
        if self.state == "closed":
            raise _torn_down()
        if self.state != before:
            raise EngineStateError(refusal, expected=f"a client that is {before}", got=self.state)
        self.state = after
        if after == "open":
            for call in self.calls():
                call.set_time(call.limit)
        self.changed.notify_all()

    # --- requests ---

    def begin(self, session: Hashable | None, about: str) -> Work:
        """Begin a piece of work. `about` describes it in errors."""
        self.enter()
        first, key = None, repr(session)
        if session is None:
            number = next(self._turns)
            first, key = self.targets[number % len(self.targets)], str(number)
        else:
            about = f"{about}, session {session!r}"

        def rank(replica: Replica) -> tuple[bool, bytes]:
            # Rendezvous hashing: if an engine is down, its work spreads over all others, and no other moves.
            return replica is first, hashlib.blake2b(f"{key}@{replica.name}".encode()).digest()

        order = sorted(self.targets, key=rank, reverse=True)
        return Work(about, order, self.aborts, self._attempt_timeout)

    def is_aborted(self, work: Work) -> bool:
        """Whether all work was aborted since this one began."""
        return work.aborts != self.aborts

    def calls(self) -> list[Work]:
        """Work with a request in flight."""
        return [call for target in self.targets for call in target.calls]

    async def send(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], work: Work
    ) -> Result | None:
        """Ask an engine, and the next ones if it fails. Return None if the client ended the request.

        Raises:
            MMRenderError: An engine refused, or every attempt failed.
        """
        failed: set[Replica] = set()
        for number in itertools.count(1):
            try:
                return await self._attempt(ask, work, failed)
            except EngineError as error:
                if number >= self.retries.attempts or not is_transient(error):
                    raise
            if all(each.down is not None or each in failed for each in self.targets):
                failed.clear()
                await asyncio.sleep(self.retries.wait_before(number + 1))
        raise RuntimeError("unreachable: the last attempt returns or raises")

    async def _attempt(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], work: Work, failed: set[Replica]
    ) -> Result | None:
        work.paused = False
        while True:
            await self.changed.wait_for(lambda: self.state in ("open", "closed") or self.is_aborted(work))
            if self.state == "closed":
                raise _torn_down()
            if self.is_aborted(work):
                return None
            replica = await self._choose(work, failed)
            if self.state == "open" and not self.is_aborted(work):  # both may have changed meanwhile
                break
        replica.calls.add(work)
        # Engines that are down are looked at while a request runs on another one, so that no request waits.
        down = [each for each in (*self.targets, *self.replicas) if each.down is not None and not each.stale]
        looks = [asyncio.ensure_future(self.look_at(each)) for each in dict.fromkeys(down)]
        try:
            value = await work.run(ask(replica.engine), replica.name)
        except EngineError as error:
            failed.add(replica)
            if is_lost(error) and replica.down is None:
                await self.look_at(replica)
            raise
        finally:
            work.paused = self.state != "open"
            replica.calls.discard(work)
            self._ended.notify_all()
            if looks:
                for look in looks:
                    look.cancel()
                await asyncio.gather(*looks, return_exceptions=True)
        work.last = replica
        return value

    async def _choose(self, work: Work, failed: Collection[Replica]) -> Replica:
        """Return the first replica of the work's order that serves and has not failed it."""
        # Behind a router one engine must serve, or it would pass requests on to paused or outdated ones.
        for needed in (self.replicas, work.order):
            if all(each.down is not None for each in needed):
                await asyncio.gather(*map(self.look_at, needed))
                if all(each.down is not None for each in needed):
                    raise self.unavailable()
        up = [each for each in work.order if each.down is None]
        return next((each for each in up if each not in failed), up[0])

    async def until_idle(self, timeout: float | None = None) -> bool:
        """Wait until no request is in flight, or return False after `timeout` seconds."""
        return await self._ended.wait_for(lambda: not self.calls(), timeout)

    async def end_calls(self, look: float = 0.05) -> None:
        """Let engines abort every request in flight, and wait until each has ended.

        Engines are asked repeatedly, since one asked too early does not know of a request on its way to it.
        Requests that run on after the timeout are cancelled without a result.
        """
        running, clock = set(self.calls()), asyncio.get_running_loop().time
        deadline = clock() + self.pause_timeout
        while not await self._ended.wait_for(lambda: running.isdisjoint(self.calls()), look):
            asked = {each: each.calls & running for each in self.targets if each.calls & running}
            if self.targets is not self.replicas:  # any engine may have the requests of the router
                asked = dict.fromkeys(self.healthy(), running)
            left = max(deadline - clock(), look)
            failed = await self.failures(asked, lambda engine: engine.abort_generation(), within=left)
            late = running if clock() > deadline else set()
            for replica, error in failed.items():
                if isinstance(error, EngineUnsupportedError):
                    late = late | asked[replica]
            for call in late:
                call.end("stopped")
            look = min(2 * max(look, 0.05), 1.0)

    # --- calls to several engines ---

    async def answers(
        self, replicas: Iterable[Replica], action: Action, *, within: float | None = None
    ) -> dict[Replica, Any | BaseException]:
        """Act on engines concurrently and return each answer or error. `within` bounds each, in seconds."""

        async def ask(replica: Replica) -> Any:
            scope = asyncio.timeout(within)
            try:
                async with scope:
                    return await action(replica.engine)
            except TimeoutError as error:
                bound = f" within {within:g} s" if scope.expired() else ""
                raise EngineTimeoutError(f"the engine did not answer{bound}", where=replica.name) from error

        self.enter()
        asked = list(replicas)
        answers = await asyncio.gather(*map(ask, asked), return_exceptions=True)
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                answer.add_note(f"engine {replica.name}")
        return dict(zip(asked, answers, strict=True))

    async def failures(
        self, replicas: Iterable[Replica], action: Action, *, within: float | None = None
    ) -> dict[Replica, BaseException]:
        """Act on engines concurrently and return the errors of those that failed, as `answers`."""
        answers = await self.answers(replicas, action, within=within)
        return {each: answer for each, answer in answers.items() if isinstance(answer, BaseException)}

    # --- health ---

    def healthy(self) -> list[Replica]:
        """Engines that may get requests."""
        return [each for each in self.replicas if each.down is None]

    def unavailable(self) -> EngineUnavailableError:
        """Build the error of a pool whose engines are all down."""
        down = dict.fromkeys(each for each in (*self.targets, *self.replicas) if each.down is not None)
        reasons = "; ".join(f"{each.name}: {each.down}" for each in down)
        return EngineUnavailableError(
            "no healthy engine is left", got=reasons, remedy="Start one, and check that its URL is right"
        )

    def take_down(self, replica: Replica, reason: str) -> None:
        """Send an engine no more requests, and end those in flight, which are sent elsewhere."""
        if replica.down is None:
            _log.warning("engine %s is down: %s", replica.name, reason)
        replica.down = reason
        for call in list(replica.calls):
            call.end("down")

    async def look_at(self, replica: Replica) -> bool:
        """Ask an engine for its health and return whether it may get requests.

        One that comes back needs current weights, and is resumed. Concurrent callers share one question.
        """
        self.enter()
        return await self._looks.run(replica, partial(self._look, replica))

    async def _look(self, replica: Replica) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await replica.engine.check_health()
                if replica.down is not None:
                    await self._bring_back(replica)
        except (EngineError, TimeoutError) as error:
            self.take_down(replica, str(error) or "it did not answer in time")
            return False
        return True

    async def _bring_back(self, replica: Replica) -> None:
        """Resume an engine that serves again. It needs current weights, and the client must run."""
        if replica.stale:
            raise EngineStateError(
                "the engine missed a weight update", where=replica.name, remedy="Update the weights again"
            )
        with contextlib.suppress(EngineUnsupportedError):
            version = None if self.version is None else await replica.engine.weight_version()
            if version not in (None, self.version):
                problem = "the engine has other weights"
                raise EngineStateError(problem, where=replica.name, expected=self.version, got=version)
        if self.state != "open":
            raise EngineStateError("the client is not running", got=self.state)
        with contextlib.suppress(EngineStateError, EngineUnsupportedError):
            await replica.engine.resume_generation()  # it may have missed the end of a pause
        _log.info("engine %s is back", replica.name)
        replica.down = None

    async def all_present(self) -> list[Replica]:
        """Return every engine, after those that are down have answered for their health.

        Raises:
            EngineUnavailableError: One does not serve.
        """
        down = [each for each in self.replicas if each.down is not None]
        failed = await self.failures(down, lambda engine: engine.check_health(), within=HEALTH_TIMEOUT)
        if failed:
            raise EngineUnavailableError(
                "weights are sent to all engines at once, and some are down",
                got="; ".join(f"{each.name}: {error}" for each, error in failed.items()),
                remedy="Bring them back, or make a client without them",
            )
        return self.replicas

    async def update(self, action: Action, version: str | None) -> list[BaseException]:
        """Update all weights. An engine that fails gets no requests until a later update succeeds."""
        failed = await self.failures(self.replicas, action)
        if len(failed) < len(self.replicas):
            self.version = version
        for replica in self.replicas:
            replica.stale = replica in failed
            if replica.stale:
                self.take_down(replica, f"it missed a weight update: {failed[replica]}")
        return list(failed.values())

    async def reports_pause(self, replica: Replica | None = None) -> bool | None:
        """Return whether any client has paused an engine, or None if no pause is known and one does not say.

        Only `replica` is asked, unless it is a router, which passes requests on to any engine.
        """
        asked = [replica] if replica in self.replicas else self.replicas
        reports = await self.answers(asked, lambda engine: engine.reports_pause(), within=HEALTH_TIMEOUT)
        if any(report is True for report in reports.values()):
            return True
        return False if all(report is False for report in reports.values()) else None


def _torn_down() -> EngineStateError:
    return EngineStateError("the client was torn down", remedy="Make another one, or a copy by pickling")
