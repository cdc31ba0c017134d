"""What a reader accepts, and what a writer promises to stay within."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message. Writers check them too, so that nothing is sent that a default reader refuses.

    With these bounds, reading allocates at most 80 bytes for a byte of the head plus 300 for a value in it,
    and nothing for payloads, whatever the input (measured by the fuzzer; see `docs/codec.md`).
    """

    max_bytes: int = 16 << 30
    """Length of the whole message, in bytes."""
    max_head_bytes: int = 4 << 20
    """Length of preamble, frame table and body, in bytes."""
    max_frames: int = 4096
    """Payload frames in one message."""
    max_depth: int = 64
    """Containers inside each other."""
    max_values: int = 65_536
    """Values in the head, by what they cost to read: a scalar counts one, a container two, an array, packed
    list or
    other extension that holds no values four. What a packed list holds does not count."""
    max_ndim: int = 8
    """Dimensions of one array. At most 32, which is what numpy holds everywhere."""
    max_key_bytes: int = 64
    """Length of the key of a shared array, in bytes."""


DEFAULT_LIMITS = Limits()
