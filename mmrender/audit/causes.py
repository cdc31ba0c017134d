"""Why sampler and trainer part: faults that a sample shows by itself, and variations that explain it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Comparison, Finding, Float32Array, described
from mmrender.audit.variations import Variation, id_variations, image_variations, shift_text
from mmrender.errors import MMRenderError, PlaceholderError
from mmrender.spans import MediaItem
from mmrender.trajectory.sample import TrainingSample

LogProbs: TypeAlias = Callable[[TrainingSample], Float32Array]
"""Log-probability of each token of a sample given those before it."""

_MOST_SHIFT: Final = 8
_FITS: Final = 0.1
"""A variation fits where it leaves less than this share of the difference."""
_CERTAIN: Final = -1e-6
_PRECISION: Final = 0.25
"""Nats a token; bfloat16 arithmetic by itself changes a log-probability by less, as a rule."""


def inspect_sample(sample: TrainingSample) -> list[Finding]:
    """Return the faults of one sample's tokens, placeholder ranges and masks, before any model runs."""
    try:
        found = [*_range_faults(sample)]
    except PlaceholderError as error:
        statement = "the placeholder ranges do not fit the tokens"
        found = [Finding("ids", statement, str(error), sample.sample_id)]
    return [*found, *_mask_faults(sample)]


def _range_faults(sample: TrainingSample) -> Iterator[Finding]:
    """Yield ranges that cover other tokens than features, and feature tokens that no range covers."""
    spans, ids = sample.media_spans, sample.token_ids
    features: dict[str, list[npt.NDArray[np.int32]]] = {}
    for span in spans:
        features.setdefault(span.modality, []).append(ids[span.start : span.stop][span.range.is_embed])
    # The feature token is the commonest one in the ranges of a modality.
    pads = {modality: int(np.bincount(np.concatenate(held)).argmax()) for modality, held in features.items()}
    covered = np.zeros(len(sample), np.bool_)
    for span in spans:
        covered[span.start : span.stop] = True
        pad, places = pads[span.modality], span.start + np.flatnonzero(span.range.is_embed)
        misses = int((ids[places] != pad).sum())
        if misses:
            moves = sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs)
            inside = (by for by in moves if places[0] + by >= 0 and places[-1] + by < len(ids))
            shift = next((by for by in inside if (ids[places + by] == pad).all()), None)
            moved = f"; the run that fits begins {shift_text(shift)}" if shift else ""
            yield Finding(
                "ids",
                f"the placeholder range of {span.modality} {span.position} covers other tokens{moved}",
                f"{misses} of {len(places)} tokens in [{span.start}, {span.stop}) are not {pad}",
                sample.sample_id,
                span.position,
            )
    edges = [edge for span in spans for edge in (span.start - 1, span.stop)]
    for modality, pad in pads.items():
        stray = np.flatnonzero((ids == pad) & ~covered)
        sampled = stray[sample.loss_mask[stray]]
        statement = f"a placeholder token of {modality}s lies outside every placeholder range"
        if len(sampled):
            statement = (
                f"the model sampled the placeholder token of {modality}s, but no {modality} belongs to it; "
                "a trainer that finds images by token id takes it for one"
            )
        # Next to a range, a shifted range has been reported already.
        if len(sampled) or (len(stray) and not np.isin(stray, edges).any()):
            shown = _some(sampled if len(sampled) else stray)
            evidence = f"token {pad} at {shown} is in no placeholder range"
            yield Finding("ids", statement, evidence, sample.sample_id)


def _mask_faults(sample: TrainingSample) -> Iterator[Finding]:
    logprobs, mask = sample.logprobs, sample.loss_mask
    if logprobs is None:
        return
    bad = np.flatnonzero(mask & ~((logprobs <= 0) & np.isfinite(logprobs)))
    outside = np.flatnonzero(~mask & (logprobs != 0))
    faults = []
    if len(bad):
        evidence = f"{logprobs[bad[0]]:g} at {_some(bad)}"
        faults.append(("sampled tokens carry values that are not log-probabilities", evidence))
    if len(outside):
        missing = int((mask & (logprobs == 0)).sum())
        evidence = f"{len(outside)} outside the loss mask, at {_some(outside)}; {missing} inside it have 0.0"
        faults.append(("tokens that do not count as sampled carry log-probabilities", evidence))
    if len(mask) and mask[0]:
        faults.append(("the first token counts as sampled, and nothing precedes it", "position 0"))
    yield from (Finding("masks", statement, evidence, sample.sample_id) for statement, evidence in faults)


