"""`Session`: one rollout of an agent, and its trajectory.

A turn is on disk before its answer is complete. An equal call attaches to an earlier one whose callers have
left without the whole answer, so a retry gets the same turn. A session without running calls may leave
memory, and the next call reads it back as after a restart.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec

from mmrender.client.engine import Engine
from mmrender.client.types import RequestOptions
from mmrender.engines.http_engine import SESSION_HEADER
from mmrender.errors import SessionClosedError
from mmrender.gateway.call import Answer, Call, OnDelta, new_id
from mmrender.gateway.failures import loss_of
from mmrender.gateway.memory import COUNTS, SessionMemory
from mmrender.gateway.pending import Pending, Run
from mmrender.gateway.settings import GatewaySettings
from mmrender.gateway.store import Answered, Begun, Closed, Delivered, Opened, Refused, Rewarded, SessionFile
from mmrender.gateway.turn import take_turn
from mmrender.rollout.environment import turn_seed
from mmrender.trajectory.tree import Trajectory
from mmrender.workers import Notifier, gather_all

_log = logging.getLogger("mmrender.gateway")

_DELIVERY_SECONDS: Final = 0.05
"""Seconds in which a delivery may be written together with the next call."""
_PRIVATE: Final = ("api_key", "owner", "version")

SessionState: TypeAlias = Literal["open", "closing", "finished", "abandoned"]


@dataclass(frozen=True, slots=True)
class SessionHost:
    """Engine, rules and neighbours that all sessions of a gateway share.

    Attributes:
        engine: Samples.
        settings: Limits.
        options: Options of each request to the engine.
        leave: Takes the trajectory of a session that has ended, and removes its file.
        root: Returns the root URL of the gateway.
    """

    engine: Engine
    settings: GatewaySettings
    options: RequestOptions
    leave: Callable[["Session", Trajectory | None], Awaitable[None]]
    root: Callable[[], str]


class Session:
    """One rollout of an agent. `Gateway.open_session` makes it. One event loop uses it.

    Attributes:
        opened: Its settings.
        file: Its records.
        state: `open`, `closing` while running calls end, `finished`, or `abandoned`.
        used: Time of the newest call, as `time.monotonic`.
    """

    def __init__(self, opened: Opened, file: SessionFile, host: SessionHost) -> None:
        self.opened = opened
        self.file = file
        self.state: SessionState = "open"
        self.used = time.monotonic()
        self._host = host
        headers = {**(host.options.get("extra_headers") or {}), SESSION_HEADER: opened.name}
        self._options: RequestOptions = {**host.options, "extra_headers": headers}
        self._memory: SessionMemory | None = None
        self._left: dict[str, Any] = dict.fromkeys(COUNTS)
        self._loading = asyncio.Lock()
        self._beginning = 0
        self._changed = Notifier()
        self._closing = Closed("finished", None)
        self._end: asyncio.Task[Trajectory | None] | None = None

    def __repr__(self) -> str:
        return f"Session({self.name!r}, {self.state})"

    @property
    def name(self) -> str:
        """The name, which is also the trajectory's id."""
        return self.opened.name

    @property
    def owner(self) -> str:
        """Digest of the key that opened it, or an empty text."""
        return self.opened.owner

    @property
    def api_key(self) -> str:
        """The key that opens only this session."""
        return self.opened.api_key

    @property
    def base_url(self) -> str:
        """URL for clients of OpenAI's protocols."""
        return f"{self._host.root()}/s/{self.name}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """URL for clients of Anthropic's protocol, which add `/v1` themselves."""
        return f"{self._host.root()}/s/{self.name}"

    @property
    def incomplete(self) -> str | None:
        """Why the trajectory lacks a call of the agent, or None. After a restart a call finds it out."""
        incomplete: str | None = self._counts()["incomplete"]
        return incomplete

    @property
    def in_memory(self) -> bool:
        """Whether it is in memory, besides its settings."""
        return self._memory is not None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, 0 if it has left memory."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or an answer waits for a caller that may come back."""
        return self._beginning > 0 or (self._memory is not None and bool(self._memory.runs))

    @property
    def has_failed_to_end(self) -> bool:
        """Whether the trajectory could not leave, such as on a full disk."""
        return self._end is not None and self._end.done() and self._end.exception() is not None

    def describe(self) -> dict[str, Any]:
        """Return its settings and state as plain data, without its key.

        `steps`, `tokens`, `bytes`, `running` and `reward` are None from a restart to the first call.
        """
        opened = msgspec.structs.asdict(self.opened)
        return {
            **{name: value for name, value in opened.items() if name not in _PRIVATE},
            "state": self.state,
            "idle_seconds": round(time.monotonic() - self.used, 3),
            **self._counts(),
        }

    # --- calls ---

    async def begin(self, call: Call) -> Pending:
        """Begin to answer a call.

        The call attaches to an earlier one if their idempotency keys are equal, or if the requests are equal
        and each caller of the earlier one has left without the whole answer. If all callers have left,
        sampling goes on for `settings.retry_seconds`, and is then aborted.

        Tokens are streamed from the engine only if the call is streamed, since that costs more.

        Raises:
            SessionClosedError: The session has ended.
            SessionBudgetError: Its turns, tokens or bytes are used up.
            InputError: The idempotency key names another request, or the call cannot be digested.
            TrajectoryError: The session's file is damaged.
        """
        self._check_open()
        self.used = time.monotonic()
        self._beginning += 1  # so that it stays in memory
        try:
            key = call.digests.request
            memory = await self._loaded()
            run = await memory.repeated(key, call.idempotency_key)
            self._check_open()
            if run is None:
                memory.check_budgets(self.opened, self._host.settings, call.n)
                run = Run(key, tuple(new_id() for _ in range(call.n)), call.idempotency_key)
                memory.keep(run)
                on_delta = run.add_delta if call.stream else None
                self._start(run, self._sampled(memory, run, call, on_delta))
            elif run.task is not None and run.answers and run.task.done() and run.task.exception():
                self._start(run, self._written(run))
        finally:
            self._beginning -= 1
        return Pending(run, self._caller_ended)

    async def answer(self, call: Call, on_delta: OnDelta | None = None) -> tuple[Answer, ...]:
        """Answer a call of this process, which receives each answer that this returns.

        Text is sent to `on_delta` as it becomes certain.

        Raises as `begin` and `Pending.answers`.
        """
        pending = await self.begin(replace(call, stream=on_delta is not None))
        try:
            if on_delta is not None:
                position = 0
                while (deltas := await pending.more(position)) is not None:
                    for delta in deltas:
                        on_delta(delta)
                    position += len(deltas)
            answers = await pending.answers()
            pending.delivered()
            return answers
        finally:
            pending.leave()

    # --- rewards and the end ---

    async def reward(
        self,
        value: float | Sequence[float] | None,
        *,
        step: int | None = None,
        response_id: str | None = None,
    ) -> None:
        """Set the reward of the rollout, of a step, or of the step that made a response.

        Args:
            value: A number. For a step also one for each sampled token.
            step: Index of the step.
            response_id: Id of the response, with or without its protocol's prefix.

        Raises:
            SessionClosedError: The session has ended.
            InputError: The step or response does not exist.
            TrajectoryError: The value does not fit.
            OSError: The reward could not be written.
        """
        self._check_open()
        memory = await self._loaded()
        self._check_open()
        if response_id is not None:
            step = memory.step_of(response_id)
        event = Rewarded(list(value) if isinstance(value, Sequence) else value, step)
        memory.reward(event)
        self.file.put(event)
        await self.file.flush()

    async def finish(self, *, reward: float | None = None, incomplete: str | None = None) -> Trajectory:
        """End the rollout: refuse later calls, wait for running ones, and let the trajectory leave.

        The trajectory leaves once, however often this is called.

        Args:
            reward: Of the rollout as a whole.
            incomplete: Why the rollout is not whole, if it is not.

        Returns:
            The trajectory, for a look at it.

        Raises:
            SessionClosedError: The session was abandoned.
            TrajectoryError: The reward is not a number. The session stays open.
            OSError: The trajectory could not be written. It leaves once there is room.
        """
        if reward is not None and self.state == "open":
            await self.reward(reward)
        trajectory = await self._close(Closed("finished", incomplete))
        if trajectory is None:
            raise SessionClosedError("the session was abandoned", where=self.name)
        return trajectory

    async def abandon(self, reason: str | None = None) -> None:
        """End the rollout and throw its trajectory away. Running calls are aborted."""
        await self._close(Closed("abandoned", reason))

    async def wait(self) -> SessionState:
        """Wait until the session has ended and left. Return how it ended."""
        await self._changed.wait_until(lambda: self.state in ("finished", "abandoned"))
        return self.state

    async def trajectory(self) -> Trajectory:
        """Return the trajectory so far, to read it.

        Raises:
            SessionClosedError: The trajectory has left.
        """
        if self.state in ("finished", "abandoned"):
            raise SessionClosedError("the trajectory has left", where=self.name)
        return (await self._loaded()).trajectory

    # --- memory ---

    def rest(self) -> None:
        """Drop buffers that make the next call cheaper."""
        if self._memory is not None:
            self._memory.trajectory.rest()

    async def spill(self) -> None:
        """Leave memory until the next call. A session with running calls stays."""
        if self.in_memory and not self.is_busy:
            self._leave_memory()
            await self.file.close()

    async def stop(self) -> None:
        """Abort running calls. The session stays open on disk."""
        await self._abort()
        if self._end is not None and not self._end.done():
            await asyncio.wait({self._end}, timeout=self._host.settings.stop_seconds)
            self._end.cancel()
        with contextlib.suppress(OSError):
            await self.file.flush()

    async def _abort(self) -> None:
        runs = [] if self._memory is None else self._memory.undelivered_runs()
        tasks = [run.task for run in runs if run.task is not None]
        for run in runs:
            run.stop_timer()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _loaded(self) -> SessionMemory:
        """Return the part that may leave memory, read back if it has left."""
        async with self._loading:
            if self._memory is None:
                entries = await self.file.read()
                restored = partial(SessionMemory.restored, self.name, entries)
                memory = await asyncio.to_thread(restored, strict=self._host.settings.strict)
                self._memory = memory
                for run in memory.undelivered_runs():
                    self._wait_for_retry(run)
        return self._memory

    def _counts(self) -> dict[str, Any]:
        """Return the counts of `describe`. All are None from a restart to the first call."""
        return self._left if self._memory is None else self._memory.counts()

    def _leave_memory(self) -> None:
        self._left = self._counts()
        self._memory = None

    # --- parts of a call ---

    def _check_open(self) -> None:
        if self.state != "open":
            raise SessionClosedError(
                "the session takes no more calls",
                where=self.name,
                expected="an open session",
                got=f"a session that is {self.state}",
                remedy="Open another session",
            )

    def _start(self, run: Run, work: Any) -> None:
        """Run the work of a call. Its end is seen by callers, if there are any."""

        def end(task: asyncio.Task[tuple[Answer, ...]]) -> None:
            if not task.cancelled():
                task.exception()
            run.changed.notify()

        run.task = asyncio.ensure_future(work)
        run.task.add_done_callback(end)

    async def _sampled(
        self, memory: SessionMemory, run: Run, call: Call, on_delta: OnDelta | None
    ) -> tuple[Answer, ...]:
        """Sample and record the answers of a call."""
        host = self._host
        params = self.opened.sampling_params
        if isinstance(seed := params.get("seed"), int):
            params = {**params, "seed": turn_seed(seed, self.name, memory.begun)}
        memory.begun += 1
        self.file.put(Begun(run.key))
        try:
            if on_delta is None:
                self.file.flush_soon()
            else:
                await self.file.flush()  # before a part of the answer can be seen
            previous = None
            if call.previous is not None:
                previous = memory.step_of(call.previous, "previous_response_id")
            turns = await gather_all(
                [
                    take_turn(
                        host.engine,
                        memory.trajectory,
                        memory.index,
                        call,
                        previous=previous,
                        params=params,
                        template_arguments=self.opened.template_arguments,
                        on_delta=on_delta,
                        number=number,
                        answer_id=answer_id,
                        options=self._options,
                    )
                    for number, answer_id in enumerate(run.answer_ids)
                ]
            )
        except BaseException as error:
            lost = loss_of(error)
            memory.drop(run, forget=True)
            memory.note_failure(run.key, lost)
            self.file.put(Refused(run.key, lost))
            self.file.flush_soon()
            raise
        run.answers = tuple(answer for _, answer in turns)
        memory.note_answers(run)
        stored = [replace(answer, token_ids=(), logprobs=()) for answer in run.answers]
        self.file.put(Answered(run.key, stored, run.idempotency_key), memory.next_piece())
        return await self._written(run)

    async def _written(self, run: Run) -> tuple[Answer, ...]:
        """Return the answers once they are on disk."""
        await self.file.flush()
        return run.answers

    def _caller_ended(self, run: Run, is_delivered: bool) -> None:
        """Note that a caller has received all answers, or has left."""
        memory = self._memory
        if is_delivered:
            self.file.put(Delivered(list(run.answer_ids)))
            asyncio.get_running_loop().call_later(_DELIVERY_SECONDS, self.file.flush_soon)
            if memory is not None:
                memory.note_delivery(run.answer_ids)
                memory.drop(run)
        elif run.waits_for_retry:
            self._wait_for_retry(run)
        self._changed.notify()

    def _wait_for_retry(self, run: Run) -> None:
        """Give a call up if no caller comes back in time."""

        def give_up() -> None:
            if run.task is not None:
                run.task.cancel()
            if self._memory is not None:
                self._memory.drop(run)

        loop = asyncio.get_running_loop()
        run.timer = loop.call_later(self._host.settings.retry_seconds, give_up)

    # --- parts of the end ---

    async def _close(self, closed: Closed) -> Trajectory | None:
        if self._end is None:
            self._check_open()
            self._end = self.resume(closed)
        elif self.has_failed_to_end:
            self._end = self.resume()
        return await asyncio.shield(self._end)

    def resume(self, closed: Closed | None = None) -> "asyncio.Task[Trajectory | None]":
        """Begin an end, or go on with one that is on disk or that failed."""
        self.state = "closing"
        self._closing = closed or self._closing

        def log(task: asyncio.Task[Trajectory | None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.warning("%s could not leave, and tries again: %s", self, error)

        self._end = asyncio.ensure_future(self._closed(self._closing))
        self._end.add_done_callback(log)
        return self._end

    async def _closed(self, closed: Closed) -> Trajectory | None:
        """Wait for running calls, or abort them, and let the trajectory leave."""
        trajectory = None
        if closed.state == "finished":
            trajectory = await self._whole(closed)
        else:
            await self._abort()
        self.file.put(closed)
        await self.file.flush()
        await self._host.leave(self, trajectory)
        self._leave_memory()
        self.state = closed.state
        self._changed.notify()
        return trajectory

    async def _whole(self, closed: Closed) -> Trajectory:
        """Return the trajectory with the session's data once no call runs."""
        memory = await self._loaded()
        await asyncio.gather(
            *(run.task for run in memory.undelivered_runs() if run.task is not None), return_exceptions=True
        )
        with contextlib.suppress(TimeoutError):  # answers may be on their way
            async with asyncio.timeout(self._host.settings.stop_seconds):
                await self._changed.wait_until(
                    lambda: not any(run.callers for run in memory.undelivered_runs())
                )
        for run in memory.undelivered_runs():
            run.stop_timer()
        return memory.whole(self.opened, closed.reason)
