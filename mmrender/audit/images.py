"""Variations of what the sampler saw: another image, another order, other pixels, or none."""

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrender.audit.report import Float32Array, described
from mmrender.audit.trial import Case, ChangedItem, PixelChange, Trial, Variation, with_items, with_tokens
from mmrender.media.item import PatchItem, PatchLayout
from mmrender.media.load import load_image
from mmrender.spans import MediaItem, MediaSpan, PlaceholderRange, Repeat, feature_count

Channels: TypeAlias = tuple[float, ...]
PlaneChange: TypeAlias = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""New planes `(..., 3, height, width)` from old ones, levels or values."""
_MOST_PAIRS: Final = 15
_MOST_OTHERS: Final = 24

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


def _over_images(
    case: Case, statement: str, make: Callable[[MediaItem], MediaItem | None]
) -> Iterator[Trial]:
    """Yield trials that change one image that is suspect, and one that changes all, where there are several.

    `statement` has a `{}` for what is changed.
    """
    spans = [span for span in case.sample.media_spans if span.modality == "image"]
    changed = {span.start: item for span in spans if (item := make(span.item)) is not None}
    for span in case.suspects:
        if span.start in changed:
            sample = with_items(case.sample, [(span, changed[span.start])])
            yield Trial(statement.format(described(span)), sample, image=span.position, since=span.start)
    if len(changed) > 1:
        sample = with_items(
            case.sample, [(span, changed[span.start]) for span in spans if span.start in changed]
        )
        yield Trial(statement.format("every image"), sample, image=spans[0].position, since=spans[0].start)


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

    def ordered(order: list[int]) -> Any:
        # Ranges keep their places where the images have as many tokens; else all placeholders are laid anew.
        items = [spans[index].item for index in order]
        sizes = [feature_count(span.item.expansion) for span in spans]
        if [feature_count(item.expansion) for item in items] == sizes:
            return with_items(case.sample, list(zip(spans, items, strict=True)))
        return _laid_anew(case, spans, order)

    orders = {
        f"images {one} and {two}": [
            two if index == one else one if index == two else index for index in range(len(spans))
        ]
        for one, two in list(combinations(range(len(spans)), 2))[:_MOST_PAIRS]
    }
    if len(spans) > 2:
        orders["the order of all images"] = list(range(len(spans)))[::-1]
        for by in (1, -1):
            orders[f"images, each moved {shift_text(by)},"] = np.roll(range(len(spans)), by).tolist()
    for name, order in orders.items():
        if [spans[index].item.identity for index in order] == [span.item.identity for span in spans]:
            continue
        first = next(index for index, other in enumerate(order) if index != other)
        yield Trial(
            f"the sampler saw {name} in exchanged places",
            ordered(order),
            image=spans[first].position,
            since=spans[first].start,
        )


def _laid_anew(case: Case, spans: list[MediaSpan], order: list[int]) -> Any:
    """Return the sample with its images, placeholders and all, in another order."""
    sample = case.sample
    for span, index in reversed(list(zip(spans, order, strict=True))):
        new = spans[index]
        ids = case.sample.token_ids[new.start : new.stop]
        sample = with_tokens(sample, span.start, span.stop, ids, media=(new.range, new.item))
    return sample


def _moved_patches(case: Case) -> Iterator[Trial]:
    def moved(pixels: Float32Array, _: tuple[int, ...], by: int) -> Float32Array:
        return np.roll(pixels, by, 0 if pixels.ndim == 2 else pixels.ndim - 1)

    def lowered(pixels: Float32Array, grid: tuple[int, ...], by: int) -> Float32Array:
        # Patches come in merged squares, row of squares by row of squares: one such row is two of patches.
        flat = pixels.ndim == 2 and len(grid) == 3
        return np.roll(pixels, by * 2 * grid[2], 0) if flat else np.roll(pixels, by, pixels.ndim - 2)

    changes: list[tuple[str, PixelChange]] = [
        (f"every patch {shift_text(by)}", partial(moved, by=by)) for by in (1, -1, 2, -2, 4, -4)
    ]
    changes += [
        (f"the image one row of patches {way}", partial(lowered, by=by))
        for by, way in ((1, "lower"), (-1, "higher"))
    ]
    for text, change in changes:
        yield from _over_images(case, f"the sampler saw {text} in {{}}", _changing(change))


def _changing(change: PixelChange) -> Callable[[MediaItem], MediaItem]:
    return lambda item: ChangedItem(item, change)


def _patch_order(case: Case) -> Iterator[Trial]:
    """Yield patches in plain rows, in columns, and with their values in another order."""
    for text, reorder in _PATCH_ORDERS.items():

        def make(item: MediaItem, reorder: Any = reorder) -> MediaItem | None:
            if not isinstance(item, PatchItem):
                return None
            return ChangedItem(item, lambda pixels, grid: reorder(pixels, grid, item.layout))

        yield from _over_images(case, f"the sampler's patches came {text} in {{}}", make)


def _as_rows(pixels: Float32Array, grid: tuple[int, ...], layout: PatchLayout) -> Float32Array:
    """Return patches that come in merged squares in plain rows instead."""
    steps, height, width = grid
    merge = layout.merge
    squares = pixels.reshape(steps, height // merge, width // merge, merge, merge, -1)
    return squares.transpose(0, 1, 3, 2, 4, 5).reshape(pixels.shape)


def _as_columns(pixels: Float32Array, grid: tuple[int, ...], layout: PatchLayout) -> Float32Array:
    """Return patches whose merged squares come column by column."""
    steps, height, width = grid
    merge = layout.merge
    squares = pixels.reshape(steps, height // merge, width // merge, merge * merge, -1)
    return squares.transpose(0, 2, 1, 3, 4).reshape(pixels.shape)


def _inner(
    axes: tuple[int, ...], pixels: Float32Array, _: tuple[int, ...], layout: PatchLayout
) -> Float32Array:
    """Return patches whose values, by channel, frame, row and column, come in another order of axes."""
    shaped = pixels.reshape(len(pixels), 3, layout.temporal, layout.patch, layout.patch)
    return shaped.transpose(0, *(axis + 1 for axis in axes)).reshape(pixels.shape)


def _as_squares(pixels: Float32Array, grid: tuple[int, ...], layout: PatchLayout) -> Float32Array:
    """Return patches, taken for plain rows, in merged squares: merged twice."""
    steps, height, width = grid
    merge = layout.merge
    rows = pixels.reshape(steps, height // merge, merge, width // merge, merge, -1)
    return rows.transpose(0, 1, 3, 2, 4, 5).reshape(pixels.shape)


_PATCH_ORDERS: Final[Mapping[str, Any]] = {
    "in plain rows, not in merged squares,": _as_rows,
    "in columns": _as_columns,
    "merged into squares twice": _as_squares,
    "with frames before channels": partial(_inner, (1, 0, 2, 3)),
    "with channels last": partial(_inner, (1, 2, 3, 0)),
    "each turned over its diagonal": partial(_inner, (0, 1, 3, 2)),
}


def _normalised(case: Case) -> Iterator[Trial]:
    for text, values in _RULES.items():
        # What an item does not say of its own rule is tried too.
        for used in (None, *NORMALISATIONS.values()):

            def make(item: MediaItem, values: Any = values, used: Any = used) -> MediaItem | None:
                arithmetic: Any = getattr(item, "arithmetic", None)
                if (arithmetic is None) == (used is None):
                    return None
                mean, std = used or (arithmetic.mean, arithmetic.std)
                scale, offset = values(np.array(mean), np.array(std))
                return ChangedItem(item, _by_channel(scale, offset))

            yield from _over_images(case, f"the sampler's pixels were {text} in {{}}", make)


def _instead(mean: Channels, std: Channels) -> Callable[..., tuple[Any, Any]]:
    """Return what makes values of another rule those of this one."""
    return lambda own, deviation: (deviation / np.array(std), (own - np.array(mean)) / np.array(std))


_RULES: Final[Mapping[str, Callable[..., tuple[Any, Any]]]] = {
    **{f"normalised by another rule ({name})": _instead(*rule) for name, rule in NORMALISATIONS.items()},
    "normalised with blue's mean and deviation for red": lambda mean, std: (
        std / std[::-1],
        (mean - mean[::-1]) / std[::-1],
    ),
    # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
    "normalised twice, rescaling included,": lambda mean, std: (1 / (255 * std), -mean / std),
    "normalised twice": lambda mean, std: (1 / std, -mean / std),
    "not rescaled from 0 to 255 before they were normalised": lambda mean, std: (
        255 * np.ones(3),
        254 * mean / std,
    ),
    "rescaled twice before they were normalised": lambda mean, std: (
        np.ones(3) / 255,
        mean / std * (1 / 255 - 1),
    ),
}
"""Factor and offset by channel that make other values of the trainer's, given its mean and deviation."""


