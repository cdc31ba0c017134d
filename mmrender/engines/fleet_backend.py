"""`FleetBackend`: many engines as one backend of the client, so that rollouts sample through all of them."""

from dataclasses import dataclass, replace
from typing import Any, Final

from mmrender.client.local import NullTransport
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import PromptTooLongError

SESSION_HEADER: Final = "X-Session-ID"


@dataclass(frozen=True, slots=True)
class FleetBackend:
    """An `InferenceEngineClient` where `generate` and `RendererClient` take a backend; they need no server.

    ```python
    rollouts = RendererClient(renderer, model="my-model", backend=FleetBackend(engines))
    ```

    What the engine client does goes on underneath: routing, retries, pauses. A request's `X-Session-ID`
    header is its session and is not sent on.

    Attributes:
        engines: Whose engines sample.
    """

    engines: InferenceEngineClient

    @property
    def name(self) -> str:
        """`"fleet"`."""
        return "fleet"

    @property
    def transport(self) -> Transport:
        """One to nowhere: the engines have their own."""
        return NullTransport()

    async def generate(
        self,
        request: EngineRequest,
        transport: Transport | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> EngineResponse:
        """Sample one completion on one of the engines; errors as for `InferenceEngineClient.generate`."""
        del transport
        headers = dict(request.extra_headers)
        session = headers.pop(SESSION_HEADER, None)
        options: dict[str, Any] = {
            "multi_modal_data": request.multi_modal_data,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "extra_headers": headers,
            "routed_experts": request.routed_experts,
        }
        if session is not None:
            options["session_id"] = session
        response = await self.engines.complete(request.prompt_ids, request.sampling_params, **options)
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        start = request.routed_experts_prompt_start
        if start is None or response.routed_experts is None:
            return response
        return replace(response, routed_experts=response.routed_experts.from_position(start))

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int | None:
        """The most tokens that every engine takes; `model` is that of the engines."""
        del model, transport
        return await self.engines.max_prompt_len()

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether an engine said that the prompt is too long."""
        return isinstance(exc, PromptTooLongError)
