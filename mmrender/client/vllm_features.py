"""Media items as vLLM takes them: the `features` of a generate request.

vLLM joins the tensors of many requests by the field layout of the model. Each item is encoded by itself, its
slices naming itself alone, so its bytes are the same in every request, and are encoded once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from mmcodecs.arrays import RawTensor
from mmcodecs.vllm import encode_mm_kwargs_item_as_bytes
from mmcodecs.vllm_fields import LAYOUTS, Flat, Layout, Shared, collate_items
from mmrender.caching import LRUCache
from mmrender.client.transport import JSONText
from mmrender.errors import EngineUnsupportedError, PlaceholderError
from mmrender.media.item import PatchItem, ProcessedItem
from mmrender.media.levels import Levels, expanded
from mmrender.spans import MediaItem, MediaSpan

PixelDtype: TypeAlias = Literal["uint8", "float32", "bfloat16", "float16"]
"""Pixels on the wire: `uint8` levels that the server normalises itself, or normalised values."""

PIXEL_DTYPES: Final[tuple[PixelDtype, ...]] = get_args(PixelDtype)

_encoded: LRUCache[tuple[str, type[MediaItem], str, PixelDtype], JSONText] = LRUCache(256 << 20, size_of=len)
"""Encoded items as JSON text, by identity, class, layout and dtype."""


@dataclass(frozen=True, slots=True)
class WireForm:
    """How a server takes the items of one processor.

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
    """Expand one item to the tensors that go on the wire."""
    if pixels != "uint8":
        tensors = item.tensors(pixels)
        if pixels != "bfloat16":
            return tensors
        # numpy has no bfloat16; its bit patterns are the only uint16 that items hold.
        return {
            name: RawTensor("bfloat16", array) if array.dtype == np.uint16 else array
            for name, array in tensors.items()
        }
    if isinstance(item, PatchItem) and item.modality == "image":
        return {"pixel_values": item.levels(), "image_grid_thw": np.array([item.grid], np.int64)}
    if not isinstance(item, ProcessedItem) or not item.compact:
        raise EngineUnsupportedError(
            "the server normalises pixels itself, and this item holds normalised ones only",
            where=f"item {item.identity[:12]}",
            got=f"{type(item).__name__} of modality {item.modality!r}",
            remedy="Start vLLM with --no-mm-device-do-normalize",
        )
    levels: dict[str, Any] = {}
    for name, part in item.parts.items():
        if not isinstance(part, Levels):
            levels[name] = expanded(part, "float32")
        elif part.values.size == np.prod(part.shape):
            levels[name] = part.values.reshape(part.shape)
        else:
            raise EngineUnsupportedError(
                "the server normalises pixels itself, and this item is padded with zeros that are not pixels",
                where=name,
                remedy="Start vLLM with --no-mm-device-do-normalize",
            )
    return levels


def layout_for(names: Collection[str], modality: str, kinds: Mapping[str, str] | None = None) -> Layout:
    """Return the field layout of an item by the names of its tensors.

    Args:
        names: The item's tensors.
        modality: The item's modality.
        kinds: How the server says that each is joined: `batched`, `flat` or `shared`.
    """

    def takes(layout: Layout) -> bool:
        for name in names:
            spec = layout.fields.get(name)
            if spec is None or spec.modality != modality:
                return False
            kind = type(spec).__name__.lower()
            if (kinds or {}).get(name, kind) != kind:
                return False
            if isinstance(spec, Flat | Shared) and spec.sizes not in names:
                return False
        return True

    found = [layout for layout in LAYOUTS if takes(layout)]
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
    """Encode one item as vLLM's base64 item, a JSON text; each item and form once while it is remembered."""

    def encode() -> JSONText:
        tensors = item_tensors(span.item, form.pixels)
        if isinstance(span.item, PatchItem):
            _check_patches(span, span.item, tensors, form.pixels)
        (item,) = collate_items(form.layout, [tensors])
        return JSONText(b'"%b"' % encode_mm_kwargs_item_as_bytes(item))

    key = (span.item.identity, type(span.item), form.layout.name, form.pixels)
    return _encoded.get_or_compute(key, encode)


def _check_patches(span: MediaSpan, item: PatchItem, tensors: Mapping[str, Any], dtype: PixelDtype) -> None:
    """Check patches of the Qwen kind against their grid and range; an engine dies of what does not fit."""
    pixels = tensors["pixel_values"]
    array = pixels.bits if isinstance(pixels, RawTensor) else pixels
    grid = tensors["image_grid_thw"]
    sides = [int(side) for side in np.ravel(grid)]
    if len(sides) != 3 or grid.dtype != np.int64 or any(side < 1 for side in sides):
        raise PlaceholderError(
            "the grid is malformed",
            where=f"{span.where}.grid",
            expected="three positive numbers of int64",
            got=f"{sides} of {grid.dtype}",
        )
    patches = sides[0] * sides[1] * sides[2]
    stored = "uint16" if dtype == "bfloat16" else dtype  # numpy holds its bits so
    if array.shape != (patches, item.layout.features) or array.dtype.name != stored:
        raise PlaceholderError(
            "the patches do not fit their grid",
            where=f"{span.where}.pixel_values",
            expected=f"{stored} [{patches}, {item.layout.features}] for the grid {sides}",
            got=f"{array.dtype.name} {list(array.shape)}",
        )
    expected = span.range.num_embeds * item.layout.merge**2
    if patches != expected:
        raise PlaceholderError(
            "the grid does not fit its placeholder range",
            where=f"{span.where}.grid",
            expected=f"{expected} patches for {span.range.num_embeds} tokens",
            got=f"{patches} of {sides}",
        )


def features_of(
    spans: Sequence[MediaSpan],
    forms: Mapping[str, WireForm],
    left_out: Collection[str] = (),
    *,
    repeats_left_out: bool = False,
) -> dict[str, Any]:
    """Return the `features` of a request.

    Args:
        spans: Items in prompt order.
        forms: How the server takes each, by identity.
        left_out: Hashes whose data the server has; the data of these is not sent.
        repeats_left_out: Send the data of an item once within the request. A server takes the second hash
            for one whose data it has, so this is safe only where hashes without data are.
    """
    features: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    sent: dict[str, JSONText] = {}
    for span in spans:
        form = forms[span.item.identity]
        mm_hash = form.mm_hash(span.item)
        is_repeat = mm_hash in sent
        if mm_hash not in left_out and not is_repeat:
            sent[mm_hash] = encode_item(span, form)
        data = None if is_repeat and repeats_left_out else sent.get(mm_hash)
        place = {"offset": span.range.offset, "length": span.range.length}
        features["mm_hashes"].setdefault(span.modality, []).append(mm_hash)
        features["mm_placeholders"].setdefault(span.modality, []).append(place)
        features["kwargs_data"].setdefault(span.modality, []).append(data)
    return features
