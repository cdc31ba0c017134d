"""`Session`: one rollout of an agent, and its trajectory.

A turn is on disk before `Session.answer` returns it. An equal call attaches to an earlier one whose caller
has left without the whole answer, so a retry gets the same turn. A session without running calls may leave
memory, and the next call reads it back as after a restart.
"""

import asyncio
import contextlib
import logging
import secrets
import string
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
from blake3 import blake3

from mmrender.client.engine import Engine
from mmrender.engines.interface import gather_all
from mmrender.errors import (
    EngineStatusError,
    InputError,
    RenderError,
    SessionBudgetError,
    SessionClosedError,
    TemplateError,
)
from mmrender.gateway.call import Answer, Call, Delta, OnDelta
from mmrender.gateway.settings import GatewaySettings
from mmrender.gateway.store import (
    Answered,
    Begun,
    Closed,
    Delivered,
    Entry,
    Opened,
    Refused,
    Rewarded,
    SessionFile,
)
from mmrender.trajectory.pieces import TrajectoryPieces
from mmrender.trajectory.step import Step, check_numbers
from mmrender.trajectory.tree import Trajectory

_log = logging.getLogger("mmrender.gateway")

ID_LENGTH: Final = 24
"""Letters and digits of an answer's id."""
_ALPHABET: Final = string.ascii_letters + string.digits
_MAX_KEPT: Final = 64
"""Answers of one session that are kept for idempotency keys."""
_REFUSALS: Final = (InputError, RenderError, TemplateError)
"""Errors that refuse a call before an answer begins."""

SessionState: TypeAlias = Literal["open", "closing", "finished", "abandoned"]
OnIds: TypeAlias = Callable[[Sequence[str]], None]
"""Callback for the ids of the answers, before their first text."""


class TakeTurn(Protocol):
    """Samples one answer and appends its step. The session's parameters replace the call's."""

    async def __call__(
        self,
        engine: Engine,
        trajectory: Trajectory,
        index: Any,
        call: Call,
        /,
        *,
        params: Mapping[str, Any],
        template_arguments: Mapping[str, Any],
        session_name: str,
        on_delta: OnDelta | None,
        number: int,
        answer_id: str,
    ) -> tuple[Step, Answer]:
        """Return the step and its answer. If it fails, the trajectory is as it was."""
        ...


@dataclass(frozen=True, slots=True)
class SessionHost:
    """Engine, rules and neighbours that all sessions of a gateway share.

    Attributes:
        engine: Samples.
        settings: Limits.
        take_turn: Samples and records one answer.
        new_index: Returns the index of recorded steps, by which calls find their place.
        leave: Takes the trajectory of a session that has ended, and removes its file.
        root: Returns the root URL of the gateway.
    """

    engine: Engine
    settings: GatewaySettings
    take_turn: TakeTurn
    new_index: Callable[[Sequence[Step]], Any]
    leave: Callable[["Session", Trajectory | None], Awaitable[None]]
    root: Callable[[], str]


@dataclass(eq=False)
class _Pending:
    """A call from its beginning until a caller has received all of its answers.

    Attributes:
        key: Digest of the request.
        ids: Ids of the answers.
        idempotency_key: As in `Call`.
        task: Samples and writes.
        answers: The answers, once sampled.
        callers: Callers that wait for the answers, or are being sent them.
        delivered: Whether one of them has received all.
        deltas: Certain text so far, for callers that attach.
        listeners: Callbacks of callers that wait.
        timer: Gives the call up when no caller has come back.
    """

    key: bytes
    ids: tuple[str, ...]
    idempotency_key: str | None
    task: asyncio.Task[tuple[Answer, ...]] | None = None
    answers: tuple[Answer, ...] = ()
    callers: int = 0
    delivered: bool = False
    deltas: list[Delta] = field(default_factory=list)
    listeners: list[OnDelta] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None

    def on_delta(self, delta: Delta) -> None:
        """Pass text on to all callers."""
        self.deltas.append(delta)
        for listener in self.listeners:
            listener(delta)


