"""Token ids from outside: checked once, where they enter."""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mmrender.errors import InputError

TokenIds: TypeAlias = Sequence[int] | np.ndarray[Any, Any]
"""A flat sequence of integers, or an integer array of shape `(n,)`."""


def checked_ids(ids: TokenIds, where: str, vocab_size: int) -> list[int]:
    """Return token ids as a new list of Python integers.

    Args:
        ids: A flat sequence of integers, or an integer array or tensor of shape `(n,)`.
        where: Path for errors.
        vocab_size: Number of ids that the model has embeddings for.

    Raises:
        InputError: They are no flat integers, or one lies outside the vocabulary.
    """
    values: Any = ids
    if not isinstance(values, list | tuple) and hasattr(values, "__array__"):
        values = np.asarray(values)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise _error(where, f"{values.dtype} of shape {values.shape}")
        values = values.tolist()
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Sequence):
        raise _error(where, type(values).__name__)
    try:
        packed = array("I", values)
    except (TypeError, OverflowError):
        packed = None
    if packed is None or (packed and np.asarray(packed).max() >= vocab_size):
        index = next(index for index, value in enumerate(values) if not _is_id(value, vocab_size))
        error = _error(f"{where}[{index}]", repr(values[index])[:80])
        error.expected = f"an integer from 0 to {vocab_size - 1}"
        raise error
    return packed.tolist()


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int | np.integer) and 0 <= int(value) < vocab_size


def _error(where: str, got: str) -> InputError:
    return InputError(
        "not token ids",
        where=where,
        expected="a list of integers, or an integer array of shape (n,)",
        got=got,
    )
