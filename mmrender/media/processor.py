"""The interface of every media processor, and the settings files that all of them read.

A processor turns a decoded image into a `MediaItem` and knows, from height and width alone, into how many
placeholder tokens. It is immutable and may be used from many threads.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

from blake3 import blake3

from mmrender.errors import MissingDependencyError, ProcessorError
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend
from mmrender.messages import Modality
from mmrender.spans import Expansion, MediaItem, Repeat


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of an image of a given size after processing, known without its pixels.

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
    def depends_on_image_count(self) -> bool:
        """Whether an image's tensors depend on how many images the conversation has."""
        ...

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return grid and expansion of an image of this size.

        Raises:
            MediaError: The family cannot process an image of this size.
        """
        ...

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Identify one image, so that an item made before can be taken in place of a new one.

        Raises:
            MediaError: The family cannot process an image of this size.
        """
        ...

    def process(self, loaded: LoadedImage, *, num_images: int = 1) -> MediaItem:
        """Process one image: `prepare` and finish.

        Args:
            loaded: The decoded image.
            num_images: Number of images in the conversation, this one included; most families ignore it.

        Raises:
            MediaError: The family cannot process an image of this size.
            MissingDependencyError: The image back end needs a package that is not installed.
        """
        ...


@dataclass(frozen=True)
class ProcessorFiles:
    """The settings files of a model directory that concern its processor.

    Attributes:
        directory: The model directory.
        image: Settings of the image processor; empty where the directory has none.
        processor: Settings of the processor as a whole, such as the number of tokens per tile.
        model: `config.json`.
        tokenizer: `tokenizer_config.json`.
    """

    directory: Path
    image: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> "ProcessorFiles":
        """Read the files that exist; a nested `image_processor` comes before a file of its own.

        Raises:
            ProcessorError: A file is not a JSON object.
        """
        processor = _read(directory / "processor_config.json")
        image = processor.get("image_processor")
        return cls(
            directory=directory,
            image=image if isinstance(image, dict) else _read(directory / "preprocessor_config.json"),
            processor=processor,
            model=_read(directory / "config.json"),
            tokenizer=_read(directory / "tokenizer_config.json"),
        )

    @property
    def image_processor_type(self) -> str | None:
        """Class of the image processor without its back-end suffix, or `None` where no file names one."""
        name = self.image.get("image_processor_type")
        return name.removesuffix("Fast").removesuffix("Pil") if isinstance(name, str) else None

    @property
    def processor_class(self) -> str | None:
        """Class of the whole processor, from whichever file names it."""
        for settings in (self.processor, self.image, self.tokenizer):
            if isinstance(name := settings.get("processor_class"), str):
                return name
        return None

    def named_token(self, name: str, default: str) -> str:
        """Return the token that the tokenizer's settings call `name`, such as `image_token`."""
        extra = self.tokenizer.get("extra_special_tokens")
        named = extra if isinstance(extra, dict) else {}
        token = self.tokenizer.get(name, named.get(name, default))
        return str(token["content"] if isinstance(token, dict) else token)


@dataclass(frozen=True)
class UnavailableProcessor:
    """The processor of a model whose images need a package that is not installed; its text still renders.

    Attributes:
        files: The model's settings.
        image_backend: As asked for.
        error: Raised for every image.
    """

    files: ProcessorFiles
    image_backend: ImageBackend
    error: MissingDependencyError

    settings_digest = b""
    depends_on_image_count = False

    @property
    def name(self) -> str:
        """Class of the image processor."""
        return self.files.image_processor_type or "unknown"

    @property
    def placeholder(self) -> Mapping[Modality, str]:
        """The image token that the tokenizer's settings name, if they do."""
        token = self.files.named_token("image_token", "")
        return {"image": token} if token else {}

    @property
    def placeholder_tokens(self) -> frozenset[str]:
        """The tokens that the settings files name."""
        decoder = self.files.tokenizer.get("added_tokens_decoder") or {}
        ids = (self.files.model.get(key) for key in ("image_token_id", "image_token_index"))
        named = (decoder.get(str(index), {}).get("content", "") for index in ids)
        return frozenset((*self.placeholder.values(), *named)) - {""}

    def _unavailable(self, *_: object, num_images: int = 1) -> NoReturn:
        raise copy.copy(self.error)

    geometry = prepare = process = _unavailable


def digest_settings(settings: Mapping[str, Any]) -> bytes:
    """Return a 32-byte digest of settings that JSON can hold, whatever the order of their keys."""
    return blake3(json.dumps(settings, sort_keys=True, allow_nan=True).encode()).digest()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ProcessorError("the settings file cannot be read", where=str(path), got=str(error)) from error
    if not isinstance(content, dict):
        raise ProcessorError(
            "the settings file is not usable",
            where=str(path),
            expected="a JSON object",
            got=type(content).__name__,
        )
    return content
