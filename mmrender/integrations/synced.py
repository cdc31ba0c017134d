"""`SyncedBackend`: names the weights of an engine that a trainer keeps in sync."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.trajectory.engine_data import WeightVersionSpan


@dataclass(frozen=True)
class SyncedBackend:
    """A backend whose responses carry the trainer's name of the weights that sampled them.

    Attributes:
        backend: The engine's backend.
        version: Returns the name of the engine's present weights. If it changes during a request, the
            response names no weights of its own.
    """

    backend: RendererBackend
    version: Callable[[], str]

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.backend.name

    @property
    def transport(self) -> Any:
        """The backend's own transport, or None."""
        return getattr(self.backend, "transport", None)

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion. Errors are the backend's."""
        before = self.version()
        response = await self.backend.generate(request, transport, on_tokens=on_tokens)
        if self.version() != before:
            return response
        span = WeightVersionSpan(before, 0, len(response.completion_ids))
        return replace(response, weight_versions=(span,))

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Return the engine's maximum length of a prompt."""
        return await self.backend.resolve_max_prompt_len(model, transport)

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether `exc` says that the prompt is too long."""
        return self.backend.is_overflow_error(exc)
