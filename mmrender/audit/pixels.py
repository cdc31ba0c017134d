"""Rows of the stage pixels: another image, another order, other pixels, or none."""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.audit.case import Case, ChangedItem, Trial, edited, part, plain, with_items
from mmrender.audit.report import described
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchItem, PatchLayout
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, PlaceholderRange, Repeat, feature_count
from mmrender.trajectory.sample import TrainingSample

Array: TypeAlias = npt.NDArray[Any]
ItemChange: TypeAlias = Callable[[Case, MediaItem], MediaItem | None]
"""The item that the sampler may have had in place of another; None if it cannot have."""
Rule: TypeAlias = Callable[[Array, Array], tuple[Any, Any]]
"""Factor and offset by channel of normalised values, given mean and deviation."""
_MAX_PAIRS: Final = 15
_MAX_OTHERS: Final = 24
_ORIENTATION: Final = 274
_NORMALISATIONS: Final[Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mean and deviation 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none, values from 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "none, values from 0 to 255": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
}


def _over_images(table: Mapping[str, ItemChange], case: Case) -> Iterator[Trial]:
    """Yield trials that change one suspect, and one that changes all images, if there are several."""
    spans = case.sample.media_spans
    for text, change in table.items():
        changed = {span.start: item for span in spans if (item := change(case, span.item)) is not None}
        chosen = [[span for span in spans if span.start in changed]] if len(changed) > 1 else []
        for some in [*chosen, *([span] for span in case.suspects if span.start in changed)]:
            which = described(some[0]) if len(some) == 1 else "every image"
            sample = with_items(case.sample, [(span, changed[span.start]) for span in some])
            since, image = some[0].start, some[0].position
            yield Trial(f"the sampler saw {text} in {which}", sample, image=image, since=since)


def _values(change: Callable[[Array, tuple[int, ...]], Array]) -> ItemChange:
    """Return a change of normalised pixels, given the grid."""
    return lambda _, item: ChangedItem(item, change)


