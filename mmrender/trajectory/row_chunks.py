"""Many small rows as a few encoded chunks.

A reader of the codec bounds the number of values in one message, since each costs memory to read. A large
group holds more small values (messages, finish reasons) than that, so rows are encoded by themselves, some
hundreds to a chunk, each chunk a message of the codec under the same bounds.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import mmcodecs
from mmrender.errors import TrajectoryError

_ROWS: Final = 256


def write_rows(rows: Sequence[Any], where: str) -> list[npt.NDArray[np.uint8]]:
    """Return plain rows as chunks, uint8 of any length.

    Raises:
        TrajectoryError: A row holds something that has no plain form.
    """
    chunks = []
    for start in range(0, len(rows), _ROWS):
        try:
            encoded = mmcodecs.encode(list(rows[start : start + _ROWS]))
        except mmcodecs.CodecError as error:
            raise TrajectoryError(
                "rows cannot be written", where=f"{where}[{start}:{start + _ROWS}]", got=str(error)
            ) from error
        chunks.append(np.frombuffer(encoded, np.uint8))
    return chunks


def read_rows(chunks: Any, where: str) -> list[Any]:
    """Return the rows of `write_rows`.

    Raises:
        TrajectoryError: A chunk is no message of the codec, or holds no list.
    """
    if not isinstance(chunks, list | tuple):
        raise TrajectoryError(
            "a table is malformed", where=where, expected="a list of chunks", got=repr(chunks)[:80]
        )
    rows: list[Any] = []
    for index, chunk in enumerate(chunks):
        path = f"{where}[{index}]"
        if not isinstance(chunk, np.ndarray) or chunk.dtype != np.uint8 or chunk.ndim != 1:
            got = f"{chunk.dtype} {list(chunk.shape)}" if isinstance(chunk, np.ndarray) else repr(chunk)[:80]
            raise TrajectoryError(
                "a chunk of a table is malformed", where=path, expected="uint8 [n]", got=got
            )
        try:
            values = mmcodecs.decode(np.ascontiguousarray(chunk).data)
        except mmcodecs.CodecError as error:
            raise TrajectoryError("a chunk of a table is damaged", where=path, got=str(error)) from error
        if not isinstance(values, list):
            raise TrajectoryError(
                "a chunk of a table is malformed", where=path, expected="a list", got=type(values).__name__
            )
        rows += values
    return rows
