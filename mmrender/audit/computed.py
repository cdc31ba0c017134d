"""Rows of the stages positions and model: other positions, attention, dtypes and weights."""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from mmrender.audit.case import Case, ChangedItem, Trial, minimum, scopes, with_items
from mmrender.audit.report import Float32Array, described
from mmrender.audit.tokens import bounds
from mmrender.audit.trainer import ModelChange
from mmrender.media.processors.patches import PatchItem

Place: TypeAlias = tuple[Any, Any, Any]
"""The owner of a value, its attribute or key, and another value for it."""
VISION: Final = "vision"
LANGUAGE: Final = "language model"
_MAX_FITTED: Final = 3
_MAX_GROUPS: Final = 48
"""Parts of the model in which other weights are tried."""


# --- positions


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


def _renumbered(case: Case) -> Iterator[tuple[str, Sequence[tuple[int, int]], Callable[[Any, int], Any]]]:
    spans, runs, length = case.sample.media_spans, case.runs, len(case.sample)
    images = [(span.start, span.stop) for span in spans]
    if spans and case.trainer.family.mrope is not None:
        since = [(images[0][0], length)]
        yield "numbered its tokens one by one, as text, on one axis", [(0, length)], _by_index
        for names, axes in {"height and width": [0, 2, 1], "time and height": [1, 0, 2]}.items():
            swap = lambda own, _, axes=axes: own.copy_(own[axes])  # noqa: E731
            yield f"had {names} exchanged in its positions", since, swap
        flat = lambda own, _: own[1:].copy_(own[:1, :, :1].expand_as(own[1:]))  # noqa: E731
        yield "had one number for height and width of images", images, flat
        yield "numbered rows and columns of images from zero", images, lambda own, at: _from_zero(own[1:], at)
        yield "numbered images from zero", images, _from_zero
        for text, step in _STEPS.items():
            yield f"counted an image {text}", since, partial(_followed, images, step)
        merge = getattr(case.trainer.model.config.vision_config, "spatial_merge_size", 2)
        by_patches = lambda own: merge * (own.max() - own[0, 0, 0] + 1)  # noqa: E731
        yield (
            "counted an image by its side in patches, not merged",
            since,
            partial(_followed, images, by_patches),
        )
        for text, start in {"the images": images[-1][1], "the first prompt": runs[0][0]}.items():
            yield f"numbered tokens by their index after {text} (no rope delta)", [(start, length)], _by_index
        for parts, which in scopes(case):
            yield f"numbered the tokens of {which} by their index (no rope delta)", parts, _by_index
    elif spans:
        yield (
            "counted an image as one position",
            [(images[0][0], length)],
            partial(_followed, images, lambda own: 1),
        )
    for parts, which in scopes(case):
        yield f"restarted its positions in {which}", parts, _from_zero
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
    for by in (*(sign * by for by in range(1, 25) for sign in (1, -1)), 32, 64):
        moved = lambda own, _, by=by: own.add_(by)  # noqa: E731
        shift = f"positions shifted by {by:+d} ({abs(by)} {'higher' if by > 0 else 'lower'})"
        for parts, which in scopes(case):
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


def _followed(images: Sequence[tuple[int, int]], step: Callable[[Any], Any], ids: Any, offset: int) -> None:
    """Let the tokens after an image continue at a distance from its first token."""
    first = ids.reshape(-1, ids.shape[-1])[0]
    for start, stop in ((start - offset, stop - offset) for start, stop in images):
        if stop < ids.shape[-1]:
            ids[..., stop:] += first[start] + step(ids[..., start:stop]) - first[stop].clone()


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


def rotary_modules(model: Any) -> list[Any]:
    """Return the modules of the language model that turn positions into rotations."""
    import torch

    language = parts_of(model).get(LANGUAGE, model)
    return [one for one in language.modules() if isinstance(getattr(one, "inv_freq", None), torch.Tensor)]


