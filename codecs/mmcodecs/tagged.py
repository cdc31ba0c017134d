"""The tagged dict: `{"__torch_tensor__": true, "dtype": "float32", "shape": [2, 3], "data": <bytes>}`.

Other rollout libraries put tensors on the wire in this form, inside plain msgpack or JSON-like trees. It is
read strictly: a dict is a tensor if it has exactly these four keys and the tag is `true`. Another dict with
the tag stays a dict. Four keys that do not fit together are an error.

The form is poorer than the codec's own: elements are little-endian (a big-endian array is copied), tuples
become lists, numpy scalars become Python's. A user's dict that would be read as a tensor is refused. Without
a head to bound it, reading takes up to 150 bytes of memory for a byte of a hostile message: bound the length
of messages from outside by `Limits(max_bytes=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from mmcodecs.arrays import contiguous, describe, dtype_named, restore
from mmcodecs.errors import CodecError, DecodeError, UnsupportedTypeError, limit_exceeded
from mmcodecs.values import DEFAULT_LIMITS, Limits, neutral_form, pack, unpack
from mmcodecs.wire import as_bytes

TAG: Final = "__torch_tensor__"
_KEYS = frozenset((TAG, "dtype", "shape", "data"))
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))


def is_tensor_payload(value: Any) -> bool:
    """Tell whether a dict is a tensor in this dialect."""
    return isinstance(value, dict) and value.get(TAG) is True and value.keys() == _KEYS


def decode_tensor_payload(
    payload: Any, *, to_torch: bool = True, copy: bool = False, limits: Limits = DEFAULT_LIMITS
) -> Any:
    """Read one tagged dict. Any other value is returned as it is.

    Args:
        payload: The dict, its data as bytes, bytearray or memoryview.
        to_torch: Build a torch tensor instead of a numpy array. Over read-only data it is a copy.
        copy: Copy into writable memory. Otherwise a numpy array is a read-only view of the data.
        limits: Bounds to enforce.

    Raises:
        DecodeError: The dtype is unknown, or shape and data do not fit together.
        LimitError: It has too many dimensions.
    """
    if not is_tensor_payload(payload):
        return payload
    row, data = dtype_named(payload["dtype"]), as_bytes(payload["data"], None)
    shape = payload["shape"]
    if not isinstance(shape, list | tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise DecodeError("a shape is a list of integers, none negative", got=repr(shape)[:80])
    shape = tuple(shape)
    if len(shape) > limits.max_ndim:
        raise limit_exceeded("max_ndim", limits.max_ndim, len(shape))
    dtype = np.dtype("<" + row.carrier)
    return restore(row, dtype, shape, data, framework="torch" if to_torch else "numpy", copy=copy)


def walk_decode_tensors(
    value: Any, *, to_torch: bool = True, copy: bool = False, limits: Limits = DEFAULT_LIMITS
) -> Any:
    """Return a copy of the tree with each tagged dict in it decoded.

    For arguments and errors see `decode_tensor_payload`. A tree too deep is a `LimitError`. Errors name the
    path. Subclasses of dict become dicts, and subclasses of list and tuple are left as they are.
    """

    def leaf(item: Any, depth: int) -> Any:
        if isinstance(item, dict) and not is_tensor_payload(item):
            return _rebuild(dict(item), leaf, depth, limits)
        return decode_tensor_payload(item, to_torch=to_torch, copy=copy, limits=limits)

    return _rebuild(value, leaf, 0, limits)


def to_tagged(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return the value as a plain tree with arrays as tagged dicts, whose data are views of their memory.

    Raises as `mmcodecs.encode`.
    """

    def leaf(item: Any, depth: int) -> Any:
        if is_tensor_payload(item):
            raise UnsupportedTypeError("this dict would be read as a tensor", remedy="Pass the array itself")
        if isinstance(item, np.generic):
            return item.item()
        if (source := describe(item)) is not None:
            array = source.array.astype(source.array.dtype.newbyteorder("<"), copy=False)
            shape = list(array.shape)
            return {TAG: True, "dtype": source.row.name, "shape": shape, "data": contiguous(array)}
        return _rebuild(neutral_form(item), leaf, depth, limits)

    return _rebuild(value, leaf, 0, limits)


def encode_tagged(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Write a value as plain msgpack with tagged dicts. Raises as `mmcodecs.encode`."""
    return pack(to_tagged(value, limits=limits))


def decode_tagged(
    data: bytes | bytearray | memoryview,
    *,
    to_torch: bool = False,
    copy: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Read plain msgpack with tagged dicts.

    Raises:
        CodecError: Whatever is wrong, and nothing else.
    """

    def refuse(code: int, _payload: memoryview) -> Any:
        raise DecodeError("this dialect has no extensions", where="$", got=f"type {code}")

    view = as_bytes(data, "$")
    if view.nbytes > limits.max_bytes:
        raise limit_exceeded("max_bytes", limits.max_bytes, view.nbytes)
    try:
        tree = unpack(view, refuse)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise DecodeError(f"malformed msgpack: {error}", where="$") from error
    return walk_decode_tensors(tree, to_torch=to_torch, copy=copy, limits=limits)


def _rebuild(value: Any, leaf: Callable[[Any, int], Any], depth: int, limits: Limits) -> Any:
    """Copy the dicts, lists and tuples of a tree, and replace other values but scalars by `leaf`."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind not in (dict, list, tuple) or is_tensor_payload(value):
        return leaf(value, depth)
    if depth >= limits.max_depth and value:
        raise limit_exceeded("max_depth", limits.max_depth)
    step: Any = None
    try:
        if kind is dict:
            out = {}
            for step, item in value.items():
                out[step] = item if type(item) in _SCALARS else _rebuild(item, leaf, depth + 1, limits)
            return out
        if kind is list and _SCALARS.issuperset(map(type, value)):
            return list(value)
        items: list[Any] = []
        for item in value:
            step = len(items)
            items.append(item if type(item) in _SCALARS else _rebuild(item, leaf, depth + 1, limits))
    except CodecError as error:
        raise error.under(f".{step}" if kind is dict else f"[{step}]") from error.__cause__
    return items if kind is list else tuple(items)
