"""`LocalEngine`: a model in this process as one of a client's engines."""

from typing import Any, Final

from mmrender.client.local import LocalBackend
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.routes import RouteTable
from mmrender.errors import EngineUnsupportedError

_NO_ROUTES: Final = RouteTable("local", {}, {}, {"sleep": frozenset(), "wake_up": frozenset()})


class LocalEngine(HTTPEngine):
    """A Transformers model in this process. It cannot be paused itself; a client holds its work back.

    Args:
        backend: The model; a directory's can be pickled.
        name: Names the engine.
        renderer: Renders conversations and decodes completions.
    """

    def __init__(self, backend: LocalBackend, *, name: str = "local", renderer: Any = None) -> None:
        super().__init__(
            backend, backend.transport, model="local", name=name, renderer=renderer, routes=_NO_ROUTES
        )
        self._local = backend

    async def abort_generation(self) -> None:
        """End every request before its next token."""
        self._local.abort_all()

    async def reset_prefix_cache(self) -> None:
        """Return: keys and values of a prompt go with its completion."""

    async def weight_version(self) -> str | None:
        """Name of the model's weights."""
        return self._local.weight_version

    async def set_weight_version(self, version: str) -> None:
        """Refuse: weights get their name with `LocalBackend.update_weights`.

        Raises:
            EngineUnsupportedError: Always.
        """
        raise EngineUnsupportedError(
            "weights of a model in this process are named as they are replaced",
            where=f"{self.name}.set_version",
            remedy="Use LocalBackend.update_weights(weights, version)",
        )

    async def check_health(self) -> None:
        """Return: it serves as long as this process does."""
