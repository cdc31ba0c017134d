"""Tokens scored within a model's forward equal the scores of its logits, whatever the model does to them."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kit import error_of
from mmrender import TrainingSample
from mmrender.errors import BatchError
from mmrender.training import (
    ModelFamily,
    SequenceShard,
    collate,
    hidden_states,
    score_tokens,
    scoring,
    token_entropy,
    token_logprobs,
)
from mmrender.training.scoring import OutputHead, Scoring
from mmrender.trajectory import AllowedTokens

VOCABULARY = 50
_SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
CHANGED: dict[str, tuple[str, dict[str, Any], tuple[float, float | None]]] = {
    "plain": ("LlamaConfig", {}, (1.0, None)),
    "tied": ("Qwen2Config", {"tie_word_embeddings": True}, (1.0, None)),
    "with a bias": ("PhiConfig", {}, (1.0, None)),
    "capped": ("Gemma2Config", {"final_logit_softcapping": 2.0}, (1.0, 2.0)),
    "scaled": ("CohereConfig", {"logit_scale": 0.0625}, (0.0625, None)),
    "divided": ("GraniteConfig", {"logits_scaling": 8.0}, (0.125, None)),
}
"""By name a configuration, its settings, and the scale and cap of its logits."""


@cache
def model_of(name: str) -> Any:
    config, options, _ = CHANGED[name]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**_SIZES, **options),
            dtype=torch.float32,
            attn_implementation="eager",
        )
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.4)
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    return model.eval()


def batch_of(**options: Any) -> Any:
    rng = np.random.default_rng(0)
    samples = []
    for index, length in enumerate((9, 4, 6)):
        ids = rng.integers(3, VOCABULARY, length).astype(np.int32)
        mask = (np.arange(length) > 1) & (rng.random(length) < 0.8)
        listed = tuple(sorted({int(ids[3]), 7, 9}))
        allowed = (AllowedTokens(3, 4, listed),)
        values = rng.normal(size=length).astype(np.float32)
        samples.append(TrainingSample(ids, mask, values, allowed=allowed, sample_id=f"s{index}"))
    return collate(samples, ModelFamily(model_type="text"), pad_token_id=0, **options)


def gradients(model: Any, loss: Any) -> list[Any]:
    return list(
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    )


@pytest.mark.parametrize("name", CHANGED)
def test_scores_equal_those_of_the_models_logits(name: str) -> None:
    model, batch = model_of(name), batch_of(rows=[[0, 1], [2]])
    logits = model(**batch.model_inputs()).logits
    logprobs, entropy = (
        token_logprobs(logits, batch, temperature=0.8),
        token_entropy(logits, batch, temperature=0.8),
    )
    expected = [torch.where(batch.loss_mask, logprobs, 0.0), entropy]
    found = score_tokens(model, batch, temperature=0.8, entropy=True, tile=(2, 7))
    before = hidden_states(model, batch)
    assert before.head.scale == pytest.approx(CHANGED[name][2][0], rel=1e-6)
    assert before.head.softcap == (
        None if CHANGED[name][2][1] is None else pytest.approx(CHANGED[name][2][1])
    )
    assert before.values.shape == (int(batch.loss_mask.sum()), 16)
    weights = torch.randn(2, *batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    totals = []
    for scores in (found[:2], expected):
        for mine, plain in zip(scores, expected, strict=True):
            torch.testing.assert_close(mine, plain, atol=2e-6, rtol=1e-6)
        totals.append(sum((one * weight).sum() for one, weight in zip(scores, weights, strict=True)))
    for mine, plain in zip(*(gradients(model, total) for total in totals), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-6 * max(1.0, float(plain.abs().max())), rtol=0)
    everywhere = score_tokens(model, batch, tokens="all", temperature=0.8).logprobs
    torch.testing.assert_close(everywhere, logprobs, atol=2e-6, rtol=1e-6)
    assert "forward" not in vars(model.lm_head)
    assert torch.equal(model(**batch.model_inputs()).logits, logits)


def test_the_divergence_from_a_reference_is_exact() -> None:
    model, other, batch = model_of("capped"), model_of("divided"), batch_of()
    with torch.no_grad():
        reference = hidden_states(other, batch)
        rows, columns = batch.loss_mask.nonzero(as_tuple=True)
        bare = replace(
            batch, segments=tuple(tuple(replace(one, allowed=()) for one in row) for row in batch.segments)
        )
        theirs, ours = (
            (one(**batch.model_inputs()).logits[rows, columns - 1] / 0.5).log_softmax(-1)
            for one in (other, model)
        )
        expected = torch.nn.functional.kl_div(theirs, ours, reduction="none", log_target=True).sum(-1)
        found = score_tokens(
            model,
            bare,
            reference=reference._replace(predictions=hidden_states(other, bare).predictions),
            temperature=0.5,
        )
        itself = score_tokens(model, batch, reference=hidden_states(model, batch), temperature=0.5)
    torch.testing.assert_close(found.kl[rows, columns], expected, atol=2e-6, rtol=2e-6)
    assert float(itself.kl.abs().max()) == 0.0


def test_a_batch_without_trained_tokens_still_reaches_every_weight() -> None:
    """A rank without a loss must take part in the reduction of gradients."""
    model, batch = model_of("plain"), batch_of()
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    scores = score_tokens(model, empty, entropy=True)
    total = (scores.logprobs + scores.entropy).sum()
    assert float(total.detach()) == 0.0
    found = torch.autograd.grad(total, list(model.parameters()))
    assert all(bool((one == 0).all()) for one in found)


@pytest.mark.parametrize("layout", ["ulysses", "ring"])
def test_a_shard_is_scored_at_the_tokens_before(layout: Any) -> None:
    model, batch = model_of("scaled"), batch_of(rows=[[0, 1, 2]])
    for rank in range(2):
        shard = SequenceShard.of(batch, rank=rank, world_size=2, layout=layout)
        logits = model(**shard.model_inputs()).logits
        expected = torch.where(shard.loss_mask, shard.token_logprobs(shard.take(logits)), 0.0)

        def split(module: Any, inputs: Any, shard: Any = shard) -> Any:
            return (shard.take(inputs[0]),)  # as the hooks of a trainer do

        with model.model.norm.register_forward_pre_hook(split):
            found = score_tokens(model, shard).logprobs
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)


class Bare(torch.nn.Module):
    """A model in a few lines, which is traced in no time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lm_head = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Any, **inputs: Any) -> Any:
        return SimpleNamespace(logits=2.0 * self.lm_head(self.embedding(input_ids).tanh()))


