"""More faults planted between sampler and trainer, as rows: those that others may think of."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from audit_cases import (
    ANSWER,
    BOS,
    FAULTS,
    LETTERS,
    OPENER,
    Planted,
    Row,
    Scene,
    Seen,
    as_trained,
    computed_by,
    cut,
    images,
    numbered,
    numbers,
    other_weights,
    pixels_of,
    prompted,
    recorded,
    reframed,
    sampled_by,
    scored,
    seen_as,
    showing,
    values_of,
)
from mmrender.audit.report import sampled_runs
from training_cases import PAD_ID


def row(name: str, *expected: str) -> Callable[[Any], Any]:
    def register(plant: Any) -> Any:
        FAULTS[name] = expected, plant
        return plant

    return register


# --- pixels


def framed(change: Callable[[Any, Any, Any], Any]) -> Callable[[Any], Any]:
    """A change of levels `(3, h, w)` as an image."""

    def of(item: Any) -> Any:
        image = Image.fromarray(item.frames[0].transpose(1, 2, 0))
        return reframed(item, np.asarray(change(image, *image.size).convert("RGB")).transpose(2, 0, 1)[None])

    return of


def source_of(at: Scene, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def of(item: Any) -> Any:
        height, width = item.frames.shape[-2:]
        image = change(at.sources[item.identity]).resize((width, height), Image.Resampling.BICUBIC)
        return reframed(item, np.asarray(image.convert("RGB")).transpose(2, 0, 1)[None])

    return of


def padded(image: Any, fill: int) -> Any:
    side = max(image.size)
    out = Image.new("RGB", (side, side), (fill, fill, fill))
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def cropped(image: Any) -> Any:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def squares(item: Any) -> Any:
    return pixels_of(item).reshape(-1, 2, 2, pixels_of(item).shape[-1])


PIXELS: dict[str, tuple[tuple[str, ...], Any, int | None]] = {
    "grey in one image": (("colours",), lambda at: framed(lambda image, w, h: image.convert("L")), -1),
    "inverted levels": (
        ("colours",),
        lambda at: lambda item: reframed(item, 255 - item.frames),
        0,
    ),
    "one channel for all": (("colours",), lambda at: lambda item: reframed(item, np.repeat(item.frames[:, 1:2], 3, 1)), -1),
    "two channels swapped": (("colours",), lambda at: lambda item: reframed(item, item.frames[:, [1, 0, 2]]), None),
    "centre cropped": (("framing",), lambda at: source_of(at, cropped), -1),
    "letterboxed on black": (("framing",), lambda at: source_of(at, lambda image: padded(image, 0)), 0),
    "letterboxed on grey everywhere": (("framing",), lambda at: source_of(at, lambda image: padded(image, 128)), None),
    "squares of patches turned over": (
        ("patch order",),
        lambda at: lambda item: Seen(item, squares(item).transpose(0, 2, 1, 3).reshape(pixels_of(item).shape)),
        -1,
    ),
    "patches in reverse order": (("patch order",), lambda at: lambda item: Seen(item, pixels_of(item)[::-1]), 0),
    "EXIF orientation ignored": (
        ("turned image",),
        lambda at: lambda item: at.tiny.process(at.sources[item.identity].transpose(Image.Transpose.ROTATE_90)),
        -1,
    ),
    "pixels rounded to bfloat16": (
        ("pixel values",),
        lambda at: lambda item: Seen(item, torch.from_numpy(pixels_of(item)).bfloat16().float().numpy()),
        None,
    ),
    "pixels rounded to eighths": (
        ("pixel values",),
        lambda at: lambda item: Seen(item, np.round(pixels_of(item) * 8) / 8),
        -1,
    ),
    "levels truncated to 4 bits": (("pixel values",), lambda at: lambda item: reframed(item, item.frames // 16 * 16), -1),
    "pixels of the wrong sign": (("normalisation", "colours"), lambda at: lambda item: Seen(item, -pixels_of(item)), 0),
    "pixels halved": (("normalisation",), lambda at: lambda item: Seen(item, pixels_of(item) / 2), -1),
    "JPEG without the source": ((), lambda at: framed(lambda image, w, h: _jpeg(image)), -1),
    "one pixel to the left": (("framing", "patches moved"), lambda at: lambda item: reframed(item, np.roll(item.frames, -1, -1)), -1),
    "the lower half black": (("framing", "blank image"), lambda at: lambda item: reframed(item, _half(item.frames)), -1),
    "blurred": ((), lambda at: framed(lambda image, w, h: image.resize((w // 2, h // 2)).resize((w, h), Image.Resampling.BICUBIC)), -1),
}  # fmt: skip


def _jpeg(image: Any) -> Any:
    import io

    out = io.BytesIO()
    image.save(out, "JPEG", quality=60)
    return Image.open(out)


def _half(frames: Any) -> Any:
    out = frames.copy()
    out[..., out.shape[-2] // 2 :, :] = 0
    return out


for name, (expected, change, which) in PIXELS.items():

    @row(name, *expected)
    def _(at, index, change=change, which=which):
        return seen_as(at, index, change(at), which, sources=at.sources)


@row("alpha over white, not black", "background")
def _(at, index):
    sample, items = at.samples[index], images(at.samples[index])
    rng = np.random.default_rng(index)
    old = at.sources[items[-1].identity]
    alpha = Image.fromarray(rng.integers(0, 256, (old.height, old.width), dtype=np.uint8))
    rgba = old.convert("RGBA")
    rgba.putalpha(alpha)

    def over(fill: int) -> Any:
        ground = Image.new("RGBA", rgba.size, (fill, fill, fill, 255))
        return at.tiny.process(Image.alpha_composite(ground, rgba).convert("RGB"))

    true = showing(sample, [*items[:-1], at.tiny.process(rgba)])
    drop = showing(sample, [*items[:-1], at.tiny.process(rgba.convert("RGB"))])
    ours = at.tiny.process(rgba)
    theirs = over(0) if not np.array_equal(over(0).frames, ours.frames) and index % 2 else over(255)
    if np.array_equal(theirs.frames, ours.frames):
        theirs = over(0)
    assert drop is not None
    saw = scored(at.model, at.tiny, showing(sample, [*items[:-1], theirs]))
    return Planted(
        as_trained(saw, true), len(items) - 1, options={"sources": {**at.sources, ours.identity: rgba}}
    )


@row("two images exchanged and one resized")
def _(at, index):
    sample = at.samples[index]
    items = images(sample)
    changed = [resized_to(one, two) for one, two in zip(items, [items[1], items[0], *items[2:]], strict=True)]
    return Planted(as_trained(scored(at.model, at.tiny, showing(sample, changed)), sample))


def resized_to(own: Any, other: Any) -> Any:
    height, width = own.frames.shape[-2:]
    image = Image.fromarray(other.frames[0].transpose(1, 2, 0)).resize(
        (width, height), Image.Resampling.BILINEAR
    )
    return reframed(own, np.asarray(image).transpose(2, 0, 1)[None])


@row("the first image shown for all", "stale image", "image order")
def _(at, index):
    rng = np.random.default_rng(index)
    items = images(at.samples[index])
    true = Row().add([BOS, OPENER, 5])
    same = [reframed(items[0], rng.integers(0, 256, items[0].frames.shape, dtype=np.uint8)) for _ in range(3)]
    tokens = at.samples[index].token_ids[at.samples[index].loss_mask]
    for one in same:
        true.image(one).add([6, 7])
    trained = true.add([ANSWER]).add(tokens[:12], True).sample("repeated")
    saw = scored(at.model, at.tiny, showing(trained, [same[0]] * 3))
    return Planted(as_trained(saw, trained), 1)


def assembled(sample: Any, pieces: Any) -> Any:
    """A sample of these pieces of one: ranges of tokens, or lists of prompt tokens."""
    out = Row()
    for piece in pieces:
        if isinstance(piece, list):
            out.add(piece)
            continue
        start, stop = piece
        for span in sample.media_spans:
            if start <= span.start < stop:
                out.entries.append((span.range.shifted(len(out.ids) - start), span.item))
        out.ids += sample.token_ids[start:stop].tolist()
        out.mask += sample.loss_mask[start:stop].tolist()
    return out.sample(sample.sample_id)


def laid(at: Scene, index: int, pieces: Callable[[Any], Any], **named: Any) -> Planted:
    sample = at.samples[index]
    saw = scored(at.model, at.tiny, assembled(sample, pieces(sample)))
    return Planted(as_trained(saw, sample), **named)


@row("an image after its text", "image placed")
def _(at, index):
    sample = at.samples[index]
    span = sample.media_spans[-1]
    stop = sampled_runs(sample.loss_mask)[1][0] - 3
    return laid(
        at,
        index,
        lambda one: [
            (0, span.start - 1),
            (span.stop + 1, stop),
            (span.start - 1, span.stop + 1),
            (stop, len(one)),
        ],
        image=span.position,
    )


@row("an image twice", "image placed")
def _(at, index):
    span = at.samples[index].media_spans[-1]
    block = (span.start - 1, span.stop + 1)
    return laid(at, index, lambda one: [(0, block[1]), block, (block[1], len(one))], image=span.position)


@row("an image left out of the prompt", "image placed")
def _(at, index):
    span = at.samples[index].media_spans[-1]
    return laid(at, index, lambda one: [(0, span.start - 1), (span.stop + 1, len(one))], image=span.position)


@row("only the placeholders left out", "image placed")
def _(at, index):
    span = at.samples[index].media_spans[-1]
    return laid(at, index, lambda one: [(0, span.start), (span.stop, len(one))], image=span.position)


def second_after(at: Scene, index: int, pieces: Callable[[Any, Any, Any], Any], **named: Any) -> Planted:
    """The first completion as it is, the second after another history."""
    sample = at.samples[index]
    one, two = sampled_runs(sample.loss_mask)
    other = assembled(sample, pieces(sample, one, two))
    other = replace(other, loss_mask=np.arange(len(other)) >= len(other) - (len(sample) - two[0]))
    saw = scored(at.model, at.tiny, other).logprobs
    logprobs = sample.logprobs.copy()
    logprobs[two[0] :] = saw[len(other) - (len(sample) - two[0]) :]
    return Planted(replace(sample, logprobs=logprobs), **named)


@row("the newline after a turn missing", "history")
def _(at, index):
    return second_after(at, index, lambda one, a, b: [(0, a[1]), (a[1] + 1, len(one))])


@row("a newline more after a turn", "history")
def _(at, index):
    return second_after(at, index, lambda one, a, b: [(0, a[1]), [6], (a[1], len(one))])


@row("reasoning stripped from history", "history")
def _(at, index):
    return second_after(at, index, lambda one, a, b: [(0, a[0]), (a[0] + 5 + index, len(one))])


@row("the first turn dropped from history", "history")
def _(at, index):
    return second_after(at, index, lambda one, a, b: [(0, 7), (a[1], len(one))])


@row("the first answer dropped from history", "history")
def _(at, index):
    return second_after(at, index, lambda one, a, b: [(0, a[0]), (a[1], len(one))])


@row("no stop token in history", "history")
def _(at, index):
    return second_after(at, index, lambda one, a, b: [(0, a[1] - 1), (a[1], len(one))])


@row("history encoded again", "history", "encoded again")
def _(at, index):
    """Letters that make a pair, in the first completion, as that pair in the second prompt."""
    sample = at.samples[index]
    (start, _), (second, _) = sampled_runs(sample.loss_mask)
    ids = sample.token_ids.copy()
    ids[start + 4 : start + 6] = 20 + index, 21 + index
    true = scored(at.model, at.tiny, replace(sample, token_ids=ids))
    other = assembled(true, [(0, start + 4), [60 + index], (start + 6, len(true))])
    mask = np.arange(len(other)) >= second - 1
    saw = scored(at.model, at.tiny, replace(other, loss_mask=mask & other.loss_mask))
    logprobs = true.logprobs.copy()
    logprobs[second:] = saw.logprobs[second - 1 :]
    return Planted(replace(true, logprobs=logprobs))


@row("older images dropped from history", "history", "image placed")
def _(at, index):
    sample = at.samples[index]
    first = [span for span in sample.media_spans if span.start < sampled_runs(sample.loss_mask)[0][0]]

    def pieces(one, a, b):
        cuts, done = [], 0
        for span in first:
            cuts.append((done, span.start - 1))
            done = span.stop + 1
        return [*cuts, (done, len(one))]

    return second_after(at, index, pieces)


@row("another rollout's system prompt", "opening", "another's prompt")
def _(at, index):
    other = at.samples[(index + 1) % 3]
    ids = other.token_ids.copy()
    ids[2:7] = 31, 32, 33, 34, 35
    other = replace(scored(at.model, at.tiny, replace(other, token_ids=ids)), sample_id="the other prompt")
    planted = prompted(at, index, 2, 7, [31, 32, 33, 34, 35])
    return replace(planted, options={"peers": [other]})


@row("the prompt cut from the left", "opening")
def _(at, index):
    return prompted(at, index, 0, 5 + index)


@row("another sample before it in the row", "another's prompt")
def _(at, index):
    sample, other = at.samples[index], at.samples[(index + 1) % 3]
    packed = Row()
    packed.ids = [*other.token_ids, *sample.token_ids]
    packed.mask = [False] * len(other) + sample.loss_mask.tolist()
    packed.entries = [(s.range, s.item) for s in other.media_spans]
    packed.entries += [(s.range.shifted(len(other)), s.item) for s in sample.media_spans]
    return Planted(as_trained(scored(at.model, at.tiny, packed.sample()), sample))


@row("padding attended to before the second completion", "attended padding", "generation prompt")
def _(at, index):
    sample = at.samples[index]
    _, (second, _) = sampled_runs(sample.loss_mask)
    return prompted(at, index, second, second, [PAD_ID] * (3 + index))


@row("the date in the system prompt")
def _(at, index):
    return prompted(at, index, 4, 5, [40 + index % 2])


@row("the question cut short")
def _(at, index):
    first = sampled_runs(at.samples[index].loss_mask)[0][0]
    return prompted(at, index, first - 6, first - 4)


# --- positions and attention


@row("positions restarted at each turn", "positions")
def _(at, index):
    def edit(ids, sample):
        stop = sampled_runs(sample.loss_mask)[0][1]
        ids[..., stop:] -= ids[..., stop : stop + 1].clone()
        return ids

    return numbered(at, index, edit)


@row("positions restarted at each completion", "positions")
def _(at, index):
    def edit(ids, sample):
        for start, stop in sampled_runs(sample.loss_mask):
            ids[..., start:stop] -= ids[..., start : start + 1].clone()
        return ids

    return numbered(at, index, edit)


@row("an image's rows and columns from zero", "positions")
def _(at, index):
    def edit(ids, sample):
        for span in sample.media_spans:
            ids[1:, :, span.start : span.stop] -= ids[:1, :, span.start : span.start + 1].clone()
        return ids

    return numbered(at, index, edit)


@row("positions after images by width", "positions")
def _(at, index):
    """What follows an image goes on from its width, not from the larger side."""

    def edit(ids, sample):
        for span in sample.media_spans:
            wide = ids[2, 0, span.start : span.stop].max() + 1
            ids[..., span.stop :] += wide - ids[0, 0, span.stop]
        return ids

    sample = at.samples[index]
    if all(span.item.grid[2] >= span.item.grid[1] for span in sample.media_spans):
        return None
    return numbered(at, index, edit)


@row("positions twice as far apart", "positions", "rotary base")
def _(at, index):
    return numbered(at, index, lambda ids, sample: ids * 2)


@row("the rotary base 37,000", "rotary base")
def _(at, index):
    rotary = at.model.model.language_model.rotary_emb
    return computed_by(
        at, index, attribute(rotary, "inv_freq", rotary.inv_freq ** (np.log(37e3) / np.log(1e4)))
    )


@row("rotary frequencies a third", "rotary base")
def _(at, index):
    rotary = at.model.model.language_model.rotary_emb
    return computed_by(at, index, attribute(rotary, "inv_freq", rotary.inv_freq / 3))


@contextmanager
def attribute(holder: Any, name: str, value: Any) -> Any:
    kept = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)


@contextmanager
def every(model: Any, name: str, change: Callable[[Any], Any], kind: type = float) -> Any:
    kept = [(m, getattr(m, name)) for m in model.modules() if isinstance(getattr(m, name, None), kind)]
    for module, value in kept:
        setattr(module, name, change(value))
    try:
        yield
    finally:
        for module, value in kept:
            setattr(module, name, value)


@row("a window of 16 tokens", "attention")
def _(at, index):
    sample = at.samples[index]
    length = len(sample)
    seen = torch.ones(length, length, dtype=torch.bool).tril().triu(-15)

    def change(inputs):
        inputs["attention_mask"] = torch.zeros(1, 1, length, length).masked_fill(
            ~seen, torch.finfo(torch.float32).min
        )

    return Planted(scored(at.model, at.tiny, sample, change))


@row("images that see nothing before them", "attention")
def _(at, index):
    sample = at.samples[index]
    length = len(sample)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for span in sample.media_spans:
        seen[span.start : span.stop, : span.start] = False

    def change(inputs):
        inputs["attention_mask"] = torch.zeros(1, 1, length, length).masked_fill(
            ~seen, torch.finfo(torch.float32).min
        )

    return Planted(scored(at.model, at.tiny, sample, change))


# --- model


def language(at: Scene) -> Any:
    return at.model.model.language_model


def vision(at: Scene) -> Any:
    return at.model.model.visual


@contextmanager
def outputs(module: Any, change: Callable[[Any], Any]) -> Any:
    """A module's result changed; of a structure, what the language model is given of it."""

    def leave(_m, _a, out):
        if torch.is_tensor(out):
            return change(out)
        for key in ("pooler_output", "deepstack_features"):
            if getattr(out, key, None) is not None:
                held = out[key]
                out[key] = [change(one) for one in held] if isinstance(held, list | tuple) else change(held)
        return out

    hook = module.register_forward_hook(leave)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def mapped(modules: Any, change: Callable[[Any], Any]) -> Any:
    """Matrices of linear layers changed."""
    kept = [(m, m.weight.data) for part in modules for m in part.modules() if isinstance(m, torch.nn.Linear)]
    for module, data in kept:
        module.weight.data = change(data)
    try:
        yield
    finally:
        for module, data in kept:
            module.weight.data = data


