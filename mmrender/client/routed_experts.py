"""Router choices from the wire: three forms, one `RoutedExperts`.

Every form leaves out the last sampled token: it is never fed back, so no router saw it. Of `n` tokens of
prompt and completion and a start of 0 there are `n - 1` rows. Arrays are read-only views of the decoded
base64; nothing is trimmed but by `RoutedExperts.from_position`.
"""

import io
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pybase64

from mmrender.errors import EngineReplyError
from mmrender.trajectory.engine_data import RoutedExperts

Base64: TypeAlias = str | bytes | bytearray | memoryview

_DTYPES: Final = frozenset({"uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"})
_KEYS: Final = frozenset({"data", "shape", "start", "dtype"})


def experts_from_npy(data: Base64, start: int = 0, *, where: str = "routed_experts") -> RoutedExperts:
    """Read vLLM's form: base64 of an `.npy` file, of shape `(rows, layers, top_k)`.

    Args:
        data: The base64 text.
        start: Position of the token that row 0 belongs to.
        where: The field in errors.

    Raises:
        EngineReplyError: It is not such a file, or holds something else.
    """
    raw = _decoded(data, where)
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read_header(stream)
    except (ValueError, KeyError, EOFError) as error:
        raise _malformed(where, "base64 of an .npy file", str(error)) from error
    if fortran:
        raise _malformed(where, "an array in C order", "Fortran order")
    return _experts(memoryview(raw)[stream.tell() :], dtype, shape, start, where)


def experts_from_int32(
    data: Base64, *, rows: int, layers: int, top_k: int, start: int = 0, where: str = "routed_experts"
) -> RoutedExperts:
    """Read SGLang's form: base64 of little-endian int32 in C order, without a shape.

    Args:
        data: The base64 text.
        rows: Prompt plus completion tokens, less 1 and less `start`.
        layers: Layers of the model that SGLang reports; from its configuration.
        top_k: Experts that each token is routed to.
        start: Position of the token that row 0 belongs to.
        where: The field in errors.

    Raises:
        EngineReplyError: It is not base64, or of another size.
    """
    return _experts(_decoded(data, where), np.dtype("<i4"), (rows, layers, top_k), start, where)


def experts_from_mapping(
    value: Any, data: Base64 | None = None, *, where: str = "routed_experts"
) -> RoutedExperts:
    """Read Dynamo's form: `{data, shape, start, dtype}`.

    Args:
        value: The mapping.
        data: Its base64 text, where that was taken out of the reply.
        where: The field in errors.

    Raises:
        EngineReplyError: A member is missing or malformed, or the data is of another size.
    """
    if not isinstance(value, Mapping) or not {"data", "shape", "dtype"} <= set(value):
        raise _malformed(where, f"an object with {', '.join(sorted(_KEYS))}", repr(value)[:100])
    shape, dtype, start = value["shape"], value["dtype"], value.get("start", 0)
    if not isinstance(shape, list | tuple) or not all(map(_is_count, shape)):
        raise _malformed(f"{where}.shape", "a list of sizes", repr(shape)[:100])
    if dtype not in _DTYPES:
        raise _malformed(f"{where}.dtype", "the name of an integer type", repr(dtype)[:100])
    if not _is_count(start):
        raise _malformed(f"{where}.start", "a position", repr(start)[:100])
    text = value["data"] if data is None else data
    little = np.dtype(dtype).newbyteorder("<")
    return _experts(_decoded(text, f"{where}.data"), little, tuple(shape), start, where)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _decoded(data: Any, where: str) -> bytes:
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise _malformed(where, "base64 text", type(data).__name__)
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise _malformed(where, "base64 text", str(error)) from error


def _experts(
    raw: bytes | memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, where: str
) -> RoutedExperts:
    if len(shape) != 3 or dtype.name not in _DTYPES:
        raise _malformed(where, "integers of shape (rows, layers, top_k)", f"{dtype} {list(shape)}")
    needed = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if len(raw) != needed:
        raise _malformed(where, f"{needed} bytes for {dtype.name} {list(shape)}", f"{len(raw)} bytes")
    array: npt.NDArray[Any] = np.frombuffer(raw, dtype).reshape(shape)
    return RoutedExperts(array, start)


def _malformed(where: str, expected: str, got: str) -> EngineReplyError:
    return EngineReplyError(
        "the routed experts of the reply are malformed", where=where, expected=expected, got=got
    )
