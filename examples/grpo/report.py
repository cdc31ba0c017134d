"""What a run shows: a progress bar, a line of JSON for each step, and a plot."""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from grpo.config import Config

SHOWN = ("updates", "loss", "reward", "held_out", "entropy", "kl", "tokens_per_s")
PARTS = ("rollout", "train", "audit", "evaluate")


class Report:
    """Writes and shows the metrics of a run; lines after the step that it goes on from are dropped."""

    def __init__(self, config: Config, step: int) -> None:
        self._file = config.out / "metrics.jsonl"
        # A kill may have cut the last line.
        lines = self._file.read_text().split("\n")[:-1] if self._file.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        written = self._file.with_suffix(".new")
        written.write_text("".join(line + "\n" for line in kept))
        written.replace(self._file)
        self.last: dict[str, Any] = json.loads(kept[-1]) if kept else {}
        self._bar: Any = None
        if not config.quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            shown = TextColumn("{task.fields[shown]}")
            self._bar = Progress(BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), shown)
            self._task = self._bar.add_task("", total=config.steps, completed=step, shown="")

    @property
    def display(self) -> AbstractContextManager[Any]:
        """The progress bar, for as long as its block runs."""
        return nullcontext() if self._bar is None else self._bar

    def add(self, row: dict[str, Any]) -> None:
        """Write and show the metrics of a step."""
        self.last = {**self.last, **row}
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.show(self.last)

    def show(self, seen: Mapping[str, Any]) -> None:
        """Show metrics."""
        if self._bar is not None:
            shown = [f"{name} {seen[name]:.3g}" for name in SHOWN if name in seen]
            self._bar.update(self._task, completed=seen.get("step", 0), shown="  ".join(shown))


def save_plot(runs: Sequence[Path], path: Path) -> None:
    """Draw the metrics of runs: reward, divergence, entropy, tokens a second, and where the time goes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(15, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws to files without a display
    (reward, entropy, speed), (difference, divergence, time) = figure.subplots(2, 3)
    for number, run in enumerate(runs):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        tested = [row for row in rows if "held_out" in row]
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
            panel.plot(played, [abs(row.get(name, 0.0)) for row in rows], color=color, linewidth=0.8)
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
    reward.legend(fontsize="small")
    time.legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=save_plot.__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    save_plot(options.runs, options.out)
