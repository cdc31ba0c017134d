"""What one run of a template may spend: loop iterations and calls, seconds, and the size of what it builds.

A template comes from whoever published the model. Growth is checked where text and lists are built, before
they are built; whoever runs templates that he does not trust at all renders them in a child process.
"""

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2.utils import Namespace

from mmrender.errors import TemplateLimitError

LONG = 256
"""Text and lists up to this length are too small to be worth counting."""
PER_ELEMENT = 64
"""What an element of a list counts as, in characters."""
CONTAINERS = (list, tuple, dict)
_WALKED = (*CONTAINERS, Namespace)
_MAX_DEPTH = 200
_MAX_BITS = 100_000


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one run of a template may spend.

    Attributes:
        max_characters: Longest text that may be built, the output included. A list counts 64 for each of its
            elements, and all long texts and lists of a run together may reach eight times as much.
        max_steps: Loop iterations and calls.
        max_seconds: Wall-clock time.
    """

    max_characters: int = 8_000_000
    max_steps: int = 1_000_000
    max_seconds: float = 2.0


class Budget:
    """What is left of the limits of one run."""

    __slots__ = ("_deadline", "_size_left", "_steps_left", "limits")

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._steps_left = limits.max_steps
        self._size_left = 8 * limits.max_characters
        self._deadline = time.monotonic() + limits.max_seconds

    def step(self) -> None:
        """Count one loop iteration or call."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise _too_much("steps", f"at most {self.limits.max_steps:,} loop iterations and calls", "more")
        if time.monotonic() > self._deadline:
            raise _too_much("time", f"at most {self.limits.max_seconds:g} s", "more")

    def grow(self, size: int) -> None:
        """Count a text or list of so many characters that is about to be built."""
        if size > self.limits.max_characters:
            raise _too_much("text", f"at most {self.limits.max_characters:,} characters", f"{size:,}")
        self._size_left -= size
        if self._size_left < 0:
            most = 8 * self.limits.max_characters
            raise _too_much("text", f"at most {most:,} characters in all", "more")
        if time.monotonic() > self._deadline:
            raise _too_much("time", f"at most {self.limits.max_seconds:g} s", "more")


BUDGET: ContextVar[Budget | None] = ContextVar("mmrender_template_budget", default=None)
"""The budget of the run in this context; None outside of one, where nothing is bounded."""


def grow(size: int) -> None:
    """Count a text or list that is about to be built in the current run, unless it is short."""
    if size > LONG and (budget := BUDGET.get()) is not None:
        budget.grow(size)


def weigh(value: Any) -> Any:
    """Return `value` if printing, comparing or hashing it takes a bounded time.

    Such a walk visits an element once for each place where it stands, so a list that holds one list twice,
    forty levels deep, would take for ever.

    Raises:
        TemplateLimitError: It is too large, or nested too deep for a walk in C code.
    """
    if not isinstance(value, _WALKED) or (budget := BUDGET.get()) is None:
        return value
    most = budget.limits.max_characters
    size = depth = 0
    level: list[Any] = [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Namespace):
                inner.append(object.__getattribute__(item, "_Namespace__attrs"))
            elif isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
            elif isinstance(item, str):
                size += len(item)
            if size + len(inner) * PER_ELEMENT > most:
                raise _too_much("elements", f"at most {most // PER_ELEMENT:,}", "more")
        size += len(inner) * PER_ELEMENT
        depth += 1
        if depth > _MAX_DEPTH:
            raise _too_much("nesting", f"at most {_MAX_DEPTH} levels", "more")
        level = inner
    return value


def check_number(value: Any) -> None:
    """Refuse to compute with an integer so large that one operation takes long."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise _too_much("numbers", f"integers of at most {_MAX_BITS:,} bits", f"{value.bit_length():,}")


def check_power(base: int, exponent: int) -> None:
    """Refuse a power that would be such an integer."""
    if base.bit_length() * max(exponent, 1) > _MAX_BITS:
        raise _too_much("numbers", f"integers of at most {_MAX_BITS:,} bits", "a larger power")


def bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Jinja filter that lists, sorts or repeats: what it walks through and builds is counted."""
    first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def counted(*args: Any, **kwargs: Any) -> Any:
        *passed, value = args[: first + 1]
        if isinstance(value, str):
            grow(PER_ELEMENT * len(value))
        elif filter_.__name__ != "do_list":
            value = weigh(list(value) if isinstance(value, Iterator) else value)
        for argument in (*args[first + 1 :], *kwargs.values()):
            if isinstance(argument, int):
                grow(PER_ELEMENT * abs(argument))
        result = filter_(*passed, value, *args[first + 1 :], **kwargs)
        if isinstance(result, list):
            grow(PER_ELEMENT * len(result))
        return result

    return counted


def _too_much(what: str, expected: str, got: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template used too much: {what}",
        expected=expected,
        got=got,
        remedy="If you trust the template, pass larger TemplateLimits",
    )
