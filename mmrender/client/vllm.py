"""`VLLMBackend`: tokens and images to a vLLM server, by its `/inference/v1/generate`.

Images go in one of three ways:

- `features`: tensors of our own encoding, after a handshake that shows which pixels the server takes.
- `hash_only`: the same, without the data of images that the server has seen.
- `content_parts`: encoded images, which the server processes, and then their uuids. Its prompt is compared
  with ours.

`auto` takes the second if the server's cache is proved safe, else the third with uncompressed pixels, and the
first for servers and items that allow neither.

A request that would kill the engine, or be misread silently, is refused before it is sent. Verified with vLLM
0.32.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import msgspec

from mmrender.client.exchange import (
    HTTPBackend,
    Ids,
    check_request,
    post,
    warn_once,
)
from mmrender.client.reply import (
    FailedInEngineError,
    PromptNotShownError,
    ReportedExperts,
    ReportedLogprobs,
    ReportedUsage,
    ReportedVersion,
    check_completion,
    decode_as,
    finish_reason_in,
    only,
    read_events,
    response_of,
)
from mmrender.client.sampling import limit_of, renormalised, reporting, spell, truncates
from mmrender.client.server_facts import Process, facts_of
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.client.vllm_fields import PIXEL_DTYPES, PixelDtype
from mmrender.client.vllm_images import (
    GENERATE_PATH,
    ImagePlan,
    dense_spans,
    has_safe_cache,
    leaves_out_data,
    require_safe_cache,
    wire_forms,
)
from mmrender.client.vllm_parts import PartsPlan, decoded_alike
from mmrender.client.vllm_render import Range
from mmrender.errors import (
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    check_option,
)
from mmrender.media.encoded import is_encodable
from mmrender.messages import MODALITIES, Modality
from mmrender.sidecar import MediaSpan

_log = logging.getLogger("mmrender.client")

Send: TypeAlias = Callable[[list[dict[str, Any]]], Awaitable[EngineResponse]]
"""Sends the prompts of a plan, see `VLLMBackend._send`."""
ABORT_PATH: Final = "/inference/v1/abort_requests"
Widened: TypeAlias = Literal["not", "anew", "again"]
"""Whether a server widened the placeholders of images. `anew`: it processed an image, and the whole prompt
must be ours. `again`: it knew all images by uuids whose widening was compared, and the number of tokens must
be ours."""
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
        check_option("VLLMBackend.images", self.images, get_args(ImageMode))
        check_option("VLLMBackend.pixels", self.pixels, ("ask", *PIXEL_DTYPES))

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
        is_encoded = self.images == "content_parts"
        takes: Sequence[Modality] = ("image",) if is_encoded else MODALITIES
        ids, spans = check_request(request, takes=takes)
        listener = on_tokens if limit is None else None
        send = partial(self._send, request, transport, listener)
        if spans:
            plans = await self._plans(request, transport, ids, spans)
            response = await self._send_images(send, plans)
        else:
            response = await send([{"token_ids": ids.tolist()}])
        if limit is None:
            return response
        response = renormalised(response, limit)
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    async def _plans(
        self, request: EngineRequest, transport: Transport, ids: Ids, spans: Sequence[MediaSpan]
    ) -> list[ImagePlan | PartsPlan]:
        """Negotiate the forms that the images may have, the best first. Nothing is encoded or sampled."""
        parts = partial(PartsPlan, request, facts_of(transport), ids, spans, self.max_body_bytes)
        if self.images == "content_parts":
            return [parts()]
        is_auto = self.images == "auto"
        last = [parts()] if is_auto and all(is_encodable(span.item) for span in spans) else []
        try:
            steps = dense_spans(spans)
            asks = self.pixels == "ask" or self.images != "features"
            process = await Process.answering(transport) if asks else Process.unknown(transport)
            ask = partial(wire_forms, steps, ids, request.model, self.pixels)
            forms = await ask(process)
            by_hash = self.images == "hash_only"
            if by_hash:
                await require_safe_cache(process, trusted=self.trust_cache)
            elif is_auto:
                by_hash = await has_safe_cache(process, trusted=self.trust_cache)
        except EngineUnsupportedError as refusal:
            if not last:
                raise
            _log.info("%s: images are sent encoded: %s", transport.base_url, refusal)
            return [*last]
        tensors = ImagePlan(process, ask, ids, steps, forms, by_hash, self.max_body_bytes)
        # Pixels that are named were not compared with the pixels that the server makes of an image.
        if not last or by_hash or self.pixels != "ask" or not last[0].may_be_named:
            return [tensors, *last]
        pixels = parts(is_packed=False)
        originals = await decoded_alike(pixels, process)
        # The server may refuse a file that is decoded here, which says nothing of others.
        first = [replace(pixels, originals=originals)] if originals else []
        return [*first, pixels, tensors, *last]

    async def _send_images(self, send: Send, plans: list[ImagePlan | PartsPlan]) -> EngineResponse:
        """Send the requests of the first plan that can be carried out."""
        refused: tuple[PartsPlan, EngineError] | None = None
        for plan in plans:
            is_last = plan is plans[-1]
            try:
                prompts = await plan.requests()
            except EngineUnsupportedError:  # it is too long
                if is_last:
                    raise
                continue
            try:
                response = await self._send_plan(send, plan, prompts)
            except (EngineStatusError, PromptNotShownError) as error:
                if is_last or not isinstance(plan, PartsPlan) or not plan.is_refused_by(error):
                    raise
                refused = plan, error
                continue
            if refused is not None and not isinstance(plan, PartsPlan):
                refused[0].note_refusal(refused[1])
            return response
        raise AssertionError("there is no plan")

    async def _send_plan(
        self, send: Send, plan: ImagePlan | PartsPlan, prompts: list[dict[str, Any]]
    ) -> EngineResponse:
        """Send the requests of a plan, with all data once more if the server lacks an image."""
        left_out = any(map(leaves_out_data, prompts))
        try:
            response = await send(prompts)
        except (EngineStatusError, FailedInEngineError) as error:
            if not left_out or not plan.may_be_miss(error):
                raise
            plan.note(knew=False, left_out=True)
            response, left_out = await send(await plan.requests(anew=True)), False
        plan.note(knew=True, left_out=left_out)
        if isinstance(plan, ImagePlan):
            await plan.require_same_pixels()
        return response

    async def _send(
        self,
        request: EngineRequest,
        transport: Transport,
        on_tokens: OnTokens | None,
        prompts: list[dict[str, Any]],
    ) -> EngineResponse:
        """Send the beginnings of a prompt, each sampling one token, and then the whole, as the last."""
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
        return await sample_tokens(
            request, transport, prompts[-1], aborts=self.abort_on_cancel, on_tokens=on_tokens
        )


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
    widened: Widened = "not" if "content_parts" not in prompt else "again"
    if "return_token_ids" in prompt:
        widened = "anew"
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
    error: Any = None  # of a stream


def read_reply(
    request: EngineRequest, answer: bytes | _Reply, where: str, *, widened: Widened = "not"
) -> EngineResponse:
    """Read a whole answer. `widened` says whether the server widened the placeholders of images."""
    reply = decode_as(answer, _Reply, where=where) if isinstance(answer, bytes) else answer
    choice = only(reply.choices, where=where)
    if widened == "anew" and reply.prompt_token_ids is None:
        raise PromptNotShownError(
            "the reply lacks the server's prompt, which must be compared with ours",
            where=f"{where} prompt_token_ids",
            expected="a list",
        )
    if widened == "again" and (reply.usage is None or reply.usage.prompt_tokens is None):
        raise PromptNotShownError(
            "the reply lacks the number of the prompt's tokens, which must be ours",
            where=f"{where} usage.prompt_tokens",
            expected=str(len(request.prompt_ids)),
        )
    response = response_of(
        request,
        where=where,
        ids=choice.token_ids or [],
        entries=choice.logprobs.content or [] if choice.logprobs else [],
        reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        seen=reply.prompt_token_ids if widened == "anew" else None,
        usage=reply.usage,
        experts=choice.routed_experts,
        versions=choice.weight_versions,
        masks=choice.sampling_mask,
        request_id=reply.request_id,
    )
    if not response.allowed and response.completion_ids and truncates(request.sampling_params):
        warn_once(
            "%s: the server does not say which tokens top_p, top_k or min_p kept. Log-probabilities are of "
            "the whole vocabulary, and importance weights of a trainer are biased. Start vLLM with "
            "--return-sampling-mask --logprobs-mode processed_logprobs",
            where,
        )
    if widened == "anew" and reply.mm_placeholders is not None:
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


class _Stream:
    """Chunks of an answer, reported as they come and merged to the whole answer.

    Tokens that come with sampling masks are reported at the end: shown earlier, they would be kept without
    their masks if the stream broke.
    """

    def __init__(self, request: EngineRequest, on_tokens: OnTokens, where: str, widened: Widened) -> None:
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
            async for chunk in read_events(lines, _Reply, where=self._where):
                self._take(chunk)
        except EngineError:
            if self._choice.finish_reason not in ("stop", "length"):
                raise
        response = read_reply(self._request, self._whole, self._where, widened=self._widened)
        if self._has_masks:
            self._on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    def _take(self, chunk: _Reply) -> None:
        where = self._where
        if chunk.error is not None:
            # Before the first token the request may be sent again.
            kind = EngineReplyError if self._choice.token_ids else FailedInEngineError
            raise kind("the engine failed within a stream", where=where, got=repr(chunk.error)[:300])
        for choice in chunk.choices:
            before = len(self._choice.token_ids or ())
            entries = choice.logprobs.content or [] if choice.logprobs else []
            ids = choice.token_ids or []
            logprobs = check_completion(ids, entries, self._request, where=where, before=before)
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
