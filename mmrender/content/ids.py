"""Token ids from outside, checked once as they enter."""

import contextlib
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""A flat sequence of integers, or an integer array of shape `(n,)`."""


def checked_ids(ids: TokenIds, where: str, vocab_size: int) -> list[int]:
    """Return token ids as a new list of Python integers.

    Args:
        ids: A flat sequence of integers, or an integer array or tensor of shape `(n,)`.
        where: Path for errors.
        vocab_size: Number of ids that the model has embeddings for.

    Raises:
        InputError: They are not flat integers, or one is outside the vocabulary.
    """
    numbers: npt.NDArray[Any] | None = None
    if not isinstance(ids, list | tuple) and hasattr(ids, "__array__"):
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise _error(where, f"{numbers.dtype} of shape {numbers.shape}")
    elif isinstance(ids, str | bytes | bytearray | memoryview) or not isinstance(ids, Sequence):
        raise _error(where, type(ids).__name__)
    else:
        with contextlib.suppress(TypeError, OverflowError):
            numbers = np.asarray(array("I", ids))
    values: list[Any] = list(ids) if numbers is None else numbers.tolist()
    # Zeros and ones alone may be a mask.
    if numbers is None or (numbers.size and not (numbers.min() >= 0 and 1 < numbers.max() < vocab_size)):
        entries = ids if isinstance(ids, Sequence) else values
        wrong = (
            index
            for index, value in enumerate(entries)
            if not isinstance(value, int | np.integer)
            or isinstance(value, bool)
            or not 0 <= value < vocab_size
        )
        if (index := next(wrong, None)) is not None:
            error = _error(f"{where}[{index}]", repr(entries[index])[:80])
            error.expected = f"an integer from 0 to {vocab_size - 1}"
            raise error
    return values


def _error(where: str, got: str) -> InputError:
    return InputError(
        "not token ids",
        where=where,
        expected="a list of integers, or an integer array of shape (n,)",
        got=got,
    )
