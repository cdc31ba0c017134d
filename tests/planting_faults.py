"""Changes of conversations, pixels, models and numbers from which the tables make their faults."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from planting import Context, Part, Parts, World


def without(kind: str) -> Callable[[Parts, Context], Parts]:
    return lambda parts, _: [part for part in parts if part.kind != kind]


def edited(
    kind: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Callable[[Parts, Context], Parts]:
    """Parts of a kind with other tokens."""
    return lambda parts, _: [replace(one, ids=change(one.ids)) if one.kind == kind else one for one in parts]


def cut_front(tokens: int) -> Callable[[Parts, Context], Parts]:
    def cut(parts: Parts, _: Context) -> Parts:
        left, out = tokens, []
        for part in parts:
            taken = min(left, len(part.ids))
            out.append(replace(part, ids=part.ids[taken:]) if taken else part)
            left -= taken
        return out

    return cut


def target_size(world: World, image: Image.Image) -> tuple[int, int]:
    """Width and height to which the processor resizes a picture that becomes one tile or patches."""
    item = world.item(image)
    if len(item.grid) == 3:
        return item.grid[2] * item.layout.patch, item.grid[1] * item.layout.patch
    height, width = item.tensors()["pixel_values"].shape[-2:]
    return width, height


def resampled(filter: Image.Resampling) -> Callable[[Image.Image, int, Context], Image.Image]:
    """A picture that is resized by another filter; the processor then leaves its size."""
    return lambda image, _, ctx: image.resize(target_size(ctx.world, image), filter)


def channels(inputs: dict[str, Any]) -> Any:
    """A view of the pixels as `(n, 3, ...)`."""
    pixels = inputs["pixel_values"]
    return pixels.reshape(len(pixels), 3, -1) if pixels.ndim == 2 else pixels.movedim(-3, 1)


def on_channels(change: Callable[[Any], Any]) -> Callable[[dict[str, Any], Context], None]:
    """Change of the pixels as `(n, 3, ...)`."""

    def edit(inputs: dict[str, Any], _: Context) -> None:
        pixels = inputs["pixel_values"]
        new = change(channels(inputs).clone())
        inputs["pixel_values"] = new.reshape(pixels.shape) if pixels.ndim == 2 else new.movedim(1, -3)

    return edit


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def normalised(mean: Sequence[float], std: Sequence[float]) -> Callable[[Any], Any]:
    """From mean and deviation 0.5 to others."""

    def change(pixels: Any) -> Any:
        shape = (1, 3, *[1] * (pixels.ndim - 2))
        return (pixels * 0.5 + 0.5 - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)

    return change


def numbered_as_text(inputs: dict[str, Any], _: Context) -> None:
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["position_ids"])


def completion_shifted(by: int) -> Callable[[dict[str, Any], Context], None]:
    def shift(inputs: dict[str, Any], ctx: Context) -> None:
        positions = inputs["position_ids"].clone()
        positions[..., len(ctx.prompt) :] += by
        inputs["position_ids"] = positions

    return shift


def rotary(model: Any) -> Iterator[Any]:
    """The language model's rotary embeddings."""
    for name, module in model.named_modules():
        if hasattr(module, "inv_freq") and "visual" not in name and "vision" not in name:
            yield module


def llama3(length: int, values: Any) -> Any:
    """Frequencies scaled by 8 beyond so many positions, as in Llama 3.1."""
    smooth = ((length * values / (2 * np.pi) - 1) / 3).clamp(0, 1)
    return values * (smooth + (1 - smooth) / 8)


