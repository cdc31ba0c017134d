"""Tiny models of the families that batches are built for, with random weights, and samples that fit them.

Nothing is read from elsewhere: configurations are made here, images come from the family's own processor with
small settings, and token ids are drawn. Attention is eager and everything float32.
"""

import zlib
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
from mmrender.media.item import PatchItem, PatchLayout
from mmrender.media.levels import PixelArithmetic
from mmrender.media.load import load_image
from mmrender.media.processors.qwen import PatchProcessor
from mmrender.media.processors.registry import load_processor
from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange, Repeat, Text
from mmrender.training import ModelFamily
from mmrender.trajectory.sample import TrainingSample
from training_processors import idefics3 as idefics3_directory
from training_processors import internvl as internvl_directory

VOCABULARY = 100
IMAGE_ID, VIDEO_ID, START_ID, END_ID, PAD_ID = 90, 91, 92, 93, 0
TEXT_IDS = range(1, 80)
_TOKENS = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
_VISION_TOKENS = {"vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD_ID,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


def patch_processor(patch: int) -> PatchProcessor:
    """The Qwen2-VL kind, images of 4 to 36 tokens."""
    pixels = (2 * patch) ** 2
    return PatchProcessor(
        name="Qwen2VLImageProcessor",
        image_backend="pil",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        layout=PatchLayout(patch, 2, 2),
        arithmetic=PixelArithmetic((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, "pil"),
        min_pixels=4 * pixels,
        max_pixels=36 * pixels,
        counts_frames=False,
    )


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


def _id(text: str) -> int:
    return TEXT_IDS[zlib.crc32(text.encode()) % len(TEXT_IDS)]


def expanded_ids(item: MediaItem) -> tuple[list[int], PlaceholderRange]:
    """What stands for an item in a prompt, and the range of it if it stood at the start."""
    ids: list[int] = []
    spans = []
    for piece in item.expansion:
        if not isinstance(piece, Repeat):
            ids += [_id(piece.text), _id(piece.text[::-1])]
            continue
        if piece.embeds:
            spans.append((len(ids), len(ids) + piece.count))
        ids += [IMAGE_ID if piece.embeds else _id(piece.token)] * piece.count
    return ids, PlaceholderRange(0, len(ids), tuple(spans))


def make_sample(
    items: Sequence[MediaItem], rng: np.random.Generator, *, name: str = "", most_text: int = 12
) -> TrainingSample:
    """Text, and images between; the last tokens are sampled ones."""
    ids: list[int] = []
    entries = []
    for item in items:
        ids += rng.choice(TEXT_IDS, rng.integers(1, most_text)).tolist() + [START_ID]
        own, placeholder = expanded_ids(item)
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
    own, placeholder = expanded_ids(still)
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


def _with_patches(name: str, config: Any, patch: int) -> TinyFamily:
    processor = patch_processor(patch)
    return _built(name, config, lambda image: processor.process(load_image(image)))


def _qwen2_vl(_: Path) -> TinyFamily:
    from transformers import Qwen2VLConfig

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    config = Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_TOKENS, **_VISION_TOKENS
    )
    return _with_patches("qwen2_vl", config, 14)


def _qwen2_5_vl(_: Path) -> TinyFamily:
    from transformers import Qwen2_5_VLConfig

    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 14}
    vision |= {"intermediate_size": 48, "window_size": 56, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_TOKENS, **_VISION_TOKENS
    )
    return _with_patches("qwen2_5_vl", config, 14)


def _qwen3_vl(_: Path) -> TinyFamily:
    from transformers import Qwen3VLConfig

    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 16}
    vision |= {"intermediate_size": 48, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision_config=vision,
        **_TOKENS,
        **_VISION_TOKENS,
    )
    return _with_patches("qwen3_vl", config, 16)


def _qwen3_5(_: Path) -> TinyFamily:
    from transformers import Qwen3_5Config

    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 16}
    vision |= {"intermediate_size": 48, "num_position_embeddings": 256, "deepstack_visual_indexes": []}
    text = {**_TEXT, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    text |= {"rope_parameters": {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}}
    config = Qwen3_5Config(text_config=text, vision_config=vision, **_TOKENS, **_VISION_TOKENS)
    return _with_patches("qwen3_5", config, 16)


def _glm4v(_: Path) -> TinyFamily:
    from transformers import Glm4vConfig

    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 14}
    vision |= {"intermediate_size": 48, "image_size": 112}
    text = {**_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}
    config = Glm4vConfig(
        text_config=text,
        vision_config=vision,
        image_start_token_id=START_ID,
        image_end_token_id=END_ID,
        video_start_token_id=94,
        video_end_token_id=95,
        **_TOKENS,
    )
    return _with_patches("glm4v", config, 14)


def _from_directory(name: str, config: Any, directory: Path) -> TinyFamily:
    processor = load_processor(directory, image_backend="pil")
    assert processor is not None
    return _built(name, config, lambda image: processor.process(load_image(image)))


def _gemma3(folder: Path) -> TinyFamily:
    from transformers import Gemma3Config

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 64, "patch_size": 8}
    text = {**_TEXT, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        image_token_id=IMAGE_ID,
        boi_token_index=START_ID,
        eoi_token_index=END_ID,
    )
    return _from_directory("gemma3", config, gemma3_directory(folder / "gemma3"))


def _internvl(folder: Path) -> TinyFamily:
    from transformers import InternVLConfig

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": [28, 28], "patch_size": [7, 7]}
    config = InternVLConfig(
        text_config={**_TEXT, "model_type": "qwen2"},
        vision_config=vision,
        image_token_id=IMAGE_ID,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return _from_directory("internvl", config, internvl_directory(folder / "internvl"))


def _idefics3(folder: Path) -> TinyFamily:
    from transformers import Idefics3Config

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    config = Idefics3Config(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config=vision,
        image_token_id=IMAGE_ID,
        scale_factor=2,
        pad_token_id=PAD_ID,
    )
    return _from_directory("idefics3", config, idefics3_directory(folder / "idefics3"))


_BUILDERS: dict[str, Callable[[Path], TinyFamily]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "glm4v": _glm4v,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "idefics3": _idefics3,
}
FAMILIES = tuple(_BUILDERS)
MROPE_FAMILIES = FAMILIES[:5]


@cache
def tiny_family(name: str, folder: Path) -> TinyFamily:
    """The tiny model of a family; `folder` is where processor directories are written."""
    return _BUILDERS[name](folder)
