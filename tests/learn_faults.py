"""Train as a fleet of processes, kill each kind again and again, and see that each game is trained on once.

    python tests/learn_faults.py --out RUN [--kills 10] [--server local] [--ray] [-- flags of grpo.processes]

Without `--server local` a vLLM is started, from the environment that MMRENDER_VLLM_ENV names; its weights are
read anew before each step. Processes die by SIGKILL at random moments, and are started again: by the fleet
on this machine, or with `--ray` by Ray. Checked at the end, by the lines that the trainer
wrote:

- each step was taken once, on every game of it and no other, none twice, all sampled by the weights of that step;
- sampler and trainer differ by less than 1e-3 nats at every token of every step, right after the reload;
- the reward of the last third of the steps is above that of the first third by more than noise explains: a
  permutation test over the steps, whose boards are all different, with p below 0.001 or what `--p` says.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from grpo.config import Config, build, parse
from grpo.processes import fleet_on
from grpo.worker import games_of
from integration.engine_server import start_vllm

ROLES = ("trainer", "worker", "receiver")
PERMUTATIONS = 100_000


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The lines of the steps, without a torn last one."""
    file = out / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if "reward" in row]


def drive(config: Config, fleet: Any, kills: int, seed: int) -> list[tuple[str, int]]:
    """Run to the end with so many kills, spread over the run; return who was killed at which step."""
    dice, killed = random.Random(seed), []
    # Of each kind as many, in any order, each at a moment of its own within a step.
    roles = [ROLES[number % len(ROLES)] for number in range(kills)]
    dice.shuffle(roles)
    at = [1 + number * (config.steps - 2) // max(1, kills) for number in range(kills)]
    seen, since, length = 0, time.monotonic(), 0.0
    while fleet.poll(0.05):
        now, steps = time.monotonic(), len(steps_of(config.out))
        if steps > seen:
            # Steps may be so short that a longer wait outlasts the run.
            seen, since, length = steps, now, (now - since) / (steps - seen) if seen else 0.0
        if len(killed) < kills and steps >= at[len(killed)]:
            time.sleep(dice.random() * min(2, length))
            role = roles[len(killed)]
            pids = fleet.pids()
            if chosen := sorted(name for name in pids if name[0] == role):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[dice.choice(chosen)], signal.SIGKILL)
                killed.append((role, len(steps_of(config.out))))
                print("killed the", role, "after step", killed[-1][1], flush=True)
    return killed


def p_value(early: list[float], late: list[float], seed: int) -> float:
    """Chance that steps in a random order part by as much: a one-sided permutation test of means."""
    rng, values = np.random.default_rng(seed), np.array([*early, *late])
    seen = np.mean(late) - np.mean(early)
    orders = rng.permuted(np.tile(values, (PERMUTATIONS, 1)), axis=1)
    parted = orders[:, len(early) :].mean(1) - orders[:, : len(early)].mean(1)
    return float((np.sum(parted >= seen - 1e-12) + 1) / (PERMUTATIONS + 1))


def check(config: Config, killed: list[tuple[str, int]], kills: int, most_p: float) -> dict[str, Any]:
    """Check the lines of a whole run; return its figures.

    Raises:
        SystemExit: A law does not hold.
    """
    rows, problems = steps_of(config.out), []
    if [row["step"] for row in rows] != list(range(1, config.steps + 1)):
        problems.append(f"steps {[row['step'] for row in rows]}")
    for row in rows:
        if row["games"] != [list(game) for game in games_of(config, row["step"] - 1)]:
            problems.append(f"step {row['step']} was trained on other games than its own")
        if row["weights"] != [f"step-{row['step'] - 1}"]:
            problems.append(f"step {row['step']} was sampled by {row['weights']}")
        if not row["difference"] < 1e-3:
            problems.append(f"step {row['step']}: sampler and trainer part by {row['difference']}")
        if row["bridged"] != row["later_turns"] or row["items"] != row["pictures"]:
            problems.append(f"step {row['step']}: a turn was not bridged, or a picture is held twice")
    third = len(rows) // 3
    rewards = [row["reward"] for row in rows]
    early, late = rewards[:third], rewards[-third:]
    p = p_value(early, late, config.seed)
    if p > most_p:
        problems.append(f"the reward does not rise: p = {p:.2g}")
    if len(killed) < kills:
        problems.append(f"only {len(killed)} kills of {kills}")
    if problems:
        raise SystemExit("\n".join(problems))
    return {
        "kills": {role: sum(each == role for each, _ in killed) for role in ROLES},
        "steps": len(rows),
        "games": sum(len(row["games"]) for row in rows),
        "left_out": sum(row["left_out"] for row in rows),
        "difference": max(row["difference"] for row in rows),
        "early": round(float(np.mean(early)), 3),
        "late": round(float(np.mean(late)), 3),
        "p": p,
    }


def main() -> None:
    """Run, and print the figures."""
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--server", default="vllm", choices=("vllm", "local"))
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--p", type=float, default=1e-3, help="1 asks for no rise, as in a run of few steps")
    parser.add_argument("--seed", type=int, default=0, help="of the kills, and of the run")
    options = parser.parse_args(own)
    if options.out.exists() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} holds a run already")
    flags = ["--out", str(options.out), "--seed", str(options.seed), "--quiet", *flags]
    model = build(parse(flags))
    with contextlib.ExitStack() as stack:
        url = options.server
        if url == "vllm":
            server = stack.enter_context(
                start_vllm(model, ["--max-num-seqs", "32"], log=options.out / "vllm.log")
            )
            url = server.base_url
        flags += ["--server", url]
        config, start = parse(flags), time.monotonic()
        if options.ray:
            import ray

            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
        fleet = stack.enter_context(fleet_on("ray" if options.ray else "local", config))
        killed = drive(config, fleet, options.kills, options.seed)
    figures = check(config, killed, options.kills, options.p)
    print(json.dumps({**figures, "seconds": round(time.monotonic() - start)}))


if __name__ == "__main__":
    main()
