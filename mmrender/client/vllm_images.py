"""Images and audio for one vLLM server: the handshake about their form, and the requests that bring them.

The server must make of an image exactly the tensors that we make. Since 0.28 vLLM normalises pixels on the
device by default and takes raw levels on the wire, for some model families since 0.32. Normalised values are
then normalised again, silently. So before the first image the server renders one.
"""

import asyncio
import io
import itertools
import logging
import wave
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import msgspec
import numpy.typing as npt
from PIL import Image

from mmcodecs.errors import CodecError
from mmrender.client.exchange import BYTES_PER_ID, check_size, warn_once
from mmrender.client.reply import FailedInEngineError, decode_as
from mmrender.client.server_facts import Process, facts_of
from mmrender.client.transport import JSONText, Transport
from mmrender.client.vllm_fields import (
    PixelDtype,
    WireForm,
    encode_item,
    layout_for,
)
from mmrender.client.vllm_render import (
    RENDER_PATH,
    compare_item,
    dtype_of,
    kind_of,
    known_dtype,
    mismatch,
    render_item,
)
from mmrender.errors import (
    EngineError,
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
)
from mmrender.media.encoded import EncodedImage, encoded_image, is_encodable
from mmrender.media.item import tensor_specs
from mmrender.media.processors.patches import PatchItem, time_steps
from mmrender.media.vllm_items import decode_mm_kwargs_item
from mmrender.sidecar import MediaItem, MediaSpan, PlaceholderRange

_log = logging.getLogger("mmrender.client")

GENERATE_PATH: Final = "/inference/v1/generate"
INFO_PATH: Final = "/server_info?config_format=json"
SIZE_SETTING: Final = "VLLMBackend(max_body_bytes=...)"


async def wire_forms(
    spans: Sequence[MediaSpan],
    ids: npt.NDArray[Any],
    model: str,
    pixels: PixelDtype | Literal["ask"],
    process: Process,
) -> dict[str, WireForm]:
    """Return by identity how a vLLM server takes items, asked once for each processor by a handshake.

    The server renders one image, and the dtypes and fields of its tensors are those that it takes. If the
    item can be had as an encoded image, the server's tensors must equal ours. Named `pixels` are not asked
    for.
    """
    forms: dict[str, WireForm] = {}
    by_kind: dict[Hashable, WireForm] = {}
    # The server is asked to render the smallest image of a kind.
    for span in sorted(spans, key=lambda span: span.range.length):
        item = span.item
        settings: tuple[Hashable, ...] = ()
        if isinstance(item, PatchItem):
            settings = (item.layout, item.arithmetic, bool(item.times))
        # Items share their settings, whose own hashes take longer than those of their addresses.
        kind = (type(item), item.modality, *map(id, settings))
        if kind not in by_kind:
            key = ("form", pixels, model, type(item), item.modality, *settings)
            tokens = tuple(ids[span.start : span.stop].tolist())
            ask = partial(_ask_form, item, tokens, model, process.transport, pixels)
            by_kind[kind] = await process.ask_once(key, ask)
        forms[item.identity] = by_kind[kind]
    return forms


