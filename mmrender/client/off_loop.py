"""Reading large replies without keeping the event loop."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

INLINE_BYTES: Final = 256 << 10
"""Reading more takes milliseconds, in which no other call would go on."""


async def read_off_loop(body: bytes | memoryview, read: Callable[[], T]) -> T:
    """Return what `read` makes of a reply's body, on a thread where the body is large."""
    if len(body) < INLINE_BYTES:
        return read()
    return await asyncio.to_thread(read)
