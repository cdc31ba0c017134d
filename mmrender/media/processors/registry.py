"""Choose the processor of a model directory: a native family's whose rules are known, a plugin's, or its own.

To add a native family, write a module beside `qwen.py` with a subclass of `MediaProcessor` that has
`from_files`, and name it in `NATIVE`. `tests/parity/test_processor_parity.py` compares it with the
reference.
"""

from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from mmrender.errors import MediaError, MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.pixels import IMAGE_BACKENDS, ImageBackend
from mmrender.media.processor import Affixes, BosPlace, MediaProcessor, ProcessorFiles, VideoProcessor
from mmrender.media.processors.deferred import DeferredProcessor
from mmrender.media.processors.qwen import PatchProcessor
from mmrender.media.processors.reference import build_reference_processor
from mmrender.media.processors.video import PatchVideoProcessor
from mmrender.media.processors.watched import WatchedProcessor
from mmrender.messages import UNKNOWN_SOURCE, VideoPart
from mmrender.model.files import ModelDir
from mmrender.plugins import load_plugins
from mmrender.template.known import KnownTemplate
from mmrender.template.probes import user
from mmrender.template.text import plain

NATIVE = (PatchProcessor,)
"""Classes whose `from_files(files, backend)` gives a processor, or None for settings of another family."""

TEXT_WRITERS = frozenset({"ChameleonProcessor", "Emu3Processor", "Molmo2Processor", "PaliGemmaProcessor"})
"""Processors that add text to prompts without images, too: without Transformers, these are refused."""

GROUP = "mmrender.processors"
"""Entry points of other packages' classes; each is as those of `NATIVE`, and sets `videos` itself."""


def load_processor(
    directory: Path | ModelDir,
    *,
    image_backend: ImageBackend = "torch",
    trust_remote_code: bool = False,
    template: KnownTemplate | None = None,
) -> MediaProcessor | None:
    """Load the processor of a model directory in Hub layout.

    The back end is the caller's choice, never a consequence of what is installed: the two differ in about
    0.2 % of the pixel values, and the choice is part of every item's identity.

    Args:
        directory: Holds `preprocessor_config.json` or `processor_config.json`.
        image_backend: `"torch"` equals the reference's torchvision back end, which inference servers run;
            `"pil"` equals its PIL back end and needs neither torch nor, for native families, Transformers.
        trust_remote_code: Run processor code that the directory brings along.
        template: The model's chat template. With it, the processor of a family that is not native is loaded
            when the first image comes, and raises then what is said below.

    Returns:
        The processor, or `None` for a directory without image settings: a text-only model.

    Raises:
        ProcessorError: The settings cannot be read, or no processor here equals what they describe.
        MissingDependencyError: The family needs a package that is not installed. (A native processor asks
            for torch with the first image that must be resampled.)
        PluginError: A processor of another package cannot be used. None is looked for where one of ours fits.
    """
    if image_backend not in IMAGE_BACKENDS:
        raise ProcessorError(
            "there is no such image back end",
            expected=" or ".join(map(repr, IMAGE_BACKENDS)),
            got=repr(image_backend),
        )
    files = ProcessorFiles.read(directory)
    if not files.image:
        return None

    # Text and images are learnt from the same processor.
    built = partial(build_reference_processor, files, image_backend, trust_remote_code=trust_remote_code)
    watched = WatchedProcessor(built, files.model.special_tokens.get("bos_token") or "")

    @cache
    def provided() -> MediaProcessor | None:
        return _provided(files, image_backend)

    def build() -> MediaProcessor:
        if (found := provided()) is not None:
            return found
        # Imported here: native families need none of it, and it is the larger half of the package.
        from mmrender.media.processors.transformers import TransformersProcessor

        image_text = template.probes.added_by_image("user") if template is not None else None
        processor = TransformersProcessor(files, image_backend, watched, image_text or "")
        processor.videos = adapted_videos() if "video" in processor.placeholder else None
        return processor

    def adapted_videos() -> VideoProcessor:
        from mmrender.media.processors.adapted_video import AdaptedVideoProcessor

        part = VideoPart(UNKNOWN_SOURCE)
        video_text = template.probes.added_by(part, "user") if template is not None else None
        return AdaptedVideoProcessor(files, video_text or "", trust_remote_code=trust_remote_code)

    def learn() -> dict[BosPlace, Affixes]:
        if provided() is not None:
            return {}
        return watched.learn_affixes(_prompts(template) if template is not None else ())

    try:
        for family in NATIVE:
            native = family.from_files(files, image_backend)
            if native is not None:
                native.videos = (
                    PatchVideoProcessor.from_files(
                        files, image_token=native.image_token, video_token=native.video_token
                    )
                    or adapted_videos()
                )
                return native
        if template is None:
            return build()
        must_learn = files.processor_class in TEXT_WRITERS
        deferred = DeferredProcessor(files, image_backend, template, build, learn, must_learn=must_learn)
        if not deferred.can_wait:
            with suppress(MissingDependencyError):
                return deferred.load()
        return deferred
    except (MissingDependencyError, ProcessorError, MediaError) as error:
        error.at(str(files.directory))
        raise


def _prompts(template: KnownTemplate) -> list[str]:
    """Return prompts of the template without media."""
    texts = [template.probes.render([user()], prompt=prompt) for prompt in (False, True)]
    return [plain(text) for text in texts if text is not None]


def _provided(files: ProcessorFiles, backend: ImageBackend) -> MediaProcessor | None:
    """The processor of the first plugin that knows these settings."""
    expected = "a subclass of MediaProcessor with from_files(files, backend)"
    for plugin in load_plugins(GROUP, _is_family, expected).values():
        try:
            found: MediaProcessor | None = plugin.value.from_files(files, backend)
        except MMRenderError:
            raise
        except Exception as error:
            raise plugin.failed(error) from error
        if found is not None:
            return found
    return None


def _is_family(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, MediaProcessor) and hasattr(value, "from_files")
