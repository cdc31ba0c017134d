"""`VLLMBackend`: tokens and images to a vLLM server, by its `/inference/v1/generate`.

Images go in one of three ways:

- `features`: tensors of our own encoding, after a handshake that shows which pixels the server takes;
- `hash_only`: the same, without the data of images that the server has seen;
- `content_parts`: encoded images, which the server processes; its prompt is then compared with ours.

What kills the engine or passes silently wrong is refused before it is sent. Verified with vLLM 0.32.
"""

import asyncio
import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import msgspec
import pybase64

from mmrender.client.placeholders import Ids, check_placeholders, check_prompt, check_prompt_seen, collapse
from mmrender.client.reply import (
    LogprobEntry,
    ReportedExperts,
    ReportedUsage,
    ReportedVersion,
    alternatives,
    check_completion,
    check_named,
    check_prompt_count,
    convert,
    decode_json,
    experts_from_mapping,
    experts_from_npy,
    finish_reason_in,
    read_reply,
    version_spans,
)
from mmrender.client.sampling import spell
from mmrender.client.server_facts import facts_of, forget, model_cards
from mmrender.client.transport import Transport, read_events
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.client.vllm_images import (
    PIXEL_DTYPES,
    PixelDtype,
    WireForm,
    features_of,
    require_safe_cache,
    wire_form,
)
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
)
from mmrender.media.item import encoded_image
from mmrender.spans import MediaSpan
from mmrender.trajectory.engine_data import RoutedExperts

