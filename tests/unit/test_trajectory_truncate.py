"""Cutting to a length: never through an image, and everything aligned is cut along."""

import numpy as np
import pytest

from kit import error_of
from mmrender import TrainingSample
from mmrender.errors import TrajectoryError
from mmrender.sidecar import mm_token_type_ids
from mmrender.tokens.rendered import RenderedTokens, TokenSpan
from mmrender.trajectory import AllowedTokens, RoutedExperts, WeightVersionSpan
from mmrender.trajectory.sample import RESTRICTED
from mmrender.trajectory.truncate import truncate, whole_media_length
from tree_cases import A, B, sidecar

SIDECAR = sidecar((2, A), (10, B))
IDS = [1, 2, *[9] * 6, 3, 4, *[9] * 6, 5, 6]


@pytest.mark.parametrize(("limit", "length"), [(18, 18), (16, 16), (15, 10), (8, 8), (7, 2), (0, 0)])
def test_prompts_are_cut_at_whole_images(limit, length):
    cut = truncate(
        RenderedTokens(IDS, (TokenSpan(0, 18, 0, "content", False),), multi_modal_data=SIDECAR), limit
    )
    assert whole_media_length(SIDECAR, limit) == length
    assert cut.token_ids == IDS[:length]
    types = mm_token_type_ids(cut.multi_modal_data.spans(length), length)
    assert (types == 1).tolist() == [token == 9 for token in cut.token_ids]


def test_rendered_prompts_keep_their_attribution_or_are_returned_as_they_are():
    spans = (
        TokenSpan(0, 2, 0, "content", False),
        TokenSpan(2, 8, 0, "image", False),
        TokenSpan(8, 18, 1, "content", True),
    )
    prompt = RenderedTokens(IDS, spans, ("user", "assistant"), (None, None), SIDECAR, "text")
    cut = truncate(prompt, 12)
    assert (cut.token_ids, cut.spans[-1]) == (IDS[:10], spans[2]._replace(stop=10))
    assert cut.multi_modal_data.mm_items == {"image": [A]}
    assert len(cut.message_indices) == 10
    assert [span.kind for span in truncate(prompt, 5).spans] == ["content"]
    prompt = RenderedTokens(IDS, (TokenSpan(0, 18, 0, "content", False),))
    assert truncate(prompt, 18) is prompt


def test_samples_are_cut_in_everything():
    count = len(IDS)
    sample = TrainingSample(
        token_ids=np.array(IDS, np.int32),
        loss_mask=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        multi_modal_data=SIDECAR,
        rewards=np.ones(count, np.float32),
        routed_experts=RoutedExperts(np.zeros((15, 1, 2), np.uint8), 2),
        weight_versions=(
            WeightVersionSpan("a", 0, 9),
            WeightVersionSpan("b", 9, 18),
            WeightVersionSpan("c", 12, 18),
        ),
        allowed=(AllowedTokens(1, 3, (1, 2)), AllowedTokens(9, 14, (3,), True)),
        sample_id="t/0",
        extra={RESTRICTED: ((2, 4, "json"), (9, 14, "regex", "choice"), (12, 18, "json")), "group": 7},
    )
    cut = truncate(sample, 12)
    assert (len(cut), cut.sample_id, cut.advantages) == (10, "t/0", None)
    assert cut.loss_mask.shape == (10,)
    assert cut.rewards.tolist() == [1.0] * 9 + [9.0]
    assert (cut.routed_experts.start, cut.routed_experts.stop) == (2, 10)
    assert cut.weight_versions == (("a", 0, 9), ("b", 9, 10))
    assert cut.allowed == ((1, 3, (1, 2), False), (9, 10, (3,), True))
    assert cut.extra == {RESTRICTED: ((2, 4, "json"), (9, 10, "regex", "choice")), "group": 7}
    assert truncate(sample, 2).routed_experts is None
    assert truncate(sample, 2).extra == {"group": 7}


def rewarded(rewards, trained):
    count = len(rewards)
    mask = np.isin(np.arange(count), trained)
    return TrainingSample(
        np.arange(count, dtype=np.int32),
        mask,
        np.where(mask, np.float32(-1), np.float32(0)),
        rewards=np.array(rewards, np.float32),
        advantages=np.ones(count, np.float32),
        sample_id="t/0",
    )


def test_the_rewards_of_cut_tokens_go_to_the_last_token_that_is_trained_on():
    sample = rewarded([0, 0, 0.25, 0, 0, 0, -0.5, 2], trained=[2, 3, 6, 7])
    for limit in (4, 5, 6):
        cut = truncate(sample, limit)
        assert cut.rewards.tolist() == [0, 0, 0.25, 1.5, 0, 0][:limit]
        assert cut.advantages.tolist() == [1] * limit
    assert truncate(sample, 7).rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 1.5]
    assert truncate(sample, 3).rewards.tolist() == [0, 0, 1.75]
    assert sample.rewards.tolist() == [0, 0, 0.25, 0, 0, 0, -0.5, 2]


def test_what_cannot_be_cut_is_refused(sentence):
    assert error_of(TrajectoryError, truncate, rewarded([0, 0, 0, 3, 0], trained=[3, 4]), 3) == sentence
    assert truncate(rewarded([0, 1, 0, 0, 0], trained=[3, 4]), 3).rewards.tolist() == [0, 1, 0]
    assert error_of(TrajectoryError, whole_media_length, SIDECAR, -1) == sentence
