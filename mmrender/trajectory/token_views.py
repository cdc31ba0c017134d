"""Steps in the shape that rollout libraries of the verifiers kind read: lists, whole prompts, whole sidecars.

`step_multi_modal_data` and `pack_sidecars` take these as they are.
"""

from typing import TypedDict

import numpy as np

from mmrender.media.item import MultiModalData
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


def response_tokens(step: Step) -> ResponseTokens:
    """Return the tokens of a step, whole."""
    prompt, completion = step.prompt_ids.tolist(), step.completion_ids.tolist()
    sidecar = step.multi_modal_data
    return ResponseTokens(
        prompt_ids=prompt,
        prompt_mask=[0] * len(prompt),
        completion_ids=completion,
        completion_mask=[1] * len(completion),
        completion_logprobs=[] if step.logprobs is None else step.logprobs.tolist(),
        routed_experts=step.routed_experts,
        multi_modal_data=sidecar if sidecar else None,
    )


def trajectory_step_tokens(step: Step, max_length: int | None = None) -> TrajectoryStepTokens:
    """Return the tokens of a step, at most `max_length` of prompt and completion together.

    A prompt that is too long is cut where no image is cut, and its sidecar with it; the completion is then
    empty.

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
        multi_modal_data=whole["multi_modal_data"],
        overlong_prompt=overlong,
        is_truncated=len(step) > limit or step.finish_reason == "length",
    )


def _experts_within(experts: RoutedExperts | None, length: int) -> RoutedExperts | None:
    if experts is None or experts.stop <= length:
        return experts
    kept = np.s_[: max(0, length - experts.start)]
    return RoutedExperts(experts.data[kept], experts.start)
