"""Media items as vLLM takes them: tensors in the field layout of the model's family.

vLLM joins the tensors of many requests by field layout. Each item is encoded by itself, its slices naming
itself alone, so its bytes are the same in every request, and are encoded once.

The tables follow the `_get_mm_fields_config` of vLLM 0.32's model files. A layout is found by the model's
architecture, as in vLLM. Keys that an output lacks are skipped, and keys that a layout lacks are an error:
vLLM would drop them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from mmcodecs.arrays import RawTensor
from mmcodecs.errors import CodecError, EncodeError
from mmrender.client.exchange import encoded_once
from mmrender.client.transport import JSONText
from mmrender.errors import EngineUnsupportedError, PlaceholderError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Levels, expanded
from mmrender.media.processors.patches import PatchItem
from mmrender.media.vllm_items import (
    BatchedField,
    Field,
    FieldElem,
    FlatField,
    KwargsItem,
    SharedField,
    encode_mm_kwargs_item_as_bytes,
)
from mmrender.sidecar import MediaItem, MediaSpan

Inputs: TypeAlias = Mapping[str, Any]
"""A processor's output: keyword arguments of the model."""


@dataclass(frozen=True, slots=True)
class Batched:
    """Element i of the batch belongs to item i."""

    modality: str
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Flat:
    """The items' rows are concatenated along `dim`. `sizes` names the key with the number of rows of each.

    With `unit="value"` that key holds the numbers. With `"grid"` it holds grids, whose product is the number.
    With `"merged grid"` the product is divided by the square of the model's spatial merge size.
    """

    modality: str
    sizes: str
    unit: Literal["value", "grid", "merged grid"] = "value"
    keep_on_cpu: bool = False
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """Every item holds the whole. `sizes` names a key with one element per item."""

    modality: str
    sizes: str
    keep_on_cpu: bool = False


Spec: TypeAlias = Batched | Flat | Shared


@dataclass(frozen=True, slots=True)
class Layout:
    """The fields of a model family, by keyword, and the architectures that have them."""

    name: str
    architectures: tuple[str, ...]
    fields: Mapping[str, Spec]


_IMAGE, _VIDEO, _AUDIO = Batched("image"), Batched("video"), Batched("audio")
_ON_CPU, _VIDEO_ON_CPU, _AUDIO_ON_CPU = (
    Batched(modality, keep_on_cpu=True) for modality in ("image", "video", "audio")
)
_QWEN2_VL: Final[dict[str, Spec]] = {
    "pixel_values": Flat("image", "image_grid_thw", "grid"),
    "image_embeds": Flat("image", "image_grid_thw", "merged grid"),
    "image_grid_thw": _ON_CPU,
    "pixel_values_videos": Flat("video", "video_grid_thw", "grid"),
    "video_embeds": Flat("video", "video_grid_thw", "merged grid"),
    "video_grid_thw": _VIDEO_ON_CPU,
    "timestamps": _VIDEO_ON_CPU,
}
_AUDIO_EMBEDS: Final[dict[str, Spec]] = {"audio_embeds": _AUDIO, "audio_num_tokens": _AUDIO_ON_CPU}
_WINDOWS: Final[dict[str, Spec]] = {
    "audio_embeds": _AUDIO,
    "input_features": Flat("audio", "chunk_counts"),
    "feature_attention_mask": Flat("audio", "chunk_counts"),
    "chunk_counts": _AUDIO_ON_CPU,
}
_CLIPS: Final[dict[str, Spec]] = {"input_features_padded": _AUDIO, "input_features_mask": _AUDIO}
_QWEN_OMNI: Final[dict[str, Spec]] = {
    **{key: spec for key, spec in _QWEN2_VL.items() if key != "timestamps"},
    "second_per_grid_ts": _VIDEO_ON_CPU,
    "input_audio_features": Flat("audio", "audio_feature_lengths", dim=1),
    "feature_attention_mask": _AUDIO_ON_CPU,
    "audio_feature_lengths": _AUDIO_ON_CPU,
}
_PIXELS: Final[dict[str, Spec]] = {"pixel_values": _IMAGE}
_LLAVA: Final = _PIXELS | {"image_embeds": _IMAGE}
_LLAVA_NEXT: Final = _LLAVA | {"image_sizes": _ON_CPU}
_PATCHES: Final[dict[str, Spec]] = {"pixel_values": Flat("image", "num_patches"), "num_patches": _ON_CPU}
_INTERNVL: Final[dict[str, Spec]] = {
    "image_num_patches": _ON_CPU,
    "image_embeds": _IMAGE,
    "image_token_id": Shared("image", "image_num_patches", keep_on_cpu=True),
    "video_num_patches": _VIDEO_ON_CPU,
    "video_token_id": Shared("video", "video_num_patches", keep_on_cpu=True),
}
_INTERNVL_IMAGES, _INTERNVL_VIDEOS = Flat("image", "image_num_patches"), Flat("video", "video_num_patches")
_GEMMA4: Final[dict[str, Spec]] = {
    "pixel_values": _IMAGE,
    "pixel_position_ids": _IMAGE,
    **_CLIPS,
    "pixel_values_videos": Flat("video", "video_frame_counts"),
    "pixel_position_ids_videos": Flat("video", "video_frame_counts"),
    "video_frame_counts": _VIDEO_ON_CPU,
    "video_num_soft_tokens": _VIDEO_ON_CPU,
    "video_timestamps": _VIDEO_ON_CPU,
}
_LLAMA4: Final[dict[str, Spec]] = {
    "pixel_values": Flat("image", "patches_per_image"),
    "patches_per_image": _ON_CPU,
    "aspect_ratios": _ON_CPU,
}
_MINICPMV: Final[dict[str, Spec]] = {
    "pixel_values": _IMAGE,
    "image_sizes": _ON_CPU,
    "tgt_sizes": _ON_CPU,
    "image_embeds": _IMAGE,
    "video_pixel_values": _VIDEO,
    "video_image_sizes": _VIDEO_ON_CPU,
    "video_tgt_sizes": _VIDEO_ON_CPU,
    "video_embeds": _VIDEO,
}

