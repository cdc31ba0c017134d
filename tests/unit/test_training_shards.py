"""Rows split along the sequence: every token at one rank, with what its loss needs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as torchs

from mmrender.training import SequenceShard, TrainingBatch, collate, token_logprobs
from mmrender.training.logprobs import importance_weights
from training_cases import PAD_ID, kinds, sample

VALUES = ("logprobs", "advantages", "rewards", "loss_weights")


@st.composite
def batches(draw: Any) -> TrainingBatch:
    """Batches of each kind of images, padded or packed, with a padding row here and there."""
    kind = kinds()[draw(st.sampled_from(sorted(kinds())))]
    samples = []
    for index in range(draw(st.integers(1, 4))):
        items = draw(st.lists(st.sampled_from(kind.items), max_size=2))
        one = sample(items, draw(st.integers(1, 6)), name=f"s{index}", seed=index, experts=True)
        trained = draw(st.booleans())
        weights = np.where(one.loss_mask, one.rewards, 0).astype(np.float32)
        samples.append(replace(one, loss_mask=one.loss_mask & trained, loss_weights=weights))
    options: dict[str, Any] = {"padding_side": draw(st.sampled_from(["right", "left"]))}
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(samples)))
        indices = draw(st.permutations(range(len(samples))))
        options["rows"] = [indices[:cut], indices[cut:]]
    return collate(samples, kind.family, pad_token_id=PAD_ID, **options)


def allowed(batch: TrainingBatch, layout: str) -> bool:
    return layout == "ulysses" or batch.packed or batch.padding_side == "right"


def expected_columns(whole: TrainingBatch, world_size: int, layout: str) -> torch.Tensor:
    """The columns of all ranks, one rank after another, as torch orders them: `(rows, width)`."""
    width = whole.width
    if layout == "ulysses":
        return torch.arange(width).expand(len(whole), width)
    if not whole.packed:
        order = torchs._HeadTailLoadBalancer(width, world_size, "cpu")._generate_indices()
        return order.expand(len(whole), width)
    unit, documents = 2 * world_size, []
    for row in whole.segments:
        lengths = [-(-one.length // unit) * unit for one in row]
        rest = width - sum(lengths)
        ends = [rest, *lengths] if whole.padding_side == "left" else [*lengths, rest]
        documents.append([length for length in ends if length])
    found = torchs._PerDocumentHeadTailLoadBalancer(documents, world_size, "cpu")._generate_indices()
    rows = []  # torch orders document by document; a rank has its part of each
    for own, order in zip(documents, found, strict=True):
        by_document = [one.chunk(world_size) for one in order.split(own)]
        rows.append(torch.cat([one[rank] for rank in range(world_size) for one in by_document]))
    return torch.stack(rows)


def trained_on(held: Any, token_ids: torch.Tensor) -> Counter[Any]:
    """Each token that is trained on, with its values."""
    tensors = [token_ids, *(getattr(held, name) for name in VALUES)]
    return Counter(zip(*(one[held.loss_mask].tolist() for one in tensors), strict=True))


@settings(max_examples=60)
@given(batches(), st.integers(1, 4), st.sampled_from(["ring", "ulysses"]))
def test_the_ranks_have_every_token_and_every_term_of_the_loss_once(batch, world_size, layout):
    if not allowed(batch, layout):
        return
    shards = [
        SequenceShard.of(batch, rank=rank, world_size=world_size, layout=layout) for rank in range(world_size)
    ]
    whole = shards[0].whole
    assert torch.equal(
        torch.cat([one.columns for one in shards], 1), expected_columns(whole, world_size, layout)
    )
    # The rows hold what they held, in their places.
    assert whole.sample_ids == batch.sample_ids
    assert whole.fields is batch.fields or whole.fields == batch.fields
    for name in ("input_ids", "token_types", *VALUES, "routed_experts"):
        kept, given_ = getattr(whole, name), getattr(batch, name)
        assert kept.dtype == given_.dtype
        for mine, theirs in zip(whole.split(kept), batch.split(given_), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(shards[0].merge([one.take(kept) for one in shards]), kept)
    axes = whole.positions if whole.family.mrope else whole.positions[:1]
    for one in shards:
        position_ids = one.position_ids.view(-1, *one.columns.shape)[-len(axes) :]
        assert all(torch.equal(mine, one.take(axis)) for mine, axis in zip(position_ids, axes, strict=True))
    for mine, theirs in zip(whole.split(whole.positions[0]), batch.split(batch.positions[0]), strict=True):
        assert torch.equal(mine, theirs)
    assert whole.loss_mask.sum() == batch.loss_mask.sum()
    assert int(whole.attention_mask.sum()) == int(batch.attention_mask.sum())
    # Each token that is trained on is predicted at one rank, with its own values.
    for one in shards:
        assert all(getattr(one, name).dtype == torch.float32 for name in VALUES)
        assert torch.equal(one.shift_labels != -100, one.loss_mask)
    got = sum((trained_on(one, one.shift_labels) for one in shards), Counter())
    assert got == trained_on(batch, batch.input_ids)
    # Logits of the whole rows, split, give the log-probabilities of the whole rows.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(whole), whole.width, 100, generator=generator)
    ours = token_logprobs(logits, whole, temperature=1.3)
    for one in shards:
        found = one.token_logprobs(one.take(logits), temperature=1.3)
        torch.testing.assert_close(found, one.at_prediction(ours))
        weights = one.at_prediction(importance_weights(ours, whole))
        torch.testing.assert_close(importance_weights(found, one), weights)


@settings(max_examples=60)
@given(batches(), st.integers(1, 3))
def test_the_bounds_are_those_that_attention_sees(batch, world_size):
    """Whole rows after an exchange of heads; of a ring each rank has its share of each sequence."""
    shard = SequenceShard.of(batch, rank=0, world_size=world_size, layout="ulysses")
    assert torch.equal(
        shard.flash_attention_kwargs()["cu_seq_lens_q"], shard.whole.flash_attention_kwargs()["cu_seq_lens_q"]
    )
    if not allowed(batch, "ring"):
        return
    shard = SequenceShard.of(batch, rank=world_size - 1, world_size=world_size, layout="ring")
    bounds = shard.flash_attention_kwargs()
    offsets = bounds["cu_seq_lens_q"]
    assert offsets.dtype == torch.int32
    assert int(offsets[-1]) == shard.columns.numel()
    assert bounds["max_length_k"] == int(offsets.diff().max())
    owners = torch.full_like(shard.whole.input_ids, -1)
    for row, segments in enumerate(shard.whole.segments):
        for number, one in enumerate(segments):
            owners[row, one.start : one.stop] = 100 * row + number
    for own in shard.take(owners).flatten().split(offsets.diff().tolist()):
        assert len({*own.tolist()} - {-1}) <= 1  # padding is with the sample before it


@pytest.mark.parametrize("layout", ["ring", "ulysses"])
def test_a_batch_is_split_where_it_is(layout):
    kind = kinds()["patches"]
    samples = [sample(kind.items[:2], name="a", experts=True), sample(text=2, name="b", experts=True)]
    batch = collate(samples, kind.family, pad_token_id=PAD_ID, rows=[[0, 1], []]).to("meta")
    shard = SequenceShard.of(batch, rank=1, world_size=2, layout=layout)
    bounds = shard.flash_attention_kwargs()["cu_seq_lens_q"]
    for held in (shard.columns, shard.shift_labels, shard.advantages, shard.whole.routed_experts, bounds):
        assert held.device.type == "meta"
