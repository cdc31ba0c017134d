"""Measure `import mmrender` in fresh interpreters, and refuse optional dependencies that it pulls in.

Prints medians over several runs and the slowest modules by their own time. Exits 1 above the limit, or when
a package that belongs to an extra was imported. The limit holds for the least processor time: on a quiet
machine that is what a clock on the wall shows, and on a busy one it depends least on the neighbours.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import NamedTuple

FORBIDDEN = ("torch", "torchvision", "transformers", "aiohttp", "stamina", "typer", "rich", "vllm", "ray")
PROBE = """
import json, sys, time
start = time.process_time()
import mmrender
spent = 1000 * (time.process_time() - start)
print(json.dumps([spent, sorted(name for name in sys.modules if "." not in name)]))
"""


class Run(NamedTuple):
    """One import: processor and wall time, own time of each module (all in ms), and top-level modules."""

    processor: float
    wall: float
    own: list[tuple[float, str]]
    loaded: list[str]


def importtime(python: str) -> Run:
    """Import once, in a fresh interpreter."""
    done = subprocess.run(
        [python, "-X", "importtime", "-c", PROBE], capture_output=True, text=True, check=True
    )
    own: list[tuple[float, str]] = []
    total = 0.0
    for line in done.stderr.splitlines():
        self_us, separator, rest = line.removeprefix("import time:").partition("|")
        if not separator or not self_us.strip().isdigit():
            continue
        cumulative_us, _, module = rest.partition("|")
        own.append((int(self_us) / 1000, module.strip()))
        if module.strip() == "mmrender":
            total = int(cumulative_us) / 1000
    processor, loaded = json.loads(done.stdout)
    return Run(processor, total, own, loaded)


def main() -> int:
    """Run the measurement and report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter to measure")
    parser.add_argument("--limit-ms", type=float, default=250.0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--slowest", type=int, default=8, help="how many modules to list")
    options = parser.parse_args()

    importtime(options.python)  # compiles bytecode and fills the page cache
    runs = [importtime(options.python) for _ in range(options.runs)]
    typical = min(runs, key=lambda run: run.processor)
    least = typical.processor
    wall = statistics.median(run.wall for run in runs)
    limit = f"limit {options.limit_ms:.0f} ms"
    shown = f"{least:.0f} ms at best ({limit}), {wall:.0f} ms on the wall in the median"
    print(f"import mmrender: {options.runs} runs, {shown}")
    for milliseconds, module in sorted(typical.own, reverse=True)[: options.slowest]:
        print(f"  {milliseconds:7.1f} ms  {module}")

    pulled = [name for name in FORBIDDEN if name in typical.loaded]
    if pulled:
        print(f"error: import mmrender pulls in {', '.join(pulled)}, which belong to extras", file=sys.stderr)
    if least > options.limit_ms:
        print("error: the import takes too long; import what is heavy where it is used", file=sys.stderr)
    return int(bool(pulled) or least > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
