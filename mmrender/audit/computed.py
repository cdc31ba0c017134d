"""Rows of the stage model: other attention, dtypes, settings and modules, and how trials change a model."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, pairwise
from operator import getitem, setitem
from typing import Any, Final, TypeAlias

import numpy as np

from mmrender.audit.case import Case, Trial, fitted
from mmrender.audit.prompts import bounds
from mmrender.audit.report import described
from mmrender.audit.trainer import LANGUAGE, VISION, ModelChange, parts_of
from mmrender.training.recurrent import recurrent_layers

Place: TypeAlias = tuple[Any, Any, Any]
"""The owner of a value, its attribute or key, and another value for it."""
_MAX_FACTOR: Final = 64
"""Largest factor of a number of a module, and of its inverse."""
_NO_SETTINGS: Final = ("p", "momentum")


@contextmanager
def replaced(places: Iterable[Place]) -> Iterator[None]:
    """Hold other values in attributes or under keys within the block."""
    with ExitStack() as stack:
        for holder, key, value in places:
            read, put = (getitem, setitem) if isinstance(holder, dict) else (getattr, setattr)
            stack.callback(put, holder, key, read(holder, key))
            put(holder, key, value)
        yield


@contextmanager
def hooked(
    modules: Iterable[Any],
    before: Callable[[Any, Any], Any] | None = None,
    after: Callable[[Any, Any], Any] | None = None,
) -> Iterator[None]:
    """Change the arguments of modules, and their outputs given these, within the block."""
    with ExitStack() as stack:
        for module in modules:
            if before is not None:
                own = module.register_forward_pre_hook(lambda _, *given: before(*given), with_kwargs=True)
                stack.callback(own.remove)
            if after is not None:
                stack.callback(module.register_forward_hook(lambda _, *given: after(*given)).remove)
        yield


def giving(modules: Iterable[Any], change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Change the floats that modules return, within the block."""
    return hooked(modules, after=lambda _, output: _mapped(output, change))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the floats of a tensor, or of all tensors in a list, tuple, dict or model output."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda one: change(one) if one.is_floating_point() else one, value)


def tensors(module: Any, change: Callable[[Any], Any]) -> Iterator[Place]:
    """Yield a module's parameters, changed. Modules that share them keep the original."""
    import torch

    for part in module.modules():
        for key, value in part._parameters.items():
            if value is not None and value.is_floating_point():
                yield part._parameters, key, torch.nn.Parameter(change(value.data), requires_grad=False)


def changed_weights(module: Any, change: Callable[[Any], Any]) -> ModelChange:
    """Return a change of a model whose parameters in a module are changed."""
    return lambda: replaced([*tensors(module, change)])


def changing(
    case: Case, text: str, make: Callable[..., AbstractContextManager[None]], *args: Any, part: str = ""
) -> Trial:
    """Return the trial of a changed model. A change of vision matters from the first image on."""
    starts = [span.start for span in case.sample.media_spans] if part.startswith((VISION, "image")) else [0]
    since = min(starts, default=len(case.sample))
    return Trial(f"the sampler{text}", model=partial(make, *args), since=since)


# --- attention and dtypes


