"""verl's trainer on Geometry3K, with mmrender's agent loop: turns are bridged, images processed once.

```console
$ pip install 'mmrender[all]' 'verl[vllm]==0.9.1'
$ PYTHONPATH=examples python -m recipes.verl --model Qwen/Qwen2.5-VL-7B-Instruct     # 8 GPUs of 80 GB
$ PYTHONPATH=examples python -m recipes.verl --tiny       # here, without a GPU, for two steps
```

Memory, computed and not measured: weights, gradients and Adam's two moments in float32 take 16 bytes a
parameter: 133 GB for 8.3 billion, 17 GB on each of 8 GPUs under FSDP2, beside checkpointed activations. vLLM
takes half of each GPU (`gpu_memory_utilization=0.5`), and gives it back while verl trains.

Watch in verl's log: `critic/score/mean`; `rollout_corr/rollout_is_max` and `_min`, whose logarithms are the
largest difference of sampler and trainer at a token, below 0.1 in bfloat16; `actor/entropy`; and
`response_length/clip_ratio`, the share of answers that were cut.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import datasets
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from grpo.verl_cpu import ENVIRONMENT, SETTINGS
from grpo.with_verl import composed
from mmrender.integrations.verl import EpisodeLoop
from recipes.geometry import Geometry, Run, asked

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HERE = {
    **SETTINGS,
    "data.train_batch_size": 4,
    "data.max_prompt_length": 256,
    "data.max_response_length": 48,
    f"{ROLLOUT}.n": 4,
    f"{ACTOR}.ppo_mini_batch_size": 4,
}
THERE: dict[str, Any] = {
    "data.train_batch_size": 128,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 2048,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.ppo_mini_batch_size": 128,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": 20,
}


class GeometryLoop(EpisodeLoop):
    """Asks the question of a row, which is its `extra_info`."""

    environment = Geometry


def settings(run: Run) -> Any:
    """Return verl's configuration."""
    out = run.out.resolve()
    loops, data = out / "loops.yaml", out / "train.parquet"
    loops.write_text(json.dumps([{"name": "geometry", "_target_": "recipes.verl.GeometryLoop"}]))
    rows = [
        {
            "prompt": [],
            "agent_name": "geometry",
            "data_source": "geometry",
            "extra_info": {"index": index, **row},
        }
        for index, row in enumerate(run.rows())
    ]
    datasets.Dataset.from_list(rows).to_parquet(data)
    return composed(
        {
            **(HERE if run.tiny else THERE),
            "data.train_files": str(data),
            "data.val_files": str(data),
            "actor_rollout_ref.model.path": run.model,
            f"{ACTOR}.optim.lr": 1e-6,
            f"{ACTOR}.clip_ratio_high": 0.28,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
            f"{ROLLOUT}.calculate_log_probs": True,
            f"{ROLLOUT}.multi_turn.max_assistant_turns": 2,
            f"{ROLLOUT}.agent.agent_loop_config_path": str(loops),
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": False,
            "algorithm.rollout_correction.rollout_is": "token",
            "trainer.total_training_steps": run.steps,
            "trainer.val_before_train": False,
            "trainer.logger": "[console,file]",
            "trainer.resume_mode": "disable",
            "trainer.default_local_dir": str(out / "checkpoints"),
        }
    )


def main() -> None:
    """Train."""
    run = asked("recipes.verl", __doc__, model="Qwen/Qwen2.5-VL-7B-Instruct", steps=200)
    log = run.out.resolve() / "log.jsonl"
    os.environ |= {**(ENVIRONMENT if run.tiny else {}), "VERL_FILE_LOGGER_PATH": str(log)}
    run_ppo(settings(run), task_runner_class=TaskRunnerV1)
    for line in map(json.loads, Path(log).read_text().splitlines()):
        data = line["data"]
        bounds = data["rollout_corr/rollout_is_max"], data["rollout_corr/rollout_is_min"]
        nats = max(abs(math.log(bound)) for bound in bounds)
        print(f"step {line['step']}  reward {data['critic/score/mean']:.3f}  nats {nats:.2g}")


if __name__ == "__main__":
    main()
