"""Rows of the stage pixels: other pixels of the same images."""

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from mmrender.audit.canvas import Canvas, canvas_of, pictures, renewed, shrunk, source_of
from mmrender.audit.case import Array, Case, ChangedItem, Trial, fitted_number, with_items
from mmrender.audit.report import described
from mmrender.media.processors.patches import PatchItem, PatchLayout
from mmrender.sidecar import MediaItem

ItemChange: TypeAlias = Callable[[Case, MediaItem], MediaItem | None]
"""The item that the sampler may have had in place of another; None if it cannot have."""
Rule: TypeAlias = Callable[[Array, Array], tuple[Any, Any]]
"""Factor and offset by channel of normalised values, given mean and deviation."""
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


def _planes(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of levels `(frames, 3, height, width)`, maybe turned, of a whole image."""

    def make(_: Case, item: MediaItem) -> MediaItem | None:
        frames = pictures(item)
        if frames is None or (len(frames) > 1 and not isinstance(item, PatchItem)):
            return None
        changed = change(frames)
        return (
            renewed(item, changed) if isinstance(item, PatchItem) or changed.shape == frames.shape else None
        )

    return make


def _images(change: Callable[[Image.Image], Image.Image | None], *, stored: bool = False) -> ItemChange:
    """Return a change of the image before it was resized, as it is `stored`, or upright and opaque."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        upright, source = source_of(case, item), source_of(case, item, stored=stored)
        canvas = None if upright is None else canvas_of(case, item, upright)
        if canvas is None or source is None or (image := change(source)) is None:
            return None
        if (
            isinstance(item, PatchItem)
            and upright is not None
            and image.size == upright.size[::-1] != upright.size
        ):
            canvas = Canvas(canvas.size[::-1])
        return renewed(item, canvas.frames(image.convert("RGB")))

    return make


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


def _raw(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of levels from 0 to 1, `(n, 3, values)`, that are not rounded again."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        arithmetic: Any = getattr(item, "arithmetic", None)
        mean, std = (0.5, 0.5) if arithmetic is None else (arithmetic.mean, arithmetic.std)
        middle, deviation = (np.broadcast_to(np.asarray(one), 3)[:, None] for one in (mean, std))
        return _channels(lambda own: (change(own * deviation + middle) - middle) / deviation)(case, item)

    return make


def _on_levels(change: Callable[[Array], Array], planes: Array) -> Array:
    """Return levels `(n, 3, height, width)` after a change of levels from 0 to 1, rounded."""
    changed = change(planes.reshape(*planes.shape[:2], -1) / 255)
    return (changed.clip(0, 1) * 255).round().astype(np.uint8).reshape(planes.shape)


def _on_image(change: Callable[[Array], Array], image: Image.Image) -> Image.Image:
    planes = np.asarray(image.convert("RGB")).transpose(2, 0, 1)[None]
    return Image.fromarray(np.ascontiguousarray(_on_levels(change, planes)[0].transpose(1, 2, 0)))


def _adjusted(case: Case) -> Iterator[Trial]:
    """Yield images with other brightness, contrast, saturation or gamma, by the number that fits best."""
    for text, rule in _ADJUSTED.items():

        def make(factor: float, text: str = text, rule: Any = rule) -> Trial:
            name = f"pixels with {factor:.3g} times the {text}"
            trials = [*_over_images({name: _raw(partial(rule, factor))}, case)]
            return trials[0] if trials else Trial("", since=len(case.sample))

        value = fitted_number(case, make, 1 / 16, 16, 1.0)
        if value is not None:
            change = partial(rule, value)
            name = f"{value:.3g} times the {text}"
            ways = {
                f"pixels with {name}": _raw(change),
                f"levels with {name}": _planes(partial(_on_levels, change)),
                f"an image with {name}": _images(partial(_on_image, change)),
            }
            yield from (trial._replace(fitted=1) for trial in _over_images(ways, case))


_GREY: Final = np.array([0.299, 0.587, 0.114])[:, None]
_ADJUSTED: Final[Mapping[str, Callable[[float, Array], Array]]] = {
    "brightness": lambda factor, own: (own * factor).clip(0, 1),
    "contrast": lambda factor, own: (own.mean() + factor * (own - own.mean())).clip(0, 1),
    "saturation": lambda factor, own: (
        (grey := (own * _GREY).sum(-2, keepdims=True)) + factor * (own - grey)
    ).clip(0, 1),
    "gamma": lambda factor, own: own.clip(0, 1) ** factor,
}


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
        source = source_of(case, item)
        canvas = None if source is None else canvas_of(case, item, source)
        if source is None or canvas is None or source.size == canvas.size:
            return None
        return renewed(item, canvas.frames(source, method))

    return make


def _in_linear_light(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return a resized image whose averages are of light, not of levels."""
    light = (np.asarray(image.convert("RGB"), np.float32) / 255) ** 2.2
    planes = [Image.fromarray(np.ascontiguousarray(light[..., one])) for one in range(3)]
    resized = [np.asarray(plane.resize(size, Image.Resampling.BICUBIC)) for plane in planes]
    return Image.fromarray((np.stack(resized, -1).clip(0, 1) ** (1 / 2.2) * 255).round().astype(np.uint8))


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


def _middle(image: Image.Image, share: float) -> Image.Image:
    width, height = (round(side * share) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _in_bits(bits: int, planes: Array) -> Array:
    return planes >> (8 - bits) << (8 - bits)


def _second_frame(pixels: Array, _: tuple[int, ...], layout: PatchLayout, level: float) -> Array:
    frames = pixels.reshape(len(pixels), 3, layout.temporal, -1).copy()
    frames[:, :, 1:] = level
    return frames


def _transposed(image: Image.Image, turn: str) -> Image.Image:
    return image.transpose(Image.Transpose[turn])


def _tiles(change: Callable[[Array], Array]) -> ItemChange:
    """Return a change of the order of tiles `(tiles, 3, height, width)`."""

    def make(_: Case, item: MediaItem) -> MediaItem | None:
        frames = pictures(item)
        if frames is None or len(frames) < 2 or isinstance(item, PatchItem):
            return None
        changed = change(frames)
        return None if np.array_equal(changed, frames) else renewed(item, changed)

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
        "zeros in the second frame of each patch": _patches(partial(_second_frame, level=0.0)),
        "black in the second frame of each patch": _patches(partial(_second_frame, level=-1.0)),
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
                (
                    "rotated by 180 degrees (turned by half)",
                    "ROTATE_180",
                    lambda planes: planes[..., ::-1, ::-1],
                ),
                ("rotated by 90 degrees to the left before resizing", "ROTATE_90", None),
                ("rotated by 90 degrees to the right before resizing", "ROTATE_270", None),
            )
            for text, make in {
                f"the image {name}": _images(partial(_transposed, turn=turn)),
                **({} if change is None else {f"pixels {name}": _planes(change)}),
            }.items()
        },
        "pixels rotated by 90 degrees to the left": _planes(lambda planes: np.rot90(planes, 1, (-2, -1))),
        "pixels rotated by 90 degrees to the right": _planes(lambda planes: np.rot90(planes, -1, (-2, -1))),
        "rows for columns": _planes(lambda planes: planes.swapaxes(-1, -2)),
    },
    "levels": {
        **{
            text: _images(partial(_on_image, change))
            for text, change in {
                "levels from 16 to 235 (limited range)": lambda own: (16 + 219 * own) / 255,
                "levels from 16 to 235 stretched to 0 to 255": lambda own: (255 * own - 16) / 219,
                "colours without their gamma (linear light)": lambda own: np.where(
                    own <= 0.04045, own / 12.92, ((own + 0.055) / 1.055) ** 2.4
                ),
                "colours without a gamma of 2.2 (linear light)": lambda own: own**2.2,
            }.items()
        },
        **{f"levels of {n} bits (posterised)": _planes(partial(_in_bits, n)) for n in range(1, 8)},
        **{
            f"an image of {n} bits (posterised)": _images(partial(ImageOps.posterize, bits=n))
            for n in range(1, 8)
        },
        "an image with equalised levels": _images(ImageOps.equalize),
        "an image with stretched contrast (autocontrast)": _images(ImageOps.autocontrast),
    },
    "framing": {
        "its middle square only (cropped)": _images(partial(_squared, level=None)),
        **{
            f"its middle, {share:.4g} of both sides, only (cropped)": _images(partial(_middle, share=share))
            for share in (0.95, 0.9, 0.875, 0.8, 0.75, 0.5)
        },
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
        "pixels resized in linear light": _resampled(_in_linear_light),
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
        f"{text}, enlarged again by {method.name.lower()},": _images(shrunk(side, method))
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


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    **{name: partial(_over_images, table) for name, table in _TABLES.items()},
    "levels": lambda case: chain(_over_images(_TABLES["levels"], case), _adjusted(case)),
}
"""Changes to try, by row."""
