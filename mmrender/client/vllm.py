"""`VLLMBackend`: tokens and images to a vLLM server, by its `/inference/v1/generate`.

Images go in one of three ways:

- `features`: tensors of our own encoding, after a handshake that shows which pixels the server takes.
- `hash_only`: the same, without the data of images that the server has seen.
- `content_parts`: encoded images, which the server processes. Its prompt is then compared with ours.

`auto` takes the second if the server's cache is proved safe, else the first, and the third if server or items
allow neither.

A request that would kill the engine, or be misread silently, is refused before it is sent. Verified with vLLM
0.32.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import msgspec

from mmrender.client.exchange import (
    HTTPBackend,
    Ids,
    check_request,
    check_size,
    data_urls,
    post,
    require_one_of,
)
from mmrender.client.reply import (
    FailedInEngineError,
    ReportedExperts,
    ReportedLogprobs,
    ReportedUsage,
    ReportedVersion,
    check_completion,
    convert,
    decode_as,
    finish_reason_in,
    only,
    response_of,
)
from mmrender.client.sampling import limit_of, renormalised, reporting, spell, truncates
from mmrender.client.server_facts import Process
from mmrender.client.transport import Transport, read_events
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.client.vllm_fields import PIXEL_DTYPES, PixelDtype
from mmrender.client.vllm_images import (
    GENERATE_PATH,
    SIZE_SETTING,
    ImagePlan,
    Range,
    dense_spans,
    has_safe_cache,
    leaves_out_data,
    require_safe_cache,
    wire_forms,
)
from mmrender.errors import (
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    MediaError,
)
from mmrender.sidecar import MediaSpan, collapse

_log = logging.getLogger("mmrender.client")

Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[EngineResponse]]
ABORT_PATH: Final = "/inference/v1/abort_requests"
ImageMode: TypeAlias = Literal["auto", "features", "hash_only", "content_parts"]


@dataclass(frozen=True, slots=True)
class VLLMBackend(HTTPBackend):
    """vLLM's wire. Frozen and picklable. Facts about a server are kept with the transport.

    Attributes:
        images: How images are sent: `"auto"`, `"features"`, `"hash_only"` or `"content_parts"`, as the
            module says.
        pixels: Pixels that the server takes. `"ask"` finds out by a handshake. `"uint8"` are levels that the
            server normalises. All others are normalised values.
        trust_cache: Send hashes alone although the server does not say how it caches images. It kills the
            engine unless its cache is `lru`, in one API process and one data-parallel rank.
        max_body_bytes: The longest body that the server's frontend takes. None for no bound. If hashes are
            sent, longer requests are split, and otherwise refused before they are sent.
        abort_on_cancel: Tell the server to stop when a call is cancelled or times out. Closing the connection
            stops it too, unless a proxy keeps it open.

    Raises:
        InputError: A setting has an unknown value.
    """

    name: ClassVar[str] = "vllm"
    images: ImageMode = "auto"
    pixels: Literal["ask"] | PixelDtype = "ask"
    trust_cache: bool = False
    max_body_bytes: int | None = None
    abort_on_cancel: bool = True

    def __post_init__(self) -> None:
        require_one_of("VLLMBackend.images", self.images, get_args(ImageMode))
        require_one_of("VLLMBackend.pixels", self.pixels, ("ask", *PIXEL_DTYPES))

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion. Tokens are streamed if `on_tokens` is given, unless a limit holds for them.

        Log-probabilities under `allowed_token_ids` or `forbidden_token_ids` are renormalised over the tokens
        that are left. A server with `--return-sampling-mask` names the tokens that `top_p`, `top_k`, `min_p`
        and a grammar kept, and its log-probabilities are of these, at the temperature of the request.

        Raises:
            MediaError: An item cannot be sent as an encoded image.
            EngineUnsupportedError: The server or the mode of images lacks a capability.
            EngineMismatchError: The server takes other pixels, or made another prompt of the images.
            MMRenderError: As for `RendererBackend.generate`.
        """
        limit = limit_of(request)
        if limit is not None:
            request = reporting(request, limit)
        ids, spans = check_request(request, takes_videos=self.images != "content_parts")
        listener = on_tokens if limit is None else None
        send = partial(sample_tokens, request, transport, aborts=self.abort_on_cancel, on_tokens=listener)
        planned = None
        if spans and self.images != "content_parts":
            planned = await self._plan(request, transport, ids, spans)
        if planned is not None:
            response = await self._send_tensors(send, request, *planned)
        elif spans:
            response = await send(await self._encoded_images(request, ids, spans))
        else:
            response = await send({"token_ids": ids.tolist()})
        if limit is None:
            return response
        response = renormalised(response, limit)
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    async def _encoded_images(
        self, request: EngineRequest, ids: Ids, spans: Sequence[MediaSpan]
    ) -> dict[str, Any]:
        """Return the members of a request whose images the server processes."""
        urls = await asyncio.to_thread(data_urls, spans)
        collapsed = collapse(ids.tolist(), request.multi_modal_data, request.placeholder_ids)
        if self.max_body_bytes is not None:
            check_size(len(collapsed), urls, self.max_body_bytes, where=GENERATE_PATH, setting=SIZE_SETTING)
        parts = [{"type": "image_url", "url": url} for url in urls]
        return {"token_ids": collapsed, "content_parts": parts, "return_token_ids": True}

    async def _plan(
        self, request: EngineRequest, transport: Transport, ids: Ids, spans: Sequence[MediaSpan]
    ) -> tuple[ImagePlan, list[dict[str, Any]]] | None:
        """Negotiate the form of the images, and encode those that the server lacks. Nothing is sampled.

        None if `auto` sends encoded images instead.
        """
        try:
            steps = dense_spans(spans)
            asks = self.pixels == "ask" or self.images != "features"
            process = await Process.answering(transport) if asks else Process.unknown(transport)
            forms = await wire_forms(steps, ids, request.model, process, self.pixels)
            by_hash = self.images == "hash_only"
            if by_hash:
                await require_safe_cache(process, trusted=self.trust_cache)
            elif self.images == "auto":
                by_hash = await has_safe_cache(process, trusted=self.trust_cache)
            plan = ImagePlan(process, ids, steps, forms, by_hash, self.max_body_bytes)
            hashes = process.facts.hashes
            known = {name for name in plan.names if hashes.get(name)} if by_hash else None
            if known is not None and known.issuperset(plan.names):
                return plan, plan.prompts(known)  # nothing is to be encoded
            return plan, await asyncio.to_thread(plan.prompts, known)
        except EngineUnsupportedError as refusal:
            if self.images != "auto":
                raise
            try:
                await asyncio.to_thread(data_urls, spans)
            except MediaError:
                raise refusal from None
            _log.info("%s: images are sent encoded: %s", transport.base_url, refusal)
            return None

    async def _send_tensors(
        self, send: Send, request: EngineRequest, plan: ImagePlan, prompts: list[dict[str, Any]]
    ) -> EngineResponse:
        """Send the requests of a plan. Verify that the server was not replaced meanwhile."""
        process = plan.process
        try:
            response = await self._send_all(send, request, process.transport, prompts)
        except (EngineStatusError, FailedInEngineError) as error:
            # A cache miss is a status 500 like any failure, or on older servers an empty completion.
            may_be_miss = isinstance(error, FailedInEngineError) or error.status == 500
            if not may_be_miss or not any(map(leaves_out_data, prompts)):
                raise
            for name in plan.names:
                process.facts.hashes.pop(name)
            prompts = await asyncio.to_thread(plan.prompts, None if self.max_body_bytes is None else ())
            response = await self._send_all(send, request, process.transport, prompts)
        if plan.by_hash:
            for name in plan.names:
                process.facts.hashes.put(name, True)
        now = await Process.answering(process.transport) if process.facts.name else process
        if now != process and plan.forms != await wire_forms(
            plan.spans, plan.ids, request.model, now, self.pixels
        ):
            raise EngineMismatchError(
                "a server that takes other pixels replaced the server that was asked",
                where=process.transport.base_url,
                remedy="Ask again. It is not known which of the two answered",
            )
        return response

    async def _send_all(
        self, send: Send, request: EngineRequest, transport: Transport, prompts: list[dict[str, Any]]
    ) -> EngineResponse:
        """Send the beginnings of a prompt, each sampling one token, and then the whole."""
        headers = {
            name: text for name, text in request.extra_headers.items() if name.lower() != "x-request-id"
        }
        for number, prompt in enumerate(prompts[:-1], 1):
            beginning = EngineRequest(
                model=request.model,
                prompt_ids=prompt["token_ids"],
                sampling_params={"max_tokens": 1},
                request_id=f"{request.request_id}-{number}",
                cache_salt=request.cache_salt,
                priority=request.priority,
                extra_headers=headers,
                vocab_size=request.vocab_size,
            )
            await sample_tokens(beginning, transport, prompt, aborts=self.abort_on_cancel)
        return await send(prompts[-1])


