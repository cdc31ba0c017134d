"""One request for a completion and its answer, as the backends of all servers make it over HTTP.

`HTTPBackend` is their base. `check_request` checks a prompt and its sidecar before sending, since a mistake
kills an engine, or gets a wrong answer. `post` sends a request once, tells the server to stop if the caller
is cancelled, recognises a prompt that is too long by each server's words, and reads a large answer off the
event loop.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.caching import LRUCache
from mmrender.client.reply import token_at
from mmrender.client.server_facts import facts_of, forget, model_cards
from mmrender.client.transport import JSONText, Transport, is_lost
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.content.ids import checked_array
from mmrender.errors import (
    EngineError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnsupportedError,
    InputError,
    PlaceholderError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.media.encoded import EncodedImage, bitmap, encoded_image, original
from mmrender.messages import Modality
from mmrender.sidecar import MediaItem, MediaSpan, Repeat, common_prefix

_log = logging.getLogger("mmrender.client")

Ids: TypeAlias = npt.NDArray[np.integer[Any]]

_ABORT_SECONDS: Final = 5.0
_ABORT_GRACE: Final = 0.25
"""Seconds that a cancelled caller waits for the server to take the abort, which goes on without it."""
_LARGE_REPLY: Final = 1 << 20
"""Bytes above which a reply is read on a thread."""
_REPLY_BYTES: Final = 4 << 20
BYTES_PER_ID: Final = 8
"""Upper bound of the bytes of a token id as JSON."""
_ENTRY_BYTES: Final = 512
"""Upper bound of the bytes of one token with its logprob as JSON."""

_TOO_LONG: Final = tuple(
    re.compile(text, re.DOTALL)
    for text in (
        # vLLM: "The decoder prompt (length 3000) is longer than the maximum model length of 2048. ...", and
        # the same with "plus the number of requested output tokens" before "is".
        r"prompt \(length (?P<length>\d+)\).{0,80}is longer than the maximum model length of (?P<limit>\d+)",
        # vLLM: "This model's maximum context length is 2048 tokens. However, your prompt ..."
        r"maximum context length is (?P<limit>\d+) tokens.{0,80}?(?P<length>\d+)[^.]{0,60}tokens",
        r"Input length \((?P<length>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)",
        # SGLang, from its managers/tokenizer_manager.py, managers/utils.py and managers/scheduler.py
        r"input \((?P<length>\d+) tokens\) is longer than the model's context length \((?P<limit>\d+) tokens",
        r"Input length \((?P<length>\d+) tokens\) exceeds the maximum allowed length \((?P<limit>\d+) tokens",
        r"too long after expanding .* => (?P<length>\d+) >= (?P<limit>\d+)",
    )
)
_NO_ROOM: Final = re.compile(
    r"maximum context length of (?P<limit>\d+) tokens\..*?(?P<length>\d+) tokens from the input messages",
    re.DOTALL,
)
"""SGLang's refusal of prompt and `max_tokens` together."""


@lru_cache(1024)
def warn_once(text: str, server: str) -> None:
    """Log a warning about a server, once for each. Questions to it are repeated after pauses."""
    _log.warning(text, server)


class HTTPBackend:
    """Base of the backends of servers."""

    __slots__ = ()

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Ask `/v1/models`: the context less one token, since a prompt that fills it is refused."""
        cards = await model_cards(transport)
        card = cards.get(model)
        # An adapter's own entry lacks the length. Its base model's has it.
        base = card and cards.get(card.parent or "")
        length = (card and card.length) or (base and base.length)
        return length - 1 if length and length > 1 else None

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether a prompt was too long, before it was sent or by any text of a server."""
        if isinstance(exc, EngineStatusError):
            return _overflow_error(exc, 1, "") is not None
        return isinstance(exc, PromptTooLongError)


def check_request(
    request: EngineRequest, *, takes: Sequence[Modality] = ("image",)
) -> tuple[Ids, list[MediaSpan]]:
    """Return the prompt as an array of shape `(n,)` and its media in order, checked against each other.

    `MultiModalData.spans` checks the sidecar against itself. The checks here are of engines: ids within the
    vocabulary, ranges that hold exactly the tokens of their items, no image without a range.

    Args:
        request: The prompt, its sidecar, and the model's tokens. Without `media_token_ids` the first token of
            a range counts as the pad token.
        takes: Media that the engine takes, of a video each run of features by itself if text lies between.

    Raises:
        InputError: The prompt is empty, or has an element outside the vocabulary.
        EngineUnsupportedError: The engine does not take an item's modality.
        PlaceholderError: Tokens, ranges and items do not fit together.
    """
    size = 1 << 31 if request.vocab_size is None else request.vocab_size
    ids = checked_array(request.prompt_ids, "prompt_ids", size)
    if not len(ids):
        raise InputError("the prompt is empty", where="prompt_ids")
    spans = request.multi_modal_data.spans(len(ids))
    pads: dict[str, int] = {}
    for span in spans:
        if span.modality not in takes:
            raise EngineUnsupportedError(
                f"only {' and '.join(f'{one}s' for one in takes)} can be sent to this engine",
                where=span.where,
                got=span.modality,
                remedy="Send audio to vLLM: VLLMBackend()" if span.modality == "audio" else None,
            )
        actual = ids[span.start : span.stop]
        expansion = span.item.expansion
        if len(expansion) == 1 and isinstance(piece := expansion[0], Repeat):  # an array for it takes longer
            token = request.media_token_ids.get(piece.token)
            if token is not None and len(actual) == piece.count and (actual == token).all():
                pads.setdefault(span.modality, token)
                continue
        expected = _expected_tokens(span, ids, request.media_token_ids, pads)
        if not np.array_equal(actual, expected):
            same = common_prefix(actual, expected)
            raise PlaceholderError(
                "a placeholder range does not hold the tokens of its item",
                where=span.where,
                expected=f"{token_at(expected, same)}, {len(expected)} tokens in all",
                got=f"{token_at(actual, same)} at {span.start + same}, {len(actual)} in all",
            )
    for modality, pad in pads.items():
        _check_edges([span for span in spans if span.modality == modality], spans, ids, pad)
    return ids, spans


