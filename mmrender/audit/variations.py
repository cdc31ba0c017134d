"""Other things that the sampler may have seen, to be tried one by one.

A variation changes one sample in one respect. Where the trainer's model then gives the sampler's
log-probabilities, that respect is what differs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Float32Array, described
from mmrender.spans import Framework, MediaItem, MediaSpan, MultiModalData, TensorDtype
from mmrender.trajectory.sample import TrainingSample

PixelChange: TypeAlias = Callable[[Float32Array, tuple[int, ...]], Float32Array]
"""New pixels from old ones and the item's grid."""


class Variation(NamedTuple):
    """One change of a sample: the cause that it stands for, and what it would mean if it fits."""

    cause: Cause
    statement: str
    sample: TrainingSample
    image: int | None = None


class Normalisation(NamedTuple):
    """How pixels in 0 to 1 become what the model takes: minus mean, divided by deviation, by channel."""

    name: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


NORMALISATIONS: Final = (
    Normalisation("CLIP's", (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    Normalisation("ImageNet's", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    Normalisation("mean and deviation 0.5", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    Normalisation("none, values from 0 to 1", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    Normalisation("none, values from 0 to 255", (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
)
"""What processors in use apply: the constants of OpenAI's CLIP, of ImageNet, and of SigLIP."""


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
    """Yield what the sampler may have seen in place of one image.

    Args:
        sample: The sample.
        span: The image.
        others: Items that it may have been mistaken for.
    """
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
    entries = [
        (
            other.range,
            item if (other.modality, other.position) == (span.modality, span.position) else other.item,
        )
        for other in sample.media_spans
    ]
    return replace(sample, multi_modal_data=MultiModalData.of(entries))


def _moved_patches() -> Iterator[tuple[str, PixelChange]]:
    def patches(by: int) -> PixelChange:
        return lambda pixels, _: np.roll(pixels, by, 0 if pixels.ndim == 2 else pixels.ndim - 1)

    def rows(by: int) -> PixelChange:
        # Patches come in merged squares, row of squares by row of squares: one such row is two of patches.
        def change(pixels: Float32Array, grid: tuple[int, ...]) -> Float32Array:
            flat = pixels.ndim == 2 and len(grid) == 3
            return np.roll(pixels, by * 2 * grid[2], 0) if flat else np.roll(pixels, by, pixels.ndim - 2)

        return change

    for by in (1, -1, 4, -4):
        way = "later" if by > 0 else "earlier"
        yield f"the sampler saw every patch {abs(by)} place(s) {way}", patches(by)
    for by in (1, -1):
        yield f"the sampler saw the image one row of patches {'lower' if by > 0 else 'higher'}", rows(by)


def _normalised(item: MediaItem) -> Iterator[tuple[str, PixelChange]]:
    arithmetic = getattr(item, "arithmetic", None)
    candidates: Sequence[Normalisation] = NORMALISATIONS
    if arithmetic is not None:
        candidates = [Normalisation("the processor's", tuple(arithmetic.mean), tuple(arithmetic.std))]
    for used in candidates:
        for other in NORMALISATIONS:
            if (other.mean, other.std) != (used.mean, used.std):
                offset = np.subtract(used.mean, other.mean) / np.array(other.std)
                change = _by_channel(np.divide(used.std, other.std), offset)
                yield f"the sampler's pixels were normalised by another rule ({other.name})", change
        # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
        twice = _by_channel(1 / (255 * np.array(used.std)), -np.divide(used.mean, used.std))
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
    """Yield other orders of tokens that the sampler may have had.

    Args:
        sample: The sample.
        position: The first token that departs; it and those after it are suspected.
    """
    runs = [run for run in sampled_runs(sample.loss_mask) if run[1] > position]
    for by in (1, -1, 2, -2):
        way = "later" if by > 0 else "earlier"
        for moved, which in ((runs[:1], "of one completion"), (runs, "of every completion from there on")):
            ids = sample.token_ids.copy()
            for start, stop in moved:
                ids[start:stop] = np.roll(ids[start:stop], by)
            yield Variation(
                "ids",
                f"the sampled tokens {which} are shifted: the sampler's stood {abs(by)} place(s) {way}",
                replace(sample, token_ids=ids),
            )


def sampled_runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs `[start, stop)` of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
