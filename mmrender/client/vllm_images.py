"""Media items as vLLM takes them: the `features` of a generate request, and the handshake before the first.

vLLM joins the tensors of many requests by the field layout of the model. Each item is encoded by itself, its
slices naming itself alone, so its bytes are the same in every request, and are encoded once.

The handshake verifies that a vLLM server preprocesses an image exactly as we do. Since 0.28 vLLM normalises
pixels on the device by default and takes raw levels on the wire, for some model families since 0.32;
normalised values are then normalised again, silently. So before the first image the server renders one.
"""

import asyncio
import io
import itertools
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcodecs.arrays import RawTensor
from mmcodecs.errors import CodecError
from mmrender.client.exchange import BYTES_PER_ID, encoded_once
from mmrender.client.reply import decode_as
from mmrender.client.server_facts import Process, facts_of
from mmrender.client.transport import JSONText, Transport
from mmrender.client.vllm_fields import LAYOUTS, Flat, Layout, Shared, collate_items
from mmrender.errors import (
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    PlaceholderError,
)
from mmrender.media.item import EncodedImage, PatchItem, ProcessedItem, encoded_image, tensor_specs
from mmrender.media.levels import Levels, expanded
from mmrender.media.vllm_items import KwargsItem, decode_mm_kwargs_item, encode_mm_kwargs_item_as_bytes
from mmrender.sidecar import MediaItem, MediaSpan, PlaceholderRange

_log = logging.getLogger("mmrender.client")

RENDER_PATH: Final = "/v1/chat/completions/render"
INFO_PATH: Final = "/server_info?config_format=json"

PixelDtype: TypeAlias = Literal["uint8", "float32", "bfloat16", "float16"]
"""Pixels on the wire: `uint8` levels that the server normalises itself, or normalised values."""

PIXEL_DTYPES: Final[tuple[PixelDtype, ...]] = get_args(PixelDtype)


@dataclass(frozen=True, slots=True)
class WireForm:
    """Form in which a server takes the items of one processor.

    Attributes:
        layout: How fields are joined.
        pixels: Dtype on the wire of what the reference processor gives as floating-point tensors.
    """

    layout: Layout
    pixels: PixelDtype

    def mm_hash(self, item: MediaItem) -> str:
        """Name of an item's data on the server, which keeps the data that first came under a name.

        It names the dtype too, so data of a wrong kind is never taken for that of the right one.
        """
        return f"{item.identity}-{self.pixels}"


def item_tensors(item: MediaItem, pixels: PixelDtype) -> dict[str, Any]:
    """Expand one image or video to the tensors that go on the wire."""
    if pixels != "uint8":
        tensors = item.tensors(pixels)
        if pixels != "bfloat16":
            return tensors
        # numpy has no bfloat16; its bit patterns are the only uint16 that items hold.
        return {
            name: RawTensor("bfloat16", array) if array.dtype == np.uint16 else array
            for name, array in tensors.items()
        }
    if isinstance(item, PatchItem):
        values, *others = item.specs("float32").items()
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in others}
        item.write(arrays, "float32")
        return {values[0]: item.levels(), **arrays}
    problem = "this item holds normalised ones only"
    if isinstance(item, ProcessedItem) and item.compact:
        levels = {name: part for name, part in item.parts.items() if isinstance(part, Levels)}
        padded = [name for name, part in levels.items() if part.values.size != math.prod(part.shape)]
        if not padded:
            return {
                name: part.values.reshape(part.shape)
                if isinstance(part, Levels)
                else expanded(part, "float32")
                for name, part in item.parts.items()
            }
        problem = f"the {padded[0]} of this item are padded with zeros that are not pixels"
    raise EngineUnsupportedError(
        f"the server normalises pixels itself, and {problem}",
        where=f"item {item.identity[:12]}",
        got=type(item).__name__,
        remedy="Start vLLM with --no-mm-device-do-normalize",
    )


def in_runs(spans: Sequence[MediaSpan]) -> list[MediaSpan]:
    """Return media with each time step of a video as an image of its own, where text lies between the steps.

    vLLM forgets which tokens of a range hold features. Families that write text between time steps attend
    within each of them and number each like an image, so a step gives the features of an image of one step.

    Raises:
        EngineUnsupportedError: Such a video is not kept as frames.
    """
    found: list[MediaSpan] = []
    for span in spans:
        runs, item = span.range.embed_spans, span.item
        if span.modality != "video" or runs is None:
            found.append(span)
            continue
        if not isinstance(item, PatchItem) or len(runs) != item.grid[0]:
            raise EngineUnsupportedError(
                "the engine loses which tokens of a video hold features",
                where=span.where,
                expected="one run of features for each time step of a PatchItem",
                got=f"{len(runs)} runs of {item!r}",
                remedy="Use another engine for videos of this model",
            )
        for (start, stop), image in zip(runs, item.steps(), strict=True):
            place = PlaceholderRange(span.start + start, stop - start)
            found.append(MediaSpan(span.modality, span.position, place, image))
    return found


