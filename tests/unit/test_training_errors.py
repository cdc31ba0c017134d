"""Refusals of batches, their parts and their plans, each with its sentence on the page of the room."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kit import error_of
from mmrender.errors import MMRenderError
from mmrender.sidecar import MultiModalData, PlaceholderRange
from mmrender.training import (
    ModelFamily,
    SequenceShard,
    TensorList,
    TrainingBatch,
    collate,
    first_fit_decreasing,
    token_logprobs,
)
from mmrender.training.positions import MRope, mrope_position_ids
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.sample import TrainingSample
from training_cases import IMAGE_ID, PAD_ID, family_of, patch_item, sample, tiled_item

ITEM = patch_item(16, 16)
GOOD = sample([ITEM], name="a")
FAMILY = family_of("qwen3_vl")


def batch_of(*samples: TrainingSample, family: ModelFamily = FAMILY, **options: Any) -> TrainingBatch:
    return collate(samples, family, pad_token_id=PAD_ID, **options)


def changed(**fields: Any) -> TrainingBatch:
    """A batch of one sample of 12 tokens, an image's among them, with other fields."""
    return batch_of(replace(GOOD, **fields))


def experts_of(name: str, rows: int, top_k: int) -> TrainingSample:
    return replace(sample(name=name), routed_experts=RoutedExperts(np.zeros((rows, 1, top_k), np.uint8)))


def tiles(*sides: int, name: str = "") -> TrainingSample:
    return sample([tiled_item((1, 3, side, side), 2, seed=side) for side in sides], name=name)


def shard_of(
    layout: Any, *, rank: int = 0, family: str = "internvl", rows: Any = None, **options: Any
) -> SequenceShard:
    batch = batch_of(sample(text=5), sample(text=2), family=family_of("internvl"), rows=rows, **options)
    batch = replace(batch, family=family_of(family))
    return SequenceShard.of(batch, rank=rank, world_size=2, layout=layout)


def rows() -> TensorList:
    return TensorList(torch.zeros(6, 4), (2, 0, 3, 1))


def positions(types: Any, grids: Any, **options: Any) -> Any:
    return mrope_position_ids([types], MRope(merge=2, frames_apart=True), image_grid_thw=grids, **options)


