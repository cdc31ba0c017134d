"""Links within one event loop, for tests: parcels are passed as they are."""

import asyncio
import time
from collections.abc import Sequence

from mmrender.errors import ShippingConnectionError
from mmrender.shipping.links.base import Limit, Listener, OnLink, Parcel, broken, too_long

_DOORS: dict[str, "MemoryDoor"] = {}


class MemoryLink:
    """One end of a pair; `connect` joins two."""

    def __init__(self, name: str, capacity: int) -> None:
        self.peer = name
        self.heard = time.monotonic()
        self.inbox: asyncio.Queue[Parcel | None] = asyncio.Queue(capacity)
        self.other: MemoryLink | None = None

    def connect(self, other: "MemoryLink") -> None:
        """Join two ends."""
        self.other, other.other = other, self

    async def send(self, header: bytes, frames: Sequence[memoryview]) -> None:
        """Give a parcel to the other end, waiting while its inbox is full."""
        other = self.other
        if other is None:
            raise broken(self.peer, "closed")
        await other.inbox.put(Parcel(bytes(header), [memoryview(bytes(frame)) for frame in frames]))
        if self.other is None:
            raise broken(self.peer, "closed")

    async def receive(self, limit: Limit) -> Parcel:
        """Wait for a parcel."""
        if self.other is None and self.inbox.empty():
            raise broken(self.peer, "closed")
        parcel = await self.inbox.get()
        if parcel is None:
            raise broken(self.peer, "closed")
        self.heard = time.monotonic()
        total, bound = sum(frame.nbytes for frame in parcel.frames), limit()
        if total > bound:
            raise too_long(self.peer, "a message is", bound, total)
        return parcel

    def cut(self) -> None:
        """Break the connection: both ends lose what is under way."""
        for end in (self, self.other):
            if end is not None:
                while not end.inbox.empty():
                    end.inbox.get_nowait()
                end.inbox.put_nowait(None)
        if self.other is not None:
            self.other.other = None
        self.other = None

    async def aclose(self) -> None:
        """Close this end; what was sent arrives before the end does."""
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            if other.inbox.full():
                other.inbox.get_nowait()
            other.inbox.put_nowait(None)


class MemoryDoor:
    """A listener in memory."""

    def __init__(self, name: str, on_link: OnLink) -> None:
        self.name = name
        self.on_link = on_link
        self.url = f"memory://{name}"
        _DOORS[name] = self

    async def aclose(self) -> None:
        """Close the door."""
        if _DOORS.get(self.name) is self:
            del _DOORS[self.name]


class MemoryTransport:
    """Dials and listens under a name, which is known to this process only.

    Args:
        name: The name.
        capacity: Parcels that a link holds in each direction.
    """

    def __init__(self, name: str, capacity: int = 64) -> None:
        self.name = name
        self.capacity = capacity

    async def dial(self) -> MemoryLink:
        """Connect to whoever listens under the name."""
        door = _DOORS.get(self.name)
        if door is None:
            raise ShippingConnectionError("nobody listens", where=f"memory://{self.name}")
        near, far = (MemoryLink(f"memory://{self.name}", self.capacity) for _ in range(2))
        near.connect(far)
        door.on_link(far)
        return near

    async def listen(self, on_link: OnLink) -> Listener:
        """Listen under the name."""
        if self.name in _DOORS:
            raise ShippingConnectionError("the name is taken", where=f"memory://{self.name}")
        return MemoryDoor(self.name, on_link)

    async def aclose(self) -> None:
        """Nothing is shared."""
