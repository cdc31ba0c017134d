"""Put off loading a model's own processor until its first image comes.

Transformers and torch take seconds to import, and some families need packages that text does not. All that
text needs to know of a processor is which tokens are media's. The model's settings name the token that holds
image features, and its template writes the placeholder; the processor, once loaded, must agree with both.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

from mmcodecs.forks import watch_forks
from mmrender.errors import MMRenderError, ProcessorError
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import Geometry, MediaProcessor, Prepared, ProcessorFiles
from mmrender.messages import UNKNOWN_SOURCE, ImagePart, Modality, VideoPart
from mmrender.probing.templates import KnownTemplate

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
    """

    settings_digest = b""

    def __init__(
        self,
        files: ProcessorFiles,
        backend: ImageBackend,
        template: KnownTemplate,
        build: Callable[[], MediaProcessor],
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