def _some(positions: npt.NDArray[np.intp]) -> str:
    shown = ", ".join(str(position) for position in positions[:4])
    more = f" and {len(positions) - 4} more" if len(positions) > 4 else ""
    return f"position(s) {shown}{more}"


def find_cause(
    compared: Comparison,
    departure: int,
    tolerance: float,
    logprobs: LogProbs,
    *,
    others: Sequence[MediaItem],
    low_precision: LogProbs,
    own_positions: LogProbs,
) -> Finding:
    """Explain one sample that departs.

    Args:
        compared: A comparison with a departure beyond `tolerance`.
        departure: Index of the first token beyond it.
        tolerance: In nats a token.
        logprobs: The trainer's model.
        others: Items that an image may have been mistaken for.
        low_precision: The same model in bfloat16.
        own_positions: The same model with the rotary positions that it works out itself.
    """
    sample = compared.sample
    numbered = Variation("positions", "the sampler numbered its tokens as the model does", sample)
    rounded = Variation("precision", "the sampler computed in bfloat16", sample)

    def found() -> Iterator[Finding | None]:
        yield _tried(compared, departure, numbered, own_positions)
        yield _restricted(compared, tolerance)
        position = int(compared.positions[departure])
        for variation in id_variations(sample, position):
            yield _tried(compared, departure, variation, logprobs)
        # Images new to the departing token are suspected, else all that it saw, the nearest first.
        seen = [span for span in reversed(sample.media_spans) if span.start < position]
        for span in compared.suspects(departure) or seen:
            for variation in image_variations(sample, span, others):
                yield _tried(compared, departure, variation, logprobs)
        yield _tried(compared, departure, rounded, low_precision)

    return next(filter(None, found()), None) or _unexplained(compared, departure, tolerance)


def _restricted(compared: Comparison, tolerance: float) -> Finding | None:
    """Report tokens that depart because a grammar or mask left the sampler few tokens to choose from.

    Engines renormalise over what is left, so their numbers are never below the model's, and 0 where one
    token was left.
    """
    difference = compared.difference
    departing = np.abs(difference) > tolerance
    certain = int(np.sum(departing & (compared.sampler >= _CERTAIN)))
    if not (difference[departing] < 0).all() or certain < max(2, departing.sum() / 2):
        return None
    return Finding(
        "sampling",
        "the sampler was restricted to a grammar or a few tokens, and its log-probabilities are of these",
        f"{int(departing.sum())} tokens depart, the sampler higher in all of them and certain of {certain}",
        compared.sample.sample_id,
    )


def _tried(compared: Comparison, departure: int, variation: Variation, logprobs: LogProbs) -> Finding | None:
    """Run a variation; report it where it removes the difference and leaves agreeing tokens as they were."""
    try:
        varied = Comparison.of(variation.sample, logprobs(variation.sample))
    except MMRenderError:
        return None  # a variation that the model does not take cannot be what the sampler saw
    left = replace(compared, trainer=varied.trainer)
    if left.largest > _FITS * compared.largest:
        return None
    remaining = left.largest_of(slice(departure, None))
    evidence = f"largest difference {compared.largest:.4g} without that, {remaining:.4g} with it"
    sample_id = compared.sample.sample_id
    return Finding(variation.cause, variation.statement, evidence, sample_id, variation.image)


def _unexplained(compared: Comparison, departure: int, tolerance: float) -> Finding:
    """Report the most that can be said where no variation fits."""
    cause: Cause = "unknown"
    statement = (
        "no change of tokens, images, positions or precision that was tried explains the difference; the "
        "weights may differ, or the sampler's settings, such as a temperature in its log-probabilities"
    )
    evidence, image = f"largest difference {compared.largest:.4g}, tolerance {tolerance:g}", None
    if departure > 0 and (suspects := compared.suspects(departure)):
        names = ", ".join(map(described, suspects))
        cause, image = "pixels", suspects[0].position
        statement = f"tokens agree up to {names} and part after it, in a way that no change tried explains"
        evidence += f"; before it at most {compared.largest_of(slice(0, departure)):.2g}"
    elif compared.largest <= _PRECISION:
        cause = "precision"
        statement = "differences are small and begin at no image: arithmetic, as of another kernel or dtype"
    return Finding(cause, statement, evidence, compared.sample.sample_id, image)
