"""Work that grows with a request: on the event loop if it is short, else in a thread.

A request is decoded, read and digested. This module alone decides which of that is too long for the loop.
The size of work is in bytes of a picture, of which the loop takes in a million in less than a millisecond.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

LOOP_BYTES: Final = 2 << 20
"""Maximum size of work on the event loop, which takes about 2 ms."""
ENTRY_BYTES: Final = 16 << 10
"""Size that a message or a content part has besides its bytes, since it is read member by member."""


async def do(work: Callable[..., Result], *arguments: Any, nbytes: int, entries: int = 0) -> Result:
    """Do work that grows with a request, in a thread if it is long.

    Args:
        work: The work.
        *arguments: Its arguments.
        nbytes: Bytes of the request, or of its pictures.
        entries: Number of messages and content parts that the work reads.
    """
    if nbytes + ENTRY_BYTES * entries > LOOP_BYTES:
        return await asyncio.to_thread(work, *arguments)
    return work(*arguments)
