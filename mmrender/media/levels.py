"""From uint8 levels to normalised floats and back, bit for bit as the reference computes.

A pixel value depends on its level and channel only, so 3 x 256 values define everything. They are computed
once by the reference's formula, and the fast computation of whole arrays is proved equal to them.

Tensors of any processor are kept in the smallest exact form. The processor's settings do not decide whether
normalised pixels become levels: each array is mapped back to levels and expanded again, and stays as levels
only if the result is equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mmrender.media.pixels import ImageBackend
from mmrender.sidecar import Count, TensorDtype

STORAGE: dict[TensorDtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""The numpy type of each tensor dtype. Bit patterns for bfloat16, which numpy lacks."""

Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


@dataclass(frozen=True, slots=True)
class PixelArithmetic:
    """Rescaling and normalising of one processor.

    Attributes:
        mean: Per channel, in units of the rescaled image.
        std: Per channel.
        rescale: Factor from levels to that unit, usually 1/255.
        backend: Back end whose order of operations is followed.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float
    backend: ImageBackend

    @classmethod
    def of(cls, mean: Any, std: Any, rescale: Any, backend: ImageBackend) -> "PixelArithmetic":
        """Read the settings of an image processor; `mean` and `std` may be one number for all channels.

        Raises:
            TypeError, ValueError: A setting is malformed.
        """
        values = [(each,) * 3 if isinstance(each, int | float) else each for each in (mean, std)]
        (red, green, blue), (dr, dg, db) = ([float(one) for one in each] for each in values)
        return cls((red, green, blue), (dr, dg, db), float(rescale), backend)

    def table(self) -> npt.NDArray[np.float32]:
        """Return the value of each level by the reference's formula: `(3, 256)`, float32, read-only."""
        return _table(self)

    def write(
        self, levels: npt.NDArray[np.uint8], channel: int, dtype: TensorDtype, out: npt.NDArray[Any]
    ) -> None:
        """Write the values of `levels`, all of one channel, into `out` of the storage type of `dtype`.

        Both arrays are C-contiguous and of equal size.
        """
        steps = _steps(self)[channel] if dtype == "float32" else None
        if steps is not None:
            values: npt.NDArray[Any] = levels
            for operation, operand in steps:
                values = operation(values, operand, out=out)
        elif levels.size % 2 == 0:
            pairs = levels.reshape(-1).view(np.uint16)
            table = _pair_table(self, channel, dtype)
            np.take(table, pairs, out=out.reshape(-1).view(table.dtype), mode="clip")
        else:
            np.take(cast(self.table()[channel], dtype), levels, out=out, mode="clip")


@lru_cache(maxsize=32)
def _table(arithmetic: PixelArithmetic) -> npt.NDArray[np.float32]:
    mean = np.array(arithmetic.mean, np.float32)[:, None]
    std = np.array(arithmetic.std, np.float32)[:, None]
    levels = np.arange(256)
    if arithmetic.backend == "torch":
        # The torch back end folds the factor into mean and deviation, each product rounded to float32.
        scale = np.float32(1.0 / arithmetic.rescale)
        mean, std, values = mean * scale, std * scale, levels.astype(np.float32)
    else:
        values = (levels.astype(np.float64) * arithmetic.rescale).astype(np.float32)
    table: npt.NDArray[np.float32] = (values - mean) / std
    table.flags.writeable = False
    return table


_Steps: TypeAlias = Sequence[tuple[Callable[..., Any], np.float32]]


