"""An audit of files of trajectories, as the command runs it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from mmrender.audit.report import AuditReport
from mmrender.audit.run import audit, items_of
from mmrender.audit.trainer import TrainerModel
from mmrender.content.messages import normalize_message
from mmrender.errors import InputError, MessageError, MMRenderError, ModelError, check_option
from mmrender.media.encoded import ReferenceItem
from mmrender.media.pixels import IMAGE_BACKENDS
from mmrender.media.processors.registry import load_processor
from mmrender.messages import ImagePart
from mmrender.model.convert import open_model
from mmrender.model.files import ModelDir
from mmrender.model.tokenizer import Tokenizer
from mmrender.training import resolve_references
from mmrender.trajectory import load_trajectories
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory

_DTYPES: Final = ("float32", "bfloat16", "float16")


def _sources_of(trajectory: Trajectory) -> Iterator[tuple[str, Any]]:
    """Yield identities of items, and the images of messages that they were made of, if these kept them."""
    for step in trajectory.steps:
        try:
            contents = [normalize_message(message, "message").content for message in step.new_messages]
        except MessageError:
            continue  # messages of a caller that were never rendered
        parts = [part for content in contents if isinstance(content, tuple) for part in content]
        shown = [part.source for part in parts if isinstance(part, ImagePart)]
        items = [span.item for span in step.own_media if span.modality == "image"]
        # A prompt that was rendered anew has images of earlier messages too.
        pairs = zip(items, shown, strict=True) if len(items) == len(shown) else ()
        yield from ((item.identity, source) for item, source in pairs if source is not None)


def _resolved(samples: list[TrainingSample], directory: ModelDir) -> list[TrainingSample]:
    """Return samples with their references processed, by the back end that makes the sampler's items."""
    refused: list[MMRenderError] = []
    for backend in IMAGE_BACKENDS:
        try:
            processor = load_processor(directory, image_backend=backend)
            if processor is not None:
                return resolve_references(samples, processor)
        except MMRenderError as error:
            refused.append(error)
    problem = "the trajectories have images by reference, and the model lacks an image processor"
    raise refused[0] if refused else ModelError(problem, where=str(directory.path))


def audit_files(
    files: Sequence[Path],
    model: str,
    *,
    tolerance: float | None = None,
    explain: int = 3,
    dtype: str = "float32",
    device: str = "cpu",
    progress: Callable[[str], object] = lambda _: None,
) -> AuditReport:
    """Audit every branch of every trajectory in `files` against the weights of `model`.

    Args:
        files: As `save_trajectories` writes them.
        model: Model directory or hub id, with the weights that sampled.
        tolerance: In nats a token; None measures it.
        explain: Maximum number of samples to explain.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        device: Device on which torch runs the model.
        progress: Called with a text at the start of each stage.

    Raises:
        InputError: A file cannot be read, or the dtype is unknown.
        TrajectoryError: A file is not one of trajectories, or a trajectory lacks log-probabilities.
        ModelError: The model cannot be loaded.
        MediaError: An image by reference cannot be loaded, or becomes another one.
        MissingDependencyError: torch or Transformers is not installed.
    """
    check_option("dtype", dtype, _DTYPES)
    trajectories: list[Trajectory] = []
    for path in files:
        try:
            trajectories += load_trajectories(path)
        except OSError as error:
            raise InputError("cannot read the file", where=str(path), got=error.strerror) from error
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    directory = open_model(model)
    references = {item.identity: item for item in items_of(samples) if isinstance(item, ReferenceItem)}
    if references:
        samples = _resolved(samples, directory)
    sources = dict(chain.from_iterable(map(_sources_of, trajectories)))
    sources |= {name: item.source for name, item in references.items()}
    trainer = TrainerModel.from_pretrained(model, dtype=dtype, device=device)
    decode = Tokenizer.load(directory).decode
    return audit(
        samples,
        trainer,
        tolerance=tolerance,
        explain=explain,
        decode=decode,
        sources=sources,
        progress=progress,
    )
