"""A whole turn of a rollout worker: turns a second a core, against a vLLM server with default settings.

    python benchmarks/bench_turn.py [MODEL_DIR] [--rounds 3] [--venv DIR] [--quick] [--json FILE]

One worker process has 64 rollouts in flight. Each has 16 turns, with a new picture of 512² (a JPEG, as a data
URL) and a tool call in every other. The stub server, in a process of its own, shows no metrics and has no
developer routes. Contenders are described in `turn_contenders.py`. verifiers runs in the virtual environment
that `--venv` or `MMRENDER_VERIFIERS_ENV` names, made by `pip install verifiers==0.4.0 renderers==0.1.12`, and
is left out without it.

Processor time is that of the worker process with all its threads, from the messages of the environment to the
record that a trainer gets. Rounds of the contenders take turns. The first round of each has what is made at
first use, and is given apart. MB are what the server was sent in a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

from measure import machine, shown_ms, shown_ratio, table  # noqa: E402
from turn_cases import ROLLOUTS  # noqa: E402
from turn_parts import REST  # noqa: E402

from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402

HERE = Path(__file__).resolve().parent
SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
NAMES = ("mmrender", "verifiers", "plain")
"""Contenders. `parts` is mmrender once more, timed by part."""
PACKAGES = ("aiohttp", "msgspec", "openai", "transformers")


class Program:
    """A process that answers lines with lines."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """Return the next line that it prints.

        Raises:
            RuntimeError: It ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with {self._process.wait(60)}")
        return line

    def say(self, text: str) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it by closing its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def taken(url: str) -> dict[str, Any]:
    """Return the requests and bytes of each route since the last time."""
    with urllib.request.urlopen(f"{url}/taken", timeout=60) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def measure(
    names: list[str], directory: str, python: Path | None, rollouts: int, rounds: int
) -> dict[str, Any]:
    """Return the rounds of each contender, the first apart."""
    found: dict[str, Any] = {}
    stub = Program(sys.executable, str(HERE / "turn_stub.py"), directory)
    workers: dict[str, Program] = {}
    try:
        url = f"http://127.0.0.1:{int(stub.line())}"
        for name in names:
            interpreter = str(python) if name == "verifiers" and python is not None else sys.executable
            script = str(HERE / "turn_contenders.py")
            workers[name] = Program(interpreter, script, name, directory, url, str(rollouts))
        for _ in range(rounds + 1):
            for name, worker in list(workers.items()):
                taken(url)
                try:
                    worker.say("go")
                    record = json.loads(worker.line())
                except (RuntimeError, BrokenPipeError) as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    del workers[name]
                    found.pop(name, None)
                    continue
                routes = taken(url)
                record["requests"] = sum(count for count, _ in routes.values())
                record["sent_bytes"] = sum(size for _, size in routes.values())
                found.setdefault(name, []).append(record)
    finally:
        for worker in workers.values():
            worker.close()
        stub.close()
    return {name: summary(records) for name, records in found.items()}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first round, and medians of the others."""
    first, *others = ({**each, "turn_s": each["processor_s"] / each["turns"]} for each in records)
    parts = [each.pop("parts", {}) for each in (first, *others)][1:]
    medians: dict[str, Any] = {key: statistics.median(each[key] for each in others) for key in first}
    if parts[0]:
        turns = first["turns"]
        medians["parts"] = {
            name: statistics.median(each[name] for each in parts) / turns for name in parts[0]
        }
    return {**medians, "first_turn_s": first["turn_s"]}


def shown(found: dict[str, Any]) -> str:
    """Lay out the table."""
    ours = found["mmrender"]["turn_s"] if "mmrender" in found else None
    rows = [
        [
            name,
            f"{1 / row['turn_s']:.0f}",
            shown_ms(row["turn_s"]),
            shown_ratio(row["turn_s"], ours),
            shown_ms(row["first_turn_s"]),
            f"{row['turns'] / row['seconds']:.0f}",
            f"{row['requests'] / row['turns']:.2f}",
            f"{row['sent_bytes'] / 1e6:.0f}",
        ]
        for name, row in found.items()
        if name != "parts"
    ]
    headings = ["whole turn", "turns a second a core", "processor ms a turn", "ours is faster"]
    return table([*headings, "first round, ms", "turns a second", "requests a turn", "MB sent"], rows)


def shown_parts(row: dict[str, Any]) -> str:
    """Lay out the processor time of a turn by part."""
    parts = row["parts"]
    rows = [*parts.items(), (REST, row["turn_s"] - sum(parts.values()))]
    return table(["processor ms of a turn", "ms"], [[name, f"{1e3 * value:.2f}"] for name, value in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="model directory; default: the shared one, or a tiny one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    known = os.environ.get("MMRENDER_VERIFIERS_ENV")
    parser.add_argument(
        "--venv", type=Path, default=known, help="virtual environment with verifiers and renderers"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--quick", action="store_true", help="one round of 16 rollouts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    python = None if options.venv is None else options.venv / "bin" / "python"
    names = [name for name in options.only if name != "verifiers" or python is not None]
    names += ["parts"] if "mmrender" in names else []
    rounds, rollouts = (1, 16) if options.quick else (options.rounds, options.rollouts)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(SHARED_MODEL)
        if not Path(model).is_dir():
            model = str(Path(folder) / "tiny")
            build_tiny_model(Path(model), weights=False)
        found = measure(names, model, python, rollouts, rounds)
    print(shown(found))
    if "parts" in found:
        print(f"\n{shown_parts(found['parts'])}")
    if options.json:
        record = {"machine": machine(PACKAGES), "rollouts": rollouts, "rounds": rounds, "contenders": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
