"""Plant faults in rollouts, audit them, and print what the audit said beside the truth.

python tests/audit_plantings.py third                        # both modes of each planting of a table
python tests/audit_plantings.py fourth --only flat --mode one --reports
python tests/audit_plantings.py fourth --tolerance 1e-5 1e-3 # wrong names by tolerance
python tests/audit_plantings.py third --check                # how far each fault moves the recorded numbers
python tests/audit_plantings.py healthy                      # 300 rollouts without a fault
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch

from audit_cases import decode
from mmrender.audit import TrainerModel, audit
from mmrender.trajectory.sample import TrainingSample
from planting import (
    COUNT,
    FAULTY,
    HEALTHY,
    SMALL,
    Outcome,
    Planting,
    audited,
    judge,
    kept,
    noise,
    planted,
    planted_departures,
    roll,
    world_of,
)

KINDS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
"""Dtypes of sampler and trainer."""
HEALTHY_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "internvl")


def unharmed(family: str, kind: str, start: int, folder: Path) -> tuple[Any, list[TrainingSample], Any]:
    """The trainer's model, rollouts of a sampler in this kind of numbers, and their images."""
    sampler, trainer = KINDS[kind]
    world = world_of(family, folder, HEALTHY)
    world = replace(world, sampler=world.sampler.to(sampler), model=world.model.to(trainer))

    def draw() -> Any:
        return [roll(world, 100 + seed, HEALTHY) for seed in range(start, start + COUNT)], world.sources

    return world.model, *kept(f"healthy-{kind}-{start}", draw)


