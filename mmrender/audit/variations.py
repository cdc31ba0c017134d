"""Other things that the sampler may have seen, to be tried one by one.

A variation changes one sample in one respect. Where the trainer's model then gives the sampler's
log-probabilities, that respect is what differs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Float32Array, described
from mmrender.spans import Framework, MediaItem, MediaSpan, MultiModalData, TensorDtype
from mmrender.trajectory.sample import TrainingSample

PixelChange: TypeAlias = Callable[[Float32Array, tuple[int, ...]], Float32Array]
"""New pixels from old ones and the item's grid."""
Channels: TypeAlias = tuple[float, ...]


class Variation(NamedTuple):
    """One change of a sample: the cause that it tries, and what it would mean if it fits."""

    cause: Cause
    statement: str
    sample: TrainingSample
    image: int | None = None


NORMALISATIONS: Final[Mapping[str, tuple[Channels, Channels]]] = {
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mean and deviation 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none, values from 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "none, values from 0 to 255": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
}
"""Mean and deviation by channel that processors in use apply to pixels from 0 to 1."""


def shift_text(by: int) -> str:
    """Return a text such as "1 place(s) later"."""
    return f"{abs(by)} place(s) {'later' if by > 0 else 'earlier'}"


class ChangedItem:
    """A media item whose pixels are changed after it made them; everything else is the item's own."""

    def __init__(self, item: MediaItem, change: PixelChange) -> None:
        self.item, self.change = item, change
        # No real item has this identity, so the changed pixels are taken for no other item's.
        self.identity = f"{item.identity}-changed-{id(change):x}"
        self.modality, self.size, self.grid = item.modality, item.size, item.grid
        self.expansion, self.nbytes = item.expansion, item.nbytes

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Return the item's tensors with `pixel_values` changed; `dtype` float32 only."""
        tensors = dict(self.item.tensors(dtype))
        tensors["pixel_values"] = self.change(tensors["pixel_values"], self.grid)
        if framework == "numpy":
            return tensors
        import torch

        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}


def image_variations(
    sample: TrainingSample, span: MediaSpan, others: Iterable[MediaItem]
) -> Iterator[Variation]:
    """Yield what the sampler may have seen in place of one image, `others` among it."""
    item, place = span.item, described(span)
    for other in others:
        if other.identity != item.identity and other.grid == item.grid:
            yield Variation(
                "pixels",
                f"the sampler saw another image (identity {other.identity[:12]}…) in place of {place}: "
                "a stale image under this one's hash",
                _with_item(sample, span, other),
                span.position,
            )
    for statement, change in (*_moved_patches(), *_normalised(item)):
        changed = _with_item(sample, span, ChangedItem(item, change))
        yield Variation("pixels", f"{statement} in {place}", changed, span.position)


def _with_item(sample: TrainingSample, span: MediaSpan, item: MediaItem) -> TrainingSample:
    entries = [(one.range, item if one == span else one.item) for one in sample.media_spans]
    return replace(sample, multi_modal_data=MultiModalData.of(entries))


def _moved_patches() -> Iterator[tuple[str, PixelChange]]:
    def moved(pixels: Float32Array, _: tuple[int, ...], by: int) -> Float32Array:
        return np.roll(pixels, by, 0 if pixels.ndim == 2 else pixels.ndim - 1)

    def lowered(pixels: Float32Array, grid: tuple[int, ...], by: int) -> Float32Array:
        # Patches come in merged squares, row of squares by row of squares: one such row is two of patches.
        flat = pixels.ndim == 2 and len(grid) == 3
        return np.roll(pixels, by * 2 * grid[2], 0) if flat else np.roll(pixels, by, pixels.ndim - 2)

    for by in (1, -1, 4, -4):
        yield f"the sampler saw every patch {shift_text(by)}", partial(moved, by=by)
    for by in (1, -1):
        way = "lower" if by > 0 else "higher"
        yield f"the sampler saw the image one row of patches {way}", partial(lowered, by=by)


def _normalised(item: MediaItem) -> Iterator[tuple[str, PixelChange]]:
    arithmetic = getattr(item, "arithmetic", None)
    candidates: Iterable[tuple[Channels, Channels]] = NORMALISATIONS.values()
    if arithmetic is not None:
        candidates = [(tuple(arithmetic.mean), tuple(arithmetic.std))]
    for used_mean, used_std in candidates:
        for name, (mean, std) in NORMALISATIONS.items():
            if (mean, std) != (used_mean, used_std):
                offset = np.subtract(used_mean, mean) / np.array(std)
                change = _by_channel(np.divide(used_std, std), offset)
                yield f"the sampler's pixels were normalised by another rule ({name})", change
        # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
        twice = _by_channel(1 / (255 * np.array(used_std)), -np.divide(used_mean, used_std))
        yield "the sampler's pixels were normalised twice", twice


def _by_channel(scale: npt.NDArray[np.float64], offset: npt.NDArray[np.float64]) -> PixelChange:
    """Return `pixels * scale + offset` along the colour axis: of flattened patches, or of planes."""

    def change(pixels: Float32Array, _: tuple[int, ...]) -> Float32Array:
        if pixels.ndim == 2:
            by_channel = pixels.reshape(len(pixels), 3, -1)
            return (by_channel * scale[:, None] + offset[:, None]).reshape(pixels.shape).astype(np.float32)
        return (pixels * scale[:, None, None] + offset[:, None, None]).astype(np.float32)

    return change


def id_variations(sample: TrainingSample, position: int) -> Iterator[Variation]:
    """Yield other orders of tokens that the sampler may have had, changed from `position` on."""
    runs = [run for run in sampled_runs(sample.loss_mask) if run[1] > position]
    for by in (1, -1, 2, -2):
        for moved, which in ((runs[:1], "of one completion"), (runs, "of every completion from there on")):
            ids = sample.token_ids.copy()
            for start, stop in moved:
                ids[start:stop] = np.roll(ids[start:stop], by)
            yield Variation(
                "ids",
                f"the sampled tokens {which} are shifted: the sampler's were {shift_text(by)}",
                replace(sample, token_ids=ids),
            )


def sampled_runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs `[start, stop)` of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