@pytest.mark.filterwarnings("ignore")  # torch warns of its own use of functions when it traces them
def test_a_compiled_model_is_scored_and_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model, batch = Bare(), batch_of()
    compiled = torch.compile(model, backend=counter)
    found = [score_tokens(compiled, batch, entropy=True) for _ in range(3)]
    counted = counter.frame_count
    assert counted > 0
    expected = score_tokens(model, batch, entropy=True)
    for scores in found:
        torch.testing.assert_close(scores.logprobs, expected.logprobs, atol=2e-6, rtol=1e-6)
    totals = [(one.logprobs * one.entropy).sum() for one in (found[-1], expected)]
    for mine, plain in zip(*(gradients(model, total) for total in totals), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)
    score_tokens(compiled, batch)
    assert counter.frame_count == counted


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_has_the_same_values_and_gradients() -> None:
    batch, weight = batch_of(), Bare().lm_head.weight
    hidden = torch.randn(
        *batch.input_ids.shape, 16, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    scoring = Scoring(batch.predictions(), 0.7, entropy=True)

    def loss(hidden: Any) -> Any:
        scores = scoring.of(hidden * 2, OutputHead(weight, softcap=3.0))
        return (scores.logprobs * scores.entropy).sum()

    compiled = torch.compile(loss, backend="eager")
    plain, found = loss(hidden), compiled(hidden)
    torch.testing.assert_close(found, plain)
    for mine, expected in zip(
        *(torch.autograd.grad(one, [hidden, weight]) for one in (found, plain)), strict=True
    ):
        torch.testing.assert_close(mine, expected)


@pytest.mark.filterwarnings("ignore")
def test_steps_over_tiles_become_one_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU for large tiles: graphs without a break, which serve tiles of all sizes."""
    from torch._dynamo.testing import CompileCounter

    model, batch, counter = model_of("capped"), batch_of(), CompileCounter()
    reference = hidden_states(model_of("divided"), batch)
    options: Any = {"temperature": 0.8, "entropy": True, "reference": reference, "tile": (4, 17)}

    def results() -> list[Any]:
        scores = score_tokens(model, batch, **options)
        return [*scores, *gradients(model, (scores.logprobs * scores.entropy + scores.kl).sum())]

    expected = results()
    compiled = cache(partial(torch.compile, dynamic=True, fullgraph=True, backend=counter))
    monkeypatch.setattr(scoring, "_compiled", compiled)
    monkeypatch.setattr(scoring, "_is_large", lambda _: True)
    for mine, plain in zip(results(), expected, strict=True):
        torch.testing.assert_close(mine, plain)
    assert counter.frame_count == 2
    assert not scoring._failures


class Masking(torch.nn.Module):
    """A head whose model closes some ids, as Chameleon closes those of images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def get_output_embeddings(self) -> Any:
        return self.model.lm_head

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits[..., 5:9] = -1e9
        return output


class Twice(Masking):
    def forward(self, **inputs: Any) -> Any:
        self.model(**inputs)
        return self.model(**inputs)


def adapted() -> Any:
    model = transformers.AutoModelForCausalLM.from_config(model_of("plain").config)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return model


REFUSED: dict[str, Any] = {
    "closed ids": lambda: score_tokens(Masking(model_of("plain")), batch_of()),
    "a head called twice": lambda: score_tokens(Twice(model_of("tied")), batch_of()),
    "a head that is not linear": lambda: score_tokens(adapted(), batch_of()),
    "a model without a head": lambda: score_tokens(torch.nn.Linear(2, 2), batch_of()),
    "a temperature of zero": lambda: score_tokens(model_of("plain"), batch_of(), temperature=0),
    "temperatures of other rows": lambda: score_tokens(
        model_of("plain"), batch_of(), temperature=torch.ones(3, 4)
    ),
    "a reference of other tokens": lambda: score_tokens(
        model_of("plain"), batch_of(), reference=hidden_states(model_of("plain"), batch_of(), tokens="all")
    ),
    "a mask of other rows": lambda: score_tokens(model_of("plain"), batch_of(), tokens=torch.ones(3, 4)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_where_and_what(case: str, sentence: Any) -> None:
    assert error_of(BatchError, REFUSED[case]) == sentence
