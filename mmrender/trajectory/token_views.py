"""Steps in the shape that rollout libraries of the verifiers kind read: lists, whole prompts, whole sidecars.

`step_multi_modal_data` and `pack_sidecars` take these as they are.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypedDict

import numpy as np

from mmrender.spans import MediaItem, MultiModalData
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.tree_step import Step
from mmrender.trajectory.trimming import trim_ids


class ResponseTokens(TypedDict):
    """Tokens of one response.

    Masks hold 0 for prompt tokens and 1 for sampled ones. `completion_logprobs` is empty where the engine
    gave none. `routed_experts` covers prompt and completion from its `start` on.
    """

    prompt_ids: list[int]
    prompt_mask: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    routed_experts: RoutedExperts | None
    multi_modal_data: MultiModalData | None


class TrajectoryStepTokens(ResponseTokens):
    """Tokens of one step, perhaps cut to a length.

    `overlong_prompt` says that the prompt alone was too long, so nothing of the completion is left;
    `is_truncated` that tokens were cut off here, or that sampling ended at the engine's own limit.
    """

    overlong_prompt: bool
    is_truncated: bool


AsItem: TypeAlias = Callable[[MediaItem], Any]
"""What stands in `mm_items` for a media item, such as `lambda item: item.tensors("bfloat16")`."""


def response_tokens(step: Step, *, as_item: AsItem | None = None) -> ResponseTokens:
    """Return the tokens of a step, whole.

    Args:
        step: The step.
        as_item: Given to libraries whose items are dicts of tensors; called once for each distinct item. By
            default `mm_items` holds the media items themselves, which are eight times smaller for the Qwen
            family.
    """
    prompt, completion = step.prompt_ids.tolist(), step.completion_ids.tolist()
    sidecar = step.multi_modal_data
    return ResponseTokens(
        prompt_ids=prompt,
        prompt_mask=[0] * len(prompt),
        completion_ids=completion,
        completion_mask=[1] * len(completion),
        completion_logprobs=[] if step.logprobs is None else step.logprobs.tolist(),
        routed_experts=step.routed_experts,
        multi_modal_data=_with_items(sidecar if sidecar else None, as_item),
    )


def trajectory_step_tokens(
    step: Step, max_length: int | None = None, *, as_item: AsItem | None = None
) -> TrajectoryStepTokens:
    """Return the tokens of a step, at most `max_length` of prompt and completion together.

    A prompt that is too long is cut where no image is cut, and its sidecar with it; the completion is then
    empty.

    Args:
        step: The step.
        max_length: None leaves it whole.
        as_item: As for `response_tokens`.

    Raises:
        TrajectoryError: `max_length` is negative.
    """
    whole = response_tokens(step)
    limit = len(step) if max_length is None else max_length
    overlong = step.prompt_length > limit
    if overlong:
        sidecar = whole["multi_modal_data"] or MultiModalData()
        prompt, cut = trim_ids(whole["prompt_ids"], sidecar, limit)
        whole["prompt_ids"], whole["prompt_mask"] = prompt, [0] * len(prompt)
        whole["multi_modal_data"] = cut if cut else None
    left = 0 if overlong else limit - step.prompt_length
    completion = whole["completion_ids"][:left]
    length = len(whole["prompt_ids"]) + len(completion)
    return TrajectoryStepTokens(
        prompt_ids=whole["prompt_ids"],
        prompt_mask=whole["prompt_mask"],
        completion_ids=completion,
        completion_mask=whole["completion_mask"][:left],
        completion_logprobs=whole["completion_logprobs"][:left],
        routed_experts=_experts_within(whole["routed_experts"], length),
        multi_modal_data=_with_items(whole["multi_modal_data"], as_item),
        overlong_prompt=overlong,
        is_truncated=len(step) > limit or step.finish_reason == "length",
    )


def _with_items(sidecar: MultiModalData | None, as_item: AsItem | None) -> MultiModalData | None:
    if sidecar is None or as_item is None:
        return sidecar
    distinct = {item.identity: item for items in sidecar.mm_items.values() for item in items}
    made = {identity: as_item(item) for identity, item in distinct.items()}
    items = {key: [made[item.identity] for item in held] for key, held in sidecar.mm_items.items()}
    return MultiModalData(sidecar.mm_hashes, sidecar.mm_placeholders, items)


def _experts_within(experts: RoutedExperts | None, length: int) -> RoutedExperts | None:
    if experts is None or experts.stop <= length:
        return experts
    kept = np.s_[: max(0, length - experts.start)]
    return RoutedExperts(experts.data[kept], experts.start)