@lru_cache(maxsize=32)
def _steps(arithmetic: PixelArithmetic) -> tuple[_Steps | None, ...]:
    """Return, per channel, operations on whole arrays that produce exactly the table's values.

    The first one makes float32 of levels. None if no order of operations does. Pairs of levels are looked up
    then, which takes two to three times as long: the tables of three channels exceed the nearest caches.
    """
    per_channel: list[_Steps | None] = []
    for mean, std, row in zip(arithmetic.mean, arithmetic.std, arithmetic.table(), strict=True):
        scale = np.float32(1.0 / arithmetic.rescale)
        shift, factor = np.float32(mean) * scale, np.float32(std) * scale
        # As the torch back end computes, and the same with the deviation, a power of two, divided by first.
        # Last as Pillow's computes, if a quotient in float32 rounds as its product in float64 does.
        orders: tuple[_Steps, ...] = (
            [(np.subtract, shift), (np.divide, factor)],
            [(np.divide, factor), (np.subtract, np.float32(mean) / np.float32(std))],
            [(np.divide, scale), (np.subtract, np.float32(mean)), (np.divide, np.float32(std))],
        )
        per_channel.append(next((steps for steps in orders if _produces(steps, row)), None))
    return tuple(per_channel)


def _produces(steps: _Steps, row: npt.NDArray[np.float32]) -> bool:
    """Whether the operations turn all 256 levels into exactly these values."""
    values: npt.NDArray[Any] = np.arange(256, dtype=np.uint8)
    out = np.empty(256, np.float32)
    for operation, operand in steps:
        values = operation(values, operand, out=out)
    return np.array_equal(out.view(np.uint32), row.view(np.uint32))


@lru_cache(maxsize=32)
def _pair_table(
    arithmetic: PixelArithmetic, channel: int, dtype: TensorDtype
) -> npt.NDArray[np.unsignedinteger]:
    """Return the values of two neighbouring levels as one word, for each of the 65,536 pairs.

    Gathering pairs halves the look-ups. Converting float32 arrays costs twice as much for bfloat16 and six
    times as much for float16, which numpy converts in software.
    """
    values = cast(arithmetic.table()[channel], dtype)
    levels = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return values[levels].view(f"u{2 * values.itemsize}").reshape(-1)