async def sample_tokens(
    request: EngineRequest,
    transport: Transport,
    prompt: Mapping[str, Any],
    *,
    aborts: bool,
    on_tokens: OnTokens | None = None,
) -> EngineResponse:
    """Sample by vLLM's generate route, which a Dynamo frontend has too. Streamed if `on_tokens` is given.

    `prompt` has the members of the body for tokens and images. With `aborts` the server is asked to stop when
    the call is cancelled or times out.
    """
    spelled, _ = spell(request.sampling_params, "vllm")
    params = {"logprobs": 0, **spelled}  # by default of the sampled token alone
    if request.routed_experts_prompt_start is not None:
        params["routed_experts_prompt_start"] = request.routed_experts_prompt_start
    body = {
        "model": request.model,
        "request_id": request.request_id,
        "sampling_params": params,
        **prompt,
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.priority is not None:
        body["priority"] = request.priority
    if on_tokens is not None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    # A header replaces the body's id.
    headers = {name.lower(): value for name, value in request.extra_headers.items()}
    engine_id = f"generate-tokens-{headers.get('x-request-id', request.request_id)}"
    where = f"{transport.base_url}{GENERATE_PATH}"
    widened = "content_parts" in prompt
    try:
        return await post(
            request,
            transport,
            GENERATE_PATH,
            body,
            partial(read_reply, request, widened=widened),
            abort=(ABORT_PATH, {"request_ids": [engine_id]}) if aborts else None,
            read_stream=None if on_tokens is None else _Stream(request, on_tokens, where, widened).read,
        )
    except EngineStatusError as error:
        if error.status == 403 and "--enable-scale-out" in error.body:
            raise EngineUnsupportedError(
                "the server's generate route is closed",
                where=where,
                remedy="Start vLLM with --enable-scale-out",
            ) from error
        if error.status == 413:
            error.remedy = "Name the bound of its frontend: VLLMBackend(max_body_bytes=...)"
        if error.status == 404 and "does not exist" not in error.body:
            raise EngineUnsupportedError(
                "the server lacks the generate route for tokens",
                where=where,
                got="status 404",
                remedy="It takes vLLM 0.20 or later, or a Dynamo frontend with "
                "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1",
            ) from error
        raise


# --- replies ---


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ReportedLogprobs | None = None
    routed_experts: str | ReportedExperts | None = None  # the second is a Dynamo frontend's
    sampling_mask: list[list[int]] | None = None  # with --return-sampling-mask: a list for each token
    weight_versions: list[ReportedVersion] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: ReportedUsage | None = None
    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[Range]] | None = None


