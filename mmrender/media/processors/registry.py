"""From a model directory to the processor that equals its own."""

from pathlib import Path

from mmrender.errors import ProcessorError
from mmrender.media.pixels import IMAGE_BACKENDS, ImageBackend, require_backend
from mmrender.media.processors.base import MediaProcessor, read_processor_files
from mmrender.media.processors.qwen import PatchProcessor


def load_processor(
    directory: Path, *, image_backend: ImageBackend = "torch", trust_remote_code: bool = False
) -> MediaProcessor | None:
    """Load the processor of a model directory in Hub layout.

    The back end is the caller's choice, never a consequence of what is installed: the two differ in about
    0.2 % of the pixel values, and the choice is part of every item's identity.

    Args:
        directory: Holds `preprocessor_config.json` or `processor_config.json`.
        image_backend: `"torch"` equals the reference's torchvision back end, which inference servers run;
            `"pil"` equals its PIL back end and needs neither torch nor, for native families, Transformers.
        trust_remote_code: Run processor code that the directory brings along.

    Returns:
        The processor, or `None` for a directory without image settings: a text-only model.

    Raises:
        ProcessorError: The settings cannot be read, or no processor here equals what they describe.
        MissingDependencyError: The back end or the family needs a package that is not installed.
    """
    if image_backend not in IMAGE_BACKENDS:
        raise ProcessorError(
            "there is no such image back end",
            expected=" or ".join(map(repr, IMAGE_BACKENDS)),
            got=repr(image_backend),
        )
    files = read_processor_files(directory)
    if not files.image:
        return None
    require_backend(image_backend)
    native = PatchProcessor.from_files(files, image_backend)
    if native is not None:
        return native
    # Imported here: native families need none of it, and it is the larger half of the package.
    from mmrender.media.processors.transformers import HuggingFaceProcessor

    return HuggingFaceProcessor(files, image_backend, trust_remote_code=trust_remote_code)
