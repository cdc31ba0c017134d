"""Rows of the stage pixels: other pixels of the same images."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from operator import methodcaller
from typing import Any, Final, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from mmrender.audit.case import Array, Case, ChangedItem, Trial, fitted_number
from mmrender.audit.images import Canvas, Make, canvas_of, over_media, pictures, renewed, shrunk, source_of
from mmrender.media.pixels import picture_of
from mmrender.media.processors.patches import PatchItem, PatchLayout
from mmrender.sidecar import MediaItem, MediaSpan

ItemChange: TypeAlias = Callable[[Case, MediaItem], MediaItem | None]
"""The item that the sampler may have had in place of another; None if it cannot have."""
ImageChange: TypeAlias = Callable[[Image.Image], Image.Image | None]
_ORIENTATION: Final = 274
_TURNS: Final = Image.Transpose
_HALF: Final = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_NORMALISATIONS: Final[Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "CLIP's mean and deviation": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's mean and deviation": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mean and deviation 0.5": _HALF,
    "none, values from 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "none, values from 0 to 255": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
}


def over_images(table: Mapping[str, ItemChange], case: Case) -> Iterator[Trial]:
    """Yield trials that change one suspect, and one that changes all images, if there are several."""

    def others(case: Case, span: MediaSpan) -> dict[str, Make]:
        is_seen = span.modality != "audio"
        return {text: partial(change, case, span.item) for text, change in table.items() if is_seen}

    return over_media(others, case)


def _each(
    text: str, change: Callable[..., Image.Image | None], *axes: Iterable[Any]
) -> dict[str, ImageChange]:
    """Return a change of images by each combination of values, which its text names."""
    return {text.format(*values): partial(change, *values) for values in product(*axes)}


# --- changes of normalised pixels


def _values(change: Callable[[Array, tuple[int, ...]], Array]) -> ItemChange:
    """Return a change of normalised pixels, given the grid."""
    return lambda _, item: ChangedItem.of(item, change)


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
        return ChangedItem.of(
            item, lambda pixels, grid: change(pixels, grid, item.layout).reshape(pixels.shape)
        )

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


def _second_frame(pixels: Array, _: tuple[int, ...], layout: PatchLayout, level: float) -> Array:
    frames = pixels.reshape(len(pixels), 3, layout.temporal, -1).copy()
    frames[:, :, 1:] = level
    return frames


def _own_rule(item: Any) -> tuple[Array, Array]:
    """Return mean and deviation of an item's normalisation, 0.5 for an item without one."""
    arithmetic: Any = getattr(item, "arithmetic", None)
    mean, std = _HALF if arithmetic is None else (arithmetic.mean, arithmetic.std)
    return np.broadcast_to(np.asarray(mean), 3), np.broadcast_to(np.asarray(std), 3)


def _ruled(change: Callable[[Array, Array, Array], Any]) -> ItemChange:
    """Return a change of normalised values, `(n, 3, values)`, given mean and deviation."""

    def make(case: Case, item: MediaItem) -> MediaItem | None:
        mean, std = (one[:, None] for one in _own_rule(item))
        return _channels(lambda own: np.broadcast_to(change(own, mean, std), own.shape))(case, item)

    return make


def _raw(change: Callable[[Array], Any]) -> ItemChange:
    """Return a change of levels from 0 to 1, `(n, 3, values)`, that are not rounded again."""
    return _ruled(lambda own, mean, std: (change(own * std + mean) - mean) / std)


def _normalised_by(mean: Sequence[float], std: Sequence[float]) -> ItemChange:
    """Return another rule of normalisation."""
    other, deviation = np.array(mean)[:, None], np.array(std)[:, None]
    return _ruled(lambda own, mean, std: (own * std + mean - other) / deviation)


def _cast(values: Array, _: tuple[int, ...], dtype: str) -> Array:
    import torch

    own = torch.from_numpy(np.ascontiguousarray(values))
    return np.asarray(own.to(getattr(torch, dtype)).float().numpy())


# --- changes of images


def _images(
    table: Mapping[str, ImageChange], *, stored: bool = False, method: Any = None
) -> dict[str, ItemChange]:
    """Return changes of the image before it was resized, as it is `stored`, or upright and opaque.

    The image is then resized by another filter, if `method` is one.
    """

    def before(change: ImageChange, case: Case, item: MediaItem) -> MediaItem | None:
        upright, source = source_of(case, item), source_of(case, item, stored=stored)
        canvas = None if upright is None else canvas_of(case, item, upright)
        if upright is None or canvas is None or source is None or (image := change(source)) is None:
            return None
        if method is not None and source.size == canvas.size:
            return None
        if isinstance(item, PatchItem) and image.size == upright.size[::-1] != upright.size:
            canvas = Canvas(canvas.size[::-1])
        return renewed(item, canvas.frames(image.convert("RGB"), method))

    return {text: partial(before, change) for text, change in table.items()}


