"""Arrays and tensors: their dtypes, their record on the wire, and who owns their memory.

Writing: `describe` makes a `Source`, an array over the value's own memory. Nothing is copied, except that a
tensor on a device moves to the CPU and a lazily conjugated or negated one is resolved. Gradients are dropped.

Reading: a numpy array is a read-only view of the message, or with `copy=True` a writable array of its own. A
torch tensor is always writable, so it is a view only if the message lies in writable memory, and a copy over
`bytes`. A dtype that numpy lacks becomes a `RawTensor`.

The dtype table. An id never changes its meaning, and a name from outside is looked up here and nowhere else.

| id | name | bytes | numpy |
|---|---|---|---|
| 1 | bool | 1 | yes |
| 2-5 | int8, int16, int32, int64 | 1, 2, 4, 8 | yes |
| 6-9 | uint8, uint16, uint32, uint64 | 1, 2, 4, 8 | yes |
| 10-12 | float16, float32, float64 | 2, 4, 8 | yes |
| 13, 14 | complex64, complex128 | 8, 16 | yes |
| 16 | bfloat16 | 2 | no |
| 17-21 | float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu | 1 | no |
| 22 | float4_e2m1fn_x2 (two values in a byte) | 1 | no |
| 23 | complex32 | 4 | no |
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from mmcodecs.errors import DecodeError, UnsupportedTypeError, limit_exceeded, require

Framework: TypeAlias = Literal["numpy", "torch"]
Dimension: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Kind of the sender's value. A reader distinguishes scalars only.
ARRAY, SCALAR, TENSOR, RAW = range(4)
# Storage of a record's elements: a payload frame, the record itself, a frame that also enters the table of
# shared arrays under a key, or the table.
FRAME, INLINE, ENTER, REFER = range(4)
INDEX = struct.Struct("<I")
_START = struct.Struct("<BBBBI")
_DIMS = tuple(struct.Struct(f"<{count}Q") for count in range(33))


class DType(NamedTuple):
    """One row of the table.

    Attributes:
        id: Its byte on the wire.
        name: torch's name, without `torch.`.
        itemsize: Bytes of one element.
        carrier: numpy type code without byte order: of the dtype, or of the unsigned integers with its bits.
        in_numpy: Whether numpy has the dtype.
    """

    id: int
    name: str
    itemsize: int
    carrier: str
    in_numpy: bool


_NUMPY_CODES = {
    1: ("bool", "b1"), 2: ("int8", "i1"), 3: ("int16", "i2"), 4: ("int32", "i4"), 5: ("int64", "i8"),
    6: ("uint8", "u1"), 7: ("uint16", "u2"), 8: ("uint32", "u4"), 9: ("uint64", "u8"),
    10: ("float16", "f2"), 11: ("float32", "f4"), 12: ("float64", "f8"),
    13: ("complex64", "c8"), 14: ("complex128", "c16"),
}  # fmt: skip
_BIT_SIZES = {
    16: ("bfloat16", 2), 17: ("float8_e4m3fn", 1), 18: ("float8_e4m3fnuz", 1), 19: ("float8_e5m2", 1),
    20: ("float8_e5m2fnuz", 1), 21: ("float8_e8m0fnu", 1), 22: ("float4_e2m1fn_x2", 1), 23: ("complex32", 4),
}  # fmt: skip
_ROWS = [DType(i, name, int(code[1:]), code, True) for i, (name, code) in _NUMPY_CODES.items()] + [
    DType(i, name, size, f"u{size}", False) for i, (name, size) in _BIT_SIZES.items()
]
BY_ID: dict[int, DType] = {row.id: row for row in _ROWS}
BY_NAME: dict[str, DType] = {row.name: row for row in _ROWS}
_BY_CODE: dict[str, DType] = {row.carrier: row for row in _ROWS if row.in_numpy}


def dtype_named(name: object) -> DType:
    """Look a dtype up by its name, with or without a leading `torch.`, or raise `DecodeError`."""
    row = BY_NAME.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if row is None:
        raise DecodeError("unknown dtype", expected="a name of the dtype table", got=repr(name)[:80])
    return row


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor of a dtype that numpy lacks, such as bfloat16, as the bits of its elements.

    Two are equal if dtype, shape and bits are.

    Attributes:
        dtype: Name in the dtype table, without `torch.`.
        bits: Unsigned integers of the dtype's size, in the tensor's shape.

    Raises:
        UnsupportedTypeError: The name is not in the table, or the bits have another dtype.
    """

    dtype: str
    bits: AnyArray

    def __post_init__(self) -> None:
        row = BY_NAME.get(self.dtype)
        if row is None or row.in_numpy:
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
        return tuple(self.bits.shape)

    def to_torch(self) -> Any:
        """Return a torch tensor with memory of its own."""
        return _tensor_over(self.bits.copy(), BY_NAME[self.dtype])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RawTensor):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.bits, other.bits)

    def __hash__(self) -> int:
        return hash((self.dtype, self.bits.shape, self.bits.tobytes()))