def int8(data: Any) -> Any:
    scale = data.abs().amax(1, keepdim=True) / 127
    return (data / scale).round().clamp(-127, 127) * scale


def fp8(data: Any) -> Any:
    scale = data.abs().max() / 448
    return (data / scale).to(torch.float8_e4m3fn).float() * scale


MODELS: dict[str, tuple[tuple[str, ...], Any]] = {
    "image features scaled by 1.3": (("scaled part",), lambda at: outputs(vision(at), lambda x: x * 1.3)),
    "image features rounded to bfloat16": (("dtype of a part",), lambda at: outputs(vision(at), lambda x: x.bfloat16().float())),
    "image features rounded to float8": (("dtype of a part",), lambda at: outputs(vision(at), lambda x: x.to(torch.float8_e4m3fn).float())),
    "embeddings scaled by the root of the width": (("scaled part",), lambda at: outputs(at.model.get_input_embeddings(), lambda x: x * 32**0.5)),
    "int8 weights": (("rounded weights",), lambda at: mapped([language(at)], int8)),
    "float8 weights with a scale": (("rounded weights",), lambda at: mapped([language(at)], fp8)),
    "epsilon of the norms": (("epsilon",), lambda at: every(language(at), "variance_epsilon", lambda x: 1e-2)),
    "attention not scaled by the root": (("scaled part",), lambda at: every(language(at), "scaling", lambda x: x * x)),
    "GELU for SiLU": (("activation",), lambda at: every(language(at), "act_fn", lambda x: torch.nn.GELU(), torch.nn.Module)),
    "a vision layer left out": (("layer left out",), lambda at: outputs_in(vision(at).blocks[-1])),
    "the first layer twice": (("layer left out",), lambda at: twice(language(at).layers[0])),
}  # fmt: skip


