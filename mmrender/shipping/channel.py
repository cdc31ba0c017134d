"""Messages over a link: numbered, authenticated where there is a key, strictly read."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mmrender.errors import ShippingProtocolError, ShippingSecurityError
from mmrender.shipping.links.base import Limit, Link
from mmrender.shipping.messages import Data, Message, pack, unpack
from mmrender.shipping.security import TAG_BYTES, SessionKeys, same_tag, tag

T = TypeVar("T")
INLINE_WORK = 4 << 20
"""Work on up to this many bytes is done on the event loop: a thread would cost more than it frees."""
_NUMBER_BYTES = 8


async def off_loop(num_bytes: int, call: Callable[[], T]) -> T:
    """Do work that grows with so many bytes, in a thread if that is worth it."""
    if num_bytes <= INLINE_WORK:
        return call()
    return await asyncio.to_thread(call)


def total_bytes(frames: Sequence[memoryview]) -> int:
    """Bytes in all frames."""
    return sum(frame.nbytes for frame in frames)


class Channel:
    """One conversation over one link.

    Each parcel starts with its number in this direction; a parcel that was lost or repeated on the way shows
    as a wrong one and ends the conversation. Once it has keys, a tag follows the number.

    Args:
        link: The connection.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.peer = link.peer
        self.said = time.monotonic()
        self.sent_bytes = 0
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        self._turn = asyncio.Lock()

    def secure(self, keys: SessionKeys, *, as_sender: bool) -> None:
        """Authenticate everything from here on, in both directions."""
        pair = (keys.sender, keys.receiver)
        self._keys = pair if as_sender else pair[::-1]

    async def send(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        """Send one message.

        Raises:
            ShippingConnectionError: The connection broke.
        """
        async with self._turn:
            number, body = self._sent, pack(message)
            header = number.to_bytes(_NUMBER_BYTES, "little")
            if self._keys is not None:
                key = self._keys[0]
                header += await off_loop(total_bytes(frames), lambda: tag(key, number, body, frames))
            self._sent += 1
            await self.link.send(header + body, frames)
            self.said = time.monotonic()
            self.sent_bytes += len(header) + len(body) + total_bytes(frames)

    async def receive(self, limit: Limit) -> tuple[Message, list[memoryview]]:
        """Wait for the next message.

        Args:
            limit: Payload bytes that it may have.

        Raises:
            ShippingConnectionError: The connection broke.
            ShippingProtocolError: What came is no message, or not the next one.
            ShippingSecurityError: It does not come from who holds the key.
        """
        header, frames = await self.link.receive(limit)
        view = memoryview(header)
        number = self._received
        start = _NUMBER_BYTES + (TAG_BYTES if self._keys is not None else 0)
        if len(view) < start or int.from_bytes(view[:_NUMBER_BYTES], "little") != number:
            raise ShippingProtocolError(
                "messages are missing, repeated or out of order", where=self.peer, expected=f"number {number}"
            )
        if self._keys is not None:
            key, body = self._keys[1], view[start:]
            expected = await off_loop(total_bytes(frames), lambda: tag(key, number, body, frames))
            if not same_tag(expected, view[_NUMBER_BYTES:start]):
                raise ShippingSecurityError(
                    "a message that the holder of the key did not send",
                    where=self.peer,
                    remedy="Give both sides the same key",
                )
        self._received += 1
        message = unpack(view[start:])
        if frames and not isinstance(message, Data):
            raise ShippingProtocolError(
                "a payload that belongs to nothing", where=self.peer, got=type(message).__name__
            )
        return message, frames
