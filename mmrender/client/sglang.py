"""`SGLangBackend`: tokens and images to an SGLang server, by its `POST /generate`.

Over HTTP SGLang takes images only encoded, and widens placeholders itself. So the prompt is sent with one
placeholder for each image, and the prompt that comes back must be ours, token for token. Facts were read from
SGLang 0.5.23's sources and seen on a running server.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec

from mmrender.client.exchange import HTTPBackend, check_request, data_url, post
from mmrender.client.reply import (
    LogprobEntry,
    PromptDetails,
    ReportedUsage,
    ReportedVersion,
    add_alternatives,
    decode_as,
    only,
    response_of,
)
from mmrender.client.sampling import spell, truncates
from mmrender.client.sampling import where as parameter
from mmrender.client.server_facts import facts_of
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.errors import (
    EngineStatusError,
    EngineUnsupportedError,
    PlaceholderError,
    SamplingParameterError,
)
from mmrender.sidecar import collapse

_log = logging.getLogger("mmrender.client")


@dataclass(frozen=True, slots=True)
class SGLangBackend(HTTPBackend):
    """SGLang over HTTP.

    SGLang reports the logprobs of the distribution that it sampled from: unlike vLLM's they are taken after
    the division by `temperature` (and before `top_p`, `top_k` and `min_p`), unless the server runs with
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.

    Attributes:
        routed_experts_shape: `(layers, experts of a token)` of the model, which SGLang does not say. Needed
            if router choices are asked for.
        deterministic: The server runs with `--enable-deterministic-inference`. Others ignore seeds, so a seed
            is then refused.
        sampling_masks: Ask for the tokens that `top_p`, `top_k`, `min_p` and a grammar kept. Logprobs are
            then of these. Each request that limits its tokens needs a `top_k`, below the server's
            `--sampling-mask-max-tokens` (4,096), beyond which it aborts. Takes SGLang 0.5.23.
        low_priority_values_first: The server runs with `--schedule-low-priority-values-first`. By default
            SGLang serves high values first, so the priority is negated.
    """

    name: ClassVar[str] = "sglang"
    routed_experts_shape: tuple[int, int] | None = None
    deterministic: bool = False
    low_priority_values_first: bool = False
    sampling_masks: bool = False

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion. `on_tokens` is called once, at the end.

        A call that is cancelled or times out is aborted on the server, by its `request_id`.

        Raises:
            EngineMismatchError: The server's prompt differs from the renderer's.
            EngineUnsupportedError: A video, or router choices that the server does not send.
            MMRenderError: As for `RendererBackend.generate`.
        """
        return await post(
            request,
            transport,
            "/generate",
            await self._body(request),
            partial(read_reply, request, self.routed_experts_shape, masked=self.sampling_masks),
            abort=("/abort_request", {"rid": request.request_id}),
            on_tokens=on_tokens,
        )

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Return the longest prompt: one token less than `max_req_input_len`, which already is too long.

        It lies some tokens below the model's context length, which `/v1/models` has.
        """
        reply = await transport.request("GET", "/server_info")
        info = decode_as(reply.body, _ServerInfo, where="GET /server_info")
        facts_of(transport).note_sampler("sglang", info)
        return info.max_req_input_len and info.max_req_input_len - 1

    async def _body(self, request: EngineRequest) -> dict[str, Any]:
        ids, spans = check_request(request)
        params = request.sampling_params
        sampling, top_level = spell(params, "sglang")
        if params.get("seed") is not None and not self.deterministic:
            raise SamplingParameterError(
                "SGLang ignores seeds unless it runs with --enable-deterministic-inference",
                where=parameter("seed"),
                remedy="Start it with that flag, and set SGLangBackend(deterministic=True)",
            )
        if (params.get("logprobs") or 0) < 0:
            raise SamplingParameterError(
                "SGLang does not report the whole vocabulary",
                where=parameter("logprobs"),
                expected="0 or more",
                got=str(params["logprobs"]),
            )
        body: dict[str, Any] = {
            "input_ids": ids.tolist(),
            "rid": request.request_id,
            "stream": False,
            "sampling_params": {"skip_special_tokens": False, "no_stop_trim": True, **sampling},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": True,
            **top_level,
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.priority is not None:
            body["priority"] = request.priority if self.low_priority_values_first else -request.priority
        if request.routed_experts:
            if self.routed_experts_shape is None:
                raise EngineUnsupportedError(
                    "SGLang sends router choices without their shape",
                    where="routed_experts",
                    remedy="Name it with SGLangBackend(routed_experts_shape=(layers, experts of a token))",
                )
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.routed_experts_prompt_start or 0
        if self.sampling_masks and truncates(params):
            if (params.get("top_k") or 0) <= 0:
                raise SamplingParameterError(
                    "sampling masks need a bound", where=parameter("top_k"), expected="1 or more"
                )
            body["return_sampling_mask"] = True
        if spans:
            collapsed = collapse(body["input_ids"], request.multi_modal_data, request.placeholder_ids)
            placeholder = collapsed[spans[0].start]
            if (count := collapsed.count(placeholder)) != len(spans):
                raise PlaceholderError(
                    "SGLang takes every placeholder token for an image",
                    where="prompt_ids",
                    expected=f"{len(spans)} of the token {placeholder}, one for each image",
                    got=str(count),
                    remedy="A placeholder that the model itself sampled cannot be sent along with images",
                )
            body["input_ids"] = collapsed
            body["image_data"] = await asyncio.to_thread(lambda: [data_url(span.item) for span in spans])
        return body


# --- replies ---


class _ServerInfo(msgspec.Struct):
    max_req_input_len: int | None = None
    dtype: Any = None
    attention_backend: Any = None
    kv_cache_dtype: Any = None
    quantization: Any = None


class _Logprob(msgspec.Struct, array_like=True):
    logprob: float | None
    token_id: int


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int | str] | None = None
    status_code: int | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    id: str | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None
    routed_experts: str | None = None
    weight_version: str | int | None = None
    weight_versions: list[ReportedVersion] | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int]
    prompt_token_ids: list[int]
    meta_info: _Meta


def read_reply(
    request: EngineRequest,
    experts_shape: tuple[int, int] | None,
    body: bytes,
    where: str,
    *,
    masked: bool = False,
) -> EngineResponse:
    """Read a reply of status 200. `masked` says that sampling masks were asked for."""
    found: _Reply | list[_Reply] = decode_as(body, _Reply | list[_Reply], where=where)  # type: ignore[arg-type]
    reply = only(found, where=where) if isinstance(found, list) else found
    ids, meta = reply.output_ids, reply.meta_info
    finish = meta.finish_reason
    if finish.type == "abort" and finish.status_code is not None:
        raise EngineStatusError(
            f"the server gave up: {finish.message}",
            status=finish.status_code,
            body=msgspec.json.encode(finish).decode(),
            where=f"{where} finish_reason",
        )
    entries = [LogprobEntry(pair.logprob, pair.token_id) for pair in meta.output_token_logprobs or ()]
    masks = None
    if masked and ids and truncates(request.sampling_params):
        masks, kept = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
        if masks is None or kept is None:
            raise EngineUnsupportedError(
                "sampling masks were asked for, and the server sends none",
                where=f"{where} meta_info.output_token_sampling_mask",
                remedy="Use SGLang 0.5.23 or later, or leave out SGLangBackend(sampling_masks=True)",
            )
        # Renormalised over the kept tokens.
        entries = [LogprobEntry(value, token) for value, token in zip(kept, ids, strict=False)]
    if request.sampling_params.get("logprobs"):
        rows = [
            [LogprobEntry(other.logprob, other.token_id) for other in row or () if other.logprob is not None]
            for row in meta.output_top_logprobs or ()
        ]
        add_alternatives(entries, rows, where=where)
    versions = meta.weight_versions
    if versions is None and meta.weight_version is not None:  # servers before 0.5.23 name the last one only
        versions = [ReportedVersion(meta.weight_version, 0, len(ids))]
    most = request.sampling_params["max_tokens"]
    if finish.type == "length" and len(ids) < most:
        _log.warning(
            "SGLang cut max_tokens from %d to %d, since the prompt has %d tokens",
            most,
            len(ids),
            len(request.prompt_ids),
        )
    return response_of(
        request,
        where=where,
        ids=ids,
        entries=entries,
        reason=finish.type,
        stop_reason=finish.matched if isinstance(finish.matched, int | str) else None,
        seen=reply.prompt_token_ids,
        usage=ReportedUsage(prompt_tokens_details=PromptDetails(meta.cached_tokens)),
        experts=meta.routed_experts,
        experts_shape=experts_shape,
        versions=versions,
        masks=masks,
        request_id=meta.id,
    )
