"""Choose the processor of a model directory: a native family, a plugin, or the model's own in Transformers.

To add a native family, write a module next to `patches.py` with a subclass of `MediaProcessor` that has
`from_files`, and name it in `NATIVE`. `tests/parity/test_processor_parity.py` compares it with the
reference.
"""

import copy
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmcodecs.forks import watch_forks
from mmrender.caching import cached_property, digest_of_code, release_of
from mmrender.errors import MissingDependencyError, MMRenderError, ProcessorError, check_option, located
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import IMAGE_BACKENDS, ImageBackend
from mmrender.media.processor import (
    Affixes,
    BosPlace,
    Geometry,
    MediaProcessor,
    Prepared,
    ProcessorFiles,
    VideoProcessor,
    digest_settings,
)
from mmrender.media.processors.adapted_audio import AdaptedAudioProcessor, AudioOnlyProcessor
from mmrender.media.processors.patch_videos import PatchVideoProcessor
from mmrender.media.processors.patches import PatchProcessor
from mmrender.media.processors.reference import build_reference_processor
from mmrender.media.processors.watched import WatchedProcessor
from mmrender.messages import MODALITIES, Modality
from mmrender.model.files import ModelDir
from mmrender.plugins import load_plugins
from mmrender.template.known import KnownTemplate
from mmrender.template.probes import user
from mmrender.template.text import plain

NATIVE = (PatchProcessor,)
"""Classes whose `from_files(files, backend)` returns a processor, or None for settings of another family."""

TEXT_WRITERS = frozenset({"ChameleonProcessor", "Emu3Processor", "Molmo2Processor", "PaliGemmaProcessor"})
"""Processors that add text to prompts without images, too: without Transformers, these are refused."""

GROUP = "mmrender.processors"
"""Entry points of other packages' classes. They follow the rules of `NATIVE`, and set `videos` themselves."""


def load_processor(
    directory: Path | ModelDir,
    *,
    image_backend: ImageBackend = "torch",
    trust_remote_code: bool = False,
    template: KnownTemplate | None = None,
) -> MediaProcessor | None:
    """Load the processor of a model directory in Hub layout.

    The back end is the caller's choice, never a consequence of the installed packages: the two differ in
    about 0.2 % of the pixel values, and the choice is part of every item's identity.

    Args:
        directory: Holds `preprocessor_config.json` or `processor_config.json`.
        image_backend: `"torch"` equals the reference's torchvision back end, which inference servers run.
            `"pil"` equals its PIL back end and needs neither torch nor, for native families, Transformers.
        trust_remote_code: Run processor code of the directory, also in place of a native family.
        template: The model's chat template. With it, the processor of a family that is not native is loaded
            with the first image, and raises the errors below then.

    Returns:
        The processor, or None for a directory without settings of images or audio: a text-only model.

    Raises:
        ProcessorError: The settings cannot be read, or no processor here equals the described one.
        MissingDependencyError: The family needs a package that is not installed. (A native processor asks
            for torch with the first image that must be resampled.)
        PluginError: A processor of another package cannot be used. Plugins are tried after native families.
    """
    check_option("image_backend", image_backend, IMAGE_BACKENDS, error=ProcessorError)
    files = ProcessorFiles.read(directory)
    if not files.image and not files.audio:
        return None
    is_own = trust_remote_code and files.has_own_code("AutoProcessor", "AutoImageProcessor")
    with located(str(files.directory)):
        if not files.image:
            alone = AudioOnlyProcessor(str(files.audio.get("feature_extractor_type")), image_backend)
            return _with_audio(alone, files, template, trust_remote_code)
        native = None if is_own else _native(files, image_backend)
        if native is not None:
            if token := native.placeholder.get("video"):
                image_token = native.placeholder["image"]
                videos = PatchVideoProcessor.from_files(files, image_token=image_token, video_token=token)
                native.videos = videos or _adapted_videos(files, template, trust_remote_code)
            return _with_audio(native, files, template, trust_remote_code)
        deferred = DeferredProcessor(files, image_backend, template, trust_remote_code=trust_remote_code)
        if template is None:
            return deferred.load()
        if not deferred.can_wait:
            with suppress(MissingDependencyError):
                return deferred.load()
        return deferred


def backend_of_tokens(directory: Path | ModelDir) -> ImageBackend:
    """Return the back end that needs the fewest packages and gives the same tokens as `"torch"`.

    A native family counts placeholders alike for both: `"pil"` then needs no torch. The pixels differ.
    """
    return "pil" if _native(ProcessorFiles.read(directory), "pil") is not None else "torch"