@contextmanager
def outputs_in(layer: Any) -> Any:
    with attribute(layer, "forward", lambda hidden_states, *args, **kwargs: hidden_states):
        yield


@contextmanager
def twice(layer: Any) -> Any:
    forward = layer.forward

    def again(hidden_states, *args, **kwargs):
        return forward(forward(hidden_states, *args, **kwargs), *args, **kwargs)

    with attribute(layer, "forward", again):
        yield


for name, (expected, change) in MODELS.items():

    @row(name, *expected)
    def _(at, index, change=change):
        return computed_by(at, index, change(at))


@row("dropout left on")
def _(at, index):
    torch.manual_seed(index)
    return computed_by(
        at, index, outputs(language(at).layers[0].mlp, lambda x: torch.nn.functional.dropout(x, 0.1))
    )


@row("dropout of little effect")
def _(at, index):
    torch.manual_seed(index)

    def weakly(x):
        return x + 0.03 * (torch.nn.functional.dropout(x, 0.1) - x)

    return computed_by(at, index, outputs(language(at).layers[0].mlp, weakly))


def some_stale(at: Scene, index: int, holds: Callable[[str], bool]) -> Planted:
    with other_weights(at.model, lambda name: True) as old:
        pass
    with other_weights(at.model, lambda name: False):
        for name, one in at.model.named_parameters():
            if holds(name):
                one.data = old[name]
        sample = scored(at.model, at.tiny, at.samples[index])
    return Planted(sample, options={"weights": {"the step before": old}})


