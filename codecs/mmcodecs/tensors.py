"""Arrays and tensors on their way in and out: what is viewed, what is copied, who owns the memory.

In: a `Source` describes a numpy array, a numpy scalar, a torch tensor or a `RawTensor` as an array over its
own memory. Nothing is copied, except: a tensor on a device is moved to the CPU, and a lazily conjugated or
negated one is resolved. A tensor that needs gradients is detached. An array that is not C-contiguous is
copied once, when it is written.

Out: a numpy array is a read-only view of the message, or with `copy=True` a writable array of its own. A
torch tensor can be written to by anyone who holds it, so it is a view only where the message itself lies in
writable memory; over `bytes` and other read-only memory it is a copy. Tensors of dtypes that numpy lacks come
out as `RawTensor` where numpy was asked for, and arrays of dtypes that torch lacks stay numpy where torch
was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from mmcodecs.dtypes import BY_NAME, DType, of_numpy, of_torch, to_torch
from mmcodecs.errors import UnsupportedTypeError
from mmcodecs.optional import require

Framework: TypeAlias = Literal["numpy", "torch", "source"]
AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# What the sender held, so that framework="source" gives the same back.
ARRAY, SCALAR, TENSOR, RAW = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor of a dtype that numpy lacks, such as bfloat16: its bits, and what they mean.

    Two are equal when dtype, shape and bits are.

    Attributes:
        dtype: Name in the dtype table, without `torch.`.
        bits: Unsigned integers of the dtype's size, in the tensor's shape.

    Raises:
        UnsupportedTypeError: The name is not in the table, or the bits are not such integers.
    """

    dtype: str
    bits: AnyArray

    def __post_init__(self) -> None:
        row = BY_NAME.get(self.dtype)
        if row is None or row.numpy is not None:
            raise UnsupportedTypeError(
                "not a dtype that needs a RawTensor", expected="such as bfloat16", got=repr(self.dtype)
            )
        if type(self.bits) is not np.ndarray or self.bits.dtype != np.dtype(row.carrier):
            raise UnsupportedTypeError(
                f"the bits of {self.dtype} are a numpy array of {np.dtype(row.carrier)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        shape: tuple[int, ...] = self.bits.shape
        return shape

    def to_torch(self) -> Any:
        """Give a torch tensor of its own memory.

        Raises:
            FrameworkError: torch is not installed.
        """
        torch = require("torch", "RawTensor.to_torch")
        return torch.from_numpy(self.bits.copy()).view(to_torch(BY_NAME[self.dtype]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RawTensor):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.bits, other.bits)

    def __hash__(self) -> int:
        return hash((self.dtype, self.bits.shape, self.bits.tobytes()))


@dataclass(frozen=True, slots=True)
class Source:
    """One array to be written.

    Attributes:
        row: Its dtype.
        unit: Unit id of a datetime64 or timedelta64, else 0.
        parameter: Multiple of that unit, or the width of a bytes or str dtype, else 0.
        kind: ARRAY, SCALAR, TENSOR or RAW.
        array: Its elements, or their bits, in the memory of the value itself, with any strides.
    """

    row: DType
    unit: int
    parameter: int
    kind: int
    array: AnyArray

    @property
    def big_endian(self) -> bool:
        """Whether the elements lie in memory most significant byte first."""
        order = self.array.dtype.byteorder
        return order == ">" or (order == "=" and sys.byteorder == "big")

    def contiguous(self) -> memoryview:
        """Give the elements as bytes in C order: a read-only view, or one copy where they do not lie so."""
        flat = np.ascontiguousarray(self.array).reshape(-1)
        return flat.view(np.uint8).data.toreadonly()

    def write_into(self, target: memoryview) -> None:
        """Write the elements in C order into `target`, which is as long as they are."""
        np.copyto(np.ndarray(self.array.shape, self.array.dtype, buffer=target), self.array)


def of_array(value: AnyArray) -> Source:
    """Describe a numpy array; a memory map counts as one.

    Raises:
        UnsupportedTypeError: Masked arrays, matrices and other subclasses, and dtypes without a form on the
            wire.
    """
    if type(value) is not np.ndarray and type(value) is not np.memmap:
        raise UnsupportedTypeError(
            f"{type(value).__name__} is a subclass of numpy.ndarray, and what it adds would be lost",
            remedy="Give numpy.asarray(value), and what it adds beside it",
        )
    row, unit, parameter = of_numpy(value.dtype)
    return Source(row, unit, parameter, ARRAY, value)


def of_scalar(value: np.generic) -> Source:
    """Describe a numpy scalar.

    Raises:
        UnsupportedTypeError: Its dtype has no form on the wire, an empty `numpy.str_` included.
    """
    array = np.asarray(value)
    row, unit, parameter = of_numpy(array.dtype)
    return Source(row, unit, parameter, SCALAR, array)


def of_raw(value: RawTensor) -> Source:
    """Describe a `RawTensor`."""
    return Source(BY_NAME[value.dtype], 0, 0, RAW, value.bits)


def of_tensor(value: Any) -> Source:
    """Describe a torch tensor or parameter.

    Raises:
        UnsupportedTypeError: Sparse, nested, quantized and meta tensors, other subclasses, unknown dtypes.
    """
    torch = sys.modules["torch"]
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        raise UnsupportedTypeError(
            f"{type(value).__name__} is a subclass of torch.Tensor, and what it adds would be lost",
            remedy="Give value.as_subclass(torch.Tensor)",
        )
    row = of_torch(value.dtype)
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        form = "nested" if value.is_nested else "meta" if value.is_meta else str(value.layout)
        raise UnsupportedTypeError(
            f"a {form} tensor has no plain memory", remedy="Give its parts as dense tensors"
        )
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    if row.numpy is None:
        # numpy() knows no such dtype, but an integer of the same size has the same strides.
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[row.itemsize]
        return Source(row, 0, 0, TENSOR, plain.view(integer).numpy().view(row.carrier))
    return Source(row, 0, 0, TENSOR, plain.numpy())


def array_over(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> AnyArray:
    """View bytes as an array, as writable as they are.

    The view keeps `data` itself alive, which a buffer pool relies on. `numpy.ndarray(buffer=data)` does not:
    it looks through a memoryview, and holds on to the owner of the memory only.
    """
    if data.nbytes:
        return np.frombuffer(data, dtype).reshape(shape)
    # Not numpy.empty, which drops the byte order of a datetime64 without a unit.
    array: AnyArray = np.ndarray(shape, dtype)
    array.flags.writeable = not data.readonly
    return array


def restore(
    row: DType,
    kind: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    data: memoryview,
    *,
    framework: Framework,
    copy: bool,
) -> Any:
    """Build what the receiver asked for over `data`, whose length the caller has checked.

    Args:
        row: Dtype of the record.
        kind: What the sender held.
        dtype: numpy dtype of the elements or their bits, byte order included.
        shape: Shape of the array.
        data: Its bytes, in C order.
        framework: What to give; see the module.
        copy: Whether to give memory of its own, writable.
    """
    if kind == SCALAR:
        return array_over(data, dtype, shape)[()]
    if row.torch and (framework == "torch" or (framework == "source" and kind == TENSOR)):
        return _torch_over(row, dtype, shape, data, copy=copy)
    array = array_over(data.toreadonly(), dtype, shape)
    if copy:
        array = array.copy()
    return array if row.numpy is not None else RawTensor(row.name, array)


def _torch_over(
    row: DType, dtype: np.dtype[Any], shape: tuple[int, ...], data: memoryview, *, copy: bool
) -> Any:
    torch = require("torch", 'framework="torch"')
    array = array_over(data, dtype, shape)
    if copy or data.readonly or not dtype.isnative or not array.flags.aligned:
        array = array.astype(dtype.newbyteorder("="), copy=True)
    tensor = torch.from_numpy(array)
    return tensor if row.numpy is not None else tensor.view(to_torch(row))
