"""A digest of what a rollout was asked with, to know it again in another process."""

import dataclasses
import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from PIL import Image


def digest_of(*values: Any) -> str:
    """Return a digest of nested values, the same in every process.

    Mappings count without their order, images by their pixels, arrays by dtype, shape and values. What is
    neither plain data nor can be pickled, such as a lambda, is never the same as anything, itself included.
    """
    hasher = blake3()

    def add(kind: str, data: bytes) -> None:
        # Lengths keep neighbours apart.
        hasher.update(f"{kind}:{len(data)}:".encode())
        hasher.update(data)

    _walk(values, add)
    return hasher.hexdigest(length=16)


def _walk(value: Any, add: Callable[[str, bytes], None]) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | str):
        add(kind, repr(value).encode())
    elif isinstance(value, bytes | bytearray):
        add("bytes", bytes(value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        add(f"array {value.dtype.str} {value.shape}", value.tobytes())
    elif isinstance(value, Image.Image):
        add(
            f"image {value.mode} {value.size} {value.getpalette() if value.mode == 'P' else ''}",
            value.tobytes(),
        )
    elif isinstance(value, Mapping):
        _walk(
            sorted([digest_of(key), digest_of(item)] for key, item in value.items()), _under("mapping", add)
        )
    elif isinstance(value, list | tuple):
        add("list", str(len(value)).encode())
        for item in value:
            _walk(item, add)
    else:
        _walk_object(value, kind, add)


def _walk_object(value: Any, kind: str, add: Callable[[str, bytes], None]) -> None:
    if isinstance(value, partial):
        _walk([value.func, value.args, value.keywords], _under(kind, add))
    elif isinstance(value, msgspec.Struct):
        _walk(msgspec.structs.asdict(value), _under(kind, add))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        _walk(members, _under(kind, add))
    else:
        add(kind, _pickled(value))


def _under(kind: str, add: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
    add(kind, b"")
    return add


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # noqa: BLE001 - whatever a class of the caller raises
        return os.urandom(16)
