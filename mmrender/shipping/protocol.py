"""The protocol between a sender and a receiver: msgpack headers, one kind of which carries frames.

```
sender                                   receiver
Hello     version, who, table       ->
                                    <-   Welcome    version, window, limits
Data + frames                       ->
                                    <-   Taken      by the consumer: its room in the window is free
                                    <-   Acked      acknowledged
                                    <-   Refused    this message cannot be used; not to be sent again
Ping                                <->  Ping       after a while of silence
Bye                                 <->  Bye        closing in good order
```

Over shared memory also:

```
Segment + descriptor                ->              memory for frames
Dropped                             ->              segments that are gone
                                    <-   Freed      segments whose last view is gone
```

On the wire each is the magic `mmsp`, the length of the header as a little-endian u32, the header, and after a
`Data` whose frames are not in a segment these, one after the other.

After a lost connection the sender sends everything again that was not acknowledged, and the receiver drops
what it has: a delivery is known by its sender's id and its sequence number, or by a key that the caller gave.
"""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

import mmcodecs
from mmcodecs import Limits
from mmrender.errors import ShippingConnectionError, ShippingProtocolError, ShippingSecurityError
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire

VERSION: Final = 3
MAGIC: Final = b"mmsp"
PREFIX: Final = struct.Struct("<4sI")
MAX_HEADER_BYTES: Final = 256 << 10
MAX_KEY_BYTES: Final = 256
MAX_UNACKED: Final = 4096
MAX_FRAMES: Final = 4096 + 1
"""A message of the codec has at most 4,096 payloads, and a head."""
MAX_SEGMENTS: Final = 256
PLAIN, TRAJECTORY, GROUP = "", "trajectory", "group"

SenderId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 62)]
Numbers = Annotated[list[Positive], Meta(max_length=MAX_SEGMENTS)]
Text = Annotated[str, Meta(max_length=1000)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds.

    Attributes:
        handshake: From the connection to the Welcome.
        heartbeat: A Ping is sent after so long without any other message.
        silence: A connection over which nothing came for so long is closed.
        first_retry: Wait before the second attempt to connect; each further one waits twice as long.
        last_retry: The longest wait between attempts.
        goodbye: How long closing waits for a peer that does not read.
    """

    handshake: float = 10.0
    heartbeat: float = 5.0
    silence: float = 30.0
    first_retry: float = 0.02
    last_retry: float = 2.0
    goodbye: float = 1.0


DEFAULT_TIMING: Final = Timing()


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class Hello(_Header, frozen=True):
    """Opens a connection. `sender` is the same for all connections of one `Sender`."""

    version: int
    sender: SenderId
    table_bytes: Number


class Welcome(_Header, frozen=True):
    """Answers a Hello: how much may be in flight, the longest message, and the table of shared arrays."""

    version: int
    window_messages: Positive
    window_bytes: Positive
    max_bytes: Positive
    table_bytes: Number


class Data(_Header, frozen=True):
    """A message; its frames are those of the codec.

    `key` is the caller's idempotency key or empty, `digest` then that of the content. `kind` says what the
    decoded value becomes. `lengths` are those of the frames, which lie in `segment`, or follow if that is 0.
    """

    seq: Number
    key: Annotated[str, Meta(max_length=MAX_KEY_BYTES)]
    digest: Annotated[bytes, Meta(max_length=32)]
    kind: Annotated[str, Meta(max_length=32)]
    lengths: Annotated[list[Number], Meta(max_length=MAX_FRAMES)]
    segment: Number = 0


class Taken(_Header, frozen=True):
    """The consumer took message `seq`."""

    seq: Number


class Acked(Taken, frozen=True):
    """Message `seq` is acknowledged, and taken."""


class Refused(Taken, frozen=True):
    """Message `seq` cannot be used."""

    reason: Text


class Segment(_Header, frozen=True):
    """Memory of so many bytes; its descriptor is attached to the first byte of this message."""

    number: Positive
    num_bytes: Positive


class Freed(_Header, frozen=True):
    """Segments of which the receiver has no view any more."""

    numbers: Numbers


class Dropped(_Header, frozen=True):
    """Segments that the sender has given up."""

    numbers: Numbers


class Ping(_Header, frozen=True):
    """A sign of life."""


class Bye(_Header, frozen=True):
    """The last message. `denied` says that coming back would not help."""

    reason: Text
    denied: bool = False


Message = Hello | Welcome | Data | Taken | Acked | Refused | Segment | Freed | Dropped | Ping | Bye

M = TypeVar("M", bound=_Header)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Write a message, without its frames."""
    header = _ENCODER.encode(message)
    return PREFIX.pack(MAGIC, len(header)) + header


def unpack(header: bytes | memoryview) -> Message:
    """Read the header of a message."""
    try:
        return _DECODER.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ShippingProtocolError("a header cannot be read", got=str(error)[:200]) from error


def expect(kind: type[M], message: Message, peer: str) -> M:
    """Require a message of one kind, and of this version of the protocol if it opens a connection."""
    if isinstance(message, Bye):
        if message.denied:
            raise ShippingSecurityError("the peer refused the connection", where=peer, got=message.reason)
        raise ShippingConnectionError("the peer said goodbye", where=peer, got=message.reason)
    if not isinstance(message, kind):
        raise ShippingProtocolError("a message out of turn", where=peer, got=type(message).__name__)
    if isinstance(message, Hello | Welcome) and message.version != VERSION:
        raise ShippingProtocolError(
            "the peer speaks another version of the protocol",
            where=peer,
            expected=str(VERSION),
            got=str(message.version),
            remedy="Install the same version of mmrender on both sides",
        )
    return message


def to_wire(value: Any) -> tuple[str, Any]:
    """Return the kind of a value, and the form in which the codec writes it."""
    if isinstance(value, Trajectory):
        return TRAJECTORY, trajectories_to_wire([value])
    if type(value) is list and value and all(isinstance(each, Trajectory) for each in value):
        return GROUP, trajectories_to_wire(value)
    return PLAIN, value


def from_wire(kind: str, value: Any) -> Any:
    """Undo `to_wire`."""
    if kind == PLAIN:
        return value
    group = trajectories_from_wire(value) if kind in (TRAJECTORY, GROUP) else None
    if group is None or (kind == TRAJECTORY and len(group) != 1):
        got = f"{kind!r} of {0 if group is None else len(group)}"
        raise ShippingProtocolError("a value of unknown kind", expected="a trajectory or a group", got=got)
    return group if kind == GROUP else group[0]


def content_digest(wire: Any, limits: Limits) -> bytes:
    """Return the blake3 digest of an encoded value, the same for equal content."""
    hasher = blake3()
    for frame in mmcodecs.encode_frames(wire, limits=limits):
        view = memoryview(frame)
        hasher.update(view.nbytes.to_bytes(8, "little"))
        hasher.update(view)
    return hasher.digest()


class Notifier:
    """Wakes the tasks of one event loop that wait for a condition; it may be notified from any function."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Have every waiter look at its condition again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        while not condition():
            await self._event.wait()
