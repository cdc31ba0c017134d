"""Images of a batch are joined as the model's own processor joins them, for every kind of joining."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import adapter_models
import training_processors
from mmrender.media.load import load_image
from mmrender.media.processor import ProcessorFiles
from mmrender.media.processors.reference import build_reference_processor
from mmrender.media.processors.registry import load_processor
from mmrender.sidecar import MultiModalData, PlaceholderRange, Repeat
from mmrender.training import ModelFamily, collate
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.trajectory.sample import TrainingSample

KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gemma3": (adapter_models.gemma3, "gemma3"),
    "pixtral": (adapter_models.pixtral, "llava"),
    "llava": (adapter_models.llava, "llava"),
    "llava_next": (adapter_models.llava_next, "llava_next"),
    "llava_onevision": (adapter_models.llava_onevision, "llava_onevision"),
    "internvl": (training_processors.internvl, "internvl"),
    "idefics3": (training_processors.idefics3, "idefics3"),
}
SIZES = [[(40, 120)], [(100, 30), (64, 64), (90, 140)], [(33, 35)]]


def sample_of(items: list[Any]) -> TrainingSample:
    entries, end = [], 0
    for item in items:
        length = sum(piece.count for piece in item.expansion if isinstance(piece, Repeat) and piece.embeds)
        entries.append((PlaceholderRange(end, length), item))
        end += length
    zeros = np.zeros(end + 1, np.float32)
    return TrainingSample(zeros.astype(np.int32), zeros.astype(np.bool_), zeros, MultiModalData.of(entries))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], SIZES[1:2]], ids=["mixed", "one", "three"])
def test_joined_as_the_processor_joins(kind: str, sizes: list[Any], tmp_path: Path) -> None:
    build, model_type = KINDS[kind]
    directory = build(tmp_path / kind)
    processor = load_processor(directory, image_backend="pil")
    reference = build_reference_processor(ProcessorFiles.read(directory), "pil")
    rng = np.random.default_rng(3)
    images = [
        [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8), "RGB") for size in row]
        for row in sizes
    ]
    placeholder = processor.placeholder["image"]
    texts = ["before " + " between ".join([placeholder] * len(row)) + " after" for row in images]
    theirs = reference(text=texts, images=images, return_tensors="pt", padding=True)
    samples = [
        sample_of([processor.process(load_image(image), num_images=len(row)) for image in row])
        for row in images
    ]
    family = ModelFamily(model_type, rules=ModelFamily.from_config({"model_type": model_type}).rules)
    ours = collate_mm_kwargs(samples, family)
    assert "pixel_values" in ours
    names = {name for name in theirs if "pixel" in name or "image" in name}
    assert set(ours) == names
    for name in names:
        expected = theirs[name]
        assert ours[name].dtype == expected.dtype
        assert torch.equal(ours[name], expected), name
    batch = collate(samples, family, pad_token_id=0).select(range(len(samples))).model_inputs()
    packed = collate(samples, family, pad_token_id=0, rows=[list(range(len(samples)))]).model_inputs()
    for name in names:
        assert torch.equal(batch[name], theirs[name]), name
        if family.rule(name).layout == "rows":
            whole = torch.cat(_held(theirs[name], samples, name))
            assert torch.equal(packed[name], whole[None]), name
        else:
            assert torch.equal(packed[name], theirs[name]), name


def _held(values: Any, samples: list[TrainingSample], name: str) -> list[Any]:
    """Of rows filled with zeros, what each sample's own images are."""
    counts = [
        sum(item.tensors()[name].shape[1] for item in sample.multi_modal_data.mm_items["image"])
        for sample in samples
    ]
    return [row[:count] for row, count in zip(values, counts, strict=True)]
