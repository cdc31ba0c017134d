"""Looks after the health of engines in the background, while there is something to look after."""

import asyncio
import contextlib

from mmrender.engines.fleet import Fleet


class Monitor:
    """Checks engines while requests are under way or an engine is ejected; then its task ends by itself.

    Args:
        fleet: The engines.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Begin to look, unless that is so already. Needs a running event loop."""
        if self._fleet.policy.health_interval is None or self._is_running():
            return
        self._task = asyncio.get_running_loop().create_task(self._look(), name="mmrender-engines-health")

    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done() and not self._task.get_loop().is_closed()

    async def _look(self) -> None:
        interval = self._fleet.policy.health_interval or 1.0
        while True:
            await asyncio.sleep(interval)
            if self._fleet.gate.state in ("paused", "resuming"):  # it may load weights, and need not answer
                continue
            members = list(self._fleet.members.values())
            if not any(member.calls or member.ill is not None for member in members):
                return
            await asyncio.gather(*[self._fleet.check(member) for member in members])

    async def stop(self) -> None:
        """End the task, wherever it runs."""
        task, self._task = self._task, None
        if task is None or task.done() or task.get_loop().is_closed():
            return
        if task.get_loop() is not asyncio.get_running_loop():
            task.get_loop().call_soon_threadsafe(task.cancel)
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
