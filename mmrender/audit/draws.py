"""Random faults of each stage, which show how faults without a row look in the numbers of one sample."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from mmrender.audit.case import Array, Case, ChangedItem, Edit, Trial, edited, showing, with_sampled
from mmrender.audit.computed import bound, changed_weights, giving, replaced, stacks
from mmrender.audit.positions import positions, rotary_buffers
from mmrender.audit.prompts import blocks, bounds
from mmrender.audit.report import Stage, described
from mmrender.audit.stage import CUT, Effect, Fault
from mmrender.audit.trainer import parts_of
from mmrender.sidecar import MediaSpan

_PROMPTS: Final = 48
_SAMPLED: Final = 12
_IMAGES: Final = 2
"""Rounds over the kinds of changes of pixels, for each image and for all."""
_POSITIONS: Final = 36
_FREQUENCIES: Final = 12
_OUTPUTS: Final = 24
"""Changes of the outputs of a kind of module."""
_WHOLE: Final = 8
"""Changes of all weights, of each size."""
_SIZES: Final = (0.05, 0.2)
"""Sizes of changes of weights, as a share of their deviation."""


def draws(case: Case) -> Iterator[Fault]:
    """Yield random faults of the stages that need a forward, always the same for one sample."""
    rng = np.random.default_rng(len(case.sample))
    yield from _prompts(case, rng)
    yield from _completions(case, rng)
    yield from _pixels(case, rng)
    yield from _positions(case, rng)
    yield from _weights(case, rng)


def _prompts(case: Case, rng: np.random.Generator) -> Iterator[Fault]:
    """Yield prompts with tokens replaced, lost or added: at one place, at each of a kind, or a whole part."""
    sample, starts = case.sample, [0, *(stop for _, stop in case.runs)]
    free = case.free
    known = np.unique(sample.token_ids[free | sample.loss_mask])
    kinds = [at for at in blocks(case) if at.before or at.after]
    edges = {0, *bounds(case, len(sample)), *(edge for run in case.runs for edge in run)}
    edges |= {edge for span in sample.media_spans for edge in (span.start - 1, span.stop + 1)}
    for number, (since, (stop, _)) in enumerate(zip(starts, case.runs, strict=False)):
        for kind in range(_PROMPTS // len(case.runs) if free[since:stop].any() else 0):
            # A few tokens, or a text such as a system prompt.
            few = int(rng.geometric(0.4))
            added = rng.choice(known, few if rng.random() < 0.7 else int(rng.integers(5, 15))).tolist()
            lost = int(rng.geometric(0.4)) - 1
            added = added if rng.random() < 0.7 or not lost else []
            if kind % 2 == 0:
                places = [(int(rng.choice(since + np.flatnonzero(free[since:stop]))), lost)]
            elif kind % 4 == 1 and kinds:
                at = kinds[int(rng.integers(len(kinds)))]
                before = bool(at.before) and (not at.after or rng.random() < 0.5)
                places = [(one[0] - lost if before else one[1], lost) for one in at.blocks]
            else:
                own = sorted(edge for edge in edges if 0 <= edge <= stop)
                first, last = sorted(rng.choice(own, 2, replace=False).tolist())
                places, added = [(first, last - first)], []
            edits: list[Edit] = [(start, start + count, added) for start, count in places]
            first = max(edits[0][0], since)
            if edits[0][0] < 0 or any(a > b or b > len(sample) for a, b, _ in edits):
                continue
            cut = [span for span in sample.media_spans for a, b, _ in edits if _cuts(span, a, b)]
            if cut or any(sample.loss_mask[max(a, since) : b].any() for a, b, _ in edits):
                continue
            mask = sample.loss_mask & (np.arange(len(sample)) >= since)
            changed = edited(replace(sample, loss_mask=mask), edits)
            yield Fault("template", f"the prompt before completion {number}", Trial("", changed, since=first))


def _cuts(span: MediaSpan, start: int, stop: int) -> bool:
    """Whether an edit of tokens `[start, stop)` leaves a part of an image."""
    whole = start <= span.start and span.stop <= stop
    return not whole and start < span.stop and span.start < stop


def _completions(case: Case, rng: np.random.Generator) -> Iterator[Fault]:
    """Yield completions with a token replaced, lost or added at the first difference."""
    sample, place = case.sample, case.position
    stop = next(stop for start, stop in case.runs if start <= place < stop)
    known = np.unique(sample.token_ids[sample.loss_mask])
    for number in range(_SAMPLED):
        at = place if number % 2 else int(rng.integers(place, stop))
        rest = sample.token_ids[at:stop].tolist()
        token = int(rng.choice(known))
        new = ([token, *rest[1:]], [token, *rest[:-1]], [*rest[1:], token])[number // 2 % 3]
        trial = Trial("", with_sampled(sample, at, new), since=at)
        yield Fault("tokens", f"the sampled tokens from {place} on", trial)


def _pixels(case: Case, rng: np.random.Generator) -> Iterator[Fault]:
    """Yield changed pixels of each suspect, and of all images."""
    spans = case.sample.media_spans
    scopes = [([span], f"the pixels of {described(span)}") for span in case.suspects]
    if len(spans) > 1:
        scopes.append((spans, "the pixels of every image"))
    for some, place in scopes:
        for _ in range(_IMAGES * (1 + (some is spans))):
            for change in _PIXELS:
                seed, size = int(rng.integers(1 << 30)), float(10 ** rng.uniform(-1.5, 0))
                own = partial(_changed, change, seed, size)
                trial = showing(case, "", [(span, ChangedItem(span.item, own)) for span in some])
                yield Fault("pixels", place, trial)


def _changed(
    change: Callable[..., Array], seed: int, size: float, pixels: Array, _: tuple[int, ...]
) -> Array:
    return change(pixels, size, np.random.default_rng(seed))


def _by_channel(own: Array, rng: np.random.Generator, low: float, high: float) -> Array:
    """Return a random number for each channel, in the shape of flat patches or of planes."""
    values = rng.uniform(low, high, 3)
    return np.repeat(values, own.shape[1] // 3) if own.ndim == 2 else values[:, None, None]


def _smoothed(own: Array, size: float, _: np.random.Generator) -> Array:
    axes = (1,) if own.ndim == 2 else (-1, -2)
    for axis in axes:
        own = own + size * ((np.roll(own, 1, axis) + np.roll(own, -1, axis)) / 2 - own)
    return own


def _covered(own: Array, size: float, rng: np.random.Generator) -> Array:
    out, axis = own.copy(), 0 if own.ndim == 2 else -2
    count = own.shape[axis]
    start = int(rng.integers(0, count))
    np.moveaxis(out, axis, 0)[start : start + max(1, int(size * count))] = rng.uniform(-1, 1)
    return out


def _mixed(own: Array, size: float, _: np.random.Generator) -> Array:
    planes = own.reshape(len(own), 3, -1) if own.ndim == 2 else np.moveaxis(own, -3, 1)
    out = planes + size * (planes.mean(1, keepdims=True) - planes)
    return out.reshape(own.shape) if own.ndim == 2 else np.moveaxis(out, 1, -3)


_PIXELS: Final[tuple[Callable[[Array, float, np.random.Generator], Array], ...]] = (
    lambda own, size, rng: own + size * _by_channel(own, rng, -1, 1),
    lambda own, size, rng: own * (1 + size * _by_channel(own, rng, -1, 1)),
    lambda own, size, rng: own * 30**size,
    lambda own, size, rng: own + size * rng.choice([-1, 1]) * (own**2 - 1),
    lambda own, size, rng: own + size * own.std() * rng.standard_normal(own.shape),
    lambda own, size, rng: (
        own + size * (np.roll(own, int(rng.integers(1, 4)), 0 if own.ndim == 2 else -1) - own)
    ),
    lambda own, size, rng: (
        own + size * (own[rng.permutation(len(own))] - own) if own.ndim == 2 else own[..., ::-1]
    ),
    _smoothed,
    _covered,
    _mixed,
)
"""Changes of normalised pixels, given a size up to 1: colours, noise, shifts, blur, a covered part."""


def _positions(case: Case, rng: np.random.Generator) -> Iterator[Fault]:
    """Yield some of the positions that rows try, and other frequencies."""
    known = [trial for trial in positions(case) if trial.until is None]
    for number in sorted(rng.permutation(len(known))[:_POSITIONS].tolist()):
        trial = known[number]
        yield Fault("positions", f"the positions from token {trial.since} on", trial, row="positions")
    held = rotary_buffers(case.trainer.model)
    for _ in range(_FREQUENCIES if held else 0):
        factors = np.exp(rng.normal(0, float(rng.choice([0.02, 0.5])), len(getattr(*held[0]))))
        factors = np.full_like(factors, factors[0]) if rng.random() < 0.5 else factors
        yield Fault("positions", "the rotary frequencies", Trial("", model=partial(_scaled, held, factors)))


def _scaled(places: list[tuple[Any, str]], factors: Array, _: Any) -> Any:
    import torch

    return replaced(
        (one, name, getattr(one, name) * torch.from_numpy(factors).to(getattr(one, name)))
        for one, name in places
    )


def _weights(case: Case, rng: np.random.Generator) -> Iterator[Fault]:
    """Yield weights with noise, in the model, a part or a layer, and modules that add nothing."""
    import torch

    model = case.trainer.model
    scopes: dict[str, tuple[Any, str | None]] = {"the weights": (model, None)}
    scopes |= {f"the weights of the {name}": (part, None) for name, part in parts_of(model).items()}
    for name, layers in stacks(model).items():
        for number, layer in enumerate(layers):
            place = f"layer {number} of the {name}"
            scopes[place] = layer, place
    first = min((span.start for span in case.sample.media_spans), default=len(case.sample))
    for place, (module, layer) in scopes.items():
        since = first if "vision" in place else 0
        for size in _SIZES * (1 if layer else _WHOLE if module is model else _WHOLE // 2):
            generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))

            def noisy(data: Any, size: float = size, generator: Any = generator) -> Any:
                noise = torch.randn(data.shape, generator=generator).to(data)
                own = data.float().std() if data.ndim > 1 else data.float().abs().mean()
                return data + noise * (size * own).to(data)

            yield Fault("model", place, Trial("", model=changed_weights(module, noisy), since=since), layer)
    named: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if (name and any(True for _ in module.parameters()) and ".layers." in name) or ".blocks." in name:
            named.setdefault(name.rpartition(".")[2], []).append(module)
    kinds = sorted(name for name in named if not name.isdigit())
    for number in range(_OUTPUTS if kinds else 0):
        some = named[str(rng.choice(kinds))]
        factor = float(np.exp(rng.normal(0, 0.2 if number % 2 else 1.0)))
        yield Fault(
            "model", "a kind of module", Trial("", model=bound(giving, some, partial(_multiplied, factor)))
        )


def _multiplied(factor: float, data: Any) -> Any:
    return data * factor


# --- the stages behind the model


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
