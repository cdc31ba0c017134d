"""`Gateway`: sessions over inference servers, and the server that agents call."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mmrender.caching import cached_property
from mmrender.gateway.app import App, build
from mmrender.gateway.server import Server
from mmrender.gateway.sessions import Sessions

Result = TypeVar("Result")


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

    @cached_property
    def app(self) -> App:
        """The ASGI application."""
        return build(self)

    @cached_property
    def _server(self) -> Server:
        return Server(self.app, self.settings)

    @property
    def url(self) -> str:
        """Root of the running server.

        Raises:
            EngineStateError: It does not run.
        """
        return self._server.url

    async def serve(self, *, started: Callable[[str], None] | None = None) -> None:
        """Serve on this event loop until cancelled, or until a signal ends the process's main thread.

        Args:
            started: Called with the URL once it listens.

        Raises:
            EngineStateError: It cannot listen.
        """
        await self._server.serve(started=started)

    def start(self) -> str:
        """Serve on a thread of its own, and return the URL. Its event loop uses the gateway then; see `run`.

        Raises:
            EngineStateError: It runs already, or cannot listen.
        """
        return self._server.start()

    def stop(self) -> None:
        """Stop a server that `start` began, and close the gateway. Idempotent."""
        self._server.stop()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Run a call, such as `gateway.open_session()`, on the server's event loop from another thread.

        Raises:
            EngineStateError: The server does not run, or stops before the call ends.
        """
        return self._server.run(call)
