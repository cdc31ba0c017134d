"""Request bodies as JSON bytes, on a thread where they are large; large base64 texts are not copied."""

import asyncio
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import msgspec

from mmrender.errors import InputError

Piece: TypeAlias = bytes | memoryview

_SCALAR_BYTES: Final = 8
"""A guess at what a number takes: a token id has up to six digits and a comma."""


class PlainText:
    """A text for JSON that needs no escapes, such as base64, as ASCII bytes.

    Where it stands in a request these very bytes go to the socket, without a look at each and without a copy.
    That it needs no escapes is not checked.
    """

    # Not a dataclass, which the encoder would write as an object.
    __slots__ = ("data",)

    def __init__(self, data: Piece) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON text as pieces that follow each other; `len` gives its bytes."""

    pieces: tuple[Piece, ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def joined(self) -> bytes:
        """The text in one piece."""
        return b"".join(self.pieces)


async def encode_body(value: Any, inline_bytes: int) -> Body:
    """Encode a JSON value.

    Args:
        value: What msgspec takes (JSON values, dataclasses, `msgspec.Raw`), and `PlainText`.
        inline_bytes: From about this size on it is encoded on a thread.

    Raises:
        InputError: It cannot be written as JSON.
    """
    if weigh(value, inline_bytes) < inline_bytes:
        return encode(value)
    return await asyncio.get_running_loop().run_in_executor(_thread(), encode, value)


def encode(value: Any) -> Body:
    """Encode a JSON value here and now; see `encode_body`.

    Raises:
        InputError: It cannot be written as JSON.
    """
    texts: list[PlainText] = []
    # No text of the request can hold what nobody knew when it was written.
    mark = secrets.token_hex(16)

    def stand_in(other: Any) -> str:
        if not isinstance(other, PlainText):
            raise TypeError(f"Encoding objects of type {type(other).__name__} is unsupported")
        texts.append(other)
        return f"{mark}{len(texts):08}"

    try:
        text = msgspec.json.encode(value, enc_hook=stand_in)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            "the request cannot be written as JSON", where="json", expected="JSON values", got=str(error)
        ) from error
    return Body(tuple(_spliced(text, mark.encode(), texts)) if texts else (text,))


def _spliced(text: bytes, mark: bytes, texts: Sequence[PlainText]) -> Iterator[Piece]:
    """The pieces of a text in which marks stand for others, in their order."""
    view = memoryview(text)
    position = 0
    for plain in texts:
        start = text.index(mark, position)
        yield view[position:start]
        yield plain.data
        position = start + len(mark) + 8
    yield view[position:]


@cache
def _thread() -> ThreadPoolExecutor:
    # The encoder holds the interpreter's lock for all of a body, so a second thread would encode no faster,
    # and the event loop would wait for two of them each time it needs the lock.
    return ThreadPoolExecutor(1, "mmrender-encode")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_thread.cache_clear)


def weigh(value: Any, enough: int) -> int:
    """Guess how many bytes of text are to be written, looking no further once it is `enough`.

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
