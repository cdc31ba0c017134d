"""`FrameStore`: the frames that a receiver keeps, so that senders need not send them again."""

from collections import OrderedDict
from typing import Final

import numpy as np

_SENDER_BYTES: Final = 256
"""Memory that is counted for each sender of a frame."""


class FrameStore:
    """Frames by key, for all senders together. The least recently used ones leave first.

    A sender finds a frame only if it has sent equal bytes under the key itself. So one sender's frames never
    come to be another's, whatever keys they choose, and equal frames of several senders are kept once.

    Args:
        max_bytes: Bound on the memory of all frames.

    Attributes:
        num_bytes: Memory of all frames.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[memoryview, set[str]]] = OrderedDict()

    def find(self, sender: str, key: bytes | None, length: int) -> memoryview | None:
        """Return the frame that a sender has sent under a key, or None if it is not here."""
        if key is None or key not in self._kept:
            return None
        frame, senders = self._kept[key]
        if sender not in senders or frame.nbytes != length:
            return None
        self._kept.move_to_end(key)
        return frame

    def put(self, sender: str, key: bytes, frame: memoryview) -> None:
        """Keep a frame, which must not change any more."""
        kept, senders = self._kept.pop(key, (None, set[str]()))
        if kept is not None:
            self.num_bytes -= kept.nbytes + _SENDER_BYTES * len(senders)
        if kept is None or not np.array_equal(np.frombuffer(kept, "u1"), np.frombuffer(frame, "u1")):
            kept, senders = frame, set()
        senders.add(sender)
        num_bytes = kept.nbytes + _SENDER_BYTES * len(senders)
        if num_bytes <= self._max_bytes:
            self._kept[key] = kept, senders
            self.num_bytes += num_bytes
            self.limit(self._max_bytes)

    def limit(self, max_bytes: int) -> None:
        """Set the bound, and drop what is beyond it."""
        self._max_bytes = max_bytes
        while self._kept and self.num_bytes > max_bytes:
            frame, senders = self._kept.popitem(last=False)[1]
            self.num_bytes -= frame.nbytes + _SENDER_BYTES * len(senders)
