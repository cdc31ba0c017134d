"""Building batches: what is refused and by which name, dtypes, memory, router choices, dummies."""

import math
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmcodecs
from kit import error_of
from mmcodecs import BufferPool
from mmrender import Trajectory
from mmrender.errors import BatchError, ModelError
from mmrender.media.levels import compacted
from mmrender.media.processors.patches import PatchItem
from mmrender.sidecar import MultiModalData, PlaceholderRange
from mmrender.training import (
    Descriptor,
    ModelFamily,
    TrainingBatch,
    TrajectoryDataset,
    collate,
    collate_micro_batch,
    fields,
    plan_steps,
    smallest_dummy,
    token_logprobs,
)
from mmrender.training.collate import usable
from mmrender.training.fields import collate_fields, pins
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.logprobs import importance_weights
from mmrender.training.packing import MicroBatch, compute_cost
from mmrender.trajectory import load_trajectories, save_trajectories
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.sample import TrainingSample
from training_cases import (
    HALF,
    IMAGE_ID,
    PAD_ID,
    family_of,
    item_tokens,
    kinds,
    patch_item,
    sample,
    tiled_item,
)

FAMILY = family_of("qwen3_vl")
ITEM = patch_item(16, 16)


def batch_of(*samples: TrainingSample, family: ModelFamily = FAMILY, **options: Any) -> TrainingBatch:
    return collate(samples, family, pad_token_id=PAD_ID, **options)


