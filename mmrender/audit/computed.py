"""Variations of the sampler's computation: positions, attention, dtypes and weights."""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mmrender.audit.trainer import ModelChange
from mmrender.audit.trial import Case, Trial, Variation, Weights, least, scopes
from mmrender.sidecar import MediaSpan

Place: TypeAlias = tuple[Any, Any, Any]
"""The owner of a value, its attribute or key, and another value for it."""
Renumbered: TypeAlias = tuple[str, Sequence[tuple[int, int]], Callable[[Any, int], Any], int | None]
"""Statement, parts, change of positions given their start, and index of an image."""
_MOST_LAYERS: Final = 64
_VISION: Final = "vision"
_LANGUAGE: Final = "language model"


def _positions(case: Case) -> Iterator[Trial]:
    """Yield other numbers of tokens: `position_ids` of shape `(axes, 1, n)`, or `(1, n)`."""
    spans, runs, length = case.sample.media_spans, case.runs, len(case.sample)
    first = spans[0].start if spans else 0
    yield Trial(
        "the sampler numbered its tokens as the model does by itself",
        inputs=lambda given: given.pop("position_ids", None),
        since=first,
        token=first,
    )
    rows = [*_renumbered(case)]
    turns = [(runs[number - 1][1], runs[number][1]) for number in range(1, len(runs))]
    if turns:
        rows.append(("restarted its positions after each completion", turns, _from_zero, None))
    rows += [(f"had positions {by} apart", [(0, length)], partial(_multiplied, by), None) for by in (2, 3, 4)]
    for statement, parts, change, image in rows:
        since = parts[0][0]
        inputs = partial(_with_positions, parts, change)
        yield Trial(f"the sampler {statement}", inputs=inputs, token=since, since=since, image=image)


def _renumbered(case: Case) -> Iterator[Renumbered]:
    spans, length = case.sample.media_spans, len(case.sample)
    images = [(span.start, span.stop) for span in spans]
    if spans and case.trainer.family.mrope is not None:
        whole, since = [(0, length)], [(images[0][0], length)]
        yield "numbered its tokens one by one, on one axis", whole, _by_index, None
        for names, axes in {"height and width": [0, 2, 1], "time and height": [1, 0, 2]}.items():
            text = f"had {names} exchanged in its positions"
            yield text, since, partial(_with_axes, axes), None
        yield "had one number for height and width of images", images, _flattened, None
        yield "numbered rows and columns of images from zero", images, _from_zero_within, None
        yield "numbered images from zero", images, _from_zero, None
        for text, step in _STEPS.items():
            yield f"counted an image {text}", since, partial(_followed, spans, step), None
        text = "numbered tokens by their index from the first completion on (no rope delta)"
        yield text, [(case.runs[0][0], length)], _by_index, None
        for parts, which in scopes(case):
            yield f"numbered the tokens of {which} by their index (no rope delta)", parts, _by_index, None
        for span in case.suspects:
            text = f"numbered the tokens of {span.modality} {span.position} one by one"
            yield text, [(span.start, span.stop)], _one_by_one, span.position
    for parts, which in scopes(case):
        yield f"restarted its positions in {which}", parts, _from_zero, None
    for by in (1, -1, 2, -2):
        moved = partial(_moved, by)
        for parts, which in scopes(case):
            yield f"had positions {by:+d} from {which} on", [(parts[0][0], length)], moved, None
        for span in case.suspects:
            text = f"had positions {by:+d} after {span.modality} {span.position}"
            yield text, [(span.stop, length)], moved, span.position
        if spans:
            yield f"had positions {by:+d} within images", images, moved, None


def _with_positions(
    parts: Iterable[tuple[int, int]], change: Callable[[Any, int], Any], given: dict[str, Any]
) -> None:
    given["position_ids"] = ids = given["position_ids"].clone()
    for start, stop in parts:
        change(ids[..., start:stop], start)


def _by_index(own: Any, start: int) -> None:
    import torch

    own.copy_(torch.arange(start, start + own.shape[-1]))


def _one_by_one(own: Any, _: int) -> None:
    first = own[..., :1].clone()
    _by_index(own, 0)
    own += first


def _with_axes(order: list[int], own: Any, _: int) -> None:
    own.copy_(own[order])


