"""Token ids as what they add to a sequence that is known already, and masks as runs."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, Literal, cast

import numpy as np

from mmrender.errors import TrajectoryError
from mmrender.trajectory.packed import Int32Array, PackedIds, PackedMask, PoolReader, check_keep

NO_IDS: Final[Int32Array] = np.zeros(0, np.int32)
_INT32 = np.iinfo(np.int32)
_FORMS: Final = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_BLOCK: Final = 64
"""Tokens per node of the prefix index; fewer than this many are stored again when a base is found by it."""


def common_prefix(first: Int32Array, second: Int32Array) -> int:
    """Return how many leading entries two int32 arrays share."""
    count = min(len(first), len(second))
    differs = first[:count] != second[:count]
    return int(differs.argmax()) if differs.any() else count


def read_ids(value: Any, where: str) -> tuple[Int32Array, str]:
    """Return token ids as an int32 array `[n]`, and the form they had: `list`, `tuple` or a dtype name.

    Raises:
        TrajectoryError: They are no one-dimensional list, tuple or numpy array of integers that fit 32 bits.
    """
    form = value.dtype.name if isinstance(value, np.ndarray) else type(value).__name__
    if form in _FORMS | {"list", "tuple"}:
        ids = _integers(value)
        if ids is not None:
            return ids, form
    raise TrajectoryError(
        "token ids must be a flat list, tuple or numpy array of integers of 32 bits",
        where=where,
        got=_described(value),
    )


def _integers(value: Any) -> Int32Array | None:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # a ragged list, or an integer beyond 64 bits
        return None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        return None
    if len(array) and not (_INT32.min <= int(array.min()) and int(array.max()) <= _INT32.max):
        return None
    return array.astype(np.int32)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, list | tuple):
        odd = next(
            (x for x in value if type(x) is not int or not _INT32.min <= x <= _INT32.max), "nothing wrong"
        )
        return f"a {type(value).__name__} with {odd!r}"[:120]
    return type(value).__name__


def restore_ids(ids: Int32Array, form: str, where: str) -> Any:
    """Return token ids in the form that `read_ids` reported.

    Raises:
        TrajectoryError: There is no such form.
    """
    if form == "list":
        return ids.tolist()
    if form == "tuple":
        return tuple(ids.tolist())
    if form not in _FORMS:
        raise TrajectoryError("token ids have an unknown form", where=where, got=repr(form))
    return ids.astype(form)


class TokenPool:
    """Collects the runs of token ids that are not known from elsewhere."""

    def __init__(self) -> None:
        self._runs: list[Int32Array] = []

    def add(self, ids: Int32Array, form: str, reference: Int32Array) -> PackedIds:
        """Store what `ids` adds to the prefix that it shares with `reference`."""
        keep = common_prefix(ids, reference)
        self._runs.append(ids[keep:])
        return PackedIds(keep, len(ids) - keep, form)

    def array(self) -> Int32Array:
        """Return the pool, int32 `[T]`."""
        return np.concatenate([NO_IDS, *self._runs])


def expand_ids(packed: PackedIds, reference: Int32Array, pool: PoolReader, where: str) -> Int32Array:
    """Undo `TokenPool.add`.

    Raises:
        TrajectoryError: The delta does not fit the reference or the pool.
    """
    check_keep(packed.keep, len(reference), f"{where}.keep")
    added = pool.take(packed.add, f"{where}.add")
    return np.concatenate([reference[: packed.keep], added])


class PrefixIndex:
    """Finds, among sequences added before, one that shares a long prefix with another.

    A trie over blocks of 64 tokens: where a step branches off from a step that is not its predecessor, as
    sibling rollouts and interleaved agents do, its base is still found, within one block of the best.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, bytes], int] = {}
        self._owners: list[int] = [-1]

    def add(self, ids: Int32Array, owner: int) -> None:
        """Add a sequence under the number `owner`."""
        node = 0
        for block in _blocks(ids):
            child = self._children.get((node, block))
            if child is None:
                child = self._children[node, block] = len(self._owners)
                self._owners.append(owner)
            node = child

    def find(self, ids: Int32Array) -> int:
        """Return the owner of a sequence that shares the most leading blocks with `ids`, -1 for none."""
        node = 0
        for block in _blocks(ids):
            child = self._children.get((node, block))
            if child is None:
                break
            node = child
        return self._owners[node]


def _blocks(ids: Int32Array) -> list[bytes]:
    data = ids.tobytes()
    width = _BLOCK * ids.itemsize
    return [data[start : start + width] for start in range(0, len(data) - width + 1, width)]


def read_mask(value: Any) -> PackedMask | None:
    """Return a list or tuple of booleans or of integers as runs, `None` for others or if runs are many."""
    if type(value) not in (list, tuple) or set(map(type, value)) not in ({bool}, {int}):
        return None
    runs = [(entry, sum(1 for _ in group)) for entry, group in groupby(value)]
    form = cast(Literal["list", "tuple"], type(value).__name__)
    return PackedMask(runs, form) if 4 * len(runs) <= len(value) else None


def restore_mask(packed: PackedMask, limit: int, where: str) -> Sequence[bool | int]:
    """Undo `read_mask`.

    Raises:
        TrajectoryError: The runs are negative or add up to more than `limit` entries.
    """
    total = sum(count for _, count in packed.runs)
    if any(count < 0 for _, count in packed.runs) or total > limit:
        raise TrajectoryError(
            "a mask is longer than the tokens it belongs to",
            where=where,
            expected=f"at most {limit}",
            got=str(total),
        )
    entries = [value for value, count in packed.runs for _ in range(count)]
    return tuple(entries) if packed.form == "tuple" else entries
