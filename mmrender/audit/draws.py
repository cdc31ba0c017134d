"""Random faults of each stage, which show how faults without a row look in the numbers of one sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from mmrender.audit.case import Array, Case, ChangedItem, Edit, Trial, edited, part, with_items, with_sampled
from mmrender.audit.computed import bound, changed_weights, giving, stacks
from mmrender.audit.positions import rotary_buffers, with_positions
from mmrender.audit.prompts import blocks, bounds
from mmrender.audit.report import Stage, described
from mmrender.audit.stage import CUT, Effect
from mmrender.audit.trainer import parts_of
from mmrender.sidecar import MediaSpan

_PROMPTS: Final = 48
_SAMPLED: Final = 12
_IMAGES: Final = 2
"""Rounds over the kinds of changes of pixels, for each image and for all."""
_POSITIONS: Final = 48
_TEXTUAL: Final = 3
"""Kinds of changes of positions that need no image."""
_OUTPUTS: Final = 24
"""Changes of the outputs of a kind of module."""
_WHOLE: Final = 8
"""Changes of all weights, of each size."""
_SIZES: Final = (0.05, 0.2)
"""Sizes of changes of weights, as a share of their deviation."""


class Draw(NamedTuple):
    """A random fault.

    Attributes:
        stage: Its stage.
        place: Its place, for a statement.
        trial: The change.
        layer: Name of the layer, if it is in one.
    """

    stage: Stage
    place: str
    trial: Trial
    layer: str | None = None


def draws(case: Case) -> Iterator[Draw]:
    """Yield random faults of the stages that need a forward, always the same for one sample."""
    rng = np.random.default_rng(len(case.sample))
    yield from _prompts(case, rng)
    yield from _completions(case, rng)
    yield from _pixels(case, rng)
    yield from _positions(case, rng)
    yield from _weights(case, rng)


def _prompts(case: Case, rng: np.random.Generator) -> Iterator[Draw]:
    """Yield prompts with tokens replaced, lost or added: at one place, at each of a kind, or a whole part."""
    sample, starts = case.sample, [0, *(stop for _, stop in case.runs)]
    free = np.ones(len(sample), np.bool_)
    for span in sample.media_spans:
        free[span.start : span.stop] = False
    known = np.unique(sample.token_ids[free])
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
            yield Draw("template", f"the prompt before completion {number}", Trial("", changed, since=first))
    for span in sample.media_spans:
        number = sum(start < span.start for start, _ in case.runs)
        first, last = max(span.start - 1, 0), min(span.stop + 1, len(sample))
        block = part(sample, first, last, sampled=False)
        for by in (-4, -2, 2, 4, 0) if number < len(case.runs) else ():
            to = first + by if by < 0 else last + by
            moved: list[Edit] = [(first, last, []), (to, to, block)] if by else [(first, last, [])]
            moved.sort(key=lambda edit: edit[0])
            if (
                0 < to < len(sample)
                and free[to]
                and not sample.loss_mask[min(to, first) : max(to, last)].any()
            ):
                trial = Trial("", edited(sample, moved), since=min(to, first))
                yield Draw("template", f"the prompt before completion {number}", trial)


def _cuts(span: MediaSpan, start: int, stop: int) -> bool:
    """Whether an edit of tokens `[start, stop)` leaves a part of an image."""
    whole = start <= span.start and span.stop <= stop
    return not whole and start < span.stop and span.start < stop


def _completions(case: Case, rng: np.random.Generator) -> Iterator[Draw]:
    """Yield completions with a token replaced, lost or added at the first difference."""
    sample, place = case.sample, case.position
    stop = next(stop for start, stop in case.runs if start <= place < stop)
    known = np.unique(sample.token_ids[sample.loss_mask])
    for number in range(_SAMPLED):
        at = place if number % 2 else int(rng.integers(place, stop))
        rest = sample.token_ids[at:stop].tolist()
        token = int(rng.choice(known))
        new = ([token, *rest[1:]], [token, *rest[:-1]], [*rest[1:], token])[number // 2 % 3]
        yield Draw(
            "tokens",
            f"the sampled tokens from {place} on",
            Trial("", with_sampled(sample, at, new), since=at),
        )


def _pixels(case: Case, rng: np.random.Generator) -> Iterator[Draw]:
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
                sample = with_items(case.sample, [(span, ChangedItem(span.item, own)) for span in some])
                trial = Trial("", sample, image=some[0].position, since=some[0].start)
                yield Draw("pixels", place, trial)


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


def _positions(case: Case, rng: np.random.Generator) -> Iterator[Draw]:
    """Yield positions that are shifted, restarted or stretched, at images or after them, or on some axes."""
    spans, length = case.sample.media_spans, len(case.sample)
    images = [(span.start, span.stop) for span in spans]
    edges = {at for pair in (*images, *case.runs) for at in pair} | {run[1] + 1 for run in case.runs}
    cuts = sorted(at for at in edges if 0 < at < length)
    for number in range(_POSITIONS):
        cut = int(rng.choice(cuts)) if number % 3 and cuts else int(rng.integers(1, max(length, 2)))
        kind, seed = number % (len(_RENUMBERED) if spans else _TEXTUAL), int(rng.integers(1 << 30))
        name, change = _RENUMBERED[kind]
        start = cut if kind < _TEXTUAL else images[0][0]
        moved = partial(with_positions, [(0, length)], partial(_renumbered, change, images, cut, seed))
        place = f"the positions from token {cut} on" if kind < _TEXTUAL else f"the positions {name}"
        yield Draw("positions", place, Trial("", positions=moved, since=start, token=start))
    held = rotary_buffers(case.trainer.model)
    for _ in range(_POSITIONS // 4 if held else 0):
        factors = np.exp(rng.normal(0, float(rng.choice([0.02, 0.5])), len(getattr(*held[0]))))
        factors = np.full_like(factors, factors[0]) if rng.random() < 0.5 else factors
        change_of = partial(_scaled, held, factors)
        yield Draw("positions", "the rotary frequencies", Trial("", model=change_of))


def _renumbered(
    change: Callable[..., None], images: Sequence[tuple[int, int]], cut: int, seed: int, own: Any, _: int
) -> None:
    change(own, images, cut, np.random.default_rng(seed))


def _shift(rng: np.random.Generator) -> int:
    return int(rng.choice([-8, -4, -3, -2, -1, 1, 2, 3, 4, 8]))


def _after_cut(own: Any, _: Any, cut: int, rng: np.random.Generator) -> None:
    own[..., cut:] += _shift(rng)


def _restarted(own: Any, _: Any, cut: int, rng: np.random.Generator) -> None:
    own[..., cut:] -= own[..., cut : cut + 1].clone() - int(rng.integers(0, 3))


def _indexed(own: Any, _: Any, cut: int, rng: np.random.Generator) -> None:
    import torch

    stop = own.shape[-1] if rng.random() < 0.5 else min(cut + int(rng.geometric(0.05)), own.shape[-1])
    index = torch.arange(cut, stop).to(own)
    own[..., cut:stop] = index if own.ndim == 3 else index.clamp(max=cut + _shift(rng) % 4)


def _within(own: Any, images: Any, _: int, rng: np.random.Generator) -> None:
    by, axes = float(rng.choice([0, 0.5, 2])), own[int(rng.integers(0, 2)) :] if own.ndim == 3 else own
    moved = _shift(rng) if rng.random() < 0.5 else None
    for start, stop in images:
        part, first = axes[..., start:stop], axes[..., start : start + 1].clone()
        part.copy_(part + moved if moved else first + (part - first) * by)


def _counted(own: Any, images: Any, _: int, rng: np.random.Generator) -> None:
    share, by = float(rng.choice([0, 0, 1, 3])), _shift(rng)
    for start, stop in images:
        own[..., stop:] += int(share * (own[0, ..., stop - 1].max() - own[0, ..., start].max())) + by


def _permuted(own: Any, images: Any, _: int, rng: np.random.Generator) -> None:
    if own.ndim == 3:
        own.copy_(own[rng.permutation(len(own)).tolist()])
    else:
        _counted(own, images, 0, rng)


_RENUMBERED: Final[tuple[tuple[str, Callable[[Any, Any, int, np.random.Generator], None]], ...]] = (
    ("from a token on", _after_cut),
    ("that restart", _restarted),
    ("by index", _indexed),
    ("within images", _within),
    ("after images", _counted),
    ("of images", _permuted),
)
"""Random changes of positions, given images, a token and randomness."""


def _scaled(places: list[tuple[Any, str]], factors: Array, _: Any) -> Any:
    import torch

    from mmrender.audit.computed import replaced

    return replaced(
        (one, name, getattr(one, name) * torch.from_numpy(factors).to(getattr(one, name)))
        for one, name in places
    )


def _weights(case: Case, rng: np.random.Generator) -> Iterator[Draw]:
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

            yield Draw("model", place, Trial("", model=changed_weights(module, noisy), since=since), layer)
        for child in module.children() if layer else ():
            if any(True for _ in child.parameters()):
                change = changed_weights(child, lambda data: data * 0)
                yield Draw("model", place, Trial("", model=change, since=since), layer)
    named: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if (name and any(True for _ in module.parameters()) and ".layers." in name) or ".blocks." in name:
            named.setdefault(name.rpartition(".")[2], []).append(module)
    kinds = sorted(name for name in named if not name.isdigit())
    for number in range(_OUTPUTS if kinds else 0):
        some = named[str(rng.choice(kinds))]
        factor = float(np.exp(rng.normal(0, 0.2 if number % 2 else 1.0)))
        yield Draw(
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
            yield Effect(stage, f"{place} of {scope}", np.where(mask, own - values, 0))


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
        # The same tokens at all places, or others at each, as of a grammar or a watermark.
        shape = logits.shape if number % 2 else logits.shape[1:]
        chosen = rng.random(shape) < 10 ** rng.uniform(-2, -0.05)
        some = np.broadcast_to(chosen, logits.shape).copy()
        bias = float(rng.choice([-1e4, -1, 1.0, 3]))
        if bias < -1:
            some[rows if number % 2 else slice(None), tokens] = False
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
