"""Work that grows with a request: on the event loop if it is short, else in a thread.

A request is decoded, read and digested. This module alone decides when that is too long for the event loop.
The size of work is in bytes of a picture, of which the loop takes in a million in less than a millisecond.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

LOOP_BYTES: Final = 2 << 20
"""Maximum size of work on the event loop, which takes about 2 ms."""
MEMBER_BYTES: Final = 1 << 10
"""Size that a member of an object or an array has besides its bytes, since Python reads it by itself."""


def size_of(text: bytes | bytearray) -> int:
    """Return the size of the work on a JSON text. Each member has a comma, and pictures have none."""
    nbytes = len(text)
    return nbytes if nbytes > LOOP_BYTES else nbytes + MEMBER_BYTES * text.count(b",")


async def do(work: Callable[..., Result], *arguments: Any, size: int) -> Result:
    """Do work of a size, in a thread if it is long."""
    return await asyncio.to_thread(work, *arguments) if size > LOOP_BYTES else work(*arguments)
