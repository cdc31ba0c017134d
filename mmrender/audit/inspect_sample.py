"""Faults that a sample shows by itself, before any model runs."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mmrender.audit.finding import Finding
from mmrender.spans import MultiModalData, PlaceholderRange
from mmrender.trajectory.sample import TrainingSample

_MOST_SHIFT = 8


def inspect_sample(sample: TrainingSample) -> list[Finding]:
    """Return what is wrong with tokens, placeholder ranges and masks of one sample."""
    return [*_shifted_ranges(sample), *_stray_pads(sample), *_masks(sample)]


def _entries(sidecar: MultiModalData) -> Iterator[tuple[str, int, PlaceholderRange]]:
    for modality, ranges in sidecar.mm_placeholders.items():
        for index, found in enumerate(ranges):
            yield modality, index, found


def _embed_positions(found: PlaceholderRange) -> npt.NDArray[np.intp]:
    return found.offset + np.flatnonzero(found.is_embed)


def _pad_ids(sample: TrainingSample) -> dict[str, int]:
    """By modality the token that stands for features: the commonest one in the placeholder ranges."""
    tokens: dict[str, list[npt.NDArray[np.int32]]] = {}
    for modality, _, found in _entries(sample.multi_modal_data):
        positions = _embed_positions(found)
        inside = positions[(positions >= 0) & (positions < len(sample))]
        tokens.setdefault(modality, []).append(sample.token_ids[inside])
    joined = {modality: np.concatenate(parts) for modality, parts in tokens.items()}
    return {
        modality: int(np.bincount(ids[ids >= 0]).argmax())
        for modality, ids in joined.items()
        if len(ids) and (ids >= 0).any()
    }


def _shifted_ranges(sample: TrainingSample) -> Iterator[Finding]:
    pads = _pad_ids(sample)
    for modality, index, found in _entries(sample.multi_modal_data):
        pad = pads.get(modality)
        misses = 0 if pad is None else _misses(sample.token_ids, found, pad)
        if pad is None or not misses:
            continue
        shift = next(
            (
                by
                for by in sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs)
                if by and _misses(sample.token_ids, found.shifted(by), pad) == 0
            ),
            None,
        )
        moved = "" if shift is None else f"; the run that fits stands {abs(shift)} token(s) "
        moved += "" if shift is None else ("later" if shift > 0 else "earlier")
        yield Finding(
            "ids",
            f"the tokens do not stand where the placeholder range of {modality} {index} says{moved}",
            f"{misses} of {found.num_embeds} tokens in [{found.offset}, {found.offset + found.length}) "
            f"are not {pad}",
            sample.sample_id,
            index,
        )


def _misses(ids: npt.NDArray[np.int32], found: PlaceholderRange, pad: int) -> int:
    """How many feature tokens of a range are something else than the pad token, or lie outside."""
    positions = _embed_positions(found)
    inside = positions[(positions >= 0) & (positions < len(ids))]
    return len(positions) - int((ids[inside] == pad).sum())


def _stray_pads(sample: TrainingSample) -> Iterator[Finding]:
    covered = np.zeros(len(sample), np.bool_)
    for _, _, found in _entries(sample.multi_modal_data):
        covered[max(found.offset, 0) : found.offset + found.length] = True
    for modality, pad in _pad_ids(sample).items():
        stray = np.flatnonzero((sample.token_ids == pad) & ~covered)
        sampled = stray[sample.loss_mask[stray]]
        if len(sampled):
            yield Finding(
                "ids",
                f"the model sampled the placeholder token of {modality}s, which stands for no {modality}; "
                "a trainer that finds images by token id takes it for one",
                f"token {pad} at {_some(sampled)} is in no placeholder range",
                sample.sample_id,
            )
        elif len(stray) and not _near_range(sample, stray):
            yield Finding(
                "ids",
                f"a placeholder token of {modality}s stands in no placeholder range",
                f"token {pad} at {_some(stray)}",
                sample.sample_id,
            )


def _near_range(sample: TrainingSample, stray: npt.NDArray[np.intp]) -> bool:
    """Whether stray pads touch a range, where a shifted range has been reported already."""
    edges = [
        edge
        for _, _, found in _entries(sample.multi_modal_data)
        for edge in (found.offset - 1, found.offset + found.length)
    ]
    return bool(np.isin(stray, edges).any())


def _masks(sample: TrainingSample) -> Iterator[Finding]:
    logprobs, mask = sample.logprobs, sample.loss_mask
    if logprobs is None:
        return
    bad = np.flatnonzero(mask & ~((logprobs <= 0) & np.isfinite(logprobs)))
    if len(bad):
        yield Finding(
            "masks",
            "sampled tokens carry what is no log-probability",
            f"{logprobs[bad[0]]:g} at {_some(bad)}",
            sample.sample_id,
        )
    outside = np.flatnonzero(~mask & (logprobs != 0))
    missing = np.flatnonzero(mask & (logprobs == 0))
    if len(outside):
        yield Finding(
            "masks",
            "tokens that do not count as sampled carry log-probabilities",
            f"{len(outside)} outside the loss mask, at {_some(outside)}; {len(missing)} inside it have 0.0",
            sample.sample_id,
        )
    if len(mask) and mask[0]:
        yield Finding(
            "masks",
            "the first token counts as sampled, and nothing precedes it",
            "position 0",
            sample.sample_id,
        )


def _some(positions: npt.NDArray[np.intp]) -> str:
    shown = ", ".join(str(position) for position in positions[:4])
    more = f" and {len(positions) - 4} more" if len(positions) > 4 else ""
    return f"position(s) {shown}{more}"
