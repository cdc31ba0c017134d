"""Arrays and byte strings on their way out: which lie in the head, which get a frame, and which the peer has.

An object that stands several times in a value is written once, and so is an array under a declared key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmcodecs.errors import EncodeError, LimitError
from mmcodecs.limits import Limits
from mmcodecs.packing import FRAMED_BYTES
from mmcodecs.record import ENTER, FRAME, INDEX, INLINE, REFER, write_record
from mmcodecs.shared import SharedTable, array_form, content_key
from mmcodecs.tensors import Source

INLINE_BYTES = 256
"""Arrays up to this size lie in the head: a frame costs more than it saves."""

Payload = Source | memoryview


class Payloads:
    """The frames of one message, and the records that name them.

    Args:
        limits: Bounds to stay within.
        table: The table of shared arrays of this connection, if there is one.
        share_from: Hash and share arrays from this many bytes on; None for declared keys only.

    Attributes:
        frames: The payloads, in the order of their indices.
        uses: What the table has to note once the message is complete.
    """

    def __init__(self, limits: Limits, table: SharedTable[bool] | None, share_from: int | None) -> None:
        self.limits = limits
        self.table = table
        self.share_from = share_from
        self.frames: list[Payload] = []
        self.uses: dict[bytes, tuple[bytes, int, bool | None]] = {}
        # The objects are kept beside their records, or an id might come to mean another object.
        self._written: dict[int, tuple[Any, bytes]] = {}
        self._keys: dict[bytes, tuple[bytes, int, bytes]] = {}

    def array(self, value: Any, describe: Callable[[Any], Source], key: bytes | None = None) -> bytes:
        """Give the record of an array.

        Args:
            value: The array or tensor.
            describe: How to describe it.
            key: The key that stands for its content, if one was declared.

        Raises:
            EncodeError: It has no form on the wire, or its key stood for another dtype or shape.
            LimitError: It has too many dimensions.
        """
        done = self._written.get(id(value))
        if done is not None:
            return done[1]
        source = describe(value)
        array = source.array
        if array.ndim > self.limits.max_ndim:
            raise LimitError(
                "Limits.max_ndim is passed", expected=f"at most {self.limits.max_ndim}", got=str(array.ndim)
            )
        if array.nbytes <= INLINE_BYTES:
            return inline(source)
        if key is None and self.share_from is not None and array.nbytes >= self.share_from:
            key = content_key(source)
        record = self._plain(source) if key is None else self._keyed(source, key)
        self._written[id(value)] = value, record
        return record

    def data(self, kind: int, value: bytes | bytearray | memoryview) -> bytes:
        """Give the record of a byte string, or of a text in UTF-8.

        Args:
            kind: What it is, as the wire numbers it.
            value: Its bytes.
        """
        if len(value) < FRAMED_BYTES:
            return bytes((kind, INLINE)) + bytes(value)
        done = self._written.get(id(value))
        if done is None:
            record = bytes((kind, FRAME)) + self._add(memoryview(value).toreadonly())
            done = self._written[id(value)] = value, record
        return done[1]

    def _add(self, payload: Payload) -> bytes:
        """Add a frame and give its index as it stands in a record."""
        self.frames.append(payload)
        return INDEX.pack(len(self.frames) - 1)

    def _plain(self, source: Source) -> bytes:
        return write_record(source, FRAME, self._add(source))

    def _keyed(self, source: Source, key: bytes) -> bytes:
        """Write an array under a key: by reference if the peer has it, and once in any case."""
        if len(key) > self.limits.max_key_bytes:
            raise LimitError(
                "Limits.max_key_bytes is passed",
                expected=f"at most {self.limits.max_key_bytes}",
                got=str(len(key)),
            )
        nbytes, form = source.array.nbytes, array_form(source)
        done = self._keys.get(key)
        if done is not None:
            if done[0] != form:
                raise EncodeError("two arrays of different dtype or shape under one key", got=key.hex())
            return write_record(source, *done[1:])
        storage, rest = REFER, key
        if self.table is None or nbytes > self.table.capacity_bytes:
            storage, rest = FRAME, self._add(source)
        elif key in self.table:
            self.uses[key] = (key, nbytes, None)
        else:
            self.uses[key] = (key, nbytes, True)
            storage, rest = ENTER, self._add(source) + key
        self._keys[key] = form, storage, rest
        return write_record(source, storage, rest)


def inline(source: Source) -> bytes:
    """Give the record of an array whose elements lie in the record itself."""
    return write_record(source, INLINE, bytes(source.contiguous()))
