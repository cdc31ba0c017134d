"""The same game with TRL's trainer: `python -m grpo.with_trl --out runs/trl`, with examples/ on the path.

TRL's model is the sampler's, so each step samples with the weights of that step. A line of `metrics.jsonl`
for each step has the mean reward, and how far sampler and trainer differ at any token, in nats.
"""

import asyncio
import json
import time
from functools import partial
from typing import Any

import datasets
import trl
from transformers import AutoProcessor, TrainerCallback

from grpo.config import Config, build, parse
from grpo.games import game_of
from grpo.worker import Worker
from mmrender import Renderer, RendererClient, Trajectory
from mmrender.client.local import LocalBackend
from mmrender.integrations.trl import GRPOTrainer
from mmrender.model.weights import load_model
from mmrender.rollout import run_episode


class Report(TrainerCallback):
    """Writes what each step saw, and ends the run when the held-out boards are answered."""

    def __init__(self, config: Config, worker: Worker) -> None:
        self._config, self._worker, self._began = config, worker, time.monotonic()
        self._file = config.out / "metrics.jsonl"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._write({"step": 0, "rollouts": 0, "held_out": asyncio.run(self._worker.held_out())})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" not in logs:
            return
        config, step = self._config, state.global_step
        line = {
            "step": step,
            "rollouts": step * config.boards * config.rollouts,
            "reward": logs["reward"],
            "entropy": logs["entropy"],
            "difference": logs["sampler_trainer/max"],
            "kl": logs["sampler_trainer/mean"],
        }
        if step % config.evaluate_every == 0:
            line["held_out"] = asyncio.run(self._worker.held_out())
            control.should_training_stop |= line["held_out"] >= config.until
        self._write(line)

    def _write(self, line: dict[str, float]) -> None:
        line["seconds"] = round(time.monotonic() - self._began, 1)
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def settings(config: Config) -> trl.GRPOConfig:
    """TRL's settings that match the ones of the other programs."""
    games = config.boards * config.rollouts
    return trl.GRPOConfig(
        str(config.out / "trl"),
        max_steps=config.steps,
        per_device_train_batch_size=games,
        num_generations=config.rollouts,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        loss_type="cispo",
        epsilon_high=config.most_weight,
        scale_rewards="none",
        entropy_coef=config.entropy_bonus,
        max_grad_norm=1.0,
        temperature=1.0,
        max_completion_length=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=config.seed,
    )


async def play(environment: Any, client: RendererClient, row: dict[str, Any]) -> Trajectory:
    """Play the board of a row."""
    trajectory = Trajectory()
    await run_episode(
        client, environment(), [], {"seed": row["seed"]}, trajectory=trajectory, forbid_media_tokens=True
    )
    return trajectory


def main() -> None:
    """Train until the held-out boards are answered."""
    config = parse(program="grpo.with_trl")
    directory = build(config)
    renderer = Renderer.from_pretrained(directory)
    model = load_model(directory, "float32", "cpu", purpose="the example")
    rows = [{"prompt": "", "seed": seed} for seed in range(config.steps * config.boards)]
    trainer = GRPOTrainer(
        model,
        partial(play, game_of(config, renderer)),
        renderer=renderer,
        row_tokens=config.row_tokens,
        concurrency=config.boards * config.rollouts,
        args=settings(config),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(directory),
        callbacks=[Report(config, Worker(config, renderer, backend=LocalBackend(model)))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
