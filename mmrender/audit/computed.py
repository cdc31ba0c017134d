"""Rows of the stages positions and model: other positions, attention, dtypes and weights."""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from mmrender.audit.case import Case, ChangedItem, Trial, minimum, scopes, with_items
from mmrender.audit.report import described
from mmrender.audit.trainer import ModelChange
from mmrender.media.processors.patches import PatchItem

Place: TypeAlias = tuple[Any, Any, Any]
"""The owner of a value, its attribute or key, and another value for it."""
_MAX_LAYERS: Final = 64
VISION: Final = "vision"
LANGUAGE: Final = "language model"


def positions(case: Case) -> Iterator[Trial]:
    """Yield other numbers of tokens: `position_ids` of shape `(axes, 1, n)`, or `(1, n)`."""
    first = min((span.start for span in case.sample.media_spans), default=0)
    text = "the sampler numbered its tokens as the model does by itself"
    yield Trial(text, inputs=lambda given: given.pop("position_ids", None), since=first, token=first)
    for text, parts, change in _renumbered(case):
        since = parts[0][0]
        images = [span.position for span in case.sample.media_spans if since in (span.start, span.stop)]
        inputs = partial(_with_positions, parts, change)
        image = images[0] if images else None
        yield Trial(f"the sampler {text}", inputs=inputs, token=since, since=since, image=image)


def _renumbered(case: Case) -> Iterator[tuple[str, Sequence[tuple[int, int]], Callable[[Any, int], Any]]]:
    spans, runs, length = case.sample.media_spans, case.runs, len(case.sample)
    images = [(span.start, span.stop) for span in spans]
    if spans and case.trainer.family.mrope is not None:
        since = [(images[0][0], length)]
        yield "numbered its tokens one by one, on one axis", [(0, length)], _by_index
        for names, axes in {"height and width": [0, 2, 1], "time and height": [1, 0, 2]}.items():
            yield f"had {names} exchanged in its positions", since, partial(_with_axes, axes)
        yield "had one number for height and width of images", images, _flattened
        yield "numbered rows and columns of images from zero", images, _from_zero_within
        yield "numbered images from zero", images, _from_zero
        for text, step in _STEPS.items():
            stops = [(span.start, span.stop) for span in spans]
            yield f"counted an image {text}", since, partial(_followed, stops, step)
        for text in ("", " of the first completion"):
            start = runs[0][0] if text else images[-1][1]
            yield (
                f"numbered tokens by their index after the prompt{text} (no rope delta)",
                [(start, length)],
                _by_index,
            )
        for parts, which in scopes(case):
            yield f"numbered the tokens of {which} by their index (no rope delta)", parts, _by_index
    for parts, which in scopes(case):
        yield f"restarted its positions in {which}", parts, _from_zero
    turns = [(runs[number - 1][1], runs[number][1]) for number in range(1, len(runs))]
    if turns:
        yield "restarted its positions after each completion", turns, _from_zero
        yield "restarted its positions after the first completion", [(runs[0][1], length)], _from_zero
    for by in (1, -1, 2, -2):
        for parts, which in scopes(case):
            yield f"had positions {by:+d} from {which} on", [(parts[0][0], length)], partial(_moved, by)
        for span in case.suspects:
            yield f"had positions {by:+d} after {described(span)}", [(span.stop, length)], partial(_moved, by)
        if spans:
            yield f"had positions {by:+d} within images", images, partial(_moved, by)
    for by in (2, 3, 4):
        yield f"had positions {by} apart", [(0, length)], lambda own, _, by=by: own.mul_(by)  # type: ignore[misc]


def _with_positions(
    parts: Iterable[tuple[int, int]], change: Callable[[Any, int], Any], given: dict[str, Any]
) -> None:
    given["position_ids"] = ids = given["position_ids"].clone()
    for start, stop in parts:
        change(ids[..., start:stop], start)


def _by_index(own: Any, start: int) -> None:
    import torch

    own.copy_(torch.arange(start, start + own.shape[-1]))


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


def _followed(images: Sequence[tuple[int, int]], step: Callable[[Any], Any], ids: Any, offset: int) -> None:
    """Let the tokens after an image continue at a distance from its first token."""
    for start, stop in ((start - offset, stop - offset) for start, stop in images):
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


def grid(case: Case) -> Iterator[Trial]:
    """Yield images whose grid has height and width exchanged."""
    for span in case.suspects:
        steps, height, width = (*span.item.grid, 0, 0, 0)[:3]
        if isinstance(span.item, PatchItem) and height != width:
            other = ChangedItem(span.item, lambda pixels, _: pixels, grid=(steps, width, height))
            text = f"the sampler saw a grid with height and width exchanged in {described(span)}"
            sample = with_items(case.sample, [(span, other)])
            yield Trial(text, sample, image=span.position, since=span.start)


