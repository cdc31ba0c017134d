"""Write docs/scale.md: what a fleet moves on each link, from what one rollout was measured to cost.

    python tools/scale_page.py [--check]

`benchmarks/bench_scale.py --json docs/scale.json`, `benchmarks/bench_receivers.py --json
docs/scale-receivers.json`, `benchmarks/bench_reading.py --json docs/scale-reading.json`,
`benchmarks/bench_engines.py --part hung --json docs/scale-engines.json` and `tests/fleet_faults.py --json
docs/scale-fleet.json` measure. The text between the marks
of the page is replaced; `--check` writes nothing and exits with 1 if the page is not what it would write.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from speed_page import with_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, FIGURES, READING = DOCS / "scale.md", DOCS / "scale.json", DOCS / "scale-reading.json"
RECEIVERS = DOCS / "scale-receivers.json"
BEGIN = "<!-- written by tools/scale_page.py -->\n"
BEGIN_RECEIVERS = "<!-- receivers, written by tools/scale_page.py -->\n"
BEGIN_READING = "<!-- reading, written by tools/scale_page.py -->\n"
HUNG = DOCS / "scale-engines.json"
BEGIN_ENGINES = "<!-- engines, written by tools/scale_page.py -->\n"
KILLED = DOCS / "scale-fleet.json"
BEGIN_FLEET = "<!-- fleet, written by tools/scale_page.py -->\n"

ENVIRONMENTS, TURN_SECONDS = 1000, 10.0
WORKERS, ENGINES, ENGINES_A_HOST = 8, 64, 8
CORES = 64
"""Of each worker host; the receiver is one process."""
WORKER_LINK, ENGINE_LINK, TRAINER_LINK = 25e9 / 8, 100e9 / 8, 100e9 / 8
"""Bytes a second of the network of one host."""
ACCELERATORS, ACCELERATOR_LINK = 8, 25e9
"""Of the trainer's host, and bytes a second to each."""


class Load(NamedTuple):
    """What one turn of all environments puts on one link, and its limit a second, in bytes or cores."""

    link: str
    mode: str
    amount: float
    limit: float
    is_time: bool = False

    @property
    def shortest(self) -> float:
        """Seconds that a turn must last for the link to keep up."""
        return self.amount / self.limit

    @property
    def row(self) -> str:
        """Cells: link, mode, rate at the assumed turn, share of the limit, shortest turn."""
        rate = self.amount / TURN_SECONDS
        shown = f"{rate:,.1f} cores" if self.is_time else f"{rate / 1e9:,.2f} GB/s"
        limit = f"{self.limit:,.0f} cores" if self.is_time else f"{self.limit / 1e9:,.1f} GB/s"
        share, shortest = f"{rate / self.limit:.1%}", f"{self.shortest:.2g} s"
        return f"| {self.link} | {self.mode} | {shown} | {limit} | {share} | {shortest} |"


def loads(figures: dict[str, Any]) -> Iterator[Load]:
    """Yield the loads of every link, whole fleet, in each mode."""
    turns = figures["turns"]
    trajectory = figures["trajectory"]
    shipped = ENVIRONMENTS * trajectory["bytes"] / turns
    for mode, found in figures["requests"].items():
        sent = ENVIRONMENTS * found["bytes"] / turns
        yield Load("workers, out", f"`{mode}`", sent + shipped, WORKERS * WORKER_LINK)
        yield Load("engines, in", f"`{mode}`", sent, ENGINES / ENGINES_A_HOST * ENGINE_LINK)
        seconds = ENVIRONMENTS * (found["seconds"] / turns + figures["image_seconds"])
        yield Load("workers' processors", f"`{mode}`", seconds, WORKERS * CORES, is_time=True)
    yield Load("trainer, in", "trajectories", shipped, TRAINER_LINK)
    one = ENVIRONMENTS * trajectory["seconds"] / turns
    yield Load("one receiver process", "trajectories", one, 1, is_time=True)
    limit = ACCELERATORS * ACCELERATOR_LINK
    yield Load("trainer to accelerators", "levels", shipped, limit)
    floats = ENVIRONMENTS * figures["float32_bytes"] / turns
    yield Load("trainer to accelerators", "float32", floats, limit)