def test_memory_of_a_batch_is_used_again_when_its_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a batch of other images. What is still referenced keeps its values."""
    monkeypatch.setattr(fields, "_memory", BufferPool(max_idle_bytes=64 << 20))
    samples = [sample([patch_item(384, 640, seed=seed)]) for seed in range(3)]

    def pixels(index: int) -> torch.Tensor:
        return batch_of(samples[index]).fields["pixel_values"].values

    first = pixels(0)
    kept, place = first[:1], first.data_ptr()
    expected = kept.clone()
    del first
    second = pixels(1)
    assert second.data_ptr() != place
    assert torch.equal(kept, expected)
    del kept
    third = pixels(2)
    assert third.data_ptr() == place
    assert torch.equal(
        third, torch.from_numpy(samples[2].multi_modal_data.mm_items["image"][0].tensors()["pixel_values"])
    )


def changed(base: TrainingSample, **arrays: Any) -> TrainingSample:
    given = {name: np.asarray(value, getattr(base, name).dtype) for name, value in arrays.items()}
    return replace(base, **given)


def test_by_hand() -> None:
    one = TrainingSample(
        np.array([5, 90, 90, 90, 90, 6], np.int32),
        np.arange(6) == 5,
        np.array([0, 0, 0, 0, 0, -0.5], np.float32),
        MultiModalData.of([(PlaceholderRange(1, 4), patch_item(16, 16))]),
    )
    two = TrainingSample(
        np.array([7, 8], np.int32), np.array([False, True]), np.array([0, -1.0], np.float32), sample_id="two"
    )
    left = batch_of(one, two, padding_side="left")
    assert left.input_ids.tolist() == [[5, 90, 90, 90, 90, 6], [0, 0, 0, 0, 7, 8]]
    assert left.attention_mask.int().tolist() == [[1] * 6, [0, 0, 0, 0, 1, 1]]
    assert left.token_types.tolist() == [[0, 1, 1, 1, 1, 0], [0] * 6]
    assert left.logprobs.tolist() == [[0, 0, 0, 0, 0, -0.5], [0, 0, 0, 0, 0, -1.0]]
    assert left.positions.tolist() == [
        [[0, 1, 1, 1, 1, 3], [0, 0, 0, 0, 0, 1]],
        [[0, 1, 1, 2, 2, 3], [0, 0, 0, 0, 0, 1]],
        [[0, 1, 2, 1, 2, 3], [0, 0, 0, 0, 0, 1]],
    ]
    assert left.sample_ids == ["samples[0]", "two"]
    assert [tuple(row.shape) for row in left.fields["pixel_values"]] == [(16, 96), (0, 96)]
    packed = batch_of(one, two, rows=[[1, 0]], multiple=5)
    assert packed.input_ids.tolist() == [[7, 8, 5, 90, 90, 90, 90, 6, 0, 0]]
    assert packed.seq_lens == [2, 6]
    assert packed.cu_seqlens().tolist() == [0, 2, 8, 10]
    assert packed.cu_seqlens().dtype == torch.int32
    inputs = packed.model_inputs()
    assert "attention_mask" not in inputs
    assert inputs["position_ids"][0].tolist() == [[0, 1, 0, 1, 2, 3, 4, 5, 0, 0]]
    assert inputs["position_ids"][3].tolist() == [[0, 1, 0, 1, 2, 1, 2, 3, 0, 0]]
    assert (packed.width, len(packed)) == (10, 1)


def test_recorded_conversations_are_batched_without_logprobs() -> None:
    recorded = replace(sample([ITEM], name="recorded"), logprobs=None)
    assert batch_of(recorded).with_padding_rows(1).logprobs is None
    with pytest.raises(BatchError, match=r"^b\.logprobs: samples of one batch have the same fields"):
        batch_of(recorded, sample(name="b"))


def test_weight_versions_and_extra_reach_the_batch_by_every_path(tmp_path: Path) -> None:
    """From a branch or all of them, shipped, from a file; in rows of either kind, cut, joined and sent."""
    own, placeholder = item_tokens(ITEM)
    trajectory = Trajectory("t", extra={"group": 3})
    trajectory.append(
        [5, 6, *own, 7],
        [40, 41],
        logprobs=[-1, -1],
        multi_modal_data=MultiModalData.of([(placeholder.shifted(2), ITEM)]),
        weight_versions=[WeightVersionSpan("step-7", 0, 1), WeightVersionSpan("step-8", 1, 2)],
    )
    start = 3 + len(own)
    versions = (("step-7", start, start + 1), ("step-8", start + 1, start + 2))
    save_trajectories(tmp_path / "run", [trajectory])
    (loaded,) = load_trajectories(tmp_path / "run")
    for held in (
        trajectory,
        pickle.loads(pickle.dumps(trajectory)),
        Trajectory.from_bytes(trajectory.to_bytes()),
        loaded,
    ):
        for one in (held.samples()[0], held.branches()[0].sample(), *TrajectoryDataset(tmp_path / "run")):
            for options in ({}, {"padding_side": "left", "multiple": 8}, {"rows": [[0, 1]]}):
                batch = batch_of(replace(one, sample_id="first"), one, **options)
                sent = mmcodecs.decode(mmcodecs.encode(batch), framework="torch", type=TrainingBatch)
                parts = (
                    batch.select([len(batch) - 1]),
                    TrainingBatch.cat([batch, batch]),
                    sent,
                    *batch.chunk(2),
                )
                for part in (batch, *parts, *batch.micro_batches(100), pickle.loads(pickle.dumps(batch))):
                    for segment in (segment for row in part.segments for segment in row):
                        assert segment.extra == {"group": 3, "trajectory_id": "t", "steps": (0,)}
                        assert segment.weight_versions == versions


def test_a_sampled_placeholder_costs_its_own_sample(sentence: Any) -> None:
    bad = changed(sample([ITEM], name="bad"), token_ids=np.append(GOOD.token_ids[:-1], IMAGE_ID))
    unpaired = replace(sample([ITEM], name="unpaired"), multi_modal_data=UNPAIRED)
    kept, left_out = usable([GOOD, bad, unpaired, sample()], FAMILY)
    assert [one.sample_id for one in kept] == ["a", ""]
    assert left_out["bad"] == sentence
    assert list(left_out) == ["bad", "unpaired"]
    batch_of(*kept)


def test_bounds_are_those_that_transformers_reads_off_the_positions() -> None:
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    family = family_of("llava")
    batch = batch_of(*[sample(text=n) for n in (3, 5, 4, 4)], family=family, rows=[[0, 1], [2, 3]])
    kwargs = batch.flash_attention_kwargs()
    (query, key), (longest_query, longest_key) = prepare_fa_kwargs_from_position_ids(
        batch.model_inputs()["position_ids"]
    )
    assert torch.equal(kwargs["cu_seq_lens_q"], query)
    assert torch.equal(kwargs["cu_seq_lens_k"], key)
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (longest_query, longest_key) == (5, 5)


def test_weights_and_staleness_by_token(sentence: Any) -> None:
    versions = (WeightVersionSpan("step-7", 4, 6), WeightVersionSpan("step-9", 6, 8))
    one = replace(sample(text=8, name="a"), weight_versions=versions, loss_mask=np.arange(8) >= 4)
    one.logprobs[:] = np.where(one.loss_mask, -1.0, 0.0)
    batch = batch_of(sample(text=2, name="b"), one, rows=[[0, 1]], width=12)
    behind = batch.staleness({"step-7": 7, "step-8": 8, "step-9": 9})
    assert behind.tolist() == [[0] * 6 + [2, 2, 0, 0, 0, 0]]
    assert error_of(BatchError, batch.staleness, {"step-9": 9}) == sentence
    model = torch.full((1, 12), -1.0, requires_grad=True) + torch.tensor([0.0] * 6 + [-1, 0, 0.5, 900, 0, 0])
    weights = importance_weights(model, batch, most=3.0)[0, 6:10]
    expected = [math.exp(-1), 1.0, math.exp(0.5), 3.0]
    assert weights.tolist() == pytest.approx(expected)
    assert not weights.requires_grad
    assert int((importance_weights(model, batch) != 0).sum()) == int(batch.loss_mask.sum())
    with pytest.raises(BatchError, match="the batch is without log-probabilities of a sampler"):
        importance_weights(model, batch_of(replace(one, logprobs=None), width=12))


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("draw", ["lognormal", "long tail", "pareto", "uniform", "bimodal"])
def test_the_slowest_rank_is_within_a_tenth_of_what_any_assignment_needs(draw: str, ranks: int) -> None:
    """Which is the mean, or the longest sample by itself."""
    rng = np.random.default_rng(ranks)
    slowest, count = [], 16 * ranks
    for _ in range(6):
        lengths = {
            "lognormal": rng.lognormal(7, 1, count),
            "long tail": rng.lognormal(6.5, 1.5, count),
            "pareto": 300 + 300 * rng.pareto(1.5, count),
            "uniform": rng.uniform(100, 4096, count),
            "bimodal": np.where(rng.random(count) < 0.3, 3000, 200) + rng.integers(0, 100, count),
        }[draw]
        lengths = lengths.clip(16, 16384).astype(int)
        samples = [Descriptor(int(n), 0) for n in lengths]
        plan = plan_steps(samples, FAMILY, ranks=ranks, max_tokens=16384)
        costs = [[compute_cost([lengths[i] for i in one.samples], 4096) for one in step] for step in plan]
        needed = max(np.mean(costs, axis=1).sum(), compute_cost([max(lengths)], 4096))
        slowest.append(sum(map(max, costs)) / needed)
    assert np.mean(slowest) <= 1.1


def test_an_item_that_stands_often_is_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    whole = PatchItem.write

    def counted(self: PatchItem, out: Any, dtype: Any = "float32") -> None:
        calls.append(self.identity)
        whole(self, out, dtype)

    monkeypatch.setattr(PatchItem, "write", counted)
    other = patch_item(16, 24, seed=5)
    batch = batch_of(*[sample([ITEM, other, ITEM], name=str(i)) for i in range(3)])
    assert sorted(calls) == sorted([ITEM.identity, other.identity])
    rows = list(batch.fields["pixel_values"])
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[0][:16], rows[0][-16:])
    assert not torch.equal(rows[0][:16], rows[0][16:32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["patches", "rows", "padded"])
def test_pixels_come_in_the_dtype_asked_for(kind: str, dtype: Any) -> None:
    family, items = kinds()[kind].family, kinds()[kind].items
    kwargs = collate_mm_kwargs([sample(items)], family, dtype=dtype)
    exact = collate_mm_kwargs([sample(items)], family)
    for name, values in kwargs.items():
        assert values.dtype == (dtype if exact[name].is_floating_point() else torch.int64)
        assert torch.equal(values, exact[name].to(values.dtype))


def on_device_cases() -> Any:
    """Items of each kind, float values without levels, a video, and tiles of which some are padding."""
    for name, kind in kinds().items():
        yield name, kind.family, [[*kind.items, kind.items[0]], [], [kind.items[-1]]]
    still = patch_item(16, 24)
    frames = np.random.default_rng(0).integers(0, 256, (4, *still.frames.shape[1:]), dtype=np.uint8)
    video = msgspec.structs.replace(
        still, modality="video", identity="e" * 64, grid=(2, *still.grid[1:]), frames=frames
    )
    yield "video", FAMILY, [[still], [video]]
    tiled = tiled_item((3, 3, 6, 6), 6)
    values = tiled.tensors()["pixel_values"].copy()
    values[1] = 0
    some = {"pixel_values": compacted(values, HALF)}
    floats = {"pixel_values": compacted(values + np.float32(0.3), None)}
    assert some["pixel_values"].held == (0, 2)
    changed_items = [
        msgspec.structs.replace(tiled, identity=f"{number:064x}", parts=parts)
        for number, parts in enumerate((some, floats))
    ]
    yield "held and floats", family_of("internvl"), [changed_items]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(on_device_cases()), ids=lambda case: case[0])
def test_expansion_on_a_device_has_the_same_bits(case: Any, dtype: Any) -> None:
    _, family, items = case
    rows = [[(f"sample {n}", MultiModalData.of(pairs_of(held)).spans())] for n, held in enumerate(items)]
    expected = collate_fields(rows, family, dtype=dtype)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        got = collate_fields(rows, family, dtype=dtype, device=device)
        assert got.keys() == expected.keys()
        for name, rows_of in expected.items():
            mine = got[name].to("cpu")
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert mine.lengths == rows_of.lengths
            if rows_of.values.is_floating_point():
                assert torch.equal(mine.values.view(bits), rows_of.values.view(bits)), name
            else:
                assert torch.equal(mine.values, rows_of.values), name


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_do_not_touch_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory of a forked worker is an error, and of a spawned one a context on the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pins(None)
    build = partial(collate, family=FAMILY, pad_token_id=PAD_ID)
    samples = [sample([ITEM]), sample()]
    (batch,) = DataLoader(
        samples, batch_size=2, num_workers=1, collate_fn=build, multiprocessing_context="fork"
    )
    assert batch.seq_lens == [len(one) for one in samples]


def pairs_of(items: Any) -> Any:
    offset, pairs = 0, []
    for item in items:
        ids, placeholder = item_tokens(item)
        pairs.append((placeholder.shifted(offset), item))
        offset += len(ids)
    return pairs


def test_items_of_other_classes_are_taken() -> None:
    class Foreign:
        modality, identity, size, grid, nbytes = "image", "f" * 64, (8, 8), (1, 4, 4), 1
        expansion = ITEM.expansion

        def tensors(self, dtype: str = "float32", *, framework: str = "numpy") -> dict[str, Any]:
            return ITEM.tensors(dtype, framework=framework)

    batch = batch_of(sample([Foreign(), ITEM]))
    rows = batch.fields["pixel_values"][0]
    assert torch.equal(rows[:16], rows[16:])
    assert batch.fields["image_grid_thw"][0].tolist() == [[1, 4, 4]] * 2


def test_text_only_batches_name_no_images() -> None:
    inputs = batch_of(sample(), sample(text=6)).model_inputs()
    assert sorted(inputs) == ["attention_mask", "input_ids", "mm_token_type_ids", "position_ids", "use_cache"]
    mixed = batch_of(sample(), sample([ITEM]))
    assert "pixel_values" not in mixed.rows(0, 1).model_inputs()
    assert "pixel_values" in mixed.rows(1, 2).model_inputs()


def test_router_choices_are_as_wide_as_they_need() -> None:
    one = sample(text=5, experts=True)
    assert batch_of(one).routed_experts.dtype == torch.uint8
    wide = replace(one, routed_experts=RoutedExperts(one.routed_experts.data.astype(np.uint16) + 300))
    assert batch_of(wide).routed_experts.dtype == torch.int32
    assert int(batch_of(wide).routed_experts.max()) >= 300
    full = replace(one, routed_experts=RoutedExperts(np.full((5, 2, 3), 9, np.uint8)))
    assert batch_of(full).routed_experts[0, 4].tolist() == [[9, 9, 9]] * 2


def test_logprobs_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(sample(text=3), sample(text=4), rows=[[0, 1]])
    logits = torch.randn(1, 7, 100, generator=generator)
    got = token_logprobs(logits, batch, temperature=0.5)
    expected = (logits / 0.5).log_softmax(-1)
    for place in range(7):
        wanted = 0.0 if place in (0, 3) else float(expected[0, place - 1, batch.input_ids[0, place]])
        assert float(got[0, place]) == pytest.approx(wanted, abs=1e-5)
    padded = batch_of(sample(text=3), sample(text=5), padding_side="left")
    logits = torch.randn(2, 5, 100, generator=generator)
    whole = token_logprobs(logits, padded)
    for broken in (float("nan"), float("inf"), float("-inf")):  # what the model says at padding
        logits[0, :2] = broken
        assert torch.equal(token_logprobs(logits, padded), whole)


def test_a_device_may_be_number_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []

    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        devices.append(kwargs["device"])
        return self

    batch = batch_of(sample([ITEM]))
    monkeypatch.setattr(torch.Tensor, "to", recorded)
    batch.to(0)
    assert set(devices) == {0}
    devices.clear()
    batch.to()
    assert set(devices) == {torch.device("cpu")}


def test_dummies() -> None:
    small, large = patch_item(16, 16), patch_item(32, 32, seed=1)
    base = sample([large, small], experts=True)
    found = smallest_dummy([sample(), base])
    assert found.multi_modal_data.mm_items["image"] == [small]
    assert found.token_ids.tolist() == [IMAGE_ID] * 4
    assert not found.loss_mask.any()
    assert found.routed_experts.shape == (4, 2, 3)
    batch_of(base, found, rows=[[0, 1]])
    assert smallest_dummy([sample()]) is None
    bare = smallest_dummy([base], like=replace(sample(), logprobs=None))
    assert (bare.logprobs, bare.rewards, bare.routed_experts) == (None, None, None)
    tiled = sample([tiled_item((1, 3, 6, 6), 5)])
    dummy = smallest_dummy([tiled])
    assert dummy.token_ids.tolist() == [7, 7, 90, 90, 7, 90, 90, 90]
    assert batch_of(dummy, family=family_of("internvl")).token_types.tolist() == [[0, 0, 1, 1, 0, 1, 1, 1]]


def test_plans_that_cannot_be_carried_out(sentence: Any) -> None:
    samples = [sample([ITEM] * (index % 2), 4 + index, name=str(index)) for index in range(4)]
    with pytest.raises(BatchError) as caught:
        collate_micro_batch(samples, MicroBatch((0,), dummy=True), FAMILY, pad_token_id=PAD_ID)
    assert str(caught.value) == sentence
    with pytest.raises(BatchError, match="ranks: is out of range"):
        plan_steps([Descriptor.of(one) for one in samples], FAMILY, ranks=0, max_tokens=40)


@pytest.mark.parametrize("wide", [False, True])
def test_an_empty_micro_batch_has_what_the_others_have(wide: bool) -> None:
    samples = [sample([ITEM], experts=True)]
    if wide:
        data = samples[0].routed_experts.data.astype(np.uint16)
        samples = [replace(samples[0], routed_experts=RoutedExperts(data))]
    full, empty = (
        collate_micro_batch(samples, MicroBatch(held), FAMILY, pad_token_id=PAD_ID) for held in ((0,), ())
    )
    assert empty.segments == ((),)
    for name in ("advantages", "rewards", "routed_experts"):
        assert getattr(empty, name).dtype == getattr(full, name).dtype
        assert getattr(empty, name).shape == (1, 1, *getattr(full, name).shape[2:])
    assert not empty.advantages.any()
    assert not empty.rewards.any()
    assert empty.routed_experts[0, 0].tolist() == [[0, 1, 2]] * 2
    assert not empty.loss_mask.any()
    joined = TrainingBatch.cat([full, empty])
    assert joined.routed_experts.dtype == full.routed_experts.dtype
    bare = collate_micro_batch([sample()], MicroBatch(()), FAMILY, pad_token_id=PAD_ID)
    assert (bare.advantages, bare.rewards, bare.routed_experts) == (None, None, None)


def test_kinds_of_images_that_cannot_be_joined_do_not_share_a_bin() -> None:
    small, large = tiled_item((1, 3, 6, 6), 2, seed=1), tiled_item((1, 3, 8, 8), 2, seed=2)
    samples = [sample([small]), sample([large]), sample(), sample([small])]
    family = family_of("internvl")
    plan = plan_steps([Descriptor.of(one) for one in samples], family, ranks=1, max_tokens=1000)
    rows = [micro.samples for step in plan for micro in step]
    assert sorted(index for row in rows for index in row) == [0, 1, 2, 3]
    assert all(1 not in row for row in rows if {0, 3} & set(row))
    for step in plan:
        collate_micro_batch(samples, step[0], family, pad_token_id=PAD_ID)


GOOD = sample([ITEM], name="a")
UNPAIRED = MultiModalData({}, {"image": [PlaceholderRange(4, 4)]}, {})


def test_families_are_read_off_configurations(tmp_path: Any) -> None:
    assert (FAMILY.token_types, FAMILY.mrope.merge) == ("mm_token_type_ids", 2)
    gemma = ModelFamily.from_config(
        {"model_type": "gemma3", "image_token_index": 5, "text_config": {"sliding_window": 512}}
    )
    assert (gemma.token_types, gemma.image_blocks, gemma.sliding_window) == (
        "token_type_ids",
        ("full_attention", "sliding_attention"),
        512,
    )
    assert gemma.feature_token_ids == {"image": 5}
    for unproved in (
        {"model_type": "something"},
        {"model_type": "llava", "text_config": {"model_type": "jamba"}},
    ):
        with pytest.raises(BatchError, match="batches of this family are not proved"):
            ModelFamily.from_config(unproved)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 2}}'
    )
    assert ModelFamily.from_config(tmp_path).mrope.tokens_per_second == 2
    (tmp_path / "config.json").write_text("[]")
    for broken in (tmp_path, tmp_path / "none", {}):
        with pytest.raises(ModelError):
            ModelFamily.from_config(broken)


def test_real_configurations(shared_models: Any) -> None:
    numbered = {"glm4_5v", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_thinking"}
    for directory in sorted(path for path in shared_models.iterdir() if path.is_dir()):
        family = ModelFamily.from_config(directory)
        assert (family.mrope is not None) == (directory.name in numbered)
        assert family.recurrent == ("linear_attn" if directory.name == "qwen3_5" else "")


def test_without_torch_the_extra_is_named(sentence: Any) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import mmrender.training as t\n"
        "from mmrender.errors import MissingDependencyError\n"
        "try:\n"
        "    t.TensorList\n"
        "except MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == sentence
