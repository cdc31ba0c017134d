"""`Aligned`: values that belong to tokens, which are cut and moved together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrender.trajectory.engine_data import AllowedTokens, RoutedExperts, WeightVersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Values of the tokens from position `start` on.

    Attributes:
        arrays: By name, arrays or lists of one value a token, such as log-probabilities, or None.
        routed_experts: Router choices by position, or None.
        weight_versions: Spans of positions, and the weights that sampled them.
        allowed: Spans of positions, and the tokens that could be sampled there.
        start: Position of the first value of each array.
    """

    arrays: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: RoutedExperts | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    allowed: tuple[AllowedTokens, ...] = ()
    start: int = 0

    def cut(self, start: int, stop: int) -> "Aligned":
        """Return the values of positions `[start, stop)`, which keep their positions. Arrays are views."""
        low, high = (max(0, position - self.start) for position in (start, stop))
        experts = self.routed_experts
        if experts is not None and (experts.start >= stop or experts.stop <= start):
            experts = None
        return Aligned(
            {name: None if array is None else array[low:high] for name, array in self.arrays.items()},
            None if experts is None else experts.cut(start, stop),
            tuple(_overlapping(self.weight_versions, start, stop)),
            tuple(_overlapping(self.allowed, start, stop)),
            self.start + low,
        )

    def shift(self, by: int) -> "Aligned":
        """Return the same values at positions that are higher by `by`."""
        experts = self.routed_experts
        return Aligned(
            self.arrays,
            None if experts is None else experts.shift(by),
            tuple(_moved(span, by) for span in self.weight_versions),
            tuple(_moved(span, by) for span in self.allowed),
            self.start + by,
        )

    def fields(self) -> dict[str, Any]:
        """Return the values by name, as `dataclasses.replace` takes them for a sample."""
        names = ("routed_experts", "weight_versions", "allowed")
        return {**self.arrays, **{name: getattr(self, name) for name in names}}


def joined_spans(parts: Iterable[Aligned]) -> Aligned:
    """Return the spans of parts in rising order. A version on both sides of a seam becomes one span."""
    versions: list[WeightVersionSpan] = []
    allowed: list[AllowedTokens] = []
    for part in parts:
        for span in part.weight_versions:
            meets = versions and versions[-1].version == span.version and versions[-1].stop == span.start
            versions.append(span._replace(start=versions.pop().start) if meets else span)
        allowed += part.allowed
    return Aligned(weight_versions=tuple(versions), allowed=tuple(allowed))


def _overlapping(spans: Iterable[Any], start: int, stop: int) -> Iterable[Any]:
    """Yield the parts of spans within `[start, stop)` that are not empty."""
    for span in spans:
        low, high = max(span.start, start), min(span.stop, stop)
        if low < high:
            yield span._replace(start=low, stop=high)


def _moved(span: Any, by: int) -> Any:
    return span._replace(start=span.start + by, stop=span.stop + by)
