"""Bins of samples for a token budget, and parts of equal cost.

A sample is never split. Bins are filled by first-fit decreasing, which needs at most 11/9 of the fewest
possible bins and two thirds of one more (Dosa, 2007); parts are balanced by giving the costliest first to the
part that has least (Graham, 1969).
"""

import heapq
from collections.abc import Hashable, Sequence

import numpy as np

from mmrender.errors import BatchError

_ANY, _UNUSED = -1, 16


def first_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, keys: Sequence[Hashable | None] | None = None
) -> list[list[int]]:
    """Put samples into bins of at most `capacity` tokens.

    Args:
        lengths: Tokens of each sample.
        capacity: Tokens of a bin.
        keys: For each sample what all samples of its bin must share, such as the kinds of its image tensors;
            None joins any.

    Returns:
        Indices by bin; within a bin they rise. Every index stands in one bin.

    Raises:
        BatchError: A sample is longer than a bin.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > capacity:
        raise BatchError(
            "a sample does not fit a bin, and samples are not split",
            where=f"lengths[{order[0]}]",
            expected=f"at most {capacity} tokens",
            got=str(lengths[order[0]]),
            remedy="Truncate it, or raise the budget",
        )
    numbers: dict[Hashable, int] = {}
    keys = [None] * len(lengths) if keys is None else keys
    kinds = [_ANY if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
    room, kind = np.zeros(_UNUSED, np.int64), np.full(_UNUSED, _ANY, np.int64)
    bins: list[list[int]] = []
    for index in order:
        used = len(bins)
        fits = room[:used] >= lengths[index]
        if kinds[index] != _ANY:
            fits &= (kind[:used] == _ANY) | (kind[:used] == kinds[index])
        found = int(fits.argmax()) if fits.any() else used
        if found == used:
            if used == len(room):
                room, kind = np.append(room, np.zeros_like(room)), np.append(kind, np.full_like(kind, _ANY))
            bins.append([])
            room[found] = capacity
        bins[found].append(index)
        room[found] -= lengths[index]
        kind[found] = kind[found] if kinds[index] == _ANY else kinds[index]
    return [sorted(members) for members in bins]


def compute_cost(lengths: Sequence[int], *, hidden_size: int = 4096) -> float:
    """Return the relative cost of sequences side by side in a row: `sum of n + n**2 / (12 * hidden_size)`.

    Per layer a token costs about `24 * hidden_size**2` operations in projections (12 h**2 weights, two
    operations each), and causal attention `2 * hidden_size` for each token before it; they are equal at
    `n = 12 * hidden_size`. The unit is the projections of one token.
    """
    return float(sum(length + length**2 / (12 * hidden_size) for length in lengths))


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Give items to parts of equal counts (to one) so that the costliest part costs little.

    Returns:
        Indices by part; within a part they rise.

    Raises:
        BatchError: `parts` is not positive.
    """
    if parts < 1:
        raise BatchError("items are given to one part or more", where="parts", got=str(parts))
    larger = len(costs) % parts or parts  # so many parts may hold one more than the others
    base = (len(costs) - larger) // parts if len(costs) else 0
    heap = [(0.0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cost, part = heapq.heappop(heap)
        members[part].append(index)
        if len(members[part]) > base:
            larger -= 1
            if larger == 0:
                heap = [entry for entry in heap if len(members[entry[1]]) < base]
                heapq.heapify(heap)
        elif len(members[part]) < base or larger > 0:
            heapq.heappush(heap, (cost + costs[index], part))
    return [sorted(part) for part in members]