# fmt: off
LAYOUTS: Final = (
    Layout("qwen2_vl", (
        "Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration", "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
    ), _QWEN2_VL),
    Layout("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",),
           _QWEN2_VL | {"second_per_grid_ts": _VIDEO_ON_CPU}),
    Layout("glm4v", ("GLM4VForCausalLM",), _PIXELS),
    Layout("internvl_chat", ("InternVLChatModel",),
           _INTERNVL | {"pixel_values_flat": _INTERNVL_IMAGES, "pixel_values_flat_video": _INTERNVL_VIDEOS}),
    Layout("internvl", ("InternVLForConditionalGeneration", "InternS1ForConditionalGeneration"),
           _INTERNVL | {"pixel_values": _INTERNVL_IMAGES, "pixel_values_videos": _INTERNVL_VIDEOS}),
    Layout("gemma3", ("Gemma3ForConditionalGeneration",), _PATCHES),
    Layout("cohere2_vision", ("Cohere2VisionForConditionalGeneration",), _PATCHES | {"image_embeds": _IMAGE}),
    Layout("gemma3n", ("Gemma3nForConditionalGeneration",), _PIXELS | _CLIPS),
    Layout("gemma4", ("Gemma4ForConditionalGeneration",), _GEMMA4),
    Layout("idefics3", ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
           _PATCHES | {"pixel_attention_mask": Flat("image", "num_patches"), "image_embeds": _IMAGE}),
    Layout("llava", ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"), _LLAVA),
    Layout("llava_next", ("LlavaNextForConditionalGeneration", "Phi3VForCausalLM"), _LLAVA_NEXT),
    Layout("llava_onevision", ("LlavaOnevisionForConditionalGeneration",),
           _LLAVA_NEXT | {"pixel_values_videos": _VIDEO}),
    Layout("pixtral", ("PixtralForConditionalGeneration",), {"images": _IMAGE}),
    Layout("llama4", ("Llama4ForConditionalGeneration",), _LLAMA4),
    Layout("kimi_vl", ("KimiVLForConditionalGeneration",),
           {"pixel_values": Flat("image", "image_grid_hws", "grid"), "image_grid_hws": _ON_CPU}),
    Layout("kimi_k25", ("KimiK25ForConditionalGeneration",),
           {"pixel_values": Flat("vision_chunk", "grid_thws", "grid"),
            "grid_thws": Batched("vision_chunk", keep_on_cpu=True)}),
    Layout("minicpmv", ("MiniCPMV",), _MINICPMV),
    Layout("aria", ("AriaForConditionalGeneration",), _PIXELS | {"pixel_mask": _IMAGE}),
    Layout("paligemma", ("PaliGemmaForConditionalGeneration",), _PIXELS),
    Layout("qwen2_audio", ("Qwen2AudioForConditionalGeneration",),
           _AUDIO_EMBEDS | {"input_features": _AUDIO, "feature_attention_mask": _AUDIO}),
    Layout("qwen_omni", (
        "Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration",
    ), _QWEN_OMNI),
    Layout("audio_flamingo", ("AudioFlamingo3ForConditionalGeneration",), _AUDIO_EMBEDS | _WINDOWS),
    Layout("glm_asr", ("GlmAsrForConditionalGeneration",), _WINDOWS),
    Layout("granite_speech", ("GraniteSpeechForConditionalGeneration",),
           {"input_features": _AUDIO, "audio_embed_sizes": _AUDIO_ON_CPU}),
)
# fmt: on
_BY_ARCHITECTURE: Final = {name: layout for layout in LAYOUTS for name in layout.architectures}


