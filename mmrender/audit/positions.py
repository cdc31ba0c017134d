"""Rows of the stage positions: other positions of tokens, and other rotations by them."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, Final, TypeAlias

import numpy as np

from mmrender.audit.case import Case, Trial, fitted, scopes
from mmrender.audit.computed import Place, changed_weights, giving, other_dtypes, replaced, through
from mmrender.audit.prompts import bounds
from mmrender.audit.report import described, sampled_runs
from mmrender.audit.trainer import LANGUAGE, parts_of

_MAX_GAP: Final = 65
"""Positions that padding between prompt and completion may take."""


_Renumbered: TypeAlias = tuple[str, Sequence[tuple[int, int]], Callable[[Any, int], Any]]
"""The sampler's fault, the parts of the sample, and the change of their positions."""


def positions(case: Case) -> Iterator[Trial]:
    """Yield other numbers of tokens: `position_ids` of shape `(axes, 1, n)`, or `(1, n)`."""
    spans = case.sample.media_spans
    # Between the features of an image there may be text.
    images = [(s.start + a, s.start + b) for s in spans for a, b in sampled_runs(s.range.is_embed)]
    of_images = _of_images(case, images) if images else ()
    for text, parts, change in chain(of_images, _of_tokens(case), _moved(case, images)):
        since = parts[0][0]
        trial = Trial(f"the sampler {text}", positions=partial(_renumbered, parts, change), since=since)
        yield trial
        # Of one completion alone: in later prompts its tokens may have their own positions again.
        for number in case.departing_runs if len(case.runs) > 1 else ():
            if case.runs[number][0] == since:
                statement = f"{trial.statement}, seen by its own tokens alone"
                yield trial._replace(sample=case.of_run(number), statement=statement)


def _of_images(case: Case, images: Sequence[tuple[int, int]]) -> Iterator[_Renumbered]:
    """Yield other positions of images, and of the tokens after them."""
    length, merge = len(case.sample), 1
    since, steps = [(images[0][0], length)], {"as one position": _STEPS["as one position"]}
    if case.trainer.family.mrope is not None:
        yield "numbered its tokens one by one, as text, on one axis", [(0, length)], _by_index
        for names, axes in _AXES.items():
            swap = lambda own, _, axes=axes: own.copy_(own[axes])  # noqa: E731
            yield f"had {names} exchanged in its positions", since, swap
        flat = lambda own, _: own[1:].copy_(own[:1, :, :1].expand_as(own[1:]))  # noqa: E731
        yield "had one number for height and width of images", images, flat
        yield "numbered rows and columns of images from zero", images, lambda own, at: _from_zero(own[1:], at)
        yield "numbered images from zero", images, _from_zero
        merge = getattr(case.trainer.model.config.vision_config, "spatial_merge_size", 2)
        by_patches = lambda own: merge * (own.max() - own[0, 0, 0] + 1)  # noqa: E731
        steps = {**_STEPS, "by its side in patches, not merged": by_patches}
        for text, start in {"the images": images[-1][1], "the first prompt": case.runs[0][0]}.items():
            yield f"numbered tokens by their index after {text} (no rope delta)", [(start, length)], _by_index
        for parts, which in scopes(case):
            yield f"numbered the tokens of {which} by their index (no rope delta)", parts, _by_index
    for text, step in steps.items():
        yield f"counted an image {text}", since, partial(_followed, images, step)
    yield "gave one position to all tokens of an image", images, _frozen
    together = partial(_followed, images, _STEPS["as one position"], inside=_frozen)
    yield "gave one position to all tokens of an image, which counted as one,", since, together
    for factor in (2, 0.5, 0):
        text = f"had positions within images {factor:g} times as far apart"
        stretch = lambda own, _, by=factor: own.copy_(own[..., :1] + (own - own[..., :1]) * by)  # noqa: E731
        yield text, images, stretch


def _of_tokens(case: Case) -> Iterator[_Renumbered]:
    """Yield positions that are bounded, or restart at some token."""
    length = len(case.sample)
    for size in (2**power for power in range(5, 18) if 2**power < length):
        clamped = lambda own, _, n=size: own.clamp_(max=n - 1)  # noqa: E731
        yield f"had no positions above {size - 1}", [(0, length)], clamped
    for parts, which in scopes(case):
        yield f"restarted its positions in {which}", parts, _from_zero
        yield f"gave one position to all tokens of {which}", parts, _frozen
    anew = {stop: f"after completion {number}" for number, (_, stop) in enumerate(case.runs[:-1])}
    anew |= {start: f"from zero in the turn at token {start}" for start in bounds(case, length)[1:]}
    for start, where in anew.items():
        yield f"restarted its positions {where}", [(start, length)], _from_zero


