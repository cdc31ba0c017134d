"""`VLLMRenderer`: prompts in chunks, their images processed by a vLLM server's render route.

A server that only renders (`vllm launch render`) needs neither weights nor an accelerator. Every distinct
image is sent once, by itself, as vLLM's own cache takes an image's processing not to depend on its company.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import blake3
import msgspec
import pybase64

from mmrender.client.server_facts import RENDER_PATH
from mmrender.client.transport import as_transport
from mmrender.engines.together import together
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineStatusError, EngineUnsupportedError
from mmrender.media.policy import MediaPolicy
from mmrender.remote.chunks import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    RenderedModelInput,
    check_input,
    image_bytes,
)
from mmrender.remote.served import MODALITY, ServedImage, read_served_image
from mmrender.spans import PlaceholderRange


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _LoopState:
    """What belongs to one event loop: the bound on requests, and the images that are on their way."""

    def __init__(self, max_concurrency: int) -> None:
        self.slots = asyncio.Semaphore(max_concurrency)
        self.pending: dict[bytes, asyncio.Future[ServedImage]] = {}


class VLLMRenderer:
    """Renders prompts in chunks through a vLLM server. Usable from several event loops, one at a time each.

    Args:
        client: The server: a base URL, a `Transport`, or an object with `base_url` and `api_key`.
        model_name: The name under which the prompt will be sampled. A LoRA adapter is rendered with its base
            model, which the server's model list names.
        base_model: Name for the render route, where it is known; spares the look-up.
        max_concurrency: Most render requests in flight at once, of one event loop.
        cache_bytes: Bound on the rendered images kept; the least recently used go first. 0 keeps none.
        media_policy: What an `ImageAssetPointerChunk` may name.
    """

    def __init__(
        self,
        client: Any,
        model_name: str,
        *,
        base_model: str | None = None,
        max_concurrency: int = 8,
        cache_bytes: int = 512 << 20,
        media_policy: MediaPolicy | None = None,
    ) -> None:
        self._transport = as_transport(client)
        self._model_name = model_name
        self._base_model = base_model
        self._max_concurrency = max_concurrency
        self._cache = _ImageCache(cache_bytes)
        self._policy = media_policy or MediaPolicy()
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    async def render(self, inputs: Sequence[ModelInput]) -> list[RenderedModelInput]:
        """Render prompts, in their order. Prompts of text alone ask nothing of the server.

        Raises:
            InputError: An input or chunk is malformed; nothing is sent.
            MediaError: An image cannot be read, or is not of the format that its chunk names.
            EngineMismatchError: An image takes another number of tokens than its chunk expects.
            EngineError: The server could not be reached, refused, or gave an answer that cannot be used.
        """
        checked = [check_input(given, f"inputs[{index}]") for index, given in enumerate(inputs)]
        return await together(
            [self._render(given, f"inputs[{index}]") for index, given in enumerate(checked)]
        )

    async def aclose(self) -> None:
        """Close the transport's connections of the running event loop."""
        await self._transport.aclose()

    async def _render(self, given: ModelInput, where: str) -> RenderedModelInput:
        chunks = {
            index: chunk
            for index, chunk in enumerate(given.chunks)
            if not isinstance(chunk, EncodedTextChunk)
        }
        served = await together(
            [self._served(chunk, f"{where}.chunks[{index}]") for index, chunk in chunks.items()]
        )
        return _spliced(given, dict(zip(chunks, served, strict=True)))

    async def _served(self, chunk: ImageChunk | ImageAssetPointerChunk, where: str) -> ServedImage:
        data = await asyncio.to_thread(image_bytes, chunk, self._policy, where)
        served = await self._image(data, chunk.format, where)
        if chunk.expected_tokens is not None and len(served.tokens) != chunk.expected_tokens:
            raise EngineMismatchError(
                "the server gives the image another number of tokens than expected",
                where=f"{where}.expected_tokens",
                expected=str(chunk.expected_tokens),
                got=str(len(served.tokens)),
                remedy="Count tokens with the processor settings that the server runs with",
            )
        return served

    async def _image(self, data: bytes, image_format: str, where: str) -> ServedImage:
        """The image from the cache, from a request that is on its way, or from a request of its own."""
        key = blake3.blake3(data).digest()
        state = self._state()
        while True:
            known = self._cache.get(key)
            if known is not None:
                return known
            pending = state.pending.get(key)
            if pending is None:
                break
            await asyncio.wait({pending})  # not awaited itself: its failure is another caller's
            if not pending.cancelled() and pending.exception() is None:
                return pending.result()
        future = state.pending[key] = asyncio.get_running_loop().create_future()
        try:
            served = await self._request(state, data, image_format, where)
        except BaseException:
            future.cancel()  # whoever waits asks for itself
            raise
        else:
            self._cache.put(key, served)
            future.set_result(served)
            return served
        finally:
            del state.pending[key]

    async def _request(self, state: _LoopState, data: bytes, image_format: str, where: str) -> ServedImage:
        async with state.slots:
            model = await self._render_model()
            url = f"data:image/{image_format};base64,{pybase64.b64encode(data).decode('ascii')}"
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"model": model, "messages": [{"role": "user", "content": [part]}]}
            try:
                # The route computes and stores nothing that a second call would change.
                reply = await self._transport.request("POST", RENDER_PATH, json=body, idempotent=True)
            except EngineStatusError as error:
                if error.status == 403 or _lacks_route(error):
                    raise _closed(error, model, where) from error
                error.where = f"{where}, {error.where}"
                raise
        return read_served_image(reply.body, where)

    async def _render_model(self) -> str:
        """Name of the model on the render route, which knows no adapters; looked up once it succeeds."""
        if self._base_model is None:
            reply = await self._transport.request("GET", "/v1/models")
            self._base_model = _base_of(self._model_name, reply.body)
        return self._base_model

    def _state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            state = self._loops[loop] = _LoopState(self._max_concurrency)
        return state


