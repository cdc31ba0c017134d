"""Faults planted between sampler and trainer, of many kinds, and what an audit makes of them.

Each is planted in rollouts of tiny models: on the sampler's side by computing its log-probabilities otherwise,
or on the trainer's side by changing the sample. Run as a program it plants all of them and prints a table.
"""

import argparse
import copy
import sys
import tempfile
import textwrap
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

import audit_more_faults  # noqa: F401 - more of them
import audit_other_faults  # noqa: F401 - and more
from audit_cases import (
    ANSWER,
    BOS,
    FAMILIES,
    FAULTS,
    OPENER,
    OTHER_STOP,
    Planted,
    Row,
    Seen,
    as_trained,
    by_channel,
    computed_by,
    cut,
    decode,
    fault,
    images,
    judge,
    numbered,
    numbers,
    other_weights,
    pixels_of,
    prompted,
    recorded,
    reframed,
    resized,
    rollout,
    sampled_by,
    scene,
    scored,
    seen_as,
    showing,
    values_of,
)
from mmrender.audit import TrainerModel, audit
from mmrender.audit.causes import GROUPS
from mmrender.audit.recorded import CAUSES
from mmrender.audit.report import sampled_runs
from training_cases import PAD_ID
from training_models import tiny_family

CLIP = (np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711]))


@fault("one patch off", "patches moved")
def _(at, index):
    return seen_as(at, index, lambda item: Seen(item, np.roll(pixels_of(item), 1, 0)), -1)


@fault("a row of patches off in every image", "patches moved")
def _(at, index):
    return seen_as(at, index, lambda item: Seen(item, np.roll(pixels_of(item), -2 * item.grid[2], 0)), None)


@fault("BGR in one image", "colours")
def _(at, index):
    return seen_as(
        at, index, lambda item: Seen(item, by_channel(item)[:, ::-1].reshape(pixels_of(item).shape)), 0
    )


@fault("BGR in every image", "colours")
def _(at, index):
    return seen_as(
        at, index, lambda item: Seen(item, by_channel(item)[:, ::-1].reshape(pixels_of(item).shape)), None
    )


@fault("CLIP's mean and deviation in one image", "normalisation")
def _(at, index):
    def change(item):
        values = ((by_channel(item) * 0.5 + 0.5) - CLIP[0][:, None]) / CLIP[1][:, None]
        return Seen(item, values.reshape(pixels_of(item).shape))

    return seen_as(at, index, change, -1)


@fault("no normalisation", "normalisation")
def _(at, index):
    return seen_as(at, index, lambda item: Seen(item, pixels_of(item) * 0.5 + 0.5), None)


@fault("normalised twice", "normalisation")
def _(at, index):
    return seen_as(at, index, lambda item: Seen(item, (pixels_of(item) - 0.5) / 0.5), None)


@fault("raw levels", "normalisation")
def _(at, index):
    return seen_as(at, index, lambda item: Seen(item, (pixels_of(item) * 0.5 + 0.5) * 255), 0)


@fault("two images exchanged", "image order")
def _(at, index):
    """Images of one size, the second one new to the second turn."""
    rng = np.random.default_rng(index)
    sample, items = at.samples[index], images(at.samples[index])
    items[-1] = reframed(items[0], rng.integers(0, 256, items[0].frames.shape, dtype=np.uint8))
    row = Row().add([BOS, OPENER, 5, 6, OPENER]).image(items[0]).add([7, 8, ANSWER])
    row.add(sample.token_ids[sample.loss_mask][:8], True).add([OPENER]).image(items[-1]).add([9, ANSWER])
    true = row.add(sample.token_ids[sample.loss_mask][8:16], True).sample("exchanged")
    saw = scored(at.model, at.tiny, showing(true, images(true)[::-1]))
    return Planted(as_trained(saw, true), 0)