def _expected_tokens(
    span: MediaSpan, ids: Ids, token_ids: Mapping[str, int], pads: dict[str, int]
) -> npt.NDArray[Any]:
    """Return the tokens that a range must hold: its expansion's, or its runs of pads if unknown."""
    runs = span.range.embed_spans or ((0, span.range.length),)
    pad = pads.setdefault(span.modality, int(ids[span.start + runs[0][0]]))
    pieces = span.item.expansion
    known = [piece for piece in pieces if isinstance(piece, Repeat) and piece.token in token_ids]
    if len(known) == len(pieces):
        return np.repeat([token_ids[piece.token] for piece in known], [piece.count for piece in known])
    expected = ids[span.start : span.stop].copy()
    for start, stop in runs:
        expected[start:stop] = pad
    return expected


def _check_edges(own: Sequence[MediaSpan], spans: Sequence[MediaSpan], ids: Ids, pad: int) -> None:
    """Require that runs of a modality's pads end with its ranges `own`, and that no image lacks a range.

    A model may sample a pad token, and it stays one. Pads between the same two tokens that every image of the
    prompt lies between are an image that the sidecar lacks.
    """
    padded = np.concatenate(([-1], ids, [-1]))  # so that the token before the first has an index
    stray = padded == pad
    for span in spans:
        stray[span.start + 1 : span.stop + 1] = False
    if not stray.any():
        return
    for span in own:
        for index in (span.start - 1, span.stop):
            if stray[index + 1]:
                raise PlaceholderError(
                    "a placeholder range ends within a run of pad tokens",
                    where=span.where,
                    expected=f"no token {pad} next to it",
                    got=f"one at {index}",
                )
    frames = {(int(padded[span.start]), int(padded[span.stop + 1])) for span in own}
    for start, stop in np.flatnonzero(np.diff(stray)).reshape(-1, 2).tolist():
        before, after = frame = int(padded[start]), int(padded[stop + 1])
        if frames == {frame}:
            raise PlaceholderError(
                "an image of the prompt lacks a placeholder range",
                where=f"prompt_ids[{start}:{stop}]",
                expected="a range and an item for each image",
                got=f"a run of the token {pad} between {before} and {after}, as images have it",
                remedy="Pass the sidecar of the whole prompt as multi_modal_data",
            )


async def post(
    request: EngineRequest,
    transport: Transport,
    path: str,
    body: Mapping[str, Any],
    read: Callable[[bytes, str], EngineResponse],
    *,
    abort: tuple[str, Any] | None = None,
    on_tokens: OnTokens | None = None,
    read_stream: Callable[[AsyncIterator[bytes]], Awaitable[EngineResponse]] | None = None,
) -> EngineResponse:
    """Send a request for a completion and read its answer, which gets the known facts about the sampler.

    Args:
        request: The request.
        transport: The server.
        path: The server's route.
        body: The request as the server takes it.
        read: Reads the body of the answer. Its second argument is the call in errors.
        abort: Path and body that tell the server to stop. None if the closed connection does.
        on_tokens: Called at the end, unless the answer is a stream.
        read_stream: Reads an answer that comes as lines instead, and reports its tokens.
    """
    where = f"{transport.base_url}{path}"
    if repeated := sorted(body.keys() & request.extra_body.keys()):
        raise InputError("the request itself sets this member", where=f"extra_body[{repeated[0]!r}]")
    body, headers = {**body, **request.extra_body}, request.extra_headers
    try:
        if read_stream is not None:
            response = await read_stream(transport.stream("POST", path, json=body, headers=headers))
        else:
            reply = await transport.request(
                "POST", path, json=body, headers=headers, max_reply_bytes=_max_reply_bytes(request)
            )
    except (asyncio.CancelledError, EngineError) as error:
        if is_lost(error):
            forget(transport)  # the server may come back with other flags
        if abort is not None and isinstance(error, asyncio.CancelledError | EngineTimeoutError):
            await _send_abort(transport, *abort)
        if not isinstance(error, EngineStatusError):
            raise
        overflow = _overflow_error(error, request.sampling_params["max_tokens"], where)
        if overflow is None:
            raise
        raise overflow from error
    if read_stream is None:
        is_large = len(reply.body) >= _LARGE_REPLY
        response = await asyncio.to_thread(read, reply.body, where) if is_large else read(reply.body, where)
    if sampler := facts_of(transport, has_answered=True).sampler:
        response = replace(response, sampler=sampler)
    if on_tokens is not None:
        on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
    return response


