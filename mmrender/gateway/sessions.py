"""`Sessions`: sessions over inference servers, on disk while they are open, gone once they have left."""

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Self

import aiohttp
import msgspec

from mmcodecs.structs import ready
from mmrender.client.engine import Engine
from mmrender.client.resolve import BackendName
from mmrender.client.types import RendererBackend, RequestOptions
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.http_engine import HTTPEngine
from mmrender.errors import (
    EngineConnectionError,
    EngineStateError,
    InputError,
    SessionClosedError,
    SessionLimitError,
    SessionUnknownError,
)
from mmrender.gateway.call import Call
from mmrender.gateway.matching import Index
from mmrender.gateway.prompts import make_prompt
from mmrender.gateway.session import Session, SessionHost
from mmrender.gateway.settings import GatewaySettings
from mmrender.gateway.store import Closed, Opened, SessionStore
from mmrender.protocols import RendererProtocol
from mmrender.shipping.sender import Sender
from mmrender.trajectory.tree import Trajectory

_log = logging.getLogger("mmrender.gateway")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
_REST_SECONDS: Final = 2.0
"""Seconds without a call after which a session drops buffers that make the next call cheaper."""
_LOOK_SECONDS: Final = 1.0
"""Seconds between looks for sessions that may leave memory or have expired."""


