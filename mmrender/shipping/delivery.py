"""What the two ends hand out: a promise on the sender's side, a message on the receiver's."""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from mmrender.errors import ShippingError


class Delivery:
    """One message on its way. `await` it for the receiver's acknowledgement.

    Awaiting raises `ShippingProtocolError` if the receiver cannot use the message, `ShippingConnectionError`
    if it was sent at most once and may be lost, and `ShippingClosedError` if the sender was closed before.

    Attributes:
        id: The id under which the receiver tells it from others.
        error: Why it failed.
        told: Whether awaiting it has raised the error, which `Sender.flush` then leaves out.
    """

    def __init__(self, id: str) -> None:
        self.id = id
        self.error: ShippingError | None = None
        self.told = False
        self._done = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether it is known how it ended."""
        return self._done.is_set()

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has acknowledged it."""
        return self.done and self.error is None

    def settle(self, error: ShippingError | None = None) -> None:
        """Note how it ended; the first word counts."""
        if not self.done:
            self.error = error
            self._done.set()

    async def _wait(self) -> None:
        await self._done.wait()
        self.check()

    def check(self) -> None:
        """Raise the error of a message that has failed."""
        if self.error is not None:
            self.told = True
            raise self.error

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A message that the consumer took.

    Attributes:
        value: What was sent. Its arrays are read-only views of memory that is reused once the last of them is
            gone.
        id: The id that the sender gave it.
        sender: Names the connection, for messages.
    """

    value: Any
    id: str
    sender: str
    _acknowledge: Callable[[str], None] = field(repr=False)

    def ack(self) -> None:
        """Acknowledge it: it is safe with the consumer, and the sender may forget it. Twice is as once.

        Raises:
            OSError: The note in the receiver's folder cannot be written; nothing was acknowledged.
        """
        self._acknowledge(self.id)