def _by_channel(scale: npt.NDArray[np.float64], offset: npt.NDArray[np.float64]) -> PixelChange:
    """Return `pixels * scale + offset` along the colour axis: of flattened patches, or of planes."""

    def change(pixels: Float32Array, _: tuple[int, ...]) -> Float32Array:
        if pixels.ndim == 2:
            by_channel = pixels.reshape(len(pixels), 3, -1)
            return (by_channel * scale[:, None] + offset[:, None]).reshape(pixels.shape).astype(np.float32)
        return (pixels * scale[:, None, None] + offset[:, None, None]).astype(np.float32)

    return change


def _colours(case: Case) -> Iterator[Trial]:
    orders = {"BGR": (2, 1, 0), "GBR": (1, 2, 0), "BRG": (2, 0, 1), "RBG": (0, 2, 1), "GRB": (1, 0, 2)}
    for name, order in orders.items():

        def change(pixels: Float32Array, _: tuple[int, ...], order: tuple[int, ...] = order) -> Float32Array:
            if pixels.ndim == 2:
                return pixels.reshape(len(pixels), 3, -1)[:, order].reshape(pixels.shape)
            return pixels[..., order, :, :]

        yield from _over_images(case, f"the sampler read the colours as {name} in {{}}", _changing(change))


def _normalised_level(item: MediaItem, level: float) -> npt.NDArray[np.float64]:
    """Return a level from 0 to 1 by channel, where the item says how it is normalised; else 0."""
    arithmetic = getattr(item, "arithmetic", None)
    return np.zeros(3) if arithmetic is None else np.subtract(level, arithmetic.mean) / arithmetic.std


