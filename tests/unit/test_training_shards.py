"""Rows split along the sequence: every token at one rank, with what its loss needs."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as torchs

from mmrender.errors import BatchError
from mmrender.training import TrainingBatch, collate, token_logprobs
from mmrender.training.batch import importance_weights
from training_cases import PAD_ID, family_of, kinds, sample

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
def test_the_ranks_have_every_token_and_every_term_of_the_loss_once(
    batch: TrainingBatch, world_size: int, layout: str
) -> None:
    if not allowed(batch, layout):
        return
    shards = [batch.shard(rank=rank, world_size=world_size, layout=layout) for rank in range(world_size)]
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
def test_the_bounds_are_those_that_attention_sees(batch: TrainingBatch, world_size: int) -> None:
    """Whole rows after an exchange of heads; of a ring each rank has its share of each sequence."""
    shard = batch.shard(rank=0, world_size=world_size, layout="ulysses")
    assert torch.equal(
        shard.flash_attention_kwargs()["cu_seq_lens_q"], shard.whole.flash_attention_kwargs()["cu_seq_lens_q"]
    )
    if not allowed(batch, "ring"):
        return
    shard = batch.shard(rank=world_size - 1, world_size=world_size, layout="ring")
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
def test_a_batch_is_split_where_it_is(layout: str) -> None:
    kind = kinds()["patches"]
    samples = [sample(kind.items[:2], name="a", experts=True), sample(text=2, name="b", experts=True)]
    batch = collate(samples, kind.family, pad_token_id=PAD_ID, rows=[[0, 1], []]).to("meta")
    shard = batch.shard(rank=1, world_size=2, layout=layout)
    bounds = shard.flash_attention_kwargs()["cu_seq_lens_q"]
    for held in (shard.columns, shard.shift_labels, shard.advantages, shard.whole.routed_experts, bounds):
        assert held.device.type == "meta"


def error(call: Any) -> str:
    with pytest.raises(BatchError) as caught:
        call()
    return str(caught.value)


def test_splits_that_attention_could_not_follow_are_refused() -> None:
    plain = family_of("internvl")
    batch = collate([sample(text=5), sample(text=2)], plain, pad_token_id=PAD_ID)
    left = collate([sample(text=5)], plain, pad_token_id=PAD_ID, padding_side="left")
    assert error(lambda: batch.shard(rank=2, world_size=2, layout="ring")) == (
        "rank: there is no such rank - expected 0 to 1, got 2"
    )
    assert error(lambda: left.shard(rank=0, world_size=2, layout="ring")) == (
        "padding_side: attention in a ring knows no padding before the tokens - "
        "expected 'right', or packed rows, got 'left'"
    )
    for model_type, layout, message in (
        (
            "gemma3",
            "ring",
            "layout: gemma3 takes no ring rows - expected ulysses, "
            "got images are seen in both directions, by masks that attention in a ring does not take",
        ),
        (
            "paligemma",
            "ulysses",
            "layout: paligemma takes no ulysses rows - expected whole rows, "
            "got prompts are seen in both directions, by a mask that is not split",
        ),
    ):
        other = replace(batch, family=family_of(model_type))
        assert error(lambda: other.shard(rank=0, world_size=2, layout=layout)) == message  # noqa: B023
    shard = batch.shard(rank=0, world_size=2, layout="ulysses")
    assert error(lambda: shard.take(torch.zeros(2, 3))) == (
        "a tensor is not aligned to the batch - expected [2, 6] first, got [2, 3]"
    )
    assert error(lambda: shard.token_logprobs(torch.zeros(2, 6, 9))) == (
        "a tensor is not aligned to the shard - expected [2, 3] first, got [2, 6, 9]"
    )


class Decoder(torch.nn.Module):
    config = SimpleNamespace(_attn_implementation="flash_attention_2")

    def forward(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs


class Wrapped(torch.nn.Module):
    """A model as the library's wrappers hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.decoder.get_decoder = lambda: self.decoder
        self.module = torch.nn.Module()
        self.module.get_decoder = lambda: self.decoder

    def forward(self, **kwargs: Any) -> Any:
        return self.decoder(**kwargs)


