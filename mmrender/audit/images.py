"""Images of items: how they became pixels, and rows of other images, or another order or size of them."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from PIL import Image

from mmrender.audit.case import Array, Case, ChangedItem, Trial, edited, part, plain, with_items
from mmrender.audit.report import described, sampled_runs
from mmrender.errors import MediaError
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import Levels
from mmrender.media.load import load_image
from mmrender.media.pixels import picture_of
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.patches import PatchItem
from mmrender.media.video import open_video
from mmrender.messages import VideoPart
from mmrender.sidecar import MediaItem, MediaSpan, MultiModalData, PlaceholderRange, Repeat, feature_count
from mmrender.trajectory.sample import TrainingSample

Make: TypeAlias = Callable[[], MediaItem | None]
Others: TypeAlias = Callable[[Case, MediaSpan], Mapping[str, Make]]
"""The items that the sampler may have had in place of one, by description. None if it cannot have."""
_MAX_OTHERS: Final = 24
_MAX_STRIDE: Final = 8
_FEW: Final = 3
"""Images, tiles or frames of more of which only neighbours are exchanged."""
_NOUNS: Final = {"image": "image", "video": "video", "audio": "clip"}
_ROUNDED: Final = 1
"""Levels by which filters of different releases differ."""


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
        (width, height), method = self.size, self.method if method is None else method
        own = levels(image, self.size, method)
        if self.tile is None:
            return own
        high, wide = self.tile
        cut = own[0].reshape(3, height // high, high, width // wide, wide).transpose(1, 3, 0, 2, 4)
        whole = [levels(image, (wide, high), method)] if self.thumbnail else []
        return np.concatenate([cut.reshape(-1, 3, high, wide), *whole])


def pictures(item: Any) -> Array | None:
    """Return the levels of an item's frames or tiles, uint8 `(n, 3, height, width)`, if it keeps levels."""
    if isinstance(item, PatchItem):
        return item.frames
    pixels = item.parts.get("pixel_values") if isinstance(item, ProcessedItem) else None
    if not isinstance(pixels, Levels):
        return None
    shape = pixels.shape[-3:]
    is_whole = len(pixels.held) * np.prod(shape) == np.prod(pixels.shape)
    return pixels.values.reshape(-1, *shape) if is_whole else None


def canvas_of(case: Case, item: Any, source: Image.Image) -> Canvas | None:
    """Return how an image becomes the pixels of an item, proved by its own pixels for tiles."""
    frames = pictures(item)
    if frames is None or (isinstance(item, PatchItem) and len(frames) != 1):
        return None
    count, _, height, width = frames.shape
    if isinstance(item, PatchItem):
        return Canvas((width, height))

    def found() -> Canvas | None:
        for method in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS):
            for cut in (count, count - 1)[: 1 + (count > 1)]:
                for rows in (rows for rows in range(1, cut + 1) if cut % rows == 0):
                    size = cut // rows * width, rows * height
                    canvas = Canvas(size, (height, width), cut < count, method)
                    if np.abs(canvas.frames(source).astype(int) - frames).max() <= _ROUNDED:
                        return canvas
        return None

    return case.once(("canvas", item.identity), found)


def levels(image: Image.Image, size: tuple[int, ...], method: Any = Image.Resampling.BICUBIC) -> Array:
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


def renewed(item: Any, frames: Array) -> MediaItem:
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
        held = Levels(frames, tuple(range(len(frames))), shape, own.arithmetic)
        fields = {"parts": {**item.parts, "pixel_values": held}}
    expansion = tuple(
        msgspec.structs.replace(piece, count=round(piece.count * share))
        if isinstance(piece, Repeat) and piece.embeds
        else piece
        for piece in item.expansion
    )
    renewed: MediaItem = msgspec.structs.replace(item, **fields, identity=identity, expansion=expansion)
    return renewed


