"""mmrender's rollouts as SkyRL's `GeneratorInterface`.

```python
from find_cell import FindCell                     # of mmrender's examples: an environment with pictures
from mmrender import Renderer
from mmrender.integrations.skyrl import Generator
from mmrender.rollout import VLMGenerator
from mmrender.rollout.client import RendererClient

client = RendererClient(Renderer.from_pretrained("MODEL"), "http://localhost:8000", model="MODEL")
generator = Generator(VLMGenerator(client, {"find_cell": FindCell}))   # of SkyRL's trainer
```
"""

from dataclasses import replace

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from mmrender.rollout.generator import GeneratorInput as Batch
from mmrender.rollout.generator import TrajectoryID, VLMGenerator

_SAME = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "pixel_values", "image_grid_thw"),
)
"""Fields that are SkyRL's already."""


class Generator(GeneratorInterface):
    """Rolls out SkyRL's batches. Each row has the images of all its turns.

    If `rollouts.failures` is `keep`, failed rollouts are rows with a loss mask of zeros, and
    `rollout_metrics` has their share.

    Args:
        rollouts: Makes the rollouts. `tensors` is `torch`. With `step_wise` each turn is a row, as SkyRL's
            `generator.step_wise_trajectories` expects.
    """

    def __init__(self, rollouts: VLMGenerator) -> None:
        self.rollouts = replace(rollouts, tensors="torch")

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Roll out a batch, with the sampling parameters of SkyRL's configuration, in vLLM's names.

        Raises:
            InputError: The batch is malformed, or the model's images have other tensors than SkyRL takes.
            Exception: A rollout failed, and `rollouts.failures` is `raise`.
        """
        names, params = input_batch.get("trajectory_ids"), input_batch.get("sampling_params")
        if params is not None:  # SkyRL passes unset parameters as None
            params = {name: value for name, value in params.items() if value is not None}
        batch = Batch(
            prompts=input_batch["prompts"],
            env_classes=input_batch["env_classes"],
            env_extras=input_batch.get("env_extras"),
            sampling_params=params,
            trajectory_ids=names and [TrajectoryID(each.instance_id, each.repetition_id) for each in names],
        )
        output = await self.rollouts.generate(batch)
        experts = output["rollout_expert_indices"]
        choices = None if experts is None else [[] if each is None else each.tolist() for each in experts]
        theirs = {(each.instance_id, each.repetition_id): each for each in names or ()}
        ids = [theirs.get((each.instance_id, each.repetition_id)) for each in output["trajectory_ids"]]
        return GeneratorOutput(
            **{name: output[name] for name in _SAME},  # type: ignore[literal-required]
            trajectory_ids=ids if names else None,
            trajectory_generation_times=None,
            rollout_expert_indices=choices,
            is_last_step=output["is_last_step"] if self.rollouts.step_wise else None,
            env_metrics=None,
        )
