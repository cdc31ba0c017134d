"""Figures of the two ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SenderStats:
    """Figures since a sender was made.

    Attributes:
        acknowledged: Messages that the receiver has acknowledged.
        unacked: Messages that it has not.
        resent: How often a message was sent again.
        refused: Messages that the receiver could not use.
        lost: Messages sent at most once whose connection broke.
        connections: Connections so far.
        sent_bytes: Bytes handed to them, headers included.
    """

    acknowledged: int
    unacked: int
    resent: int
    refused: int
    lost: int
    connections: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Figures since a receiver was opened.

    Attributes:
        messages: Messages that arrived whole, duplicates included.
        duplicates: Those of them that were there already, and were not handed on.
        received_bytes: Bytes of their payloads on the wire.
        queued: Messages in line for the consumer.
        connections: Open ones.
        refused: Connections that ended because of what the peer sent, or could not show.
    """

    messages: int
    duplicates: int
    received_bytes: int
    queued: int
    connections: int
    refused: int