def layout_of(architecture: str) -> Layout:
    """Return the layout of a model by its architecture, as `config.json` names it.

    Raises:
        EncodeError: Its layout is unknown.
    """
    layout = _BY_ARCHITECTURE.get(architecture)
    if layout is None:
        raise EncodeError(
            f"no field layout for {architecture!r}",
            expected=f"one of {', '.join(sorted(_BY_ARCHITECTURE))}",
            remedy="Build a Layout from the _get_mm_fields_config of its vLLM model file",
        )
    return layout


def collate_items(
    layout: Layout, outputs: Sequence[Inputs], *, spatial_merge_size: int | None = None
) -> list[KwargsItem]:
    """Make one item of each output of a processor that was run on one image (or one video) at a time.

    The items are those that vLLM cuts from one run on the whole batch, slices of the whole batch included,
    and no tensor is copied.

    Args:
        layout: How the model's fields are joined.
        outputs: One for each image or video, all with the same fields.
        spatial_merge_size: Of the model. Needed for image or video embeddings of the Qwen kind only.

    Raises:
        EncodeError: The layout lacks a key, a key that it needs is missing, numbers of rows do not add up, or
            an output holds another number of items than one or other fields than the first.
    """
    data: list[dict[str, Any]] = []
    for index, output in enumerate(outputs):
        if output.keys() != outputs[0].keys():
            raise EncodeError(
                "each output must have the fields of the first",
                where=f"$[{index}]",
                expected=", ".join(outputs[0]),
                got=", ".join(output),
            )
        try:
            data.append({key: _datum(layout, key, output, spatial_merge_size) for key in output})
        except CodecError as error:
            raise error.under(f"[{index}]") from None
    fields: dict[str, Field] = {}
    for key in outputs[0] if outputs else ():
        spec = layout.fields[key]
        if isinstance(spec, Batched):
            fields[key] = BatchedField(spec.keep_on_cpu)
        elif isinstance(spec, Shared):
            fields[key] = SharedField(len(outputs), spec.keep_on_cpu)
        else:
            ends = pairwise([0, *accumulate(_length(output[key], spec.dim) for output in outputs)])
            before = (slice(None),) * spec.dim
            cuts = tuple((*before, slice(*pair)) for pair in ends)
            fields[key] = FlatField(cuts, spec.dim, spec.keep_on_cpu)
    return [{key: FieldElem(value, fields[key]) for key, value in item.items()} for item in data]


def _datum(layout: Layout, key: str, output: Inputs, merge: int | None) -> Any:
    """Return the data of one field of one item, and check that the output holds one item."""
    value, spec, where = output[key], layout.fields.get(key), f"$.{key}"
    if spec is None:
        raise EncodeError(
            f"the layout {layout.name} lacks this field, and vLLM would drop it",
            where=where,
            expected=f"some of {', '.join(layout.fields)}",
        )
    if not isinstance(spec, Batched) and spec.sizes not in output:
        raise EncodeError(f"{key} needs {spec.sizes}", where="$", expected=spec.sizes, got=", ".join(output))
    count = _length(value if isinstance(spec, Batched) else output[spec.sizes])
    if count != 1:
        raise EncodeError("each output must hold one item", where=where, got=f"{count} {spec.modality}")
    if isinstance(spec, Flat):
        rows = int(np.asarray(output[spec.sizes][0]).prod())
        if spec.unit == "merged grid":
            if merge is None:
                raise EncodeError(f"{key} needs the model's spatial_merge_size", where=where)
            rows //= merge * merge
        if rows != _length(value, spec.dim):
            raise EncodeError(
                f"{spec.sizes} does not add up to the rows",
                where=where,
                expected=f"{rows} rows",
                got=str(_length(value, spec.dim)),
            )
    if not isinstance(spec, Batched):
        return value
    if isinstance(value, RawTensor):
        return RawTensor(value.dtype, np.asarray(value.bits[0]))
    # numpy returns a scalar for a vector's element, and vLLM a tensor without dimensions.
    return np.asarray(value[0]) if isinstance(value[0], np.generic) else value[0]


