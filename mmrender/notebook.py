"""HTML of values in notebooks.

Values lie far below the room that draws them. The package's `__init__` connects the two, so that no value
imports the room above it.
"""

from collections.abc import Callable
from typing import Any

_draw: Callable[[Any], str] | None = None


def draw_with(draw: Callable[[Any], str]) -> None:
    """Set the function that returns the HTML of a value."""
    global _draw  # noqa: PLW0603 - one function for the process
    _draw = draw


class Drawn:
    """Base class of values that a notebook draws."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return _draw(self) if _draw is not None else None
