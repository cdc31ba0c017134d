"""An audit: what the trainer would see is run through its model and set beside what the sampler said."""

from collections.abc import Sequence
from functools import cache

from mmrender.audit.causes import find_cause
from mmrender.audit.compare import Comparison, compare
from mmrender.audit.finding import Finding
from mmrender.audit.inspect_sample import inspect_sample
from mmrender.audit.report import AuditReport, Decode, Unread
from mmrender.audit.trainer import TrainerModel
from mmrender.audit.variations import items_of
from mmrender.errors import MMRenderError
from mmrender.spans import MediaItem
from mmrender.trajectory.sample import TrainingSample

DEFAULT_TOLERANCE = 1e-2
"""Nats a token: above what float32 kernels of different libraries give, below what any fault does."""
_MOST_EXPLAINED = 3


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
    findings: list[Finding] = []
    comparisons: list[Comparison] = []
    unread: list[Unread] = []
    departing: list[Comparison] = []
    for index, sample in enumerate(samples):
        faults = inspect_sample(sample)
        findings += faults
        try:
            compared = compare(sample, trainer.logprobs(sample))
        except MMRenderError as error:
            unread.append(Unread(sample.sample_id or f"samples[{index}]", str(error)))
            continue
        comparisons.append(compared)
        if compared.largest > tolerance and not faults:
            departing.append(compared)
    departing.sort(key=lambda compared: -compared.largest)
    low_precision = cache(trainer.low_precision)  # a copy of the model, made only where it is asked for
    known = [*items_of(samples), *others]
    findings += [
        find_cause(
            compared,
            tolerance,
            trainer.logprobs,
            others=known,
            low_precision=lambda sample: low_precision().logprobs(sample),
            own_positions=trainer.own_positions,
        )
        for compared in departing[:explain]
    ]
    return AuditReport(tuple(comparisons), tuple(findings), tuple(unread), tolerance, decode)