def written(figures: dict[str, Any]) -> str:
    """Tables and the links that saturate first."""
    found = sorted(loads(figures), key=lambda load: -load.shortest)
    common = {load.mode for load in found} - {f"`{mode}`" for mode in figures["requests"]}
    first = []
    for mode in figures["requests"]:
        worst, second = [load for load in found if load.mode in {f"`{mode}`", *common}][:2]
        first.append(
            f"- `{mode}`: {worst.link}, at turns shorter than {worst.shortest:.2g} s; then {second.link}, at "
            f"{second.shortest:.2g} s."
        )
    machine = figures["machine"]

    def milliseconds(rollout: float) -> float:
        return 1e3 * rollout / float(figures["turns"])

    lines = [
        f"One rollout, measured on {machine['cpu']}, Python {machine['python']}: {figures['turns']} turns, "
        f"{figures['pictures']}.\n",
        "| | MB | processor, ms a turn |",
        "|---|---|---|",
        *[
            f"| requests, `{mode}` | {cost['bytes'] / 1e6:,.0f} | {milliseconds(cost['seconds']):.1f} |"
            for mode, cost in figures["requests"].items()
        ],
        f"| a new image rendered, in every mode | - | {1e3 * figures['image_seconds']:.1f} |",
        f"| trajectory over TCP, both ends | {figures['trajectory']['bytes'] / 1e6:,.0f} | "
        f"{milliseconds(figures['trajectory']['seconds']):.1f} |",
        f"| its images as float32 | {figures['float32_bytes'] / 1e6:,.0f} | - |",
        f"\nThe fleet, at {TURN_SECONDS:g} s a turn, the most loaded first:\n",
        "| link | mode | load | limit | share | shortest turn |",
        "|---|---|---|---|---|---|",
        *[load.row for load in found],
        "\nWhat saturates first:\n",
        *first,
        "",
    ]
    return "\n".join(lines)


def reading(figures: dict[str, Any]) -> str:
    """Tables of the bytes that ranks read, and of the times of a first batch and a plan."""
    machine = figures["machine"]
    amounts = {
        "samples, records, file": f"{figures['samples']:,}, {figures['records']:,}, "
        f"{figures['file_bytes'] / 1e9:.2f} GB",
        "index": f"{figures['index_bytes_a_sample']:.0f} bytes a sample",
        "of the time of an append, for the index": f"{figures['indexing_share']:.0%}",
        "asked for by a rank, over its share of the file": f"{figures['read_over_share']:.3f}",
        "read from the disk for it, over its share": f"{figures['disk_over_share']:.3f}",
    }
    times = {
        "first batch of a rank": ("first_batch_seconds", "first_batch_processor_seconds"),
        "the same without an index": (
            "first_batch_seconds_without_index",
            "first_batch_processor_seconds_without_index",
        ),
        "descriptors of all samples": ("describe_seconds", "describe_processor_seconds"),
        f"plan of {figures['planned_samples']:,} samples over {figures['planned_ranks']} ranks": (
            "plan_seconds",
            "plan_processor_seconds",
        ),
    }
    return "\n".join(
        [
            f"The slowest of {figures['measured']} of {figures['ranks']} ranks, on {machine['cpu']}, "
            f"{machine['cores']} cores with a load of {figures['load']:.0f}, Python {machine['python']}:\n",
            "| | |",
            "|---|---|",
            *[f"| {name} | {value} |" for name, value in amounts.items()],
            "",
            "| | wall, s | processor, s |",
            "|---|--:|--:|",
            *[
                f"| {name} | {figures[wall]:.2f} | {figures[used]:.2f} |"
                for name, (wall, used) in times.items()
            ],
            "",
        ]
    )


def receivers(figures: dict[str, Any]) -> str:
    """Tables of a receiver's memory over its senders, and of two receivers beside one."""
    one, two = figures["one"], figures["two"]
    rows = {
        "GB/s, with senders on the same cores": "gb_a_second",
        "GB a second of the receivers' processors": "capacity",
        "processor, s a GB: receivers": "receivers_processor_seconds_a_gb",
        "processor, s a GB: senders": "senders_processor_seconds_a_gb",
    }
    machine = figures["machine"]
    return "\n".join(
        [
            f"On {machine['cpu']}, {machine['cores']} cores with a load of {figures['load']:.0f}, "
            f"Python {machine['python']}:\n",
            "| senders | MB shipped | receiver's memory at its peak, MB | at the end, MB |",
            "|--:|--:|--:|--:|",
            *[
                f"| {each['senders']} | {each['bytes'] / 1e6:,.0f} | {each['peak'] / 1e6:,.0f} | "
                f"{each['after'] / 1e6:,.0f} |"
                for each in figures["memory"]
            ],
            "",
            "| | one receiver | two | ratio |",
            "|---|--:|--:|--:|",
            *[
                f"| {name} | {one[key]:.2f} | {two[key]:.2f} | {two[key] / one[key]:.2f} |"
                for name, key in rows.items()
            ],
            "",
        ]
    )


