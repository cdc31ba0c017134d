"""`VLLMRenderer`: prompts in chunks, their images processed by a vLLM server's render route.

Text chunks stay the caller's tokens. A server that only renders (`vllm launch render`) needs neither weights
nor an accelerator. Every distinct image is sent once, by itself, as vLLM's own cache takes an image's
processing to be independent of other images.
"""

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import blake3
import pybase64

from mmrender.caching import AsyncSingleFlight, LRUCache
from mmrender.client.resolve import as_transport
from mmrender.client.server_facts import model_cards
from mmrender.client.transport import Server
from mmrender.client.vllm_render import ServedItem, render_item
from mmrender.errors import (
    EngineError,
    EngineMismatchError,
    EngineUnsupportedError,
    InputError,
    MediaDecodeError,
    located,
)
from mmrender.media.policy import MediaPolicy
from mmrender.media.sources import format_name, read_source, sniff
from mmrender.sidecar import PlaceholderRange
from mmrender.workers import gather_all

ImageFormat: TypeAlias = Literal["png", "jpeg"]


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """Tokens of the prompt."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An encoded image.

    `expected_tokens` is the number of placeholder tokens that the caller counts on. None takes any number.
    """

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ImageAssetPointerChunk:
    """An encoded image at a URL or path, read under a media policy. See `ImageChunk`."""

    location: str
    format: ImageFormat
    expected_tokens: int | None = None


Chunk: TypeAlias = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A prompt in chunks, in order."""

    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class RenderedModelInput:
    """A prompt as the model takes it. The last three are by modality, and None without images.

    Attributes:
        prompt_ids: The text chunks' tokens, with the placeholder tokens of each image in its place.
        multi_modal_kwargs: vLLM's base64 item of each image, in prompt order.
        multi_modal_placeholders: The range of each image in `prompt_ids`.
        mm_hashes: The server's hash of each image.
    """

    prompt_ids: list[int]
    multi_modal_kwargs: Mapping[str, list[str]] | None = None
    multi_modal_placeholders: Mapping[str, list[PlaceholderRange]] | None = None
    mm_hashes: Mapping[str, list[str]] | None = None


class VLLMRenderer:
    """Renders prompts in chunks through a vLLM server. Usable from several event loops.

    Args:
        client: The server: a base URL, a `Transport`, or an object with `base_url` and `api_key`.
        model_name: The name under which the prompt will be sampled. A LoRA adapter is rendered with its base
            model, which the server's model list names.
        base_model: Name for the render route, if it is known, which saves the look-up.
        max_concurrency: Bounds the render requests in flight, of one event loop.
        cache_bytes: Bound on the rendered images kept. The least recently used are dropped first. 0 turns the
            cache off.
        media_policy: Bounds the locations of an `ImageAssetPointerChunk`.
    """

    def __init__(
        self,
        client: Server,
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
        self._cache: LRUCache[bytes, ServedItem] = LRUCache(cache_bytes, size_of=lambda image: image.nbytes)
        self._requests: AsyncSingleFlight[bytes, ServedItem] = AsyncSingleFlight()
        self._policy = media_policy or MediaPolicy()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def render(self, inputs: Sequence[ModelInput]) -> list[RenderedModelInput]:
        """Render prompts, in their order. Prompts of text alone ask nothing of the server.

        Raises:
            InputError: An input or chunk is malformed. Nothing is sent.
            MediaError: An image cannot be read, or is not of the format that its chunk names.
            EngineMismatchError: An image takes another number of tokens than its chunk expects.
            EngineError: The server could not be reached, refused, or gave an unusable answer.
        """
        for index, given in enumerate(inputs):
            _check_input(given, f"inputs[{index}]")
        places = [
            (f"inputs[{index}].chunks[{position}]", chunk)
            for index, given in enumerate(inputs)
            for position, chunk in enumerate(given.chunks)
            if not isinstance(chunk, EncodedTextChunk)
        ]
        if places and self._base_model is None:
            self._base_model = await self._find_base_model()
        images = iter(await gather_all([self._served(chunk, where) for where, chunk in places]))
        return [_spliced(given, images) for given in inputs]

    async def aclose(self) -> None:
        """Close the transport's connections of the running event loop."""
        await self._transport.aclose()

    async def _served(self, chunk: ImageChunk | ImageAssetPointerChunk, where: str) -> ServedItem:
        data = await asyncio.to_thread(_image_bytes, chunk, self._policy, where)
        key = blake3.blake3(data).digest()
        served = self._cache.get(key)
        if served is None:
            try:
                served = await self._requests.run(key, lambda: self._request(data, chunk.format))
            except EngineError as error:
                # The same error may reach several chunks, each with its own place.
                placed = copy.copy(error)
                placed.where = f"{where}, {error.where}"
                raise placed from error
            self._cache.put(key, served)
        if chunk.expected_tokens is not None and len(served.tokens) != chunk.expected_tokens:
            raise EngineMismatchError(
                "the image has another number of tokens at the server than expected",
                where=f"{where}.expected_tokens",
                expected=str(chunk.expected_tokens),
                got=str(len(served.tokens)),
                remedy="Count tokens with the processor settings that the server runs with",
            )
        return served

    async def _request(self, data: bytes, image_format: str) -> ServedItem:
        loop = asyncio.get_running_loop()
        slots = self._slots.get(loop)
        if slots is None:
            slots = self._slots[loop] = asyncio.Semaphore(self._max_concurrency)
        async with slots:
            url = f"data:image/{image_format};base64,{pybase64.b64encode_as_string(data)}"
            return await render_item(self._transport, self._base_model or self._model_name, url)

    async def _find_base_model(self) -> str:
        """Return the name of the model on the render route, which refuses adapters."""
        cards = await model_cards(self._transport)
        card = cards.get(self._model_name)
        if card is None:
            raise EngineUnsupportedError(
                "the server does not serve this model",
                where="model_name",
                expected=" or ".join(map(repr, cards)) or "any model",
                got=repr(self._model_name),
            )
        if card.parent is None or card.parent in cards:
            return card.parent or self._model_name
        return next((known.id for known in cards.values() if known.parent is None), card.parent)


