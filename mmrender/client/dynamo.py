"""`DynamoBackend`: token ids to a Dynamo frontend, by its chat route and, for images, by vLLM's.

The chat route takes a prompt of tokens in the extension `nvext`, with a placeholder message. It refuses
tensors, so a prompt with images goes by `/inference/v1/generate`, which a frontend passes on to vLLM workers
unchanged. Verified with Dynamo 1.6.1.

Tokens and logprobs of a chat reply come by several channels, some of which a worker or a frontend may omit:

1. `nvext.engine_data`: gathered by the worker. It comes with the worker's last chunk, and so not at all
   if the frontend itself ended the completion, at a stop string.
2. `nvext.completion_token_ids`: passed through the frontend.
3. `choices[0].logprobs.content`: a logprob for each token, and since 1.6 the token's id.

Tokens are taken from the first that has them, logprobs from `engine_data` if the tokens are, and otherwise
from `content`, where each must name the token that it belongs to. Present but empty is an answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import msgspec

from mmrender.client.exchange import HTTPBackend, Ids, check_request, check_size, post
from mmrender.client.reply import (
    LogprobEntry,
    ReportedExperts,
    ReportedLogprobs,
    ReportedUsage,
    add_alternatives,
    decode_as,
    only,
    response_of,
)
from mmrender.client.sampling import spell
from mmrender.client.server_facts import Process
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.client.vllm import sample_tokens
from mmrender.client.vllm_fields import PixelDtype
from mmrender.client.vllm_images import GENERATE_PATH, data_in, dense_spans, features_of, wire_forms
from mmrender.errors import EngineReplyError, EngineStatusError, EngineUnsupportedError, InputError
from mmrender.sidecar import MediaSpan

CHAT_PATH: Final = "/v1/chat/completions"
EXTRA_FIELDS: Final = ("completion_token_ids", "prompt_token_ids", "engine_data")


@dataclass(frozen=True, slots=True)
class DynamoBackend(HTTPBackend):
    """A Dynamo frontend.

    It drops the text of a worker's error, so an overflow is recognised only before sending. A call that is
    cancelled closes its connection, which stops the worker. It reports `stop` also for an aborted completion.
    The last token distinguishes an end from an abort.

    Attributes:
        nvext: Members of the request's `nvext`, such as `{"annotations": ["llm_metrics"]}`. `extra_fields`
            are merged with those that are needed, `agent_hints` with the priority.
        pixels: Pixels that the vLLM workers take: `"uint8"` if they normalise, as vLLM does by default since
            0.28 or 0.32, `"float32"` if they run with `--no-mm-device-do-normalize`. A frontend
            renders nothing, so this cannot be asked for.
        eos_token_ids: Tokens on which the model ends a completion, for requests that do not name them.
        max_body_bytes: The largest body. The frontend's `DYN_HTTP_BODY_LIMIT_MB`.
        max_image_bytes: The largest body with images, which the frontend passes on in one message.
    """

    name: ClassVar[str] = "dynamo"
    nvext: Mapping[str, Any] = field(default_factory=dict)
    pixels: PixelDtype | None = None
    eos_token_ids: tuple[int, ...] | None = None
    max_body_bytes: int = 45 << 20
    max_image_bytes: int = 32 << 20

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion. `on_tokens` is called once, at the end.

        Raises:
            EngineUnsupportedError: The request is too large, the frontend cannot take images, or it is not
                known on which tokens a completion ends.
            EngineMismatchError: The worker had another prompt than the renderer's.
            MMRenderError: As for `RendererBackend.generate`.
        """
        ids, spans = check_request(request)
        spans = dense_spans(spans)
        try:
            if spans:
                response = await self._with_images(request, transport, ids, spans)
                if on_tokens is not None:
                    on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
                return response
            read = partial(read_reply, request, self._ends(request))
            body = chat_body(request, self.nvext)
            setting = "DynamoBackend(max_body_bytes=...)"
            check_size(len(ids), (), self.max_body_bytes, where=CHAT_PATH, setting=setting)
            return await post(request, transport, CHAT_PATH, body, read, on_tokens=on_tokens)
        except EngineStatusError as error:
            if error.status == 400 and error.remedy is None:
                error.remedy = "A frontend withholds the worker's message. The worker's log has it"
            raise

    def _ends(self, request: EngineRequest) -> frozenset[int]:
        """Return the tokens that can end a completion."""
        named = request.sampling_params.get("stop_token_ids") or ()
        if request.sampling_params.get("ignore_eos"):
            return frozenset(named)
        eos_ids = self.eos_token_ids if request.eos_token_ids is None else request.eos_token_ids
        if eos_ids is None:
            raise EngineUnsupportedError(
                "a Dynamo frontend calls an abort `stop` too, so the ends of a completion must be known",
                where="eos_token_ids",
                remedy="Pass a renderer, or DynamoBackend(eos_token_ids=...)",
            )
        return frozenset((*eos_ids, *named))

    async def _with_images(
        self, request: EngineRequest, transport: Transport, ids: Ids, spans: Sequence[MediaSpan]
    ) -> EngineResponse:
        """Send tensors by vLLM's generate route, which the frontend passes on to its vLLM workers."""
        if self.pixels is None:
            raise EngineUnsupportedError(
                "a Dynamo frontend renders nothing, so it is not known which pixels its workers take",
                where="images",
                remedy="Say it with DynamoBackend(pixels='uint8'), or 'float32' for vLLM workers "
                "with --no-mm-device-do-normalize",
            )
        forms = await wire_forms(spans, ids, request.model, self.pixels, Process.unknown(transport))
        prompt = await asyncio.to_thread(features_of, spans, forms)
        texts = data_in(prompt)
        setting = "DynamoBackend(max_image_bytes=...)"
        check_size(len(ids), texts, self.max_image_bytes, where=GENERATE_PATH, setting=setting)
        prompt["token_ids"] = ids.tolist()
        try:
            # A frontend aborts when the connection is closed.
            return await sample_tokens(request, transport, prompt, aborts=False)
        except EngineUnsupportedError as error:
            if not isinstance(error.__cause__, EngineStatusError):
                raise
            raise EngineUnsupportedError(
                "the Dynamo frontend does not take images for this model",
                where=error.where,
                got=str(error.__cause__),
                remedy="Start the frontend with DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1, and vLLM workers, "
                "which advertise the route. GET /v1/models lists the models that are served at all",
            ) from error


