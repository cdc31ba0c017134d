"""What is known of a server between calls: its prompt limit, the pixels it takes, the images it has seen.

Everything is asked once and kept beside the transport, for as long as that lives. A connection that breaks
may mean that the server restarts with other flags; `forget` drops everything then.

The handshake verifies that a vLLM server preprocesses an image exactly as we do. Since 0.28 vLLM normalises
pixels on the device by default and takes raw levels on the wire, for some model families since 0.32;
normalised values are then normalised again, silently. So before the first image the server renders one.
"""

import asyncio
import io
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Final, Literal, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcodecs.arrays import RawTensor
from mmcodecs.errors import CodecError
from mmcodecs.vllm import KwargsItem, decode_mm_kwargs_item
from mmrender.caching import AsyncSingleFlight, LRUCache
from mmrender.client.reply import decode_as, read_reply
from mmrender.client.transport import Transport
from mmrender.client.types import RendererBackend
from mmrender.client.vllm_features import PIXEL_DTYPES, PixelDtype, WireForm, item_tensors, layout_for
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
)
from mmrender.media.item import EncodedImage, PatchItem, encoded_image, tensor_specs
from mmrender.spans import MediaItem, MediaSpan

RENDER_PATH: Final = "/v1/chat/completions/render"
INFO_PATH: Final = "/server_info?config_format=json"
_log = logging.getLogger("mmrender.client")
_PAUSE: Final = 10.0
"""Seconds after a failed look-up of the prompt limit in which it is not repeated."""


class ServerFacts:
    """Answers of one server, and the hashes of images it was sent. Thread-safe."""

    def __init__(self) -> None:
        self._answers: LRUCache[Hashable, tuple[Any]] = LRUCache(4096)
        self._asking: AsyncSingleFlight[Hashable, Any] = AsyncSingleFlight()
        self._seen: LRUCache[str, bool] = LRUCache(1 << 16)
        self.limits_failed_at: dict[Hashable, float] = {}

    async def ask_once(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question; concurrent callers share one request, and errors are not kept."""
        if (known := self._answers.get(key)) is not None:
            return known[0]
        answer = await self._asking.run(key, ask)
        self._answers.put(key, (answer,))
        return answer

    def seen(self, hashes: Collection[str]) -> set[str]:
        """Return those of `hashes` whose data the server has been sent."""
        return {digest for digest in hashes if self._seen.get(digest)}

    def remember(self, hashes: Iterable[str]) -> None:
        """Note that the server has the data of these."""
        for digest in hashes:
            self._seen.put(digest, True)

    def unsee(self, hashes: Iterable[str]) -> None:
        """Note that the server no longer has the data of these."""
        for digest in hashes:
            self._seen.pop(digest)


_facts: WeakKeyDictionary[Transport, ServerFacts] = WeakKeyDictionary()
_lock = threading.Lock()


def facts_of(transport: Transport) -> ServerFacts:
    """Return what is known of the server of a transport."""
    with _lock:
        facts = _facts.get(transport)
        if facts is None:
            facts = _facts[transport] = ServerFacts()
    return facts


def forget(transport: Transport) -> None:
    """Forget what is known of a server."""
    with _lock:
        _facts.pop(transport, None)


async def prompt_limit(backend: RendererBackend, model: str, transport: Transport) -> int | None:
    """Return the most tokens that a prompt may have, asked once; None if unknown.

    A server that cannot say is asked again after a pause, and refuses long prompts itself meanwhile.
    """
    facts = facts_of(transport)
    key = ("limit", backend.name, model)
    if time.monotonic() < facts.limits_failed_at.get(key, 0.0) + _PAUSE:
        return None
    try:
        limit: int | None = await facts.ask_once(
            key, lambda: backend.resolve_max_prompt_len(model, transport)
        )
    except EngineConnectionError:
        raise
    except EngineError as error:
        facts.limits_failed_at[key] = time.monotonic()
        _log.warning("prompts are not checked for length before they are sent: %s", error)
        return None
    return limit


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`. `max_model_len` is vLLM's and SGLang's, `context_window` Dynamo's."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None
    context_window: int | None = None


class _ModelCards(msgspec.Struct):
    data: list[ModelCard]


async def model_cards(transport: Transport) -> dict[str, ModelCard]:
    """Return a server's models by name."""
    reply = await transport.request("GET", "/v1/models")
    cards = decode_as(reply.body, _ModelCards, where=f"{transport.base_url}/v1/models")
    return {card.id: card for card in cards.data}


# --- images: what a server makes of one ---


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]
    kwargs_data: dict[str, list[str | None]] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class ServedImage(msgspec.Struct, frozen=True):
    """One image as a server processed it: its placeholder tokens, base64 item and hash."""

    tokens: tuple[int, ...]
    item: str
    mm_hash: str

    @property
    def nbytes(self) -> int:
        """Bytes it keeps alive, approximately."""
        return len(self.item) + 8 * len(self.tokens)


