"""`SGLangBackend`: tokens and images to an SGLang server, by its `POST /generate`.

Over HTTP SGLang takes images only encoded, and widens placeholders itself. So the prompt is sent with one
placeholder for each image, and the prompt that comes back must be ours, token for token. Facts were read from
SGLang 0.5.23's sources and seen on a running server.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from mmrender.client.placeholders import check_placeholders, check_prompt, check_prompt_seen, collapse
from mmrender.client.reply import (
    LogprobEntry,
    ReportedVersion,
    check_completion,
    check_count,
    check_named,
    convert,
    decode_as,
    decode_json,
    experts_from_int32,
    finish_reason_in,
    read_reply,
    version_spans,
)
from mmrender.client.sampling import spell
from mmrender.client.sampling import where as parameter
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, TopLogprobs, Usage
from mmrender.client.vllm import data_urls, send_abort, with_extra_body
from mmrender.errors import (
    EngineStatusError,
    EngineTimeoutError,
    EngineUnsupportedError,
    PlaceholderError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.spans import MediaSpan
from mmrender.trajectory.engine_data import RoutedExperts

_log = logging.getLogger("mmrender.client")


@dataclass(frozen=True, slots=True)
class SGLangBackend:
    """SGLang over HTTP.

    SGLang reports the logprobs of the distribution that it sampled from: unlike vLLM's they are taken after
    the division by `temperature` (and before `top_p`, `top_k` and `min_p`), unless the server runs with
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.

    Attributes:
        routed_experts_shape: `(layers, experts of a token)` of the model, which SGLang does not say. Needed
            where router choices are asked for.
        deterministic: The server runs with `--enable-deterministic-inference`. Others ignore seeds, so a seed
            is then refused.
        low_priority_values_first: The server runs with `--schedule-low-priority-values-first`. By default
            SGLang serves high values first, and the sign of a priority is turned.
    """

    name: ClassVar[str] = "sglang"
    routed_experts_shape: tuple[int, int] | None = None
    deterministic: bool = False
    low_priority_values_first: bool = False

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion; `on_tokens` is called once, at the end.

        A call that is cancelled or times out is aborted on the server, by its `request_id`.

        Raises:
            EngineMismatchError: The server made another prompt of it than the renderer.
            EngineUnsupportedError: A video, or router choices that the server does not give.
            MMRenderError: As for `RendererBackend.generate`.
        """
        body = await self._body(request)
        try:
            reply = await transport.request("POST", "/generate", json=body, headers=request.extra_headers)
        except (asyncio.CancelledError, EngineTimeoutError):
            await send_abort(transport, "/abort_request", {"rid": request.request_id})
            raise
        except EngineStatusError as error:
            overflow = _overflow_error(error, body["sampling_params"]["max_new_tokens"])
            if overflow is None:
                raise
            raise overflow from error
        response = await read_reply(
            reply.body, lambda body: parse_reply(body, request, self.routed_experts_shape)
        )
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Return the longest prompt: one token less than `max_req_input_len`, which already is too long.

        It lies some tokens below the model's context length, which `/v1/models` has.
        """
        reply = await transport.request("GET", "/server_info")
        limit = decode_as(reply.body, _ServerInfo, where="GET /server_info").max_req_input_len
        return limit and limit - 1

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether the server refused a prompt, or prompt and completion together, as too long."""
        if isinstance(exc, EngineStatusError):
            return _overflow_error(exc, 1) is not None
        return isinstance(exc, PromptTooLongError)

    async def _body(self, request: EngineRequest) -> dict[str, Any]:
        ids = check_prompt(request.prompt_ids, request.vocab_size)
        spans = check_placeholders(ids, request)
        spelled = spell(
            request.sampling_params, "sglang", without_max_tokens="SGLang would stop after 128 tokens"
        )
        params = request.sampling_params
        if params.get("seed") is not None and not self.deterministic:
            raise SamplingParameterError(
                "SGLang ignores seeds unless it runs with --enable-deterministic-inference",
                where=parameter("seed"),
                remedy="Start it so, and say it with SGLangBackend(deterministic=True)",
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
            "sampling_params": {"skip_special_tokens": False, "no_stop_trim": True, **spelled.sampling},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": True,
            **spelled.request,
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.priority is not None:
            body["priority"] = request.priority if self.low_priority_values_first else -request.priority
        if request.routed_experts:
            if self.routed_experts_shape is None:
                raise EngineUnsupportedError(
                    "SGLang gives router choices without their shape",
                    where="routed_experts",
                    remedy="Name it with SGLangBackend(routed_experts_shape=(layers, experts of a token))",
                )
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.routed_experts_prompt_start or 0
        if spans:
            body["input_ids"] = _collapsed_ids(request, spans)
            body["image_data"] = await asyncio.to_thread(data_urls, spans)
        return with_extra_body(body, request)


def _collapsed_ids(request: EngineRequest, spans: Sequence[MediaSpan]) -> list[int]:
    """Return the prompt with one placeholder for each image, and no stray ones."""
    collapsed = collapse(request.prompt_ids, request.multi_modal_data, request.placeholder_ids)
    placeholder = collapsed[spans[0].start]
    count = sum(token == placeholder for token in collapsed)
    if count != len(spans):
        raise PlaceholderError(
            "SGLang takes every placeholder token for an image",
            where="prompt_ids",
            expected=f"{len(spans)} of the token {placeholder}, one for each image",
            got=str(count),
            remedy="A placeholder that the model itself sampled cannot be sent along with images",
        )
    return collapsed


# --- replies ---


class _ServerInfo(msgspec.Struct):
    max_req_input_len: int | None = None


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
    output_top_logprobs: list[list[_Logprob] | None] | None = None
    routed_experts: str | None = None
    weight_version: str | int | None = None
    weight_versions: list[ReportedVersion] | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int]
    prompt_token_ids: list[int]
    meta_info: _Meta


