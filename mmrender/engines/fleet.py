"""Which engines may be given work: ejection, return, and who missed a weight update."""

import asyncio
import logging
from collections.abc import Collection, Hashable, Sequence

from mmrender.engines.gate import Gate
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.engines.members import Member
from mmrender.engines.policy import ClientPolicy
from mmrender.engines.routing import Router
from mmrender.errors import (
    EngineError,
    EngineStateError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
)

_log = logging.getLogger("mmrender.engines")


class Fleet:
    """The engines of a client.

    Args:
        engines: Engines with different names.
        policy: When to eject, and how to route.
        gate: Tells whether the client is paused, which an engine that comes back must be too.

    Attributes:
        members: By name.
        weights: How many weight updates were carried out.
        version: What the last one named the weights.
    """

    def __init__(self, engines: Sequence[InferenceEngineInterface], policy: ClientPolicy, gate: Gate) -> None:
        self.policy = policy
        self.gate = gate
        self.members: dict[str, Member] = {}
        self.weights = 0
        self.version: str | None = None
        for engine in engines:
            self._put(engine)
        if not self.members:
            raise InputError("there is no engine", where="engines", expected="one or more")
        self.router = Router(self.members, policy)

    def _put(self, engine: InferenceEngineInterface) -> Member:
        if engine.name in self.members:
            raise InputError(
                "two engines have one name", where="engines", got=repr(engine.name), remedy="Name them apart"
            )
        member = self.members[engine.name] = Member(engine, self.policy.concurrency)
        member.weights = self.weights
        return member

    def add(self, engine: InferenceEngineInterface) -> None:
        """Add an engine; few sessions move to it."""
        self.members = dict(self.members)
        self._put(engine)
        self.router = Router(self.members, self.policy)

    def remove(self, name: str) -> Member:
        """Take an engine out; its sessions spread over the others."""
        if name not in self.members:
            raise InputError("there is no such engine", where="name", got=repr(name))
        if len(self.members) == 1:
            raise InputError("the last engine cannot be removed", where="name", got=repr(name))
        rest = dict(self.members)
        member = rest.pop(name)
        member.removed = True  # those who wait for a place there choose anew
        self.members = rest
        self.router = Router(rest, self.policy)
        return member

    # --- choosing ---

    def well(self) -> dict[str, Member]:
        """Engines that may be given work."""
        return {name: member for name, member in self.members.items() if member.ill is None}

    def choose(
        self,
        *,
        session: Hashable | None,
        images: Sequence[str],
        preferred: str | None,
        avoided: Collection[str],
    ) -> Member:
        """Choose an engine, those that are not in `avoided` first.

        Raises:
            EngineUnavailableError: All are ejected.
        """
        well = self.well()
        if not well:
            ills = "; ".join(f"{member.name}: {member.ill}" for member in self.members.values())
            raise EngineUnavailableError(
                "no healthy engine is left", got=ills, remedy="Start one, and check that its URL is right"
            )
        engines = {name: member for name, member in well.items() if name not in avoided} or well
        return engines[self.router.choose(engines, session=session, images=images, preferred=preferred)]

    # --- health ---

    async def failed(self, member: Member, error: Exception) -> None:
        """Note a failure; after several in a row the engine's own word decides whether it is ejected."""
        member.failures += 1
        # Requests fail together where a server dies; one of them asks.
        if member.ill is None and member.failures >= self.policy.eject_after and not member.suspected:
            member.suspected = True
            try:
                await self.check(member, patient=False)
            finally:
                member.suspected = False

    def succeeded(self, member: Member) -> None:
        """Note that an engine did what it was asked."""
        member.failures = 0

    async def check(self, member: Member, *, patient: bool = True) -> bool:
        """Ask an engine for its health; eject it or take it back accordingly.

        Args:
            member: The engine.
            patient: Eject only after `eject_after` failures in a row, of which this may be one.
        """
        try:
            async with asyncio.timeout(self.policy.health_timeout):
                await member.engine.check_health()
                if member.ill is not None:
                    await self._bring_up_to_date(member)
        except (EngineError, TimeoutError) as error:
            if patient:
                member.failures += 1
            if member.ill is not None or not patient or member.failures >= self.policy.eject_after:
                self.eject(member, str(error) or "it did not answer in time")
            return False
        if member.ill is not None:
            _log.info("engine %s is back", member.name)
        member.ill = None
        member.failures = 0
        return True

    async def answers(self, member: Member) -> bool:
        """Whether an engine says that it serves, whatever its weights."""
        try:
            async with asyncio.timeout(self.policy.health_timeout):
                await member.engine.check_health()
        except (EngineError, TimeoutError):
            return False
        return True

    def eject(self, member: Member, reason: str) -> None:
        """Give an engine no more work, and end what it has: it is asked again elsewhere."""
        if member.ill is None:
            _log.warning("engine %s is ejected: %s", member.name, reason)
        member.ill = reason
        for call in list(member.calls):
            call.end("ejected")

    async def revive(self) -> None:
        """Ask every ejected engine whether it serves again."""
        ill = [member for member in self.members.values() if member.ill is not None]
        await asyncio.gather(*[self.check(member) for member in ill])

    async def _bring_up_to_date(self, member: Member) -> None:
        """Check that an engine may come back.

        Raises:
            EngineStateError: It has other weights than the rest, or the client is just changing state.
        """
        if member.weights != self.weights:
            raise EngineStateError(
                "the engine missed a weight update", where=member.name, remedy="Update the weights again"
            )
        if self.weights and self.version is not None:
            version = await _version(member)
            if version is not None and version != self.version:
                raise EngineStateError(
                    "the engine has other weights", where=member.name, expected=self.version, got=version
                )
        if self.gate.state != "open":
            raise EngineStateError("the client is not running", got=self.gate.state)
        # It may have missed the end of a pause.
        try:
            await member.engine.resume_generation()
        except (EngineStateError, EngineUnsupportedError):
            return


async def _version(member: Member) -> str | None:
    try:
        return await member.engine.weight_version()
    except EngineUnsupportedError:
        return None
