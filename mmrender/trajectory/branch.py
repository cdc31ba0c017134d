"""Branches: sequences from the root to a last step, and the training samples made of them and of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.spans import MultiModalData
from mmrender.trajectory.engine_data import WeightVersionSpan
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree_step import Part, Step


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One sequence of a trajectory, from the first token to the end of its last step.

    Attributes:
        trajectory_id: Of the trajectory.
        index: Position in `Trajectory.branches()`.
        tip: The last step.
    """

    trajectory_id: str
    index: int
    tip: Step

    def __len__(self) -> int:
        return len(self.tip)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps whose prompt and completion the sequence holds whole, the last one last."""
        return tuple(part.step for part in self.tip.parts() if part.whole)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The whole sequence, int32, read-only."""
        return self.tip.token_ids

    @property
    def multi_modal_data(self) -> MultiModalData:
        """The sidecar of the whole sequence."""
        return self.tip.multi_modal_data

    def sample(
        self, *, trained: dict[int, int] | None = None, require_logprobs: bool = True
    ) -> TrainingSample:
        """Return the sequence as a sample that trains on every token that was sampled.

        Args:
            trained: By step, up to which position its tokens are trained on already; these are masked out,
                and the dict is brought up to date. None trains on all.
            require_logprobs: Refuse sampled tokens without log probabilities, instead of giving them 0.0.

        Raises:
            TrajectoryError: Log probabilities are required and missing.
        """
        parts = self.tip.parts()
        mask = np.zeros(len(self), np.bool_)
        for part in parts:
            start, stop = part.sampled
            if trained is not None:
                start = max(start, trained.get(part.step.index, 0))
                trained[part.step.index] = max(stop, trained.get(part.step.index, 0))
            mask[start:stop] = True
        name = f"{self.trajectory_id}/{self.index}"
        return _sample(self.tip, parts, mask, name, require_logprobs)


def step_sample(step: Step, trajectory_id: str = "", *, require_logprobs: bool = True) -> TrainingSample:
    """Return one step as a sample that trains on its own completion only.

    Over all steps of a trajectory, each sampled token is trained on exactly once.

    Raises:
        TrajectoryError: Log probabilities are required and missing.
    """
    mask = np.zeros(len(step), np.bool_)
    mask[step.prompt_length :] = True
    sample = _sample(step, step.parts(), mask, f"{trajectory_id}/step-{step.index}", require_logprobs)
    return replace(sample, prompt_length=step.prompt_length)


def _sample(
    step: Step, parts: Sequence[Part], mask: npt.NDArray[np.bool_], name: str, require_logprobs: bool
) -> TrainingSample:
    experts = step.routed_experts
    return TrainingSample(
        token_ids=step.token_ids,
        loss_mask=mask,
        logprobs=_logprobs(parts, mask, require_logprobs),
        multi_modal_data=step.multi_modal_data,
        rewards=_rewards(parts, len(step)),
        routed_experts=experts,
        weight_versions=tuple(_versions(parts)),
        sample_id=name,
        extra={"steps": tuple(part.step.index for part in parts)},
    )


def _logprobs(parts: Sequence[Part], mask: npt.NDArray[np.bool_], required: bool) -> npt.NDArray[np.float32]:
    """Return what was said of the tokens that are trained on, 0.0 elsewhere."""
    logprobs = np.zeros(len(mask), np.float32)
    for part in parts:
        start, stop = part.sampled
        if part.step.logprobs is not None:
            logprobs[start:stop] = part.step.logprobs[: stop - start]
        elif required and mask[start:stop].any():
            raise TrajectoryError(
                "sampled tokens have no log probabilities",
                where=f"steps[{part.step.index}].logprobs",
                expected=f"{stop - start} numbers",
                got="None",
                remedy="Ask the engine for them, or pass require_logprobs=False for 0.0 in their place",
            )
    logprobs[~mask] = 0.0
    return logprobs


def _rewards(parts: Sequence[Part], length: int) -> npt.NDArray[np.float32] | None:
    """Place rewards: those of tokens on their tokens, one of a whole step on its last sampled token.

    A step that sampled nothing has its reward on the last token sampled before it; where nothing was, on its
    own last token, which no loss mask marks and no later token is credited for. One reward of a step that the
    sequence holds in part is left out: it was given for another ending.
    """
    if all(part.step.reward is None for part in parts):
        return None
    last = -1
    rewards = np.zeros(length, np.float32)
    for part in parts:
        reward: Any = part.step.reward
        start, stop = part.sampled
        last = stop - 1 if stop > start else last
        if isinstance(reward, np.ndarray):
            rewards[start:stop] = reward[: stop - start]
        elif reward is not None and part.whole and part.stop:
            rewards[last if last >= 0 else part.stop - 1] += reward
    return rewards


def _versions(parts: Sequence[Part]) -> list[WeightVersionSpan]:
    spans = []
    for part in parts:
        start, stop = part.sampled
        for version, first, last in part.step.weight_versions:
            if start + first < min(start + last, stop):
                spans.append(WeightVersionSpan(version, start + first, min(start + last, stop)))
    return spans
