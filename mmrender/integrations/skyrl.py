"""mmrender's rollouts as SkyRL's `GeneratorInterface`.

```python
from find_cell import FindCell                     # of mmrender's examples: an environment with pictures
from mmrender import Renderer
from mmrender.integrations.skyrl import Generator, engine_client
from mmrender.rollout import VLMGenerator

renderer = Renderer.from_pretrained("MODEL")

def get_generator(self, cfg, tokenizer, inference_engine_client):   # of SkyRL's experiment class
    client = engine_client(inference_engine_client, renderer)
    return Generator(VLMGenerator(client, {"find_cell": FindCell}))
```
"""

from dataclasses import replace
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from mmrender.client.types import RendererBackend
from mmrender.client.vllm import VLLMBackend
from mmrender.errors import InputError
from mmrender.integrations.synced import SyncedBackend
from mmrender.protocols import RendererProtocol
from mmrender.rollout.client import RendererClient
from mmrender.rollout.generator import GeneratorInput as Batch
from mmrender.rollout.generator import VLMGenerator
from mmrender.rollout.rows import TrajectoryID

_SAME = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "pixel_values", "image_grid_thw"),
)
"""Fields that are SkyRL's already."""


def engine_client(
    inference_engine_client: Any, renderer: RendererProtocol, *, model: str | None = None, **options: Any
) -> RendererClient:
    """Return a client of the engines that SkyRL keeps in sync, by the address of SkyRL's own router.

    Turns carry the number of SkyRL's weight syncs as the name of their weights, unless the weights changed
    during the turn.

    Args:
        inference_engine_client: SkyRL's `InferenceEngineInterface`.
        renderer: Renders the model's prompts.
        model: Name of a LoRA adapter that SkyRL syncs, by default the base model.
        options: Of `RendererClient`.

    Raises:
        InputError: SkyRL syncs adapters, and none is named.
    """
    if model is None and getattr(inference_engine_client, "uses_lora_weight_sync", False):
        raise InputError(
            "SkyRL syncs an adapter, and the base model keeps its weights",
            where="model",
            expected="the adapter's name, such as skyrl-lora",
            got="none",
        )
    backend: RendererBackend = VLLMBackend()
    if hasattr(inference_engine_client, "weight_version"):
        backend = SyncedBackend(backend, lambda: str(inference_engine_client.weight_version))
    url, name = inference_engine_client.get_endpoint_url(), model or inference_engine_client.model_name
    return RendererClient(renderer, url, model=name, backend=backend, **options)


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
