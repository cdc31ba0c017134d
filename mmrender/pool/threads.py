"""The threads of one pool in one process, with the renderer that they use."""

import asyncio
import contextvars
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mmrender.pool.admission import Admission, closed_error
from mmrender.pool.sizes import PoolSizes
from mmrender.renderer import Renderer

Result = TypeVar("Result")


class PoolThreads:
    """Worker threads, media threads, and a queue before them.

    Args:
        renderer: Shared as it is, but for its media resolver, which gets the media threads.
        sizes: How many of everything.
    """

    def __init__(self, renderer: Renderer, sizes: PoolSizes) -> None:
        self._admission = Admission(sizes.workers + sizes.queue_size)
        self._workers = ThreadPoolExecutor(sizes.workers, "mmrender-pool")
        self._media: ThreadPoolExecutor | None = None
        self.renderer = renderer
        if sizes.media_threads and renderer.media is not None:
            self._media = ThreadPoolExecutor(sizes.media_threads, "mmrender-media")
            self.renderer = copy.copy(renderer)
            self.renderer.media = renderer.media.with_executor(self._media)

    async def run(self, call: Callable[[], Result], *, nowait: bool) -> Result:
        """Carry out a call on a worker, in the caller's context.

        A caller that is cancelled leaves the queue; a call that has begun runs to its end unheeded.

        Raises:
            PoolFullError: `nowait`, and every place is taken.
            PoolClosedError: The pool is closed.
        """
        if nowait:
            self._admission.enter_now()
        else:
            await self._admission.enter()
        try:
            future = self._workers.submit(contextvars.copy_context().run, call)
        except RuntimeError as error:
            self._admission.leave()
            raise closed_error() from error
        future.add_done_callback(lambda _: self._admission.leave())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what was taken in, refuse the rest."""
        self._admission.close()
        self._workers.shutdown()
        if self._media is not None:
            self._media.shutdown()