def read_reply(
    request: EngineRequest, answer: bytes | _Reply, where: str, *, widened: bool = False
) -> EngineResponse:
    """Read a whole answer. `widened` says that the server widened placeholders, as the renderer must have."""
    reply = decode_as(answer, _Reply, where=where) if isinstance(answer, bytes) else answer
    choice = only(reply.choices, where=where)
    if widened and reply.prompt_token_ids is None:
        raise EngineReplyError(
            "the reply lacks the server's prompt, which must be compared with ours",
            where=f"{where} prompt_token_ids",
            expected="a list",
        )
    response = response_of(
        request,
        where=where,
        ids=choice.token_ids or [],
        entries=choice.logprobs.content or [] if choice.logprobs else [],
        reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        seen=reply.prompt_token_ids if widened else None,
        usage=reply.usage,
        experts=choice.routed_experts,
        versions=choice.weight_versions,
        masks=choice.sampling_mask,
        request_id=reply.request_id,
    )
    if not response.allowed and response.completion_ids and truncates(request.sampling_params):
        _warn_of_truncation(where)
    if widened and reply.mm_placeholders is not None:
        ours = {
            modality: [Range(place.offset, place.length) for place in ranges]
            for modality, ranges in request.multi_modal_data.mm_placeholders.items()
        }
        if reply.mm_placeholders != ours:
            raise EngineMismatchError(
                "the server has the images at other places than the renderer",
                where=f"{where} mm_placeholders",
                expected=str(ours),
                got=str(reply.mm_placeholders),
            )
    return response


