"""Put off loading a model's own processor until its first image comes.

Transformers and torch take seconds to import, and some families need packages that text does not. Text needs
to know which tokens are media's: the model's settings name the token that holds image features, and its
template writes the placeholder; the processor, once loaded, must agree with both. Text also needs to know
what the processor adds to every prompt, which is learnt once and kept on disk.
"""

import copy
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mmcodecs.forks import watch_forks
from mmrender.caching import digest_of_code
from mmrender.errors import MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import (
    Affixes,
    BosPlace,
    Geometry,
    MediaProcessor,
    Prepared,
    ProcessorFiles,
    digest_settings,
)
from mmrender.messages import UNKNOWN_SOURCE, ImagePart, Modality, VideoPart
from mmrender.template.known import KnownTemplate

_PARTS: dict[Modality, ImagePart | VideoPart] = {
    "image": ImagePart(UNKNOWN_SOURCE),
    "video": VideoPart(UNKNOWN_SOURCE),
}


class DeferredProcessor(MediaProcessor):
    """A processor that is loaded when it is first asked for more than the names of its tokens.

    Its `settings_digest` and `depends_on_image_count` are those of the loaded one: ask `load()` for them.

    Args:
        files: The model's settings.
        backend: As asked for.
        template: The model's chat template.
        build: Makes the processor.
        learn: Finds out what the processor writes beside prompts without media.
        must_learn: Whether a prompt is refused if a package is missing that `learn` needs.
    """

    settings_digest = b""

    def __init__(
        self,
        files: ProcessorFiles,
        backend: ImageBackend,
        template: KnownTemplate,
        build: Callable[[], MediaProcessor],
        learn: Callable[[], dict[BosPlace, Affixes]],
        *,
        must_learn: bool = False,
    ) -> None:
        self.name = files.image_processor_type or "unknown"
        self.image_backend = backend
        self.placeholder = {}
        tokens: set[Any] = set()
        seen: set[str] = set()
        for modality, part in _PARTS.items():
            held = {template.tokenizer.token(index) for index in files.token_ids(modality)}
            key = f"{modality}_token"
            named = files.model.special_tokens.get(key), files.processor.get(key)
            # A template may write tokens around the one that holds features, and take any part for an image.
            written = _added_tokens(template, part) - seen
            found = written & held or written
            if len(found) == 1:
                self.placeholder[modality] = next(iter(found))
            tokens |= {*held, *found, *named}
            seen |= written
        self.placeholder_tokens = frozenset(token for token in tokens if token and isinstance(token, str))
        self.can_wait = "image" in self.placeholder and bool(files.token_ids("image"))
        self._build = build
        self._template = template
        self._learn = learn
        self._must_learn = must_learn
        self._settings = (files.processor_class, files.image, files.processor, files.model.tokenizer_config)
        self._of_text: Mapping[BosPlace, Affixes] | None = None
        self._loaded: MediaProcessor | MMRenderError | None = None
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Replace the lock: what another thread was loading, the child loads itself."""
        self._lock = threading.Lock()

    def load(self) -> MediaProcessor:
        """Return the processor, which the first call makes.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            ProcessorError: It cannot be made, or replaces other tokens than the template writes.
        """
        with self._lock:
            if self._loaded is None:
                try:
                    self._loaded = self._agreeing(self._build())
                except MMRenderError as error:
                    self._loaded = error
        if isinstance(self._loaded, MMRenderError):
            raise copy.copy(self._loaded)
        return self._loaded

    def affixes(self, bos: BosPlace, *, images: bool) -> Affixes | None:
        """Return what the processor writes beside a prompt; for text it is loaded if that is not known yet.

        None if the processor cannot be loaded, or is that of another package.
        """
        if images:
            return self.load().affixes(bos, images=True)
        if self._of_text is None:
            try:
                release = version("transformers")
            except PackageNotFoundError:
                release = ""
            about = digest_settings({"settings": self._settings, "transformers": release}).hex()
            key = ("affixes", about, digest_of_code(("media/processors/*.py",)))
            try:
                find, kind = self._template.findings.get_or_find, dict[BosPlace, Affixes]
                self._of_text = find(key, kind, self._learn)
            except MissingDependencyError:
                if self._must_learn:
                    raise
                self._of_text = {}
            except MMRenderError:
                self._of_text = {}
        return self._of_text.get(bos)

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        """Load the processor and ask it; see `MediaProcessor`."""
        return self.load().geometry(height, width, num_images=num_images)

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Load the processor and ask it; see `MediaProcessor`."""
        return self.load().prepare(loaded, num_images=num_images)

    def _agreeing(self, processor: MediaProcessor) -> MediaProcessor:
        """Require the tokens by which text has been rendered so far."""
        token, written = processor.placeholder["image"], self.placeholder.get("image")
        if self.can_wait and token != written:
            raise ProcessorError(
                f"{processor.name} replaces another token than the chat template writes for an image",
                expected=repr(written),
                got=repr(token),
            )
        of_video = {processor.placeholder.get("video")}
        unknown = processor.placeholder_tokens - self.placeholder_tokens - of_video
        if self.can_wait and unknown:
            raise ProcessorError(
                f"{processor.name} writes another token for an image than config.json names",
                expected=" or ".join(map(repr, sorted(self.placeholder_tokens))),
                got=repr(sorted(unknown)),
            )
        return processor


def _added_tokens(template: KnownTemplate, part: ImagePart | VideoPart) -> set[str]:
    """Return the added tokens that the template writes for one item in a user's message."""
    text = template.probes.added_by(part, "user") or ""
    return {match.token for match in template.tokenizer.find(text)}
