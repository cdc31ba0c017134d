"""Tensors of any processor in the smallest form that gives them back bit for bit.

Whether normalised pixels can be kept as uint8 is not asked of the processor's settings: each array is mapped
back to levels and expanded again, and only an array that survives this unchanged is kept as levels.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.media.processors.arithmetic import STORAGE, PixelArithmetic, cast
from mmrender.spans import TensorDtype

_NARROWER = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


@dataclass(frozen=True, slots=True)
class Levels:
    """Normalised pixels as the uint8 levels they came from.

    Attributes:
        levels: `(tiles held, 3, height, width)`.
        held: Which tiles of the whole these are; the others are all zero, padding added after normalising.
        shape: Of the whole: `(..., 3, height, width)`.
        arithmetic: How levels become values.
    """

    levels: npt.NDArray[np.uint8]
    held: tuple[int, ...]
    shape: tuple[int, ...]
    arithmetic: PixelArithmetic

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.levels.nbytes

    def expanded(self, dtype: TensorDtype) -> npt.NDArray[Any]:
        """Return the pixels, of shape `shape`, in the storage type of `dtype`."""
        out = np.zeros(self.shape, STORAGE[dtype])
        tiles = out.reshape(-1, *self.shape[-3:])
        for index, tile in zip(self.held, self.levels, strict=True):
            for channel in range(3):
                self.arithmetic.write(tile[channel], channel, dtype, tiles[index, channel])
        return out


@dataclass(frozen=True, slots=True)
class Floats:
    """Floating-point values with no smaller exact form."""

    values: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes

    def expanded(self, dtype: TensorDtype) -> npt.NDArray[Any]:
        """Return the values rounded to `dtype`."""
        rounded = cast(self.values.astype(np.float32, copy=False), dtype)
        return rounded.copy() if rounded is self.values else rounded


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers or booleans: one value where they are all equal, else the narrowest type that holds them."""

    values: npt.NDArray[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes

    def expanded(self, _: TensorDtype) -> npt.NDArray[Any]:
        """Return the values in their own shape and type, whatever the floating-point type asked for."""
        return np.broadcast_to(self.values, self.shape).astype(self.dtype)


Compact: TypeAlias = Levels | Floats | Integers


def compacted(values: npt.NDArray[Any], arithmetic: PixelArithmetic | None) -> Compact:
    """Return the smallest exact form of an array.

    Args:
        values: Of any shape; pixels have their three channels on the third axis from the end.
        arithmetic: How pixels were normalised, if that is known.
    """
    if not np.issubdtype(values.dtype, np.floating):
        return _narrowed(values)
    if arithmetic is not None and values.dtype == np.float32 and values.ndim >= 3 and values.shape[-3] == 3:
        levels = _levels(np.ascontiguousarray(values), arithmetic)
        if levels is not None:
            return levels
    return Floats(_frozen(values))


def _levels(values: npt.NDArray[np.float32], arithmetic: PixelArithmetic) -> Levels | None:
    tiles = values.reshape(-1, *values.shape[-3:])
    # Compared as bits throughout: -0.0 and NaN must come back as they were.
    held = tuple(index for index, tile in enumerate(tiles) if tile.view(np.uint32).any())
    table = arithmetic.table()
    levels = np.empty((len(held), *tiles.shape[1:]), np.uint8)
    for target, index in zip(levels, held, strict=True):
        for channel in range(3):
            lowest, highest = table[channel, 0], table[channel, -1]
            with np.errstate(invalid="ignore", over="ignore"):
                plane = (tiles[index, channel] - lowest) * (np.float32(255) / (highest - lowest))
                target[channel] = np.clip(np.rint(plane), 0, 255)
    candidate = Levels(_frozen(levels), held, values.shape, arithmetic)
    same = np.array_equal(candidate.expanded("float32").view(np.uint32), values.view(np.uint32))
    return candidate if same else None


def _narrowed(values: npt.NDArray[Any]) -> Integers:
    shape, dtype = values.shape, values.dtype
    if values.size and (values == values.flat[0]).all():
        return Integers(_frozen(values.reshape(-1)[:1].reshape((1,) * values.ndim).copy()), shape, dtype)
    if values.size and dtype.kind in "iu":
        least, most = int(values.min()), int(values.max())
        for narrower in _NARROWER:
            info = np.iinfo(narrower)
            if np.dtype(narrower).itemsize < dtype.itemsize and info.min <= least and most <= info.max:
                return Integers(_frozen(values.astype(narrower)), shape, dtype)
    return Integers(_frozen(values), shape, dtype)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # A view would keep all of its base alive.
    if values.base is not None or not values.flags.c_contiguous:
        values = values.copy(order="C")
    values.flags.writeable = False
    return values
