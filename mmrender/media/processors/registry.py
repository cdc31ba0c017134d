"""Choose the processor of a model directory: a native family's whose rules are known, a plugin's, or its own.

To add a native family, write a module beside `qwen.py` with a subclass of `MediaProcessor` that has
`from_files`, and name it in `NATIVE`. `tests/parity/test_processor_parity.py` compares it with the
reference.
"""

from contextlib import suppress
from pathlib import Path

from mmrender.errors import MediaError, MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.pixels import IMAGE_BACKENDS, ImageBackend
from mmrender.media.processor import MediaProcessor, ProcessorFiles, VideoProcessor
from mmrender.media.processors.deferred import DeferredProcessor
from mmrender.media.processors.qwen import PatchProcessor
from mmrender.media.processors.video import PatchVideoProcessor
from mmrender.model.files import ModelDir
from mmrender.plugins import load_plugins
from mmrender.probing.probes import user
from mmrender.probing.templates import KnownTemplate
from mmrender.template.text import plain

NATIVE = (PatchProcessor,)
"""Classes whose `from_files(files, backend)` gives a processor, or None for settings of another family."""

TEXT_WRITERS = frozenset({"ChameleonProcessor", "Emu3Processor", "Molmo2Processor", "PaliGemmaProcessor"})
"""Processors of Transformers that add text to any prompt: they are built at once, not at the first image."""

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

    def build() -> MediaProcessor:
        provided = _provided(files, image_backend)
        if provided is not None:
            return provided
        # Imported here: native families need none of it, and it is the larger half of the package.
        from mmrender.media.processors.transformers import TransformersProcessor

        opening = _opening(files, template)
        processor = TransformersProcessor(
            files, image_backend, trust_remote_code=trust_remote_code, opening=opening
        )
        processor.videos = adapted_videos() if "video" in processor.placeholder else None
        return processor

    def adapted_videos() -> VideoProcessor:
        from mmrender.media.processors.adapted_video import AdaptedVideoProcessor

        return AdaptedVideoProcessor(files, trust_remote_code=trust_remote_code)

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
        if template is None or files.processor_class in TEXT_WRITERS:
            return build()
        deferred = DeferredProcessor(files, image_backend, template, build)
        if not deferred.can_wait:
            with suppress(MissingDependencyError):
                return deferred.load()
        return deferred
    except (MissingDependencyError, ProcessorError, MediaError) as error:
        error.at(str(files.directory))
        raise


def _opening(files: ProcessorFiles, template: KnownTemplate | None) -> str:
    """Return `<s>` or its like if prompts of the template begin with it, or if there is no template."""
    token = files.model.special_tokens.get("bos_token") or ""
    if template is None:
        return token
    prompt = template.probes.render([user()])
    return token if prompt is not None and plain(prompt).startswith(token) else ""


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
