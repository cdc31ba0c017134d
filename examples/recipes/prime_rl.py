"""prime-rl on Geometry3K: a taskset of verifiers, and mmrender as the renderer of its configuration.

```console
$ git clone https://github.com/PrimeIntellect-ai/prime-rl && cd prime-rl && uv sync
$ uv pip install 'mmrender[all]' && export PYTHONPATH=MMRENDER/examples
$ python -m recipes.prime_rl --model Qwen/Qwen3-VL-4B-Instruct --out geometry    # writes geometry/rl.toml
$ uv run rl @ geometry/rl.toml                                                   # 8 GPUs of 80 GB
$ python -m recipes.prime_rl --tiny                                              # here, without prime-rl
```

With `--tiny` prime-rl is not started, since it needs GPUs: verifiers 0.4.0 loads the taskset by its id, its
prompts are rendered by the renderer of the configuration, the tiny model answers, and the task rewards it.

Memory, computed and not measured: weights, gradients and Adam's two moments in float32 take 16 bytes a
parameter: 71 GB for 4.4 billion, 18 GB on each of 4 GPUs that train. The 4 that sample hold 9 GB of weights.

Watch in prime-rl's log: the reward, the mismatch of the trainer's and the sampler's log-probabilities, below
0.01 nats on average in bfloat16, and the share of rollouts that are dropped as too old.
"""

import asyncio
from typing import Any

from renderers import CustomRendererConfig, create_renderer
from renderers.base import load_tokenizer
from verifiers.v1.utils.loaders import taskset_class

from geometry_tasks import GeometryConfig
from mmrender import RendererClient, Trajectory
from mmrender.client.local import LocalBackend
from recipes.geometry import Run, asked

IMPORT_PATH = "mmrender.integrations.renderers.MMRenderer"
CONFIGURATION = """\
max_steps = {steps}
seq_len = 4096

[deployment]
num_train_gpus = 4
num_infer_gpus = 4

[model]
name = "{model}"

[model.vlm]
vision_encoder_attr = "model.visual"
language_model_attr = "model.language_model"

[orchestrator]
batch_size = 256
group_size = 8

[orchestrator.renderer]
name = "custom"
import_path = "mmrender.integrations.renderers.MMRenderer"

[orchestrator.train.sampling]
max_completion_tokens = 1024

[[orchestrator.train.source]]
name = "geometry"

[orchestrator.train.source.env.taskset]
id = "geometry-tasks"

[orchestrator.train.source.env.agent.harness]
id = "null"

[trainer.optim]
lr = 1e-6

[inference]
"""


async def answer(run: Run) -> None:
    """Answer the first questions with the model, and print their rewards."""
    tasks = list(taskset_class("geometry-tasks")(GeometryConfig(tiny=run.tiny, count=4)))
    renderer = create_renderer(load_tokenizer(run.model), CustomRendererConfig(import_path=IMPORT_PATH))
    backend = LocalBackend(run.model)
    client = RendererClient(renderer.renderer, backend=backend, sampling_params={"max_tokens": 16, "seed": 0})
    for task in tasks:
        messages = [message.model_dump(exclude_none=True) for message in task.data.prompt]
        trajectory = Trajectory()
        turn = await client.create_completion(messages, trajectory=trajectory, forbid_media_tokens=True)
        (sample,) = trajectory.samples()
        theirs = renderer.render(messages, add_generation_prompt=True)
        length = len(theirs.token_ids)
        if sample.token_ids[:length].tolist() != theirs.token_ids:
            raise SystemExit("the renderer of the configuration renders another prompt")
        reward = await task.right(Reply(turn.text))
        print(f"{length} tokens in, {len(sample.token_ids) - length} out, reward {reward}")
    await backend.aclose()


class Reply:
    """What a reward reads of a trace."""

    def __init__(self, last_reply: str) -> None:
        self.last_reply = last_reply


def main() -> Any:
    """Write prime-rl's configuration, or answer here."""
    run = asked("recipes.prime_rl", __doc__, model="Qwen/Qwen3-VL-4B-Instruct", steps=200)
    if run.tiny:
        return asyncio.run(answer(run))
    path = run.out / "rl.toml"
    path.write_text(CONFIGURATION.format(model=run.model, steps=run.steps))
    print(f"uv run rl @ {path}")
    return None


if __name__ == "__main__":
    main()
