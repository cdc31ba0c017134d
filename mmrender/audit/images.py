"""Rows of the stage pixels: other images, another order or size of them, or none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Final

import msgspec
import numpy as np
from PIL import Image

from mmrender.audit.canvas import canvas_of, levels, renewed, shrunk, source_of
from mmrender.audit.case import Array, Case, Trial, edited, part, plain, showing
from mmrender.audit.report import described, sampled_runs
from mmrender.errors import MediaError
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.patches import PatchItem
from mmrender.media.video import open_video
from mmrender.messages import Modality, VideoPart
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, PlaceholderRange, Repeat, feature_count
from mmrender.trajectory.sample import TrainingSample

_MAX_PAIRS: Final = 15
_MAX_OTHERS: Final = 24
_MAX_STRIDE: Final = 8
_TENSORS: Final = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "input_features"),
    *("feature_attention_mask", "input_features_mask"),
)
"""Keyword arguments of media."""


def _other_images(case: Case) -> Iterator[Trial]:
    known = {item.identity: item for item in case.others}
    for span in case.suspects:
        own = span.item
        fitting = [
            other
            for other in known.values()
            if other.identity != own.identity
            and other.modality == span.modality
            and feature_count(other.expansion) == feature_count(own.expansion)
        ]
        for other in sorted(fitting, key=lambda item: item.grid != own.grid)[:_MAX_OTHERS]:
            text = f"another {own.modality} (identity {other.identity[:12]}…) in place of {described(span)}: "
            yield showing(case, f"{text}a stale {own.modality} under this one's hash", [(span, other)])


def _order(kind: Modality, noun: str, case: Case) -> Iterator[Trial]:
    """Yield the images or clips of a sample in other orders."""
    spans = [span for span in case.sample.media_spans if span.modality == kind]
    places = list(range(len(spans)))
    orders = {
        f"{noun}s {one} and {two} in exchanged places (swapped)": [
            {one: two, two: one}.get(at, at) for at in places
        ]
        for one, two in list(combinations(places, 2))[:_MAX_PAIRS]
    }
    if len(spans) > 2:
        orders[f"all {noun}s in reverse order"] = places[::-1]
        for by in (1, -1):
            orders[f"{noun}s, each moved by {by:+d}"] = np.roll(places, by).tolist()
    if len(spans) > 1:
        orders |= {
            f"{noun} {place} in the place of each (repeated)": [place] * len(spans) for place in places
        }
    for text, order in orders.items():
        if [spans[index].item.identity for index in order] == [span.item.identity for span in spans]:
            continue
        first = next(index for index, other in enumerate(order) if index != other)
        others = [part(case.sample, spans[at].start, spans[at].stop) for at in order]
        shown = [(span.start, span.stop, other) for span, other in zip(spans, others, strict=True)]
        sample = edited(case.sample, shown)
        yield Trial(f"the sampler saw {text}", sample, image=spans[first].position, since=spans[first].start)


def _budget(case: Case) -> Iterator[Trial]:
    """Yield images of fewer or more pixels or tiles, and of as many placeholder tokens as these make."""
    # Rows and separators between features are written by rules that only the processor knows.
    spans = [span for span in case.sample.media_spans if len(sampled_runs(span.range.is_embed)) == 1]
    others = {span.start: dict(_sized(case, span.item)) for span in spans}
    held = [span for span in spans if others[span.start]]
    for scope in ([held] if len(held) > 1 else []) + [[span] for span in case.suspects if span in held]:
        for text in others[scope[0].start]:
            items = [others[span.start].get(text) for span in scope]
            if None in items:
                continue
            new = [
                (span.start, span.stop, _shown(case, span, item))
                for span, item in zip(scope, items, strict=True)
            ]
            which = described(scope[0]) if len(scope) == 1 else "every image"
            why = "as by another max_pixels, or a client that resizes"
            statement = f"the number of pixels was another ({text}) in {which}, {why}"
            sample = edited(case.sample, new)
            yield Trial(statement, sample, image=scope[0].position, since=scope[0].start)


def _sized(case: Case, item: Any) -> Iterator[tuple[str, MediaItem]]:
    """Yield an image in other sizes."""
    source = source_of(case, item)
    if isinstance(item, PatchItem) and len(item.frames) == 1:
        # Without the source it is compared as an image that was not resized.
        source = source or Image.fromarray(item.frames[0].transpose(1, 2, 0), "RGB")
        seen = {item.grid}
        for share in (1 / 4, 1 / 2, 3 / 4, 2.0, 4.0, *np.geomspace(1 / 16, 8, 29)):
            sides = [
                max(1, round(side * share**0.5 / item.layout.merge)) * item.layout.merge
                for side in item.grid[1:]
            ]
            grid = (item.grid[0], *sides)
            if grid not in seen:
                seen.add(grid)
                size = sides[1] * item.layout.patch, sides[0] * item.layout.patch
                yield f"{share:.3g} of the trainer's pixels", renewed(item, levels(source, size))
                small = shrunk(share**0.5, Image.Resampling.BICUBIC)(source)
                if small is not None:
                    text = f"{share:.3g} of the trainer's pixels, of a smaller copy"
                    yield text, renewed(item, levels(small, size))
    canvas = None if source is None else canvas_of(case, item, source)
    if source is None or canvas is None or canvas.tile is None:
        return
    height, width = canvas.tile
    for rows, columns in ((a, b) for a in range(1, 7) for b in range(1, 12 // a + 1)):
        size = columns * width, rows * height
        for thumbnail in (True, False) if rows * columns > 1 else (False,):
            other = canvas._replace(size=size, thumbnail=thumbnail)
            if other != canvas:
                text = f"{rows} x {columns} tiles{' and a thumbnail' * thumbnail}"
                yield text, renewed(item, other.frames(source))


def _shown(case: Case, span: MediaSpan, item: Any) -> TrainingSample:
    """Return the placeholders of an item, between the text that is beside an image's, with the item."""
    ((start, stop),) = sampled_runs(span.range.is_embed)
    own, count = case.sample.token_ids[span.start : span.stop], feature_count(item.expansion)
    ids = np.concatenate([own[:start], np.full(count, own[start]), own[stop:]])
    alone = len(ids) == count
    place = PlaceholderRange(0, count) if alone else PlaceholderRange(0, len(ids), ((start, start + count),))
    return replace(plain(ids), multi_modal_data=MultiModalData.of([(place, item)]))


