"""The stage at which sampler and trainer differ, by generic perturbations that have no cause.

A stage hands an intermediate to the next: embeddings of tokens, pixels, rotations, scales of layers,
logits, numbers. A random change of one intermediate changes the log-probabilities by a Gaussian, whose
covariance the model's gradients give. The stage under which the observed differences are likeliest is where
they come from. Tokens that an intermediate cannot reach, such as those before an image, have variance 0
under it, so the place where differences begin decides first. Sizes decide next: a token is replaced whole
and a position moves by one at least, while pixels and weights may change a little. The pattern over tokens
decides the rest. This is the evidence of a Gaussian process with a linearised model (Rasmussen and
Williams, "Gaussian Processes for Machine Learning", 5.4), averaged over sizes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case
from mmrender.audit.computed import LANGUAGE, VISION, parts_of, stacks
from mmrender.audit.report import STAGES, Stage, described
from mmrender.errors import MMRenderError

Matrix: TypeAlias = npt.NDArray[np.float64]
MAX_TOKENS: Final = 40
"""Tokens whose gradients are taken."""
_SLACK: Final = 0.1
"""Share of a token's variance that the linear model may miss."""
_SIZES: Final[dict[Stage, tuple[float, float]]] = {
    "template": (0.03, 10.0),
    "tokens": (0.03, 10.0),
    "pixels": (1e-9, 4.0),
    "positions": (1e-4, 10.0),
    "model": (1e-9, 1.0),
    "sampling": (1e-6, 10.0),
    "recording": (1e-6, 100.0),
}
"""Variances of changes: of one token, of the size of pixels and weights, in positions, in nats."""
_PRIOR: Final[dict[Stage, float]] = {"pixels": 3.0, "model": 2.0, "positions": -2.0}
"""Nats by which causes without a row are likelier: images and weights differ in more ways than tokens."""
_VISION: Final = -4.0
"""The same for the weights of vision, which are updated less often than images differ."""
_GRID: Final = 24


class Place(NamedTuple):
    """A place at which sampler and trainer may differ.

    Attributes:
        stage: Its stage.
        evidence: Log-likelihood of the differences if they come from it, in nats.
        name: For the statement.
        image: Index of the image.
        layer: Name of the layer.
        token: First token that it may change.
    """

    stage: Stage
    evidence: float
    name: str
    image: int | None = None
    layer: str | None = None
    token: int | None = None


def locate(case: Case, noise: float) -> list[Place]:
    """Return the best place of each stage, the likeliest stage first.

    Args:
        case: The sample.
        noise: Root mean square of differences by arithmetic alone, in nats.
    """
    compared = case.compared
    # A token of probability 1, such as the only one that a grammar allows, agrees whatever the model saw.
    certain = (compared.sampler == 0) & ~compared.beyond(case.tolerance)
    usable = np.flatnonzero(np.isfinite(compared.difference) & ~certain)
    if not len(usable):
        return [Place("recording", 0.0, "the recorded numbers")]
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, MAX_TOKENS).round().astype(int))]
    if case.departure not in chosen and case.departure in usable:
        chosen = np.sort(np.append(chosen, case.departure))
    d = compared.difference[chosen].astype(np.float64)
    best: dict[Stage, Place] = {}
    counts = dict.fromkeys(STAGES, 0)
    try:
        places = [*_places(case, chosen)]
    except (MMRenderError, RuntimeError):  # the gradients do not fit the memory, or the model has none
        places = [*_by_order(case, chosen)]
    for place, covariance in places:
        counts[place.stage] += 1
        prior = _VISION if VISION in (place.layer or "") else 0.0
        found = place._replace(evidence=prior + _evidence(d, covariance, noise, _SIZES[place.stage]))
        if place.stage not in best or found.evidence > best[place.stage].evidence:
            best[place.stage] = found
    # More places of a stage fit better by chance.
    fair = [
        one._replace(evidence=one.evidence - np.log(counts[one.stage]) + _PRIOR.get(one.stage, 0.0))
        for one in best.values()
    ]
    return sorted(fair, key=lambda place: -place.evidence)


