"""`TensorList`: one tensor per row of a batch if rows differ in length, such as patches of images.

The rows lie one after another in one tensor, so the list is also the model's input, with no copy: `values`.
A row without images is `empty(0, *trailing)`, never None.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mmrender.errors import BatchError, importing

with importing("torch", "torch", "mmrender.training"):
    import torch as _torch

torch: Any = _torch  # type checkers do not follow torch. Other modules of this package import it from here


class _Packed(NamedTuple):
    """A tensor's bytes as an array, which pickles out of band."""

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


def _packed(value: Any, protocol: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if protocol < 5 or value.device.type != "cpu" or value.requires_grad:
        # torch pickles a tensor with all of its storage, and a slice would take the whole batch along.
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()
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

    They arrive as views of the buffers, or as copies if the buffers cannot be written to. Other protocols
    leave tensors to torch, which passes them through shared memory between the processes of a `DataLoader`.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = {one.name: _packed(getattr(self, one.name), protocol) for one in fields(cast(Any, self))}
        return _restored, (type(self), values)


def check_aligned(values: Any, shape: Iterable[int], owner: str) -> None:
    """Raise `BatchError` unless a tensor is `(*shape, ...)`, `shape` being rows and tokens of its owner."""
    expected = [*shape]
    if [*values.shape[:2]] != expected:
        got = str(list(values.shape))
        raise BatchError(f"a tensor is not aligned to the {owner}", expected=f"{expected} first", got=got)


def row_places(indices: Iterable[Any], count: int) -> list[int]:
    """Return the numbers of rows, from 0, among `count` rows. Raises as `TensorList.select`.

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
                remedy="In place of a mask pass the numbers of its rows",
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
    def from_rows(cls, rows: Sequence[Any]) -> "TensorList":
        """Join rows, each of shape `(length, *trailing)`, in one copy.

        Raises:
            BatchError: `rows` is empty, one is not a tensor, or dtypes or trailing dimensions differ.
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
    ) -> "TensorList":
        """Return that many empty rows."""
        return cls(torch.empty((0, *trailing), dtype=dtype, device=device), (0,) * rows)

    @staticmethod
    def cat(lists: Sequence["TensorList"], *, pad: bool = False) -> "TensorList":
        """Return the rows of all lists in order. Empty lists take dtype and shape of the rest.

        Args:
            lists: One or more.
            pad: Whether to fill smaller trailing dimensions with zeros at their ends, up to the largest.

        Raises:
            BatchError: `lists` is empty, or dtypes or trailing dimensions differ.
        """
        if not lists:
            raise BatchError("no lists to join", where="lists")
        filled = [one for one in lists if one.values.shape[0]] or [lists[0]]
        dtype, trailing = filled[0].dtype, filled[0].trailing
        if pad and len({len(one.trailing) for one in filled}) == 1:
            trailing = tuple(map(max, zip(*(one.trailing for one in filled), strict=True)))
        values = []
        for one in filled:
            fits = one.trailing == trailing or (pad and len(one.trailing) == len(trailing))
            if one.dtype != dtype or not fits:
                raise BatchError(
                    "rows differ in dtype or trailing dimensions",
                    where="lists",
                    expected=f"{dtype} {['...', *filled[0].trailing]}",
                    got=f"{one.dtype} {['...', *one.trailing]}",
                )
            pairs = zip(trailing[::-1], one.trailing[::-1], strict=True)
            ends = [end for largest, size in pairs for end in (0, largest - size)]
            values.append(torch.nn.functional.pad(one.values, ends) if any(ends) else one.values)
        lengths = tuple(length for one in lists for length in one.lengths)
        return TensorList(values[0] if len(values) == 1 else torch.cat(values), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.split(self.lengths)) if self.lengths else iter(())

    def __getitem__(self, index: Any) -> Any:
        """Return one row as a view, or a list of rows, a view for a slice without a step.

        Raises as `select`.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.select(range(start, stop, step))
            stop, offsets = max(start, stop), self.offsets
            return TensorList(self.values[offsets[start] : offsets[stop]], self.lengths[start:stop])
        if isinstance(index, Sequence) or bool(getattr(index, "ndim", 0)):  # arrays are not sequences
            return self.select(index)
        (place,) = row_places([index], len(self))
        start = self.offsets[place]
        return self.values[start : start + self.lengths[place]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorList):
            return NotImplemented
        same = (self.lengths, self.dtype, self.trailing) == (other.lengths, other.dtype, other.trailing)
        return same and bool(torch.equal(self.values, other.values))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        form = f"{['...', *self.trailing]}, {self.dtype}, lengths={self.lengths}"
        return f"TensorList({len(self)} rows of {form})"

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

    def select(self, indices: Sequence[int]) -> "TensorList":
        """Return a copy of the rows of these indices, in their order.

        Raises:
            BatchError: An index is not an integer, such as one of a mask.
            IndexError: An index is out of range.
        """
        rows = [self[place] for place in row_places(indices, len(self))]
        if not rows:
            return cast(TensorList, self[:0])
        return TensorList(torch.cat(rows), tuple(row.shape[0] for row in rows))

    def to(self, device: Any = None, dtype: Any = None, *, non_blocking: bool = False) -> "TensorList":
        """Return the rows on a device, floating ones in a dtype. Integers and booleans keep theirs.

        As for a tensor, the first argument may be the dtype.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is None or not self.values.is_floating_point():
            dtype = self.dtype
        # Not `or`: a device may be given by number, and the first one is 0.
        device = self.values.device if device is None else device
        return TensorList(self.values.to(device=device, dtype=dtype, non_blocking=non_blocking), self.lengths)

    def pin_memory(self) -> "TensorList":
        """Return the rows in page-locked memory, which a device reads asynchronously."""
        return TensorList(self.values.pin_memory(), self.lengths)

    def padded(self, value: float = 0) -> Any:
        """Return one tensor `(rows, longest, *trailing)`, with `value` after the end of shorter rows."""
        longest = max(self.lengths, default=0)
        if len(set(self.lengths)) == 1:
            return self.values.reshape(len(self), longest, *self.trailing)
        padded = self.values.new_full((len(self), longest, *self.trailing), value)
        for target, row in zip(padded, self, strict=True):
            target[: row.shape[0]] = row
        return padded