def _channels(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of normalised pixels as `(n, 3, values)`."""

    def by_channel(pixels: Array, _: tuple[int, ...]) -> Array:
        shape = (len(pixels), 3, -1) if pixels.ndim == 2 else (-1, 3, pixels.shape[-1] * pixels.shape[-2])
        return change(pixels.reshape(shape)).reshape(pixels.shape)

    return _values(by_channel)


def _patches(change: Callable[[Array, tuple[int, ...], PatchLayout], Array]) -> ItemChange:
    """Return a change of flat patches, given grid and layout."""

    def make(_: Case, item: MediaItem) -> MediaItem | None:
        if not isinstance(item, PatchItem):
            return None
        return ChangedItem(item, lambda pixels, grid: change(pixels, grid, item.layout).reshape(pixels.shape))

    return make


def _planes(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of levels `(frames, 3, height, width)`, maybe turned."""
    return lambda _, item: _renewed(item, change(item.frames)) if isinstance(item, PatchItem) else None


def _images(change: Callable[[Image.Image], Image.Image | None], *, stored: bool = False) -> ItemChange:
    """Return a change of the image before it was resized, as it is `stored`, or upright and opaque."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        source = _source(case, item, stored=stored)
        if not isinstance(item, PatchItem) or source is None or (image := change(source)) is None:
            return None
        return _renewed(item, _levels(image.convert("RGB"), item.frames.shape[:-3:-1]))

    return make


def _levels(image: Image.Image, size: tuple[int, ...], method: Any = Image.Resampling.BICUBIC) -> Array:
    width, height = size
    resized = image if image.size == (width, height) else image.resize((width, height), method)
    return np.asarray(resized).transpose(2, 0, 1)[None]


def _renewed(item: PatchItem, frames: Array) -> PatchItem:
    frames = np.ascontiguousarray(frames)
    grid = (item.grid[0], *(side // item.layout.patch for side in frames.shape[-2:]))
    tokens = grid[0] * grid[1] * grid[2] // item.layout.merge**2
    expansion = tuple(
        msgspec.structs.replace(piece, count=tokens) if isinstance(piece, Repeat) and piece.embeds else piece
        for piece in item.expansion
    )
    identity = f"{id(frames):064x}"  # which no real item has
    return msgspec.structs.replace(item, frames=frames, grid=grid, identity=identity, expansion=expansion)


def _source(case: Case, item: MediaItem, *, stored: bool = False) -> Image.Image | None:
    """Return the image before it was resized, if it is known: from the sources, or if it was not resized."""
    if not isinstance(item, PatchItem) or len(item.frames) != 1:
        return None
    given = case.sources.get(item.identity)
    if stored:
        try:
            return given if given is None or isinstance(given, Image.Image) else Image.open(io.BytesIO(given))
        except (OSError, TypeError):
            return None  # of another form than bytes, which only `load_image` reads
    if given is not None:
        return load_image(given).image.convert("RGB")
    if tuple(item.frames.shape[-2:]) != tuple(item.size):
        return None
    return Image.fromarray(np.ascontiguousarray(item.frames[0].transpose(1, 2, 0)), "RGB")


def _in_order(
    squares: tuple[int, ...],
    inside: tuple[int, ...],
    pixels: Array,
    grid: tuple[int, ...],
    layout: PatchLayout,
) -> Array:
    """Return patches in another order of axes: of squares and within them, and of the values of each."""
    (steps, height, width), merge = grid, layout.merge
    values = pixels.reshape(-1, 3, layout.temporal, layout.patch, layout.patch).transpose(0, *inside)
    return values.reshape(steps, height // merge, width // merge, merge, merge, -1).transpose(*squares, 5)


def _rolled(values: Array, grid: tuple[int, ...], by: int, rows: bool = False) -> Array:
    flat = values.ndim == 2
    # One row of merged squares is two rows of patches.
    by *= 2 * grid[2] if rows and flat and len(grid) == 3 else 1
    return np.roll(values, by, 0 if flat else -2 if rows else -1)


def _normalised(rule: Rule) -> ItemChange:
    """Return another rule of normalisation. An item without one has 0.5 and 0.5."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        arithmetic: Any = getattr(item, "arithmetic", None)
        own = _NORMALISATIONS["mean and deviation 0.5"]
        mean, std = own if arithmetic is None else (arithmetic.mean, arithmetic.std)
        scale, offset = (np.asarray(one)[..., None] for one in rule(np.array(mean), np.array(std)))
        return _channels(lambda own: own * scale + offset)(case, item)

    return make


def _instead(mean: tuple[float, ...], std: tuple[float, ...]) -> Rule:
    """Return a function from values of another rule to values of this one."""
    return lambda own, deviation: (deviation / np.array(std), (own - np.array(mean)) / np.array(std))


def _level(level: float) -> Rule:
    """Return a function from all values to one level from 0 to 1."""
    return lambda mean, std: (0 * mean, (level - mean) / std)


def _cast(values: Array, _: tuple[int, ...], dtype: str) -> Array:
    import torch

    own = torch.from_numpy(np.ascontiguousarray(values))
    return np.asarray(own.to(getattr(torch, dtype)).float().numpy())


def _resampled(method: Any) -> ItemChange:
    """Return an image resized by another filter, of Pillow or of torch."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        source = _source(case, item)
        if source is None or not isinstance(item, PatchItem) or source.size == item.frames.shape[:-3:-1]:
            return None
        if not isinstance(method, str):
            return _renewed(item, _levels(source, item.frames.shape[:-3:-1], method))
        import torch

        data = torch.from_numpy(np.asarray(source).copy()).permute(2, 0, 1)[None].float()
        size, mode = item.frames.shape[-2:], method.removesuffix("-antialias")
        resized = torch.nn.functional.interpolate(data, size, mode=mode, antialias=method != mode)
        return _renewed(item, resized.round().clamp(0, 255).byte().numpy())

    return make


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality)
    return Image.open(data).convert("RGB")


def _over(image: Image.Image, level: int | None) -> Image.Image | None:
    """Return a transparent image over one level, or without its transparency for None."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return None
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (level or 0,) * 3 + (255,))
    return image if level is None else Image.alpha_composite(ground, image)


def _squared(image: Image.Image, level: int | None) -> Image.Image:
    """Return an image in the middle of a square of one level, or its own middle square for None."""
    side = min(image.size) if level is None else max(image.size)
    out = Image.new("RGB", (side, side), (level or 0,) * 3)
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


