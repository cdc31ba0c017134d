"""The two ends of a connection that share a table of arrays; the rule they follow is in `shared.py`.

Messages must be decoded in the order in which they were encoded. Neither end may be used from two threads at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mmcodecs.buffers import Buffer, BufferPool, aligned_empty
from mmcodecs.codec import Readable, read_message, write_frames, write_single
from mmcodecs.errors import DecodeError, MissingKeyError
from mmcodecs.head import BodyWriter
from mmcodecs.limits import DEFAULT_LIMITS, Limits
from mmcodecs.record import Record
from mmcodecs.shared import SharedTable
from mmcodecs.tensors import Framework
from mmcodecs.typed import convert

TABLE_BYTES = 2 << 30


class Encoder:
    """The writing end.

    Args:
        table_bytes: Capacity of the table; the reader must allow at least as much.
        share_from: Hash arrays of at least this many bytes (blake3, about 5 GB/s) and share them without a
            declared key. None shares only what is wrapped in `Shared`.
        checksums: As in `encode`.
        limits: Bounds to stay within.
    """

    def __init__(
        self,
        *,
        table_bytes: int = TABLE_BYTES,
        share_from: int | None = None,
        checksums: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.table_bytes = table_bytes
        self.share_from = share_from
        self.checksums = checksums
        self.limits = limits
        self._table: SharedTable[bool] = SharedTable(table_bytes)

    def encode(self, value: Any, *, buffer: BufferPool | Buffer | None = None) -> memoryview:
        """Write a value as one buffer; see `mmcodecs.encode`."""
        writer, head = self._write(value)
        out = write_single(
            writer, head, buffer=buffer, checksums=self.checksums, table_bytes=self.table_bytes
        )
        self._table.commit(writer.uses.values(), self.table_bytes)
        return out

    def encode_frames(self, value: Any) -> list[bytearray | memoryview]:
        """Write a value as frames; see `mmcodecs.encode_frames`."""
        writer, head = self._write(value)
        out = write_frames(writer, head, checksums=self.checksums, table_bytes=self.table_bytes)
        self._table.commit(writer.uses.values(), self.table_bytes)
        return out

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the reader lacks these keys, so that the next message carries their arrays."""
        self._table.forget(keys)

    def reset(self) -> None:
        """Start over, as towards a new reader."""
        self._table.clear()

    def _write(self, value: Any) -> tuple[BodyWriter, bytearray]:
        writer = BodyWriter(self.limits, self._table, self.share_from)
        return writer, writer.write(value)


class _Turn:
    """What one message does to the table of the reader, applied when the message has been read."""

    def __init__(self, table: SharedTable[tuple[Record, memoryview]]) -> None:
        self.table = table
        self.capacity = 0
        self.uses: dict[bytes, tuple[bytes, int, tuple[Record, memoryview] | None]] = {}

    def begin(self, capacity: int) -> None:
        """Take the capacity that the message says, 0 if its writer keeps no table."""
        if capacity > self.table.capacity_bytes:
            raise DecodeError(
                "the writer's table is larger than this reader allows",
                where="head",
                expected=f"at most {self.table.capacity_bytes} bytes",
                got=str(capacity),
            )
        self.capacity = capacity

    def find(self, key: bytes) -> tuple[Record, memoryview] | None:
        """Give what is entered under a key, and count it as used."""
        found = self.table.get(key)
        if found is not None:
            self.uses.setdefault(key, (key, found[1].nbytes, None))
        return found

    def enter(self, key: bytes, record: Record, data: memoryview) -> None:
        """Note an array that came with its key."""
        if data.nbytes > self.capacity:
            raise DecodeError("an array longer than the table", got=f"{data.nbytes} bytes of {self.capacity}")
        self.uses.setdefault(key, (key, data.nbytes, (record, data)))

    def commit(self) -> None:
        """Copy what came, and apply the rule."""
        if self.capacity:
            uses = [(key, nbytes, item and _own(*item)) for key, nbytes, item in self.uses.values()]
            self.table.commit(uses, self.capacity)


def _own(record: Record, data: memoryview) -> tuple[Record, memoryview]:
    """Copy the elements, so that the table keeps no message alive."""
    target = aligned_empty(data.nbytes)
    np.copyto(target, np.ndarray(target.shape, np.uint8, buffer=data))
    target.flags.writeable = False
    return record._replace(rest=memoryview(b"")), target.data


class Decoder:
    """The reading end.

    Args:
        table_bytes: The largest capacity to accept from a writer.
        copy: As in `decode`.
        framework: As in `decode`; a torch tensor of a shared array is always a copy.
        limits: Bounds to hold to.
    """

    def __init__(
        self,
        *,
        table_bytes: int = TABLE_BYTES,
        copy: bool = False,
        framework: Framework = "numpy",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.table_bytes = table_bytes
        self.copy = copy
        self.framework: Framework = framework
        self.limits = limits
        self._table: SharedTable[tuple[Record, memoryview]] = SharedTable(table_bytes)

    def decode(self, data: Readable | Sequence[Readable], *, type: Any = None) -> Any:
        """Read a message.

        Raises:
            MissingKeyError: It refers to arrays that are not in the table. The rest of it has been entered.
            CodecError: Anything else; the table is then as it was.
        """
        turn = _Turn(self._table)
        try:
            value = read_message(
                data, copy=self.copy, framework=self.framework, limits=self.limits, table=turn
            )
        except MissingKeyError:
            turn.commit()
            raise
        turn.commit()
        return value if type is None else convert(value, type)

    def reset(self) -> None:
        """Drop the table, as towards a new writer."""
        self._table.clear()
