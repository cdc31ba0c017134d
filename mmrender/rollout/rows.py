"""Trajectories as the rows of a generator's output."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError
from mmrender.rollout.types import TrajectoryID
from mmrender.spans import MultiModalData, TensorDtype
from mmrender.trajectory.branch import Branch, step_sample
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory

TensorKind: TypeAlias = Literal["numpy", "torch"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Attributes as in `GeneratorOutput`, in the singular."""

    prompt_token_ids: list[int]
    response_ids: list[int]
    rewards: list[float]
    loss_mask: list[int]
    stop_reason: str
    logprobs: list[float]
    trajectory_id: TrajectoryID
    expert_indices: npt.NDArray[np.integer[Any]] | None
    is_last_step: bool
    multi_modal_data: MultiModalData
    error: str | None


def rows_of(trajectory: Trajectory, trajectory_id: TrajectoryID, *, step_wise: bool) -> list[Row]:
    """Make the rows of one rollout; one at least, which is empty where nothing was sampled.

    Step-wise, each turn is a row: its prompt, and what was sampled. Otherwise the rollout is one row: the
    sequence that its last turn ends, which holds every turn as long as prompts were bridged. Turns that it
    does not hold, since a later prompt was rendered anew, are not trained on there; their rewards are added
    to that of the last token, so that the sum stays what the environment gave.

    A rollout that failed has rows of what it got to, with a loss mask of zeros and no rewards.
    """
    steps = trajectory.steps
    if not steps:
        return [_empty(trajectory, trajectory_id)]
    if step_wise:
        samples = [step_sample(step, trajectory.trajectory_id) for step in steps]
        starts = [step.prompt_length for step in steps]
    else:
        whole = Branch(trajectory.trajectory_id, 0, steps[-1])
        samples = [whole.sample()]
        sampled = samples[0].loss_mask
        starts = [int(sampled.argmax()) if sampled.any() else len(sampled)]
    rows = []
    for index, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        rewards = sample.rewards if sample.rewards is not None else np.zeros(len(sample), np.float32)
        rewards = rewards if step_wise else _with_lost_rewards(rewards, trajectory)
        is_last = index == len(samples) - 1
        rows.append(
            _row(
                sample,
                start,
                rewards,
                trajectory=trajectory,
                trajectory_id=trajectory_id,
                is_last=is_last,
            )
        )
    return rows


def _empty(trajectory: Trajectory, trajectory_id: TrajectoryID) -> Row:
    """The row of a rollout that failed before its first turn."""
    return Row(
        prompt_token_ids=[],
        response_ids=[],
        rewards=[],
        loss_mask=[],
        stop_reason=stop_reason(trajectory),
        logprobs=[],
        trajectory_id=trajectory_id,
        expert_indices=None,
        is_last_step=True,
        multi_modal_data=MultiModalData(),
        error=trajectory.error,
    )


def _row(
    sample: TrainingSample,
    start: int,
    rewards: npt.NDArray[np.float32],
    *,
    trajectory: Trajectory,
    trajectory_id: TrajectoryID,
    is_last: bool,
) -> Row:
    failed = trajectory.error is not None
    mask = np.zeros(len(sample), np.int64) if failed else sample.loss_mask.astype(np.int64)
    earned = np.zeros_like(rewards) if failed else rewards
    experts = sample.routed_experts
    return Row(
        prompt_token_ids=sample.token_ids[:start].tolist(),
        response_ids=sample.token_ids[start:].tolist(),
        rewards=earned[start:].tolist(),
        loss_mask=mask[start:].tolist(),
        stop_reason=stop_reason(trajectory),
        logprobs=[] if sample.logprobs is None else sample.logprobs[start:].tolist(),
        trajectory_id=trajectory_id,
        # Positions without a row would shift all that follow, so a part is none.
        expert_indices=experts.data if experts is not None and experts.start == 0 else None,
        is_last_step=is_last,
        multi_modal_data=sample.multi_modal_data,
        error=trajectory.error,
    )


def stop_reason(trajectory: Trajectory) -> str:
    """Why a rollout ended, see `mmrender.rollout.episode.StopReason`."""
    return "error" if trajectory.error is not None else str(trajectory.extra.get("stop_reason", "error"))


def _with_lost_rewards(rewards: npt.NDArray[np.float32], trajectory: Trajectory) -> npt.NDArray[np.float32]:
    lost = total_reward(trajectory) - float(rewards.sum())
    if len(rewards) and abs(lost) > 1e-6:
        rewards = rewards.copy()
        rewards[-1] += lost
    return rewards


def total_reward(trajectory: Trajectory) -> float:
    """Sum of the rewards of all turns."""
    return float(sum(np.sum(step.reward) for step in trajectory.steps if step.reward is not None))


def image_tensors(
    sidecars: Iterable[MultiModalData], kind: TensorKind, dtype: TensorDtype
) -> tuple[list[Any], list[Any]] | None:
    """Join the images of each row: `pixel_values` and `image_grid_thw`, one array or tensor a row.

    Rows without images hold none: `(0, values)` and `(0, 3)`. `TensorList.from_rows` takes both as they are.

    Returns:
        None where no row has images.

    Raises:
        InputError: The model's family has other tensors than these two.
    """
    found = [_joined(sidecar, kind, dtype) for sidecar in sidecars]
    known = next((pair for pair in found if pair is not None), None)
    if known is None:
        return None
    pairs = [(pixels[:0], grids[:0]) if pair is None else pair for pair in found for pixels, grids in [known]]
    return [pixels for pixels, _ in pairs], [grids for _, grids in pairs]


def _joined(sidecar: MultiModalData, kind: TensorKind, dtype: TensorDtype) -> tuple[Any, Any] | None:
    items = sidecar.mm_items.get("image", ())
    if not items:
        return None
    tensors = [item.tensors(dtype, framework=kind) for item in items]
    for found in tensors:
        if set(found) != {"pixel_values", "image_grid_thw"}:
            raise InputError(
                "images of this model have other tensors",
                where="tensors",
                expected="pixel_values and image_grid_thw",
                got=", ".join(sorted(found)),
                remedy="Take them from multi_modal_data",
            )
    pixels, grids = (_concatenated([found[key] for found in tensors], kind) for key in _KEYS)
    return pixels, grids


_KEYS = ("pixel_values", "image_grid_thw")


def _concatenated(parts: Sequence[Any], kind: TensorKind) -> Any:
    if kind == "numpy":
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))