@row("a vision tower of the step before", "weights")
def _(at, index):
    return some_stale(at, index, lambda name: ".visual." in name)


@row("all but the vision tower stale", "weights")
def _(at, index):
    return some_stale(at, index, lambda name: ".visual." not in name)


@row("the norms and biases only loaded", "weights")
def _(at, index):
    return some_stale(at, index, lambda name: "norm" not in name and "bias" not in name)


@row("attention stale, the rest new", "weights")
def _(at, index):
    return some_stale(at, index, lambda name: "language_model" in name and "attn" in name)


@row("stale weights that are not given")
def _(at, index):
    with other_weights(at.model, lambda name: True):
        return Planted(scored(at.model, at.tiny, at.samples[index]))


# --- numbers


@row("a vocabulary padded with zeros", "vocabulary")
def _(at, index):
    return sampled_by(at, index, lambda logits: torch.cat([logits, torch.zeros(len(logits), 28)], 1))


@row("placeholders that cannot be sampled", "vocabulary", "logit bias")
def _(at, index):
    return sampled_by(at, index, lambda logits: logits[:, :88])


@row("a bias on one token", "logit bias")
def _(at, index):
    sample = at.samples[index]
    free = next(token for token in range(20, 40) if token not in sample.token_ids[sample.loss_mask])

    def rule(logits):
        logits[:, free] += 2.0 + index
        return logits

    return sampled_by(at, index, rule)