def engines(figures: dict[str, Any]) -> str:
    """Tables of the latencies beside a hung server, and of the times of a step without it."""
    machine, hung = figures["machine"], figures["hung"]
    count, service, deadline = hung["servers"], hung["service_s"], hung["deadline_s"]
    cancel, answers = hung["cancel_s"], hung["answers_after_cancel_s"]
    steps = {"not yet known to hang": hung["first_step_s"], "known to hang": hung["later_step_s"]}
    return "\n".join(
        [
            f"{count} servers that answer after {1e3 * service:.0f} ms, one request in flight at each. "
            f"Clients and servers share {machine['cores']} cores of {machine['cpu']} with a load of "
            f"{figures['load']:.0f}, Python {machine['python']}.\n",
            f"| requests to {count - 1} of them | median, ms | p99, ms |",
            "|---|--:|--:|",
            *[
                f"| {name} | {1e3 * each['p50']:.0f} | {1e3 * each['p99']:.0f} |"
                for name, each in hung["latency_s"].items()
            ],
            "",
            f"| the hung one, deadline {deadline:g} s | pause, s | update, s | resume, s |",
            "|---|--:|--:|--:|",
            *[
                f"| {name} | {step['pause']:.2f} | {step['update']:.2f} | {step['resume']:.2f} |"
                for name, step in steps.items()
            ],
            f"\nA cancelled pause returns after {1e3 * cancel:.0f} ms. {count - 1} requests to the others, "
            f"which are resumed first, take {1e3 * answers:.0f} ms then.",
            "",
        ]
    )


def killed_fleet(figures: dict[str, Any]) -> str:
    """Tables of a fleet that was killed: what was trained on, the longest waits, and resident memory."""
    machine, sizes, left = figures["machine"], figures["sizes"], figures["left"]
    kills = ", ".join(f"{count} of {role}s" for role, count in sorted(figures["kills"].items()))
    behind = {int(steps): count for steps, count in figures["steps_behind"].items()}
    trained = f"{figures['steps']}, {figures['games']:,}, {figures['turns']:,}"
    waits = ", ".join(f"{figures['slowest_s'][name]:.1f}" for name in ("pause", "load", "resume"))
    control, attempt, turn = sizes["control_s"], sizes["attempt_s"], figures["slowest_turn_s"]
    played, asked = left.get("played again", 0), left.get("asked again", 0)
    older = sum(count for steps, count in behind.items() if steps > 1)
    counts = {
        "steps, games, turns trained on, each once": trained,
        "answers to games that were played again, since a worker died": played,
        "answers to turns that were asked again, since they came late or not at all": asked,
        "answers by the weights of the step before": f"{behind.get(1, 0) / sum(behind.values()):.0%}",
        "answers by older weights": f"{older:,}",
        f"longest pause, update, resumption, deadline {control:g} s each": f"{waits} s",
        f"longest turn, deadline {attempt:g} s at one engine": f"{turn:.1f} s",
    }
    return "\n".join(
        [
            f"{sizes['environments']:,} environments in {sizes['workers']} workers, {sizes['engines']} stub "
            f"engines of which {sizes['hung']} hang, {sizes['mortal']} die and {sizes['slow']} are slow, "
            f"{sizes['receivers']} receivers and {sizes['ranks']} ranks, for {figures['seconds'] / 60:.0f} "
            f"minutes. Processes killed: {kills}. On {machine['cpu']}, {machine['cores']} cores with a load "
            f"of {figures['load']:.0f}, Python {machine['python']}:\n",
            "| | |",
            "|---|--:|",
            *[f"| {name} | {value} |" for name, value in counts.items()],
            "",
            "| resident memory of the largest process, MB | after a quarter | half | end |",
            "|---|--:|--:|--:|",
            *[f"| {name} | {' | '.join(map(str, row))} |" for name, row in figures["memory_mb"].items()],
            "",
        ]
    )


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = PAGE.read_text("utf-8")
    expected = with_text(page, written(json.loads(FIGURES.read_text("utf-8"))), BEGIN)
    expected = with_text(expected, reading(json.loads(READING.read_text("utf-8"))), BEGIN_READING)
    expected = with_text(expected, receivers(json.loads(RECEIVERS.read_text("utf-8"))), BEGIN_RECEIVERS)
    expected = with_text(expected, engines(json.loads(HUNG.read_text("utf-8"))), BEGIN_ENGINES)
    expected = with_text(expected, killed_fleet(json.loads(KILLED.read_text("utf-8"))), BEGIN_FLEET)
    if not options.check:
        PAGE.write_text(expected, "utf-8")
        return 0
    if page != expected:
        print("docs/scale.md is not what tools/scale_page.py writes", file=sys.stderr)
    return int(page != expected)


if __name__ == "__main__":
    sys.exit(main())