async def _ask_form(
    item: MediaItem,
    tokens: tuple[int, ...],
    model: str,
    transport: Transport,
    pixels: PixelDtype | Literal["ask"],
) -> WireForm:
    """Let the server render an item, and compare its placeholder tokens and tensors with ours."""
    modality = kind_of(item)
    if pixels != "ask" and modality == "image":
        return WireForm(layout_for(tensor_specs(item), modality=item.modality), pixels)
    where = f"{transport.base_url}{RENDER_PATH}"
    medium, has_its_values = await asyncio.to_thread(_probe, item)
    try:
        served = await render_item(transport, model, medium.data_url, modality)
        theirs = decode_mm_kwargs_item(served.item)
    except EngineUnsupportedError as error:
        if modality == "image":
            error.remedy = (
                f"{error.remedy}, or name the pixels that it takes: VLLMBackend(pixels='uint8'), or "
                "'float32' if it runs with --no-mm-device-do-normalize"
            )
        raise
    except CodecError as error:
        raise EngineReplyError("the server's item is malformed", where=where, got=str(error)) from error
    if isinstance(item, PatchItem) and not is_encodable(item):
        # A server processes the videos that it decodes: only the dtype can be learnt.
        pixel_values = theirs.get("pixel_values")
        dtype = known_dtype(set() if pixel_values is None else {dtype_of(pixel_values.data)}, where)
        return WireForm(layout_for(tensor_specs(item), modality=item.modality), dtype)
    shown = served.tokens
    if modality == "audio":  # the server may write further tokens around a clip's
        shown = tuple(token for token in served.tokens if token == tokens[0])
    if shown != tokens:
        runs = [
            ", ".join(f"{len(list(run))} of the token {token}" for token, run in itertools.groupby(sequence))
            for sequence in (shown, tokens)
        ]
        raise mismatch("placeholder tokens", where, *runs, modality=modality)
    form = await asyncio.to_thread(compare_item, item, theirs, has_its_values, where)
    if form.pixels == "uint8":
        warn_once(
            "%s: the server normalises pixels by a mean and deviation that it does not show. They must be "
            "equal to ours, which mmrender cannot check: compare preprocessor_config.json",
            transport.base_url,
        )
    return form


def _probe(item: MediaItem) -> tuple[EncodedImage, bool]:
    """Return a medium that the server widens as the item, and whether it has the item's own values.

    An item of audio keeps features and no samples, so the clip is silence of its length.
    """
    if isinstance(item, PatchItem) and is_encodable(item):
        return encoded_image(item), True
    buffer = io.BytesIO()
    if kind_of(item) == "audio":
        rate, count = item.size
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(1)
            file.setframerate(rate)
            file.writeframes(b"\x80" * count)
        return EncodedImage(buffer.getvalue(), "audio/wav"), False
    height, width = item.size
    Image.new("RGB", (width, height), (127, 127, 127)).save(buffer, format="PNG")
    return EncodedImage(buffer.getvalue(), "image/png"), False


class _Multimodal(msgspec.Struct):
    mm_processor_cache_gb: float | None = None
    mm_processor_cache_type: str | None = None


class _ModelConfig(msgspec.Struct):
    multimodal_config: _Multimodal | None
    dtype: Any = None
    logprobs_mode: Any = None
    quantization: Any = None


class _Parallel(msgspec.Struct):
    api_processes: int = msgspec.field(name="_api_process_count")
    data_parallel_size: int


class _Config(msgspec.Struct):
    model_config: _ModelConfig
    parallel_config: _Parallel


class _Info(msgspec.Struct):
    vllm_config: _Config


