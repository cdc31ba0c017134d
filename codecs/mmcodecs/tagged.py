"""The tagged dict: `{"__torch_tensor__": true, "dtype": "float32", "shape": [2, 3], "data": <bytes>}`.

Other rollout libraries put tensors on the wire in this form, inside plain msgpack or JSON-like trees. It is
read strictly: a dict is a tensor if it has exactly these four keys and the tag is `true`; a dict that merely
holds the tag stays a dict. What has the four keys but does not fit together is an error, not a dict.

The form is poorer than the codec's own: elements are little-endian (an array of the other order is swapped,
which copies it), tuples become lists, times, UUIDs and paths become their text, numpy scalars become
Python's. A user's dict that would be read as a tensor cannot be written, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, time
from math import prod
from pathlib import PurePath
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from mmcodecs.describe import array_describer, unsupported
from mmcodecs.dtypes import by_name, to_numpy
from mmcodecs.errors import CodecError, DecodeError, LimitError, TruncatedError, UnsupportedTypeError
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.packing import PACKED_LENGTH, holds_no_containers
from mmcodecs.scan import ARRAY, BINARY, EXTENSION, FIELD, INVALID, KIND, MAPPING, SIZE, STRING
from mmcodecs.tensors import TENSOR, Source, restore
from mmcodecs.typed import neutral_form

TAG = "__torch_tensor__"
_KEYS = frozenset((TAG, "dtype", "shape", "data"))
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))


def is_tensor_payload(value: Any) -> bool:
    """Tell whether a dict is a tensor in this dialect."""
    return isinstance(value, dict) and value.get(TAG) is True and value.keys() == _KEYS


def decode_tensor_payload(
    payload: Any, *, to_torch: bool = True, copy: bool = False, limits: Limits = DEFAULT_LIMITS
) -> Any:
    """Read one tagged dict; anything else comes back as it is.

    Args:
        payload: The dict, its data as bytes, bytearray or memoryview.
        to_torch: Whether to give a torch tensor instead of a numpy array. Over read-only data it is a copy.
        copy: Whether to give memory of its own, writable; else a numpy array is a read-only view of the data.
        limits: Bounds to hold to.

    Raises:
        DecodeError: The dtype is unknown, or shape and data do not fit together.
        LimitError: It has too many dimensions.
    """
    if not is_tensor_payload(payload):
        return payload
    row = by_name(payload["dtype"])
    shape, data = payload["shape"], payload["data"]
    if not isinstance(shape, list | tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise DecodeError("a shape is a list of integers, none negative", got=repr(shape)[:80])
    if len(shape) > limits.max_ndim:
        raise LimitError(
            "Limits.max_ndim is passed", expected=f"at most {limits.max_ndim}", got=str(len(shape))
        )
    if not isinstance(data, bytes | bytearray | memoryview):
        raise DecodeError("the data of a tensor is bytes", got=type(data).__name__)
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise DecodeError("the data of a tensor is contiguous bytes") from error
    if prod(shape) * row.itemsize != view.nbytes:
        raise DecodeError(
            f"{row.name} of shape {list(shape)} does not fill its bytes",
            expected=f"{prod(shape) * row.itemsize} bytes",
            got=str(view.nbytes),
        )
    if prod(n for n in shape if n) >= 1 << 59:
        raise DecodeError("array too large to exist", got=f"shape {list(shape)}")
    framework = "torch" if to_torch else "numpy"
    dtype = to_numpy(row, 0, 0, big_endian=False)
    return restore(row, TENSOR, dtype, tuple(shape), view, framework=framework, copy=copy)  # type: ignore[arg-type]


def walk_decode_tensors(
    value: Any, *, to_torch: bool = True, copy: bool = False, limits: Limits = DEFAULT_LIMITS
) -> Any:
    """Give the tree with each tagged dict in it decoded; dicts, lists and tuples are made anew.

    Args:
        value: The tree. Subclasses of dict come back as dicts; those of list and tuple are left as they are.
        to_torch: As in `decode_tensor_payload`.
        copy: As in `decode_tensor_payload`.
        limits: Bounds to hold to.

    Raises:
        DecodeError: Some tagged dict is malformed; the message names its path.
        LimitError: The tree is too deep.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, dict) and not is_tensor_payload(item):
            return walk_decode_tensors(dict(item), to_torch=to_torch, copy=copy, limits=limits)
        return decode_tensor_payload(item, to_torch=to_torch, copy=copy, limits=limits)

    return _rebuild(value, leaf, limits.max_depth)


