"""Losses of a batch against loops over samples, as the papers write them, and their gradients."""

from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch

from kit import error_of
from mmrender import TrainingSample, Trajectory
from mmrender.errors import BatchError
from mmrender.training import ModelFamily, SequenceShard, TrainingBatch, collate, importance_weights
from mmrender.training.losses import (
    cispo_loss,
    dpo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    kl_estimate,
    ppo_loss,
    step_counts,
)

FAMILY = ModelFamily(model_type="text")
MAX_TOKENS = 8


def samples_of(count: int, *, seed: int = 0) -> list[TrainingSample]:
    """Samples with several turns and advantages of their own, the last one without any trained token."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(rng.integers(3, 12))
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        mask[1:3] = True
        mask &= index < count - 1
        samples.append(
            TrainingSample(
                rng.integers(0, 50, length).astype(np.int32),
                mask,
                np.where(mask, -rng.random(length) * 2, 0).astype(np.float32),
                advantages=np.full(length, rng.normal(), np.float32),
                sample_id=f"s{index}",
            )
        )
    return samples


def values_of(batch: TrainingBatch, *, near: float = 0.4) -> Any:
    """Log-probabilities near the sampler's, in float64."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(batch.input_ids.shape, generator=generator, dtype=torch.float64)
    return torch.where(batch.loss_mask, batch.logprobs.double() + near * noise, torch.nan)


def by_sample(batch: TrainingBatch, *tensors: Any) -> list[list[list[float]]]:
    """For each sample with trained tokens, the values at these tokens of each tensor."""
    rows = []
    for index, mask in enumerate(batch.split(batch.loss_mask)):
        if mask.any():
            rows.append([batch.split(one)[index][mask].tolist() for one in tensors])
    return rows


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, 1 - low), 1 + high)


def naive(name: str, batch: TrainingBatch, logprobs: Any, old: Any, weights: Any, penalty: Any) -> float:
    """A loss as a loop over samples and tokens."""
    low, high = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}.get(name, (0.2, 0.2))
    total, tokens = 0.0, 0
    rows = by_sample(batch, logprobs, old, batch.advantages, weights, penalty)
    for ours, theirs, advantages, factors, penalties in rows:
        mean = sum(one - other for one, other in zip(ours, theirs, strict=True)) / len(ours)
        losses = []
        for one, other, advantage, factor, extra in zip(
            ours, theirs, advantages, factors, penalties, strict=True
        ):
            ratio = exp(mean) if name == "gspo" else exp(one - other)
            if name == "cispo":
                loss = -clip(ratio, low, high) * advantage * one
            else:
                loss = -min(ratio * advantage, clip(ratio, low, high) * advantage)
            losses.append(factor * loss + extra)
        total += sum(losses) / len(losses) if name in ("grpo", "gspo") else sum(losses)
        tokens += len(losses)
    return total / {"ppo": tokens, "cispo": tokens, "dr_grpo": len(rows) * MAX_TOKENS}.get(name, len(rows))


def calls(counts: Any) -> dict[str, Any]:
    """Each loss with the counts of the step."""
    return {
        "ppo": (ppo_loss, {"tokens": counts.tokens}),
        "grpo": (grpo_loss, {"samples": counts.samples}),
        "dr_grpo": (dr_grpo_loss, {"samples": counts.samples, "max_tokens": MAX_TOKENS}),
        "gspo": (gspo_loss, {"samples": counts.samples}),
        "cispo": (cispo_loss, {"tokens": counts.tokens}),
    }


NAMES = ("ppo", "grpo", "dr_grpo", "gspo", "cispo")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_equals_a_loop_over_samples(name: str, packed: bool) -> None:
    rows = [[0, 2], [1, 4], [3]] if packed else None
    batch = collate(samples_of(5), FAMILY, pad_token_id=0, rows=rows)
    logprobs = values_of(batch, near=0.001 if name == "gspo" else 0.4)
    loss, counts = calls(step_counts([batch]))[name]
    old = torch.where(batch.loss_mask, batch.logprobs.double() + 1e-4, torch.nan)
    weights = importance_weights(old, batch, most=2.0)
    penalty = 0.1 * kl_estimate(logprobs, torch.where(batch.loss_mask, -1.0, torch.nan))
    ones, zeros = torch.ones_like(weights), torch.zeros_like(weights)
    options: dict[str, Any]
    for options, expected in (
        ({}, naive(name, batch, logprobs, batch.logprobs, ones, zeros)),
        ({"old": old, "weights": weights}, naive(name, batch, logprobs, old, weights, zeros)),
        ({"penalty": penalty}, naive(name, batch, logprobs, batch.logprobs, ones, penalty)),
    ):
        found = loss(logprobs, batch, **counts, **options)
        assert float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_and_shards_add_up_to_the_step(name: str) -> None:
    batch = collate(samples_of(6), FAMILY, pad_token_id=0, rows=[[0, 2], [1, 4], [3], [5]])
    step = step_counts([batch])
    assert step == (int(batch.loss_mask.sum()), 5)
    loss, counts = calls(step)[name]
    whole = values_of(batch).nan_to_num().requires_grad_()
    expected = loss(whole, batch, **counts)
    (gradient,) = torch.autograd.grad(expected, whole)
    parts = batch.rows(0, 1), batch.rows(1, 4)
    assert step_counts(parts) == step
    found = [
        loss(whole[rows], part, **counts)
        for rows, part in zip((slice(0, 1), slice(1, 4)), parts, strict=True)
    ]
    torch.testing.assert_close(sum(found), expected)
    torch.testing.assert_close(torch.autograd.grad(sum(found), whole)[0], gradient)
    if name == "gspo":
        return  # the ratio of a sample that is split needs a group of ranks
    shards = [SequenceShard.of(batch, rank=rank, world_size=2, layout="ring") for rank in range(2)]
    columns = shards[0].whole
    spread = torch.zeros(columns.input_ids.shape, dtype=torch.float64)
    spread[columns.loss_mask] = whole[batch.loss_mask]
    found = [loss(one.at_prediction(spread), one, **counts) for one in shards]
    torch.testing.assert_close(sum(found), expected)
    torch.testing.assert_close(torch.autograd.grad(sum(found), whole)[0], gradient)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    batch = collate(samples_of(4, seed=2), FAMILY, pad_token_id=0)
    loss, counts = calls(step_counts([batch]))[name]
    sampled = values_of(batch, near=0.0).nan_to_num()
    # Where nothing is clipped. CISPO's ratio and GSPO's mean pass no gradient of their own.
    logprobs = (sampled + 1e-5).requires_grad_()
    if name != "cispo":
        assert torch.autograd.gradcheck(
            lambda values: loss(values, batch, **counts), logprobs, eps=1e-7, atol=1e-4
        )
        return
    (gradient,) = torch.autograd.grad(loss(logprobs, batch, **counts), logprobs)
    ratio = torch.where(batch.loss_mask, (logprobs - batch.logprobs).exp(), 0.0)
    torch.testing.assert_close(gradient, -(ratio * batch.advantages / counts["tokens"]).detach())


