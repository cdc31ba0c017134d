"""Why sampler and trainer part: faults that a sample shows by itself, and variations that explain it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Comparison, Finding, Float32Array, described
from mmrender.audit.variations import Variation, id_variations, image_variations
from mmrender.errors import MMRenderError, PlaceholderError
from mmrender.spans import MediaItem, MediaSpan, PlaceholderRange
from mmrender.trajectory.sample import TrainingSample

LogProbs: TypeAlias = Callable[[TrainingSample], Float32Array]
"""Log-probability of each token of a sample given those before it."""

_MOST_SHIFT: Final = 8
_FITS: Final = 0.1
"""A variation fits where it leaves less than this share of the difference."""
_CERTAIN: Final = -1e-6
_PRECISION: Final = 0.25
"""Nats a token; bfloat16 arithmetic by itself changes a log-probability by less, as a rule."""


_Fault: TypeAlias = tuple[Cause, str, str, int | None]
"""Cause, statement, evidence and image."""


def inspect_sample(sample: TrainingSample) -> list[Finding]:
    """Return the faults of one sample's tokens, placeholder ranges and masks, before any model runs."""
    found: list[_Fault] = []
    try:
        spans = sample.media_spans
        pads = _pad_ids(sample, spans)
        found += [*_shifted_ranges(sample, spans, pads), *_stray_pads(sample, spans, pads)]
    except PlaceholderError as error:
        found.append(("ids", "the placeholder ranges do not fit the tokens", str(error), None))
    return [
        Finding(cause, statement, evidence, sample.sample_id, image)
        for cause, statement, evidence, image in [*found, *_mask_faults(sample)]
    ]


def _pad_ids(sample: TrainingSample, spans: Sequence[MediaSpan]) -> dict[str, int]:
    """Return by modality the token that stands for features: the commonest one in the placeholder ranges."""
    tokens: dict[str, list[npt.NDArray[np.int32]]] = {}
    for span in spans:
        tokens.setdefault(span.modality, []).append(
            sample.token_ids[span.start : span.stop][span.range.is_embed]
        )
    return {modality: int(np.bincount(np.concatenate(ids)).argmax()) for modality, ids in tokens.items()}


def _misses(ids: npt.NDArray[np.int32], found: PlaceholderRange, pad: int) -> int:
    """Count feature tokens of a range that are not the pad token, or lie outside of the sequence."""
    positions = found.offset + np.flatnonzero(found.is_embed)
    inside = positions[(positions >= 0) & (positions < len(ids))]
    return len(positions) - int((ids[inside] == pad).sum())


def _shifted_ranges(
    sample: TrainingSample, spans: Sequence[MediaSpan], pads: dict[str, int]
) -> Iterator[_Fault]:
    for span in spans:
        pad, ids = pads[span.modality], sample.token_ids
        misses = _misses(ids, span.range, pad)
        if not misses:
            continue
        shifts = sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs)
        shift = next((by for by in shifts if by and _misses(ids, span.range.shifted(by), pad) == 0), None)
        moved = ""
        if shift is not None:
            way = "later" if shift > 0 else "earlier"
            moved = f"; the run that fits begins {abs(shift)} token(s) {way}"
        yield (
            "ids",
            f"the placeholder range of {span.modality} {span.position} covers other tokens{moved}",
            f"{misses} of {span.range.num_embeds} tokens in [{span.start}, {span.stop}) are not {pad}",
            span.position,
        )


def _stray_pads(sample: TrainingSample, spans: Sequence[MediaSpan], pads: dict[str, int]) -> Iterator[_Fault]:
    covered = np.zeros(len(sample), np.bool_)
    for span in spans:
        covered[span.start : span.stop] = True
    for modality, pad in pads.items():
        stray = np.flatnonzero((sample.token_ids == pad) & ~covered)
        sampled = stray[sample.loss_mask[stray]]
        # Next to a range, a shifted range has been reported already.
        near = np.isin(stray, [edge for span in spans for edge in (span.start - 1, span.stop)]).any()
        if len(sampled):
            yield (
                "ids",
                f"the model sampled the placeholder token of {modality}s, which stands for no {modality}; "
                "a trainer that finds images by token id takes it for one",
                f"token {pad} at {_some(sampled)} is in no placeholder range",
                None,
            )
        elif len(stray) and not near:
            statement = f"a placeholder token of {modality}s lies outside every placeholder range"
            yield "ids", statement, f"token {pad} at {_some(stray)}", None


def _mask_faults(sample: TrainingSample) -> Iterator[_Fault]:
    logprobs, mask = sample.logprobs, sample.loss_mask
    if logprobs is None:
        return
    bad = np.flatnonzero(mask & ~((logprobs <= 0) & np.isfinite(logprobs)))
    if len(bad):
        evidence = f"{logprobs[bad[0]]:g} at {_some(bad)}"
        yield "masks", "sampled tokens carry values that are not log-probabilities", evidence, None
    outside = np.flatnonzero(~mask & (logprobs != 0))
    if len(outside):
        missing = int((mask & (logprobs == 0)).sum())
        evidence = f"{len(outside)} outside the loss mask, at {_some(outside)}; {missing} inside it have 0.0"
        yield "masks", "tokens that do not count as sampled carry log-probabilities", evidence, None
    if len(mask) and mask[0]:
        yield "masks", "the first token counts as sampled, and nothing precedes it", "position 0", None


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
    positions = Variation("positions", "the sampler numbered its tokens as the model does", sample)
    precision = Variation("precision", "the sampler computed in bfloat16", sample)
    if finding := _tried(compared, departure, positions, own_positions):
        return finding
    if finding := _restricted(compared, tolerance):
        return finding
    for variation in _variations(compared, departure, others):
        if finding := _tried(compared, departure, variation, logprobs):
            return finding
    if finding := _tried(compared, departure, precision, low_precision):
        return finding
    return _unexplained(compared, departure, tolerance)


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


def _variations(compared: Comparison, departure: int, others: Sequence[MediaItem]) -> Iterable[Variation]:
    position = int(compared.positions[departure])
    yield from id_variations(compared.sample, position)
    # Images new to the departing token are suspected, else all that it saw, the nearest first.
    seen = [span for span in reversed(compared.sample.media_spans) if span.start < position]
    for span in compared.suspects(departure) or seen:
        yield from image_variations(compared.sample, span, others)


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
    return Finding(
        variation.cause,
        variation.statement,
        f"largest difference {compared.largest:.4g} without that, {remaining:.4g} with it",
        compared.sample.sample_id,
        variation.image,
    )


def _unexplained(compared: Comparison, departure: int, tolerance: float) -> Finding:
    """Report the most that can be said where no variation fits."""
    sample_id = compared.sample.sample_id
    suspects = compared.suspects(departure)
    largest = f"largest difference {compared.largest:.4g}"
    if suspects and departure > 0:
        names = ", ".join(map(described, suspects))
        return Finding(
            "pixels",
            f"tokens agree up to {names} and part after it, in a way that no change tried explains",
            f"{largest}; before it at most {compared.largest_of(slice(0, departure)):.2g}",
            sample_id,
            suspects[0].position,
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
