"""Run the benchmarks and print one table of their figures.

    python benchmarks/run.py [--quick] [--parts NAME ...] [--from FILE] [--json FILE]

Each part is a benchmark of its own, in a process of its own, whose contenders take turns. A row is a time of
ours in milliseconds, with those of the reference, the peers and the physical limit of the same run, what was
asked, and what was reached. `--json` keeps the figures and all that the parts measured; `--from` takes the
parts that are not run again from such a file. Exits with 1 where a part fails.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import NATIVE, OURS, REFERENCE, RENDERERS, Figure, figures
from measure import machine, shown_ms, shown_ratio, table

HERE = Path(__file__).resolve().parent
LIBRARIES = ("numpy", "pillow", "torch", "torchvision", "transformers", "tokenizers", "fastokens")
PACKAGES = (*LIBRARIES, RENDERERS, NATIVE)


@dataclass(frozen=True)
class Part:
    """One benchmark, with its arguments for a whole run and for a quick one."""

    script: str
    whole: str = ""
    quick: str = ""

    def arguments(self, *, quick: bool) -> list[str]:
        return shlex.split(self.quick if quick else self.whole)


PARTS = {
    "turn": Part("bench_turn.py", "--rounds 2", "--quick"),
    "sft": Part("bench_sft.py", "", "--quick --rows 4"),
    "text": Part("bench_text.py", "--turns 1 4 16 64 250 1000 --rounds 7", "--turns 16 --rounds 9"),
    "images": Part(
        "bench_media.py",
        "--sizes 1024x1024 1920x1080 3840x2160 --rounds 9",
        "--sizes 1024x1024 1920x1080 --counts 1 2 --rounds 5",
    ),
    "render": Part("bench_render.py", "", "--backend pil --cases 1 2 4 --rounds 5"),
    "bridge": Part("bench_bridge.py", "", "--kinds 'tool text' --before 30 --rounds 7"),
    "template": Part("bench_template.py", "--runs 200", "--runs 30"),
    "trajectory": Part("bench_trajectory.py", "", "--rounds 1"),
    "rollout": Part("bench_rollout.py", "--rounds 3", "--quick"),
    "client": Part("bench_client.py", "--rounds 2", "--quick"),
    "gateway": Part("bench_gateway.py", "", "--quick"),
    "codec": Part("bench_codec.py", "", "--repeats 3"),
    "open": Part("bench_open.py", "", "--rounds 3"),
}


def run_part(name: str, *, quick: bool, folder: Path) -> Any | None:
    """Return what a part measured, or None where it failed; its output goes to standard error."""
    part, out = PARTS[name], folder / f"{name}.json"
    command = [sys.executable, str(HERE / part.script), *part.arguments(quick=quick), "--json", str(out)]
    print(f"== {name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr, check=False)
    return json.loads(out.read_text("utf-8")) if done.returncode == 0 and out.exists() else None


def shown(found: Sequence[Figure]) -> str:
    """The table, times in milliseconds."""
    rows = []
    for figure in found:
        named = (OURS, REFERENCE, RENDERERS, NATIVE)
        others = [f"{name} {shown_ms(value)}" for name, value in figure.seconds.items() if name not in named]
        limit = figure.limit
        rows.append(
            [
                figure.name,
                *[shown_ms(figure.of(name)) for name in named],
                ", ".join(others) or "-",
                "-" if limit is None else f"{shown_ms(limit[1])} ({limit[0]})",
                "; ".join(map(verdict, figure.verdicts())) or "-",
            ]
        )
    return table(["milliseconds", OURS, REFERENCE, RENDERERS, NATIVE, "others", "limit", "asked"], rows)


def verdict(entry: dict[str, Any]) -> str:
    """What was asked, and what was reached."""
    word = {True: "", False: " SHORT", None: " not measured"}[entry["met"]]
    if entry["other"] == "s":
        return f"at most {shown_ms(entry['asked'])}: {shown_ms(entry['reached'])}{word}"
    reached = shown_ratio(entry["reached"], 1.0)
    return f"{entry['sense']} {entry['other']} {entry['asked']:g}x: {reached}{word}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Print one table of all figures.")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: three minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--from", dest="earlier", type=Path, help="JSON of an earlier run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = json.loads(options.earlier.read_text("utf-8"))["parts"] if options.earlier else {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts:
            start = time.monotonic()
            found = run_part(name, quick=options.quick, folder=Path(folder))
            seconds[name] = round(time.monotonic() - start, 1)
            parts.pop(name, None)
            if found is not None:
                parts[name] = found
    rows = figures({name: parts[name] for name in PARTS if name in parts})
    # The average over five minutes, so that what ran before does not count as run beside it.
    here = machine(PACKAGES) | {"quick": options.quick, "load": round(os.getloadavg()[1], 1)}
    print("\n".join(f"{key}: {value}" for key, value in here.items()) + "\n")
    print(shown(rows))
    print("\nseconds: " + ", ".join(f"{name} {value:g}" for name, value in seconds.items()))
    if options.json:
        kept = [{**asdict(row), "verdicts": list(row.verdicts())} for row in rows]
        document = {"machine": here, "figures": kept, "parts": parts}
        options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    failed = [name for name in options.parts if name not in parts]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
