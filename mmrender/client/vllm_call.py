"""One call of vLLM's generate route: what is sent, what a refusal means, and how it is stopped."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrender.client.backend import EngineRequest, EngineResponse
from mmrender.client.checks import Ids, Placed
from mmrender.client.large_text import decode_reply
from mmrender.client.spelling import translate
from mmrender.client.transport import Transport
from mmrender.client.vllm_errors import meaning_of
from mmrender.client.vllm_reply import read_reply
from mmrender.errors import EngineError, EngineStatusError, EngineTimeoutError, SamplingParameterError

GENERATE_PATH: Final = "/inference/v1/generate"
ABORT_PATH: Final = "/inference/v1/abort_requests"
_ID_PREFIX: Final = "generate-tokens-"
_ABORT_SECONDS: Final = 5.0
_INLINE_BYTES: Final = 256 << 10
"""A longer answer is decoded on a thread; parsing it takes milliseconds."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked request on its way to one server.

    Attributes:
        request: What the caller asked.
        transport: The way to the server.
        ids: The prompt, placeholders widened; of shape `(n,)`.
        placed: Its images, in prompt order.
        aborts: Whether the server is told where the call is cancelled or times out.
    """

    request: EngineRequest
    transport: Transport
    ids: Ids
    placed: Sequence[Placed]
    aborts: bool

    @property
    def where(self) -> str:
        """The route in errors."""
        return f"{self.transport.base_url}{GENERATE_PATH}"

    async def post(self, images: Mapping[str, Any]) -> Any:
        """Send the request with `images` among its members, and return the decoded answer.

        Raises:
            SamplingParameterError: vLLM has no such parameter, or not of that value.
            PromptTooLongError: The server says so.
            EngineUnsupportedError: The route is closed or missing.
            EngineReplyError: The answer is not JSON.
            EngineError: The server could not be reached, or refused.
        """
        body = {**_members(self.request), "token_ids": self.ids.tolist(), **images}
        headers = dict(self.request.extra_headers)
        try:
            reply = await self.transport.request("POST", GENERATE_PATH, json=body, headers=headers)
        except EngineStatusError as error:
            meaning = meaning_of(error, where=self.where)
            if meaning is error:
                raise
            raise meaning from error
        except (asyncio.CancelledError, EngineTimeoutError):
            if self.aborts:
                await self._abort()
            raise
        if len(reply.body) < _INLINE_BYTES:
            return decode_reply(reply.body, where=self.where)
        return await asyncio.to_thread(decode_reply, reply.body, where=self.where)

    def read(self, reply: Any) -> EngineResponse:
        """Read the decoded answer; see `read_reply`."""
        return read_reply(reply, self.request, len(self.ids), where=self.where)

    @property
    def engine_id(self) -> str:
        """The engine's own name of the request; a header of that name comes before the body's."""
        given = {name.lower(): value for name, value in self.request.extra_headers.items()}
        return _ID_PREFIX + given.get("x-request-id", self.request.request_id)

    async def _abort(self) -> None:
        """Stop the request on the server. What fails here must not hide why it was stopped."""
        call = self.transport.request(
            "POST",
            ABORT_PATH,
            json={"request_ids": [self.engine_id]},
            timeout=_ABORT_SECONDS,
            idempotent=True,
        )
        sending = asyncio.ensure_future(call)
        # Whoever cancels once more waits for it no longer; its failure is then nobody's.
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(EngineError):
            await asyncio.shield(sending)


def _members(request: EngineRequest) -> dict[str, Any]:
    """The request without prompt and images. What is not asked for is left out."""
    params = translate(request.sampling_params, "vllm").sampling
    if "max_tokens" not in params:
        raise SamplingParameterError(
            "is missing, and vLLM would fill the context",
            where="sampling_params['max_tokens']",
            expected="an integer of 1 or more",
        )
    params.setdefault("logprobs", 0)  # of the sampled token alone
    if request.routed_experts_prompt_start is not None:
        params["routed_experts_prompt_start"] = request.routed_experts_prompt_start
    members: dict[str, Any] = {
        "model": request.model,
        "request_id": request.request_id,
        "sampling_params": params,
    }
    if request.cache_salt is not None:
        members["cache_salt"] = request.cache_salt
    if request.priority is not None:
        members["priority"] = request.priority
    return members
