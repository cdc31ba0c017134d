"""Turns sampled under a constraint: their log-probabilities are of what was allowed, at both ends."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from end_to_end import image_part
from kit import text, user
from mmrender import TrainingSample, Trajectory, generate
from mmrender.audit import TrainerModel, audit
from mmrender.client.local import LocalBackend
from mmrender.client.sampling import limit_of, renormalised, reporting
from mmrender.client.types import EngineRequest, EngineResponse, Usage
from mmrender.errors import TrajectoryError
from mmrender.rollout.client import RendererClient
from mmrender.training import SequenceShard, collate, first_fit_decreasing, token_entropy, token_logprobs
from mmrender.trajectory import AllowedTokens

torch = pytest.importorskip("torch")

VOCAB = 20
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True).map(
    lambda few: tuple(sorted(few))
)


@st.composite
def limited_samples(draw):
    """Samples of text whose last tokens were sampled, some among few tokens, some among all but a few."""
    found = []
    for index in range(draw(st.integers(1, 4))):
        prompt, sampled = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=prompt, max_size=prompt))
        spans = []
        for place in range(prompt, prompt + sampled):
            listed, kind = draw(ids), draw(st.sampled_from(["all", "among", "not"]))
            token = draw(st.sampled_from(listed if kind == "among" else range(VOCAB)))
            if kind == "not":
                listed = tuple(one for one in listed if one != token)
            tokens.append(token)
            if kind != "all":
                spans.append(AllowedTokens(place, place + 1, listed, kind == "not"))
        mask = np.arange(len(tokens)) >= prompt
        zeros = np.zeros(len(tokens), np.float32)
        sample = TrainingSample(
            np.array(tokens, np.int32), mask, zeros, allowed=tuple(spans), sample_id=str(index)
        )
        found.append(sample)
    return found


def allowed_at(sample, place):
    """The tokens that the one at `place` was chosen among."""
    for span in sample.allowed:
        if span.start <= place < span.stop:
            return [token for token in range(VOCAB) if (token in span.token_ids) != span.forbids]
    return list(range(VOCAB))


@settings(max_examples=60)
@given(limited_samples(), st.sampled_from(["left", "right", "packed"]), st.integers(0, 99))
def test_logprobs_and_entropies_are_of_what_was_allowed(tiny_family, samples, layout, seed):
    lengths = [len(sample) for sample in samples]
    rows = first_fit_decreasing(lengths, max(lengths) + 3) if layout == "packed" else None
    side = "right" if layout == "packed" else layout
    batch = collate(samples, tiny_family, pad_token_id=0, rows=rows, padding_side=side)
    logits = 3 * torch.randn(*batch.input_ids.shape, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    found, entropy = token_logprobs(logits, batch), token_entropy(logits, batch)
    (found + entropy).sum().backward()
    assert logits.grad.isfinite().all()
    logits, found, entropy = logits.detach(), found.detach(), entropy.detach()
    seen = torch.zeros_like(entropy)
    for row, segments in enumerate(batch.segments):
        for segment in segments:
            sample = samples[int(segment.sample_id)]
            for place in range(1, len(sample)):
                column = segment.start + place
                among = allowed_at(sample, place)
                logprobs = logits[row, column - 1, among].log_softmax(-1)
                wanted = logprobs[among.index(int(sample.token_ids[place]))]
                assert float(found[row, column]) == pytest.approx(float(wanted), abs=1e-5)
                if sample.loss_mask[place]:
                    seen[row, column] = -(logprobs.exp() * logprobs).sum()
    torch.testing.assert_close(entropy, seen)
    for rank in range(2):
        shard = SequenceShard.of(batch, rank=rank, world_size=2, layout="ulysses")
        whole = torch.nn.functional.pad(logits, (0, 0, 0, shard.whole.width - batch.width))
        expected = shard.at_prediction(token_logprobs(whole, shard.whole))
        torch.testing.assert_close(shard.token_logprobs(shard.take(whole)), expected)


def test_what_was_allowed_holds_the_tokens_of_a_sample(tiny_family):
    rng = np.random.default_rng(0)
    tokens, zeros = np.array([3, 4, 5], np.int32), np.zeros(3, np.float32)
    sample = TrainingSample(tokens, np.array([False, True, True]), zeros)
    first = AllowedTokens(0, 1, (3, 4))
    logits = torch.from_numpy(rng.normal(size=(1, 3, VOCAB)).astype(np.float32))
    found = [
        token_logprobs(logits, collate([replace(sample, allowed=spans)], tiny_family, pad_token_id=0))
        for spans in ((), (first,))
    ]
    assert torch.equal(*found)  # the first token, predicted by none, leaves the others alone
    with pytest.raises(TrajectoryError, match="a token was sampled that was not allowed"):
        collate([replace(sample, allowed=(AllowedTokens(1, 3, (4,)),))], tiny_family, pad_token_id=0)


@given(
    st.lists(st.floats(-8, 8), min_size=VOCAB, max_size=VOCAB),
    st.none() | ids,
    st.sets(st.integers(0, VOCAB - 1), max_size=4),
    st.integers(0, VOCAB - 1),
)
def test_an_engines_raw_logprobs_are_renormalised(logits, allowed, forbidden, token):
    left = [one for one in (range(VOCAB) if allowed is None else allowed) if one not in forbidden]
    params = {"max_tokens": 1} | ({} if allowed is None else {"allowed_token_ids": list(allowed)})
    request = EngineRequest("m", [1], params, "r", forbidden_token_ids=sorted(forbidden))
    limit = limit_of(request)
    if limit is None:
        assert not left or (not forbidden and allowed is None)
        return
    token = left[token % len(left)]
    raw = np.array(logits) - np.logaddexp.reduce(logits)
    asked = reporting(request, limit).sampling_params["logprob_token_ids"]
    # As vLLM: the sampled token first, and of distinct ones as many as were asked for.
    top = (tuple(dict.fromkeys((one, raw[one]) for one in [token, *asked]))[: len(asked)],)
    response = EngineResponse([token], [raw[token]], "stop", Usage(1, 1), top_logprobs=top)
    got = renormalised(response, limit)
    if limit.forbids and np.exp(raw[left]).sum() < 1e-3:  # too little is left to be known from float32
        assert got == replace(response, top_logprobs=None)
        return
    assert got.logprobs == pytest.approx([raw[token] - np.logaddexp.reduce(raw[left])], abs=1e-6)
    assert [span.start for span in got.allowed] == [0]
    assert got.top_logprobs is None
    # A server that does not report them leaves the log-probabilities as they are, and nothing claims otherwise.
    silent = replace(response, top_logprobs=((),))
    assert renormalised(silent, limit) == replace(response, top_logprobs=None)


@pytest.mark.parametrize("count", [0, 1, 18, 19, 20, 127, 500])
@pytest.mark.parametrize("name", ["allowed", "forbidden"])
def test_what_is_asked_of_a_server_is_within_its_default_bound(name, count):
    allowed = {"allowed_token_ids": list(range(count))} if name == "allowed" else {}
    forbidden = range(count) if name == "forbidden" else ()
    request = EngineRequest("m", [1], {"max_tokens": 1, **allowed}, "r", forbidden_token_ids=forbidden)
    limit = limit_of(request)
    assert (limit is not None) == (0 < count < 20)
    if limit is not None:
        params = reporting(request, limit).sampling_params
        assert len(params["logprob_token_ids"]) == params["logprobs"] <= 20  # vLLM's `--max-logprobs`


@pytest.fixture(scope="module")
def trainer(tiny_model):
    return TrainerModel.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tiny_family(trainer):
    return trainer.family


def constrained(renderer):
    """By name the options of a client, and the sampling parameters."""
    letters = [renderer.tokenizer.encode(letter)[0] for letter in "ABCDEFGHI"]
    pad = renderer.tokenizer.token_id("<|image_pad|>")
    return {
        "allowed": ({}, {"allowed_token_ids": letters, "max_tokens": 3}),
        "choices": ({}, {"structured_outputs": {"choice": ["left", "right side", "up"]}, "temperature": 2}),
        # Without the rule, every token would be the pad.
        "forbidden": ({"forbid_media_tokens": True}, {"logit_bias": {str(pad): 90.0}, "max_tokens": 8}),
    }


@pytest.mark.parametrize("by", ["client", "hand"])
@pytest.mark.parametrize("name", ["allowed", "choices", "forbidden"])
def test_sampler_and_trainer_agree_under_a_constraint(renderer, trainer, name, by):
    options, sampling = constrained(renderer)[name]
    backend = LocalBackend(trainer.model, tokenizer=renderer.tokenizer)
    client = RendererClient(renderer, backend=backend, **options)

    async def roll_out():
        trajectory = Trajectory("t")
        messages = [{"role": "user", "content": [image_part(1), text("Where?")]}]
        if by == "hand":  # as the guide on trajectories has it
            turn = await generate(
                renderer=renderer,
                backend=backend,
                model="tiny",
                messages=messages,
                sampling_params={"max_tokens": 8, **sampling, "seed": 0},
                forbid_media_tokens=name == "forbidden",
            )
            trajectory.append_turn(turn, messages=[*messages, turn.message], tools=None)
            return trajectory
        for seed in range(2):
            turn = await client.create_completion(
                messages, trajectory=trajectory, sampling_params={"max_tokens": 8, **sampling, "seed": seed}
            )
            messages = [*messages, turn.message, user("And now?")]
        return trajectory

    trajectory = Trajectory.from_frames(asyncio.run(roll_out()).to_frames())
    assert all(step.allowed for step in trajectory.steps)
    samples = trajectory.samples()
    assert sum(span.stop - span.start for one in samples for span in one.allowed) == sum(
        one.loss_mask.sum() for one in samples
    )
    batch = collate(samples, trainer.family, pad_token_id=0)
    with torch.inference_mode():
        found = token_logprobs(trainer.model(**batch.model_inputs()).logits, batch)
    assert float((found - batch.logprobs)[batch.loss_mask].abs().max()) < 1e-4
    report = audit(samples, trainer, explain=0)
    assert report.ok, report.text()
    assert not report.left_out
    # Another token than the constraint allows could not have been sampled.
    unlimited = [replace(one, allowed=()) for one in samples]
    if name != "forbidden":
        assert not audit(unlimited, trainer, explain=0).ok
