"""Base64 that has one text for one message, decoded at the speed of memory."""

import binascii
from typing import Final, NoReturn

import numpy as np
import pybase64

from mmcodecs.errors import DecodeError

# malloc maps blocks beyond this size afresh each time, and writing them costs page faults: several times the
# decoding. So longer text is decoded in pieces, through memory that stays mapped, into huge pages.
_WHOLE: Final = 1 << 25
_PIECE: Final = 1 << 18


def decode_base64(data: str | bytes | bytearray | memoryview) -> memoryview:
    """Decode standard padded base64 into memory of its own, writable.

    Raises:
        DecodeError: Another alphabet, anything else between the characters, missing padding, or bits
            after the last byte that are not zero.
    """
    try:
        text = data if isinstance(data, str) else memoryview(data).cast("B")
        if len(text) <= _WHOLE:
            raw = pybase64.b64decode_as_bytearray(text, validate=True)
            _check_end(text, raw)
            return memoryview(raw)
        return _decode_pieces(text)
    except (binascii.Error, ValueError, TypeError, BufferError) as error:
        if isinstance(error, DecodeError):
            raise
        _refuse(error)


def _decode_pieces(text: str | memoryview) -> memoryview:
    # numpy asks for huge pages, bytearray does not.
    target = np.empty(len(text) // 4 * 3, np.uint8).data
    position = 0
    for start in range(0, len(text), _PIECE):
        part = text[start : start + _PIECE]
        raw = pybase64.b64decode_as_bytearray(part, validate=True)
        if start + _PIECE >= len(text):
            _check_end(part, raw)
        elif len(raw) != _PIECE // 4 * 3:
            _refuse(None)  # padding before the end
        target[position : position + len(raw)] = raw
        position += len(raw)
    return target[:position]


def _check_end(text: str | memoryview, raw: bytearray) -> None:
    rest = len(raw) % 3
    last = text[-4:].encode("ascii") if isinstance(text, str) else bytes(text[-4:])
    if rest and pybase64.b64encode(raw[-rest:]) != last:
        _refuse(None)


def _refuse(cause: Exception | None) -> NoReturn:
    raise DecodeError(
        "this is not strict base64",
        expected="the standard alphabet, padded to fours, no bits after the last byte, and nothing else",
    ) from cause