def video_times(case: Case) -> Iterator[Trial]:
    """Yield other durations of a video's time steps."""
    for span in case.suspects:
        known = getattr(span.item, "second_per_grid", None)
        for seconds in [] if known is None else [*(known * f for f in (0.5, 2.0, 0.25, 4.0)), 0.5, 1.0, 2.0]:
            changed = {"second_per_grid": seconds, "identity": f"{hash(seconds) % 2**63:064x}"}
            other: Any = msgspec.structs.replace(span.item, **changed)  # type: ignore[type-var]
            text = f"the sampler took a time step of {described(span)} to last {seconds:g} s, not {known:g} s"
            yield Trial(text, with_items(case.sample, [(span, other)]), since=span.start)


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
    yield trial("tokens attended to the token after them, too", distance >= -1, 0, near)
    if near is not None:
        yield trial("tokens attended without a window", causal)
        yield trial("tokens attended to the window in all layers", causal & near)
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
        found[LANGUAGE if language else f"{VISION} ({name})"] = child
    if head is not None:
        found["head"] = head
    return found


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


def _change(make: Callable[..., AbstractContextManager[None]], *args: Any) -> ModelChange:
    """Return a change of a model that is already bound to its modules."""
    return lambda _: make(*args)


def _through(dtype: Any, data: Any) -> Any:
    return data.to(dtype).to(data.dtype)


@contextmanager
def in_dtype(module: Any, dtype: Any, buffers: bool = False) -> Iterator[None]:
    """Compute a module in another dtype within the block. Inputs and outputs are cast."""
    import torch

    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return _mapped((list(args), dict(kwargs)), lambda one: one.to(dtype))

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


def _since(case: Case, part: str) -> int:
    """Return the first token whose number may depend on a part: for vision, the first image's."""
    starts = [span.start for span in case.sample.media_spans]
    return min(starts, default=len(case.sample)) if part.startswith((VISION, "image")) else 0


def whole_dtype(case: Case) -> Iterator[Trial]:
    """Yield the whole model in another dtype."""
    for name, dtype in _other_dtypes(case.trainer.model).items():
        yield Trial(f"the sampler computed in {name}", model=whole_in(dtype))


def part_dtype(case: Case) -> Iterator[Trial]:
    """Yield parts of the model, features, or keys and values in another dtype."""
    import torch

    model = case.trainer.model
    own = {} if model.dtype == torch.float32 else {"float32": torch.float32}
    for name, dtype in (_other_dtypes(model) | own).items():
        for part, module in parts_of(model).items():
            for buffers in (False, True) if any(True for _ in module.buffers()) else (False,):
                text = f"the sampler computed its {part} in {name}" + (", buffers too" if buffers else "")
                yield Trial(text, model=_change(in_dtype, module, dtype, buffers), since=_since(case, part))
    for name, dtype in {**_other_dtypes(model), "float8_e4m3fn": torch.float8_e4m3fn}.items():
        for part, modules in _features(model).items():
            change = _change(_giving, modules, partial(_output, partial(_through, dtype)))
            text = f"the sampler's {part} were rounded to {name}"
            yield Trial(text, model=change, since=_since(case, part))
        yield Trial(f"the sampler kept keys and values in {name}", model=_change(_cached_in, model, dtype))