def _unseen(case: Case) -> Iterator[Trial]:
    spans = case.sample.media_spans

    def without(inputs: dict[str, Any]) -> None:
        for key in _TENSORS:
            inputs.pop(key, None)

    if spans:
        text = f"the sampler was given no {spans[0].modality}: it read the placeholder tokens as text"
        yield Trial(text, inputs=without, image=spans[0].position, since=spans[0].start)


def _frames(case: Case) -> Iterator[Trial]:
    """Yield other frames of a video: its own in another order, or another choice of its source's."""
    for span in case.suspects:
        item = span.item
        if not isinstance(item, PatchItem) or span.modality != "video":
            continue
        places = list(range(len(item.frames)))
        orders = {"with its frames in reverse order": places[::-1]}
        orders["with each frame one place later"] = [0, *places[:-1]]
        orders["with every other frame twice"] = [place // 2 * 2 for place in places]
        for at in places:
            orders[f"without frame {at}"] = [*places[:at], *places[at + 1 :], places[-1]]
            orders[f"with frame {at} in the place of each"] = [at] * len(places)
            after = (at + 1) % len(places)
            orders[f"with frames {at} and {after} exchanged"] = [
                {at: after, after: at}.get(p, p) for p in places
            ]
        for text, order in orders.items():
            if order != places:
                frames = np.ascontiguousarray(item.frames[order])
                other = msgspec.structs.replace(item, frames=frames, identity=f"{id(frames):064x}")
                yield showing(case, f"{described(span)} {text}", [(span, other)])
        yield from _other_choices(case, span, item)


def _other_choices(case: Case, span: MediaSpan, item: PatchItem) -> Iterator[Trial]:
    """Yield as many frames of the source of a video, or fewer or more, by other rules."""
    film, steps, own = _film(case, item), item.grid[0], len(item.frames)
    runs = sampled_runs(span.range.is_embed)
    counts = {round(own * share) for share in (1, 1 / 2, 2, 1 / 4, 4)}
    for text, chosen in _choices(len(film), sorted(counts, key=lambda count: abs(count - own))):
        frames = np.ascontiguousarray(film[chosen])
        new = -(-len(frames) // item.layout.temporal)
        if (new == steps and np.array_equal(frames, item.frames)) or len(runs) not in (1, steps):
            continue
        # Steps that have a text each keep the texts of those that they are nearest to.
        kept = np.linspace(0, steps - 1, new).round().astype(int).tolist()
        size = len(item.expansion) // len(runs)
        pieces = [item.expansion[at * size : (at + 1) * size] for at in range(len(runs))]
        expansion = (
            tuple(piece for at in kept for piece in pieces[at])
            if len(runs) == steps
            else tuple(
                msgspec.structs.replace(piece, count=piece.count * new // steps)
                if isinstance(piece, Repeat) and piece.embeds
                else piece
                for piece in item.expansion
            )
        )
        other = msgspec.structs.replace(
            item,
            frames=frames,
            times=(),
            grid=(new, *item.grid[1:]),
            expansion=expansion,
            identity=f"{id(frames):064x}",
        )
        shown = _shown(case, span, other) if len(runs) == 1 else _of_steps(case, span, other, kept)
        sample = edited(case.sample, [(span.start, span.stop, shown)])
        statement = f"the sampler saw {described(span)} as {text}"
        yield Trial(statement, sample, image=span.position, since=span.start)


def _choices(total: int, counts: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Yield frames of `total` by the rules of samplers, each choice once."""
    seen = set[tuple[int, ...]]()
    for count in (count for count in counts if 0 < count <= total):
        places = np.arange(count)
        rules: dict[str, Array] = {
            f"{count} frames spread from its first to its last": np.linspace(0, total - 1, count).round(),
            f"{count} frames at equal steps": places * total / count,
            f"the middle frames of {count} equal parts": (places + 0.5) * total / count,
            f"its last {count} frames": places + total - count,
        }
        strides = range(1, min((total - 1) // max(count - 1, 1), _MAX_STRIDE) + 1)
        rules |= {f"{count} frames from its start on, one of {by} (stride)": places * by for by in strides}
        for text, at in rules.items():
            chosen = at.astype(int).tolist()
            if tuple(chosen) not in seen:
                seen.add(tuple(chosen))
                yield text, chosen


def _film(case: Case, item: PatchItem) -> Array:
    """Return all frames of the source of a video in the size of its item, or its own without a source."""
    source = case.sources.get(item.identity)
    if not isinstance(source, (bytes, list, tuple, np.ndarray)):
        return item.frames
    try:
        with open_video(VideoPart(source), MediaPolicy(), "source") as video:
            images = [frame.image.convert("RGB") for frame in video.sample().images]
    except MediaError:
        return item.frames
    return np.concatenate([levels(image, item.frames.shape[:-3:-1]) for image in images])


def _of_steps(case: Case, span: MediaSpan, item: MediaItem, steps: Sequence[int]) -> TrainingSample:
    """Return the placeholders of an item with some of the time steps of a span, each with its text."""
    own, embeds = case.sample.token_ids[span.start : span.stop], span.range.is_embed
    bounds = [0, *(stop for _, stop in sampled_runs(embeds))]
    places = [at for step in steps for at in range(bounds[step], bounds[step + 1])]
    places += range(bounds[-1], len(own))
    place = PlaceholderRange(0, len(places), tuple(sampled_runs(embeds[places])))
    return replace(plain(own[places]), multi_modal_data=MultiModalData.of([(place, item)]))


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    "stale image": _other_images,
    "image order": partial(_order, "image", "image"),
    "clip order": partial(_order, "audio", "clip"),
    "pixel budget": _budget,
    "image unseen": _unseen,
    "frames": _frames,
}
"""Changes to try, by row."""
