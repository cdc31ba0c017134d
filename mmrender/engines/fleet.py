"""`Fleet`: which engines serve. Each call to one has a deadline.

An engine that fails a control call, or does not obey it in time, is down: it gets no requests until it has
answered for its health, has made up for the calls that it missed, and has the weights of the others. It is
looked at beside everything else, so that nobody waits for it.

One event loop owns a fleet at a time, so its state needs no locks.
"""

import asyncio
import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mmcodecs.forks import watch_forks
from mmrender.caching import AsyncSingleFlight
from mmrender.engines.interface import Control, EngineResult, InferenceEngineInterface
from mmrender.engines.replicas import Replica, Work, bounded
from mmrender.errors import (
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
)
from mmrender.workers import Notifier

State: TypeAlias = Literal["open", "pausing", "paused", "resuming", "closed"]
Results: TypeAlias = dict[Replica, EngineResult]
Method: TypeAlias = Control | Literal["teardown"]

HEALTH_TIMEOUT: Final = 5.0
"""Seconds that an engine may take to answer for its health, its limit or a pause."""
_FIRST_LOOK, _MAX_LOOK = 1.0, 15.0
"""Seconds before the first look at an engine that is down, doubled for each further one, and the maximum."""
_PEERS: Final = 5
"""Engines whose weights are compared with the weights of one that comes back."""
_LONG: Final = frozenset(
    {"sleep", "wake_up", "load_weights", "update_named_weights", "init_weight_update_communicator"}
)
"""Calls that move weights or memory."""
_log = logging.getLogger("mmrender.engines")


class Timeouts(NamedTuple):
    """Seconds that an engine may take. None for no limit.

    Attributes:
        attempt: For one request, pauses not counted.
        pause: For a short control call.
        update: For a call that moves weights or memory.
    """

    attempt: float | None
    pause: float
    update: float | None


