"""Variations of the sampler's images: another image, another order, other pixels, or none."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.audit.report import Cause, described
from mmrender.audit.trial import Case, ChangedItem, Edit, Trial, Variation, edited, part, plain, with_items
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchItem, PatchLayout
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, PlaceholderRange, Repeat, feature_count
from mmrender.trajectory.sample import TrainingSample

Channels: TypeAlias = tuple[float, ...]
Array: TypeAlias = npt.NDArray[Any]
PlaneChange: TypeAlias = Callable[[Array], Array]
Rule: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]
ItemChange: TypeAlias = Callable[[Case, MediaItem], MediaItem | None]
"""The item that the sampler may have had in place of another; None if it cannot have."""
_MOST_PAIRS: Final = 15
_MOST_OTHERS: Final = 24
_MOST_PLACES: Final = 16
_ORIENTATION: Final = 274
_DTYPES: Final = ("bfloat16", "float16", "float8_e4m3fn")
_GROUNDS: Final = (0, 114, 127, 128, 255)
_SHARES: Final = (0.5, 2 / 3, 0.75, 0.8, 0.875, 0.9, 0.95)

NORMALISATIONS: Final[Mapping[str, tuple[Channels, Channels]]] = {
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mean and deviation 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none, values from 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "none, values from 0 to 255": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
    "values from -1 to 1 less the mean": ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0)),
}
"""Mean and deviation by channel that processors in use apply to pixels from 0 to 1."""


def shift_text(by: int) -> str:
    """Return a text such as "1 place(s) later"."""
    return f"{abs(by)} place(s) {'later' if by > 0 else 'earlier'}"


def _over_images(case: Case, text: str, change: ItemChange) -> Iterator[Trial]:
    """Yield trials that change one suspect, and one that changes all images, if there are several."""
    spans = [span for span in case.sample.media_spans if span.modality == "image"]
    changed = {span.start: item for span in spans if (item := change(case, span.item)) is not None}
    chosen = [[span] for span in case.suspects if span.start in changed]
    chosen += [[span for span in spans if span.start in changed]] if len(changed) > 1 else []
    for some in chosen:
        which = described(some[0]) if len(some) == 1 else "every image"
        sample = with_items(case.sample, [(span, changed[span.start]) for span in some])
        statement = f"the sampler saw {text} in {which}"
        yield Trial(statement, sample, image=some[0].position, since=some[0].start)


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
    """Return a change of planes `(..., 3, height, width)`, of levels if the item has them, maybe turned."""

    def make(_: Case, item: MediaItem) -> MediaItem | None:
        if isinstance(item, PatchItem):
            return _renewed(item, change(item.frames))
        shape = item.tensors()["pixel_values"].shape
        square = len(shape) > 2 and shape[-1] == shape[-2]
        return ChangedItem(item, lambda pixels, _: change(pixels)) if square else None

    return make


def _images(change: Callable[[Image.Image], Image.Image | None], *, stored: bool = False) -> ItemChange:
    """Return a change of the image before it was resized, as it is `stored`, or upright and opaque."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        source = _source(case, item, stored=stored)
        if not isinstance(item, PatchItem) or source is None or (image := change(source)) is None:
            return None
        size: tuple[int, ...] = item.frames.shape[:-3:-1]
        if (image.width < image.height) != (item.size[1] < item.size[0]) and image.size == item.size:
            size = size[::-1]  # turned
        return _renewed(item, _levels(image.convert("RGB"), size))

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
    # No real item has this identity, so it is taken for no other one.
    identity = f"{id(frames):064x}"
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


