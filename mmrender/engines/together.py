"""Several coroutines as one, and a coroutine as a stream, leaving no task behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all at once; results in order.

    The first error ends the others and is raised as it is.
    """
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def produced(
    produce: Callable[[Callable[[Result], None]], Awaitable[None]],
) -> AsyncIterator[Result]:
    """What a coroutine emits, as it emits it; ending the stream ends the coroutine."""
    queue: asyncio.Queue[tuple[Result] | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await produce(lambda value: queue.put_nowait((value,)))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (entry := await queue.get()) is not None:
            yield entry[0]
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
