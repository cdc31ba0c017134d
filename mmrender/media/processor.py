"""The interface of media processors, and their settings files.

A processor turns a decoded image into a `MediaItem`, and knows the number of its placeholder tokens from
height and width alone. It is immutable and may be used from many threads.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from blake3 import blake3

from mmrender.caching import cached_property
from mmrender.errors import ProcessorError
from mmrender.media.audio import LoadedAudio, load_audio
from mmrender.media.load import Coding, LoadedImage, load_image
from mmrender.media.pixels import ImageBackend
from mmrender.media.policy import MediaPolicy
from mmrender.media.video import Video, open_video
from mmrender.messages import Modality
from mmrender.model.files import ModelDir
from mmrender.sidecar import Expansion, MediaItem, feature_count


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a processed image, known without its pixels.

    Attributes:
        grid: `(t, h, w)` in patches, or `(tiles,)`. Families differ.
        expansion: The replacement of the template's placeholder.
        resized: Height and width after resampling, if it is one image.
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
    """A medium with a known identity; `finish` makes its item.

    `encoded` is as for `LoadedImage`.
    """

    identity: str
    finish: Callable[[], MediaItem]
    encoded: tuple[bytes, Coding] | None = None


BosPlace: TypeAlias = Literal["none", "first", "later"]
"""Position of BOS in the template's text of a prompt."""


class Affixes(msgspec.Struct, frozen=True, dict=True):
    """Text and tokens that a processor adds to prompts of one kind, besides expansions.

    Attributes:
        first: Ids of the tokens before everything else.
        opening: Text at the start of the prompt, or behind some of its images.
        behind: The images that `opening` follows: the leading images of the prompt, or the last image.
        ending: Text after the prompt.
        last: Ids of the tokens after everything else.
        refusal: Why the processor refuses prompts of this kind, or None.
    """

    first: tuple[int, ...] = ()
    opening: str = ""
    behind: Literal["nothing", "leading", "last"] = "nothing"
    ending: str = ""
    last: tuple[int, ...] = ()
    refusal: str | None = None

    def start(self, images: Sequence[tuple[int, int]]) -> int:
        """Return the position of `opening` in a text with images at these characters."""
        if self.behind == "last" and images:
            return images[-1][1]
        stop = 0
        for start, end in images if self.behind == "leading" else ():
            stop = end if start == stop else stop
        return stop

    @cached_property
    def closes(self) -> bool:
        """Whether the prompt of a conversation is not a prefix of the prompt of a longer one."""
        return bool(self.ending or self.last or (self.opening and self.behind == "last"))


