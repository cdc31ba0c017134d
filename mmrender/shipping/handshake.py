"""The first four messages of a connection: who is there, who holds the key, and where to go on."""

import os
from typing import Literal, TypeVar

from mmrender.errors import ShippingConnectionError, ShippingProtocolError, ShippingSecurityError
from mmrender.shipping.channel import Channel
from mmrender.shipping.messages import (
    NONCE_BYTES,
    VERSION,
    Bye,
    Challenge,
    Hello,
    Resume,
    Welcome,
    expect,
    pack,
)
from mmrender.shipping.security import SessionKeys

Side = Literal["sender", "receiver"]
T = TypeVar("T")


def _no_payload() -> int:
    return 0


async def open_as_sender(
    channel: Channel, sender: bytes, *, secret: bytes | None, table_bytes: int, unacked: list[tuple[int, str]]
) -> Welcome:
    """Introduce a sender.

    Args:
        channel: Over a link that was just made.
        sender: 16 bytes that are the same for all connections of this sender.
        secret: The shared secret, if there is one.
        table_bytes: Capacity of the table of shared arrays that the sender would like.
        unacked: Number and id of each message that it has.

    Raises:
        ShippingSecurityError: One side has a key and the other none, or another one.
        ShippingConnectionError: The connection broke, or the receiver is closing.
        ShippingProtocolError: The other side is no receiver of this version.
    """
    hello = Hello(VERSION, sender, os.urandom(NONCE_BYTES), secret is not None, table_bytes)
    await channel.send(hello)
    challenge = await _next(channel, Challenge)
    _check_version(channel, challenge.version)
    _check_keyed(channel, challenge.keyed, secret, "receiver")
    if secret is not None:
        channel.secure(SessionKeys.derive(secret, [pack(hello), pack(challenge)]), as_sender=True)
    await channel.send(Resume(unacked))
    return await _next(channel, Welcome)


async def open_as_receiver(channel: Channel, *, secret: bytes | None) -> tuple[Hello, Resume]:
    """Meet a sender, up to where it must be welcomed.

    Raises:
        ShippingSecurityError: One side has a key and the other none, or another one.
        ShippingConnectionError: The connection broke.
        ShippingProtocolError: The other side is no sender of this version.
    """
    hello = await _next(channel, Hello)
    challenge = Challenge(VERSION, os.urandom(NONCE_BYTES), secret is not None)
    await channel.send(challenge)
    _check_version(channel, hello.version)
    _check_keyed(channel, hello.keyed, secret, "sender")
    if secret is not None:
        channel.secure(SessionKeys.derive(secret, [pack(hello), pack(challenge)]), as_sender=False)
    return hello, await _next(channel, Resume)


async def _next(channel: Channel, kind: type[T]) -> T:
    message, _ = await channel.receive(_no_payload)
    if isinstance(message, Bye):
        raise farewell(channel.peer, message)
    return expect(message, kind)


def farewell(peer: str, bye: Bye) -> ShippingConnectionError | ShippingSecurityError:
    """What a Bye means to who hears it."""
    if bye.denied:
        return ShippingSecurityError("the peer does not let us in", where=peer, got=bye.reason)
    return ShippingConnectionError("the peer said goodbye", where=peer, got=bye.reason)


def _check_version(channel: Channel, version: int) -> None:
    if version != VERSION:
        raise ShippingProtocolError(
            "the other side speaks another version of the protocol",
            where=channel.peer,
            expected=str(VERSION),
            got=str(version),
            remedy="Install the same version of mmrender on both sides",
        )


def _check_keyed(channel: Channel, keyed: bool, secret: bytes | None, other: Side) -> None:
    if keyed != (secret is not None):
        raise ShippingSecurityError(
            f"the {other} has {'a' if keyed else 'no'} shared secret, and this side has "
            f"{'one' if secret is not None else 'none'}",
            where=channel.peer,
            remedy="Give both sides the same key",
        )
