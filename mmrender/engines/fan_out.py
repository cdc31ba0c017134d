"""Control calls carried out on many engines at once."""

import asyncio
from collections.abc import Awaitable, Callable

from mmrender.engines.fleet import Fleet
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.engines.members import FAILED, Member
from mmrender.errors import EngineUnavailableError


class FanOut:
    """Tells all engines the same.

    Args:
        fleet: The engines.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def on_all(self, action: Callable[[InferenceEngineInterface], Awaitable[None]]) -> None:
        """Act on every healthy engine at once."""
        members = list(self._fleet.well().values())
        if not members:
            self._fleet.choose(session=None, images=(), preferred=None, avoided=())
        results = await asyncio.gather(*[action(member.engine) for member in members], return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                result.add_note(f"engine {member.name}")
                raise result

    async def all_present(self) -> list[Member]:
        """Every engine, once each is known to serve; where all failed in an update, all may try again.

        Raises:
            EngineUnavailableError: One is ejected and does not come back.
        """
        await self._fleet.revive()
        members = list(self._fleet.members.values())
        ill = [
            f"{member.name}: {member.ill}"
            for member in members
            if member.ill is not None and not (member.weights == FAILED and await self._fleet.answers(member))
        ]
        if ill:
            raise EngineUnavailableError(
                "weights are sent to all engines at once, and some are not there",
                got="; ".join(ill),
                remedy="Bring them back, or take them out with remove_engine()",
            )
        return members

    async def update(
        self,
        action: Callable[[InferenceEngineInterface], Awaitable[None]],
        version: str | None,
        *,
        all_present: bool = True,
    ) -> None:
        """Carry out a weight update; an engine that fails in it gets no work until a later one succeeds.

        Args:
            action: The update.
            version: What the weights are called after it.
            all_present: Whether it takes every engine at once, as a transfer does.

        Raises:
            EngineUnavailableError: It takes every engine, and one is ejected.
            EngineError: It failed on all, or on one where it takes every engine.
        """
        members = await self.all_present() if all_present else list(self._fleet.members.values())
        results = await asyncio.gather(*[action(member.engine) for member in members], return_exceptions=True)
        failed = [isinstance(result, BaseException) for result in results]
        if not all(failed):
            self._fleet.weights += 1
            self._fleet.version = version
        for member, result in zip(members, results, strict=True):
            if not isinstance(result, BaseException):
                member.weights = self._fleet.weights
                continue
            if all(failed) and member.weights in (FAILED, self._fleet.weights):
                member.weights = FAILED
            else:  # it misses one that others have
                member.weights = self._fleet.weights - 1
            self._fleet.eject(member, f"it missed a weight update: {result}")
            result.add_note(f"engine {member.name}")
        problems = [result for result in results if isinstance(result, BaseException)]
        if problems and (all_present or all(failed)):
            raise problems[0]