def _evidence(d: Matrix, covariance: Matrix, noise: float, sizes: tuple[float, float]) -> float:
    """Return the log-likelihood of differences, averaged over sizes of the change."""
    slack = _SLACK * np.diag(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance + slack)
    squares = np.square(vectors.T @ d)
    grid = np.geomspace(*sizes, _GRID)[:, None]
    variances = grid * values.clip(min=0) + max(noise, 1e-5) ** 2
    each = -0.5 * (squares / variances + np.log(2 * np.pi * variances)).sum(1)
    return float(np.logaddexp.reduce(each) - np.log(_GRID))


def _gram(*gradients: Matrix) -> Matrix:
    """Return the covariance under independent changes of unit size: `(m, m)`."""
    flat = [one.reshape(len(one), -1) for one in gradients]
    return np.asarray(sum(one @ one.T for one in flat))


def _places(case: Case, chosen: npt.NDArray[np.intp]) -> Iterator[tuple[Place, Matrix]]:
    """Yield places with their covariances."""
    sample, positions = case.sample, case.compared.positions[chosen]
    found = _gradients(case, positions)
    yield from _by_numbers(case, chosen, found["logits"])
    embeddings, starts = found["embeddings"], [0, *(stop for _, stop in case.runs)]
    segments = [(start, run[0]) for start, run in zip(starts, case.runs, strict=False)]
    for start, stop in segments:
        name = f"the prompt at tokens {start} to {stop - 1}"
        yield Place("template", 0, name, token=start), _gram(embeddings[:, start:stop]) / (stop - start)
    if len(segments) > 1:
        yield (
            Place("template", 0, "the prompts", token=0),
            _gram(*(embeddings[:, a:b] for a, b in segments)) / 8,
        )
    for number, (start, stop) in enumerate(case.runs):
        own = 4 * np.diag(((positions >= start) & (positions < stop)).astype(float))
        place = Place("tokens", 0, f"completion {number}", token=start)
        yield place, _gram(embeddings[:, start:stop]) + own
    at = case.position
    stop = next(stop for start, stop in case.runs if start <= at < stop)
    for end, name in ((at + 1, f"token {at}"), (stop, f"the tokens from {at} on")):
        own = 4 * np.diag(((positions >= at) & (positions < end)).astype(float))
        yield Place("tokens", 0, name, token=at), _gram(embeddings[:, at:end]) + own
    spans = sample.media_spans
    if "pixels" in found:
        yield from _by_pixels(case, found["pixels"], found["values"])
    if "positions" in found:
        yield from _by_positions(case, found["positions"])
    whole = [gradient for name, gradient in found.items() if name.endswith(f"of the {LANGUAGE}")]
    if whole:
        language = _gram(np.concatenate(whole, 1))
        yield Place("model", 0, "the language model"), language
        yield Place("model", 0, "the arithmetic of the model"), np.diag(np.diag(language))
    for name, gradient in found.items():
        if name.startswith("layer ") and np.any(gradient):
            token = spans[0].start if spans and VISION in name else None
            yield Place("model", 0, name, layer=name, token=token), _gram(gradient)


def _by_pixels(case: Case, gradients: Matrix, values: Matrix) -> Iterator[tuple[Place, Matrix]]:
    """Yield places of pixels, given gradients `(m, rows, ...)` and values `(rows, ...)`."""
    spans = case.sample.media_spans
    rows = np.cumsum([0, *(_leading(span.item) for span in spans)])
    if len(values) == 1 < rows[-1]:  # of families that keep images of a sample in a row
        gradients, values = gradients[:, 0], values[0]
    parts = [gradients[:, a:b] for a, b in pairwise(rows)]
    colours = [_colours(part, values[a:b]) for part, (a, b) in zip(parts, pairwise(rows), strict=True)]
    for number, span in enumerate(spans):
        place = Place("pixels", 0, f"the pixels of {described(span)}", span.position, token=span.start)
        yield place, _gram(parts[number])
        yield place._replace(name=f"the colours of {described(span)}"), _gram(colours[number])
        if 0 < number < len(spans) - 1:
            yield place._replace(name=f"the pixels from {described(span)} on"), _gram(*parts[number:])
    if len(spans) > 1:
        place = Place("pixels", 0, "the pixels of every image", spans[0].position, token=spans[0].start)
        yield place, _gram(*parts)
        yield place._replace(name="the colours of every image"), _gram(np.sum(colours, 0))


