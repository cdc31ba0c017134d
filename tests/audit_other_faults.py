"""Faults of further kinds, planted to see that what an audit does not know it does not name."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import (
    LETTERS,
    Planted,
    Seen,
    as_trained,
    computed_by,
    images,
    numbered,
    picture,
    pixels_of,
    reframed,
    sampled_by,
    scored,
    seen_as,
    showing,
    values_of,
)
from audit_more_faults import assembled, attribute, framed, laid, language, mapped, outputs, row, vision
from mmrender.audit.report import sampled_runs


def gamma(image: Any, w: int, h: int) -> Any:
    return Image.fromarray((255 * (np.asarray(image) / 255.0) ** 2.2).round().astype(np.uint8))


def exchanged_squares(item: Any) -> Any:
    """Two neighbouring squares of patches in each other's place."""
    squares = pixels_of(item).reshape(-1, 4, pixels_of(item).shape[-1]).copy()
    squares[[0, 1]] = squares[[1, 0]]
    return Seen(item, squares.reshape(pixels_of(item).shape))


PIXELS: dict[str, tuple[tuple[str, ...], Any]] = {
    "another image of the same size": ((), lambda at: lambda item: reframed(item, np.random.default_rng(5).integers(0, 256, item.frames.shape, np.uint8))),
    "two squares of patches exchanged": ((), lambda at: exchanged_squares),
    "gamma applied": ((), lambda at: framed(gamma)),
    "brighter by ten levels": ((), lambda at: lambda item: reframed(item, np.clip(item.frames.astype(int) + 10, 0, 255).astype(np.uint8))),
    "half of its pixels, enlarged": ((), lambda at: framed(lambda image, w, h: image.resize((w // 2, h // 2), 0).resize((w, h), 0))),
    "16 colours": ((), lambda at: framed(lambda image, w, h: image.quantize(16))),
    "the last row of patches black": ((), lambda at: lambda item: reframed(item, np.concatenate([item.frames[..., :-14, :], 0 * item.frames[..., -14:, :]], -2))),
}  # fmt: skip


def by_256(item: Any) -> Any:
    """Pixels as of levels that were divided by 256."""
    mean, std = (np.array(values)[:, None] for values in (item.arithmetic.mean, item.arithmetic.std))
    levels = pixels_of(item).reshape(len(pixels_of(item)), 3, -1) * std + mean
    return Seen(item, ((levels * (255 / 256) - mean) / std).reshape(pixels_of(item).shape))


@row("levels over 256, not 255")
def _(at, index):
    return seen_as(at, index, by_256, None, sources=at.sources)


for name, (expected, change) in PIXELS.items():

    @row(name, *expected)
    def _(at, index, change=change):
        return seen_as(at, index, change(at), -1, sources=at.sources)


@row("positions one off within images", "positions")
def _(at, index):
    def edit(ids, sample):
        for span in sample.media_spans:
            ids[..., span.start : span.stop] += 1
        return ids

    return numbered(at, index, edit)


@row("positions half as far apart in images")
def _(at, index):
    def edit(ids, sample):
        for span in sample.media_spans:
            own = ids[..., span.start : span.stop]
            own -= (own - own[..., :1]) // 2
        return ids

    return numbered(at, index, edit)


def masked(at: Any, index: int, seen: Any) -> Planted:
    def change(inputs: Any) -> None:
        empty = torch.zeros(1, 1, *seen.shape)
        inputs["attention_mask"] = empty.masked_fill(~seen, torch.finfo(torch.float32).min)

    return Planted(scored(at.model, at.tiny, at.samples[index], change))


@row("attention to the future", "attention")
def _(at, index):
    length = len(at.samples[index])
    return masked(at, index, torch.ones(length, length, dtype=torch.bool))


@row("attention to the token after", "attention")
def _(at, index):
    length = len(at.samples[index])
    return masked(at, index, torch.ones(length, length, dtype=torch.bool).tril(1))


@row("a sampled token that no later one attended to")
def _(at, index):
    length, (start, _) = len(at.samples[index]), sampled_runs(at.samples[index].loss_mask)[0]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[start + 4 :, start + 3] = False
    return masked(at, index, seen)


@row("a system prompt that was attended to in both directions")
def _(at, index):
    length = len(at.samples[index])
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[:7, :7] = True
    return masked(at, index, seen)


@row("the first turn twice in the second prompt", "history")
def _(at, index):
    (_, stop), (second, _) = sampled_runs(at.samples[index].loss_mask)
    whole = at.samples[index]
    late = replace(whole, loss_mask=np.arange(len(whole)) >= second)
    saw = scored(at.model, at.tiny, assembled(late, [(0, stop), (7, len(whole))]))
    logprobs = whole.logprobs.copy()
    logprobs[second:] = saw.logprobs[saw.loss_mask][-(len(whole) - second) :]
    return Planted(replace(whole, logprobs=logprobs))


@row("the system prompt twice", "opening")
def _(at, index):
    return laid(at, index, lambda one: [(0, 7), (1, 7), (7, len(one))])


@row("the question asked again after the image")
def _(at, index):
    start = sampled_runs(at.samples[index].loss_mask)[0][0]
    return laid(at, index, lambda one: [(0, start - 3), (start - 7, len(one))])


def in_float8(value: Any) -> Any:
    return value.to(torch.float8_e4m3fn).float()


def of_attention(at: Any, names: tuple[str, ...]) -> list[Any]:
    return [one for name, one in language(at).named_modules() if name.endswith(names)]


@row("keys and values kept in float8", "dtype of a part")
def _(at, index):
    """Keys once they are turned by their positions, as caches hold them."""
    (attention, *_) = of_attention(at, ("self_attn",))
    module = sys.modules[type(attention).__module__]
    name = next(
        one for one in ("apply_multimodal_rotary_pos_emb", "apply_rotary_pos_emb") if hasattr(module, one)
    )
    own = getattr(module, name)

    def turned(*args: Any, **options: Any) -> Any:
        query, key = own(*args, **options)
        return query, in_float8(key)

    hooks = [
        one.register_forward_hook(lambda _m, _a, out: in_float8(out)) for one in of_attention(at, ("v_proj",))
    ]
    try:
        return computed_by(at, index, attribute(module, name, turned))
    finally:
        for hook in hooks:
            hook.remove()


@row("weights rounded to 3 bits by groups of 16")
def _(at, index):
    def rounded(data: Any) -> Any:
        rows = data.reshape(-1, 16)
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        step = (high - low) / 7
        return (((rows - low) / step).round() * step + low).reshape(data.shape)

    return computed_by(at, index, mapped([language(at)], rounded))


@row("biases left out")
def _(at, index):
    held = [one for one in language(at).modules() if getattr(one, "bias", None) is not None]
    kept = [one.bias.data for one in held]
    if not held:
        return None
    for one in held:
        one.bias.data = torch.zeros_like(one.bias.data)
    try:
        return Planted(scored(at.model, at.tiny, at.samples[index]))
    finally:
        for one, data in zip(held, kept, strict=True):
            one.bias.data = data


@row("one head of attention lost")
def _(at, index):
    (module, *_) = of_attention(at, ("o_proj",))
    weight = module.weight.data.clone()
    weight[:, : weight.shape[1] // 4] = 0
    with attribute(module.weight, "data", weight):
        return Planted(scored(at.model, at.tiny, at.samples[index]))


@row("rotary frequencies stretched as YaRN does")
def _(at, index):
    rotary = language(at).rotary_emb
    own = rotary.inv_freq
    share = torch.linspace(0, 1, len(own))
    return computed_by(at, index, attribute(rotary, "inv_freq", own * (1 - share) + own / 4 * share))


@row("vision features of the wrong layer norm")
def _(at, index):
    return computed_by(
        at, index, outputs(vision(at), lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))
    )


@row("a vocabulary padded with random rows")
def _(at, index):
    def rule(logits: Any) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.cat([logits, torch.randn(len(logits), 28, generator=generator)], 1)

    return sampled_by(at, index, rule)


@row("logits capped", "capped logits")
def _(at, index):
    return sampled_by(at, index, lambda logits: 3 * (logits / 3).tanh())


@row("min_p", "min_p", "top_p", "top_k")
def _(at, index):
    sample = at.samples[index]
    tokens = torch.from_numpy(sample.token_ids[sample.loss_mask].astype(np.int64))[:, None]

    def rule(logits: Any) -> Any:
        own = logits.log_softmax(-1)
        bound = float((own.gather(1, tokens)[:, 0] - own.amax(-1)).min())
        return logits.masked_fill(own < own.amax(-1, keepdim=True) + bound - 1e-4, -torch.inf)

    return sampled_by(at, index, rule)


@row("temperature that falls with each token")
def _(at, index):
    return sampled_by(at, index, lambda logits: logits / torch.linspace(1.2, 0.8, len(logits))[:, None])


@row("two tokens that cannot be sampled")
def _(at, index):
    sample = at.samples[index]
    free = [token for token in LETTERS if token not in sample.token_ids[sample.loss_mask]][:2]

    def rule(logits: Any) -> Any:
        logits[:, free] = -torch.inf
        return logits

    return sampled_by(at, index, rule)


FORMS: dict[str, tuple[tuple[str, ...], Any]] = {
    "numbers in reverse": (("shifted numbers",), lambda own: own[::-1]),
    "each completion's numbers in reverse": (("shifted numbers",), lambda own: np.concatenate([part[::-1] for part in np.split(own, 2)])),
    "means of three neighbours": ((), lambda own: np.convolve(own, np.ones(3) / 3, "same")),
    "square roots": ((), lambda own: -np.sqrt(-np.minimum(own, 0))),
    "every other number 0.02 higher": ((), lambda own: own + np.where(np.arange(len(own)) % 2, 0.02, 0)),
    "the last completion's mean for the least": ((), lambda own: np.where(own == own.min(), own.mean(), own)),
    "numbers of neighbours exchanged in pairs": (("shifted numbers",), lambda own: own[np.arange(len(own)) ^ 1] if len(own) % 2 == 0 else own),
}  # fmt: skip

for name, (expected, change) in FORMS.items():

    @row(name, *expected)
    def _(at, index, change=change):
        return values_of(at, index, change)


@row("another picture, resized to the same size, in every image")
def _(at, index):
    sample = at.samples[index]
    rng = np.random.default_rng(40 + index)
    other = []
    for item in images(sample):
        height, width = item.frames.shape[-2:]
        other.append(reframed(item, np.asarray(picture(rng, (width, height))).transpose(2, 0, 1)[None]))
    return Planted(as_trained(scored(at.model, at.tiny, showing(sample, other)), sample))
