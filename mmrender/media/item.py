"""Media items and the sidecar that carries them beside the tokens.

An item is decoded and processed once and then shared: across turns, steps, branches and the rollouts of a
group. It holds its tensors in the smallest exact form and expands them when asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from mmrender.messages import Modality

TensorDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Framework: TypeAlias = Literal["numpy", "torch"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of an expansion that is encoded as template text."""

    text: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A piece of an expansion: one added token, `count` times. `embeds` says it stands for image features."""

    token: str
    count: int
    embeds: bool = True


Expansion: TypeAlias = tuple[Text | Repeat, ...]
"""What one placeholder that the template wrote becomes, piece by piece.

For the Qwen family `(Repeat("<|image_pad|>", 768),)`; for tiled families rows, columns and separators too.
Concatenated as text it is exactly what the model's own processor writes in place of the placeholder.
"""


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where one media item stands in the prompt: the tokens `[offset, offset + length)`.

    The range covers all that replaced the template's placeholder. Where only some of those tokens stand for
    features (rows, columns and separators among them), `embed_spans` lists the `(start, stop)` runs that do,
    relative to `offset`; `None` means all of them.
    """

    offset: int
    length: int
    embed_spans: tuple[tuple[int, int], ...] | None = None

    def shifted(self, by: int) -> "PlaceholderRange":
        """Return the same range, `by` tokens later."""
        return PlaceholderRange(self.offset + by, self.length, self.embed_spans)

    @property
    def num_embeds(self) -> int:
        """Number of tokens in the range that stand for features."""
        if self.embed_spans is None:
            return self.length
        return sum(stop - start for start, stop in self.embed_spans)

    @property
    def is_embed(self) -> npt.NDArray[np.bool_]:
        """Boolean mask of shape `(length,)`: which tokens of the range stand for features."""
        mask = np.full(self.length, self.embed_spans is None)
        for start, stop in self.embed_spans or ():
            mask[start:stop] = True
        return mask


@runtime_checkable
class MediaItem(Protocol):
    """One processed image or video.

    `identity` is the hex blake3 digest of the decoded pixels and of the processor's settings; equal
    identities mean equal tensors and an equal expansion.
    """

    @property
    def modality(self) -> Modality:
        """`"image"` or `"video"`."""
        ...

    @property
    def identity(self) -> str:
        """Hex digest of content and processor settings."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the image as loaded, orientation applied."""
        ...

    @property
    def expansion(self) -> Expansion:
        """What replaces the template's placeholder."""
        ...

    @property
    def grid(self) -> tuple[int, ...]:
        """Family-specific layout for display: `(t, h, w)` in patches, or `(tiles,)`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes the item keeps alive."""
        ...

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to the model's keyword arguments, such as `pixel_values` and `image_grid_thw`.

        Floating tensors come in `dtype`, integer ones as the model's processor gives them. numpy has no
        bfloat16: with `framework="numpy"` such values come as `uint16` bit patterns.
        """
        ...


@dataclass(frozen=True, slots=True)
class MultiModalData:
    """The sidecar of a rendered prompt: hashes, placeholder ranges and items by modality, in prompt order.

    The three mappings have equal keys and lists of equal length. Instances are treated as immutable: `merged`
    and `shifted` return new ones that share the items.
    """

    mm_hashes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    mm_placeholders: Mapping[str, Sequence[PlaceholderRange]] = field(default_factory=dict)
    mm_items: Mapping[str, Sequence[MediaItem]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.mm_hashes.values())

    @classmethod
    def of(cls, entries: Iterable[tuple[PlaceholderRange, MediaItem]]) -> "MultiModalData":
        """Build the sidecar from `(range, item)` pairs in prompt order."""
        hashes: dict[str, list[str]] = {}
        ranges: dict[str, list[PlaceholderRange]] = {}
        items: dict[str, list[MediaItem]] = {}
        for placeholder, item in entries:
            hashes.setdefault(item.modality, []).append(item.identity)
            ranges.setdefault(item.modality, []).append(placeholder)
            items.setdefault(item.modality, []).append(item)
        return cls(hashes, ranges, items)

    def shifted(self, by: int) -> "MultiModalData":
        """Return the sidecar of the same items standing `by` tokens later."""
        moved = {
            modality: [placeholder.shifted(by) for placeholder in ranges]
            for modality, ranges in self.mm_placeholders.items()
        }
        return MultiModalData(self.mm_hashes, moved, self.mm_items)

    def merged(self, later: "MultiModalData") -> "MultiModalData":
        """Return the sidecar of these items and then those of `later`, whose offsets are kept."""
        return MultiModalData(
            _joined(self.mm_hashes, later.mm_hashes),
            _joined(self.mm_placeholders, later.mm_placeholders),
            _joined(self.mm_items, later.mm_items),
        )

    def first_outside(self, length: int) -> tuple[str, PlaceholderRange] | None:
        """Return path and range of the first placeholder outside a prompt of `length` tokens, or None."""
        for modality, ranges in self.mm_placeholders.items():
            for index, found in enumerate(ranges):
                if not 0 <= found.offset <= found.offset + found.length <= length:
                    return f"mm_placeholders[{modality!r}][{index}]", found
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct items."""
        return sum(
            {item.identity: item.nbytes for items in self.mm_items.values() for item in items}.values()
        )


def _joined(first: Mapping[str, Sequence[Any]], second: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {key: [*first.get(key, ()), *second.get(key, ())] for key in {**first, **second}}
