"""`VLLMBackend`: tokens and images to a vLLM server, by its `/inference/v1/generate`.

Images go in one of three ways:

- `features`: tensors of our own encoding, after a handshake that shows which pixels the server takes;
- `hash_only`: the same, without the data of images that the server has seen;
- `content_parts`: encoded images, which the server processes; the prompt that it makes of them is held
  against ours.

What kills the engine or passes silently wrong is refused before it is sent. Verified with vLLM 0.32.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from mmrender.client.backend import EngineRequest, EngineResponse
from mmrender.client.checks import Placed, check_prompt, check_sidecar
from mmrender.client.collapse import collapse
from mmrender.client.item_checks import check_data_url
from mmrender.client.transport import Transport
from mmrender.client.vllm_cache import cache_refusal
from mmrender.client.vllm_call import GenerateCall
from mmrender.client.vllm_errors import overflow_of
from mmrender.client.vllm_features import PIXEL_DTYPES, PixelDtype, WireForm, features_of, layout_for
from mmrender.client.vllm_handshake import handshake_key, shake_hands
from mmrender.client.vllm_reply import FailedInEngineError, check_returned_prompt
from mmrender.client.vllm_state import forget, state_of
from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
)
from mmrender.media.item import encoded_image, tensor_specs

ImageMode: TypeAlias = Literal["features", "hash_only", "content_parts"]


@dataclass(frozen=True, slots=True)
class VLLMBackend:
    """vLLM's wire. Frozen and picklable; what it learns about a server is kept with the transport.

    Attributes:
        images: How images go; see the module.
        pixels: What pixels the server takes: `"ask"` it by a handshake, or say so without one. `"uint8"` are
            levels that the server normalises, the others normalised values.
        trust_cache: Leave out images of `hash_only` also where the server does not say how it caches them. A
            wrong answer kills the engine.
        abort_on_cancel: Tell the server to stop where a call is cancelled or times out. Closing the
            connection stops it too, unless something stands between.

    Raises:
        InputError: A setting is not one of those known.
    """

    images: ImageMode = "features"
    pixels: Literal["ask"] | PixelDtype = "ask"
    trust_cache: bool = False
    abort_on_cancel: bool = True

    def __post_init__(self) -> None:
        for name, known in (("images", get_args(ImageMode)), ("pixels", ("ask", *PIXEL_DTYPES))):
            if getattr(self, name) not in known:
                raise InputError(
                    "a setting of the backend is not one of those known",
                    where=f"VLLMBackend.{name}",
                    expected=", ".join(map(repr, known)),
                    got=repr(getattr(self, name)),
                )

    @property
    def name(self) -> str:
        """`vllm`."""
        return "vllm"

    async def generate(self, request: EngineRequest, transport: Transport) -> EngineResponse:
        """Sample one completion.

        Raises:
            InputError: The prompt is empty or holds an id outside the vocabulary.
            PlaceholderError: Tokens, ranges and items do not fit together. Nothing was sent.
            SamplingParameterError: vLLM has no such parameter, or not of that value. Nothing was sent.
            MediaError: An item cannot be sent as an encoded image.
            PromptTooLongError: The server says so.
            EngineUnsupportedError: The server or the mode of images lacks what is needed.
            EngineMismatchError: The server takes other pixels, or made another prompt of the images.
            EngineError: The server could not be reached, refused, or gave an answer that cannot be used.
        """
        by_parts = self.images == "content_parts"
        ids = check_prompt(request.prompt_ids, request.vocab_size)
        placed = check_sidecar(
            ids, request.multi_modal_data, token_ids=request.media_token_ids, takes_sparse=by_parts
        )
        for entry in placed:
            if entry.modality != "image":
                raise EngineUnsupportedError(
                    "only images can be sent to this engine", where=entry.where, got=entry.modality
                )
        call = GenerateCall(request, transport, ids, placed, self.abort_on_cancel)
        try:
            if not placed:
                return call.read(await call.post({}))
            return await (_by_parts(call) if by_parts else self._by_features(call))
        except EngineConnectionError:
            forget(transport)  # it may come back with other flags
            raise

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Ask `/v1/models`: the context less one token, since a prompt that fills it is refused.

        Raises:
            EngineReplyError: The answer is not to be understood.
            EngineError: The server could not be asked.
        """
        reply = await transport.request("GET", "/v1/models")
        try:
            cards = {card["id"]: card for card in msgspec.json.decode(reply.body)["data"]}
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise EngineReplyError(
                "the server's list of models is not to be understood",
                where=f"{transport.base_url}/v1/models",
                got=f"{type(error).__name__}: {error}",
            ) from error
        card = cards.get(model, {})
        # An adapter's own entry says nothing; its base model's does.
        length = card.get("max_model_len") or cards.get(card.get("parent"), {}).get("max_model_len")
        return length - 1 if isinstance(length, int) and length > 1 else None

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether the server refused a prompt as too long, by any of its texts."""
        return isinstance(exc, PromptTooLongError) or overflow_of(exc) is not None

    async def _by_features(self, call: GenerateCall) -> EngineResponse:
        """Send tensors, and those that were wrongly left out once more."""
        forms = await self._forms(call)
        state = state_of(call.transport)
        hashes = [forms[entry.item.identity].mm_hash(entry.item) for entry in call.placed]
        sparing = self.images == "hash_only"
        if sparing:
            await self._require_safe_cache(call.transport)
        left_out = state.seen(hashes) if sparing else set()
        try:
            response = await _with_features(call, forms, left_out, once=sparing)
        except (EngineStatusError, FailedInEngineError) as error:
            spared = left_out or (sparing and len(set(hashes)) < len(hashes))
            if not spared or not _may_be_a_miss(error):
                raise
            state.unsee(hashes)
            response = await _with_features(call, forms, (), once=False)
        state.remember(hashes)
        return response

    async def _forms(self, call: GenerateCall) -> dict[str, WireForm]:
        """How the server takes each item, by identity."""
        state = state_of(call.transport)
        forms: dict[str, WireForm] = {}
        # The smallest image of a kind is the one that the server is asked to render.
        for entry in sorted(call.placed, key=lambda entry: entry.range.length):
            identity = entry.item.identity
            if identity in forms:
                continue
            if self.pixels != "ask":
                forms[identity] = WireForm(layout_for(tensor_specs(entry.item), entry.modality), self.pixels)
                continue

            async def ask(entry: Placed = entry) -> WireForm:
                return await shake_hands(entry, call.ids, call.request.model, call.transport)

            forms[identity] = await state.ask_once(handshake_key(entry.item, call.request.model), ask)
        return forms

    async def _require_safe_cache(self, transport: Transport) -> None:
        async def ask() -> str | None:
            try:
                return await cache_refusal(transport)
            except EngineUnsupportedError:
                if self.trust_cache:
                    return None
                raise

        refusal = await state_of(transport).ask_once(("cache", self.trust_cache), ask)
        if refusal is not None:
            raise EngineUnsupportedError(
                "the server's settings make a hash without data fatal to its engine",
                where=transport.base_url,
                got=refusal,
                remedy="Send the data each time: VLLMBackend(images='features')",
            )


async def _with_features(
    call: GenerateCall, forms: Mapping[str, WireForm], left_out: Collection[str], *, once: bool
) -> EngineResponse:
    features = await asyncio.to_thread(features_of, call.placed, forms, left_out, repeats_left_out=once)
    return call.read(await call.post({"features": features}))


def _may_be_a_miss(error: EngineStatusError | FailedInEngineError) -> bool:
    """Whether a request may have failed for a hash whose data the server lacks; it has no text of its own."""
    return isinstance(error, FailedInEngineError) or error.status == 500


async def _by_parts(call: GenerateCall) -> EngineResponse:
    """Send encoded images, and hold the prompt that the server makes of them against ours."""
    request, widened = call.request, call.ids.tolist()
    written = request.collapsed_ids
    images = {
        "token_ids": list(collapse(widened, request.multi_modal_data) if written is None else written),
        "content_parts": await asyncio.to_thread(_content_parts, call.placed),
        "return_token_ids": True,
    }
    reply = await call.post(images)
    check_returned_prompt(reply, request, widened, where=call.where)
    return call.read(reply)


def _content_parts(placed: Sequence[Placed]) -> list[dict[str, Any]]:
    urls = ((entry, encoded_image(entry.item).data_url) for entry in placed)
    return [{"type": "image_url", "url": check_data_url(url, where=entry.where)} for entry, url in urls]