def _by_positions(case: Case, own: Matrix) -> Iterator[tuple[Place, Matrix]]:
    """Yield places of positions, given gradients `(m, axes, n)`."""
    spans = case.sample.media_spans
    stops = [*(span.stop for span in spans), *(place for run in case.runs for place in run)]
    steps = [own[..., stop:].sum((1, 2), keepdims=True) for stop in stops]
    inside = [own[..., span.start : span.stop] for span in spans]
    first = spans[0].start if spans else 0
    yield Place("positions", 0, "the positions of tokens", token=first), _gram(own, *steps)
    for number, (start, _) in enumerate(case.runs):
        place = Place("positions", 0, f"the positions from completion {number} on", token=start)
        yield place, _gram(own[..., start:].sum((1, 2), keepdims=True))
    if spans:
        place = Place("positions", 0, "the positions of images", spans[0].position, token=first)
        yield place, _gram(*inside, *steps[: len(spans)])
        yield place._replace(name="the positions after images"), _gram(*steps[: len(spans)])
        yield place._replace(name="the positions within images"), _gram(*inside)


def _colours(gradients: Matrix, values: Matrix) -> Matrix:
    """Return gradients by a shift and a factor of each channel, alike in all pixels: `(m, 6)`."""
    shape = (3, -1) if values.ndim == 2 else (values.shape[1], -1)
    by_channel = [
        one.reshape(*one.shape[: one.ndim - values.ndim + 1], *shape) for one in (gradients, values)
    ]
    own, factors = by_channel
    return np.concatenate([own.sum((1, 3)), (own * factors).sum((1, 3))], 1)


def _by_numbers(case: Case, chosen: npt.NDArray[np.intp], logits: Matrix) -> Iterator[tuple[Place, Matrix]]:
    """Yield the places behind the model: the distribution that was sampled, and the recorded numbers."""
    positions, trainer = case.compared.positions[chosen], case.compared.trainer[chosen].astype(np.float64)
    masks = [((positions >= start) & (positions < stop)).astype(float) for start, stop in case.runs]
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    slope = np.log(probabilities.clip(1e-30))
    heat = (trainer - (probabilities * slope).sum(1))[:, None]  # the derivative by the inverse temperature
    picked = np.zeros_like(probabilities)
    picked[np.arange(len(chosen)), case.sample.token_ids[positions]] = 1
    biases = picked - probabilities
    for scope, mask in [
        ("all completions", sum(masks)),
        *((f"completion {n}", m) for n, m in enumerate(masks)),
    ]:
        of = np.asarray(mask)[:, None]
        yield Place("sampling", 0, f"the temperature of {scope}"), _gram(heat * of)
        yield Place("sampling", 0, f"the allowed tokens of {scope}"), _gram(biases * of)
        yield Place("recording", 0, f"the recorded numbers of {scope}"), np.diag(np.asarray(mask))
        yield Place("recording", 0, f"the scale of {scope}"), _gram(trainer[:, None] * of)
        yield Place("sampling", 0, f"the normalisation of {scope}"), _gram(of)


def _by_order(case: Case, chosen: npt.NDArray[np.intp]) -> Iterator[tuple[Place, Matrix]]:
    """Yield places by the tokens that they can reach alone."""
    positions = case.compared.positions[chosen]
    logits = case.trainer.logits_at(case.sample, positions).float().cpu().numpy().astype(np.float64)
    yield from _by_numbers(case, chosen, logits)
    yield Place("model", 0, "the model"), np.eye(len(positions))
    for span in case.sample.media_spans:
        seen = np.diag((positions > span.start).astype(float))
        place = Place("pixels", 0, f"the pixels of {described(span)}", span.position, token=span.start)
        yield place, seen


def _leading(item: Any) -> int:
    """Return the number of rows of an item's pixels."""
    tensors = item.tensors()
    return int(next(value for name, value in tensors.items() if name.startswith("pixel_values")).shape[0])