class _Live:
    """The part of a session that may leave memory: trajectory, index, and calls that may be repeated."""

    def __init__(self, pieces: TrajectoryPieces, index: Any) -> None:
        self.pieces = pieces
        self.index = index
        self.steps_of: dict[str, int] = {}
        self.undelivered: set[int] = set()
        self.lost: dict[bytes, str] = {}
        self.calls: dict[bytes, list[_Pending]] = {}
        self.kept: dict[str, _Pending] = {}
        self.nbytes = 0

    @property
    def trajectory(self) -> Trajectory:
        return self.pieces.trajectory

    def pending(self, answer_ids: Sequence[str] | None = None) -> list[_Pending]:
        """Return calls that have not been delivered, or the calls of some answers."""
        waiting = [each for calls in self.calls.values() for each in calls]
        if answer_ids is None:
            return waiting
        known = dict.fromkeys([*waiting, *self.kept.values()])
        return [each for each in known if not set(each.ids).isdisjoint(answer_ids)]

    def answered(self, pending: _Pending) -> None:
        """Take in the answers of a call."""
        self.lost.pop(pending.key, None)
        for answer in pending.answers:
            self.steps_of[answer.id] = answer.step
            self.undelivered.add(answer.step)
            before = self.trajectory.steps[answer.step].previous
            if before is not None:  # an agent that goes on from an answer has received it
                self.undelivered.discard(before.index)

    def delivered(self, answer_ids: Iterable[str]) -> None:
        self.undelivered -= {self.steps_of[each] for each in answer_ids if each in self.steps_of}

    def keep(self, pending: _Pending) -> None:
        """Keep a call for its repetitions."""
        self.calls.setdefault(pending.key, []).append(pending)
        if pending.idempotency_key is not None:
            self.kept[pending.idempotency_key] = pending
            if len(self.kept) > _MAX_KEPT:
                del self.kept[next(iter(self.kept))]

    def drop(self, pending: _Pending, *, failed: bool = False) -> None:
        """Forget a call that has been delivered or given up, except by its idempotency key."""
        calls = [each for each in self.calls.pop(pending.key, ()) if each is not pending]
        if calls:
            self.calls[pending.key] = calls
        if failed and pending.idempotency_key is not None:
            self.kept.pop(pending.idempotency_key, None)


