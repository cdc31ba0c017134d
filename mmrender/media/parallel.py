"""Sharing the work of one call among threads, the calling one included."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def map_shared(
    function: Callable[[Given], Made], given: Sequence[Given], executor: Executor | None = None
) -> list[Made]:
    """Return `function` of each, in order; threads of the executor take what the calling one has not begun.

    The calling thread never waits for work that nobody is doing, so it cannot be stalled by an executor that
    is busy or shut down, or whose threads call this themselves.

    Raises:
        Exception: That of the first in order that fails, after which the rest is not begun.
    """
    if executor is None or len(given) < 2:
        return [function(one) for one in given]
    futures = [_submit(executor, function, one) for one in given[1:]]
    try:
        made = [function(given[0])]
        for one, future in zip(given[1:], futures, strict=True):
            made.append(function(one) if future.cancel() else future.result())
        return made
    finally:
        for future in futures:
            future.cancel()


def _submit(executor: Executor, function: Callable[[Given], Made], one: Given) -> "Future[Made]":
    try:
        return executor.submit(function, one)
    except RuntimeError:  # shut down meanwhile: a future that nobody runs is left to the calling thread
        return Future()