class MediaProcessor(ABC):
    """One model's image processing, with its settings fixed.

    Attributes:
        name: The equal image processor of the reference, for display.
        image_backend: The equal back end of the reference.
        settings_digest: Digest of everything but the pixels that the tensors depend on, including
            `image_backend`. Videos have their own digest.
        placeholder: The text that the model's template writes for one medium, by modality.
        placeholder_tokens: Tokens of media, and tokens that media replace. Content never becomes one of them.
        depends_on_image_count: Whether the tensors of a lone image differ from the tensors of an image among
            several. All numbers above one are equal.
        videos: The model's processing of videos, or None.
        audio: The model's processing of audio, or None.
        use_audio_in_video: Whether sound tracks of videos are rendered between their frames.
        is_deferred: Whether `load` returns another object.
    """

    name: str
    image_backend: ImageBackend
    settings_digest: bytes
    placeholder: Mapping[Modality, str]
    placeholder_tokens: frozenset[str]
    depends_on_image_count: bool = False
    videos: "VideoProcessor | None" = None
    audio: "AudioProcessor | None" = None
    use_audio_in_video: bool = False
    is_deferred: bool = False

    def of(
        self, modality: Modality, where: str | None = None
    ) -> "MediaProcessor | VideoProcessor | AudioProcessor":
        """Return the processing of media of a modality: for images, the object itself.

        Args:
            modality: The modality.
            where: Path of the part, for the error.

        Raises:
            ProcessorError: The model does not take them. Images are refused by `prepare`.
        """
        if modality == "image":
            return self
        if modality == "video" and self.videos is not None:
            return self.videos
        if modality == "audio" and self.audio is not None:
            return self.audio
        if modality == "audio":
            expected, remedy = (
                "a feature extractor, and a placeholder of the template",
                "Pass a transcript as text.",
            )
        elif "image" in self.placeholder:
            expected, remedy = "images", "Pass the frames as images."
        else:
            expected, remedy = "text and audio", "Remove the video"
        raise ProcessorError(
            f"{'audio is' if modality == 'audio' else 'videos are'} not supported for {self.name}",
            where=where,
            expected=expected,
            remedy=remedy,
        )

    def load_part(
        self, part: Any, policy: MediaPolicy, where: str, *, num_images: int = 1, longest: int | None = None
    ) -> Prepared:
        """Load the source of a media part, and identify it.

        Args:
            part: A `MediaPart` with a source.
            policy: Limits of loading.
            where: Path of the part, for errors.
            num_images: As for `prepare`.
            longest: As for `AudioProcessor.prepare`.

        Raises:
            MediaError: It cannot be loaded, or the family cannot process it.
            ProcessorError: The model does not take media of this modality.
        """
        processor = self.of(part.modality, where)
        if isinstance(processor, VideoProcessor):
            with open_video(part, policy, where) as video:
                return processor.prepare(video)
        if isinstance(processor, AudioProcessor):
            rate, source_rate = processor.sampling_rate, part.sampling_rate
            clip = load_audio(part.source, rate, policy, source_rate=source_rate, where=where)
            return processor.prepare(clip, longest=longest)
        loaded = load_image(part.source, policy, where=where)
        prepared = processor.prepare(loaded, num_images=num_images)
        return prepared if loaded.encoded is None else replace(prepared, encoded=loaded.encoded)

    @abstractmethod
    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Return grid and expansion of an image of this size.

        Args:
            height: Of the image, in pixels.
            width: Of the image, in pixels.
            num_images: Number of images in the conversation, this one included. Many families ignore it.

        Raises:
            MediaError: The family cannot process an image of this size.
        """

    def affixes(self, bos: BosPlace, *, images: bool) -> Affixes | None:
        """Return the text and tokens that it adds to a prompt; None for the tokenizer's own tokens.

        Args:
            bos: Position of BOS in the prompt.
            images: Whether the prompt has images.

        Raises:
            MissingDependencyError: It depends on a package that is not installed.
            ProcessorError: The processor cannot be loaded.
        """
        del bos, images
        return None

    def load(self) -> "MediaProcessor":
        """Return the processor itself, loaded. Only a deferred one returns another object.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: It cannot be made, or replaces other tokens than the template writes.
        """
        return self

    @abstractmethod
    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Identify one image, so that an existing item can be used instead of a new one.

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
        name: The equal video processor of the reference, for display.
        settings_digest: Digest of everything but the frames and their times that the tensors depend on.
        covers: Text before and after a placeholder that an expansion replaces as well.
        takes_several: Whether a prompt may have several videos.
    """

    name: str
    settings_digest: bytes
    covers: tuple[str, str] = ("", "")
    takes_several: bool = True

    @abstractmethod
    def prepare(self, video: Video) -> Prepared:
        """Sample an open video, and identify it.

        Raises:
            MediaError: A frame cannot be loaded, or the family cannot process the video.
            MissingDependencyError: It needs a package that is not installed.
        """


TokenRun: TypeAlias = tuple[str, int]
"""An added token, and how often it is repeated."""
EffectOfOthers: TypeAlias = Literal["none", "longer", "any", "refused"]
"""Whether other clips of a prompt change the tensors of a clip, and which do. Some prompts take one clip."""


class AudioProcessor(ABC):
    """One model's audio processing, with its settings fixed.

    Attributes:
        name: The equal feature extractor of the reference, for display.
        sampling_rate: Samples per second that it takes.
        settings_digest: Digest of everything but the samples that the tensors depend on.
        effect_of_others: Effect of other clips of a prompt, which the reference pads to the longest.
    """

    name: str
    sampling_rate: int
    settings_digest: bytes
    effect_of_others: EffectOfOthers = "none"

    @abstractmethod
    def prepare(self, loaded: LoadedAudio, *, longest: int | None = None) -> Prepared:
        """Identify a clip, so that an existing item can be used instead of a new one.

        Args:
            loaded: The clip.
            longest: Number of samples of the longest clip of a prompt with several clips.

        Raises:
            MediaError: The family cannot process the clip.
            MissingDependencyError: It needs a package that is not installed.
        """

    def alternate(self, frames: int, frame_tokens: int, seconds: float, tokens: int) -> Sequence[TokenRun]:
        """Return the tokens of a video with its sound track, in the order of their times.

        Args:
            frames: Time steps of the video.
            frame_tokens: Tokens of each.
            seconds: Duration of each.
            tokens: Tokens of the track.

        Raises:
            ProcessorError: The family has no rule for it.
        """
        raise ProcessorError(
            f"{self.name} does not join sound tracks with videos",
            expected="the processor of an omni model",
            remedy="Open the model without use_audio_in_video.",
        )


