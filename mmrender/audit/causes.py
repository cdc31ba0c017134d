"""Why sampler and trainer part: variations of a sample are tried until one brings them together."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mmrender.audit.compare import Comparison, Float32Array, ImagePlace, compare, image_places
from mmrender.audit.finding import Finding
from mmrender.audit.variations import Variation, id_variations, image_variations
from mmrender.errors import MMRenderError
from mmrender.spans import MediaItem
from mmrender.trajectory.sample import TrainingSample

LogProbs = Callable[[TrainingSample], Float32Array]
"""Log-probability of each token of a sample given those before it."""

_FITS = 0.1
"""A variation fits where it leaves less than this share of the difference."""
_CERTAIN = -1e-6
_PRECISION = 0.25
"""Nats a token; more than bfloat16 arithmetic does to a log-probability by itself, as a rule."""


def find_cause(
    compared: Comparison,
    tolerance: float,
    logprobs: LogProbs,
    *,
    others: Sequence[MediaItem] = (),
    low_precision: LogProbs | None = None,
    own_positions: LogProbs | None = None,
) -> Finding:
    """Explain one sample that departs.

    Args:
        compared: A comparison with a departure beyond `tolerance`.
        tolerance: In nats a token.
        logprobs: The trainer's model.
        others: Items that an image may have been mistaken for.
        low_precision: The same model in bfloat16.
        own_positions: The same model with the rotary positions that it works out itself.
    """
    departure = compared.first_departure(tolerance)
    if departure is None:
        raise ValueError("the comparison has no departure to explain")
    sample = compared.sample
    if own_positions is not None and (left := _left(compared, departure, sample, own_positions)) is not None:
        return _fitting(
            compared,
            Variation("positions", "the sampler numbered its tokens as the model does", sample),
            left,
        )
    if (restricted := _restricted(compared, tolerance)) is not None:
        return restricted
    for variation in _variations(compared, departure, others):
        left = _left(compared, departure, variation.sample, logprobs)
        if left is not None:
            return _fitting(compared, variation, left)
    if low_precision is not None and (left := _left(compared, departure, sample, low_precision)) is not None:
        return _fitting(compared, Variation("precision", "the sampler computed in bfloat16", sample), left)
    return _unexplained(compared, departure, tolerance)


def _restricted(compared: Comparison, tolerance: float) -> Finding | None:
    """Whether tokens depart because a grammar or mask left the sampler few tokens to choose from.

    Engines renormalise over what is left, so their numbers are never below the model's, and 0 where one
    token was left.
    """
    difference = compared.difference
    departing = np.abs(difference) > tolerance
    higher = float(np.mean(difference[departing] < 0))
    certain = int(np.sum(departing & (compared.sampler >= _CERTAIN)))
    if higher < 1.0 or certain < max(2, departing.sum() / 2):
        return None
    return Finding(
        "sampling",
        "the sampler was held to a grammar or a few tokens, and its log-probabilities are of what was left",
        f"{int(departing.sum())} tokens depart, the sampler higher in all of them and certain of {certain}",
        compared.sample.sample_id,
    )


def _variations(compared: Comparison, departure: int, others: Sequence[MediaItem]) -> Iterable[Variation]:
    yield from id_variations(compared.sample, int(compared.positions[departure]))
    for place in _candidates(compared, departure):
        yield from image_variations(compared.sample, place, others)


def _candidates(compared: Comparison, departure: int) -> list[ImagePlace]:
    """Images to suspect: those new to the departing token, else all that it saw, the nearest first."""
    suspects = compared.suspects(departure)
    if suspects:
        return suspects
    position = int(compared.positions[departure])
    return [place for place in reversed(image_places(compared.sample)) if place.start < position]


def _left(compared: Comparison, departure: int, sample: TrainingSample, logprobs: LogProbs) -> float | None:
    """What is left of the difference with this sample in the place of its own; None if it does not fit."""
    try:
        varied = compare(sample, logprobs(sample))
    except MMRenderError:
        return None  # a variation that the model does not take cannot be what the sampler saw
    left = Comparison(compared.sample, compared.positions, compared.sampler, varied.trainer)
    remaining = left.largest_from(departure)
    # Tokens that agreed must agree still: only the ones from the departure on were wrong.
    before = Comparison(
        compared.sample,
        compared.positions[:departure],
        compared.sampler[:departure],
        varied.trainer[:departure],
    )
    fits = max(remaining, before.largest) <= _FITS * compared.largest
    return remaining if fits else None


def _fitting(compared: Comparison, variation: Variation, left: float) -> Finding:
    return Finding(
        variation.cause,
        variation.statement,
        f"largest difference {compared.largest:.4g} without that, {left:.4g} with it",
        compared.sample.sample_id,
        variation.image,
    )


def _unexplained(compared: Comparison, departure: int, tolerance: float) -> Finding:
    """The best that can be said where nothing tried fits."""
    sample_id = compared.sample.sample_id
    suspects = compared.suspects(departure)
    largest = f"largest difference {compared.largest:.4g}"
    if suspects and departure > 0:
        names = ", ".join(map(str, suspects))
        return Finding(
            "pixels",
            f"tokens agree up to {names} and part after it, in a way that no change tried explains",
            f"{largest}; before it at most {_agreed(compared, departure):.2g}",
            sample_id,
            suspects[0].number,
        )
    if compared.largest <= _PRECISION:
        return Finding(
            "precision",
            "differences are small and begin at no image: arithmetic, as of another kernel or dtype",
            f"{largest}, tolerance {tolerance:g}",
            sample_id,
        )
    return Finding(
        "unknown",
        "no change of tokens, images, positions or precision that was tried explains the difference; the "
        "weights may differ, or the sampler's settings, such as a temperature in its log-probabilities",
        largest,
        sample_id,
    )


def _agreed(compared: Comparison, departure: int) -> float:
    return float(abs(compared.difference[:departure]).max())
