"""Variations of what the sampler computed: positions, attention, dtypes and weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from mmrender.audit.trainer import ModelChange
from mmrender.audit.trial import Case, Trial, Variation, Weights, least, scopes

Place: TypeAlias = tuple[Any, Any, Any]
"""What holds a value, its attribute or key, and another value for it."""
_MOST_LAYERS: Final = 64
_VISION: Final = "vision"
_LANGUAGE: Final = "language model"


def _positions(case: Case) -> Iterator[Trial]:
    """Yield other numbers of tokens: `position_ids` of shape `(axes, 1, n)`, or `(1, n)`."""
    import torch

    spans, runs, length = case.sample.media_spans, case.runs, len(case.sample)
    index = torch.arange(length, device=case.trainer.model.device)
    first = spans[0].start if spans else 0
    several = case.trainer.family.mrope is not None and bool(spans)

    def trial(statement: str, change: Callable[[Any], Any], since: int, image: int | None = None) -> Trial:
        def inputs(given: dict[str, Any]) -> None:
            given["position_ids"] = given["position_ids"].clone()
            change(given["position_ids"])

        return Trial(f"the sampler {statement}", inputs=inputs, token=since, since=since, image=image)

    def by_index(parts: Iterable[tuple[int, int]], ids: Any) -> None:
        for start, stop in parts:
            ids[..., start:stop] = index[start:stop]

    def restarted(parts: Iterable[tuple[int, int]], ids: Any) -> None:
        for start, stop in parts:
            ids[..., start:stop] -= ids[..., start : start + 1].clone()

    def moved(start: int, by: int, ids: Any) -> None:
        ids[..., start:] += by

    def in_images(change: Callable[[Any], None], ids: Any) -> None:
        for span in spans:
            change(ids[..., span.start : span.stop])

    def followed(step: Callable[[Any], Any], ids: Any) -> None:
        """Let what follows an image go on so much after its first token."""
        for span in spans:
            if span.stop < length:
                start = ids[0, 0, span.start]
                ids[..., span.stop :] += start + step(ids[..., span.start : span.stop]) - ids[0, 0, span.stop]

    def extent(axis: int, own: Any) -> Any:
        return own[axis, 0].max() - own[0, 0, 0] + 1

    def from_zero(own: Any) -> None:
        own -= own[:, :, :1].clone()

    yield Trial(
        "the sampler numbered its tokens as the model does by itself",
        inputs=lambda given: given.pop("position_ids", None),
        since=first,
        token=first,
    )
    start, everywhere = runs[0][0], [(0, length)]
    rows: dict[str, Callable[[Any], Any]] = {
        "numbered its tokens one by one, on one axis": partial(by_index, everywhere),
        "had height and width exchanged in its positions": lambda ids: ids.copy_(ids[[0, 2, 1]]),
        "had time and height exchanged in its positions": lambda ids: ids.copy_(ids[[1, 0, 2]]),
        "had one number for height and width of images": partial(in_images, _flattened),
        "numbered rows and columns of images from zero": partial(in_images, lambda own: from_zero(own[1:])),
        "numbered images from zero": partial(in_images, from_zero),
        "counted an image as one position": partial(followed, lambda own: 1),
        "counted an image as one position a token": partial(followed, lambda own: own.shape[-1]),
        "counted an image by its height": partial(followed, partial(extent, 1)),
        "counted an image by its width": partial(followed, partial(extent, 2)),
    }
    if several:
        for statement, change in rows.items():
            yield trial(statement, change, first)
        text = "numbered tokens by their index from the first completion on (no rope delta)"
        yield trial(text, partial(by_index, [(start, length)]), start)
    for parts, which in scopes(case):
        start = parts[0][0]
        if several:
            text = f"numbered the tokens of {which} by their index (no rope delta)"
            yield trial(text, partial(by_index, parts), start)
        yield trial(f"began its positions anew in {which}", partial(restarted, parts), start)
        for by in (1, -1, 2, -2):
            yield trial(f"had positions {by:+d} from {which} on", partial(moved, start, by), start)
    turns = [(runs[number - 1][1], runs[number][1]) for number in range(1, len(runs))]
    if turns:
        yield trial("began its positions anew after each completion", partial(restarted, turns), turns[0][0])
    for factor in (2, 3, 4):
        yield trial(f"had positions {factor} apart", partial(_multiplied, factor), 0)
    for span in case.suspects:
        name, place = f"{span.modality} {span.position}", (span.start, span.stop)
        for by in (1, -1, 2, -2):
            after = partial(moved, span.stop, by)
            yield trial(f"had positions {by:+d} after {name}", after, span.stop, span.position)
        if several:
            flat = partial(_one_by_one, *place)
            yield trial(f"numbered the tokens of {name} one by one", flat, span.start, span.position)


def _multiplied(by: int, ids: Any) -> None:
    ids *= by


def _flattened(own: Any) -> None:
    own[1:] = own[:1, :, :1].clone()


def _one_by_one(start: int, stop: int, ids: Any) -> None:
    import torch

    count = torch.arange(stop - start, device=ids.device)
    ids[..., start:stop] = ids[..., start : start + 1] + count


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
            # A mask for each kind of layers, where the model has several.
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
def _giving(modules: Iterable[Any], change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let modules give out `change(what went in, what came out)` within the block."""

    def leave(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        return change(args[0] if args else next(iter(kwargs.values()), None), output)

    hooks = [module.register_forward_hook(leave, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _output(change: Callable[[Any], Any], _: Any, output: Any) -> Any:
    return _mapped(output, change)


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
    """Yield a module's parameters, changed; what shares them elsewhere keeps its own."""
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
    """Compute a module in another dtype within the block; what goes in and comes out is cast."""
    import torch

    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return _mapped(args, lambda one: one.to(dtype)), {
            name: _mapped(value, lambda one: one.to(dtype)) for name, value in kwargs.items()
        }

    hook = module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with (
            _giving([module], lambda _, output: _mapped(output, lambda one: one.to(own))),
            replaced([*_tensors(module, lambda data: data.to(dtype), buffers=buffers)]),
        ):
            yield
    finally:
        hook.remove()


@contextmanager
def other_attention(model: Any) -> Iterator[None]:
    """Compute attention by another kernel within the block, where the model has one."""
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


def _first_image(case: Case) -> int:
    return min((span.start for span in case.sample.media_spans), default=len(case.sample))


def _part_dtype(case: Case) -> Iterator[Trial]:
    import torch

    model = case.trainer.model
    others = _other_dtypes(model) | ({"float32": torch.float32} if model.dtype != torch.float32 else {})
    for name, dtype in others.items():
        for part, module in parts_of(model).items():
            since = _first_image(case) if part.startswith(_VISION) else 0
            for buffers in (False, True) if any(True for _ in module.buffers()) else (False,):
                text = f"the sampler computed its {part} in {name}" + (", buffers too" if buffers else "")
                yield Trial(text, model=_change(in_dtype, module, dtype, buffers), since=since)
    for name, dtype in {**_other_dtypes(model), "float8_e4m3fn": torch.float8_e4m3fn}.items():
        for part, modules in _features(model).items():
            since = _first_image(case) if part.startswith("image") else 0
            yield Trial(
                f"the sampler's {part} were rounded to {name}",
                model=_change(_giving, modules, partial(_output, partial(_through, dtype))),
                since=since,
            )


def _features(model: Any) -> dict[str, list[Any]]:
    """Return the modules that give what the layers of the language model are given."""
    towers = [module for name, module in parts_of(model).items() if name.startswith(f"{_VISION} (")]
    # Of several in a row, the last one gives the features.
    return {"image features": towers[-1:], "embeddings": [model.get_input_embeddings()]}


def _through(dtype: Any, data: Any) -> Any:
    return data.to(dtype).to(data.dtype)


def _quantised(data: Any, bits: int, group: int | None) -> Any:
    """Return a matrix rounded to integers of so many bits, scaled by row, or by groups of a row."""
    if data.ndim != 2 or (group and data.shape[1] % group):
        return data
    rows = data.reshape(-1, group) if group else data
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return ((rows / scale).round() * scale).reshape(data.shape)


def _in_float8(data: Any, by_row: bool) -> Any:
    """Return a matrix rounded to float8, scaled by its largest value, or by that of each row."""
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
    """Yield other weights, whole and by parts, where they differ from the trainer's."""
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


def _adapter(case: Case) -> Iterator[Trial]:
    model = case.trainer.model
    disable = getattr(model, "disable_adapter", None)
    if disable is not None:
        text = "the sampler's adapter was not merged: it had the base weights"
        yield Trial(text, model=_change(disable))
    scaled = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]

    def by(factor: float) -> Trial:
        places = [
            (one, "scaling", {name: value * factor for name, value in one.scaling.items()}) for one in scaled
        ]
        text = f"the sampler's adapter had {factor:.3g} of the trainer's scale"
        text = text if factor else "the sampler's adapter was not applied"
        return Trial(text, model=_change(replaced, places))

    if scaled:
        yield by(0.0)
        yield from _fitted(case, by, 0.05, 20.0)


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
    """Return the layers of the language model and of the vision towers, in order, where they are found."""
    import torch

    found = {}
    for name, part in parts_of(model).items():
        lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
        if name == _LANGUAGE or name.startswith(f"{_VISION} ("):
            found[name] = list(max(lists, key=len, default=[]))
    return found


def _skipped(given: Any, output: Any) -> Any:
    return (given, *output[1:]) if isinstance(output, tuple) else given


def _layers(case: Case) -> Iterator[Trial]:
    for part, layers in _stacks(case.trainer.model).items():
        since = _first_image(case) if part.startswith(_VISION) else 0
        for number, layer in enumerate(layers[:_MOST_LAYERS]):
            text = f"the sampler left out layer {number} of its {part}"
            yield Trial(text, model=_change(_giving, [layer], _skipped), since=since)
            if number + 1 < len(layers):
                text = f"the sampler's layers {number} and {number + 1} of its {part} were exchanged"
                places = _exchanged(layer, layers[number + 1])
                yield Trial(text, model=_change(replaced, places), since=since)
    norm = getattr(parts_of(case.trainer.model).get(_LANGUAGE), "norm", None)
    if norm is not None:
        text = "the sampler left out the last normalisation"
        yield Trial(text, model=_change(_giving, [norm], _skipped))


def _exchanged(one: Any, two: Any) -> list[Place]:
    """Return places that hold the parameters of two modules, each with the other's where they fit."""
    others = dict(two.named_parameters())
    pairs = [(a, others[name]) for name, a in one.named_parameters() if name in others]
    fitting = [(a, b) for a, b in pairs if a.shape == b.shape]
    return [place for a, b in fitting for place in ((a, "data", b.data), (b, "data", a.data))]


def _fitted(case: Case, make: Callable[[float], Trial], low: float, high: float) -> Iterator[Trial]:
    """Yield the trial whose number is found by a search, where it brings the sampler's numbers nearer."""
    if not np.isfinite(case.compared.sampler).all():
        return

    def loss(value: float) -> float:
        found = case.trainer.sampled_logprobs(case.sample, model=make(value).model)
        return float(np.abs(found - case.compared.sampler).mean())

    enough = 0.7 * float(np.abs(case.compared.difference).mean())
    value = least(loss, low, high, points=12, enough=enough)
    yield make(value)._replace(fitted=1)


def _rope(case: Case) -> Iterator[Trial]:
    language = parts_of(case.trainer.model).get(_LANGUAGE)
    held = [] if language is None else [*language.modules()]
    held = [module for module in held if getattr(module, "inv_freq", None) is not None]
    config = case.trainer.model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    theta = given.get("rope_theta", getattr(config, "rope_theta", None))
    if not held:
        return

    def trial(text: str, change: Callable[[Any], Any]) -> Trial:
        places = [(module, "inv_freq", change(module.inv_freq)) for module in held]
        return Trial(f"the sampler's {text}", model=_change(replaced, places))

    def based(base: float) -> Trial:
        power = math.log(base) / math.log(theta or base)
        return trial(f"rotary base was {base:.6g}, not {theta:g}", lambda own: own**power)

    def scaled(factor: float) -> Trial:
        return trial(f"rotary frequencies were {factor:.4g} of the trainer's", lambda own: own * factor)

    for make, values in ((based, (1e4, 5e5, 1e6, 5e6, 1e7)), (scaled, (0.5, 0.25, 0.125, 2.0, 4.0, 8.0))):
        if make is scaled or theta:
            yield from (make(value) for value in values if value != theta)
    for module, name, own in [entry for one in held for entry in _attributes(one, ["mrope_section"], list)]:
        for by in (1, 2):
            other = [*own[by:], *own[:by]]
            text = f"the sampler's rotary frequencies were shared out to axes as {other}, not {own}"
            yield Trial(text, model=_change(replaced, [(module, name, other)]))
    if theta:
        yield from _fitted(case, based, 1e3, 1e8)
    yield from _fitted(case, scaled, 0.02, 50.0)


def _attributes(model: Any, names: Sequence[str], kind: type) -> list[tuple[Any, str, Any]]:
    """Return modules, with names and values of those attributes that are of a kind."""
    found = [(module, name, getattr(module, name, None)) for module in model.modules() for name in names]
    return [entry for entry in found if isinstance(entry[2], kind) and not isinstance(entry[2], bool)]


def _scaled_parts(case: Case) -> Iterator[Trial]:
    """Yield image features, embeddings or attention scaled by a number, which is searched."""
    model = case.trainer.model
    for part, modules in _features(model).items():

        def features(factor: float, part: str = part, modules: Any = modules) -> Trial:
            return Trial(
                f"the sampler's {part} were multiplied by {factor:.4g}",
                model=_change(_giving, modules, partial(_output, lambda own: own * factor)),
                since=_first_image(case) if part.startswith("image") else 0,
            )

        yield from _fitted(case, features, 0.01, 100.0) if modules else ()
    language = parts_of(model).get(_LANGUAGE)
    scales = [] if language is None else _attributes(language, ["scaling"], float)

    def attention(factor: float) -> Trial:
        places = [(module, name, value * factor) for module, name, value in scales]
        text = f"the sampler's attention was scaled by {factor:.4g} of the trainer's factor"
        return Trial(text, model=_change(replaced, places))

    yield from _fitted(case, attention, 0.01, 100.0) if scales else ()


def _norms(case: Case) -> Iterator[Trial]:
    for part, module in parts_of(case.trainer.model).items():
        held = _attributes(module, ["variance_epsilon", "eps"], float)

        def with_epsilon(value: float, part: str = part, held: Any = held) -> Trial:
            places = [(one, name, value) for one, name, _ in held]
            return Trial(
                f"the norms of the sampler's {part} had an epsilon of {value:.3g}, not {held[0][2]:g}",
                model=_change(replaced, places),
            )

        if held:
            yield from (with_epsilon(10.0**-power) for power in (3, 5, 6, 8) if 10.0**-power != held[0][2])
            yield from _fitted(case, with_epsilon, 1e-7, 1.0)


def _activations(case: Case) -> Iterator[Trial]:
    from torch import nn

    others = {
        "GELU": nn.GELU(),
        "GELU by tanh": nn.GELU("tanh"),
        "SiLU": nn.SiLU(),
        "ReLU": nn.ReLU(),
    }
    names = ["act_fn", "activation_fn", "act", "hidden_act"]
    for part, module in parts_of(case.trainer.model).items():
        held = _attributes(module, names, nn.Module)
        for name, other in others.items() if held else ():
            places = [(one, key, other) for one, key, _ in held]
            text = f"the activation of the sampler's {part} was {name}"
            yield Trial(text, model=_change(replaced, places))


COMPUTED_VARIATIONS: Final[tuple[Variation, ...]] = (
    Variation("dtype", "precision", "all of the model in another dtype", _whole_dtype),
    Variation("dtype of a part", "precision", "vision, language model, head or features", _part_dtype),
    Variation("rounded weights", "precision", "rounded to bfloat16, float16, float8, int8 or int4", _rounded),
    Variation("positions", "positions", "one axis, no rope delta, axes exchanged, off", _positions),
    Variation("attention", "masks", "in both directions, another window, a prompt cut off", _attention),
    Variation("head", "weights", "a head tied to the embedding", _head),
    Variation("adapter", "weights", "an adapter not merged, or of another scale", _adapter),
    Variation("weights", "weights", "other weights, all, in one layer or kind; needs `weights`", _weights),
    Variation("rotary base", "positions", "another base, scale or share of rotary frequencies", _rope),
    Variation("layer left out", "weights", "a layer left out or exchanged, or the last norm", _layers),
    Variation("activation", "weights", "another activation function", _activations),
    Variation("epsilon", "weights", "another epsilon of the norms", _norms),
    Variation("scaled part", "weights", "image features, embeddings or attention scaled", _scaled_parts),
)  # fmt: skip
