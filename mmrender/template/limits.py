"""Bounds on what a template may spend: steps, time, text, memory and numbers.

A template comes from whoever published the model. Loop iterations, calls and filters are counted as they
happen; anything that could become large in one go is measured before it is built.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2.utils import Namespace

from mmrender.errors import TemplateLimitError

LONG = 1024
"""Text and lists shorter than this are too small to be worth counting."""
_MAX_DEPTH = 400
_CHARACTERS_PER_ITEM = 256
ITEMS_PER_SPAN = 4
# What CPython takes for a span with its two numbers, a short traced text with its span, and a number.
_SPAN_BYTES, _TEXT_BYTES, _NUMBER_BYTES = 160, 256, 32


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may spend.

    Attributes:
        max_characters: Longest text that any operation may build.
        max_items: Most elements of a list, tuple or dict, those of its elements included.
        max_bytes: Memory of all longer texts and lists that the rendering builds, kept or not.
        max_steps: Loop iterations, calls and filters.
        max_seconds: Wall-clock time, checked at each step.
        max_bits: Size of an integer.
    """

    max_characters: int = 8_000_000
    max_items: int = 1_000_000
    max_bytes: int = 256 << 20
    max_steps: int = 1_000_000
    max_seconds: float = 10.0
    max_bits: int = 100_000


class Meter:
    """Counts what one rendering has spent, and refuses what goes beyond its limits."""

    __slots__ = ("_bytes", "_deadline", "_steps", "limits")

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._steps = 0
        self._bytes = 0
        self._deadline = time.monotonic() + limits.max_seconds

    def step(self) -> None:
        """Count one loop iteration, call or filter."""
        self._steps += 1
        if self._steps > self.limits.max_steps:
            expected = f"at most {self.limits.max_steps:,} loop iterations, calls and filters"
            raise _too_much("steps", expected, "more")
        if time.monotonic() > self._deadline:
            raise _too_much("time", f"at most {self.limits.max_seconds:g} s", "more")

    def admit(self, characters: int) -> None:
        """Refuse to build a text of so many characters."""
        if characters > self.limits.max_characters:
            raise _too_much("text", f"at most {self.limits.max_characters:,} characters", f"{characters:,}")

    def admit_items(self, count: int) -> None:
        """Refuse to build or walk so many elements."""
        if count > self.limits.max_items:
            raise _too_much("elements", f"at most {self.limits.max_items:,}", f"{count:,} or more")

    def admit_bits(self, bits: int) -> None:
        """Refuse to compute an integer of so many bits."""
        if bits > self.limits.max_bits:
            raise _too_much("numbers", f"integers of at most {self.limits.max_bits:,} bits", f"{bits:,}")

    def built(self, value: Any, spans: int = 0) -> None:
        """Count the memory of a text, with so many spans, or of a container just built."""
        if len(value) < LONG:
            return
        self._bytes += sys.getsizeof(value) + _SPAN_BYTES * spans
        if isinstance(value, list | tuple):
            # Its elements, too, may just have been built: all alike, as filters and methods build them.
            self._bytes += len(value) * (_TEXT_BYTES if isinstance(value[0], str) else _NUMBER_BYTES)
        if self._bytes > self.limits.max_bytes:
            expected = f"at most {self.limits.max_bytes:,} bytes of text and lists in all"
            raise _too_much("memory", expected, f"{self._bytes:,}")


METER: ContextVar[Meter | None] = ContextVar("mmrender_template_meter", default=None)
"""The meter of the rendering that runs in this context; None outside of one, where nothing is bounded."""

SIZED = (str, bytes, list, tuple, dict)
CONTAINERS = (list, tuple, dict)


def admit(characters: int) -> None:
    """Refuse to build a text of so many characters in the current rendering."""
    meter = METER.get()
    if meter is not None:
        meter.admit(characters)


def admit_items(count: int) -> None:
    """Refuse to build so many elements in the current rendering."""
    meter = METER.get()
    if meter is not None:
        meter.admit_items(count)


def weigh(value: Any) -> int:
    """Number of elements that a walk through `value` visits; long text counts as several.

    A walk visits an element once for each place where it stands, so lists that hold one list many times weigh
    what they would weigh written out.

    Raises:
        TemplateLimitError: More than `max_items` elements, or nested deeper than a walk in C code survives.
    """
    meter = METER.get()
    value = attributes(value)
    if not isinstance(value, CONTAINERS):
        return 1 + len(value) // _CHARACTERS_PER_ITEM if isinstance(value, str) else 1
    if meter is None:
        return len(value)
    count = len(value)
    stack = [iter(_elements(value))]
    while stack:
        for element in stack[-1]:
            item = attributes(element)
            if isinstance(item, CONTAINERS):
                count += len(item)
                stack.append(iter(_elements(item)))
                break
            if isinstance(item, str):
                count += len(item) // _CHARACTERS_PER_ITEM
        else:
            stack.pop()
        meter.admit_items(count)
        if len(stack) > _MAX_DEPTH:
            raise _too_much("nesting", f"at most {_MAX_DEPTH} levels", "more")
    return count


def attributes(value: Any) -> Any:
    """What a namespace holds, as a dict; any other value as it is."""
    return object.__getattribute__(value, "_Namespace__attrs") if isinstance(value, Namespace) else value


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [element for pair in value.items() for element in pair]
    return value  # type: ignore[no-any-return]


def _too_much(what: str, expected: str, got: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template used too much: {what}",
        expected=expected,
        got=got,
        remedy="If you trust the template, pass larger TemplateLimits",
    )
