"""What is known about a server between calls: how it takes pixels, and which images it has seen.

A backend is a plain value, so this is kept beside the transport, for as long as that lives. A connection that
breaks may mean that the server starts anew with other flags; `forget` is called then, and all is asked again.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

from mmrender.client.transport import Transport

MOST_HASHES: Final = 1 << 16
"""How many images of one server are remembered; a server forgets old ones as well."""


class ServerState:
    """Answers and hashes of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[Hashable, Any] = {}
        self._pending: dict[tuple[Hashable, asyncio.AbstractEventLoop], asyncio.Task[Any]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()

    async def ask_once(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question; callers that come while it is asked wait for the same answer.

        An error is raised for all who wait, and not kept: the next call asks again.
        """
        if key in self._answers:
            return self._answers[key]
        pending = (key, asyncio.get_running_loop())
        task = self._pending.get(pending)
        if task is None:
            task = self._pending[pending] = asyncio.ensure_future(self._asked(key, ask))
            task.add_done_callback(lambda done: self._settled(pending, done))
        # One who gives up must not take the answer from the others.
        return await asyncio.shield(task)

    async def _asked(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        answer = await ask()
        self._answers[key] = answer
        return answer

    def _settled(self, pending: tuple[Hashable, asyncio.AbstractEventLoop], task: asyncio.Task[Any]) -> None:
        self._pending.pop(pending, None)
        if not task.cancelled():
            task.exception()  # looked at here, since all who waited may have given up

    def seen(self, hashes: Collection[str]) -> set[str]:
        """Those of `hashes` that the server has been sent."""
        with self._lock:
            known = {digest for digest in hashes if digest in self._seen}
            for digest in known:
                self._seen.move_to_end(digest)
        return known

    def remember(self, hashes: Iterable[str]) -> None:
        """Note that the server has taken the data of these."""
        with self._lock:
            for digest in hashes:
                self._seen[digest] = None
                self._seen.move_to_end(digest)
            while len(self._seen) > MOST_HASHES:
                self._seen.popitem(last=False)

    def unsee(self, hashes: Iterable[str]) -> None:
        """Note that the server no longer has these."""
        with self._lock:
            for digest in hashes:
                self._seen.pop(digest, None)


_states: WeakKeyDictionary[Transport, ServerState] = WeakKeyDictionary()
_lock = threading.Lock()


def _beneath(transport: Transport) -> Transport:
    """The transport that one made for a single request stands on, as its attribute `beneath`."""
    while (inner := getattr(transport, "beneath", None)) is not None:
        transport = inner
    return transport


def state_of(transport: Transport) -> ServerState:
    """What is known about the server of a transport."""
    transport = _beneath(transport)
    with _lock:
        state = _states.get(transport)
        if state is None:
            state = _states[transport] = ServerState()
    return state


def forget(transport: Transport) -> None:
    """Forget what is known about a server."""
    with _lock:
        _states.pop(_beneath(transport), None)