def _blank(case: Case) -> Iterator[Trial]:
    def filled(item: MediaItem, level: float | None) -> MediaItem:
        """Fill with one level from 0 to 1 of all channels, or with normalised 0 for None."""
        values = np.zeros(3) if level is None else _normalised_level(item, level)
        return ChangedItem(item, _by_channel(np.zeros(3), values))

    for name, level in {"zeros in place of pixels": None, "black": 0.0, "white": 1.0, "grey": 0.5}.items():
        yield from _over_images(case, f"the sampler saw {name} in {{}}", partial(filled, level=level))


def _second_frame(case: Case) -> Iterator[Trial]:
    for name in ("zeros", "black", "half of it"):
        for frame in (1, 0):

            def make(item: MediaItem, name: str = name, frame: int = frame) -> MediaItem | None:
                if not isinstance(item, PatchItem) or item.layout.temporal < 2 or item.modality != "image":
                    return None
                fill = _normalised_level(item, 0.0)[:, None] if name == "black" else np.zeros((3, 1))

                def change(pixels: Float32Array, _: tuple[int, ...]) -> Float32Array:
                    out = pixels.reshape(len(pixels), 3, item.layout.temporal, -1).copy()
                    out[:, :, frame] = out[:, :, frame] / 2 if name == "half of it" else fill
                    return out.reshape(pixels.shape)

                return ChangedItem(item, change)

            which = "second" if frame else "first"
            yield from _over_images(
                case, f"the sampler's {which} frame of each patch held {name} in {{}}", make
            )


def _turned(case: Case) -> Iterator[Trial]:
    turns: dict[str, PlaneChange] = {
        "mirrored": lambda planes: planes[..., ::-1],
        "upside down": lambda planes: planes[..., ::-1, :],
        "turned by half": lambda planes: planes[..., ::-1, ::-1],
        "turned to the left": lambda planes: np.rot90(planes, 1, (-2, -1)),
        "turned to the right": lambda planes: np.rot90(planes, -1, (-2, -1)),
        "with rows for columns": lambda planes: planes.swapaxes(-1, -2),
    }
    for name, turn in turns.items():
        yield from _over_images(case, f"the sampler saw {{}} {name}", partial(_with_planes, change=turn))