def _length(value: Any, dim: int = 0) -> int:
    if hasattr(value, "shape"):
        return int(value.shape[dim]) if len(value.shape) else 1
    return len(value) if isinstance(value, list | tuple) else 1


# --- items as vLLM takes them ---

PixelDtype: TypeAlias = Literal["uint8", "float32", "bfloat16", "float16"]
"""Pixels on the wire: `uint8` levels that the server normalises itself, or normalised values."""

PIXEL_DTYPES: Final[tuple[PixelDtype, ...]] = get_args(PixelDtype)


@dataclass(frozen=True, slots=True)
class WireForm:
    """Form in which a server takes the items of one processor.

    Attributes:
        layout: How fields are joined.
        pixels: Dtype on the wire of the reference processor's floating-point tensors.
    """

    layout: Layout
    pixels: PixelDtype

    def mm_hash(self, item: MediaItem) -> str:
        """Name of an item's data on the server, which keeps the data that first came under a name.

        It names the dtype too, so data of a wrong kind is never taken for the right one.
        """
        return f"{item.identity}-{self.pixels}"


def item_tensors(item: MediaItem, form: WireForm) -> dict[str, Any]:
    """Expand one item to the tensors that go on the wire.

    Raises:
        EngineUnsupportedError: The server takes levels, and the item holds normalised values.
    """
    pixels = form.pixels
    if pixels != "uint8":
        tensors = item.tensors(pixels)
        if item.modality == "audio":
            tensors = _clip_tensors(tensors, form.layout)
        if pixels != "bfloat16":
            return tensors
        # numpy lacks bfloat16. Its bit patterns are the only uint16 that items hold.
        return {
            name: RawTensor("bfloat16", array) if array.dtype == np.uint16 else array
            for name, array in tensors.items()
        }
    if isinstance(item, PatchItem):
        values, *others = item.specs("float32").items()
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in others}
        item.write(arrays, "float32")
        return {values[0]: item.levels(), **arrays}
    problem = "this item holds normalised values only"
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


def _clip_tensors(tensors: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the features of a clip by the names of a vLLM model, without padding if that model drops it."""
    mask = next((tensors[name] for name in _CLIP_MASKS if name in tensors), None)
    if mask is not None:
        features, is_kept = tensors["input_features"], mask.astype(bool)
        if "chunk_counts" in layout.fields:
            count = np.array([len(features)])
            return {"input_features": features, "feature_attention_mask": mask, "chunk_counts": count}
        if "input_features_padded" in layout.fields:
            return {
                "input_features_padded": features[:, is_kept[0]],
                "input_features_mask": mask[:, is_kept[0]],
            }
        if "input_audio_features" in layout.fields:
            return {
                "input_audio_features": features[0][:, is_kept[0]],
                "feature_attention_mask": mask,
                "audio_feature_lengths": is_kept.sum(1),
            }
    return {name: values for name, values in tensors.items() if name in layout.fields}


_CLIP_MASKS: Final = ("input_features_mask", "feature_attention_mask")
"""Which frames of the features of a clip are not padding."""


def layout_for(
    names: Collection[str], kinds: Mapping[str, str] | None = None, *, modality: str = "image"
) -> Layout:
    """Return the field layout of an image or video by the names of its tensors.

    `kinds` is how the server joins each: `batched`, `flat` or `shared`.
    """

    def fits(layout: Layout, name: str) -> bool:
        spec = layout.fields.get(name)
        if spec is None or spec.modality != modality:
            return False
        kind = type(spec).__name__.lower()
        sizes_known = not isinstance(spec, Flat | Shared) or spec.sizes in names
        return sizes_known and (kinds or {}).get(name, kind) == kind

    layouts = [layout for layout in LAYOUTS if all(fits(layout, name) for name in names)]
    if not layouts or any(each.fields[name] != layouts[0].fields[name] for each in layouts for name in names):
        raise EngineUnsupportedError(
            "it is not known how vLLM joins these tensors",
            where=f"{modality} items",
            expected="the fields of one of the known layouts",
            got=", ".join(sorted(names)),
            remedy="Send encoded images: VLLMBackend(images='content_parts')",
        )
    return layouts[0]


def encode_item(span: MediaSpan, form: WireForm, *, is_sent_once: bool = False) -> JSONText:
    """Encode one item as vLLM's base64 item, a JSON text. See `encoded_once`."""

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
        (item,) = collate_items(form.layout, [item_tensors(span.item, form)])
        return b'"%b"' % encode_mm_kwargs_item_as_bytes(item)

    return encoded_once(span.item, (form.layout.name, form.pixels), encode, is_sent_once=is_sent_once)
