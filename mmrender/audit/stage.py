"""The stage at which sampler and trainer differ: the stage whose faults are the likest to the differences.

The changes of rows run through the trainer's program, a few of each row at least. Each shows by how much it
would change the log-probability of every token of the sample. The evidence of a stage is the likelihood of
the observed differences among the differences of its faults, in two forms that are averaged:

- a Gaussian for each place (an image, a layer, a prompt, ...) with the covariance of the faults there. Tokens
  that they cannot reach, such as tokens before an image, have variance 0;
- a mixture of all single faults, each with an error of its own, for a fault that resembles one of them.

Both are averages, so a stage of many faults has no advantage over a stage of few. Prompts, tokens and
positions change by whole steps, so their faults have the size that was simulated. Other faults may be of any
size.

Rows of sampling and recording are read, and the nearest reading of a row with one number is a fault of its
stage. Besides, recorded numbers differ by noise, at all tokens or at a few, and distributions by noise or,
if they were cut, to one side. A few other sampled tokens change their own numbers by a simulated size,
and the numbers after them in the completion by less.

A sampler draws from its own distribution q, so `log p - log q` has a mean of about minus half its variance at
the sampled tokens, whatever the trainer's p is. Recorded numbers that are not q's are free of that.
"""

from collections.abc import Sequence
from itertools import chain, product
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mmrender.audit.case import Array, Trial
from mmrender.audit.report import STAGES, Stage
from mmrender.audit.rows import ROWS

