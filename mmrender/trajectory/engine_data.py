"""What an engine says of a completion besides its tokens: router choices, and the weights it ran with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError


class WeightVersionSpan(NamedTuple):
    """Completion tokens `[start, stop)` that were sampled with the weights `version`."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts that the routers of a mixture-of-experts model chose, to be replayed in training.

    Attributes:
        data: Integers of shape `(rows, layers, top_k)`, often a read-only view of what the engine sent.
        start: Position in prompt plus completion of the token that row 0 belongs to.

    The last sampled token is never fed back, so an engine has no row for it: of `n` tokens and start 0 there
    are `n - 1` rows.

    Raises:
        TrajectoryError: The array has another shape or dtype, or `start` is negative.
    """

    data: npt.NDArray[Any]
    start: int = 0

    def __post_init__(self) -> None:
        if self.data.ndim != 3 or self.data.dtype.kind not in "iu":
            raise TrajectoryError(
                "routed experts have the wrong form",
                where="routed_experts.data",
                expected="integers of shape (rows, layers, top_k)",
                got=f"{self.data.dtype} {list(self.data.shape)}",
            )
        if self.start < 0:
            raise TrajectoryError(
                "routed experts start before the first token",
                where="routed_experts.start",
                expected="0 or more",
                got=str(self.start),
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, layers and experts a token."""
        rows, layers, top_k = self.data.shape
        return rows, layers, top_k

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that the engine chose, such as uint8 for up to 256 experts."""
        return self.data.dtype

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self.data)

    def from_position(self, start: int) -> "RoutedExperts":
        """Return the rows of the positions from `start` on, as a view.

        Raises:
            TrajectoryError: There is no row for `start`, nor for the position before it.
        """
        if not self.start <= start <= self.stop:
            raise TrajectoryError(
                "there are no routed experts from that position on",
                where="routed_experts",
                expected=f"{self.start}..{self.stop}",
                got=str(start),
            )
        return RoutedExperts(self.data[start - self.start :], start)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        same = self.start == other.start and self.dtype == other.dtype
        return same and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]