class Session:
    """One rollout of an agent. `Gateway.open_session` makes it. One event loop uses it.

    Attributes:
        opened: Its settings.
        state: `open`, `closing` while running calls end, `finished`, or `abandoned`.
        incomplete: Why the trajectory lacks a call of the agent, or None. Known while the session is in
            memory.
        used: Time of the newest call, as `time.monotonic`.
    """

    def __init__(self, opened: Opened, file: SessionFile, host: SessionHost) -> None:
        self.opened = opened
        self.file = file
        self.state: SessionState = "open"
        self.incomplete: str | None = None
        self.used = time.monotonic()
        self._host = host
        self._live: _Live | None = None
        self._loading = asyncio.Lock()
        self._ended = asyncio.Event()
        self._moved = asyncio.Event()
        self._closing = Closed("finished", None)
        self._end: asyncio.Task[None] | None = None
        self._flushes: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Session({self.name!r}, {self.state})"

    @property
    def name(self) -> str:
        """The name, which is also the trajectory's id."""
        return self.opened.name

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
    def has_failed_to_end(self) -> bool:
        """Whether the trajectory could not leave, such as on a full disk."""
        return self._end is not None and self._end.done() and self._end.exception() is not None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, 0 if it has left memory."""
        return 0 if self._live is None else self._live.nbytes

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or an answer is kept for a caller that may come back."""
        return self._loading.locked() or (self._live is not None and bool(self._live.calls))

    # --- calls ---

    async def answer(
        self, call: Call, on_delta: OnDelta | None = None, *, on_ids: OnIds | None = None
    ) -> tuple[Answer, ...]:
        """Answer a call. Its turns are on disk when this returns.

        A call attaches to an earlier one if their idempotency keys are equal, or if the requests are equal
        and each caller of the earlier one has left without the whole answer. The caller reports by
        `delivered` or `undelivered` how sending went. A caller that is cancelled has left: sampling goes on
        for `settings.retry_seconds`, and is then aborted.

        Args:
            call: The call.
            on_delta: Called with text as it becomes certain, in full also for a call that attaches.
            on_ids: Called with the ids of the answers before their first text.

        Raises:
            SessionClosedError: The session has ended.
            SessionBudgetError: Its turns, tokens or bytes are used up.
            InputError: An idempotency key names another request.
            MMRenderError: As for `Engine.turn`.
            OSError: The turn could not be written. An equal call tries again.
        """
        self._check_open()
        self.used = time.monotonic()
        live = await self._loaded()
        self._check_open()
        pending = self._repeated(live, call) or self._begin(live, call)
        pending.callers += 1
        if pending.timer is not None:
            pending.timer.cancel()
        if on_ids is not None:
            on_ids(pending.ids)
        if on_delta is not None:
            for delta in pending.deltas:
                on_delta(delta)
            pending.listeners.append(on_delta)
        try:
            return await asyncio.shield(self._task(live, pending, call))
        except asyncio.CancelledError:
            self._leave(live, pending)
            if pending.task is not None and pending.task.cancelled():
                raise SessionClosedError("the call was given up", where=self.name) from None
            raise
        except BaseException:
            self._leave(live, pending)
            raise
        finally:
            if on_delta is not None:
                pending.listeners.remove(on_delta)

    def delivered(self, answer_ids: Sequence[str]) -> None:
        """Note that a caller has received answers in full. The same request then begins another turn."""
        if (live := self._live) is not None:
            for pending in live.pending(answer_ids):
                pending.callers -= 1
                pending.delivered = True
                live.drop(pending)
            live.delivered(answer_ids)
        if self.state in ("open", "closing"):
            self.file.put(Delivered(list(answer_ids)))
            self._flush_soon()
        self._moved.set()

    def undelivered(self, answer_ids: Sequence[str]) -> None:
        """Note that a caller has left before it received answers in full. Its retry gets the same turn."""
        if (live := self._live) is not None:
            for pending in live.pending(answer_ids):
                self._leave(live, pending)

    # --- rewards and the end ---

    async def reward(
        self, value: float | Sequence[float] | None, *, step: int | None = None, response: str | None = None
    ) -> None:
        """Set the reward of the rollout, of a step, or of the step that made a response.

        Args:
            value: A number. For a step also one for each sampled token.
            step: Index of the step.
            response: Id of the response, with or without its protocol's prefix.

        Raises:
            SessionClosedError: The session has ended.
            InputError: There is no such step or response.
            TrajectoryError: The value does not fit.
        """
        self._check_open()
        live = await self._loaded()
        self._check_open()
        if response is not None:
            step = live.steps_of.get(response[-ID_LENGTH:])
            if step is None:
                raise InputError(
                    "this session has no such response", where="response", got=repr(response)[:80]
                )
        if step is not None and not 0 <= step < len(live.trajectory):
            expected = f"a number below {len(live.trajectory)}"
            raise InputError("this session has no such step", where="step", expected=expected, got=str(step))
        event = Rewarded(list(value) if isinstance(value, Sequence) else value, step)
        _apply_reward(live.trajectory, event)
        self.file.put(event)
        await self.file.flush()

    async def finish(self, *, reward: float | None = None, incomplete: str | None = None) -> None:
        """End the rollout: refuse later calls, wait for running ones, and let the trajectory leave.

        The trajectory leaves once, however often this is called.

        Args:
            reward: Of the rollout as a whole, if it is not set yet.
            incomplete: Why the rollout is not whole, if it is not.

        Raises:
            TrajectoryError: The reward is not a number. The session stays open.
            OSError: The trajectory could not be written. Call it again once there is room.
        """
        if reward is not None and self.state == "open":
            await self.reward(reward)
        await self._close(Closed("finished", incomplete))

    async def abandon(self, reason: str | None = None) -> None:
        """End the rollout and throw its trajectory away. Running calls are aborted."""
        if self.state == "open" and self._live is not None:
            for pending in list(self._live.pending()):
                if pending.task is not None:
                    pending.task.cancel()
        await self._close(Closed("abandoned", reason))

    async def wait(self) -> SessionState:
        """Wait until the session has ended and left. Return how it ended."""
        await self._ended.wait()
        return self.state

    async def trajectory(self) -> Trajectory:
        """Return the trajectory so far. It grows with later calls.

        Raises:
            SessionClosedError: The session has ended, so the trajectory has left.
        """
        if self.state in ("finished", "abandoned"):
            raise SessionClosedError(f"the session is {self.state}", where=self.name)
        return (await self._loaded()).trajectory

    # --- memory ---

    async def spill(self) -> None:
        """Leave memory until the next call. A session with running calls stays."""
        if self.is_busy or self._live is None:
            return
        self._live = None
        await self.file.close()

    async def stop(self) -> None:
        """Abort running calls. The session stays open on disk."""
        live = self._live
        tasks = [each.task for each in (live.pending() if live else ()) if each.task is not None]
        for pending in live.pending() if live else ():
            if pending.timer is not None:
                pending.timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._flushes, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self.file.flush()

    async def _loaded(self) -> _Live:
        """Return the part that may leave memory, read back if it has left."""
        if self._live is None:
            async with self._loading:
                if self._live is None:
                    entries = await self.file.read()
                    live = await asyncio.to_thread(self._restored, entries)
                    for pending in list(live.pending()):
                        self._wait_for_retry(live, pending)
                    self._live = live
                    self._note_lost(live)
        return self._live

    def _restored(self, entries: Sequence[Entry]) -> _Live:
        """Replay the records of the session's file."""
        pieces = TrajectoryPieces.restored(self.name, [each.piece for each in entries if each.piece])
        trajectory = pieces.trajectory
        live = _Live(pieces, self._host.new_index(trajectory.steps))
        live.nbytes = trajectory.nbytes
        for event, piece in entries:
            live.nbytes += 0 if piece is None else piece["table"].nbytes
            if isinstance(event, Begun):
                live.lost[event.call] = "the gateway stopped during a call"
            elif isinstance(event, Refused):
                live.lost.pop(event.call, None)
                live.lost |= {} if event.lost is None else {event.call: event.lost}
            elif isinstance(event, Answered):
                answers = tuple(_with_tokens(answer, trajectory) for answer in event.answers)
                ids = tuple(answer.id for answer in answers)
                pending = _Pending(event.call, ids, event.idempotency_key, answers=answers)
                live.answered(pending)
                live.keep(pending)
            elif isinstance(event, Delivered):
                live.delivered(event.answers)
            elif isinstance(event, Rewarded):
                _apply_reward(trajectory, event)
        for pending in live.pending():
            if live.undelivered.isdisjoint(answer.step for answer in pending.answers):
                pending.delivered = True
                live.drop(pending)
        return live

    # --- parts of a call ---

    def _check_open(self) -> None:
        if self.state != "open":
            raise SessionClosedError(
                "the session takes no more calls",
                where=self.name,
                got=f"a call of a session that is {self.state}",
                remedy="Open another session",
            )

    def _repeated(self, live: _Live, call: Call) -> _Pending | None:
        """Return the earlier call that this one repeats, or None."""
        key, name = call_digest(call), call.idempotency_key
        if name is not None and (kept := live.kept.get(name)) is not None:
            if kept.key != key:
                raise InputError(
                    "another request has this idempotency key", where="idempotency-key", got=name
                )
            return kept
        calls = live.calls.get(key, ())
        return next((each for each in calls if not each.callers and not each.delivered), None)

    def _begin(self, live: _Live, call: Call) -> _Pending:
        """Take in a new call."""
        limits, opened, trajectory = self._host.settings, self.opened, live.trajectory
        running = sum(len(each.ids) for each in live.pending() if not each.answers)
        tokens = sum(len(step.completion_ids) for step in trajectory.steps)
        for used, limit, unit in (
            (len(trajectory) + running, opened.max_turns, "turns"),
            (tokens, opened.max_tokens, "tokens"),
            (len(trajectory) + running, limits.max_steps, "calls"),
            (live.nbytes, limits.max_session_bytes, "bytes"),
        ):
            if limit is not None and used >= limit:
                problem = f"the session's {unit} are used up"
                raise SessionBudgetError(problem, where=self.name, expected=f"below {limit}", got=str(used))
        ids = tuple(new_id() for _ in range(call.n))
        pending = _Pending(call_digest(call), ids, call.idempotency_key)
        live.keep(pending)
        return pending

    def _task(self, live: _Live, pending: _Pending, call: Call) -> asyncio.Task[tuple[Answer, ...]]:
        """Return the task that answers a call. A turn that could not be written is written again."""
        task = pending.task
        if task is None or (task.done() and pending.answers and (task.cancelled() or task.exception())):
            work = self._written(pending) if pending.answers else self._sampled(live, pending, call)
            task = pending.task = asyncio.create_task(work)
        return task

    async def _sampled(self, live: _Live, pending: _Pending, call: Call) -> tuple[Answer, ...]:
        """Sample and record the answers of a call."""
        host = self._host
        self.file.put(Begun(pending.key))
        try:
            await self.file.flush()  # before a part of the answer can be seen
            turns = await gather_all(
                [
                    host.take_turn(
                        host.engine,
                        live.trajectory,
                        live.index,
                        call,
                        params=self.opened.sampling_params,
                        template_arguments=self.opened.template_arguments,
                        session_name=self.name,
                        on_delta=pending.on_delta,
                        number=number,
                        answer_id=answer_id,
                    )
                    for number, answer_id in enumerate(pending.ids)
                ]
            )
        except BaseException as error:
            live.drop(pending, failed=True)
            live.lost.pop(pending.key, None)
            if (lost := _lost(error)) is not None:
                live.lost[pending.key] = lost
            self._note_lost(live)
            self.file.put(Refused(pending.key, lost))
            self._flush_soon()
            raise
        pending.answers = tuple(answer for _, answer in turns)
        live.answered(pending)
        self._note_lost(live)
        piece = live.pieces.next()
        items = sum(item.nbytes for step, _ in turns for item in step.new_items)
        live.nbytes += piece["table"].nbytes + items
        stored = [replace(answer, token_ids=(), logprobs=()) for answer in pending.answers]
        self.file.put(Answered(pending.key, stored, pending.idempotency_key), piece)
        return await self._written(pending)

    async def _written(self, pending: _Pending) -> tuple[Answer, ...]:
        """Return the answers once they are on disk."""
        await self.file.flush()
        return pending.answers

    def _leave(self, live: _Live, pending: _Pending) -> None:
        """Note that a caller has left without the whole answer. Another may come back in time."""
        pending.callers -= 1
        if not pending.callers and not pending.delivered:
            self._wait_for_retry(live, pending)
        self._moved.set()

    def _wait_for_retry(self, live: _Live, pending: _Pending) -> None:
        def give_up() -> None:
            if pending.task is not None and not pending.task.done():
                pending.task.cancel()
            live.drop(pending)

        loop = asyncio.get_running_loop()
        pending.timer = loop.call_later(self._host.settings.retry_seconds, give_up)

    def _note_lost(self, live: _Live) -> None:
        self.incomplete = next(iter(live.lost.values()), None)

    def _flush_soon(self) -> None:
        """Write waiting records without a caller that waits. A failed write is repeated by the next one."""

        async def flush() -> None:
            try:
                await self.file.flush()
            except OSError as error:
                _log.warning("%s could not be written: %s", self, error)

        task = asyncio.ensure_future(flush())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    # --- parts of the end ---

    async def _close(self, closed: Closed) -> None:
        if self._end is None:
            self._check_open()
            self.file.put(closed)
            self.resume(closed)
        elif self.has_failed_to_end:
            self.resume()
        if self._end is not None:
            await asyncio.shield(self._end)

    def resume(self, closed: Closed | None = None) -> None:
        """Go on with an end that is on disk, or that failed."""
        self.state = "closing"
        self._closing = closed or self._closing
        self._end = asyncio.ensure_future(self._closed(self._closing))

    async def _closed(self, closed: Closed) -> None:
        """Wait for running calls, and let the trajectory leave."""
        trajectory = None
        if closed.state == "finished":
            live = await self._loaded()
            running = [each.task for each in live.pending() if each.task is not None]
            await asyncio.gather(*running, return_exceptions=True)
            with contextlib.suppress(TimeoutError):  # answers may be on their way
                async with asyncio.timeout(self._host.settings.stop_seconds):
                    while any(each.callers for each in live.pending()):
                        self._moved.clear()
                        await self._moved.wait()
            trajectory = self._marked(live, closed)
        await self.file.flush()
        await self._host.leave(self, trajectory)
        self._live = None
        self.state = closed.state
        self._ended.set()

    def _marked(self, live: _Live, closed: Closed) -> Trajectory:
        """Return the trajectory with the session's data. Answers that no caller received are marked."""
        self.incomplete = closed.reason or self.incomplete
        trajectory, opened = live.trajectory, self.opened
        known = {"group": opened.group, "metadata": opened.metadata, "incomplete": self.incomplete}
        trajectory.extra = {name: value for name, value in known.items() if value}
        if self.incomplete is not None:
            trajectory.error = f"the session is incomplete: {self.incomplete}"
        for index in live.undelivered:
            trajectory.steps[index].extra.setdefault("gateway", {})["undelivered"] = True
        for pending in live.pending():
            if pending.timer is not None:
                pending.timer.cancel()
        return trajectory