def _both(table: Mapping[str, ImageChange]) -> dict[str, ItemChange]:
    """Return changes of an image before it was resized, and of the resized image's frames."""

    def after(change: ImageChange, _: Case, item: MediaItem) -> MediaItem | None:
        frames = pictures(item)
        if frames is None or (len(frames) > 1 and not isinstance(item, PatchItem)):
            return None
        images = [change(picture_of(one)) for one in frames]
        changed = np.stack([np.asarray(one.convert("RGB")).transpose(2, 0, 1) for one in images if one])
        fits = isinstance(item, PatchItem) or changed.shape == frames.shape
        return renewed(item, changed) if fits else None

    resized = {f"{text} after resizing": partial(after, change) for text, change in table.items()}
    return _images(table) | resized


def _on_image(change: Callable[[Array], Array], image: Image.Image) -> Image.Image:
    """Return an image after a change of levels from 0 to 1, `(1, 3, values)`."""
    own = np.asarray(image.convert("RGB"))
    changed = change(own.reshape(1, -1, 3).swapaxes(1, 2) / 255).clip(0, 1) * 255
    return Image.fromarray(changed.swapaxes(1, 2).round().astype(np.uint8).reshape(own.shape))


def _encoded(form: str, quality: int, image: Image.Image, **options: Any) -> Image.Image:
    data = io.BytesIO()
    image.save(data, form, quality=quality, **options)
    return Image.open(data).convert("RGB")


def _over(level: int | None, image: Image.Image) -> Image.Image | None:
    """Return a transparent image over one level, or without its transparency for None."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return None
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (level or 0,) * 3 + (255,))
    return image if level is None else Image.alpha_composite(ground, image)


def _squared(level: Any, image: Image.Image) -> Image.Image:
    """Return an image in the middle of a square of one level or colour, or its own middle square for None."""
    side = min(image.size) if level is None else max(image.size)
    out = Image.new("RGB", (side, side), level if isinstance(level, tuple) else (level or 0,) * 3)
    out.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return out


def _on_mean(case: Case, item: MediaItem) -> MediaItem | None:
    """Return an image in a square of the colour that is normalised to 0, as of LLaVA."""
    colour = tuple(int(255 * level) for level in _own_rule(item)[0])
    return _images({"": partial(_squared, colour)})[""](case, item)


def _middle(share: float, image: Image.Image) -> Image.Image:
    width, height = (round(side * share) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def adjusted(case: Case) -> Iterator[Trial]:
    """Yield images with other brightness, contrast, saturation or gamma, by the number that fits best."""
    for text, rule in _ADJUSTED.items():

        def make(factor: float, text: str = text, rule: Any = rule) -> Trial:
            name = f"pixels with {factor:.3g} times the {text}"
            trials = [*over_images({name: _raw(partial(rule, factor))}, case)]
            return trials[0] if trials else Trial("", since=len(case.sample))

        value = fitted_number(case, make, 1 / 16, 16, 1.0)
        if value is not None:
            name, change = f"{value:.3g} times the {text}", partial(rule, value)
            ways = {f"pixels with {name}": _raw(change)}
            ways |= _both({f"an image with {name}": partial(_on_image, change)})
            yield from (trial._replace(fitted=1) for trial in over_images(ways, case))


def _enlarged(share: float, image: Image.Image) -> Image.Image:
    """Return the middle of an image in the image's own size. It may begin between pixels."""
    return ImageOps.fit(image, image.size, bleed=(1 - share) / 2)


def _turned(image: Image.Image) -> Image.Image | None:
    return image if image.getexif().get(_ORIENTATION, 1) != 1 else None


def _linear(own: Array) -> Array:
    return np.where(own <= 0.04045, own / 12.92, ((own + 0.055) / 1.055) ** 2.4)


_GREY: Final = np.array([0.299, 0.587, 0.114])[:, None]
_ADJUSTED: Final[Mapping[str, Callable[[float, Array], Array]]] = {
    "brightness": lambda factor, own: (own * factor).clip(0, 1),
    "contrast": lambda factor, own: (own.mean() + factor * (own - own.mean())).clip(0, 1),
    "saturation": lambda factor, own: (
        (grey := (own * _GREY).sum(-2, keepdims=True)) + factor * (own - grey)
    ).clip(0, 1),
    "gamma": lambda factor, own: own.clip(0, 1) ** factor,
}