async def require_safe_cache(process: Process, *, trusted: bool) -> None:
    """Require that a hash without data cannot kill a vLLM engine. Asked once.

    The hash is found in vLLM's processor cache if the cache is of the kind `lru`, in one API process and one
    data-parallel rank. With the cache off, of kind `shm`, or behind several API processes, the engine exits.
    `trusted`: the caller answers for a server that does not say.
    """
    transport = process.transport

    async def ask() -> str:
        try:
            reply = await transport.request("GET", INFO_PATH)
        except EngineStatusError as error:
            if error.status not in (403, 404, 405):
                raise
            return f"status {error.status}"
        config = decode_as(reply.body, _Info, where=f"{transport.base_url}{INFO_PATH}").vllm_config
        cache, parallel = config.model_config.multimodal_config or _Multimodal(), config.parallel_config
        facts_of(transport).note_sampler("vllm", config.model_config)
        dangers = {
            "its processor cache is off": not cache.mm_processor_cache_gb,
            f"its processor cache is of kind {cache.mm_processor_cache_type!r}": (
                cache.mm_processor_cache_type != "lru"
            ),
            f"it runs {parallel.api_processes} API processes": parallel.api_processes != 1,
            f"it runs {parallel.data_parallel_size} data-parallel ranks": parallel.data_parallel_size != 1,
        }
        return next((danger for danger, applies in dangers.items() if applies), "")

    answer: str = await process.ask_once("cache", ask)
    if answer.startswith("status"):
        if trusted:
            return
        raise EngineUnsupportedError(
            "the server does not say how it caches images, and a hash without data can be fatal",
            where=f"{transport.base_url}{INFO_PATH}",
            got=answer,
            remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, or answer for its cache (lru, one API "
            "process, one data-parallel rank): VLLMBackend(images='hash_only', trust_cache=True)",
        )
    if answer:
        raise EngineUnsupportedError(
            "the server's settings make a hash without data fatal to its engine",
            where=transport.base_url,
            got=answer,
            remedy="Send the data each time: VLLMBackend(images='features')",
        )


async def has_safe_cache(process: Process, *, trusted: bool) -> bool:
    """Whether it is proved that a hash without data cannot kill the engine.

    The server must say which process answers, and one process must answer at a time: of others it is not
    known which would get the hash. A server that cannot be asked proves nothing.
    """
    if not process.facts.name or facts_of(process.transport).alternates:
        return False
    try:
        await require_safe_cache(process, trusted=trusted)
    except (EngineUnsupportedError, EngineStatusError, EngineReplyError, EngineMismatchError) as error:
        _log.debug("images go with their data: %s", error)
        return False
    return True


# --- requests ---


def dense_spans(spans: Sequence[MediaSpan]) -> list[MediaSpan]:
    """Return media as ranges in which every token holds features. Those of audio are cut to their features.

    vLLM forgets which tokens of a range hold features. Families that write text between the time steps of a
    video attend within each step and number it like an image, so each step goes as an image of its own.

    Raises:
        EngineUnsupportedError: A range has other tokens among its features, or such a video is not kept as
            frames.
    """
    dense: list[MediaSpan] = []
    for video, track in itertools.pairwise(spans):
        if track.is_track_of(video):
            raise EngineUnsupportedError(
                "the engine loses which tokens of a video and of its sound track hold features",
                where=video.where,
                expected="videos without sound tracks",
                got=f"{track.range.num_embeds} tokens of sound between {video.range.num_embeds}",
                remedy="Open the renderer without use_audio_in_video, or use LocalBackend",
            )
    for span in spans:
        runs = span.range.embed_spans
        if runs is None:
            dense.append(span)
            continue
        if span.modality == "audio" and len(runs) == 1:  # text lies around the features
            start, stop = runs[0]
            dense.append(span._replace(range=PlaceholderRange(span.range.offset + start, stop - start)))
            continue
        steps = time_steps(span) if span.modality == "video" else None
        if steps is not None:
            dense += steps
        elif span.modality == "video":
            raise EngineUnsupportedError(
                "the engine loses which tokens of a video hold features",
                where=span.where,
                expected="one run of features for each time step of a PatchItem",
                got=f"{len(runs)} runs of {span.item!r}",
                remedy="Use another engine for videos of this model",
            )
        elif span.range.num_embeds == span.range.length:
            dense.append(span)
        else:
            raise EngineUnsupportedError(
                "the engine loses which tokens of this range hold features",
                where=span.where,
                expected="a range in which every token does",
                got=f"{span.range.num_embeds} of {span.range.length}",
                remedy="Send the encoded image, or use another engine for this model",
            )
    return dense


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The images of a prompt as tensors for one server. `prompts` are the requests that bring them.

    Attributes:
        process: The server process.
        ask: Asks a process how it takes the items.
        ids: The prompt, placeholders widened, of shape `(n,)`.
        spans: Items in prompt order.
        forms: How the process takes each item, by identity.
        by_hash: Whether data that the server has is left out.
        max_bytes: The longest body that the server's frontend takes. None for no bound.
    """

    process: Process
    ask: Callable[[Process], Awaitable[Mapping[str, WireForm]]]
    ids: npt.NDArray[Any]
    spans: Sequence[MediaSpan]
    forms: Mapping[str, WireForm]
    by_hash: bool
    max_bytes: int | None

    @property
    def names(self) -> list[str]:
        """Hash of each item."""
        return [self.forms[span.item.identity].mm_hash(span.item) for span in self.spans]

    async def requests(self, *, anew: bool = False) -> list[dict[str, Any]]:
        """Return `prompts` without the data that the server has, or `anew` with all data."""
        hashes, known = self.process.facts.hashes, None
        if self.by_hash and not (anew and self.max_bytes is None):  # requests that are too long stay split
            names = set(self.names)
            known = {name for name in names if hashes.get(name) and not anew}
            if known == names:  # a thread would take longer
                return self.prompts(known)
        return await asyncio.to_thread(self.prompts, known)

    def may_be_miss(self, error: EngineError) -> bool:
        """Whether a request failed because the server lacked an image.

        It is a status 500 like any failure, or on older servers an empty completion.
        """
        if isinstance(error, EngineStatusError):
            return error.status == 500
        return isinstance(error, FailedInEngineError)

    def note(self, *, left_out: bool, knew: bool) -> None:
        """Note an answered request, or one that the server lacked an image of."""
        for name in self.names if self.by_hash else ():
            self.process.facts.hashes.put(name, True) if knew else self.process.facts.hashes.pop(name)

    async def require_same_pixels(self) -> None:
        """Verify that the server was not replaced meanwhile by one that takes other pixels."""
        process = self.process
        now = await Process.answering(process.transport) if process.facts.name else process
        if now != process and self.forms != await self.ask(now):
            raise EngineMismatchError(
                "a server that takes other pixels replaced the server that was asked",
                where=process.transport.base_url,
                remedy="Ask again. It is not known which of the two answered",
            )

    def prompts(self, known: Collection[str] | None) -> list[dict[str, Any]]:
        """Return the members for tokens and images of one or more requests. The last has the whole prompt.

        If hashes are sent, images that one body cannot hold are split over several: beginnings of the prompt
        go first, each with as many further images as fit. So the server then has the images and, in its
        prefix cache, the work.

        Args:
            known: Hashes whose data the server has. None: no data is left out, and nothing is split.

        Raises:
            EngineUnsupportedError: A body is larger than the frontend takes.
        """
        prompts: list[dict[str, Any]] = []
        brought = before = set(known or ())
        room: int | None = None
        for index, (name, span) in enumerate(zip(self.names, self.spans, strict=True)):
            if known is None or self.max_bytes is None or name in brought:
                continue
            size = encode_item(span, self.forms[span.item.identity], is_sent_once=True).size
            if room is not None and size > room:
                prompts.append(self._prompt(index, before))
                before, room = brought, None
            if room is None:
                room = self.max_bytes - BYTES_PER_ID * len(self.ids)
            room -= size
            brought = brought | {name}
        return [*prompts, self._prompt(len(self.spans), None if known is None else before)]

    def _prompt(self, count: int, known: Collection[str] | None) -> dict[str, Any]:
        """Return the members of a request that shows the first `count` items."""
        ids = self.ids if count == len(self.spans) else self.ids[: self.spans[count - 1].stop]
        features = features_of(self.spans[:count], self.forms, known)
        if self.max_bytes is not None:
            check_size(
                len(self.ids), data_in(features), self.max_bytes, where=GENERATE_PATH, setting=SIZE_SETTING
            )
        return {"token_ids": ids.tolist(), **features}


def features_of(
    spans: Sequence[MediaSpan], forms: Mapping[str, WireForm], known: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the member `features` of a request.

    Args:
        spans: Items in prompt order.
        forms: How the server takes each item, by identity.
        known: Hashes whose data the server has. Their data is left out, and so are repeats within the
            request, which a server takes for hashes that it knows. None sends all data.
    """
    features: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    left_out = set(known or ())
    for span in spans:
        form = forms[span.item.identity]
        name = form.mm_hash(span.item)
        place = {"offset": span.range.offset, "length": span.range.length}
        is_left_out = name in left_out
        data = None if is_left_out else encode_item(span, form, is_sent_once=known is not None)
        for members, value in zip(features.values(), (name, place, data), strict=True):
            members.setdefault(span.item.modality, []).append(value)
        if known is not None:
            left_out.add(name)
    return {"features": features}


def leaves_out_data(prompt: Mapping[str, Any]) -> bool:
    """Whether a request names an item by its hash or uuid alone."""
    if "content_parts" in prompt:
        return any("url" not in part for part in prompt["content_parts"])
    return any(None in texts for texts in prompt["features"]["kwargs_data"].values())


def data_in(prompt: Mapping[str, Any]) -> list[JSONText]:
    """Return the encoded items of a request's `features`."""
    texts = [text for texts in prompt["features"]["kwargs_data"].values() for text in texts]
    return [text for text in texts if text is not None]