_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
_LARGE: Final = (
    "input_token_logprobs",
    "input_top_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "routed_experts",
)


def parse_reply(body: bytes, request: EngineRequest, experts_shape: tuple[int, int] | None) -> EngineResponse:
    """Parse a reply of status 200; `experts_shape` is layers, and experts of a token."""
    decoded = decode_json(body, where="reply")
    if isinstance(decoded, list) and len(decoded) == 1:
        decoded = decoded[0]
    reply = convert(decoded, _Reply, where="reply")
    meta = reply.meta_info
    finish = meta.finish_reason
    if finish.type == "abort" and finish.status_code is not None:
        raise EngineStatusError(
            f"the server gave up: {finish.message}",
            status=finish.status_code,
            body=str(decoded["meta_info"]["finish_reason"]),
            where="finish_reason",
        )
    reason = finish_reason_in(_REASONS, finish.type, where="finish_reason.type")
    check_prompt_seen(reply.prompt_token_ids, request, where="prompt_token_ids")
    entries = [LogprobEntry(pair.logprob, pair.token_id) for pair in meta.output_token_logprobs or ()]
    ids, logprobs = check_completion(
        reply.output_ids, [entry.logprob for entry in entries], request, where="output_ids"
    )
    check_named(entries, ids, where="output_token_logprobs", required=True)
    versions = meta.weight_versions
    if versions is None and meta.weight_version is not None:  # servers before 0.5.23 name the last one only
        versions = [ReportedVersion(meta.weight_version, 0, len(ids))]
    raw: dict[str, Any] = {
        "text": decoded.get("text"),
        "meta_info": {name: value for name, value in decoded["meta_info"].items() if name not in _LARGE},
    }
    if finish.type == "length" and len(ids) < request.sampling_params["max_tokens"]:
        raw["max_tokens_granted"] = len(ids)
        _log.warning(
            "SGLang cut max_tokens from %d to %d, since the prompt has %d tokens",
            request.sampling_params["max_tokens"],
            len(ids),
            len(request.prompt_ids),
        )
    return EngineResponse(
        completion_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=finish.matched if isinstance(finish.matched, int | str) else None,
        usage=Usage(len(request.prompt_ids), len(ids), meta.cached_tokens),
        routed_experts=_experts(meta, request, len(ids), experts_shape) if request.routed_experts else None,
        weight_versions=version_spans(versions, len(ids), where="meta_info.weight_versions"),
        request_id=meta.id,
        top_logprobs=_top_logprobs(meta, len(ids)),
        raw=raw,
    )


def _top_logprobs(meta: _Meta, count: int) -> TopLogprobs | None:
    rows = meta.output_top_logprobs
    if not rows:
        return None
    check_count(rows, count, what="alternatives", where="output_top_logprobs")
    return tuple(
        tuple((entry.token_id, entry.logprob) for entry in row or () if entry.logprob is not None)
        for row in rows
    )


def _experts(
    meta: _Meta, request: EngineRequest, completion: int, shape: tuple[int, int] | None
) -> RoutedExperts:
    if meta.routed_experts is None or shape is None:
        raise EngineUnsupportedError(
            "the server gives no router choices",
            where="meta_info.routed_experts",
            remedy="Start SGLang with --enable-return-routed-experts",
        )
    start = request.routed_experts_prompt_start or 0
    return experts_from_int32(
        meta.routed_experts,
        rows=len(request.prompt_ids) + completion - 1 - start,
        layers=shape[0],
        top_k=shape[1],
        start=start,
        where="meta_info.routed_experts",
    )


# Read from SGLang 0.5.23: managers/tokenizer_manager.py, managers/utils.py and managers/scheduler.py.
_TOO_LONG: Final = (
    r"The input \((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)",
    r"Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)",
    r"too long after expanding .* => (\d+) >= (\d+)",
)
_NO_ROOM: Final = r"maximum context length of (\d+) tokens\..*?(\d+) tokens from the input messages"


def _overflow_error(
    error: EngineStatusError, max_tokens: int
) -> PromptTooLongError | SamplingParameterError | None:
    """Return the error of a reply that finds the request too long; None for other replies."""
    if error.status != 400:
        return None
    for pattern in _TOO_LONG:
        if found := re.search(pattern, error.body, re.DOTALL):
            # A prompt of the length that the server names is refused already.
            return PromptTooLongError(int(found[1]), int(found[2]) - 1, where="prompt")
    if not (found := re.search(_NO_ROOM, error.body, re.DOTALL)):
        return None
    context_length, prompt_len = int(found[1]), int(found[2])
    if max_tokens < context_length:
        return PromptTooLongError(
            prompt_len,
            context_length - max_tokens,
            where="prompt",
            remedy=f"Shorten it, or ask for less than {max_tokens} tokens",
        )
    return SamplingParameterError(
        "is more than the model's context holds",
        where=parameter("max_tokens"),
        expected=f"at most {context_length - prompt_len}",
        got=str(max_tokens),
    )
