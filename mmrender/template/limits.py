"""Bounds on what a template may spend: steps, time, text and numbers.

A template comes from whoever published the model. Operations that can grow text or numbers without a loop
are checked before they run; loops and calls are counted.
"""

import re
import time
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from mmrender.errors import TemplateLimitError


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may spend.

    Attributes:
        max_characters: Longest text that any operation may build.
        max_steps: Loop iterations and calls.
        max_seconds: Wall-clock time, checked at each step.
        max_bits: Size of an integer.
    """

    max_characters: int = 64_000_000
    max_steps: int = 1_000_000
    max_seconds: float = 10.0
    max_bits: int = 100_000


class Meter:
    """Counts what one rendering has spent."""

    __slots__ = ("_deadline", "_limits", "_steps")

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._deadline = time.monotonic() + limits.max_seconds

    def step(self) -> None:
        """Count one loop iteration or call; raise `TemplateLimitError` past either limit."""
        self._steps += 1
        if self._steps > self._limits.max_steps:
            raise _too_much("steps", f"at most {self._limits.max_steps:,} loop iterations and calls", "more")
        if time.monotonic() > self._deadline:
            raise _too_much("time", f"at most {self._limits.max_seconds:g} s", "more")


def check_size(size: int, limits: TemplateLimits) -> None:
    """Refuse to build `size` characters or elements."""
    if size > limits.max_characters:
        raise _too_much("text", f"at most {limits.max_characters:,} characters", f"{size:,}")


def check_operation(operator: str, left: Any, right: Any, limits: TemplateLimits) -> None:
    """Refuse an operation whose result would be too large."""
    if operator == "+":
        if isinstance(left, Sized) and isinstance(right, Sized):
            check_size(len(left) + len(right), limits)
    elif operator == "*":
        _check_product(left, right, limits)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 1), limits)
    elif operator == "%" and isinstance(left, str):
        check_widths(left, limits)
        if "*" in left and isinstance(right, tuple):
            check_size(sum(abs(item) for item in right if isinstance(item, int)), limits)


def _check_product(left: Any, right: Any, limits: TemplateLimits) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, Sized) and isinstance(count, int):
            check_size(len(sequence) * count, limits)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length(), limits)


def _check_bits(bits: int, limits: TemplateLimits) -> None:
    if bits > limits.max_bits:
        raise _too_much("numbers", f"integers of at most {limits.max_bits:,} bits", f"{bits:,}")


def check_widths(text: str, limits: TemplateLimits) -> None:
    """Refuse a width or precision in a format text that would pad beyond the limit."""
    for digits in re.findall(r"[0-9]{7,}", text):
        check_size(int(digits[:18]), limits)


def check_call(name: str, text: str, args: tuple[Any, ...], limits: TemplateLimits) -> None:
    """Refuse a string method whose result would be too large."""
    if name in ("center", "ljust", "rjust", "zfill", "indent"):
        for item in args:
            if isinstance(item, int):
                check_size(item * (text.count("\n") + 1 if name == "indent" else 1), limits)
    elif name == "expandtabs" and args and isinstance(args[0], int):
        check_size(text.count("\t") * args[0], limits)
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        check_size(len(text) + (text.count(args[0]) * len(args[1])), limits)
    elif name in ("format", "format_map"):
        check_widths(text, limits)
        for item in args:
            if isinstance(item, str | int):
                check_widths(str(item), limits)
    elif name == "join" and args and isinstance(args[0], list | tuple):
        pieces = [item for item in args[0] if isinstance(item, str)]
        check_size(sum(map(len, pieces)) + len(text) * len(pieces), limits)


def _too_much(what: str, expected: str, got: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template used too much: {what}",
        expected=expected,
        got=got,
        remedy="If you trust the template, pass larger TemplateLimits",
    )