def new_id() -> str:
    """Return a unique id of letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


def call_digest(call: Call) -> bytes:
    """Return the digest by which a repeated request is known. Whether it is streamed does not count."""
    origin = call.origin
    request = (
        (call.protocol, call.model, origin.thread, origin.agent),
        (call.messages, call.tools, call.tool_choice, call.forced_tool, call.parallel_tool_calls),
        (call.sampling_params, call.template_arguments, call.n, call.logprobs),
    )
    return blake3(msgspec.msgpack.encode(request, enc_hook=str)).digest(16)


def _lost(error: BaseException) -> str | None:
    """Return why a call is lost, or None if the error refuses it."""
    if isinstance(error, _REFUSALS) or (isinstance(error, EngineStatusError) and error.status < 500):
        return None
    if isinstance(error, asyncio.CancelledError):
        return "a caller left before its answer was sampled"
    return f"a call failed: {str(error)[:200] or type(error).__name__}"


def _apply_reward(trajectory: Trajectory, event: Rewarded) -> None:
    if event.step is None:
        trajectory.reward = check_numbers(event.value, None, "reward", reward=True)
    else:
        trajectory.steps[event.step].reward = event.value


def _with_tokens(answer: Answer, trajectory: Trajectory) -> Answer:
    """Return a stored answer with the tokens of its step."""
    step = trajectory.steps[answer.step]
    logprobs = () if step.logprobs is None else step.logprobs.tolist()
    return replace(answer, token_ids=step.completion_ids.tolist(), logprobs=logprobs)