GENERATE_PATH: Final = "/inference/v1/generate"
ABORT_PATH: Final = "/inference/v1/abort_requests"
ImageMode: TypeAlias = Literal["features", "hash_only", "content_parts"]
_ABORT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class VLLMBackend:
    """vLLM's wire. Frozen and picklable; what it learns about a server is kept with the transport.

    Attributes:
        images: How images are sent: `"features"`, `"hash_only"` or `"content_parts"`; see the module.
        pixels: Which pixels the server takes: `"ask"` it by a handshake, or say so without one. `"uint8"` are
            levels that the server normalises, the others normalised values.
        trust_cache: Leave out images of `hash_only` also where the server does not say how it caches them. A
            wrong answer kills the engine.
        abort_on_cancel: Tell the server to stop where a call is cancelled or times out. Closing the
            connection stops it too, unless something stands between.

    Raises:
        InputError: A setting has an unknown value.
    """

    name: ClassVar[str] = "vllm"
    images: ImageMode = "features"
    pixels: Literal["ask"] | PixelDtype = "ask"
    trust_cache: bool = False
    abort_on_cancel: bool = True

    def __post_init__(self) -> None:
        for name, known in (("images", get_args(ImageMode)), ("pixels", ("ask", *PIXEL_DTYPES))):
            if getattr(self, name) not in known:
                raise InputError(
                    "unknown setting of the backend",
                    where=f"VLLMBackend.{name}",
                    expected=", ".join(map(repr, known)),
                    got=repr(getattr(self, name)),
                )

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion; tokens are streamed where `on_tokens` is given.

        Raises:
            MediaError: An item cannot be sent as an encoded image.
            EngineUnsupportedError: The server or the mode of images lacks what is needed.
            EngineMismatchError: The server takes other pixels, or made another prompt of the images.
            MMRenderError: As for `RendererBackend.generate`.
        """
        by_parts = self.images == "content_parts"
        ids = check_prompt(request.prompt_ids, request.vocab_size)
        spans = check_placeholders(ids, request, takes_sparse=by_parts)
        call = GenerateCall(request, transport, ids, self.abort_on_cancel, on_tokens)
        try:
            if not spans:
                return await call.send({})
            if not by_parts:
                return await self._by_features(call, spans)
            collapsed = collapse(ids.tolist(), request.multi_modal_data, request.placeholder_ids)
            urls = await asyncio.to_thread(data_urls, spans)
            parts = [{"type": "image_url", "url": url} for url in urls]
            images = {"token_ids": collapsed, "content_parts": parts, "return_token_ids": True}
            return await call.send(images, widened=True)
        except EngineConnectionError:
            forget(transport)  # the server may come back with other flags
            raise

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Ask `/v1/models`: the context less one token, since a prompt that fills it is refused."""
        cards = await model_cards(transport)
        # An adapter's own entry says nothing; its base model's does.
        card = cards.get(model)
        base = cards.get(card.parent or "") if card is not None else None
        length = (card and card.max_model_len) or (base and base.max_model_len)
        return length - 1 if length and length > 1 else None

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether the server refused a prompt as too long, by any of its texts."""
        return isinstance(exc, PromptTooLongError) or _overflow_of(exc) is not None

    async def _by_features(self, call: "GenerateCall", spans: Sequence[MediaSpan]) -> EngineResponse:
        """Send tensors; with `hash_only` leave out those that the server has, and send them after a miss."""
        forms: dict[str, WireForm] = {}
        # The smallest image of a kind is the one that the server is asked to render.
        for span in sorted(spans, key=lambda span: span.range.length):
            if span.item.identity not in forms:
                forms[span.item.identity] = await wire_form(
                    span, call.ids, call.request.model, call.transport, pixels=self.pixels
                )

        async def send(left_out: Collection[str] = (), *, repeats: bool = True) -> EngineResponse:
            features = await asyncio.to_thread(
                features_of, spans, forms, left_out, repeats_left_out=not repeats
            )
            return await call.send({"features": features})

        if self.images == "features":
            return await send()
        await require_safe_cache(call.transport, trusted=self.trust_cache)
        facts = facts_of(call.transport)
        hashes = [forms[span.item.identity].mm_hash(span.item) for span in spans]
        left_out = facts.seen(hashes)
        try:
            response = await send(left_out, repeats=False)
        except (EngineStatusError, FailedInEngineError) as error:
            # A miss has no text of its own: status 500, or on older servers an empty completion.
            may_be_miss = isinstance(error, FailedInEngineError) or error.status == 500
            if not may_be_miss or not (left_out or len(set(hashes)) < len(hashes)):
                raise
            facts.unsee(hashes)
            response = await send()
        facts.remember(hashes)
        return response


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked request to vLLM's generate route; also used through a Dynamo frontend.

    Attributes:
        request: What the caller asked.
        transport: The server.
        ids: The prompt, placeholders widened; of shape `(n,)`.
        aborts: Whether the server is told to stop where the call is cancelled or times out.
        on_tokens: Called with tokens as they come; the answer is streamed then.
    """

    request: EngineRequest
    transport: Transport
    ids: Ids
    aborts: bool
    on_tokens: OnTokens | None = None

    async def send(self, images: Mapping[str, Any], *, widened: bool = False) -> EngineResponse:
        """Send the request with `images` among its members, and parse the answer.

        Args:
            images: Members of the body for the prompt's images.
            widened: Whether the server widens the placeholders, so that its prompt is compared with ours.
        """
        where = f"{self.transport.base_url}{GENERATE_PATH}"
        body = with_extra_body(self._body(images), self.request)
        headers = dict(self.request.extra_headers)
        try:
            if self.on_tokens is not None:
                return await self._streamed(body, headers, self.on_tokens, where, widened)
            reply = await self.transport.request("POST", GENERATE_PATH, json=body, headers=headers)
        except EngineStatusError as error:
            meaning = _meaning_of(error, where=where)
            if meaning is error:
                raise
            raise meaning from error
        except (asyncio.CancelledError, EngineTimeoutError):
            if self.aborts:
                # A header of that name comes before the body's id.
                given = {name.lower(): value for name, value in headers.items()}
                engine_id = f"generate-tokens-{given.get('x-request-id', self.request.request_id)}"
                await send_abort(self.transport, ABORT_PATH, {"request_ids": [engine_id]})
            raise
        return await read_reply(
            reply.body,
            lambda body: parse_reply(
                decode_json(body, where=where), self.request, where=where, widened=widened
            ),
        )

    def _body(self, images: Mapping[str, Any]) -> dict[str, Any]:
        request = self.request
        spelled = spell(request.sampling_params, "vllm", without_max_tokens="vLLM would fill the context")
        params = spelled.sampling
        params.setdefault("logprobs", 0)  # of the sampled token alone
        if request.routed_experts_prompt_start is not None:
            params["routed_experts_prompt_start"] = request.routed_experts_prompt_start
        body: dict[str, Any] = {
            "model": request.model,
            "request_id": request.request_id,
            "sampling_params": params,
            "token_ids": self.ids.tolist(),
            **images,
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.priority is not None:
            body["priority"] = request.priority
        return body

    async def _streamed(
        self, body: dict[str, Any], headers: dict[str, str], on_tokens: OnTokens, where: str, widened: bool
    ) -> EngineResponse:
        """Read the answer as a stream; one that breaks after the last token is complete."""
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        lines = self.transport.stream("POST", GENERATE_PATH, json=streamed, headers=headers)
        whole = StreamedReply(self.request, on_tokens, where=where)
        try:
            async for chunk in read_events(lines, where=where):
                whole.take(chunk)
        except EngineError:
            if not whole.is_finished:
                raise
        return parse_reply(whole.reply(), self.request, where=where, widened=widened)


def with_extra_body(body: dict[str, Any], request: EngineRequest) -> dict[str, Any]:
    """Add `extra_body` of a request, unchecked, to its body."""
    if taken := sorted(body.keys() & request.extra_body.keys()):
        raise InputError("the request itself sets this member", where=f"extra_body[{taken[0]!r}]")
    return {**body, **request.extra_body}


async def send_abort(transport: Transport, path: str, body: Mapping[str, Any]) -> None:
    """Tell a server to stop sampling; failures are ignored, as they must not hide why it was told."""
    call = transport.request("POST", path, json=body, timeout=_ABORT_SECONDS, idempotent=True)
    sending = asyncio.ensure_future(call)
    # A second cancellation ends the wait, not the request; then its failure has no one to report it to.
    sending.add_done_callback(lambda done: done.cancelled() or done.exception())
    with contextlib.suppress(EngineError):
        await asyncio.shield(sending)


_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]+;base64,(?=.)", re.I | re.S)


