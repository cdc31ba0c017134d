"""Plant faults in rollouts, audit them, and print what the audit said beside the truth.

python tests/audit_plantings.py dev                        # both modes of each planting of a table
python tests/audit_plantings.py dev --only bgr --mode one --reports
python tests/audit_plantings.py dev --tolerance 1e-5 1e-3  # wrong names by tolerance
python tests/audit_plantings.py healthy                    # 300 rollouts without a fault
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from audit_cases import decode
from mmrender.audit import TrainerModel, audit
from mmrender.trajectory.sample import TrainingSample
from planting import COUNT, HEALTHY, SMALL, Outcome, audited, judge, kept, planted, roll, world_of

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


def figures(outcomes: list[Outcome], exotic: set[str]) -> str:
    """Counts over the plantings that are not small."""
    counted = [one for one in outcomes if not one.largest < SMALL]
    known = [one for one in counted if one.name not in exotic]
    rest = [one for one in counted if one.name in exotic]
    verdicts = Counter(one.verdict for one in known)
    lines = [
        f"{len(counted)} counted, {len(outcomes) - len(counted)} below {SMALL:g} nats",
        f"stage right: {sum(one.stage_right for one in counted)} of {len(counted)}",
        f"cause of those that have one: {dict(verdicts)}, of {len(known)}",
        f"exotic, of {len(rest)}: {dict(Counter(one.verdict for one in rest))} ('unknown' is right)",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("dev", "held", "healthy"))
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME")
    parser.add_argument("--mode", choices=("one", "all"))
    parser.add_argument("--tolerance", nargs="*", type=float, default=[None])
    parser.add_argument("--count", type=int, default=300, help="healthy rollouts")
    parser.add_argument(
        "--draw", action="store_true", help="draw the rollouts and audit nothing, with PLANTINGS_KEPT"
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
            print(figures(outcomes, {one.name for one in plantings if one.exotic}))


if __name__ == "__main__":
    main()
