"""An audit of files of trajectories, as the command runs it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from mmrender.audit.report import AuditReport
from mmrender.audit.run import audit, items_of
from mmrender.audit.trainer import TrainerModel
from mmrender.content.messages import normalize_messages
from mmrender.errors import InputError, MMRenderError, ModelError, check_option
from mmrender.media.encoded import ReferenceItem
from mmrender.media.load import load_image
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import MediaProcessor
from mmrender.media.processors.registry import load_processor
from mmrender.messages import ImagePart
from mmrender.model.convert import open_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.training import resolve_references
from mmrender.trajectory import load_trajectories
from mmrender.trajectory.tree import Trajectory

_DTYPES: Final = ("float32", "bfloat16", "float16")


class _Sources(dict[str, Any]):
    """Images before they were processed, by identity of their items: of `given`, and of messages.

    The item of an image in a message is found by processing the image again, when one is asked for.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
        load: Callable[[], MediaProcessor | None],
    ) -> None:
        super().__init__(given)
        self._waiting, self._load = list(trajectories), load

    def get(self, key: str, default: Any = None) -> Any:
        """Return the image of an item, or the default."""
        while key not in self and self._waiting:
            shown = _images_of(self._waiting.pop())
            processor = self._load() if shown else None
            for source in shown:
                if processor is None:
                    return default
                try:
                    item = processor.process(load_image(source), num_images=len(shown))
                except MMRenderError:
                    continue  # an image that cannot be loaded again has lost its source
                self[item.identity] = source
        return super().get(key, default)


def _images_of(trajectory: Trajectory) -> list[Any]:
    """Return the images of a trajectory's messages, each once, if these kept them."""
    messages = [message for step in trajectory.steps for message in step.new_messages]
    contents = [message.content for message in normalize_messages(messages)]
    parts = [part for content in contents if isinstance(content, tuple) for part in content]
    return [part.source for part in parts if isinstance(part, ImagePart) and part.source is not None]


def audit_files(
    files: Sequence[Path],
    model: str,
    *,
    tolerance: float | None = None,
    explain: int = 3,
    dtype: str = "float32",
    device: str = "cpu",
    image_backend: ImageBackend = "torch",
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
        image_backend: How images that were shipped by reference are processed.
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
    load = partial(load_processor, directory, image_backend=image_backend)
    if references:
        processor = load()
        if processor is None:
            raise ModelError(
                "the trajectories have images by reference, and the model lacks an image processor",
                where=str(directory.path),
            )
        samples = resolve_references(samples, processor)
    sources = _Sources({name: item.source for name, item in references.items()}, trajectories, load)
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