def test_a_language_model_gets_its_rank_s_part_of_what_it_takes() -> None:
    """Features that models add again in deeper layers follow their tokens, also those of a cut image."""
    kind = kinds()["patches"]
    given_ = [sample([kind.items[0]], 3, name="a"), sample([kind.items[1], kind.items[2]], 2, name="b")]
    batch = collate(given_, kind.family, pad_token_id=PAD_ID, rows=[[1], [0]])
    for rank in range(2):
        shard = batch.shard(rank=rank, world_size=2, layout="ring")
        whole, model = shard.whole, Wrapped()
        inputs = shard.model_inputs()
        assert "attention_mask" not in inputs
        assert inputs["input_ids"] is whole.input_ids
        images = whole.token_types == 1
        features = torch.randn(int(images.sum()), 4)
        embeds = torch.randn(*whole.input_ids.shape, 4)
        added = embeds.clone()
        added[images] += features
        with shard.cut(model):
            got = model(
                inputs_embeds=embeds,
                position_ids=inputs["position_ids"],
                attention_mask=None,
                visual_pos_masks=images,
                deepstack_visual_embeds=[features, 2 * features],
                use_cache=False,
            )
        mine = got["inputs_embeds"].clone()
        mine[got["visual_pos_masks"]] += got["deepstack_visual_embeds"][0]
        assert torch.equal(mine, shard.take(added))
        assert torch.equal(got["deepstack_visual_embeds"][1], 2 * got["deepstack_visual_embeds"][0])
        assert got["position_ids"].shape == (4, 2, whole.width // 2)
        for axis, position_ids in zip(got["position_ids"], inputs["position_ids"], strict=True):
            assert torch.equal(axis, shard.take(position_ids))
        assert got["max_length_q"] == shard.flash_attention_kwargs()["max_length_q"]
        assert model(inputs_embeds=embeds) == {"inputs_embeds": embeds}  # whole again after the block


def test_what_cannot_be_cut_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate([sample(text=5)], family_of("internvl"), pad_token_id=PAD_ID)
    shard, model = batch.shard(rank=0, world_size=2, layout="ulysses"), Wrapped()

    def forward(**kwargs: Any) -> None:
        with shard.cut(model):
            model(**kwargs)

    expected = (
        "which is not split over ranks - expected input_ids, inputs_embeds, per_layer_inputs, position_ids, "
        "visual_pos_masks, deepstack_visual_embeds. Train this model without context or sequence parallelism"
    )
    for kwargs, name in (
        ({"aspects": torch.zeros(1)}, "aspects"),
        ({"aspects": {"a": torch.zeros(1)}}, "aspects"),
        ({"attention_mask": torch.zeros(1, 6)}, "attention_mask"),
        ({"inputs_embeds": torch.zeros(1, 5, 2)}, "inputs_embeds [1, 5, 2]"),
    ):
        assert error(lambda: forward(**kwargs)) == f"Decoder: the language model takes {name}, {expected}"  # noqa: B023
    with pytest.raises(BatchError, match="takes a positional argument"), shard.cut(model):
        model.decoder._call_impl(torch.zeros(1))
    monkeypatch.setattr(Decoder.config, "_attn_implementation", "eager")
    assert error(forward) == (
        "Decoder.config: eager attention sees the tokens of its own rank only - "
        "expected an attention that is parallel along the sequence. "
        'Choose it with model.set_attn_implementation({"text_config": ...})'
    )
    with pytest.raises(BatchError) as caught, shard.cut(torch.nn.Linear(1, 1)):
        pass
    assert str(caught.value) == (
        "Linear: the model has no language model to cut rows before - "
        "expected a model of Transformers, whose get_decoder() gives it"
    )
    monkeypatch.setattr(Decoder.config, "_attn_implementation", "flash_attention_2")
    shard = replace(shard, whole=replace(shard.whole, family=family_of("qwen3_5")))
    assert error(forward) == (
        "group: the recurrent layers of qwen3_5 carry a state along the row, over all ranks - "
        "expected the process group of the ranks, which gathers the row for them, got None"
    )
