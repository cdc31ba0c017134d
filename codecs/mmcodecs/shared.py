"""The table of shared arrays that both ends of a connection keep, so that an array is sent once.

A value holds an array in `Shared`, with a key that identifies its content. The first message carries the
array and enters it in the table, and later ones carry the key alone. Both tables follow one rule, so they
agree without talking: the preamble of each message holds the capacity C that the writer has chosen. The first
record of a key in a message counts: an entered array goes to the end of the table with its length in bytes,
one that is referred to moves to the end. After the last record, entries leave from the front until the
lengths add up to at most C. A reader that allows less than C refuses the message. An array longer than C is
not entered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from mmcodecs.arrays import Record
from mmcodecs.buffers import aligned_empty
from mmcodecs.errors import EncodeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """An array with a key that identifies its content. It decodes as the array.

    Within a message, and over a connection of `Encoder` and `Decoder`, the array under a key is sent once.

    Attributes:
        value: numpy array, torch tensor or `RawTensor`.
        key: 1 to 64 bytes. Two arrays under one key must be equal in everything: the codec trusts the key.
    """

    value: Any
    key: bytes

    def __post_init__(self) -> None:
        if type(self.key) is not bytes or not 1 <= len(self.key) <= 64:
            raise EncodeError("not a key", expected="1 to 64 bytes", got=repr(self.key)[:80])


Uses: TypeAlias = dict[bytes, tuple[int, T | None]]
"""Effect of a message on a table: key, length and content (None: a reference) of each array in it."""


class SharedTable(Generic[T]):
    """One end's table of keys, least recently used first.

    Args:
        capacity_bytes: Bound on the lengths of all arrays together.
        keep_views: As in `Decoder`.

    Attributes:
        entries: Length and content of each key.
        total_bytes: Their lengths together.
    """

    def __init__(self, capacity_bytes: int, *, keep_views: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.keep_views = keep_views
        self.entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()
        self.total_bytes = 0

    def commit(self, uses: Uses[T], capacity: int) -> None:
        """Apply the rule to the uses of a message with this capacity."""
        for key, (nbytes, content) in uses.items():
            if content is not None:
                self.total_bytes += nbytes - self.entries.pop(key, (0, None))[0]
                self.entries[key] = (nbytes, content)
            elif key in self.entries:
                self.entries.move_to_end(key)
        while self.total_bytes > capacity:
            self.total_bytes -= self.entries.popitem(last=False)[1][0]

    def clear(self) -> None:
        """Drop everything."""
        self.entries.clear()
        self.total_bytes = 0


Entered: TypeAlias = tuple[Record, memoryview]
"""A reader's entry of an array: its record, and its elements."""


def copied(uses: Uses[Entered]) -> Uses[Entered]:
    """Return the same uses with memory of their own."""
    out: Uses[Entered] = {}
    for key, (nbytes, entered) in uses.items():
        own = None
        if entered is not None:
            room = aligned_empty(nbytes)
            room[:] = np.frombuffer(entered[1], np.uint8)
            own = entered[0], room.data.toreadonly()
        out[key] = nbytes, own
    return out
