"""Tiny models of the families that batches are built for, with random weights, and samples that fit them.

Nothing is read from elsewhere: configurations are made here, images come from the family's own processor with
small settings, and token ids are drawn. Attention is eager and everything float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from adapter_models import gemma3 as gemma3_directory
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchItem
from mmrender.media.processors.registry import load_processor
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange, Repeat, Text
from mmrender.training import ModelFamily
from mmrender.trajectory.sample import TrainingSample
from training_cases import IMAGE_ID, PAD_ID, item_tokens, patch_processor
from training_processors import idefics3 as idefics3_directory
from training_processors import internvl as internvl_directory

VOCABULARY = 100
VIDEO_ID, START_ID, END_ID = 91, 92, 93
TEXT_IDS = range(1, 80)
_TOKENS = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
_VISION_TOKENS = {"vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
_TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD_ID},
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


@dataclass(frozen=True)
class TinyFamily:
    """A model, what it takes, and its image processor."""

    name: str
    model: Any
    family: ModelFamily
    process: Callable[[Image.Image], MediaItem]

    def item(self, rng: np.random.Generator) -> MediaItem:
        """An image of random pixels and size."""
        size = (*rng.integers(20, 120, 2).tolist(), 3)
        return self.process(Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8), "RGB"))


def make_sample(
    items: Sequence[MediaItem], rng: np.random.Generator, *, name: str = "", most_text: int = 12
) -> TrainingSample:
    """Text, and images between; the last tokens are sampled ones."""
    ids: list[int] = []
    entries = []
    for item in items:
        ids += rng.choice(TEXT_IDS, rng.integers(1, most_text)).tolist() + [START_ID]
        own, placeholder = item_tokens(item)
        entries.append((placeholder.shifted(len(ids)), item))
        ids += [*own, END_ID]
    ids += rng.choice(TEXT_IDS, rng.integers(3, most_text + 3)).tolist()
    mask = np.zeros(len(ids), np.bool_)
    mask[-2:] = True
    logprobs = np.where(mask, -rng.random(len(ids)), 0).astype(np.float32)
    return TrainingSample(np.array(ids, np.int32), mask, logprobs, MultiModalData.of(entries), sample_id=name)


def video_sample(tiny: TinyFamily, steps: int, seed: int = 0) -> TrainingSample:
    """A video between text, its frames apart where the family has them so, and an image after it."""
    rng = np.random.default_rng(seed)
    still = tiny.item(rng)
    assert isinstance(still, PatchItem)
    _, height, width = still.grid
    count = steps * still.layout.temporal
    frames = rng.integers(0, 256, (count, *still.frames.shape[1:]), dtype=np.uint8)
    tokens = height * width // still.layout.merge**2
    apart = tiny.family.mrope is not None and tiny.family.mrope.frames_apart
    frame = Repeat("<|video_pad|>", tokens if apart else steps * tokens)
    expansion = (Text("<0.5 seconds>"), frame) * steps if apart else (frame,)
    video = msgspec.structs.replace(
        still,
        modality="video",
        identity=f"{seed:064x}",
        grid=(steps, height, width),
        frames=frames,
        expansion=expansion,
    )
    ids = [5, 6, START_ID]
    spans = []
    for _ in range(steps if apart else 1):
        ids += [7, 8] if apart else []
        spans.append((len(ids) - 3, len(ids) - 3 + frame.count))
        ids += [VIDEO_ID] * frame.count
    entries = [(PlaceholderRange(3, len(ids) - 3, tuple(spans)), video)]
    own, placeholder = item_tokens(still)
    entries.append((placeholder.shifted(len(ids) + 2), still))
    ids += [END_ID, START_ID, *own, END_ID, 9, 10]
    zeros = np.zeros(len(ids), np.float32)
    return TrainingSample(
        np.array(ids, np.int32),
        zeros.astype(np.bool_),
        zeros,
        MultiModalData.of(entries),
        sample_id=f"v{seed}",
    )


def make_samples(tiny: TinyFamily, counts: Sequence[int], seed: int = 0) -> list[TrainingSample]:
    """Samples with these numbers of images."""
    rng = np.random.default_rng(seed)
    return [
        make_sample([tiny.item(rng) for _ in range(count)], rng, name=f"s{index}")
        for index, count in enumerate(counts)
    ]


def _built(name: str, config: Any, process: Callable[[Image.Image], MediaItem]) -> TinyFamily:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in key:
                # Unit variance in, unit variance out: with the usual 0.02 all logits would be almost equal.
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return TinyFamily(name, model.eval(), ModelFamily.from_config(config), process)


_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
_WIDE = {**_VISION, "out_hidden_size": 32, "intermediate_size": 48}
_WINDOWED = {**_WIDE, "window_size": 56, "fullatt_block_indexes": [1]}
_DEEP = {**_WIDE, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
_FLAT = {**_DEEP, "deepstack_visual_indexes": []}
_ROPE = {"rope_parameters": _MROPE}
_SPLIT_ROPE = {"rope_parameters": {**_MROPE, "mrope_interleaved": True}}
_WHOLE_ROPE = {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}
_RECURRENT = {
    "rope_parameters": {**_SPLIT_ROPE["rope_parameters"], "partial_rotary_factor": 1.0},
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_conv_kernel_dim": 4,
}
_GLM_TOKENS = {"image_start_token_id": START_ID, "image_end_token_id": END_ID}
_GLM_TOKENS |= {"video_start_token_id": 94, "video_end_token_id": 95}
_PATCHES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLConfig", 14, {**_VISION, "embed_dim": 32}, _ROPE, _VISION_TOKENS),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", 14, _WINDOWED, _ROPE, _VISION_TOKENS),
    "qwen3_vl": ("Qwen3VLConfig", 16, _DEEP, _SPLIT_ROPE, _VISION_TOKENS),
    "qwen3_5": ("Qwen3_5Config", 16, _FLAT, _RECURRENT, _VISION_TOKENS),
    "glm4v": ("Glm4vConfig", 14, {**_WIDE, "image_size": 112}, _WHOLE_ROPE, _GLM_TOKENS),
}
"""Families of flat patches: class, side of a patch, and what the vision, text and whole configurations add."""

_DIRECTORIES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        gemma3_directory,
        {"image_size": 64, "patch_size": 8},
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        {"mm_tokens_per_image": 16, "boi_token_index": START_ID, "eoi_token_index": END_ID},
    ),
    "internvl": (
        "InternVLConfig",
        internvl_directory,
        {"image_size": [28, 28], "patch_size": [7, 7]},
        {"model_type": "qwen2"},
        {"image_seq_length": 4, "downsample_ratio": 0.5},
    ),
    "idefics3": (
        "Idefics3Config",
        idefics3_directory,
        {"image_size": 32, "patch_size": 8},
        {"model_type": "llama"},
        {"scale_factor": 2, "pad_token_id": PAD_ID},
    ),
}
"""The other families: class, processor directory, and what the configurations add."""
MROPE_FAMILIES = tuple(_PATCHES)
FAMILIES = (*MROPE_FAMILIES, *_DIRECTORIES)


@cache
def tiny_family(name: str, folder: Path) -> TinyFamily:
    """The tiny model of a family; `folder` is where processor directories are written."""
    import transformers

    if name in _PATCHES:
        kind, patch, vision, text, rest = _PATCHES[name]
        processor: Any = patch_processor(patch, 36)
        vision, rest = {**vision, "patch_size": patch}, {**rest, **_TOKENS}
    else:
        kind, directory, vision, text, rest = _DIRECTORIES[name]
        processor = load_processor(directory(folder / name), image_backend="pil")
        vision, rest = {**_LAYERS, **vision}, {**rest, "image_token_id": IMAGE_ID}
    config = getattr(transformers, kind)(text_config={**_TEXT, **text}, vision_config=vision, **rest)
    return _built(name, config, lambda image: processor.process(load_image(image)))
