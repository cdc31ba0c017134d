"""What a batch gives a model equals what each sample gives it alone, for eight families of Transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit import error_of
from mmrender.errors import BatchError
from mmrender.media.policy import MediaPolicy
from mmrender.media.video import open_video
from mmrender.messages import VideoPart
from mmrender.training import collate, score_tokens, smallest_dummy, token_entropy, token_logprobs
from mmrender.training.positions import mrope_position_ids
from mmrender.training.recurrent import recurrent_segments
from training_models import (
    FAMILIES,
    MROPE_FAMILIES,
    PAD_ID,
    TinyFamily,
    make_sample,
    make_samples,
    tiny_family,
    video_sample,
)
from video_cases import VideoReference, frames_of, video_processor

LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {},
    "left": {"padding_side": "left", "multiple": 8},
    "packed": {"rows": [[3, 1, 0], [2, 4]], "multiple": 8},
    "packed_left": {"rows": [[1, 0, 3], [4], [2]], "padding_side": "left"},
}
COUNTS = (1, 0, 2, 3, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


def alone(tiny: TinyFamily, sample: Any) -> Any:
    """Logits of one sample as the model itself numbers and masks it."""
    inputs = collate([sample], tiny.family, pad_token_id=PAD_ID).model_inputs()
    del inputs["position_ids"], inputs["attention_mask"]
    return tiny.model(**inputs).logits[0]


def together(tiny: TinyFamily, batch: Any) -> dict[str, Any]:
    with recurrent_segments(tiny.model, batch):
        logits = tiny.model(**batch.model_inputs()).logits
    return dict(zip(batch.sample_ids, batch.split(logits), strict=True))


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for sample_id, logits in expected.items():
        torch.testing.assert_close(got[sample_id], logits, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_single_forwards(name: str, folder: Path) -> None:
    """In every layout; padding rows and dummies change nothing."""
    tiny = tiny_family(name, folder)
    samples = make_samples(tiny, COUNTS)
    dummy = smallest_dummy(samples)
    with torch.no_grad():
        expected = {sample.sample_id: alone(tiny, sample) for sample in samples}
        assert expected["s0"].std() > 0.5  # logits that were all alike would equal each other in any case
        for options in LAYOUTS.values():
            batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **options)
            assert_close(together(tiny, batch), expected)
        text_only = {"s1": expected["s1"]}
        padded = collate(samples[:2], tiny.family, pad_token_id=PAD_ID).with_padding_rows(2)
        packed = collate([samples[1], dummy], tiny.family, pad_token_id=PAD_ID, rows=[[0, 1], []])
        for batch in (padded, packed):
            assert_close(together(tiny, batch), text_only)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_videos_beside_images(name: str, folder: Path) -> None:
    tiny = tiny_family(name, folder)
    samples = [video_sample(tiny, 2), *make_samples(tiny, (1, 0)), video_sample(tiny, 3, seed=1)]
    with torch.no_grad():
        expected = {sample.sample_id: alone(tiny, sample) for sample in samples}
        for options in ({}, {"rows": [[3, 1], [0, 2]]}):
            batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **options)
            assert batch.fields["video_grid_thw"].values[:, 0].sum() == 5
            assert_close(together(tiny, batch), expected)


def video_item(whole: str, processor: Any, reference: VideoReference, frames: Any) -> tuple[Any, Any]:
    """Return our item of a video, and the reference's inputs for it."""
    metadata = {"total_num_frames": 99, "fps": 12.5, "frames_indices": [3 * n for n in range(len(frames))]}
    part = VideoPart(frames, fps=12.5, frames_indices=tuple(metadata["frames_indices"]), total_num_frames=99)
    with open_video(part, MediaPolicy(), "video") as video:
        item = processor.prepare(video).finish()
    found = reference.process(frames, metadata, sampled=True)
    inputs = {
        "pixel_values_videos": torch.from_numpy(found.pixels),
        "video_grid_thw": torch.tensor([found.grid]),
    }
    if whole == "Qwen2_5_VLProcessor":
        inputs["second_per_grid_ts"] = torch.tensor([found.seconds])
    return item, inputs


