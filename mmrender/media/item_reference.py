"""Media by reference: for servers that process images themselves, and trainers that process them again.

A reference holds the image as it came, encoded, or only its URL. It says what processing must give (the
identity, the grid, the expansion and how many tokens that makes), so two sides that process differently are
found out instead of trained on.
"""

from dataclasses import dataclass, field
from typing import Any

from mmrender.errors import MediaError
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.base import MediaProcessor
from mmrender.messages import Modality
from mmrender.spans import Expansion, Framework, MediaItem, TensorDtype


@dataclass(frozen=True, slots=True)
class ReferenceItem:
    """One image without tensors.

    Attributes:
        identity: What the item that `source` is processed to must have; 64 hex digits.
        size: Height and width of the image as loaded.
        grid: As that of the item.
        expansion: What replaces the template's placeholder.
        expected_length: Number of tokens of the placeholder range in the prompt.
        source: The encoded image, or its URL.
    """

    identity: str
    size: tuple[int, int]
    grid: tuple[int, ...]
    expansion: Expansion
    expected_length: int
    source: bytes | str = field(compare=False, repr=False)
    modality: Modality = "image"

    @classmethod
    def of(cls, item: MediaItem, source: bytes | str, expected_length: int) -> "ReferenceItem":
        """Return the reference to `item`, which was made of `source`."""
        return cls(
            identity=item.identity,
            size=item.size,
            grid=tuple(item.grid),
            expansion=item.expansion,
            expected_length=expected_length,
            source=source,
            modality=item.modality,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded image or of the URL."""
        return len(self.source)

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Raise: a reference has no tensors until it is processed.

        Raises:
            MediaError: Always.
        """
        raise MediaError(
            "an item by reference has no tensors",
            where=f"item {self.identity[:12]}",
            expected=f"{framework} tensors of {dtype}",
            got="a URL" if isinstance(self.source, str) else f"{len(self.source)} encoded bytes",
            remedy="Process it first: item.resolve(processor)",
        )

    def resolve(
        self, processor: MediaProcessor, policy: MediaPolicy | None = None, *, company: int = 1
    ) -> MediaItem:
        """Load and process the image, and compare what comes out with what was expected.

        Args:
            processor: The model's, with the settings that the sampling side had.
            policy: What may be loaded; see `mmrender.media.policy`.
            company: Number of images in the conversation, this one included.

        Raises:
            MediaError: It cannot be loaded, or it becomes another item than the one expected.
        """
        where = f"item {self.identity[:12]}"
        item = processor.process(load_image(self.source, policy, where=where), company=company)
        for name in ("identity", "grid", "expansion"):
            expected, got = getattr(self, name), getattr(item, name)
            if expected != got:
                raise MediaError(
                    f"processing again gives another {name}",
                    where=where,
                    expected=str(expected),
                    got=str(got),
                    remedy="Sample and train with the same image, processor settings and image back end",
                )
        return item
