"""An audit: run the trainer's samples through its model, and compare with the sampler's numbers.

`Watch` does that within a training loop, for a share of its time.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mmrender.audit.case import Case, Weights
from mmrender.audit.inspect import inspect_sample
from mmrender.audit.noise import Noise, measure_noise
from mmrender.audit.report import STAGES, UNKNOWN, AuditReport, Comparison, Decode, Finding, Stage
from mmrender.audit.rows import finding_of
from mmrender.audit.search import DEFAULT_BUDGET, Search
from mmrender.audit.trainer import TrainerModel
from mmrender.errors import MMRenderError
from mmrender.sidecar import MediaItem
from mmrender.trajectory.sample import RESTRICTED, SAMPLER, TrainingSample

_EXPLAINED: Final = 3
_EVIDENT: Final = 4.0
"""Digits by which a cause of all samples rules out chance."""


def audit(
    samples: Sequence[TrainingSample],
    trainer: TrainerModel,
    *,
    tolerance: float | None = None,
    others: Sequence[MediaItem] = (),
    explain: int = _EXPLAINED,
    decode: Decode | None = None,
    sources: Mapping[str, Any] | None = None,
    weights: Mapping[str, Weights] | None = None,
    alternatives: Mapping[str, Sequence[TrainingSample]] | None = None,
    budget: int = DEFAULT_BUDGET,
    noise: Noise | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> AuditReport:
    """Compare every sampled token, and find the stage and cause of differences.

    Samples that are faulty by themselves are reported first. Among further samples with differences, the
    `explain` largest are explained: run again with one thing changed.

    Args:
        samples: As the trainer would get them, `logprobs` being the sampler's.
        trainer: The trainer's model, with the weights that sampled.
        tolerance: In nats a token: larger differences are an alarm. None takes the measured arithmetic. The
            named cause does not depend on it.
        others: Items that an image may have been mistaken for, besides the samples' own.
        explain: Maximum number of samples to explain.
        decode: Text of token ids, for the report and for text that was encoded again.
        sources: Images and videos before processing, by identity of their items: whatever messages may hold.
        weights: Weights that may have sampled in place of the trainer's, by name: tensors by parameter.
        alternatives: The same samples as something else builds them, such as another template, by name.
        budget: Changes that are tried for each explained sample at most. A second cause takes 200 more.
        noise: An earlier result of `measure_noise`, by default measured again.
        progress: Called with a text at the start of each stage.
    """
    progress(f"comparing samples: {len(samples)}")
    faults, free = [inspect_sample(sample) for sample in samples], [_unrestricted(one) for one in samples]
    named = [sample.sample_id or f"samples[{index}]" for index, sample in enumerate(samples)]
    left_out = tuple((name, why) for name, (_, why) in zip(named, free, strict=True) if why)
    unread: list[tuple[str, str]] = []
    compared: dict[int, Comparison] = {}
    values = trainer.sampled_of_many([sample for sample, _ in free])
    for index, (sample, _) in enumerate(free):
        try:
            # A sample that failed in a batch is run alone, for the model's own error.
            own = values[index]
            compared[index] = Comparison.of(sample, trainer.sampled_logprobs(sample) if own is None else own)
        except MMRenderError as error:
            unread.append((named[index], str(error)))
    comparisons = [*compared.values()]
    progress("measuring the arithmetic alone")
    dtype, notes = _sampler_dtype(samples)
    noise = noise or measure_noise([one.sample for one in comparisons], trainer, dtype)
    noise = noise.as_sampled(comparisons) if dtype is None else noise
    alarm = noise.alarm if tolerance is None else tolerance
    found = [finding for findings in faults for finding in findings] + _dropout(comparisons, trainer)
    loud = tolerance is None and noise.is_exceeded(comparisons)
    if (
        noise.alarm == noise.tolerance
        or max((one.largest for one in comparisons), default=0) < noise.tolerance
    ):
        notes = ()  # the dtype is known, or does not matter
    pool = [*items_of(samples), *others]
    searches: list[Search] = []
    causes: list[Finding] = []
    for index, one in sorted(compared.items(), key=lambda entry: -entry[1].largest):
        # Without a tolerance a fault may be as small as another dtype makes differences.
        if (
            not one.beyond(noise.tolerance if tolerance is None else tolerance).any()
            or len(causes) == explain
        ):
            break
        # A sample with a fault of its own is explained, unless it is about numbers, which may have a known
        # form.
        if any(finding.cause != "values" for finding in faults[index]):
            continue
        progress(f"looking for the cause in {named[index]}")
        case = Case(
            one,
            trainer.steady(),
            noise.tolerance,
            peers=[other for other in comparisons if other is not one],
            others=pool,
            decode=decode,
            sources={} if sources is None else sources,
            weights=weights or {},
            alternatives={name: built[index] for name, built in (alternatives or {}).items()},
        )
        search = Search(case, noise, budget, causes[-1] if causes else None)
        finding = search.finding()
        if one.largest <= alarm and not loud and not _is_fault(finding):
            break  # samples come by size of their differences, and those left are as small
        if finding.cause != UNKNOWN:
            found = [one for one in found if one not in faults[index]]
        searches.append(search)
        causes.append(finding)
    everywhere = [one.beyond(noise.tolerance).any() for one in comparisons if len(one.positions)]
    if len(everywhere) > 1 and all(everywhere):
        found, causes = _over_all(searches, found, causes)
    return AuditReport(tuple(comparisons), (*found, *causes), tuple(unread), alarm, left_out, notes, decode)


def _sampler_dtype(samples: Sequence[TrainingSample]) -> tuple[str | None, tuple[str, ...]]:
    """Return the dtype in which samples say that they were sampled, and a note if one does not."""
    facts = [one.extra.get(SAMPLER, {}) for one in samples]
    dtypes = {str(known.get("dtype", "")).removeprefix("torch.") for known in facts}
    if len(dtypes) == 1 and (dtype := dtypes.pop()) in ("float32", "bfloat16", "float16"):
        return dtype, ()
    note = (
        "the sampler's dtype is not recorded, so differences as large as bfloat16 makes are no alarm: record "
        f"step.extra[{SAMPLER!r}] = {{'dtype': ...}}"
    )
    return None, (note,)


def _dropout(comparisons: Sequence[Comparison], trainer: TrainerModel) -> list[Finding]:
    """Report a model in training mode whose forwards differ among themselves."""
    if not trainer.model.training or not comparisons:
        return []
    sample = comparisons[0].sample
    first, second = trainer.sampled_logprobs(sample), trainer.sampled_logprobs(sample)
    if np.array_equal(first, second):
        return []
    evidence = f"two forwards of one sample differ by {np.abs(first - second).max():.3g} nats"
    statement = "the trainer's model is in training mode, and its dropout is on"
    return [replace(finding_of("dropout", statement, evidence, sample), shared=True)]


def _over_all(
    searches: Sequence[Search], found: list[Finding], causes: list[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Return both kinds of findings, of samples that all differ: the cause or at least the stage is one."""
    unknown = [place for place, finding in enumerate(causes) if finding.cause == UNKNOWN]
    if len(unknown) == len(causes) > 1:
        held = [{(fit.trial.row, fit.trial.statement): fit for fit in one.fits} for one in searches]
        digits = {key: sum(fits[key].digits for fits in held) for key in set.intersection(*map(set, held))}
        count = sum(search.count for search in searches)
        best = max(digits, key=lambda key: (digits[key], key), default=None)
        if best is not None and digits[best] - np.log10(max(count, 1)) > _EVIDENT:
            causes = [search.named([fits[best]]) for search, fits in zip(searches, held, strict=True)]
            unknown = []
    if unknown and len(causes) > 1:
        known = [finding.stage for finding in causes if finding.cause != UNKNOWN]
        found_in = [{place.stage: place.evidence for place in search.places} for search in searches]

        def evidence(stage: Stage) -> float:
            return sum(own.get(stage, min(own.values(), default=0.0)) for own in found_in)

        stage = known[0] if known else max(STAGES, key=evidence)
        for place in unknown:
            ordered = sorted(searches[place].places, key=lambda one: one.stage != stage)
            causes[place] = searches[place].unknown(ordered) if ordered else causes[place]
    elif len({finding.statement for finding in causes}) > 1:
        # Several changes explain some samples each: the change that explains all is the cause.
        for finding in dict.fromkeys(causes):
            same = [stated for search in searches if (stated := search.stated(finding)) is not None]
            if len(same) == len(searches):
                causes = same
                break
    shared = len({(finding.stage, finding.cause) for finding in causes}) == 1
    if shared and all(one.cause != UNKNOWN for one in causes):
        found = [one for one in found if one.cause != "values"]  # the numbers have this form everywhere
    return found, [replace(finding, shared=shared) for finding in causes]


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
    """Whether a difference as small as between dtypes has a cause that does without another dtype."""
    named = {*re.split(" or | and ", finding.cause)} - {UNKNOWN}
    return bool(named) and not named & {"dtype", "logits dtype"}


