"""An audit: run the trainer's samples through its model, and compare with the sampler's numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from mmrender.audit.causes import DEFAULT_BUDGET, Noise, find_cause
from mmrender.audit.computed import other_attention, whole_in
from mmrender.audit.inspect import inspect_sample
from mmrender.audit.report import AuditReport, Comparison, Decode, Finding
from mmrender.audit.trainer import TrainerModel
from mmrender.audit.trial import Case, Weights
from mmrender.content.messages import normalize_messages
from mmrender.errors import InputError, MMRenderError, ModelError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.load import load_image
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import MediaProcessor
from mmrender.media.processors.registry import load_processor
from mmrender.messages import ImagePart
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.sidecar import MediaItem
from mmrender.training import resolve_references
from mmrender.trajectory import Trajectory, load_trajectories
from mmrender.trajectory.sample import RESTRICTED, TrainingSample

_MOST_EXPLAINED: Final = 3
_LEAST: Final = 1e-3
"""Maximum difference of float32 kernels of different libraries, in nats a token. Any fault does more."""
_MARGIN: Final = 4.0
"""Tolerance as a multiple of the measured noise."""
_TELLING: Final = 16
"""Agreeing tokens (with a probability of 0.5 or less each) that count as evidence."""
_MEASURED: Final = 3
_MEASURED_TOKENS: Final = 256
_DTYPES: Final = ("float32", "bfloat16", "float16")


def measure_noise(samples: Sequence[TrainingSample], trainer: TrainerModel) -> Noise:
    """Measure differences by arithmetic alone, on some of the samples.

    Each runs alone, and again in a batch with padding and another attention kernel. If the model computes in
    float32, once more in bfloat16, in which samplers often compute.

    Args:
        samples: Some of these are run.
        trainer: The model.
    """
    import torch

    exact = mixed = 0.0
    near: list[float] = []
    chosen = sorted(samples, key=len)[: 2 * _MEASURED : 2]
    beside = max(chosen, key=len, default=None)
    for sample in chosen:
        mask = sample.mm_token_type_ids == 0
        mask[0] = False
        places = np.flatnonzero(mask)[-_MEASURED_TOKENS:]
        mask[:] = False
        mask[places] = True
        whole = replace(sample, loss_mask=mask, logprobs=np.zeros(len(sample), np.float32))
        alone = trainer.sampled_logprobs(whole)
        other = trainer.sampled_logprobs(whole, model=other_attention, beside=beside)
        exact = max(exact, float(np.abs(other - alone).max(initial=0.0)))
        if trainer.model.dtype == torch.float32:
            low = np.abs(trainer.sampled_logprobs(whole, model=whole_in(torch.bfloat16)) - alone)
            mixed = max(mixed, float(low.max(initial=0.0)))
            near += (low <= _LEAST).tolist()
    mixed = max(mixed, exact)
    least = max(_LEAST, _MARGIN * exact)
    return Noise(exact, mixed, least, max(least, _MARGIN * mixed), float(np.mean(near)) if near else 1.0)


def as_sampled(noise: Noise, comparisons: Sequence[Comparison]) -> Noise:
    """Drop the allowance for another dtype if half of the samples or more show that the sampler had the same.

    Their tokens agree more closely than under another dtype.
    """
    agreeing = [one for one in comparisons if one.largest <= noise.tolerance]
    tokens = sum(len(one.positions) for one in agreeing) * (1 - noise.near)
    if len(agreeing) < max(2, len(comparisons) / 2) or tokens < _TELLING:
        return noise
    alarm = max(noise.tolerance, _MARGIN * max(one.largest for one in agreeing))
    return replace(noise, alarm=min(noise.alarm, alarm), mixed=noise.exact)


def audit(
    samples: Sequence[TrainingSample],
    trainer: TrainerModel,
    *,
    tolerance: float | None = None,
    others: Sequence[MediaItem] = (),
    explain: int = _MOST_EXPLAINED,
    decode: Decode | None = None,
    sources: Mapping[str, Any] | None = None,
    weights: Mapping[str, Weights] | None = None,
    alternatives: Mapping[str, Sequence[TrainingSample]] | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[str], object] = lambda _: None,
) -> AuditReport:
    """Compare every sampled token, and look for the cause of differences.

    Samples that are faulty by themselves are reported first. Among further samples with differences, the
    `explain` largest are run again with one thing changed at a time. Each run costs a forward pass.

    Args:
        samples: As the trainer would get them, `logprobs` being the sampler's.
        trainer: The trainer's model, with the weights that sampled.
        tolerance: In nats a token: larger differences are an alarm. None measures the arithmetic with
            `measure_noise`. The named cause does not depend on it.
        others: Items that an image may have been mistaken for, besides the samples' own.
        explain: Maximum number of samples to explain.
        decode: Text of token ids, for the report and for text that was encoded again.
        sources: Images before processing, by identity of their items: whatever a message may hold.
        weights: Weights that may have sampled in place of the trainer's, by name: tensors by parameter.
        alternatives: The same samples as something else builds them, such as another template, by name.
        budget: Forward passes for each sample that is explained, at most.
        progress: Called with a text at the start of each stage.
    """
    progress(f"comparing samples: {len(samples)}")
    unread: list[tuple[str, str]] = []
    comparisons: list[Comparison] = []
    given: dict[int, int] = {}
    faults: dict[int, list[Finding]] = {}
    left_out: list[tuple[str, str]] = []
    compared_of = [_unrestricted(sample) for sample in samples]
    values = trainer.sampled_of_many([sample for sample, _ in compared_of])
    for index, (sample, why) in enumerate(compared_of):
        if why:
            left_out.append((sample.sample_id or f"samples[{index}]", why))
        faults[index] = inspect_sample(sample)
        try:
            # A sample that failed in a batch is run alone, for the model's own error.
            own = values[index]
            compared = Comparison.of_sampled(sample, trainer.sampled_logprobs(sample) if own is None else own)
        except MMRenderError as error:
            unread.append((sample.sample_id or f"samples[{index}]", str(error)))
            continue
        given[len(comparisons)] = index
        comparisons.append(compared)
    progress("measuring the arithmetic alone")
    noise = as_sampled(measure_noise([one.sample for one in comparisons], trainer), comparisons)
    alarm = noise.alarm if tolerance is None else tolerance
    found = [finding for findings in faults.values() for finding in findings]
    report = AuditReport(tuple(comparisons), tuple(found), tuple(unread), alarm, tuple(left_out), decode)
    order = sorted(range(len(comparisons)), key=lambda place: -comparisons[place].largest)
    causes: list[Finding] = []
    pool = [*_items_of(samples), *others]
    for place in order:
        compared, index = comparisons[place], given[place]
        # Without a tolerance a fault may be as small as another dtype makes differences.
        departing = compared.first_departure(noise.tolerance if tolerance is None else tolerance)
        if departing is None or len(causes) == explain:
            break
        departure = compared.first_departure(noise.tolerance)
        # A sample with a fault of its own is explained, unless it is about numbers, which may have a known
        # form.
        if any(finding.variation != "values" for finding in faults[index]):
            continue
        progress(f"looking for the cause in {compared.sample.sample_id or f'samples[{index}]'}")
        case = Case(
            compared,
            departing if departure is None else departure,
            trainer,
            noise.tolerance,
            peers=[one for other, one in enumerate(comparisons) if other != place],
            others=pool,
            decode=decode,
            sources={} if sources is None else sources,
            weights=weights or {},
            alternatives={name: built[index] for name, built in (alternatives or {}).items()},
        )
        finding = find_cause(case, noise, budget=budget)
        if compared.largest <= alarm and not _is_fault(finding):
            break  # samples come by size of their differences, and those left are as small
        if finding.variation:
            found = [one for one in found if one not in faults[index]]
        causes.append(finding)
    return replace(report, findings=(*found, *causes))


def _unrestricted(sample: TrainingSample) -> tuple[TrainingSample, str]:
    """Return a sample without the completions under a grammar, and a text about these."""
    spans = sample.extra.get(RESTRICTED, ())
    if not spans:
        return sample, ""
    mask, kinds = sample.loss_mask.copy(), {kind for _, _, *named in spans for kind in named}
    for start, stop, *_ in spans:
        mask[start:stop] = False
    logprobs = None if sample.logprobs is None else np.where(mask, sample.logprobs, 0).astype(np.float32)
    count = int(sample.loss_mask.sum() - mask.sum())
    why = f"{count} tokens sampled under {', '.join(sorted(kinds))}"
    return replace(sample, loss_mask=mask, logprobs=logprobs), why


def _is_fault(finding: Finding) -> bool:
    """Whether a difference as small as between dtypes has another cause."""
    named = set(finding.variation.split(" or ")) - {""}
    return bool(named) and (finding.cause != "precision" or not named & {"dtype", "rounded"})


def _items_of(samples: Sequence[TrainingSample]) -> list[MediaItem]:
    """Return the distinct items of samples."""
    held = (item for one in samples for items in one.multi_modal_data.mm_items.values() for item in items)
    return [*{item.identity: item for item in held}.values()]


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
    explain: int = _MOST_EXPLAINED,
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
    if dtype not in _DTYPES:
        raise InputError("unknown dtype", where="dtype", expected=", ".join(_DTYPES), got=dtype)
    trajectories: list[Trajectory] = []
    for path in files:
        try:
            trajectories += load_trajectories(path)
        except OSError as error:
            raise InputError("cannot read the file", where=str(path), got=error.strerror) from error
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    directory = find_model(model)
    references = {item.identity: item for item in _items_of(samples) if isinstance(item, ReferenceItem)}
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
