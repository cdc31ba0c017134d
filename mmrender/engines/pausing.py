"""Pausing and resuming all engines, exactly: when a pause returns, no request of this client runs."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from mmrender.engines.fleet import Fleet
from mmrender.engines.gate import Gate
from mmrender.engines.interface import InferenceEngineInterface, PauseMode
from mmrender.engines.members import Call, Ending, Member
from mmrender.engines.policy import ClientPolicy
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    EngineUnsupportedError,
)

_log = logging.getLogger("mmrender.engines")

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
            EngineUnsupportedError: An engine cannot be paused so, or cannot forget cached prefixes. Nothing
                is paused then.
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
        told = [member for member in members if _can_be_told(member.engine, mode)]
        if mode == "wait":
            # Before engines are told: a request that reaches one behind its pause would never end.
            await quiet(members)
        else:
            for member in members:
                for call in list(member.calls):
                    call.hold()
        self._paused = list(told)  # from here on, since a pause that fails may have reached its server
        await self._each(told, lambda engine: _pause_one(engine, mode, clear_cache))
        if mode == "abort":
            await abort_calls(members, self._policy.pause_timeout, "paused")
        if clear_cache and mode != "keep":
            await self._each(
                [each for each in members if each not in told], lambda engine: engine.reset_prefix_cache()
            )

    async def resume(self) -> None:
        """Go on. An engine that does not resume is ejected, and comes back once it does.

        Raises:
            EngineStateError: The client is not paused.
            EngineError: No engine resumes. The client stays paused.
        """
        self._gate.move("paused", "resuming", "the client is not paused")
        try:
            await self._resume_all()
        except BaseException:
            self._gate.move("resuming", "paused", "the client changed state")
            raise
        self._go_on()
        self._gate.move("resuming", "open", "the client changed state")

    async def _resume_all(self) -> None:
        members = list(self._paused)
        results = await asyncio.gather(*[self._resume_one(each) for each in members], return_exceptions=True)
        refused: dict[Member, EngineError] = {}
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineConnectionError):
                self._eject(member, result)
            elif isinstance(result, EngineError):
                refused[member] = result
            elif result is not None:
                raise result
        if refused and not set(self._fleet.well().values()) - refused.keys():
            member, error = next(iter(refused.items()))
            error.add_note(f"engine {member.name}")
            raise error
        for member, error in refused.items():
            self._eject(member, error)

    async def _resume_one(self, member: Member) -> None:
        await member.engine.resume_generation()
        self._forget(member)

    async def leave(self, member: Member) -> None:
        """Let an engine that was taken out run again, without what the pause has frozen on it."""
        if member not in self._paused:
            return
        self._forget(member)
        for call in list(member.calls):
            call.end("ejected")  # it is asked again elsewhere
        try:
            await member.engine.resume_generation()
        except EngineError as error:
            _log.warning("engine %s was taken out and does not resume: %s", member.name, error)

    async def _each(
        self, members: Sequence[Member], action: Callable[[InferenceEngineInterface], Awaitable[None]]
    ) -> None:
        """Act on all engines at once. One that is gone is ejected; another error is raised in the end."""
        results = await asyncio.gather(*[action(member.engine) for member in members], return_exceptions=True)
        problem: BaseException | None = None
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineConnectionError):
                self._eject(member, result)
            elif result is not None:
                result.add_note(f"engine {member.name}")
                problem = problem or result
        if problem is not None:
            raise problem

    async def _undo(self) -> None:
        """Resume every engine that was told to pause, whatever it answered."""
        members, self._paused = self._paused, []
        results = await asyncio.gather(
            *[member.engine.resume_generation() for member in members], return_exceptions=True
        )
        for member, result in zip(members, results, strict=True):
            if result is not None and not isinstance(result, EngineStateError | EngineUnsupportedError):
                self._eject(member, result)  # it may still be paused; whoever takes it back resumes it
        self._go_on()

    def _go_on(self) -> None:
        for member in self._fleet.members.values():
            for call in list(member.calls):
                call.go_on()

    def _eject(self, member: Member, error: BaseException) -> None:
        self._forget(member)
        self._fleet.eject(member, str(error))

    def _forget(self, member: Member) -> None:
        self._paused = [each for each in self._paused if each is not member]


def _can_be_told(engine: InferenceEngineInterface, mode: PauseMode) -> bool:
    """Whether an engine is paused; else it is left as it is, since this client holds back all work for it.

    Raises:
        EngineUnsupportedError: It would have to freeze requests, and cannot.
    """
    modes = engine.pause_modes
    if mode == "keep" and "keep" not in modes:
        raise EngineUnsupportedError(
            "the engine cannot freeze requests", where=engine.name, remedy="Pause with 'abort' or 'wait'"
        )
    return mode in modes or (mode == "wait" and "keep" in modes)


async def _pause_one(engine: InferenceEngineInterface, mode: PauseMode, clear_cache: bool) -> None:
    if mode in engine.pause_modes:
        await engine.pause_generation(mode, clear_cache=clear_cache)
        return
    # Nothing of this client runs there any more, so freezing is the same, but for the cache: it is kept then.
    if clear_cache:
        await engine.reset_prefix_cache()
    await engine.pause_generation("keep", clear_cache=False)


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
