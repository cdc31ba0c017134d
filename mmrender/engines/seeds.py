"""Sampling parameters of several samples of one prompt."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mmrender.engines.interface import InferenceEngineInput
from mmrender.spans import MultiModalData


def seeded(params: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """One mapping for each sample, with a seed of its own where there is one; `n` is left out."""
    seed = params.get("seed")
    rest = {name: value for name, value in params.items() if name != "n"}
    if seed is None:
        return [rest] * count
    return [{**rest, "seed": seed + index} for index in range(count)]


def several(
    prompt_token_ids: Sequence[int],
    num_samples: int,
    sampling_params: Mapping[str, Any],
    multi_modal_data: MultiModalData | None,
    session_id: Hashable | None,
) -> InferenceEngineInput:
    """The batch that samples one prompt several times, independently."""
    return {
        "prompt_token_ids": [prompt_token_ids] * num_samples,
        "multi_modal_data": [multi_modal_data] * num_samples,
        "sampling_params": seeded(sampling_params, num_samples),
        "session_ids": [session_id] * num_samples,
    }
