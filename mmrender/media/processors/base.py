"""What every media processor offers, and the little that all of them share.

A processor turns a decoded image into a `MediaItem` and knows, from height and width alone, into how many
placeholder tokens. It is immutable and may be used from many threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

from mmrender.media.load import LoadedImage, LoadedVideo
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, Repeat

ImageBackend: TypeAlias = Literal["torch", "pil"]
IMAGE_BACKENDS: tuple[ImageBackend, ...] = get_args(ImageBackend)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a medium of a given size becomes, without looking at its pixels.

    Attributes:
        grid: `(t, h, w)` in patches, or `(tiles,)`; families differ.
        expansion: What replaces the template's placeholder.
        resized: Height and width the pixels are resampled to, where there is one such size.
    """

    grid: tuple[int, ...]
    expansion: Expansion
    resized: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens that stand for features."""
        return sum(piece.count for piece in self.expansion if isinstance(piece, Repeat) and piece.embeds)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A medium whose identity is known and whose item is still to be made by `finish`."""

    identity: str
    finish: Callable[[], MediaItem]


@runtime_checkable
class MediaProcessor(Protocol):
    """One model's image processing, with its settings fixed."""

    @property
    def name(self) -> str:
        """The reference image processor that this one equals, for display."""
        ...

    @property
    def settings_digest(self) -> bytes:
        """Digest of everything but the pixels that the tensors depend on, `image_backend` among it."""
        ...

    @property
    def image_backend(self) -> ImageBackend:
        """Which of the reference's two back ends the tensors equal."""
        ...

    @property
    def placeholder(self) -> Mapping[Modality, str]:
        """The text that the model's template writes for one image or video."""
        ...

    @property
    def placeholder_tokens(self) -> frozenset[str]:
        """Tokens that stand for media or are replaced by it; content must never become one of them."""
        ...

    @property
    def depends_on_company(self) -> bool:
        """Whether an image becomes something else when the conversation holds others."""
        ...

    def geometry(self, height: int, width: int, *, company: int = 1) -> Geometry:
        """Return what an image of this size becomes.

        Raises:
            MediaError: The family cannot process an image of this size.
        """
        ...

    def prepare(self, loaded: LoadedImage | LoadedVideo, *, company: int = 1) -> "Prepared":
        """Identify one image or video, so that an item made before can be taken in place of a new one.

        Raises:
            MediaError: The family cannot process a medium of this size.
            ProcessorError: The family takes no such medium.
        """
        ...

    def process(self, loaded: LoadedImage | LoadedVideo, *, company: int = 1) -> MediaItem:
        """Process one image or video: `prepare` and finish.

        Args:
            loaded: The decoded medium.
            company: Number of images in the conversation, this one included; most families ignore it.

        Raises:
            MediaError: The family cannot process a medium of this size.
            ProcessorError: The family takes no such medium.
        """
        ...