@contextmanager
def _cached_in(model: Any, dtype: Any) -> Iterator[None]:
    """Round keys and values of the language model as a cache of another dtype does, within the block."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as KERNELS

    language = parts_of(model).get(LANGUAGE, model)
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
    towers = [module for name, module in parts_of(model).items() if name.startswith(VISION)]
    # Of several in a row, the last one produces the features.
    return {"image features": towers[-1:], "embeddings": [model.get_input_embeddings()]}


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


def quantised(case: Case) -> Iterator[Trial]:
    """Yield weights that were rounded to fewer bits, in the model or a part."""
    import torch

    model = case.trainer.model
    changes = {name: partial(_through, dtype) for name, dtype in _other_dtypes(model).items()}
    changes |= {f"float8 with a scale{' a row' * by}": partial(_in_float8, by_row=by) for by in (False, True)}
    changes |= {f"int{bits} by rows": partial(_quantised, bits=bits, group=None) for bits in (8, 4)}
    changes |= {f"int4 by {group}": partial(_quantised, bits=4, group=group) for group in (32, 64, 128)}
    for part, module in {"model": model, **parts_of(model)}.items():
        linear = torch.nn.ModuleList(one for one in module.modules() if isinstance(one, torch.nn.Linear))
        for name, change in changes.items():
            chosen = linear if name.startswith(("int", "float8")) else module

            def make(chosen: Any = chosen, change: Any = change) -> AbstractContextManager[None]:
                return replaced([*_tensors(chosen, change)])

            text = f"the weights of the sampler's {part} were rounded to {name}"
            yield Trial(text, model=_change(make), since=_since(case, part))


def other_weights(case: Case) -> Iterator[Trial]:
    """Yield given weights, whole and by parts, if they differ from the trainer's, and untied or tied heads."""
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
        if not changed:
            continue
        text = f"the sampler had the weights of {name}"
        yield trial(text, changed)
        for part, keys in _groups(changed).items():
            yield trial(f"{text} in {part}", {key: changed[key] for key in keys})
            rest = {key: value for key, value in changed.items() if key not in keys}
            yield trial(f"{text} everywhere but in {part}", rest)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        head is not None
        and head.weight is not embedding.weight
        and head.weight.shape == embedding.weight.shape
    ):
        tied = [(head.weight, "data", embedding.weight.data)]
        yield Trial("the sampler's head was tied to its embedding", model=_change(replaced, tied))


