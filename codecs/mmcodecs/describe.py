"""What kind of value the writer has before it, where its exact type does not say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mmcodecs.errors import UnsupportedTypeError
from mmcodecs.tensors import RawTensor, Source, of_array, of_raw, of_tensor


def utf8(value: str) -> bytes:
    """Give the bytes of a text.

    Raises:
        UnsupportedTypeError: It holds a lone surrogate.
    """
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedTypeError(
            "a lone surrogate is no text", got=repr(value[error.start : error.end]), remedy="Give the bytes"
        ) from error


def array_describer(value: Any) -> Callable[[Any], Source] | None:
    """Give the function that describes this array or tensor, or None for another value."""
    if isinstance(value, np.ndarray):
        return of_array
    if isinstance(value, RawTensor):
        return of_raw
    torch = sys.modules.get("torch")
    return of_tensor if torch is not None and isinstance(value, torch.Tensor) else None


def unsupported(value: Any) -> UnsupportedTypeError:
    """Build the error for a value that no form keeps."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in (str, int, float, dict, list, tuple, set, frozenset, bytes, bytearray):
        if isinstance(value, base):
            return UnsupportedTypeError(
                f"{name} is a subclass of {base.__name__}, and what it adds would be lost",
                remedy=f"Give {base.__name__}(value)",
            )
    return UnsupportedTypeError(
        f"{name} has no form on the wire", remedy="Give a dataclass, a msgspec Struct, or plain containers"
    )
