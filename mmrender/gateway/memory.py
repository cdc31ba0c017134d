"""`SessionMemory`: the part of a session that leaves memory while no call comes. The disk has it too."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from mmrender.errors import InputError, SessionBudgetError
from mmrender.gateway.call import ID_LENGTH, Answer
from mmrender.gateway.kinds import settle_kinds
from mmrender.gateway.matching import EXTRA, Index
from mmrender.gateway.pending import Run
from mmrender.gateway.settings import GatewaySettings
from mmrender.gateway.store import Answered, Begun, Delivered, Entry, Opened, Refused, Rewarded
from mmrender.trajectory.pieces import TrajectoryPieces
from mmrender.trajectory.step import check_numbers
from mmrender.trajectory.tree import Trajectory

COUNTS: Final = ("incomplete", "steps", "tokens", "bytes", "running", "reward")
_LEAVE_SECONDS: Final = 0.02
"""Seconds that the callers of an equal call have to leave, before a new call counts as another one."""
_MAX_KEPT: Final = 64
"""Calls of one session whose answers are kept for their idempotency keys."""


class SessionMemory:
    """Trajectory, index and calls of a session.

    Args:
        pieces: The trajectory.
        index: The recorded steps, by which calls find their place.

    Attributes:
        runs: Calls whose answers have not been delivered, by digest of the request.
        lost: Why calls have no answer on the tree, by digest of the request.
        begun: Number of calls whose sampling has begun.
        tokens: Number of sampled tokens.
        nbytes: Distinct bytes of the session.
    """

    def __init__(self, pieces: TrajectoryPieces, index: Index) -> None:
        self.pieces = pieces
        self.index = index
        self.runs: dict[bytes, list[Run]] = {}
        self.lost: dict[bytes, str] = {}
        self.begun = 0
        self.tokens = 0
        self.nbytes = 0
        self._kept: dict[str, Run] = {}
        self._steps: dict[str, int] = {}
        self._requests: dict[int, bytes] = {}

    @classmethod
    def restored(cls, name: str, entries: Sequence[Entry], *, strict: bool) -> Self:
        """Return the memory of a session from the records of its file.

        Raises:
            TrajectoryError: A record is damaged.
            MediaError: A media item is damaged.
        """
        pieces = TrajectoryPieces.restored(name, [each.piece for each in entries if each.piece is not None])
        index = Index.of(pieces.trajectory.steps, strict=strict)
        settle_kinds(pieces.trajectory)  # steps are written before their kinds are final
        memory = cls(pieces, index)
        memory.nbytes = sum(item.nbytes for item in pieces.trajectory.items)
        for event, piece in entries:
            memory.nbytes += 0 if piece is None else piece["table"].nbytes
            memory._replay(event)
        for run in memory.undelivered_runs():
            if all(answer.step in memory.index.received for answer in run.answers):
                run.delivered = True
                memory.drop(run)
        return memory

    def _replay(self, event: object) -> None:
        match event:
            case Begun():
                self.begun += 1
                self.lost[event.call] = "the gateway stopped during a call"
            case Refused():
                self.note_failure(event.call, event.lost)
            case Answered():
                answers = tuple(_with_tokens(answer, self.trajectory) for answer in event.answers)
                ids = tuple(answer.id for answer in answers)
                run = Run(event.call, ids, event.idempotency_key, answers)
                self.keep(run)
                self.note_answers(run)
            case Delivered():
                self.note_delivery(event.answers)
            case Rewarded():
                self.reward(event)
            case _:
                pass

    def next_piece(self) -> dict[str, Any]:
        """Return the steps that are not on disk, as a piece for the session's file."""
        new = self.trajectory.steps[self.pieces.written :]
        piece = self.pieces.next()
        items = sum(item.nbytes for step in new for item in step.new_items)
        self.nbytes += piece["table"].nbytes + items
        return piece

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory."""
        return self.pieces.trajectory

    @property
    def incomplete(self) -> str | None:
        """Why the trajectory lacks a call of the agent, or None."""
        return next(iter(self.lost.values()), None)

    def whole(self, opened: Opened, reason: str | None) -> Trajectory:
        """Return the trajectory with the session's data, its undelivered answers marked.

        Args:
            opened: The session's settings.
            reason: Why the rollout is not whole, besides lost calls.
        """
        if reason is not None:
            self.lost = {b"": reason, **self.lost}
        known = {"group": opened.group, "metadata": opened.metadata, "incomplete": self.incomplete}
        self.trajectory.extra = {name: value for name, value in known.items() if value}
        if self.incomplete is not None:
            self.trajectory.error = f"the session is incomplete: {self.incomplete}"
        for step in self.trajectory.steps:
            step.extra[EXTRA].pop("matching", None)  # of use to the session alone
            if step.index not in self.index.received:
                step.extra[EXTRA]["undelivered"] = True
        return self.trajectory

    def undelivered_runs(self) -> list[Run]:
        """Return the calls whose answers have not been delivered."""
        return [run for runs in self.runs.values() for run in runs]

    def counts(self) -> dict[str, Any]:
        """Return what is known of the calls so far, by the names of `COUNTS`."""
        values = (
            self.incomplete,
            len(self.trajectory),
            self.tokens,
            self.nbytes,
            sum(run.is_sampling for run in self.undelivered_runs()),
            self.trajectory.reward,
        )
        return dict(zip(COUNTS, values, strict=True))

    def check_budgets(self, opened: Opened, settings: GatewaySettings, answers: int) -> None:
        """Require that a call for so many answers is within the session's budgets.

        Raises:
            SessionBudgetError: Turns, tokens or bytes are used up.
        """
        sampling = sum(len(run.answer_ids) for run in self.undelivered_runs() if run.is_sampling)
        turns = len(self.trajectory) + sampling + answers
        for used, limit, unit in (
            (turns, opened.max_turns, "turns"),
            (turns, settings.max_steps, "calls"),
            (self.tokens + 1, opened.max_tokens, "tokens"),
            (self.nbytes, settings.max_session_bytes, "bytes"),
        ):
            if limit is not None and used > limit:
                problem = f"the session's {unit} are used up"
                raise SessionBudgetError(problem, where=opened.name, expected=f"at most {limit} {unit}")

    async def repeated(self, key: bytes, idempotency_key: str | None) -> Run | None:
        """Return the call that a new one repeats, or None.

        If callers wait for an equal call, they have a moment to leave: a caller that comes back at once may
        be seen before its old connection is seen to end.

        Raises:
            InputError: The idempotency key names another request.
        """
        kept = None if idempotency_key is None else self._kept.get(idempotency_key)
        if kept is None:
            if key in self.runs and not any(run.waits_for_retry for run in self.runs[key]):
                await asyncio.sleep(_LEAVE_SECONDS)
            return next((run for run in self.runs.get(key, ()) if run.waits_for_retry), None)
        if kept.key != key:
            where = "idempotency-key"
            raise InputError("another request has this idempotency key", where=where, got=idempotency_key)
        return kept

    def keep(self, run: Run) -> None:
        """Keep a call for its repetitions."""
        self.runs.setdefault(run.key, []).append(run)
        if run.idempotency_key is not None:
            self._kept[run.idempotency_key] = run
            if len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]

    def drop(self, run: Run, *, forget: bool = False) -> None:
        """Drop a call that has been delivered or given up. `forget` drops its idempotency key too."""
        runs = [each for each in self.runs.pop(run.key, ()) if each is not run]
        if runs:
            self.runs[run.key] = runs
        if forget and run.idempotency_key is not None:
            self._kept.pop(run.idempotency_key, None)

    def note_answers(self, run: Run) -> None:
        """Take in the answers of a call."""
        self.lost.pop(run.key, None)
        for answer in run.answers:
            self._steps[answer.id] = answer.step
            self._requests[answer.step] = run.key
            self.tokens += len(answer.token_ids)
            before = self.trajectory.steps[answer.step].previous
            if before is not None:  # an agent that goes on from an answer has received it
                self._receive(before.index)

    def note_failure(self, key: bytes, lost: str | None) -> None:
        """Take in that a call failed, and why it is lost if it was not refused."""
        self.lost.pop(key, None)
        if lost is not None:
            self.lost[key] = lost

    def note_delivery(self, answer_ids: Iterable[str]) -> None:
        """Take in that a caller has received answers."""
        for answer_id in answer_ids:
            if answer_id in self._steps:
                self._receive(self._steps[answer_id])

    def _receive(self, step: int) -> None:
        self.index.received.add(step)
        # The agent has an answer to this request, so equal calls that failed are not lost to it.
        self.lost.pop(self._requests.get(step, b""), None)

    def step_of(self, response_id: str, where: str = "response_id") -> int:
        """Return the step of a response, whose id may have a protocol's prefix.

        Raises:
            InputError: No step has this response. `where` names the field.
        """
        step = self._steps.get(response_id[-ID_LENGTH:])
        if step is None:
            problem = "the session did not make this response"
            raise InputError(problem, where=where, got=repr(response_id)[:80])
        return step

    def reward(self, event: Rewarded) -> None:
        """Set a reward.

        Raises:
            InputError: The step does not exist.
            TrajectoryError: The value does not fit.
        """
        trajectory, step = self.trajectory, event.step
        if step is None:
            trajectory.reward = check_numbers(event.value, None, "reward", reward=True)
        elif 0 <= step < len(trajectory):
            trajectory.steps[step].reward = event.value
        else:
            expected = f"a number from 0 to {len(trajectory) - 1}"
            raise InputError("the step does not exist", where="step", expected=expected, got=str(step))


def _with_tokens(answer: Answer, trajectory: Trajectory) -> Answer:
    """Return a stored answer with the tokens of its step."""
    step = trajectory.steps[answer.step]
    logprobs = () if step.logprobs is None else step.logprobs.tolist()
    return replace(answer, token_ids=step.completion_ids.tolist(), logprobs=logprobs)
