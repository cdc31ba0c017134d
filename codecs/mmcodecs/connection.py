"""The two ends of a connection that sends each array once; the rule of their table is in `mmcodecs.shared`.

Messages must be decoded in the order in which they were encoded, all by the same decoder. After a lost
message both ends `reset()`. Neither end may be used from two threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mmcodecs.arrays import Framework, Record
from mmcodecs.buffers import Buffer, BufferPool
from mmcodecs.shared import ReaderTurn, SharedTable
from mmcodecs.values import DEFAULT_LIMITS, Limits, convert
from mmcodecs.wire import Message, Readable, read_message

T = TypeVar("T")
TABLE_BYTES = 2 << 30


class Encoder:
    """The writing end.

    Args:
        table_bytes: Capacity of the table; the reader must allow at least as much.
        share_from: Hash arrays of at least this many bytes (blake3, about 5 GB/s) and share them without a
            declared key. None shares only arrays in `Shared`.
        limits: Bounds to stay within.
    """

    def __init__(
        self,
        *,
        table_bytes: int = TABLE_BYTES,
        share_from: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.table_bytes = table_bytes
        self.share_from = share_from
        self.limits = limits
        self._table: SharedTable[bool] = SharedTable(table_bytes)

    def encode(self, value: Any, *, buffer: BufferPool | Buffer | None = None) -> memoryview:
        """Write a value as one buffer; see `mmcodecs.encode`."""
        message = self._compose(value)
        return self._committed(message, message.single(buffer))

    def encode_frames(self, value: Any) -> list[bytearray | memoryview]:
        """Write a value as frames; see `mmcodecs.encode_frames`."""
        message = self._compose(value)
        return self._committed(message, message.separate())

    def reset(self) -> None:
        """Empty the table, as towards a new reader."""
        self._table.clear()

    def _compose(self, value: Any) -> Message:
        return Message(value, self.limits, self._table, self.share_from)

    def _committed(self, message: Message, out: T) -> T:
        uses = ((key, nbytes, new) for key, (nbytes, new) in message.uses.items())
        self._table.commit(uses, self.table_bytes)
        return out


class Decoder:
    """The reading end.

    Args:
        table_bytes: The largest capacity to accept from a writer.
        copy: As in `decode`.
        framework: As in `decode`; a torch tensor of an array in the table is always a copy.
        keep_views: Let the table hold views of a message that consists of shared arrays for at least a half,
            instead of copies. For a caller that never writes to the memory of a message again: one that
            receives each message into a buffer of a `BufferPool`, or hands over `bytes`.
        limits: Bounds to enforce.
    """

    def __init__(
        self,
        *,
        table_bytes: int = TABLE_BYTES,
        copy: bool = False,
        framework: Framework = "numpy",
        keep_views: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.table_bytes = table_bytes
        self.copy = copy
        self.framework: Framework = framework
        self.keep_views = keep_views
        self.limits = limits
        self._table: SharedTable[tuple[Record, memoryview]] = SharedTable(table_bytes)

    def decode(self, data: Readable | Sequence[Readable], *, type: Any = None) -> Any:
        """Read a message; see `mmcodecs.decode`.

        Raises:
            MissingKeyError: It refers to arrays that are not in the table.
            CodecError: Anything else. The table is then as it was.
        """
        turn = ReaderTurn(self._table, keep_views=self.keep_views)
        value = read_message(data, copy=self.copy, framework=self.framework, limits=self.limits, turn=turn)
        turn.commit()
        return value if type is None else convert(value, type)

    def reset(self) -> None:
        """Empty the table, as towards a new writer."""
        self._table.clear()
