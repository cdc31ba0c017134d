"""The packed form of trajectories: plain data in which each distinct thing stands once.

A packed form is a dict of the fields of `PackedTrajectories`, in turn made of dicts, lists, numpy arrays
and the media items themselves. It can be encoded, stored or sent by whatever can carry those.

- `items` is the table of distinct media items.
- `tokens` is one int32 array `[T]`, the pool of token ids.
- `placeholders` is one int32 array `[P, 4]`: item row, offset, length, and the number of embed spans, -1
  for `None`.
- `spans` is one int32 array `[S, 2]`, the embed spans of the placeholders that have some, in their order.
- `steps` lists the steps of all trajectories one after another, and `lengths` says how many belong to each.

The number of arrays does not grow with the number of steps, only with that of the items. A step says of its
token ids and placeholders how many it keeps of those of its `base`, an earlier step, and how many it adds.
What it adds comes next in the pool: pools are read from front to back, step by step, within a step block by
block, within a block first the prompt, then the completion. So nothing in a pool is used twice, and nothing
is left.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError

FORMAT: Final = "mmrender.trajectories"
VERSION: Final = 1

Int32Array: TypeAlias = npt.NDArray[np.int32]
RangeForm: TypeAlias = Literal["range", "mapping", "mapping with tuples", "mapping with lists"]


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the packed form; as plain data, a dict of its fields."""


class PackedItem(_Packed):
    """One row of the item table. `item` is `None` where a sidecar names a hash without its data."""

    modality: str
    hash: str
    item: Any = None


class PackedIds(_Packed):
    """A sequence of token ids: the first `keep` of the reference sequence, then the next `add` of the pool.

    `form` is `list`, `tuple` or the name of the numpy dtype that the sequence had.
    """

    keep: int
    add: int
    form: str


class PackedMask(_Packed):
    """A 0/1 or true/false list as runs `(value, count)`."""

    runs: list[tuple[bool | int, int]]
    form: Literal["list", "tuple"]


class PackedEntries(_Packed):
    """The placeholders of one modality: the first `keep` of the reference, then the next `add` of the pool.

    `hashes`, `ranges` and `items` give the sequence type (`list` or `tuple`) of the three fields of a
    sidecar, `None` where the sidecar did not hold that one for the modality.
    """

    keep: int
    add: int
    hashes: Literal["list", "tuple"] | None = None
    ranges: Literal["list", "tuple"] | None = None
    items: Literal["list", "tuple"] | None = None
    range_form: RangeForm = "range"


class PackedSidecar(_Packed):
    """A sidecar. `fields` are those that a mapping held, `rest` its other entries."""

    form: Literal["MultiModalData", "mapping"]
    modalities: dict[str, PackedEntries]
    fields: list[str]
    rest: dict[str, Any] = {}


class PackedBlock(_Packed):
    """A token block: its other fields as they are, and a `None` there for each that is packed."""

    rest: dict[str, Any]
    prompt: PackedIds | None = None
    completion: PackedIds | None = None
    masks: dict[str, PackedMask] = {}
    sidecar: PackedSidecar | None = None


class PackedStep(_Packed):
    """A step: its other fields, and its blocks by path (`tokens`, `response.message.tokens`).

    `base` is the index in `steps` of the step that the first block is relative to, -1 for none. A second
    block is relative to the first.
    """

    base: int
    rest: dict[str, Any]
    blocks: dict[str, PackedBlock]


class PackedTrajectories(_Packed):
    """The whole packed form; see the module."""

    format: str
    version: int
    items: list[PackedItem]
    tokens: Any
    placeholders: Any
    spans: Any
    steps: list[PackedStep]
    lengths: list[int]


def to_plain(node: Any) -> Any:
    """Turn the parts of the packed form into dicts; everything else is returned as it is."""
    if isinstance(node, _Packed):
        return {name: to_plain(value) for name, value in msgspec.structs.asdict(node).items()}
    if type(node) is list and node and isinstance(node[0], _Packed):
        return [to_plain(entry) for entry in node]
    if type(node) is dict and node and isinstance(next(iter(node.values())), _Packed):
        return {key: to_plain(value) for key, value in node.items()}
    return node


def from_plain(packed: object) -> PackedTrajectories:
    """Check the outline of a packed form: its version, fields, types, pools and lengths.

    Raises:
        TrajectoryError: It is not a packed form, one of another version, or damaged.
    """
    marks = [packed.get(key) for key in ("format", "version")] if isinstance(packed, Mapping) else None
    # Compared as text, since a damaged form may hold anything here, arrays among them.
    if str(marks) != str([FORMAT, VERSION]):
        raise TrajectoryError(
            "this is not a packed form that can be read",
            where="packed",
            expected=f"format {FORMAT!r}, version {VERSION}",
            got=f"format {marks[0]!r}, version {marks[1]!r}" if marks else type(packed).__name__,
            remedy="Pack and unpack with the same release of mmrender",
        )
    try:
        form = msgspec.convert(packed, PackedTrajectories)
    except (ValueError, TypeError, AttributeError) as error:  # msgspec asks an array, say, for its keys
        raise TrajectoryError("the packed form is damaged", where="packed", got=str(error)) from error
    _check_pool(form.tokens, "tokens", None)
    _check_pool(form.placeholders, "placeholders", 4)
    _check_pool(form.spans, "spans", 2)
    if min(form.lengths, default=0) < 0 or sum(form.lengths) != len(form.steps):
        raise TrajectoryError(
            "the lengths of the trajectories do not add up",
            where="packed.lengths",
            expected=f"non-negative numbers with the sum {len(form.steps)}",
            got=str(form.lengths),
        )
    return form


def _check_pool(pool: Any, name: str, columns: int | None) -> None:
    ndim = 1 if columns is None else 2
    if (
        isinstance(pool, np.ndarray)
        and pool.dtype == np.int32
        and pool.ndim == ndim
        and columns in (None, pool.shape[-1])
    ):
        return
    shape = "[n]" if columns is None else f"[n, {columns}]"
    got = f"{pool.dtype} {list(pool.shape)}" if isinstance(pool, np.ndarray) else type(pool).__name__
    raise TrajectoryError(
        "a pool has the wrong shape", where=f"packed.{name}", expected=f"int32 {shape}", got=got
    )


class PoolReader:
    """Hands out the rows of a pool from front to back."""

    def __init__(self, pool: Int32Array, name: str) -> None:
        self._pool = pool
        self._name = name
        self._next = 0

    def take(self, count: int, where: str) -> Int32Array:
        """Return the next `count` rows as a view.

        Raises:
            TrajectoryError: There are not so many.
        """
        left = len(self._pool) - self._next
        if not 0 <= count <= left:
            raise TrajectoryError(
                f"more is taken from the pool of {self._name} than it holds",
                where=where,
                expected=f"0..{left}",
                got=str(count),
            )
        self._next += count
        return self._pool[self._next - count : self._next]

    def finish(self) -> None:
        """Raise `TrajectoryError` if rows are left."""
        if self._next != len(self._pool):
            raise TrajectoryError(
                "a pool holds rows that no step uses",
                where=f"packed.{self._name}",
                expected=str(self._next),
                got=str(len(self._pool)),
            )


def check_keep(keep: int, available: int, where: str) -> None:
    """Raise `TrajectoryError` unless `keep` entries can be taken from `available` ones."""
    if not 0 <= keep <= available:
        raise TrajectoryError(
            "more is kept than the reference holds", where=where, expected=f"0..{available}", got=str(keep)
        )