@fault("a stale image under a hash", "stale image")
def _(at, index):
    sample, items = at.samples[index], images(at.samples[index])
    rng = np.random.default_rng(index)
    other = reframed(items[-1], rng.integers(0, 256, items[-1].frames.shape, dtype=np.uint8))
    saw = scored(at.model, at.tiny, showing(sample, [*items[:-1], other]))
    return Planted(as_trained(saw, sample), len(items) - 1, options={"others": [other]})


@fault("second frame zero", "temporal frame")
def _(at, index):
    def change(item):
        values = pixels_of(item).reshape(-1, 3, 2, item.layout.patch**2).copy()
        values[:, :, 1] = 0
        return Seen(item, values.reshape(pixels_of(item).shape))

    return seen_as(at, index, change, None)


@fault("second frame black in one image", "temporal frame")
def _(at, index):
    def change(item):
        values = pixels_of(item).reshape(-1, 3, 2, item.layout.patch**2).copy()
        values[:, :, 1] = -1
        return Seen(item, values.reshape(pixels_of(item).shape))

    return seen_as(at, index, change, -1)


@fault("an image mirrored", "turned image")
def _(at, index):
    return seen_as(at, index, lambda item: reframed(item, item.frames[..., ::-1]), -1)


@fault("an image turned by a quarter", "turned image")
def _(at, index):
    return seen_as(at, index, lambda item: reframed(item, np.rot90(item.frames, 1, (-2, -1))), 0)


@fault("a blank image", "blank image")
def _(at, index):
    return seen_as(at, index, lambda item: Seen(item, np.zeros_like(pixels_of(item))), -1)


