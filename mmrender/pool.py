"""`RendererPool`: a renderer for many callers at once, threads and coroutines."""

from typing import TypeVar

from mmrender.renderer import Renderer

AnyRenderer = TypeVar("AnyRenderer", bound=Renderer)


def RendererPool(  # noqa: N802 - it reads as the class that it opens
    renderer: AnyRenderer,
    *,
    workers: int | None = None,
    queue_size: int | None = None,
    media_threads: int | None = None,
) -> AnyRenderer:
    """Return a renderer with threads of its own, which shares tables, memo and media cache with another one.

    Args:
        renderer: The other one. It stays usable by itself.
        workers: Threads that carry out `a...` calls; by default one per processor, at most four.
        queue_size: Calls that may wait for a worker, by default four for each. Beyond that, a call waits to
            be let in, or fails if it was made with `nowait=True`.
        media_threads: Threads that help with images, by default as many as workers; 0 for none.

    Raises:
        InputError: A size is too small.
    """
    return renderer.with_workers(workers, queue_size=queue_size, media_threads=media_threads)
