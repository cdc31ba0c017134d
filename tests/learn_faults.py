"""Train in two processes, kill worker and trainer again and again, and see that each game is trained on once.

    python tests/learn_faults.py --out RUN [--kills 10] [--server local] [-- flags of grpo.processes]

Without `--server local` a vLLM is started, from the environment that MMRENDER_VLLM_ENV names; its weights are
read anew before each step. Both processes die by SIGKILL at random moments, and are started again. Checked at
the end, by the lines that the trainer wrote:

- each step was taken once, on every game of it and no other, none twice, all sampled by the weights of that step;
- sampler and trainer differ by less than 1e-3 nats at every token of every step, right after the reload;
- the reward of the last third of the steps is above that of the first third by more than noise explains: a
  permutation test over the steps, whose boards are all different, with p below 0.001.
"""

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from grpo.config import Config, build, parse
from integration.engine_server import start_vllm

ROLES = ("trainer", "worker")
PERMUTATIONS = 100_000


class Processes:
    """Worker and trainer, started again when they die."""

    def __init__(self, out: Path, flags: list[str]) -> None:
        self._out, self._flags = out, flags
        self.running = {role: self._start(role) for role in ROLES}

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        with (self._out / f"{role}.log").open("ab") as log:
            command = [sys.executable, "-m", "grpo.processes", role, *self._flags]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, role: str) -> None:
        """Kill one, and start it again."""
        self.running[role].send_signal(signal.SIGKILL)
        self.running[role].wait()
        self.running[role] = self._start(role)

    def failed(self) -> list[str]:
        """Those that ended by themselves, and not because they were done."""
        return [role for role, process in self.running.items() if process.poll() not in (None, 0)]

    def end(self) -> None:
        """Kill what runs."""
        for process in self.running.values():
            process.kill()
            process.wait()


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The lines of the steps, without a torn last one."""
    file = out / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if "reward" in row]


def drive(config: Config, flags: list[str], kills: int, seed: int) -> list[tuple[str, int]]:
    """Run to the end with so many kills, spread over the run; return who was killed at which step."""
    dice, killed = random.Random(seed), []
    # Of each kind as many, in any order, each at a moment of its own within a step.
    roles = [ROLES[number % 2] for number in range(kills)]
    dice.shuffle(roles)
    at = [1 + number * (config.steps - 2) // max(1, kills) for number in range(kills)]
    processes = Processes(config.out, flags)
    try:
        while any(process.poll() is None for process in processes.running.values()):
            if failed := processes.failed():
                raise SystemExit(f"{failed[0]} ended by itself: see {config.out / failed[0]}.log")
            if len(killed) < kills and len(steps_of(config.out)) >= at[len(killed)]:
                time.sleep(dice.random() * 2)
                role = roles[len(killed)]
                processes.kill(role)
                killed.append((role, len(steps_of(config.out))))
                print("killed the", role, "after step", killed[-1][1], flush=True)
            time.sleep(0.05)
    finally:
        processes.end()
    return killed


def p_value(early: list[float], late: list[float], seed: int) -> float:
    """Chance that steps in a random order part by as much: a one-sided permutation test of means."""
    rng, values = np.random.default_rng(seed), np.array([*early, *late])
    seen = np.mean(late) - np.mean(early)
    orders = rng.permuted(np.tile(values, (PERMUTATIONS, 1)), axis=1)
    parted = orders[:, len(early) :].mean(1) - orders[:, : len(early)].mean(1)
    return float((np.sum(parted >= seen - 1e-12) + 1) / (PERMUTATIONS + 1))


def check(config: Config, killed: list[tuple[str, int]], kills: int) -> dict[str, Any]:
    """Check the lines of a whole run; return its figures.

    Raises:
        SystemExit: A law does not hold.
    """
    rows, problems = steps_of(config.out), []
    if [row["step"] for row in rows] != list(range(1, config.steps + 1)):
        problems.append(f"steps {[row['step'] for row in rows]}")
    for row in rows:
        first = ((config.seed << 20) + row["step"] - 1) * config.boards
        expected = [
            [board, game] for board in range(first, first + config.boards) for game in range(config.rollouts)
        ]
        if row["games"] != expected:
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
    if not p < 1e-3:
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
    parser.add_argument("--seed", type=int, default=0, help="of the kills, and of the run")
    options = parser.parse_args(own)
    if options.out.exists() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} holds a run already")
    flags = ["--out", str(options.out), "--seed", str(options.seed), "--quiet", *flags]
    config = parse(flags)
    model = build(config)
    with contextlib.ExitStack() as stack:
        url = options.server
        if url == "vllm":
            server = stack.enter_context(
                start_vllm(model, ["--max-num-seqs", "32"], log=config.out / "vllm.log")
            )
            url = server.base_url
        start = time.monotonic()
        killed = drive(config, [*flags, "--server", url], options.kills, options.seed)
    print(json.dumps({**check(config, killed, options.kills), "seconds": round(time.monotonic() - start)}))


if __name__ == "__main__":
    main()