@pytest.mark.parametrize(
    ("name", "video", "whole"),
    [
        ("qwen2_5_vl", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
        ("qwen3_vl", "Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
        ("qwen3_5", "Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
        ("glm4v", "Glm4vVideoProcessor", "Glm4vProcessor"),
    ],
)
def test_videos_as_the_reference_gives_them(
    name: str, video: str, whole: str, folder: Path, tmp_path: Path
) -> None:
    """Odd numbers of frames, packed and padded, and expanded on the device, as in forwards of their own."""
    tiny = tiny_family(name, folder)
    patch = tiny.model.config.vision_config.patch_size
    settings = {
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 8 * (2 * patch) ** 2, "longest_edge": 60 * (2 * patch) ** 2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = video_processor(tmp_path, video, whole, settings)
    reference = VideoReference(video, whole, settings)
    samples, expected = make_samples(tiny, (1, 0)), {}
    with torch.no_grad():
        for count in (2, 3, 7):
            item, inputs = video_item(whole, processor, reference, frames_of(count, 40 + count, 70))
            sample = make_sample([item], np.random.default_rng(count), name=f"v{count}")
            types = torch.from_numpy(sample.mm_token_type_ids)[None]
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
            expected[sample.sample_id] = tiny.model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[
                0
            ]
            samples.append(sample)
        rng = np.random.default_rng(0)
        samples.append(make_sample([tiny.item(rng), item], rng, name="both"))
        for options in ({}, {"padding_side": "left"}, {"rows": [[3, 0, 2], [4, 5, 1]]}, {"device": "cpu"}):
            batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **options)
            for sample_id, logits in together(tiny, batch).items():
                # Those without a forward by the reference are compared between layouts.
                known = expected.setdefault(sample_id, logits)
                torch.testing.assert_close(logits, known, atol=5e-5, rtol=0)


def test_logprobs_are_those_of_the_models_own_loss(folder: Path) -> None:
    tiny = tiny_family("qwen2_vl", folder)
    batch = collate(make_samples(tiny, (1, 0)), tiny.family, pad_token_id=PAD_ID)
    with torch.no_grad():
        output = tiny.model(**batch.model_inputs(), labels=batch.labels())
        ours = token_logprobs(output.logits, batch)
    torch.testing.assert_close(-ours[batch.loss_mask].mean(), output.loss)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_scored_without_logits(name: str, folder: Path) -> None:
    """Values and all gradients equal those from logits."""
    tiny = tiny_family(name, folder)
    batch = collate(make_samples(tiny, COUNTS), tiny.family, pad_token_id=PAD_ID, **LAYOUTS["packed"])
    with recurrent_segments(tiny.model, batch):
        logits = tiny.model(**batch.model_inputs()).logits
        found = score_tokens(tiny.model, batch, entropy=True, tile=(3, 32))
        plain = torch.where(batch.loss_mask, token_logprobs(logits, batch), 0.0), token_entropy(logits, batch)
        gradients = [
            torch.autograd.grad(
                (logprobs * entropy).sum(),
                list(tiny.model.parameters()),
                allow_unused=True,
                materialize_grads=True,
            )
            for logprobs, entropy in (found[:2], plain)
        ]
    torch.testing.assert_close(found[:2], plain, atol=2e-6, rtol=1e-6)
    for mine, theirs in zip(*gradients, strict=True):
        largest = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, atol=5e-6 * largest, rtol=0)


def test_a_whole_mask_serves_models_that_take_one(folder: Path) -> None:
    tiny = tiny_family("internvl", folder)
    samples = make_samples(tiny, COUNTS)
    batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **LAYOUTS["packed"])
    with torch.no_grad():
        expected = together(tiny, batch)
        inputs = batch.model_inputs() | {"attention_mask": batch.block_diagonal_mask(torch.float32)}
        got = dict(zip(batch.sample_ids, batch.split(tiny.model(**inputs).logits), strict=True))
    assert_close(got, expected)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_sdpa_takes_the_same_inputs(name: str, folder: Path) -> None:
    tiny = tiny_family(name, folder)
    samples = make_samples(tiny, COUNTS)
    batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **LAYOUTS["packed"])
    with torch.no_grad():
        expected = together(tiny, batch)
        tiny.model.set_attn_implementation("sdpa")
        try:
            got = together(tiny, batch)
        finally:
            tiny.model.set_attn_implementation("eager")
    assert_close(got, expected)


