"""From an address to the transport that serves it."""

from mmcodecs import BufferPool, Limits
from mmrender.errors import ShippingSecurityError
from mmrender.shipping.address import Address
from mmrender.shipping.links.base import Transport
from mmrender.shipping.options import Timing
from mmrender.shipping.security import CurveKeys


def transport_of(
    address: Address,
    *,
    keyed: bool,
    curve: CurveKeys | None,
    pool: BufferPool,
    limits: Limits,
    timing: Timing,
) -> Transport:
    """Make the transport of an address.

    Raises:
        ShippingSecurityError: CURVE keys for what is not ZeroMQ, or none of the peer.
        MissingDependencyError: It needs a package that is not installed.
    """
    if curve is not None and not curve.peers:
        raise ShippingSecurityError(
            "CURVE keys without peers", where="curve.peers", expected="public keys of the other side"
        )
    if address.is_zmq:
        from mmrender.shipping.links.zeromq import ZmqTransport

        return ZmqTransport(address, keyed=keyed, curve=curve, limits=limits, handshake=timing.handshake)
    if curve is not None:
        raise ShippingSecurityError(
            "CURVE belongs to ZeroMQ",
            where=str(address),
            expected="zmq+tcp:// or zmq+ipc://",
            remedy="Pass key=, or take a zmq address",
        )
    if address.scheme == "memory":
        from mmrender.shipping.links.memory import MemoryTransport

        return MemoryTransport(address.path)
    if address.scheme == "shm":
        from mmrender.shipping.links.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(address, keyed=keyed, pool=pool, limits=limits)
    from mmrender.shipping.links.sockets import SocketTransport

    return SocketTransport(address, keyed=keyed, pool=pool)
