"""What a batch of rollouts was like, as numbers by name."""

from collections import defaultdict
from collections.abc import Sequence

from mmrender.rollout.rows import stop_reason, total_reward
from mmrender.trajectory.tree import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the rollouts, and some extremes.

    `rollout/...` is of all: reward, turns, sampled tokens, length, the part of turns after the first whose
    prompt was rendered anew, the part that failed, and the part of each reason to stop. `environment/...` is
    what environments reported in the `info` of their last observation, over the rollouts that reported it.
    """
    if not trajectories:
        return {}
    rewards = [total_reward(trajectory) for trajectory in trajectories]
    turns = [len(trajectory) for trajectory in trajectories]
    sampled = [sum(len(step.completion_ids) for step in trajectory.steps) for trajectory in trajectories]
    lengths = [len(trajectory.steps[-1]) if len(trajectory) else 0 for trajectory in trajectories]
    later = [step for trajectory in trajectories for step in trajectory.steps if step.index]
    metrics = {
        "rollout/reward": _mean(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
        "rollout/turns": _mean(turns),
        "rollout/sampled_tokens": _mean(sampled),
        "rollout/length": _mean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/rendered_anew": _mean([step.extra.get("why_rendered") is not None for step in later]),
        "rollout/failed": _mean([trajectory.error is not None for trajectory in trajectories]),
    }
    reasons = [stop_reason(trajectory) for trajectory in trajectories]
    for reason in sorted(set(reasons)):
        metrics[f"rollout/ended_{reason}"] = _mean([each == reason for each in reasons])
    return {**metrics, **_reported(trajectories)}


def _reported(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.extra.get("info", {}).items():
            if isinstance(value, int | float):
                values[f"environment/{name}"].append(value)
    return {name: _mean(found) for name, found in sorted(values.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
