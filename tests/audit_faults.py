"""Faults planted between sampler and trainer, as one table, and the verdicts of audits about them.

Each is planted in rollouts of tiny models: on the sampler's side by computing its log-probabilities differently, or on
the trainer's side by changing the sample. A row has the variations that may name the fault, none if no audit can, and
the arguments of its planting. Run as a program it plants all of them and prints a table.
"""

import argparse
import copy
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from audit_cases import (
    ANSWER,
    BOS,
    FAMILIES,
    FAULTS,
    LETTERS,
    OPENER,
    OTHER_STOP,
    Planted,
    Row,
    Scene,
    Seen,
    as_trained,
    decode,
    images,
    judge,
    numbers,
    picture,
    pixels_of,
    recorded,
    reframed,
    rollout,
    scene,
    scored,
    showing,
)
from mmrender.audit import TrainerModel, audit
from mmrender.audit.report import sampled_runs
from mmrender.trajectory.sample import TrainingSample
from training_cases import PAD_ID
from training_models import tiny_family

CLIP = (np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711]))


def plant(planting: Callable[..., Planted | None], rows: dict[str, tuple[Any, ...]]) -> None:
    """Register faults of one planting: by name the variations, joined by `|`, and the planting's arguments."""
    for name, (variations, *arguments) in rows.items():
        expected = tuple(variations.split("|")) if variations else ()
        FAULTS[name] = expected, lambda at, index, own=tuple(arguments): planting(at, index, *own)


def fault(name: str, variations: str = "") -> Callable[[Any], Any]:
    """Register a fault that is planted by a function of its own."""

    def register(planting: Any) -> Any:
        plant(planting, {name: (variations,)})
        return planting

    return register


def scored_by(at: Scene, index: int, change: Callable[[Any, TrainingSample], None], **named: Any) -> Planted:
    """The sampler's model had other inputs."""
    sample = at.samples[index]
    return Planted(scored(at.model, at.tiny, sample, lambda inputs: change(inputs, sample)), **named)


# --- pixels


def seen(at: Scene, index: int, which: int | None, change: Any, *, sources: bool = False) -> Planted:
    """The sampler saw one image, or all of them (None), changed."""
    sample, items = at.samples[index], images(at.samples[index])
    number = len(items) - 1 if which == -1 else which
    changed = [change(at, item) if number in (None, place) else item for place, item in enumerate(items)]
    saw = scored(at.model, at.tiny, showing(sample, changed))
    options = {"sources": at.sources} if sources else {}
    return Planted(as_trained(saw, sample), number or 0, options=options)


def seen_with_sources(at: Scene, index: int, which: int | None, change: Any) -> Planted:
    return seen(at, index, which, change, sources=True)


def pixels(change: Callable[[Any], Any], *shape: int) -> Any:
    """A change of the pixel dtype, in a shape."""

    def of(at: Scene, item: Any) -> Any:
        values = pixels_of(item)
        return Seen(item, change(values.reshape(shape) if shape else values).reshape(values.shape))

    return of


def by_patch(change: Callable[[Any, Any], Any]) -> Any:
    """A change of the pixel dtype that needs the item."""
    return lambda at, item: Seen(item, change(pixels_of(item), item).reshape(pixels_of(item).shape))


def levels(change: Callable[[Any], Any]) -> Any:
    return lambda at, item: reframed(item, change(item.frames))


def framed(change: Callable[[Any, int, int], Any]) -> Any:
    """A change of levels `(3, h, w)` as an image."""

    def of(at: Scene, item: Any) -> Any:
        image = Image.fromarray(item.frames[0].transpose(1, 2, 0))
        return reframed(item, np.asarray(change(image, *image.size).convert("RGB")).transpose(2, 0, 1)[None])

    return of


def source(change: Callable[[Any], Any], method: Any = Image.Resampling.BICUBIC) -> Any:
    """A change of the image before it was resized."""

    def of(at: Scene, item: Any) -> Any:
        height, width = item.frames.shape[-2:]
        image = change(at.sources[item.identity]).resize((width, height), method)
        return reframed(item, np.asarray(image.convert("RGB")).transpose(2, 0, 1)[None])

    return of


def jpeg(image: Any, quality: int) -> Any:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return Image.open(out)


def letterboxed(fill: int) -> Any:
    def padded(image: Any) -> Any:
        side = max(image.size)
        out = Image.new("RGB", (side, side), (fill, fill, fill))
        out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return out

    return source(padded)


def cropped(image: Any) -> Any:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def black(frames: Any, rows: int) -> Any:
    """The last rows black."""
    out = frames.copy()
    out[..., -rows:, :] = 0
    return out


def second_frame(value: int) -> Any:
    def change(values: Any, item: Any) -> Any:
        planes = values.reshape(-1, 3, 2, item.layout.patch**2).copy()
        planes[:, :, 1] = value
        return planes

    return by_patch(change)


