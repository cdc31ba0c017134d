"""Random faults of sampling and recording, which show how faults without a row look in one sample."""

from collections.abc import Iterator, Mapping

import numpy as np

from mmrender.audit.case import Array
from mmrender.audit.report import Stage
from mmrender.audit.stage import CUT, Effect, Fault


def numbers(logits: Array, tokens: Array, runs: Mapping[int, Array], counts: Array) -> Iterator[Effect]:
    """Yield random faults of sampling and recording, which need no forward, of all completions and of each.

    Args:
        logits: float64 `(m, vocabulary)`.
        tokens: The sampled tokens, int `(m,)`.
        runs: The tokens of each completion, bool `(m,)`.
        counts: How often each token came before, `(m, vocabulary)`.
    """
    rng = np.random.default_rng(logits.shape[1])
    own = _picked(logits, tokens)
    scopes = {"all completions": np.ones(len(tokens), np.bool_)}
    if len(runs) > 1:
        scopes |= {f"completion {number}": mask for number, mask in runs.items() if mask.any()}
    faults: list[tuple[Stage, str, Array]] = []
    faults += [("sampling", *fault) for fault in _distributions(logits, tokens, counts, rng)]
    faults += [("recording", *fault) for fault in _records(own, rng)]
    for scope, mask in scopes.items():
        for stage, place, values in faults:
            yield Fault(stage, f"{place} of {scope}"), np.where(mask, own - values, 0)


def _picked(logits: Array, tokens: Array) -> Array:
    """Return the log-probabilities of tokens: `(m,)`."""
    chosen: Array = logits[np.arange(len(tokens)), tokens] - np.logaddexp.reduce(logits, 1)
    return chosen


def _distributions(
    logits: Array, tokens: Array, counts: Array, rng: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """Yield log-probabilities under distributions that were changed after the model."""
    rows, total, own = np.arange(len(tokens)), np.logaddexp.reduce(logits, 1), _picked(logits, tokens)
    for heat in (0.5, 0.7, 0.9, 1.1, 1.4, 2.0):
        yield "the temperature", _picked(logits / heat, tokens)
    for cap in (3.0, 10.0, 30.0):
        yield "the temperature", _picked(cap * np.tanh(logits / cap), tokens)
    entropy = -(np.exp(logits - total[:, None]) * (logits - total[:, None])).sum(1)
    for first, second, third in rng.normal(0, 1, (8, 3)):
        yield "the temperature", own + np.sin(first * own + second * entropy + 3 * third)
    order = np.sort(logits, 1)[:, ::-1]
    mass = np.exp(order - total[:, None]).cumsum(1)
    for share in (0.3, 0.6, 0.8, 0.95):
        least = order[rows, (mass < share).sum(1).clip(max=logits.shape[1] - 1)]
        kept = logits >= np.minimum(least, logits[rows, tokens])[:, None]
        yield CUT, _picked(np.where(kept, logits, -1e4), tokens)
    for by in (0.2, 1.0):
        for seen in (counts > 0, counts):
            yield "the penalties", _picked(logits - by * seen, tokens)
    for number in range(36):
        # The same tokens at all places, as of a request, or others at each, as of a grammar.
        shape = logits.shape if number % 2 else logits.shape[1:]
        chosen = rng.random(shape) < 10 ** rng.uniform(-2, -0.05)
        some = np.broadcast_to(chosen, logits.shape).copy()
        bias = float(rng.choice([-1e4, -1, 1.0, 3]))
        if bias < -1:
            some[rows if number % 2 else slice(None), tokens] = False
        elif number % 2:
            continue  # a grammar only forbids, and a bias at random to both sides is like any fault
        yield CUT if bias < -1 else "the biases", _picked(logits + bias * some, tokens)
    for more in (0 * total, *(total + by for by in rng.uniform(-3, 1, 5))):
        yield "the vocabulary", own + total - np.logaddexp(total, more)


def _records(own: Array, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """Yield numbers that were recorded in place of log-probabilities."""
    for size in (0.1, 0.3, 1.0, 3.0):
        noise = size * rng.standard_normal((2, len(own)))
        yield "the recorded numbers", own + noise[0]
        yield "the recorded numbers", own * (1 + noise[1])
    for first, second in rng.normal(0, 1, (8, 2)):
        yield "the scale", own + np.sin(first * own + 3 * second)
    for factor in (0.5, 0.9, 1.1, 2.3):
        yield "the scale", own * factor
    for shift in (-2, -1, 1, 2):
        yield "the order", np.roll(own, shift)
    for _ in range(4):
        yield "the order", rng.permutation(own)
    yield "the order", (np.roll(own, 1) + own + np.roll(own, -1)) / 3
    yield "the order", np.cumsum(own) / np.arange(1, len(own) + 1)
