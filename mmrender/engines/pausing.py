"""Pausing and resuming all engines, exactly: when a pause returns, no request of this client runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from mmrender.engines.fleet import Fleet
from mmrender.engines.gate import Gate
from mmrender.engines.interface import InferenceEngineInterface, PauseMode
from mmrender.engines.members import Call, Ending, Member
from mmrender.engines.policy import ClientPolicy
from mmrender.errors import EngineConnectionError, EngineError, EngineTimeoutError, EngineUnsupportedError

_FIRST_LOOK = 0.05
"""Seconds after which requests that reached an engine behind its pause are aborted once more."""


class Pauser:
    """Pauses and resumes.

    Args:
        fleet: The engines.
        gate: What their requests pass.
        policy: How long engines may take to obey.
    """

    def __init__(self, fleet: Fleet, gate: Gate, policy: ClientPolicy) -> None:
        self._fleet = fleet
        self._gate = gate
        self._policy = policy
        self._paused: list[Member] = []

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Let no further work pass, and bring what is under way to rest.

        Raises:
            EngineStateError: The client is paused already, or about to change state.
            EngineUnsupportedError: An engine cannot be paused so. Nothing is paused then.
            EngineError: An engine refused. Nothing is paused then.
        """
        self._gate.move("open", "pausing", "the client is paused already")
        try:
            await self._pause(mode, clear_cache)
        except BaseException:
            await self._undo()
            self._gate.move("pausing", "open", "the client changed state")
            raise
        self._gate.move("pausing", "paused", "the client changed state")

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        members = list(self._fleet.well().values())
        if mode == "wait":
            # Before engines are told: a request that reaches one behind its pause would never end.
            await quiet(members)
        else:
            for member in members:
                for call in list(member.calls):
                    call.hold()
        await self._each(members, lambda engine: _pause_one(engine, mode, clear_cache))
        if mode == "abort":
            await abort_calls(members, self._policy.pause_timeout, "paused")

    async def resume(self) -> None:
        """Go on.

        Raises:
            EngineStateError: The client is not paused.
            EngineError: An engine does not resume. The client stays paused.
        """
        self._gate.move("paused", "resuming", "the client is not paused")
        try:
            await self._each(list(self._paused), _resume_one, forget=True)
        except BaseException:
            self._gate.move("resuming", "paused", "the client changed state")
            raise
        for member in self._fleet.members.values():
            for call in list(member.calls):
                call.go_on()
        self._gate.move("resuming", "open", "the client changed state")

    async def _each(
        self,
        members: Sequence[Member],
        action: Callable[[InferenceEngineInterface], Awaitable[bool]],
        *,
        forget: bool = False,
    ) -> None:
        """Act on all engines at once. One that is gone is ejected; another error is raised in the end."""
        results = await asyncio.gather(*[action(member.engine) for member in members], return_exceptions=True)
        problem: BaseException | None = None
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineConnectionError):
                self._fleet.eject(member, str(result))
            elif isinstance(result, BaseException):
                result.add_note(f"engine {member.name}")
                problem = problem or result
                continue
            if forget:
                self._paused.remove(member)
            elif result is True:
                self._paused.append(member)
        if problem is not None:
            raise problem

    async def _undo(self) -> None:
        members, self._paused = self._paused, []
        await asyncio.gather(*[_resume_one(each.engine) for each in members], return_exceptions=True)
        for member in self._fleet.members.values():
            for call in list(member.calls):
                call.go_on()


async def _pause_one(engine: InferenceEngineInterface, mode: PauseMode, clear_cache: bool) -> bool:
    """Pause an engine; False where it is left as it is, since this client holds back all work for it."""
    modes = engine.pause_modes
    if mode in modes:
        await engine.pause_generation(mode, clear_cache=clear_cache)
        return True
    if mode == "keep":
        raise EngineUnsupportedError(
            "the engine cannot freeze requests", where=engine.name, remedy="Pause with 'abort' or 'wait'"
        )
    if "keep" in modes and mode == "wait":
        # Nothing of this client runs there any more, so freezing is the same.
        await engine.pause_generation("keep", clear_cache=clear_cache)
        return True
    return False


async def _resume_one(engine: InferenceEngineInterface) -> bool:
    await engine.resume_generation()
    return True


async def quiet(members: Sequence[Member]) -> None:
    """Wait until no request is under way."""
    for member in members:
        await member.quiet.wait_until(lambda member=member: not member.calls)  # type: ignore[misc]


async def abort_calls(members: Sequence[Member], seconds: float, ending: Ending) -> None:
    """Abort every request that is under way now, and wait until each has ended.

    Engines are told again as long as some still run, since one told too early does not know of a request that
    is on its way to it. Those that run on after `seconds` are cancelled, and then have given nothing.
    """
    running = {call: member for member in members for call in list(member.calls)}
    deadline = time.monotonic() + seconds
    pause = _FIRST_LOOK
    while running := await _still_running(running, pause):
        if time.monotonic() > deadline:
            for call in running:
                call.end(ending)
        else:
            await asyncio.gather(*[_abort_one(each, running, ending) for each in set(running.values())])
        pause = min(2 * pause, 1.0)


async def _still_running(running: dict[Call, Member], seconds: float) -> dict[Call, Member]:
    deadline = time.monotonic() + seconds
    for call, member in running.items():
        left = max(0.0, deadline - time.monotonic())
        await member.quiet.wait_until(
            lambda call=call, member=member: call not in member.calls,  # type: ignore[misc]
            left,
        )
    return {call: member for call, member in running.items() if call in member.calls}


async def _abort_one(member: Member, running: dict[Call, Member], ending: Ending) -> None:
    try:
        await member.engine.abort_generation()
    except EngineUnsupportedError:
        for call, owner in running.items():
            if owner is member:
                call.end(ending)
    except (EngineTimeoutError, EngineError):
        return  # told again in a moment, or cancelled in the end
