"""`ReplicaPool`: which engine gets a request, the requests in flight, their ends, and pauses."""

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Any

from mmrender.client.transport import RetryPolicy, is_lost, is_transient
from mmrender.engines.control import FleetControl
from mmrender.engines.fleet import HEALTH_TIMEOUT, Results, Timeouts, torn_down
from mmrender.engines.interface import EngineResult, InferenceEngineInterface, PauseMode, Result
from mmrender.engines.replicas import Replica, Work
from mmrender.errors import EngineError, EngineTimeoutError, EngineUnsupportedError
from mmrender.workers import Notifier


class ReplicaPool(FleetControl):
    """Sends requests to engines. It waits while the client is paused, and asks the next engine if one fails.

    Pickled, it arrives open and without requests.

    Attributes:
        retries: How often and how soon failed requests are repeated.
        aborts: How often all work was aborted.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        router: InferenceEngineInterface | None,
        retries: RetryPolicy,
        timeouts: Timeouts,
    ) -> None:
        self._arguments = (engines, router, retries, timeouts)
        super().__init__(engines, router, timeouts)
        self.retries = retries
        self.aborts = 0
        self._turns = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaPool, self._arguments

    def renew_after_fork(self) -> None:
        """Forget the parent's event loop, with its requests and looks in flight."""
        super().renew_after_fork()
        self._ended = Notifier()

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
        return Work(about, order, self.aborts, self.timeouts.attempt)

    def is_aborted(self, work: Work) -> bool:
        """Whether all work was aborted since this one began."""
        return work.aborts != self.aborts

    async def send(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], work: Work
    ) -> Result | None:
        """Ask an engine, and the next ones if it fails. Return None if the client ended the request.

        A request that timed out on an engine that another client has paused does not count as a failure.

        Raises:
            MMRenderError: An engine refused, or every attempt failed.
        """
        failed: set[Replica] = set()
        attempts = 0
        while True:
            try:
                return await self._attempt(ask, work, failed)
            except EngineError as error:
                if isinstance(error, EngineTimeoutError) and await self.until_resumed(work):
                    failed.clear()
                    continue
                attempts += 1
                if attempts >= self.retries.attempts or not is_transient(error):
                    raise
            if all(each.down is not None or each in failed for each in self.targets):
                failed.clear()
                await asyncio.sleep(self.retries.wait_before(attempts + 1))

    async def _attempt(
        self, ask: Callable[[InferenceEngineInterface], Awaitable[Result]], work: Work, failed: set[Replica]
    ) -> Result | None:
        work.paused = False
        while True:
            await self.changed.wait_until(lambda: self.state in ("open", "closed") or self.is_aborted(work))
            if self.state == "closed":
                raise torn_down()
            if self.is_aborted(work):
                return None
            replica = await self._choose(work, failed)
            if self.state == "open" and not self.is_aborted(work):  # both may have changed meanwhile
                break
        replica.calls.add(work)
        work.last = replica
        try:
            return await work.run(ask(replica.engine), replica.name)
        except EngineError as error:
            failed.add(replica)
            if is_lost(error) and replica.down is None:
                await self.look_at(replica)
            raise
        finally:
            work.paused = self.state != "open"
            replica.calls.discard(work)
            self._ended.notify()

    async def _choose(self, work: Work, failed: Collection[Replica]) -> Replica:
        """Return the first replica of the work's order that serves and has not failed it."""
        # Behind a router one engine must serve, or it would pass requests on to paused or outdated ones.
        for needed in (self.replicas, work.order):
            if all(each.down is not None for each in needed):
                await self.until_one_serves(needed)
        up = [each for each in work.order if each.down is None]
        return next((each for each in up if each not in failed), up[0])

    async def until_one_serves(self, needed: Sequence[Replica]) -> None:
        """Look at engines, and return when the first of them serves.

        Raises:
            EngineUnavailableError: None does.
        """
        looks = [asyncio.ensure_future(self.look_at(each)) for each in needed]
        try:
            for look in asyncio.as_completed(looks):
                if await look:
                    return
        finally:
            for look in looks:
                look.cancel()
        raise self.unavailable()

    async def until_idle(self, timeout: float | None = None) -> bool:
        """Wait until no request is in flight, or return False after `timeout` seconds."""
        return await self._ended.wait_until(lambda: not self.calls(), timeout)

    async def until_ended(self, deadline: float | None) -> None:
        """Wait until every request has ended by itself. Engines that hang are found out meanwhile.

        Raises:
            EngineTimeoutError: Requests run on after `deadline` seconds. The error names them.
        """
        clock = asyncio.get_running_loop().time
        until = None if deadline is None else clock() + deadline
        while True:
            left = self.timeouts.pause if until is None else min(self.timeouts.pause, until - clock())
            if await self.until_idle(max(left, 0.0)):
                return
            if until is not None and clock() >= until:
                break
            await asyncio.gather(*[self.look_at(each) for each in self.targets if each.calls])
        calls = [f"{each.name}: {call.about}" for each in self.targets for call in each.calls]
        more = f"; and {len(calls) - 8} more" if len(calls) > 8 else ""
        raise EngineTimeoutError(
            f"requests did not end within {deadline:g} s, so nothing was paused",
            where="pause_generation",
            got="; ".join(calls[:8]) + more,
            remedy="Pause with 'abort', after which they are continued, or pass a longer deadline",
        )

    async def end_calls(self, seconds: float, look: float = 0.05) -> Results:
        """Let engines abort every request in flight, and wait until each has ended.

        Engines are asked repeatedly, since one asked too early does not know of a request on its way to it.
        Requests that run on after `seconds` are cancelled without a result. Return the last answer of each
        engine that was asked.
        """
        running, clock = set(self.calls()), asyncio.get_running_loop().time
        deadline = clock() + seconds
        answers: Results = {}
        while not await self._ended.wait_until(lambda: running.isdisjoint(self.calls()), look):
            asked = {each: each.calls & running for each in self.targets if each.calls & running}
            if self.targets is not self.replicas:  # any engine may have the requests of the router
                asked = dict.fromkeys(self.healthy(), running)
            left = max(deadline - clock(), look)
            results = await self.tell(asked, "abort_generation", within=left)
            answers |= results
            late = running if clock() > deadline else set()
            for replica, result in results.items():
                if isinstance(result.error, EngineUnsupportedError):
                    answers[replica] = EngineResult(replica.name)  # its requests are cancelled instead
                    late = late | asked[replica]
            for call in late:
                call.end("stopped")
            look = min(2 * max(look, 0.05), 1.0)
        return answers

    async def until_resumed(self, work: Work) -> bool | None:
        """Wait while another client pauses the engine that had the work's last request.

        An engine that is paused for longer than an update may take, while others serve, is left: its client
        may be gone, or may have given up a pause that the engine obeyed later.

        Returns:
            Whether it was paused. None if it does not say, or does not serve.
        """
        waits, was_paused, paused = itertools.count(2), False, None
        begun = asyncio.get_running_loop().time()
        while work.last is not None and work.last.down is None:
            paused = await self.reports_pause(work.last)
            if not paused:
                break
            if self.state == "closed" or self.is_aborted(work):
                return True
            was_paused = True
            lasts = asyncio.get_running_loop().time() - begun
            if self.timeouts.update is not None and lasts > self.timeouts.update:
                await self.leave_paused(work.last, lasts)
            await asyncio.sleep(self.retries.wait_before(next(waits)))
        return was_paused or paused

    # --- pauses ---

    async def pause(self, mode: PauseMode, clear_cache: bool, deadline: float | None) -> Results:
        """Pause engines. See `InferenceEngineClient.pause_generation`."""
        await self.release_held()
        self.move("open", "pausing", "the client is paused already")
        try:
            results = await self._halt(mode, clear_cache, deadline)
        except BaseException as error:
            halted = self.hold_halted("its pause was given up")
            if self.state == "pausing":
                self.move("pausing", "open")
            if isinstance(error, Exception):  # a caller who was cancelled does not wait
                await asyncio.gather(*map(self.look_at, halted))
            raise
        self.move("pausing", "paused")
        return results

    async def _halt(self, mode: PauseMode, clear_cache: bool, deadline: float | None) -> Results:
        clock = asyncio.get_running_loop().time
        others = [each for each in self.healthy() if mode not in each.engine.pause_modes]
        if mode == "keep" and others:
            problem, remedy = "the engine cannot freeze requests", "Pause with 'abort' or 'wait'"
            raise EngineUnsupportedError(problem, where=others[0].name, remedy=remedy)
        # Before engines pause: a request that reaches one after its pause would never end.
        if mode == "wait":
            await self.until_ended(deadline)
        until = clock() + self.timeouts.pause
        for call in self.calls():
            call.set_time(None)
        results = self.presence()
        able = [each for each in self.healthy() if each not in others]
        for each in able:
            each.halted = True
        told = await self.tell(able, "pause_generation", mode=mode, clear_cache=clear_cache)
        told |= {each: EngineResult(each.name) for each in others}
        results |= self.settle(told, "pause_generation", {})
        if mode == "abort":
            await self.end_calls(max(until - clock(), 0.0))
        if clear_cache:
            others = [each for each in others if each.down is None]
            reset = await self.tell(others, "reset_prefix_cache", within=max(until - clock(), HEALTH_TIMEOUT))
            for each in self.replicas:
                if each.down is not None:
                    each.owe("reset_prefix_cache", {})
            results |= self.settle(reset, "reset_prefix_cache", {}) if reset else {}
        return results

    async def resume(self) -> Results:
        """Resume engines. See `InferenceEngineClient.resume_generation`."""
        self.enter()
        if self.state != "open" or not await self.adopt_pause():
            self.move("paused", "resuming", "the client is not paused")
        try:
            halted = [each for each in self.healthy() if each.halted]
            results = await self.tell(halted, "resume_generation")
        except BaseException:
            if self.state == "resuming":
                self.move("resuming", "paused")
            raise
        errors = []
        for replica, result in results.items():
            if result.error is not None:
                errors.append(result.error)
                self.take_down(replica, f"it did not resume: {result.error}")
        if self.state == "resuming":
            self.move("resuming", "open")  # even if no engine resumed, so that waiting requests fail
        if not self.healthy():
            raise self.unavailable() from (errors[0] if errors else None)
        return self.presence() | results