_ROWS: Final = (0, 1, 2, 3, 4)
_VALUES: Final = (1, 2, 3, 4)
_TABLES: Final[Mapping[str, Mapping[str, ItemChange]]] = {
    "patch order": {
        **{f"every patch moved by {by:+d}": _values(partial(_rolled, by=by)) for by in (1, -1, 2, -2, 4, -4)},
        **{f"patches moved by {n:+d} row": _values(partial(_rolled, by=n, rows=True)) for n in (1, -1)},
        **{
            text: _patches(partial(_in_order, squares, inside))
            for text, squares, inside in (
                ("patches in plain rows, not in merged squares", (0, 1, 3, 2, 4), _VALUES),
                ("patches in columns of squares", (0, 2, 1, 3, 4), _VALUES),
                ("patches column by column within squares", (0, 1, 2, 4, 3), _VALUES),
                ("frames before channels", _ROWS, (2, 1, 3, 4)),
                ("channels last", _ROWS, (2, 3, 4, 1)),
                ("rows for columns within patches", _ROWS, (1, 2, 4, 3)),
            )
        },
    },
    "channels": {
        "colours read as BGR": _channels(lambda own: own[:, ::-1]),
    },
    "normalisation": {
        f"pixels normalised {text}": _normalised(rule)
        for text, rule in {
            **{f"by another rule ({name})": _instead(*rule) for name, rule in _NORMALISATIONS.items()},
            # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
            "twice, rescaling included,": lambda mean, std: (1 / (255 * std), -mean / std),
            "twice": lambda mean, std: (1 / std, -mean / std),
            "without being rescaled": lambda mean, std: (255 + 0 * std, 254 * mean / std),
            "after being rescaled twice": lambda mean, std: (1 / 255 + 0 * std, mean / std * (1 / 255 - 1)),
            "after levels were divided by 256": lambda mean, std: (255 / 256 + 0 * std, -mean / std / 256),
            "without the mean": lambda mean, std: (1 + 0 * std, mean / std),
            "without the deviation": lambda mean, std: (std, 0 * std),
        }.items()
    },
    "pixel dtype": {
        f"values rounded to {name}": _values(partial(_cast, dtype=name))
        for name in ("bfloat16", "float16", "float8_e4m3fn")
    },
    "blank image": {
        "zeros in place of pixels": _values(lambda own, _: np.zeros_like(own)),
        "black": _normalised(_level(0.0)),
        "white": _normalised(_level(1.0)),
    },
    "orientation": {
        "pixels as they are stored, not upright,": _images(
            lambda image: image if image.getexif().get(_ORIENTATION, 1) != 1 else None, stored=True
        ),
        "pixels mirrored": _planes(lambda planes: planes[..., ::-1]),
        "pixels upside down": _planes(lambda planes: planes[..., ::-1, :]),
        "pixels turned by half": _planes(lambda planes: planes[..., ::-1, ::-1]),
        "pixels turned to the left": _planes(lambda planes: np.rot90(planes, 1, (-2, -1))),
        "pixels turned to the right": _planes(lambda planes: np.rot90(planes, -1, (-2, -1))),
        "rows for columns": _planes(lambda planes: planes.swapaxes(-1, -2)),
    },
    "framing": {
        "its middle square only": _images(partial(_squared, level=None)),
        **{
            f"a square of level {n} around it": _images(partial(_squared, level=n))
            for n in (0, 127, 128, 255)
        },
    },
    "background": {
        "transparency ignored": _images(partial(_over, level=None), stored=True),
        **{f"level {n} behind it": _images(partial(_over, level=n), stored=True) for n in (0, 127, 128, 255)},
    },
    "resampling": {
        **{f"pixels resized by {one.name.lower()}": _resampled(one) for one in Image.Resampling},
        **{
            f"pixels resized by torch's {mode}": _resampled(mode)
            for mode in ("nearest", "bilinear", "bicubic", "bilinear-antialias", "bicubic-antialias", "area")
        },
    },
    "compression": {
        f"a JPEG of it (quality {n})": _images(partial(_jpeg, quality=n))
        for n in (95, 90, 85, 80, 75, 60, 50)
    },
}
"""Other pixels of an image by row: statement, and how they are made."""


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
            yield Trial(
                f"the sampler saw another image (identity {other.identity[:12]}…) in place of "
                f"{described(span)}: a stale image under this one's hash",
                with_items(case.sample, [(span, other)]),
                image=span.position,
                since=span.start,
            )


