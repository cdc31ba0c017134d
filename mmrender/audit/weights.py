"""Rows of the stage model about its weights: rounded ones, and weights of another step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, Final

from mmrender.audit.case import Case, Trial, fitted
from mmrender.audit.computed import (
    Place,
    attending,
    changed_weights,
    changing,
    hooked,
    other_dtypes,
    replaced,
    tensors,
    through,
)
from mmrender.audit.trainer import LANGUAGE, parts_of

_MAX_FITTED: Final = 3
_MAX_FLOAT8: Final = 448.0
_MAX_GROUPS: Final = 48
"""Parts of the model in which other weights are tried."""


def quantised(case: Case) -> Iterator[Trial]:
    """Yield weights that were rounded to fewer bits, in the model or a part."""
    import torch

    model, low = case.trainer.model, partial(through, torch.float8_e4m3fn)

    def on_scale(group: int | None, top: float, low: Any = torch.round, zero: bool = False) -> Any:
        return partial(_on_scale, group, lambda largest: largest / top, low, zero)

    changes = {name: partial(through, dtype) for name, dtype in other_dtypes(model).items()}
    changes |= {"float8": low, "float8 but for vectors": low}
    for text, group in {"with a scale": 0, "with a scale a row": None}.items():
        changes[f"float8 {text}"] = on_scale(group, _MAX_FLOAT8, low)
    changes["int8 with one scale"] = on_scale(0, 127)
    for bits, even, group in product((8, 4), (True, False), (None, 128, 64, 32, 16)):
        if bits == 4 or group in (None, 128):
            by = "rows" if group is None else f"groups of {group}"
            text = f"int{bits} by {by}{'' if even else ' with zero points'}"
            changes[text] = on_scale(group, 2 ** (bits - even) - 1, zero=not even)
    for name, group, scale_of in (("NVFP4", 16, _in_float8), ("MXFP4", 32, _as_power_of_2)):
        changes[f"float4 in groups of {group} ({name})"] = partial(
            _on_scale, group, scale_of, _to_float4, False
        )
    # Engines leave the head out, and often vision.
    parts = parts_of(model)
    language = parts.get(LANGUAGE, model)
    scopes = {"model": [model], "model but its head": [parts[name] for name in parts if name != "head"]}
    scopes[LANGUAGE] = [language]
    projections = [(name, one) for name, one in language.named_modules() if name.endswith("_proj")]
    for text, in_attention in {"attention": True, "perceptrons": False}.items():
        chosen = [one for name, one in projections if ("attn" in name) == in_attention]
        scopes[f"{text} of the {LANGUAGE}"] = chosen
    for part, modules in scopes.items():
        whole = torch.nn.ModuleList(modules)
        linear = torch.nn.ModuleList(one for one in whole.modules() if isinstance(one, torch.nn.Linear))
        for name, change in changes.items():
            only = linear if name.startswith(("int", "float8 ", "float4")) else whole
            text = f"the weights of the sampler's {part} were rounded to {name}: quantised"
            yield Trial(text, model=changed_weights(only, change))
        for by_row in (True, False) if part in ("model but its head", LANGUAGE) else ():
            scale = f"a scale {'a row and token' if by_row else 'a tensor'}"
            text = f"'s {part} multiplied in float8, weights and inputs, with {scale}: quantised (fp8)"
            rounded = changes[f"float8 with a scale{' a row' * by_row}"]
            yield changing(case, text, _multiplied, linear, rounded)


@contextmanager
def _multiplied(modules: Any, low: Callable[[Any], Any]) -> Iterator[None]:
    """Multiply rounded matrices with rounded inputs within the block."""
    inputs = lambda args, options: ((low(args[0]), *args[1:]), options)  # noqa: E731
    with hooked(modules, inputs), replaced([*tensors(modules, low)]):
        yield


def _on_scale(
    group: int | None, scale_of: Callable[[Any], Any], low: Callable[[Any], Any], zero: bool, data: Any
) -> Any:
    """Return a matrix rounded on scales: of groups of a row, of rows (None), or of all (0).

    A scale is of the largest value, counted from the least one with a zero point.
    """
    if data.ndim < 2 or (group and data.shape[-1] % group):
        return data
    rows = data.reshape(1, -1) if group == 0 else data.reshape(-1, group or data.shape[-1])
    least = rows.amin(1, keepdim=True) if zero else 0
    scale = scale_of((rows - least).abs().amax(1, keepdim=True).clamp(min=1e-12))
    return (low((rows - least) / scale) * scale + least).reshape(data.shape)


def _in_float8(largest: Any) -> Any:
    """Return scales of NVFP4, which are float8 on a scale of their own."""
    import torch

    whole = largest.max() / (6 * _MAX_FLOAT8)
    return through(torch.float8_e4m3fn, largest / 6 / whole).clamp(min=2.0**-9) * whole


def _as_power_of_2(largest: Any) -> Any:
    return 2.0 ** (largest.log2().floor() - 2)


def _to_float4(data: Any) -> Any:
    """Round to the nearest float4 (e2m1)."""
    import torch

    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).to(data)
    return levels[torch.bucketize(data.abs(), (levels[1:] + levels[:-1]) / 2)] * data.sign()


def _with(case: Case, statement: str, changed: Mapping[str, Any]) -> Trial:
    return Trial(statement, model=partial(replaced, as_given(changed, case.trainer.model)))


def other_weights(case: Case) -> Iterator[Trial]:
    """Yield given weights that differ from the trainer's, whole and by parts, a tied head, and no adapter."""
    import torch

    model = case.trainer.model
    named = dict(model.named_parameters(remove_duplicate=False))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()

    for name, given in case.weights.items():
        known = {id(own): value for own, _, value in as_given(given, model)}
        same = {key for key, own in named.items() if id(own) in known and torch.equal(known[id(own)], own)}
        changed = {key: known[id(own)] for key, own in named.items() if id(own) in known and key not in same}
        text = f"the sampler had the weights of {name}"
        yield from [_with(case, text, changed)] if changed else ()
        for part, keys in list(_groups(changed).items())[: _MAX_GROUPS // len(case.weights)]:
            yield _with(case, f"{text} in {part}", {key: changed[key] for key in keys})
            rest = {key: value for key, value in changed.items() if key not in keys}
            yield _with(case, f"{text} everywhere but in {part}", rest)
        steps = {key: value - named[key] for key, value in changed.items()}
        scopes_of = {"all parts": {*changed}, **dict(list(_groups(changed).items())[:_MAX_FITTED])}
        for part, keys in scopes_of.items() if changed else ():
            own_steps = [(key, steps[key]) for key in keys]

            def moved(factor: float, by: str = f"{name}'s in {part}", some: Any = own_steps) -> Trial:
                towards = {key: named[key] + factor * step for key, step in some}
                why = "averaged" if factor < 1 else "of another step"
                text = f"the sampler's weights were {factor:.3g} of the way from the trainer's to {by}: {why}"
                return _with(case, text, towards)

            yield from fitted(case, moved, 0.02, 10, 1.0, 0.1, 1.0)
        # A head that is tied to the embedding may be loaded apart from it.
        tied = [key for key, own in named.items() if head is not None and own is head.weight and key in given]
        for of, text in ((head, "head"), (embedding, "embedding")):
            if tied and head.weight is embedding.weight:
                other = torch.nn.Parameter(given[tied[0]].to(head.weight), requires_grad=False)
                statement = f" had the weights of {name} in its {text} alone, which was not tied"
                yield changing(case, statement, replaced, [(of._parameters, "weight", other)])
    if (
        head is not None
        and head.weight is not embedding.weight
        and head.weight.shape == embedding.weight.shape
    ):
        places = [(head.weight, "data", embedding.weight.data)]
        yield changing(case, "'s head was tied to its embedding (tie_word_embeddings)", replaced, places)
    yield from _adapters(case, named)
    yield from _restacked(case, named)


def as_given(given: Mapping[str, Any], model: Any) -> list[Place]:
    """Return the model's parameters with given values of their shape."""
    named = dict(model.named_parameters(remove_duplicate=False))
    known = [(named[key], value) for key, value in given.items() if key in named]
    return [(own, "data", value.to(own)) for own, value in known if value.shape == own.shape]


def _adapters(case: Case, named: Mapping[str, Any]) -> Iterator[Trial]:
    """Yield weights without an adapter, or without it in some parts, or with another scale of it."""
    import torch

    if (disable := getattr(case.trainer.model, "disable_adapter", None)) is None:
        return
    yield Trial("the sampler's adapter (LoRA) was not merged: it had the base weights", model=disable)
    merged = {key: one.detach().clone() for key, one in named.items()}
    with disable():
        base = {key: one.detach().clone() for key, one in named.items()}
    deltas = {key: one - base[key] for key, one in merged.items() if not torch.equal(one, base[key])}
    for part, keys in _groups(deltas).items():
        text = f"the sampler's adapter (LoRA) was left out of {part}"
        yield _with(case, text, {key: base[key] for key in keys})

    def adapted(factor: float) -> Trial:
        text = f"the sampler's adapter (LoRA) had {factor:.3g} times its scale"
        return _with(case, text, {key: base[key] + factor * delta for key, delta in deltas.items()})

    yield from fitted(case, adapted, 1 / 32, 32, 1.0) if deltas else ()


def _restacked(case: Case, named: Mapping[str, Any]) -> Iterator[Trial]:
    """Yield projections that engines stack, in another order."""
    other = "in each other's place (stacked in another order)"
    for one, two in (("gate_proj", "up_proj"), ("q_proj", "k_proj"), ("k_proj", "v_proj")):
        names = {key: key.replace(one, two) for key in named if key.endswith(f"{one}.weight")}
        if names and all(two in named and named[key].shape == named[two].shape for key, two in names.items()):
            changed = {a: named[b].data for key, two in names.items() for a, b in ((key, two), (two, key))}
            yield _with(case, f"the sampler had {one} and {two} {other}", changed)
    stacked = {key: value.roll(len(value) // 2, 0) for key, value in named.items() if "gate_up_proj" in key}
    yield from (
        [_with(case, f"the sampler had gate and up {other} (gate_up_proj)", stacked)] if stacked else ()
    )


def stale_prefix(case: Case) -> Iterator[Trial]:
    """Yield prompts whose keys and values were cached under other weights."""
    model = case.trainer.model
    for name, given in case.weights.items():
        change = partial(_after, model, as_given(given, model))
        starts = [(number, case.runs[number][0]) for number in case.departing_runs]
        parts = [Trial("", case.of_run(number), model=partial(change, start - 1)) for number, start in starts]
        text = f"the sampler's prefix cache held keys and values of the weights of {name}"
        yield Trial(text, parts=parts)


@contextmanager
def _after(model: Any, places: list[Place], stop: int) -> Iterator[None]:
    """Take keys and values before token `stop` from a forward under other weights, within the block."""
    cached: list[tuple[Any, Any]] = []

    def keep(key: Any, value: Any) -> tuple[Any, Any]:
        cached.append((key, value))
        return key, value

    def put(key: Any, value: Any) -> tuple[Any, Any]:
        for own, old in zip((key, value), cached.pop(0), strict=True):
            own[..., :stop, :] = old[..., :stop, :]
        return key, value

    def before(_: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        with replaced(places), attending(model, keep):
            model(*args, **kwargs)
        stack.enter_context(attending(model, put))

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    with ExitStack() as stack:
        stack.callback(hook.remove)
        yield


def _groups(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return parameters by module, and by the last layers."""
    groups: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        names = [".".join(parts[:count]) for count in range(1, len(parts))] + [f"each {'.'.join(parts[-2:])}"]
        place = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), 0)
        last = int(parts[place]) if place else 0
        for name in [*names, *(f"{'.'.join(parts[:place])} from {n} on" for n in range(1, last + 1))]:
            groups.setdefault(name, set()).add(key)
    return dict(sorted(groups.items(), key=lambda entry: -len(entry[1])))