def healthy(folder: Path, count: int, draw: bool = False) -> list[dict[str, object]]:
    """Audits of rollouts without a fault, six at a time."""
    out: list[dict[str, object]] = []
    for start in range(0, count, COUNT):
        number = start // COUNT
        kind, family = list(KINDS)[number % 3], HEALTHY_FAMILIES[number // 3 % 5]
        model, samples, sources = unharmed(family, kind, start, folder)
        if draw:
            continue
        report = audit(samples, TrainerModel(model), decode=decode, sources=sources)
        findings = [f"{one.stage}, {one.cause}: {one.statement}" for one in report.findings]
        out.append(
            {
                "family": family,
                "kind": kind,
                "alarm": not report.ok,
                "largest": report.largest,
                "tolerance": report.tolerance,
                "findings": findings,
            }
        )
        if not report.ok:
            print(
                f"ALARM {family} {kind}: {report.largest:.2g} of {report.tolerance:.2g}: {findings}",
                flush=True,
            )
    return out


def floor(family: str, folder: Path) -> float:
    """Departures that a planting must exceed, in nats."""
    return max(SMALL, 10 * noise(family, folder))


def check(plantings: Sequence[Planting], folder: Path) -> list[str]:
    """Print how far each fault, and each of two, moves the recorded numbers; return those that move too little."""
    weak = []
    print(f"{'planting':34} {'family':11} {'floor':>8} {'largest':>8} {'median':>8} {'tokens':>7} samples")
    for planting in plantings:
        halves = [
            replace(planting, name=f"{planting.name}-{number}", fault=fault)
            for number, fault in enumerate(planting.halves, 1)
        ]
        for one in (planting, *halves):
            least = floor(one.family, folder)
            moved = planted_departures(one, folder)
            share = float((np.concatenate(moved) > least).mean())
            count = sum(float(sample.max()) > least for sample in moved)
            own = moved[FAULTY]
            print(
                f"{one.name:34} {one.family:11} {least:8.2g} {own.max():8.2g} {np.median(own):8.2g} {share:7.0%} "
                f"{count} of {COUNT}",
                flush=True,
            )
            if not own.max() > least:
                weak.append(one.name)
    return weak


def table(outcomes: list[Outcome]) -> str:
    rows = [
        "| planting | family | mode | nats | stage: true | reported | cause | said |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        small = " (small)" if one.largest < SMALL else ""
        said = one.cause.replace("|", "/")[:300] + (f" BESIDE {one.beside}"[:160] if one.beside else "")
        rows.append(
            f"| {one.name} | {one.family} | {one.mode} | {one.largest:.2g}{small} | {one.expected} | "
            f"{one.stage}{'' if one.stage_right else ' WRONG'} | {one.verdict} | {said} |"
        )
    return "\n".join(rows)


def figures(outcomes: list[Outcome], plantings: Sequence[Planting]) -> str:
    """Counts over the plantings that are not small."""
    counted = [one for one in outcomes if not one.largest < SMALL]
    exotic = {one.name for one in plantings if one.exotic}
    pairs = {one.name for one in plantings if one.halves}
    known = [one for one in counted if one.name not in exotic | pairs]
    rest = [one for one in counted if one.name in exotic]
    double = [one for one in counted if one.name in pairs]
    verdicts = Counter(one.verdict for one in known)
    remedies = Counter(one.remedied for one in known if one.remedied is not None)
    lines = [
        f"{len(counted)} counted, {len(outcomes) - len(counted)} below {SMALL:g} nats",
        f"stage right: {sum(one.stage_right for one in counted)} of {len(counted)}",
        f"cause of those that have one: {dict(verdicts)}, of {len(known)}",
        f"remedy of those named: {remedies[True]} right, of {remedies.total()} that the table has",
        f"exotic, of {len(rest)}: {dict(Counter(one.verdict for one in rest))} ('unknown' is right)",
    ]
    if double:
        lines.append(f"two causes, of {len(double)}: {dict(Counter(one.verdict for one in double))}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("third", "fourth", "fifth", "sixth", "healthy"))
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME")
    parser.add_argument("--mode", choices=("one", "all"))
    parser.add_argument("--tolerance", nargs="*", type=float, default=[None])
    parser.add_argument("--count", type=int, default=300, help="healthy rollouts")
    parser.add_argument(
        "--draw", action="store_true", help="draw the rollouts and audit nothing, with PLANTINGS_KEPT"
    )
    parser.add_argument(
        "--check", action="store_true", help="audit nothing; exit with 1 if a fault moves too little"
    )
    parser.add_argument("--reports", action="store_true", help="print whole reports")
    parser.add_argument(
        "--part", default="1/1", metavar="N/OF", help="one of several parts, to run beside each other"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.table == "healthy":
            found = healthy(folder, options.count, options.draw)
            print(
                f"{sum(bool(one['alarm']) for one in found)} alarms in {len(found)} audits of {options.count} rollouts"
            )
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
            return
        module = importlib.import_module(f"plantings_{options.table}")
        plantings = [
            one
            for one in getattr(module, options.table.upper())
            if not options.only or one.name in options.only
        ]
        number, count = map(int, options.part.split("/"))
        plantings = plantings[number - 1 :: count]
        if options.check:
            weak = check(plantings, folder)
            print(f"{len(weak)} of {len(plantings)} move too little: {', '.join(weak) or 'none'}")
            sys.exit(bool(weak))
        modes = (options.mode,) if options.mode else ("one", "all")
        everything = []
        for tolerance in options.tolerance:
            outcomes = []
            for mode in modes:
                for planting in plantings:
                    started = time.perf_counter()
                    if options.reports:
                        print(audited(planting, mode, folder, tolerance).text())
                    try:
                        if options.draw:
                            planted(planting, mode, folder)
                            continue
                        outcome = judge(planting, mode, folder, tolerance)
                    except Exception as error:
                        print(
                            f"{planting.name} {mode}: {type(error).__name__}: {error}",
                            file=sys.stderr,
                            flush=True,
                        )
                        continue
                    print(
                        f"{outcome.verdict:8}{'' if outcome.stage_right else ' STAGE'} {planting.name} {mode} "
                        f"({outcome.largest:.2g}, {time.perf_counter() - started:.1f} s): {outcome.cause[:200]}",
                        file=sys.stderr,
                        flush=True,
                    )
                    outcomes.append(outcome)
                    everything.append({"tolerance": tolerance, **asdict(outcome)})
                    if options.json:
                        options.json.write_text(json.dumps(everything, indent=1))
            print(f"\ntolerance {tolerance}\n{table(outcomes)}\n")
            print(figures(outcomes, plantings))


if __name__ == "__main__":
    main()