def rotary(case: Case) -> Iterator[Trial]:
    """Yield another base or scale of rotary frequencies."""
    config = case.trainer.model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    theta = given.get("rope_theta", getattr(config, "rope_theta", None)) or 1e4
    held = rotary_modules(case.trainer.model)

    def trial(statement: str, change: Callable[[Any], Any]) -> Trial:
        places = [(one, "inv_freq", change(one.inv_freq)) for one in held]
        return Trial(f"the sampler's rotary {statement}", model=_change(replaced, places))

    def based(base: float) -> Trial:
        return trial(
            f"base (theta) was {base:.6g}, not {theta:g}",
            lambda own: own ** (math.log(base) / math.log(theta)),
        )

    def scaled(factor: float) -> Trial:
        return trial(f"frequencies were {factor:.4g} of the trainer's", lambda own: own * factor)

    if held:
        yield from _turned(case, held)
    yield from (based(base) for base in (1e4, 5e5, 1e6, 5e6, 1e7))
    yield from (scaled(factor) for factor in (0.5, 0.25, 0.125, 2.0, 4.0))
    yield from _fitted(case, based, 1e3, 1e8) if held else ()
    yield from _fitted(case, scaled, 0.02, 50.0) if held else ()


def _turned(case: Case, held: list[Any]) -> Iterator[Trial]:
    """Yield rotations of another dtype, of another kind of scaling, and with axes on other frequencies."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, dtype in _other_dtypes(case.trainer.model).items():
        if name != "float32":
            places = [(one, "inv_freq", _through(dtype, one.inv_freq)) for one in held]
            text = f"the sampler's rotary frequencies were rounded to {name}"
            yield Trial(text, model=_change(replaced, places))
            text = f"the sampler's rotations, cosines and sines of positions, were rounded to {name}"
            yield Trial(text, model=_change(_giving, held, partial(_through, dtype)))
    config = copy.deepcopy(case.trainer.model.config.get_text_config())
    own = dict(getattr(config, "rope_parameters", None) or {})
    for kind, factor in (
        (kind, factor) for kind in ("yarn", "linear", "dynamic") for factor in (2.0, 4.0, 8.0)
    ):
        longest = int(config.max_position_embeddings / factor)
        for original in dict.fromkeys((longest, config.max_position_embeddings)):
            config.rope_parameters = {
                **own,
                "rope_type": kind,
                "factor": factor,
                "original_max_position_embeddings": original,
            }
            try:
                frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # of a release that computes this kind otherwise
            if frequencies.shape == held[0].inv_freq.shape:
                places = [(one, "inv_freq", frequencies.to(one.inv_freq)) for one in held]
                places += [
                    (one, "attention_scaling", scaling) for one in held if hasattr(one, "attention_scaling")
                ]
                text = (
                    f"the sampler scaled rotary frequencies by {kind} (factor {factor:g}, length {original})"
                )
                yield Trial(text, model=_change(replaced, places))
    sections = [
        one for one in held if hasattr(one, "recomposition_frequencies") and hasattr(one, "mrope_section")
    ]
    for text, order in _SECTIONS.items() if sections else ():
        places = [
            (one, "recomposition_frequencies", partial(_composed, order, one.mrope_section))
            for one in sections
        ]
        since = min((span.start for span in case.sample.media_spans), default=0)
        yield Trial(
            f"the sampler gave the axes of positions {text}", model=_change(replaced, places), since=since
        )


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


# --- changes of the model


def parts_of(model: Any) -> dict[str, Any]:
    """Return the parts of a model that are computed or loaded apart: vision, language model and head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base = getattr(model, model.base_model_prefix, model)
    found: dict[str, Any] = {}
    for name, child in base.named_children():
        language = any(module is embedding for module in child.modules())
        found[LANGUAGE if language else f"{VISION} ({name})"] = child
    return found | ({} if head is None else {"head": head})


def stacks(model: Any) -> dict[str, list[Any]]:
    """Return the layers of the language model and of the vision towers, in order, if they are found."""
    import torch

    found = {}
    for name, part in parts_of(model).items():
        lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
        found[name] = list(max(lists, key=len, default=[]))
    return {name: layers for name, layers in found.items() if layers}


@contextmanager
def replaced(places: Iterable[Place]) -> Iterator[None]:
    """Hold other values in attributes or under keys within the block."""
    kept: list[Place] = []

    def put(holder: Any, key: Any, value: Any) -> None:
        if isinstance(holder, dict):
            holder[key] = value
        else:
            setattr(holder, key, value)

    try:
        for holder, key, value in places:
            kept.append((holder, key, holder[key] if isinstance(holder, dict) else getattr(holder, key)))
            put(holder, key, value)
        yield
    finally:
        for place in reversed(kept):
            put(*place)


