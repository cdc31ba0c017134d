"""An audit: run the trainer's samples through its model, and compare with the sampler's numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mmrender.audit.case import Case, Weights
from mmrender.audit.computed import other_attention, whole_in
from mmrender.audit.inspect import inspect_sample
from mmrender.audit.report import STAGES, UNKNOWN, AuditReport, Comparison, Decode, Finding
from mmrender.audit.rows import finding_of
from mmrender.audit.search import DEFAULT_BUDGET, Noise, Search
from mmrender.audit.trainer import TrainerModel
from mmrender.errors import MMRenderError
from mmrender.sidecar import MediaItem
from mmrender.trajectory.sample import RESTRICTED, SAMPLER, TrainingSample

_EXPLAINED: Final = 3
_FLOOR: Final = 1e-3
"""Maximum difference of float32 kernels of different libraries, in nats a token."""
_MARGIN: Final = 4.0
"""Tolerance as a multiple of the measured noise."""
_WIDTH: Final = 2.0
"""Maximum root mean square over all tokens, as a multiple of the difference between dtypes."""
_TELLING: Final = 16
"""Tokens that agree more closely than another dtype allows, before it is ruled out."""
_MEASURED: Final = 4
_MEASURED_TOKENS: Final = 256


def measure_noise(
    samples: Sequence[TrainingSample], trainer: TrainerModel, dtype: str | None = None
) -> Noise:
    """Measure differences by arithmetic alone, on some of the samples.

    Each runs alone, and again in a batch with padding and another attention kernel. It runs once more in the
    sampler's dtype, or in bfloat16 if that is unknown and the model computes in float32.

    Args:
        samples: Some of these are run.
        trainer: The model.
        dtype: Name of the sampler's dtype, if it is known.
    """
    import torch

    other = getattr(torch, dtype) if dtype else torch.bfloat16
    differs = other != trainer.model.dtype and (dtype is not None or trainer.model.dtype == torch.float32)
    exact, low = np.zeros(0), np.zeros(0)
    near: list[bool] = []
    chosen = sorted(samples, key=len)[: 2 * _MEASURED : 2]
    beside = max(chosen, key=len, default=None)
    for sample in chosen:
        mask = sample.mm_token_type_ids == 0
        mask[0] = False
        mask[np.flatnonzero(mask)[:-_MEASURED_TOKENS]] = False
        whole = replace(sample, loss_mask=mask, logprobs=np.zeros(len(sample), np.float32))
        alone = trainer.sampled_logprobs(whole)
        again = trainer.sampled_logprobs(whole, model=other_attention, beside=beside)
        exact = np.append(exact, np.abs(again - alone))
        if differs:
            mixed = np.abs(trainer.sampled_logprobs(whole, model=whole_in(other)) - alone)
            low = np.append(low, mixed)
            near += (mixed <= _FLOOR)[sample.loss_mask[mask]].tolist()
    largest = float(exact.max(initial=0.0))
    mixed_largest = max(float(low.max(initial=0.0)), largest)
    tolerance = max(_FLOOR, _MARGIN * largest)
    rms = [float(np.sqrt(np.mean(np.square(of)))) if len(of) else 0.0 for of in (exact, low)]
    share = float(np.mean(near)) if near else 1.0
    alarm = max(tolerance, _MARGIN * mixed_largest)
    return Noise(largest, mixed_largest, tolerance, alarm, share, len(near), max(rms))


def as_sampled(noise: Noise, comparisons: Sequence[Comparison]) -> Noise:
    """Drop the allowance for another dtype if tokens show that the sampler had the same.

    More of them agree closely than another dtype leaves alone, beyond chance.
    """
    agreeing = [one.difference[~one.beyond(noise.tolerance)] for one in comparisons]
    count, total = sum(map(len, agreeing)), sum(len(one.positions) for one in comparisons)
    share = noise.near
    # The share was measured on some tokens, and has an error of its own.
    error = share * (1 - share) * (total + total**2 / max(noise.tokens, 1))
    if not noise.tokens or count - total * share < max(_TELLING, 4 * error**0.5):
        return noise
    return replace(noise, alarm=noise.tolerance, mixed=noise.exact, rms=noise.exact)


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
        sources: Images before processing, by identity of their items: whatever a message may hold.
        weights: Weights that may have sampled in place of the trainer's, by name: tensors by parameter.
        alternatives: The same samples as something else builds them, such as another template, by name.
        budget: Changes that are tried for each sample that is explained, at most.
        noise: An earlier result of `measure_noise`, by default measured again.
        progress: Called with a text at the start of each stage.
    """
    progress(f"comparing samples: {len(samples)}")
    faults = [inspect_sample(sample) for sample in samples]
    compared_of = [_unrestricted(sample) for sample in samples]
    named = [sample.sample_id or f"samples[{index}]" for index, sample in enumerate(samples)]
    left_out = tuple((name, why) for name, (_, why) in zip(named, compared_of, strict=True) if why)
    unread: list[tuple[str, str]] = []
    comparisons: list[Comparison] = []
    given: list[int] = []
    values = trainer.sampled_of_many([sample for sample, _ in compared_of])
    for index, (sample, _) in enumerate(compared_of):
        try:
            # A sample that failed in a batch is run alone, for the model's own error.
            own = values[index]
            compared = Comparison.of_sampled(sample, trainer.sampled_logprobs(sample) if own is None else own)
        except MMRenderError as error:
            unread.append((named[index], str(error)))
            continue
        given.append(index)
        comparisons.append(compared)
    progress("measuring the arithmetic alone")
    dtype, notes = _sampler_dtype(samples)
    noise = noise or measure_noise([one.sample for one in comparisons], trainer, dtype)
    noise = as_sampled(noise, comparisons) if dtype is None else noise
    alarm = noise.alarm if tolerance is None else tolerance
    found = [finding for findings in faults for finding in findings] + _dropout(comparisons, trainer)
    loud = tolerance is None and _is_loud(comparisons, noise)
    if (
        noise.alarm == noise.tolerance
        or max((one.largest for one in comparisons), default=0) < noise.tolerance
    ):
        notes = ()  # the dtype is known, or does not matter
    pool = [*items_of(samples), *others]
    searches: list[Search] = []
    causes: list[Finding] = []
    for place in sorted(range(len(comparisons)), key=lambda place: -comparisons[place].largest):
        compared, index = comparisons[place], given[place]
        # Without a tolerance a fault may be as small as another dtype makes differences.
        departing = compared.first_departure(noise.tolerance if tolerance is None else tolerance)
        if departing is None or len(causes) == explain:
            break
        departure = compared.first_departure(noise.tolerance)
        # A sample with a fault of its own is explained, unless it is about numbers, which may have a known
        # form.
        if any(finding.cause != "values" for finding in faults[index]):
            continue
        progress(f"looking for the cause in {named[index]}")
        case = Case(
            compared,
            departing if departure is None else departure,
            trainer.steady(),
            noise.tolerance,
            peers=[one for other, one in enumerate(comparisons) if other != place],
            others=pool,
            decode=decode,
            sources={} if sources is None else sources,
            weights=weights or {},
            alternatives={name: built[index] for name, built in (alternatives or {}).items()},
        )
        search = Search(case, noise, budget, causes[-1] if causes else None)
        finding = search.finding()
        if compared.largest <= alarm and not loud and not _is_fault(finding):
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


