"""Rows of the stage positions: other positions of tokens, and other rotations by them."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final

import msgspec
import numpy as np

from mmrender.audit.case import Case, ChangedItem, Trial, fitted, scopes, with_items
from mmrender.audit.computed import Place, bound, giving, other_dtypes, replaced, tensors, through
from mmrender.audit.prompts import bounds
from mmrender.audit.report import described, sampled_runs
from mmrender.audit.trainer import LANGUAGE, parts_of
from mmrender.media.processors.patches import PatchItem

_MAX_GAP: Final = 65
"""Positions that padding between prompt and completion may take."""


def positions(case: Case) -> Iterator[Trial]:
    """Yield other numbers of tokens: `position_ids` of shape `(axes, 1, n)`, or `(1, n)`."""
    for text, parts, change in _renumbered(case):
        since = parts[0][0]
        images = [span.position for span in case.sample.media_spans if since in (span.start, span.stop)]
        moved, image = partial(with_positions, parts, change), images[0] if images else None
        trial = Trial(f"the sampler {text}", positions=moved, token=since, since=since, image=image)
        yield trial
        if len(case.runs) > 1 and since in [case.runs[number][0] for number in case.departing_runs]:
            # Of one completion alone: in later prompts its tokens may have their own positions again.
            stop = next(stop for start, stop in case.runs if start == since)
            inside = (np.arange(len(case.sample)) >= since) & (np.arange(len(case.sample)) < stop)
            only = replace(case.sample, loss_mask=case.sample.loss_mask & inside)
            yield trial._replace(sample=only, statement=f"{trial.statement}, seen by its own tokens alone")


def _renumbered(  # noqa: PLR0912 - a table of texts and changes, some of which need images
    case: Case,
) -> Iterator[tuple[str, Sequence[tuple[int, int]], Callable[[Any, int], Any]]]:
    spans, runs, length = case.sample.media_spans, case.runs, len(case.sample)
    # Between the features of an image there may be text.
    images = [(s.start + a, s.start + b) for s in spans for a, b in sampled_runs(s.range.is_embed)]
    since = [(images[0][0], length)] if spans else []
    if spans and case.trainer.family.mrope is not None:
        yield "numbered its tokens one by one, as text, on one axis", [(0, length)], _by_index
        for names, axes in _AXES.items():
            swap = lambda own, _, axes=axes: own.copy_(own[axes])  # noqa: E731
            yield f"had {names} exchanged in its positions", since, swap
        flat = lambda own, _: own[1:].copy_(own[:1, :, :1].expand_as(own[1:]))  # noqa: E731
        yield "had one number for height and width of images", images, flat
        yield "numbered rows and columns of images from zero", images, lambda own, at: _from_zero(own[1:], at)
        yield "numbered images from zero", images, _from_zero
        for axis, by in product(range(3), (1, -1)):
            moved = lambda own, _, axis=axis, by=by: own[axis].add_(by)  # noqa: E731
            yield f"had the {_AXIS[axis]} of images {by:+d} place off in its positions", images, moved
        for text, step in _STEPS.items():
            yield f"counted an image {text}", since, partial(_followed, images, step)
        merge = getattr(case.trainer.model.config.vision_config, "spatial_merge_size", 2)
        by_patches = lambda own: merge * (own.max() - own[0, 0, 0] + 1)  # noqa: E731
        text = "counted an image by its side in patches, not merged"
        yield text, since, partial(_followed, images, by_patches)
        for text, start in {"the images": images[-1][1], "the first prompt": runs[0][0]}.items():
            yield f"numbered tokens by their index after {text} (no rope delta)", [(start, length)], _by_index
        for parts, which in scopes(case):
            yield f"numbered the tokens of {which} by their index (no rope delta)", parts, _by_index
    elif spans:
        yield "counted an image as one position", since, partial(_followed, images, _STEPS["as one position"])
    if spans:
        yield "gave one position to all tokens of an image", images, _frozen
        together = partial(_followed, images, _STEPS["as one position"], inside=_frozen)
        yield "gave one position to all tokens of an image, which counted as one,", since, together
        for factor in (2, 0.5, 0):
            text = f"had positions within images {factor:g} times as far apart"
            yield text, images, partial(_stretched, factor=factor)
    for size in (2**power for power in range(4, 18) if 2**power < length):
        clamped, wrapped = (
            (lambda own, _, n=size: own.clamp_(max=n - 1)),
            lambda own, _, n=size: own.remainder_(n),
        )
        yield f"had no positions above {size - 1}", [(0, length)], clamped
        yield f"began positions anew at {size}", [(0, length)], wrapped
    for parts, which in scopes(case):
        yield f"restarted its positions in {which}", parts, _from_zero
        yield f"gave one position to all tokens of {which}", parts, _frozen
    for number in range(1, len(runs)):
        text = f"restarted its positions after completion {number - 1}"
        yield text, [(runs[number - 1][1], length)], _from_zero
    for start in bounds(case, length)[1:]:
        yield f"restarted its positions from zero in the turn at token {start}", [(start, length)], _from_zero
    yield from _moved(case, images)


def _moved(
    case: Case, images: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, Sequence[tuple[int, int]], Callable[[Any, int], Any]]]:
    """Yield positions that are higher or lower from somewhere on."""
    length = len(case.sample)
    # Padding between prompt and completion may be counted: by any number.
    for by in (
        *(sign * by for by in range(1, 9) for sign in (1, -1)),
        *range(9, _MAX_GAP),
        96,
        128,
        256,
        512,
    ):
        moved = lambda own, _, by=by: own.add_(by)  # noqa: E731
        shift = f"positions shifted by {by:+d} ({abs(by)} {'higher' if by > 0 else 'lower'})"
        for parts, which in scopes(case) if by < 9 else [*scopes(case)][:1]:
            yield f"had {shift} from {which} on", [(parts[0][0], length)], moved
        if images and abs(by) < 3:
            for span in case.suspects:
                yield f"had {shift} after {described(span)}", [(span.stop, length)], moved
            yield f"had {shift} within images", images, moved


def with_positions(
    parts: Iterable[tuple[int, int]], change: Callable[[Any, int], Any], given: dict[str, Any]
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


def _stretched(own: Any, _: int, factor: float) -> None:
    own.copy_(own[..., :1] + (own - own[..., :1]) * factor)


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


_AXIS: Final = ("time", "height", "width")
_AXES: Final[Mapping[str, list[int]]] = {"height and width": [0, 2, 1], "time and height": [1, 0, 2]}


_STEPS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "as one position": lambda own: 1,
    "as one position a token": lambda own: own.shape[-1],
    "by its height": lambda own: own[1, 0].max() - own[0, 0, 0] + 1,
    "by its width": lambda own: own[2, 0].max() - own[0, 0, 0] + 1,
}


def grid(case: Case) -> Iterator[Trial]:
    """Yield images whose grid has height and width exchanged, and videos with other time steps."""
    for span in case.suspects:
        item: Any = span.item
        others: dict[str, Any] = {}
        if isinstance(item, PatchItem) and item.grid[1] != item.grid[2]:
            steps, height, width = item.grid
            turned = ChangedItem(item, lambda pixels, _: pixels, grid=(steps, width, height))
            others["a grid with height and width exchanged"] = turned
        known = getattr(item, "second_per_grid", None)
        for seconds in [] if known is None else [known / 2, known * 2, known / 4, known * 4, 0.5, 1.0, 2.0]:
            changed = {"second_per_grid": seconds, "identity": f"{round(seconds * 1e9):064x}"}
            others[f"time steps of {seconds:g} s, not {known:g} s,"] = msgspec.structs.replace(
                item, **changed
            )
        for text, other in others.items():
            sample = with_items(case.sample, [(span, other)])
            statement = f"the sampler saw {text} in {described(span)}"
            yield Trial(statement, sample, image=span.position, since=span.start)


def rotary_buffers(model: Any) -> list[tuple[Any, str]]:
    """Return the buffers of the language model that rotate by positions, one for each kind of layer."""
    language = parts_of(model).get(LANGUAGE, model)
    return [
        (module, name)
        for module in language.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]


def rotary(case: Case) -> Iterator[Trial]:
    """Yield another base, scale or dtype of rotary frequencies, and other pairs of dimensions or axes."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model, held = case.trainer.model, rotary_buffers(case.trainer.model)
    config = copy.deepcopy(model.config.get_text_config())
    given = dict(getattr(config, "rope_parameters", None) or {})
    theta = given.get("rope_theta", getattr(config, "rope_theta", None)) or 1e4
    if not held:
        return

    def trial(statement: str, change: Callable[[Any], Any], *more: Place) -> Trial:
        places = [(one, name, change(getattr(one, name))) for one, name in held]
        return Trial(f"the sampler's rotary {statement}", model=bound(replaced, [*places, *more]))

    def based(base: float) -> Trial:
        text = f"base (theta) was {base:.6g}, not {theta:g}"
        return trial(text, lambda own: own ** (math.log(base) / math.log(theta)))

    def scaled(factor: float) -> Trial:
        return trial(
            f"frequencies were {factor:.4g} of the trainer's (linear scaling)", lambda own: own * factor
        )

    def llama3(factor: float, original: float) -> Trial:
        def change(own: Any) -> Any:
            kept = ((original * own / (2 * math.pi) - 1) / 3).clamp(0, 1)
            return own * (kept + (1 - kept) / factor)

        return trial(f"frequencies were scaled by llama3 (factor {factor:g}, length {original:.5g})", change)

    for name, dtype in other_dtypes(model).items():
        if name != "float32":
            yield trial(f"frequencies were rounded to {name}", partial(through, dtype))
            text = f"the sampler's rotations, cosines and sines of positions, were rounded to {name}"
            modules = list(dict.fromkeys(one for one, _ in held))
            yield Trial(text, model=bound(giving, modules, partial(through, dtype)))
    first = getattr(*held[0])
    for kind, factor in product(("yarn", "linear", "dynamic"), (2.0, 4.0, 8.0)):
        for original in dict.fromkeys(
            (int(config.max_position_embeddings / factor), config.max_position_embeddings)
        ):
            config.rope_parameters = {
                **{**given, "rope_type": kind, "factor": factor},
                "original_max_position_embeddings": original,
            }
            try:
                frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # of a release that computes this kind otherwise
            if frequencies.shape == first.shape:
                text = f"frequencies were scaled by {kind} (factor {factor:g}, length {original})"
                more = [
                    (one, "attention_scaling", scaling)
                    for one, _ in held
                    if hasattr(one, "attention_scaling")
                ]
                yield trial(text, partial(_instead, frequencies), *more)
    for one, name in held if len({name for _, name in held}) > 1 else ():
        kind, other = name.removesuffix("_inv_freq").replace("_", " "), getattr(one, name)
        yield trial(f"base was that of {kind} in all layers", partial(_instead, other))
    for share in (0.5, 0.25):
        count = int(len(first) * share)
        text = f"dimensions were the first {share:g} of each head alone (partial_rotary_factor)"
        sections = [
            (one, "mrope_section", [int(length * share) for length in one.mrope_section])
            for one, _ in held
            if getattr(one, "mrope_section", None)
        ]
        yield trial(text, partial(_instead, theta ** -(torch.arange(count) / count)), *sections)
    yield from _other_pairs(case, len(first) * 2)
    yield from _other_sections(case, [one for one, _ in held])
    yield from (based(base) for base in (1e4, 5e5, 1e6, 5e6, 1e7))
    yield from (scaled(factor) for factor in (0.5, 0.25, 0.125, 2.0, 4.0))
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
    own = torch.arange(size)
    orders = {
        "neighbouring dimensions of a head together (interleaved, is_neox_style=False)": own.reshape(-1, 2).T,
        "dimensions half a head apart together, of weights for neighbours": own.reshape(2, -1).T,
    }
    for text, order in orders.items():

        def permuted(data: Any, order: Any = order) -> Any:
            heads = data.reshape(-1, size, *data.shape[1:]) if len(data) % size == 0 else None
            return data if heads is None else heads[:, order.reshape(-1)].reshape(data.shape)

        def make(change: Callable[[Any], Any] = permuted) -> AbstractContextManager[None]:
            return replaced([place for one in modules for place in tensors(one, change)])

        yield Trial(f"the sampler rotated {text}", model=bound(make))