def source_of(case: Case, item: Any, *, stored: bool = False) -> Image.Image | None:
    """Return the image before it was resized, if it is known: from the sources, or if it was not resized."""
    frames = pictures(item)
    if frames is None or (isinstance(item, PatchItem) and len(frames) != 1):
        return None
    given = case.sources.get(item.identity)
    if stored:
        try:
            return given if given is None or isinstance(given, Image.Image) else Image.open(io.BytesIO(given))
        except (OSError, TypeError):
            return None  # of another form than bytes, which only `load_image` reads
    if given is not None:
        return case.once(("source", item.identity), lambda: load_image(given).image.convert("RGB"))
    if tuple(frames.shape[-2:]) != tuple(item.size) or len(frames) > 1:
        return None
    return picture_of(frames[0])


def shrunk(side: float, method: Any, image: Image.Image) -> Image.Image | None:
    """Return an image of a share of both sides, or of a longer side of so many pixels, if it is smaller."""
    share = side if side <= 1 else side / max(image.size)
    width, height = (max(1, int(length * share)) for length in image.size)
    return image.resize((width, height), method) if share < 1 else None


# --- rows


def over_media(others: Others, case: Case, *, several: bool = True) -> Iterator[Trial]:
    """Yield trials in which one suspect is another item, or all items are, if there are several."""
    tables = [(span, others(case, span)) for span in case.sample.media_spans]
    suspects = {(span.start, span.modality) for span in case.suspects}
    for text in dict.fromkeys(chain.from_iterable(table for _, table in tables)):
        made = [(span, table[text]()) for span, table in tables if text in table]
        changed = [(span, item) for span, item in made if item is not None]
        alone = [[one] for one in changed if (one[0].start, one[0].modality) in suspects]
        for some in ([changed] if several and len(changed) > 1 else []) + alone:
            kinds = " and ".join(dict.fromkeys(span.modality for span, _ in some))
            which = f"every {kinds}" if len(some) > 1 else described(some[0][0])
            count = all(feature_count(item.expansion) == feature_count(s.item.expansion) for s, item in some)
            parts = [] if count else [(s.start, s.stop, _shown(case, s, item)) for s, item in some]
            sample = with_items(case.sample, some) if count else edited(case.sample, parts)
            yield Trial(f"the sampler saw {text} in {which}", sample, since=some[0][0].start)


def _shown(case: Case, span: MediaSpan, item: Any) -> TrainingSample:
    """Return the placeholders of an item, between the text that is beside an image's, with the item."""
    own, embeds = case.sample.token_ids[span.start : span.stop], span.range.is_embed
    runs, count = sampled_runs(embeds), feature_count(item.expansion)
    if len(runs) == 1:
        ((start, stop),) = runs
        ids = np.concatenate([own[:start], np.full(count, own[start]), own[stop:]])
        runs = [] if len(ids) == count else [(start, start + count)]
    else:
        # Time steps that have a text each keep the texts of those that they are nearest to.
        edges = [0, *(stop for _, stop in runs)]
        places = [at for step in _steps(len(runs), item) for at in range(edges[step], edges[step + 1])]
        places += range(edges[-1], len(own))
        ids, runs = own[places], sampled_runs(embeds[places])
    place = PlaceholderRange(0, len(ids), tuple(runs) or None)
    return replace(plain(ids), multi_modal_data=MultiModalData.of([(place, item)]))


def _steps(count: int, item: Any) -> list[int]:
    """Return the time steps of a video that are the nearest to the steps of another."""
    return [int(step) for step in np.linspace(0, count - 1, item.grid[0]).round()]