def _flattened(own: Any, _: int) -> None:
    own[1:] = own[:1, :, :1].clone()


def _from_zero(own: Any, _: int) -> None:
    own -= own[..., :1].clone()


def _from_zero_within(own: Any, start: int) -> None:
    _from_zero(own[1:], start)


def _moved(by: int, own: Any, _: int) -> None:
    own += by


def _multiplied(by: int, own: Any, _: int) -> None:
    own *= by


def _followed(spans: Sequence[MediaSpan], step: Callable[[Any], Any], ids: Any, offset: int) -> None:
    """Let the tokens after an image continue at a distance from its first token."""
    for span in spans:
        start, stop = span.start - offset, span.stop - offset
        if stop < ids.shape[-1]:
            ids[..., stop:] += ids[0, 0, start] + step(ids[..., start:stop]) - ids[0, 0, stop]


def _extent(axis: int, own: Any) -> Any:
    return own[axis, 0].max() - own[0, 0, 0] + 1


_STEPS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "as one position": lambda own: 1,
    "as one position a token": lambda own: own.shape[-1],
    "by its height": partial(_extent, 1),
    "by its width": partial(_extent, 2),
}


def _attention(case: Case) -> Iterator[Trial]:
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
    blocks, alone = causal.clone(), causal.clone()
    for span in spans:
        blocks[span.start : span.stop, span.start : span.stop] = True
        alone[span.start : span.stop, : span.start] = False
    if spans:
        first = spans[0].start
        yield trial("images saw themselves in both directions", blocks, first, near)
        yield trial("images saw themselves only backwards", causal, first, near)
        yield trial("images saw nothing before them", alone, first, near)
    yield trial("tokens attended in both directions", torch.ones_like(causal), 0, near)
    yield trial("tokens attended to the one after them, too", distance >= -1, 0, near)
    if near is not None:
        for seen, text in ((causal, ""), (blocks, ", and images saw themselves in both directions")):
            yield trial(f"tokens attended without a window{text}", seen)
            yield trial(f"tokens attended to the window in all layers{text}", seen & near)
    for window in dict.fromkeys(2**power for power in range(3, 16)):
        if window < length:
            yield trial(f"tokens attended to the last {window} only", causal & (distance < window))
    for number in case.departing_runs:
        start, stop = case.runs[number]
        for before in {span.stop for span in case.suspects if span.stop < start}:
            cut = causal.clone()
            cut[start:stop, :before] = False
            yield trial(f"completion {number} attended to nothing before token {before}", cut, start, near)


def parts_of(model: Any) -> dict[str, Any]:
    """Return the parts of a model that are computed or loaded apart: vision, language model and head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base = getattr(model, model.base_model_prefix, model)
    found: dict[str, Any] = {}
    for name, child in base.named_children():
        language = any(module is embedding for module in child.modules())
        found[_LANGUAGE if language else f"{_VISION} ({name})"] = child
    towers = [child for name, child in found.items() if name.startswith(_VISION)]
    if len(towers) > 1:
        import torch

        found[_VISION] = torch.nn.ModuleList(towers)
    if head is not None:
        found["head"] = head
    return found


@contextmanager
def replaced(places: Iterable[Place]) -> Iterator[None]:
    """Hold other values in attributes or under keys within the block."""
    kept: list[Place] = []
    try:
        for holder, key, value in places:
            keyed = isinstance(holder, dict)
            kept.append((holder, key, holder[key] if keyed else getattr(holder, key)))
            if keyed:
                holder[key] = value
            else:
                setattr(holder, key, value)
        yield
    finally:
        for holder, key, value in reversed(kept):
            if isinstance(holder, dict):
                holder[key] = value
            else:
                setattr(holder, key, value)


@contextmanager
def _giving(modules: Iterable[Any], change: Callable[..., Any]) -> Iterator[None]:
    """Let modules return `change(module, args, kwargs, output)` within the block."""
    hooks = [module.register_forward_hook(change, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _output(change: Callable[[Any], Any], *call: Any) -> Any:
    return _mapped(call[-1], change)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the floats of a tensor, or of all tensors in a list, tuple or model output."""
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


