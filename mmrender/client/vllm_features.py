"""Media items as vLLM takes them: `features` of a generate request.

vLLM joins the tensors of many requests by the field layout of the model (`mmcodecs.vllm_fields`). Each item
is encoded by itself, its slices naming itself alone, so what goes on the wire does not depend on its company.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmcodecs.tensors import RawTensor
from mmcodecs.vllm_batch import collate_items
from mmcodecs.vllm_fields import LAYOUTS, Flat, Layout, Shared
from mmcodecs.vllm_items import encode_mm_kwargs_item_as_bytes
from mmrender.client.checks import Placed
from mmrender.client.encoding import PlainText
from mmrender.client.item_checks import check_patches
from mmrender.errors import EngineUnsupportedError
from mmrender.media.item import PatchItem, ProcessedItem
from mmrender.media.levels import Levels
from mmrender.spans import MediaItem

PixelDtype: TypeAlias = Literal["uint8", "float32", "bfloat16", "float16"]
"""What pixels are on the wire: levels that the server normalises itself, or normalised values."""

PIXEL_DTYPES: Final[tuple[PixelDtype, ...]] = get_args(PixelDtype)


@dataclass(frozen=True, slots=True)
class WireForm:
    """How a server takes the items of one processor.

    Attributes:
        layout: How fields are joined.
        pixels: What floating-point tensors of the reference processor are on the wire.
    """

    layout: Layout
    pixels: PixelDtype

    def mm_hash(self, item: MediaItem) -> str:
        """The name of an item's data on the server, which keeps what first came under a name.

        It names the kind of pixels too, so data of a wrong kind is never taken for that of the right one.
        """
        return f"{item.identity}-{self.pixels}"


def item_tensors(item: MediaItem, pixels: PixelDtype) -> dict[str, Any]:
    """Expand one item to what goes on the wire.

    Raises:
        EngineUnsupportedError: Levels are asked for, and the item's pixels do not come from any.
    """
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
    if isinstance(item, ProcessedItem) and item.compact:
        return {
            name: _whole_levels(part, name) if isinstance(part, Levels) else part.expanded("float32")
            for name, part in item.parts.items()
        }
    raise EngineUnsupportedError(
        "the server normalises pixels itself, and this item has none that are not normalised",
        where=f"item {item.identity[:12]}",
        got=f"{type(item).__name__} of modality {item.modality!r}",
        remedy="Start vLLM with --no-mm-device-do-normalize",
    )


def _whole_levels(part: Levels, name: str) -> npt.NDArray[np.uint8]:
    if part.levels.size == np.prod(part.shape):
        return part.levels.reshape(part.shape)
    raise EngineUnsupportedError(
        "the server normalises pixels itself, and this item is padded with zeros that are not pixels",
        where=name,
        remedy="Start vLLM with --no-mm-device-do-normalize",
    )


def layout_for(names: Collection[str], modality: str, kinds: Mapping[str, str] | None = None) -> Layout:
    """Return the field layout of an item by the names of its tensors.

    Args:
        names: The item's tensors.
        modality: The item's.
        kinds: How the server says that each is joined: `batched`, `flat` or `shared`.

    Raises:
        EngineUnsupportedError: No layout has these fields, or several that join them differently.
    """
    found = [layout for layout in LAYOUTS if _takes(layout, names, modality, kinds or {})]
    if not found or any(layout.fields[n] != found[0].fields[n] for layout in found for n in names):
        raise EngineUnsupportedError(
            "it is not known how vLLM joins these tensors",
            where=f"{modality} items",
            expected="the fields of one of the layouts in mmcodecs.vllm_fields",
            got=", ".join(sorted(names)),
            remedy="Send encoded images: VLLMBackend(images='content_parts')",
        )
    return found[0]


def _takes(layout: Layout, names: Collection[str], modality: str, kinds: Mapping[str, str]) -> bool:
    for name in names:
        spec = layout.fields.get(name)
        if spec is None or spec.modality != modality:
            return False
        if kinds.get(name, type(spec).__name__.lower()) != type(spec).__name__.lower():
            return False
        if isinstance(spec, Flat | Shared) and spec.sizes not in names:
            return False
    return True


def encode_item(entry: Placed, form: WireForm) -> PlainText:
    """Encode one item as vLLM's base64 text, after a check that its tensors fit together and their range.

    Raises:
        PlaceholderError: Patches, grid and range do not fit, or pixels are of another dtype than `form` says.
        EngineUnsupportedError: As `item_tensors`.
    """
    tensors = item_tensors(entry.item, form.pixels)
    if isinstance(entry.item, PatchItem):
        pixels = tensors["pixel_values"]
        array = pixels.bits if isinstance(pixels, RawTensor) else pixels
        check_patches(
            array,
            tensors["image_grid_thw"],
            width=entry.item.layout.features,
            dtype="uint16" if form.pixels == "bfloat16" else form.pixels,  # numpy holds its bits so
            merge_size=entry.item.layout.merge,
            num_embeds=entry.range.num_embeds,
            where=entry.where,
        )
    (item,) = collate_items(form.layout, [tensors])
    return PlainText(encode_mm_kwargs_item_as_bytes(item))


def features_of(
    placed: Sequence[Placed],
    forms: Mapping[str, WireForm],
    left_out: Collection[str] = (),
    *,
    repeats_left_out: bool = False,
) -> dict[str, Any]:
    """Return the `features` of a request.

    Args:
        placed: Items in prompt order.
        forms: How the server takes each, by identity.
        left_out: Hashes whose data the server has; of these nothing else is sent.
        repeats_left_out: Send the data of an item once within the request. A server takes the hash behind
            it as one whose data it has, so this holds where hashes without data do.

    Raises:
        PlaceholderError: An item does not fit its range.
    """
    features: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    encoded: dict[str, PlainText] = {}
    for entry in placed:
        form = forms[entry.item.identity]
        mm_hash = form.mm_hash(entry.item)
        repeated = mm_hash in encoded
        if mm_hash not in left_out and not repeated:
            encoded[mm_hash] = encode_item(entry, form)
        data = None if repeated and repeats_left_out else encoded.get(mm_hash)
        place = {"offset": entry.range.offset, "length": entry.range.length}
        features["mm_hashes"].setdefault(entry.modality, []).append(mm_hash)
        features["mm_placeholders"].setdefault(entry.modality, []).append(place)
        features["kwargs_data"].setdefault(entry.modality, []).append(data)
    return features
