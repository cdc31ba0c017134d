"""`TensorList`: one tensor per row of a batch where rows differ in length, such as patches of images.

The rows lie one after another in one tensor, so the list is also what a model takes, with no copy: `values`.
A row without images is `empty(0, *trailing)`, never None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError, MissingDependencyError

try:
    import torch as _torch
except ImportError as error:
    raise MissingDependencyError.of_extra("torch", "torch", "mmrender.training") from error

torch: Any = _torch  # type checkers do not follow torch; other modules of this package import it from here


class _Packed(NamedTuple):
    """A tensor's bytes as an array, which pickles out of band."""

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


def _packed(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.requires_grad:
        return value
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _Packed(data, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _unpacked(value: Any) -> Any:
    if not isinstance(value, _Packed):
        return value
    # Whoever holds a tensor may write to it, so memory that cannot be written to is copied.
    data = value.data if value.data.flags.writeable else value.data.copy()
    return torch.from_numpy(data).view(getattr(torch, value.dtype)).reshape(value.shape)


def _restored(cls: Any, values: dict[str, Any]) -> Any:
    return cls(**{name: _unpacked(value) for name, value in values.items()})


class OutOfBand:
    """A dataclass whose tensors on the CPU pickle out of band with protocol 5, as numpy's arrays do.

    They arrive as views of the buffers, or as copies where these cannot be written to. Other protocols
    leave tensors to torch, which passes them through shared memory between the processes of a `DataLoader`.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol < 5:
            return super().__reduce_ex__(protocol)
        values = {one.name: _packed(getattr(self, one.name)) for one in fields(cast(Any, self))}
        return _restored, (type(self), values)


def row_places(indices: Iterable[Any], count: int) -> list[int]:
    """Return which of `count` rows are meant; raises as `TensorList.select`.

    Booleans are refused: Python counts them as 0 and 1, so a mask would silently name the first two rows.
    """
    places = []
    for number, index in enumerate(indices):
        try:
            if isinstance(index, bool) or str(getattr(index, "dtype", "")) in ("bool", "torch.bool"):
                raise TypeError
            places.append(range(count)[operator.index(index)])
        except TypeError:
            raise BatchError(
                "rows are taken by their numbers",
                where=f"indices[{number}]",
                expected="an integer",
                got=repr(index)[:80],
                remedy="In place of a mask give the numbers of the rows where it holds",
            ) from None
    return places


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorList(OutOfBand):
    """Rows of equal dtype and trailing dimensions.

    Attributes:
        values: All rows, `(sum of lengths, *trailing)`.
        lengths: First dimension of each row.

    Raises:
        BatchError: The lengths do not add up to the values.
    """

    values: torch.Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        rows = len(self.values)
        if sum(self.lengths) != rows or any(length < 0 for length in self.lengths):
            raise BatchError(
                "the lengths do not add up to the values",
                where="lengths",
                expected=f"0 or more each, {rows} in all",
                got=str(self.lengths)[:80],
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> TensorList:
        """Join rows, each of shape `(length, *trailing)`, in one copy.

        Raises:
            BatchError: There is no row, one is not a tensor, or dtypes or trailing dimensions differ.
        """
        for index, row in enumerate(rows):
            if not isinstance(row, torch.Tensor):
                remedy = "A row without images is torch.empty(0, *trailing)"
                got = f"a {type(row).__name__}"
                raise BatchError("a row is a tensor", where=f"rows[{index}]", got=got, remedy=remedy)
        return cls.cat([cls(row, (row.shape[0],)) for row in rows])

    @classmethod
    def empty(
        cls, rows: int, trailing: Sequence[int] = (), *, dtype: Any = None, device: Any = None
    ) -> TensorList:
        """Return that many empty rows."""
        return cls(torch.empty((0, *trailing), dtype=dtype, device=device), (0,) * rows)

    @staticmethod
    def cat(lists: Sequence[TensorList], *, pad: bool = False) -> TensorList:
        """Return the rows of all lists in order. Empty lists take dtype and shape of the others.

        Args:
            lists: One or more.
            pad: Whether to fill smaller trailing dimensions with zeros at their ends, up to the largest.

        Raises:
            BatchError: There is no list, or dtypes or trailing dimensions differ.
        """
        if not lists:
            raise BatchError("no lists to join", where="lists")
        holding = [one for one in lists if one.values.shape[0]] or [lists[0]]
        model, trailing = holding[0], holding[0].trailing
        if pad and len({len(one.trailing) for one in holding}) == 1:
            trailing = tuple(map(max, zip(*(one.trailing for one in holding), strict=True)))
        values = []
        for one in holding:
            fits = one.trailing == trailing or (pad and len(one.trailing) == len(trailing))
            if one.dtype != model.dtype or not fits:
                raise BatchError(
                    "rows differ in dtype or trailing dimensions",
                    where="lists",
                    expected=f"{model.dtype} {['...', *model.trailing]}",
                    got=f"{one.dtype} {['...', *one.trailing]}",
                )
            pairs = zip(trailing[::-1], one.trailing[::-1], strict=True)
            ends = [end for most, own in pairs for end in (0, most - own)]
            values.append(torch.nn.functional.pad(one.values, ends) if any(ends) else one.values)
        lengths = tuple(length for one in lists for length in one.lengths)
        return TensorList(values[0] if len(values) == 1 else torch.cat(values), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.split(self.lengths)) if self.lengths else iter(())

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> TensorList: ...

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        """Return one row as a view; or a list of rows, a view for a slice without a step.

        Raises as `select`.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.select(range(start, stop, step))
            stop, offsets = max(start, stop), self.offsets
            return TensorList(self.values[offsets[start] : offsets[stop]], self.lengths[start:stop])
        given: Any = index
        if isinstance(given, Sequence) or bool(getattr(given, "ndim", 0)):  # arrays are not sequences
            return self.select(given)
        (place,) = row_places([given], len(self))
        start = self.offsets[place]
        return self.values[start : start + self.lengths[place]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorList):
            return NotImplemented
        same = self.lengths == other.lengths and self.dtype == other.dtype and self.trailing == other.trailing
        return same and bool(torch.equal(self.values, other.values))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        form = f"{['...', *self.trailing]}, {self.dtype}, lengths={self.lengths}"
        return f"TensorList({len(self)} rows of {form})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A tensor is pickled with all of its storage, and a slice would take the whole batch along.
        values = self.values
        whole = values.untyped_storage().nbytes() == values.numel() * values.element_size()
        return TensorList, (values if whole else values.clone(), self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of each row, and end of the last one: one more than there are rows."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def trailing(self) -> tuple[int, ...]:
        """Shape of a row without its first dimension."""
        return tuple(self.values.shape[1:])

    @property
    def dtype(self) -> Any:
        """Dtype of the rows."""
        return self.values.dtype

    def select(self, indices: Sequence[int]) -> TensorList:
        """Return a copy of the rows of these indices, in their order.

        Raises:
            BatchError: An index is not an integer, such as one of a mask.
            IndexError: There is no such row.
        """
        rows = [self[place] for place in row_places(indices, len(self))]
        if not rows:
            return self[:0]
        return TensorList(torch.cat(rows), tuple(row.shape[0] for row in rows))

    def chunk(self, chunks: int) -> list[TensorList]:
        """Return at most `chunks` views of equally many rows, the last one maybe shorter.

        Raises:
            BatchError: `chunks` is not positive.
        """
        if chunks < 1:
            raise BatchError("a list is cut into one part or more", where="chunks", got=str(chunks))
        size = max(1, -(-len(self) // chunks))
        return [self[start : start + size] for start in range(0, max(1, len(self)), size)]

    def to(self, device: Any = None, dtype: Any = None, *, non_blocking: bool = False) -> TensorList:
        """Return the rows on a device, floating ones in a dtype; integers and booleans keep theirs.

        As for a tensor, the first argument may be the dtype.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not self.values.is_floating_point():
            dtype = None
        # Not `or`: a device may be given by number, and the first one is 0.
        target = {"device": self.values.device if device is None else device, "dtype": dtype or self.dtype}
        return TensorList(self.values.to(**target, non_blocking=non_blocking), self.lengths)

    def pin_memory(self) -> TensorList:
        """Return the rows in page-locked memory, which a device reads asynchronously."""
        return TensorList(self.values.pin_memory(), self.lengths)

    def padded(self, value: float = 0) -> Any:
        """Return one tensor `(rows, longest, *trailing)`, with `value` after the end of shorter rows."""
        longest = max(self.lengths, default=0)
        if len(set(self.lengths)) == 1:
            return self.values.reshape(len(self), longest, *self.trailing)
        out = self.values.new_full((len(self), longest, *self.trailing), value)
        for target, row in zip(out, self, strict=True):
            target[: row.shape[0]] = row
        return out
