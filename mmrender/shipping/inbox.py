"""What a receiver holds: messages in line for the consumer, those it took, and those it is done with."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmrender.shipping.bell import Bell
from mmrender.shipping.seen import SeenIds


class Owner(Protocol):
    """The connection that a message came over, or over which its sender asked for it again."""

    peer: str
    closed: bool

    def took(self, seq: int) -> None:
        """Its consumer took the message."""

    def finished(self, seq: int) -> None:
        """The message is acknowledged."""


@dataclass(slots=True, eq=False)
class Incoming:
    """One message.

    Attributes:
        id: The sender's id.
        value: What was sent; dropped when the consumer takes it.
        wire_bytes: What it takes of its owner's window while it is queued.
        owner: The connection that the window belongs to, and its number there.
        others: Connections that have asked for the same id: they hear of the acknowledgement, too.
    """

    id: str
    value: Any
    wire_bytes: int
    owner: tuple[Owner, int]
    others: list[tuple[Owner, int]] = field(default_factory=list)
    taken: bool = False


class Inbox:
    """Each id once: queued, then held by the consumer, then acknowledged for good.

    Args:
        seen: The ids that were acknowledged.
    """

    def __init__(self, seen: SeenIds) -> None:
        self.seen = seen
        self.bell = Bell()
        self.duplicates = 0
        self._queue: deque[Incoming] = deque()
        self._open: dict[str, Incoming] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def orphaned(self) -> tuple[int, int]:
        """Messages and bytes in line whose connections are gone, so that no window bounds them."""
        lost = [entry.wire_bytes for entry in self._queue if entry.owner[0].closed]
        return len(lost), sum(lost)

    def put(self, id: str, value: Any, wire_bytes: int, owner: tuple[Owner, int]) -> None:
        """Take in a message that has arrived whole."""
        self._drop_closed(id)
        if id in self.seen:
            self.duplicates += 1
            owner[0].took(owner[1])
            owner[0].finished(owner[1])
        elif id in self._open:
            self.duplicates += 1
            self._open[id].others.append(owner)
            owner[0].took(owner[1])
        else:
            entry = self._open[id] = Incoming(id, value, wire_bytes, owner)
            self._queue.append(entry)
            self.bell.ring()

    def ask(self, id: str, owner: tuple[Owner, int]) -> str | Incoming:
        """Say what became of an id, as a sender does that has come back.

        Returns:
            "acked", "held" by the consumer, "new", or the entry that is still in line, which counts in the
            window of this connection from here on.
        """
        self._drop_closed(id)
        if id in self.seen:
            return "acked"
        entry = self._open.get(id)
        if entry is None:
            return "new"
        if entry.taken or not entry.owner[0].closed:
            entry.others.append(owner)
            return "held"
        entry.others.append(entry.owner)
        entry.owner = owner
        return entry

    def take(self) -> Incoming | None:
        """Give the next message to the consumer."""
        if not self._queue:
            return None
        entry = self._queue.popleft()
        entry.taken = True
        entry.owner[0].took(entry.owner[1])
        self.bell.ring()
        return entry

    def ack(self, id: str) -> None:
        """Note that a message is safe with the consumer, and tell its senders.

        Raises:
            OSError: The note cannot be written; nothing has changed.
        """
        entry = self._open.get(id)
        if entry is None or not entry.taken:
            return
        self.seen.add(id)
        del self._open[id]
        for owner, seq in [entry.owner, *entry.others]:
            owner.finished(seq)

    def _drop_closed(self, id: str) -> None:
        entry = self._open.get(id)
        if entry is not None:
            entry.others = [other for other in entry.others if not other[0].closed]
