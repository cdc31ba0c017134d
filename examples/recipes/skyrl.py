"""SkyRL's trainer on Geometry3K, with mmrender's generator: each row has the images of all its turns.

```console
$ pip install 'mmrender[all]' 'skyrl[fsdp]==0.3.0'          # Python 3.12
$ PYTHONPATH=examples python -m recipes.skyrl --model Qwen/Qwen2.5-VL-7B-Instruct    # 8 GPUs of 80 GB
$ PYTHONPATH=examples python -m recipes.skyrl --tiny        # here, without a GPU
```

With `--tiny` SkyRL's workers are not started, since they need CUDA: the generator rolls out a batch with the
tiny model, and SkyRL's own validator takes the rows.

Memory, computed and not measured: weights, gradients and Adam's two moments in float32 take 16 bytes a
parameter: 133 GB for 8.3 billion, 17 GB on each of 8 GPUs under FSDP. vLLM takes half of each GPU.

Watch in SkyRL's log: the reward, `rollout/failed` (0), and the difference of the trainer's and the sampler's
log-probabilities, below 0.01 nats on average in bfloat16.
"""

import asyncio
from typing import Any

import datasets
import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg
from skyrl.train.utils.trainer_utils import validate_generator_output

from mmrender import Renderer, RendererClient
from mmrender.client.local import LocalBackend
from mmrender.integrations.skyrl import Generator, engine_client
from mmrender.rollout import VLMGenerator
from recipes.geometry import Geometry, Run, asked

SETTINGS = {
    "trainer.strategy": "fsdp",
    "trainer.algorithm.advantage_estimator": "grpo",
    "trainer.epochs": 1,
    "trainer.train_batch_size": 128,
    "trainer.policy_mini_batch_size": 128,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.max_prompt_length": 2048,
    "trainer.placement.colocate_all": True,
    "trainer.placement.policy_num_gpus_per_node": 8,
    "generator.n_samples_per_prompt": 8,
    "generator.max_turns": 2,
    "generator.vision_language_generator": True,
    "generator.sampling_params.max_generate_length": 1024,
    "generator.inference_engine.num_engines": 4,
    "generator.inference_engine.tensor_parallel_size": 2,
    "generator.inference_engine.gpu_memory_utilization": 0.5,
}


class Experiment(BasePPOExp):
    """SkyRL's, with mmrender's generator."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Generator:
        """Return the generator that samples from SkyRL's engines."""
        client = engine_client(
            inference_engine_client, Renderer.from_pretrained(cfg.trainer.policy.model.path)
        )
        return Generator(VLMGenerator(client, {"geometry": Geometry}, max_turns=cfg.generator.max_turns))


@ray.remote(num_cpus=1)
def train(cfg: Any) -> None:
    """Run the experiment where SkyRL runs it, in a task of Ray."""
    Experiment(cfg).run()


def rehearse(run: Run) -> None:
    """Roll out a batch with the tiny model, and let SkyRL check its rows."""
    client = RendererClient(
        Renderer.from_pretrained(run.model), backend=LocalBackend(run.model), forbid_media_tokens=True
    )
    generator = Generator(VLMGenerator(client, {"geometry": Geometry}, max_turns=2, failures="raise"))
    rows = run.rows(4)
    output = asyncio.run(
        generator.generate(
            {
                "prompts": [[] for _ in rows],
                "env_classes": ["geometry"] * len(rows),
                "env_extras": rows,
                "sampling_params": {"max_tokens": 16, "temperature": 1.0, "seed": 0},
            }
        )
    )
    validate_generator_output(len(rows), output, step_wise=False)
    for prompt, response, rewards in zip(
        output["prompt_token_ids"], output["response_ids"], output["rewards"], strict=True
    ):
        print(f"{len(prompt)} tokens in, {len(response)} out, reward {sum(rewards)}")


def main() -> None:
    """Train, or rehearse here."""
    run = asked("recipes.skyrl", __doc__, model="Qwen/Qwen2.5-VL-7B-Instruct", steps=200)
    if run.tiny:
        return rehearse(run)
    data = run.out.resolve() / "train.parquet"
    rows = [
        {"prompt": [{"role": "system", "content": "Answer."}], "env_class": "geometry", **row}
        for row in run.rows()
    ]
    datasets.Dataset.from_list(rows).to_parquet(data)
    chosen = {
        **SETTINGS,
        "data.train_data": f"['{data}']",
        "data.val_data": f"['{data}']",
        "trainer.policy.model.path": run.model,
        "trainer.max_training_steps": run.steps,
        "trainer.ckpt_path": str(run.out.resolve() / "checkpoints"),
    }
    cfg = SkyRLTrainConfig.from_cli_overrides([f"{name}={value}" for name, value in chosen.items()])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))
    return None


if __name__ == "__main__":
    main()