async def render_image(
    transport: Transport, model: str, data_url: str, *, modality: str = "image"
) -> ServedImage:
    """Let a vLLM server process one image.

    Args:
        transport: The server.
        model: The model as the server knows it.
        data_url: The encoded image.
        modality: Under which the server lists it.
    """
    where = f"{transport.base_url}{RENDER_PATH}"
    part = {"type": "image_url", "image_url": {"url": data_url}}
    body = {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    try:
        reply = await transport.request("POST", RENDER_PATH, json=body, idempotent=True)
    except EngineStatusError as error:
        lacks_route = error.status == 404 and "model" not in error.body
        if error.status in (403, 405) or lacks_route:
            raise EngineUnsupportedError(
                "the server does not render images",
                where=where,
                got=f"status {error.status}: {error.body[:200]}",
                remedy="Start vLLM with --enable-scale-out, or start `vllm launch render`",
            ) from error
        raise
    rendered = await read_reply(reply.body, lambda body: decode_as(body, _Rendered, where=where))
    features = rendered.features or _Features({}, {})
    found: Mapping[str, Mapping[str, list[Any]]] = {
        "mm_hashes": features.mm_hashes,
        "mm_placeholders": features.mm_placeholders,
        "kwargs_data": features.kwargs_data or {},
    }
    for name, by_modality in found.items():
        counts = {kind: len(values) for kind, values in by_modality.items() if values}
        if counts != {modality: 1} or by_modality[modality][0] is None:
            raise EngineReplyError(
                "the server did not render one image",
                where=f"{where} features.{name}",
                expected=f"one of {modality!r}, with its data",
                got=str(counts),
            )
    place = features.mm_placeholders[modality][0]
    stop = place.offset + place.length
    if not 0 <= place.offset < stop <= len(rendered.token_ids):
        raise EngineReplyError(
            "the server rendered a placeholder outside the prompt",
            where=f"{where} features.mm_placeholders",
            expected=f"tokens within [0, {len(rendered.token_ids)})",
            got=f"[{place.offset}, {stop})",
        )
    return ServedImage(
        tuple(rendered.token_ids[place.offset : stop]),
        found["kwargs_data"][modality][0],
        features.mm_hashes[modality][0],
    )


# How far values may differ: back ends round differently, another mean or deviation is much further off.
_TOLERANCE: Final = {"uint8": 0.0, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


async def wire_form(
    span: MediaSpan,
    prompt_ids: npt.NDArray[Any],
    model: str,
    transport: Transport,
    *,
    pixels: PixelDtype | Literal["ask"] = "ask",
) -> WireForm:
    """Return how a vLLM server takes the items of one processor, found out once by a handshake.

    The server renders one image, and its tensors tell what it takes. Where the item can be had as an encoded
    image, the server's tensors must equal ours.

    Args:
        span: An item of the prompt and its place.
        prompt_ids: The prompt, of shape `(n,)`.
        model: The model as the server knows it.
        transport: The server.
        pixels: Which pixels the server takes, where that is known without a handshake.
    """
    item = span.item
    settings: Hashable = (item.layout, item.arithmetic) if isinstance(item, PatchItem) else None
    key = ("form", pixels, model, type(item), item.modality, settings)

    async def ask() -> WireForm:
        if pixels != "ask":
            return WireForm(layout_for(tensor_specs(item), item.modality), pixels)
        where = f"{transport.base_url}{RENDER_PATH}"
        image, has_its_pixels = await asyncio.to_thread(_probe_image, item)
        try:
            served = await render_image(transport, model, image.data_url, modality=item.modality)
            theirs = decode_mm_kwargs_item(served.item)
        except EngineUnsupportedError as error:
            error.remedy = (
                f"{error.remedy}; or say which pixels it takes: VLLMBackend(pixels='uint8'), or 'float32' "
                "for one that runs with --no-mm-device-do-normalize"
            )
            raise
        except CodecError as error:
            raise EngineReplyError("the server's item is malformed", where=where, got=str(error)) from error
        ours = tuple(prompt_ids[span.start : span.stop].tolist())
        if served.tokens != ours:
            raise _mismatch("placeholder tokens", where, _describe_run(served.tokens), _describe_run(ours))
        return await asyncio.to_thread(_compare_item, item, theirs, has_its_pixels, where)

    return cast(WireForm, await facts_of(transport).ask_once(key, ask))


def _probe_image(item: MediaItem) -> tuple[EncodedImage, bool]:
    """Return an image that the server widens as the item, and whether it has the item's own pixels."""
    if isinstance(item, PatchItem) and item.modality == "image":
        return encoded_image(item), True
    height, width = item.size
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (127, 127, 127)).save(buffer, format="PNG")
    return EncodedImage(buffer.getvalue(), "image/png"), False


def _compare_item(item: MediaItem, served: KwargsItem, has_its_pixels: bool, where: str) -> WireForm:
    """Compare the served tensors with ours, and return the form of both."""
    specs = tensor_specs(item)
    if served.keys() != specs.keys():
        raise _mismatch("fields", where, ", ".join(sorted(served)), ", ".join(sorted(specs)))
    data: dict[str, Any] = {name: elem.data for name, elem in served.items()}
    for name, tensor in data.items():
        if not hasattr(tensor, "dtype"):
            raise _mismatch(name, where, type(tensor).__name__, "a tensor")
    pixels = {_dtype_of(data[name]) for name, spec in specs.items() if spec.floating}
    if len(pixels) != 1 or not pixels <= set(PIXEL_DTYPES):
        raise _mismatch("pixel dtypes", where, ", ".join(sorted(pixels)), f"one of {', '.join(PIXEL_DTYPES)}")
    (dtype,) = (name for name in PIXEL_DTYPES if name in pixels)
    kinds = {name: type(elem.field).__name__.removesuffix("Field").lower() for name, elem in served.items()}
    layout = layout_for(specs, item.modality, kinds)
    for name, ours in item_tensors(item, dtype).items():
        theirs = data[name]
        shape = list(ours.shape[1:] if kinds[name] == "batched" else ours.shape)
        if list(theirs.shape) != shape or _dtype_of(theirs) != _dtype_of(ours):
            got = f"{_dtype_of(theirs)} {list(theirs.shape)}"
            raise _mismatch(name, where, got, f"{_dtype_of(ours)} {shape}")
        if has_its_pixels:
            apart = np.abs(_floats(theirs).reshape(-1) - _floats(ours).reshape(-1))
            worst, tolerance = float(apart.max(initial=0.0)), _TOLERANCE[dtype]
            if not worst <= tolerance:
                count = int((apart > tolerance).sum())
                here = f"{worst:.4g}, and {count} of {apart.size} values differ"
                raise _mismatch(f"values of {name}", where, f"no difference above {tolerance:g}", here)
    return WireForm(layout, dtype)


def _dtype_of(tensor: Any) -> str:
    return tensor.dtype if isinstance(tensor, RawTensor) else str(tensor.dtype.name)


def _floats(tensor: Any) -> npt.NDArray[np.float64]:
    if isinstance(tensor, RawTensor):  # of bfloat16, the upper half of a float32
        bits = tensor.bits.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return np.asarray(tensor).astype(np.float64)


def _describe_run(run: tuple[int, ...]) -> str:
    same = len(set(run)) == 1
    return f"{len(run)} of the token {run[0]}" if same else f"{len(run)} tokens {str(run[:8])[:-1]}, ...)"


def _mismatch(what: str, where: str, served: str, ours: str) -> EngineMismatchError:
    return EngineMismatchError(
        f"the server makes something else of an image than the renderer: {what}",
        where=where,
        expected=f"as the server has it: {served}",
        got=f"here: {ours}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


class _Multimodal(msgspec.Struct):
    mm_processor_cache_gb: float | None = None
    mm_processor_cache_type: str | None = None


class _ModelConfig(msgspec.Struct):
    multimodal_config: _Multimodal | None


class _Parallel(msgspec.Struct):
    api_processes: int = msgspec.field(name="_api_process_count")
    data_parallel_size: int


class _Config(msgspec.Struct):
    model_config: _ModelConfig
    parallel_config: _Parallel


class _Info(msgspec.Struct):
    vllm_config: _Config


async def require_safe_cache(transport: Transport, *, trusted: bool) -> None:
    """Require that a hash without data cannot kill a vLLM engine; asked once.

    Such a hash hits vLLM's processor cache where that is of the kind `lru`, in one API process and one
    data-parallel rank. With the cache off, of kind `shm`, or behind several API processes, the engine exits.

    Args:
        transport: The server.
        trusted: Whether the caller vouches for a server that does not say.
    """
    where = f"{transport.base_url}{INFO_PATH}"

    async def ask() -> str | None:
        try:
            reply = await transport.request("GET", INFO_PATH)
        except EngineStatusError as error:
            if error.status not in (403, 404, 405):
                raise
            if trusted:
                return None
            raise EngineUnsupportedError(
                "the server does not say how it caches images, and a hash without data can be fatal",
                where=where,
                got=f"status {error.status}",
                remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, or vouch for its cache (lru, one API "
                "process, one data-parallel rank): VLLMBackend(images='hash_only', trust_cache=True)",
            ) from error
        config = decode_as(reply.body, _Info, where=where).vllm_config
        cache, parallel = config.model_config.multimodal_config, config.parallel_config
        if cache is None or not cache.mm_processor_cache_gb:
            return "its processor cache is off"
        if cache.mm_processor_cache_type != "lru":
            return f"its processor cache is of kind {cache.mm_processor_cache_type!r}"
        if parallel.api_processes != 1:
            return f"it runs {parallel.api_processes} API processes"
        if parallel.data_parallel_size != 1:
            return f"it runs {parallel.data_parallel_size} data-parallel ranks"
        return None

    refusal = await facts_of(transport).ask_once(("cache", trusted), ask)
    if refusal is not None:
        raise EngineUnsupportedError(
            "the server's settings make a hash without data fatal to its engine",
            where=transport.base_url,
            got=refusal,
            remedy="Send the data each time: VLLMBackend(images='features')",
        )