def _holding(module: Any, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Let a module have changed parameters within a block."""
    return replaced([*_tensors(module, change)])


def _change(make: Callable[..., AbstractContextManager[None]], *args: Any) -> ModelChange:
    """Return a change of a model that is already bound to its modules."""
    return lambda _: make(*args)


@contextmanager
def in_dtype(module: Any, dtype: Any, buffers: bool = False) -> Iterator[None]:
    """Compute a module in another dtype within the block. Inputs and outputs are cast."""
    import torch

    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return _mapped(args, lambda one: one.to(dtype)), {
            name: _mapped(value, lambda one: one.to(dtype)) for name, value in kwargs.items()
        }

    hook = module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with (
            _giving([module], partial(_output, lambda one: one.to(own))),
            replaced([*_tensors(module, lambda data: data.to(dtype), buffers=buffers)]),
        ):
            yield
    finally:
        hook.remove()


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


def whole_in(dtype: Any) -> ModelChange:
    """Return a change of the model that computes all of it in another dtype."""
    return lambda model: in_dtype(model, dtype)


def _other_dtypes(model: Any) -> dict[str, Any]:
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return {name: dtype for name, dtype in dtypes.items() if dtype != model.dtype}


def _whole_dtype(case: Case) -> Iterator[Trial]:
    for name, dtype in _other_dtypes(case.trainer.model).items():
        yield Trial(f"the sampler computed in {name}", model=whole_in(dtype))


def _since(case: Case, part: str) -> int:
    """Return the first token whose number may depend on a part: for vision, the first image's."""
    if not part.startswith((_VISION, "image")):
        return 0
    return min((span.start for span in case.sample.media_spans), default=len(case.sample))


def _part_dtype(case: Case) -> Iterator[Trial]:
    import torch

    model = case.trainer.model
    others = _other_dtypes(model) | ({"float32": torch.float32} if model.dtype != torch.float32 else {})
    for name, dtype in others.items():
        for part, module in parts_of(model).items():
            since = _since(case, part)
            for buffers in (False, True) if any(True for _ in module.buffers()) else (False,):
                text = f"the sampler computed its {part} in {name}" + (", buffers too" if buffers else "")
                yield Trial(text, model=_change(in_dtype, module, dtype, buffers), since=since)
    for name, dtype in {**_other_dtypes(model), "float8_e4m3fn": torch.float8_e4m3fn}.items():
        for part, modules in _features(model).items():
            since = _since(case, part)
            yield Trial(
                f"the sampler's {part} were rounded to {name}",
                model=_change(_giving, modules, partial(_output, partial(_through, dtype))),
                since=since,
            )
        yield Trial(f"the sampler kept keys and values in {name}", model=_change(_cached_in, model, dtype))


@contextmanager
def _cached_in(model: Any, dtype: Any) -> Iterator[None]:
    """Round keys and values of the language model as a cache of another dtype does, within the block."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as KERNELS

    language = parts_of(model).get(_LANGUAGE, model)
    name = model.config.get_text_config()._attn_implementation
    own, modules = KERNELS.get(name), {id(module) for module in language.modules()}

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        kernel = own or sys.modules[type(module).__module__].eager_attention_forward
        if id(module) in modules:
            key, value = _through(dtype, key), _through(dtype, value)
        return kernel(module, query, key, value, *args, **options)

    KERNELS[name] = attend
    try:
        yield
    finally:
        del KERNELS[name]


def _features(model: Any) -> dict[str, list[Any]]:
    """Return the modules that produce the inputs of the language model's layers."""
    towers = [module for name, module in parts_of(model).items() if name.startswith(f"{_VISION} (")]
    # Of several in a row, the last one produces the features.
    return {"image features": towers[-1:], "embeddings": [model.get_input_embeddings()]}


def _through(dtype: Any, data: Any) -> Any:
    return data.to(dtype).to(data.dtype)


def _quantised(data: Any, bits: int, group: int | None) -> Any:
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


def _rounded(case: Case) -> Iterator[Trial]:
    import torch

    model = case.trainer.model
    dtypes = {**_other_dtypes(model), "float8_e4m3fn": torch.float8_e4m3fn}
    plain = {name: partial(_through, dtype) for name, dtype in dtypes.items()}
    linear_only = {
        "float8 with a scale": partial(_in_float8, by_row=False),
        "float8 with a scale a row": partial(_in_float8, by_row=True),
        **{f"int{bits} by rows": partial(_quantised, bits=bits, group=None) for bits in (8, 4)},
        **{f"int4 by {group}": partial(_quantised, bits=4, group=group) for group in (32, 64, 128)},
    }
    for part, module in {"model": model, **parts_of(model)}.items():
        for name, change in (plain | linear_only).items():
            held = [one for one in module.modules() if isinstance(one, torch.nn.Linear)]
            chosen = torch.nn.ModuleList(held) if name in linear_only else module
            text = f"the weights of the sampler's {part} were rounded to {name}"
            yield Trial(text, model=_change(_holding, chosen, change))


def _weights(case: Case) -> Iterator[Trial]:
    """Yield other weights, whole and by parts, if they differ from the trainer's."""
    import torch

    named = dict(case.trainer.model.named_parameters(remove_duplicate=False))
    for name, given in case.weights.items():
        changed = {
            key: value
            for key, value in given.items()
            if key in named
            and value.shape == named[key].shape
            and not torch.equal(value.to(named[key]), named[key])
        }
        if not changed:
            continue
        yield _other_weights(f"the sampler had the weights of {name}", named, changed)
        for part, keys in _groups(changed).items():
            text = f"the sampler had the weights of {name}"
            yield _other_weights(f"{text} in {part}", named, {key: changed[key] for key in keys})
            rest = {key: value for key, value in changed.items() if key not in keys}
            yield _other_weights(f"{text} everywhere but in {part}", named, rest)


def _other_weights(statement: str, named: Mapping[str, Any], changed: Weights) -> Trial:
    places = [
        (named[key], "data", value.to(named[key].device, named[key].dtype)) for key, value in changed.items()
    ]
    return Trial(statement, model=_change(replaced, places))


def _groups(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return parameters by module, from the largest, and by the name that modules have in every layer."""
    held = list(keys)
    groups: dict[str, set[str]] = {}
    for key in held:
        parts = key.split(".")
        for count in range(1, len(parts)):
            groups.setdefault(".".join(parts[:count]), set()).add(key)
        numbers = [place for place, part in enumerate(parts) if part.isdigit()]
        if numbers:
            layers, number = ".".join(parts[: numbers[0]]), int(parts[numbers[0]])
            groups.setdefault(f"{layers}.*.{parts[numbers[0] + 1]}", set()).add(key)
            for last in range(1, number + 1):
                groups.setdefault(f"{layers} from {last} on", set()).add(key)
        groups.setdefault(f"all {parts[-1]}es" if parts[-1] == "bias" else "all norms", set()).update(
            [key] if parts[-1] == "bias" or "norm" in key else []
        )
    distinct = {frozenset(group): name for name, group in reversed(groups.items()) if len(group) < len(held)}
    ordered = sorted(distinct.items(), key=lambda entry: -len(entry[0]))[: 2 * _MOST_LAYERS]
    return {name: set(group) for group, name in ordered if group}


def _head(case: Case) -> Iterator[Trial]:
    model = case.trainer.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    to_embedding, to_head = (
        (head.weight, "data", embedding.weight.data),
        (embedding.weight, "data", head.weight.data),
    )
    yield Trial("the sampler's head was tied to its embedding", model=_change(replaced, [to_embedding]))
    yield Trial("the sampler's embedding was tied to its head", model=_change(replaced, [to_head]))


def _stacks(model: Any) -> dict[str, list[Any]]:
    """Return the layers of the language model and of the vision towers, in order, if they are found."""
    import torch

    found = {}
    for name, part in parts_of(model).items():
        lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
        if name == _LANGUAGE or name.startswith(f"{_VISION} ("):
            found[name] = list(max(lists, key=len, default=[]))
    return found


def _skipped(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
    given = args[0] if args else next(iter(kwargs.values()), None)
    return (given, *output[1:]) if isinstance(output, tuple) else given


def _again(layer: Any, args: Any, kwargs: Any, output: Any) -> Any:
    given = output[0] if isinstance(output, tuple) else output
    if args:
        return layer.forward(given, *args[1:], **kwargs)
    return layer.forward(**{**kwargs, next(iter(kwargs)): given})


def _layers(case: Case) -> Iterator[Trial]:
    for part, layers in _stacks(case.trainer.model).items():
        since = _since(case, part)
        for number, layer in enumerate(layers[:_MOST_LAYERS]):
            text = f"the sampler left out layer {number} of its {part}"
            yield Trial(text, model=_change(_giving, [layer], _skipped), since=since)
            text = f"the sampler ran layer {number} of its {part} twice"
            yield Trial(text, model=_change(_giving, [layer], _again), since=since)
            if number + 1 < len(layers):
                text = f"the sampler's layers {number} and {number + 1} of its {part} were exchanged"
                places = _exchanged(layer, layers[number + 1])
                yield Trial(text, model=_change(replaced, places), since=since)
    norm = getattr(parts_of(case.trainer.model).get(_LANGUAGE), "norm", None)
    if norm is not None:
        text = "the sampler left out the last normalisation"
        yield Trial(text, model=_change(_giving, [norm], _skipped))


def _exchanged(one: Any, two: Any) -> list[Place]:
    """Return places of the parameters of two modules, with their values exchanged if they fit."""
    others = dict(two.named_parameters())
    pairs = [(a, others[name]) for name, a in one.named_parameters() if name in others]
    fitting = [(a, b) for a, b in pairs if a.shape == b.shape]
    return [place for a, b in fitting for place in ((a, "data", b.data), (b, "data", a.data))]


def _fitted(case: Case, make: Callable[[float], Trial], low: float, high: float) -> Iterator[Trial]:
    """Yield the trial with the number that a search finds, if it brings the sampler's numbers nearer."""
    if not np.isfinite(case.compared.sampler).all():
        return

    def loss(value: float) -> float:
        found = case.trainer.sampled_logprobs(case.sample, model=make(value).model)
        return float(np.abs(found - case.compared.sampler).mean())

    enough = 0.7 * float(np.abs(case.compared.difference).mean())
    value = least(loss, low, high, points=12, enough=enough)
    yield make(value)._replace(fitted=1)


class _Number(NamedTuple):
    """A number of modules, or a setting, and other values that it may have had.

    Attributes:
        text: Statement about the sampler's part, given the part's name, the value, and the trainer's own.
        names: Its attributes.
        kind: Its type.
        change: The attribute's value, given its own and another.
        values: Values to try.
        bounds: Bounds of a search for a value; None without a search.
    """

    text: str
    names: tuple[str, ...]
    kind: type
    change: Callable[[Any, Any], Any]
    values: tuple[Any, ...] = ()
    bounds: tuple[float, float] | None = None


def _other_numbers(case: Case, number: _Number, parts: Mapping[str, Any]) -> Iterator[Trial]:
    for part, module in parts.items():
        held = _attributes(module, number.names, number.kind)

        def with_value(value: Any, part: str = part, held: Any = held) -> Trial:
            places = [(one, name, number.change(own, value)) for one, name, own in held]
            text = number.text.format(part=part, value=value, own=held[0][2])
            return Trial(f"the sampler's {text}", model=_change(replaced, places))

        yield from (with_value(value) for value in number.values if held)
        if held and number.bounds is not None:
            yield from _fitted(case, with_value, *number.bounds)


def _attributes(model: Any, names: Sequence[str], kind: type) -> list[tuple[Any, str, Any]]:
    """Return modules, with names and values of those attributes that are of a kind."""
    found = [(module, name, getattr(module, name, None)) for module in model.modules() for name in names]
    return [entry for entry in found if isinstance(entry[2], kind) and not isinstance(entry[2], bool)]


def _language_of(case: Case) -> dict[str, Any]:
    return {name: part for name, part in parts_of(case.trainer.model).items() if name == _LANGUAGE}


def _adapter(case: Case) -> Iterator[Trial]:
    model = case.trainer.model
    disable = getattr(model, "disable_adapter", None)
    if disable is not None:
        text = "the sampler's adapter was not merged: it had the base weights"
        yield Trial(text, model=_change(disable))
    text = "{part} had {value:.3g} of the trainer's scale"
    scale = _Number(text, ("scaling",), dict, _each_scaled, (0.0,), (0.05, 20.0))
    yield from _other_numbers(case, scale, {"adapter": model})


def _each_scaled(own: dict[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in own.items()}


def _rope(case: Case) -> Iterator[Trial]:
    import torch

    config = case.trainer.model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    theta = given.get("rope_theta", getattr(config, "rope_theta", None))

    def based(own: Any, base: float) -> Any:
        return own ** (math.log(base) / math.log(theta or base))

    names, bases = ("inv_freq",), (1e4, 5e5, 1e6, 5e6, 1e7)
    text = f"rotary base was {{value:.6g}}, not {theta}"
    numbers = [_Number(text, names, torch.Tensor, based, bases, (1e3, 1e8))] if theta else []
    text = "rotary frequencies were {value:.4g} of the trainer's"
    factors = (0.5, 0.25, 0.125, 2.0, 4.0, 8.0)
    numbers.append(_Number(text, names, torch.Tensor, operator.mul, factors, (0.02, 50.0)))
    text = "rotary frequencies were shared out to axes as {own} moved by {value}"
    numbers.append(_Number(text, ("mrope_section",), list, lambda own, by: own[by:] + own[:by], (1, 2)))
    for number in numbers:
        yield from _other_numbers(case, number, _language_of(case))


def _scaled_parts(case: Case) -> Iterator[Trial]:
    """Yield image features, embeddings or attention scaled by a number, which is searched."""
    for part, modules in _features(case.trainer.model).items():

        def features(factor: float, part: str = part, modules: Any = modules) -> Trial:
            return Trial(
                f"the sampler's {part} were multiplied by {factor:.4g}",
                model=_change(_giving, modules, partial(_output, lambda own: own * factor)),
                since=_since(case, part),
            )

        yield from _fitted(case, features, 0.01, 100.0) if modules else ()
    text = "attention was scaled by {value:.4g} of the trainer's factor"
    scale = _Number(text, ("scaling",), float, operator.mul, (), (0.01, 100.0))
    yield from _other_numbers(case, scale, _language_of(case))


def _norms(case: Case) -> Iterator[Trial]:
    text = "norms of its {part} had an epsilon of {value:.3g}, not {own:g}"
    names, values = ("variance_epsilon", "eps"), (1e-3, 1e-5, 1e-6, 1e-8)
    number = _Number(text, names, float, lambda _, value: value, values, (1e-7, 1.0))
    yield from _other_numbers(case, number, parts_of(case.trainer.model))


def _activations(case: Case) -> Iterator[Trial]:
    from torch import nn

    others = {"GELU": nn.GELU(), "GELU by tanh": nn.GELU("tanh"), "SiLU": nn.SiLU(), "ReLU": nn.ReLU()}
    names = ("act_fn", "activation_fn", "act", "hidden_act")
    number = _Number(
        "{part} had {value} for activation", names, nn.Module, lambda _, name: others[name], (*others,)
    )
    yield from _other_numbers(case, number, parts_of(case.trainer.model))


COMPUTED_VARIATIONS: Final[tuple[Variation, ...]] = (
    Variation("dtype", "precision", "the whole model in another dtype", _whole_dtype),
    Variation(
        "dtype of a part", "precision", "vision, language model, head, features, keys and values", _part_dtype
    ),
    Variation("rounded weights", "precision", "rounded to bfloat16, float16, float8, int8 or int4", _rounded),
    Variation("positions", "positions", "one axis, no rope delta, axes exchanged, shifted", _positions),
    Variation("attention", "masks", "in both directions, another window, a prompt cut off", _attention),
    Variation("head", "weights", "a head tied to the embedding", _head),
    Variation("adapter", "weights", "an adapter not merged, or of another scale", _adapter),
    Variation("weights", "weights", "other weights, all, in one layer or kind, needs `weights`", _weights),
    Variation("rotary base", "positions", "another base, scale or share of rotary frequencies", _rope),
    Variation("layer left out", "weights", "a layer left out, twice or exchanged, or the last norm", _layers),
    Variation("activation", "weights", "another activation function", _activations),
    Variation("epsilon", "weights", "another epsilon of the norms", _norms),
    Variation("scaled part", "weights", "image features, embeddings or attention scaled", _scaled_parts),
)  # fmt: skip
