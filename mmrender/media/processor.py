"""The interface of every media processor, and the settings files that all of them read.

A processor turns a decoded image into a `MediaItem` and knows, from height and width alone, into how many
placeholder tokens. It is immutable and may be used from many threads.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from blake3 import blake3

from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend
from mmrender.media.video import Video
from mmrender.messages import Modality
from mmrender.model.files import ModelDir
from mmrender.sidecar import Expansion, MediaItem, feature_count


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
        """Number of feature tokens of the placeholder."""
        return feature_count(self.expansion)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A medium whose identity is known and whose item is still to be made by `finish`."""

    identity: str
    finish: Callable[[], MediaItem]


BosPlace: TypeAlias = Literal["none", "first", "later"]
"""Where the template's text of a prompt holds BOS."""


class Affixes(msgspec.Struct, frozen=True):
    """All that a processor writes into prompts of one kind beside the template's text and expansions.

    Attributes:
        first: Ids of the tokens before everything else.
        opening: Text at the start of the prompt, or behind some of its images.
        behind: Images that `opening` follows: those that the prompt begins with, or the last.
        ending: Text after the prompt.
        last: Ids of the tokens after everything else.
        refusal: Why the processor takes no such prompt, or None.
    """

    first: tuple[int, ...] = ()
    opening: str = ""
    behind: Literal["nothing", "leading", "last"] = "nothing"
    ending: str = ""
    last: tuple[int, ...] = ()
    refusal: str | None = None

    def start(self, images: Sequence[tuple[int, int]]) -> int:
        """Return the character that `opening` is put before, in a text with images at these characters."""
        if self.behind == "last" and images:
            return images[-1][1]
        stop = 0
        for start, end in images if self.behind == "leading" else ():
            stop = end if start == stop else stop
        return stop

    @property
    def closes(self) -> bool:
        """Whether a longer conversation does not begin with all that is written for a shorter one."""
        return bool(self.ending or self.last or (self.opening and self.behind == "last"))


class MediaProcessor(ABC):
    """One model's image processing, with its settings fixed.

    Attributes:
        name: The reference image processor that this one equals, for display.
        image_backend: Which of the reference's two back ends the tensors equal.
        settings_digest: Digest of everything but the pixels that the tensors depend on, `image_backend`
            among it; videos have one of their own.
        placeholder: The text that the model's template writes for one image or video.
        placeholder_tokens: Tokens of media, or replaced by it; content must never become one
            of them.
        depends_on_image_count: Whether a lone image's tensors differ from those of one among several; all
            numbers above one are alike.
        videos: The model's processing of videos; None where it has none.
    """

    name: str
    image_backend: ImageBackend
    settings_digest: bytes
    placeholder: Mapping[Modality, str]
    placeholder_tokens: frozenset[str]
    depends_on_image_count: bool = False
    videos: "VideoProcessor | None" = None

    @abstractmethod
    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return grid and expansion of an image of this size.

        Args:
            height: Of the image, in pixels.
            width: The same.
            num_images: Number of images in the conversation, this one included; most families ignore it.

        Raises:
            MediaError: The family cannot process an image of this size.
        """

    def affixes(self, bos: BosPlace, *, images: bool) -> Affixes | None:
        """Return the text and tokens that it writes beside a prompt; None for the tokenizer's own tokens.

        Args:
            bos: Where the prompt holds BOS.
            images: Whether the prompt holds images.

        Raises:
            MissingDependencyError: To find out takes a package that is not installed.
            ProcessorError: The processor cannot be loaded.
        """
        del bos, images
        return None

    def load(self) -> "MediaProcessor":
        """Return the processor itself, loaded; only a deferred one returns another object.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: It cannot be made, or replaces other tokens than the template writes.
        """
        return self

    @abstractmethod
    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Identify one image, so that an item made before can be taken in place of a new one.

        Raises:
            MediaError: The family cannot process an image of this size.
        """

    def process(self, loaded: LoadedImage, *, num_images: int = 1) -> MediaItem:
        """Process one image: `prepare` and finish.

        Raises:
            MediaError: The family cannot process the image.
            MissingDependencyError: The image back end needs a package that is not installed.
        """
        return self.prepare(loaded, num_images=num_images).finish()


class VideoProcessor(ABC):
    """One model's video processing, with its settings fixed.

    Attributes:
        name: The reference video processor that this one equals, for display.
        settings_digest: Digest of everything but the frames and their times that the tensors depend on.
        covers: Text before and after a placeholder that an expansion replaces as well.
        takes_several: Whether a prompt may hold several videos.
    """

    name: str
    settings_digest: bytes
    covers: tuple[str, str] = ("", "")
    takes_several: bool = True

    @abstractmethod
    def prepare(self, video: Video) -> Prepared:
        """Sample an open video, and identify it.

        Raises:
            MediaError: A frame cannot be loaded, or the family cannot process such a video.
            MissingDependencyError: It needs a package that is not installed.
        """


@dataclass(frozen=True)
class ProcessorFiles:
    """The settings files of a model directory that concern its processor.

    Attributes:
        model: The model directory.
        image: Settings of the image processor; empty where the directory has none.
        video: Settings of the video processor, which are those of the image processor where it has no file of
            its own; empty where the directory has neither.
        processor: Settings of the processor as a whole, such as the number of tokens per tile.
    """

    model: ModelDir
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    processor: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path | ModelDir) -> "ProcessorFiles":
        """Read the files that exist; a nested `image_processor` comes before a file of its own.

        Raises:
            ModelError: A file is not a JSON object.
        """
        model = directory if isinstance(directory, ModelDir) else ModelDir(directory)
        processor = model.read_json("processor_config.json")
        image, video = processor.get("image_processor"), processor.get("video_processor")
        alone = model.read_json("preprocessor_config.json")
        if not isinstance(video, dict):
            video = model.read_json("video_preprocessor_config.json") or alone
        return cls(model, image if isinstance(image, dict) else alone, video, processor)

    @property
    def directory(self) -> Path:
        """The model directory."""
        return self.model.path

    @property
    def image_processor_type(self) -> str | None:
        """Class of the image processor without its back-end suffix, or `None` where no file names one."""
        name = self.image.get("image_processor_type")
        return name.removesuffix("Fast").removesuffix("Pil") if isinstance(name, str) else None

    @property
    def video_processor_type(self) -> str | None:
        """Class of the video processor, by the name of that of images where it has no name of its own."""
        if isinstance(name := self.video.get("video_processor_type"), str):
            return name
        name = self.video.get("image_processor_type")
        return name.replace("ImageProcessor", "VideoProcessor") if isinstance(name, str) else None

    @property
    def processor_class(self) -> str | None:
        """Class of the whole processor, from whichever file names it."""
        for settings in (self.processor, self.image, self.model.tokenizer_config):
            if isinstance(name := settings.get("processor_class"), str):
                return name
        return None

    @property
    def bos_token(self) -> str:
        """The BOS token, or an empty string."""
        return self.model.special_tokens.get("bos_token") or ""

    def token_ids(self, modality: Modality) -> list[int]:
        """Ids of the tokens that hold features of a modality, where `config.json` names any."""
        ids = (self.model.config.get(f"{modality}_token_{key}") for key in ("id", "index"))
        return [index for index in ids if isinstance(index, int)]


def digest_settings(settings: Mapping[str, Any]) -> bytes:
    """Return a 32-byte digest of settings that JSON can hold, whatever the order of their keys."""
    return blake3(json.dumps(settings, sort_keys=True, allow_nan=True).encode()).digest()
