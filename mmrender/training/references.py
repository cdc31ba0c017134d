"""Items by reference are loaded and processed again, and must become what the server made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from mmrender.errors import BatchError
from mmrender.media.item import ReferenceItem
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.base import MediaProcessor
from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange, Repeat
from mmrender.training.mm_kwargs import name_of
from mmrender.trajectory.sample import TrainingSample

Loader: TypeAlias = Callable[[ReferenceItem, int], MediaItem]
"""Turns a reference into an item with tensors; the number is that of the items in its sample."""


@dataclass(frozen=True, slots=True)
class ProcessorLoader:
    """Loads references and processes them with the model's processor.

    Attributes:
        processor: With the settings of the sampling side.
        policy: What may be loaded; see `mmrender.media.policy`.
    """

    processor: MediaProcessor
    policy: MediaPolicy | None = None

    def __call__(self, item: ReferenceItem, company: int) -> MediaItem:
        """Return the item. Raises `MediaError` if it becomes another one than expected."""
        return item.resolve(self.processor, self.policy, company=company)


def resolve_references(samples: Sequence[TrainingSample], loader: Loader) -> list[TrainingSample]:
    """Return the samples with each reference replaced by its item; each distinct one is loaded once.

    Args:
        samples: Those without references are returned as they are.
        loader: Such as `ProcessorLoader`.

    Raises:
        BatchError: An item is not as long as the placeholder that the server made for it.
        MediaError: As the loader raises it.
    """
    known: dict[tuple[str, int], MediaItem] = {}
    return [_resolved(sample, name_of(sample, index), loader, known) for index, sample in enumerate(samples)]


def _resolved(
    sample: TrainingSample, name: str, loader: Loader, known: dict[tuple[str, int], MediaItem]
) -> TrainingSample:
    sidecar = sample.multi_modal_data
    held = [item for items in sidecar.mm_items.values() for item in items]
    if not any(isinstance(item, ReferenceItem) for item in held):
        return sample
    found: dict[str, list[MediaItem]] = {}
    for modality, items in sidecar.mm_items.items():
        ranges = sidecar.mm_placeholders[modality]
        for index, (item, placeholder) in enumerate(zip(items, ranges, strict=True)):
            made = item
            if isinstance(item, ReferenceItem):
                key = (item.identity, len(held))
                made = known[key] if key in known else known.setdefault(key, loader(item, len(held)))
                _check_length(item, made, placeholder, f"{name}.{modality}[{index}]")
            found.setdefault(modality, []).append(made)
    return replace(sample, multi_modal_data=MultiModalData(sidecar.mm_hashes, sidecar.mm_placeholders, found))


def _check_length(
    reference: ReferenceItem, item: MediaItem, placeholder: PlaceholderRange, where: str
) -> None:
    repeats = [piece for piece in item.expansion if isinstance(piece, Repeat)]
    wholly = len(repeats) == len(item.expansion)  # text between has a length that only a tokenizer knows
    features = sum(piece.count for piece in repeats if piece.embeds)
    length = sum(piece.count for piece in repeats) if wholly else reference.expected_length
    if (features, length) != (placeholder.num_embeds, placeholder.length):
        raise BatchError(
            "an image processed again is not as long as the server's placeholder",
            where=where,
            expected=f"{placeholder.length} tokens, {placeholder.num_embeds} of them for features",
            got=f"{length} and {features}",
            remedy="Server and trainer process images differently; compare their settings",
        )
