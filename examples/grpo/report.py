"""What a run shows: progress, a line of JSON for each step, a table and a plot."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from grpo.config import Config

SHOWN: Final = ("updates", "loss", "held_out", "reward", "entropy", "kl", "tokens_per_s")
"""Metrics beside the progress bar, the first ones where a terminal is narrow."""
PARTS: Final = ("rollout", "train", "audit", "evaluate")


class Report:
    """Writes and shows the metrics of a run.

    In a terminal a bar shows each step. Elsewhere, as in a log, each play of the held-out boards is a line.

    Args:
        config: The run's.
        step: Step of the checkpoint from which the run goes on. Later lines are dropped.
        updates: Updates on recorded games in this checkpoint.

    Attributes:
        last: The newest line.
    """

    def __init__(self, config: Config, step: int, updates: int = 0) -> None:
        self._file = config.out / "metrics.jsonl"
        # A kill may have cut the last line.
        lines = self._file.read_text().split("\n")[:-1] if self._file.exists() else []
        kept = [line for line in lines if _place(json.loads(line)) <= (step, updates)]
        written = self._file.with_suffix(".new")
        written.write_text("".join(line + "\n" for line in kept))
        written.replace(self._file)
        self.last: dict[str, Any] = json.loads(kept[-1]) if kept else {}
        self._shown: dict[str, Any] = {}  # from one play of the held-out boards to the next
        self._bar: Any = None
        self._is_quiet = config.quiet
        if not config.quiet:
            self._begin(config, step)

    def _begin(self, config: Config, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        chance = f"{1 / config.grid**2:.2f} of the held-out boards by chance"
        going_on = f", goes on from step {step}" if step else ""
        print(f"{config.out}: {chance}, at most {config.steps} steps{going_on}", flush=True)
        console = Console()
        if console.is_terminal:
            # In a narrow terminal the last metrics are cut off, not the bar.
            shown = TextColumn("{task.fields[shown]}", table_column=Column(ratio=1, no_wrap=True))
            columns = BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn(), shown
            self._bar = Progress(*columns, console=console, expand=True)
            self._task = self._bar.add_task("", total=config.steps, completed=step, shown="")

    @property
    def display(self) -> AbstractContextManager[Any]:
        """The progress bar, for as long as its block runs."""
        return nullcontext() if self._bar is None else self._bar

    def add(self, row: dict[str, Any]) -> None:
        """Write and show the metrics of a step."""
        self.last = row
        self._shown |= {"held_out": row["held_out"]} if "held_out" in row else {}
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], shown=_text({**self._shown, **row}))
        elif not self._is_quiet and "held_out" in row:
            print(f"step {row['step']}  {_text(row)}", flush=True)


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    """Steps and updates on recorded games before a line of the metrics."""
    return row["step"], row.get("updates", 0)


def _text(row: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {row[name]:.3g}" for name in SHOWN if name in row)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, line by line."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(config: Config) -> str:
    """Say in words how a run of this process ended, and where its results are."""
    rows = rows_of(config.out)
    last = rows[-1]
    right = round(last["held_out"] * config.held_out)
    text = f"{config.out}: {right} of {config.held_out} held-out boards answered rightly"
    text += f" after {last['step']} steps, {last['rollouts']} games"
    if last["held_out"] < config.until:
        text += f"; --steps {2 * config.steps} goes on"
    pages = ("plot.png", "rollouts.html")
    return "\n".join([text, *(f"  {config.out / page}" for page in pages if (config.out / page).exists())])


def table(runs: Sequence[Path]) -> str:
    """Return a table in Markdown: a row a run, with all its scores on held-out boards."""
    head = "| run | held out: before | after the warm-up | then | steps | games | s | processor s | nats |"
    lines = [head, "|---|--:|--:|---|--:|--:|--:|--:|--:|"]
    for run in runs:
        rows = rows_of(run)
        before, *warm_up = (row for row in rows if row["step"] == 0)
        scores = [f"{row['held_out']:.2f}" for row in rows if row["step"] and "held_out" in row]
        processor = sum(value for row in rows for name, value in row.items() if name.endswith("_processor_s"))
        wall = sum(row.get(f"{part}_s", 0.0) for row in rows for part in PARTS)
        cells = [
            run.name,
            f"{before['held_out']:.2f}",
            f"{warm_up[-1]['held_out']:.2f} ({warm_up[-1]['updates']} updates)" if warm_up else "",
            " ".join(scores),
            str(rows[-1]["step"]),
            f"{rows[-1]['rollouts']:,}",
            f"{wall:.0f}",
            f"{processor:.0f}",
            f"{max((row['difference'] for row in rows if 'difference' in row), default=0.0):.1g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def save_plot(runs: Sequence[Path], path: Path) -> None:
    """Draw the metrics of runs: reward, divergence, entropy, tokens a second, and where the time goes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(15, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws to files without a display
    (reward, entropy, speed), (difference, divergence, time) = figure.subplots(2, 3)
    for number, run in enumerate(runs):
        rows = rows_of(run)
        # The last one of each count, which leaves out the scores within a warm-up.
        tested = list({row["rollouts"]: row for row in rows if "held_out" in row}.values())
        rows = [row for row in rows if "reward" in row]
        color, played = f"C{number}", [row["rollouts"] for row in rows]
        reward.plot(played, [row["reward"] for row in rows], color=color, linewidth=0.7, alpha=0.6)
        line = {"marker": "o", "markersize": 3, "label": f"{run.name}, held out, greedy"}
        reward.plot(
            [row["rollouts"] for row in tested], [row["held_out"] for row in tested], color=color, **line
        )
        for panel, name in (
            (difference, "difference"),
            (divergence, "kl"),
            (entropy, "entropy"),
            (speed, "tokens_per_s"),
        ):
            panel.plot(played, [abs(row.get(name, math.nan)) for row in rows], color=color, linewidth=0.8)
    bottom = [0.0] * len(played)
    for part in PARTS:
        seconds = [row.get(f"{part}_processor_s", 0.0) for row in rows]
        time.fill_between(played, bottom, [a + b for a, b in zip(bottom, seconds, strict=True)], label=part)
        bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
    reward.set(title="reward", xlabel="rollouts", ylim=(0, 1.05))
    difference.set(title="largest difference of sampler and trainer, nats", xlabel="rollouts", yscale="log")
    divergence.set(title="KL of sampler and trainer, its size in nats", xlabel="rollouts", yscale="log")
    speed.set(title="tokens a second, sampled and trained on", xlabel="rollouts", ylim=(0, None))
    entropy.set(title="entropy of the answer, nats", xlabel="rollouts")
    time.set(title=f"processor seconds of a step, {runs[-1].name}", xlabel="rollouts")
    # Trainers of others count neither.
    time.set_visible(any(bottom))
    speed.set_visible(any("tokens_per_s" in row for row in rows))
    reward.legend(fontsize="small")
    time.legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m grpo.report", description="Compare runs in a table and a plot."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="file of the plot, such as learn.png")
    options = parser.parse_args()
    print(table(options.runs))
    if options.out is not None:
        save_plot(options.runs, options.out)
