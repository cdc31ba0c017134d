"""One image or audio clip as a vLLM server processes it, by its render route, compared with ours."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mmcodecs.arrays import RawTensor
from mmrender.client.reply import decode_as
from mmrender.client.transport import Transport
from mmrender.client.vllm_fields import (
    PIXEL_DTYPES,
    PixelDtype,
    WireForm,
    collate_items,
    item_tensors,
    layout_for,
)
from mmrender.errors import (
    EngineMismatchError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
)
from mmrender.media.item import tensor_specs
from mmrender.media.vllm_items import KwargsItem
from mmrender.messages import Modality
from mmrender.sidecar import MediaItem

RENDER_PATH: Final = "/v1/chat/completions/render"
_NOUN: Final = {"image": "image", "video": "video", "audio": "audio clip"}


# How far values may differ. Back ends round differently. Another mean or deviation differs by much more.
_TOLERANCE: Final = {"uint8": 0.0, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


class Range(msgspec.Struct):
    """A placeholder range as vLLM writes it."""

    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Range]] = {}
    kwargs_data: dict[str, list[str | None]] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class ServedItem(msgspec.Struct, frozen=True):
    """One image or clip as a server processed it: its placeholder tokens, base64 item and hash."""

    tokens: tuple[int, ...]
    item: str
    mm_hash: str

    @property
    def nbytes(self) -> int:
        """Bytes it keeps alive, approximately."""
        return len(self.item) + 8 * len(self.tokens)


async def render_item(
    transport: Transport, model: str, data_url: str, modality: Modality = "image"
) -> ServedItem:
    """Let a vLLM server process one image or clip, given as a `data:` URL."""
    where = f"{transport.base_url}{RENDER_PATH}"
    noun = _NOUN[modality]
    part = {"type": f"{modality}_url", f"{modality}_url": {"url": data_url}}
    body = {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    try:
        reply = await transport.request("POST", RENDER_PATH, json=body, idempotent=True)
    except EngineStatusError as error:
        lacks_route = error.status == 404 and "model" not in error.body
        if error.status in (403, 405) or lacks_route:
            raise EngineUnsupportedError(
                f"the server does not render {noun}s",
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
        if counts != {modality: 1} or members[modality] == [None]:
            raise EngineReplyError(
                f"the server did not render one {noun}",
                where=f"{where} features.{name}",
                expected=f"one of {modality!r}, with its data",
                got=str(counts),
            )
    ((offset, length),) = ((each.offset, each.length) for each in features.mm_placeholders[modality])
    if offset < 0 or length <= 0 or offset + length > len(rendered.token_ids):
        raise EngineReplyError(
            "the server rendered a placeholder outside the prompt",
            where=f"{where} features.mm_placeholders",
            expected=f"tokens within [0, {len(rendered.token_ids)})",
            got=f"[{offset}, {offset + length})",
        )
    (item,), (mm_hash,) = (features.kwargs_data or {})[modality], features.mm_hashes[modality]
    return ServedItem(tuple(rendered.token_ids[offset : offset + length]), item or "", mm_hash)


def kind_of(item: MediaItem) -> Modality:
    """Return the modality that a server is asked to render for an item: frames of a video are images."""
    return "audio" if item.modality == "audio" else "image"


def compare_item(item: MediaItem, served: KwargsItem, has_its_values: bool, where: str) -> WireForm:
    """Compare the served tensors with ours, and return the form of both.

    Features of a clip go by the names of the server's model. Values are compared if the server was shown
    the item's own.

    Raises:
        EngineMismatchError: The server has other tensors.
        EngineUnsupportedError: It is not known how the server joins its tensors.
    """
    modality, specs = kind_of(item), tensor_specs(item)
    if modality == "image" and served.keys() != specs.keys():
        raise mismatch("fields", where, ", ".join(sorted(served)), ", ".join(sorted(specs)))
    kinds = {name: type(elem.field).__name__.removesuffix("Field").lower() for name, elem in served.items()}
    layout = layout_for(served.keys(), kinds, modality=modality)
    dtypes = {name: dtype_of(elem.data) for name, elem in served.items()}
    is_value = {name: specs[name].floating if name in specs else "float" in dtypes[name] for name in served}
    values = {dtype for name, dtype in dtypes.items() if is_value[name]}
    form = WireForm(layout, known_dtype(values, where, modality))
    (collated,) = collate_items(layout, [item_tensors(item, form)])
    if served.keys() != collated.keys():
        names = ", ".join(sorted(served)), ", ".join(sorted(collated))
        raise mismatch("fields", where, *names, modality=modality)
    for name, elem in collated.items():
        theirs, ours = served[name].data, elem.data
        shapes = [_described(tensor) for tensor in (theirs, ours)]
        is_unused = name == "feature_attention_mask" and "audio_feature_lengths" in served
        if shapes[0] != shapes[1] and not is_unused:
            raise mismatch(name, where, *shapes, modality=modality)
        differences = np.abs(_floats(theirs) - _floats(ours)) if has_its_values else np.zeros(1)
        largest, tolerance = float(differences.max(initial=0.0)), _TOLERANCE[form.pixels]
        if not largest <= tolerance:
            count = int((differences > tolerance).sum())
            got = f"{largest:.4g}, and {count} of {differences.size} values differ"
            raise mismatch(f"values of {name}", where, f"no difference above {tolerance:g}", got)
    return form


def _described(tensor: Any) -> str:
    """Return the kind and shape of a tensor. Releases of Transformers have integers of other widths."""
    dtype = dtype_of(tensor)
    kind = "integers" if "int" in dtype and dtype != "uint8" else dtype
    return f"{kind} {list(getattr(tensor, 'shape', ()))}"


def _floats(tensor: Any) -> npt.NDArray[np.float64]:
    if isinstance(tensor, RawTensor):  # of bfloat16, the upper half of a float32
        bits = tensor.bits.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(-1)
    return np.asarray(tensor).astype(np.float64).reshape(-1)


def mismatch(
    subject: str, where: str, served: str, ours: str, *, modality: Modality = "image"
) -> EngineMismatchError:
    """Return the error of an item that the server processes in another way. `subject` is what differs."""
    return EngineMismatchError(
        f"the server processes an {_NOUN[modality]} differently than the renderer: {subject}",
        where=where,
        expected=f"as the server has it: {served}",
        got=f"here: {ours}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


def known_dtype(dtypes: set[str], where: str, modality: Modality = "image") -> PixelDtype:
    """Return the dtype of the served floating-point tensors."""
    dtype = next((known for known in PIXEL_DTYPES if dtypes == {known}), None)
    if dtype is None:
        subject = "pixel dtypes" if modality == "image" else "dtypes of features"
        expected = f"one of {', '.join(PIXEL_DTYPES)}"
        raise mismatch(subject, where, ", ".join(sorted(dtypes)) or "nothing", expected, modality=modality)
    return dtype


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype."""
    return str(getattr(tensor, "dtype", type(tensor).__name__))
