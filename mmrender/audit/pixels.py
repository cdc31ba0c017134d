"""Rows of the stage pixels: another image, another order, other pixels, or none."""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from PIL import Image

from mmrender.audit.case import Array, Case, ChangedItem, Trial, edited, part, plain, with_items
from mmrender.audit.report import described
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Levels
from mmrender.media.load import load_image
from mmrender.media.processors.patches import PatchItem, PatchLayout
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, PlaceholderRange, Repeat, feature_count
from mmrender.trajectory.sample import TrainingSample

ItemChange: TypeAlias = Callable[[Case, MediaItem], MediaItem | None]
"""The item that the sampler may have had in place of another; None if it cannot have."""
Rule: TypeAlias = Callable[[Array, Array], tuple[Any, Any]]
"""Factor and offset by channel of normalised values, given mean and deviation."""
_MAX_PAIRS: Final = 15
_MAX_OTHERS: Final = 24
_ROUNDED: Final = 1
"""Levels by which filters of different releases differ."""
_ORIENTATION: Final = 274
_NORMALISATIONS: Final[Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "CLIP's mean and deviation": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's mean and deviation": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
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


class Canvas(NamedTuple):
    """How an image becomes the pixels of an item: resized once, and cut into tiles if the family has them.

    Attributes:
        size: Width and height to which the image is resized.
        tile: Height and width of a tile; None for patches.
        thumbnail: Whether the whole image follows as a last tile.
        method: The filter.
    """

    size: tuple[int, int]
    tile: tuple[int, int] | None = None
    thumbnail: bool = False
    method: Any = Image.Resampling.BICUBIC

    def frames(self, image: Image.Image, method: Any = None) -> Array:
        """Return the levels of an image: uint8 `(frames or tiles, 3, height, width)`."""
        levels = _levels(image, self.size, self.method if method is None else method)
        if self.tile is None:
            return levels
        height, width = self.tile
        rows, columns = self.size[1] // height, self.size[0] // width
        cut = levels[0].reshape(3, rows, height, columns, width).transpose(1, 3, 0, 2, 4)
        tiles: Array = cut.reshape(-1, 3, height, width)
        if not self.thumbnail:
            return tiles
        return np.concatenate(
            [tiles, _levels(image, (width, height), self.method if method is None else method)]
        )


def _pictures(item: Any) -> Array | None:
    """Return the levels of an item's frames or tiles, uint8 `(n, 3, height, width)`, if it keeps levels."""
    if isinstance(item, PatchItem):
        return item.frames
    pixels = item.parts.get("pixel_values") if isinstance(item, ProcessedItem) else None
    if not isinstance(pixels, Levels) or len(pixels.held) * np.prod(pixels.shape[-3:]) != np.prod(
        pixels.shape
    ):
        return None
    return pixels.values.reshape(-1, *pixels.shape[-3:])


def _canvases(count: int, tile: tuple[int, int]) -> Iterator[Canvas]:
    """Yield the ways in which an image may have become so many tiles."""
    height, width = tile
    for method in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS):
        for thumbnail in (False, True) if count > 1 else (False,):
            cut = count - thumbnail
            for rows in (rows for rows in range(1, cut + 1) if cut % rows == 0):
                yield Canvas((cut // rows * width, rows * height), tile, thumbnail, method)


def _canvas(case: Case, item: Any, source: Image.Image) -> Canvas | None:
    """Return how an image becomes the pixels of an item, proved by its own pixels for tiles."""
    key = "canvas", item.identity
    if key not in case.memory:
        case.memory[key] = _found_canvas(item, source)
    canvas: Canvas | None = case.memory[key]
    return canvas


def _found_canvas(item: Any, source: Image.Image) -> Canvas | None:
    frames = _pictures(item)
    if isinstance(item, PatchItem):
        return (
            Canvas((frames.shape[-1], frames.shape[-2])) if frames is not None and len(frames) == 1 else None
        )
    if frames is None:
        return None
    for canvas in _canvases(len(frames), (frames.shape[-2], frames.shape[-1])):
        if np.abs(canvas.frames(source).astype(int) - frames).max() <= _ROUNDED:
            return canvas
    return None


def _planes(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of levels `(frames, 3, height, width)`, maybe turned, of a whole image."""

    def make(_: Case, item: MediaItem) -> MediaItem | None:
        frames = _pictures(item)
        if frames is None or (len(frames) > 1 and not isinstance(item, PatchItem)):
            return None
        changed = change(frames)
        return (
            _renewed(item, changed) if isinstance(item, PatchItem) or changed.shape == frames.shape else None
        )

    return make


def _images(change: Callable[[Image.Image], Image.Image | None], *, stored: bool = False) -> ItemChange:
    """Return a change of the image before it was resized, as it is `stored`, or upright and opaque."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        upright, source = _source(case, item), _source(case, item, stored=stored)
        canvas = None if upright is None else _canvas(case, item, upright)
        if canvas is None or source is None or (image := change(source)) is None:
            return None
        if (
            isinstance(item, PatchItem)
            and upright is not None
            and image.size == upright.size[::-1] != upright.size
        ):
            canvas = Canvas(canvas.size[::-1])
        return _renewed(item, canvas.frames(image.convert("RGB")))

    return make


def _levels(image: Image.Image, size: tuple[int, ...], method: Any = Image.Resampling.BICUBIC) -> Array:
    """Return the levels of a resized image: `(1, 3, height, width)`. A name is a filter of torch."""
    width, height = size
    if isinstance(method, str) and image.size != (width, height):
        import torch

        data = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float()
        mode = method.removesuffix("-antialias")
        resized = torch.nn.functional.interpolate(data, (height, width), mode=mode, antialias=method != mode)
        return np.asarray(resized.round().clamp(0, 255).byte().numpy())
    resized = image if image.size == (width, height) else image.resize((width, height), method)
    return np.asarray(resized).transpose(2, 0, 1)[None]


def _renewed(item: Any, frames: Array) -> MediaItem:
    """Return an item of other levels, maybe more or fewer."""
    frames = np.ascontiguousarray(frames)
    identity = f"{id(frames):064x}"  # which no real item has
    if isinstance(item, PatchItem):
        grid = (item.grid[0], *(side // item.layout.patch for side in frames.shape[-2:]))
        tokens = grid[0] * grid[1] * grid[2] // item.layout.merge**2
        share, fields = tokens / max(feature_count(item.expansion), 1), {"frames": frames, "grid": grid}
    else:
        own = item.parts["pixel_values"]
        share = len(frames) / len(own.values)
        shape = (*own.shape[:-4], len(frames), *frames.shape[1:]) if share != 1 else own.shape
        levels = Levels(frames, tuple(range(len(frames))), shape, own.arithmetic)
        fields = {"parts": {**item.parts, "pixel_values": levels}}
    expansion = tuple(
        msgspec.structs.replace(piece, count=round(piece.count * share))
        if isinstance(piece, Repeat) and piece.embeds
        else piece
        for piece in item.expansion
    )
    renewed: MediaItem = msgspec.structs.replace(item, **fields, identity=identity, expansion=expansion)
    return renewed


def _source(case: Case, item: Any, *, stored: bool = False) -> Image.Image | None:
    """Return the image before it was resized, if it is known: from the sources, or if it was not resized."""
    frames = _pictures(item)
    if frames is None or (isinstance(item, PatchItem) and len(frames) != 1):
        return None
    given = case.sources.get(item.identity)
    if stored:
        try:
            return given if given is None or isinstance(given, Image.Image) else Image.open(io.BytesIO(given))
        except (OSError, TypeError):
            return None  # of another form than bytes, which only `load_image` reads
    if given is not None:
        key = "source", item.identity
        if key not in case.memory:
            case.memory[key] = load_image(given).image.convert("RGB")
        image: Image.Image = case.memory[key]
        return image
    if tuple(frames.shape[-2:]) != tuple(item.size) or len(frames) > 1:
        return None
    return Image.fromarray(np.ascontiguousarray(frames[0].transpose(1, 2, 0)), "RGB")


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
    """Return an image resized by another filter, of Pillow or of torch by name."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        source = _source(case, item)
        canvas = None if source is None else _canvas(case, item, source)
        if source is None or canvas is None or source.size == canvas.size:
            return None
        return _renewed(item, canvas.frames(source, method))

    return make


def _shrunk(side: float, method: Any) -> Callable[[Image.Image], Image.Image | None]:
    """Return a change to a share of both sides, or to a longer side of so many pixels."""

    def change(image: Image.Image) -> Image.Image | None:
        share = side if side < 1 else side / max(image.size)
        width, height = (max(1, int(length * share)) for length in image.size)
        return image.resize((width, height), method) if share < 1 else None

    return change


def _encoded(image: Image.Image, form: str, **options: Any) -> Image.Image:
    data = io.BytesIO()
    image.save(data, form, **options)
    return Image.open(data).convert("RGB")


def _over(image: Image.Image, level: int | None) -> Image.Image | None:
    """Return a transparent image over one level, or without its transparency for None."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return None
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (level or 0,) * 3 + (255,))
    return image if level is None else Image.alpha_composite(ground, image)


def _grey(planes: Array) -> Array:
    images = [Image.fromarray(np.ascontiguousarray(one.transpose(1, 2, 0))).convert("L") for one in planes]
    return np.stack([np.repeat(np.asarray(one)[None], 3, 0) for one in images])


def _squared(image: Image.Image, level: int | None) -> Image.Image:
    """Return an image in the middle of a square of one level, or its own middle square for None."""
    side = min(image.size) if level is None else max(image.size)
    out = Image.new("RGB", (side, side), (level or 0,) * 3)
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def _without_second_frame(pixels: Array, _: tuple[int, ...], layout: PatchLayout) -> Array:
    frames = pixels.reshape(len(pixels), 3, layout.temporal, -1).copy()
    frames[:, :, 1:] = 0
    return frames


def _transposed(image: Image.Image, turn: str) -> Image.Image:
    return image.transpose(Image.Transpose[turn])


def _tiles(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of the order of tiles `(tiles, 3, height, width)`."""

    def make(_: Case, item: MediaItem) -> MediaItem | None:
        frames = _pictures(item)
        if frames is None or len(frames) < 2 or isinstance(item, PatchItem):
            return None
        changed = change(frames)
        return None if np.array_equal(changed, frames) else _renewed(item, changed)

    return make


def _in_columns(tiles: Array, last: int) -> Array:
    """Return tiles of a square of tiles column by column, `last` tiles in their place."""
    count = len(tiles) - last
    side = round(count**0.5)
    if side * side != count:
        return tiles
    order = np.arange(count).reshape(side, side).T.ravel().tolist()
    return tiles[[*order, *range(count, len(tiles))]]


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
        "inverted colours": _channels(lambda own: -own),
        "no colours, only grey,": _images(lambda image: image.convert("L")),
        "no colours after resizing, only grey,": _planes(_grey),
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
        "zeros in place of pixels (blank)": _values(lambda own, _: np.zeros_like(own)),
        "zeros in the second frame of each patch": _patches(_without_second_frame),
        "black": _normalised(_level(0.0)),
        "white": _normalised(_level(1.0)),
    },
    "orientation": {
        "pixels as they are stored, not upright by their EXIF orientation,": _images(
            lambda image: image if image.getexif().get(_ORIENTATION, 1) != 1 else None, stored=True
        ),
        **{
            text: make
            for name, turn, change in (
                ("mirrored (flipped)", "FLIP_LEFT_RIGHT", lambda planes: planes[..., ::-1]),
                ("upside down", "FLIP_TOP_BOTTOM", lambda planes: planes[..., ::-1, :]),
                ("turned by half (180 degrees)", "ROTATE_180", lambda planes: planes[..., ::-1, ::-1]),
                ("turned to the left before resizing", "ROTATE_90", None),
                ("turned to the right before resizing", "ROTATE_270", None),
            )
            for text, make in {
                f"the image {name}": _images(partial(_transposed, turn=turn)),
                **({} if change is None else {f"pixels {name}": _planes(change)}),
            }.items()
        },
        "pixels turned to the left": _planes(lambda planes: np.rot90(planes, 1, (-2, -1))),
        "pixels turned to the right": _planes(lambda planes: np.rot90(planes, -1, (-2, -1))),
        "rows for columns": _planes(lambda planes: planes.swapaxes(-1, -2)),
    },
    "framing": {
        "its middle square only (cropped)": _images(partial(_squared, level=None)),
        **{
            f"a square of level {n} around it (padded, letterboxed)": _images(partial(_squared, level=n))
            for n in (0, 127, 128, 255)
        },
    },
    "background": {
        "transparency (alpha) ignored": _images(partial(_over, level=None), stored=True),
        **{
            f"level {n} behind its transparency (alpha)": _images(partial(_over, level=n), stored=True)
            for n in (0, 127, 128, 255)
        },
    },
    "resampling": {
        **{f"pixels resized by {one.name.lower()} resampling": _resampled(one) for one in Image.Resampling},
        **{
            f"pixels resized by torch's {mode} resampling": _resampled(mode)
            for mode in ("nearest", "bilinear", "bicubic", "bilinear-antialias", "bicubic-antialias", "area")
        },
    },
    "compression": {
        **{
            f"a JPEG of it (quality {n})": _images(partial(_encoded, form="JPEG", quality=n))
            for n in (95, 90, 85, 80, 75, 70, 60, 50, 40, 30)
        },
        **{
            f"a JPEG of it with whole colours (quality {n})": _images(
                partial(_encoded, form="JPEG", quality=n, subsampling=0)
            )
            for n in (95, 90, 85, 75)
        },
        **{
            f"a WebP of it (quality {n})": _images(partial(_encoded, form="WEBP", quality=n))
            for n in (95, 90, 85, 80, 75, 50)
        },
        **{
            f"a palette of {n} colours of it": _images(partial(Image.Image.quantize, colors=n))
            for n in (256, 16)
        },
    },
    "shrunk": {
        f"{text}, enlarged again by {method.name.lower()},": _images(_shrunk(side, method))
        for method in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS)
        for text, side in {
            "a copy of half the size": 1 / 2,
            "a copy of a third of the size": 1 / 3,
            "a copy of a quarter of the size": 1 / 4,
            "a copy of three quarters of the size": 3 / 4,
            **{
                f"a copy with a longer side of {n}": n
                for n in (64, 224, 256, 336, 384, 448, 512, 768, 1024, 2048)
            },
        }.items()
    },
    "tiles": {
        "tiles in reverse order": _tiles(lambda own: own[::-1]),
        "the last tile first": _tiles(lambda own: np.roll(own, 1, 0)),
        "the first tile last": _tiles(lambda own: np.roll(own, -1, 0)),
        "tiles in reverse order, the last in its place,": _tiles(
            lambda own: np.concatenate([own[-2::-1], own[-1:]])
        ),
        "the first tile in the place of each": _tiles(lambda own: np.repeat(own[:1], len(own), 0)),
        "the last tile in the place of each": _tiles(lambda own: np.repeat(own[-1:], len(own), 0)),
        "tiles in columns": _tiles(lambda own: _in_columns(own, 0)),
        "tiles in columns, the last in its place,": _tiles(lambda own: _in_columns(own, 1)),
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
        f"images {one} and {two} in exchanged places (swapped)": [
            {one: two, two: one}.get(at, at) for at in places
        ]
        for one, two in list(combinations(places, 2))[:_MAX_PAIRS]
    }
    if len(spans) > 2:
        orders["all images in reverse order"] = places[::-1]
        for by in (1, -1):
            orders[f"images, each moved by {by:+d}"] = np.roll(places, by).tolist()
    if len(spans) > 1:
        orders |= {f"image {place} in the place of each (repeated)": [place] * len(spans) for place in places}
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
    spans = [
        span
        for span in case.sample.media_spans
        if feature_count(span.item.expansion) == span.stop - span.start
    ]
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
            statement = f"the number of pixels was another ({text}) in {which}, as by another max_pixels"
            sample = edited(case.sample, new)
            yield Trial(statement, sample, image=scope[0].position, since=scope[0].start)


def _sized(case: Case, item: Any) -> Iterator[tuple[str, MediaItem]]:
    """Yield an image in other sizes."""
    source = _source(case, item)
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
                yield f"{share:.3g} of the trainer's pixels", _renewed(item, _levels(source, size))
                small = _shrunk(share**0.5, Image.Resampling.BICUBIC)(source)
                if small is not None:
                    text = f"{share:.3g} of the trainer's pixels, of a smaller copy"
                    yield text, _renewed(item, _levels(small, size))
    canvas = None if source is None else _canvas(case, item, source)
    if source is None or canvas is None or canvas.tile is None:
        return
    height, width = canvas.tile
    for rows, columns in ((a, b) for a in range(1, 7) for b in range(1, 12 // a + 1)):
        size = columns * width, rows * height
        for thumbnail in (True, False) if rows * columns > 1 else (False,):
            other = canvas._replace(size=size, thumbnail=thumbnail)
            if other != canvas:
                text = f"{rows} x {columns} tiles{' and a thumbnail' * thumbnail}"
                yield text, _renewed(item, other.frames(source))


def _shown(case: Case, span: MediaSpan, item: Any) -> TrainingSample:
    """Return the placeholders of an item, with the item."""
    count = feature_count(item.expansion)
    ids = plain([int(case.sample.token_ids[span.start])] * count)
    return replace(ids, multi_modal_data=MultiModalData.of([(PlaceholderRange(0, count), item)]))


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