def _other_sections(case: Case, modules: Sequence[Any]) -> Iterator[Trial]:
    """Yield axes of positions with other frequencies."""
    since = min((span.start for span in case.sample.media_spans), default=0)
    sections = [one for one in modules if getattr(one, "mrope_section", None)]
    for text, order in _SECTIONS.items():
        places: list[Place] = [
            (one, "recomposition_frequencies", partial(_composed, order, one.mrope_section))
            for one in sections
            if hasattr(one, "recomposition_frequencies")
        ]
        if places:
            statement = f"the sampler gave the axes of positions {text}"
            yield Trial(statement, model=bound(replaced, places), since=since)
    own = list(sections[0].mrope_section) if sections else []
    total, step = sum(own), max(1, sum(own) // 16)
    for time in range(step, total - step if len(own) == 3 else 0, step):
        for height in range(step, total - time, step):
            other = [time, height, total - time - height]
            if other != own:
                places = [(one, "mrope_section", other) for one in sections]
                text = (
                    f"the sampler's mrope_section (sections of time, height and width) was {other}, not {own}"
                )
                yield Trial(text, model=bound(replaced, places), since=since)


def _composed(order: Callable[[int, list[int]], int], sections: list[int], frequencies: Any) -> Any:
    """Return frequencies `(axes, 1, n, m)` with an axis for each: `(1, n, 2m)`."""
    import torch

    count = frequencies.shape[-1]
    chosen = [frequencies[order(place, sections), ..., place] for place in range(count)]
    return torch.cat(2 * [torch.stack(chosen, -1)], -1)


_SECTIONS: Final[Mapping[str, Callable[[int, list[int]], int]]] = {
    "contiguous sections of frequencies, one after another, not interleaved": lambda place, sections: int(
        np.searchsorted(np.cumsum(sections), place, "right").clip(0, 2)
    ),
    "interleaved frequencies, not contiguous sections": lambda place, sections: (
        place % 3 if place < 3 * sections[place % 3] else 0
    ),
    "the frequencies of time alone": lambda place, sections: 0,
}
"""The axis of each frequency, given the number of frequencies of each axis."""


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    "positions": positions,
    "grid": grid,
    "rotary base": rotary,
}
"""Changes to try, by row."""
