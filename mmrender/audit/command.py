"""An audit of files of saved trajectories, as the command runs it."""

from collections.abc import Sequence
from pathlib import Path

from mmrender.audit.plot import save_plot
from mmrender.audit.report import AuditReport
from mmrender.audit.run import audit
from mmrender.audit.trainer import TrainerModel
from mmrender.audit.variations import items_of
from mmrender.errors import InputError, ModelError
from mmrender.media.item import ReferenceItem
from mmrender.media.pixels import ImageBackend
from mmrender.media.processors.registry import load_processor
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.training import resolve_references
from mmrender.trajectory import TrainingSample, load_trajectories

DTYPES = ("float32", "bfloat16", "float16")


def audit_files(
    files: Sequence[Path],
    model: str,
    *,
    tolerance: float,
    explain: int,
    dtype: str = "float32",
    device: str = "cpu",
    image_backend: ImageBackend = "torch",
    plot: Path | None = None,
) -> AuditReport:
    """Audit every branch of every trajectory in `files` against the weights of `model`.

    Args:
        files: As `save_trajectories` writes them.
        model: Model directory or hub id; the weights that sampled.
        tolerance: In nats a token.
        explain: How many departing samples to look for a cause in.
        dtype: One of `DTYPES`.
        device: Where torch runs the model.
        image_backend: How images that were shipped by reference are processed.
        plot: A file to draw the differences to, or None.

    Raises:
        InputError: A file cannot be read, or there is no such dtype.
        TrajectoryError: A file holds no trajectories, or a trajectory has no log-probabilities.
        ModelError: The model cannot be loaded.
        MediaError: An image by reference cannot be loaded, or becomes another one.
        MissingDependencyError: torch, Transformers or, for a plot, matplotlib is not installed.
    """
    if dtype not in DTYPES:
        raise InputError("there is no such dtype", where="dtype", expected=", ".join(DTYPES), got=dtype)
    samples = []
    for path in files:
        try:
            trajectories = load_trajectories(path)
        except OSError as error:
            raise InputError("cannot read the file", where=str(path), got=error.strerror) from error
        samples += [sample for trajectory in trajectories for sample in trajectory.samples()]
    directory = find_model(model)
    samples = _with_items(samples, directory.path, image_backend)
    trainer = TrainerModel.from_pretrained(model, dtype=dtype, device=device)
    decode = Tokenizer.load(directory).decode
    report = audit(samples, trainer, tolerance=tolerance, explain=explain, decode=decode)
    if plot is not None:
        save_plot(report, plot)
    return report


def _with_items(
    samples: list[TrainingSample], directory: Path, image_backend: ImageBackend
) -> list[TrainingSample]:
    """The samples with images that came by reference processed again."""
    if not any(isinstance(item, ReferenceItem) for item in items_of(samples)):
        return samples
    processor = load_processor(directory, image_backend=image_backend)
    if processor is None:
        raise ModelError(
            "the trajectories hold images by reference, and the model has no image processor",
            where=str(directory),
        )
    return resolve_references(samples, processor)
