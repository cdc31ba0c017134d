"""The handshake: what a vLLM server makes of one image, held against what is made of it here.

Since 0.28 vLLM normalises pixels on the device by default and takes raw levels on the wire, for some model
families since 0.32; normalised values are then normalised again, and nothing says so. So before the first
image the server renders one, and its tensors tell what it takes. Where the item can be had as an encoded
image, the server's tensors must be ours to the last level.
"""

import asyncio
import io
from collections.abc import Hashable
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcodecs.errors import CodecError
from mmcodecs.tensors import RawTensor
from mmcodecs.vllm_items import FieldElem, KwargsItem, decode_mm_kwargs_item
from mmrender.client.checks import Placed
from mmrender.client.transport import Reply, Transport
from mmrender.client.vllm_features import PIXEL_DTYPES, WireForm, item_tensors, layout_for
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineStatusError, EngineUnsupportedError
from mmrender.media.item import EncodedImage, PatchItem, encoded_image, tensor_specs
from mmrender.spans import MediaItem

RENDER_PATH: Final = "/v1/chat/completions/render"
_TOLERANCE: Final = {"uint8": 0.0, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""How far values may be apart: back ends round differently, another mean or deviation is much further off."""


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_placeholders: dict[str, list[_Range]]
    kwargs_data: dict[str, list[str]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features


def handshake_key(item: MediaItem, model: str) -> Hashable:
    """What a handshake holds for: the model as the server knows it, and the processor's settings."""
    settings: Hashable = (item.layout, item.arithmetic) if isinstance(item, PatchItem) else None
    return "handshake", model, type(item), item.modality, settings


async def shake_hands(
    entry: Placed, prompt_ids: npt.NDArray[Any], model: str, transport: Transport
) -> WireForm:
    """Let the server render one image and find out how it takes the items of this processor.

    Args:
        entry: An item of the prompt and its place.
        prompt_ids: The prompt, of shape `(n,)`.
        model: The model as the server knows it.
        transport: The way to the server.

    Raises:
        EngineMismatchError: The server makes something else of the image: other fields, shapes, values or
            placeholder tokens.
        EngineUnsupportedError: The server does not render, or how it joins the fields is not known.
        EngineReplyError: Its answer is not to be understood.
        EngineError: It could not be asked.
    """
    image, is_same = await asyncio.to_thread(_probe, entry.item)
    part = {"type": "image_url", "image_url": {"url": image.data_url}}
    body = {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    where = f"{transport.base_url}{RENDER_PATH}"
    try:
        reply = await transport.request("POST", RENDER_PATH, json=body, idempotent=True)
    except EngineStatusError as error:
        raise _closed(error, where) from error
    served, run = _read(reply, entry.modality, where)
    ours = prompt_ids[entry.start : entry.stop].tolist()
    if run != ours:
        raise _mismatch("placeholder tokens", where, _described_run(run), _described_run(ours))
    return await asyncio.to_thread(_agreed, entry, served, is_same, where)


def _probe(item: MediaItem) -> tuple[EncodedImage, bool]:
    """An image that the server makes the same of, and whether its pixels are the item's own too."""
    if isinstance(item, PatchItem) and item.modality == "image":
        return encoded_image(item), True
    height, width = item.size
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (127, 127, 127)).save(buffer, format="PNG")
    return EncodedImage(buffer.getvalue(), "image/png"), False


def _closed(error: EngineStatusError, where: str) -> Exception:
    if error.status not in (403, 404, 405):
        return error
    return EngineUnsupportedError(
        "the server does not render an image, so it is not known which pixels it takes",
        where=where,
        got=f"status {error.status}",
        remedy="Start vLLM with --enable-scale-out, or say what it takes: VLLMBackend(pixels='uint8'), "
        "or 'float32' for one that runs with --no-mm-device-do-normalize",
    )


def _read(reply: Reply, modality: str, where: str) -> tuple[KwargsItem, list[int]]:
    """The served item and its placeholder tokens."""
    try:
        rendered = msgspec.json.decode(reply.body, type=_Rendered)
        (place,) = rendered.features.mm_placeholders[modality]
        (data,) = rendered.features.kwargs_data[modality]
        served = decode_mm_kwargs_item(data)
    except (msgspec.MsgspecError, CodecError, KeyError, ValueError) as error:
        raise EngineReplyError(
            "the server's rendering of an image is not to be understood",
            where=where,
            expected=f"features of one {modality} with its tensors",
            got=f"{type(error).__name__}: {error}",
        ) from error
    return served, rendered.token_ids[place.offset : place.offset + place.length]


def _agreed(entry: Placed, served: KwargsItem, is_same: bool, where: str) -> WireForm:
    """Hold the served tensors against ours, and return what both are."""
    specs = tensor_specs(entry.item)
    if served.keys() != specs.keys():
        raise _mismatch("fields", where, ", ".join(sorted(served)), ", ".join(sorted(specs)))
    dtypes = {name: _dtype(served[name], where, name) for name in served}
    pixels = {dtypes[name] for name, spec in specs.items() if spec.floating}
    if len(pixels) != 1 or not pixels <= set(PIXEL_DTYPES):
        raise _mismatch("pixel dtypes", where, ", ".join(sorted(pixels)), f"one of {', '.join(PIXEL_DTYPES)}")
    (dtype,) = (name for name in PIXEL_DTYPES if name in pixels)
    kinds = {name: type(elem.field).__name__.removesuffix("Field").lower() for name, elem in served.items()}
    layout = layout_for(specs, entry.modality, kinds)
    ours = item_tensors(entry.item, dtype)
    for name, elem in served.items():
        _compare(name, elem, ours[name], _TOLERANCE[dtype] if is_same else None, where)
    return WireForm(layout, dtype)


def _compare(name: str, elem: FieldElem, ours: Any, tolerance: float | None, where: str) -> None:
    shape = tuple(ours.shape[1:]) if type(elem.field).__name__ == "BatchedField" else tuple(ours.shape)
    data: Any = elem.data
    theirs = tuple(data.shape)
    if theirs != shape or _dtype_of(data) != _dtype_of(ours):
        raise _mismatch(name, where, f"{_dtype_of(data)} {list(theirs)}", f"{_dtype_of(ours)} {list(shape)}")
    if tolerance is None:
        return
    apart = np.abs(_floats(data).reshape(-1) - _floats(ours).reshape(-1))
    worst = float(apart.max(initial=0.0))
    if not worst <= tolerance:
        raise _mismatch(
            f"values of {name}",
            where,
            f"no difference above {tolerance:g}",
            f"{worst:.4g}, and {int((apart > tolerance).sum())} of {apart.size} values differ",
        )


def _dtype(elem: FieldElem, where: str, name: str) -> str:
    if not hasattr(elem.data, "dtype"):
        raise _mismatch(name, where, type(elem.data).__name__, "a tensor")
    return _dtype_of(elem.data)


def _dtype_of(tensor: Any) -> str:
    return tensor.dtype if isinstance(tensor, RawTensor) else str(tensor.dtype.name)


def _floats(tensor: Any) -> npt.NDArray[np.float64]:
    if isinstance(tensor, RawTensor):  # of bfloat16, the upper half of a float32
        bits = tensor.bits.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return np.asarray(tensor).astype(np.float64)


def _described_run(run: list[int]) -> str:
    same = len(set(run)) == 1
    return f"{len(run)} of the token {run[0]}" if same else f"{len(run)} tokens {str(run[:8])[:-1]}, ...]"


def _mismatch(what: str, where: str, served: str, ours: str) -> EngineMismatchError:
    return EngineMismatchError(
        f"the server makes something else of an image than the renderer: {what}",
        where=where,
        expected=f"as the server has it: {served}",
        got=f"here: {ours}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )
