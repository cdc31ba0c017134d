"""Variations of what the sampler computed: positions, attention, dtypes and weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

from mmrender.audit.trial import Case, Trial, Variation, Weights, scopes

_THETAS: Final = (1e4, 5e5, 1e6, 5e6, 1e7)
_MOST_LAYERS: Final = 64
_VISION: Final = "vision"


def _positions(case: Case) -> Iterator[Trial]:
    """Yield other numbers of tokens: `position_ids` of shape `(axes, 1, n)`, or `(1, n)`."""
    import torch

    sample = case.sample
    spans, first = sample.media_spans, case.runs[0][0]
    since = spans[0].start if spans else 0

    def numbered(statement: str, change: Callable[[Any], None], at: int, image: int | None = None) -> Trial:
        def inputs(given: dict[str, Any]) -> None:
            given["position_ids"] = given["position_ids"].clone()
            change(given["position_ids"])

        return Trial(statement, inputs=inputs, token=at, since=at, image=image)

    def by_index(ids: Any, start: int, stop: int | None = None) -> None:
        stop = len(sample) if stop is None else stop
        ids[..., start:stop] = torch.arange(start, stop, device=ids.device)

    yield Trial(
        "the sampler numbered its tokens as the model does by itself",
        inputs=lambda given: given.pop("position_ids", None),
        since=since,
        token=since,
    )
    if case.trainer.family.mrope is not None and spans:
        yield numbered(
            "the sampler numbered its tokens one by one, on one axis", lambda ids: by_index(ids, 0), since
        )
        yield numbered(
            "the sampler numbered tokens by their index from the first completion on (no rope delta)",
            lambda ids: by_index(ids, first),
            first,
        )

        def completions_by_index(ids: Any) -> None:
            for start, stop in case.runs:
                by_index(ids, start, stop)

        if len(case.runs) > 1:
            yield numbered(
                "the sampler numbered the tokens of completions by their index (no rope delta)",
                completions_by_index,
                first,
            )
            for number in case.departing_runs:
                start, stop = case.runs[number]
                yield numbered(
                    f"the sampler numbered the tokens of completion {number} by their index (no rope delta)",
                    partial(by_index, start=start, stop=stop),
                    start,
                )
        for name, order in {"height and width": (0, 2, 1), "time and height": (1, 0, 2)}.items():
            yield numbered(
                f"the sampler's positions had {name} exchanged",
                lambda ids, order=order: ids.copy_(ids[list(order)]),  # type: ignore[misc]
                since,
            )
        for axes, name in (((0,), "time"), ((1, 2), "height and width")):

            def flat(ids: Any, axes: tuple[int, ...] = axes) -> None:
                for span in spans:
                    ids[list(axes), :, span.start : span.stop] = ids[0, :, span.start : span.start + 1]

            if axes != (0,):
                yield numbered(f"the sampler's images had one number for {name}", flat, since)

        def as_one(ids: Any, last: bool) -> None:
            for span in spans:
                step = 1 if last else span.stop - span.start
                following = ids[0, 0, span.start] + step
                if span.stop < len(sample):
                    ids[..., span.stop :] += following - ids[0, 0, span.stop]

        yield numbered("the sampler counted an image as one position", partial(as_one, last=True), since)
        yield numbered(
            "the sampler counted an image as one position a token", partial(as_one, last=False), since
        )
    for by in (1, -1, 2, -2):
        for runs, which in scopes(case):

            def moved(ids: Any, by: int = by, start: int = runs[0][0]) -> None:
                ids[..., start:] += by

            yield numbered(f"the sampler's positions were {by:+d} from {which} on", moved, runs[0][0])
        for span in case.suspects:

            def after(ids: Any, by: int = by, start: int = span.stop) -> None:
                ids[..., start:] += by

            yield numbered(
                f"the sampler's positions were {by:+d} after {span.modality} {span.position}",
                after,
                span.stop,
                span.position,
            )
    for span in case.suspects:

        def one_by_one(ids: Any, start: int = span.start, stop: int = span.stop) -> None:
            count = torch.arange(stop - start, device=ids.device)
            ids[..., start:stop] = ids[..., start : start + 1] + count

        if case.trainer.family.mrope is not None:
            yield numbered(
                f"the sampler numbered the tokens of {span.modality} {span.position} one by one",
                one_by_one,
                span.start,
                span.position,
            )


def _attention(case: Case) -> Iterator[Trial]:
    import torch

    length, spans = len(case.sample), case.sample.media_spans

    def masked(seen: Any) -> Callable[[dict[str, Any]], None]:
        def inputs(given: dict[str, Any]) -> None:
            dtype = case.trainer.model.dtype
            mask = torch.zeros(1, 1, length, length, dtype=dtype)
            given["attention_mask"] = mask.masked_fill(~seen, torch.finfo(dtype).min).to(
                given["input_ids"].device
            )

        return inputs

    causal = torch.ones(length, length, dtype=torch.bool).tril()
    blocks = causal.clone()
    for span in spans:
        blocks[span.start : span.stop, span.start : span.stop] = True
    if spans:
        yield Trial(
            "the sampler's images saw themselves in both directions",
            inputs=masked(blocks),
            since=spans[0].start,
        )
        yield Trial(
            "the sampler's images saw themselves only backwards", inputs=masked(causal), since=spans[0].start
        )
    yield Trial("the sampler attended in both directions", inputs=masked(torch.ones_like(causal)))
    own = getattr(case.trainer.model.config.get_text_config(), "sliding_window", None)
    for window in dict.fromkeys([own, 4096, 1024]):
        if window is not None and window < length:
            near = torch.arange(length)[None] > torch.arange(length)[:, None] - window
            yield Trial(
                f"the sampler attended to the last {window} tokens only", inputs=masked(causal & near)
            )
    for number in case.departing_runs:
        start, stop = case.runs[number]
        for before in {span.stop for span in case.suspects if span.stop < start}:
            cut = causal.clone()
            cut[start:stop, :before] = False
            yield Trial(
                f"completion {number} attended to nothing before token {before}",
                inputs=masked(cut),
                token=start,
                since=start,
            )


def parts_of(model: Any) -> dict[str, Any]:
    """Return the parts of a model that are computed or loaded apart: vision, language model and head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base = getattr(model, model.base_model_prefix, model)
    found: dict[str, Any] = {}
    for name, child in base.named_children():
        language = any(module is embedding for module in child.modules())
        found["language model" if language else f"{_VISION} ({name})"] = child
    towers = [child for name, child in found.items() if name.startswith(_VISION)]
    if len(towers) > 1:
        import torch

        found[_VISION] = torch.nn.ModuleList(towers)
    if head is not None:
        found["head"] = head
    return found