@fault("patches in plain rows", "patch order")
def _(at, index):
    def change(item):
        _, height, width = item.grid
        squares = pixels_of(item).reshape(height // 2, width // 2, 2, 2, -1)
        return Seen(item, squares.transpose(0, 2, 1, 3, 4).reshape(pixels_of(item).shape))

    return seen_as(at, index, change, None)


@fault("channels last within patches", "patch order")
def _(at, index):
    def change(item):
        side = item.layout.patch
        values = pixels_of(item).reshape(-1, 3, 2, side, side).transpose(0, 2, 3, 4, 1)
        return Seen(item, values.reshape(pixels_of(item).shape))

    return seen_as(at, index, change, 0)


@fault("grid exchanged", "grid")
def _(at, index):
    """Height and width of one image that is not square."""
    items = images(at.samples[index])
    which = next((place for place, item in enumerate(items) if item.grid[1] != item.grid[2]), None)
    if which is None:
        return None

    def change(item):
        return Seen(item, pixels_of(item), (1, item.grid[2], item.grid[1]))

    return seen_as(at, index, change, which)


@fault("bilinear", "resampling")
def _(at, index):
    return seen_as(
        at, index, lambda item: resized(at, item, Image.Resampling.BILINEAR), -1, sources=at.sources
    )


@fault("nearest in every image", "resampling")
def _(at, index):
    return seen_as(
        at, index, lambda item: resized(at, item, Image.Resampling.NEAREST), None, sources=at.sources
    )


@fault("JPEG once more", "compression")
def _(at, index):
    change = lambda item: resized(at, item, Image.Resampling.BICUBIC, 75)  # noqa: E731
    return seen_as(at, index, change, -1, sources=at.sources)


@fault("a quarter of the pixels", "pixel budget")
def _(at, index):
    """One image of half the sides, fewer placeholder tokens among it."""
    sample = at.samples[index]
    spans = sample.media_spans
    which = max(range(len(spans)), key=lambda place: spans[place].item.grid[1] * spans[place].item.grid[2])
    item = spans[which].item
    layout = item.layout
    sides = [max(1, round(side / 2 / layout.merge)) * layout.merge for side in item.grid[1:]]
    source = at.sources[item.identity].resize(
        (sides[1] * layout.patch, sides[0] * layout.patch), Image.Resampling.BICUBIC
    )
    small = reframed(item, np.asarray(source).transpose(2, 0, 1)[None])
    small = msgspec.structs.replace(
        small, expansion=(msgspec.structs.replace(item.expansion[0], count=sides[0] * sides[1] // 4),)
    )
    row = Row()
    done = 0
    for place, span in enumerate(spans):
        for token, is_sampled in zip(
            sample.token_ids[done : span.start - 1], sample.loss_mask[done : span.start - 1], strict=True
        ):
            row.add([token], bool(is_sampled))
        row.image(small if place == which else span.item)
        done = span.stop + 1
    for token, is_sampled in zip(sample.token_ids[done:], sample.loss_mask[done:], strict=True):
        row.add([token], bool(is_sampled))
    saw = scored(at.model, at.tiny, row.sample())
    return Planted(as_trained(saw, sample), which, options={"sources": at.sources})


@fault("no image reached the sampler", "image unseen")
def _(at, index):
    def change(inputs):
        for name in ("pixel_values", "image_grid_thw"):
            del inputs[name]

    sample = at.samples[index]
    return Planted(scored(at.model, at.tiny, sample, change), 0)


@fault("positions on one axis", "positions")
def _(at, index):
    return numbered(at, index, lambda ids, sample: torch.arange(len(sample)).expand_as(ids))


@fault("no rope delta", "positions")
def _(at, index):
    def edit(ids, sample):
        first = int(sample.loss_mask.argmax())
        ids[..., first:] = torch.arange(first, len(sample))
        return ids

    return numbered(at, index, edit)


@fault("no rope delta in the second completion", "positions")
def _(at, index):
    def edit(ids, sample):
        start, stop = sampled_runs(sample.loss_mask)[1]
        ids[..., start:stop] = torch.arange(start, stop)
        return ids

    return numbered(at, index, edit)


@fault("positions one off after an image", "positions")
def _(at, index):
    span = at.samples[index].media_spans[-1]

    def edit(ids, sample):
        ids[..., span.stop :] += 1
        return ids

    return numbered(at, index, edit, image=span.position)


@fault("height and width exchanged in positions", "positions", "grid")
def _(at, index):
    return numbered(at, index, lambda ids, sample: ids[[0, 2, 1]])


@fault("no BOS", "opening")
def _(at, index):
    return prompted(at, index, 0, 1, token=0)


@fault("BOS twice", "opening", "attended padding")
def _(at, index):
    return prompted(at, index, 0, 0, [BOS], token=0)


@fault("no system prompt", "opening")
def _(at, index):
    return prompted(at, index, 1, 7)


@fault("the trainer lacks the system prompt", "opening", "another's prompt")
def _(at, index):
    true = at.samples[index]
    return Planted(as_trained(true, cut(true, 0, 7, [])), token=0)


@fault("the generation prompt lacks two tokens", "generation prompt")
def _(at, index):
    first = int(at.samples[index].loss_mask.argmax())
    return prompted(at, index, first - 2, first)


@fault("another template", "another template")
def _(at, index):
    """Every turn opens with another token."""
    sample = at.samples[index]
    other = replace(
        sample, token_ids=np.where(sample.token_ids == OPENER, 83, sample.token_ids).astype(np.int32)
    )
    built = [other if place == index else one for place, one in enumerate(at.samples)]
    saw = scored(at.model, at.tiny, other)
    return Planted(
        as_trained(saw, sample), options={"alternatives": {"the other template": [built[index], *built]}}
    )


@fault("attended padding", "attended padding")
def _(at, index):
    return prompted(at, index, 0, 0, [PAD_ID] * (3 + 5 * index))


@fault("a completion was encoded again", "encoded again")
def _(at, index):
    """The sampler drew two letters, the trainer has their pair, and one token less."""
    sample = at.samples[index]
    start, _ = sampled_runs(sample.loss_mask)[0]
    true = sample.token_ids.copy()
    pair = 10 + index
    true[start + 3 : start + 5] = 3 + pair, 4 + pair
    saw = scored(at.model, at.tiny, replace(sample, token_ids=true))
    row = Row()
    row.ids = [*true[: start + 3], 43 + pair, *true[start + 5 :]]
    row.mask = [*saw.loss_mask[: start + 3], *saw.loss_mask[start + 4 :]]
    row.entries = [(s.range.shifted(-1 if s.start > start else 0), s.item) for s in sample.media_spans]
    # Numbers are laid to tokens from the front, and the one too many is dropped.
    first = int(saw.loss_mask.sum()) // 2
    values = saw.logprobs[saw.loss_mask]
    trained = row.sample(sample.sample_id)
    second = scored(at.model, at.tiny, trained).logprobs[trained.loss_mask][first - 1 :]
    return Planted(recorded(trained, [*values[: first - 1], *second]), token=start + 3)


@fault("a wrong final token", "final token")
def _(at, index):
    sample = at.samples[index]
    end = sampled_runs(sample.loss_mask)[1][1] - 1
    ids = sample.token_ids.copy()
    ids[end] = OTHER_STOP
    return Planted(replace(sample, token_ids=ids), token=end)


@fault("a token altered", "altered token")
def _(at, index):
    sample = at.samples[index]
    place = sampled_runs(sample.loss_mask)[1][0] + 2 + index
    ids = sample.token_ids.copy()
    ids[place] = 3 + (ids[place] + 7) % 40
    return Planted(replace(sample, token_ids=ids), token=place)


@fault("a token lost", "altered token")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[1]
    place = start + 3
    ids = sample.token_ids.copy()
    ids[place : stop - 1] = sample.token_ids[place + 1 : stop]
    # Of equal tokens in a row the last one may as well be the one that is lost.
    place = int(np.flatnonzero(ids != sample.token_ids)[0])
    return Planted(replace(sample, token_ids=ids), token=place)


@fault("tokens shifted", "shifted tokens")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[index % 2]
    ids = sample.token_ids.copy()
    ids[start:stop] = np.roll(ids[start:stop], 1)
    return Planted(replace(sample, token_ids=ids), token=start)


@fault("log-probabilities shifted", "shifted numbers")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[index % 2]
    logprobs = sample.logprobs.copy()
    logprobs[start:stop] = np.roll(logprobs[start:stop], 1 + index)
    return Planted(replace(sample, logprobs=logprobs), token=start)


@fault("temperature", "temperature")
def _(at, index):
    return sampled_by(at, index, lambda logits: logits / (0.6, 0.8, 1.3)[index])


@fault("top_p", "top_p", "top_k", "min_p")
def _(at, index):
    """Kept are the tokens that were sampled, and at the most 95 % of the mass."""
    sample = at.samples[index]
    logprobs = numbers(at.model, at.tiny, sample).log_softmax(-1)
    tokens = torch.from_numpy(sample.token_ids[sample.loss_mask].astype(np.int64))[:, None]
    ordered = logprobs.sort(-1, descending=True).values
    before = ordered.exp().cumsum(-1) - ordered.exp()
    own = logprobs.gather(1, tokens)[:, 0]
    least = torch.stack([before[row][ordered[row] == own[row]][0] for row in range(len(own))]).max()
    kept = before < max(0.9, float(least) + 1e-6)
    mass = torch.where(kept, ordered.exp(), 0).sum(-1)
    return Planted(recorded(sample, (own - mass.log()).numpy()))


@fault("a repetition penalty", "penalty")
def _(at, index):
    sample = at.samples[index]
    places = np.flatnonzero(sample.loss_mask)

    def rule(logits):
        for row, place in enumerate(places):
            seen = np.unique(sample.token_ids[:place])
            own = logits[row, seen]
            logits[row, seen] = torch.where(own > 0, own / 1.3, own * 1.3)
        return logits

    return sampled_by(at, index, rule)


@fault("a token that could not be sampled", "logit bias")
def _(at, index):
    def rule(logits):
        logits[:, 20 + index] = -torch.inf
        return logits

    sample = at.samples[index]
    ids = np.where((sample.token_ids == 20 + index) & sample.loss_mask, 11, sample.token_ids).astype(np.int32)
    changed = replace(sample, token_ids=ids)
    return Planted(scored(at.model, at.tiny, changed, rule=rule))


@fault("logarithms to the base 2", "form")
def _(at, index):
    return values_of(at, index, lambda values: values / np.log(2))


@fault("probabilities", "form")
def _(at, index):
    return values_of(at, index, np.exp)


@fault("the opposite sign", "form")
def _(at, index):
    return values_of(at, index, lambda values: -values)


@fault("zeros", "missing")
def _(at, index):
    return values_of(at, index, np.zeros_like)


@fault("no numbers", "missing")
def _(at, index):
    return values_of(at, index, lambda values: np.full_like(values, np.nan))


@fault("means over completions", "summed")
def _(at, index):
    return values_of(at, index, lambda values: np.repeat(values.reshape(2, -1).mean(1), len(values) // 2))


@fault("two decimals", "rounded")
def _(at, index):
    return values_of(at, index, lambda values: np.round(values, 2))


@fault("clipped", "clipped")
def _(at, index):
    return values_of(at, index, lambda values: np.maximum(values, np.sort(values)[len(values) // 2]))


@fault("the likeliest token's", "other number")
def _(at, index):
    sample = at.samples[index]
    return Planted(recorded(sample, numbers(at.model, at.tiny, sample).log_softmax(-1).amax(-1).numpy()))


@fault("held to a grammar", "restricted")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[1]
    logprobs = sample.logprobs.copy()
    logprobs[start:stop] = 0
    logprobs[start + 2 : start + 5] /= 3
    logprobs[start + 3] = sample.logprobs[start + 3] / 3
    return Planted(replace(sample, logprobs=logprobs), token=start)


@fault("another rollout's log-probabilities", "another's numbers")
def _(at, index):
    sample, other = at.samples[index], at.samples[(index + 1) % 3]
    start, stop = sampled_runs(sample.loss_mask)[0]
    first, last = sampled_runs(other.loss_mask)[0]
    logprobs = sample.logprobs.copy()
    logprobs[start:stop] = other.logprobs[first:last]
    return Planted(replace(sample, logprobs=logprobs), token=start)


@fault("turns' log-probabilities exchanged", "another's numbers")
def _(at, index):
    return values_of(at, index, lambda values: np.roll(values, len(values) // 2))


@fault("another rollout's tokens", "another's tokens")
def _(at, index):
    sample, other = at.samples[index], at.samples[(index + 1) % 3]
    start, stop = sampled_runs(sample.loss_mask)[1]
    first, last = sampled_runs(other.loss_mask)[1]
    ids = sample.token_ids.copy()
    ids[start:stop] = other.token_ids[first:last]
    saw = scored(at.model, at.tiny, replace(sample, token_ids=ids))
    return Planted(as_trained(saw, sample), token=start)


@fault("turns exchanged", "exchanged turns")
def _(at, index):
    """Both completions, with their log-probabilities, in the other one's turn."""
    sample = at.samples[index]
    (a, b), (c, d) = sampled_runs(sample.loss_mask)
    order = [*range(a), *range(c, d), *range(b, c), *range(a, b), *range(d, len(sample))]
    return Planted(
        replace(sample, token_ids=sample.token_ids[order], logprobs=sample.logprobs[order]), token=a
    )


@fault("another branch's prompt", "another's prompt", "stale image")
def _(at, index):
    """The second turn was asked otherwise in the branch that the trainer has."""
    sample = at.samples[index]
    start = sampled_runs(sample.loss_mask)[1][0]
    other = replace(sample, token_ids=sample.token_ids.copy(), sample_id="the other branch")
    other.token_ids[start - 6 : start - 3] = (30, 31, 32)
    saw = scored(at.model, at.tiny, other)
    mask = np.arange(len(sample)) >= start
    other = scored(at.model, at.tiny, replace(other, loss_mask=other.loss_mask & mask))
    both = as_trained(saw, sample)
    return Planted(both, options={"peers": [saw]}, token=start)


@fault("stale weights", "weights")
def _(at, index):
    with other_weights(at.model, lambda name: True) as old:
        sample = scored(at.model, at.tiny, at.samples[index])
    return Planted(sample, options={"weights": {"the step before": old}})


@fault("stale weights in one layer", "weights")
def _(at, index):
    with other_weights(at.model, lambda name: True) as old:
        pass
    with other_weights(at.model, lambda name: False):
        for name, one in at.model.named_parameters():
            if "language_model.layers.1." in name:
                one.data = old[name]
        sample = scored(at.model, at.tiny, at.samples[index])
    return Planted(sample, options={"weights": {"the step before": old}})


@fault("a head tied to the embedding", "head")
def _(at, index):
    head = at.model.get_output_embeddings()
    kept = head.weight.data
    head.weight.data = at.model.get_input_embeddings().weight.data
    try:
        return Planted(scored(at.model, at.tiny, at.samples[index]))
    finally:
        head.weight.data = kept


@contextmanager
def bfloat16(module: Any) -> Any:
    """The module's weights and computation in bfloat16, as where a part is loaded so."""
    kept = [(one, one.data) for one in module.parameters()]
    for one in module.parameters():
        one.data = one.data.to(torch.bfloat16)

    def cast(value: Any, dtype: Any) -> Any:
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    hooks = [
        module.register_forward_pre_hook(lambda m, args: tuple(cast(one, torch.bfloat16) for one in args)),
    ]

    def leave(_m: Any, _args: Any, out: Any) -> Any:
        if torch.is_tensor(out):
            return cast(out, torch.float32)
        for key in list(out.keys()):
            value = out[key]
            out[key] = (
                [cast(v, torch.float32) for v in value]
                if isinstance(value, list)
                else cast(value, torch.float32)
            )
        return out

    hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for one, data in kept:
            one.data = data
        for hook in hooks:
            hook.remove()


@fault("the vision tower in bfloat16", "dtype of a part")
def _(at, index):
    return computed_by(at, index, bfloat16(at.model.model.visual))


@fault("the head in bfloat16", "dtype of a part")
def _(at, index):
    return computed_by(at, index, bfloat16(at.model.lm_head))


@fault("a layer left out", "layer left out")
def _(at, index):
    layer = at.model.model.language_model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        return Planted(scored(at.model, at.tiny, at.samples[index]))
    finally:
        layer.forward = forward


@fault("another rotary base", "rotary base")
def _(at, index):
    rotary = at.model.model.language_model.rotary_emb
    kept = rotary.inv_freq
    rotary.inv_freq = 1e6 ** (-torch.arange(len(kept)) / len(kept))
    try:
        return Planted(scored(at.model, at.tiny, at.samples[index]))
    finally:
        rotary.inv_freq = kept


@fault("an image attended to in both directions", "attention")
def _(at, index):
    sample = at.samples[index]
    seen = torch.ones(len(sample), len(sample), dtype=torch.bool).tril()
    for span in sample.media_spans:
        seen[span.start : span.stop, span.start : span.stop] = True

    def change(inputs):
        inputs["attention_mask"] = torch.zeros(1, 1, *seen.shape).masked_fill(
            ~seen, torch.finfo(torch.float32).min
        )

    return Planted(scored(at.model, at.tiny, sample, change))


@fault("two images of unlike sizes exchanged", "image order")
def _(at, index):
    """Before the first completion, placeholders and all."""
    sample = at.samples[index]
    items = sorted(images(sample), key=lambda item: item.grid[1] * item.grid[2])
    small, large = items[0], items[-1]
    if small.grid[1] * small.grid[2] == large.grid[1] * large.grid[2]:
        return None
    tokens = sample.token_ids[sample.loss_mask][:12]

    def shown(one, two):
        row = Row().add([BOS, OPENER, 7]).image(one).add([8, 9]).image(two).add([10, ANSWER])
        return row.add(tokens, True).sample("unlike")

    return Planted(as_trained(scored(at.model, at.tiny, shown(large, small)), shown(small, large)), 0)


@fault("every image upside down", "turned image")
def _(at, index):
    return seen_as(at, index, lambda item: reframed(item, item.frames[..., ::-1, :]), None)


@fault("an image that was not attended to", "image unseen", "attention")
def _(at, index):
    sample = at.samples[index]
    span = sample.media_spans[-1]

    def change(inputs):
        inputs["attention_mask"][:, span.start : span.stop] = 0

    return Planted(scored(at.model, at.tiny, sample, change), span.position)


@fault("padding between prompt and completion", "attended padding")
def _(at, index):
    first = int(at.samples[index].loss_mask.argmax())
    return prompted(at, index, first, first, [PAD_ID] * (2 + index))


@fault("a line more before each completion", "generation prompt")
def _(at, index):
    sample = at.samples[index]
    other = sample
    for start, _ in reversed(sampled_runs(sample.loss_mask)):
        other = cut(other, start, start, [6])
    return Planted(as_trained(scored(at.model, at.tiny, other), sample))


@fault("a stop token added after sampling", "final token")
def _(at, index):
    sample = at.samples[index]
    end = sampled_runs(sample.loss_mask)[index % 2][1] - 1
    logprobs = sample.logprobs.copy()
    logprobs[end] = 0
    return Planted(replace(sample, logprobs=logprobs), token=end)


@fault("a completion encoded again in two places", "encoded again")
def _(at, index):
    """One token more where the sampler had a pair, and one less where it had two letters."""
    sample = at.samples[index]
    start, _ = sampled_runs(sample.loss_mask)[1]
    true, trained = sample.token_ids.copy(), sample.token_ids.copy()
    true[start + 2 : start + 9] = (60, 5, 6, 12 + index, 13 + index, 7, 8)
    trained[start + 2 : start + 9] = (20, 21, 5, 6, 52 + index, 7, 8)
    saw = scored(at.model, at.tiny, replace(sample, token_ids=true))
    return Planted(as_trained(saw, replace(sample, token_ids=trained)), token=start + 2)


@fault("running sums", "summed")
def _(at, index):
    return values_of(
        at, index, lambda values: np.concatenate([np.cumsum(part) for part in np.split(values, 2)])
    )


@fault("temperature in one completion", "temperature")
def _(at, index):
    sample = at.samples[index]
    hot = scored(at.model, at.tiny, sample, rule=lambda logits: logits / 0.7).logprobs
    start, stop = sampled_runs(sample.loss_mask)[1]
    logprobs = sample.logprobs.copy()
    logprobs[start:stop] = hot[start:stop]
    return Planted(replace(sample, logprobs=logprobs), token=start)


@fault("a presence penalty", "penalty")
def _(at, index):
    sample = at.samples[index]
    runs = sampled_runs(sample.loss_mask)
    places = np.flatnonzero(sample.loss_mask)

    def rule(logits):
        for row, place in enumerate(places):
            start = max(start for start, _ in runs if start <= place)
            logits[row, np.unique(sample.token_ids[start:place])] -= 0.8
        return logits

    return sampled_by(at, index, rule)


@fault("an adapter that was not merged", "adapter")
def _(at, index):
    """The trainer's model has low-rank updates that can be switched off."""
    generator = torch.Generator().manual_seed(index)
    head = at.model.get_output_embeddings()
    base = head.weight.data
    rows, columns = base.shape
    update = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator) * 0.05

    @contextmanager
    def disable():
        merged, head.weight.data = head.weight.data, base
        try:
            yield
        finally:
            head.weight.data = merged

    return Planted(at.samples[index], options={"adapter": (head, base + update, disable)})


@fault("BGR from a sampler in bfloat16", "colours")
def _(at, index):
    sample = at.samples[index]
    bgr = [Seen(item, by_channel(item)[:, ::-1].reshape(pixels_of(item).shape)) for item in images(sample)]
    with bfloat16_weights(at.model):
        saw = scored(at.model, at.tiny, showing(sample, bgr))
        others = [scored(at.model, at.tiny, one) for one in at.samples]
    return Planted(as_trained(saw, sample), 0, options={"rollouts": others})


@contextmanager
def bfloat16_weights(model: Any) -> Any:
    """Every weight rounded to bfloat16, as a sampler's arithmetic would be off."""
    kept = [(one, one.data) for one in model.parameters()]
    for one, data in kept:
        one.data = data.to(torch.bfloat16).float()
    try:
        yield
    finally:
        for one, data in kept:
            one.data = data


def healthy(family: str, folder: Path, count: int) -> int:
    """Audit healthy rollouts whose sampler and trainer compute in float32 or bfloat16; return the alarms."""
    tiny = tiny_family(family, folder)
    alarms = 0
    low = copy.deepcopy(tiny.model).to(torch.bfloat16)
    for buffer, own in zip(low.buffers(), tiny.model.buffers(), strict=True):
        buffer.data = own.data
    models = {"float32": tiny.model, "bfloat16": low}
    for number, (sampler, trainer) in enumerate((one, two) for one in models for two in models):
        part = range(number * count // 4, (number + 1) * count // 4)
        samples = [rollout(tiny, models[sampler], 100 + seed, {}, tokens=8) for seed in part]
        report = audit(samples, TrainerModel(models[trainer]), decode=decode)
        print(
            f"{family}: {len(samples)} sampled in {sampler}, trained in {trainer}: {report.text()}",
            flush=True,
        )
        alarms += len(report.departing) + len(report.findings) + len(report.unread)
    return alarms


def listed() -> str:
    """All faults by kind: the cause of the variation that names each."""
    causes = {one.name: one.cause for group in GROUPS for one in group} | dict(CAUSES)
    kinds: dict[str, list[str]] = {}
    for name, (expected, _) in FAULTS.items():
        kind = causes.get(expected[0], "logprobs") if expected else "nothing to try"
        kinds.setdefault(kind, []).append(name)
    return " ".join(f"*{kind}* ({len(names)}): {'; '.join(names)}." for kind, names in kinds.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="*", default=FAMILIES)
    parser.add_argument("--fault", nargs="*", default=list(FAULTS))
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--tolerance", type=float, help="nats a token; measured if not given")
    parser.add_argument("--healthy", type=int, default=0, help="audit so many healthy rollouts instead")
    parser.add_argument("--list", action="store_true", help="print the names of all faults by kind")
    parser.add_argument("--quiet", action="store_true", help="print only what was not named")
    options = parser.parse_args()
    if options.list:
        print(textwrap.fill(listed(), 120, break_on_hyphens=False))
        return 0
    torch.set_num_threads(1)
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for family in options.family:
            if options.healthy:
                alarms = healthy(family, Path(folder), options.healthy)
                verdicts["healthy"] += options.healthy
                verdicts["wrong"] += alarms
                continue
            at = scene(family, Path(folder))
            for name in options.fault:
                for index in range(options.samples):
                    outcome = judge(name, family, at, index, tolerance=options.tolerance)
                    if outcome is None:
                        continue
                    verdicts[outcome.verdict] += 1
                    if outcome.verdict != "named" or not options.quiet:
                        print(
                            f"{family} {index} {outcome.verdict:10} {outcome.seconds:5.1f}s {name}: {outcome.finding[:300]}",
                            flush=True,
                        )
    print(dict(verdicts))
    return int(verdicts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
