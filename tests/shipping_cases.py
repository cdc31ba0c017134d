"""Building blocks for tests of shipping: an unreliable link, quick timing, and messages with shared arrays."""

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np

from mmcodecs import Shared
from mmrender.shipping.links.memory import MemoryLink, MemoryTransport
from mmrender.shipping.options import Timing

QUICK = Timing(handshake=0.3, heartbeat=0.02, silence=0.6, first_retry=0.001, last_retry=0.01)
PATIENT = Timing(first_retry=0.005, last_retry=0.05)


class FaultyLink(MemoryLink):
    """A link whose parcels may be lost or repeated, or that breaks."""

    faults: "FaultyTransport"

    async def send(self, header: bytes, frames: Any) -> None:
        fault = self.faults.next_fault()
        if fault == "cut":
            self.cut()
        if fault != "drop":
            await super().send(header, frames)
        if fault == "repeat":
            await super().send(header, frames)


class FaultyTransport(MemoryTransport):
    """A transport in memory, and what happens to which parcel, counted over all links and both directions."""

    def __init__(self, name: str, faults: Iterable[tuple[int, str]] = ()) -> None:
        super().__init__(name)
        self.faults = dict(faults)
        self.parcels = 0

    def next_fault(self) -> str | None:
        self.parcels += 1
        return self.faults.get(self.parcels)

    async def dial(self) -> MemoryLink:
        # The receiver has its end already, and uses it only when it is its turn.
        link = await super().dial()
        for end in (link, link.other):
            end.__class__ = FaultyLink
            end.faults = self
        return link


def picture(number: int, num_bytes: int = 4000) -> np.ndarray:
    return np.full(num_bytes, number % 251, np.uint8)


def message(number: int, pictures: Iterable[int] = (), num_bytes: int = 4000) -> dict[str, Any]:
    """A value that follows from its arguments, with arrays under keys that several messages share."""
    shared = {str(each): Shared(picture(each, num_bytes), b"picture %d" % each) for each in pictures}
    return {"number": number, "tokens": np.arange(number, number + 40), "pictures": shared}


def is_message(value: Any, number: int, pictures: Iterable[int] = (), num_bytes: int = 4000) -> bool:
    wanted = {str(each): picture(each, num_bytes) for each in pictures}
    return (
        value["number"] == number
        and np.array_equal(value["tokens"], np.arange(number, number + 40))
        and value["pictures"].keys() == wanted.keys()
        and all(np.array_equal(value["pictures"][name], array) for name, array in wanted.items())
    )


async def leftovers() -> list[asyncio.Task[Any]]:
    """Tasks that are still there besides the one that asks, after everything had its turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
