"""The protocol between a sender and a receiver: msgpack headers, some of which carry frames.

```
sender                                   receiver
Hello     version, sender           ->
                                    <-   Welcome    version, longest message
Data + short frames                 ->
                                    <-   Want       the long frames that the receiver lacks
Frames + these frames               ->
                                    <-   Acked      acknowledged
                                    <-   Refused    this message cannot be used, and is not sent again
Ping                                <->  Ping       after a while of silence
Bye                                 <->  Bye        closing in good order
```

On the wire each is the magic `mmsp`, the length of the header as a little-endian u32, the header, and after
`Data` and `Frames` the frames. A message without long frames has no `Want` and no `Frames`.

A long frame may have a key, which identifies its content. The receiver wants a frame unless this sender has
sent it under the key before, and the receiver still has it. The receiver answers with `Want` once it has room
for the message, so a sender waits without pixels in its socket.

After a lost connection the sender sends all unacknowledged messages again, in order. The receiver drops
duplicates, whose long frames do not travel again: it keeps the last sequence number of each sender.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta

from mmcodecs.values import DEFAULT_LIMITS
from mmrender.errors import InputError, ShippingClosedError, ShippingError, ShippingProtocolError
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.delivery import MAX_NUMBER
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire

VERSION: Final = 6
MAX_FRAMES: Final = DEFAULT_LIMITS.max_frames + 1
"""Maximum frames of a message of the codec: its payloads and a head."""
PLAIN, TRAJECTORY, GROUP = "", "trajectory", "group"
LONG_BYTES: Final = 64 << 10
"""Length of the shortest long frame. Each has a buffer of its own, so that it keeps no other frame alive."""

SenderId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key = Annotated[bytes, Meta(min_length=1, max_length=DEFAULT_LIMITS.max_key_bytes)]
Number = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
Positive = Annotated[int, Meta(ge=1, lt=MAX_NUMBER)]
Text = Annotated[str, Meta(max_length=1000)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds.

    Attributes:
        handshake: From the connection to the Welcome.
        heartbeat: Of silence until a Ping is sent.
        silence: Of the peer's silence until the connection is closed.
        first_retry: Before the second attempt to connect. The wait doubles with each further attempt.
        last_retry: The maximum wait between attempts.
        goodbye: That closing waits for a peer that does not read.
        look: Between two looks of a sender at a list of receivers that may change.
        leave: That a sender waits for acknowledgements before it leaves a receiver for another one.
        failover: That a sender's own receiver may be unreachable before the sender tries others of the list.
    """

    handshake: float = 10.0
    heartbeat: float = 5.0
    silence: float = 30.0
    first_retry: float = 0.02
    last_retry: float = 2.0
    goodbye: float = 1.0
    look: float = 5.0
    leave: float = 10.0
    failover: float = 30.0


DEFAULT_TIMING: Final = Timing()


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class Hello(_Header, frozen=True, forbid_unknown_fields=False):
    """Opens a connection. `sender` is the same for all connections of one `Sender`."""

    version: int
    sender: SenderId


class Welcome(_Header, frozen=True, forbid_unknown_fields=False):
    """Answers a Hello with the length of the longest message."""

    version: int
    max_bytes: Positive


class Data(_Header, frozen=True):
    """A message. Its short frames follow.

    Attributes:
        seq: Its number, which rises with each message of a sender.
        kind: Form of the decoded value, see `from_wire`.
        lengths: Lengths of its frames, in bytes.
        keys: Identities of the contents of its long frames, by number of the frame.
    """

    seq: Positive
    kind: Annotated[str, Meta(max_length=32)]
    lengths: Annotated[list[Number], Meta(max_length=MAX_FRAMES)]
    keys: Annotated[dict[int, Key], Meta(max_length=MAX_FRAMES)]

    def parts(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the short frames, and of the long ones."""
        numbers: tuple[list[int], list[int]] = ([], [])
        for number, length in enumerate(self.lengths):
            numbers[length >= LONG_BYTES].append(number)
        return numbers


class Frames(_Header, frozen=True):
    """The long frames of message `seq` that the receiver wants follow."""

    seq: Positive


class Answer(_Header, frozen=True):
    """About message `seq`."""

    seq: Number


class Acked(Answer, frozen=True):
    """The message is acknowledged."""


class Want(Answer, frozen=True):
    """The receiver has room for the message, and wants these of its long frames."""

    frames: Annotated[list[Number], Meta(max_length=MAX_FRAMES)]


class Refused(Answer, frozen=True):
    """The message cannot be used."""

    reason: Text


class Ping(_Header, frozen=True):
    """A sign of life."""


class Bye(_Header, frozen=True):
    """The last message. `denied` says that coming back would not help."""

    reason: Text
    denied: bool = False


Message = Hello | Welcome | Data | Want | Frames | Acked | Refused | Ping | Bye


def to_wire(value: Any) -> tuple[str, Any]:
    """Return the kind of a value, and the form in which the codec writes it.

    Raises:
        InputError: It is a sample or a rendering, of which no other process could make one again.
    """
    if isinstance(value, Trajectory):
        return TRAJECTORY, trajectories_to_wire([value])
    if type(value) is list and value and all(isinstance(each, Trajectory) for each in value):
        return GROUP, trajectories_to_wire(value)
    if isinstance(value, RenderedTokens | TrainingSample):
        remedy = "Send the trajectory that it is of, or pickle.dumps(value, 5) to a peer that trusts you"
        raise InputError("has no form on the wire", where="value", got=type(value).__name__, remedy=remedy)
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


class End:
    """One end of shipping. It belongs to the process that used it first, and is not copied."""

    _pid: int = 0

    def claim(self) -> None:
        """Use it in this process from now on.

        Raises:
            ShippingClosedError: It is in use in another process, from which this one was forked.
        """
        pid = os.getpid()
        self._pid = self._pid or pid
        if self._pid != pid:  # neither its event loop nor its threads run here
            raise ShippingClosedError(
                "in use in the process from which this one was forked",
                where=type(self).__name__,
                expected=f"process {self._pid}",
                got=f"process {pid}",
                remedy="Make another one in each process, or use it first after the fork",
            )

    def __reduce__(self) -> NoReturn:
        raise ShippingError(
            "an end of shipping cannot be copied or pickled: messages of two copies would be taken for one",
            where=type(self).__name__,
            remedy="Pass the address, and make another one there",
        )