def _is_loud(comparisons: Sequence[Comparison], noise: Noise) -> bool:
    """Whether the differences of all tokens together are larger than the arithmetic makes them."""
    every = np.concatenate([np.zeros(0), *(one.difference for one in comparisons)])
    if len(every) < _TELLING:
        return False
    return not float(np.sqrt(np.mean(np.square(every)))) <= max(_FLOOR, _WIDTH * noise.rms)


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
        held = [{(fit.row.name, fit.trial.statement): fit for fit in one.fits} for one in searches]
        digits = {key: sum(fits[key].digits for fits in held) for key in set.intersection(*map(set, held))}
        count = sum(search.count for search in searches)
        best = max(digits, key=lambda key: (digits[key], key), default=None)
        if best is not None and digits[best] - np.log10(max(count, 1)) > _MARGIN:
            causes = [search.named([fits[best]]) for search, fits in zip(searches, held, strict=True)]
            unknown = []
    if unknown and len(causes) > 1:
        known = [finding.stage for finding in causes if finding.cause != UNKNOWN]
        evidence = {stage: sum(_evidence(search, stage) for search in searches) for stage in STAGES}
        stage = known[0] if known else max(STAGES, key=lambda stage: evidence[stage])
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


def _evidence(search: Search, stage: str) -> float:
    worst = min((place.evidence for place in search.places), default=0.0)
    return next((place.evidence for place in search.places if place.stage == stage), worst)


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