def to_tagged(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Give the value as a plain tree with arrays as tagged dicts, their data as views of their memory.

    Raises:
        UnsupportedTypeError: Some value has no form in this dialect; the message names its path.
        LimitError: The tree is too deep.
    """
    return _rebuild(value, _to_leaf, limits.max_depth)


def encode_tagged(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Write a value as plain msgpack with tagged dicts.

    Raises:
        UnsupportedTypeError: Some value has no form in this dialect.
        LimitError: The tree is too deep.
    """
    try:
        return msgspec.msgpack.encode(to_tagged(value, limits=limits))
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise UnsupportedTypeError(f"not writable as msgpack: {error}", where="$") from error


def decode_tagged(
    data: bytes | bytearray | memoryview,
    *,
    to_torch: bool = False,
    copy: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Read plain msgpack with tagged dicts.

    Everything outside of strings and binaries may take `limits.max_head_bytes`, and there may be
    `limits.max_values` values, where a container or a string of 32 bytes or more counts three, other scalars
    nothing.

    Raises:
        CodecError: Whatever is wrong, and nothing else.
    """
    view = memoryview(data).cast("B")
    _check_plain(view, limits)
    try:
        tree = msgspec.msgpack.decode(view)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise DecodeError(f"malformed msgpack: {error}", where="$") from error
    return walk_decode_tensors(tree, to_torch=to_torch, copy=copy, limits=limits)


def _rebuild(value: Any, leaf: Callable[[Any], Any], room: int) -> Any:
    """Copy the dicts, lists and tuples of a tree, with tensors and whatever else is no scalar replaced."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind not in (dict, list, tuple) or is_tensor_payload(value):
        return leaf(value)
    if not value:
        return kind()
    if room <= 0:
        raise LimitError("Limits.max_depth is passed, or the value holds itself")
    step: Any = None
    try:
        if kind is dict:
            out = {}
            for step, item in value.items():
                out[step] = item if type(item) in _SCALARS else _rebuild(item, leaf, room - 1)
            return out
        if kind is list and len(value) >= PACKED_LENGTH and holds_no_containers(value):
            return list(value)
        items: list[Any] = []
        for item in value:
            step = len(items)
            items.append(item if type(item) in _SCALARS else _rebuild(item, leaf, room - 1))
    except CodecError as error:
        raise error.under(f".{step}" if kind is dict else f"[{step}]") from error.__cause__
    return items if kind is list else tuple(items)


def _to_leaf(value: Any) -> Any:
    if is_tensor_payload(value):
        raise UnsupportedTypeError("this dict would be read as a tensor", remedy="Give the array itself")
    if isinstance(value, np.generic):
        return value.item()
    describe = array_describer(value)
    if describe is not None:
        return _payload(describe(value))
    if isinstance(value, UUID | PurePath):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    neutral = neutral_form(value)
    if neutral is NotImplemented:
        raise unsupported(value)
    return to_tagged(neutral)


def _payload(source: Source) -> dict[str, Any]:
    by_name(source.row.name)
    array = source.array
    if source.big_endian:
        array = array.astype(array.dtype.newbyteorder("<"))
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return {TAG: True, "dtype": source.row.name, "shape": list(array.shape), "data": data}


def _plain_run() -> re.Pattern[bytes]:
    """Match a run of values of fixed length: in C, at some 20 milliseconds a megabyte."""
    fixed = [rb"[\x00-\x7f\xa0\xc0\xc2\xc3\xe0-\xff]++"]
    for size in range(2, 33):
        first = bytes(byte for byte in range(256) if SIZE[byte] == size and KIND[byte] == 0)
        if first:
            fixed.append(b"[" + re.escape(first) + b"].{" + str(size - 1).encode() + b"}")
    return re.compile(b"(?:" + b"|".join(fixed) + b")*+", re.DOTALL)


_RUN = _plain_run()
_COST = 3  # what a container or long string counts in Limits.max_values, for it is looked at three times
_EMPTY = (0x80, 0x90)  # the map and the array that hold nothing
_STRINGS = (STRING, BINARY)
_EMPTIES = re.compile(rb"[\x80\x90]++")


def _check_plain(view: memoryview, limits: Limits) -> None:
    """Bound what building this msgpack can allocate, before anything is built."""
    at, size, values, payload = 0, view.nbytes, 0, 0
    run: Any = _RUN.match  # never None: the empty run matches, too
    while (at := run(view, at).end()) < size:
        byte = view[at]
        kind, width = KIND[byte], FIELD[byte]
        values += _COST
        if kind in _STRINGS:
            field = at + 1
            at = field + width
            length = view[field] if width == 1 and field < size else int.from_bytes(view[field:at], "big")
            at += length
            payload += length
        elif byte in _EMPTY:
            empties = _EMPTIES.match(view, at)
            count = empties.end() - at if empties else 1
            values += _COST * (count - 1)
            at += count
        elif kind in (ARRAY, MAPPING):
            field, at = at + 1, at + 1 + width
            length = int.from_bytes(view[field:at], "big") if width else SIZE[byte]
            if length > size - at:
                raise TruncatedError("a container announces more than there is", where=f"byte {at}")
        elif kind in (INVALID, EXTENSION):
            raise DecodeError(
                "this dialect has no extensions", where=f"byte {at}", got=f"first byte {byte:#04x}"
            )
        else:
            raise TruncatedError("the input ends inside a value", where=f"byte {at}")
        if values > limits.max_values:
            raise LimitError("Limits.max_values is passed", expected=f"at most {limits.max_values}")
    if size - payload > limits.max_head_bytes:
        raise LimitError("Limits.max_head_bytes is passed", got=f"{size - payload} bytes outside of binaries")
    if size > limits.max_bytes:
        raise LimitError("Limits.max_bytes is passed", got=str(size))