def orders(noun: str, count: int) -> dict[str, list[int]]:
    """Return other orders of so many images, frames or tiles, each once."""
    own = [*range(count)]
    found = {
        f"{noun}s {one} and {two} in exchanged places (swapped)": [
            {one: two, two: one}.get(a, a) for a in own
        ]
        for one, two in (combinations(own, 2) if count <= _FEW else pairwise([*own, 0]))
    }
    found[f"all {noun}s in reverse order"] = own[::-1]
    found |= {f"{noun}s, each moved by {by:+d},": np.roll(own, by).tolist() for by in (1, -1)}
    for text, rest in {f"{noun}s": 0, f"{noun}s, the last in its place,": 1}.items():
        side = round((count - rest) ** 0.5)
        if side * side == count - rest:
            columns = np.arange(side * side).reshape(side, side).T.ravel().tolist()
            found[f"{text} in columns"] = columns + own[count - rest :]
    found[f"{noun}s in reverse order, the last in its place,"] = [*own[-2::-1], *own[-1:]]
    found[f"each {noun} one place later"] = [0, *own[:-1]]
    found[f"every other {noun} twice"] = [at // 2 * 2 for at in own]
    found |= {f"{noun} {at} in the place of each (repeated)": [at] * count for at in own}
    found |= {f"{noun}s without {noun} {at}": [*own[:at], *own[at + 1 :], own[-1]] for at in own}
    texts = {tuple(order): text for text, order in reversed(found.items()) if order != own}
    return {text: [*order] for order, text in reversed(texts.items())}


def order(case: Case) -> Iterator[Trial]:
    """Yield the images, videos or clips of a sample in other orders."""
    for kind, noun in _NOUNS.items():
        spans = [span for span in case.sample.media_spans if span.modality == kind]
        parts = [part(case.sample, span.start, span.stop) for span in spans]
        for text, order in orders(noun, len(spans)).items() if len(spans) > 1 else ():
            moved = [
                (span.start, span.stop, parts[at])
                for span, at in zip(spans, order, strict=True)
                if spans[at].item.identity != span.item.identity
            ]
            if moved:
                yield Trial(f"the sampler saw {text}", edited(case.sample, moved), since=moved[0][0])


def stale(case: Case, span: MediaSpan) -> dict[str, Make]:
    """Return other items of as many tokens."""
    own, known = span.item, {item.identity: item for item in case.others}
    kind = own.modality, feature_count(own.expansion)
    fitting = [one for one in known.values() if (one.modality, feature_count(one.expansion)) == kind]
    fitting = sorted(fitting, key=lambda item: item.grid != own.grid)[:_MAX_OTHERS]
    text = f"another {own.modality} (identity {{:.12}}…), a stale {own.modality} under this one's hash,"
    return {
        text.format(one.identity): partial(_itself, one) for one in fitting if one.identity != own.identity
    }


def _itself(item: MediaItem) -> MediaItem:
    return item


def sized(case: Case, span: MediaSpan) -> dict[str, Make]:
    """Return an image in other sizes, of as many placeholder tokens as these make."""
    # Rows and separators between features are written by rules that only the processor knows.
    item: Any = span.item
    if len(sampled_runs(span.range.is_embed)) > 1:
        return {}
    source, found = source_of(case, item), dict[str, Make]()
    text = "another number of pixels ({}), as by another max_pixels or a client that resizes,"
    if isinstance(item, PatchItem) and len(item.frames) == 1:
        # Without the source it is compared as an image that was not resized.
        image, unit = source or picture_of(item.frames[0]), item.layout.merge
        sizes: dict[tuple[int, int], float] = {}
        for share in (1 / 4, 1 / 2, 3 / 4, 2.0, 4.0, *np.geomspace(1 / 16, 8, 29)):
            sides = [max(1, round(n * share**0.5 / unit)) * unit for n in item.grid[1:]]
            sizes.setdefault((sides[0], sides[1]), share)
        sizes.pop(item.grid[1:], None)
        for (height, width), share in sizes.items():
            size = width * item.layout.patch, height * item.layout.patch
            for name, copied in {"": 1.0, ", of a smaller copy": share**0.5}.items():
                if copied <= 1:
                    own = f"{share:.3g} of the trainer's{name}"
                    found[text.format(own)] = partial(_drawn, item, Canvas(size), image, copied)
    canvas = None if source is None else canvas_of(case, item, source)
    if source is not None and canvas is not None and canvas.tile is not None:
        for rows, columns in ((a, b) for a in range(1, 7) for b in range(1, 12 // a + 1)):
            size = columns * canvas.tile[1], rows * canvas.tile[0]
            for thumbnail in (True, False) if rows * columns > 1 else (False,):
                other = canvas._replace(size=size, thumbnail=thumbnail)
                own = f"{rows} x {columns} tiles{' and a thumbnail' * thumbnail}"
                if other != canvas:
                    found[text.format(own)] = partial(_drawn, item, other, source)
    return found


def _drawn(item: Any, canvas: Canvas, image: Image.Image, share: float = 1.0) -> MediaItem:
    """Return an item of an image, or of a smaller copy, on another canvas."""
    return renewed(item, canvas.frames(shrunk(share, Image.Resampling.BICUBIC, image) or image))


def reordered(noun: str, case: Case, span: MediaSpan) -> dict[str, Make]:
    """Return a video with other frames, or an image with its tiles in another order."""
    item, frames = span.item, pictures(span.item)
    is_of_noun = frames is not None and isinstance(item, PatchItem) == (noun == "frame")
    found = orders(noun, len(frames)) if frames is not None and is_of_noun else {}
    others: dict[str, Make] = {text: partial(_with_frames, item, order) for text, order in found.items()}
    if noun == "frame" and isinstance(item, PatchItem) and span.modality == "video":
        film, own = _film(case, item), len(item.frames)
        counts = {round(own * share) for share in (1, 1 / 2, 2, 1 / 4, 4)}
        for text, chosen in _choices(len(film), sorted(counts, key=lambda count: abs(count - own))).items():
            others[f"a video of {text}"] = partial(_filmed, span, item, film[chosen])
    return others


def _choices(total: int, counts: Sequence[int]) -> dict[str, list[int]]:
    """Return frames of `total` by the rules of samplers, each choice once."""
    found: dict[tuple[int, ...], str] = {}
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
            found.setdefault(tuple(at.astype(int).tolist()), text)
    return {text: [*chosen] for chosen, text in found.items()}


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


def _filmed(span: MediaSpan, item: PatchItem, frames: Array) -> MediaItem | None:
    """Return a video of other frames, fewer or more."""
    runs, grid = len(sampled_runs(span.range.is_embed)), -(-len(frames) // item.layout.temporal)
    if np.array_equal(frames, item.frames) or runs not in (1, item.grid[0]):
        return None
    other = msgspec.structs.replace(item, times=(), grid=(grid, *item.grid[1:]))
    if runs > 1:
        size = len(item.expansion) // runs
        pieces = [
            piece for at in _steps(runs, other) for piece in item.expansion[at * size : (at + 1) * size]
        ]
        other = msgspec.structs.replace(other, expansion=tuple(pieces))
    return renewed(other, frames)


def _with_frames(item: Any, order: Sequence[int]) -> MediaItem:
    frames = pictures(item)
    return item if frames is None else renewed(item, frames[list(order)])


def grid(_: Case, span: MediaSpan) -> dict[str, Make]:
    """Return an image whose grid has height and width exchanged, and a video with other time steps."""
    found = dict[str, Make]()
    item: Any = span.item
    if isinstance(item, PatchItem) and item.grid[1] != item.grid[2]:
        turned = (item.grid[0], item.grid[2], item.grid[1])
        text = "a grid with height and width exchanged"
        found[text] = partial(ChangedItem.of, item, lambda pixels, _: pixels, turned)
    known: Any = getattr(item, "second_per_grid", None)
    for seconds in [] if known is None else [known / 2, known * 2, known / 4, known * 4, 0.5, 1.0, 2.0]:
        own = {"second_per_grid": seconds, "identity": f"{round(seconds * 1e9):064x}"}
        found[f"time steps of {seconds:g} s, not {known:g} s,"] = partial(
            msgspec.structs.replace, item, **own
        )
    return found


def unseen(case: Case) -> Iterator[Trial]:
    """Yield the placeholders of media as text."""
    spans = case.sample.media_spans
    names = {name for span in spans for name in span.item.tensors()}

    def without(inputs: dict[str, Any]) -> None:
        for key in names & {*inputs}:
            del inputs[key]

    if spans:
        text = f"the sampler was given no {spans[0].modality}: it read the placeholder tokens as text"
        yield Trial(text, inputs=without, since=spans[0].start)
