"""Waking whoever waits for a change on one event loop."""

import asyncio
from collections.abc import Callable


class Bell:
    """Rung at every change; each waiter looks for itself whether it was the one it waits for."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake everybody who waits."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is looked at now and after every change."""
        while not condition():
            await self.wait()
