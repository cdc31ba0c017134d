"""The sampler of the local back end against one written to be obvious, token for token."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.client.token_sampler import TokenSampler
from mmrender.errors import SamplingParameterError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

VOCAB = 12
STOPS = frozenset({3, 7})
tokens = st.integers(0, VOCAB - 1)
settings_of_sampling = st.fixed_dictionaries(
    {"max_tokens": st.just(8), "seed": st.integers(0, 1 << 40)},
    optional={
        "temperature": st.sampled_from([0, 0.31, 1.0, 1.9]),
        "top_p": st.sampled_from([0.07, 0.43, 0.93, 1.0]),
        "top_k": st.integers(-1, VOCAB + 2),
        "min_p": st.sampled_from([0.0, 0.013, 0.6, 1.0]),
        "min_tokens": st.integers(0, 4),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.4]),
        "presence_penalty": st.sampled_from([-1.5, 0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 0, 1.1]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-200, -1.3, 2.7]), max_size=3),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=5).map(lambda few: [0, 1, *few]),
        "logprobs": st.integers(0, 3),
    },
)


def softmax(values):
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def reference(params, prompt, logits, sampled, noise):
    """One token in plain Python, step by step as vLLM's sampler documents its order."""
    values = list(logits)
    allowed = params.get("allowed_token_ids", range(VOCAB))
    values = [value if token in allowed else -math.inf for token, value in enumerate(values)]
    if len(sampled) < params.get("min_tokens", 0):
        values = [-math.inf if token in STOPS else value for token, value in enumerate(values)]
    for token, bias in params.get("logit_bias", {}).items():
        values[token] += max(-100, min(100, bias))
    penalty = params.get("repetition_penalty", 1.0)
    for token in {*prompt, *sampled}:
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(sampled):
        values[token] -= params.get("frequency_penalty", 0) * sampled.count(token)
        values[token] -= params.get("presence_penalty", 0)
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        return values.index(max(values))
    values = [value / temperature for value in values]
    likely = softmax(values)
    bound = params.get("min_p", 0.0) * max(likely) * (1 - 1e-6)
    values = [-math.inf if odds < bound else value for value, odds in zip(values, likely, strict=True)]
    top_k = params.get("top_k", 0)
    if 0 < top_k < VOCAB:
        bound = sorted(values)[-top_k]
        values = [value if value >= bound else -math.inf for value in values]
    order = sorted(range(VOCAB), key=lambda token: values[token])
    mass = 0.0
    probabilities = softmax(values)
    for token in order[:-1]:
        mass += probabilities[token]
        if mass <= 1 - params.get("top_p", 1.0):
            values[token] = -math.inf
    scores = [probability / draw for probability, draw in zip(softmax(values), noise, strict=True)]
    return scores.index(max(scores))


numbers = st.integers(-40, 40).map(lambda n: n / 7 + 0.01)
logits = st.lists(numbers, min_size=VOCAB, max_size=VOCAB, unique=True)


@settings(max_examples=50)
@given(
    params=settings_of_sampling,
    prompt=st.lists(tokens, min_size=1, max_size=6),
    rows=st.lists(logits, min_size=1, max_size=5),
)
def test_it_is_vllms_order(params, prompt, rows):
    sampler = TokenSampler(params, prompt, STOPS)
    draws = torch.Generator().manual_seed(params["seed"])
    greedy = params.get("temperature") == 0
    sampled = []
    for row in rows:
        noise = None if greedy else torch.empty(VOCAB).exponential_(generator=draws).tolist()
        token = sampler.sample(torch.tensor(row))
        logprob, top = sampler.logprobs[-1], sampler.top[-1] if sampler.top else ()
        assert token == reference(params, prompt, row, sampled, noise)
        allowed = params.get("allowed_token_ids", range(VOCAB))
        among = [value if each in allowed else -math.inf for each, value in enumerate(row)]
        assert logprob == pytest.approx(math.log(softmax(among)[token]), abs=1e-4)
        assert len(top) == params.get("logprobs", 0)
        ordered = sorted(range(VOCAB), key=lambda t: -among[t])[: len(top)]
        # Tokens that are not allowed are equally likely.
        possible = [each for each in ordered if among[each] > -math.inf]
        assert [found for found, _ in top][: len(possible)] == possible
        sampled.append(token)


@given(
    seed=st.integers(0, 1000),
    choices=st.none() | st.lists(tokens, min_size=1, unique=True),
    allowed=st.none() | st.lists(tokens, min_size=1, unique=True),
    forbidden=st.sets(tokens),
)
def test_logprobs_are_among_what_was_allowed_and_say_so(seed, choices, allowed, forbidden):
    row = [math.sin(seed + token) * 3 for token in range(VOCAB)]
    params = {"max_tokens": 1, "seed": seed} | ({} if allowed is None else {"allowed_token_ids": allowed})
    begun = None if choices is None else [[token, 0] for token in choices]
    sampler = TokenSampler(params, [0], STOPS, begun, forbidden)
    free = range(VOCAB)
    left = set(free if choices is None else choices) & set(free if allowed is None else allowed) - forbidden
    if not left:
        with pytest.raises(SamplingParameterError, match="together leave no token"):
            sampler.sample(torch.tensor(row))
        return
    token, (logprob,) = sampler.sample(torch.tensor(row)), sampler.logprobs
    assert token in left
    masked = [value if each in left else -math.inf for each, value in enumerate(row)]
    assert logprob == pytest.approx(math.log(softmax(masked)[token]), abs=1e-5)
    if choices is None and allowed is None:
        expected = ((0, 1, tuple(sorted(forbidden)), True),) if forbidden else ()
    else:
        expected = ((0, 1, tuple(sorted(left)), False),)
    assert sampler.allowed == expected
