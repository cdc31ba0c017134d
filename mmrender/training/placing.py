"""Which images a sample holds and where they stand in its tokens; which samples can share a batch by them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmrender.errors import BatchError
from mmrender.media.item import ReferenceItem, tensor_specs
from mmrender.spans import MediaItem, PlaceholderRange, Repeat
from mmrender.training.families import ModelFamily
from mmrender.trajectory.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class Placed:
    """One item where it stands in a sample; `where` is its path for errors."""

    item: MediaItem
    range: PlaceholderRange
    where: str


def placed_items(sample: TrainingSample, name: str) -> list[Placed]:
    """Return a sample's items in the order of its tokens.

    Args:
        sample: Whose sidecar is checked.
        name: Names the sample in errors.

    Raises:
        BatchError: Items and placeholders differ in number, a placeholder lies outside the tokens, two of
            them overlap, or one has another number of feature tokens than its item makes.
    """
    found = []
    sidecar = sample.multi_modal_data
    for modality in sidecar.mm_placeholders.keys() | sidecar.mm_items.keys():
        ranges, items = sidecar.mm_placeholders.get(modality, ()), sidecar.mm_items.get(modality, ())
        if len(ranges) != len(items):
            raise BatchError(
                f"placeholders and {modality} items differ in number",
                where=f"{name}.multi_modal_data",
                expected=f"{len(ranges)} items",
                got=str(len(items)),
            )
        for index, (placeholder, item) in enumerate(zip(ranges, items, strict=True)):
            found.append(Placed(item, placeholder, f"{name}.{modality}[{index}]"))
    found.sort(key=lambda placed: placed.range.offset)
    end = 0
    for placed in found:
        start = placed.range.offset
        if not end <= start <= start + placed.range.length <= len(sample):
            raise BatchError(
                "a placeholder overlaps another or leaves the tokens",
                where=placed.where,
                expected=f"tokens within [{end}, {len(sample)})",
                got=f"[{start}, {start + placed.range.length})",
                remedy="Trim the sidecar together with the tokens",
            )
        end = start + placed.range.length
        _check_length(placed)
    return found


def _check_length(placed: Placed) -> None:
    repeats = [piece for piece in placed.item.expansion if isinstance(piece, Repeat)]
    embeds = sum(piece.count for piece in repeats if piece.embeds)
    if embeds != placed.range.num_embeds:
        raise BatchError(
            "a placeholder is not as long as its item makes it",
            where=placed.where,
            expected=f"{embeds} feature tokens",
            got=str(placed.range.num_embeds),
            remedy="Sampler and trainer process images differently; compare their settings",
        )


def image_key(items: Iterable[MediaItem], family: ModelFamily) -> frozenset[Any] | None:
    """Return what samples must agree in to share a batch: keywords, kinds and trailing dimensions.

    Dimensions that the family pads are left out. None where there is no item.
    """
    found: set[Any] = set()
    for item in items:
        if isinstance(item, ReferenceItem):
            continue
        for name, spec in tensor_specs(item).items():
            rule = family.rule(name)
            shape = spec.shape[2:] if rule.layout == "rows" else spec.shape[1:]
            if rule.layout != "counts":
                found.add((name, str(spec.dtype), len(shape) if rule.padded else shape))
    return frozenset(found) or None
