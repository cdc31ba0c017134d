"""What a sender has not seen acknowledged, and what of it may go out now. No input or output happens here."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mmrender.errors import ShippingClosedError, ShippingConnectionError, ShippingError, ShippingProtocolError
from mmrender.shipping.bell import Bell
from mmrender.shipping.delivery import Delivery
from mmrender.shipping.failures import Failures
from mmrender.shipping.messages import Welcome


@dataclass(slots=True, eq=False)
class Outgoing:
    """One message.

    Attributes:
        seq: Its number; rising, never used twice by one sender.
        kind: What the receiver makes of the value.
        value: What the codec writes.
        num_bytes: Its size when nothing of it is shared.
        delivery: The promise that its sender holds.
        sent: Whether it is on its way, on this connection.
        attempts: How often it was sent.
    """

    seq: int
    kind: str
    value: Any
    num_bytes: int
    delivery: Delivery
    sent: bool = False
    attempts: int = 0


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    acknowledged: int = 0
    resent: int = 0
    refused: int = 0
    lost: int = 0
    failures: Failures = field(default_factory=Failures)


class Outbox:
    """Messages in the order in which they were given, until each is acknowledged.

    Args:
        max_messages: Most that may be unacknowledged.
        max_bytes: The same in bytes; a message that is longer waits until nothing else is there.
        resend: Whether a message that may have been lost is sent again.
    """

    def __init__(self, *, max_messages: int, max_bytes: int, resend: bool) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.resend = resend
        self.counts = Counts()
        self.bell = Bell()
        self.num_bytes = 0
        self._entries: dict[int, Outgoing] = {}
        self._waiting: list[int] = []
        self._window: dict[int, int] = {}
        self._missing: set[int] = set()
        self._bounds: Welcome | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more message of that size can be kept."""
        if not self._entries:
            return True
        return len(self._entries) < self.max_messages and self.num_bytes + num_bytes <= self.max_bytes

    def add(self, entry: Outgoing) -> None:
        """Take a message in."""
        self._entries[entry.seq] = entry
        self.num_bytes += entry.num_bytes
        heapq.heappush(self._waiting, entry.seq)
        self.bell.ring()

    def unacked(self) -> list[tuple[int, str]]:
        """Number and id of everything that is here, in order."""
        return [(entry.seq, entry.delivery.id) for _, entry in sorted(self._entries.items())]

    def connected(self, welcome: Welcome) -> None:
        """Begin a connection: leave out what arrived earlier, line up the rest."""
        self._bounds = welcome
        self.acked(welcome.acked)
        queued = dict(welcome.queued)
        for seq in [*welcome.held, *queued]:
            if seq in self._entries:
                self._entries[seq].sent = True
        self._window = {seq: size for seq, size in queued.items() if seq in self._entries}
        self._waiting = sorted(entry.seq for entry in self._entries.values() if not entry.sent)

    def disconnected(self) -> None:
        """End a connection: what was on its way is to be sent again, or is lost, which `flush` tells."""
        self._bounds = None
        self._window.clear()
        self._missing.clear()
        for entry in list(self._entries.values()):
            if entry.sent and not self.resend:
                self.counts.lost += 1
                self._drop(entry, _lost(entry.delivery.id))
            entry.sent = False

    def next(self) -> Outgoing | None:
        """Give the first message that waits, if its turn has come."""
        while self._waiting and (
            self._waiting[0] not in self._entries or self._entries[self._waiting[0]].sent
        ):
            heapq.heappop(self._waiting)
        if not self._waiting or self._bounds is None:
            return None
        entry = self._entries[self._waiting[0]]
        if entry.seq in self._missing and not self._may_fill(entry):
            return None
        return entry

    def may_send(self, entry: Outgoing, wire_bytes: int) -> bool:
        """Whether the receiver's window has room.

        It also has while the receiver waits for a message to be sent again: what follows that one can only
        pile up, and this one was encoded already and must go in that order.
        """
        if self._bounds is None:
            return False
        if not self._window or self._missing:
            return True
        used = sum(self._window.values())
        return (
            len(self._window) < self._bounds.window_messages
            and used + wire_bytes <= self._bounds.window_bytes
        )

    def is_missing(self, entry: Outgoing) -> bool:
        """Whether the receiver waits for this one to be sent again."""
        return entry.seq in self._missing

    def sent(self, entry: Outgoing, wire_bytes: int) -> None:
        """Note that a message is on its way."""
        entry.sent = True
        entry.attempts += 1
        self.counts.resent += entry.attempts > 1
        self._missing.discard(entry.seq)
        self._window[entry.seq] = wire_bytes

    def taken(self, seqs: Iterable[int]) -> None:
        """Note what the consumer took: its place in the window is free."""
        for seq in seqs:
            self._window.pop(seq, None)
        self.bell.ring()

    def acked(self, seqs: Iterable[int]) -> None:
        """Note what is acknowledged."""
        for seq in seqs:
            self.counts.acknowledged += self._settle(seq, None)

    def missing(self, seq: int) -> None:
        """Line a message up again, whose shared arrays the receiver lacks."""
        entry = self._entries.get(seq)
        self._window.pop(seq, None)
        if entry is not None:
            entry.sent = False
            self._missing.add(seq)
            heapq.heappush(self._waiting, seq)
        self.bell.ring()

    def refused(self, seq: int, reason: str, peer: str) -> None:
        """Drop a message that the receiver cannot use."""
        if seq in self._entries:
            self.fail(seq, _refused(self._entries[seq].delivery.id, reason, peer))

    def fail(self, seq: int, error: ShippingError) -> None:
        """Drop a message, and keep the error for `flush`."""
        entry = self._entries.get(seq)
        if entry is not None:
            self.counts.refused += 1
            self._drop(entry, error)

    def fail_all(self, error: ShippingError) -> None:
        """Drop everything, and keep the error for `flush`."""
        if self._entries:
            self.counts.failures.add_general(error)
        for seq in list(self._entries):
            self.counts.refused += self._settle(seq, error)

    def close(self) -> None:
        """Drop everything, since the sender is closed."""
        for seq in list(self._entries):
            self._settle(seq, ShippingClosedError("the sender was closed before this was acknowledged"))

    def _may_fill(self, entry: Outgoing) -> bool:
        """Whether a message that the receiver waits for fits, or nothing before it is in its way."""
        used = sum(self._window.values())
        bounds = self._bounds
        fits = bounds is not None and used + entry.num_bytes <= bounds.window_bytes
        return fits or not any(seq < entry.seq for seq in self._window)

    def _drop(self, entry: Outgoing, error: ShippingError) -> None:
        self._settle(entry.seq, error)
        self.counts.failures.add(entry.delivery)

    def _settle(self, seq: int, error: ShippingError | None) -> bool:
        entry = self._entries.pop(seq, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        self._window.pop(seq, None)
        self._missing.discard(seq)
        entry.delivery.settle(error)
        self.bell.ring()
        return True


def _lost(id: str) -> ShippingConnectionError:
    return ShippingConnectionError(
        "the connection broke before this was acknowledged, and it is sent at most once",
        where=f"message {id!r}",
        remedy='Take delivery="at-least-once" to have it sent again',
    )


def _refused(id: str, reason: str, peer: str) -> ShippingProtocolError:
    return ShippingProtocolError(
        "the receiver cannot use this message", where=f"message {id!r} to {peer}", got=reason
    )