@contextmanager
def _held_as(module: Any, change: Callable[[Any], Any], *, buffers: bool = False) -> Iterator[None]:
    """Give a module other parameters within the block; what shares them elsewhere keeps its own."""
    import torch

    places = [(part._parameters, key) for part in module.modules() for key in part._parameters]
    if buffers:
        places += [(part._buffers, key) for part in module.modules() for key in part._buffers]
    kept = [(held, key, held[key]) for held, key in places]
    kept = [
        (held, key, value) for held, key, value in kept if value is not None and value.is_floating_point()
    ]
    try:
        for held, key, value in kept:
            changed = change(value.data)
            is_parameter = isinstance(value, torch.nn.Parameter)
            held[key] = torch.nn.Parameter(changed, requires_grad=False) if is_parameter else changed
        yield
    finally:
        for held, key, value in kept:
            held[key] = value


@contextmanager
def in_dtype(module: Any, dtype: Any, *, buffers: bool = False) -> Iterator[None]:
    """Compute a module in another dtype within the block; what goes in and comes out is cast."""
    import torch

    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

    def cast(value: Any, wanted: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(wanted) if value.is_floating_point() else value
        if isinstance(value, list | tuple):
            return type(value)(cast(one, wanted) for one in value) if type(value) in (list, tuple) else value
        return value

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return cast(args, dtype), {name: cast(value, dtype) for name, value in kwargs.items()}

    def leave(_: Any, __: Any, output: Any) -> Any:
        if hasattr(output, "keys"):
            for name in list(output.keys()):
                output[name] = cast(output[name], own)
            return output
        return cast(output, own)

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        with _held_as(module, lambda data: data.to(dtype), buffers=buffers):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def rounded_weights(module: Any, dtype: Any) -> AbstractContextManager[None]:
    """Round the weights of a module to another dtype within the block, and compute in their own."""
    return _held_as(module, lambda data: data.to(dtype).to(data.dtype))


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


def whole_in(dtype: Any) -> Callable[[Any], AbstractContextManager[None]]:
    """Return a change of the model that computes all of it in another dtype."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        kept = [(one, one.data) for one in model.parameters() if one.is_floating_point()]
        hook = model.register_forward_pre_hook(_cast_pixels(dtype), with_kwargs=True)
        try:
            for tensor, data in kept:
                tensor.data = data.to(dtype)
            yield
        finally:
            for tensor, data in kept:
                tensor.data = data
            hook.remove()

    return change


def _cast_pixels(dtype: Any) -> Callable[..., Any]:
    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        cast = {
            name: value.to(dtype)
            if hasattr(value, "is_floating_point") and value.is_floating_point()
            else value
            for name, value in kwargs.items()
        }
        return args, cast

    return enter


def _other_dtypes(model: Any) -> dict[str, Any]:
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return {name: dtype for name, dtype in dtypes.items() if dtype != model.dtype}


def _whole_dtype(case: Case) -> Iterator[Trial]:
    for name, dtype in _other_dtypes(case.trainer.model).items():
        yield Trial(f"the sampler computed in {name}", model=whole_in(dtype))


def _part_dtype(case: Case) -> Iterator[Trial]:
    import torch

    model = case.trainer.model
    first_image = min((span.start for span in case.sample.media_spans), default=len(case.sample))
    others = _other_dtypes(model) | ({"float32": torch.float32} if model.dtype != torch.float32 else {})
    for name, dtype in others.items():
        for part, module in parts_of(model).items():
            for buffers in (False, True) if any(True for _ in module.buffers()) else (False,):
                text = f"the sampler computed its {part} in {name}" + (", buffers too" if buffers else "")
                yield Trial(
                    text,
                    model=lambda _, m=module, d=dtype, b=buffers: in_dtype(m, d, buffers=b),  # type: ignore[misc]
                    since=first_image if part.startswith(_VISION) else 0,
                )


def _rounded(case: Case) -> Iterator[Trial]:
    import torch

    model = case.trainer.model
    for name, dtype in {**_other_dtypes(model), "float8_e4m3fn": torch.float8_e4m3fn}.items():
        for part, module in {"model": model, **parts_of(model)}.items():
            yield Trial(
                f"the weights of the sampler's {part} were rounded to {name}",
                model=lambda _, m=module, d=dtype: rounded_weights(m, d),  # type: ignore[misc]
            )


@contextmanager
def _with_weights(tensors: Mapping[Any, Any]) -> Iterator[None]:
    """Give parameters other values within the block."""
    kept = [(parameter, parameter.data) for parameter in tensors]
    try:
        for parameter, value in tensors.items():
            parameter.data = value.to(parameter.device, parameter.dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


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
        groups = _groups(changed)
        for part, keys in groups.items():
            if len(keys) < len(changed):
                text = f"the sampler had the weights of {name} in {part}"
                yield _other_weights(text, named, {key: changed[key] for key in keys})
                rest = {key: value for key, value in changed.items() if key not in keys}
                text = f"the sampler had the weights of {name} everywhere but in {part}"
                yield _other_weights(text, named, rest)


def _other_weights(statement: str, named: Mapping[str, Any], changed: Weights) -> Trial:
    tensors = {named[key]: value for key, value in changed.items()}
    return Trial(statement, model=lambda _: _with_weights(tensors))


def _groups(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return parameters by the layer that holds them, else by module, and by the part of the model."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        index = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        name = ".".join(parts[: index + 1]) if index is not None else ".".join(parts[:-1])
        groups.setdefault(name, []).append(key)
        if index is not None and index > 1:
            groups.setdefault(".".join(parts[: index - 1]), []).append(key)
    return dict(sorted(groups.items())[:_MOST_LAYERS])


def _adapter(case: Case) -> Iterator[Trial]:
    model = case.trainer.model
    disable = getattr(model, "disable_adapter", None)
    if disable is not None:
        yield Trial(
            "the sampler's adapter was not merged: it had the base weights", model=lambda _: disable()
        )
    scaled = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    for factor in (0.0, 0.5, 2.0) if scaled else ():

        @contextmanager
        def change(_: Any, factor: float = factor) -> Iterator[None]:
            kept = [(module, dict(module.scaling)) for module in scaled]
            try:
                for module, scaling in kept:
                    module.scaling = {name: value * factor for name, value in scaling.items()}
                yield
            finally:
                for module, scaling in kept:
                    module.scaling = scaling

        text = f"the sampler's adapter had {factor:g} of the trainer's scale"
        yield Trial(text if factor else "the sampler's adapter was not applied", model=change)


def _head(case: Case) -> Iterator[Trial]:
    model = case.trainer.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    if head.weight.shape == embedding.weight.shape:
        yield Trial(
            "the sampler's head was tied to its embedding",
            model=lambda _: _with_weights({head.weight: embedding.weight.data}),
        )
        yield Trial(
            "the sampler's embedding was tied to its head",
            model=lambda _: _with_weights({embedding.weight: head.weight.data}),
        )


def decoder_layers(model: Any) -> list[Any]:
    """Return the layers of the language model, in order; empty where they are not found."""
    import torch

    language = parts_of(model).get("language model")
    lists = (
        []
        if language is None
        else [module for module in language.modules() if isinstance(module, torch.nn.ModuleList)]
    )
    return list(max(lists, key=len, default=[]))


@contextmanager
def _skipping(*modules: Any) -> Iterator[None]:
    """Give out what went in, within the block."""

    def leave(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    hooks = [module.register_forward_hook(leave, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(case: Case) -> Iterator[Trial]:
    layers = decoder_layers(case.trainer.model)
    for number, layer in enumerate(layers[:_MOST_LAYERS]):
        yield Trial(f"the sampler left out layer {number}", model=lambda _, one=layer: _skipping(one))  # type: ignore[misc]
    language = parts_of(case.trainer.model).get("language model")
    norm = getattr(language, "norm", None)
    if norm is not None:
        yield Trial("the sampler left out the last normalisation", model=lambda _: _skipping(norm))


def _rope(case: Case) -> Iterator[Trial]:
    language = parts_of(case.trainer.model).get("language model")
    if language is None:
        return
    held = [module for module in language.modules() if getattr(module, "inv_freq", None) is not None]
    config = case.trainer.model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    theta = given.get("rope_theta", getattr(config, "rope_theta", None)) if isinstance(given, dict) else None
    if not held or not theta:
        return

    @contextmanager
    def change(_: Any, base: float | None = None, scale: float = 1.0) -> Iterator[None]:
        import math

        kept = [(module, module.inv_freq) for module in held]
        power = 1.0 if base is None else math.log(base) / math.log(theta)
        try:
            for module, frequencies in kept:
                module.inv_freq = frequencies**power * scale
            yield
        finally:
            for module, frequencies in kept:
                module.inv_freq = frequencies

    for base in _THETAS:
        if base != theta:
            yield Trial(
                f"the sampler's rotary base was {base:g}, not {theta:g}", model=partial(change, base=base)
            )
    for factor in (0.5, 0.25, 0.125, 2.0, 4.0, 8.0):
        yield Trial(f"the sampler's positions were scaled by {factor:g}", model=partial(change, scale=factor))


COMPUTED_VARIATIONS: Final[tuple[Variation, ...]] = (
    Variation("dtype", "precision", "all of the model in another dtype", _whole_dtype),
    Variation("dtype of a part", "precision", "vision, language model or head in another dtype", _part_dtype),
    Variation("rounded weights", "precision", "weights rounded to bfloat16, float16 or float8", _rounded),
    Variation(
        "positions", "positions", "one axis, no rope delta, axes exchanged, one or two off", _positions
    ),
    Variation(
        "attention", "masks", "images or text in both directions, a window, a prompt cut off", _attention
    ),
    Variation("head", "weights", "a head tied to the embedding", _head),
    Variation("adapter", "weights", "an adapter not merged, or of another scale", _adapter),
    Variation("weights", "weights", "other weights, all or in one layer; needs `weights`", _weights),
    Variation("rotary base", "positions", "another base or scale of rotary positions", _rope),
    Variation("layer left out", "weights", "a layer or the last normalisation left out", _layers),
)
