"""What the two ends say to each other: small msgpack headers, of which one kind has a payload.

```
sender                                   receiver
Hello     who, delivery, nonce      ->
                                    <-   Challenge  nonce; from here on both sides authenticate, given a key
Resume    what it has unacknowledged ->
                                    <-   Welcome    window, limits, what of that arrived already
Data + frames                       ->
                                    <-   Progress   taken (credit comes back), acknowledged
                                    <-   Missing    arrays that were named but are not held: send it again
                                    <-   Refused    this message cannot be used; not to be sent again
Ping                                <->  Ping       after a while of silence
Bye                                 <->  Bye        closing in good order
```
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from mmrender.errors import ShippingProtocolError
from mmrender.shipping.options import MAX_ID_BYTES, MAX_UNACKED

T = TypeVar("T")
VERSION = 1
NONCE_BYTES = 32
MAX_KEYS = 4096

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
PeerId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Numbers = Annotated[list[Number], Meta(max_length=4 * MAX_UNACKED)]
MessageId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES)]
Text = Annotated[str, Meta(max_length=1000)]


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    """Opens a conversation. `sender` is the same for all connections of one `Sender`."""

    version: int
    sender: PeerId
    nonce: Nonce
    keyed: bool
    table_bytes: Number


class Challenge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="challenge"):
    """Answers a Hello."""

    version: int
    nonce: Nonce
    keyed: bool


class Resume(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="resume"):
    """Numbers and ids of messages that would be sent, or sent again."""

    unacked: Annotated[list[tuple[Number, MessageId]], Meta(max_length=MAX_UNACKED)]


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="welcome"):
    """Answers a Resume: bounds, and which of its messages need not be sent.

    They are acknowledged, held by the consumer, or queued for it; those take room in the window, so many
    bytes.
    """

    window_messages: Annotated[int, Meta(ge=1)]
    window_bytes: Annotated[int, Meta(ge=1)]
    max_bytes: Annotated[int, Meta(ge=1)]
    table_bytes: Number
    acked: Numbers
    held: Numbers
    queued: Annotated[list[tuple[Number, Number]], Meta(max_length=MAX_UNACKED)]


class Data(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="data"):
    """A message; its frames are those of the codec. `kind` says what the decoded value is turned into."""

    seq: Number
    id: MessageId
    kind: Annotated[str, Meta(max_length=32)]


class Progress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="progress"):
    """Numbers of messages that the consumer took, and that are acknowledged."""

    taken: Numbers
    acked: Numbers


class Missing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="missing"):
    """Keys of shared arrays that message `seq` named and the receiver lacks, or the first of many."""

    seq: Number
    keys: Annotated[list[Annotated[bytes, Meta(min_length=1, max_length=64)]], Meta(max_length=MAX_KEYS)]


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="refused"):
    """Message `seq` cannot be used."""

    seq: Number
    reason: Text


class Ping(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ping"):
    """A sign of life."""


class Bye(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="bye"):
    """The last word. `denied` says that the peer may not speak here, and coming back would not help."""

    reason: Text
    denied: bool = False


Message = Hello | Challenge | Resume | Welcome | Data | Progress | Missing | Refused | Ping | Bye

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Write a header."""
    return _ENCODER.encode(message)


def unpack(header: bytes | memoryview) -> Message:
    """Read a header.

    Raises:
        ShippingProtocolError: It is not one.
    """
    try:
        return _DECODER.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ShippingProtocolError("a header cannot be read", got=str(error)[:200]) from error


def expect(message: Message, kind: type[T]) -> T:
    """Check that a message is of the kind that is due, and give it.

    Raises:
        ShippingProtocolError: It is another.
    """
    if not isinstance(message, kind):
        raise ShippingProtocolError(
            "a message out of turn", expected=kind.__name__, got=type(message).__name__
        )
    return message
