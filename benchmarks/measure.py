"""Timing and tables that the benchmark scripts share; the package has what `mmrender bench` needs of it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmrender.testing.timing import Clock, Contender, machine, medians, shown_ms, table

__all__ = [
    "Clock",
    "Contender",
    "machine",
    "medians",
    "memcpy_seconds",
    "peak_resident",
    "shown_ms",
    "shown_ratio",
    "table",
]


def memcpy_seconds(nbytes: int, rounds: int = 15, clock: Clock = "wall") -> float:
    """Return the median time of copying a buffer that is mapped already, the least any copy can cost."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return medians({"copy": Contender(lambda: np.copyto(target, source))}, rounds=rounds, clock=clock)["copy"]


def shown_ratio(numerator: float | None, denominator: float | None) -> str:
    """Ratio of two numbers, or a dash."""
    if numerator is None or denominator is None:
        return "-"
    ratio = numerator / denominator
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def peak_resident(call: Callable[[], object]) -> int | None:
    """Return the peak of the resident set during a call over what it was before; None without Linux."""
    status = Path("/proc/self/status")

    def read(field: str) -> int:
        lines = status.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except (OSError, AttributeError):
        return None
    before = read("VmRSS")
    result = call()
    peak = max(0, read("VmHWM") - before)
    del result
    return peak