@contextmanager
def _giving(modules: Iterable[Any], change: Callable[[Any], Any]) -> Iterator[None]:
    """Change the floats that modules return, within the block."""
    hooks = [module.register_forward_hook(lambda *call: _mapped(call[-1], change)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the floats of a tensor, or of all tensors in a list, tuple, dict or model output."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change) for one in value)
    if hasattr(value, "keys"):
        for name in list(value.keys()):
            value[name] = _mapped(value[name], change)
    return value


def _tensors(module: Any, change: Callable[[Any], Any], *, buffers: bool = False) -> Iterator[Place]:
    """Yield a module's parameters, changed. Modules that share them keep the original."""
    import torch

    for part in module.modules():
        for held in (part._parameters, part._buffers)[: 1 + buffers]:
            for key, value in held.items():
                if value is not None and value.is_floating_point():
                    new = change(value.data)
                    own = isinstance(value, torch.nn.Parameter)
                    yield held, key, torch.nn.Parameter(new, requires_grad=False) if own else new


def changed_weights(module: Any, change: Callable[[Any], Any]) -> ModelChange:
    """Return a change of a model whose parameters in a module are changed."""
    return lambda _: replaced([*_tensors(module, change)])


def _change(make: Callable[..., AbstractContextManager[None]], *args: Any) -> ModelChange:
    """Return a change of a model that is already bound to its modules."""
    return lambda _: make(*args)


def _fitted(
    case: Case, make: Callable[[float], Trial], low: float, high: float, start: float | None = None
) -> Iterator[Trial]:
    """Yield the trial with the number that a search finds, if `start` brings the numbers nearer."""
    if not np.isfinite(case.compared.sampler).all():
        return

    def loss(value: float) -> float:
        found = case.trainer.attempt(case.sample, model=make(value).model)
        return np.inf if found is None else float(np.abs(found - case.compared.sampler).mean())

    enough = 0.7 * float(np.abs(case.compared.difference).mean())
    if start is not None and loss(start) > 1.3 * enough:
        return
    yield make(minimum(loss, low, high, points=12, enough=enough))._replace(fitted=1)


# --- attention and dtypes


def attention(case: Case) -> Iterator[Trial]:
    """Yield other masks of attention."""
    import torch

    model, length, spans = case.trainer.model, len(case.sample), case.sample.media_spans
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) & {"full_attention", "sliding_attention"}

    def trial(statement: str, seen: Any, since: int = 0, near: Any = None) -> Trial:
        def mask(seen: Any) -> Any:
            zeros = torch.zeros(1, 1, length, length, dtype=model.dtype)
            return zeros.masked_fill(~seen, torch.finfo(model.dtype).min).to(model.device)

        def inputs(given: dict[str, Any]) -> None:
            # A mask for each kind of layers, if the model has several.
            windowed = seen if near is None else seen & near
            masks = {"full_attention": seen, "sliding_attention": windowed}
            several = {kind: mask(masks[kind]) for kind in kinds} if len(kinds) > 1 else None
            given["attention_mask"] = several or mask(windowed)

        return Trial(f"the sampler's {statement}", inputs=inputs, since=since, token=since)

    causal = torch.ones(length, length, dtype=torch.bool).tril()
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    own = getattr(config, "sliding_window", None)
    near = None if own is None else distance < own
    blocks = causal.clone()
    for span in spans:
        own_tokens = span.start + torch.from_numpy(np.flatnonzero(span.range.is_embed))
        blocks[own_tokens[:, None], own_tokens] = True
    if spans:
        yield trial("images saw themselves in both directions", blocks, spans[0].start, near)
        yield trial("images saw themselves only backwards (causal)", causal, spans[0].start, near)
    yield trial("tokens attended in both directions", torch.ones_like(causal), 0, near)
    base = blocks if spans and case.trainer.family.image_blocks else causal
    if near is not None:
        yield trial("tokens attended without a window, which was ignored", base)
        yield trial("tokens attended to the window in all layers", base & near)
    beside = [] if own is None else [own + 1, own - 1]  # whether a window counts its own token
    for window in dict.fromkeys([*beside, *(2**power for power in range(3, 16))]):
        if window < length:
            yield trial(f"tokens attended to the last {window} only", base & (distance < window))


@contextmanager
def in_dtype(module: Any, dtype: Any) -> Iterator[None]:
    """Compute a module in another dtype within the block, its buffers apart. Inputs and outputs are cast."""
    import torch

    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return _mapped((args, dict(kwargs)), lambda one: one.to(dtype))

    hook = module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with (
            _giving([module], lambda one: one.to(own)),
            replaced([*_tensors(module, lambda data: data.to(dtype))]),
        ):
            yield
    finally:
        hook.remove()


def whole_in(dtype: Any) -> ModelChange:
    """Return a change of the model that computes all of it in another dtype."""
    return lambda model: in_dtype(model, dtype)


@contextmanager
def other_attention(model: Any) -> Iterator[None]:
    """Compute attention by another kernel within the block, if the model has one."""
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager" if own != "eager" else "sdpa")
    except (ValueError, ImportError, AttributeError):
        own = None
    try:
        yield
    finally:
        if own is not None:
            model.set_attn_implementation(own)


def _since(case: Case, part: str) -> int:
    """Return the first token whose number may depend on a part: for vision, the first image's."""
    starts = [span.start for span in case.sample.media_spans]
    return min(starts, default=len(case.sample)) if part.startswith((VISION, "image")) else 0


def _other_dtypes(model: Any) -> dict[str, Any]:
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return {name: dtype for name, dtype in dtypes.items() if dtype != model.dtype}


def whole_dtype(case: Case) -> Iterator[Trial]:
    """Yield the whole model in another dtype."""
    for name, dtype in _other_dtypes(case.trainer.model).items():
        yield Trial(f"the sampler computed in {name}", model=whole_in(dtype))


def part_dtype(case: Case) -> Iterator[Trial]:
    """Yield parts of the model, features, or keys and values in another dtype."""
    import torch

    model, others = case.trainer.model, _other_dtypes(case.trainer.model)
    for name, dtype in others.items():
        for part, module in parts_of(model).items():
            change = _change(in_dtype, module, dtype)
            yield Trial(f"the sampler computed its {part} in {name}", model=change, since=_since(case, part))
    towers = [module for name, module in parts_of(model).items() if name.startswith(VISION)]
    # Of several in a row, the last one produces the features.
    features = {"image features": towers[-1:], "embeddings": [model.get_input_embeddings()]}
    for name, dtype in {
        **others,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }.items():
        for part, modules in features.items():
            change = _change(_giving, modules, partial(_through, dtype))
            text = f"the sampler's {part} were rounded to {name}"
            yield Trial(text, model=change, since=_since(case, part))
        yield Trial(
            f"the sampler kept keys and values (KV cache) in {name}", model=_change(_cached_in, model, dtype)
        )
        language = parts_of(model).get(LANGUAGE, model)
        projections = [one for key, one in language.named_modules() if key.endswith(("k_proj", "v_proj"))]
        change = _change(_giving, projections, partial(_through, dtype))
        yield Trial(
            f"the sampler kept keys and values (KV cache) in {name}, before they were rotated", model=change
        )


def _through(dtype: Any, data: Any) -> Any:
    return data.to(dtype).to(data.dtype)


def _cached_in(model: Any, dtype: Any) -> AbstractContextManager[None]:
    """Round keys and values of the language model as a cache of another dtype does, within the block."""
    return _attending(model, lambda *pair: tuple(_through(dtype, one) for one in pair))


@contextmanager
def _attending(model: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> Iterator[None]:
    """Change the keys and values `(1, heads, n, size)` of the language model's layers, within the block."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as KERNELS

    language = parts_of(model).get(LANGUAGE, model)
    name = model.config.get_text_config()._attn_implementation
    own, modules = KERNELS.get(name), {id(module) for module in language.modules()}

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        kernel = own or sys.modules[type(module).__module__].eager_attention_forward
        if id(module) in modules:
            key, value = change(key, value)
        return kernel(module, query, key, value, *args, **options)

    KERNELS[name] = attend
    try:
        yield
    finally:
        if own is None:
            del KERNELS[name]
        else:  # two of these blocks may be nested
            KERNELS[name] = own


def left_out(case: Case) -> Iterator[Trial]:
    """Yield the model without a layer, the layers from one on, a module beside them, or biases."""
    model = case.trainer.model

    def zero(data: Any) -> Any:
        return data * 0

    for part, layers in stacks(model).items():
        # Without what attention and perceptron add, a layer hands on what it was given.
        added = [
            [one for one in layer.children() if any(p.ndim > 1 for p in one.parameters())] for layer in layers
        ]
        since = _since(case, part)
        for number in range(len(layers)):
            text = f"the sampler left out layer {number} of the {part}"
            yield Trial(text, model=_change(_giving, added[number], zero), since=since)
            if 0 < number < len(layers) - 1:
                rest = [one for some in added[number:] for one in some]
                text = f"the sampler left out the layers of the {part} from {number} on"
                yield Trial(text, model=_change(_giving, rest, zero), since=since)
    layers = [layer for some in stacks(model).values() for layer in some]
    inside = {id(module) for layer in layers for module in layer.modules()}
    whole = {id(module) for module in model.modules() if any(id(one) in inside for one in module.modules())}
    for part, root in parts_of(model).items():
        for name, module in root.named_modules():
            if (
                not name
                or id(module) in whole
                or name.count(".") > 1
                or not any(True for _ in module.parameters())
            ):
                continue
            text = f"the sampler left out {name.replace('_', ' ').split('.')[0]} ({name}) of the {part}"
            yield Trial(text, model=_change(_giving, [module], zero), since=_since(case, part))
        biases = [
            (one._parameters, key, _zeros(value))
            for one in root.modules()
            for key, value in one._parameters.items()
            if value is not None and key == "bias"
        ]
        if biases:
            text = f"the sampler left out the biases of the {part}"
            yield Trial(text, model=_change(replaced, biases), since=_since(case, part))


def settings(case: Case) -> Iterator[Trial]:
    """Yield the model with other settings of its configuration."""
    from transformers.activations import ACT2FN

    model = case.trainer.model
    for part, root in parts_of(model).items():
        since = _since(case, part)
        for kind in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"):
            places = [
                (one, name, ACT2FN[kind])
                for one in root.modules()
                for name in ("act_fn", "activation_fn")
                if hasattr(one, name)
            ]
            text = f"the sampler's activation function (hidden_act) was {kind} in its {part}"
            yield from [Trial(text, model=_change(replaced, places), since=since)] if places else ()
        norms: dict[str, list[Any]] = {}
        for name, one in root.named_modules():
            own = [*one.parameters()]
            if own and all(value.ndim == 1 for value in own) and not [*one.children()]:
                norms.setdefault(name.rpartition(".")[2], []).append(one)
        for name, several in norms.items():
            text = f"the sampler did not normalise in {name} of its {part}"
            yield Trial(text, model=_change(_passing, several), since=since)
    for one in model.modules():
        if isinstance(indexes := getattr(one, "fullatt_block_indexes", None), list):
            for kind, blocks in {"no windows": range(999), "windows in all layers": range(0)}.items():
                places = [(one, "fullatt_block_indexes", blocks)]
                change, since = _change(replaced, places), _since(case, VISION)
                text = f"the sampler's vision had {kind} of attention, not windows but in layers {indexes}"
                yield Trial(text, model=change, since=since)
        if getattr(one, "scalar_embed_scale", 1.0) != 1.0:
            places = [(one, "embed_scale", one.embed_scale * 0 + 1)]
            yield Trial("the sampler's embeddings were not scaled", model=_change(replaced, places))


@contextmanager
def _passing(modules: Iterable[Any]) -> Iterator[None]:
    """Let modules return their input, within the block."""
    hooks = [module.register_forward_hook(lambda _, args, output: args[0]) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(value: Any) -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros_like(value), requires_grad=False)


# --- weights


def quantised(case: Case) -> Iterator[Trial]:
    """Yield weights that were rounded to fewer bits, in the model or a part."""
    import torch

    model = case.trainer.model
    changes = {name: partial(_through, dtype) for name, dtype in _other_dtypes(model).items()}
    low = torch.float8_e4m3fn
    changes |= {f"float8{text}": partial(_through, low) for text in ("", " but for vectors")}
    changes |= {f"float8 with a scale{' a row' * by}": partial(_in_float8, by_row=by) for by in (False, True)}
    changes |= {f"int{bits} by rows": partial(_in_integers, bits=bits, group=None) for bits in (8, 4)}
    changes |= {f"int4 by {group}": partial(_in_integers, bits=4, group=group) for group in (32, 64, 128)}
    # Engines leave the head out, and often vision.
    parts = parts_of(model)
    body = torch.nn.ModuleList(part for name, part in parts.items() if name != "head")
    for part, module in {
        "model": model,
        "model but its head": body,
        LANGUAGE: parts.get(LANGUAGE, model),
    }.items():
        linear = torch.nn.ModuleList(one for one in module.modules() if isinstance(one, torch.nn.Linear))
        for name, change in changes.items():
            chosen = linear if name.startswith(("int", "float8 ")) else module

            def make(chosen: Any = chosen, change: Any = change) -> AbstractContextManager[None]:
                return replaced([*_tensors(chosen, change)])

            text = f"the weights of the sampler's {part} were rounded to {name}: quantised"
            yield Trial(text, model=_change(make), since=_since(case, part))


def _in_integers(data: Any, bits: int, group: int | None) -> Any:
    """Return a matrix rounded to integers of `bits` bits, scaled by row, or by groups of a row."""
    if data.ndim != 2 or (group and data.shape[1] % group):
        return data
    rows = data.reshape(-1, group) if group else data
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return ((rows / scale).round() * scale).reshape(data.shape)


def _in_float8(data: Any, by_row: bool) -> Any:
    """Return a matrix rounded to float8, scaled by its largest value, or by each row's."""
    import torch

    if data.ndim != 2:
        return data
    largest = data.abs().amax(1, keepdim=True) if by_row else data.abs().max()
    scale = largest.clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (data / scale).to(torch.float8_e4m3fn).to(data.dtype) * scale


def other_weights(case: Case) -> Iterator[Trial]:
    """Yield given weights that differ from the trainer's, whole and by parts, a tied head, and no adapter."""
    import torch

    model = case.trainer.model
    named = dict(model.named_parameters(remove_duplicate=False))

    def trial(statement: str, changed: Mapping[str, Any]) -> Trial:
        owners = [(named[key], value) for key, value in changed.items()]
        places = [(own, "data", value.to(own.device, own.dtype)) for own, value in owners]
        return Trial(statement, model=_change(replaced, places))

    for name, given in case.weights.items():
        known = {
            key: value for key, value in given.items() if key in named and value.shape == named[key].shape
        }
        changed = {k: v for k, v in known.items() if not torch.equal(v.to(named[k]), named[k])}
        text = f"the sampler had the weights of {name}"
        yield from [trial(text, changed)] if changed else ()
        for part, keys in list(_groups(changed).items())[: _MAX_GROUPS // len(case.weights)]:
            yield trial(f"{text} in {part}", {key: changed[key] for key in keys})
            rest = {key: value for key, value in changed.items() if key not in keys}
            yield trial(f"{text} everywhere but in {part}", rest)
        steps = {key: value.to(named[key]) - named[key] for key, value in changed.items()}
        scopes_of = {"all parts": {*changed}, **dict(list(_groups(changed).items())[:_MAX_FITTED])}
        for part, keys in scopes_of.items() if changed else ():
            text = f"times as much as those of {name} do in {part}: they are of another step"
            some = {key: steps[key] for key in keys}

            def moved(factor: float, text: str = text, some: Mapping[str, Any] = some) -> Trial:
                towards = {key: named[key] + factor * step for key, step in some.items()}
                return trial(f"the sampler's weights differed {factor:.3g} {text}", towards)

            yield from _fitted(case, moved, 0.1, 10, start=1.0)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name, given in case.weights.items() if head is not None and head.weight is embedding.weight else ():
        # A head that is tied to the embedding may be loaded apart from it.
        tied_to = [key for key, own in named.items() if own is head.weight and key in given]
        for part, text in ((head, "head"), (embedding, "embedding")) if tied_to else ():
            other = torch.nn.Parameter(given[tied_to[0]].to(head.weight), requires_grad=False)
            places = [(part._parameters, "weight", other)]
            statement = f"the sampler had the weights of {name} in its {text} alone, which was not tied"
            yield Trial(statement, model=_change(replaced, places))
    if (
        head is not None
        and head.weight is not embedding.weight
        and head.weight.shape == embedding.weight.shape
    ):
        tied = [(head.weight, "data", embedding.weight.data)]
        yield Trial(
            "the sampler's head was tied to its embedding (tie_word_embeddings)",
            model=_change(replaced, tied),
        )
    if (disable := getattr(model, "disable_adapter", None)) is not None:
        yield Trial(
            "the sampler's adapter (LoRA) was not merged: it had the base weights", model=_change(disable)
        )
        merged = {key: one.detach().clone() for key, one in named.items()}
        with disable():
            base = {key: one.detach().clone() for key, one in named.items()}
        deltas = {key: one - base[key] for key, one in merged.items() if not torch.equal(one, base[key])}
        for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 16.0) if deltas else ():
            text = f"the sampler's adapter (LoRA) had {factor:g} times its scale"
            yield trial(text, {key: base[key] + factor * delta for key, delta in deltas.items()})


def stale_prefix(case: Case) -> Iterator[Trial]:
    """Yield prompts whose keys and values were cached under other weights."""
    named = dict(case.trainer.model.named_parameters(remove_duplicate=False))
    for name, given in case.weights.items():
        known = {
            key: value for key, value in given.items() if key in named and value.shape == named[key].shape
        }
        places = [(named[key], "data", value.to(named[key])) for key, value in known.items()]
        values = partial(_behind_prefix, case, places)
        text = f"the sampler's prefix cache held keys and values of the weights of {name}"
        yield Trial(text, values=values)


def _behind_prefix(case: Case, places: list[Place]) -> Float32Array | None:
    """Return log-probabilities of completions behind a prompt that was cached under other weights."""
    trainer, sample, out = case.trainer, case.sample, list[Float32Array]()
    for start, stop in case.runs:
        own = np.zeros(len(sample), np.bool_)
        own[start:stop] = True
        one = trainer.attempt(
            replace(sample, loss_mask=own), model=_change(_after, trainer.model, places, start - 1)
        )
        if one is None:
            return None
        out.append(one)
    return np.concatenate(out)


@contextmanager
def _after(model: Any, places: list[Place], stop: int) -> Iterator[None]:
    """Take keys and values before token `stop` from a forward under other weights, within the block."""
    cached: list[tuple[Any, Any]] = []
    left: Iterator[tuple[Any, Any]] | None = None

    def keep(key: Any, value: Any) -> tuple[Any, Any]:
        cached.append((key, value))
        return key, value

    def put(key: Any, value: Any) -> tuple[Any, Any]:
        for own, old in zip((key, value), (key, value) if left is None else next(left), strict=True):
            own[..., :stop, :] = old[..., :stop, :]
        return key, value

    def before(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal left
        hook.remove()
        with replaced(places), _attending(model, keep):
            model(*args, **kwargs)
        left = iter(cached)

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        with _attending(model, put):
            yield
    finally:
        hook.remove()


def _groups(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return parameters by module, and by the last layers."""
    groups: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts)):
            groups.setdefault(".".join(parts[:count]), set()).add(key)
        place = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), None)
        for last in range(1, int(parts[place]) + 1) if place is not None else ():
            groups.setdefault(f"{'.'.join(parts[:place])} from {last} on", set()).add(key)
    return dict(sorted(groups.items(), key=lambda entry: -len(entry[1])))


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    "positions": positions,
    "grid": grid,
    "rotary base": rotary,
    "attention": attention,
    "dtype": whole_dtype,
    "dtype of a part": part_dtype,
    "quantised weights": quantised,
    "left out": left_out,
    "settings": settings,
    "weights": other_weights,
    "stale prefix": stale_prefix,
}
"""Changes to try, by row."""