def chat_body(request: EngineRequest, nvext: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a chat request whose prompt, without images, is `nvext.token_data`."""
    spelled, _ = spell(request.sampling_params, "dynamo")
    if "token_data" in nvext:
        raise InputError(
            "the prompt is the request's own",
            where="nvext.token_data",
            expected="nothing",
            remedy="Pass it to generate as prompt_ids",
        )
    wanted = [*EXTRA_FIELDS, *(["routed_experts"] if request.routed_experts else [])]
    merged: dict[str, Any] = {
        **nvext,
        "token_data": list(request.prompt_ids),
        "extra_fields": list(dict.fromkeys([*nvext.get("extra_fields", ()), *wanted])),
    }
    if request.cache_salt is not None:
        merged["cache_salt"] = request.cache_salt
    if request.priority is not None:
        # Dynamo serves high values first, and turns the sign for engines that do not.
        merged["agent_hints"] = {**nvext.get("agent_hints", {}), "priority": -request.priority}
    return {
        "model": request.model,
        # Ignored if there is `token_data`, but a request without messages is refused.
        "messages": [{"role": "user", "content": ""}],
        "stream": False,
        "logprobs": True,
        **spelled,
        "nvext": merged,
    }


# --- replies ---


class _EngineData(msgspec.Struct):
    completion_token_ids: list[int] | None = None
    completion_logprobs: list[float | None] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: ReportedExperts | None = None
    finished: bool | None = None


class _Nvext(msgspec.Struct):
    engine_data: _EngineData | None = None
    completion_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: ReportedExperts | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    logprobs: ReportedLogprobs | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    id: str | None = None
    nvext: _Nvext | None = None
    usage: ReportedUsage | None = None


def read_reply(request: EngineRequest, ends: frozenset[int], body: bytes, where: str) -> EngineResponse:
    """Read a chat reply of status 200. `ends` are the tokens that can end a completion."""
    reply = decode_as(body, _Reply, where=where)
    choice, nvext = only(reply.choices, where=where), reply.nvext or _Nvext()
    data = nvext.engine_data or _EngineData()
    if data.finished is False:
        raise EngineReplyError(
            "the worker failed during the request",
            where=f"{where} nvext.engine_data.finished",
            got="false",
        )
    content = (choice.logprobs and choice.logprobs.content) or []
    ids = _completion_ids(data, nvext, choice, where)
    entries, named = content, any(entry.id is not None for entry in content)
    if data.completion_token_ids is not None and data.completion_logprobs is not None:
        entries, named = [LogprobEntry(logprob) for logprob in data.completion_logprobs], False
        if request.sampling_params.get("logprobs"):
            add_alternatives(entries, [entry.top_logprobs for entry in content], where=where)
    reason = choice.finish_reason
    ended = bool(ids) and ids[-1] in ends
    # A frontend says `stop` also of a completion that was aborted. A stop string may end it at any token.
    if reason in ("stop", "tool_calls") and not ended and not request.sampling_params.get("stop"):
        reason = "abort"
    return response_of(
        request,
        where=where,
        ids=ids,
        entries=entries,
        named=named,
        reason=reason,
        seen=nvext.prompt_token_ids if data.prompt_token_ids is None else data.prompt_token_ids,
        usage=reply.usage,
        experts=nvext.routed_experts or data.routed_experts,
        request_id=reply.id,
    )


def _completion_ids(data: _EngineData, nvext: _Nvext, choice: _Choice, where: str) -> list[int]:
    """Return the tokens from the first channel that has them."""
    for ids in (data.completion_token_ids, nvext.completion_token_ids):
        if ids is not None:
            return ids
    if choice.logprobs is not None and choice.logprobs.content is not None:
        named = [entry.token_id for entry in choice.logprobs.content if entry.token_id is not None]
        # Frontends before 1.6 send the text of each token only.
        if len(named) == len(choice.logprobs.content):
            return named
    raise EngineReplyError(
        "the reply lacks token ids",
        where=f"{where} nvext",
        expected="engine_data or completion_token_ids",
        remedy="Retokenizing its text would train on other tokens. Use a frontend that sends them",
    )
