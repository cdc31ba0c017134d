"""Values for the codec's tests: strategies, what each framework should make of them, and strict equality."""

import struct
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mmcodecs.arrays import RawTensor

NUMPY_DTYPES = [
    order + code
    for order in "<>"
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
]
TORCH_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
]
RAW_DTYPES = {"bfloat16": "u2", "float8_e4m3fn": "u1", "float4_e2m1fn_x2": "u1", "complex32": "u4"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def filled(dtype: np.dtype[Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Random bits; booleans are 0 or 1."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.random(count) < 0.5
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


@st.composite
def arrays(draw: st.DrawFn, dtypes: list[str] = NUMPY_DTYPES) -> np.ndarray[Any, Any]:
    """Arrays of every plain dtype, contiguous or sliced, reversed, transposed or broadcast."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(shapes)
    array = filled(dtype, int(np.prod(shape)), draw(st.integers(0, 99))).reshape(shape)
    form = draw(st.sampled_from(["plain", "plain", "transposed", "strided", "reversed", "broadcast"]))
    if form == "transposed":
        return array.T
    if form == "strided" and array.ndim:
        return array[..., ::2]
    if form == "reversed" and array.ndim:
        return array[::-1]
    if form == "broadcast":
        return np.broadcast_to(array, (3, *shape))
    return array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Torch tensors of every dtype, contiguous, transposed or expanded."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(shapes)
    bits = filled(
        np.dtype("b1" if dtype == torch.bool else f"u{min(dtype.itemsize, 8)}"), int(np.prod(shape)), 1
    )
    plain = torch.from_numpy(bits.reshape(shape))
    if dtype == torch.complex128:
        plain = torch.complex(plain.double(), plain.double())
    tensor = plain if dtype in (torch.bool, torch.complex128) else plain.view(dtype)
    return tensor.mT if draw(st.booleans()) and tensor.ndim >= 2 else tensor


raw_tensors = st.sampled_from(list(RAW_DTYPES)).flatmap(
    lambda name: arrays([RAW_DTYPES[name]]).map(lambda bits: RawTensor(name, bits))
)
texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    texts,
    texts.map(lambda text: text * 300),
    st.binary(max_size=20),
    st.binary(min_size=4096, max_size=4100),
    st.binary(max_size=20).map(bytearray),
    st.binary(max_size=20).map(memoryview),
    arrays().filter(lambda a: a.size).map(lambda a: a.reshape(-1)[0]),
)
long_lists = st.one_of(
    st.lists(st.integers(-(2**63), 2**64 - 1), min_size=14, max_size=20),
    st.lists(st.floats(), min_size=14, max_size=20),
    st.lists(st.booleans(), min_size=14, max_size=20),
    st.lists(st.none() | st.integers(0, 9) | texts, min_size=14, max_size=20),
)
leaves = st.one_of(scalars, arrays(), tensors(), raw_tensors, long_lists)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
    ),
    max_leaves=8,
)


def as_seen(value: Any, framework: str) -> Any:
    """What a value should become for a receiver that asks for this framework."""
    if isinstance(value, np.ndarray):
        if framework != "torch":
            return value
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C", copy=True))
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if framework != "numpy":
            return value
        bits = tensor_bits(value)
        carrier = {"bfloat16": "u2", "complex32": "u4"}.get(name, "u1")
        if name.startswith(("bfloat", "float8", "float4", "complex32")):
            return RawTensor(name, bits.view(carrier).reshape(value.shape))
        return value.numpy()
    if isinstance(value, RawTensor):
        return value.to_torch() if framework == "torch" else value
    if isinstance(value, dict):
        return {key: as_seen(item, framework) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_seen(item, framework) for item in value)
    return value


def tensor_bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def identical(left: Any, right: Any) -> bool:
    """Equal in value, type, dtype, byte order, shape and bits; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and np.array_equal(tensor_bits(left), tensor_bits(right))
    if isinstance(left, RawTensor):
        return left.dtype == right.dtype and identical(left.bits, right.bits)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(identical(a, b) for a, b in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(identical(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (left != left and right != right)
    return bool(left == right)
