"""`ReplicaPool`: the engines of a client as one state machine: requests, pauses, weight updates and health.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from mmcodecs.forks import watch_forks
from mmrender.caching import AsyncSingleFlight
from mmrender.client.transport import RetryPolicy
from mmrender.engines.calls import Action, Call, Condition, Ending, Replica, answers, failures
from mmrender.engines.interface import InferenceEngineInterface, PauseMode, Result
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

State: TypeAlias = Literal["open", "pausing", "paused", "resuming", "closed"]

_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_HEALTH_TIMEOUT: Final = 5.0

_log = logging.getLogger("mmrender.engines")


@dataclass(slots=True)
class Work:
    """A completion, which may take several requests.

    Attributes:
        order: Replicas in the order in which they are asked.
        about: Its description in errors.
        aborts: The pool's count of aborts when the work began.
        last: The replica that had the last request.
        paused: Whether the client was paused during the last request.
    """

    order: Sequence[Replica]
    about: str
    aborts: int
    last: Replica | None = None
    paused: bool = False


class ReplicaPool:
    """Sends requests to engines: waits while the client is paused, and goes on to the next if one fails.

    Pickled, it arrives open and without requests.

    Attributes:
        replicas: The engines, which control calls go to.
        targets: Where requests go: the engines, or the router.
        state: Requests pass while it is `open`.
        pause_timeout: Seconds that engines may take to obey a pause.
        version: Name of the weights since the last update.
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
            raise InputError(
                "two engines have one name", where="engines", got=repr(name), remedy="Name them apart"
            )
        self.replicas = [Replica(engine) for engine in engines]
        self.targets = self.replicas if router is None else [Replica(router)]
        self.state: State = "open"
        self.version: str | None = None
        self._given = (engines, router, retries, attempt_timeout, pause_timeout)
        self._retries = retries
        self._attempt_timeout = attempt_timeout
        self.pause_timeout = pause_timeout
        self._aborts = 0
        self._halted: list[Replica] = []
        """Engines that were asked to pause."""
        self._clocks_stopped = False
        self._resumed_at = 0.0
        self._turns = itertools.count()
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Forget the requests in flight, which are the parent's."""
        self._lock = threading.Lock()
        self._changed = Condition()
        self._ended = Condition()
        self._looks: AsyncSingleFlight[Replica, bool] = AsyncSingleFlight()
        for target in self.targets:
            target.calls.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaPool, self._given

    # --- requests ---

    def begin(self, session: Hashable | None, about: str) -> Work:
        """Begin a piece of work; `about` describes it in errors."""
        first, key = None, repr(session)
        if session is None:
            number = next(self._turns)
            first, key = self.targets[number % len(self.targets)], str(number)
        else:
            about = f"{about}, session {session!r}"

        def rank(replica: Replica) -> tuple[bool, bytes]:
            # Rendezvous hashing: if an engine is down, only its own work moves, to each of the others.
            return replica is first, hashlib.blake2b(f"{key}@{replica.name}".encode()).digest()

        return Work(sorted(self.targets, key=rank, reverse=True), about, self._aborts)

    def is_aborted(self, work: Work) -> bool:
        """Whether all work was aborted since this one began."""
        return work.aborts != self._aborts

    def calls(self) -> list[Call]:
        """Requests in flight."""
        return [call for target in self.targets for call in list(target.calls)]

    async def send(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], work: Work
    ) -> Result | None:
        """Ask an engine, and others after it where it fails; None where the client ended the request.

        Raises:
            MMRenderError: An engine refused, or every attempt failed.
        """
        avoided: set[Replica] = set()
        for number in itertools.count(1):
            try:
                return await self._attempt(ask, work, avoided)
            except EngineError as error:
                if number >= self._retries.attempts or not is_transient(error):
                    raise
            if all(each.down is not None or each in avoided for each in self.targets):
                avoided.clear()
                await asyncio.sleep(self._retries.wait_before(number + 1))
        raise RuntimeError("unreachable: the last attempt returns or raises")

    async def _attempt(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], work: Work, avoided: set[Replica]
    ) -> Result | None:
        work.paused = False
        while True:
            if self.state != "open":
                await self._changed.wait_for(
                    lambda: self.state in ("open", "closed") or self.is_aborted(work)
                )
            if self.state == "closed":
                raise _torn_down()
            if self.is_aborted(work):
                return None
            replica = await self._choose(work, avoided)
            call = Call(self._attempt_timeout, work.about)
            with self._lock:  # so that a pause knows exactly which requests are in flight
                if self.state == "open" and not self.is_aborted(work):
                    replica.calls.add(call)
                    break
        try:
            self._watch(call)
            async with self._looking():
                value = await call.run(ask(replica.engine), replica.name)
        except EngineError as error:
            avoided.add(replica)
            if isinstance(error, EngineConnectionError | EngineTimeoutError) and replica.down is None:
                await self.look_at(replica)
            raise
        finally:
            work.paused = self.state != "open"
            replica.calls.discard(call)
            self._ended.notify_all()
        work.last = replica
        return value

    def _watch(self, call: Call) -> None:
        """End a request that takes longer than its limit, counted from the end of the last pause."""
        if call.limit is None:
            return
        left = max(call.begun, self._resumed_at) + call.limit - time.monotonic()
        if self._clocks_stopped:
            left = call.limit
        if left <= 0:
            call.end("late")
        else:
            call.clock = asyncio.get_running_loop().call_later(left, self._watch, call)

    @contextlib.asynccontextmanager
    async def _looking(self) -> AsyncIterator[None]:
        """Look at engines that are down while a request runs on another one, so that nobody waits."""
        down = [each for each in (*self.targets, *self.replicas) if each.down is not None and not each.stale]
        looks = [asyncio.ensure_future(self.look_at(each)) for each in dict.fromkeys(down)]
        try:
            yield
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _choose(self, work: Work, avoided: Collection[Replica]) -> Replica:
        """Return the first replica of the work's order that serves and has not failed it."""
        if self.targets is not self.replicas and not self.healthy():
            # A router would pass requests on to engines that are paused, or that have other weights.
            await asyncio.gather(*map(self.look_at, self.replicas))
            if not self.healthy():
                raise self.unavailable()
        up = [each for each in work.order if each.down is None]
        if not up:
            await asyncio.gather(*map(self.look_at, work.order))
            up = [each for each in work.order if each.down is None]
            if not up:
                raise self.unavailable()
        return next((each for each in up if each not in avoided), up[0])

    async def abort(self) -> None:
        """End all work, waiting or in flight, and wait until it has ended."""
        with self._lock:
            self._aborts += 1
        self._changed.notify_all()
        await self._end_calls("aborted", look=0.0)

    async def _end_calls(self, ending: Ending, look: float = 0.05) -> None:
        """Let engines abort every request in flight, and wait until each has ended.

        They are asked repeatedly, since one asked too early does not know of a request on its way
        to it. Requests that run on after the timeout are cancelled, and return nothing.
        """
        running, clock = set(self.calls()), asyncio.get_running_loop().time
        deadline = clock() + self.pause_timeout
        while not await self._ended.wait_for(lambda: running.isdisjoint(self.calls()), look):
            asked = [(each, each.calls & running) for each in self.targets if each.calls & running]
            if self.targets is not self.replicas:  # any engine may have what the router was asked
                asked = [(each, running) for each in self.healthy()]
            left = max(deadline - clock(), look)
            results = await answers(
                [each for each, _ in asked], lambda engine: engine.abort_generation(), within=left
            )
            late = running if clock() > deadline else set()
            for (_, calls), result in zip(asked, results, strict=True):
                if isinstance(result, EngineUnsupportedError):
                    late = late | calls
            for call in late:
                call.end(ending)
            look = min(2 * max(look, 0.05), 1.0)

    async def close(self, wait: float) -> bool:
        """Let nothing pass any more, and end what runs after `wait` seconds; False if it was closed."""
        with self._lock:
            was, self.state = self.state, "closed"
        self._changed.notify_all()
        if was != "closed" and not await self._ended.wait_for(lambda: not self.calls(), wait):
            for call in self.calls():
                call.end("aborted")
            await self._ended.wait_for(lambda: not self.calls())
        return was != "closed"

    # --- pauses ---

    def _move(self, before: State, after: State, refusal: str = "the client changed state") -> None:
        """Change state; `refusal` says what another state than `before` means."""
        with self._lock:
            if self.state == "closed":
                raise _torn_down()
            if self.state != before:
                raise EngineStateError(refusal, expected=f"a client that is {before}", got=self.state)
            if after == "open":
                self._resumed_at, self._clocks_stopped = time.monotonic(), False
            self.state = after
        self._changed.notify_all()

    async def pause(self, mode: PauseMode, clear_cache: bool, deadline: float | None) -> None:
        """Pause all engines that know the mode; the others are held by their getting no requests.

        `deadline` bounds the wait of the mode `wait`, in seconds.
        """
        self._move("open", "pausing", "the client is paused already")
        replicas, self._halted = self.healthy(), []
        others = [each for each in replicas if mode not in each.engine.pause_modes]
        try:
            if mode == "keep" and others:
                raise EngineUnsupportedError(
                    "the engine cannot freeze requests",
                    where=others[0].name,
                    remedy="Pause with 'abort' or 'wait'",
                )
            # Before engines pause: a request that reaches one after its pause would never end.
            if mode == "wait" and not await self._ended.wait_for(lambda: not self.calls(), deadline):
                raise self._still_running(deadline)
            self._clocks_stopped = True
            self._halted = [each for each in replicas if each not in others]
            pausing = lambda engine: engine.pause_generation(mode, clear_cache=clear_cache)  # noqa: E731
            await self._on_reached(self._halted, pausing)
            if mode == "abort":
                await self._end_calls("paused")
            if clear_cache:
                await self._on_reached(others, lambda engine: engine.reset_prefix_cache())
        except BaseException:
            # Also those that have not answered, since a pause that fails may have reached its server.
            # One that hangs must not hold up the caller, who may have been cancelled.
            for replica, error in await failures(
                self._halted,
                lambda engine: engine.resume_generation(),
                within=min(self.pause_timeout, _HEALTH_TIMEOUT),
            ):
                if not isinstance(error, EngineStateError | EngineUnsupportedError):
                    self.take_down(replica, str(error))  # it may still be paused
            self._move("pausing", "open")
            raise
        self._move("pausing", "paused")

    def _still_running(self, deadline: float | None) -> EngineTimeoutError:
        calls = [f"{each.name}: {call.about}" for each in self.targets for call in list(each.calls)]
        more = f"; and {len(calls) - 8} more" if len(calls) > 8 else ""
        return EngineTimeoutError(
            f"requests did not end within {deadline:g} s, so nothing was paused",
            where="pause_generation",
            got="; ".join(calls[:8]) + more,
            remedy="Pause with 'abort', after which they are continued, or give a longer deadline",
        )

    async def _on_reached(self, replicas: Sequence[Replica], action: Action) -> None:
        """Act on engines concurrently. One that is not reached is taken down; another error is raised."""
        failed = await failures(replicas, action, within=self.pause_timeout)
        for replica, error in failed:
            if isinstance(error, EngineConnectionError | EngineTimeoutError):
                self._halted = [each for each in self._halted if each is not replica]
                self.take_down(replica, str(error))
        for _, error in failed:
            if not isinstance(error, EngineConnectionError | EngineTimeoutError):
                raise error

    async def resume(self) -> None:
        """Resume the engines that were paused; one that does not resume is down."""
        self._move("paused", "resuming", "the client is not paused")
        try:
            failed = await failures(
                self._halted, lambda engine: engine.resume_generation(), within=self.pause_timeout
            )
        except BaseException:
            self._move("resuming", "paused")
            raise
        for replica, error in failed:
            self.take_down(replica, f"it did not resume: {error}")
        # Also where none resumed: what waits then fails, where it would wait for ever.
        self._move("resuming", "open")
        if failed and not self.healthy():
            raise self.unavailable() from failed[0][1]

    async def reports_pause(self, replica: Replica | None = None) -> bool | None:
        """Return whether an engine is paused, by any client; None if none is and one does not say.

        Only `replica` is asked, unless it is a router, which passes requests on to any engine.
        """
        asked = [replica] if replica in self.replicas else self.replicas
        reports = await answers(asked, lambda engine: engine.reports_pause(), within=_HEALTH_TIMEOUT)
        if any(report is True for report in reports):
            return True
        return False if all(report is False for report in reports) else None

    # --- weights ---

    async def update(
        self, replicas: Sequence[Replica], action: Action, version: str | None
    ) -> list[BaseException]:
        """Carry out a weight update; an engine that fails gets no requests until a later one succeeds."""
        failed = dict(await failures(replicas, action))
        if len(failed) < len(replicas):
            self.version = version
        for replica in replicas:
            replica.stale = replica in failed
            if replica.stale:
                self.take_down(replica, f"it missed a weight update: {failed[replica]}")
        return list(failed.values())

    async def all_present(self) -> list[Replica]:
        """Return every engine, once those that are down have answered for their health.

        Raises:
            EngineUnavailableError: One does not serve.
        """
        down = [each for each in self.replicas if each.down is not None]
        failed = await failures(down, lambda engine: engine.check_health(), within=_HEALTH_TIMEOUT)
        if failed:
            raise EngineUnavailableError(
                "weights are sent to all engines at once, and some are down",
                got="; ".join(f"{each.name}: {error}" for each, error in failed),
                remedy="Bring them back, or make a client without them",
            )
        return self.replicas

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
        """Give an engine no more requests, and end those it has: they are sent elsewhere."""
        if replica.down is None:
            _log.warning("engine %s is down: %s", replica.name, reason)
        replica.down = reason
        for call in list(replica.calls):
            call.end("down")

    async def look_at(self, replica: Replica) -> bool:
        """Ask an engine for its health; one that comes back needs current weights, and is resumed.

        Return whether it may get requests. Callers that ask at the same time share one question.
        """
        return await self._looks.run(replica, partial(self._look, replica))

    async def _look(self, replica: Replica) -> bool:
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
        if replica.stale:
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

    async def max_prompt_len(self) -> int | None:
        """Return the smallest limit of the engines that serve; one that does not answer in time is down."""
        serving = [each for each in self.targets if each.down is None]
        limits = await answers(serving, lambda engine: engine.max_prompt_len(), within=_HEALTH_TIMEOUT)
        for replica, limit in zip(serving, limits, strict=True):
            if isinstance(limit, EngineTimeoutError):
                self.take_down(replica, str(limit))
            elif isinstance(limit, BaseException) and not isinstance(limit, EngineError):
                raise limit
        return min((limit for limit in limits if isinstance(limit, int)), default=None)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed at another time or engine."""
    if isinstance(error, EngineStatusError):
        return error.status in _TRANSIENT
    return isinstance(
        error, EngineConnectionError | EngineTimeoutError | EngineReplyError | EngineUnavailableError
    )


def _torn_down() -> EngineStateError:
    return EngineStateError("the client was torn down", remedy="Make another one, or a copy by pickling")
