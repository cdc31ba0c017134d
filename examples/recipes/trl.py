"""TRL's GRPOTrainer on Geometry3K, with trajectories of one turn or two.

```console
$ pip install 'mmrender[all]' trl==1.16.0 accelerate datasets vllm
$ PYTHONPATH=examples accelerate launch --num_processes 8 -m recipes.trl --model Qwen/Qwen3-VL-2B-Instruct
$ PYTHONPATH=examples python -m recipes.trl --tiny        # here, without a GPU, for two steps
```

Memory, computed and not measured: weights, gradients and Adam's two moments in float32 take 16 bytes a
parameter, 34 GB for 2.1 billion, on each GPU without sharding. vLLM in the same process takes 20 GB
(`vllm_gpu_memory_utilization=0.25`). That fits a GPU of 80 GB with checkpointed activations.

Watch in the log: `sampler_trainer/max`, which stays below 0.1 nats in bfloat16 and jumps if weights are not
synced; `reward`; `frac_reward_zero_std`, the share of questions that teach nothing; and `entropy`.
"""

from functools import partial
from typing import Any

import datasets
import trl
from transformers import AutoProcessor

from mmrender import Renderer, RendererClient, Trajectory
from mmrender.integrations.trl import GRPOTrainer
from mmrender.rollout import run_episode
from recipes.geometry import Geometry, Run, asked

HERE = {"use_cpu": True, "bf16": False, "max_completion_length": 16, "per_device_train_batch_size": 4}
THERE = {
    "bf16": True,
    "max_completion_length": 1024,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.25,
    "gradient_checkpointing": True,
}


async def play(run: Run, client: RendererClient, row: dict[str, Any]) -> Trajectory:
    """Ask the question of a row. Untrained weights would sample tokens of images."""
    trajectory = Trajectory()
    await run_episode(client, Geometry(), [], row, trajectory=trajectory, forbid_media_tokens=run.tiny)
    return trajectory


def main() -> None:
    """Train."""
    run = asked("recipes.trl", __doc__, model="Qwen/Qwen3-VL-2B-Instruct", steps=200)
    config = trl.GRPOConfig(
        str(run.out),
        max_steps=run.steps,
        num_generations=4 if run.tiny else 8,
        learning_rate=1e-6,
        loss_type="dapo",
        epsilon_high=0.28,
        scale_rewards="none",
        logging_steps=1,
        report_to="none",
        **(HERE if run.tiny else THERE),
    )
    trainer = GRPOTrainer(
        run.model,
        partial(play, run),
        renderer=Renderer.from_pretrained(run.model),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "", **row} for row in run.rows()]),
        processing_class=AutoProcessor.from_pretrained(run.model),
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "sampler_trainer/max" in entry:
            print(
                f"step {entry['step']}  reward {entry['reward']:.3f}  nats {entry['sampler_trainer/max']:.2g}"
            )


if __name__ == "__main__":
    main()
