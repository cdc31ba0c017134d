"""The same game with TRL's trainer: `python -m grpo.with_trl --out runs/trl`, with examples/ on the path.

TRL's model is the sampler's, so each step samples with the weights of that step. A line of `log.jsonl` for
each step has the mean reward, and how far sampler and trainer differ at any token, in nats.
"""

import argparse
import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import trl
from transformers import AutoProcessor, TrainerCallback

from grpo.config import Config, build
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
        self._file = config.out / "log.jsonl"

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" not in logs:
            return
        names = ("reward", "entropy", "sampler_trainer/max", "sampler_trainer/mean")
        line = {"step": state.global_step, **{name: logs[name] for name in names}}
        if state.global_step % self._config.evaluate_every == 0:
            line["held_out"] = asyncio.run(self._worker.held_out())
            control.should_training_stop |= line["held_out"] >= self._config.until
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    config = Config(**vars(parser.parse_args()))
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