def _in_squares(
    order: tuple[int, ...], merged: bool, pixels: Array, grid: tuple[int, ...], layout: PatchLayout
) -> Array:
    """Return patches in another order of axes: of squares and within them, or of plain rows."""
    (steps, height, width), merge = grid, layout.merge
    inner = (steps, height // merge, width // merge, merge, merge, -1)
    plain_rows = (steps, height // merge, merge, width // merge, merge, -1)
    return pixels.reshape(inner if merged else plain_rows).transpose(order)


def _within(order: tuple[int, ...], pixels: Array, _: tuple[int, ...], layout: PatchLayout) -> Array:
    """Return patches whose values, by channel, frame, row and column, come in another order of axes."""
    return pixels.reshape(-1, 3, layout.temporal, layout.patch, layout.patch).transpose(order)


def _normalised(rule: Rule) -> ItemChange:
    """Return another rule of normalisation. An item without one has 0.5 and 0.5."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        arithmetic: Any = getattr(item, "arithmetic", None)
        own = NORMALISATIONS["mean and deviation 0.5"]
        mean, std = own if arithmetic is None else (arithmetic.mean, arithmetic.std)
        scale, offset = (np.asarray(one)[:, None] for one in rule(np.array(mean), np.array(std)))
        return _channels(lambda own: own * scale + offset)(case, item)

    return make


def _reordered(order: tuple[int, ...], values: Array) -> Array:
    return values[:, order]


def _filled(level: float | None) -> ItemChange:
    """Return an image of one level from 0 to 1, or of normalised 0 for None."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        arithmetic: Any = getattr(item, "arithmetic", None)
        known = level is not None and arithmetic is not None
        values = np.subtract(level or 0, arithmetic.mean) / arithmetic.std if known else np.zeros(3)
        return _channels(lambda own: np.zeros_like(own) + values[:, None])(case, item)

    return make


def _frame(frame: int, fill: str) -> ItemChange:
    """Return one frame of each patch filled with something else."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        if not isinstance(item, PatchItem) or item.layout.temporal < 2 or item.modality != "image":
            return None
        black = -np.asarray(item.arithmetic.mean) / item.arithmetic.std

        def change(pixels: Array, _: tuple[int, ...], layout: PatchLayout) -> Array:
            out = pixels.reshape(len(pixels), 3, layout.temporal, -1).copy()
            filled = {"zeros": 0.0, "black": black[:, None], "half of it": out[:, :, frame] / 2}
            out[:, :, frame] = filled[fill]
            return out

        return _patches(change)(case, item)

    return make


def _resampled(method: Any) -> ItemChange:
    def make(case: Case, item: MediaItem) -> MediaItem | None:
        source = _source(case, item)
        if source is None or not isinstance(item, PatchItem) or source.size == item.frames.shape[:-3:-1]:
            return None
        return _renewed(item, _levels(source, item.frames.shape[:-3:-1], method))

    return make


def _jpeg(image: Image.Image, quality: int, sampling: int) -> Image.Image:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality, subsampling=sampling)
    return Image.open(data).convert("RGB")


def _stored(image: Image.Image) -> Image.Image | None:
    return image if image.getexif().get(_ORIENTATION, 1) != 1 else None


def _transposed(image: Image.Image, turn: Image.Transpose) -> Image.Image:
    return image.transpose(turn)


def _over(image: Image.Image, level: int | None) -> Image.Image | None:
    """Return a transparent image over one level, or without its transparency for None."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return None
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (level or 0,) * 3 + (255,))
    return image if level is None else Image.alpha_composite(ground, image)


def _squared(image: Image.Image, level: int) -> Image.Image:
    """Return an image in the middle of a square of one level."""
    side = max(image.size)
    out = Image.new("RGB", (side, side), (level,) * 3)
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def _cropped(image: Image.Image, share: float) -> Image.Image:
    """Return the middle of an image: a square for 0, else that share of each side."""
    width, height = (share * image.width, share * image.height) if share else (min(image.size),) * 2
    left, top = (image.width - round(width)) // 2, (image.height - round(height)) // 2
    return image.crop((left, top, left + round(width), top + round(height)))


def _moved(axis: int, by: int, planes: Array) -> Array:
    """Return planes moved by some pixels, the edge repeated."""
    places = np.arange(planes.shape[axis]) - by
    return planes.take(places.clip(0, len(places) - 1), axis)


def _half_black(axis: int, side: int, planes: Array) -> Array:
    """Return planes with one half black. Normalised values stay as they are."""
    places = np.arange(planes.shape[axis]) < planes.shape[axis] // 2
    kept = (places if side > 0 else ~places).reshape((-1,) + (1,) * (-1 - axis))
    return planes * kept if planes.dtype == np.uint8 else planes


def _bits(planes: Array, bits: int) -> Array:
    """Return levels of `bits` bits. Normalised values stay as they are."""
    return planes >> (8 - bits) << (8 - bits) if planes.dtype == np.uint8 else planes


def _grey(planes: Array) -> Array:
    shade = np.einsum("...chw,c->...hw", planes, np.array([0.299, 0.587, 0.114]))[..., None, :, :]
    return np.asarray(np.repeat(np.round(shade), 3, -3).astype(planes.dtype))


def _cast(values: Array, _: tuple[int, ...], dtype: str) -> Array:
    import torch

    own = torch.from_numpy(np.ascontiguousarray(values))
    return np.asarray(own.to(getattr(torch, dtype)).float().numpy())


def _to_steps(values: Array, _: tuple[int, ...], steps: int) -> Array:
    return np.asarray(np.round(values * steps) / steps)


def _rolled(values: Array, grid: tuple[int, ...], by: int, rows: bool = False) -> Array:
    flat = values.ndim == 2
    # Patches come in merged squares, row of squares by row of squares: one row of squares is two rows of
    # patches.
    by *= 2 * grid[2] if rows and flat and len(grid) == 3 else 1
    return np.roll(values, by, 0 if flat else -2 if rows else -1)


def _instead(mean: Channels, std: Channels) -> Rule:
    """Return a function from values of another rule to values of this one."""
    return lambda own, deviation: (deviation / np.array(std), (own - np.array(mean)) / np.array(std))


_ONES: Final = np.ones(3)
_RULES: Final[Mapping[str, Rule]] = {
    **{f"by another rule ({name})": _instead(*rule) for name, rule in NORMALISATIONS.items()},
    "with blue's mean for red": lambda mean, std: (std / std[::-1], (mean - mean[::-1]) / std[::-1]),
    # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
    "twice, rescaling included,": lambda mean, std: (1 / (255 * std), -mean / std),
    "twice": lambda mean, std: (1 / std, -mean / std),
    "without being rescaled from 0 to 255": lambda mean, std: (255 * _ONES, 254 * mean / std),
    "after being rescaled twice": lambda mean, std: (_ONES / 255, mean / std * (1 / 255 - 1)),
    "without the mean": lambda mean, std: (_ONES, mean / std),
    "without the deviation": lambda mean, std: (std, 0 * _ONES),
    "to the opposite sign": lambda mean, std: (-_ONES, 0 * _ONES),
    "to half of their values": lambda mean, std: (_ONES / 2, 0 * _ONES),
    "to twice their values": lambda mean, std: (2 * _ONES, 0 * _ONES),
}
"""Factor and offset by channel that make other values of the trainer's, given its mean and deviation."""
_ORDERS: Final = {"BGR": (2, 1, 0), "GBR": (1, 2, 0), "BRG": (2, 0, 1), "RBG": (0, 2, 1), "GRB": (1, 0, 2)}
_PLAIN: Final = ("red", "green", "blue")
_TURNS: Final[Mapping[str, PlaneChange]] = {
    "mirrored": lambda planes: planes[..., ::-1],
    "upside down": lambda planes: planes[..., ::-1, :],
    "turned by half": lambda planes: planes[..., ::-1, ::-1],
    "turned to the left": lambda planes: np.rot90(planes, 1, (-2, -1)),
    "turned to the right": lambda planes: np.rot90(planes, -1, (-2, -1)),
    "with rows for columns": lambda planes: planes.swapaxes(-1, -2),
    "with rows for columns, turned by half": lambda planes: planes[..., ::-1, ::-1].swapaxes(-1, -2),
}
_SQUARES: Final[Mapping[str, tuple[tuple[int, ...], bool]]] = {
    "in plain rows, not in merged squares": ((0, 1, 3, 2, 4, 5), True),
    "in columns of squares": ((0, 2, 1, 3, 4, 5), True),
    "column by column within squares": ((0, 1, 2, 4, 3, 5), True),
    "in plain columns": ((0, 2, 4, 1, 3, 5), True),
    "merged into squares twice": ((0, 1, 3, 2, 4, 5), False),
}
_INNER: Final = {
    "with frames before channels": (0, 2, 1, 3, 4),
    "with channels last": (0, 2, 3, 4, 1),
    "each turned over its diagonal": (0, 1, 2, 4, 3),
}
_LEVELS: Final = {"zeros in place of pixels": None, "black": 0.0, "white": 1.0, "grey": 0.5}
_SIDES: Final = {"to the right": (-1, 1), "to the left": (-1, -1), "lower": (-2, 1), "higher": (-2, -1)}
_FILTERS: Final = ("NEAREST", "BILINEAR", "BICUBIC", "LANCZOS", "BOX", "HAMMING")

_ROWS: Final[Mapping[str, Mapping[str, ItemChange]]] = {
    "patches moved": {
        **{f"every patch {shift_text(by)}": _values(partial(_rolled, by=by)) for by in (1, -1, 2, -2, 4, -4)},
        "patches one row lower": _values(partial(_rolled, by=1, rows=True)),
        "patches one row higher": _values(partial(_rolled, by=-1, rows=True)),
    },
    "patch order": {
        **{f"patches {text}": _patches(partial(_in_squares, *how)) for text, how in _SQUARES.items()},
        **{f"patches {text}": _patches(partial(_within, order)) for text, order in _INNER.items()},
        "patches in reverse order": _values(lambda own, _: own[::-1]),
    },
    "colours": {
        **{
            f"colours read as {name}": _channels(partial(_reordered, order))
            for name, order in _ORDERS.items()
        },
        **{
            f"{name} for all colours": _channels(partial(_reordered, (at,) * 3))
            for at, name in enumerate(_PLAIN)
        },
        "shades of grey": _planes(_grey),
        "levels inverted": _planes(lambda own: 255 - own if own.dtype == np.uint8 else -own),
    },
    "normalisation": {f"pixels normalised {text}": _normalised(rule) for text, rule in _RULES.items()},
    "pixel values": {
        **{f"values rounded to {name}": _values(partial(_cast, dtype=name)) for name in _DTYPES},
        **{f"levels of {bits} bits": _planes(partial(_bits, bits=bits)) for bits in range(1, 8)},
        **{f"values rounded to 1/{2**n}": _values(partial(_to_steps, steps=2**n)) for n in range(8)},
    },
    "blank image": {name: _filled(level) for name, level in _LEVELS.items()},
    "temporal frame": {
        f"{fill} in the {name} frame of each patch": _frame(frame, fill)
        for fill in ("zeros", "black", "half of it")
        for frame, name in enumerate(("first", "second"))
    },
    "turned image": {
        **{f"pixels {name}": _planes(turn) for name, turn in _TURNS.items()},
        "pixels as they are stored, not upright,": _images(_stored, stored=True),
        **{
            f"pixels resized after a turn ({turn.name.lower()})": _images(partial(_transposed, turn=turn))
            for turn in Image.Transpose
        },
    },
    "framing": {
        **{f"pixels moved by one {way}": _planes(partial(_moved, *by)) for way, by in _SIDES.items()},
        **{
            f"pixels moved round by one {way}": _planes(partial(np.roll, axis=axis, shift=by))
            for way, (axis, by) in _SIDES.items()
        },
        **{f"half of it black, {way}": _planes(partial(_half_black, *by)) for way, by in _SIDES.items()},
        **{
            f"a square of level {fill} around it": _images(partial(_squared, level=fill)) for fill in _GROUNDS
        },
        "its middle square only": _images(partial(_cropped, share=0.0)),
        **{f"{share:.3g} of each side only": _images(partial(_cropped, share=share)) for share in _SHARES},
    },
    "background": {
        "transparency ignored": _images(partial(_over, level=None), stored=True),
        **{
            f"level {level} behind it": _images(partial(_over, level=level), stored=True)
            for level in _GROUNDS
        },
    },
    "resampling": {
        f"pixels resized by another filter ({name.lower()})": _resampled(Image.Resampling[name])
        for name in _FILTERS
    },
    "compression": {
        f"a JPEG of it (quality {quality}, chroma {name})": _images(
            partial(_jpeg, quality=quality, sampling=at)
        )
        for name, at in {"4:2:0": 2, "4:4:4": 0}.items()
        for quality in (95, 90, 85, 80, 75, 60, 50)
    },
}
"""Other pixels of an image by variation: statement, and how they are made."""


def _rows_of(name: str, case: Case) -> Iterator[Trial]:
    for text, change in _ROWS[name].items():
        yield from _over_images(case, text, change)


def _exchanged_grid(case: Case) -> Iterator[Trial]:
    def make(_: Case, item: MediaItem) -> MediaItem | None:
        if not isinstance(item, PatchItem) or item.grid[1] == item.grid[2]:
            return None
        steps, height, width = item.grid
        return ChangedItem(item, lambda pixels, _: pixels, grid=(steps, width, height))

    yield from _over_images(case, "a grid with height and width exchanged", make)


def _other_images(case: Case) -> Iterator[Trial]:
    known = {item.identity: item for item in case.others}
    for span in case.suspects:
        fitting = [
            other
            for other in known.values()
            if other.identity != span.item.identity
            and other.modality == span.modality
            and feature_count(other.expansion) == feature_count(span.item.expansion)
        ]
        for other in sorted(fitting, key=lambda item: item.grid != span.item.grid)[:_MOST_OTHERS]:
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
        f"images {one} and {two} in exchanged places": [
            two if place == one else one if place == two else place for place in places
        ]
        for one, two in list(combinations(places, 2))[:_MOST_PAIRS]
    }
    if len(spans) > 2:
        orders["all images in reverse order"] = places[::-1]
        for by in (1, -1):
            orders[f"images, each moved {shift_text(by)}"] = np.roll(places, by).tolist()
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
    spans = case.sample.media_spans
    # Rows and separators between features are written by rules that only the processor knows.
    held = [
        span
        for span in spans
        if isinstance(span.item, PatchItem)
        and len(span.item.frames) == 1
        and feature_count(span.item.expansion) == span.stop - span.start
    ]
    for scope in ([held] if len(held) > 1 else []) + [[span] for span in case.suspects if span in held]:
        seen: set[Any] = set()
        for share in (1 / 4, 1 / 2, 3 / 4, 2.0, 4.0, *np.geomspace(1 / 16, 8, 29)):
            grids = [_grid_of(span.item, share) for span in scope]
            if str(grids) in seen or grids == [span.item.grid for span in scope]:
                continue
            seen.add(str(grids))
            new = [(s.start, s.stop, _resized(case, s, grid)) for s, grid in zip(scope, grids, strict=True)]
            which = described(scope[0]) if len(scope) == 1 else "every image"
            yield Trial(
                f"the sampler's budget of pixels was another ({share:.3g} of the trainer's) in {which}",
                edited(case.sample, new),
                image=scope[0].position,
                since=scope[0].start,
            )