def check_data_url(value: Any, *, where: str) -> str:
    """Return an image that is to be sent, which must be a `data:` URL: a server would open a path."""
    found = _DATA_URL.match(value) if isinstance(value, str) else None
    try:
        # Decoding is the fastest way to look at every character.
        is_data = found is not None and bool(pybase64.b64decode(value[found.end() :], validate=True))
    except ValueError:
        is_data = False
    if not is_data:
        raise InputError(
            "images are sent as data URLs only",
            where=where,
            expected="data:image/...;base64,...",
            got=repr(value[:40] if isinstance(value, str) else type(value).__name__),
            remedy="A server may open any other text as a file of its own",
        )
    return str(value)


def data_urls(spans: Sequence[MediaSpan]) -> list[str]:
    """Encode images; tens of milliseconds for each that was not sent before."""
    return [check_data_url(encoded_image(span.item).data_url, where=span.where) for span in spans]


_OVERFLOWS: Final = (
    # "The decoder prompt (length 3000) is longer than the maximum model length of 2048. ...", and the same
    # with "plus the number of requested output tokens" before "is".
    re.compile(
        r"prompt \(length (?P<length>\d+)\).{0,80}is longer than the maximum model length of (?P<limit>\d+)"
    ),
    # "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 ..."
    re.compile(r"maximum context length is (?P<limit>\d+) tokens.{0,80}?(?P<length>\d+)[^.]{0,60}tokens"),
    # "Input length (3000) exceeds model's maximum context length (2048)."
    re.compile(r"Input length \((?P<length>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)"),
)


def _overflow_of(error: BaseException) -> tuple[int, int] | None:
    """Return the counted tokens and the context length, where the prompt is too long."""
    if not isinstance(error, EngineStatusError) or error.status != 400:
        return None
    found = next((match for text in _OVERFLOWS if (match := text.search(error.body))), None)
    return None if found is None else (int(found["length"]), int(found["limit"]))


