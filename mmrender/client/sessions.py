"""One aiohttp session for each event loop, closed when its loop ends or its owner goes."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from typing import NamedTuple

import aiohttp

from mmrender.client.config import TransportConfig

_READ_BUFFER = 1 << 20


class _Entry(NamedTuple):
    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    keeper: AsyncGenerator[None, None]


class LoopSessions:
    """Sessions by event loop.

    A session is closed by `aclose` in its loop; by `asyncio.run` at the loop's end, since a suspended
    asynchronous generator keeps it; or, where this object is dropped first, by that generator's finalizer.
    """

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    async def get(self) -> aiohttp.ClientSession:
        """The session of the running loop."""
        loop = asyncio.get_running_loop()
        entry = self._entries.get(id(loop))
        # A loop that ended may have left its address to another one.
        if entry is not None and entry.loop is loop and not entry.session.closed:
            return entry.session
        return await self._open(loop)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> aiohttp.ClientSession:
        session = _new_session(self._config)
        keeper = _kept(session)
        # Runs to its first `yield` without giving way, so no second task can open another session meanwhile.
        await anext(keeper)
        with self._lock:
            ended = [key for key, entry in self._entries.items() if entry.loop.is_closed()]
            dropped = [self._entries.pop(key) for key in ended]
            self._entries[id(loop)] = _Entry(loop, session, keeper)
        for entry in dropped:
            _abandon(entry)
        return session

    async def aclose(self) -> None:
        """Close the session of the running loop; a later `get` opens another."""
        with self._lock:
            entry = self._entries.pop(id(asyncio.get_running_loop()), None)
        if entry is not None:
            await entry.keeper.aclose()


def _new_session(config: TransportConfig) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=config.max_connections, limit_per_host=0, keepalive_timeout=config.keepalive
        ),
        # The whole call has its own deadline, which covers encoding, waiting for a connection and retries.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
        headers={"Accept": "application/json", "Accept-Encoding": "identity", **config.all_headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=_READ_BUFFER,
        auto_decompress=True,
    )


async def _kept(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await session.close()


def _abandon(entry: _Entry) -> None:
    """Close the session of a loop that ended without ending its generators; there is nothing to wait for."""
    with contextlib.suppress(StopIteration):
        entry.session.close().send(None)
