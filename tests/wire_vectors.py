"""The wire's test vectors: files in tests/data/wire, each described by a value in vectors.json.

In that file, `{"$name": ...}` stands for what JSON lacks; `build` says what each name means. Run as a
program, this writes the binary files anew: only for a new version of the wire, since a vector must never
change.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

import mmcodecs

FOLDER = pathlib.Path(__file__).parent / "data" / "wire"


def _array(spec: dict[str, Any]) -> Any:
    dtype = np.dtype(spec["dtype"])
    if "bits" in spec:
        # NaNs and the like, by their bits.
        return (
            np.array(spec["bits"], f"{dtype.byteorder}u{dtype.itemsize}").view(dtype).reshape(spec["shape"])
        )
    if "arange" in spec:
        return np.arange(spec["arange"]).astype(dtype).reshape(spec["shape"])
    return np.array(spec["values"], dtype).reshape(spec["shape"])


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "$array": _array,
    "$raw": lambda spec: mmcodecs.RawTensor(spec["name"], _array(spec)),
    "$scalar": lambda spec: np.dtype(spec["dtype"]).type(spec["value"]),
    "$shared": lambda spec: mmcodecs.Shared(_array(spec), bytes.fromhex(spec["key"])),
    "$tuple": lambda items: tuple(build(items)),
    "$bytes": bytes.fromhex,
    "$bytearray": bytearray.fromhex,
    "$memoryview": lambda text: memoryview(bytes.fromhex(text)),
    "$repeat_bytes": lambda spec: bytes.fromhex(spec[0]) * spec[1],
    "$repeat_text": lambda spec: spec[0] * spec[1],
    "$range": lambda stop: list(range(stop)),
    "$float": float.fromhex,
}


def build(spec: Any) -> Any:
    """Make the value that a description stands for."""
    if isinstance(spec, dict):
        name = next(iter(spec), "")
        if len(spec) == 1 and name in BUILDERS:
            return BUILDERS[name](spec[name])
        return {key: build(item) for key, item in spec.items()}
    return [build(item) for item in spec] if isinstance(spec, list) else spec


def unshared(value: Any) -> Any:
    """Put the arrays in place of what is `Shared`, as a reader sees them."""
    if isinstance(value, mmcodecs.Shared):
        return value.value
    if isinstance(value, dict):
        return {key: unshared(item) for key, item in value.items()}
    return [unshared(item) for item in value] if isinstance(value, list) else value


def vectors() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "vectors.json").read_text())
    return found


def written(vector: dict[str, Any], encoder: mmcodecs.Encoder | None = None) -> list[bytes]:
    """Write a vector's value by the codec, as the contents of its files."""
    value = build(vector["value"])
    if vector.get("connection"):
        assert encoder is not None
        parts: Any = encoder.encode_frames(value) if vector["mode"] == "frames" else [encoder.encode(value)]
    elif vector["mode"] == "frames":
        parts = mmcodecs.encode_frames(value)
    else:
        parts = [mmcodecs.encode(value)]
    return [bytes(part) for part in parts]


def main() -> None:
    encoder = mmcodecs.Encoder(table_bytes=4096)
    for vector in vectors():
        for name, content in zip(vector["files"], written(vector, encoder), strict=True):
            (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
