"""An audit: run what the trainer would see through its model, and compare with what the sampler reported."""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from mmrender.audit.causes import find_cause, inspect_sample
from mmrender.audit.report import AuditReport, Comparison, Decode, Float32Array, save_plot
from mmrender.errors import EngineError, InputError, MMRenderError, ModelError
from mmrender.media.item import ReferenceItem
from mmrender.media.pixels import ImageBackend
from mmrender.media.processors.registry import load_processor
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.model.weights import load_model
from mmrender.spans import MediaItem
from mmrender.training import ModelFamily, collate, resolve_references, token_logprobs
from mmrender.trajectory import load_trajectories
from mmrender.trajectory.sample import TrainingSample

DEFAULT_TOLERANCE: Final = 1e-2
"""Nats a token: above what float32 kernels of different libraries give, below what any fault does."""
_MOST_EXPLAINED: Final = 3
_DTYPES: Final = ("float32", "bfloat16", "float16")


class TrainerModel:
    """A Transformers model that gives the log-probability of every token of a sample.

    Args:
        model: In evaluation mode.
        dtype: Name of the dtype that pixels are given in; that of the weights if None.
    """

    def __init__(self, model: Any, *, dtype: str | None = None) -> None:
        self.model = model
        self.family = ModelFamily.from_config(model.config)
        self._dtype = dtype or str(model.dtype).removeprefix("torch.")

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu"
    ) -> "TrainerModel":
        """Load weights from a model directory.

        Raises:
            MissingDependencyError: torch or Transformers is not installed.
            ModelError: Transformers cannot load the model.
        """
        return cls(load_model(directory, dtype, device, purpose="an audit"))

    def low_precision(self) -> "TrainerModel":
        """Return a copy of the model in bfloat16."""
        import torch

        return TrainerModel(copy.deepcopy(self.model).to(torch.bfloat16), dtype="bfloat16")

    def logprobs(self, sample: TrainingSample, *, own_positions: bool = False) -> Float32Array:
        """Return the log-probability of each token given those before it, `(tokens,)`; 0.0 for the first.

        Each sample runs by itself, through the batch that a trainer builds.

        Args:
            sample: What the trainer would get.
            own_positions: Whether the model works out position ids by itself.

        Raises:
            BatchError: The sample cannot be batched: items or tokens do not fit together.
            PlaceholderError: Its placeholders do not fit its items or tokens.
            EngineError: The model fails on it.
        """
        import torch

        pad = 0 if self.family.feature_token_ids.get("image") != 0 else 1  # of a batch without padding
        batch = collate(
            [sample],
            self.family,
            pad_token_id=pad,
            dtype=getattr(torch, self._dtype),
            device=self.model.device,
            pin_memory=False,
        )
        inputs = batch.model_inputs()
        if own_positions:
            del inputs["position_ids"]
        try:
            with torch.inference_mode():
                found = token_logprobs(self.model(**inputs).logits, batch)
        except (RuntimeError, ValueError, IndexError) as error:
            where = sample.sample_id or "sample"
            raise EngineError("the model fails on the sample", where=where, got=str(error)[:200]) from error
        return np.asarray(found[0].float().cpu().numpy(), np.float32)


def audit(
    samples: Sequence[TrainingSample],
    trainer: TrainerModel,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    others: Sequence[MediaItem] = (),
    explain: int = _MOST_EXPLAINED,
    decode: Decode | None = None,
) -> AuditReport:
    """Compare every sampled token, and look for the cause where tokens depart.

    Samples that are faulty by themselves are reported as such. Of the others that depart, the `explain` with
    the largest differences are run again with one thing changed at a time; each run costs a forward pass.

    Args:
        samples: As the trainer would get them, `logprobs` being the sampler's.
        trainer: The trainer's model, with the weights that sampled.
        tolerance: In nats a token.
        others: Items that an image may have been mistaken for, besides those of the samples.
        explain: How many departing samples to explain.
        decode: Text of token ids, for the report.
    """
    faults = {sample: inspect_sample(sample) for sample in samples}
    comparisons, unread = [], []
    for index, sample in enumerate(samples):
        try:
            comparisons.append(Comparison.of(sample, trainer.logprobs(sample)))
        except MMRenderError as error:
            unread.append((sample.sample_id or f"samples[{index}]", str(error)))
    found = tuple(finding for findings in faults.values() for finding in findings)
    report = AuditReport(tuple(comparisons), found, tuple(unread), tolerance, decode)
    low_precision = cache(trainer.low_precision)  # a copy of the model, made only where it is asked for
    departing = [entry for entry in report.departing if not faults[entry[0].sample]]
    causes = [
        find_cause(
            compared,
            first,
            tolerance,
            trainer.logprobs,
            others=[*_items_of(samples), *others],
            low_precision=lambda sample: low_precision().logprobs(sample),
            own_positions=partial(trainer.logprobs, own_positions=True),
        )
        for compared, first in departing[:explain]
    ]
    return replace(report, findings=(*found, *causes))


def _items_of(samples: Sequence[TrainingSample]) -> list[MediaItem]:
    """Return the distinct items of samples."""
    held = (item for one in samples for items in one.multi_modal_data.mm_items.values() for item in items)
    return [*{item.identity: item for item in held}.values()]


def audit_files(
    files: Sequence[Path],
    model: str,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    explain: int = _MOST_EXPLAINED,
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
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        device: Where torch runs the model.
        image_backend: How images that were shipped by reference are processed.
        plot: A file to draw the differences to, or None.

    Raises:
        InputError: A file cannot be read, or there is no such dtype.
        TrajectoryError: A file is not one of trajectories, or a trajectory has no log-probabilities.
        ModelError: The model cannot be loaded.
        MediaError: An image by reference cannot be loaded, or becomes another one.
        MissingDependencyError: torch, Transformers or, for a plot, matplotlib is not installed.
    """
    if dtype not in _DTYPES:
        raise InputError("there is no such dtype", where="dtype", expected=", ".join(_DTYPES), got=dtype)
    samples = []
    for path in files:
        try:
            trajectories = load_trajectories(path)
        except OSError as error:
            raise InputError("cannot read the file", where=str(path), got=error.strerror) from error
        samples += [sample for trajectory in trajectories for sample in trajectory.samples()]
    directory = find_model(model)
    if any(isinstance(item, ReferenceItem) for item in _items_of(samples)):
        processor = load_processor(directory.path, image_backend=image_backend)
        if processor is None:
            raise ModelError(
                "the trajectories hold images by reference, and the model has no image processor",
                where=str(directory.path),
            )
        samples = resolve_references(samples, processor)
    trainer = TrainerModel.from_pretrained(model, dtype=dtype, device=device)
    decode = Tokenizer.load(directory).decode
    report = audit(samples, trainer, tolerance=tolerance, explain=explain, decode=decode)
    if plot is not None:
        save_plot(report, plot)
    return report