def layout_for(
    names: Collection[str], kinds: Mapping[str, str] | None = None, *, modality: str = "image"
) -> Layout:
    """Return the field layout of an image or video by the names of its tensors.

    `kinds` is how the server says that each is joined: `batched`, `flat` or `shared`.
    """

    def fits(layout: Layout, name: str) -> bool:
        spec = layout.fields.get(name)
        if spec is None or spec.modality != modality:
            return False
        kind = type(spec).__name__.lower()
        sizes_known = not isinstance(spec, Flat | Shared) or spec.sizes in names
        return sizes_known and (kinds or {}).get(name, kind) == kind

    found = [layout for layout in LAYOUTS if all(fits(layout, name) for name in names)]
    if not found or any(layout.fields[n] != found[0].fields[n] for layout in found for n in names):
        raise EngineUnsupportedError(
            "it is not known how vLLM joins these tensors",
            where=f"{modality} items",
            expected="the fields of one of the known layouts",
            got=", ".join(sorted(names)),
            remedy="Send encoded images: VLLMBackend(images='content_parts')",
        )
    return found[0]


def encode_item(span: MediaSpan, form: WireForm) -> JSONText:
    """Encode one item as vLLM's base64 item, a JSON text."""

    def encode() -> bytes:
        if isinstance(span.item, PatchItem):
            patches = span.item.pixel_shape[0]
            expected = span.range.num_embeds * span.item.layout.merge**2
            if patches != expected:  # an engine dies of it
                raise PlaceholderError(
                    "the grid does not fit its placeholder range",
                    where=f"{span.where}.grid",
                    expected=f"{expected} patches for {span.range.num_embeds} tokens",
                    got=f"{patches} of {list(span.item.grid)}",
                )
        (item,) = collate_items(form.layout, [item_tensors(span.item, form.pixels)])
        return b'"%b"' % encode_mm_kwargs_item_as_bytes(item)

    return encoded_once(span.item, (form.layout.name, form.pixels), encode)


