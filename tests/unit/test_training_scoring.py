"""Scores from hidden states in chunks equal a plain softmax over all logits, with their gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender import TrainingSample
from mmrender.training import ModelFamily, TrainingBatch, collate, scoring
from mmrender.training.scoring import HiddenStates, OutputHead, Scoring
from mmrender.trajectory import AllowedTokens

VOCABULARY, HIDDEN = 23, 8
FAMILY = ModelFamily(model_type="text")


def batch_of(seed: int, *, limited: bool, count: int = 2) -> TrainingBatch:
    """Samples of random tokens in one packed row, some sampled among listed ids, some among all others."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(rng.integers(3, 9))
        ids = rng.integers(0, VOCABULARY, length)
        spans = []
        for place in range(1, length):
            listed = {*rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist()}
            forbids = bool(rng.random() < 0.4)
            listed = listed - {int(ids[place])} if forbids else listed | {int(ids[place])}
            if rng.random() < 0.7:
                spans.append(AllowedTokens(place, place + 1, tuple(sorted(listed)), forbids))
        mask = (rng.random(length) < 0.7) & (np.arange(length) > 0)
        zeros = np.zeros(length, np.float32)
        allowed = tuple(spans) if limited else ()
        samples.append(
            TrainingSample(ids.astype(np.int32), mask, zeros, allowed=allowed, sample_id=str(index))
        )
    return collate(samples, FAMILY, pad_token_id=0, rows=[list(range(count))], multiple=4)


def head_of(
    generator: torch.Generator, dtype: Any, *, bias: bool, scale: float, softcap: float | None
) -> Any:
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) * HIDDEN**-0.5
    offset = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) if bias else None
    head = OutputHead(weight, offset, scale, softcap).part(slice(None), dtype)
    for one in (head.weight, head.bias):
        if one is not None:
            one.requires_grad_()
    return head


def detached(head: Any, dtype: Any) -> Any:
    weight, bias = (
        None if one is None else one.detach().to(dtype, copy=True).requires_grad_()
        for one in (head.weight, head.bias)
    )
    return replace(head, weight=weight, bias=bias)


def plain_scores(
    hidden: Any, head: OutputHead, batch: TrainingBatch, temperature: Any, reference: Any
) -> Any:
    """The same by torch's own functions from all logits, one token after another."""

    def logits_of(states: Any, of: OutputHead) -> Any:
        logits = torch.nn.functional.linear(states, of.weight, of.bias) * of.scale
        logits = logits if of.softcap is None else of.softcap * torch.tanh(logits / of.softcap)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    out = [torch.zeros(batch.input_ids.shape, dtype=logits_of(hidden[0, :1], head).dtype) for _ in range(3)]
    for row, segments in enumerate(batch.segments):
        for segment in segments:
            for place in range(segment.start + 1, segment.stop):
                if not batch.loss_mask[row, place]:
                    continue
                ids = list(range(VOCABULARY))
                for span in segment.in_row.allowed:
                    if span.start <= place < span.stop:
                        ids = [one for one in ids if (one in span.token_ids) != span.forbids]
                at = temperature if isinstance(temperature, float) else temperature[row, place]
                logprobs = (logits_of(hidden[row, place - 1], head)[ids] / at).log_softmax(-1)
                out[0][row, place] = logprobs[ids.index(int(batch.input_ids[row, place]))]
                out[1][row, place] = -(logprobs.exp() * logprobs).sum()
                other = (logits_of(reference[0][row, place - 1], reference[1])[ids] / at).log_softmax(-1)
                out[2][row, place] = torch.nn.functional.kl_div(
                    other, logprobs, log_target=True, reduction="sum"
                )
    return out


