"""Samples for batches without any model: items of each kind of joining, and what they must come out as."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrender.media.item import ProcessedItem
from mmrender.media.levels import PixelArithmetic, compacted
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchLayout, PatchProcessor
from mmrender.sidecar import MediaItem, MultiModalData, PlaceholderRange, Repeat, Text
from mmrender.training import ModelFamily, TrainingBatch
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.sample import TrainingSample

IMAGE_ID, PAD_ID = 90, 0
HALF = PixelArithmetic((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, "pil")


def family_of(model_type: str, **vision: Any) -> ModelFamily:
    config = {"model_type": model_type, "image_token_id": IMAGE_ID}
    return ModelFamily.from_config(config | {"vision_config": {"spatial_merge_size": 2, **vision}})


def patch_processor(patch: int, most_tokens: int) -> PatchProcessor:
    """The Qwen2-VL kind, images of 4 to `most_tokens` tokens."""
    pixels = (2 * patch) ** 2
    return PatchProcessor(
        name="Qwen2VLImageProcessor",
        image_backend="pil",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        layout=PatchLayout(patch, 2, 2),
        arithmetic=HALF,
        min_pixels=4 * pixels,
        max_pixels=most_tokens * pixels,
        counts_frames=False,
    )


PROCESSOR = patch_processor(4, 16)


def patch_item(height: int, width: int, seed: int = 0) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PROCESSOR.process(load_image(Image.fromarray(pixels, "RGB")))


def tiled_item(shape: Sequence[int], tokens: int, seed: int = 0, **others: Any) -> ProcessedItem:
    """An item of random pixels `shape`, whose tokens stand in rows with separators."""
    levels = np.random.default_rng(seed).integers(0, 256, (*shape[:-3], *shape[-3:]), dtype=np.uint8)
    values = HALF.table()[np.arange(3)[:, None, None], levels]
    parts = {"pixel_values": compacted(values, HALF)}
    parts |= {name: compacted(np.asarray(array), None) for name, array in others.items()}
    half = tokens // 2
    rows = Repeat("<image>", half), Repeat("<sep>", 1, embeds=False), Repeat("<image>", tokens - half)
    expansion = (Text("<row>"), *rows)
    return ProcessedItem(identity=f"{seed:064x}", size=(8, 8), grid=(1,), expansion=expansion, parts=parts)


@dataclass(frozen=True)
class Kind:
    """A family and some of its items."""

    family: ModelFamily
    items: tuple[MediaItem, ...]


@cache
def kinds() -> dict[str, Kind]:
    sizes = [(8, 40), (16, 16), (40, 24), (20, 20)]

    def rows(count: int, tokens: int, **others: Any) -> ProcessedItem:
        return tiled_item((1, count, 3, 6, 6), tokens * count, seed=count, **others)

    items: dict[str, tuple[str, list[Any]]] = {
        "patches": ("qwen3_vl", [patch_item(*size, seed=i) for i, size in enumerate(sizes)]),
        "tiles": ("internvl", [tiled_item((n, 3, 6, 6), 2 * n, seed=n) for n in (1, 2, 4)]),
        "rows": (
            "idefics3",
            [rows(n, 2, pixel_attention_mask=np.ones((1, n, 6, 6), int)) for n in (1, 2, 3)],
        ),
        "padded": ("llava_next", [rows(n, 3, image_sizes=np.array([[n, 9]])) for n in (1, 2, 3)]),
        "counts": ("llava_onevision", [rows(n, 3) for n in (1, 2)]),
    }
    return {name: Kind(family_of(kind), tuple(given)) for name, (kind, given) in items.items()}


def item_tokens(item: MediaItem) -> tuple[list[int], PlaceholderRange]:
    """What stands for an item in a prompt, and the range of it if it stood at the start."""
    ids: list[int] = []
    spans = []
    for piece in item.expansion:
        count = piece.count if isinstance(piece, Repeat) else 2
        embeds = isinstance(piece, Repeat) and piece.embeds
        if embeds:
            spans.append((len(ids), len(ids) + count))
        token = IMAGE_ID + ("video" in piece.token) if isinstance(piece, Repeat) else 7
        ids += [token if embeds else 7] * count
    whole = len(spans) == 1 and spans[0] == (0, len(ids))
    return ids, PlaceholderRange(0, len(ids), None if whole else tuple(spans))


def sample(
    items: Sequence[MediaItem] = (), text: int = 4, *, name: str = "", seed: int = 0, experts: bool = False
) -> TrainingSample:
    """`text` tokens, an image, as many tokens again, ...; the last tokens are trained on."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(10, 80, text).tolist()
    entries = []
    for item in items:
        own, placeholder = item_tokens(item)
        entries.append((placeholder.shifted(len(ids)), item))
        ids += own + rng.integers(10, 80, text).tolist()
    mask = np.arange(len(ids)) >= max(1, len(ids) - text)
    values = rng.random((3, len(ids))).astype(np.float32)
    given = TrainingSample(
        np.array(ids, np.int32),
        mask,
        np.where(mask, -values[0], 0).astype(np.float32),
        MultiModalData.of(entries),
        sample_id=name,
    )
    if not experts:
        return given
    data = rng.integers(0, 8, (len(ids) - 1, 2, 3)).astype(np.uint8)
    return replace(given, advantages=values[1], rewards=values[2], routed_experts=RoutedExperts(data))


def expected_fields(
    samples: Sequence[TrainingSample], family: ModelFamily, like: TrainingBatch
) -> dict[str, Any]:
    """What one row of a batch must hold of the images of its samples, computed the plain way."""
    out: dict[str, list[Any]] = {}
    for one in samples:
        items = one.multi_modal_data.mm_items.get("image", ())
        for item in items:
            for name, array in item.tensors(framework="torch").items():
                value = array[0] if family.rule(name).layout == "rows" else array
                trailing = like.fields[name].trailing
                full = torch.zeros((value.shape[0], *trailing), dtype=value.dtype)
                full[tuple(slice(0, side) for side in value.shape)] = value
                out.setdefault(name, []).append(full)
        if items and family.rule("batch_num_images").layout == "counts":
            out.setdefault("batch_num_images", []).append(torch.tensor([len(items)]))
    return {name: torch.cat(values) for name, values in out.items()}