INTERNVL = family_of("internvl")
SHIFTED = MultiModalData.of([(PlaceholderRange(3, 4), ITEM)])
UNPAIRED = MultiModalData({}, {"image": [PlaceholderRange(4, 4)]}, {})
REFUSED: dict[str, Callable[[], Any]] = {
    "a placeholder without its item": lambda: changed(multi_modal_data=UNPAIRED),
    "a placeholder in another place": lambda: changed(multi_modal_data=SHIFTED),
    "a placeholder's token sampled": lambda: changed(token_ids=np.append(GOOD.token_ids[:-1], np.int32(IMAGE_ID))),
    "another token in a placeholder": lambda: changed(token_ids=np.where(np.arange(12) == 5, 3, GOOD.token_ids).astype(np.int32)),
    "a loss on the first token": lambda: changed(loss_mask=np.ones(12, np.bool_)),
    "a loss on an image": lambda: changed(loss_mask=np.arange(12) >= 6),
    "an infinite log-probability": lambda: changed(logprobs=np.full(12, -np.inf, np.float32)),
    "too few router choices": lambda: changed(routed_experts=RoutedExperts(np.zeros((9, 1, 2), np.uint8))),
    "router choices of two models": lambda: batch_of(experts_of("a", 3, 2), experts_of("b", 3, 4)),
    "samples with log-probabilities and without": lambda: batch_of(replace(GOOD, logprobs=None), sample(name="b")),
    "no sample": batch_of,
    "a sample without tokens": lambda: batch_of(sample(text=0, name="none")),
    "a row beyond the width": lambda: batch_of(GOOD, width=11),
    "a row of no sample": lambda: batch_of(GOOD, rows=[[0, 1]]),
    "a sample in two rows": lambda: batch_of(GOOD, rows=[[0], [0]]),
    "no padding side": lambda: batch_of(GOOD, padding_side="centre"),
    "no multiple": lambda: batch_of(GOOD, multiple=0),
    "an image's token as padding": lambda: collate([GOOD], FAMILY, pad_token_id=IMAGE_ID),
    "another dtype": lambda: batch_of(GOOD, dtype=torch.float64),
    "images of two sizes": lambda: batch_of(tiles(6, 8, name="a"), family=INTERNVL),
    "two items of one identity": lambda: batch_of(GOOD, sample([msgspec.structs.replace(patch_item(32, 32), identity=ITEM.identity)], name="b")),
    "splitting another tensor": lambda: batch_of(GOOD).split(torch.zeros(1, 11)),
    "logits of another batch": lambda: token_logprobs(torch.zeros(1, 11, 5), batch_of(GOOD)),
    "batches of two sides": lambda: TrainingBatch.cat([batch_of(GOOD), batch_of(GOOD, padding_side="left")]),
    "batches with log-probabilities and without": lambda: TrainingBatch.cat([batch_of(GOOD), batch_of(replace(GOOD, logprobs=None))]),
    "batches of two sizes of images": lambda: TrainingBatch.cat([batch_of(tiles(side), family=INTERNVL) for side in (6, 8)]),
    "no batches": lambda: TrainingBatch.cat([]),
    "no parts": lambda: batch_of(GOOD).chunk(0),
    "a row beyond a micro-batch": lambda: batch_of(sample(), GOOD).micro_batches(11),
    "a sample beyond a bin": lambda: first_fit_decreasing([3, 9], 8),
    "a family that cannot be batched": lambda: ModelFamily.from_config({"model_type": "mllama"}),
    "a family that is not proved": lambda: ModelFamily.from_config({"model_type": "new", "rope_scaling": {"mrope_section": [1]}}),
    "a shard of no rank": lambda: shard_of("ring", rank=2),
    "a ring of rows padded on the left": lambda: shard_of("ring", padding_side="left"),
    "a ring of images that see themselves": lambda: shard_of("ring", family="gemma3"),
    "a shard of prompts that see themselves": lambda: shard_of("ulysses", family="paligemma"),
    "a shard of recurrent layers over packed samples": lambda: shard_of("ulysses", family="qwen3_5", rows=[[0, 1]]).model_inputs(),
    "a shard of another tensor": lambda: shard_of("ulysses").take(torch.zeros(2, 3)),
    "a shard of other logits": lambda: shard_of("ulysses").token_logprobs(torch.zeros(2, 6, 9)),
    "flash attention without masks": lambda: batch_of(sample(text=3), sample(text=4), rows=[[0, 1]], family=family_of("gemma3")).model_inputs(flash_attention=True),
    "a row that is no tensor": lambda: TensorList.from_rows([torch.zeros(2, 4), None]),
    "rows of two shapes": lambda: TensorList.from_rows([torch.zeros(2, 4), torch.zeros(0, 5), torch.zeros(1, 5)]),
    "no lists": lambda: TensorList.cat([]),
    "lengths of other rows": lambda: TensorList(torch.zeros(1), (2, -1)),
    "a mask in a list": lambda: rows().select([False, True, False, True]),
    "a mask of numpy": lambda: rows().select(np.array([False, True])),
    "a mask of torch": lambda: rows().select(torch.tensor([False, True])),
    "a float for a row": lambda: rows().select([1.0]),
    "a boolean for a row": lambda: rows()[True],
    "too few grids": lambda: positions([1, 1], [[1, 2, 2]]),
    "too many grids": lambda: positions([0, 1, 0], [[1, 2, 2], [1, 2, 4]]),
    "text within a grid": lambda: positions([1, 0, 1], [[1, 2, 4]]),
    "a grid over two samples": lambda: positions([1, 1], [[1, 2, 4]], segments=[[(0, 1), (1, 1)]]),
    "a grid without height": lambda: positions([1], [[1, 0, 2]]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_where_and_what(case: str, sentence: Any) -> None:
    assert error_of(MMRenderError, REFUSED[case]) == sentence
