"""Bounds on one run of a template: loop iterations, calls, seconds, and the size of the texts it builds.

These bounds hold between operations. What a single one takes (a huge power, say) is the operating system's to
bound: see `mmrender.processes`.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass

from mmrender.errors import TemplateLimitError

LONG = 256
"""Texts and lists up to this length are too small to be worth counting."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on one run of a template.

    Attributes:
        max_characters: Longest text that may be built, the output included. All texts of 256 characters and
            more that are built in a run may together reach eight times as much.
        max_steps: Loop iterations and calls.
        max_seconds: Processor time of the thread that renders, so that a loaded machine refuses nothing.
    """

    max_characters: int = 8_000_000
    max_steps: int = 1_000_000
    max_seconds: float = 2.0


class Budget:
    """Remainder of the limits of one run."""

    __slots__ = ("_deadline", "_processor_deadline", "_size_left", "_steps_left", "limits")

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._steps_left = limits.max_steps
        self._size_left = 8 * limits.max_characters
        self._deadline = time.monotonic() + limits.max_seconds
        self._processor_deadline = time.thread_time() + limits.max_seconds

    def step(self) -> None:
        """Count one loop iteration or call."""
        left = self._steps_left = self._steps_left - 1
        if left < 0:
            raise _too_much("steps", f"{self.limits.max_steps:,} loop iterations and calls")
        self._check_time()

    def grow(self, size: int) -> None:
        """Count a text of so many characters that is about to be built."""
        if size > self.limits.max_characters:
            raise _too_much("text", f"{self.limits.max_characters:,} characters", f"{size:,}")
        self._size_left -= size
        if self._size_left < 0:
            raise _too_much("text", f"{8 * self.limits.max_characters:,} characters in all")
        self._check_time()

    def _check_time(self) -> None:
        # The clock of the wall is the cheaper one, and never behind.
        if time.monotonic() > self._deadline and time.thread_time() > self._processor_deadline:
            raise _too_much("time", f"{self.limits.max_seconds:g} s of processor time")


BUDGET: ContextVar[Budget | None] = ContextVar("mmrender_template_budget", default=None)
"""The budget of the run in this context; None outside of one, where nothing is bounded."""


def grow(size: int) -> None:
    """Count a text or list that is about to be built in the current run, unless it is short."""
    if size > LONG and (budget := BUDGET.get()) is not None:
        budget.grow(size)


def _too_much(what: str, most: str, got: str = "more") -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template used too much: {what}",
        expected=f"at most {most}",
        got=got,
        remedy="If you trust the template, pass larger TemplateLimits",
    )
