"""Who may speak to whom: a shared secret, or ZeroMQ's CURVE.

**What a shared secret protects.** Each side sends 32 random bytes; HMAC-SHA256 over both, and over all else
that was said, gives each direction a key of its own, and from then on every message carries a keyed BLAKE3
tag of its number, header and frames, checked before anything of it is read. So nobody without the secret can
be either end, and nothing on the way can be changed, left out, repeated or put in another order, or replayed
in another connection, without the connection ending. It does not hide what is sent: whoever can read the
network can read the trajectories. A secret that a person made up can be guessed at leisure by an attacker who
saw one handshake; take 32 random bytes (`secrets.token_hex(32)`).

**CURVE** encrypts and authenticates by public keys; a receiver lists the keys of its senders. It is what
ZeroMQ needs beyond loopback, since ZeroMQ takes in whole messages before this library sees them: only CURVE
turns a stranger away before that.

Without either, an address is bound on loopback or in the file system only. Socket files are made for their
owner alone; a port on loopback is open to every user of the machine.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from mmrender.errors import MissingDependencyError, ShippingSecurityError
from mmrender.shipping.address import Address, is_loopback

TAG_BYTES = 32
MIN_KEY_BYTES = 16
_CONTEXT = b"mmrender shipping 1\0"


def key_bytes(key: str | bytes | None) -> bytes | None:
    """Check a shared secret.

    Raises:
        ShippingSecurityError: It is too short to be one.
    """
    if key is None:
        return None
    secret = key.encode() if isinstance(key, str) else bytes(key)
    if len(secret) < MIN_KEY_BYTES:
        raise ShippingSecurityError(
            "the shared secret is too short",
            where="key",
            expected=f"at least {MIN_KEY_BYTES} bytes",
            got=f"{len(secret)}",
            remedy="Make one with secrets.token_hex(32)",
        )
    return secret


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Keys for ZeroMQ's CURVE, in the 40-character form that `zmq.curve_keypair()` gives.

    Attributes:
        public: Of this side.
        secret: Of this side.
        peers: Public keys of the other side: the receiver's, or those of all senders that may come.
    """

    public: bytes
    secret: bytes = field(repr=False)
    peers: tuple[bytes, ...]

    @classmethod
    def generate(cls, *peers: bytes) -> "CurveKeys":
        """Make a new pair.

        Raises:
            MissingDependencyError: pyzmq is not installed.
        """
        try:
            import zmq
        except ImportError as error:
            raise MissingDependencyError.of_extra("pyzmq", "zmq", "CURVE") from error
        public, secret = zmq.curve_keypair()
        return cls(public, secret, peers)

    def knowing(self, *peers: bytes) -> "CurveKeys":
        """The same pair with other peers."""
        return CurveKeys(self.public, self.secret, peers)


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The two keys of one connection, 32 bytes each."""

    sender: bytes = field(repr=False)
    receiver: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, transcript: Sequence[bytes]) -> "SessionKeys":
        """Derive them from the secret and from all that was said so far, both nonces included."""
        said = b"".join(len(part).to_bytes(8, "little") + part for part in transcript)
        root = hmac.digest(secret, _CONTEXT + hashlib.sha256(said).digest(), "sha256")
        return cls(
            hmac.digest(root, b"from sender to receiver", "sha256"),
            hmac.digest(root, b"from receiver to sender", "sha256"),
        )


def tag(key: bytes, number: int, header: bytes | memoryview, frames: Sequence[memoryview]) -> bytes:
    """Authenticate a parcel: its number, and where header and frames begin and end, are part of it."""
    digest = blake3(key=key)
    lengths = [number, len(header), len(frames), *(frame.nbytes for frame in frames)]
    digest.update(b"".join(length.to_bytes(8, "little") for length in lengths))
    digest.update(header)
    for frame in frames:
        digest.update(frame)
    return bytes(digest.digest(TAG_BYTES))


def same_tag(expected: bytes, got: bytes | memoryview) -> bool:
    """Compare two tags in constant time."""
    return hmac.compare_digest(expected, bytes(got))


def check_exposure(
    address: Address, hosts: Sequence[str], *, keyed: bool, curve: CurveKeys | None, side: str
) -> None:
    """Refuse an address that another machine can reach, unless something guards it.

    Args:
        address: As given.
        hosts: The numeric addresses that it stands for.
        keyed: Whether there is a shared secret.
        curve: CURVE keys.
        side: What is about to happen, for the message.

    Raises:
        ShippingSecurityError: It is open to strangers.
    """
    if not address.is_network or all(is_loopback(host) for host in hosts):
        return
    if address.is_zmq and curve is None:
        raise ShippingSecurityError(
            f"{side} beyond loopback without CURVE keys",
            where=str(address),
            expected="curve=CurveKeys(...)",
            got="a shared secret only" if keyed else "none",
            remedy="Pass curve=, take tcp:// with key=, or use a loopback address",
        )
    if not address.is_zmq and not keyed:
        raise ShippingSecurityError(
            f"{side} beyond loopback without a shared secret",
            where=str(address),
            expected="key=",
            got="none",
            remedy="Pass the same key= to both sides, such as secrets.token_hex(32), or stay on loopback",
        )