def attention(case: Case) -> Iterator[Trial]:
    """Yield other masks of attention."""
    import torch

    model, length, spans = case.trainer.model, len(case.sample), case.sample.media_spans
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) & {"full_attention", "sliding_attention"}

    def trial(statement: str, seen: Any, since: int = 0, near: Any = None) -> Trial:
        def mask(seen: Any) -> Any:
            zeros = torch.zeros(1, 1, *seen.shape, dtype=model.dtype)
            return zeros.masked_fill(~seen, torch.finfo(model.dtype).min).to(model.device)

        def inputs(given: dict[str, Any]) -> None:
            # A mask for each kind of layers, if the model has several.
            windowed, count = seen if near is None else seen & near, given["input_ids"].shape[-1]
            masks = {"full_attention": seen, "sliding_attention": windowed}
            own = {kind: mask(one[:count, :count]) for kind, one in masks.items()}
            several = {kind: own[kind] for kind in kinds} if len(kinds) > 1 else None
            given["attention_mask"] = several or own["sliding_attention"]

        return Trial(f"the sampler's {statement}", inputs=inputs, since=since)

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
    unseen = {described(span): (span.start, span.stop) for span in spans}
    turns = bounds(case, length)
    unseen |= {f"the tokens before {at}, of earlier turns,": (0, at) for at in turns[1:]}
    unseen |= {f"the turn of tokens {first} to {last - 1}": (first, last) for first, last in pairwise(turns)}
    for text, (start, stop) in unseen.items():
        hidden = base.clone()
        hidden[stop:, start:stop] = False
        yield trial(f"later tokens did not see {text} (attention_mask)", hidden, stop, near)
    beside = [] if own is None else [own + 1, own - 1]  # whether a window counts its own token
    for window in beside:
        yield trial(f"sliding window was {window}, not {own}", base, 0, distance < window)
    for window in dict.fromkeys([*beside, *(2**power for power in range(3, 16))]):
        if window < length:
            yield trial(f"tokens attended to the last {window} only", base & (distance < window))


@contextmanager
def in_dtype(module: Any, dtype: Any) -> Iterator[None]:
    """Compute a module in another dtype within the block, its buffers apart. Inputs and outputs are cast."""
    import torch

    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    low = lambda args, options: _mapped((args, dict(options)), lambda one: one.to(dtype))  # noqa: E731
    cast = lambda _, output: _mapped(output, lambda one: one.to(own))  # noqa: E731
    with hooked([module], low, cast), replaced([*tensors(module, lambda data: data.to(dtype))]):
        yield


@contextmanager
def other_attention(model: Any) -> Iterator[None]:
    """Compute attention by another kernel within the block, if the model has one."""
    own = model.config._attn_implementation
    with ExitStack() as stack:
        with suppress(ValueError, ImportError, AttributeError):
            model.set_attn_implementation("eager" if own != "eager" else "sdpa")
            stack.callback(model.set_attn_implementation, own)
        yield


def other_dtypes(model: Any) -> dict[str, Any]:
    """Return the dtypes of samplers by name, but the model's own."""
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return {name: dtype for name, dtype in dtypes.items() if dtype != model.dtype}


def whole_dtype(case: Case) -> Iterator[Trial]:
    """Yield the whole model in another dtype."""
    for name, dtype in other_dtypes(case.trainer.model).items():
        yield Trial(f"the sampler computed in {name}", model=partial(in_dtype, case.trainer.model, dtype))


def part_dtype(case: Case) -> Iterator[Trial]:
    """Yield parts of the model, features, or keys and values in another dtype."""
    import torch

    model, others = case.trainer.model, other_dtypes(case.trainer.model)
    for name, dtype in others.items():
        for part, module in parts_of(model).items():
            yield changing(case, f" computed its {part} in {name}", in_dtype, module, dtype, part=part)
    language = parts_of(model).get(LANGUAGE, model)
    projections = [one for key, one in language.named_modules() if key.endswith(("k_proj", "v_proj"))]
    cache = "kept keys and values (KV cache) in"
    low = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
    for name, dtype in (others | low).items():
        for part, modules in _features(model).items():
            text = f"'s {part} were rounded to {name}"
            yield changing(case, text, giving, modules, partial(through, dtype), part=part)
        yield changing(case, f" {cache} {name}", _cached_in, model, dtype)
        text = f" {cache} {name}, before they were rotated"
        yield changing(case, text, giving, projections, partial(through, dtype))


def _features(model: Any) -> dict[str, list[Any]]:
    """Return the modules that make the inputs of the language model."""
    # Of several in a row, the last one produces the features.
    towers = [module for name, module in parts_of(model).items() if name.startswith(VISION)]
    return {"image features": towers[-1:], "embeddings": [model.get_input_embeddings()]}