def _gradients(case: Case, positions: Sequence[int] | npt.NDArray[Any]) -> dict[str, Matrix]:
    """Return gradients by each intermediate, `(m, ...)`, and the logits, `(m, vocabulary)`."""
    import torch

    model = case.trainer.model
    leaves: dict[str, Any] = {}

    def leaf(name: str, value: Any) -> Any:
        leaves[name] = value.detach().clone().requires_grad_()
        return leaves[name].clone()

    def embedded(_m: Any, _a: Any, output: Any) -> Any:
        return output if "embeddings" in leaves else leaf("embeddings", output)

    def rotated(module: Any, _a: Any, output: Any) -> Any:
        if "cos" in leaves or not isinstance(output, tuple):
            return output
        leaves["frequencies"] = module.inv_freq
        return leaf("cos", output[0]), leaf("sin", output[1])

    language = parts_of(model).get(LANGUAGE, model)
    rotary = [one for one in language.modules() if isinstance(getattr(one, "inv_freq", None), torch.Tensor)]
    owned: dict[str, list[Any]] = {}
    for part, layers in stacks(model).items():
        for number, layer in enumerate(layers):
            vectors = [one for one in layer.parameters() if one.ndim == 1]
            owned |= {f"layer {number} of the {part}": vectors} if vectors else {}
    flags = [(one, one.requires_grad) for one in model.parameters()]
    with ExitStack() as stack, torch.enable_grad(), case.trainer.ready([case.sample]) as inputs:
        stack.callback(lambda: [one.requires_grad_(flag) for one, flag in flags])
        for one, _ in flags:
            one.requires_grad_(one.ndim == 1)
        for module, hook in [
            (model.get_input_embeddings(), embedded),
            *((one, rotated) for one in rotary[:1]),
        ]:
            stack.enter_context(module.register_forward_hook(hook))
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs and inputs[name] is not None and "pixels" not in leaves:
                inputs[name] = leaf("pixels", inputs[name])
        logits = case.trainer.forward(inputs, case.sample)[0, np.asarray(positions) - 1].float()
        ids = torch.from_numpy(case.sample.token_ids[positions].astype(np.int64)).to(logits.device)
        values = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        frequencies = leaves.pop("frequencies", None)
        wanted = [*leaves.values(), *(one for vectors in owned.values() for one in vectors)]
        rows: dict[str, list[Any]] = {name: [] for name in [*leaves, *owned]}
        for value in values:
            got = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(w) if g is None else g for g, w in zip(got, wanted, strict=True)]
            for name, gradient in zip(leaves, flat, strict=False):
                rows[name].append(gradient.float().cpu().numpy())
            rest = flat[len(leaves) :]
            for name, vectors in owned.items():
                own, rest = rest[: len(vectors)], rest[len(vectors) :]
                rows[name].append(np.concatenate([one.float().cpu().numpy().ravel() for one in own]))
        found = {name: np.stack(gradients).astype(np.float64) for name, gradients in rows.items()}
        if frequencies is not None:
            cos, sin = (leaves[name].detach().float().cpu().numpy() for name in ("cos", "sin"))
            turns = np.resize(frequencies.detach().float().cpu().numpy(), cos.shape[-1])
            slopes = ((found.pop("sin") * cos - found.pop("cos") * sin) * turns).sum(-1)  # (m, ..., n)
            found["positions"] = slopes.reshape(len(slopes), -1, slopes.shape[-1])
        found["values"] = (
            leaves["pixels"].detach().float().cpu().numpy() if "pixels" in leaves else np.zeros(0)
        )
        # In units of the difference of two tokens' embeddings, and of the weights' own size.
        found["embeddings"] = found["embeddings"][:, 0] * float(
            leaves["embeddings"].detach().float().std() * 2**0.5
        )
        for name, vectors in owned.items():
            found[name] *= float(
                torch.cat([one.detach().flatten() for one in vectors]).float().square().mean().sqrt()
            )
        found["logits"] = logits.detach().cpu().numpy().astype(np.float64)
    return found