def _image_order(case: Case) -> Iterator[Trial]:
    spans = [span for span in case.sample.media_spans if span.modality == "image"]
    places = list(range(len(spans)))
    orders = {
        f"images {one} and {two} in exchanged places": [{one: two, two: one}.get(at, at) for at in places]
        for one, two in list(combinations(places, 2))[:_MAX_PAIRS]
    }
    if len(spans) > 2:
        orders["all images in reverse order"] = places[::-1]
        for by in (1, -1):
            orders[f"images, each moved by {by:+d}"] = np.roll(places, by).tolist()
    if len(spans) > 1:
        orders |= {f"image {place} in the place of each": [place] * len(spans) for place in places}
    for text, order in orders.items():
        if [spans[index].item.identity for index in order] == [span.item.identity for span in spans]:
            continue
        first = next(index for index, other in enumerate(order) if index != other)
        others = [part(case.sample, spans[at].start, spans[at].stop) for at in order]
        shown = [(span.start, span.stop, other) for span, other in zip(spans, others, strict=True)]
        sample = edited(case.sample, shown)
        yield Trial(f"the sampler saw {text}", sample, image=spans[first].position, since=spans[first].start)


def _budget(case: Case) -> Iterator[Trial]:
    """Yield images of fewer or more pixels, and of as many placeholder tokens as these make."""
    # Rows and separators between features are written by rules that only the processor knows.
    held = [
        span
        for span in case.sample.media_spans
        if isinstance(span.item, PatchItem)
        and len(span.item.frames) == 1
        and feature_count(span.item.expansion) == span.stop - span.start
    ]
    for scope in ([held] if len(held) > 1 else []) + [[span] for span in case.suspects if span in held]:
        seen: list[Any] = [[span.item.grid for span in scope]]
        for share in (1 / 4, 1 / 2, 3 / 4, 2.0, 4.0, *np.geomspace(1 / 16, 8, 29)):
            grids = [_grid_of(span.item, share) for span in scope]
            if grids in seen:
                continue
            seen.append(grids)
            new = [(s.start, s.stop, _resized(case, s, grid)) for s, grid in zip(scope, grids, strict=True)]
            which = described(scope[0]) if len(scope) == 1 else "every image"
            text = f"the sampler's budget of pixels was another ({share:.3g} of the trainer's) in {which}"
            sample = edited(case.sample, new)
            yield Trial(text, sample, image=scope[0].position, since=scope[0].start)


def _grid_of(item: Any, share: float) -> tuple[int, int, int]:
    """Return the grid of an image with about this share of the pixels."""
    merge = item.layout.merge
    sides = [max(1, round(side * share**0.5 / merge)) * merge for side in item.grid[1:]]
    return item.grid[0], sides[0], sides[1]


def _resized(case: Case, span: MediaSpan, grid: tuple[int, int, int]) -> TrainingSample:
    """Return the placeholders of an image of another size, with its item."""
    item: Any = span.item
    # Without the source it is compared as an image that was not resized.
    source = _source(case, item) or Image.fromarray(item.frames[0].transpose(1, 2, 0), "RGB")
    new = _renewed(item, _levels(source, (grid[2] * item.layout.patch, grid[1] * item.layout.patch)))
    count = feature_count(new.expansion)
    ids = plain([int(case.sample.token_ids[span.start])] * count)
    return replace(ids, multi_modal_data=MultiModalData.of([(PlaceholderRange(0, count), new)]))


def _unseen(case: Case) -> Iterator[Trial]:
    spans = case.sample.media_spans

    def without(inputs: dict[str, Any]) -> None:
        for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            inputs.pop(key, None)

    if spans:
        text = "the sampler was given no image: it read the placeholder tokens as text"
        yield Trial(text, inputs=without, image=spans[0].position, since=spans[0].start)


def _frames(case: Case) -> Iterator[Trial]:
    """Yield other frames of a video, in place of as many."""
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
                statement = f"the sampler saw {described(span)} {text}"
                yield Trial(statement, with_items(case.sample, [(span, other)]), since=span.start)


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    **{name: partial(_over_images, table) for name, table in _TABLES.items()},
    "stale image": _other_images,
    "image order": _image_order,
    "pixel budget": _budget,
    "image unseen": _unseen,
    "frames": _frames,
}
"""Changes to try, by row."""
