"""What a generator takes and gives: the shapes that trainers of the SkyRL kind read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

import numpy as np
import numpy.typing as npt

from mmrender.rollout.environment import Environment
from mmrender.spans import MultiModalData

EnvironmentClass: TypeAlias = str | Callable[[], Environment]
"""Name of an environment that the generator knows, or what makes one."""


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Which rollout this is: the `repetition_id`-th of a prompt's."""

    instance_id: str
    repetition_id: int = 0

    def to_string(self) -> str:
        """`instance_id_repetition_id`."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """What a batch is for."""

    global_step: int = 0
    training_phase: Literal["train", "eval"] = "train"


class GeneratorInput(TypedDict, total=False):
    """A batch of rollouts; all lists have one entry for each.

    Attributes:
        prompts: Conversations that the data set gives; an environment shows them, or others.
        env_classes: Names of environments, or what makes one.
        env_extras: What else the data set gives, such as a seed; None for nothing.
        sampling_params: In vLLM's names, for every turn; None for the generator's own.
        trajectory_ids: Names of the rollouts, all different; None to number them.
        batch_metadata: What the batch is for.
    """

    prompts: Sequence[Sequence[Any]]
    env_classes: Sequence[EnvironmentClass]
    env_extras: Sequence[Mapping[str, Any]] | None
    sampling_params: Mapping[str, Any] | None
    trajectory_ids: Sequence[TrajectoryID] | None
    batch_metadata: BatchMetadata | None


class GeneratorOutput(TypedDict):
    """Rows to train on, in the order of the input: one for each rollout, or step-wise one for each turn.

    Attributes:
        prompt_token_ids: The first prompt of the rollout, or of the turn.
        response_ids: Everything after it: what was sampled, and the observations between.
        rewards: One for each token of the response.
        loss_masks: 1 for sampled tokens, 0 for observations and for rows that are not to be trained on.
        stop_reasons: Why the rollout ended, as `mmrender.rollout.episode.StopReason`.
        rollout_metrics: Means over the batch, by name.
        rollout_logprobs: What the sampler said; 0.0 on observations.
        trajectory_ids: Which rollout a row belongs to.
        rollout_expert_indices: Router choices of prompt and response, of shape `(tokens, layers, top_k)`, or
            None; None for the whole where no engine gave any.
        is_last_step: Whether the row is the last of its rollout.
        multi_modal_data: Media of prompt and response; ranges count from the prompt's first token.
        pixel_values: For each row the patches of its images, joined, of shape `(patches, values)`; rows
            without images have no patches. None where not asked for, or where no row has images.
        image_grid_thw: For each row int64 of shape `(images, 3)`; as `pixel_values`.
        errors: For each row what ended its rollout before its time, or None.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[TrajectoryID]
    rollout_expert_indices: list[npt.NDArray[np.integer] | None] | None
    is_last_step: list[bool]
    multi_modal_data: list[MultiModalData]
    pixel_values: list[Any] | None
    image_grid_thw: list[Any] | None
    errors: list[str | None]


@runtime_checkable
class GeneratorInterface(Protocol):
    """What a trainer asks for rollouts."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Roll out a batch; rows come in the order of the input."""
        ...