def test_without_segments_a_recurrent_model_would_mix_samples(folder: Path) -> None:
    tiny = tiny_family("qwen3_5", folder)
    samples = make_samples(tiny, COUNTS)
    batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **LAYOUTS["packed"])
    assert error_of(BatchError, batch.model_inputs) == (
        "row 0: the recurrent layers of qwen3_5 would run from a sample or padding into the next - "
        "expected a block `with recurrent_segments(model, batch)` around this call and the forward. "
        "Enter it, pad on the right, or say kept_apart=True if your kernels take the bounds"
    )
    left = collate(samples, tiny.family, pad_token_id=PAD_ID, padding_side="left")
    assert error_of(BatchError, left.model_inputs) == error_of(BatchError, batch.model_inputs)
    with torch.no_grad():
        expected = together(tiny, batch)
        logits = tiny.model(**batch.model_inputs(kept_apart=True)).logits
    mixed = dict(zip(batch.sample_ids, batch.split(logits), strict=True))
    assert (mixed["s0"] - expected["s0"]).abs().max() > 1e-2
    assert error_of(BatchError, recurrent_segments(torch.nn.Linear(1, 1), batch).__enter__) == (
        "Linear: the recurrent layers of qwen3_5 are not found - expected modules named linear_attn. "
        "Use padded batches"
    )


class Layout:
    """A random row of text, images and videos, as a family's processor would number it."""

    def __init__(self, rng: np.random.Generator, frames_apart: bool, merge: int) -> None:
        types: list[int] = []
        self.images: list[list[int]] = []
        self.videos: list[list[int]] = []
        self.seconds: list[float] = []
        for _ in range(rng.integers(0, 5)):
            types += [0] * int(rng.integers(1, 9))
            height, width = (rng.integers(1, 7, 2) * merge).tolist()
            tokens = height * width // merge**2
            if rng.random() < 0.6:
                self.images.append([1, height, width])
                types += [1] * tokens
                continue
            steps = int(rng.integers(1, 5))
            self.videos.append([steps, height, width])
            self.seconds.append(float(rng.choice([0.5, 1.0, 1.3, 2.0])))
            types += (
                ([2] * tokens + [0] * int(rng.integers(1, 4))) * steps
                if frames_apart
                else [2] * tokens * steps
            )
        self.types = types + [0] * int(rng.integers(1, 20))


def stacked(rows: list[list[list[int]]]) -> Any:
    grids = [grid for row in rows for grid in row]
    return torch.tensor(grids) if grids else None


@pytest.mark.parametrize("name", MROPE_FAMILIES)
def test_positions_equal_the_models_own_over_500_layouts(name: str, folder: Path) -> None:
    tiny = tiny_family(name, folder)
    rope = tiny.family.mrope
    rng = np.random.default_rng(7)
    seen = {"image": 0, "video": 0, "rows": 0}
    while seen["rows"] < 500:
        rows = [Layout(rng, rope.frames_apart, rope.merge) for _ in range(rng.integers(1, 4))]
        seen["rows"] += len(rows)
        seen["image"] += sum(len(row.images) for row in rows)
        seen["video"] += sum(len(row.videos) for row in rows)
        images, videos = stacked([row.images for row in rows]), stacked([row.videos for row in rows])
        seconds = [value for row in rows for value in row.seconds]
        timed = {"second_per_grid_ts": torch.tensor(seconds)} if name == "qwen2_5_vl" and seconds else {}
        width, left = max(len(row.types) for row in rows), bool(rng.random() < 0.5)
        types, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
        segments = []
        for index, row in enumerate(rows):
            start = width - len(row.types) if left else 0
            segments.append([(start, len(row.types))])
            types[index, start : start + len(row.types)] = row.types
            mask[index, start : start + len(row.types)] = 1
        expected, _ = tiny.model.model.get_rope_index(
            torch.ones(types.shape, dtype=torch.int64),
            mm_token_type_ids=torch.from_numpy(types),
            image_grid_thw=images,
            video_grid_thw=videos,
            attention_mask=torch.from_numpy(mask),
            **timed,
        )
        given = {"image_grid_thw": images, "video_grid_thw": videos, **timed}
        got = mrope_position_ids(types, rope, segments=segments, **given)
        np.testing.assert_array_equal(got, expected.numpy())
        packed = np.concatenate([row.types for row in rows])[None]
        starts = np.cumsum([0, *(len(row.types) for row in rows)]).tolist()
        spans = [[(start, len(row.types)) for start, row in zip(starts, rows, strict=False)]]
        in_one_row = mrope_position_ids(packed, rope, segments=spans, **given)
        by_row = [
            expected.numpy()[:, index, start : start + length]
            for index, [(start, length)] in enumerate(segments)
        ]
        np.testing.assert_array_equal(in_one_row[:, 0], np.concatenate(by_row, axis=1))
    assert min(seen.values()) > 200