def cast(values: npt.NDArray[np.float32], dtype: TensorDtype) -> npt.NDArray[Any]:
    """Round float32 to the storage type of `dtype`, to nearest and ties to even, as torch does."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


class _Form(msgspec.Struct, frozen=True, eq=False, tag_field="form"):
    """A tensor in compact form."""


class Levels(_Form, frozen=True, eq=False, tag="levels"):
    """Normalised pixels as the uint8 levels they came from.

    Attributes:
        values: `(tiles held, 3, height, width)`, uint8.
        held: Indices of these tiles in the whole. Other tiles are zero, as padding after normalising.
        shape: Shape of the whole: `(..., 3, height, width)`.
        arithmetic: How levels become values.
    """

    values: npt.NDArray[np.uint8]
    held: tuple[Count, ...]
    shape: Shape
    arithmetic: PixelArithmetic

    def write(self, out: npt.NDArray[Any], dtype: TensorDtype) -> None:
        """Write the pixels into `out`, C-contiguous, of `shape` and the storage type of `dtype`."""
        tiles = out.reshape(-1, *self.shape[-3:])
        for index in set(range(len(tiles))).difference(self.held):
            tiles[index] = 0
        for index, tile in zip(self.held, self.values, strict=True):
            for channel in range(3):
                self.arithmetic.write(tile[channel], channel, dtype, tiles[index, channel])


class Floats(_Form, frozen=True, eq=False, tag="floats"):
    """Floating-point values with no smaller exact form."""

    values: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.values.shape

    def write(self, out: npt.NDArray[Any], dtype: TensorDtype) -> None:
        """Write the values, rounded to `dtype`, into `out`."""
        np.copyto(out, cast(self.values.astype(np.float32, copy=False), dtype))


class Padded(_Form, frozen=True, eq=False, tag="padded"):
    """Floating-point values that end in one value along an axis, such as features of a short audio clip.

    Attributes:
        values: The values before the padding.
        axis: The axis along which they are padded.
        length: Number of rows along the axis, padding included.
        fill: The value of the padding.
    """

    values: npt.NDArray[Any]
    axis: Annotated[int, msgspec.Meta(ge=0, le=7)]
    length: Count
    fill: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        shape = self.values.shape
        return (*shape[: self.axis], self.length, *shape[self.axis + 1 :])

    def write(self, out: npt.NDArray[Any], dtype: TensorDtype) -> None:
        """Write the values and the padding, rounded to `dtype`, into `out`."""
        before = (slice(None),) * self.axis
        start = self.values.shape[self.axis]
        np.copyto(out[(*before, slice(start))], cast(self.values.astype(np.float32, copy=False), dtype))
        out[(*before, slice(start, None))] = cast(np.array([self.fill], np.float32), dtype)[0]


class Integers(_Form, frozen=True, eq=False, tag="integers"):
    """Integers or booleans: a single value if all are equal, else the narrowest type."""

    values: npt.NDArray[Any]
    shape: Shape
    dtype: np.dtype[Any]

    def write(self, out: npt.NDArray[Any], _: TensorDtype) -> None:
        """Write the values into `out`, whose type is always `dtype`."""
        np.copyto(out, self.values, casting="unsafe")


Compact: TypeAlias = Levels | Floats | Padded | Integers


def storage_of(part: Compact, dtype: TensorDtype) -> np.dtype[Any]:
    """Return the numpy type of an expanded tensor: the storage of `dtype`, or its own integer type."""
    return part.dtype if isinstance(part, Integers) else np.dtype(STORAGE[dtype])


def expanded(part: Compact, dtype: TensorDtype) -> npt.NDArray[Any]:
    """Return the tensor as a new array."""
    out = np.empty(part.shape, storage_of(part, dtype))
    part.write(out, dtype)
    return out


def compacted(values: npt.NDArray[Any], arithmetic: PixelArithmetic | None) -> Compact:
    """Return the smallest exact form of an array. Pixels have their three channels third from the end."""
    if values.dtype.kind != "f":
        narrow = values
        if values.size and (values == values.flat[0]).all():
            narrow = values.reshape(-1)[:1].reshape((1,) * values.ndim)
        elif values.size and values.dtype.kind in "iu":
            narrower = np.result_type(*map(np.min_scalar_type, (values.min(), values.max())))
            if narrower.itemsize < values.itemsize:
                narrow = values.astype(narrower)
        return Integers(_frozen(narrow), values.shape, values.dtype)
    if arithmetic is not None and values.dtype == np.float32 and values.ndim >= 3 and values.shape[-3] == 3:
        levels = _levels(np.ascontiguousarray(values), arithmetic)
        if levels is not None:
            return levels
    return Floats(_frozen(values))


def padded(values: npt.NDArray[Any]) -> Compact:
    """Return the smallest exact form of an array that may end in one value, repeated."""
    if values.dtype != np.float32 or not values.size or not np.isfinite(fill := values.flat[-1]):
        return compacted(values, None)
    axis, start = 0, values.shape[0]
    differs = values.view(np.uint32) != fill.view(np.uint32)
    for candidate in range(values.ndim):
        others = tuple(other for other in range(values.ndim) if other != candidate)
        kept = np.flatnonzero(differs.any(axis=others))
        stop = int(kept[-1]) + 1 if len(kept) else 0
        if stop * values.shape[axis] < start * values.shape[candidate]:
            axis, start = candidate, stop
    if start == values.shape[axis]:
        return Floats(_frozen(values))
    head = values[(slice(None),) * axis + (slice(start),)]
    return Padded(_frozen(head), axis, values.shape[axis], float(fill))


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
    again = expanded(candidate, "float32")
    return candidate if np.array_equal(again.view(np.uint32), values.view(np.uint32)) else None


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # A view would keep its whole base alive.
    if values.base is not None or not values.flags.c_contiguous:
        values = values.copy(order="C")
    values.flags.writeable = False
    return values