def _meaning_of(error: EngineStatusError, *, where: str) -> EngineError | PromptTooLongError:
    """Return the error that a refusal of the generate route means, or the refusal itself."""
    overflow = _overflow_of(error)
    if overflow is not None:
        length, context = overflow
        # A prompt that fills the context leaves no room for a single sampled token.
        return PromptTooLongError(length, context - 1, where=where)
    if error.status == 403 and "--enable-scale-out" in error.body:
        return EngineUnsupportedError(
            "the server's generate route is closed", where=where, remedy="Start vLLM with --enable-scale-out"
        )
    if error.status == 404 and "does not exist" not in error.body:
        return EngineUnsupportedError(
            "the server has no generate route for tokens",
            where=where,
            got="status 404",
            remedy="It takes vLLM 0.20 or later, or a Dynamo frontend with "
            "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1",
        )
    return error


# --- replies ---

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",  # the detection of repetition that a caller asked for; `stop_reason` says so
}
_LARGE: Final = ("token_ids", "logprobs", "routed_experts", "sampling_mask")


class _Logprobs(msgspec.Struct):
    content: list[LogprobEntry] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | ReportedExperts | None = None  # the second is a Dynamo frontend's
    weight_versions: list[ReportedVersion] | None = None

    @property
    def entries(self) -> list[LogprobEntry]:
        """The logprob of each token."""
        return (self.logprobs and self.logprobs.content) or []


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: ReportedUsage | None = None
    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None


class FailedInEngineError(EngineReplyError):
    """The engine gave up on the request, and said so with HTTP 200.

    vLLM 0.27 and 0.28 answer so to a hash that they do not have the data of.
    """


def parse_reply(decoded: Any, request: EngineRequest, *, where: str, widened: bool = False) -> EngineResponse:
    """Parse the whole answer.

    Args:
        decoded: The answer, decoded from JSON.
        request: What was asked.
        where: The call in errors.
        widened: Whether the server widened the placeholders, so that its prompt must be compared with ours.
    """
    reply = convert(decoded, _Reply, where=where)
    if len(reply.choices) != 1:
        raise EngineReplyError("the reply is not one completion", where=where, got=str(len(reply.choices)))
    choice = reply.choices[0]
    reason = _finish_reason(choice, where)
    tokens, entries = choice.token_ids or [], choice.entries
    ids, logprobs = check_completion(
        tokens, [entry.logprob for entry in entries], request, where=f"{where} token_ids"
    )
    check_named(entries, ids, where=f"{where} logprobs", required=True)
    if widened:
        _check_widened(reply, request, where)
    check_prompt_count(reply.usage, request, where=f"{where} usage.prompt_tokens")
    asked_top = request.sampling_params.get("logprobs")
    return EngineResponse(
        completion_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        usage=Usage(len(request.prompt_ids), len(ids), reply.usage.cached_tokens if reply.usage else None),
        stop_reason=choice.stop_reason,
        routed_experts=_routed_experts(choice, request, len(ids), f"{where} routed_experts"),
        weight_versions=version_spans(choice.weight_versions, len(ids), where=f"{where} weight_versions"),
        request_id=reply.request_id,
        top_logprobs=alternatives(entries, where=f"{where} logprobs") if asked_top else None,
        raw={
            **decoded,
            "prompt_token_ids": None,
            "choices": [{name: value for name, value in decoded["choices"][0].items() if name not in _LARGE}],
        },
    )


def _finish_reason(choice: _Choice, where: str) -> FinishReason:
    if choice.finish_reason == "error":
        raise FailedInEngineError(
            "the engine failed during the request",
            where=where,
            got="finish_reason 'error'",
            remedy="The server's log says why",
        )
    return finish_reason_in(_REASONS, choice.finish_reason, where=f"{where} finish_reason")


