"""Other things that the sampler may have seen, to be tried one by one.

A variation changes one sample in one respect. Where the trainer's model then gives the sampler's
log-probabilities, that respect is what differs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.audit.compare import ImagePlace
from mmrender.audit.finding import Cause
from mmrender.messages import Modality
from mmrender.spans import Expansion, Framework, MediaItem, MultiModalData, TensorDtype
from mmrender.trajectory.sample import TrainingSample

Float32Array = npt.NDArray[np.float32]
PixelChange = Callable[[Float32Array, tuple[int, ...]], Float32Array]
"""New pixels from old ones and the item's grid."""


class Variation(NamedTuple):
    """One change of a sample: which cause it stands for, and what it would mean if it fits."""

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


@dataclass(frozen=True, slots=True)
class ChangedItem:
    """An item whose pixels are changed after it made them; everything else is the item's own."""

    item: MediaItem
    change: PixelChange

    @property
    def modality(self) -> Modality:
        """The item's."""
        return self.item.modality

    @property
    def identity(self) -> str:
        """A text that no real item has, so that the changed pixels are taken for no other item's."""
        return f"{self.item.identity}-changed-{id(self.change):x}"

    @property
    def size(self) -> tuple[int, int]:
        """The item's."""
        return self.item.size

    @property
    def expansion(self) -> Expansion:
        """The item's."""
        return self.item.expansion

    @property
    def grid(self) -> tuple[int, ...]:
        """The item's."""
        return self.item.grid

    @property
    def nbytes(self) -> int:
        """The item's."""
        return self.item.nbytes

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """The item's tensors with `pixel_values` changed; `dtype` float32 only."""
        tensors = dict(self.item.tensors(dtype))
        tensors["pixel_values"] = self.change(tensors["pixel_values"], self.item.grid)
        if framework == "numpy":
            return tensors
        import torch

        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}


def image_variations(
    sample: TrainingSample, place: ImagePlace, others: Iterable[MediaItem]
) -> Iterator[Variation]:
    """Yield what the sampler may have seen in place of one image.

    Args:
        sample: The sample.
        place: The image.
        others: Items that it may have been mistaken for.
    """
    item = sample.multi_modal_data.mm_items[place.modality][place.number]
    for other in others:
        if other.identity != item.identity and other.grid == item.grid:
            yield Variation(
                "pixels",
                f"the sampler saw another image (identity {other.identity[:12]}…) in place of {place}: "
                "a stale image under this one's hash",
                _with_item(sample, place, other),
                place.number,
            )
    for statement, change in (*_moved_patches(), *_normalised(item)):
        changed = _with_item(sample, place, ChangedItem(item, change))
        yield Variation("pixels", f"{statement} in {place}", changed, place.number)


def _with_item(sample: TrainingSample, place: ImagePlace, item: MediaItem) -> TrainingSample:
    sidecar = sample.multi_modal_data
    items = [*sidecar.mm_items[place.modality]]
    hashes = [*sidecar.mm_hashes[place.modality]]
    items[place.number], hashes[place.number] = item, item.identity
    changed = MultiModalData(
        {**sidecar.mm_hashes, place.modality: hashes},
        sidecar.mm_placeholders,
        {**sidecar.mm_items, place.modality: items},
    )
    return replace(sample, multi_modal_data=changed)


def _moved_patches() -> Iterator[tuple[str, PixelChange]]:
    for by in (1, -1, 4, -4):
        way = "later" if by > 0 else "earlier"
        yield f"the sampler saw every patch {abs(by)} place(s) {way}", _rolled(by)
    for by in (1, -1):
        way = "lower" if by > 0 else "higher"
        yield f"the sampler saw the image one row of patches {way}", _rolled_rows(by)


def _rolled(by: int) -> PixelChange:
    def change(pixels: Float32Array, grid: tuple[int, ...]) -> Float32Array:
        del grid
        axis = 0 if pixels.ndim == 2 else pixels.ndim - 1
        return np.roll(pixels, by, axis)

    return change


def _rolled_rows(by: int) -> PixelChange:
    def change(pixels: Float32Array, grid: tuple[int, ...]) -> Float32Array:
        # Patches come in merged squares, row of squares by row of squares, so one such row is two of patches.
        if pixels.ndim == 2 and len(grid) == 3:
            return np.roll(pixels, by * 2 * grid[2], 0)
        return np.roll(pixels, by, pixels.ndim - 2)

    return change


def _normalised(item: MediaItem) -> Iterator[tuple[str, PixelChange]]:
    own = _own_normalisation(item)
    for used in (own,) if own is not None else NORMALISATIONS:
        for other in NORMALISATIONS:
            if (other.mean, other.std) != (used.mean, used.std):
                yield (
                    f"the sampler's pixels were normalised by another rule ({other.name})",
                    _affine(used, other),
                )
        yield "the sampler's pixels were normalised twice", _twice(used)


def _own_normalisation(item: MediaItem) -> Normalisation | None:
    arithmetic = getattr(item, "arithmetic", None)
    if arithmetic is None:
        return None
    return Normalisation("the processor's", tuple(arithmetic.mean), tuple(arithmetic.std))


def _affine(used: Normalisation, other: Normalisation) -> PixelChange:
    scale = np.divide(used.std, other.std)
    offset = np.subtract(used.mean, other.mean) / np.array(other.std)
    return lambda pixels, _: _by_channel(pixels, scale, offset)


def _twice(used: Normalisation) -> PixelChange:
    # A server that normalises raw bytes scales by 1/255 first, whatever it is given.
    scale = 1 / (255 * np.array(used.std))
    offset = -np.divide(used.mean, used.std)
    return lambda pixels, _: _by_channel(pixels, scale, offset)


def _by_channel(
    pixels: Float32Array, scale: npt.NDArray[np.float64], offset: npt.NDArray[np.float64]
) -> Float32Array:
    """`pixels * scale + offset` along the colour axis: of flattened patches, or of planes."""
    if pixels.ndim == 2:
        by_channel = pixels.reshape(len(pixels), 3, -1)
        return (by_channel * scale[:, None] + offset[:, None]).reshape(pixels.shape).astype(np.float32)
    return (pixels * scale[:, None, None] + offset[:, None, None]).astype(np.float32)


def id_variations(sample: TrainingSample, position: int) -> Iterator[Variation]:
    """Yield another order of tokens that the sampler may have had.

    Args:
        sample: The sample.
        position: The first token that departs; it and what follows are suspected.
    """
    runs = [run for run in sampled_runs(sample.loss_mask) if run[1] > position]
    for by in (1, -1, 2, -2):
        way = "later" if by > 0 else "earlier"
        for moved, which in ((runs[:1], "of one completion"), (runs, "of every completion from there on")):
            yield Variation(
                "ids",
                f"the sampled tokens {which} are shifted: the sampler's stood {abs(by)} place(s) {way}",
                _shifted(sample, by, moved),
            )


def _shifted(sample: TrainingSample, by: int, runs: Sequence[tuple[int, int]]) -> TrainingSample:
    """The sample with the tokens of each run moved within it; log-probabilities stay."""
    ids = sample.token_ids.copy()
    for start, stop in runs:
        ids[start:stop] = np.roll(ids[start:stop], by)
    return replace(sample, token_ids=ids)


def sampled_runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs `[start, stop)` of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def items_of(samples: Sequence[TrainingSample]) -> list[MediaItem]:
    """Return the distinct items of samples."""
    found: Mapping[str, MediaItem] = {
        item.identity: item
        for sample in samples
        for items in sample.multi_modal_data.mm_items.values()
        for item in items
    }
    return [*found.values()]
