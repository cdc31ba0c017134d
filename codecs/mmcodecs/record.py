"""The array record: what the head says of one array."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np

from mmcodecs.dtypes import BY_ID, STR, DType, to_numpy
from mmcodecs.errors import DecodeError, LimitError
from mmcodecs.limits import Limits
from mmcodecs.tensors import SCALAR, Source

FRAME, INLINE, ENTER, REFER = range(4)
INDEX = struct.Struct("<I")
_START = struct.Struct("<BBBBI")
_DIMS = tuple(struct.Struct(f"<{count}Q") for count in range(33))


class Record(NamedTuple):
    """A checked array record.

    Attributes:
        row: Dtype.
        kind: What the sender held (`tensors.ARRAY` and so on).
        dtype: numpy dtype of the elements or their bits.
        shape: Dimensions.
        nbytes: Length of the elements.
        storage: FRAME, INLINE, ENTER or REFER.
        rest: What follows the dimensions in the record.
    """

    row: DType
    kind: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    storage: int
    rest: memoryview


def write_record(source: Source, storage: int, rest: bytes) -> bytes:
    """Write the record of an array.

    Args:
        source: The array.
        storage: Where its elements are.
        rest: What the storage asks for behind the dimensions.
    """
    shape = source.array.shape
    flags = source.kind | (source.big_endian << 2) | storage << 3
    start = _START.pack(source.row.id, flags, len(shape), source.unit, source.parameter)
    return start + _DIMS[len(shape)].pack(*shape) + rest


def read_record(data: memoryview, limits: Limits) -> Record:
    """Read and check a record, its storage apart.

    Raises:
        DecodeError: It is malformed.
        LimitError: It has more dimensions than allowed.
    """
    if data.nbytes < _START.size:
        raise DecodeError("array record too short", expected="at least 8 bytes", got=str(data.nbytes))
    row_id, flags, ndim, unit, parameter = _START.unpack_from(data)
    row = BY_ID.get(row_id)
    if row is None:
        raise DecodeError("unknown dtype id", expected="an id of the dtype table", got=str(row_id))
    if flags >> 5:
        raise DecodeError("reserved bits of an array record are set", got=f"{flags:#04x}")
    if ndim > limits.max_ndim:
        raise LimitError("Limits.max_ndim is passed", expected=f"at most {limits.max_ndim}", got=str(ndim))
    dims_end = _START.size + 8 * ndim
    if data.nbytes < dims_end:
        raise DecodeError("array record too short for its dimensions", got=f"{data.nbytes} bytes for {ndim}")
    shape = _DIMS[ndim].unpack_from(data, _START.size)
    dtype = to_numpy(row, unit, parameter, big_endian=bool(flags & 4))
    nbytes = math.prod(shape) * dtype.itemsize
    # numpy multiplies the dimensions that are not zero, and refuses a product beyond its index type.
    if not nbytes and math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 63:
        raise DecodeError("array too large to exist", got=f"shape {shape}")
    kind, storage = flags & 3, flags >> 3 & 3
    if kind == SCALAR and (ndim or storage != INLINE or row.numpy is None):
        raise DecodeError(
            "a scalar has no dimensions and lies inline", got=f"{ndim} dimensions, storage {storage}"
        )
    return Record(row, kind, dtype, shape, nbytes, storage, data[dims_end:])


def check_length(record: Record, data: memoryview) -> None:
    """Check that the elements fill their bytes, and that characters are characters.

    Raises:
        DecodeError: They do not.
    """
    if data.nbytes != record.nbytes:
        raise DecodeError(
            f"{record.row.name} of shape {record.shape} does not fill its bytes",
            expected=f"{record.nbytes} bytes",
            got=str(data.nbytes),
        )
    if record.row.id == STR and record.nbytes:
        # numpy builds the array anyway, and fails only when an element is read.
        codes = np.frombuffer(data, np.dtype("u4").newbyteorder(record.dtype.byteorder))
        if int(codes.max()) > 0x10FFFF:
            raise DecodeError("a code point beyond Unicode", got=hex(int(codes.max())))


def read_index(data: memoryview) -> int:
    """Read a frame index that fills `data`.

    Raises:
        DecodeError: `data` is not four bytes long.
    """
    if data.nbytes != INDEX.size:
        raise DecodeError("a frame index is four bytes", got=f"{data.nbytes} bytes")
    index: int = INDEX.unpack(data)[0]
    return index