def _with_planes(item: MediaItem, change: PlaneChange) -> MediaItem | None:
    """Return an item of changed planes, which may have height and width exchanged."""
    if not isinstance(item, PatchItem):
        return ChangedItem(item, lambda pixels, _: change(pixels)) if _is_planar(item) else None
    frames = np.ascontiguousarray(change(item.frames))
    patch = item.layout.patch
    grid = (item.grid[0], frames.shape[-2] // patch, frames.shape[-1] // patch)
    return _renewed(item, frames, grid)


def _is_planar(item: MediaItem) -> bool:
    """Whether the item's pixels come as square planes."""
    shape = item.tensors()["pixel_values"].shape
    return len(shape) > 2 and shape[-1] == shape[-2]


def _renewed(item: PatchItem, frames: npt.NDArray[np.uint8], grid: tuple[int, int, int]) -> PatchItem:
    # No real item has this identity, so it is taken for no other one.
    identity = f"{id(frames):064x}"
    tokens = grid[0] * grid[1] * grid[2] // item.layout.merge**2
    expansion = tuple(
        msgspec.structs.replace(piece, count=tokens) if isinstance(piece, Repeat) and piece.embeds else piece
        for piece in item.expansion
    )
    return msgspec.structs.replace(item, frames=frames, grid=grid, identity=identity, expansion=expansion)


def _exchanged_grid(case: Case) -> Iterator[Trial]:
    def make(item: MediaItem) -> MediaItem | None:
        if not isinstance(item, PatchItem) or item.grid[1] == item.grid[2]:
            return None
        steps, height, width = item.grid
        return ChangedItem(item, lambda pixels, _: pixels, grid=(steps, width, height))

    yield from _over_images(case, "the sampler's grid had height and width exchanged in {}", make)


_FILTERS: Final = {
    "bilinear": Image.Resampling.BILINEAR,
    "Lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "Hamming": Image.Resampling.HAMMING,
}


def _source(case: Case, item: MediaItem) -> Image.Image | None:
    """Return the image before it was resized, where it is known: as given, or since nothing was resized."""
    if not isinstance(item, PatchItem) or len(item.frames) != 1:
        return None
    given = case.sources.get(item.identity)
    if given is not None:
        return load_image(given).image.convert("RGB")
    if tuple(item.frames.shape[-2:]) != tuple(item.size):
        return None
    return Image.fromarray(np.ascontiguousarray(item.frames[0].transpose(1, 2, 0)), "RGB")


def _planes(image: Image.Image) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))[None]


def _resampled(case: Case) -> Iterator[Trial]:
    for name, method in _FILTERS.items():

        def make(item: MediaItem, method: Any = method) -> MediaItem | None:
            source = _source(case, item)
            if source is None or not isinstance(item, PatchItem):
                return None
            height, width = item.frames.shape[-2:]
            if source.size == (width, height):
                return None
            return _renewed(item, _planes(source.resize((width, height), method)), item.grid)

        yield from _over_images(
            case, f"the sampler's image was resized by another filter ({name}) in {{}}", make
        )


def _compressed(case: Case) -> Iterator[Trial]:
    for quality in (95, 90, 85, 80, 75, 50):

        def make(item: MediaItem, quality: int = quality) -> MediaItem | None:
            source = _source(case, item)
            if source is None or not isinstance(item, PatchItem):
                return None
            data = io.BytesIO()
            source.save(data, "JPEG", quality=quality)
            height, width = item.frames.shape[-2:]
            again = Image.open(data).convert("RGB")
            if again.size != (width, height):
                again = again.resize((width, height), Image.Resampling.BICUBIC)
            return _renewed(item, _planes(again), item.grid)

        text = f"the sampler's image was encoded as JPEG once more (quality {quality}) in {{}}"
        yield from _over_images(case, text, make)