def features_of(
    spans: Sequence[MediaSpan], forms: Mapping[str, WireForm], known: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the member `features` of a request.

    Args:
        spans: Items in prompt order.
        forms: How the server takes each, by identity.
        known: Hashes whose data the server has; it is sent neither of these nor of repeats within the
            request, which a server takes for hashes that it knows. None sends all data.
    """
    features: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    left_out = set(known or ())
    for span in spans:
        form = forms[span.item.identity]
        digest = form.mm_hash(span.item)
        place = {"offset": span.range.offset, "length": span.range.length}
        data = None if digest in left_out else encode_item(span, form)
        for members, value in zip(features.values(), (digest, place, data), strict=True):
            members.setdefault(span.item.modality, []).append(value)
        if known is not None:
            left_out.add(digest)
    return {"features": features}


@dataclass(slots=True)
class ImageTensors:
    """The images of a request as tensors for one server.

    Attributes:
        process: The server process.
        ids: The prompt, placeholders widened.
        spans: Items in prompt order.
        forms: How the server takes each, by identity.
        known: Hashes whose data the server has; None where data is never left out.
    """

    process: Process
    ids: npt.NDArray[Any]
    spans: Sequence[MediaSpan]
    forms: Mapping[str, WireForm]
    known: set[str] | None = None

    @property
    def names(self) -> list[str]:
        """Hash of each item."""
        return [self.forms[span.item.identity].mm_hash(span.item) for span in self.spans]

    @property
    def leaves_out_data(self) -> bool:
        """Whether some hash may have gone without its data."""
        return self.known is not None and bool(self.known or len({*self.names}) < len(self.spans))

    def encode(self) -> list[JSONText]:
        """Encode the data that the server lacks."""
        spans, known = self.spans, self.known
        if known is not None:
            lacking = {name: span for name, span in zip(self.names, spans, strict=True) if name not in known}
            spans = list(lacking.values())
        return [encode_item(span, self.forms[span.item.identity]) for span in spans]

    def stops(self, most: int | None) -> list[int]:
        """Return how many items each of some requests shows, so that none has more than `most` bytes.

        Each shows a longer beginning of the prompt, and brings what the server lacks by then; the last shows
        the whole. Without hashes there is only that one.
        """
        stops: list[int] = []
        room: int | None = None
        had = set(self.known or ())
        for index, (name, span) in enumerate(zip(self.names, self.spans, strict=True)):
            if most is None or self.known is None or name in had:
                continue
            had.add(name)
            size = len(encode_item(span, self.forms[span.item.identity]))
            if room is None or size > room:
                stops += [] if room is None else [index]
                room = most - BYTES_PER_ID * len(self.ids)
            room -= size
        return [*stops, len(self.spans)]

    def bring(self, count: int) -> None:
        """Note that the server has been sent the first `count` items."""
        if self.known is not None:
            self.known |= set(self.names[:count])

    def features(self, count: int) -> dict[str, Any]:
        """Return the member `features` of a request that shows the first `count` items."""
        return features_of(self.spans[:count], self.forms, self.known)


# --- images: what a server makes of one ---


class Place(msgspec.Struct):
    """A placeholder range as vLLM writes it."""

    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Place]] = {}
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


async def render_image(transport: Transport, model: str, data_url: str) -> ServedImage:
    """Let a vLLM server process one image, given as a `data:` URL."""
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
    rendered = await asyncio.to_thread(decode_as, reply.body, _Rendered, where=where)
    features = rendered.features or _Features()
    for name in ("mm_hashes", "mm_placeholders", "kwargs_data"):
        members: Mapping[str, list[Any]] = getattr(features, name) or {}
        counts = {kind: len(values) for kind, values in members.items() if values}
        if counts != {"image": 1} or members["image"] == [None]:
            raise EngineReplyError(
                "the server did not render one image",
                where=f"{where} features.{name}",
                expected="one of 'image', with its data",
                got=str(counts),
            )
    (place,) = features.mm_placeholders["image"]
    stop = place.offset + place.length
    if not 0 <= place.offset < stop <= len(rendered.token_ids):
        raise EngineReplyError(
            "the server rendered a placeholder outside the prompt",
            where=f"{where} features.mm_placeholders",
            expected=f"tokens within [0, {len(rendered.token_ids)})",
            got=f"[{place.offset}, {stop})",
        )
    (item,), (mm_hash,) = (features.kwargs_data or {})["image"], features.mm_hashes["image"]
    return ServedImage(tuple(rendered.token_ids[place.offset : stop]), item or "", mm_hash)


# How far values may differ: back ends round differently, another mean or deviation is much further off.
_TOLERANCE: Final = {"uint8": 0.0, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


async def wire_forms(
    spans: Sequence[MediaSpan],
    ids: npt.NDArray[Any],
    model: str,
    process: Process,
    pixels: PixelDtype | Literal["ask"],
) -> dict[str, WireForm]:
    """Return by identity how a vLLM server takes items, found out once for each processor by a handshake.

    The server renders one image, and its tensors tell what it takes. Where the item can be had as an encoded
    image, the server's tensors must equal ours. Named `pixels` need no handshake.
    """
    forms: dict[str, WireForm] = {}
    # The smallest image of a kind is the one that the server is asked to render.
    for span in sorted(spans, key=lambda span: span.range.length):
        item = span.item
        if item.identity in forms:
            continue
        settings = None
        if isinstance(item, PatchItem):
            settings = (item.layout, item.arithmetic, item.modality, _is_video(item))
        key = ("form", pixels, model, type(item), settings)
        tokens = tuple(ids[span.start : span.stop].tolist())
        ask = partial(_ask_form, item, tokens, model, process.transport, pixels)
        forms[item.identity] = await process.ask_once(key, ask)
    return forms


async def _ask_form(
    item: MediaItem,
    tokens: tuple[int, ...],
    model: str,
    transport: Transport,
    pixels: PixelDtype | Literal["ask"],
) -> WireForm:
    """Let the server render an item, and compare its placeholder tokens and tensors with ours."""
    if pixels != "ask":
        return WireForm(layout_for(tensor_specs(item), modality=item.modality), pixels)
    where = f"{transport.base_url}{RENDER_PATH}"
    image, has_its_pixels = await asyncio.to_thread(_probe_image, item)
    try:
        served = await render_image(transport, model, image.data_url)
        theirs = decode_mm_kwargs_item(served.item)
    except EngineUnsupportedError as error:
        error.remedy = (
            f"{error.remedy}; or say which pixels it takes: VLLMBackend(pixels='uint8'), or 'float32' "
            "for one that runs with --no-mm-device-do-normalize"
        )
        raise
    except CodecError as error:
        raise EngineReplyError("the server's item is malformed", where=where, got=str(error)) from error
    if _is_video(item):  # a server processes those that it decodes: only the dtype can be learnt
        dtype = _dtype_of(theirs["pixel_values"].data) if "pixel_values" in theirs else "nothing"
        known = next((one for one in PIXEL_DTYPES if one == dtype), None)
        if known is None:
            raise _mismatch("pixel dtypes", where, dtype, f"one of {', '.join(PIXEL_DTYPES)}")
        return WireForm(layout_for(tensor_specs(item), modality=item.modality), known)
    if served.tokens != tokens:
        runs = [
            ", ".join(f"{len(list(run))} of the token {token}" for token, run in itertools.groupby(some))
            for some in (served.tokens, tokens)
        ]
        raise _mismatch("placeholder tokens", where, *runs)
    form = await asyncio.to_thread(_compare_item, item, theirs, has_its_pixels, where)
    if form.pixels == "uint8":
        _warn_of_normalisation(transport.base_url)
    return form


@lru_cache(1024)
def _warn_of_normalisation(url: str) -> None:
    """Warn once for each server; the handshake is repeated after pauses and behind load balancers."""
    _log.warning(
        "%s: the server normalises pixels by a mean and deviation that it does not show; those of its "
        "preprocessor_config.json must be the ones used here, which mmrender cannot check",
        url,
    )


def _probe_image(item: MediaItem) -> tuple[EncodedImage, bool]:
    """Return an image that the server widens as the item, and whether it has the item's own pixels."""
    if isinstance(item, PatchItem) and not _is_video(item):
        return encoded_image(item), True
    height, width = item.size
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (127, 127, 127)).save(buffer, format="PNG")
    return EncodedImage(buffer.getvalue(), "image/png"), False