@row("top_k of the rank that is needed", "top_k")
def _(at, index):
    sample = at.samples[index]
    logits = numbers(at.model, at.tiny, sample)
    tokens = torch.from_numpy(sample.token_ids[sample.loss_mask].astype(np.int64))[:, None]
    rank = int((logits > logits.gather(1, tokens)).sum(1).max()) + 1

    def rule(logits):
        return logits.masked_fill(logits < logits.topk(rank).values[:, -1:], -torch.inf)

    return sampled_by(at, index, rule)


@row("held to twenty tokens", "restricted", "vocabulary")
def _(at, index):
    sample = at.samples[index]
    kept = np.unique(np.concatenate([sample.token_ids[sample.loss_mask], np.arange(3, 12)]))

    def rule(logits):
        out = torch.full_like(logits, -torch.inf)
        out[:, kept] = logits[:, kept]
        return out

    return sampled_by(at, index, rule)


@row("temperatures of two turns", "temperature")
def _(at, index):
    def rule(logits):
        half = len(logits) // 2
        return torch.cat([logits[:half] / 0.7, logits[half:] / 1.2])

    return sampled_by(at, index, rule)


@row("a penalty on the completion only", "penalty")
def _(at, index):
    sample = at.samples[index]
    places = np.flatnonzero(sample.loss_mask)
    starts = [start for start, _ in sampled_runs(sample.loss_mask)]

    def rule(logits):
        for line, place in enumerate(places):
            start = max(start for start in starts if start <= place)
            seen = np.unique(sample.token_ids[start:place])
            own = logits[line, seen]
            logits[line, seen] = torch.where(own > 0, own / 1.4, own * 1.4)
        return logits

    return sampled_by(at, index, rule)