@settings(max_examples=30)
@given(
    st.integers(0, 999),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(1.0, None), (0.0625, None), (1.0, 3.0), (2.5, 4.0)]),
    st.sampled_from([1.0, 0.7, "token"]),
    st.sampled_from([(1, 5), (3, 1000), (1000, 7)]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_scores_and_gradients_equal_the_plain_way(seed, limited, bias, change, temperature, tile, dtype):
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(seed, limited=limited)
    exact_head = head_of(generator, torch.float64, bias=bias, scale=change[0], softcap=change[1])
    exact_other = head_of(generator, torch.float64, bias=False, scale=1.0, softcap=None)
    states = torch.randn(2, *batch.input_ids.shape, HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, *batch.input_ids.shape, generator=generator, dtype=torch.float64)
    if temperature == "token":
        temperature = torch.rand(batch.input_ids.shape, generator=generator) + 0.5
    predictions = batch.predictions()

    def values(kind: str, dtype: Any) -> list[Any]:
        """All scores, and the gradients of a weighted sum of them."""
        head, other = detached(exact_head, dtype), detached(exact_other, dtype)
        hidden, reference = states[0].to(dtype).requires_grad_(), (states[1].to(dtype), other)
        if kind == "chunks":
            states_before = HiddenStates(*reference, predictions)
            scoring = Scoring(predictions, temperature, True, states_before, None, tile)
            scores = scoring.spread(hidden, head)
        else:
            scores = plain_scores(hidden, head, batch, temperature, reference)
        leaves = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
        total = sum((one * weight.to(dtype)).sum() for one, weight in zip(scores, weights, strict=True))
        gradients = torch.autograd.grad(total + 0 * hidden.sum(), leaves, materialize_grads=True)
        return [one.detach() for one in (*scores, *gradients)]

    found, plain, exact = values("chunks", dtype), values("plain", dtype), values("plain", torch.float64)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for mine, theirs, truth in zip(found, plain, exact, strict=True):
        assert mine.dtype == dtype
        error, of_plain = (float((one - truth).abs().max()) for one in (mine, theirs))
        assert error <= max(tolerance * max(1.0, float(truth.abs().max())), 2 * of_plain)


def test_gradients_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(1, limited=True, count=1)
    head = head_of(generator, torch.float64, bias=True, scale=0.5, softcap=2.0)
    states = torch.randn(2, *batch.input_ids.shape, HIDDEN, generator=generator, dtype=torch.float64)
    predictions = batch.predictions()
    reference = HiddenStates(states[1], OutputHead(head.weight.detach().clone()), predictions)

    def scores(hidden: Any, weight: Any, bias: Any) -> Any:
        scoring = Scoring(predictions, 0.8, True, reference, None, (2, 5))
        return torch.stack(scoring.of(hidden, replace(head, weight=weight, bias=bias)))

    leaves = (
        states[0].requires_grad_(),
        head.weight.detach().requires_grad_(),
        head.bias.detach().requires_grad_(),
    )
    assert torch.autograd.gradcheck(scores, leaves, fast_mode=True)


def test_weights_in_bfloat16_are_summed_in_float32():
    """Against float64: the gradient of the weights is as near as their dtype allows, over hundreds of chunks."""
    generator = torch.Generator().manual_seed(0)
    count = 200
    ids = torch.randint(0, VOCABULARY, (count,), generator=generator).numpy().astype(np.int32)
    sample = TrainingSample(ids, np.arange(count) > 0, np.zeros(count, np.float32))
    batch = collate([sample], FAMILY, pad_token_id=0)
    head = head_of(generator, torch.bfloat16, bias=False, scale=1.0, softcap=None)
    hidden = torch.randn(1, count, HIDDEN, generator=generator).bfloat16()

    def gradient(head: OutputHead, hidden: Any, dtype: Any = None) -> Any:
        scores = Scoring(batch.predictions(), dtype=dtype, tile=(2, 7)).of(hidden, head)
        (of_weight,) = torch.autograd.grad(scores.logprobs.mean(), head.weight)
        return of_weight, scores.logprobs.detach()

    exact, logprobs = gradient(
        replace(head, weight=head.weight.detach().double().requires_grad_()), hidden.double()
    )
    rounded, found = gradient(head, hidden)
    wide, precise = gradient(head, hidden, torch.float32)
    assert rounded.dtype == wide.dtype == torch.bfloat16
    assert found.dtype == precise.dtype == torch.float32
    assert float((found - logprobs).abs().max()) < 0.05  # logits themselves are rounded
    assert float((precise - logprobs).abs().max()) < 1e-5
    assert float((wide - exact).abs().max() / exact.abs().max()) < 2**-8
    assert float((rounded - exact).abs().max() / exact.abs().max()) < 2**-7


def test_autocast_decides_the_dtype_of_logits():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(0, limited=False)
    head = head_of(generator, torch.float32, bias=True, scale=1.0, softcap=None)
    hidden = torch.randn(*batch.input_ids.shape, HIDDEN, generator=generator)
    scoring = Scoring(batch.predictions())
    with torch.autocast("cpu", torch.bfloat16):
        found = scoring.of(hidden, head).logprobs
    found.sum().backward()
    expected = scoring.of(hidden, head.part(slice(None), torch.bfloat16)).logprobs
    assert torch.equal(found, expected)
    assert head.weight.grad.dtype == torch.float32


def test_frozen_weights_get_no_gradient():
    batch = batch_of(0, limited=False)
    generator = torch.Generator().manual_seed(0)
    head = head_of(generator, torch.float32, bias=True, scale=1.0, softcap=None)
    frozen = replace(head, weight=head.weight.detach(), bias=head.bias.detach())
    hidden = torch.randn(*batch.input_ids.shape, HIDDEN, generator=generator).requires_grad_()
    gradients = []
    for one in (head, frozen):
        (gradient,) = torch.autograd.grad(Scoring(batch.predictions()).of(hidden, one).logprobs.sum(), hidden)
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_a_compiler_that_fails_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps over tiles of a GPU run one by one then. Memory that runs out is another matter."""
    batch, failures = batch_of(0, limited=True), list[Exception]()
    head = head_of(torch.Generator().manual_seed(0), torch.float32, bias=True, scale=1.0, softcap=None)
    hidden = torch.randn(*batch.input_ids.shape, HIDDEN)
    expected = Scoring(batch.predictions(), entropy=True).of(hidden, head)

    def compiled(error: Exception) -> Any:
        def fail(*_: Any) -> None:
            raise error

        return lambda _: fail

    monkeypatch.setattr(scoring, "_is_large", lambda _: True)
    monkeypatch.setattr(scoring, "_failures", failures)
    monkeypatch.setattr(scoring, "_compiled", compiled(torch.cuda.OutOfMemoryError("full")))
    with pytest.raises(torch.cuda.OutOfMemoryError, match="full"):
        Scoring(batch.predictions()).of(hidden, head)
    monkeypatch.setattr(scoring, "_compiled", compiled(RuntimeError("no C compiler")))
    with pytest.warns(RuntimeWarning, match="slower without: no C compiler") as warned:
        found = Scoring(batch.predictions(), entropy=True, tile=(2, 5)).of(hidden, head)
    assert len(warned) == len(failures) == 1
    torch.testing.assert_close(found[:2], expected[:2])
