"""Read what mmcodecs wrote, with msgpack and numpy alone: the wire in eighty lines, to port or to debug.

    python examples/read_frames.py MESSAGE...

One file is a message in single mode; several are a head and its payload frames. This reader trusts its input:
it checks what it must to find the payloads, and none of the limits that a server needs.
"""

import pathlib
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

DTYPES = {
    1: "b1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "u1", 7: "u2", 8: "u4", 9: "u8", 10: "f2", 11: "f4",
    12: "f8", 13: "c8", 14: "c16",
}  # fmt: skip
BIT_DTYPES = {
    16: ("bfloat16", "u2"), 17: ("float8_e4m3fn", "u1"), 18: ("float8_e4m3fnuz", "u1"),
    19: ("float8_e5m2", "u1"), 20: ("float8_e5m2fnuz", "u1"), 21: ("float8_e8m0fnu", "u1"),
    22: ("float4_e2m1fn_x2", "u1"), 23: ("complex32", "u4"),
}  # fmt: skip


def read_array(payload: bytes, frames: Sequence[Any], shared: dict[bytes, Any]) -> Any:
    dtype_id, flags, ndim, _ = struct.unpack_from("<BBB5s", payload)
    shape = struct.unpack_from(f"<{ndim}Q", payload, 8)
    rest = payload[8 + 8 * ndim :]
    storage = flags >> 3
    if storage == 3:
        return shared[rest]
    code = BIT_DTYPES[dtype_id][1] if dtype_id in BIT_DTYPES else DTYPES[dtype_id]
    data = rest if storage == 1 else frames[int.from_bytes(rest[:4], "little")]
    array: Any = np.ndarray(shape, (">" if flags & 4 else "<") + code, buffer=data)
    if flags & 3 == 1:
        array = array[()]
    if dtype_id in BIT_DTYPES:
        array = BIT_DTYPES[dtype_id][0], array
    if storage == 2:
        shared[rest[4:]] = array
    return array


def read_data(payload: bytes, frames: Sequence[Any]) -> Any:
    kind, storage, rest = payload[0], payload[1], payload[2:]
    data = bytes(frames[int.from_bytes(rest, "little")]) if storage == 0 else rest
    return data.decode() if kind == 3 else (bytes, bytearray, memoryview)[kind](data)


def read_body(body: Any, frames: Sequence[Any], shared: dict[bytes, Any]) -> Any:
    def extension(code: int, payload: bytes) -> Any:
        if code == 1:
            return read_array(payload, frames, shared)
        if code == 7:
            return read_data(payload, frames)
        if code in (2, 3):
            items = read_body(payload, frames, shared)
            return items if code == 2 else tuple(items)
        raise ValueError(f"unknown extension type {code}")

    return msgpack.unpackb(body, ext_hook=extension, strict_map_key=True)


def read(parts: Sequence[Any], shared: dict[bytes, Any] | None = None) -> Any:
    """Read a message: `[message]` in single mode, or `[head, payload, ...]`."""
    head = memoryview(parts[0])
    magic, version, flags, count, body_bytes = struct.unpack_from("<8sHHIQ", head)
    if magic != b"\x89mmcodec" or version != 1:
        raise ValueError(f"not a message of version 1: {magic!r}, {version}")
    body_at = 64 + 24 * count
    table = list(struct.iter_unpack("<QQQ", head[64:body_at]))
    single = flags & 1
    frames = [head[at : at + length] for at, length, _ in table] if single else list(parts[1:])
    if [length for _, length, _ in table] != [len(frame) for frame in frames]:
        raise ValueError("the frames are not those that the head lists")
    return read_body(head[body_at : body_at + body_bytes], frames, {} if shared is None else shared)


if __name__ == "__main__":
    print(read([pathlib.Path(name).read_bytes() for name in sys.argv[1:]]))