def _max_reply_bytes(request: EngineRequest) -> int | None:
    """Bound the reply's size. None if it may have members of any size."""
    params = request.sampling_params
    if request.routed_experts or request.extra_body or params.get("extra"):
        return None
    alternatives, prompt_alternatives = (params.get(name) or 0 for name in ("logprobs", "prompt_logprobs"))
    tokens: int = params["max_tokens"]
    entries = tokens * (1 + alternatives) + len(request.prompt_ids) * (1 + prompt_alternatives)
    masks = tokens * max(0, params.get("top_k") or 0)  # ids that vLLM may list as kept
    return _REPLY_BYTES + _ENTRY_BYTES * entries + BYTES_PER_ID * masks


def _overflow_error(
    error: EngineStatusError, max_tokens: int, where: str
) -> PromptTooLongError | SamplingParameterError | None:
    """Translate a refusal of a request that is too long. None for other refusals."""
    texts = (*_TOO_LONG, _NO_ROOM) if error.status == 400 else ()
    match = next((match for text in texts if (match := text.search(error.body))), None)
    if match is None:
        return None
    length, limit = int(match["length"]), int(match["limit"])
    if match.re is not _NO_ROOM:
        # A prompt that fills the context leaves no room for a single token.
        return PromptTooLongError(length, limit - 1, where=where)
    if max_tokens < limit:
        remedy = f"Shorten it, or ask for less than {max_tokens} tokens"
        return PromptTooLongError(length, limit - max_tokens, where=where, remedy=remedy)
    return SamplingParameterError(
        "is more than the model's context holds",
        where="sampling_params['max_tokens']",
        expected=f"at most {limit - length}",
        got=str(max_tokens),
    )


async def _send_abort(transport: Transport, path: str, body: Any) -> None:
    """Abort on the server. Errors are ignored, so that the original error is raised."""
    call = transport.request("POST", path, json=body, timeout=_ABORT_SECONDS, idempotent=True)
    sending = asyncio.ensure_future(call)
    _aborts.add(sending)
    sending.add_done_callback(_forget_abort)
    await asyncio.wait({sending}, timeout=_ABORT_GRACE)


_aborts: set[asyncio.Future[Any]] = set()
"""Aborts in flight: the event loop keeps no task alive by itself."""


def _forget_abort(sending: asyncio.Future[Any]) -> None:
    _aborts.discard(sending)
    if not sending.cancelled():
        sending.exception()  # so that asyncio does not report it


_texts: LRUCache[Hashable, JSONText] = LRUCache(256 << 20, size_of=attrgetter("size"))
"""Images as JSON text, by identity and form, that each request repeats."""
_sent_texts: LRUCache[Hashable, JSONText] = LRUCache(64 << 20, size_of=attrgetter("size"))
"""Images as JSON text that a server is sent once. Rollouts of a group send them to several servers."""


def encoded_once(
    item: MediaItem, form: tuple[Hashable, ...], encode: Callable[[], bytes], *, is_sent_once: bool = False
) -> JSONText:
    """Return an item as JSON text. Each item and form is encoded once while it is remembered.

    All requests, servers and event loops share the last 256 MiB, or 64 MiB of texts that a server is sent
    once.
    """
    texts = _sent_texts if is_sent_once else _texts
    return texts.get_or_compute((item.identity, type(item), *form), lambda: JSONText(encode()))


ImageForm: TypeAlias = Literal["packed", "bitmap", "original"]
_ENCODERS: Final[dict[ImageForm, Callable[[MediaItem], EncodedImage]]] = {
    "packed": encoded_image,
    "bitmap": bitmap,
    "original": original,
}


def data_url(item: MediaItem, form: ImageForm = "packed") -> JSONText:
    """Encode one image as a `data:` URL. A server would open any other text as a file of its own.

    Encoding takes tens of milliseconds. Other forms than `packed` are for servers that are sent it once.
    """
    encode = _ENCODERS[form]
    return encoded_once(item, (form,), lambda: encode(item).json_url, is_sent_once=form != "packed")


def check_size(ids: int, images: Sequence[JSONText], max_bytes: int, *, where: str, setting: str) -> None:
    """Refuse a body of `ids` token ids that the server's frontend would refuse, or break the connection over.

    `where` is the route, and `setting` names the bound in errors.
    """
    size = ids * BYTES_PER_ID + sum(image.size for image in images)
    if size > max_bytes:
        raise EngineUnsupportedError(
            "the request is larger than the server's frontend takes",
            where=where,
            expected=f"at most {max_bytes:,} bytes",
            got=f"about {size:,}",
            remedy=f"Send fewer or smaller images, or raise the limit at the frontend and in {setting}",
        )
