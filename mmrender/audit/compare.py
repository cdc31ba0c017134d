"""Sampler against trainer, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.trajectory.sample import TrainingSample

Float32Array = npt.NDArray[np.float32]


class ImagePlace(NamedTuple):
    """One placeholder range of a sample: which item of its modality, and its tokens `[start, stop)`."""

    modality: str
    number: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.modality} {self.number} (tokens {self.start} to {self.stop - 1})"


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The sampled tokens of one sample with both log-probabilities.

    Attributes:
        sample: The sample.
        positions: Where the compared tokens stand in `sample.token_ids`; int32 of shape `(m,)`, rising.
        sampler: Log-probabilities that came with the sample; float32 of shape `(m,)`.
        trainer: Log-probabilities that the trainer's model gives; float32 of shape `(m,)`.
    """

    sample: TrainingSample
    positions: npt.NDArray[np.int32]
    sampler: Float32Array
    trainer: Float32Array

    @property
    def difference(self) -> Float32Array:
        """Trainer minus sampler; float32 of shape `(m,)`. Not finite where either is not."""
        with np.errstate(invalid="ignore"):
            return self.trainer - self.sampler

    @property
    def largest(self) -> float:
        """Largest absolute difference; infinite where a number is not finite, 0.0 without tokens."""
        return _largest(self.difference)

    @property
    def kl(self) -> float:
        """Estimate of KL(sampler || trainer) in nats a token, non-negative and of low variance.

        The mean of `exp(d) - 1 - d` with `d` the difference (Schulman, "Approximating KL divergence", k3).
        """
        if not len(self.positions):
            return 0.0
        difference = self.difference.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.mean(np.expm1(difference) - difference))

    def first_departure(self, tolerance: float) -> int | None:
        """Index into `positions` of the first token that differs by more than `tolerance`, or None."""
        beyond = ~(np.abs(self.difference) <= tolerance)
        return int(beyond.argmax()) if beyond.any() else None

    def largest_from(self, first: int) -> float:
        """Largest absolute difference from index `first` on."""
        return _largest(self.difference[first:])

    def suspects(self, departure: int) -> list[ImagePlace]:
        """Images that the departing token saw and the last agreeing one before it did not, in order.

        Where every image was seen before with agreement, or there are none, the list is empty.
        """
        agreeing = int(self.positions[departure - 1]) if departure else -1
        stop = int(self.positions[departure])
        return [place for place in image_places(self.sample) if agreeing < place.start < stop]


def _largest(difference: Float32Array) -> float:
    if not len(difference):
        return 0.0
    return float(np.abs(difference).max()) if np.isfinite(difference).all() else float("inf")


def image_places(sample: TrainingSample) -> list[ImagePlace]:
    """The placeholder ranges of a sample, in the order of their tokens."""
    return sorted(_places(sample), key=lambda place: place.start)


def _places(sample: TrainingSample) -> Iterator[ImagePlace]:
    for modality, ranges in sample.multi_modal_data.mm_placeholders.items():
        for index, found in enumerate(ranges):
            yield ImagePlace(modality, index, found.offset, found.offset + found.length)


def compare(sample: TrainingSample, trainer_logprobs: Float32Array) -> Comparison:
    """Set the trainer's log-probabilities beside the sampler's.

    Args:
        sample: Its `loss_mask` says which tokens are compared.
        trainer_logprobs: Of each token given those before it, of shape `(len(sample),)`; entry 0 is not used.

    Raises:
        TrajectoryError: The shapes differ.
    """
    if trainer_logprobs.shape != (len(sample),):
        raise TrajectoryError(
            "the trainer's log-probabilities are not aligned to the tokens",
            where=sample.sample_id or "sample",
            expected=f"shape ({len(sample)},)",
            got=str(trainer_logprobs.shape),
        )
    if sample.logprobs is None:
        raise TrajectoryError(
            "the sample has no log-probabilities to compare with",
            where=f"{sample.sample_id or 'sample'}.logprobs",
            expected="what the sampler reported",
            got="None",
        )
    positions = np.flatnonzero(sample.loss_mask).astype(np.int32)
    return Comparison(
        sample, positions, sample.logprobs[positions], trainer_logprobs[positions].astype(np.float32)
    )
