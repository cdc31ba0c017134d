"""An audit within a training loop, for a share of its time."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from mmrender.audit.noise import Noise, measure_noise
from mmrender.audit.report import AuditReport
from mmrender.audit.run import audit
from mmrender.audit.trainer import TrainerModel
from mmrender.trajectory.sample import TrainingSample


class Watch:
    """Audits some samples of each step, and explains them only if they differ.

    The time of all calls is at most `share` of all other time since the watch was made, explanations left
    out. The arithmetic is measured once, at the first call, and later calls wait until that is paid back.

    Args:
        trainer: The model that is trained.
        share: Maximum share of the time.
        clock: Returns seconds.
        **options: As for `audit`.
    """

    def __init__(
        self,
        trainer: TrainerModel,
        *,
        share: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self._trainer, self._share, self._clock, self._options = trainer, share, clock, options
        self._noise: Noise | None = None
        self._began = clock()
        self._spent = self._rate = 0.0
        self._next = 0

    def __call__(self, samples: Sequence[TrainingSample]) -> AuditReport | None:
        """Audit as many samples of a step as the time allows; None if it allows none.

        The weights must be the weights that sampled, so this comes before the update.
        """
        began = self._clock()
        # Half of it is kept for a call that takes longer than the last one.
        left = (self._share * (began - self._began - self._spent) - self._spent) / 2
        if not samples or (self._noise is not None and left < self._rate * min(map(len, samples))):
            return None
        chosen: list[TrainingSample] = []
        for number in range(len(samples)):
            sample = samples[(self._next + number) % len(samples)]
            if chosen and self._rate * sum(map(len, [*chosen, sample])) > left:
                break
            chosen.append(sample)
            if self._noise is None:
                break
        self._next += len(chosen)
        noise = self._noise or measure_noise(chosen, self._trainer)
        report = audit(chosen, self._trainer, noise=noise, **{**self._options, "explain": 0})
        seconds = self._clock() - began
        self._spent += seconds
        self._rate = seconds / sum(map(len, chosen)) if self._noise is not None else self._rate
        self._noise = noise
        if report.ok:
            return report
        return audit(chosen, self._trainer, noise=noise, **self._options)
