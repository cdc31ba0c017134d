"""Router choices of a sequence, put together from the engine calls that brought them."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from mmrender.trajectory.engine_data import RoutedExperts

Brought: TypeAlias = Sequence[tuple[RoutedExperts, int]]
"""From the root on: the rows that a step brought, and up to which position the sequence is that step's."""


def experts_span(brought: Brought) -> tuple[int, int] | None:
    """Return the last gapless run of positions `[start, stop)` that have rows, None if there is none."""
    spans = [(experts.start, min(experts.stop, stop)) for experts, stop in brought]
    spans = sorted((span for span in spans if span[0] < span[1]), reverse=True, key=lambda span: span[1])
    if not spans:
        return None
    start, end = spans[0]
    for first, last in spans[1:]:
        if last >= start:
            start = min(start, first)
    return start, end


def assembled_experts(brought: Brought) -> RoutedExperts | None:
    """Return the rows of the last gapless run; where several steps brought one, that of the earliest.

    The earliest call is the one that sampled a token, or first met it. Rows of one step are a view.
    """
    span = experts_span(brought)
    if span is None:
        return None
    start, end = span
    used = [pair for pair in brought if max(pair[0].start, start) < min(pair[0].stop, pair[1])]
    if len(used) == 1:
        experts = used[0][0]
        return RoutedExperts(experts.data[start - experts.start : end - experts.start], start)
    first = used[0][0]
    data = np.empty((end - start, *first.shape[1:]), first.dtype)
    for experts, stop in reversed(used):  # what came first is written last
        low, high = max(experts.start, start), min(experts.stop, stop)
        data[low - start : high - start] = experts.data[low - experts.start : high - experts.start]
    return RoutedExperts(data, start)


def rows_beyond(experts: RoutedExperts | None, brought: Brought, keep: int) -> RoutedExperts | None:
    """Return the rows that are not known already, of a sequence whose first `keep` tokens are.

    The row of the last kept token is among them: nobody fed that token back before. Where what was brought
    leaves gaps, all rows are returned.
    """
    known = experts_span(brought)
    if experts is None or known is None or known[0] > experts.start or known[1] < keep - 1:
        return experts
    start = max(experts.start, min(keep - 1, experts.stop))
    rows = experts.from_position(start)
    # Copied, or the few rows would keep all that the engine sent alive.
    return rows if start == experts.start else RoutedExperts(rows.data.copy(), start)