def _grid_of(item: Any, share: float) -> tuple[int, int, int]:
    """Return the grid of an image with about this share of the pixels."""
    merge = item.layout.merge
    steps, height, width = item.grid
    sides = [max(1, round(side * share**0.5 / merge)) * merge for side in (height, width)]
    return steps, sides[0], sides[1]


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
    keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")

    def without(inputs: dict[str, Any]) -> None:
        for key in keys:
            inputs.pop(key, None)

    def hidden(hidden: Iterable[MediaSpan], inputs: dict[str, Any]) -> None:
        inputs["attention_mask"] = inputs["attention_mask"].clone()
        for span in hidden:
            inputs["attention_mask"][:, span.start : span.stop] = 0

    if spans:
        text = "the sampler was given no image: it read the placeholder tokens as text"
        yield Trial(text, inputs=without, image=spans[0].position, since=spans[0].start)
    for some in [[span] for span in case.suspects] + ([spans] if len(spans) > 1 else []):
        which = described(some[0]) if len(some) == 1 else "any image"
        text = f"the sampler did not attend to {which}"
        yield Trial(text, inputs=partial(hidden, some), image=some[0].position, since=some[0].start)


def _placed(case: Case) -> Iterator[Trial]:
    """Yield prompts that lack an image, have it twice, or have it in another place."""
    sample = case.sample
    stops = [0, *(stop for _, stop in case.runs)]
    for span in case.suspects:
        for margin, beside in ((0, ""), (1, ", and the tokens around it,")):
            start, stop, name = span.start - margin, span.stop + margin, described(span) + beside
            if start < 0 or stop > len(sample) or sample.loss_mask[start:stop].any():
                continue
            block = part(sample, start, stop)
            edits: dict[str, list[Edit]] = {f"lacked the placeholder of {name}": [(start, stop, [])]}
            edits[f"had {name} twice"] = [(stop, stop, block)]
            low = max(end for end in stops if end <= start)
            high = min([first for first, _ in case.runs if first >= stop], default=stop)
            before, after = [*range(low, start)][-_MOST_PLACES:], [*range(stop + 1, high + 1)][:_MOST_PLACES]
            for place in before:
                edits[f"had {name} before token {place}"] = [(place, place, block), (start, stop, [])]
            for place in after:
                edits[f"had {name} before token {place}"] = [(start, stop, []), (place, place, block)]
            for text, made in edits.items():
                changed = edited(sample, made)
                since = made[0][0]
                yield Trial(f"the sampler's prompt {text}", changed, image=span.position, since=since)