def test_clipped_tokens_have_no_gradient_and_cispos_all_have_one() -> None:
    batch = collate(samples_of(4), FAMILY, pad_token_id=0)
    tokens = step_counts([batch]).tokens
    logprobs = (batch.logprobs + torch.where(batch.advantages > 0, log(1.3), log(0.7))).requires_grad_()
    (clipped,) = torch.autograd.grad(ppo_loss(logprobs, batch, tokens=tokens), logprobs)
    assert not clipped.any()
    (wider,) = torch.autograd.grad(ppo_loss(logprobs, batch, tokens=tokens, low=0.4, high=0.4), logprobs)
    (factor,) = torch.autograd.grad(cispo_loss(logprobs, batch, tokens=tokens, high=0.1), logprobs)
    assert torch.equal(wider != 0, batch.loss_mask)
    assert torch.equal(factor != 0, batch.loss_mask)
    assert float((factor / batch.advantages * tokens)[batch.loss_mask].min()) == pytest.approx(-1.1)


def branches(once: bool) -> list[TrainingSample]:
    """Two answers to one question, after a turn that both share."""
    trajectory = Trajectory("t")
    trajectory.append([1, 2], [3, 4], logprobs=[-1.0, -1.0])
    for answer in ([6, 7, 8], [6, 9]):
        trajectory.append([1, 2, 3, 4, 5], answer, logprobs=[-1.0] * len(answer))
    return trajectory.samples(once=once)


def test_preferences_between_branches() -> None:
    samples = branches(once=False)
    batch = collate(samples, FAMILY, pad_token_id=0, rows=[[0, 1]])
    ours = values_of(batch).nan_to_num().requires_grad_()
    reference = values_of(batch, near=-0.2).nan_to_num()
    chosen, rejected = batch.sample_ids[1], batch.sample_ids[0]
    found = dpo_loss(ours, reference, batch, [(chosen, rejected)], pairs=4, beta=0.5)
    sums = [sum(ones) - sum(others) for ones, others in by_sample(batch, ours.detach(), reference)]
    assert float(found.detach()) == pytest.approx(log(1 + exp(-0.5 * (sums[1] - sums[0]))) / 4)
    assert torch.autograd.gradcheck(
        lambda values: dpo_loss(values, reference, batch, [(chosen, rejected)], pairs=4, beta=0.5), ours
    )
    assert float(dpo_loss(ours, reference, batch, [], pairs=4)) == 0.0


def test_the_estimate_is_never_negative_and_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 30, generator=generator)
    ours, theirs = logits.log_softmax(-1)
    estimates = kl_estimate(ours, theirs)
    assert float(estimates.min()) >= 0.0
    expected = torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="sum")
    torch.testing.assert_close((ours.exp() * estimates).sum(), expected)


def rows(**fields: Any) -> TrainingBatch:
    samples = [replace(one, **fields) for one in samples_of(3)]
    return collate(samples, FAMILY, pad_token_id=0)


def shared() -> Any:
    batch = collate(branches(once=True), FAMILY, pad_token_id=0)
    return dpo_loss(batch.logprobs, batch.logprobs, batch, [tuple(batch.sample_ids)], pairs=1)


REFUSED: dict[str, Any] = {
    "a loss without advantages": lambda: ppo_loss(rows().logprobs, rows(advantages=None), tokens=3),
    "a loss without a sampler": lambda: ppo_loss(rows().logprobs, rows(logprobs=None), tokens=3),
    "log-probabilities of other rows": lambda: grpo_loss(torch.zeros(2, 4), rows(), samples=3),
    "weights of other rows": lambda: grpo_loss(rows().logprobs, rows(), samples=3, weights=torch.zeros(2, 4)),
    "a preference for no sample": lambda: dpo_loss(
        rows().logprobs, rows().logprobs, rows(), [("s0", "t")], pairs=1
    ),
    "branches that share trained tokens": shared,
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_where_and_what(case: str, sentence: Any) -> None:
    assert error_of(BatchError, REFUSED[case]) == sentence