def _budget(case: Case) -> Iterator[Trial]:
    """Yield images of fewer or more pixels, and of as many placeholder tokens as these make."""
    spans = case.sample.media_spans
    held = [span for span in spans if isinstance(span.item, PatchItem) and len(span.item.frames) == 1]
    for scope in ([held] if len(held) > 1 else []) + [[span] for span in case.suspects if span in held]:
        for share in (1 / 4, 1 / 2, 3 / 4, 2.0, 4.0):
            sample, changed = case.sample, False
            for span in reversed(scope):
                item: Any = span.item
                grid = _grid_of(item, share)
                if grid == item.grid:
                    continue
                # Without the source this is what it would be of an image that was not resized.
                source = _source(case, item) or Image.fromarray(item.frames[0].transpose(1, 2, 0), "RGB")
                size = (grid[2] * item.layout.patch, grid[1] * item.layout.patch)
                new = _renewed(item, _planes(source.resize(size, Image.Resampling.BICUBIC)), grid)
                count = feature_count(new.expansion)
                feature = int(sample.token_ids[span.start])
                if feature_count(item.expansion) != span.stop - span.start:
                    continue  # rows and separators are written by rules that only the processor knows
                place = PlaceholderRange(span.start, count)
                sample = with_tokens(sample, span.start, span.stop, [feature] * count, media=(place, new))
                changed = True
            if changed:
                which = described(scope[0]) if len(scope) == 1 else "every image"
                yield Trial(
                    f"the sampler's budget of pixels was another ({share:g} of the trainer's) in {which}",
                    sample,
                    image=scope[0].position,
                    since=scope[0].start,
                )


def _grid_of(item: PatchItem, share: float) -> tuple[int, int, int]:
    """Return the grid of an image with about this share of the pixels."""
    merge = item.layout.merge
    steps, height, width = item.grid
    sides = [max(1, round(side * share**0.5 / merge)) * merge for side in (height, width)]
    return steps, sides[0], sides[1]


def _unseen(case: Case) -> Iterator[Trial]:
    spans = case.sample.media_spans
    if not spans:
        return
    keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")

    def without(inputs: dict[str, Any]) -> None:
        for key in keys:
            inputs.pop(key, None)

    yield Trial(
        "the sampler was given no image: it read the placeholder tokens as text",
        inputs=without,
        image=spans[0].position,
        since=spans[0].start,
    )
    for span in case.suspects:

        def hidden(inputs: dict[str, Any], span: MediaSpan = span) -> None:
            inputs["attention_mask"] = inputs["attention_mask"].clone()
            inputs["attention_mask"][:, span.start : span.stop] = 0

        yield Trial(
            f"the sampler did not attend to {described(span)}",
            inputs=hidden,
            image=span.position,
            since=span.start,
        )


def _dropped(case: Case) -> Iterator[Trial]:
    for span in case.suspects:
        for margin in (0, 1):
            start, stop = span.start - margin, span.stop + margin
            if start < 0 or case.sample.loss_mask[start:stop].any():
                continue
            more = ", and the tokens beside it" if margin else ""
            yield Trial(
                f"the sampler's prompt lacked the placeholder of {described(span)}{more}",
                with_tokens(case.sample, start, stop, []),
                image=span.position,
                since=span.start,
            )


IMAGE_VARIATIONS: Final[tuple[Variation, ...]] = (
    Variation("stale image", "pixels", "another item under this one's hash", _other_images),
    Variation("image order", "pixels", "two images, or all, in exchanged places", _image_order),
    Variation("patches moved", "pixels", "patches a place or a row off", _moved_patches),
    Variation(
        "patch order",
        "pixels",
        "patches in plain rows or columns, or their values in another order",
        _patch_order,
    ),
    Variation("colours", "pixels", "BGR or another order of channels", _colours),
    Variation(
        "normalisation", "pixels", "another mean and deviation, none, twice, not rescaled", _normalised
    ),
    Variation("blank image", "pixels", "zeros, black, white or grey in place of pixels", _blank),
    Variation("temporal frame", "pixels", "one frame of each patch zero, black or halved", _second_frame),
    Variation("turned image", "pixels", "mirrored, upside down, turned, rows for columns", _turned),
    Variation("grid", "positions", "height and width of the grid exchanged", _exchanged_grid),
    Variation(
        "resampling",
        "pixels",
        "resized by another filter; needs the source, or an image not resized",
        _resampled,
    ),
    Variation(
        "compression",
        "pixels",
        "encoded as JPEG once more; needs the source, or an image not resized",
        _compressed,
    ),
    Variation("pixel budget", "pixels", "fewer or more pixels and placeholder tokens", _budget),
    Variation("image unseen", "pixels", "placeholders read as text, or not attended to", _unseen),
    Variation("image dropped", "ids", "a placeholder that the sampler's prompt lacked", _dropped),
)