def frequencies(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def edit(model: Any) -> Any:
        for module in rotary(model):
            module.inv_freq = change(module.inv_freq)
        return model

    return edit


def weights_of(model: Any) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained_further(model: Any, size: float, seed: int, only: str = "") -> Any:
    """The model after a few steps of training, whose names hold `only`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if only in name:
                parameter.add_(noise * float(parameter.std() if parameter.ndim > 1 else 0.1), alpha=size)
    return model


def earlier(*only: str, size: float = 0.02) -> Callable[[Any], Any]:
    """The sampler's model is one of an earlier step, or has parts of it."""

    def edit(model: Any) -> Any:
        old = trained_further(deepcopy(model), size, 41)
        if not only:
            return old
        with torch.no_grad():
            kept = dict(old.named_parameters())
            for name, parameter in model.named_parameters():
                if any(part in name for part in only):
                    parameter.copy_(kept[name])
        return model

    return edit


def kept_steps(world: World, _: Any) -> dict[str, Any]:
    """Weights that a trainer keeps of the last steps."""
    older = trained_further(deepcopy(world.model), 0.03, 40)
    return {
        "weights": {"step 41": weights_of(earlier()(deepcopy(world.model))), "step 40": weights_of(older)}
    }


def of_language_model(name: str) -> bool:
    """Whether a parameter is a query's or value's of the language model."""
    return (
        ("q_proj.weight" in name or "v_proj.weight" in name) and "visi" not in name and "visual" not in name
    )


def adapted(model: Any, targets: Callable[[str], bool] = of_language_model) -> Any:
    """The model with a merged adapter, which `disable_adapter` takes out, as of PEFT."""
    generator = torch.Generator().manual_seed(5)
    deltas = {}
    for name, parameter in model.named_parameters():
        if targets(name):
            down = torch.randn(4, parameter.shape[1], generator=generator)
            up = torch.randn(parameter.shape[0], 4, generator=generator)
            deltas[name] = up @ down * 0.02

    def apply(to: Any, factor: float, only: str = "") -> None:
        with torch.no_grad():
            for name, parameter in to.named_parameters():
                if name in deltas and only in name:
                    parameter.add_(deltas[name], alpha=factor)

    @contextmanager
    def disable_adapter() -> Iterator[None]:
        apply(model, -1)
        try:
            yield
        finally:
            apply(model, 1)

    apply(model, 1)
    model.add_adapter_times = apply
    model.disable_adapter = disable_adapter
    return model


def rounded(dtype: Any) -> Callable[[Any], Any]:
    """Weights of linear layers in eight bits, each with a scale."""

    def edit(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                    scale = parameter.abs().max() / torch.finfo(dtype).max
                    parameter.copy_((parameter / scale).to(dtype).float() * scale)
        return model

    return edit


def nucleus(logits: Any, share: float) -> Any:
    """Logits of the most probable tokens that hold `share` of the probability."""
    order = logits.argsort(descending=True)
    before = logits[order].softmax(-1).cumsum(-1) - logits[order].softmax(-1)
    out = torch.full_like(logits, -torch.inf)
    chosen = order[before < share]
    out[chosen] = logits[chosen]
    return out


def repetition(penalty: float, prompt: bool = True) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, ctx: Context) -> Any:
        seen = sorted({*(ctx.prompt if prompt else ()), *ctx.drawn})
        own = logits[seen]
        logits[seen] = torch.where(own > 0, own / penalty, own * penalty)
        return logits

    return rule


def inserted(after: str, ids: Sequence[int], *, first: bool = True) -> Callable[[Parts, Context], Parts]:
    """Tokens after the first, or each, part of a kind."""

    def insert(parts: Parts, _: Context) -> Parts:
        out: list[Part] = []
        done = False
        for part in parts:
            out.append(part)
            if part.kind == after and not (first and done):
                out.append(Part("inserted", tuple(ids)))
                done = True
        return out

    return insert


def as_jpeg(quality: int) -> Callable[[Image.Image, int, Context], Image.Image]:
    def encode(image: Image.Image, *_: Any) -> Image.Image:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=quality)
        return Image.open(io.BytesIO(data.getvalue())).convert("RGB")

    return encode


def cache_as(dtype: Any) -> Callable[[Any], Any]:
    """Keys and values of the language model in another dtype."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        return output.to(dtype).to(output.dtype)

    def edit(model: Any) -> Any:
        for name, module in model.named_modules():
            if name.endswith(("k_proj", "v_proj")) and "vis" not in name:
                module.register_forward_hook(hook)
        return model

    return edit


def top_k(logits: Any, count: int) -> Any:
    out = torch.full_like(logits, -torch.inf)
    best = logits.topk(count).indices
    out[best] = logits[best]
    return out


def min_p(logits: Any, share: float) -> Any:
    probabilities = logits.softmax(-1)
    return torch.where(probabilities >= share * probabilities.max(), logits, -torch.inf)


def only(tokens: Sequence[int]) -> Callable[[Any, Context], Any]:
    def rule(logits: Any, _: Context) -> Any:
        out = torch.full_like(logits, -torch.inf)
        out[list(tokens)] = logits[list(tokens)]
        return out

    return rule


def per_turn(change: Callable[[Any], Any]) -> Callable[[Any, Context], Any]:
    def record(values: Any, ctx: Context) -> Any:
        return np.concatenate([change(part) for part in np.split(values, np.cumsum(ctx.lengths)[:-1])])

    return record