@lru_cache(1024)
def _warn_of_truncation(where: str) -> None:
    """Warn once for each server."""
    _log.warning(
        "%s: the server does not say which tokens top_p, top_k or min_p kept. Log-probabilities are of the "
        "whole vocabulary, and importance weights of a trainer are biased. Start vLLM with "
        "--return-sampling-mask --logprobs-mode processed_logprobs",
        where,
    )


class _Stream:
    """Chunks of an answer, reported as they come and merged to the whole answer.

    Tokens that come with sampling masks are reported at the end: shown earlier, they would be kept without
    their masks if the stream broke.
    """

    def __init__(self, request: EngineRequest, on_tokens: OnTokens, where: str, widened: bool) -> None:
        self._request = request
        self._on_tokens = on_tokens
        self._where = where
        self._widened = widened
        self._choice = _Choice(token_ids=[], logprobs=ReportedLogprobs([]))
        self._whole = _Reply([self._choice])
        self._has_masks = False

    async def read(self, lines: AsyncIterator[bytes]) -> EngineResponse:
        """Return the whole answer. A break behind the last token loses nothing."""
        try:
            async for chunk in read_events(lines, where=self._where):
                self._take(chunk)
        except EngineError:
            if self._choice.finish_reason not in ("stop", "length"):
                raise
        response = read_reply(self._request, self._whole, self._where, widened=self._widened)
        if self._has_masks:
            self._on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    def _take(self, decoded: dict[str, Any]) -> None:
        where = self._where
        if "error" in decoded:
            raise EngineReplyError(
                "the engine failed within a stream", where=where, got=repr(decoded["error"])[:300]
            )
        chunk = convert(decoded, _Reply, where=where)
        for choice in chunk.choices:
            before = len(self._choice.token_ids or ())
            entries = choice.logprobs.content or [] if choice.logprobs else []
            ids, logprobs = check_completion(
                choice.token_ids or [], entries, self._request, where=where, before=before
            )
            told = choice.finish_reason
            reason = None if told is None else finish_reason_in(told, where=where)
            _merge(self._choice, choice)
            self._has_masks |= choice.sampling_mask is not None
            if (ids or reason is not None) and not self._has_masks:
                self._on_tokens(ids, logprobs, reason)
        chunk.choices = self._whole.choices
        _merge(self._whole, chunk)


def _merge(whole: msgspec.Struct, part: msgspec.Struct) -> None:
    """Add a chunk: tokens and their logprobs behind those before, other members in their place."""
    for name in part.__struct_fields__:
        value, grown = getattr(part, name), getattr(whole, name)
        if value is None:
            continue
        if name in ("token_ids", "content", "sampling_mask") and grown is not None:
            grown.extend(value)
        elif isinstance(value, ReportedLogprobs):
            _merge(grown, value)
        else:
            setattr(whole, name, value)
