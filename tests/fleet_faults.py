"""Train with a fleet of workers, engines, receivers and ranks, kill its processes, and see that nothing is lost.

    python tests/fleet_faults.py [--minutes 10 | --steps 3] [--kills 20] [--seed 0] [--ray] [--workers 8] ...

Workers play games of two turns, each with a picture, against stub engines over HTTP. Receivers write the games to files.
Rank 0 plans each step, all ranks read and batch their parts, and rank 0 updates the weights of all engines while the
games of the next step are played. Meanwhile processes are killed, and some engines hang. Checked at the end, by the
journals of engines and ranks:

- each game of each step was trained on exactly once, whoever died;
- each token that was trained on is one that an engine answered to exactly that prompt, each answer used once;
- each answer that was not trained on was asked for again, since its engine or its worker died or hung before the
  worker had it whole, or its game was played again by the worker's successor;
- no turn and no call to all engines took longer than its deadlines, and `--slack` seconds for a loaded machine.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from fleet_roles import SAYS, Sizes, key_of, lines_of, write
from mmrender.integrations.fleet import LocalFleet
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.testing.tiny_model import build_tiny_model

KINDS = ("worker", "receiver", "trainer", "engine")
STALLED_S = 1200.0
"""Seconds of a step after which a run has stalled. The first one contains the start of all processes."""
MARKS = ("quarter", "half", "end")


def memory_of(pids: dict[Any, int]) -> dict[str, float]:
    """Resident memory by role, of its largest process, in MB."""
    found: dict[str, float] = {}
    for (role, number), pid in pids.items():
        name = "engines" if role == "engine" and number == 0 else role
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[name] = max(found.get(name, 0.0), pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return {name: size for name, size in found.items() if size}  # a process that has ended has none


class Drive:
    """A run of a fleet, its kills and its hung engines."""

    def __init__(
        self,
        sizes: Sizes,
        fleet: Any,
        options: argparse.Namespace,
        lose_machine: Callable[[], None] | None = None,
    ) -> None:
        self.sizes, self.fleet, self.options, self._lose_machine = sizes, fleet, options, lose_machine
        self.dice = random.Random(options.seed)
        roles = [role for role in KINDS if role != "engine" or sizes.mortal]
        self.roles = [roles[number % len(roles)] for number in range(options.kills)]
        self.dice.shuffle(self.roles)
        if options.kills and options.ray > 1:
            self.roles[-1] = "machine"
        self.kills: list[tuple[str, int]] = []
        self.memory: dict[str, dict[str, float]] = {"end": {}}
        self.begun = self.played = time.monotonic()

    def progress(self) -> float:
        """The share of the run that is over."""
        if self.options.steps:
            return self.steps() / self.options.steps
        if not self.steps():
            self.played = time.monotonic()
        return (time.monotonic() - self.played) / (60 * self.options.minutes)

    def steps(self) -> int:
        """Steps that are done."""
        path = self.sizes.file("updates.jsonl")
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def run(self) -> None:
        """Run to the end, with all kills."""
        hung = range(self.sizes.engines - self.sizes.mortal)[-self.sizes.hung :] if self.sizes.hung else ()
        events = [((number + 0.5) / (len(self.roles) + 0.5), role) for number, role in enumerate(self.roles)]
        steps, since = 0, time.monotonic()
        while self.fleet.poll(0.2):
            over = self.progress()
            if self.steps() > steps:
                steps, since = self.steps(), time.monotonic()
            if time.monotonic() > since + STALLED_S:
                raise SystemExit(f"step {steps} has not ended in {STALLED_S:g} s")
            if over >= 0.2:
                for number in hung if over < 0.7 else ():
                    self.sizes.file(f"hung-{number}").touch()
                for number in hung if over >= 0.7 else ():
                    self.sizes.file(f"hung-{number}").unlink(missing_ok=True)
            now = memory_of(self.fleet.pids())
            for mark, share in zip(MARKS, (0.25, 0.5), strict=False):
                if over >= share:
                    self.memory.setdefault(mark, now)
            self.memory["end"] |= now  # some kinds end before others
            while events and over >= events[0][0]:
                self.kill(events.pop(0)[1])
            if over >= 1.0 and not events:
                self.sizes.file("stop").touch()

    def kill(self, role: str) -> None:
        """Kill a process of a role, an engine that has a process of its own, or a whole node of Ray."""
        if role == "machine" and self._lose_machine is not None:
            self._lose_machine()
            self.kills.append((role, 0))
            return
        pids = [
            (name, pid)
            for name, pid in self.fleet.pids().items()
            if name[0] == role and name != ("engine", 0)
        ]
        if not pids:
            return
        name, pid = self.dice.choice(sorted(pids))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills.append((role, name[1]))
            print(
                f"{time.monotonic() - self.begun:.0f} s, step {self.steps()}: killed {role} {name[1]}",
                flush=True,
            )


def check(sizes: Sizes, slack: float) -> dict[str, Any]:
    """Check the journals of a run; return its figures.

    Raises:
        SystemExit: A law does not hold.
    """
    problems: list[str] = []
    answers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(sizes.engines):
        for line in lines_of(sizes.file(f"engine-{number}.jsonl")):
            answers[line["key"]].append(line)
    games: Counter[str] = Counter()
    winners: dict[str, str] = {}
    turns, waited, lag = 0, 0.0, Counter[int]()
    used: set[int] = set()
    last = -1
    for rank in range(sizes.ranks):
        for line in lines_of(sizes.file(f"trained-{rank}.jsonl")):
            last = max(last, line["step"])
            for game in line["games"]:
                games[game["group"]] += 1
                winners[game["group"]] = game["says"]
                waited = max(waited, game["waited"])
                if not game["group"].startswith(f"{line['step']}/") or len(game["turns"]) != sizes.turns:
                    problems.append(
                        f"step {line['step']} trained on {game['group']}, {len(game['turns'])} turns"
                    )
                for prompt, ids in game["turns"]:
                    turns += 1
                    pieces = pieces_of(answers, prompt, ids)
                    if pieces is None or used.intersection(map(id, pieces)):
                        problems.append(
                            f"{game['says']}: {ids} is no answer of an engine, or was used before"
                        )
                        continue
                    used.update(map(id, pieces))
                    lag.update(line["step"] - int(piece["version"][1:]) for piece in pieces)
    expected = {f"{step}/{game}" for step in range(last + 1) for game in range(sizes.environments)}
    problems += [f"game {game} was trained on {games[game]} times" for game in expected if games[game] != 1]
    problems += [f"game {game} is of no step" for game in games.keys() - expected]
    left = Counter(left_answers(sizes, answers, used, winners, problems))
    updates = lines_of(sizes.file("updates.jsonl"))
    slowest = {name: max(each[name] for each in updates) for name in ("pause", "load", "resume")}
    problems += [
        f"{name} took {seconds:.1f} s, with a deadline of {sizes.control_s:g} s"
        for name, seconds in slowest.items()
        if seconds > sizes.control_s + slack
    ]
    longest = sizes.attempt_s + 3 * sizes.control_s
    if waited > longest + slack:
        problems.append(f"a turn took {waited:.1f} s, with deadlines of {longest:g} s")
    if problems:
        raise SystemExit("\n".join([*problems[:20], f"{len(problems)} problems"]))
    outcomes: Counter[str] = Counter()
    for each in updates:
        for name in slowest:
            outcomes.update(each[f"{name}_outcomes"])
    return {
        "steps": last + 1,
        "games": len(games),
        "turns": turns,
        "left": dict(left),
        "steps_behind": dict(sorted(lag.items())),
        "slowest_turn_s": round(waited, 2),
        "slowest_s": {name: round(seconds, 2) for name, seconds in slowest.items()},
        "outcomes": dict(outcomes),
    }


def pieces_of(answers: Any, prompt: list[int], ids: list[int]) -> list[dict[str, Any]] | None:
    """The answers that a completion consists of: several if pauses have cut it."""
    pieces: list[dict[str, Any]] = []
    while ids:
        matching = [each for each in answers[key_of(prompt)] if each["ids"] == ids[: len(each["ids"])]]
        if len(matching) != 1:
            return None
        pieces += matching
        count = len(matching[0]["ids"])
        prompt, ids = prompt + ids[:count], ids[count:]
    return pieces


def left_answers(
    sizes: Sizes, answers: Any, used: set[int], winners: dict[str, str], problems: list[str]
) -> Iterator[str]:
    """Yield why each answer was not trained on."""
    tokenizer = Tokenizer.load(find_model(sizes.model))
    trained_turns = {f"{says} turn {turn}" for says in winners.values() for turn in range(sizes.turns)}
    for answer in (each for same in answers.values() for each in same if id(each) not in used):
        text = tokenizer.decode(answer["tail"])
        found = [*SAYS.finditer(text)]
        if not found:
            problems.append(f"an answer is of no game: {text!r}")
            continue
        step, game, _, _ = found[-1].groups()
        if found[-1][0] in trained_turns:
            yield "asked again"  # the same turn has another answer, which was trained on
        elif f"{step}/{game}" in winners:
            yield "played again"
        else:
            problems.append(f"the answer to {found[-1][0]} was lost")


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[Callable[[], None]]:
    """Join a cluster of nodes of this machine while the block runs; return a function that loses one."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 64, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**node) for _ in range(count - 1)]
        ray.init(address=cluster.address, log_to_driver=False)
        yield lambda: cluster.remove_node(nodes.pop(), allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(arguments: list[str] | None = None) -> None:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps, in place of minutes")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack", type=float, default=60.0)
    nodes = "run on so many Ray nodes of this machine, of which the last kill takes one"
    parser.add_argument("--ray", type=int, default=0, metavar="NODES", help=nodes)
    parser.add_argument("--out", type=Path, help="keep the files of the run in this folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    for size in fields(Sizes):
        if size.name not in ("folder", "model"):
            kind = type(size.default)
            parser.add_argument("--" + size.name.replace("_", "-"), type=kind, default=size.default)
    options = parser.parse_args(arguments)
    folder = options.out or Path(tempfile.mkdtemp(prefix="mmrender-fleet-"))
    try:
        chosen = {size.name: getattr(options, size.name) for size in fields(Sizes)[2:]}
        sizes = Sizes(folder / "run", folder / "model", **chosen)
        sizes.folder.mkdir(parents=True)
        build_tiny_model(sizes.model, weights=False, patch_size=2)
        tokenizer = Tokenizer.load(find_model(sizes.model))
        digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
        write(sizes.file("tokens.json"), [digits, tokenizer.token_id("<|im_end|>")])
        with contextlib.ExitStack() as stack:
            if options.ray:
                from mmrender.integrations.ray_fleet import RayFleet

                lose_machine = stack.enter_context(ray_nodes(options.ray))
                fleet: Any = stack.enter_context(RayFleet(sizes.fleet()))
            else:
                lose_machine = None
                fleet = stack.enter_context(LocalFleet(sizes.fleet()))
            drive = Drive(sizes, fleet, options, lose_machine)
            drive.run()
            seconds = time.monotonic() - drive.begun
        figures = check(sizes, options.slack)
        if len(drive.kills) < options.kills:
            raise SystemExit(f"only {len(drive.kills)} kills of {options.kills}")
    finally:
        if options.out is None:
            shutil.rmtree(folder, ignore_errors=True)
    roles = {name for one in drive.memory.values() for name in one}
    memory = {role: [round(drive.memory[mark].get(role, 0)) for mark in MARKS] for role in sorted(roles)}
    kills = dict(Counter(role for role, _ in drive.kills))
    figures |= {"kills": kills, "memory_mb": memory, "seconds": round(seconds)}
    print(json.dumps(figures))
    if options.json is not None:
        sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
        from measure import machine

        run = {"sizes": chosen, "machine": machine([]), "load": os.getloadavg()[2]}
        options.json.write_text(json.dumps({**run, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
