"""Measure `import mmrender` in fresh interpreters, and refuse optional dependencies that it pulls in.

Prints the median over several runs and the slowest modules by their own time. Exits 1 above the limit, or
when a package that belongs to an extra was imported.
"""

import argparse
import json
import statistics
import subprocess
import sys

FORBIDDEN = ("torch", "torchvision", "transformers", "aiohttp", "stamina", "typer", "rich", "vllm", "ray")
PROBE = (
    "import json, sys, mmrender; print(json.dumps(sorted(name for name in sys.modules if '.' not in name)))"
)


def importtime(python: str) -> tuple[float, list[tuple[float, str]], list[str]]:
    """Import once: total milliseconds, `(own milliseconds, module)` pairs, and top-level modules."""
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
    return total, own, json.loads(done.stdout)


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
    median = statistics.median(total for total, _, _ in runs)
    _, own, loaded = min(runs, key=lambda run: abs(run[0] - median))
    print(f"import mmrender: median {median:.0f} ms of {options.runs} runs (limit {options.limit_ms:.0f} ms)")
    for milliseconds, module in sorted(own, reverse=True)[: options.slowest]:
        print(f"  {milliseconds:7.1f} ms  {module}")

    pulled = [name for name in FORBIDDEN if name in loaded]
    if pulled:
        print(f"error: import mmrender pulls in {', '.join(pulled)}, which belong to extras", file=sys.stderr)
    if median > options.limit_ms:
        print("error: the import takes too long; import what is heavy where it is used", file=sys.stderr)
    return int(bool(pulled) or median > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
