"""Measure `import mmrender` in fresh interpreters, and refuse optional dependencies that it pulls in.

Two statements are timed in turn with the third-party modules that rendering needs: `import mmrender` alone,
which must stay under a limit in milliseconds, and `from mmrender import Renderer`, which brings all of it and
must stay under a multiple of what those modules take by themselves, so that a slow machine passes as well.
Times are the least processor time of the main thread: on a quiet machine that is what a clock on the wall
shows, and it depends least on neighbours and on the threads that BLAS starts.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import NamedTuple

FORBIDDEN = (
    *("torch", "torchvision", "transformers", "aiohttp", "zmq", "starlette", "uvicorn"),
    *("opentelemetry", "matplotlib", "typer", "rich", "vllm", "ray"),
)
PACKAGE = "import mmrender"
RENDERER = "from mmrender import Renderer"
BASELINE = "import numpy, PIL.Image, jinja2.sandbox, tokenizers, msgspec, blake3, xxhash, pybase64"
PROBE = """
import json, sys, time
start = time.thread_time()
{statement}
spent = 1000 * (time.thread_time() - start)
print(json.dumps([spent, sorted(name for name in sys.modules if "." not in name)]))
"""


class Run(NamedTuple):
    """One import: processor time and own time of each module in ms, and top-level modules."""

    spent: float
    own: list[tuple[float, str]]
    loaded: list[str]


def measure(python: str, statement: str) -> Run:
    """Import once, in a fresh interpreter."""
    done = subprocess.run(
        [python, "-X", "importtime", "-c", PROBE.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
        # Otherwise each run would compile all modules again, which users' runs do not.
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    )
    own: list[tuple[float, str]] = []
    for line in done.stderr.splitlines():
        self_us, _, rest = line.removeprefix("import time:").partition("|")
        if self_us.strip().isdigit():
            own.append((int(self_us) / 1000, rest.partition("|")[2].strip()))
    spent, loaded = json.loads(done.stdout)
    return Run(spent, own, loaded)


def least(python: str, runs: int) -> dict[str, Run]:
    """Return the fastest of several interleaved runs of each statement."""
    statements = (PACKAGE, RENDERER, BASELINE)
    for statement in statements:
        measure(python, statement)  # compiles bytecode and fills the page cache
    taken: dict[str, list[Run]] = {statement: [] for statement in statements}
    for _ in range(runs):
        for statement in statements:
            taken[statement].append(measure(python, statement))
    return {statement: min(of, key=lambda run: run.spent) for statement, of in taken.items()}


def main() -> int:
    """Run the measurement and report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter to measure")
    parser.add_argument("--limit-ms", type=float, default=250.0, help="for the package alone")
    parser.add_argument("--limit-ratio", type=float, default=2.5, help="for the renderer, to third parties")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slowest", type=int, default=8, help="how many modules to list")
    options = parser.parse_args()

    best = least(options.python, options.runs)
    package, renderer, baseline = (best[statement] for statement in (PACKAGE, RENDERER, BASELINE))
    ratio = renderer.spent / baseline.spent
    print(f"{PACKAGE}: {package.spent:.0f} ms at best of {options.runs} (limit {options.limit_ms:.0f})")
    times = f"{ratio:.2f} times the {baseline.spent:.0f} ms of third parties"
    print(f"{RENDERER}: {renderer.spent:.0f} ms, {times} (limit {options.limit_ratio})")
    for milliseconds, module in sorted(renderer.own, reverse=True)[: options.slowest]:
        print(f"  {milliseconds:7.1f} ms  {module}")

    pulled = [name for name in FORBIDDEN if name in renderer.loaded]
    slow = package.spent > options.limit_ms or ratio > options.limit_ratio
    if pulled:
        print(f"error: the import pulls in {', '.join(pulled)}, which belong to extras", file=sys.stderr)
    if slow:
        print("error: the import takes too long; import what is heavy where it is used", file=sys.stderr)
    return int(bool(pulled) or slow)


if __name__ == "__main__":
    sys.exit(main())
