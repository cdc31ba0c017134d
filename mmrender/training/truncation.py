"""Cutting a sample to a length, at a whole image and with everything that is aligned to its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mmrender.errors import BatchError
from mmrender.media.item import MultiModalData
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.sample import TrainingSample

Held = TypeVar("Held")


def truncate(sample: TrainingSample, max_tokens: int) -> TrainingSample:
    """Return the sample's first tokens, at most `max_tokens` of them.

    A cut that would fall within an image's placeholder falls before it, whatever the family: nothing is read
    but the placeholder ranges. Items after the cut are left out with their ranges and hashes.

    Raises:
        BatchError: Nothing would be left.
    """
    if len(sample) <= max_tokens:
        return sample
    stop = max(0, max_tokens)
    # From back to front, so that a cut moved by one image is seen by those before it.
    ranges = [found for held in sample.multi_modal_data.mm_placeholders.values() for found in held]
    for found in sorted(ranges, key=lambda found: -found.offset):
        if found.offset < stop < found.offset + found.length:
            stop = found.offset
    if stop == 0:
        raise BatchError(
            "nothing is left of a sample",
            where=sample.sample_id or "sample",
            expected="room for a token before the first image",
            got=f"max_tokens={max_tokens}",
        )
    experts, spans = sample.routed_experts, sample.weight_versions
    return replace(
        sample,
        token_ids=sample.token_ids[:stop],
        loss_mask=sample.loss_mask[:stop],
        logprobs=sample.logprobs[:stop],
        rewards=None if sample.rewards is None else sample.rewards[:stop],
        advantages=None if sample.advantages is None else sample.advantages[:stop],
        routed_experts=None if experts is None else _first_experts(experts, stop),
        weight_versions=tuple(
            WeightVersionSpan(span.version, span.start, min(span.stop, stop))
            for span in spans
            if span.start < stop
        ),
        multi_modal_data=_before(sample.multi_modal_data, stop),
    )


def _first_experts(experts: RoutedExperts, stop: int) -> RoutedExperts:
    start = min(experts.start, stop)
    return RoutedExperts(experts.data[: max(0, stop - start)], start)


def _before(sidecar: MultiModalData, stop: int) -> MultiModalData:
    """Return what of a sidecar ends by the token `stop`."""
    kept = {
        modality: [index for index, found in enumerate(ranges) if found.offset + found.length <= stop]
        for modality, ranges in sidecar.mm_placeholders.items()
    }
    kept = {modality: indices for modality, indices in kept.items() if indices}
    return MultiModalData(
        _picked(sidecar.mm_hashes, kept),
        _picked(sidecar.mm_placeholders, kept),
        _picked(sidecar.mm_items, kept),
    )


def _picked(held: Mapping[str, Sequence[Held]], kept: Mapping[str, Sequence[int]]) -> dict[str, list[Held]]:
    return {modality: [held[modality][i] for i in kept[modality]] for modality in kept if modality in held}
