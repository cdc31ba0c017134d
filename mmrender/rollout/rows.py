"""Rows to train on, made of finished rollouts, and means over a batch of rollouts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError
from mmrender.sidecar import MultiModalData, TensorDtype
from mmrender.trajectory.step import Branch, step_sample
from mmrender.trajectory.tree import Trajectory

TensorKind: TypeAlias = Literal["numpy", "torch"]


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Name of a rollout: number `repetition_id` of the rollouts of a prompt."""

    instance_id: str
    repetition_id: int = 0

    def to_string(self) -> str:
        """`instance_id_repetition_id`."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Attributes as in `mmrender.rollout.generator.GeneratorOutput`, in the singular."""

    trajectory_id: TrajectoryID
    stop_reason: str
    error: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    expert_indices: npt.NDArray[np.integer[Any]] | None = None
    is_last_step: bool = True
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)


def rows_of(trajectory: Trajectory, trajectory_id: TrajectoryID, *, step_wise: bool) -> list[Row]:
    """Make the rows of one rollout: one or more, and an empty one if nothing was sampled.

    Step-wise, each turn with sampled tokens is a row of its prompt and its completion. Otherwise the rollout
    is one row: the sequence up to its last turn, which contains every turn if all prompts were bridged. A
    reward without tokens in the rows, since a later prompt was rendered in full or a completion was empty, is
    added to the last sampled token before it, so that rewards sum to the environment's.

    A failed rollout has rows of its sampled tokens, with a loss mask of zeros and no rewards.
    """
    steps, reason, failed = trajectory.steps, stop_reason(trajectory), trajectory.error is not None
    if not steps:
        return [Row(trajectory_id, reason, trajectory.error)]
    if step_wise:
        kept = [step for step in steps if len(step.completion_ids)] or steps[:1]
        samples = [step_sample(step, trajectory.trajectory_id) for step in kept]
        starts = [step.prompt_length for step in kept]
    else:
        kept = steps[-1:]
        samples = [Branch(trajectory.trajectory_id, 0, steps[-1]).sample()]
        sampled = samples[0].loss_mask
        starts = [int(sampled.argmax()) if sampled.any() else len(sampled)]
    earned = [
        np.zeros(len(sample), np.float32) if sample.rewards is None else sample.rewards.astype(np.float32)
        for sample in samples
    ]

    def add(rewards: Sequence[npt.NDArray[np.float32]], missing: float) -> None:
        """Add a reward to the last token of the last of these rows with a response."""
        for row in reversed(range(len(rewards))):
            if len(rewards[row]) > starts[row] and abs(missing) > 1e-6:  # not a rounding error
                rewards[row][-1] += missing
                return

    if not step_wise:
        add(earned, total_reward(trajectory) - float(earned[0].sum()))
    else:
        for step in steps:
            if not len(step.completion_ids) and step.reward is not None:
                before = sum(other.index < step.index for other in kept)
                add(earned[: before or 1], float(np.sum(step.reward)))
    rows = []
    for index, (sample, start, rewards) in enumerate(zip(samples, starts, earned, strict=True)):
        experts = sample.routed_experts
        row = Row(
            trajectory_id,
            reason,
            trajectory.error,
            prompt_token_ids=sample.token_ids[:start].tolist(),
            response_ids=sample.token_ids[start:].tolist(),
            rewards=(rewards[start:] * (not failed)).tolist(),
            loss_mask=(sample.loss_mask[start:] * np.int64(not failed)).tolist(),
            logprobs=[] if sample.logprobs is None else sample.logprobs[start:].tolist(),
            # Missing rows would shift all later ones, so partial choices are left out.
            expert_indices=experts.data if experts is not None and experts.start == 0 else None,
            is_last_step=index == len(samples) - 1,
            multi_modal_data=sample.multi_modal_data,
        )
        rows.append(row)
    return rows


def stop_reason(trajectory: Trajectory) -> str:
    """Return why a rollout ended, see `mmrender.rollout.environment.StopReason`."""
    return "error" if trajectory.error is not None else str(trajectory.extra.get("stop_reason", "error"))


def total_reward(trajectory: Trajectory) -> float:
    """Return the sum of the rewards of all turns."""
    return float(sum(np.sum(step.reward) for step in trajectory.steps if step.reward is not None))


def image_tensors(
    sidecars: Iterable[MultiModalData], kind: TensorKind, dtype: TensorDtype
) -> tuple[list[Any], list[Any]] | tuple[None, None]:
    """Return `pixel_values` and `image_grid_thw` of each row, or None for both if no row has images.

    Rows without images have shapes `(0, values)` and `(0, 3)`, as `TensorList.from_rows` takes them.

    Raises:
        InputError: The model's family has other tensors than these two.
    """
    names = ("pixel_values", "image_grid_thw")
    join: Callable[[list[Any]], Any] = np.concatenate
    if kind == "torch":
        import torch

        join = torch.cat
    rows: list[tuple[Any, ...]] = []
    for sidecar in sidecars:
        items = [item.tensors(dtype, framework=kind) for item in sidecar.mm_items.get("image", ())]
        for tensors in items:
            if set(tensors) != set(names):
                raise InputError(
                    "images of this model have other tensors",
                    where="tensors",
                    expected="pixel_values and image_grid_thw",
                    got=", ".join(sorted(tensors)),
                    remedy="Take them from multi_modal_data",
                )
        rows.append(tuple(join([tensors[name] for tensors in items]) for name in names) if items else ())
    example = next(filter(None, rows), None)
    if example is None:
        return None, None
    pixels, grids = zip(*(row or tuple(each[:0] for each in example) for row in rows), strict=True)
    return list(pixels), list(grids)


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over the rollouts, and some extremes.

    `rollout/...` covers all rollouts: reward, turns, sampled tokens, length, and the shares of failed ones,
    of each reason to stop, and of later turns whose prompt was rendered in full. `environment/...` covers the
    rollouts whose last observation reported that name in `info`.
    """
    if not trajectories:
        return {}

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    rewards = [total_reward(trajectory) for trajectory in trajectories]
    lengths = [len(trajectory.steps[-1]) if len(trajectory) else 0 for trajectory in trajectories]
    sampled = [sum(len(step.completion_ids) for step in trajectory.steps) for trajectory in trajectories]
    later = [step for trajectory in trajectories for step in trajectory.steps if step.index]
    reasons = [stop_reason(trajectory) for trajectory in trajectories]
    metrics = {
        "rollout/reward": mean(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
        "rollout/turns": mean([len(trajectory) for trajectory in trajectories]),
        "rollout/sampled_tokens": mean(sampled),
        "rollout/length": mean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/rendered_anew": mean([step.extra.get("why_rendered") is not None for step in later]),
        "rollout/failed": mean([trajectory.error is not None for trajectory in trajectories]),
    }
    for reason in sorted(set(reasons)):
        metrics[f"rollout/ended_{reason}"] = mean([each == reason for each in reasons])
    reported: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.extra.get("info", {}).items():
            if isinstance(value, int | float):
                reported[f"environment/{name}"].append(value)
    return metrics | {name: mean(values) for name, values in sorted(reported.items())}
