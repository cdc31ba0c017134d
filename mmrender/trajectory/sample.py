"""`TrainingSample`: one sequence as a trainer reads it, with everything aligned to its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.spans import MultiModalData
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One branch, or one step, of a trajectory as a sequence to train on.

    Attributes:
        token_ids: Prompt and everything that followed; int32 of shape `(n,)`.
        loss_mask: Which tokens to train on, as a rule those that the model sampled; bool of shape `(n,)`.
        logprobs: What the sampler said of each token that the loss mask marks, 0.0 elsewhere; float32 of
            shape `(n,)`.
        multi_modal_data: Items and placeholder ranges within `token_ids`.
        rewards: A value for each token; float32 of shape `(n,)`, or None where none were given.
        advantages: As `rewards`.
        routed_experts: Router choices of the tokens from `routed_experts.start` on, or None.
        weight_versions: Spans over `token_ids` that say which weights sampled them.
        sample_id: Names the trajectory and branch, for messages and for keeping order.
        extra: What a consumer wants to keep beside it.

    Raises:
        TrajectoryError: An array is not aligned to the tokens.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    rewards: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    sample_id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.token_ids),)
        for name, dtype in _ALIGNED.items():
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.dtype != dtype):
                raise TrajectoryError(
                    "an array is not aligned to the tokens",
                    where=f"{self.sample_id or 'sample'}.{name}",
                    expected=f"{np.dtype(dtype).name} {list(shape)}",
                    got=f"{array.dtype} {list(array.shape)}",
                )

    def __len__(self) -> int:
        return len(self.token_ids)


_ALIGNED: Mapping[str, Any] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "rewards": np.float32,
    "advantages": np.float32,
}