class Source(NamedTuple):
    """An array to be written.

    Attributes:
        row: Its dtype.
        kind: ARRAY, SCALAR, TENSOR or RAW.
        array: Its elements, or their bits, in the memory of the value itself, with any strides.
    """

    row: DType
    kind: int
    array: AnyArray

    def record(self, storage: int, rest: bytes) -> bytes:
        """Write the array record. `rest` depends on the storage: a frame index, a key, or the elements."""
        shape = self.array.shape
        flags = self.kind | (self.array.dtype.str[0] == ">") << 2 | storage << 3
        start = _START.pack(self.row.id, flags, len(shape), 0, 0)
        return start + _DIMS[len(shape)].pack(*shape) + rest


def contiguous(array: AnyArray) -> memoryview:
    """Return the elements as bytes in C order: a read-only view, or a copy of an array in another order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data.toreadonly()


def describe(value: Any) -> Source | None:
    """Describe a numpy array or scalar, a torch tensor or a `RawTensor`. None for any other value.

    Raises:
        UnsupportedTypeError: An array or tensor that the wire cannot keep.
    """
    kind, array = ARRAY, value
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and type(value) is not np.memmap:
            raise UnsupportedTypeError(
                f"{type(value).__name__} is a subclass of numpy.ndarray, and its additions would be lost",
                remedy="Pass numpy.asarray(value), and the additions separately",
            )
    elif isinstance(value, np.generic):
        kind, array = SCALAR, np.asarray(value)
    elif isinstance(value, RawTensor):
        return Source(BY_NAME[value.dtype], RAW, value.bits)
    else:
        torch = sys.modules.get("torch")
        return _of_tensor(value) if torch is not None and isinstance(value, torch.Tensor) else None
    row = _BY_CODE.get(array.dtype.kind + str(array.dtype.itemsize))
    if row is None:
        remedy = "Pass a list, a dict of a structured array's fields, or an array of a numeric dtype"
        raise UnsupportedTypeError(f"dtype {array.dtype} has no form on the wire", remedy=remedy)
    return Source(row, kind, array)


def _of_tensor(value: Any) -> Source:
    torch = sys.modules["torch"]
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        raise UnsupportedTypeError(
            f"{type(value).__name__} is a subclass of torch.Tensor, and its additions would be lost",
            remedy="Pass value.as_subclass(torch.Tensor)",
        )
    row = BY_NAME.get(str(value.dtype).removeprefix("torch."))
    if row is None or value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise UnsupportedTypeError(
            "only dense tensors of a dtype of the table have a form on the wire",
            got=f"{value.dtype}, {value.layout}, on {value.device}",
        )
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    if row.in_numpy:
        return Source(row, TENSOR, plain.numpy())
    # numpy() lacks the dtype, but an integer of the same size has the same strides.
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[row.itemsize]
    return Source(row, TENSOR, plain.view(integer).numpy().view(row.carrier))


class Record(NamedTuple):
    """An array record, read and checked but for its elements.

    Attributes:
        row: Dtype.
        scalar: Whether the sender held a numpy scalar.
        dtype: numpy dtype of the elements or their bits.
        shape: Dimensions.
        storage: FRAME, INLINE, ENTER or REFER.
        rest: The bytes after the dimensions of the record.
    """

    row: DType
    scalar: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    storage: int
    rest: memoryview


def read_record(data: memoryview, max_ndim: int) -> Record:
    """Read and check a record, except for its elements."""
    dims_end = _START.size + 8 * (data[2] if data.nbytes > 2 else 0)
    if data.nbytes < dims_end:
        raise DecodeError("array record too short", expected=f"{dims_end} bytes", got=str(data.nbytes))
    row, is_scalar, dtype, ndim, storage = _read_start(bytes(data[: _START.size]))
    if ndim > max_ndim:
        raise limit_exceeded("max_ndim", max_ndim, ndim)
    shape = _DIMS[ndim].unpack_from(data, _START.size)
    return Record(row, is_scalar, dtype, shape, storage, data[dims_end:])


@lru_cache(maxsize=1024)
def _read_start(data: bytes) -> tuple[DType, bool, np.dtype[Any], int, int]:
    """Read and check the start of a record, of which the arrays of a message have few: row to storage."""
    row_id, flags, ndim, zero, zeros = _START.unpack(data)
    row = BY_ID.get(row_id)
    if row is None:
        raise DecodeError("unknown dtype id", expected="an id of the dtype table", got=str(row_id))
    if flags >> 5 or zero or zeros:
        raise DecodeError("reserved bits of an array record are set", got=data.hex())
    kind, storage = flags & 3, flags >> 3
    if kind == SCALAR and (ndim or storage != INLINE or not row.in_numpy):
        raise DecodeError("a scalar has no dimensions and lies inline", got=f"{ndim} dimensions")
    return row, kind == SCALAR, np.dtype((">" if flags & 4 else "<") + row.carrier), ndim, storage


def restore(
    row: DType,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    data: memoryview,
    *,
    framework: Framework,
    copy: bool,
) -> Any:
    """Build an array, tensor or `RawTensor` over `data`, the elements in C order.

    `dtype` is the dtype of the elements or their bits, with its byte order. `copy` makes the memory writable.

    Raises:
        DecodeError: The elements do not fill their bytes.
    """
    nbytes = math.prod(shape) * row.itemsize
    if data.nbytes != nbytes:
        problem = f"{row.name} of shape {shape} does not fill its bytes"
        raise DecodeError(problem, expected=f"{nbytes} bytes", got=str(data.nbytes))
    # numpy multiplies the dimensions that are not zero, and refuses a product beyond its index type.
    if not nbytes and math.prod(n for n in shape if n) * row.itemsize >= 1 << 63:
        raise DecodeError("array too large to exist", got=f"shape {shape}")
    # frombuffer keeps the memoryview itself alive, which BufferPool relies on. ndarray(buffer=...) does not:
    # it looks through a memoryview and holds the owner of the memory.
    if framework == "torch":
        array: AnyArray = np.frombuffer(data, dtype).reshape(shape)
        if copy or data.readonly or not dtype.isnative or not array.flags.aligned:
            array = array.astype(dtype.newbyteorder("="), copy=True)
        return _tensor_over(array, row)
    array = np.frombuffer(data.toreadonly(), dtype).reshape(shape)
    if copy:
        array = array.copy()
    return array if row.in_numpy else RawTensor(row.name, array)


def _tensor_over(array: AnyArray, row: DType) -> Any:
    torch = require("torch", "a torch tensor")
    dtype = getattr(torch, row.name, None)
    if dtype is None:
        raise DecodeError(
            f"torch {torch.__version__} has no dtype {row.name}", remedy='Decode with framework="numpy"'
        )
    if not array.size:
        # Empty arrays of numpy have strides of 0, and torch would keep them.
        return torch.empty(array.shape, dtype=dtype)
    tensor = torch.from_numpy(array)
    return tensor if row.in_numpy else tensor.view(dtype)
