"""`DynamoBackend`: token ids to a Dynamo frontend, by its chat route and, for images, by vLLM's.

The chat route takes a prompt of tokens beside a placeholder message, in the extension `nvext`. It takes no
tensors, so a prompt with images goes by `/inference/v1/generate`, which a frontend passes on to vLLM workers
as it is. Verified with Dynamo 1.6.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mmrender.client.backend import EngineRequest, EngineResponse
from mmrender.client.checks import check_prompt, check_sidecar
from mmrender.client.dynamo_images import generate_with_images
from mmrender.client.dynamo_reply import read_reply
from mmrender.client.dynamo_request import chat_body, check_size
from mmrender.client.large_text import decode_reply
from mmrender.client.off_loop import read_off_loop
from mmrender.client.transport import Transport
from mmrender.client.vllm_features import PixelDtype
from mmrender.errors import EngineReplyError, EngineStatusError, PromptTooLongError

CHAT_PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class DynamoBackend:
    """A Dynamo frontend.

    It erases what a worker says of an error, so an overflow is recognised only before sending. A call that is
    cancelled closes its connection, which stops the worker.

    Attributes:
        nvext: Members of the request's `nvext`, such as `{"annotations": ["llm_metrics"]}`. `extra_fields`
            are joined with those that are needed, `agent_hints` with the priority.
        pixels: Which pixels the vLLM workers take: `"uint8"` where they normalise, as vLLM does by default
            since 0.28 or 0.32, `"float32"` where they run with `--no-mm-device-do-normalize`. A frontend
            renders nothing, so this cannot be asked for.
        max_body_bytes: The largest body; the frontend's `DYN_HTTP_BODY_LIMIT_MB`.
        max_image_bytes: The largest body with images, which the frontend passes on in one message.
    """

    nvext: Mapping[str, Any] = field(default_factory=dict)
    pixels: PixelDtype | None = None
    max_body_bytes: int = 45 << 20
    max_image_bytes: int = 32 << 20

    @property
    def name(self) -> str:
        """`dynamo`."""
        return "dynamo"

    async def generate(self, request: EngineRequest, transport: Transport) -> EngineResponse:
        """Sample one completion.

        Raises:
            InputError: The prompt or the backend's own `nvext` cannot be used.
            SamplingParameterError: Dynamo does not know a parameter.
            PlaceholderError: Tokens, ranges and items do not fit together.
            EngineUnsupportedError: The request is too large, or the frontend cannot take images.
            EngineMismatchError: The worker had another prompt than the renderer's.
            EngineError: The server could not be reached, refused, or gave an answer that cannot be used.
        """
        ids = check_prompt(request.prompt_ids, request.vocab_size)
        placed = check_sidecar(
            ids, request.multi_modal_data, token_ids=request.media_token_ids, takes_sparse=False
        )
        try:
            if placed:
                return await generate_with_images(
                    request, transport, ids, placed, pixels=self.pixels, max_bytes=self.max_image_bytes
                )
            body = chat_body(request, self.nvext)
            check_size(body, self.max_body_bytes, where=CHAT_PATH)
            reply = await transport.request("POST", CHAT_PATH, json=body, headers=request.extra_headers)
        except EngineStatusError as error:
            if error.status == 400 and error.remedy is None:
                error.remedy = "A frontend keeps back what the worker said; the worker's log has it"
            raise
        return await read_off_loop(reply.body, lambda: read_reply(decode_reply(reply.body), request))

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Return one token less than the model's `context_window`.

        Raises:
            EngineError: The server could not be asked.
        """
        reply = await transport.request("GET", "/v1/models")
        try:
            models = msgspec.json.decode(reply.body)["data"]
            window = next((entry.get("context_window") for entry in models if entry["id"] == model), None)
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
            raise EngineReplyError(
                "the server's list of models is not to be understood", where="GET /v1/models", got=repr(error)
            ) from error
        return window - 1 if isinstance(window, int) else None

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether the prompt was found too long before it was sent; no reply says so."""
        return isinstance(exc, PromptTooLongError)