class Fleet:
    """Engines, and which of them serve.

    Attributes:
        replicas: The engines, to which control calls go.
        targets: The targets of requests: the engines, or the router.
        state: Requests pass while it is `open`.
        changed: Wakes waiting work after a change of `state` or an abort.
        timeouts: Bounds of requests and control calls.
        version: Name of the weights since the last update.
        loaded: Arguments of the last update if it was `load_weights`, which can be repeated.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        router: InferenceEngineInterface | None,
        timeouts: Timeouts,
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
        self.loaded: dict[str, Any] | None = None
        self.timeouts = timeouts
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Forget the parent's event loop, with its requests and looks in flight."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.changed = Notifier()
        self._looks: dict[Replica, asyncio.Task[bool]] = {}
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._reports: AsyncSingleFlight[Replica | None, bool | None] = AsyncSingleFlight()
        for target in self.targets:
            target.calls.clear()

    def enter(self) -> None:
        """Let the running event loop own the fleet.

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
        self.watch_all()

    @property
    def everyone(self) -> list[Replica]:
        """The router if there is one, and the engines."""
        return list(dict.fromkeys((*self.targets, *self.replicas)))

    def calls(self) -> list[Work]:
        """Work with a request in flight."""
        return [call for target in self.targets for call in target.calls]

    def move(self, before: State, after: State, refusal: str = "the client changed state") -> None:
        """Change state.

        Raises:
            EngineStateError: The state is not `before`, which `refusal` explains.
        """
        self.enter()
        if self.state == "closed":
            raise torn_down()
        if self.state != before:
            raise EngineStateError(refusal, expected=f"a client that is {before}", got=self.state)
        self.state = after
        if after == "open":
            for call in self.calls():
                call.set_time(call.limit)
            self.watch_all()
        self.changed.notify()

    # --- control calls ---

    async def tell(
        self, replicas: Iterable[Replica], call: Method, /, *, within: float | None = None, **arguments: Any
    ) -> Results:
        """Make a call on engines concurrently and return one result for each.

        `within` bounds each engine's time, in seconds. By default it is the bound of the call.
        """
        self.enter()
        asked = list(replicas)
        bound = self.timeouts.update if call in _LONG else self.timeouts.pause
        seconds = bound if within is None else within
        tells = (self._tell(each, call, arguments, seconds) for each in asked)
        return dict(zip(asked, await asyncio.gather(*tells), strict=True))

    async def _tell(
        self, replica: Replica, call: Method, arguments: dict[str, Any], within: float | None
    ) -> EngineResult:
        try:
            value = await bounded(getattr(replica.engine, call)(**arguments), within, replica.name)
        except Exception as error:  # noqa: BLE001 - an engine may be the user's
            if call == "resume_generation" and isinstance(error, EngineStateError):
                replica.halted = False  # it is not paused
                return EngineResult(replica.name)
            error.add_note(f"engine {replica.name}")
            late = isinstance(error, EngineTimeoutError)
            return EngineResult(replica.name, "timed out" if late else "failed", error=error)
        if call == "resume_generation":
            replica.halted = False
        return EngineResult(replica.name, value=value)

    # --- health ---

    def healthy(self) -> list[Replica]:
        """Engines that may get requests."""
        return [each for each in self.replicas if each.down is None]

    def unavailable(self) -> EngineUnavailableError:
        """Build the error of a fleet whose engines are all down."""
        reasons = "; ".join(f"{each.name}: {each.down}" for each in self.everyone if each.down is not None)
        return EngineUnavailableError(
            "no healthy engine is left", got=reasons, remedy="Start one, and check that its URL is right"
        )

    def take_down(self, replica: Replica, reason: str) -> None:
        """Send an engine no more requests, and end those in flight, which are sent elsewhere."""
        if replica.down is None:
            _log.warning("engine %s is down: %s", replica.name, reason)
        replica.lost = True
        self.hold(replica, reason)
        for call in list(replica.calls):
            call.end("down")

    def hold(self, replica: Replica, reason: str) -> None:
        """Send an engine no more requests until it has been looked at. Those in flight go on."""
        replica.down, replica.limit = reason, None
        self._watch(replica)

    async def leave_paused(self, replica: Replica, seconds: float) -> None:
        """Take down an engine that another client has paused for so long, if others are not paused."""
        others = [each for each in self.healthy() if each is not replica]
        if replica not in self.replicas or not others:
            return
        results = await self.tell(others, "reports_pause", within=HEALTH_TIMEOUT)
        if any(result.value is False for result in results.values()):
            replica.left = True
            self.take_down(replica, f"another client has paused it for {seconds:.0f} s, and not all engines")

    def hold_halted(self, reason: str) -> list[Replica]:
        """Hold the engines that were paused, so that each is resumed before it gets requests."""
        halted = [each for each in self.replicas if each.halted]
        for each in halted:
            if each.down is None:
                self.hold(each, reason)
        return halted

    async def release_held(self) -> None:
        """Wait until the engines of a call that was given up serve again, no longer than for a short call."""
        self.enter()
        held = [each for each in self.replicas if each.down is not None and not each.lost]
        if held and self.state in ("open", "paused"):
            await asyncio.wait(map(self.begin_look, held), timeout=self.timeouts.pause)

    def watch_all(self) -> None:
        """Look at all engines that are down, now and from now on."""
        for each in self.everyone:
            if each.down is not None:
                self._watch(each, anew=True)

    def _watch(self, replica: Replica, *, anew: bool = False) -> None:
        task = self._watches.get(replica)
        is_running = task is not None and not task.done()
        if self.state == "closed" or self._loop is None or (is_running and not anew):
            return
        if task is not None and is_running:
            task.cancel()
        first = 0.0 if anew else _FIRST_LOOK
        # A client that is dropped is not kept by its watches.
        self._watches[replica] = asyncio.ensure_future(_keep_looking(weakref.ref(self), replica, first))

    async def look_at(self, replica: Replica) -> bool:
        """Ask an engine for its health and return whether it may get requests.

        One that is down makes up for what it missed, gets the current weights, and is resumed. Concurrent
        callers share one look, which goes on if a caller is cancelled.
        """
        self.enter()
        look = self.begin_look(replica)
        await asyncio.wait({look})
        return not look.cancelled() and look.result()

    def begin_look(self, replica: Replica) -> asyncio.Task[bool]:
        """Begin a look at an engine, or return the one that is under way."""
        task = self._looks.get(replica)
        if task is None or task.done():
            task = self._looks[replica] = asyncio.ensure_future(self._look(replica))
        return task

    async def _look(self, replica: Replica) -> bool:
        try:
            await bounded(replica.engine.check_health(), HEALTH_TIMEOUT, replica.name)
            if replica.down is not None and replica in self.replicas:
                await self._bring_up_to_date(replica)
        except Exception as error:  # noqa: BLE001 - an engine may be the user's
            self.take_down(replica, str(error) or type(error).__name__)
            return False
        is_open = self.state == "open" or (self.state == "paused" and replica.halted)
        if replica.down is not None and is_open and not (replica.stale or replica.owed):
            _log.info("engine %s is back", replica.name)
            replica.down, replica.lost, replica.left = None, False, False
        return replica.down is None

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Make up for the calls that an engine missed, the last weight update and the end of a pause."""

        async def tell(call: Control, **arguments: Any) -> None:
            (result,) = (await self.tell([replica], call, **arguments)).values()
            if result.error is not None:
                raise result.error

        while replica.owed:
            call, arguments = owed = replica.owed[0]
            await tell(call, **arguments)
            if owed in replica.owed:
                replica.owed.remove(owed)
        if replica.lost and not replica.stale:
            replica.stale = await self._has_other_weights(replica)
        while replica.stale:
            if self.loaded is None:
                raise EngineStateError(
                    "the engine missed a weight update", where=replica.name, remedy="Update the weights again"
                )
            loaded = self.loaded
            await tell("load_weights", **loaded)
            replica.stale = self.loaded is not loaded  # there may have been another update meanwhile
        with contextlib.suppress(EngineError):  # asked now, so that no request waits for it
            replica.limit = await bounded(replica.engine.max_prompt_len(), HEALTH_TIMEOUT, replica.name)
        if (self.loaded is not None or replica.left) and replica.lost and not replica.halted:
            # Another client that updated weights, and is gone, may have paused it.
            (report,) = (await self.tell([replica], "reports_pause", within=HEALTH_TIMEOUT)).values()
            if report.value is True and self.loaded is None:
                raise EngineStateError("another client keeps the engine paused", where=replica.name)
            replica.halted |= report.value is True
        # At the end, so that a pause that is over by now is not missed.
        if self.state == "open" and replica.halted:
            with contextlib.suppress(EngineUnsupportedError):
                await tell("resume_generation")

    async def _has_other_weights(self, replica: Replica) -> bool:
        """Whether an engine has other weights than the last update's, or, without one, than most others.

        Raises:
            EngineStateError: It has, and the update cannot be repeated.
        """
        peers = [] if self.loaded is not None or self.version is not None else self.healthy()[:_PEERS]
        results = await self.tell([replica, *peers], "weight_version", within=HEALTH_TIMEOUT)
        version, *others = (result.value for result in results.values())
        expected = Counter(others).most_common(1)[0][0] if others else self.version
        if self.loaded is not None:
            return version is None or version != expected
        if None not in (version, expected) and version != expected:
            problem = "the engine has other weights"
            raise EngineStateError(problem, where=replica.name, expected=expected, got=version)
        return False

    async def end_watches(self) -> None:
        """End looks and watches."""
        tasks = [*self._watches.values(), *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_looking(fleet: "weakref.ref[Fleet]", replica: Replica, wait: float) -> None:
    """Look at an engine that is down until it serves, or its client is gone."""
    while True:
        await asyncio.sleep(wait)
        owner = fleet()
        if owner is None or replica.down is None or owner.state == "closed":
            return
        await owner.look_at(replica)
        del owner
        wait = min(_MAX_LOOK, max(_FIRST_LOOK, 2 * wait))


def torn_down() -> EngineStateError:
    """Build the error of a client that was torn down."""
    return EngineStateError("the client was torn down", remedy="Make another one, or a copy by pickling")