def _moved(case: Case, images: Sequence[tuple[int, int]]) -> Iterator[_Renumbered]:
    """Yield positions that are higher or lower from somewhere on."""
    length = len(case.sample)
    # Padding between prompt and completion may be counted: by any number.
    small = [sign * by for by in range(1, 9) for sign in (1, -1)]
    for by in (*small, *range(9, _MAX_GAP), 96, 128, 256, 512):
        moved = lambda own, _, by=by: own.add_(by)  # noqa: E731
        shift = f"positions shifted by {by:+d} ({abs(by)} {'higher' if by > 0 else 'lower'})"
        for parts, which in scopes(case) if by < 9 else [*scopes(case)][:1]:
            yield f"had {shift} from {which} on", [(parts[0][0], length)], moved
        if images and abs(by) < 3:
            for span in case.suspects:
                yield f"had {shift} after {described(span)}", [(span.stop, length)], moved
            yield f"had {shift} within images", images, moved


def _renumbered(
    parts: Sequence[tuple[int, int]], change: Callable[[Any, int], Any], given: dict[str, Any]
) -> None:
    """Change the positions of some parts of a model's inputs in place."""
    given["position_ids"] = ids = given["position_ids"].clone()
    for start, stop in parts:
        change(ids[..., start:stop], start)


def _by_index(own: Any, start: int) -> None:
    import torch

    own.copy_(torch.arange(start, start + own.shape[-1]))


def _from_zero(own: Any, _: int) -> None:
    own -= own[..., :1].clone()


def _frozen(own: Any, _: int) -> None:
    own.copy_(own[..., :1].expand_as(own).clone())


def _followed(
    images: Sequence[tuple[int, int]],
    step: Callable[[Any], Any],
    ids: Any,
    offset: int,
    inside: Callable[[Any, int], Any] = lambda own, at: own,
) -> None:
    """Let the tokens after an image continue at a distance from its first token."""
    first = ids.reshape(-1, ids.shape[-1])[0]
    for start, stop in ((start - offset, stop - offset) for start, stop in images):
        if stop < ids.shape[-1]:
            ids[..., stop:] += first[start] + step(ids[..., start:stop]) - first[stop].clone()
        inside(ids[..., start:stop], start)


_AXES: Final[Mapping[str, list[int]]] = {"height and width": [0, 2, 1], "time and height": [1, 0, 2]}


_STEPS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "as one position": lambda own: 1,
    "as one position a token": lambda own: own.shape[-1],
    "by its height": lambda own: own[1, 0].max() - own[0, 0, 0] + 1,
    "by its width": lambda own: own[2, 0].max() - own[0, 0, 0] + 1,
}