def with_sound_tracks(processor: MediaProcessor | None, where: str) -> MediaProcessor:
    """Return a processor that renders sound tracks of videos between their frames.

    Raises:
        MissingDependencyError: A package that it needs is not installed.
        ProcessorError: The model's processor has no rule for it.
    """
    with located(where):
        loaded = None if processor is None else processor.load()
        if loaded is None or loaded.audio is None or loaded.videos is None:
            raise ProcessorError(
                "use_audio_in_video needs a model that takes videos and audio",
                got="a text-only model" if loaded is None else loaded.name,
                remedy="Open the model without use_audio_in_video.",
            )
        loaded.audio.alternate(1, 1, 1.0, 1)
    loaded.use_audio_in_video = True
    return loaded


def _native(files: ProcessorFiles, image_backend: ImageBackend) -> MediaProcessor | None:
    made = (family.from_files(files, image_backend) for family in NATIVE)
    return next((native for native in made if native is not None), None)


class DeferredProcessor(MediaProcessor):
    """A plugin's or the model's own processor, loaded when more than the names of its tokens is needed.

    Transformers and torch take seconds to import, and some families need packages that text does not. Text
    needs to know the tokens of media: the model's settings name the token that holds image features, and its
    template writes the placeholder. The processor, once loaded, must agree with both. Text also needs the
    affixes of every prompt, which are learnt once and kept on disk.

    `settings_digest` and `depends_on_image_count` are known once it is loaded: ask `load()` for them.

    Args:
        files: The model's settings.
        backend: Of images.
        template: The model's chat template, if it is known.
        trust_remote_code: Run processor code of the directory.

    Attributes:
        can_wait: Whether the settings and the template name the tokens of images.
    """

    settings_digest = b""
    is_deferred = True

    def __init__(
        self,
        files: ProcessorFiles,
        backend: ImageBackend,
        template: KnownTemplate | None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.name = files.image_processor_type or "unknown"
        self.image_backend = backend
        self.placeholder = {}
        self._files = files
        self._template = template
        self._trust_remote_code = trust_remote_code
        # Text and images are learnt from the same processor.
        build = partial(build_reference_processor, files, backend, trust_remote_code=trust_remote_code)
        self._watched = WatchedProcessor(build, files)
        self._read_tokens()
        self.can_wait = "image" in self.placeholder and bool(files.token_ids("image"))
        self._loaded: MediaProcessor | MMRenderError | None = None
        self.renew_after_fork()
        watch_forks(self)

    def _read_tokens(self) -> None:
        """Find the tokens of media in the settings and the template."""
        tokens: set[str] = set()
        for modality in MODALITIES:
            if self._template is None:
                break
            placeholder, names = _media_tokens(self._files, self._template, modality)
            if placeholder is not None:
                self.placeholder = {**self.placeholder, modality: placeholder}
            tokens |= names
        self.placeholder_tokens = frozenset(tokens)

    def renew_after_fork(self) -> None:
        """Replace the lock: a load in another thread does not end in the child."""
        self._lock = threading.Lock()

    def load(self) -> MediaProcessor:
        """Return the processor, which the first call makes. See `MediaProcessor`."""
        with self._lock:
            if self._loaded is None:
                try:
                    self._loaded = self._build()
                    self._require_known_tokens(self._loaded)
                except MMRenderError as error:
                    self._loaded = error
        if isinstance(self._loaded, MMRenderError):
            raise copy.copy(self._loaded) from self._loaded.__cause__
        return self._loaded

    @cached_property
    def _plugin(self) -> MediaProcessor | None:
        return processor_of_plugins(self._files, self.image_backend)

    def _build(self) -> MediaProcessor:
        if self._plugin is not None:
            return self._plugin
        # Imported here: native families do without it, and it is the larger half of the package.
        from mmrender.media.processors.adapter import TransformersProcessor

        files, text = self._files, _template_text(self._template, "image")
        processor = TransformersProcessor(self.image_backend, self._watched, text)
        if "video" in processor.placeholder:
            processor.videos = _adapted_videos(files, self._template, self._trust_remote_code)
        return _with_audio(processor, files, self._template, self._trust_remote_code)

    def affixes(self, bos: BosPlace, *, images: bool) -> Affixes | None:
        """Return the affixes of a prompt. For text the processor is loaded only if they are not known yet.

        None if the processor cannot be loaded, or belongs to another package.
        """
        return self.load().affixes(bos, images=True) if images else self._text_affixes.get(bos)

    @cached_property
    def _text_affixes(self) -> Mapping[BosPlace, Affixes]:
        if self._template is None:
            return {}
        files = self._files
        settings = (files.processor_class, files.image, files.processor, files.model.tokenizer_config)
        release = release_of("transformers")
        if self._trust_remote_code and files.has_own_code("AutoProcessor", "AutoTokenizer"):
            release += files.digest_code()
        about = digest_settings({"settings": settings, "transformers": release}).hex()
        key = ("affixes", about, digest_of_code(("media/processors/*.py",)))
        try:
            return self._template.findings.get_or_find(key, dict[BosPlace, Affixes], self._learn_text_affixes)
        except MMRenderError as error:
            if isinstance(error, MissingDependencyError) and files.processor_class in TEXT_WRITERS:
                raise
            return {}

    def _learn_text_affixes(self) -> dict[BosPlace, Affixes]:
        if self._plugin is not None or self._template is None:
            return {}
        prompts = [self._template.probes.render([user()], prompt=prompt) for prompt in (False, True)]
        return self._watched.learn_affixes([plain(text) for text in prompts if text is not None])

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Load the processor and ask it. See `MediaProcessor`."""
        return self.load().geometry(height, width, num_images=num_images)

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Load the processor and ask it. See `MediaProcessor`."""
        return self.load().prepare(loaded, num_images=num_images)

    def _require_known_tokens(self, processor: MediaProcessor) -> None:
        """Require the tokens by which text has been rendered so far."""
        if not self.can_wait:
            return
        token, placeholder = processor.placeholder["image"], self.placeholder["image"]
        if token != placeholder:
            raise ProcessorError(
                f"{processor.name} replaces another token than the chat template writes for an image",
                expected=repr(placeholder),
                got=repr(token),
            )
        unknown = (
            processor.placeholder_tokens - self.placeholder_tokens - {processor.placeholder.get("video")}
        )
        if unknown:
            raise ProcessorError(
                f"{processor.name} writes another token for an image than config.json names",
                expected=" or ".join(map(repr, sorted(self.placeholder_tokens))),
                got=repr(sorted(unknown)),
            )


def _template_text(template: KnownTemplate | None, modality: Modality) -> str:
    """Return the text that the template writes for one item in a user's message."""
    return (template and template.probes.added_by(modality, "user")) or ""


def _media_tokens(
    files: ProcessorFiles, template: KnownTemplate, modality: Modality
) -> tuple[str | None, frozenset[str]]:
    """Return the placeholder that the template writes for a modality, if it is plain, and its tokens."""
    # A template may render any part as it renders an image.
    others = MODALITIES[: MODALITIES.index(modality)]
    seen = {match.token for one in others for match in template.tokenizer.find(_template_text(template, one))}
    features = {template.tokenizer.token(index) for index in files.token_ids(modality)}
    key = f"{modality}_token"
    named = {files.model.special_tokens.get(key), files.processor.get(key)}
    # It may write tokens around the feature token.
    added = {match.token for match in template.tokenizer.find(_template_text(template, modality))} - seen
    placeholders = added & features or added & named or added
    tokens: set[Any] = {*features, *placeholders, *named}
    return (
        next(iter(placeholders)) if len(placeholders) == 1 else None,
        frozenset(token for token in tokens if token and isinstance(token, str)),
    )


def _with_audio(
    processor: MediaProcessor, files: ProcessorFiles, template: KnownTemplate | None, trust_remote_code: bool
) -> MediaProcessor:
    """Return a processor that takes audio as well, if the model has a feature extractor and a placeholder."""
    if not files.audio or template is None:
        return processor
    token, tokens = _media_tokens(files, template, "audio")
    if token is not None:
        text = _template_text(template, "audio")
        processor.audio = AdaptedAudioProcessor(files, token, text, trust_remote_code=trust_remote_code)
        processor.placeholder = {**processor.placeholder, "audio": token}
        processor.placeholder_tokens |= tokens
    return processor


def _adapted_videos(
    files: ProcessorFiles, template: KnownTemplate | None, trust_remote_code: bool
) -> VideoProcessor:
    from mmrender.media.processors.adapted_videos import AdaptedVideoProcessor

    text = _template_text(template, "video")
    return AdaptedVideoProcessor(files, text, trust_remote_code=trust_remote_code)


def processor_of_plugins(files: ProcessorFiles, backend: ImageBackend) -> MediaProcessor | None:
    """Return the processor of the first plugin that knows these settings.

    Raises:
        PluginError: A plugin cannot be used.
    """
    expected = "a subclass of MediaProcessor with from_files(files, backend)"
    for plugin in load_plugins(GROUP, _is_family, expected).values():
        try:
            processor: MediaProcessor | None = plugin.value.from_files(files, backend)
        except MMRenderError:
            raise
        except Exception as error:
            raise plugin.failed(error) from error
        if processor is not None:
            return processor
    return None


def _is_family(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, MediaProcessor) and hasattr(value, "from_files")