def _groups(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return parameters by module, by the name that modules have in every layer, and by first layers."""
    held = list(keys)
    groups: dict[str, set[str]] = {}
    for key in held:
        parts = key.split(".")
        for count in range(1, len(parts)):
            groups.setdefault(".".join(parts[:count]), set()).add(key)
        numbers = [place for place, part in enumerate(parts) if part.isdigit()]
        if numbers and len(parts) > numbers[0] + 1:
            layers, number = ".".join(parts[: numbers[0]]), int(parts[numbers[0]])
            groups.setdefault(f"{layers}.*.{parts[numbers[0] + 1]}", set()).add(key)
            for last in range(1, number + 1):
                groups.setdefault(f"{layers} from {last} on", set()).add(key)
        if "norm" in key or parts[-1] == "bias":
            groups.setdefault("norms and biases", set()).add(key)
    distinct = {frozenset(group): name for name, group in reversed(groups.items()) if len(group) < len(held)}
    ordered = sorted(distinct.items(), key=lambda entry: -len(entry[0]))[: 2 * _MAX_LAYERS]
    return {name: set(group) for group, name in ordered}


def stacks(model: Any) -> dict[str, list[Any]]:
    """Return the layers of the language model and of the vision towers, in order, if they are found."""
    import torch

    found = {}
    for name, part in parts_of(model).items():
        lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
        found[name] = list(max(lists, key=len, default=[]))
    return {name: layers for name, layers in found.items() if layers}


def _skipped(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
    given = args[0] if args else next(iter(kwargs.values()), None)
    return (given, *output[1:]) if isinstance(output, tuple) else given


def layers(case: Case) -> Iterator[Trial]:
    """Yield a model without one of its layers, or with one whose weights are zero."""
    for part, modules in stacks(case.trainer.model).items():
        for number, layer in enumerate(modules[:_MAX_LAYERS]):
            text, since = f"layer {number} of its {part}", _since(case, part)
            yield Trial(
                f"the sampler left out {text}", model=_change(_giving, [layer], _skipped), since=since
            )
            for name, child in layer.named_children():
                if sum(1 for one in child.parameters() if one.ndim > 1):
                    zero = _change(_giving, [child], partial(_output, lambda own: own * 0))
                    yield Trial(f"{name} in {text} had zeros for weights", model=zero, since=since)


class _Setting(NamedTuple):
    """A number of modules, and other values that it may have had.

    Attributes:
        text: Statement, given the part's name, the value, and the trainer's own.
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


def _other_settings(case: Case, settings: Sequence[_Setting], parts: Mapping[str, Any]) -> Iterator[Trial]:
    for setting in settings:
        for part, module in parts.items():
            found = [
                (one, name, getattr(one, name, None)) for one in module.modules() for name in setting.names
            ]
            held = [entry for entry in found if type(entry[2]) is setting.kind]

            def with_value(value: Any, setting: Any = setting, part: str = part, held: Any = held) -> Trial:
                places = [(one, name, setting.change(own, value)) for one, name, own in held]
                text = setting.text.format(part=part, value=value, own=held[0][2])
                return Trial(f"the sampler's {text}", model=_change(replaced, places))

            yield from (with_value(value) for value in setting.values if held)
            if held and setting.bounds is not None:
                yield from _fitted(case, with_value, *setting.bounds)


def _fitted(case: Case, make: Callable[[float], Trial], low: float, high: float) -> Iterator[Trial]:
    """Yield the trial with the number that a search finds, if it brings the sampler's numbers nearer."""
    if not np.isfinite(case.compared.sampler).all():
        return

    def loss(value: float) -> float:
        found = case.trainer.attempt(case.sample, model=make(value).model)
        return np.inf if found is None else float(np.abs(found - case.compared.sampler).mean())

    enough = 0.7 * float(np.abs(case.compared.difference).mean())
    yield make(minimum(loss, low, high, points=12, enough=enough))._replace(fitted=1)


def rotary(case: Case) -> Iterator[Trial]:
    """Yield another base or scale of rotary frequencies."""
    import torch

    config = case.trainer.model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    theta = given.get("rope_theta", getattr(config, "rope_theta", None)) or 1e4

    def based(own: Any, base: float) -> Any:
        return own ** (math.log(base) / math.log(theta))

    def stretched(own: Any, factor: float) -> Any:  # as YaRN does, low frequencies only
        share = torch.linspace(0, 1, len(own))
        return own * (1 - share) + own / factor * share

    kind, names = torch.Tensor, ("inv_freq",)
    bases, factors = (1e4, 5e5, 1e6, 5e6, 1e7), (0.5, 0.25, 0.125, 2.0, 4.0, 8.0)
    text = f"rotary base was {{value:.6g}}, not {theta:g}"
    settings = [
        _Setting(text, names, kind, based, bases, (1e3, 1e8)),
        _Setting(
            "rotary frequencies were {value:.4g} of the trainer's",
            names,
            kind,
            operator.mul,
            factors,
            (0.02, 50.0),
        ),
        _Setting("rotary frequencies were stretched by {value:g}", names, kind, stretched, (2.0, 4.0, 8.0)),
    ]
    language = parts_of(case.trainer.model).get(LANGUAGE, case.trainer.model)
    yield from _other_settings(case, settings, {LANGUAGE: language})


def constants(case: Case) -> Iterator[Trial]:
    """Yield other constants of the configuration: epsilon, activation, scale of attention and features."""
    from torch import nn

    acts = {"GELU": nn.GELU(), "GELU by tanh": nn.GELU("tanh"), "SiLU": nn.SiLU(), "ReLU": nn.ReLU()}
    parts = parts_of(case.trainer.model)
    text = "norms of its {part} had an epsilon of {value:.3g}, not {own:g}"
    epsilon = _Setting(
        text,
        ("variance_epsilon", "eps"),
        float,
        lambda _, value: value,
        (1e-3, 1e-5, 1e-6, 1e-8),
        (1e-7, 1.0),
    )
    scale = _Setting(
        "attention of its {part} was scaled by {value:.4g} of the trainer's factor",
        ("scaling",), float, operator.mul, (), (0.01, 100.0),
    )  # fmt: skip
    yield from _other_settings(case, [epsilon, scale], parts)
    for part, module in parts.items():
        names = ("act_fn", "activation_fn", "act", "hidden_act")
        held = [
            (one, key, getattr(one, key)) for one in module.modules() for key in names if hasattr(one, key)
        ]
        for name, other in acts.items() if held else ():
            places = [(one, key, other) for one, key, own in held if isinstance(own, nn.Module)]
            text = f"the sampler's {part} had {name} for activation"
            yield Trial(text, model=_change(replaced, places), since=_since(case, part))
    for part, modules in _features(case.trainer.model).items():

        def scaled(factor: float, part: str = part, modules: Any = modules) -> Trial:
            change = _change(_giving, modules, partial(_output, lambda own: own * factor))
            text = f"the sampler's {part} were multiplied by {factor:.4g}"
            return Trial(text, model=change, since=_since(case, part))

        yield from _fitted(case, scaled, 0.01, 100.0) if modules else ()


def adapter(case: Case) -> Iterator[Trial]:
    """Yield the base weights of a model with an adapter, or another scale of it."""
    model = case.trainer.model
    if (disable := getattr(model, "disable_adapter", None)) is not None:
        yield Trial("the sampler's adapter was not merged: it had the base weights", model=_change(disable))

    def scaled(own: dict[str, float], factor: float) -> dict[str, float]:
        return {name: value * factor for name, value in own.items()}

    text = "{part} had {value:.3g} of the trainer's scale"
    scale = _Setting(text, ("scaling",), dict, scaled, (0.0,), (0.05, 20.0))
    yield from _other_settings(case, [scale], {"adapter": model})
