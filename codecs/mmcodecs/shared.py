"""The table of shared arrays that both ends of a connection keep, so that an array is sent once.

A value holds an array in `Shared`, with a key that identifies its content. The first message carries the
array and enters it in the table; later ones carry the key alone. Both tables follow one rule, so they agree
without talking: the preamble of each message holds the capacity C that the writer has chosen. The first
record of a key in a message counts: an entered array goes to the end of the table with its length in bytes,
one that is referred to moves to the end. After the last record, entries leave from the front until the
lengths add up to at most C. A reader that allows less than C refuses the message. An array longer than C is
not entered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from mmcodecs.arrays import Record
from mmcodecs.buffers import aligned_empty
from mmcodecs.errors import DecodeError, EncodeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """An array with a key that identifies its content; it decodes as the array.

    Within one message an array under one key is written once; over a connection of `Encoder` and `Decoder` it
    is sent once.

    Attributes:
        value: numpy array, torch tensor or `RawTensor`.
        key: 1 to 64 bytes. Two arrays under one key must be equal in everything: the codec trusts the key.
    """

    value: Any
    key: bytes

    def __post_init__(self) -> None:
        if type(self.key) is not bytes or not 1 <= len(self.key) <= 64:
            raise EncodeError("not a key", expected="1 to 64 bytes", got=repr(self.key)[:80])


class SharedTable(Generic[T]):
    """One end's table of keys, least recently used first.

    Args:
        capacity_bytes: Bound on the lengths of all arrays together.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.total_bytes = 0
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> T | None:
        """Give the entry of a key, without counting it as used."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def commit(self, uses: Iterable[tuple[bytes, int, T | None]], capacity: int) -> None:
        """Apply a message with this capacity: key, length and content (None: a reference) of each record."""
        for key, nbytes, content in uses:
            if content is None:
                if key in self._entries:
                    self._entries.move_to_end(key)
                continue
            self.total_bytes -= self._entries.pop(key, (0, None))[0]
            self._entries[key] = (nbytes, content)
            self.total_bytes += nbytes
        while self.total_bytes > capacity:
            self.total_bytes -= self._entries.popitem(last=False)[1][0]

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.total_bytes = 0


class ReaderTurn:
    """What one message does to the reader's table, applied when the message has been read.

    Args:
        table: The table.
        keep_views: As in `Decoder`.
    """

    def __init__(self, table: SharedTable[tuple[Record, memoryview]], *, keep_views: bool) -> None:
        self._table = table
        self._keep_views = keep_views
        self._capacity = 0
        self._message_bytes = 0
        self._uses: dict[bytes, tuple[int, tuple[Record, memoryview] | None]] = {}

    def begin(self, capacity: int, message_bytes: int) -> None:
        """Take the writer's capacity (0 if it keeps no table) and the length of the message from the head."""
        if capacity > self._table.capacity_bytes:
            raise DecodeError(
                "the writer's table is larger than this reader allows",
                where="head",
                expected=f"at most {self._table.capacity_bytes} bytes",
                got=str(capacity),
            )
        self._capacity, self._message_bytes = capacity, message_bytes

    def find(self, key: bytes) -> tuple[Record, memoryview] | None:
        """Give the entry of a key, and count it as used."""
        found = self._table.get(key)
        if found is not None:
            self._uses.setdefault(key, (found[1].nbytes, None))
        return found

    def enter(self, key: bytes, record: Record, data: memoryview) -> memoryview:
        """Note an array that came with its key, and give the memory that the reader may hand out."""
        if data.nbytes > self._capacity:
            raise DecodeError("an array longer than the table", got=str(data.nbytes))
        if self._keep_views:
            data = data.toreadonly()
        self._uses.setdefault(key, (data.nbytes, (record._replace(rest=memoryview(b"")), data)))
        return data

    def commit(self) -> None:
        """Apply the rule."""
        if not self._capacity:
            return
        entered = sum(nbytes for nbytes, content in self._uses.values() if content is not None)
        # A view keeps its whole message alive, which must not be much more than the table accounts for.
        views = self._keep_views and 2 * entered >= self._message_bytes
        uses = []
        for key, (nbytes, new) in self._uses.items():
            content = new
            if new is not None and not views:
                copied = aligned_empty(nbytes)
                copied[:] = np.frombuffer(new[1], np.uint8)
                content = new[0], copied.data.toreadonly()
            uses.append((key, nbytes, content))
        self._table.commit(uses, self._capacity)
