"""One request to one of many engines: waiting, choosing, failing over. Knows nothing of what is asked."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from mmrender.engines.fleet import Fleet
from mmrender.engines.gate import Gate
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.engines.members import Call, EndedError, Member
from mmrender.engines.monitor import Monitor
from mmrender.engines.policy import ClientPolicy, is_transient
from mmrender.errors import EngineTimeoutError, EngineUnavailableError, MMRenderError

Result = TypeVar("Result")
Ask: TypeAlias = Callable[[InferenceEngineInterface], Awaitable[Result]]


@dataclass(slots=True)
class Route:
    """What decides where one piece of work goes, from request to request.

    Attributes:
        session: Its session, or None.
        images: Identities of its images.
        preferred: The engine that had it last, whose caches know it.
        aborts: The gate's count when the work began.
    """

    session: Hashable | None = None
    images: Sequence[str] = ()
    preferred: str | None = None
    aborts: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes:
        value: The engine's answer; None where the client ended the request.
        paused: Whether a pause fell into its time.
        aborted: Whether all work was aborted since it began.
    """

    value: object
    paused: bool
    aborted: bool


class Dispatcher:
    """Sends requests.

    Args:
        fleet: The engines.
        gate: What they pass.
        policy: Attempts, times and concurrency.
    """

    def __init__(self, fleet: Fleet, gate: Gate, policy: ClientPolicy) -> None:
        self.fleet = fleet
        self.gate = gate
        self.policy = policy
        self.monitor = Monitor(fleet)

    def route(self, session: Hashable | None = None, images: Sequence[str] = ()) -> Route:
        """The route of work that begins."""
        return Route(session, images, None, self.gate.aborts)

    async def send(self, ask: Ask[Result], route: Route) -> Answer:
        """Ask an engine, and others after it where it fails.

        Raises:
            MMRenderError: An engine refused, or every attempt failed.
        """
        failures = 0
        avoided: set[str] = set()
        while True:
            member: Member | None = None
            try:
                admitted = await self._admit(route, avoided)
                if admitted is None:
                    return Answer(None, paused=False, aborted=True)
                member, call = admitted
                return await self._ask(member, call, ask, route)
            except MMRenderError as error:
                if not is_transient(error):
                    raise
                failures += 1
                if member is not None:
                    avoided.add(member.name)
                    await self.fleet.failed(member, error)
                if failures >= self.policy.attempts:
                    error.add_note(f"after {failures} attempts")
                    raise
            if not self.fleet.well().keys() - avoided:
                avoided.clear()
                await asyncio.sleep(self.policy.backoff(failures))

    async def _admit(self, route: Route, avoided: set[str]) -> tuple[Member, Call] | None:
        """Wait until an engine may be asked; None where all work was aborted meanwhile."""
        while True:
            if not await self.gate.wait_open(route.aborts):
                return None
            self.monitor.wake()
            if not self.fleet.well():
                await self.fleet.revive()
            member = self.fleet.choose(
                session=route.session, images=route.images, preferred=route.preferred, avoided=avoided
            )
            await member.slots.acquire()
            call = Call(self.policy.attempt_timeout)
            is_there = member.ill is None and not member.removed
            if is_there and self.gate.enter(member, call):
                return member, call
            member.slots.release()

    async def _ask(self, member: Member, call: Call, ask: Ask[Result], route: Route) -> Answer:
        value: Result | None = None
        try:
            if route.aborts == self.gate.aborts:
                value = await call.run(ask(member.engine), member.name)
        except EndedError:
            value = None
        finally:
            paused = self.gate.state != "open"
            member.leave(call)
            member.slots.release()
        self.fleet.succeeded(member)
        route.preferred = member.name
        return Answer(value, paused=paused, aborted=route.aborts != self.gate.aborts)


def within(seconds: float | None, what: str) -> "AbstractAsyncContextManager[None]":
    """Bound the time of a whole piece of work.

    Raises:
        EngineTimeoutError: It took longer.
    """
    return _Within(seconds, what)


class _Within:
    def __init__(self, seconds: float | None, what: str) -> None:
        self._seconds = seconds
        self._what = what

    async def __aenter__(self) -> None:
        self._scope = asyncio.timeout(self._seconds)
        await self._scope.__aenter__()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError as timeout:
            raise EngineTimeoutError(
                f"the completion was not finished within {self._seconds:g} s", where=self._what
            ) from timeout


def no_progress(policy: ClientPolicy, aborts: int) -> EngineUnavailableError:
    """The error of work that engines abort again and again without a pause."""
    return EngineUnavailableError(
        f"engines aborted a request {aborts} times in a row without a token",
        expected=f"at most {policy.max_idle_aborts} such aborts",
        remedy="Look for whoever pauses or aborts on the servers besides this client",
    )