@dataclass(frozen=True)
class ProcessorFiles:
    """The settings files of a model's processor.

    Attributes:
        model: The model directory.
        image: Settings of the image processor, or empty.
        video: Settings of the video processor. Without a file of its own, settings of the image processor.
        processor: Settings of the whole processor, such as the number of tokens per tile.
        audio: Settings of the audio feature extractor, or empty.
    """

    model: ModelDir
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    processor: Mapping[str, Any]
    audio: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path | ModelDir) -> "ProcessorFiles":
        """Read the files that exist. A nested `image_processor` comes before a file of its own.

        Raises:
            ModelError: A file is not a JSON object.
        """
        model = directory if isinstance(directory, ModelDir) else ModelDir(directory)
        processor = model.read_json("processor_config.json")
        image, video = processor.get("image_processor"), processor.get("video_processor")
        image_file = model.read_json("preprocessor_config.json")
        parts = (processor.get(name) for name in ("feature_extractor", "audio_processor"))
        audio = next((part for part in parts if isinstance(part, dict)), {})
        if not audio and "feature_extractor_type" in image_file:
            audio = image_file
            # Omni models describe images and audio in one file.
            image_file = image_file if "image_processor_type" in image_file else {}
        if not isinstance(video, dict):
            video = model.read_json("video_preprocessor_config.json") or image_file
        return cls(model, image if isinstance(image, dict) else image_file, video, processor, audio)

    @property
    def directory(self) -> Path:
        """The model directory."""
        return self.model.path

    @property
    def image_processor_type(self) -> str | None:
        """Class of the image processor without its back-end suffix, or None."""
        name = self.image.get("image_processor_type")
        return name.removesuffix("Fast").removesuffix("Pil") if isinstance(name, str) else None

    @property
    def video_processor_type(self) -> str | None:
        """Class of the video processor, if need be by the name of the image processor."""
        if isinstance(name := self.video.get("video_processor_type"), str):
            return name
        name = self.video.get("image_processor_type")
        return name.replace("ImageProcessor", "VideoProcessor") if isinstance(name, str) else None

    @property
    def processor_class(self) -> str | None:
        """Class of the whole processor, from the first file that names it."""
        for settings in (self.processor, self.image, self.model.tokenizer_config):
            if isinstance(name := settings.get("processor_class"), str):
                return name
        return None

    def has_own_code(self, *classes: str) -> bool:
        """Whether the directory has Python code for one of these classes of Transformers."""
        settings = (self.processor, self.image, self.model.tokenizer_config, self.model.config)
        maps = [entry for each in settings if isinstance(entry := each.get("auto_map"), Mapping)]
        return any(name in entry for entry in maps for name in classes)

    def digest_code(self) -> str:
        """Hash of the directory's Python code, whatever the directory's name."""
        digest = blake3()
        for file in sorted(self.directory.glob("*.py")):
            content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest(length=16)

    @property
    def bos_token(self) -> str:
        """The BOS token, or an empty string."""
        return self.model.special_tokens.get("bos_token") or ""

    def token_ids(self, modality: Modality) -> list[int]:
        """Ids of the feature tokens of a modality in `config.json`, also of an omni model's thinker."""
        inner = self.model.config.get("thinker_config")
        configs = (self.model.config, inner if isinstance(inner, dict) else {})
        ids = (config.get(f"{modality}_token_{key}") for config in configs for key in ("id", "index"))
        return [index for index in ids if isinstance(index, int)]


def digest_settings(settings: Mapping[str, Any]) -> bytes:
    """Return a 32-byte digest of JSON settings, independent of the order of their keys."""
    return blake3(json.dumps(settings, sort_keys=True, allow_nan=True).encode()).digest()