def through(dtype: Any, data: Any) -> Any:
    """Round a tensor to another dtype."""
    return data.to(dtype).to(data.dtype)


def _cached_in(model: Any, dtype: Any) -> AbstractContextManager[None]:
    """Round keys and values of the language model as a cache of another dtype does, within the block."""
    return attending(model, lambda *pair: tuple(through(dtype, one) for one in pair))


@contextmanager
def attending(model: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> Iterator[None]:
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

    with ExitStack() as stack:  # two of these blocks may be nested
        stack.callback(*((KERNELS.__delitem__, name) if own is None else (KERNELS.__setitem__, name, own)))
        KERNELS[name] = attend
        yield


def recurrent_state(case: Case) -> Iterator[Trial]:
    """Yield completions without the state that linear attention carries from the tokens before them."""
    model, family = case.trainer.model, case.trainer.family
    layers = recurrent_layers(model, family) if family.recurrent else []
    kinds = {"convolutions": ["conv_states"], "recurrent states": ["recurrent_states"]}
    for text, lost in (kinds | {"states": [*chain(*kinds.values())]}).items() if layers else ():
        of, starts = f"the sampler's {text} of linear attention were lost", [start for start, _ in case.runs]
        without = partial(partial, losing, model, layers, lost)
        own = [Trial("", case.of_run(n), model=without(starts[n : n + 1])) for n in case.departing_runs]
        yield Trial(f"{of} between each prompt and its completion", parts=own, since=starts[0])
        anew = {f"before completion {number}": [start] for number, start in enumerate(starts)}
        anew |= {f"after completion {number}": [stop] for number, (_, stop) in enumerate(case.runs[:-1])}
        for where, at in (anew | {"before each completion": starts}).items():
            yield Trial(f"{of} {where}", model=without(at), since=at[0])


@contextmanager
def losing(model: Any, layers: Sequence[Any], lost: Sequence[str], starts: Sequence[int]) -> Iterator[None]:
    """Run recurrent layers part by part within the block, some of their states 0 at each start."""
    import torch
    from transformers import DynamicCache

    def run(layer: Any, hidden_states: Any, **options: Any) -> Any:
        cache, out = DynamicCache(config=model.config.get_text_config()), list[Any]()
        length = hidden_states.shape[1]
        for start, stop in pairwise((0, *(at for at in starts if at < length), length)):
            given = options | {"cache_params": cache, "attention_mask": None}
            out.append(type(layer).forward(layer, hidden_states[:, start:stop], **given))
            for name in lost:
                for state in getattr(cache.layers[layer.layer_idx], name).values():
                    state.zero_()
        return torch.cat(out, 1)

    with replaced([(layer, "forward", partial(run, layer)) for layer in layers]):
        yield


def left_out(case: Case) -> Iterator[Trial]:
    """Yield the model without a layer, the layers from one on, a module beside them, or biases."""
    import torch

    inside = set[int]()
    for part, root in parts_of(case.trainer.model).items():
        lists = [one for one in root.modules() if isinstance(one, torch.nn.ModuleList)]
        layers, lost = list(max(lists, key=len, default=[])), dict[str, list[Any]]()
        inside |= {id(module) for layer in layers for module in layer.modules()}
        # Without attention and perceptron, a layer hands on its input.
        added = [
            [one for one in layer.children() if any(p.ndim > 1 for p in one.parameters())] for layer in layers
        ]
        for number, own in enumerate(added):
            lost[f"layer {number} of the {part}"] = own
            if 0 < number < len(layers) - 1:
                lost[f"the layers of the {part} from {number} on"] = [*chain(*added[number:])]
        for name, module in root.named_modules():
            holds_layers = any(id(one) in inside for one in module.modules())
            if name and name.count(".") < 2 and not holds_layers and any(True for _ in module.parameters()):
                lost[f"{name.replace('_', ' ').split('.')[0]} ({name}) of the {part}"] = [module]
        for what, modules in lost.items():
            trial = changing(case, f" left out {what}", giving, modules, lambda data: data * 0, part=part)
            yield trial._replace(place=what if what.startswith("layer ") else "")
        named = [(one._parameters, one._parameters.get("bias")) for one in root.modules()]
        biases = [
            (of, "bias", torch.nn.Parameter(0 * one.data, False)) for of, one in named if one is not None
        ]
        if biases:
            yield changing(case, f" left out the biases of the {part}", replaced, biases, part=part)


def settings(case: Case) -> Iterator[Trial]:
    """Yield the model with other settings of its configuration."""
    from transformers.activations import ACT2FN

    model = case.trainer.model
    for part, root in parts_of(model).items():
        for kind in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"):
            names = [(one, name) for one in root.modules() for name in ("act_fn", "activation_fn")]
            places = [(one, name, ACT2FN[kind]) for one, name in names if hasattr(one, name)]
            text = f"'s activation function (hidden_act) was {kind} in its {part}"
            yield from [changing(case, text, replaced, places, part=part)] if places else ()
        norms: dict[str, list[Any]] = {}
        for name, one in root.named_modules():
            dims = {value.ndim for value in one.parameters()}
            if dims == {1} and not [*one.children()]:
                norms.setdefault(name.rpartition(".")[2], []).append(one)
        for name, several in norms.items():
            passing = partial(hooked, after=lambda args, _: args[0])
            yield changing(case, f" did not normalise in {name} of its {part}", passing, several, part=part)
        own_norms = [one for several in norms.values() for one in several if hasattr(one, "weight")]
        for kind, add in {"not as an offset from 1": -1, "as an offset from 1": 1}.items():
            places = [(one.weight, "data", one.weight.data + add) for one in own_norms]
            text = f" took weights of norms {kind} in its {part}"
            yield changing(case, text, replaced, places, part=part)
    for one in model.modules():
        if isinstance(indexes := getattr(one, "fullatt_block_indexes", None), list):
            for kind, blocks in {"no windows": range(999), "windows in all layers": range(0)}.items():
                text = f"'s vision had {kind} of attention, not windows but in layers {indexes}"
                yield changing(case, text, replaced, [(one, "fullatt_block_indexes", blocks)], part=VISION)
        if getattr(one, "scalar_embed_scale", 1.0) != 1.0:
            places = [(one, "embed_scale", one.embed_scale * 0 + 1)]
            yield changing(case, "'s embeddings were not scaled", replaced, places)
    yield from _other_numbers(case)


def _other_numbers(case: Case) -> Iterator[Trial]:
    """Yield the model with another of the numbers that its modules hold, and with scaled features."""
    for part, root in parts_of(case.trainer.model).items():
        held: dict[tuple[str, float], list[Any]] = {}
        for module in root.modules():
            for name, value in vars(module).items():
                if type(value) is float and value > 0 and "dropout" not in name and name not in _NO_SETTINGS:
                    held.setdefault((name, value), []).append(module)
        for (name, value), modules in held.items():

            def with_number(number: float, key: str = name, to: list[Any] = modules, of: str = part) -> Trial:
                text = f"'s {key} was {number:.4g}, not {getattr(to[0], key):.4g}, in its {of}"
                return changing(case, text, replaced, [(one, key, number) for one in to], part=of)

            if "eps" in name:
                yield from fitted(case, with_number, 1e-12, 1.0, value, 1e-3, 1e-12)
            else:
                yield from fitted(case, with_number, value / _MAX_FACTOR, value * _MAX_FACTOR, value)
    for text, modules in _features(case.trainer.model).items():

        def multiplied(factor: float, text: str = text, modules: list[Any] = modules) -> Trial:
            statement = f"'s {text} were multiplied (scaled) by {factor:.4g}"
            return changing(case, statement, giving, modules, lambda data: data * factor, part=text)

        yield from fitted(case, multiplied, 1 / _MAX_FACTOR, _MAX_FACTOR, 1.0) if modules else ()
