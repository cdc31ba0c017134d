"""Arrays that are sent once over a connection and then named by a key.

The writer wraps an array in `Shared` with a key that stands for its content (a hash that it already has), or
lets the encoder hash arrays from a size on. The first message carries the array and enters it in a table that
both sides keep; later ones carry the key alone. Within one message an array under one key is written once,
table or not.

Both tables follow one rule, so they agree without talking. The preamble of each message says the capacity C
that the writer has chosen. The first record of a key in a message counts: an entered array goes to the end of
the table with its length in bytes, one that is referred to moves to the end. After the last record, entries
leave from the front until the lengths add up to at most C. A reader that allows less than C refuses the
message. An array longer than C is never entered. What a reader enters it copies, so a table never holds a
whole message alive.

A message that was lost, or a reader that was restarted, shows as `MissingKeyError`: the reader keeps what the
message did bring, the writer calls `forget` with the missing keys and encodes the value again. Entries that
only the reader still has are never referred to, and leave in time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from mmcodecs.errors import EncodeError
from mmcodecs.optional import require
from mmcodecs.record import INLINE, write_record
from mmcodecs.tensors import ARRAY, Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """An array with a key that stands for its content; it decodes as the array.

    Attributes:
        value: numpy array, torch tensor or `RawTensor`.
        key: 1 to 64 bytes. Two arrays under one key must be equal in everything: the codec trusts the key.
    """

    value: Any
    key: bytes

    def __post_init__(self) -> None:
        if type(self.key) is not bytes or not 1 <= len(self.key) <= 64:
            raise EncodeError("not a key", expected="1 to 64 bytes", got=repr(self.key)[:80])


def array_form(source: Source) -> bytes:
    """Give dtype and shape as bytes, the same for an array, a tensor and a `RawTensor` that hold the same."""
    return write_record(replace(source, kind=ARRAY), INLINE, b"")


def content_key(source: Source) -> bytes:
    """Give the blake3 hash of dtype, shape and elements, 32 bytes.

    Raises:
        FrameworkError: blake3 is not installed.
    """
    digest = require("blake3", "hashing arrays").blake3(array_form(source))
    return bytes(digest.update(source.contiguous()).digest())


class SharedTable(Generic[T]):
    """One side's table of keys, least recently used first.

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
        """Give what is entered under a key, without counting it as used."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def commit(self, uses: Iterable[tuple[bytes, int, T | None]], capacity: int) -> None:
        """Apply one message.

        Args:
            uses: Key, length and content of each record in order; the content is None where it is referred
            to.
            capacity: The capacity that the message says.
        """
        for key, nbytes, content in uses:
            if content is None:
                if key in self._entries:
                    self._entries.move_to_end(key)
                continue
            self.forget([key])
            self._entries[key] = (nbytes, content)
            self.total_bytes += nbytes
        while self.total_bytes > capacity:
            self.total_bytes -= self._entries.popitem(last=False)[1][0]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these keys, those that are not there ignored."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.total_bytes -= entry[0]

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.total_bytes = 0