def _routed_experts(
    choice: _Choice, request: EngineRequest, completion: int, where: str
) -> RoutedExperts | None:
    start = request.routed_experts_prompt_start
    data = choice.routed_experts
    if data is None:
        if request.routed_experts and completion:
            raise EngineUnsupportedError(
                "router choices were asked for, and the server gives none",
                where=where,
                remedy="Start vLLM with --enable-return-routed-experts, with a mixture-of-experts model",
            )
        return None
    if isinstance(data, ReportedExperts):
        return experts_from_mapping(data, start, where=where)
    experts = experts_from_npy(data, where=where)
    # One row for each token that was fed. Servers that know `routed_experts_prompt_start` leave out the rows
    # before it, others send them all.
    rows, whole = len(experts.data), max(0, len(request.prompt_ids) + completion - 1)
    if rows == whole:
        return experts if start is None else experts.from_position(min(start, whole))
    if start is None or rows != max(0, whole - start):
        raise EngineReplyError(
            "the reply has another number of routed rows", where=where, expected=str(whole), got=str(rows)
        )
    return RoutedExperts(experts.data, start)


def _check_widened(reply: _Reply, request: EngineRequest, where: str) -> None:
    """Require that the prompt that the server made of encoded images is ours, in tokens and places."""
    if reply.prompt_token_ids is None:
        raise EngineReplyError(
            "the reply lacks the server's prompt, which must be compared with ours",
            where=f"{where} prompt_token_ids",
            expected="a list",
        )
    check_prompt_seen(reply.prompt_token_ids, request, where=f"{where} prompt_token_ids")
    ours = {
        modality: [(place.offset, place.length) for place in ranges]
        for modality, ranges in request.multi_modal_data.mm_placeholders.items()
    }
    theirs = {
        modality: [(place.offset, place.length) for place in ranges]
        for modality, ranges in (reply.mm_placeholders or {}).items()
    }
    if reply.mm_placeholders is not None and theirs != ours:
        raise EngineMismatchError(
            "the server has the images at other places than the renderer",
            where=f"{where} mm_placeholders",
            expected=str(ours),
            got=str(theirs),
        )


class StreamedReply:
    """Chunks of a generate stream, reported as they come and put together to the whole answer.

    Args:
        request: What was asked.
        on_tokens: Called with the checked tokens of each chunk.
        where: The call in errors.
    """

    def __init__(self, request: EngineRequest, on_tokens: OnTokens, *, where: str) -> None:
        self._request = request
        self._on_tokens = on_tokens
        self._where = where
        self._head: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"index": 0, "token_ids": [], "logprobs": {"content": []}}

    def take(self, decoded: Mapping[str, Any]) -> None:
        """Take one chunk."""
        where = self._where
        if "error" in decoded:
            raise EngineReplyError(
                "the engine failed within a stream", where=where, got=repr(decoded["error"])[:300]
            )
        chunk = convert(decoded, _Reply, where=where) if decoded.get("choices") else _Reply([])
        self._head.update({name: value for name, value in decoded.items() if value is not None})
        for choice, members in zip(chunk.choices, decoded.get("choices") or (), strict=True):
            tokens, entries = choice.token_ids or [], choice.entries
            ids, logprobs = check_completion(
                tokens,
                [entry.logprob for entry in entries],
                self._request,
                where=f"{where} token_ids",
                before=len(self._choice["token_ids"]),
            )
            check_named(entries, ids, where=f"{where} logprobs", required=True)
            self._choice["token_ids"] += ids
            if entries:
                self._choice["logprobs"]["content"] += members["logprobs"]["content"]
            self._choice.update(
                {
                    name: value
                    for name, value in members.items()
                    if name not in ("index", "token_ids", "logprobs") and value is not None
                }
            )
            reason = _finish_reason(choice, where) if choice.finish_reason is not None else None
            if ids or reason is not None:
                self._on_tokens(ids, logprobs, reason)

    @property
    def is_finished(self) -> bool:
        """Whether a chunk has said why the completion ended; only token counts can follow."""
        return self._choice.get("finish_reason") in ("stop", "length")

    def reply(self) -> dict[str, Any]:
        """Return the answer as the route gives it without streaming."""
        return {**self._head, "choices": [self._choice]}