MAX_TOKENS: Final = 64
"""Tokens whose differences are weighed."""
READ: Final = {"recording": -6.0, "sampling": -5.0}
"""Nats by which faults without a row are rarer in stages whose rows are almost all there is."""
RARER: Final = 1.5
"""Nats by which differences like noise are rarer in distributions than in recorded numbers."""
SLACK: Final = 0.2
"""Share of a token's variance that belongs to it alone."""
FREE: Final = frozenset({"pixels", "model"})
"""Stages whose faults may be of any size."""
SPREAD: Final = (0.7, 2.5)
"""Minimum deviation of the logarithm of sizes: as simulated, and of any size."""
ERRORS: Final = (0.15, 0.4, 0.7)
"""Errors of single faults, as a share of their size."""
SCALES: Final = (-1.0, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Sizes at which a single fault is compared."""
GRID: Final = 25
APART: Final = 4.0
"""Minimum ratio of the differences of a few tokens to all others."""
SMALLER: Final = np.geomspace(1e-3, 0.1, 5)
"""Changes after another token, as shares of the change of its own number."""


Effect: TypeAlias = tuple[Trial, Array]
"""A trial, and the trainer's log-probability less the changed one of each compared token: float64 `(m,)`."""


class Place(NamedTuple):
    """The likeliest place within a stage.

    Attributes:
        stage: The stage.
        name: For a statement.
        since: Index of the first token that it can change.
        evidence: Of the stage, in nats.
    """

    stage: Stage
    name: str
    since: int = 0
    evidence: float = 0.0


def weigh(
    difference: Array, effects: Sequence[Effect], noise: float, starts: Sequence[int] = ()
) -> list[Place]:
    """Return the stages with faults, the likeliest first.

    Args:
        difference: Trainer less sampler, `(m,)`, finite.
        effects: Simulated faults.
        noise: Root mean square of differences by arithmetic alone, in nats.
        starts: Of completions after the first, as indices of differences.
    """
    d, noise, sizes = difference.astype(np.float64), max(noise, 1e-5), np.geomspace(1e-4, 30, GRID)
    groups: dict[Stage, dict[str, list[Effect]]] = {stage: {} for stage in STAGES}
    for trial, change in effects:
        if np.isfinite(change).all() and np.abs(change).max(initial=0) > noise:
            groups[ROWS[trial.row].stage].setdefault(trial.place, []).append((trial, change))
    noisy, drawn = (_averaged(d, np.eye(len(d)), noise, sizes, 0 * sizes, lower=one) for one in (0.0, 0.5))
    completions = [one for one in np.split(d, starts) if len(one)]
    few = _sparse(d, np.array([noise]), np.geomspace(1e-2, 30, GRID))
    read: dict[Stage, list[tuple[float, str, int]]] = {
        "tokens": [
            (_altered(completions, some, noise), "a few sampled tokens", 0)
            for some in groups["tokens"].values()
        ],
        "recording": [(noisy, "the recorded numbers", 0), (few, "a few recorded numbers", 0)],
        "sampling": [(_one_sided(d, noise), "the allowed tokens", 0), (drawn - RARER, "the distribution", 0)],
    }
    places = []
    for stage, of in groups.items():
        wholes, singles, pooled = read.get(stage, []), list[tuple[float, str, int]](), list[Array]()
        for name, some in of.items():
            pooled.append(np.stack([change for _, change in some]).astype(np.float64))
            wholes.append((_gaussian(d, pooled[-1], noise, stage), name, some[0][0].since))
            logs = _single(d, pooled[-1], noise).tolist()
            singles += [(log, name, trial.since) for log, (trial, _) in zip(logs, some, strict=True)]
        parts = [part for part in (wholes, singles) if part]
        if len(pooled) > 1:
            parts.append([(_gaussian(d, np.concatenate(pooled), noise, stage), *max(wholes)[1:])])
        if parts:
            means = [np.logaddexp.reduce([one[0] for one in part]) - np.log(len(part)) for part in parts]
            evidence = float(np.logaddexp.reduce(means) - np.log(len(parts))) + READ.get(stage, 0.0)
            _, name, since = max(chain.from_iterable(parts), key=itemgetter(0))
            places.append(Place(stage, name, since, evidence))
    return sorted(places, key=lambda place: -place.evidence)


def _gaussian(d: Array, changes: Array, noise: float, stage: Stage) -> float:
    """Return the log-likelihood of differences under the covariance of some faults, averaged over sizes."""
    sizes = np.sqrt(np.square(changes).mean(1)).clip(1e-9)
    shapes = changes / sizes[:, None]
    covariance = shapes.T @ shapes / len(shapes)
    covariance = (1 - SLACK) * covariance + SLACK * np.diag(np.diag(covariance))
    middle, spread = float(np.log(sizes).mean()), float(np.log(sizes).std())
    spread = max(spread, SPREAD[stage in FREE])
    grid = np.exp(middle + spread * np.linspace(-3, 3, GRID))
    weights = -0.5 * np.linspace(-3, 3, GRID) ** 2
    # A sampler's own numbers are the higher ones on average.
    return _averaged(d, covariance, noise, grid, weights, lower=0.5 * (stage != "tokens"))


def _averaged(
    d: Array, covariance: Array, noise: float, sizes: Array, weights: Array, *, lower: float = 0.0
) -> float:
    """Return the log-likelihood under a Gaussian, averaged over weighted sizes.

    A share `lower` of its variance is taken off its mean.
    """
    values, vectors = np.linalg.eigh(covariance)
    values = values.clip(0)
    logs = []
    for size in sizes:
        taken = lower * np.minimum(size**2 * np.diag(covariance), 2.0)
        variances = size**2 * values + noise**2
        squares = np.square(vectors.T @ (d + taken))
        logs.append(-0.5 * float((squares / variances + np.log(2 * np.pi * variances)).sum()))
    total = np.asarray(logs) + weights
    return float(np.logaddexp.reduce(total) - np.logaddexp.reduce(weights))


def _sparse(d: Array, rests: Array, sizes: Array) -> float:
    """Return the log-likelihood of differences of some sizes at a few tokens, and of smaller ones."""
    sizes, rests = sizes[:, None, None], rests[:, None]
    rest, some = (-0.5 * (np.square(d / of) + np.log(2 * np.pi * of**2)) for of in (rests, sizes))
    shares = np.array([0.03, 0.1, 0.3])[:, None, None, None]
    logs = np.logaddexp(rest + np.log(1 - shares), some + np.log(shares)).sum(-1)
    logs = logs[:, (sizes > APART * rests)[..., 0]]
    # Arithmetic may be as large as both sizes.
    return float(np.logaddexp.reduce(logs, axis=None) - np.log(logs.size)) if logs.size else -np.inf


def _altered(completions: Sequence[Array], effects: Sequence[Effect], noise: float) -> float:
    """Return the log-likelihood of differences if a few sampled tokens are others.

    Their own numbers change by the simulated size, and all numbers after the first of them by less. Later
    completions agree, since they were sampled after the tokens that are trained on.
    """
    total, size = READ["recording"], float(np.sqrt(np.square([one for _, one in effects]).mean()))
    for d in completions:
        beyond = np.abs(d) > 4 * noise
        first = int(beyond.argmax()) if beyond.any() else len(d)
        total -= 0.5 * float((np.square(d[:first] / noise) + np.log(2 * np.pi * noise**2)).sum())
        if first < len(d):
            total += _sparse(d[first:], (size * SMALLER).clip(noise), size * np.geomspace(0.5, 2, 5))
    return total


def _one_sided(d: Array, noise: float) -> float:
    """Return the log-likelihood of differences under cut distributions: exponential, and never above 0."""
    if d.max() > 4 * noise:
        return -np.inf
    sizes = np.geomspace(1e-3, 10, GRID)
    below = -d.clip(max=0)
    return float(np.logaddexp.reduce(-below.sum() / sizes - len(d) * np.log(sizes)) - np.log(GRID))


def _single(d: Array, changes: Array, noise: float) -> Array:
    """Return the log-likelihood of differences around each of some faults: `(n,)`."""
    size = np.square(changes).mean(1, keepdims=True)
    spread = 0.5 * np.where(changes == 0, 0, size) + 0.5 * np.square(changes)
    logs = []
    for scale, error in product(SCALES, ERRORS):
        variances = (error * scale) ** 2 * spread + noise**2
        squares = np.square(d - scale * changes) / variances
        logs.append(-0.5 * (squares + np.log(2 * np.pi * variances)).sum(1))
    return np.asarray(np.logaddexp.reduce(logs, 0) - np.log(len(logs)))
