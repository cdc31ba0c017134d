"""How vLLM joins the tensors of each model family: field layouts as data, and items built and joined by them.

The tables say what the `_get_mm_fields_config` of vLLM 0.32's model files say, for images and videos. A
layout is found by the model's architecture, which is what vLLM dispatches on. Keys that a batch lacks are
skipped, and keys that a layout lacks are an error: vLLM would drop them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from mmcodecs.errors import EncodeError

Inputs: TypeAlias = Mapping[str, Any]
"""Keyword arguments as a processor gives them for a whole batch, and as the model takes them."""


@dataclass(frozen=True, slots=True)
class Batched:
    """Element i of the batch belongs to item i."""

    modality: str
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Flat:
    """The items' rows stand one after another; `sizes` names the key that says how many each has.

    With `unit="value"` that key holds the numbers; with `"grid"` it holds grids, whose product counts; with
    `"merged grid"` the product is divided by the square of the model's spatial merge size.
    """

    modality: str
    sizes: str
    unit: Literal["value", "grid", "merged grid"] = "value"
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """Every item holds the whole; `sizes` names a key with one element per item."""

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


_QWEN2_VL: Final[dict[str, Spec]] = {
    "pixel_values": Flat("image", "image_grid_thw", "grid"),
    "image_embeds": Flat("image", "image_grid_thw", "merged grid"),
    "image_grid_thw": Batched("image", keep_on_cpu=True),
    "pixel_values_videos": Flat("video", "video_grid_thw", "grid"),
    "video_embeds": Flat("video", "video_grid_thw", "merged grid"),
    "video_grid_thw": Batched("video", keep_on_cpu=True),
    "timestamps": Batched("video", keep_on_cpu=True),
}
_LLAVA: Final[dict[str, Spec]] = {"pixel_values": Batched("image"), "image_embeds": Batched("image")}
_LLAVA_NEXT: Final[dict[str, Spec]] = _LLAVA | {"image_sizes": Batched("image", keep_on_cpu=True)}
_PATCHES: Final[dict[str, Spec]] = {
    "pixel_values": Flat("image", "num_patches"),
    "num_patches": Batched("image", keep_on_cpu=True),
}

LAYOUTS: Final = (
    Layout(
        "qwen2_vl",
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
        ),
        _QWEN2_VL,
    ),
    Layout(
        "qwen2_5_vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        _QWEN2_VL | {"second_per_grid_ts": Batched("video", keep_on_cpu=True)},
    ),
    Layout("glm4v", ("GLM4VForCausalLM",), {"pixel_values": Batched("image")}),
    Layout(
        "internvl_chat",
        ("InternVLChatModel",),
        {
            "pixel_values_flat": Flat("image", "image_num_patches"),
            "image_num_patches": Batched("image", keep_on_cpu=True),
            "image_embeds": Batched("image"),
            "image_token_id": Shared("image", "image_num_patches", keep_on_cpu=True),
            "pixel_values_flat_video": Flat("video", "video_num_patches"),
            "video_num_patches": Batched("video", keep_on_cpu=True),
            "video_token_id": Shared("video", "video_num_patches", keep_on_cpu=True),
        },
    ),
    Layout(
        "internvl",
        ("InternVLForConditionalGeneration", "InternS1ForConditionalGeneration"),
        {
            "pixel_values": Flat("image", "image_num_patches"),
            "image_num_patches": Batched("image", keep_on_cpu=True),
            "image_embeds": Batched("image"),
            "image_token_id": Shared("image", "image_num_patches", keep_on_cpu=True),
            "pixel_values_videos": Flat("video", "video_num_patches"),
            "video_num_patches": Batched("video", keep_on_cpu=True),
            "video_token_id": Shared("video", "video_num_patches", keep_on_cpu=True),
        },
    ),
    Layout("gemma3", ("Gemma3ForConditionalGeneration",), _PATCHES),
    Layout(
        "cohere2_vision",
        ("Cohere2VisionForConditionalGeneration",),
        _PATCHES | {"image_embeds": Batched("image")},
    ),
    Layout("gemma3n", ("Gemma3nForConditionalGeneration",), {"pixel_values": Batched("image")}),
    Layout(
        "gemma4",
        ("Gemma4ForConditionalGeneration",),
        {
            "pixel_values": Batched("image"),
            "pixel_position_ids": Batched("image"),
            "pixel_values_videos": Flat("video", "video_frame_counts"),
            "pixel_position_ids_videos": Flat("video", "video_frame_counts"),
            "video_frame_counts": Batched("video", keep_on_cpu=True),
            "video_num_soft_tokens": Batched("video", keep_on_cpu=True),
            "video_timestamps": Batched("video", keep_on_cpu=True),
        },
    ),
    Layout(
        "idefics3",
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        _PATCHES | {"pixel_attention_mask": Flat("image", "num_patches"), "image_embeds": Batched("image")},
    ),
    Layout("llava", ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"), _LLAVA),
    Layout("llava_next", ("LlavaNextForConditionalGeneration", "Phi3VForCausalLM"), _LLAVA_NEXT),
    Layout(
        "llava_onevision",
        ("LlavaOnevisionForConditionalGeneration",),
        _LLAVA_NEXT | {"pixel_values_videos": Batched("video")},
    ),
    Layout("pixtral", ("PixtralForConditionalGeneration",), {"images": Batched("image")}),
    Layout(
        "llama4",
        ("Llama4ForConditionalGeneration",),
        {
            "pixel_values": Flat("image", "patches_per_image"),
            "patches_per_image": Batched("image", keep_on_cpu=True),
            "aspect_ratios": Batched("image", keep_on_cpu=True),
        },
    ),
    Layout(
        "kimi_vl",
        ("KimiVLForConditionalGeneration",),
        {
            "pixel_values": Flat("image", "image_grid_hws", "grid"),
            "image_grid_hws": Batched("image", keep_on_cpu=True),
        },
    ),
    Layout(
        "kimi_k25",
        ("KimiK25ForConditionalGeneration",),
        {
            "pixel_values": Flat("vision_chunk", "grid_thws", "grid"),
            "grid_thws": Batched("vision_chunk", keep_on_cpu=True),
        },
    ),
    Layout(
        "minicpmv",
        ("MiniCPMV",),
        {
            "pixel_values": Batched("image"),
            "image_sizes": Batched("image", keep_on_cpu=True),
            "tgt_sizes": Batched("image", keep_on_cpu=True),
            "image_embeds": Batched("image"),
            "video_pixel_values": Batched("video"),
            "video_image_sizes": Batched("video", keep_on_cpu=True),
            "video_tgt_sizes": Batched("video", keep_on_cpu=True),
            "video_embeds": Batched("video"),
        },
    ),
    Layout(
        "aria",
        ("AriaForConditionalGeneration",),
        {k: Batched("image") for k in ("pixel_values", "pixel_mask")},
    ),
    Layout("paligemma", ("PaliGemmaForConditionalGeneration",), {"pixel_values": Batched("image")}),
)
_BY_ARCHITECTURE: Final = {name: layout for layout in LAYOUTS for name in layout.architectures}


def layout_of(architecture: str) -> Layout:
    """Return the layout of a model by its architecture, as `config.json` names it.

    Raises:
        EncodeError: There is no layout for it.
    """
    layout = _BY_ARCHITECTURE.get(architecture)
    if layout is None:
        raise EncodeError(
            f"no field layout for {architecture!r}",
            expected=f"one of {', '.join(sorted(_BY_ARCHITECTURE))}",
            remedy="Build a Layout from the _get_mm_fields_config of its vLLM model file",
        )
    return layout
