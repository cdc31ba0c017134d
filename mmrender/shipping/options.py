"""What both ends bound: what is under way, and how long silence is borne."""

from dataclasses import dataclass

from mmrender.errors import ShippingError


@dataclass(frozen=True, slots=True)
class Window:
    """Messages that one sender may have under way to a receiver whose consumer has not taken them.

    A receiver holds at most this much of each connection, and in any case one message. The arrays of a
    message that the connection has carried before count nothing: what counts are the bytes on the wire.

    Attributes:
        messages: At least 1.
        num_bytes: At least 1.
    """

    messages: int = 64
    num_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("messages", "num_bytes"):
            if getattr(self, name) < 1:
                raise ShippingError(
                    "a window lets nothing through",
                    where=f"window.{name}",
                    expected="1 or more",
                    got=str(getattr(self, name)),
                )


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take, in seconds.

    Attributes:
        handshake: From the connection to the first message.
        heartbeat: A sign of life is sent when nothing else was for so long.
        silence: A peer that was not heard from for so long is given up, and its connection closed.
        first_retry: Before the second attempt to connect; each further one waits twice as long.
        last_retry: The longest wait between attempts.
    """

    handshake: float = 10.0
    heartbeat: float = 5.0
    silence: float = 30.0
    first_retry: float = 0.02
    last_retry: float = 2.0


DEFAULT_WINDOW = Window()
DEFAULT_TIMING = Timing()
MAX_ID_BYTES = 256
MAX_UNACKED = 4096
MAX_HEADER_BYTES = 2 << 20
"""Holds the ids of `MAX_UNACKED` messages, which is the longest header there is."""
