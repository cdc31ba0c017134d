"""Faults that a sample shows by itself, or by which of its tokens differ."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Comparison, Finding, sampled_runs
from mmrender.audit.rows import finding_of
from mmrender.errors import PlaceholderError
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.step import are_finite

_MAX_SHIFT: Final = 8


def inspect_sample(sample: TrainingSample) -> list[Finding]:
    """Return the faults of one sample's tokens, placeholder ranges and masks, before any model runs."""
    try:
        found = [*_range_faults(sample)]
    except PlaceholderError as error:
        statement = "the placeholder ranges do not fit the tokens"
        found = [finding_of("placeholders", statement, str(error), sample)]
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
            moves = sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)
            inside = (by for by in moves if places[0] + by >= 0 and places[-1] + by < len(ids))
            shift = next((by for by in inside if (ids[places + by] == pad).all()), None)
            moved = f", and the run that fits begins {shift:+d} place(s) from it" if shift else ""
            text = f"the placeholder range of {span.modality} {span.position} covers other tokens{moved}"
            evidence = f"{misses} of {len(places)} tokens in [{span.start}, {span.stop}) are not {pad}"
            yield finding_of("placeholders", text, evidence, sample, image=span.position)
    edges = [edge for span in spans for edge in (span.start - 1, span.stop)]
    for modality, pad in pads.items():
        stray = np.flatnonzero((ids == pad) & ~covered)
        sampled = stray[sample.loss_mask[stray]]
        text = f"a placeholder token of {modality}s lies outside every placeholder range"
        if len(sampled):
            text = (
                f"the model sampled the placeholder token of {modality}s, but no {modality} belongs to it; "
                "a trainer that finds images by token id takes it for one"
            )
        # Next to a range, a shifted range has been reported already.
        if len(sampled) or (len(stray) and not np.isin(stray, edges).any()):
            shown = _some(sampled if len(sampled) else stray)
            yield finding_of(
                "placeholders", text, f"token {pad} at {shown} is in no placeholder range", sample
            )


def _mask_faults(sample: TrainingSample) -> Iterator[Finding]:
    logprobs, mask = sample.logprobs, sample.loss_mask
    if logprobs is None:
        return
    bad = np.flatnonzero(mask & ~((logprobs <= 0) & are_finite(logprobs)))
    outside = np.flatnonzero(~mask & (logprobs != 0))
    if len(bad):
        text = "sampled tokens carry values that are not log-probabilities"
        yield finding_of("values", text, f"{logprobs[bad[0]]:g} at {_some(bad)}", sample)
    if len(outside):
        missing = int((mask & (logprobs == 0)).sum())
        evidence = f"{len(outside)} outside the loss mask, at {_some(outside)}; {missing} inside it have 0.0"
        text = "tokens that do not count as sampled carry log-probabilities"
        yield finding_of("loss mask", text, evidence, sample)
    if len(mask) and mask[0]:
        text = "the first token counts as sampled, and nothing precedes it"
        yield finding_of("loss mask", text, "position 0", sample)


def shown_by(compared: Comparison, tolerance: float) -> Finding | None:
    """Report tokens that tell the cause by which of them differ: all others agree."""
    beyond, positions, sample = compared.beyond(tolerance), compared.positions, compared.sample
    token, runs = int(positions[beyond.argmax()]), sampled_runs(sample.loss_mask)
    for version in sorted({span.version for span in sample.weight_versions}):
        of_it = np.zeros(len(beyond), np.bool_)
        for name, start, stop in sample.weight_versions:
            of_it |= (positions >= start) & (positions < stop) & (name == version)
        enough = min(of_it.sum(), (~of_it).sum()) >= 4
        if enough and not beyond[~of_it].any() and beyond[of_it].mean() > 0.5:
            text = (
                f"the tokens that the weights {version!r} sampled differ, and tokens of other weights agree"
            )
            evidence = f"{beyond.sum()} of {of_it.sum()} tokens differ, none of the {(~of_it).sum()}"
            return finding_of("weights", text, evidence, sample, token=token)
    absent, places = ~np.isfinite(compared.sampler), {*positions[beyond].tolist()}
    starts, ends = {start for start, _ in runs}, {stop - 1 for _, stop in runs}
    row = "missing"
    if absent.any() and not beyond[~absent].any():
        value = compared.sampler[absent][0]
        text = f"{value:g} was recorded in place of log-probabilities, which are missing"
    elif beyond.all() or compared.sampler[beyond].any():
        return None
    elif places == starts and min(len(starts), len({*sample.token_ids[[*starts]]})) > 1:
        # A prompt ends in the same token each time, and a completion begins with any.
        text = "0 was recorded for the first token of each completion: it has no log-probability"
    elif places == starts:
        row = "loss mask"
        text = "the first token of each completion has no log-probability: the mask begins one token early"
    elif places <= ends:
        row = "final token"
        text = "the last token of a completion has no log-probability: it was added after sampling"
    else:
        return None
    evidence = f"{int(beyond.sum())} of {len(beyond)} tokens, and all other tokens agree"
    return finding_of(row, text, evidence, sample, token=token)


def shown_by_peers(compared: Comparison, peers: Sequence[Comparison], tolerance: float) -> Finding | None:
    """Report weights all of whose samples differ, if all samples of other weights agree."""
    sets: dict[bool, list[set[str]]] = {True: [], False: []}
    for one in (compared, *peers):
        sets[bool(one.beyond(tolerance).any())].append({span.version for span in one.sample.weight_versions})
    apart, alike = (set[str]().union(*sets[differs]) for differs in (True, False))
    counts = len(sets[True]), len(sets[False])
    if min(counts) < 2 or apart & alike or not all(sets[True] + sets[False]):
        return None
    names, others = (", ".join(map(repr, sorted(versions))) for versions in (apart, alike))
    text = f"all samples of the weights {names} differ, and those of {others} agree"
    token = int(compared.positions[compared.beyond(tolerance).argmax()])
    evidence = f"{counts[0]} samples differ, {counts[1]} agree"
    return finding_of("weights", text, evidence, compared.sample, token=token)


def _some(positions: npt.NDArray[np.intp]) -> str:
    shown = ", ".join(str(position) for position in positions[:4])
    more = f" and {len(positions) - 4} more" if len(positions) > 4 else ""
    return f"position(s) {shown}{more}"