def items_of(samples: Sequence[TrainingSample]) -> list[MediaItem]:
    """Return the distinct items of samples."""
    held = (item for one in samples for items in one.multi_modal_data.mm_items.values() for item in items)
    return [*{item.identity: item for item in held}.values()]


class Watch:
    """Audits some samples of each step, and explains them only if they differ.

    The time of all calls is at most `share` of all other time since the watch was made, explanations left
    out. The arithmetic is measured once, at the first call, and later calls wait until that is paid back.

    Args:
        trainer: The model that is trained.
        share: Maximum share of the time.
        clock: Returns seconds.
        **options: As for `audit`.
    """

    def __init__(
        self,
        trainer: TrainerModel,
        *,
        share: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self._trainer, self._share, self._clock, self._options = trainer, share, clock, options
        self._noise: Noise | None = None
        self._began = clock()
        self._spent = self._rate = 0.0
        self._next = 0

    def __call__(self, samples: Sequence[TrainingSample]) -> AuditReport | None:
        """Audit as many samples of a step as the time allows; None if it allows none.

        The weights must be the weights that sampled, so this comes before the update.
        """
        began = self._clock()
        # Half of it is kept for a call that takes longer than the last one.
        left = (self._share * (began - self._began - self._spent) - self._spent) / 2
        if not samples or (self._noise is not None and left < self._rate * min(map(len, samples))):
            return None
        chosen: list[TrainingSample] = []
        for number in range(len(samples)):
            sample = samples[(self._next + number) % len(samples)]
            if chosen and self._rate * sum(map(len, [*chosen, sample])) > left:
                break
            chosen.append(sample)
            if self._noise is None:
                break
        self._next += len(chosen)
        noise = self._noise or measure_noise(chosen, self._trainer)
        report = audit(chosen, self._trainer, noise=noise, **{**self._options, "explain": 0})
        seconds = self._clock() - began
        self._spent += seconds
        self._rate = seconds / sum(map(len, chosen)) if self._noise is not None else self._rate
        self._noise = noise
        if report.ok:
            return report
        return audit(chosen, self._trainer, noise=noise, **self._options)