def rotary(case: Case) -> Iterator[Trial]:
    """Yield another base, scale or dtype of rotary frequencies, and other pairs of dimensions or axes."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = case.trainer.model
    modules = [*parts_of(model).get(LANGUAGE, model).modules()]
    buffers = ((one, name) for one in modules for name, _ in one.named_buffers(recurse=False))
    held = [(one, name) for one, name in buffers if name.endswith("inv_freq") and "original" not in name]
    config = copy.deepcopy(model.config.get_text_config())
    length = config.max_position_embeddings
    given = dict(getattr(config, "rope_parameters", None) or {})
    theta = given.get("rope_theta", getattr(config, "rope_theta", None)) or 1e4
    if not held:
        return
    modules, first = list(dict.fromkeys(one for one, _ in held)), getattr(*held[0])

    def trial(statement: str, change: Callable[[Any], Any], *names: str, of: Any = None) -> Trial:
        places = [(one, name, change(getattr(one, name))) for one, name in held]
        others = [(one, name) for one in modules for name in names if hasattr(one, name)]
        places += [(one, name, of(getattr(one, name))) for one, name in others]
        return Trial(f"the sampler's rotary {statement}", model=partial(replaced, places))

    def based(base: float) -> Trial:
        text = f"base (theta) was {base:.6g}, not {theta:g}"
        return trial(text, lambda own: own ** (math.log(base) / math.log(theta)))

    def scaled(factor: float) -> Trial:
        text = f"frequencies were {factor:.4g} of the trainer's (linear scaling)"
        return trial(text, lambda own: own * factor)

    def llama3(factor: float, original: float) -> Trial:
        def change(own: Any) -> Any:
            kept = ((original * own / (2 * math.pi) - 1) / 3).clamp(0, 1)
            return own * (kept + (1 - kept) / factor)

        return trial(f"frequencies were scaled by llama3 (factor {factor:g}, length {original:.5g})", change)

    for name, dtype in other_dtypes(model).items():
        if name != "float32":
            yield trial(f"frequencies were rounded to {name}", partial(through, dtype))
            text = f"the sampler's rotations, cosines and sines of positions, were rounded to {name}"
            yield Trial(text, model=partial(giving, modules, partial(through, dtype)))
    for kind, factor in product(("yarn", "linear", "dynamic"), (2.0, 4.0, 8.0)):
        for original in dict.fromkeys((int(length / factor), length)):
            lengths = {"factor": factor, "original_max_position_embeddings": original}
            config.rope_parameters = given | lengths | {"rope_type": kind}
            try:
                frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # of a release that computes this kind otherwise
            if frequencies.shape == first.shape:
                text = f"frequencies were scaled by {kind} (factor {factor:g}, length {original})"
                attention = lambda _, scaling=scaling: scaling  # noqa: E731
                yield trial(text, partial(_instead, frequencies), "attention_scaling", of=attention)
    for one, name in held if len({name for _, name in held}) > 1 else ():
        kind = name.removesuffix("_inv_freq").replace("_", " ")
        yield trial(f"base was that of {kind} in all layers", partial(_instead, getattr(one, name)))
    for share in (0.5, 0.25):
        text = f"dimensions were the first {share:g} of each head alone (partial_rotary_factor)"
        fewer = lambda own, share=share: own and [int(length * share) for length in own]  # noqa: E731
        frequencies = theta ** -torch.linspace(0, 1, int(len(first) * share) + 1)[:-1]
        yield trial(text, partial(_instead, frequencies), "mrope_section", of=fewer)
    yield from chain(_other_pairs(case, len(first) * 2), _other_sections(case, modules))
    yield from chain(map(based, (1e4, 5e5, 1e6, 5e6, 1e7)), map(scaled, (0.5, 0.25, 0.125, 2.0, 4.0)))
    yield from fitted(case, based, 1e3, 1e8, theta, theta * 4, theta / 4)
    yield from fitted(case, scaled, 0.02, 50.0, 1.0)
    for factor in (8.0, 32.0):
        yield from fitted(case, partial(llama3, factor), 32, 65536, 8192, 128, 1024, 8192)


def _instead(other: Any, own: Any) -> Any:
    return other.to(own)


def _other_pairs(case: Case, size: int) -> Iterator[Trial]:
    """Yield heads whose dimensions are rotated in other pairs, as of weights that were not permuted."""
    import torch

    language = parts_of(case.trainer.model).get(LANGUAGE, case.trainer.model)
    modules = [one for name, one in language.named_modules() if name.endswith(("q_proj", "k_proj"))]
    both = torch.nn.ModuleList(modules)
    neighbours, halves = (torch.arange(size).reshape(shape).T.reshape(-1) for shape in ((-1, 2), (2, -1)))

    def permuted(order: Any, data: Any) -> Any:
        heads = data.reshape(-1, size, *data.shape[1:]) if len(data) % size == 0 else None
        return data if heads is None else heads[:, order].reshape(data.shape)

    for text, order in {
        "neighbouring dimensions of a head together (interleaved, is_neox_style=False)": neighbours,
        "dimensions half a head apart together, of weights for neighbours": halves,
    }.items():
        yield Trial(f"the sampler rotated {text}", model=changed_weights(both, partial(permuted, order)))


def _other_sections(case: Case, modules: Sequence[Any]) -> Iterator[Trial]:
    """Yield axes of positions with other frequencies."""
    since = min((span.start for span in case.sample.media_spans), default=0)
    sections = [one for one in modules if getattr(one, "mrope_section", None)]
    composed = [one for one in sections if hasattr(one, "recomposition_frequencies")]
    changes: dict[str, tuple[str, Callable[[Any], Any]]] = {}
    for text, order in _SECTIONS.items() if composed else ():
        changes[f" gave the axes of positions {text}"] = (
            "recomposition_frequencies",
            partial(partial, _composed, order),
        )
    own = list(sections[0].mrope_section) if sections else []
    for shares in _SHARES if len(own) == 3 else ():
        time, height = (round(sum(own) * share) for share in shares)
        if (other := [time, height, sum(own) - time - height]) != own:
            text = f"'s mrope_section (sections of time, height and width) was {other}, not {own}"
            changes[text] = "mrope_section", lambda _, other=other: other  # type: ignore[misc]
    for text, (name, change) in changes.items():
        places: list[Place] = [
            (one, name, change(one.mrope_section)) for one in sections if hasattr(one, name)
        ]
        yield Trial(f"the sampler{text}", model=partial(replaced, places), since=since)


def _composed(order: Callable[[int, list[int]], int], sections: list[int], frequencies: Any) -> Any:
    """Return frequencies `(axes, 1, n, m)` with an axis for each: `(1, n, 2m)`."""
    import torch

    count = frequencies.shape[-1]
    chosen = [frequencies[order(place, sections), ..., place] for place in range(count)]
    return torch.cat(2 * [torch.stack(chosen, -1)], -1)


_SHARES: Final = ((1 / 4, 3 / 8), (1 / 3, 1 / 3), (3 / 8, 5 / 16), (1 / 2, 1 / 4), (1 / 8, 7 / 16))
"""Shares of frequencies for time and height, of families: Qwen2-VL, GLM-4V, Qwen3-VL and others."""
_SECTIONS: Final[Mapping[str, Callable[[int, list[int]], int]]] = {
    "contiguous sections of frequencies, one after another, not interleaved": (
        lambda at, own: min(2, sum(at >= edge for edge in np.cumsum(own)))
    ),
    "interleaved frequencies, not contiguous sections": lambda at, own: at % 3 * (at < 3 * own[at % 3]),
    "the frequencies of time alone": lambda at, own: 0,
}
"""The axis of each frequency, given the number of frequencies of each axis."""
