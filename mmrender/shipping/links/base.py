"""What the protocol asks of a way to travel: ordered parcels over a connection that may break at any time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from mmrender.errors import ShippingConnectionError, ShippingProtocolError

Limit = Callable[[], int]
"""Says, when asked, how many payload bytes the next parcel may have."""


class Parcel(NamedTuple):
    """A header and the frames that travel with it, contiguous views of bytes."""

    header: bytes | memoryview
    frames: list[memoryview]


class Link(Protocol):
    """One connection. One task may send while another receives.

    Whatever fails raises `ShippingConnectionError`, or `ShippingProtocolError` where the peer sent what is no
    parcel or too much. After an error, or a call that was cancelled, a link can only be closed.
    """

    @property
    def peer(self) -> str:
        """Who is there, for messages."""
        ...

    @property
    def heard(self) -> float:
        """When the last byte came in, by `time.monotonic`."""
        ...

    async def send(self, header: bytes, frames: Sequence[memoryview]) -> None:
        """Send a parcel. The frames may still be read from until the receiver has answered."""
        ...

    async def receive(self, limit: Limit) -> Parcel:
        """Wait for the next parcel. No memory is taken for a payload beyond the limit."""
        ...

    async def aclose(self) -> None:
        """Close; what was sent before may still arrive."""
        ...


class Listener(Protocol):
    """An open door."""

    @property
    def url(self) -> str:
        """The address, with the port that was chosen."""
        ...

    async def aclose(self) -> None:
        """Take no more connections; those that were taken go on."""
        ...


OnLink = Callable[[Link], None]


class Transport(Protocol):
    """Makes links, from either side."""

    async def dial(self) -> Link:
        """Connect to a receiver.

        Raises:
            ShippingConnectionError: Nobody answers.
            ShippingSecurityError: They refuse us.
        """
        ...

    async def listen(self, on_link: OnLink) -> Listener:
        """Open the door; `on_link` is called on the event loop with each connection.

        Raises:
            ShippingConnectionError: The address cannot be bound.
            ShippingSecurityError: It could be reached from elsewhere, and nothing guards it.
        """
        ...

    async def aclose(self) -> None:
        """Let go of what all links share, after the last of them was closed."""
        ...


def broken(peer: str, why: object) -> ShippingConnectionError:
    """The connection is gone."""
    return ShippingConnectionError("the connection broke", where=peer, got=str(why)[:200] or None)


def too_long(peer: str, what: str, expected: int, got: int) -> ShippingProtocolError:
    """The peer announced more than it may send."""
    return ShippingProtocolError(
        f"{what} too long", where=peer, expected=f"at most {expected} bytes", got=str(got)
    )
