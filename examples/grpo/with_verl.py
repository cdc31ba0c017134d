"""The same games with verl's own trainer, without a GPU: `python -m grpo.with_verl --out runs/verl`.

With `--game look` it has two turns, with a tool's picture between. `main_ppo` of verl runs as it is, with an
agent loop of mmrender's; `grpo.verl_cpu` says what stands for a GPU. verl syncs its weights to the server at
each step. A line of `metrics.jsonl` for each step has verl's figures: the mean reward, the share of held-out
boards, and the largest difference of sampler and trainer at any token, in nats, from its importance weights.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import datasets
import verl
from hydra import compose, initialize_config_dir
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from grpo.config import Config, build, parse
from grpo.games import HELD_OUT, game_of
from grpo.verl_cpu import ENVIRONMENT, SETTINGS
from mmrender.integrations.verl import EpisodeLoop

NAME: Final = "game"
"""The agent loop's name in verl's configuration and data."""


@cache
def config_of(out: str) -> Config:
    """Return the settings of the run in a folder."""
    return Config(**{**json.loads((Path(out) / "settings.json").read_text()), "out": Path(out)})


class GameLoop(EpisodeLoop):
    """Plays the boards of a run."""

    def __init__(self, *arguments: Any, out: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.environment = game_of(config_of(out), self.renderer)


def data_of(config: Config, first: int, count: int, name: str) -> str:
    """Write boards as verl reads them; return the file."""
    rows = [
        {"prompt": [], "agent_name": NAME, "data_source": NAME, "extra_info": {"index": seed, "seed": seed}}
        for seed in range(first, first + count)
    ]
    path = config.out / f"{name}.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def settings(config: Config, directory: Path) -> Any:
    """Return verl's configuration, with settings that match the ones of the other programs."""
    out, games = config.out.resolve(), config.boards * config.rollouts
    loops = out / "loops.yaml"
    loops.write_text(
        json.dumps([{"name": NAME, "_target_": f"{__package__}.with_verl.GameLoop", "out": str(out)}])
    )
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    chosen = {
        **SETTINGS,
        "data.train_files": data_of(config, config.seed << 20, config.steps * config.boards, "train"),
        "data.val_files": data_of(config, HELD_OUT, config.held_out, "held_out"),
        "data.train_batch_size": config.boards,
        "data.val_batch_size": config.held_out,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.max_prompt_length": 256,
        "data.max_response_length": 256,
        "actor_rollout_ref.model.path": str(directory.resolve()),
        f"{actor}.optim.lr": config.learning_rate,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.ppo_mini_batch_size": config.boards,
        f"{actor}.ppo_micro_batch_size_per_gpu": min(64, games),
        f"{actor}.entropy_coeff": config.entropy_bonus,
        f"{rollout}.n": config.rollouts,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": min(64, games),
        f"{rollout}.agent.agent_loop_config_path": str(loops),
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": config.most_weight,
        "trainer.logger": "[file]",
        "trainer.total_epochs": 1,
        "trainer.test_freq": config.evaluate_every,
        "trainer.default_local_dir": str(out / "checkpoints"),
        "trainer.resume_mode": "disable",
    }
    return composed(chosen)


def composed(overrides: Mapping[str, Any]) -> Any:
    """Return the configuration of verl's PPO trainer with these settings."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", [f"{name}={value}" for name, value in overrides.items()])


def lines(config: Config, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each step from verl's log, under the names that `grpo.report` draws."""
    for text in path.read_text().splitlines():
        entry = json.loads(text)
        step, data = entry["step"], entry["data"]
        line = {"step": step, "rollouts": step * config.boards * config.rollouts}
        shares = [value for name, value in data.items() if name.startswith("val-core/")]
        line |= {"held_out": shares[0]} if shares else {}
        if "critic/score/mean" in data:
            most, least = (data[f"rollout_corr/rollout_is_{bound}"] for bound in ("max", "min"))
            line |= {
                "reward": data["critic/score/mean"],
                "entropy": data["actor/entropy"],
                "difference": max(math.log(most), -math.log(least)),
                "kl": data["rollout_corr/kl"],
                "tokens_per_s": data["perf/throughput"],
                "seconds": data["timing_s/step"],
            }
        yield line


def main(arguments: list[str] | None = None) -> None:
    """Train with verl for as many steps as the settings say."""
    config = parse(arguments, program="grpo.with_verl")
    if config.game == "zoom":
        sys.exit("the turns of zoom are structured outputs, which verl's servers do not follow: --game look")
    directory = build(config)
    log = config.out / "verl.jsonl"
    # Read by verl's processes, which Ray starts with the environment of this one.
    os.environ |= {**ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(log.resolve())}
    run_ppo(settings(config, directory), task_runner_class=TaskRunnerV1)
    rows = list(lines(config, log))
    (config.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