def in_plain_rows(values: Any, item: Any) -> Any:
    _, height, width = item.grid
    return values.reshape(height // 2, width // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4)


def channels_last(values: Any, item: Any) -> Any:
    return values.reshape(-1, 3, 2, item.layout.patch, item.layout.patch).transpose(0, 2, 3, 4, 1)


def in_clip_norm(values: Any) -> Any:
    return ((values.reshape(len(values), 3, -1) * 0.5 + 0.5) - CLIP[0][:, None]) / CLIP[1][:, None]


def over_256(values: Any, item: Any) -> Any:
    """Pixels of levels that were divided by 256."""
    mean, std = (np.array(each)[:, None] for each in (item.arithmetic.mean, item.arithmetic.std))
    return ((values.reshape(len(values), 3, -1) * std + mean) * (255 / 256) - mean) / std


def first_squares_exchanged(values: Any) -> Any:
    squares = values.reshape(-1, 4, values.shape[-1]).copy()
    squares[[0, 1]] = squares[[1, 0]]
    return squares


def bgr(values: Any) -> Any:
    return values.reshape(len(values), 3, -1)[:, ::-1]


def gamma(image: Any, w: int, h: int) -> Any:
    return Image.fromarray((255 * (np.asarray(image) / 255.0) ** 2.2).round().astype(np.uint8))


plant(seen, {
    "one patch off": ("patch order", -1, pixels(lambda own: np.roll(own, 1, 0))),
    "a row of patches off in every image": ("patch order", None, by_patch(lambda own, item: np.roll(own, -2 * item.grid[2], 0))),
    "BGR in one image": ("channels", 0, pixels(bgr)),
    "BGR in every image": ("channels", None, pixels(bgr)),
    "CLIP's mean and deviation in one image": ("normalisation", -1, pixels(in_clip_norm)),
    "no normalisation": ("normalisation", None, pixels(lambda own: own * 0.5 + 0.5)),
    "normalised twice": ("normalisation", None, pixels(lambda own: (own - 0.5) / 0.5)),
    "raw levels": ("normalisation", 0, pixels(lambda own: (own * 0.5 + 0.5) * 255)),
    "second frame zero": ("temporal frame", None, second_frame(0)),
    "second frame black in one image": ("temporal frame", -1, second_frame(-1)),
    "an image mirrored": ("orientation", -1, levels(lambda own: own[..., ::-1])),
    "an image turned by a quarter": ("orientation", 0, levels(lambda own: np.rot90(own, 1, (-2, -1)))),
    "every image upside down": ("orientation", None, levels(lambda own: own[..., ::-1, :])),
    "a blank image": ("blank image", -1, pixels(np.zeros_like)),
    "patches in plain rows": ("patch order", None, by_patch(in_plain_rows)),
    "channels last within patches": ("patch order", 0, by_patch(channels_last)),
})  # fmt: skip
plant(seen_with_sources, {
    "bilinear": ("resampling", -1, source(lambda image: image, Image.Resampling.BILINEAR)),
    "nearest in every image": ("resampling", None, source(lambda image: image, Image.Resampling.NEAREST)),
    "JPEG once more": ("compression", -1, source(lambda image: jpeg(image, 75))),
    "JPEG without the source": ("", -1, framed(lambda image, w, h: jpeg(image, 60))),
    "grey in one image": ("channels", -1, framed(lambda image, w, h: image.convert("L"))),
    "inverted levels": ("channels", 0, levels(lambda own: 255 - own)),
    "one channel for all": ("channels", -1, levels(lambda own: np.repeat(own[:, 1:2], 3, 1))),
    "two channels swapped": ("channels", None, levels(lambda own: own[:, [1, 0, 2]])),
    "centre cropped": ("framing", -1, source(cropped)),
    "letterboxed on black": ("framing", 0, letterboxed(0)),
    "letterboxed on grey everywhere": ("framing", None, letterboxed(128)),
    "squares of patches turned over": ("patch order", -1, by_patch(lambda own, item: own.reshape(-1, 2, 2, own.shape[-1]).transpose(0, 2, 1, 3))),
    "patches in reverse order": ("patch order", 0, pixels(lambda own: own[::-1])),
    "EXIF orientation ignored": ("orientation", -1, lambda at, item: at.tiny.process(at.sources[item.identity].transpose(Image.Transpose.ROTATE_90))),
    "pixels rounded to bfloat16": ("pixel dtype", None, pixels(lambda own: torch.from_numpy(own).bfloat16().float().numpy())),
    "pixels rounded to eighths": ("pixel dtype", -1, pixels(lambda own: np.round(own * 8) / 8)),
    "levels truncated to 4 bits": ("pixel dtype", -1, levels(lambda own: own // 16 * 16)),
    "levels over 256, not 255": ("", None, by_patch(over_256)),
    "pixels of the wrong sign": ("normalisation|channels", 0, pixels(lambda own: -own)),
    "pixels halved": ("normalisation", -1, pixels(lambda own: own / 2)),
    "one pixel to the left": ("framing|patch order", -1, levels(lambda own: np.roll(own, -1, -1))),
    "the lower half black": ("framing|blank image", -1, levels(lambda own: black(own, own.shape[-2] - own.shape[-2] // 2))),
    "the last row of patches black": ("", -1, levels(lambda own: black(own, 14))),
    "blurred": ("", -1, framed(lambda image, w, h: image.resize((w // 2, h // 2)).resize((w, h), Image.Resampling.BICUBIC))),
    "half of its pixels, enlarged": ("", -1, framed(lambda image, w, h: image.resize((w // 2, h // 2), 0).resize((w, h), 0))),
    "another image of the same size": ("", -1, levels(lambda own: np.random.default_rng(5).integers(0, 256, own.shape, np.uint8))),
    "two squares of patches exchanged": ("", -1, pixels(first_squares_exchanged)),
    "gamma applied": ("", -1, framed(gamma)),
    "brighter by ten levels": ("", -1, levels(lambda own: np.clip(own.astype(int) + 10, 0, 255).astype(np.uint8))),
    "16 colours": ("", -1, framed(lambda image, w, h: image.quantize(16))),
})  # fmt: skip


@fault("grid exchanged", "grid")
def _(at, index):
    """Height and width of one image that is not square."""
    items = images(at.samples[index])
    which = next((place for place, item in enumerate(items) if item.grid[1] != item.grid[2]), None)
    if which is None:
        return None
    return seen(at, index, which, lambda at, item: Seen(item, pixels_of(item), (1, *item.grid[:0:-1])))


def noise_like(item: Any, rng: np.random.Generator) -> Any:
    return reframed(item, rng.integers(0, 256, item.frames.shape, dtype=np.uint8))


@fault("two images exchanged", "image order")
def _(at, index):
    """Images of one size, the second one new to the second turn."""
    sample, first = at.samples[index], images(at.samples[index])[0]
    tokens = sample.token_ids[sample.loss_mask]
    row = (
        Row()
        .add([BOS, OPENER, 5, 6, OPENER])
        .image(first)
        .add([7, 8, ANSWER])
        .add(tokens[:8], True)
        .add([OPENER])
    )
    row.image(noise_like(first, np.random.default_rng(index))).add([9, ANSWER])
    true = row.add(tokens[8:16], True).sample("exchanged")
    return Planted(as_trained(scored(at.model, at.tiny, showing(true, images(true)[::-1])), true), 0)


@fault("two images of unlike sizes exchanged", "image order")
def _(at, index):
    """Before the first completion, placeholders and all."""
    sample = at.samples[index]
    small, *_, large = sorted(images(sample), key=lambda item: item.grid[1] * item.grid[2])
    if small.grid[1] * small.grid[2] == large.grid[1] * large.grid[2]:
        return None

    def shown(one, two):
        row = Row().add([BOS, OPENER, 7]).image(one).add([8, 9]).image(two).add([10, ANSWER])
        return row.add(sample.token_ids[sample.loss_mask][:12], True).sample("unlike")

    return Planted(as_trained(scored(at.model, at.tiny, shown(large, small)), shown(small, large)), 0)


@fault("a stale image under a hash", "stale image")
def _(at, index):
    sample, (*items, last) = at.samples[index], images(at.samples[index])
    other = noise_like(last, np.random.default_rng(index))
    saw = scored(at.model, at.tiny, showing(sample, [*items, other]))
    return Planted(as_trained(saw, sample), len(items), options={"others": [other]})


@fault("a quarter of the pixels", "pixel budget")
def _(at, index):
    """One image of half the sides, fewer placeholder tokens among it."""
    sample, spans = at.samples[index], at.samples[index].media_spans
    which = max(range(len(spans)), key=lambda place: spans[place].item.grid[1] * spans[place].item.grid[2])
    item = spans[which].item
    layout = item.layout
    height, width = (max(1, round(side / 2 / layout.merge)) * layout.merge for side in item.grid[1:])
    image = at.sources[item.identity].resize(
        (width * layout.patch, height * layout.patch), Image.Resampling.BICUBIC
    )
    small = reframed(item, np.asarray(image).transpose(2, 0, 1)[None])
    count = msgspec.structs.replace(item.expansion[0], count=height * width // 4)
    small = msgspec.structs.replace(small, expansion=(count,))
    row, done = Row(), 0
    for place, span in enumerate(spans):
        row.take(sample, done, span.start - 1).image(small if place == which else span.item)
        done = span.stop + 1
    saw = scored(at.model, at.tiny, row.take(sample, done, len(sample)).sample())
    return Planted(as_trained(saw, sample), which, options={"sources": at.sources})


@fault("alpha over white, not black", "background")
def _(at, index):
    sample, (*items, last) = at.samples[index], images(at.samples[index])
    old = at.sources[last.identity]
    alpha = np.random.default_rng(index).integers(0, 256, (old.height, old.width), dtype=np.uint8)
    rgba = old.convert("RGBA")
    rgba.putalpha(Image.fromarray(alpha))

    def over(fill):
        ground = Image.new("RGBA", rgba.size, (fill, fill, fill, 255))
        return at.tiny.process(Image.alpha_composite(ground, rgba).convert("RGB"))

    ours, dark, light = at.tiny.process(rgba), over(0), over(255)
    same = np.array_equal(dark.frames, ours.frames)
    theirs = dark if (index % 2 and not same) or np.array_equal(light.frames, ours.frames) else light
    true = showing(sample, [*items, ours])
    saw = scored(at.model, at.tiny, showing(sample, [*items, theirs]))
    return Planted(
        as_trained(saw, true), len(items), options={"sources": {**at.sources, ours.identity: rgba}}
    )


@fault("two images exchanged and one resized")
def _(at, index):
    sample, items = at.samples[index], images(at.samples[index])

    def resized(own, other):
        image = Image.fromarray(other.frames[0].transpose(1, 2, 0))
        image = image.resize(own.frames.shape[:-3:-1], Image.Resampling.BILINEAR)
        return reframed(own, np.asarray(image).transpose(2, 0, 1)[None])

    changed = [resized(*pair) for pair in zip(items, [items[1], items[0], *items[2:]], strict=True)]
    return Planted(as_trained(scored(at.model, at.tiny, showing(sample, changed)), sample))


@fault("the first image shown for all", "stale image|image order")
def _(at, index):
    rng, sample = np.random.default_rng(index), at.samples[index]
    row, first = Row().add([BOS, OPENER, 5]), images(sample)[0]
    same = [noise_like(first, rng) for _ in range(3)]
    for one in same:
        row.image(one).add([6, 7])
    trained = row.add([ANSWER]).add(sample.token_ids[sample.loss_mask][:12], True).sample("repeated")
    return Planted(as_trained(scored(at.model, at.tiny, showing(trained, [same[0]] * 3)), trained), 1)


@fault("another picture, resized to the same size, in every image")
def _(at, index):
    sample, rng = at.samples[index], np.random.default_rng(40 + index)

    def other(item):
        height, width = item.frames.shape[-2:]
        return reframed(item, np.asarray(picture(rng, (width, height))).transpose(2, 0, 1)[None])

    changed = showing(sample, [other(item) for item in images(sample)])
    return Planted(as_trained(scored(at.model, at.tiny, changed), sample))


@fault("no image reached the sampler", "image unseen")
def _(at, index):
    def change(inputs, sample):
        for name in ("pixel_values", "image_grid_thw"):
            del inputs[name]

    return scored_by(at, index, change, image=0)


@fault("an image that was not attended to", "image unseen|attention")
def _(at, index):
    span = at.samples[index].media_spans[-1]

    def change(inputs, sample):
        inputs["attention_mask"][:, span.start : span.stop] = 0

    return scored_by(at, index, change, image=span.position)


# --- positions and attention


def numbered(at: Scene, index: int, edit: Callable[[Any, TrainingSample], Any], **named: Any) -> Planted:
    """The sampler's model had other position ids: `edit` returns them, or changes them in place."""

    def change(inputs, sample):
        ids = inputs["position_ids"].clone()
        edited = edit(ids, sample)
        inputs["position_ids"] = ids if edited is None else edited

    return scored_by(at, index, change, **named)


def from_numbers(ids, sample, runs):
    """Positions by number of the token, in some runs."""
    for start, stop in runs:
        ids[..., start:stop] = torch.arange(start, stop)


def restarted(ids, runs):
    for start, stop in runs:
        ids[..., start:stop] -= ids[..., start : start + 1].clone()


def one_more_within_images(ids, sample):
    for span in sample.media_spans:
        ids[..., span.start : span.stop] += 1


def half_within_images(ids, sample):
    for span in sample.media_spans:
        own = ids[..., span.start : span.stop]
        own -= (own - own[..., :1]) // 2


def rows_and_columns_from_zero(ids, sample):
    for span in sample.media_spans:
        ids[1:, :, span.start : span.stop] -= ids[:1, :, span.start : span.start + 1].clone()


plant(numbered, {
    "positions on one axis": ("positions", lambda ids, sample: torch.arange(len(sample)).expand_as(ids)),
    "no rope delta": ("positions", lambda ids, sample: from_numbers(ids, sample, [(int(sample.loss_mask.argmax()), len(sample))])),
    "no rope delta in the second completion": ("positions", lambda ids, sample: from_numbers(ids, sample, sampled_runs(sample.loss_mask)[1:])),
    "height and width exchanged in positions": ("positions|grid", lambda ids, sample: ids[[0, 2, 1]]),
    "positions one off within images": ("positions", one_more_within_images),
    "positions half as far apart in images": ("", half_within_images),
    "positions restarted at each turn": ("positions", lambda ids, sample: restarted(ids, [(sampled_runs(sample.loss_mask)[0][1], len(sample))])),
    "positions restarted at each completion": ("positions", lambda ids, sample: restarted(ids, sampled_runs(sample.loss_mask))),
    "an image's rows and columns from zero": ("positions", rows_and_columns_from_zero),
    "positions twice as far apart": ("positions|rotary base", lambda ids, sample: ids * 2),
})  # fmt: skip


@fault("positions one off after an image", "positions")
def _(at, index):
    span = at.samples[index].media_spans[-1]

    def edit(ids, sample):
        ids[..., span.stop :] += 1

    return numbered(at, index, edit, image=span.position)


@fault("positions after images by width", "positions")
def _(at, index):
    """The tokens after an image continue from its width, not from the larger side."""

    def edit(ids, sample):
        for span in sample.media_spans:
            wide = ids[2, 0, span.start : span.stop].max() + 1
            ids[..., span.stop :] += wide - ids[0, 0, span.stop]

    if all(span.item.grid[2] >= span.item.grid[1] for span in at.samples[index].media_spans):
        return None
    return numbered(at, index, edit)


def masked(at: Scene, index: int, edit: Callable[[Any, TrainingSample], Any]) -> Planted:
    """The sampler attended otherwise: `edit` returns the causal mask changed, or changes it in place."""

    def change(inputs, sample):
        seen = torch.ones(len(sample), len(sample), dtype=torch.bool).tril()
        edited = edit(seen, sample)
        seen = seen if edited is None else edited
        empty = torch.zeros(1, 1, *seen.shape)
        inputs["attention_mask"] = empty.masked_fill(~seen, torch.finfo(torch.float32).min)

    return scored_by(at, index, change)


def images_in_both_directions(seen, sample):
    for span in sample.media_spans:
        seen[span.start : span.stop, span.start : span.stop] = True


def images_alone(seen, sample):
    for span in sample.media_spans:
        seen[span.start : span.stop, : span.start] = False


def one_token_unseen(seen, sample):
    start = sampled_runs(sample.loss_mask)[0][0]
    seen[start + 4 :, start + 3] = False


def opening_in_both_directions(seen, sample):
    seen[:7, :7] = True


plant(masked, {
    "an image attended to in both directions": ("attention", images_in_both_directions),
    "a window of 16 tokens": ("attention", lambda seen, sample: seen.triu(-15)),
    "images that see nothing before them": ("attention", images_alone),
    "attention to the future": ("attention", lambda seen, sample: torch.ones_like(seen)),
    "attention to the token after": ("attention", lambda seen, sample: torch.ones_like(seen).tril(1)),
    "a sampled token that no later one attended to": ("", one_token_unseen),
    "a system prompt that was attended to in both directions": ("", opening_in_both_directions),
})  # fmt: skip


# --- prompts and history


def assembled(sample: TrainingSample, pieces: Sequence[Any]) -> TrainingSample:
    """A sample of pieces: ranges of its tokens, or lists of prompt tokens."""
    row = Row()
    for piece in pieces:
        row = row.add(piece) if isinstance(piece, list) else row.take(sample, *piece)
    return row.sample(sample.sample_id)


def cut(sample: TrainingSample, start: int, stop: int, tokens: Sequence[int] = ()) -> TrainingSample:
    """Other prompt tokens in place of `[start, stop)`."""
    return assembled(sample, [(0, start), list(tokens), (stop, len(sample))])


def laid(at: Scene, index: int, pieces: Any, **named: Any) -> Planted:
    """The sampler's prompts were others: pieces of the sample, given its runs."""
    sample = at.samples[index]
    saw = scored(at.model, at.tiny, assembled(sample, pieces(sample, *sampled_runs(sample.loss_mask))))
    return Planted(as_trained(saw, sample), **named)


def prompted(at: Scene, index: int, place: Any, tokens: Any = (), token: int | None = None) -> Planted:
    """The sampler's prompt had other tokens at a place: a range, or a function of the first completion's start."""
    sample = at.samples[index]
    start, stop = place(*(start for start, _ in sampled_runs(sample.loss_mask))) if callable(place) else place
    tokens = tokens(index) if callable(tokens) else tokens
    return Planted(
        as_trained(scored(at.model, at.tiny, cut(sample, start, stop, tokens)), sample), token=token
    )


plant(prompted, {
    "no BOS": ("opening", (0, 1), (), 0),
    "BOS twice": ("opening", (0, 0), (BOS,), 0),
    "no system prompt": ("opening", (1, 7)),
    "the generation prompt lacks two tokens": ("generation prompt", lambda one, two: (one - 2, one)),
    "": ("attended padding", (0, 0), lambda index: [PAD_ID] * (3 + 5 * index)),
    "padding between prompt and completion": ("", lambda one, two: (one, one), lambda index: [PAD_ID] * (2 + index)),
    "padding attended to before the second completion": ("generation prompt", lambda one, two: (two, two), lambda index: [PAD_ID] * (3 + index)),
    "the date in the system prompt": ("", (4, 5), lambda index: [40 + index % 2]),
    "the question cut short": ("", lambda one, two: (one - 6, one - 4)),
})  # fmt: skip
plant(laid, {
    "the system prompt twice": ("opening", lambda own, a, b: [(0, 7), (1, 7), (7, len(own))]),
    "the question asked again after the image": ("", lambda own, a, b: [(0, a[0] - 3), (a[0] - 7, len(own))]),
    "a line more before each completion": ("generation prompt", lambda own, a, b: [(0, a[0]), [6], (a[0], b[0]), [6], (b[0], len(own))]),
})  # fmt: skip


@fault("the prompt cut from the left", "opening")
def _(at, index):
    return prompted(at, index, (0, 5 + index))


def without(at: Scene, index: int, pieces: Any) -> Planted:
    """The last image was elsewhere in the prompt: pieces given the sample, its span and the second completion."""
    span = at.samples[index].media_spans[-1]
    return laid(at, index, lambda own, a, b: pieces(own, span, b), image=span.position)


plant(without, {
    "an image after its text": ("", lambda own, at, b: [(0, at.start - 1), (at.stop + 1, b[0] - 3), (at.start - 1, at.stop + 1), (b[0] - 3, len(own))]),
    "an image twice": ("", lambda own, at, b: [(0, at.stop + 1), (at.start - 1, at.stop + 1), (at.stop + 1, len(own))]),
    "an image left out of the prompt": ("", lambda own, at, b: [(0, at.start - 1), (at.stop + 1, len(own))]),
    "only the placeholders left out": ("", lambda own, at, b: [(0, at.start), (at.stop, len(own))]),
})  # fmt: skip


def second_after(at: Scene, index: int, pieces: Any, true: TrainingSample | None = None) -> Planted:
    """The first completion as it is, the second after another history."""
    sample = at.samples[index] if true is None else true
    one, two = sampled_runs(sample.loss_mask)
    other = assembled(sample, pieces(sample, one, two))
    tail = len(sample) - two[0]
    other = replace(other, loss_mask=other.loss_mask & (np.arange(len(other)) >= len(other) - tail))
    logprobs = sample.logprobs.copy()
    logprobs[two[0] :] = scored(at.model, at.tiny, other).logprobs[len(other) - tail :]
    return Planted(replace(sample, logprobs=logprobs))


def without_first_images(own, a, b):
    pieces, done = [], 0
    for span in own.media_spans:
        if span.start < a[0]:
            pieces, done = [*pieces, (done, span.start - 1)], span.stop + 1
    return [*pieces, (done, len(own))]


plant(second_after, {
    "the newline after a turn missing": ("history", lambda own, a, b: [(0, a[1]), (a[1] + 1, len(own))]),
    "a newline more after a turn": ("history", lambda own, a, b: [(0, a[1]), [6], (a[1], len(own))]),
    "the first turn dropped from history": ("history", lambda own, a, b: [(0, 7), (a[1], len(own))]),
    "the first answer dropped from history": ("history", lambda own, a, b: [(0, a[0]), (a[1], len(own))]),
    "no stop token in history": ("history", lambda own, a, b: [(0, a[1] - 1), (a[1], len(own))]),
    "older images dropped from history": ("history", without_first_images),
    "the first turn twice in the second prompt": ("history", lambda own, a, b: [(0, a[1]), (7, len(own))]),
})  # fmt: skip


@fault("reasoning stripped from history", "history")
def _(at, index):
    return second_after(at, index, lambda own, a, b: [(0, a[0]), (a[0] + 5 + index, len(own))])


@fault("history encoded again", "history|encoded again")
def _(at, index):
    """Letters that make a pair, in the first completion, as that pair in the second prompt."""
    sample = at.samples[index]
    start = sampled_runs(sample.loss_mask)[0][0] + 4
    true = scored(at.model, at.tiny, with_tokens(sample, start, (20 + index, 21 + index)))
    return second_after(at, index, lambda own, a, b: [(0, start), [60 + index], (start + 2, len(own))], true)


@fault("the trainer lacks the system prompt", "opening|another's prompt")
def _(at, index):
    true = at.samples[index]
    return Planted(as_trained(true, cut(true, 0, 7)), token=0)


@fault("another template", "another template")
def _(at, index):
    """Every turn opens with another token."""
    sample = at.samples[index]
    other = replace(
        sample, token_ids=np.where(sample.token_ids == OPENER, 83, sample.token_ids).astype(np.int32)
    )
    built = [other if place == index else one for place, one in enumerate(at.samples)]
    alternatives = {"the other template": [built[index], *built]}
    return Planted(
        as_trained(scored(at.model, at.tiny, other), sample), options={"alternatives": alternatives}
    )


@fault("another rollout's system prompt", "opening|another's prompt")
def _(at, index):
    tokens = (31, 32, 33, 34, 35)
    other = scored(at.model, at.tiny, with_tokens(at.samples[(index + 1) % 3], 2, tokens))
    peers = [replace(other, sample_id="the other prompt")]
    return replace(prompted(at, index, (2, 7), tokens), options={"peers": peers})


@fault("another sample before it in the row", "another's prompt")
def _(at, index):
    sample, other = at.samples[index], at.samples[(index + 1) % 3]
    before = replace(other, loss_mask=np.zeros(len(other), np.bool_))
    packed = Row().take(before, 0, len(other)).take(sample, 0, len(sample))
    return Planted(as_trained(scored(at.model, at.tiny, packed.sample()), sample))


@fault("another branch's prompt", "another's prompt|stale image")
def _(at, index):
    """The second turn was asked otherwise in the branch that the trainer has."""
    sample = at.samples[index]
    start = sampled_runs(sample.loss_mask)[1][0]
    other = replace(with_tokens(sample, start - 6, (30, 31, 32)), sample_id="the other branch")
    saw = scored(at.model, at.tiny, other)
    return Planted(as_trained(saw, sample), options={"peers": [saw]}, token=start)


# --- tokens


def with_tokens(sample: TrainingSample, start: int, tokens: Sequence[int]) -> TrainingSample:
    ids = sample.token_ids.copy()
    ids[start : start + len(tokens)] = tokens
    return replace(sample, token_ids=ids)


@fault("a completion was encoded again", "encoded again")
def _(at, index):
    """The sampler drew two letters, the trainer has their pair, and one token less."""
    sample, pair = at.samples[index], 10 + index
    start = sampled_runs(sample.loss_mask)[0][0] + 3
    true = scored(at.model, at.tiny, with_tokens(sample, start, (3 + pair, 4 + pair)))
    row = Row().take(true, 0, start).add([43 + pair], True).take(true, start + 2, len(true))
    trained = row.sample(sample.sample_id)
    # Numbers are laid to tokens from the front, and the one too many is dropped.
    first, values = int(true.loss_mask.sum()) // 2, true.logprobs[true.loss_mask]
    second = scored(at.model, at.tiny, trained).logprobs[trained.loss_mask][first - 1 :]
    return Planted(recorded(trained, [*values[: first - 1], *second]), token=start)


@fault("a completion encoded again in two places", "encoded again")
def _(at, index):
    """One token more where the sampler had a pair, and one less where it had two letters."""
    sample = at.samples[index]
    start = sampled_runs(sample.loss_mask)[1][0] + 2
    saw = scored(at.model, at.tiny, with_tokens(sample, start, (60, 5, 6, 12 + index, 13 + index, 7, 8)))
    trained = with_tokens(sample, start, (20, 21, 5, 6, 52 + index, 7, 8))
    return Planted(as_trained(saw, trained), token=start)


@fault("a wrong final token", "final token")
def _(at, index):
    end = sampled_runs(at.samples[index].loss_mask)[1][1] - 1
    return Planted(with_tokens(at.samples[index], end, (OTHER_STOP,)), token=end)


@fault("a token altered", "altered token")
def _(at, index):
    sample = at.samples[index]
    place = sampled_runs(sample.loss_mask)[1][0] + 2 + index
    return Planted(with_tokens(sample, place, (3 + (sample.token_ids[place] + 7) % 40,)), token=place)


@fault("a token lost", "altered token")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[1]
    trained = with_tokens(sample, start + 3, sample.token_ids[start + 4 : stop])
    # Of equal tokens in a row the last one may as well be the one that is lost.
    return Planted(trained, token=int(np.flatnonzero(trained.token_ids != sample.token_ids)[0]))


@fault("tokens shifted", "altered token")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[index % 2]
    return Planted(with_tokens(sample, start, np.roll(sample.token_ids[start:stop], 1)), token=start)


@fault("another rollout's tokens", "")
def _(at, index):
    sample, other = at.samples[index], at.samples[(index + 1) % 3]
    start, (first, last) = sampled_runs(sample.loss_mask)[1][0], sampled_runs(other.loss_mask)[1]
    saw = scored(at.model, at.tiny, with_tokens(sample, start, other.token_ids[first:last]))
    return Planted(as_trained(saw, sample), token=start)


@fault("turns exchanged", "")
def _(at, index):
    """Both completions, with their log-probabilities, in the other one's turn."""
    sample = at.samples[index]
    (a, b), (c, d) = sampled_runs(sample.loss_mask)
    order = [*range(a), *range(c, d), *range(b, c), *range(a, b), *range(d, len(sample))]
    return Planted(
        replace(sample, token_ids=sample.token_ids[order], logprobs=sample.logprobs[order]), token=a
    )


# --- the distribution that was sampled from


def sampled_by(at: Scene, index: int, rule: Any) -> Planted:
    """The sampler's logits were others: `rule` returns them given logits, the sample and the index."""
    sample = at.samples[index]
    return Planted(scored(at.model, at.tiny, sample, rule=lambda logits: rule(logits, sample, index)))


def sampled_ids(sample: TrainingSample) -> Any:
    return torch.from_numpy(sample.token_ids[sample.loss_mask].astype(np.int64))[:, None]


def free_tokens(sample: TrainingSample, tokens: Any) -> list[int]:
    return [token for token in tokens if token not in sample.token_ids[sample.loss_mask]]


def penalty(change: Callable[[Any, Any], Any], *, prompt: bool = False) -> Any:
    """A change of the logits of tokens that came before in the completion, or in all: logits and tokens."""

    def rule(logits, sample, index):
        starts = [start for start, _ in sampled_runs(sample.loss_mask)]
        for row, place in enumerate(np.flatnonzero(sample.loss_mask)):
            start = 0 if prompt else max(start for start in starts if start <= place)
            logits[row] = change(logits[row].clone(), sample.token_ids[start:place])
        return logits

    return rule


def repetition(factor: float) -> Any:
    def change(own, tokens):
        seen = np.unique(tokens)
        own[seen] = torch.where(own[seen] > 0, own[seen] / factor, own[seen] * factor)
        return own

    return change


def presence(own, tokens):
    own[np.unique(tokens)] -= 0.8
    return own


def frequency(own, tokens):
    return own - 0.7 * torch.from_numpy(np.bincount(tokens, minlength=100)[:100])


def two_temperatures(logits, sample, index):
    half = len(logits) // 2
    return torch.cat([logits[:half] / 0.7, logits[half:] / 1.2])


def needed_rank(logits, sample, index):
    rank = int((logits > logits.gather(1, sampled_ids(sample))).sum(1).max()) + 1
    return logits.masked_fill(logits < logits.topk(rank).values[:, -1:], -torch.inf)


def needed_min_p(logits, sample, index):
    own = logits.log_softmax(-1)
    bound = float((own.gather(1, sampled_ids(sample))[:, 0] - own.amax(-1)).min())
    return logits.masked_fill(own < own.amax(-1, keepdim=True) + bound - 1e-4, -torch.inf)


def only_some(logits, sample, index):
    kept = np.unique(np.concatenate([sample.token_ids[sample.loss_mask], np.arange(3, 12)]))
    out = torch.full_like(logits, -torch.inf)
    out[:, kept] = logits[:, kept]
    return out


def biased(logits, sample, index):
    logits[:, free_tokens(sample, range(20, 40))[0]] += 2.0 + index
    return logits


def two_forbidden(logits, sample, index):
    logits[:, free_tokens(sample, LETTERS)[:2]] = -torch.inf
    return logits


def random_rows(logits, sample, index):
    return torch.cat(
        [logits, torch.randn(len(logits), 28, generator=torch.Generator().manual_seed(index))], 1
    )


plant(sampled_by, {
    "temperature": ("temperature", lambda own, sample, index: own / (0.6, 0.8, 1.3)[index]),
    "temperatures of two turns": ("temperature", two_temperatures),
    "temperature that falls with each token": ("", lambda own, sample, index: own / torch.linspace(1.2, 0.8, len(own))[:, None]),
    "a repetition penalty": ("penalty", penalty(repetition(1.3), prompt=True)),
    "a penalty on the completion only": ("penalty", penalty(repetition(1.4))),
    "a presence penalty": ("penalty", penalty(presence)),
    "a frequency penalty": ("penalty", penalty(frequency)),
    "a vocabulary padded with zeros": ("vocabulary", lambda own, sample, index: torch.cat([own, torch.zeros(len(own), 28)], 1)),
    "a vocabulary padded with random rows": ("", random_rows),
    "placeholders that cannot be sampled": ("vocabulary|logit bias", lambda own, sample, index: own[:, :88]),
    "a bias on one token": ("logit bias", biased),
    "two tokens that cannot be sampled": ("", two_forbidden),
    "top_k of the rank that is needed": ("truncation", needed_rank),
    "min_p": ("truncation", needed_min_p),
    "held to twenty tokens": ("restricted|vocabulary", only_some),
    "logits rounded to bfloat16": ("rounded|dtype of a part", lambda own, sample, index: own.bfloat16().float()),
    "logits capped": ("soft cap", lambda own, sample, index: 3 * (own / 3).tanh()),
})  # fmt: skip


@fault("top_p", "truncation")
def _(at, index):
    """Kept are the tokens that were sampled, and at the most 95 % of the mass."""
    sample = at.samples[index]
    logprobs = numbers(at.model, at.tiny, sample).log_softmax(-1)
    ordered = logprobs.sort(-1, descending=True).values
    before = ordered.exp().cumsum(-1) - ordered.exp()
    own = logprobs.gather(1, sampled_ids(sample))[:, 0]
    smallest = torch.stack([before[row][ordered[row] == own[row]][0] for row in range(len(own))]).max()
    kept = before < max(0.9, float(smallest) + 1e-6)
    return Planted(recorded(sample, (own - torch.where(kept, ordered.exp(), 0).sum(-1).log()).numpy()))


@fault("a token that could not be sampled", "logit bias")
def _(at, index):
    def rule(logits):
        logits[:, 20 + index] = -torch.inf
        return logits

    sample = at.samples[index]
    ids = np.where((sample.token_ids == 20 + index) & sample.loss_mask, 11, sample.token_ids).astype(np.int32)
    return Planted(scored(at.model, at.tiny, replace(sample, token_ids=ids), rule=rule))


@fault("temperature in one completion", "temperature")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[1]
    hot = scored(at.model, at.tiny, sample, rule=lambda logits: logits / 0.7).logprobs
    return renumbered(sample, start, hot[start:stop])


# --- recorded numbers


def values_of(at: Scene, index: int, form: Callable[[Any], Any]) -> Planted:
    """The sampler's numbers were recorded in another form."""
    sample = at.samples[index]
    return Planted(recorded(sample, form(sample.logprobs[sample.loss_mask])))


def renumbered(sample: TrainingSample, start: int, values: Any, **named: Any) -> Planted:
    """Other numbers from a token on."""
    logprobs = sample.logprobs.copy()
    logprobs[start : start + len(values)] = values
    return Planted(replace(sample, logprobs=logprobs), token=start, **named)


def halves(form: Callable[[Any], Any]) -> Any:
    return lambda own: np.concatenate([form(part) for part in np.split(own, 2)])


plant(values_of, {
    "logarithms to the base 2": ("form", lambda own: own / np.log(2)),
    "probabilities": ("form", np.exp),
    "the opposite sign": ("form", lambda own: -own),
    "surprisal in bits": ("form", lambda own: -own / np.log(2)),
    "percent": ("form", lambda own: 100 * np.exp(own)),
    "log-odds": ("form", lambda own: own - np.log1p(-np.exp(np.minimum(own, -1e-6)))),
    "zeros": ("missing", np.zeros_like),
    "no numbers": ("missing", lambda own: np.full_like(own, np.nan)),
    "the first number of each completion missing": ("missing|restricted", lambda own: np.where(np.arange(len(own)) % (len(own) // 2) == 0, 0, own)),
    "the last numbers missing": ("missing|restricted", lambda own: np.where(np.arange(len(own)) >= len(own) - 3, 0, own)),
    "means over completions": ("summed", halves(lambda own: np.full_like(own, own.mean()))),
    "running sums": ("summed", halves(np.cumsum)),
    "two decimals": ("rounded", lambda own: np.round(own, 2)),
    "cut to two decimals": ("rounded", lambda own: np.trunc(own * 100) / 100),
    "rounded to quarters": ("rounded", lambda own: np.round(own * 4) / 4),
    "missing": ("missing", lambda own: np.maximum(own, np.sort(own)[len(own) // 2])),
    "a factor of each completion": ("scaled", lambda own: own * np.repeat([1 / 13, 1 / 7], len(own) // 2)),
    "turns' log-probabilities exchanged": ("another's numbers", lambda own: np.roll(own, len(own) // 2)),
    "numbers of the turn before": ("another's numbers", lambda own: np.concatenate([own[: len(own) // 2]] * 2)),
    "sorted numbers": ("", halves(np.sort)),
    "shuffled numbers": ("", lambda own: np.random.default_rng(1).permutation(own)),
    "two numbers exchanged": ("", lambda own: own[[0, 1, 5, 3, 4, 2, *range(6, len(own))]]),
    "numbers in reverse": ("shifted numbers", lambda own: own[::-1]),
    "each completion's numbers in reverse": ("shifted numbers", halves(lambda own: own[::-1])),
    "numbers of neighbours exchanged in pairs": ("shifted numbers", lambda own: own[np.arange(len(own)) ^ 1] if len(own) % 2 == 0 else own),
    "noise on every number": ("", lambda own: own - np.abs(np.random.default_rng(2).normal(0, 0.1, len(own)))),
    "differences of neighbours": ("", lambda own: np.diff(own, prepend=0)),
    "squares": ("", lambda own: -(own**2)),
    "means of three neighbours": ("", lambda own: np.convolve(own, np.ones(3) / 3, "same")),
    "square roots": ("", lambda own: -np.sqrt(-np.minimum(own, 0))),
    "every other number 0.02 higher": ("", lambda own: own + np.where(np.arange(len(own)) % 2, 0.02, 0)),
    "the last completion's mean for the least": ("", lambda own: np.where(own == own.min(), own.mean(), own)),
})  # fmt: skip


@fault("log-probabilities shifted", "shifted numbers")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[index % 2]
    return renumbered(sample, start, np.roll(sample.logprobs[start:stop], 1 + index))


@fault("a stop token added after sampling", "final token")
def _(at, index):
    return renumbered(at.samples[index], sampled_runs(at.samples[index].loss_mask)[index % 2][1] - 1, [0])


@fault("the likeliest token's", "other number")
def _(at, index):
    sample = at.samples[index]
    return Planted(recorded(sample, numbers(at.model, at.tiny, sample).log_softmax(-1).amax(-1).numpy()))


@fault("held to a grammar", "restricted")
def _(at, index):
    sample = at.samples[index]
    start, stop = sampled_runs(sample.loss_mask)[1]
    values = np.zeros(stop - start, np.float32)
    values[[3]] = sample.logprobs[start + 3] / 3
    return renumbered(sample, start, values)


@fault("another rollout's log-probabilities", "another's numbers")
def _(at, index):
    sample, other = at.samples[index], at.samples[(index + 1) % 3]
    start, (first, last) = sampled_runs(sample.loss_mask)[0][0], sampled_runs(other.loss_mask)[0]
    return renumbered(sample, start, other.logprobs[first:last])


@fault("numbers of another sample of the group", "another's numbers")
def _(at, index):
    """The same prompt, other tokens."""
    sample = at.samples[index]
    start = sampled_runs(sample.loss_mask)[1][0]
    tokens = np.random.default_rng(index).choice(LETTERS, 8)
    other = replace(scored(at.model, at.tiny, with_tokens(sample, start, tokens)), sample_id="its sibling")
    planted = renumbered(sample, start, other.logprobs[start:], options={"peers": [other]})
    return replace(planted, token=None)


@fault("numbers shifted with those of the prompt", "shifted numbers")
def _(at, index):
    """Each token has the number of the token before it, prompt included."""
    sample = at.samples[index]
    whole = replace(sample, loss_mask=(np.arange(len(sample)) > 0) & (sample.mm_token_type_ids == 0))
    own = scored(at.model, at.tiny, whole).logprobs
    return Planted(recorded(sample, own[np.flatnonzero(sample.loss_mask) - 1]))


# --- the model


def computed_by(at: Scene, index: int, change: Callable[[Scene], Any]) -> Planted:
    """The sampler's model was changed, within a block."""
    with change(at):
        return Planted(scored(at.model, at.tiny, at.samples[index]))


@contextmanager
def attributes(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Other values of attributes, within the block."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def language(at: Scene) -> Any:
    return at.model.model.language_model


def vision(at: Scene) -> Any:
    return at.model.model.visual


def attention(at: Scene, names: tuple[str, ...]) -> list[Any]:
    return [module for name, module in language(at).named_modules() if name.endswith(names)]


def every(module: Any, name: str, change: Callable[[Any], Any], kind: type = float) -> Any:
    owners = [one for one in module.modules() if isinstance(getattr(one, name, None), kind)]
    return attributes([(one, name, change(getattr(one, name))) for one in owners])


def mapped(module: Any, change: Callable[[Any], Any]) -> Any:
    """Matrices of linear layers changed."""
    linear = [one for one in module.modules() if isinstance(one, torch.nn.Linear)]
    return attributes([(one.weight, "data", change(one.weight.data)) for one in linear])


def frequencies(at: Scene, change: Callable[[Any], Any]) -> Any:
    rotary = language(at).rotary_emb
    return attributes([(rotary, "inv_freq", change(rotary.inv_freq))])


def skipped(layer: Any) -> Any:
    return attributes([(layer, "forward", lambda hidden_states, *args, **kwargs: hidden_states)])


def twice(layer: Any) -> Any:
    forward = layer.forward

    def again(hidden_states, *args, **kwargs):
        return forward(forward(hidden_states, *args, **kwargs), *args, **kwargs)

    return attributes([(layer, "forward", again)])


@contextmanager
def outputs(module: Any, change: Callable[[Any], Any], *, inputs: Any = None) -> Iterator[None]:
    """A module's result changed; of a structure, the parts that the language model gets. And its inputs."""

    def leave(_m, _a, out):
        if torch.is_tensor(out):
            return change(out)
        for key in out.keys() if inputs else ("pooler_output", "deepstack_features"):
            if (held := out.get(key)) is not None:
                out[key] = [change(one) for one in held] if isinstance(held, list | tuple) else change(held)
        return out

    hooks = [module.register_forward_hook(leave)]
    if inputs:
        hooks.append(module.register_forward_pre_hook(lambda m, args: tuple(map(inputs, args))))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def bfloat16(module: Any) -> Iterator[None]:
    """The module's weights and computation in bfloat16, if a part is loaded so."""

    def cast(dtype: Any) -> Any:
        return lambda value: (
            value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        )

    low = [(one, "data", one.data.to(torch.bfloat16)) for one in module.parameters()]
    with attributes(low), outputs(module, cast(torch.float32), inputs=cast(torch.bfloat16)):
        yield


def bfloat16_weights(model: Any) -> Any:
    """Every weight rounded to bfloat16, as a sampler's arithmetic would be off."""
    return attributes([(one, "data", one.data.to(torch.bfloat16).float()) for one in model.parameters()])


def int8(data: Any) -> Any:
    scale = data.abs().amax(1, keepdim=True) / 127
    return (data / scale).round().clamp(-127, 127) * scale


def fp8(data: Any) -> Any:
    scale = data.abs().max() / 448
    return (data / scale).to(torch.float8_e4m3fn).float() * scale


def three_bits(data: Any) -> Any:
    rows = data.reshape(-1, 16)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (high - low) / 7
    return (((rows - low) / step).round() * step + low).reshape(data.shape)


def in_float8(value: Any) -> Any:
    return value.to(torch.float8_e4m3fn).float()


def without_a_head(at: Scene) -> Any:
    weight = attention(at, ("o_proj",))[0].weight
    data = weight.data.clone()
    data[:, : data.shape[1] // 4] = 0
    return attributes([(weight, "data", data)])


def yarn(own: Any) -> Any:
    share = torch.linspace(0, 1, len(own))
    return own * (1 - share) + own / 4 * share


def tied_head(at: Scene) -> Any:
    return attributes(
        [(at.model.get_output_embeddings().weight, "data", at.model.get_input_embeddings().weight.data)]
    )


plant(computed_by, {
    "a head tied to the embedding": ("weights", tied_head),
    "the vision tower in bfloat16": ("dtype of a part", lambda at: bfloat16(vision(at))),
    "the head in bfloat16": ("dtype of a part", lambda at: bfloat16(at.model.lm_head)),
    "a layer": ("layer", lambda at: skipped(language(at).layers[1])),
    "a vision layer": ("layer", lambda at: skipped(vision(at).blocks[-1])),
    "the first layer twice": ("layer", lambda at: twice(language(at).layers[0])),
    "another rotary base": ("rotary base", lambda at: frequencies(at, lambda own: 1e6 ** (-torch.arange(len(own)) / len(own)))),
    "the rotary base 37,000": ("rotary base", lambda at: frequencies(at, lambda own: own ** (np.log(37e3) / np.log(1e4)))),
    "rotary frequencies a third": ("rotary base", lambda at: frequencies(at, lambda own: own / 3)),
    "rotary frequencies stretched as YaRN does": ("", lambda at: frequencies(at, yarn)),
    "image features scaled by 1.3": ("constants", lambda at: outputs(vision(at), lambda x: x * 1.3)),
    "image features rounded to bfloat16": ("dtype of a part", lambda at: outputs(vision(at), lambda x: x.bfloat16().float())),
    "image features rounded to float8": ("dtype of a part", lambda at: outputs(vision(at), in_float8)),
    "vision features of the wrong layer norm": ("", lambda at: outputs(vision(at), lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))),
    "embeddings scaled by the root of the width": ("constants", lambda at: outputs(at.model.get_input_embeddings(), lambda x: x * 32**0.5)),
    "int8 weights": ("quantised weights", lambda at: mapped(language(at), int8)),
    "float8 weights with a scale": ("quantised weights", lambda at: mapped(language(at), fp8)),
    "weights rounded to 3 bits by groups of 16": ("", lambda at: mapped(language(at), three_bits)),
    "one head of attention lost": ("", without_a_head),
    "epsilon of the norms": ("constants", lambda at: every(language(at), "variance_epsilon", lambda x: 1e-2)),
    "attention not scaled by the root": ("constants", lambda at: every(language(at), "scaling", lambda x: x * x)),
    "GELU for SiLU": ("constants", lambda at: every(language(at), "act_fn", lambda x: torch.nn.GELU(), torch.nn.Module)),
    "stale weights that are not given": ("", lambda at: stale(at, lambda name: True)[0]),
})  # fmt: skip


@fault("keys and values kept in float8", "dtype of a part")
def _(at, index):
    """Keys once they are turned by their positions, as caches hold them."""
    module = sys.modules[type(attention(at, ("self_attn",))[0]).__module__]
    names = ("apply_multimodal_rotary_pos_emb", "apply_rotary_pos_emb")
    name = next(one for one in names if hasattr(module, one))
    own = getattr(module, name)

    def turned(*args, **options):
        query, key = own(*args, **options)
        return query, in_float8(key)

    hooks = [
        one.register_forward_hook(lambda _m, _a, out: in_float8(out)) for one in attention(at, ("v_proj",))
    ]
    try:
        return computed_by(at, index, lambda at: attributes([(module, name, turned)]))
    finally:
        for hook in hooks:
            hook.remove()


@fault("biases left out")
def _(at, index):
    held = [one.bias for one in language(at).modules() if getattr(one, "bias", None) is not None]
    zeros = [(bias, "data", torch.zeros_like(bias.data)) for bias in held]
    return computed_by(at, index, lambda at: attributes(zeros)) if held else None


def dropout(weight: float) -> Any:
    """Dropout left on in the first layer, of this weight."""

    def planting(at: Scene, index: int) -> Planted:
        torch.manual_seed(index)
        drop = torch.nn.functional.dropout
        change = lambda x: x + weight * (drop(x, 0.1) - x) if weight < 1 else drop(x, 0.1)  # noqa: E731
        return computed_by(at, index, lambda at: outputs(language(at).layers[0].mlp, change))

    return planting


plant(dropout(1.0), {"dropout left on": ("",)})
plant(dropout(0.03), {"dropout of little effect": ("",)})


def stale(at: Scene, holds: Callable[[str], bool]) -> tuple[Any, dict[str, Any]]:
    """A block in which weights are of the step before, moved a little at random, and all of these."""
    generator = torch.Generator().manual_seed(3)
    old = {
        name: one.data + 0.05 * one.data.std() * torch.randn(one.shape, generator=generator)
        if one.ndim > 1
        else one.data
        for name, one in at.model.named_parameters()
    }
    block = attributes([(one, "data", old[name]) for name, one in at.model.named_parameters() if holds(name)])
    return block, {name: data.clone() for name, data in old.items()}


def with_stale(at: Scene, index: int, holds: Callable[[str], bool]) -> Planted:
    block, old = stale(at, holds)
    return replace(computed_by(at, index, lambda at: block), options={"weights": {"the step before": old}})


plant(with_stale, {
    "stale weights": ("weights", lambda name: True),
    "stale weights in one layer": ("weights", lambda name: "language_model.layers.1." in name),
    "a vision tower of the step before": ("weights", lambda name: ".visual." in name),
    "all but the vision tower stale": ("weights", lambda name: ".visual." not in name),
    "the norms and biases only loaded": ("weights", lambda name: "norm" not in name and "bias" not in name),
    "attention stale, the rest new": ("weights", lambda name: "language_model" in name and "attn" in name),
})  # fmt: skip


@fault("an adapter that was not merged", "adapter")
def _(at, index):
    """The trainer's model has low-rank updates that can be switched off."""
    generator = torch.Generator().manual_seed(index)
    head = at.model.get_output_embeddings()
    base = head.weight.data
    rows, columns = base.shape
    update = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator) * 0.05
    disable = lambda: attributes([(head.weight, "data", base)])  # noqa: E731
    return Planted(at.samples[index], options={"adapter": (head, base + update, disable)})


@fault("BGR from a sampler in bfloat16", "channels")
def _(at, index):
    sample = at.samples[index]
    with bfloat16_weights(at.model):
        saw = scored(at.model, at.tiny, showing(sample, [pixels(bgr)(at, item) for item in images(sample)]))
        others = [scored(at.model, at.tiny, one) for one in at.samples]
    return Planted(as_trained(saw, sample), 0, options={"rollouts": others})


# --- the program


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="*", default=FAMILIES)
    parser.add_argument("--fault", nargs="*", default=list(FAULTS))
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--tolerance", type=float, help="nats a token, measured by default")
    parser.add_argument("--healthy", type=int, default=0, help="audit a number of healthy rollouts instead")
    parser.add_argument("--everywhere", action="store_true", help="plant each fault in all rollouts")
    parser.add_argument("--quiet", action="store_true", help="print only faults that were not named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for family in options.family:
            if options.healthy:
                alarms = healthy(family, Path(folder), options.healthy)
                verdicts["healthy"] += options.healthy
                verdicts["cause wrong"] += alarms
                continue
            at = scene(family, Path(folder))
            for name in options.fault:
                for index in range(options.samples):
                    outcome = judge(
                        name, family, at, index, tolerance=options.tolerance, everywhere=options.everywhere
                    )
                    if outcome is None:
                        continue
                    verdicts[f"stage {outcome.stage}"] += 1
                    verdicts[f"cause {outcome.cause}"] += 1
                    if (outcome.cause, outcome.stage) != ("named", "right") or not options.quiet:
                        print(
                            f"{family} {index} {outcome.stage:7}{outcome.cause:10}{outcome.seconds:5.1f}s {name}: {outcome.finding[:400]}",
                            flush=True,
                        )
    print(dict(verdicts))
    return int(verdicts["cause wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
