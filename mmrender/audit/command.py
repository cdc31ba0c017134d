"""An audit of files of saved trajectories, as the command runs it."""

from collections.abc import Sequence
from pathlib import Path

from mmrender.audit.plot import save_plot
from mmrender.audit.report import AuditReport
from mmrender.audit.run import audit
from mmrender.audit.trainer import TrainerModel
from mmrender.errors import InputError
from mmrender.model_dir import find_model
from mmrender.tokenizer import Tokenizer
from mmrender.trajectory import load_trajectories

DTYPES = ("float32", "bfloat16", "float16")


def audit_files(
    files: Sequence[Path],
    model: str,
    *,
    tolerance: float,
    explain: int,
    dtype: str = "float32",
    device: str = "cpu",
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
        plot: A file to draw the differences to, or None.

    Raises:
        InputError: A file cannot be read, or there is no such dtype.
        TrajectoryError: A file holds no trajectories, or a trajectory has no log-probabilities.
        ModelError: The model cannot be loaded.
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
    trainer = TrainerModel.from_pretrained(model, dtype=dtype, device=device)
    decode = Tokenizer.load(directory).decode
    report = audit(samples, trainer, tolerance=tolerance, explain=explain, decode=decode)
    if plot is not None:
        save_plot(report, plot)
    return report
