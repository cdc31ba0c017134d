"""`TrainingSample`: one token sequence as a trainer reads it, with everything that is aligned to its tokens.

Recorded conversations (`mmrender.build_training_sample`) and rollouts (`Trajectory.samples`) produce
the same class, and `mmrender.training.collate` takes both. To add a field, declare it here (`ALIGNED` checks
arrays of one value a token) and on `TrainingBatch`, and fill it in `mmrender.trajectory.step`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.caching import cached_property
from mmrender.errors import TrajectoryError
from mmrender.sidecar import MediaSpan, MultiModalData, mm_token_type_ids
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.aligned import Aligned
from mmrender.trajectory.engine_data import AllowedTokens, RoutedExperts, WeightVersionSpan

IGNORE_INDEX: Final = -100
"""The label that PyTorch's cross entropy leaves out."""

RESTRICTED: Final = "restricted"
"""Key of a step's `extra`: the kinds of grammar or choices that restricted its completion, if the engine does
not report the allowed tokens. In a sample's `extra`: for each restricted completion its first token, the
token after its last, and the kinds."""
SAMPLER: Final = "sampler"
"""Key of a step's and of a sample's `extra`: facts about the program that sampled, such as its `dtype`."""

ALIGNED: Final[Mapping[str, Any]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "loss_weights": np.float32,
    "logprobs": np.float32,
    "rewards": np.float32,
    "advantages": np.float32,
}
"""Fields with one value a token, and their dtypes."""


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One sequence to train on: a recorded conversation, or a branch or step of a trajectory.

    Attributes:
        token_ids: The whole sequence, placeholders widened: int32 of shape `(n,)`.
        loss_mask: Which tokens to train on: bool of shape `(n,)`.
        logprobs: The sampler's log-probability of each token in the loss mask, 0.0 elsewhere: float32 of
            shape `(n,)`, or None without sampled tokens.
        multi_modal_data: Items and placeholder ranges within `token_ids`.
        rewards: A value for each token: float32 of shape `(n,)`, or None.
        advantages: As `rewards`.
        loss_weights: Weight of the loss on each token, above 0 in the loss mask and 0.0 elsewhere: float32 of
            shape `(n,)`, or None if all tokens of the loss mask weigh the same.
        routed_experts: Router choices of the tokens from `routed_experts.start` on, or None.
        weight_versions: Spans over `token_ids` with the weights that sampled them.
        allowed: Spans over `token_ids` with the allowed token ids, over which `logprobs` are normalised.
        tools: Definitions of the tools that the model was offered; None without tools.
        prompt_length: Number of tokens before the completion, for a sample of one step; None for others.
        rewritten: Messages of a recorded conversation that the template drops, or writes differently than a
            model would have, by index: the reason, and the part that is trained on. See `OnRewritten`.
        rendered: The same tokens with their attribution, for a recorded conversation.
        sample_id: Names the sample in errors and keeps its place in a batch.
        extra: Further data of the caller's, carried into the batch's metadata.

    Raises:
        TrajectoryError: An array is not aligned to the tokens.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None = None
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    rewards: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    loss_weights: npt.NDArray[np.float32] | None = None
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    allowed: tuple[AllowedTokens, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_length: int | None = None
    rewritten: Mapping[int, str] = field(default_factory=dict)
    rendered: RenderedTokens | None = None
    sample_id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.token_ids),)
        for name, dtype in ALIGNED.items():
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

    @property
    def aligned(self) -> Aligned:
        """All values that are aligned to the tokens, to be cut or moved together."""
        arrays = {name: getattr(self, name) for name in ALIGNED}
        return Aligned(arrays, self.routed_experts, self.weight_versions, self.allowed)

    @cached_property
    def media_spans(self) -> list[MediaSpan]:
        """The media items with their tokens, in prompt order.

        Raises:
            PlaceholderError: The sidecar does not fit the tokens; `where` is relative to the sample.
        """
        return self.multi_modal_data.spans(len(self))

    @cached_property
    def mm_token_type_ids(self) -> npt.NDArray[np.integer]:
        """0 for text, 1 for an image's features, 2 for a video's, 3 for audio's: int64 of shape `(n,)`.

        Raises:
            PlaceholderError: As `media_spans`.
        """
        return mm_token_type_ids(self.media_spans, len(self))

    def labels(self, ignore_index: int = IGNORE_INDEX) -> npt.NDArray[np.int64]:
        """Return the ids of trained tokens, else `ignore_index`: int64 of shape `(n,)`, not shifted."""
        return np.where(self.loss_mask, self.token_ids.astype(np.int64), ignore_index)