@row("a frequency penalty", "penalty")
def _(at, index):
    sample = at.samples[index]
    places = np.flatnonzero(sample.loss_mask)
    starts = [start for start, _ in sampled_runs(sample.loss_mask)]

    def rule(logits):
        for line, place in enumerate(places):
            start = max(start for start in starts if start <= place)
            logits[line] -= 0.7 * torch.from_numpy(
                np.bincount(sample.token_ids[start:place], minlength=100)[:100]
            )
        return logits

    return sampled_by(at, index, rule)


@row("logits rounded to bfloat16", "rounded", "dtype of a part")
def _(at, index):
    return sampled_by(at, index, lambda logits: logits.bfloat16().float())


FORMS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "surprisal in bits": (("form",), lambda own: -own / np.log(2)),
    "percent": (("form",), lambda own: 100 * np.exp(own)),
    "log-odds": (("form",), lambda own: own - np.log1p(-np.exp(np.minimum(own, -1e-6)))),
    "cut to two decimals": (("rounded",), lambda own: np.trunc(own * 100) / 100),
    "rounded to quarters": (("rounded",), lambda own: np.round(own * 4) / 4),
    "sorted numbers": (("shifted numbers", "exchanged numbers"), lambda own: np.concatenate([np.sort(p) for p in np.split(own, 2)])),
    "shuffled numbers": (("shifted numbers", "exchanged numbers"), lambda own: np.random.default_rng(1).permutation(own)),
    "two numbers exchanged": (("shifted numbers", "exchanged numbers"), lambda own: own[[0, 1, 5, 3, 4, 2, *range(6, len(own))]]),
    "the first number of each completion missing": (("missing", "restricted"), lambda own: np.where(np.arange(len(own)) % (len(own) // 2) == 0, 0, own)),
    "the last numbers missing": (("missing", "restricted"), lambda own: np.where(np.arange(len(own)) >= len(own) - 3, 0, own)),
    "noise on every number": ((), lambda own: own - np.abs(np.random.default_rng(2).normal(0, 0.1, len(own)))),
    "a factor of each completion": (("scaled",), lambda own: own * np.repeat([1 / 13, 1 / 7], len(own) // 2)),
    "differences of neighbours": ((), lambda own: np.diff(own, prepend=0)),
    "numbers of the turn before": (("another's numbers",), lambda own: np.concatenate([own[: len(own) // 2]] * 2)),
    "squares": ((), lambda own: -(own**2)),
}  # fmt: skip

for name, (expected, change) in FORMS.items():

    @row(name, *expected)
    def _(at, index, change=change):
        return values_of(at, index, change)


@row("numbers of another sample of the group", "another's numbers")
def _(at, index):
    """The same prompt, other tokens."""
    sample = at.samples[index]
    start, _ = sampled_runs(sample.loss_mask)[1]
    rng = np.random.default_rng(index)
    ids = sample.token_ids.copy()
    ids[start : start + 8] = rng.choice(LETTERS, 8)
    other = replace(scored(at.model, at.tiny, replace(sample, token_ids=ids)), sample_id="its sibling")
    logprobs = sample.logprobs.copy()
    logprobs[start:] = other.logprobs[start:]
    return Planted(replace(sample, logprobs=logprobs), options={"peers": [other]})


@row("numbers shifted with those of the prompt", "shifted numbers")
def _(at, index):
    """The number of each token is that of the token before it, prompt included."""
    sample = at.samples[index]
    whole = replace(sample, loss_mask=(np.arange(len(sample)) > 0) & (sample.mm_token_type_ids == 0))
    own = scored(at.model, at.tiny, whole).logprobs
    return Planted(recorded(sample, own[np.flatnonzero(sample.loss_mask) - 1]))


assert cut is not None
