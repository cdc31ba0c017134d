"""Bounds on one run of a template: loop iterations, calls, seconds, and the size of the texts it builds.

These bounds hold between operations. A single operation (a huge power, say) can only be bounded by the
operating system; see `mmrender.processes`.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass

from mmrender.errors import TemplateLimitError

LONG = 256
"""Length up to which texts and lists are not counted."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on one run of a template.

    Attributes:
        max_characters: Maximum length of a text that is built, the output included. All texts of 256
            characters and more that are built in a run may together reach eight times this length.
        max_steps: Maximum number of loop iterations and calls.
        max_seconds: Maximum processor time of the rendering thread, which does not depend on the machine's
            load.
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
        # Wall time is cheaper to read and never smaller.
        if time.monotonic() > self._deadline and time.thread_time() > self._processor_deadline:
            raise _too_much("time", f"{self.limits.max_seconds:g} s of processor time")

    def grow(self, size: int) -> None:
        """Count a text of `size` characters that is about to be built."""
        if size > self.limits.max_characters:
            raise _too_much("text", f"{self.limits.max_characters:,} characters", f"{size:,}")
        self._size_left -= size
        if self._size_left < 0:
            raise _too_much("text", f"{8 * self.limits.max_characters:,} characters in all")
        if time.monotonic() > self._deadline and time.thread_time() > self._processor_deadline:
            raise _too_much("time", f"{self.limits.max_seconds:g} s of processor time")


BUDGET: ContextVar[Budget | None] = ContextVar("mmrender_template_budget", default=None)
"""Budget of the run in this context, or None outside of a run."""


def grow(size: int) -> None:
    """Count a text or list that is about to be built in the current run, unless it is short."""
    if size > LONG and (budget := BUDGET.get()) is not None:
        budget.grow(size)


def _too_much(quantity: str, limit: str, got: str = "more") -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template used too much: {quantity}",
        expected=f"at most {limit}",
        got=got,
        remedy="If you trust the template, pass larger TemplateLimits",
    )
