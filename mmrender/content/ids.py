"""Token ids from outside, checked once as they enter."""

import contextlib
import marshal
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
    numbers, is_plain = _checked(ids, where, vocab_size)
    return list(ids) if is_plain else numbers.tolist()


def checked_array(ids: TokenIds, where: str, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return token ids as a new array of shape `(n,)`. Arguments and errors as for `checked_ids`."""
    return _checked(ids, where, vocab_size)[0].astype(np.int32)


def _checked(ids: TokenIds, where: str, vocab_size: int) -> tuple[npt.NDArray[Any], bool]:
    """Return token ids as an array, and whether they are a list of plain integers."""
    plain = _plain_integers(ids) if type(ids) is list else None
    numbers: npt.NDArray[Any] | None = plain
    if not isinstance(ids, list | tuple) and hasattr(ids, "__array__"):
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise _error(where, f"{numbers.dtype} of shape {numbers.shape}")
    elif isinstance(ids, str | bytes | bytearray | memoryview) or not isinstance(ids, Sequence):
        raise _error(where, type(ids).__name__)
    elif plain is None:
        with contextlib.suppress(TypeError, OverflowError):
            numbers = np.asarray(array("I", ids))
    is_valid = numbers is not None
    if numbers is not None and numbers.size:
        is_positive = numbers.dtype.kind == "u" or numbers.min() >= 0
        is_valid = bool(is_positive and 1 < numbers.max() < vocab_size)  # zeros and ones may be a mask
    if numbers is None or not is_valid:
        entries: Any = ids if numbers is None or isinstance(ids, Sequence) else numbers.tolist()
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
    if numbers is None:
        raise _error(where, "integers beyond 32 bits")
    return numbers, plain is not None


def _plain_integers(ids: list[Any]) -> npt.NDArray[np.uint32] | None:
    """Return the values of a list as a read-only array, or None unless it holds plain integers of 32 bits.

    Negative ones appear as large ones. `marshal` writes such an integer, and nothing else, as `i` and four
    bytes. That checks types and reads values in half of the time of an array that becomes a list again.
    """
    try:
        data = marshal.dumps(ids, 2)
    except ValueError:
        return None
    count = len(ids)
    if not count or len(data) != 5 * (count + 1) or data[5::5] != b"i" * count:
        return None
    return np.ndarray((count,), "<u4", data, offset=6, strides=(5,))


def _error(where: str, got: str) -> InputError:
    return InputError(
        "not token ids",
        where=where,
        expected="a list of integers, or an integer array of shape (n,)",
        got=got,
    )
