"""The dtypes of the wire: one table of ids, and the ways from and to numpy and torch.

An id never changes its meaning. A name from outside is looked up in this table and nowhere else: no
`getattr(torch, name)`, no `np.dtype(text)`.

| id | name | bytes | numpy | torch |
|---|---|---|---|---|
| 1 | bool | 1 | yes | yes |
| 2-5 | int8, int16, int32, int64 | 1, 2, 4, 8 | yes | yes |
| 6-9 | uint8, uint16, uint32, uint64 | 1, 2, 4, 8 | yes | yes |
| 10-12 | float16, float32, float64 | 2, 4, 8 | yes | yes |
| 13, 14 | complex64, complex128 | 8, 16 | yes | yes |
| 16 | bfloat16 | 2 | no | yes |
| 17-21 | float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu | 1 | no | yes |
| 22 | float4_e2m1fn_x2 (two values in a byte) | 1 | no | yes |
| 23 | complex32 | 4 | no | yes |
| 32, 33 | datetime64, timedelta64 (unit and multiple in the record) | 8 | yes | no |
| 34 | bytes (width in the record) | width | yes | no |
| 35 | str (width in characters in the record, 4 bytes each) | 4 x width | yes | no |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mmcodecs.errors import DecodeError, UnsupportedTypeError

if TYPE_CHECKING:
    import torch

DATETIME, TIMEDELTA, BYTES, STR = 32, 33, 34, 35
# numpy's own names; the position is the id on the wire, and "generic" stands for no unit.
UNITS = ("generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table.

    Attributes:
        id: The byte that stands for it on the wire.
        name: Its name, which is torch's without `torch.` where torch has it.
        itemsize: Bytes of one element; 0 where the record gives the width.
        numpy: Type code without byte order (`f4`), None where numpy lacks the dtype.
        torch: Whether torch has it.
        carrier: Type code of the array that holds its bits: `numpy`, or an unsigned integer of its size.
    """

    id: int
    name: str
    itemsize: int
    numpy: str | None
    torch: bool
    carrier: str


def _rows() -> list[DType]:
    plain = {
        1: ("bool", "b1"), 2: ("int8", "i1"), 3: ("int16", "i2"), 4: ("int32", "i4"), 5: ("int64", "i8"),
        6: ("uint8", "u1"), 7: ("uint16", "u2"), 8: ("uint32", "u4"), 9: ("uint64", "u8"),
        10: ("float16", "f2"), 11: ("float32", "f4"), 12: ("float64", "f8"),
        13: ("complex64", "c8"), 14: ("complex128", "c16"),
    }  # fmt: skip
    bits = {
        16: ("bfloat16", 2), 17: ("float8_e4m3fn", 1), 18: ("float8_e4m3fnuz", 1), 19: ("float8_e5m2", 1),
        20: ("float8_e5m2fnuz", 1), 21: ("float8_e8m0fnu", 1), 22: ("float4_e2m1fn_x2", 1),
        23: ("complex32", 4),
    }  # fmt: skip
    rows = [DType(i, name, int(code[1:]), code, True, code) for i, (name, code) in plain.items()]
    rows += [DType(i, name, size, None, True, f"u{size}") for i, (name, size) in bits.items()]
    rows.append(DType(DATETIME, "datetime64", 8, "M8", False, "M8"))
    rows.append(DType(TIMEDELTA, "timedelta64", 8, "m8", False, "m8"))
    rows.append(DType(BYTES, "bytes", 0, "S", False, "S"))
    rows.append(DType(STR, "str", 0, "U", False, "U"))
    return rows


BY_ID: dict[int, DType] = {row.id: row for row in _rows()}
BY_NAME: dict[str, DType] = {row.name: row for row in BY_ID.values()}
_BY_CODE: dict[str, DType] = {row.numpy: row for row in BY_ID.values() if row.numpy and row.itemsize}


def by_name(name: object) -> DType:
    """Look a dtype up by its name, with or without a leading `torch.`.

    Raises:
        DecodeError: No fixed-width dtype of the table has this name.
    """
    row = BY_NAME.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if row is None or not row.itemsize or row.id in (DATETIME, TIMEDELTA):
        raise DecodeError("unknown dtype", expected="a name of the dtype table", got=repr(name)[:80])
    return row


def of_numpy(dtype: np.dtype[Any]) -> tuple[DType, int, int]:
    """Give the row of a numpy dtype, with the unit id and the parameter that its record carries.

    Raises:
        UnsupportedTypeError: Object, structured, sub-array, variable-width and long double dtypes.
    """
    kind = dtype.kind
    if kind in "biufcMm":
        row = _BY_CODE.get(kind + str(dtype.itemsize))
        if row is None:
            raise UnsupportedTypeError(
                f"dtype {dtype} differs from platform to platform",
                remedy="Convert it to float64 or complex128",
            )
        if kind not in "Mm":
            return row, 0, 0
        unit, multiple = np.datetime_data(dtype)
        return row, UNITS.index(unit), multiple
    if kind in "SU" and dtype.itemsize:
        return (BY_ID[BYTES], 0, dtype.itemsize) if kind == "S" else (BY_ID[STR], 0, dtype.itemsize // 4)
    raise UnsupportedTypeError(f"dtype {dtype} has no form on the wire", remedy=_REMEDIES.get(kind))


_REMEDIES = {
    "O": "Give the objects as a list, or give the array a numeric dtype",
    "V": "Give a structured array as a dict of its fields; view opaque items as uint8",
    "T": "Convert it with .astype('U')",
}


def of_torch(dtype: torch.dtype) -> DType:
    """Give the row of a torch dtype.

    Raises:
        UnsupportedTypeError: A quantized or sub-byte dtype.
    """
    row = BY_NAME.get(str(dtype).removeprefix("torch."))
    if row is None or not row.torch:
        raise UnsupportedTypeError(
            f"dtype {dtype} has no form on the wire", remedy="Dequantize or view it as uint8"
        )
    return row


@lru_cache(maxsize=1024)
def to_numpy(row: DType, unit: int, parameter: int, *, big_endian: bool) -> np.dtype[Any]:
    """Give the numpy dtype of the array that holds a record's elements, or their bits where numpy lacks it.

    Raises:
        DecodeError: Unit, multiple or width make no sense for the row.
    """
    order = ">" if big_endian else "<"
    if row.id in (DATETIME, TIMEDELTA):
        if unit >= len(UNITS) or not 1 <= parameter < 1 << 31 or (unit == 0 and parameter != 1):
            raise DecodeError(f"{row.name} has no unit {parameter} x {unit}")
        text = "" if unit == 0 else f"[{parameter}{UNITS[unit]}]"
        return np.dtype(f"{order}{row.numpy}{text}")
    if unit or (row.itemsize and parameter):
        raise DecodeError(f"{row.name} takes neither unit nor width", got=f"{unit}, {parameter}")
    if not row.itemsize:
        if not 1 <= parameter < 1 << 29:
            raise DecodeError(f"{row.name} needs a width of at least 1", got=str(parameter))
        return np.dtype(f"{order}{row.numpy}{parameter}")
    return np.dtype(order + row.carrier)


def to_torch(row: DType) -> torch.dtype:
    """Give the torch dtype of a row that torch has.

    Raises:
        DecodeError: The installed torch is older than this dtype.
    """
    import torch

    dtype = getattr(torch, row.name, None)
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(
            f"torch {torch.__version__} has no dtype {row.name}", remedy='Decode with framework="numpy"'
        )
    return dtype
