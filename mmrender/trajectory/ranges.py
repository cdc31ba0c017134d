"""Placeholder ranges as they come: objects, or mappings of several spellings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from mmrender.errors import TrajectoryError
from mmrender.spans import PlaceholderRange
from mmrender.trajectory.packed import RangeForm
from mmrender.trajectory.steps import get_field, has_field

Spans: TypeAlias = tuple[tuple[int, int], ...] | None
_INT32_MAX: Final = 2**31 - 1


def read_range(value: Any, where: str) -> PlaceholderRange:
    """Return a range given as an object or mapping with `offset`, `length` and perhaps `embed_spans`.

    Raises:
        TrajectoryError: They are missing, no integers, negative or beyond 32 bits.
    """
    offset, length, spans = (get_field(value, name) for name in ("offset", "length", "embed_spans"))
    # A mask that stands for itself, as vLLM's ranges have it, would be lost.
    sparse = get_field(value, "is_embed") is not None and not has_field(value, "embed_spans")
    if sparse or not all(map(_is_index, (offset, length))):
        raise TrajectoryError(
            "a placeholder range is malformed",
            where=where,
            expected="offset and length, non-negative integers, and perhaps embed_spans",
            got=repr(value)[:200],
        )
    return PlaceholderRange(offset, length, _read_spans(spans, where))


def _spans_as_lists(spans: Spans) -> list[list[int]] | None:
    return None if spans is None else [list(span) for span in spans]


RANGE_FORMS: Final[dict[RangeForm, Callable[[PlaceholderRange], Any]]] = {
    "range": lambda found: found,
    "mapping": lambda found: {"offset": found.offset, "length": found.length},
    "mapping with tuples": lambda found: {
        "offset": found.offset,
        "length": found.length,
        "embed_spans": found.embed_spans,
    },
    "mapping with lists": lambda found: {
        "offset": found.offset,
        "length": found.length,
        "embed_spans": _spans_as_lists(found.embed_spans),
    },
}
"""The ways in which ranges are written down, and how to write one so."""


def range_form(values: Sequence[Any], ranges: Sequence[PlaceholderRange], where: str) -> RangeForm:
    """Return the way in which all of `values` are written, whose content is `ranges`.

    Raises:
        TrajectoryError: They are written in several ways.
    """
    if not any(isinstance(value, Mapping) for value in values):
        return "range"
    for form, write in RANGE_FORMS.items():
        if all(write(found) == value for found, value in zip(ranges, values, strict=True)):
            return form
    raise TrajectoryError(
        "placeholder ranges must be written alike, as objects or as mappings",
        where=where,
        expected="the keys offset, length and perhaps embed_spans in each",
        got=repr(values)[:200],
    )


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INT32_MAX


def _read_spans(spans: Any, where: str) -> Spans:
    if spans is None:
        return None
    pairs = tuple(tuple(span) for span in spans) if isinstance(spans, list | tuple) else ((),)
    if all(len(pair) == 2 and all(map(_is_index, pair)) for pair in pairs):
        return cast(Spans, pairs)
    raise TrajectoryError(
        "embed spans must be pairs of non-negative integers", where=where, got=repr(spans)[:200]
    )
