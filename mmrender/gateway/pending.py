"""`Pending`: a call of an agent while it is answered. Equal calls may share the sampling of its answers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mmrender.errors import SessionClosedError
from mmrender.gateway.call import Answer, Delta
from mmrender.workers import Notifier


@dataclass(eq=False)
class Run:
    """The sampling of one call's answers, until a caller has received all of them.

    Attributes:
        key: Digest of the request, see `CallDigests`.
        answer_ids: Ids of the answers.
        idempotency_key: As in `Call`.
        answers: The answers, once sampled.
        task: Samples and writes. None for answers that were read from disk.
        callers: Callers that wait for the answers, or to whom they are being sent.
        delivered: Whether one of them has received all.
        deltas: Certain text so far.
        changed: Notified of new text and of the end.
        timer: Ends the run when no caller has come back.
    """

    key: bytes
    answer_ids: tuple[str, ...]
    idempotency_key: str | None
    answers: tuple[Answer, ...] = ()
    task: asyncio.Task[tuple[Answer, ...]] | None = None
    callers: int = 0
    delivered: bool = False
    deltas: list[Delta] = field(default_factory=list)
    changed: Notifier = field(default_factory=Notifier)
    timer: asyncio.TimerHandle | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether answers are still to come."""
        return self.task is not None and not self.task.done()

    @property
    def waits_for_retry(self) -> bool:
        """Whether an equal call gets these answers, since each caller has left without them."""
        return not self.callers and not self.delivered

    def add_delta(self, delta: Delta) -> None:
        """Take in certain text."""
        self.deltas.append(delta)
        self.changed.notify()

    def stop_timer(self) -> None:
        """Stay, since a caller has come back or nobody is waited for."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Pending:
    """One caller's view of a call that is answered. `Session.begin` makes it.

    The caller ends it by `delivered` or `leave`. The first of them counts.

    Attributes:
        answer_ids: Ids of the answers, known before they are sampled.
    """

    def __init__(self, run: Run, on_end: Callable[[Run, bool], None]) -> None:
        self.answer_ids = run.answer_ids
        self._run = run
        self._on_end: Callable[[Run, bool], None] | None = on_end
        run.callers += 1
        run.stop_timer()

    async def more(self, position: int, timeout: float | None = None) -> list[Delta] | None:
        """Return the text after the first `position` deltas, once there is any that is certain.

        Returns:
            The deltas, empty if none came within `timeout` seconds. None once sampling has ended in any way.
        """
        run = self._run
        ended = await run.changed.wait_until(
            lambda: len(run.deltas) > position or not run.is_sampling, timeout
        )
        return run.deltas[position:] or (None if ended else [])

    async def answers(self) -> tuple[Answer, ...]:
        """Return the answers. Their turns are on disk then.

        Raises:
            SessionClosedError: The call was given up.
            MMRenderError: As for `take_turn`.
            OSError: The turns could not be written. An equal call tries again.
        """
        run = self._run
        if run.task is None:
            return run.answers
        await asyncio.wait({run.task})
        if run.task.cancelled():
            raise SessionClosedError("the call was given up, since the session ends or its callers had left")
        return run.task.result()

    def delivered(self) -> None:
        """Note that the caller has received all answers. The same request then begins other turns."""
        self._finish(is_delivered=True)

    def leave(self) -> None:
        """Note that the caller has left. An equal call gets the same answers for some time."""
        self._finish(is_delivered=False)

    def _finish(self, *, is_delivered: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self._run.callers -= 1
            self._run.delivered |= is_delivered
            on_end(self._run, is_delivered)