class _ImageCache:
    """Rendered images by digest, bounded by the bytes they hold."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._images: OrderedDict[bytes, ServedImage] = OrderedDict()

    def get(self, key: bytes) -> ServedImage | None:
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: bytes, image: ServedImage) -> None:
        if image.nbytes > self._max_bytes or key in self._images:
            return
        self._images[key] = image
        self._nbytes += image.nbytes
        while self._nbytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self._nbytes -= dropped.nbytes


def _base_of(model_name: str, body: bytes | memoryview) -> str:
    """Name of the base model of `model_name`, itself where it is no adapter, from a model list."""
    try:
        cards = {card.id: card for card in msgspec.json.decode(body, type=_Cards).data}
    except msgspec.MsgspecError as error:
        raise EngineReplyError(
            "the model list has an unknown form", where="/v1/models", got=str(error)
        ) from error
    card = cards.get(model_name)
    if card is None:
        raise EngineUnsupportedError(
            "the server does not serve this model",
            where="model_name",
            expected=" or ".join(map(repr, cards)) or "any model",
            got=repr(model_name),
        )
    if card.parent is None:
        return model_name
    if card.parent in cards:
        return card.parent
    return next((known.id for known in cards.values() if known.parent is None), card.parent)


def _lacks_route(error: EngineStatusError) -> bool:
    """Whether a 404 is that of a route, and not the server's word that it has no such model."""
    return error.status == 404 and "model" not in error.body


def _closed(error: EngineStatusError, model: str, where: str) -> EngineUnsupportedError:
    return EngineUnsupportedError(
        f"the server's render route is closed to {model!r}",
        where=where,
        expected=f"POST {RENDER_PATH} to be served",
        got=f"status {error.status}: {error.body[:200]}",
        remedy="Start vLLM with --enable-scale-out, or start `vllm launch render`",
    )


def _spliced(given: ModelInput, images: dict[int, ServedImage]) -> RenderedModelInput:
    """The chunks' tokens, one after another, with the place of each image."""
    ids: list[int] = []
    places: list[PlaceholderRange] = []
    for index, chunk in enumerate(given.chunks):
        if isinstance(chunk, EncodedTextChunk):
            ids.extend(chunk.tokens)
            continue
        places.append(PlaceholderRange(len(ids), len(images[index].tokens)))
        ids.extend(images[index].tokens)
    if not images:
        return RenderedModelInput(ids)
    in_order = [images[index] for index in sorted(images)]
    return RenderedModelInput(
        ids,
        multi_modal_kwargs={MODALITY: [image.item for image in in_order]},
        multi_modal_placeholders={MODALITY: places},
        mm_hashes={MODALITY: [image.mm_hash for image in in_order]},
    )