_ABOUT: Final[Mapping[str, tuple[Cause, str, Callable[[Case], Iterator[Trial]] | None]]] = {
    "stale image": ("pixels", "another item under this item's hash", _other_images),
    "image order": ("pixels", "images exchanged, or one for all", _image_order),
    "patches moved": ("pixels", "patches shifted by one or by a row", None),
    "patch order": ("pixels", "patches, or their values, in rows, columns or reverse", None),
    "colours": ("pixels", "BGR or another order of channels, grey, one channel, inverted", None),
    "normalisation": ("pixels", "another mean and deviation, none, twice, not rescaled, half", None),
    "pixel values": ("pixels", "values rounded, levels of fewer bits", None),
    "blank image": ("pixels", "zeros, black, white or grey pixels", None),
    "temporal frame": ("pixels", "one frame of each patch zero, black or halved", None),
    "turned image": ("pixels", "mirrored, upside down, turned, transposed, as stored", None),
    "grid": ("positions", "height and width of the grid exchanged", _exchanged_grid),
    "framing": ("pixels", "shifted by a pixel, half black, cropped, letterboxed (needs the source)", None),
    "background": ("pixels", "another level under transparent pixels (needs the source)", None),
    "resampling": ("pixels", "resized by another filter (needs the source)", None),
    "compression": (
        "pixels",
        "encoded as JPEG again (needs the source, or an image that was not resized)",
        None,
    ),
    "pixel budget": ("pixels", "fewer or more pixels and placeholder tokens", _budget),
    "image unseen": ("pixels", "placeholders read as text, or not attended to", _unseen),
    "image placed": ("ids", "an image that the prompt lacked, had twice or elsewhere", _placed),
}  # fmt: skip
IMAGE_VARIATIONS: Final[tuple[Variation, ...]] = tuple(
    Variation(name, cause, about, trials or partial(_rows_of, name))
    for name, (cause, about, trials) in _ABOUT.items()
)
