"""Differences of a log-probability by arithmetic alone, measured on the trainer's model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from mmrender.audit.computed import in_dtype, other_attention
from mmrender.audit.report import Comparison
from mmrender.audit.trainer import TrainerModel
from mmrender.trajectory.sample import TrainingSample

_FLOOR: Final = 1e-3
"""Maximum difference of float32 kernels of different libraries, in nats a token."""
_MARGIN: Final = 4.0
"""Tolerance as a multiple of the measured noise."""
_WIDTH: Final = 2.0
"""Maximum root mean square over all tokens, as a multiple of the difference between dtypes."""
_TELLING: Final = 16
"""Tokens that agree more closely than another dtype allows, before it is ruled out."""
_MEASURED: Final = 4
_MEASURED_TOKENS: Final = 256


@dataclass(frozen=True)
class Noise:
    """Measured differences by arithmetic alone, in nats.

    Attributes:
        exact: Largest difference between two forwards that differ in batch, padding and attention only.
        mixed: Largest difference between two forwards that differ in dtype too.
        rms: Root mean square of the differences between dtypes.
        near: Share of tokens that another dtype does not change.
        tokens: Tokens of which `near` is the share.
    """

    exact: float
    mixed: float
    rms: float = 0.0
    near: float = 1.0
    tokens: int = 0

    @property
    def tolerance(self) -> float:
        """Maximum difference under a row that explains a sample, if the arithmetic is the same."""
        return max(_FLOOR, _MARGIN * self.exact)

    @property
    def alarm(self) -> float:
        """Maximum difference by another dtype."""
        return max(self.tolerance, _MARGIN * self.mixed)

    def as_sampled(self, comparisons: Sequence[Comparison]) -> "Noise":
        """Drop the allowance for another dtype if tokens show that the sampler had the same.

        More of them agree closely than another dtype leaves alone, beyond chance.
        """
        share, total = self.near, sum(len(one.positions) for one in comparisons)
        count = total - sum(int(one.beyond(self.tolerance).sum()) for one in comparisons)
        # The share was measured on some tokens, and has an error of its own.
        error = share * (1 - share) * (total + total**2 / max(self.tokens, 1))
        if not self.tokens or count - total * share < max(_TELLING, 4 * error**0.5):
            return self
        return replace(self, mixed=self.exact, rms=self.exact)

    def is_exceeded(self, comparisons: Sequence[Comparison]) -> bool:
        """Whether the differences of all tokens together are larger than the arithmetic makes them."""
        size = np.linalg.norm([one.size for one in comparisons])
        count = sum(len(one.positions) for one in comparisons)
        return count >= _TELLING and not size / count**0.5 <= max(_FLOOR, _WIDTH * self.rms)


def measure_noise(
    samples: Sequence[TrainingSample], trainer: TrainerModel, dtype: str | None = None
) -> Noise:
    """Measure differences by arithmetic alone, on some of the samples.

    Each runs alone, and again in a batch with padding and another attention kernel. It runs once more in the
    sampler's dtype, or in bfloat16 if that is unknown and the model computes in float32.

    Args:
        samples: Some of these are run.
        trainer: The model.
        dtype: Name of the sampler's dtype, if it is known.
    """
    import torch

    other = getattr(torch, dtype) if dtype else torch.bfloat16
    differs = other != trainer.model.dtype and (dtype is not None or trainer.model.dtype == torch.float32)
    lower = partial(in_dtype, trainer.model, other)
    kernel = trainer.changed(model=partial(other_attention, trainer.model))
    exact, low, near = np.zeros(1), np.zeros(1), list[bool]()
    chosen = sorted(samples, key=len)[: 2 * _MEASURED : 2]
    for sample in chosen:
        mask = sample.mm_token_type_ids == 0
        mask[0] = False
        mask[np.flatnonzero(mask)[:-_MEASURED_TOKENS]] = False
        whole = replace(sample, loss_mask=mask, logprobs=np.zeros(len(sample), np.float32))
        alone = trainer.sampled_logprobs(whole)
        # In a batch that is padded on the left.
        (again, _) = kernel.sampled_of_many([whole, max(chosen, key=len)])
        again = kernel.sampled_logprobs(whole) if again is None else again
        exact = np.append(exact, np.abs(again - alone))
        if differs:
            mixed = np.abs(trainer.sampled_logprobs(whole, model=lower) - alone)
            low = np.append(low, mixed)
            near += (mixed <= _FLOOR)[sample.loss_mask[mask]].tolist()
    rms = max(float(np.linalg.norm(of) / max(len(of) - 1, 1) ** 0.5) for of in (exact, low))
    share = float(np.mean(near)) if near else 1.0
    return Noise(float(exact.max()), float(max(exact.max(), low.max())), rms, share, len(near))
