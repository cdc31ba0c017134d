"""Timing and tables that the benchmark scripts share.

Contenders take turns within one process, so that a change in the machine's speed falls on all of them. The
reported time is the median of single calls.
"""

import ctypes
import gc
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

Clock: TypeAlias = Literal["wall", "cpu"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """A timed call.

    Attributes:
        run: The timed call; its result is dropped before the next call starts.
        reset: What is done before each call, untimed.
    """

    run: Callable[[], object]
    reset: Callable[[], object] = _nothing


_seeds = itertools.count(1)


def fresh(make: Callable[[int], Any], call: Callable[[Any], object]) -> Contender:
    """Return a timed call whose argument is made before each, from a number that no other had."""
    made: Any = None

    def prepare() -> None:
        nonlocal made
        made = make(next(_seeds))

    return Contender(lambda: call(made), prepare)


def medians(
    contenders: Mapping[str, Contender], *, rounds: int, slice_s: float = 0.01, clock: Clock = "wall"
) -> dict[str, float]:
    """Return the median seconds of one call of each contender.

    Args:
        contenders: By name; in each round every one has its turn.
        rounds: Number of turns.
        slice_s: Length of a turn; a contender that is faster is called several times in it.
        clock: `cpu` counts the time of all threads of the process. It is steadier where others use the
            machine too, and gives nothing to a contender that spreads its work.
    """
    now = CLOCKS[clock]
    calls = {name: _calls(contender, slice_s, now) for name, contender in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, contender in contenders.items():
                seconds[name] += [_timed(contender, now) for _ in range(calls[name])]
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


def _timed(contender: Contender, now: Callable[[], float]) -> float:
    contender.reset()
    start = now()
    result = contender.run()
    elapsed = now() - start
    del result
    return elapsed


def _calls(contender: Contender, slice_s: float, now: Callable[[], float]) -> int:
    """Calls in a turn, from one that warms up and one that is timed."""
    _timed(contender, now)
    return max(1, min(1000, int(slice_s / max(1e-7, _timed(contender, now)))))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table: the first column to the left, the others to the right."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def shown_ms(seconds: float | None) -> str:
    """Milliseconds with three significant digits, or a dash."""
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.3g}"


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Describe where the figures come from."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
