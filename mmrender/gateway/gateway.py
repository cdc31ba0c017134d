"""`Gateway`: sessions over inference servers, and the server that agents call."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final, TypeVar, cast

from mmrender.caching import cached_property
from mmrender.errors import EngineStateError, importing
from mmrender.gateway.app import App, build
from mmrender.gateway.limits import TimedProtocol
from mmrender.gateway.replies import StreamBrokenError
from mmrender.gateway.sessions import Sessions

with importing(None, "serve", "the gateway"):
    import uvicorn
    from uvicorn.server import HANDLED_SIGNALS

Result = TypeVar("Result")

_KEEP_ALIVE_SECONDS: Final = 75
"""Seconds that an idle connection is kept. Clients drop theirs first, httpx after 5 s and aiohttp after 15 s,
since a request that meets the end of its connection is lost."""
_LOOK_AGAIN: Final = 1.0
"""Seconds after which a call from another thread checks that the server still runs."""


def _log_in_one_line(record: logging.LogRecord) -> bool:
    """Log a stream that was broken on purpose without the traceback that uvicorn adds."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, StreamBrokenError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


class _Server(uvicorn.Server):
    """A server whose signals end all servers of its thread. The last one restores their handlers.

    Servers of uvicorn restore handlers when each ends, so servers that end in the order in which they began
    would leave the handler of a server that has ended, which ignores the signal.
    """

    _serving: ClassVar[list["_Server"]] = []
    _handlers: ClassVar[dict[int, Any]] = {}
    _caught: ClassVar[list[int]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals while the server runs, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._serving:
            self._caught.clear()
            self._handlers.update(
                {number: signal.signal(number, self._end_all) for number in HANDLED_SIGNALS}
            )
        self._serving.append(self)
        try:
            yield
        finally:
            self._serving.remove(self)
            if not self._serving:
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)
        if not self._serving:
            for number in reversed(self._caught):  # as uvicorn does
                signal.raise_signal(number)

    @classmethod
    def _end_all(cls, number: int, frame: Any) -> None:
        cls._caught.append(number)
        for server in cls._serving:
            server.handle_exit(number, frame)


class Gateway(Sessions):
    """Answers agents in tokens, and records a trajectory for each session.

    One event loop uses it. Use it as an async context manager, or call `aclose`.

    Args:
        engines: URLs of inference servers or one URL, an `InferenceEngineClient`, a backend with a transport
            of its own such as `LocalBackend`, or an `Engine`.
        renderer: Renders prompts and parses completions. A pool keeps the event loop free.
        model: Name of the model on the servers.
        out: File of finished trajectories. Open sessions are on disk in the folder of this name with `.open`
            appended, and a gateway that is started again goes on with them. None keeps open sessions in a
            temporary folder, and finished ones until `finished` yields them.
        sender: Ships finished trajectories to the trainer. A trajectory that is shipped when the process is
            killed may be shipped again, under the same id.
        settings: Address, keys and limits.
        backend: The servers' wire, if `engines` are URLs.
        aliases: Models of other servers, by name: URLs to which calls of these models go unrecorded.
        alias_keys: Keys for these servers, by the same names. They take the place of the caller's key.
        request_options: Options of each request to the engine, such as `routed_experts`.

    Raises:
        InputError: There is no engine.
        TrajectoryError: `out` is a file of another kind, or another gateway writes it.
        OSError: A file cannot be opened.
    """

    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    @cached_property
    def app(self) -> App:
        """The ASGI application."""
        return build(self)

    async def serve(self, *, started: Callable[[str], None] | None = None) -> None:
        """Serve on this event loop until cancelled, or until a signal ends the process's main thread.

        Args:
            started: Called with the URL once it listens.

        Raises:
            EngineStateError: It cannot listen.
        """
        await self._serve(*self._listen(), started)

    def start(self) -> str:
        """Serve on a thread of its own, and return the URL. Its event loop uses the gateway then; see `run`.

        Raises:
            EngineStateError: It runs already, or cannot listen.
        """
        if self._thread is not None:
            raise EngineStateError("the server is running already")
        serving, url = self._serve(*self._listen()), self.url
        loop = self._loop = asyncio.new_event_loop()  # at once, so that `run` finds it

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(serving)

        self._thread = threading.Thread(target=run, name="mmrender-gateway", daemon=True)
        self._thread.start()
        return url  # connections made before it accepts them wait in the socket's queue

    def stop(self) -> None:
        """Stop a server that `start` began, and close the gateway. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._server = None

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Run a call, such as `gateway.open_session()`, on the server's event loop from another thread.

        Raises:
            EngineStateError: The server does not run, or stops before the call ends.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            call.close()
            raise EngineStateError("the server is not running")
        future = asyncio.run_coroutine_threadsafe(call, loop)
        while True:
            try:
                return future.result(_LOOK_AGAIN)
            except CancelledError:
                break
            except TimeoutError:
                if future.done():
                    raise
                if loop.is_closed():
                    break
        raise EngineStateError("the server stopped before the call ended")

    def _listen(self) -> tuple[socket.socket, uvicorn.Server]:
        """Bind the address, since uvicorn would end the process if the port is taken."""
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise EngineStateError(
                "the server cannot listen", where=f"{host}:{port}", got=str(error)
            ) from error
        # Connections inherit it. asyncio sets it only for sockets that name TCP, and without it a reply in
        # parts waits 40 ms for the caller's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address, number = listener.getsockname()[:2]
        self._url = f"http://[{address}]:{number}" if ":" in address else f"http://{address}:{number}"
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            http=cast(Any, partial(TimedProtocol, head_seconds=self.settings.read_seconds)),
            timeout_graceful_shutdown=max(1, round(self.settings.stop_seconds)),
        )
        logging.getLogger("uvicorn.error").addFilter(_log_in_one_line)  # once, however often
        self._server = _Server(config)
        return listener, self._server

    async def _serve(
        self, listener: socket.socket, server: uvicorn.Server, started: Callable[[str], None] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        with listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                if started is not None:
                    started(self.url)
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                server.should_exit = True
                await serving
                raise
            finally:
                self._url = self._loop = None
