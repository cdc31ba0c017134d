"""An engine's report on a completion: its tokens, and router choices, weight versions and allowed tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mmcodecs.structs import ready
from mmrender.errors import TrajectoryError
from mmrender.sidecar import MultiModalData


class WeightVersionSpan(NamedTuple):
    """Completion tokens `[start, stop)` that were sampled with the weights `version`."""

    version: str
    start: int
    stop: int


class AllowedTokens(NamedTuple):
    """Token ids among which tokens `[start, stop)` were sampled, and their log-probabilities normalised.

    `token_ids` rise. With `forbids` they are the ids that could not be sampled.
    """

    start: int
    stop: int
    token_ids: tuple[int, ...]
    forbids: bool = False


S = TypeVar("S", WeightVersionSpan, AllowedTokens)


class SampledTurn(Protocol):
    """One sampled turn as `Trajectory.append_turn` takes it, such as `generate` returns."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The whole prompt, placeholders widened."""

    @property
    def completion_ids(self) -> Sequence[int]:
        """The sampled tokens, stop token included."""

    @property
    def logprobs(self) -> Sequence[float]:
        """One finite number for each sampled token."""

    @property
    def multi_modal_data(self) -> MultiModalData:
        """Sidecar of the whole prompt."""

    @property
    def finish_reason(self) -> str:
        """Why sampling ended."""

    @property
    def routed_experts(self) -> "RoutedExperts | None":
        """Router choices of prompt and completion, or None."""

    @property
    def weight_versions(self) -> Sequence[WeightVersionSpan]:
        """Which weights sampled which tokens of the completion."""

    @property
    def allowed(self) -> Sequence[AllowedTokens]:
        """Token ids among which the completion was sampled, if `logprobs` are normalised over them."""

    @property
    def restricted(self) -> Sequence[str]:
        """Kinds of grammar that restricted the completion, if `allowed` does not name the tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts that the routers of a mixture-of-experts model chose, to be replayed in training.

    The last sampled token is never fed back, so an engine lacks its row: `n` tokens from start 0 have `n - 1`
    rows.

    Attributes:
        data: Integers of shape `(rows, layers, top_k)`, often a read-only view of the engine's reply.
        start: Position in prompt plus completion of the token that row 0 belongs to.

    Raises:
        TrajectoryError: The array has another shape or dtype, or `start` is negative.
    """

    data: npt.NDArray[Any]
    start: int = 0

    def __post_init__(self) -> None:
        is_array = isinstance(self.data, np.ndarray)
        if not is_array or self.data.ndim != 3 or self.data.dtype.kind not in "iu" or self.start < 0:
            form = f"{self.data.dtype} {list(self.data.shape)}" if is_array else type(self.data).__name__
            raise TrajectoryError(
                "routed experts have the wrong form",
                where="routed_experts",
                expected="integers of shape (rows, layers, top_k), from position 0 or later",
                got=f"{form} from {self.start}",
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, layers and experts per token."""
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

    def cut(self, start: int, stop: int) -> "RoutedExperts":
        """Return the rows of positions within `[start, stop)`, which keep their positions, as a view."""
        low, high = (min(max(position - self.start, 0), len(self.data)) for position in (start, stop))
        return RoutedExperts(self.data[low:high], self.start + low)

    def shift(self, by: int) -> "RoutedExperts":
        """Return the same rows at positions that are higher by `by`."""
        return RoutedExperts(self.data, self.start + by)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        same = self.start == other.start and self.dtype == other.dtype
        return same and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


def last_run(spans: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the last gapless run `[start, stop)` that spans of positions cover, None if they are empty."""
    spans = sorted((span for span in spans if span[0] < span[1]), reverse=True, key=lambda span: span[1])
    if not spans:
        return None
    start, end = spans[0]
    for first, last in spans[1:]:
        if last >= start:
            start = min(start, first)
    return start, end


def assembled_experts(parts: Sequence[tuple[RoutedExperts, int]]) -> RoutedExperts | None:
    """Return the rows of the last gapless run. The earliest step with a row counts: it met the token first.

    Args:
        parts: From the root on, the rows of each step, and the position at which its part of the sequence
            ends.
    """
    run = last_run((experts.start, min(experts.stop, stop)) for experts, stop in parts)
    if run is None:
        return None
    start, end = run
    used = [pair for pair in parts if max(pair[0].start, start) < min(pair[0].stop, pair[1])]
    first = used[0][0]
    if len(used) == 1:
        return first.cut(start, end)
    data = np.empty((end - start, *first.shape[1:]), first.dtype)
    for experts, stop in reversed(used):  # the earliest is written last
        rows = experts.cut(start, stop)
        data[rows.start - start : rows.stop - start] = rows.data
    return RoutedExperts(data, start)


def new_rows(experts: RoutedExperts, known: tuple[int, int] | None, keep: int) -> RoutedExperts:
    """Return the rows that are not known from earlier steps, or all if these leave gaps.

    The row of the last kept token is new: no earlier call fed that token back.

    Args:
        experts: Router choices of the whole sequence.
        known: Positions that earlier steps cover, see `last_run`.
        keep: Number of leading tokens that are shared with earlier steps.
    """
    start = max(experts.start, min(keep - 1, experts.stop))
    if known is None or known[0] > experts.start or known[1] < keep - 1 or start == experts.start:
        return experts
    # Copied, or the few rows would keep the engine's whole reply alive.
    return RoutedExperts(experts.data[start - experts.start :].copy(), start)


def check_experts(value: Any, length: int, where: str) -> None:
    """Check that router choices fit a sequence of `length` tokens."""
    if not isinstance(value, RoutedExperts):
        problem, got = "router choices have the wrong type", type(value).__name__
        raise TrajectoryError(problem, where=where, expected="RoutedExperts", got=got)
    shortest = max(0, length - 1)  # the last token is never fed back, so an engine may lack its row
    if not shortest <= value.stop <= length or value.start > length:
        raise TrajectoryError(
            "the rows of routed experts do not fit the tokens",
            where=where,
            expected=f"rows to position {shortest} or {length}",
            got=f"positions [{value.start}, {value.stop})",
        )


def check_allowed(value: Any, completion_ids: npt.NDArray[Any], where: str) -> tuple[AllowedTokens, ...]:
    """Return spans of allowed tokens. Each must allow the tokens that were sampled."""
    spans = _spans(value, AllowedTokens, len(completion_ids), where)
    for index, span in enumerate(spans):
        place = f"{where}[{index}]"
        # A token named twice would count twice in the sum that normalises log-probabilities.
        if not all(map(lt, (-1, *span.token_ids), span.token_ids)):
            raise TrajectoryError(
                "allowed tokens are malformed",
                where=f"{place}.token_ids",
                expected="token ids that rise from 0 on",
                got=str(span.token_ids)[:100],
            )
        listed, sampled = frozenset(span.token_ids), completion_ids[span.start : span.stop].tolist()
        wrong = next((at for at, token in enumerate(sampled) if (token in listed) == span.forbids), None)
        if wrong is not None:
            raise TrajectoryError(
                "a token was sampled that was not allowed",
                where=place,
                expected=f"{'none' if span.forbids else 'one'} of {len(span.token_ids)} tokens",
                got=f"{sampled[wrong]} at {span.start + wrong}",
            )
    return spans


def check_versions(value: Any, count: int, where: str) -> tuple[WeightVersionSpan, ...]:
    """Return spans of weight versions over `count` sampled tokens."""
    return _spans(value, WeightVersionSpan, count, where)


def _spans(value: Any, kind: type[S], count: int, where: str) -> tuple[S, ...]:
    """Return spans over `count` sampled tokens, which must be in order and not overlap."""
    form = ready(kind)
    try:
        spans: list[Any] = [msgspec.convert(span, form) for span in value]
    except (TypeError, msgspec.ValidationError) as error:
        problem, expected = "a span is malformed", f"{', '.join(kind._fields)} of each"
        raise TrajectoryError(problem, where=where, expected=expected, got=str(error)) from error
    end = 0
    for index, span in enumerate(spans):
        if not end <= span.start <= span.stop <= count:
            raise TrajectoryError(
                "a span is out of place",
                where=f"{where}[{index}]",
                expected=f"start and stop within sampled tokens [{end}, {count})",
                got=f"[{span.start}, {span.stop})",
            )
        end = span.stop
    return tuple(spans)