def _check_input(value: object, where: str) -> None:
    def wrong(problem: str, path: str, expected: str, got: object) -> InputError:
        return InputError(problem, where=where + path, expected=expected, got=str(got)[:80])

    if not isinstance(value, ModelInput):
        raise wrong("not a model input", "", "ModelInput", type(value).__name__)
    if not value.chunks:
        raise wrong("the model input is empty", ".chunks", "at least one chunk", "none")
    for index, chunk in enumerate[object](value.chunks):
        path = f".chunks[{index}]"
        if isinstance(chunk, EncodedTextChunk):
            for position, token in enumerate(chunk.tokens):
                if type(token) is not int or token < 0:
                    expected = "an integer of 0 or more"
                    raise wrong("not a token id", f"{path}.tokens[{position}]", expected, repr(token))
        elif not isinstance(chunk, ImageChunk | ImageAssetPointerChunk):
            kinds = "EncodedTextChunk, ImageChunk or ImageAssetPointerChunk"
            raise wrong("not a chunk", path, kinds, type(chunk).__name__)
        elif chunk.format not in get_args(ImageFormat):
            raise wrong("unknown image format", f"{path}.format", "'png' or 'jpeg'", repr(chunk.format))


def _image_bytes(chunk: ImageChunk | ImageAssetPointerChunk, policy: MediaPolicy, where: str) -> bytes:
    """Return the encoded image of a chunk, which must be of the format that the chunk names."""
    source = chunk.data if isinstance(chunk, ImageChunk) else chunk.location
    with located(where):
        data = read_source(source, policy)
    if sniff(data) != chunk.format.upper():
        raise MediaDecodeError(
            "the image is not of the format that its chunk names",
            where=where,
            expected=chunk.format.upper(),
            got=sniff(data) or format_name(data),
        )
    return data


def _spliced(given: ModelInput, images: Iterator[ServedItem]) -> RenderedModelInput:
    """Concatenate the chunks' tokens, each image's taken from `images`, and note its range."""
    ids: list[int] = []
    places: list[PlaceholderRange] = []
    shown: list[ServedItem] = []
    for chunk in given.chunks:
        if isinstance(chunk, EncodedTextChunk):
            ids.extend(chunk.tokens)
            continue
        shown.append(next(images))
        places.append(PlaceholderRange(len(ids), len(shown[-1].tokens)))
        ids.extend(shown[-1].tokens)
    if not shown:
        return RenderedModelInput(ids)
    return RenderedModelInput(
        ids,
        multi_modal_kwargs={"image": [image.item for image in shown]},
        multi_modal_placeholders={"image": places},
        mm_hashes={"image": [image.mm_hash for image in shown]},
    )
