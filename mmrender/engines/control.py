"""`FleetControl`: control calls to a fleet, with one result for each engine, its weights, and pauses."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from mmrender.client.transport import is_transient
from mmrender.engines.fleet import HEALTH_TIMEOUT, Fleet, Results
from mmrender.engines.interface import Control, EngineResult
from mmrender.engines.replicas import Replica
from mmrender.errors import EngineTimeoutError, EngineUnavailableError

_OWED: Final = frozenset({"sleep", "wake_up", "reset_prefix_cache"})
"""Calls that an engine makes up for before it serves again."""


class FleetControl(Fleet):
    """Control calls to the engines that serve. Others make up for what they miss before they serve again."""

    async def control(self, call: Control, /, **arguments: Any) -> Results:
        """Make a control call on every engine that serves. Others owe it, if it can be made up for.

        If it is cancelled, all owe it.

        Raises:
            EngineError: An engine refuses, or none obeys.
        """
        await self.release_held()
        serving, results = self.healthy(), self.presence()
        try:
            results |= await self.tell(serving, call, **arguments)
        except BaseException:
            for each in serving if call in _OWED else ():
                each.owe(call, arguments)
                self.hold(each, f"its {call} was given up")
            raise
        return self.settle(results, call, arguments)

    def presence(self) -> Results:
        """Return results that say which engines serve, the others by the error of a call that they miss."""
        down = {each: _absence(each) for each in self.replicas if each.down is not None}
        return {each: EngineResult(each.name) for each in self.replicas} | down

    def settle(self, results: Results, call: Control, arguments: dict[str, Any]) -> Results:
        """Take engines down that failed a call by a fault of their own.

        Raises:
            EngineError: An engine refused, or none obeyed.
        """
        refusals = []
        for replica, result in results.items():
            if result.error is None:
                continue
            if replica.down is None and not is_transient(result.error):
                refusals.append(result.error)
                continue
            if replica.down is None:
                self.take_down(replica, str(result.error))
            if call in _OWED:
                replica.owe(call, arguments)
        for error in refusals:
            raise error
        self.require_one(results)
        return results

    def require_one(self, results: Results) -> None:
        """Require that one engine or more obeyed.

        Raises:
            EngineError: The first error of an engine that was asked, or `EngineUnavailableError`.
        """
        errors = [result.error for result in results.values() if result.error is not None]
        if len(errors) == len(results):
            asked = [error for error in errors if not isinstance(error, EngineUnavailableError)]
            raise asked[0] if asked else self.unavailable()

    # --- weights ---

    async def load(self, arguments: dict[str, Any]) -> Results:
        """Let all engines read weights. One that is down reads them before it serves again, not waited for.

        If it is cancelled, each engine reads them before it gets requests.

        Raises:
            EngineError: None has read them.
        """
        await self.release_held()
        down = [each for each in self.replicas if each.down is not None]
        self.loaded, self.version = arguments, arguments["weight_version"]
        for each in down:
            each.stale = True
        looks = [self.begin_look(each) for each in down]
        results = await self._update("load_weights", self.healthy(), arguments)
        if looks and not self.healthy():
            await asyncio.wait(looks)
        results |= {each: _absence(each) if each.stale else EngineResult(each.name) for each in down}
        self.require_one(results)
        return results

    async def receive(self, request: Any) -> Results:
        """Let all engines receive weights at once. One that fails serves again after a later update.

        If it is cancelled, none serves before a later update.

        Raises:
            EngineError: An engine is missing or fails.
        """
        await self.require_all()
        self.loaded = None  # what is transferred cannot be transferred again for one engine
        self.version = request.get("weight_version")
        results = await self._update("update_named_weights", self.replicas, {"request": request})
        for result in results.values():
            if result.error is not None:
                raise result.error
        return results

    async def _update(self, call: Control, replicas: Sequence[Replica], arguments: dict[str, Any]) -> Results:
        """Update engines. Those that fail are stale and down."""
        for each in replicas:
            each.stale = True  # until it has answered, and if the call is cancelled
        try:
            results = await self.tell(replicas, call, **arguments)
        except BaseException:
            for each in replicas:
                self.hold(each, "its weight update was given up")
            raise
        for replica, result in results.items():
            replica.stale = result.error is not None
            if replica.stale:
                self.take_down(replica, f"it missed a weight update: {result.error}")
        return results

    async def require_all(self) -> None:
        """Require that every engine serves, or answers for its health.

        Raises:
            EngineUnavailableError: One does not.
        """
        await self.release_held()
        down = [each for each in self.replicas if each.down is not None]
        if looks := {self._looks[each] for each in down if each in self._looks}:
            await asyncio.wait(looks)  # one may be reading weights
        results = await self.tell(down, "check_health", within=HEALTH_TIMEOUT)
        failed = [f"{each.name}: {result.error}" for each, result in results.items() if result.error]
        if failed:
            raise EngineUnavailableError(
                "weights are sent to all engines at once, and some are down",
                got="; ".join(failed),
                remedy="Bring them back, or make a client without them",
            )

    # --- pauses of other clients ---

    async def adopt_pause(self) -> bool:
        """Take over the pauses that engines report, such as of a client that is gone. Whether one does."""
        reports = await self.tell(self.healthy(), "reports_pause", within=HEALTH_TIMEOUT)
        for replica, report in reports.items():
            replica.halted |= report.value is True
        return any(each.halted for each in self.healthy())

    async def reports_pause(self, replica: Replica | None = None) -> bool | None:
        """Return whether any client has paused an engine, or None if no pause is known and one does not say.

        Only `replica` is asked, unless it is a router, which passes requests on to any engine. Concurrent
        callers share one question.
        """
        self.enter()
        one = replica if replica in self.replicas else None

        async def ask() -> bool | None:
            asked = self.healthy() if one is None else [one]
            results = await self.tell(asked, "reports_pause", within=HEALTH_TIMEOUT)
            for each, result in results.items():
                if isinstance(result.error, EngineTimeoutError):
                    self.take_down(each, str(result.error))  # so that nobody waits for it again
            reports = [result.value for result in results.values()]
            if any(report is True for report in reports):
                return True
            return False if all(report is False for report in reports) else None

        return await self._reports.run(one, ask)


def _absence(replica: Replica) -> EngineResult:
    """Return the result of a call on an engine that is down."""
    error = EngineUnavailableError("the engine is down", where=replica.name, got=replica.down)
    return EngineResult(replica.name, "failed", error=error)