class Sessions:
    """The sessions of a gateway, without its server. Arguments and errors are as for `Gateway`."""

    _url: str | None = None

    def __init__(
        self,
        engines: str | Sequence[str] | InferenceEngineClient | RendererBackend | Engine,
        renderer: RendererProtocol,
        *,
        model: str = "",
        out: str | os.PathLike[str] | None = None,
        sender: Sender | None = None,
        settings: GatewaySettings | None = None,
        backend: BackendName = "vllm",
        aliases: Mapping[str, str] | None = None,
        alias_keys: Mapping[str, str] | None = None,
        request_options: RequestOptions | None = None,
    ) -> None:
        self.settings = settings or GatewaySettings()
        self.renderer = renderer
        self.model = model
        self.aliases = dict(aliases or {})
        self.alias_keys = dict(alias_keys or {})
        self._client: InferenceEngineClient | None = None
        self._owns_client = isinstance(engines, str | Sequence)
        if isinstance(engines, str | Sequence):
            urls = [engines] if isinstance(engines, str) else engines
            engines = InferenceEngineClient(
                [HTTPEngine(backend, url, model=model) for url in urls], renderer=renderer
            )
        if isinstance(engines, InferenceEngineClient):
            self._client = engines
            engines = engines.as_backend()
        if not isinstance(engines, Engine):
            engines = Engine(engines, model=model, renderer=renderer)
        self.engine = engines
        self._forwarding: aiohttp.ClientSession | None = None
        self._sender = sender
        self._shipped: set[str] = set()
        self._store = SessionStore(out, sync=self.settings.sync)
        self._has_file = out is not None
        self._host = SessionHost(
            self.engine, self.settings, request_options or {}, self._leave, lambda: self.url
        )
        self._sessions: dict[str, Session] = {}
        self._names: dict[str, str] = {}  # by key, also of sessions that have left
        self._finished: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        self._is_read = False
        self._is_closed = False
        self._keeper: asyncio.Task[None] | None = None
        self._interrupted: list[tuple[Session, Closed]] = []
        for opened, closed in self._store.opened():
            session = self._add(opened)
            if closed is not None:
                self._interrupted.append((session, closed))

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def begin(self) -> None:
        """Begin to look after sessions on this event loop, and go on with ends that were interrupted.

        Each use of a session begins it, and so does serving. Idempotent.
        """
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
            for session, closed in self._interrupted:
                session.resume(closed)

    # --- sessions ---

    def sessions(self, owner: str | None = None) -> list[Session]:
        """Return the sessions that have not left, or an owner's."""
        return [each for each in self._sessions.values() if owner in (None, each.owner)]

    async def open_session(
        self,
        name: str | None = None,
        *,
        group: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        owner: str = "",
    ) -> Session:
        """Open a session. It is on disk when this returns.

        Args:
            name: Name in its URL, and the trajectory's id: up to 128 letters, digits and `._~-`. None makes a
                unique one. A name is used once.
            group: Group of rollouts, such as the prompt's name. In the trajectory's `extra`.
            metadata: Plain data for the trainer. In the trajectory's `extra`.
            sampling_params: In vLLM's names. They replace those that the agent asks for, except that the
                smaller `max_tokens` counts. Each call derives its own `seed` by the session's name.
            template_arguments: Template variables. They replace the agent's.
            max_turns: Number of answers after which calls are refused.
            max_tokens: Number of sampled tokens after which calls are refused. A running call ends as it
                would.
            owner: Digest of the key that opens it, to which `settings.max_sessions` applies.

        Raises:
            InputError: The name is malformed or taken, or an argument is not plain data.
            SessionClosedError: A session of this name has ended.
            SessionLimitError: The owner has too many open sessions.
            OSError: It could not be written.
        """
        self.begin()
        name = f"session-{secrets.token_hex(8)}" if name is None else name
        if not _NAME.fullmatch(name):
            expected = "up to 128 letters, digits and ._~-, beginning with a letter or digit"
            raise InputError(
                "a session's name is malformed", where="name", expected=expected, got=repr(name)[:80]
            )
        if name in self._sessions:
            raise InputError("a session has this name already", where="name", got=name)
        self._check_left(name)
        limit = self.settings.max_sessions
        if len(self.sessions(owner)) >= limit:
            raise SessionLimitError("too many sessions are open", expected=f"at most {limit} of one key")
        fields = {
            "name": name,
            "api_key": f"sk-session-{secrets.token_urlsafe(24)}",
            "created": time.time(),
            "group": group,
            "metadata": dict(metadata or {}),
            "sampling_params": dict(sampling_params or {}),
            "template_arguments": dict(template_arguments or {}),
            "max_turns": max_turns,
            "max_tokens": max_tokens,
            "owner": owner,
        }
        try:
            opened = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(fields)), ready(Opened))
        except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
            raise InputError("the settings of a session are not plain data", got=str(error)) from error
        session = self._add(opened)
        session.file.put(opened)
        try:
            await session.file.flush()
        except BaseException:
            self._sessions.pop(name, None)
            self._store.left.discard(name)
            self._names.pop(session.api_key, None)
            raise
        return session

    async def session(self, name: str, owner: str | None = None, *, open: bool = False) -> Session:
        """Return a session.

        Args:
            name: Its name.
            owner: Digest of the caller's key. Sessions of others are unknown to it. None for any session.
            open: Whether to open a session if the name is new.

        Raises:
            SessionUnknownError: The name is unknown.
            SessionClosedError: The session has ended.
            InputError: It is opened, and the name is malformed or another owner's.
            SessionLimitError: It is opened, and the owner has too many open sessions.
        """
        self.begin()
        session = self._sessions.get(name)
        if session is not None and owner in (None, session.owner):
            return session
        if open:
            return await self.open_session(name, owner=owner or "")
        if session is None:
            self._check_left(name)
        raise SessionUnknownError("the session is unknown", where="session", got=repr(name)[:80])

    def session_of_key(self, api_key: str) -> Session | None:
        """Return the session that a key opens, or None.

        Raises:
            SessionClosedError: The session has ended.
        """
        self.begin()
        name = self._names.get(api_key)
        if name is not None and name not in self._sessions:
            self._check_left(name)
        return None if name is None else self._sessions[name]

    async def finished(self) -> AsyncIterator[Trajectory]:
        """Yield the trajectories of finished sessions, each once, until the gateway is closed.

        Trajectories wait in memory from the first use on. Without a file and a sender they always wait.
        """
        self.begin()
        self._is_read = True
        while (trajectory := await self._finished.get()) is not None:
            yield trajectory
        self._finished.put_nowait(None)  # for other iterators

    async def aclose(self) -> None:
        """Abort running calls and close all files. Open sessions stay on disk if the gateway has a file.

        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*(session.stop() for session in self.sessions()))
        await asyncio.to_thread(self._store.close)
        self._finished.put_nowait(None)
        if self._client is not None and self._owns_client:
            await self._client.teardown()
        if self._forwarding is not None:
            await self._forwarding.close()

    @property
    def url(self) -> str:
        """Root of the running server.

        Raises:
            EngineStateError: It does not run.
        """
        if self._url is None:
            raise EngineStateError("the server is not running")
        return self._url

    # --- calls without a session ---

    async def count_tokens(self, call: Call) -> int:
        """Return the number of tokens of a call's prompt, rendered in full.

        Raises:
            MMRenderError: The conversation cannot be rendered.
        """
        if call.previous is not None:
            problem = "tokens are counted of whole conversations"
            raise InputError(problem, where="previous_response_id", remedy="Send all of it in input")
        arguments = call.template_arguments
        place = Index().place(call)
        made = await make_prompt(self.engine, self.renderer, (), place, call, arguments, {})
        return len(made.prompt.ids)

    async def check_health(self) -> None:
        """Return if an engine serves, and raise an `EngineError` if none does."""
        if self._client is not None:
            await self._client.check_health(every=False)

    async def forward(
        self, url: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], AsyncIterator[bytes]]:
        """Pass a request on to another server, unrecorded. Return status, headers and body.

        Raises:
            EngineConnectionError: The server was not reached.
        """
        if self._forwarding is None:
            self._forwarding = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            reply = await self._forwarding.post(url.rstrip("/") + path, data=body, headers=headers)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineConnectionError("the server of an alias was not reached", where=url) from error

        async def pieces() -> AsyncIterator[bytes]:
            async with reply:
                async for piece in reply.content.iter_any():
                    yield piece

        return reply.status, reply.headers, pieces()

    # --- parts ---

    def _add(self, opened: Opened) -> Session:
        session = Session(opened, self._store.file(opened.name), self._host)
        self._sessions[session.name] = session
        self._names[session.api_key] = session.name
        return session

    def _check_left(self, name: str) -> None:
        if name in self._store.left:
            raise SessionClosedError("the session has ended", where=name, remedy="Open another session")

    async def _leave(self, session: Session, trajectory: Trajectory | None) -> None:
        """Let the trajectory of an ended session leave. If it fails or the process ends, this is repeated."""
        if trajectory is not None and self._sender is not None and session.name not in self._shipped:
            await (await self._sender.send(trajectory))
            self._shipped.add(session.name)
        await self._store.leave(session.file, session.name, trajectory)
        self._sessions.pop(session.name, None)
        has_other_way = self._has_file or self._sender is not None
        if trajectory is not None and (self._is_read or not has_other_way):
            self._finished.put_nowait(trajectory)

    async def _keep(self) -> None:
        """Look after sessions: memory, expiry, and ends that failed."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except Exception:  # noqa: BLE001 - the next look tries again
                _log.exception("looking after sessions failed")

    async def _look(self) -> None:
        now, limits = time.monotonic(), self.settings
        idle = [each for each in self.sessions() if not each.is_busy]
        for session in self.sessions():
            if session.has_failed_to_end:
                session.resume()
        for session in idle:
            seconds = limits.expire_seconds
            if session.state == "open" and seconds is not None and now - session.used > seconds:
                session.resume(Closed("finished", f"no call came for {seconds:g} s"))
        loaded = sorted((each for each in idle if each.in_memory), key=lambda each: each.used)
        total = sum(session.nbytes for session in loaded)
        for session in loaded:
            if now - session.used > limits.idle_seconds or total > limits.memory_bytes:
                total -= session.nbytes
                await session.spill()
            elif now - session.used > _REST_SECONDS:
                session.rest()
