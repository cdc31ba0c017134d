"""Request bodies as JSON bytes, on a thread where they are large."""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import msgspec

from mmrender.errors import InputError

_ENCODER: Final = msgspec.json.Encoder()
_SCALAR_BYTES: Final = 8
"""A guess at what a number takes: a token id has up to six digits and a comma."""


async def encode_body(value: Any, inline_bytes: int) -> bytes:
    """Encode a JSON value.

    Args:
        value: What msgspec takes: JSON values, dataclasses, `msgspec.Raw` for what is JSON text already.
        inline_bytes: From about this size on it is encoded on a thread.

    Raises:
        InputError: It cannot be written as JSON.
    """
    try:
        if weigh(value, inline_bytes) < inline_bytes:
            return _ENCODER.encode(value)
        return await asyncio.get_running_loop().run_in_executor(_thread(), _ENCODER.encode, value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            "the request cannot be written as JSON", where="json", expected="JSON values", got=str(error)
        ) from error


@cache
def _thread() -> ThreadPoolExecutor:
    # The encoder holds the interpreter's lock for all of a body, so a second thread would encode no faster,
    # and the event loop would wait for two of them each time it needs the lock.
    return ThreadPoolExecutor(1, "mmrender-encode")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_thread.cache_clear)


def weigh(value: Any, enough: int) -> int:
    """Guess the size of a JSON value's text, looking no further once it is `enough`.

    Of a list that begins with a number only the length is looked at, so token ids cost nothing.
    """
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return _weigh_all(value.values(), len(value) * _SCALAR_BYTES, enough)
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            return len(value) * _SCALAR_BYTES
        return _weigh_all(value, len(value), enough)
    if isinstance(value, msgspec.Raw):
        return len(memoryview(value))
    return _SCALAR_BYTES


def _weigh_all(values: Any, total: int, enough: int) -> int:
    for value in values:
        if total >= enough:
            break
        total += weigh(value, enough - total)
    return total
