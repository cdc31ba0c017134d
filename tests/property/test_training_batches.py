"""Every sample's tokens, mask and pixels come out of each way of batching unchanged and exactly once."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcodecs
from mmrender.errors import TrajectoryError
from mmrender.training import (
    Descriptor,
    ModelFamily,
    TrainingBatch,
    balance,
    collate,
    collate_micro_batch,
    first_fit_decreasing,
    plan_steps,
    smallest_dummy,
)
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.truncate import truncate
from training_cases import PAD_ID, expected_fields, kinds, sample

SEEDS = st.integers(0, 2**16)
ALIGNED = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards")


@st.composite
def sample_lists(draw: st.DrawFn) -> tuple[ModelFamily, list[TrainingSample]]:
    kind = kinds()[draw(st.sampled_from(sorted(kinds())))]
    experts = draw(st.booleans())
    samples = []
    for index in range(draw(st.integers(1, 7))):
        items = draw(st.lists(st.sampled_from(kind.items), max_size=3))
        text = draw(st.integers(2, 9))
        samples.append(sample(items, text, name=f"s{index}", seed=draw(SEEDS), experts=experts))
    return kind.family, samples


def check(batches: Sequence[TrainingBatch], samples: Sequence[TrainingSample], family: ModelFamily) -> None:
    """Each sample stands in the batches once, with all that belongs to it and nothing else."""
    by_id = {one.sample_id: one for one in samples}
    assert sorted(name for batch in batches for name in batch.sample_ids) == sorted(by_id)
    for batch in batches:
        for row, segments in enumerate(batch.segments):
            held = [by_id[segment.sample_id] for segment in segments]
            used = np.zeros(batch.width, np.bool_)
            for segment, one in zip(segments, held, strict=True):
                check_segment(batch, row, segment, one)
                assert not used[segment.start : segment.stop].any()
                used[segment.start : segment.stop] = True
            check_padding(batch, row, used)
            pixels = expected_fields(held, family, batch)
            for name, rows in batch.fields.items():
                assert torch.equal(rows[row], pixels.get(name, rows[row][:0])), name
            assert pixels.keys() <= batch.fields.keys()


def check_segment(batch: TrainingBatch, row: int, segment: Any, one: TrainingSample) -> None:
    place = slice(segment.start, segment.stop)
    assert segment.length == len(one)
    for name in ALIGNED:
        expected = getattr(one, name)
        if expected is not None:
            values = getattr(batch, "input_ids" if name == "token_ids" else name)
            np.testing.assert_array_equal(values[row, place].numpy(), expected, err_msg=name)
    assert batch.attention_mask[row, place].all()
    alone = collate([one], batch.family, pad_token_id=PAD_ID)
    assert torch.equal(batch.token_types[row, place], alone.token_types[0])
    assert torch.equal(batch.positions[:, row, place], alone.positions[:, 0])
    features = sum(
        found.num_embeds for ranges in one.multi_modal_data.mm_placeholders.values() for found in ranges
    )
    assert int((batch.token_types[row, place] == 1).sum()) == features
    if one.routed_experts is not None:
        rows = batch.routed_experts[row, place].numpy()
        np.testing.assert_array_equal(rows[:-1], one.routed_experts.data)
        np.testing.assert_array_equal(rows[-1], np.broadcast_to(np.arange(3), (2, 3)))


def check_padding(batch: TrainingBatch, row: int, used: Any) -> None:
    free = torch.from_numpy(~used)
    assert (batch.input_ids[row][free] == PAD_ID).all()
    for name in ("loss_mask", "token_types", "logprobs"):
        assert not getattr(batch, name)[row][free].any()
    if batch.routed_experts is not None:
        assert (batch.routed_experts[row][free] == torch.arange(3)).all()
    assert int(batch.attention_mask[row][free].sum()) == (0 if used.any() else 1)


@settings(max_examples=35)
@given(sample_lists(), st.sampled_from(["left", "right"]), st.sampled_from([1, 8]))
def test_padded(given_samples: Any, side: Any, multiple: int) -> None:
    family, samples = given_samples
    batch = collate(samples, family, pad_token_id=PAD_ID, padding_side=side, multiple=multiple)
    assert batch.width % multiple == 0
    check([batch], samples, family)
    check([batch.widened(batch.width + 5)], samples, family)


@settings(max_examples=35)
@given(sample_lists(), st.sampled_from(["left", "right"]), st.integers(0, 40), st.integers(0, 2))
def test_packed(given_samples: Any, side: Any, spare: int, empty_rows: int) -> None:
    family, samples = given_samples
    lengths = [len(one) for one in samples]
    bins = first_fit_decreasing(lengths, max(lengths) + spare)
    rows = [*bins, *[[]] * empty_rows]
    batch = collate(samples, family, pad_token_id=PAD_ID, rows=rows, padding_side=side)
    check([batch], samples, family)
    assert sorted(batch.seq_lens) == sorted(lengths)
    for row, members in enumerate(rows):
        bounds = batch.cu_seqlens(row).tolist()
        assert bounds[0] == 0
        assert bounds[-1] == batch.width
        found = sorted(stop - start for start, stop in pairwise(bounds))
        padding = batch.width - sum(lengths[index] for index in members)
        assert found == sorted([lengths[index] for index in members] + [padding] * bool(padding))


@settings(max_examples=20)
@given(sample_lists(), st.sampled_from(["left", "right"]), st.integers(1, 5), st.booleans(), st.data())
def test_rows_taken_apart_and_joined(
    given_samples: Any, side: Any, parts: int, packed: bool, data: Any
) -> None:
    family, samples = given_samples
    lengths = [len(one) for one in samples]
    rows = first_fit_decreasing(lengths, max(lengths) + 10) if packed else None
    batch = collate(samples, family, pad_token_id=PAD_ID, padding_side=side, rows=rows)
    chunks = batch.chunk(parts)
    assert len(chunks) == parts
    assert len({len(chunk) for chunk in chunks}) == 1
    check(chunks, samples, family)
    check([TrainingBatch.cat(chunks)], samples, family)
    budget = data.draw(st.integers(batch.width, 4 * batch.width))
    micro = batch.micro_batches(budget)
    assert all(len(one) * one.width <= budget for one in micro)
    check(micro, samples, family)
    order = data.draw(st.permutations(range(len(batch))))
    check([batch.select(order)], samples, family)
    cut = data.draw(st.integers(0, len(batch)))
    check([batch.rows(0, cut), batch.rows(cut, len(batch))], samples, family)
    check([pickle.loads(pickle.dumps(batch.rows(0, cut))), batch.rows(cut, len(batch))], samples, family)
    message = mmcodecs.encode(batch)
    check([mmcodecs.decode(message, framework="torch", type=TrainingBatch)], samples, family)


@settings(max_examples=45)
@given(sample_lists(), st.integers(1, 5), st.integers(0, 60))
def test_plans(given_samples: Any, ranks: int, spare: int) -> None:
    family, samples = given_samples
    dummy = smallest_dummy(samples)
    dummy_tokens = 0 if dummy is None else len(dummy)
    capacity = max(*(len(one) for one in samples), dummy_tokens) + spare
    described = [Descriptor.of(one) for one in samples]
    plan = plan_steps(described, family, ranks=ranks, max_tokens=capacity, dummy_tokens=dummy_tokens)
    planned = [index for step in plan for micro in step for index in micro.samples]
    assert sorted(planned) == list(range(len(samples)))
    batches = []
    for step in plan:
        assert len(step) == ranks
        made = [
            collate_micro_batch(samples, micro, family, pad_token_id=PAD_ID, dummy=dummy) for micro in step
        ]
        assert all(sum(batch.seq_lens) <= capacity for batch in made)
        has_images = {"pixel_values" in batch.model_inputs() for batch in made}
        assert len(has_images) == 1
        for micro, batch in zip(step, made, strict=True):
            names = batch.sample_ids
            assert names.count("dummy") == micro.dummy
            trained = int(sum(samples[index].loss_mask.sum() for index in micro.samples))
            assert int(batch.loss_mask.sum()) == trained
            if not micro.dummy:
                batches.append(batch)
    undisturbed = [samples[i] for step in plan for micro in step if not micro.dummy for i in micro.samples]
    check(batches, undisturbed, family)


@settings(max_examples=45)
@given(sample_lists(), st.data())
def test_truncation_cuts_at_whole_images(given_samples: Any, data: Any) -> None:
    _, samples = given_samples
    for one in samples:
        limit = data.draw(st.integers(2, len(one) + 3))
        ranges = one.multi_modal_data.mm_placeholders.get("image", [])
        allowed = [
            stop
            for stop in range(len(one) + 1)
            if stop <= limit
            and not any(found.offset < stop < found.offset + found.length for found in ranges)
        ]
        if one.rewards is not None and not one.loss_mask[: max(allowed)].any():
            with pytest.raises(TrajectoryError, match="no token is left that it could train"):
                truncate(one, limit)
            one = replace(one, rewards=None)
        cut = truncate(one, limit)
        assert len(cut) == max(allowed)
        kept = [index for index, found in enumerate(ranges) if found.offset + found.length <= len(cut)]
        sidecar = cut.multi_modal_data
        for name in ("mm_placeholders", "mm_hashes", "mm_items"):
            whole = getattr(one.multi_modal_data, name).get("image", [])
            assert list(getattr(sidecar, name).get("image", [])) == [whole[index] for index in kept]
        for name in ALIGNED:
            values = getattr(cut, name)
            if name == "rewards" and values is not None:
                last = int(np.flatnonzero(cut.loss_mask)[-1])
                np.testing.assert_array_equal(values[:last], one.rewards[:last])
                np.testing.assert_array_equal(values[last + 1 :], one.rewards[last + 1 : len(cut)])
                assert values.sum() == pytest.approx(one.rewards.sum(), rel=1e-5)
            elif values is not None:
                np.testing.assert_array_equal(values, getattr(one, name)[: len(cut)])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([None, "a", "b"])), max_size=40),
    st.integers(50, 120),
)
def test_bins(entries: Any, capacity: int) -> None:
    lengths, keys = [length for length, _ in entries], [key for _, key in entries]
    bins = first_fit_decreasing(lengths, capacity, keys=keys)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert members
        assert sum(lengths[index] for index in members) <= capacity
        assert len({keys[index] for index in members} - {None}) <= 1
    # No two bins of one kind could have been one: first fit would have filled the earlier.
    plain = first_fit_decreasing(lengths, capacity)
    loads = sorted(sum(lengths[index] for index in members) for members in plain)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 9))
def test_balanced_parts(costs: list[float], parts: int) -> None:
    found = balance(costs, parts)
    assert sorted(index for part in found for index in part) == list(range(len(costs)))
    assert len(found) == parts
    counts = [len(part) for part in found]
    assert max(counts) - min(counts) <= 1
    # Even to a thousandth, or no exchange of two items with the costliest part makes the costlier of both cheaper.
    loads = [sum(costs[index] for index in part) for part in found]
    top = loads.index(max(loads))
    for other, mine, its in (
        (o, i, j) for o in range(parts) for i in found[top] for j in found[o] if o != top
    ):
        moved = costs[mine] - costs[its]
        even = loads[top] <= sum(loads) / parts * 1.0010001
        assert even or max(loads[top] - moved, loads[other] + moved) >= loads[top] * (1 - 1e-6)
