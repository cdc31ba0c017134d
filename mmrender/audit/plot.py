"""The differences of an audit as a picture."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from mmrender.audit.compare import Comparison, image_places
from mmrender.audit.report import AuditReport
from mmrender.errors import MissingDependencyError

_MOST_TRACES = 6
_FLOOR = 1e-8
"""Differences below it are drawn on it: the axis is logarithmic."""


def save_plot(report: AuditReport, path: str | os.PathLike[str]) -> Path:
    """Draw a report, and return the file's path; its ending chooses the format.

    Left, the log-probability of every token from sampler and trainer, which should lie on a line. Right, the
    difference along the tokens of the samples that differ most, with images shaded.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError.of_extra("matplotlib", "plot", "a plot of the audit") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws to files without a display
    scatter, traces = figure.subplots(1, 2, width_ratios=(1, 2))
    _scatter(scatter, report)
    _traces(traces, report)
    largest = f"largest difference {report.largest:.3g} nats, KL {report.kl:.2g} nats a token"
    figure.suptitle(f"{report.tokens} tokens, {largest}")
    figure.savefig(path)
    return Path(path)


def _scatter(axes: Any, report: AuditReport) -> None:
    for compared in report.comparisons:
        axes.plot(compared.sampler, compared.trainer, ".", markersize=2, color="tab:blue")
    lows = [float(compared.sampler.min()) for compared in report.comparisons if len(compared.sampler)]
    axes.plot([min(lows, default=-1.0), 0.0], [min(lows, default=-1.0), 0.0], color="grey", linewidth=0.8)
    axes.set_xlabel("sampler, nats")
    axes.set_ylabel("trainer, nats")


def _traces(axes: Any, report: AuditReport) -> None:
    worst = sorted(report.comparisons, key=lambda compared: -compared.largest)[:_MOST_TRACES]
    for number, compared in enumerate(worst):
        label = compared.sample.sample_id or f"sample {number}"
        axes.plot(compared.positions, _drawn(compared), ".-", markersize=3, linewidth=0.6, label=label)
    for place in image_places(worst[0].sample) if worst else ():
        axes.axvspan(place.start, place.stop, color="tab:orange", alpha=0.15)
    axes.axhline(report.tolerance, color="tab:red", linewidth=0.8, label="tolerance")
    axes.set_yscale("log")
    axes.set_xlabel("token (images of the worst sample shaded)")
    axes.set_ylabel("absolute difference, nats")
    axes.legend(fontsize="small")


def _drawn(compared: Comparison) -> Any:
    difference = np.abs(compared.difference)
    return np.maximum(np.nan_to_num(difference, nan=1e3, posinf=1e3), _FLOOR)