_ROWS: Final = (0, 1, 2, 3, 4)
_VALUES: Final = (1, 2, 3, 4)
_SHARES: Final = (0.95, 0.9, 0.875, 0.8, 0.75, 0.5)
_SIDES: Final = (64, 224, 256, 336, 384, 448, 512, 768, 1024, 2048)
_FILTERS: Final = (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS)
_TORCH: Final = ("nearest", "bilinear", "bicubic", "bilinear-antialias", "bicubic-antialias", "area")
TABLES: Final[Mapping[str, Mapping[str, ItemChange]]] = {
    "patch order": {
        **{f"every patch moved by {n:+d}": _values(partial(_rolled, by=n)) for n in (1, -1, 2, -2)},
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
        **_both({"no colours, only grey,": methodcaller("convert", "L")}),
    },
    "normalisation": {
        f"pixels normalised {text}": change
        for text, change in {
            **{f"by another rule ({name})": _normalised_by(*rule) for name, rule in _NORMALISATIONS.items()},
            # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
            "twice, rescaling included,": _ruled(lambda own, mean, std: (own / 255 - mean) / std),
            "twice": _ruled(lambda own, mean, std: (own - mean) / std),
            "without being rescaled": _raw(lambda own: own * 255),
            "after being rescaled twice": _raw(lambda own: own / 255),
            "after levels were divided by 256": _raw(lambda own: own * 255 / 256),
            "without the mean": _ruled(lambda own, mean, std: own + mean / std),
            "without the deviation": _ruled(lambda own, mean, std: own * std),
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
        "black": _raw(lambda own: 0),
        "white": _raw(lambda own: 1),
    },
    "orientation": {
        **_images(
            {"pixels as they are stored, not upright by their EXIF orientation,": _turned}, stored=True
        ),
        **_both(
            {
                "an image mirrored (flipped)": ImageOps.mirror,
                "an image upside down": ImageOps.flip,
                "an image rotated by 180 degrees (turned by half)": methodcaller("rotate", 180),
                "an image rotated by 90 degrees to the left": methodcaller("transpose", _TURNS.ROTATE_90),
                "an image rotated by 90 degrees to the right": methodcaller("transpose", _TURNS.ROTATE_270),
                "rows for columns": methodcaller("transpose", _TURNS.TRANSPOSE),
            }
        ),
    },
    "levels": _both(
        {
            text: partial(_on_image, change)
            for text, change in {
                "levels from 16 to 235 (limited range)": lambda own: (16 + 219 * own) / 255,
                "levels from 16 to 235 stretched to 0 to 255": lambda own: (255 * own - 16) / 219,
                "colours without their gamma (linear light)": _linear,
                "colours without a gamma of 2.2 (linear light)": lambda own: own**2.2,
            }.items()
        }
    ),
    "framing": {
        **_images({"its middle square only (cropped)": partial(_squared, None)}),
        **_images(_each("its middle, {:.4g} of both sides, only (cropped)", _middle, _SHARES)),
        **_images(
            _each("its middle, {:.4g} of both sides, in the image's size, only (cropped)", _enlarged, _SHARES)
        ),
        **_images(
            _each("a square of level {} around it (padded, letterboxed)", _squared, (0, 114, 127, 128, 255))
        ),
        "a square of the mean's colour around it (padded, letterboxed)": _on_mean,
    },
    "background": _images(
        {
            "transparency (alpha) ignored": partial(_over, None),
            **_each("level {} behind its transparency (alpha)", _over, (0, 127, 128, 255)),
        },
        stored=True,
    ),
    "resampling": {
        text: change
        for name, method in {
            **{f"{one.name.lower()} resampling": one for one in Image.Resampling},
            **{f"torch's {one} resampling": one for one in _TORCH},
        }.items()
        for text, change in _images({f"pixels resized by {name}": lambda image: image}, method=method).items()
    },
    "compression": _images(
        {
            **_each("a {} of it (quality {})", _encoded, ["JPEG"], (95, 90, 85, 80, 75, 70, 60, 50, 40, 30)),
            **_each(
                "a {} of it (quality {}) with whole colours",
                partial(_encoded, subsampling=0),
                ["JPEG"],
                (95, 90, 85, 75),
            ),
            **_each("a {} of it (quality {})", _encoded, ["WEBP"], (95, 90, 85, 80, 75, 50)),
            **_each("a palette of {} colours of it", lambda n, image: image.quantize(n), (256, 16)),
        }
    ),
    "shrunk": _images(
        _each(
            "a copy of {:.2g} of the size, enlarged again ({.name}),",
            shrunk,
            (1 / 2, 1 / 3, 1 / 4, 3 / 4),
            _FILTERS,
        )
        | _each("a copy with a longer side of {}, enlarged again ({.name}),", shrunk, _SIDES, _FILTERS)
    ),
}
"""Other pixels of an image by row: statement, and how they are made."""