def _is_video(item: MediaItem) -> bool:
    """Whether an item is a video or a time step of one."""
    return isinstance(item, PatchItem) and (item.modality == "video" or bool(item.times))


def _compare_item(item: MediaItem, served: KwargsItem, has_its_pixels: bool, where: str) -> WireForm:
    """Compare the served tensors with ours, and return the form of both."""
    specs = tensor_specs(item)
    if served.keys() != specs.keys():
        raise _mismatch("fields", where, ", ".join(sorted(served)), ", ".join(sorted(specs)))
    found = {_dtype_of(served[name].data) for name, spec in specs.items() if spec.floating}
    dtype = next((known for known in PIXEL_DTYPES if found == {known}), None)
    if dtype is None:
        raise _mismatch("pixel dtypes", where, ", ".join(sorted(found)), f"one of {', '.join(PIXEL_DTYPES)}")
    kinds = {name: type(elem.field).__name__.removesuffix("Field").lower() for name, elem in served.items()}
    form = WireForm(layout_for(specs, kinds), dtype)
    (collated,) = collate_items(form.layout, [item_tensors(item, dtype)])
    for name, elem in collated.items():
        theirs, ours = served[name].data, elem.data
        shapes = [f"{_dtype_of(tensor)} {list(getattr(tensor, 'shape', ()))}" for tensor in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise _mismatch(name, where, *shapes)
        apart = np.abs(_floats(theirs) - _floats(ours)) if has_its_pixels else np.zeros(1)
        worst, tolerance = float(apart.max(initial=0.0)), _TOLERANCE[dtype]
        if not worst <= tolerance:
            count = int((apart > tolerance).sum())
            here = f"{worst:.4g}, and {count} of {apart.size} values differ"
            raise _mismatch(f"values of {name}", where, f"no difference above {tolerance:g}", here)
    return form


def _dtype_of(tensor: Any) -> str:
    return str(getattr(tensor, "dtype", type(tensor).__name__))


def _floats(tensor: Any) -> npt.NDArray[np.float64]:
    if isinstance(tensor, RawTensor):  # of bfloat16, the upper half of a float32
        bits = tensor.bits.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(-1)
    return np.asarray(tensor).astype(np.float64).reshape(-1)


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


async def require_safe_cache(process: Process, *, trusted: bool) -> None:
    """Require that a hash without data cannot kill a vLLM engine; asked once.

    Such a hash hits vLLM's processor cache where that is of the kind `lru`, in one API process and one
    data-parallel rank. With the cache off, of kind `shm`, or behind several API processes, the engine exits.
    With `trusted` the caller vouches for a server that does not say.
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
            remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, or vouch for its cache (lru, one API "
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

    It takes a server that says which process answers, and an address at which one process answers at a time:
    of others it is not known which would get the hash. What cannot be asked is not proved.
    """
    if not process.facts.name or facts_of(process.transport).alternates:
        return False
    try:
        await require_safe_cache(process, trusted=trusted)
    except (EngineUnsupportedError, EngineStatusError, EngineReplyError, EngineMismatchError) as error:
        _log.debug("images go with their data: %s", error)
        return False
    return True
