"""`EngineServer`: the HTTP endpoint as a server that starts and stops."""

import asyncio
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.endpoint.settings import ServerSettings
from mmrender.errors import EngineStateError, MissingDependencyError

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

__all__ = ["EngineServer", "ServerSettings"]


class EngineServer:
    """Serves OpenAI's routes over a client. Several may run in one process; nothing is shared between them.

    Args:
        client: Samples; it is not torn down with the server.
        settings: What is served, where, and to whom.
        renderer: With it, chat is rendered here and sampled in tokens; the client's by default. Without one,
            chat goes to the engines' own routes.

    Raises:
        MissingDependencyError: The `serve` extra is not installed.
    """

    def __init__(
        self, client: InferenceEngineClient, settings: ServerSettings, *, renderer: Any = None
    ) -> None:
        # Imported here: sampling needs no web framework.
        from mmrender.engines.endpoint.app import Endpoint

        self.client = client
        self.settings = settings
        self.endpoint = Endpoint(client, settings, renderer if renderer is not None else client.renderer)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._url: str | None = None

    @property
    def app(self) -> "Starlette":
        """The ASGI application, for a server of your own."""
        return self.endpoint.app()

    @property
    def url(self) -> str:
        """Root of the running server.

        Raises:
            EngineStateError: It does not run.
        """
        if self._url is None:
            raise EngineStateError("the server is not running")
        return self._url

    async def serve(self, *, started: Callable[[str], None] | None = None) -> None:
        """Serve on this event loop until cancelled, or until a signal ends the process's main thread.

        Args:
            started: Told the URL once it listens.

        Raises:
            EngineStateError: It cannot listen.
        """
        # Bound here: the web server would end the process where the port is taken.
        with self._bound() as listener:
            server = self._server = self._made()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started and not serving.done():
                    await asyncio.sleep(0.005)
                self._url = _url_of(listener)
                if started is not None:
                    started(self._url)
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                server.should_exit = True
                await serving
                raise
            finally:
                self._url = None

    def _bound(self) -> socket.socket:
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            raise EngineStateError(
                "the server cannot listen", where=f"{host}:{port}", got=str(error)
            ) from error

    def start(self, *, seconds: float = 30.0) -> str:
        """Serve on a thread of its own, and return the URL once it listens.

        Raises:
            EngineStateError: It runs already, or cannot listen.
        """
        if self._thread is not None:
            raise EngineStateError("the server is running already")
        listening = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self.serve(started=lambda _: listening.set()))
            except BaseException as error:  # noqa: BLE001 - raised for whoever started it
                failures.append(error)
            finally:
                listening.set()

        self._thread = threading.Thread(target=run, name="mmrender-engines-server", daemon=True)
        self._thread.start()
        if listening.wait(seconds) and not failures and self._url is not None:
            return self._url
        self.stop()
        raise failures[0] if failures else EngineStateError(f"the server did not start within {seconds:g} s")

    def stop(self) -> None:
        """Stop a server that `start` began, and wait for its thread. Calling it again does nothing."""
        if self._server is not None:
            self._server.should_exit = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._server = None

    def _made(self) -> "uvicorn.Server":
        try:
            import uvicorn
        except ImportError as error:
            raise MissingDependencyError.of_extra("uvicorn", "serve", "the HTTP endpoint") from error
        return uvicorn.Server(
            uvicorn.Config(
                self.app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=max(1, round(self.settings.stop_seconds)),
            )
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
