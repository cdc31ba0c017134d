"""Causes of a difference: variations are tried, and one that alone explains the numbers is named."""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from mmrender.audit.computed import COMPUTED_VARIATIONS
from mmrender.audit.images import IMAGE_VARIATIONS
from mmrender.audit.recorded import RECORDED_VARIATIONS, Recorded, View, views
from mmrender.audit.report import Cause, Comparison, Finding, described
from mmrender.audit.tokens import TOKEN_VARIATIONS
from mmrender.audit.trial import Case, Trial, Variation
from mmrender.audit.videos import VIDEO_VARIATIONS
from mmrender.errors import MMRenderError

GROUPS: Final[tuple[tuple[Variation, ...], ...]] = (
    TOKEN_VARIATIONS,
    (*IMAGE_VARIATIONS, *VIDEO_VARIATIONS),
    COMPUTED_VARIATIONS,
)
"""Variations to try together. The next group is tried if the fits so far may be chance."""

DEFAULT_BUDGET: Final = 1500
"""Forward passes for one sample at most."""
_DIGITS: Final = 5.0
"""Decimal digits by which numbers must agree before they are taken for more than chance, and for each number
that was fitted to them."""
_CERTAIN_DIGITS: Final = 12.0
"""From here on no other kind of change can fit by chance, among the thousand or so that are tried."""
_CHANCE: Final = 1.3
"""Evidence, in digits, required after correcting for the number of trials (5 %)."""
_AS_WELL: Final = 3.0
"""Maximum remainder of a rival, as a multiple of the best variation's remainder."""
_AT_ONCE: Final = 16
_AGREEING: Final = 8
_FAINT: Final = 0.01
"""`_AGREEING` tokens that agree to this share of the largest difference rule out another prompt."""
_LOOSE: Final = 1.5
"""Maximum remainder as a multiple of the difference between dtypes, if the sampler may have had another."""
_SHARE: Final = 0.25
"""Share of the largest difference up to which differences between dtypes are ignored."""
_LIKENESS: Final = 1 / 30
"""Maximum share of the differences that a cause may leave. A change that only resembles it leaves more."""
_LOOSE_LIKENESS: Final = 1 / 8
"""The same if the sampler may have had another dtype, whose arithmetic the cause itself leaves."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Measured differences of a log-probability by arithmetic alone, in nats.

    Attributes:
        exact: Largest difference between two forwards that differ in batch, padding and attention only.
        mixed: Largest difference between two forwards that differ in dtype too.
        tolerance: Maximum difference under a variation that explains a sample, if the arithmetic is the same.
        alarm: Maximum difference by another dtype.
        near: Share of tokens that another dtype does not change.
    """

    exact: float
    mixed: float
    tolerance: float
    alarm: float
    near: float = 1.0


class _Fit(NamedTuple):
    variation: Variation
    trial: Trial
    largest: float
    rms: float
    tokens: int


def find_cause(case: Case, noise: Noise, *, budget: int = DEFAULT_BUDGET) -> Finding:
    """Explain the differences of one sample.

    Readings of the recorded numbers come first. Then the model runs once for each change.
    A change explains the sample if it leaves all differences as small as arithmetic makes them, and a small
    share of their root mean square. It is named if chance is ruled out, and no other kind of change explains
    the sample as well.

    Args:
        case: The sample, and all data that may help.
        noise: Differences by arithmetic alone.
        budget: Forward passes at most.
    """
    if not case.compared.beyond(case.tolerance).any():
        return _unexplained(case, noise, [], 0)
    shown = _missing(case) or _appended(case) or _by_version(case) or _recorded(case, noise)
    if shown is None and _may_be_loose(case, noise):
        # Numbers of a sampler with another dtype are only as near as its arithmetic allows.
        shown = _recorded(replace(case, tolerance=_LOOSE * noise.mixed), noise)
    return shown or _tried(case, noise, budget)


def _may_be_loose(case: Case, noise: Noise) -> bool:
    """Whether the sampler may have had another dtype, and more differs than that makes."""
    return noise.mixed > noise.tolerance and noise.alarm <= _SHARE * case.compared.largest


def _missing(case: Case) -> Finding | None:
    """Report missing (NaN) log-probabilities, if all other tokens agree."""
    absent = ~np.isfinite(case.compared.sampler)
    if not absent.any() or case.compared.beyond(case.tolerance)[~absent].any():
        return None
    statement = (
        f"{case.compared.sampler[absent][0]:g} was recorded in place of log-probabilities, which are missing"
    )
    return _found(case, "logprobs", "missing", statement, f"{int(absent.sum())} of {len(absent)} tokens")


def _appended(case: Case) -> Finding | None:
    """Report last tokens of completions without a log-probability, if all other tokens agree."""
    beyond = np.flatnonzero(case.compared.beyond(case.tolerance))
    ends = {stop - 1 for _, stop in case.runs}
    places = case.compared.positions[beyond].tolist()
    if (
        case.compared.sampler[beyond].any()
        or not ends.issuperset(places)
        or len(case.compared.positions) == len(beyond)
    ):
        return None
    statement = "the last token of a completion has no log-probability: it was added after sampling"
    evidence = f"0 was recorded for {len(places)} of {len(ends)} last tokens, and all other tokens agree"
    return _found(case, "ids", "final token", statement, evidence)


def _by_version(case: Case) -> Finding | None:
    """Report one version of the weights, if its tokens alone differ."""
    beyond = case.compared.beyond(case.tolerance)
    versions = {span.version for span in case.sample.weight_versions}
    for version in sorted(versions) if len(versions) > 1 else ():
        of_it = np.zeros(len(beyond), np.bool_)
        for name, start, stop in case.sample.weight_versions:
            of_it |= (case.compared.positions >= start) & (case.compared.positions < stop) & (name == version)
        if (
            of_it.sum() >= 4
            and (~of_it).sum() >= 4
            and not beyond[~of_it].any()
            and beyond[of_it].mean() > 0.5
        ):
            text = (
                f"the tokens that the weights {version!r} sampled differ, and tokens of other weights agree"
            )
            evidence = f"{beyond.sum()} of {of_it.sum()} tokens differ, none of the {(~of_it).sum()}"
            return _found(case, "weights", "weights", text, evidence)
    return None


def _found(case: Case, cause: Cause, variation: str, statement: str, evidence: str) -> Finding:
    """Return a finding about the first token that differs."""
    return Finding(
        cause, statement, evidence, case.sample.sample_id, token=case.position, variation=variation
    )


def _recorded(case: Case, noise: Noise) -> Finding | None:
    """Look for numbers that follow from the trainer's distribution without another forward."""
    held = views(case)
    for group in RECORDED_VARIATIONS:
        found: dict[str, dict[int, tuple[float, Recorded]]] = {}
        for view in held:
            for reading in group:
                for recorded in reading(view):
                    left = _left_over(view, recorded, noise)
                    known = found.setdefault(recorded.name, {})
                    if left is not None and (view.number not in known or left < known[view.number][0]):
                        known[view.number] = left, recorded
        fits = {name: known for name, known in found.items() if len(known) == len(held) > 0}
        if fits:
            left_over = {name: max(left for left, _ in known.values()) for name, known in fits.items()}
            as_well = max(_AS_WELL * min(left_over.values()), 2 * noise.exact)
            return _recorded_finding(case, {name: fits[name] for name in fits if left_over[name] <= as_well})
    return None


def _left_over(view: View, recorded: Recorded, noise: Noise) -> float | None:
    """Return the largest difference that a reading leaves; None if it does not fit, or fits by chance."""
    covered = ~np.isnan(recorded.expected)
    support = covered & view.departing
    with np.errstate(invalid="ignore"):
        left = np.abs(recorded.expected - view.sampler)
        before = np.abs(view.trainer - view.sampler)[support]
    if (~(left <= view.case.tolerance) & covered).any() or not 0 < support.sum() >= (~covered).sum():
        return None
    before_rms, left_rms = (float(np.sqrt(np.mean(np.square(of)))) for of in (before, left[support]))
    loose = view.case.tolerance > noise.tolerance
    if _is_likeness(before_rms, left_rms, noise, loose=loose) and np.isfinite(before_rms):
        return None
    digits = _digits(view.case, int(support.sum())) - _DIGITS * recorded.fitted
    return float(left[covered].max()) if digits > _DIGITS else None


def _is_likeness(before: float, after: float, noise: Noise, *, loose: bool) -> bool:
    """Whether a change leaves too much of the differences, both root mean squares, to be the cause.

    `loose`: the sampler may have had another dtype, whose arithmetic the cause itself leaves.
    """
    return after > max(2 * noise.exact, (_LOOSE_LIKENESS if loose else _LIKENESS) * before)


def _recorded_finding(case: Case, fits: dict[str, dict[int, tuple[float, Recorded]]]) -> Finding:
    statements, causes = [], set()
    for known in fits.values():
        texts: dict[str, list[int]] = {}
        for number, (_, recorded) in known.items():
            texts.setdefault(recorded.statement, []).append(number)
            causes.add(recorded.cause)
        parts = [text.format(_completions(case, numbers)) for text, numbers in texts.items()]
        statements.append("; ".join(parts))
    cause: Cause = next(iter(causes)) if len(causes) == 1 else "unknown"
    evidence = f"largest difference {case.compared.largest:.4g} (read off the trainer's own distribution)"
    return _found(case, cause, " or ".join(fits), "; or ".join(statements), evidence)


def _completions(case: Case, numbers: list[int]) -> str:
    if len(numbers) == len(case.runs):
        return "all completions" if len(numbers) > 1 else "the completion"
    return "completion " + ", ".join(map(str, numbers))


def _tried(case: Case, noise: Noise, budget: int) -> Finding:
    fits: list[_Fit] = []
    tried: dict[str, None] = {}
    count = 0
    departing = int(case.compared.beyond(case.tolerance).sum())
    certain = _digits(case, departing) > _CERTAIN_DIGITS
    # For differences as small as between dtypes, computations are tried first.
    for group in GROUPS if case.compared.largest > noise.alarm else GROUPS[::-1]:
        trials = (
            (variation, trial)
            for variation in group
            for trial in variation.trials(case)
            if _may_explain(case, trial)
        )
        while chosen := list(islice(trials, min(_AT_ONCE, budget - count))):
            count += len(chosen)
            tried |= dict.fromkeys(variation.name for variation, _ in chosen)
            fits += _fitting(case, noise, chosen)
            if certain and any(fit.largest <= case.tolerance for fit in fits):
                break
        if certain and any(fit.largest <= case.tolerance for fit in fits):
            break
    fits = [fit for fit in fits if _is_more_than_chance(case, fit, departing, count)]
    fits = [fit for fit in fits if fit.largest <= case.tolerance] or fits
    if not fits:
        return _unexplained(case, noise, list(tried), count)
    as_well = max(_AS_WELL * min(fit.rms for fit in fits), 2 * noise.exact)
    # A change that leaves tokens unexplained does not rival one that explains them too.
    most = max(fit.tokens for fit in fits if fit.rms <= as_well)
    rivals: dict[str, _Fit] = {}
    for fit in sorted(fits, key=lambda fit: fit.rms):
        if fit.rms <= as_well and fit.tokens == most:
            rivals.setdefault(fit.variation.name, fit)
    best = next(iter(rivals.values()))
    causes = {fit.variation.cause for fit in rivals.values()}
    evidence = (
        f"largest difference {case.compared.largest:.4g} without that, {best.largest:.4g} with it; "
        f"{count} changes tried"
    )
    return Finding(
        best.variation.cause if len(causes) == 1 else "unknown",
        "; or ".join(fit.trial.statement for fit in rivals.values()),
        evidence,
        case.sample.sample_id,
        best.trial.image,
        case.position if best.trial.token is None else best.trial.token,
        " or ".join(rivals),
    )


def _is_more_than_chance(case: Case, fit: _Fit, departing: int, count: int) -> bool:
    """Whether `count` changes could not explain `departing` tokens by chance."""
    if fit.variation.name == "final token":
        return fit.largest <= case.tolerance  # few candidates, each of which was looked up
    # Beyond these digits, one number may agree by chance if both sides computed it the same way.
    departing = min(departing, fit.tokens)
    each = float(np.log10(max(case.compared.rms / max(fit.rms, case.tolerance / 10), 1.0)))
    return each * (departing - fit.trial.fitted) - float(np.log10(max(count, 1))) > _CHANCE


def _may_explain(case: Case, trial: Trial) -> bool:
    """Whether a change begins early enough to explain the first token that differs.

    A change of tokens or images is ruled out if many tokens agree after it.
    """
    if trial.since > case.position:
        return False
    agreeing = case.compared.before(case.position).after(trial.since).telling()
    changes_sample = trial.sample is not None
    return (
        not changes_sample
        or len(agreeing.positions) < _AGREEING
        or agreeing.rms > _FAINT * case.compared.largest
    )


def _digits(case: Case, departing: int) -> float:
    """Return the digits of the sampler's numbers that chance would have to explain."""
    spread = max(float(np.std(case.compared.trainer)), 0.25)
    return departing * float(np.log10(max(1.25, spread / max(case.tolerance, 1e-12))))


def _fitting(case: Case, noise: Noise, chosen: list[tuple[Variation, Trial]]) -> list[_Fit]:
    """Run trials, and return those that fit. Trials that change the sample alone share batches."""
    plain = [trial.sample for _, trial in chosen if trial.sample is not None]
    found = iter(case.trainer.sampled_of_many(plain))
    fits = []
    for variation, trial in chosen:
        if trial.sample is not None:
            values = next(found)
        else:
            try:
                values = case.trainer.sampled_logprobs(case.sample, inputs=trial.inputs, model=trial.model)
            except MMRenderError:
                values = None  # the sampler cannot have seen inputs that the model refuses
        if values is None:
            continue
        varied = Comparison.of_sampled(trial.sample or case.sample, values)
        varied = varied if trial.until is None else varied.before(trial.until)
        # The arithmetic of another dtype may remain. A change that explains it too is preferred.
        limits = {False: case.tolerance, True: _LOOSE * noise.mixed}
        explained = [
            loose
            for loose in ((False, True) if _may_be_loose(case, noise) else (False,))
            if varied.largest <= limits[loose]
            and not _is_likeness(case.compared.rms, varied.rms, noise, loose=loose)
        ]
        if len(varied.positions) and explained:
            fits.append(_Fit(variation, trial, varied.largest, varied.rms, len(varied.positions)))
    return fits


def _unexplained(case: Case, noise: Noise, tried: list[str], count: int) -> Finding:
    """Report the place of the difference if no variation fits."""
    compared, departure = case.compared, case.departure
    statement = (
        f"no change that was tried explains the difference, which begins at token {case.position}: "
        "other weights or settings of the sampler are left"
    )
    evidence, image = f"largest difference {compared.largest:.4g}, arithmetic {case.tolerance:.3g}", None
    if departure > 0 and (suspects := compared.suspects(departure)):
        names = ", ".join(map(described, suspects))
        image = suspects[0].position
        statement = f"tokens agree up to {names} and part after it, in a way that no change tried explains"
        evidence += f", before it at most {compared.largest_of(slice(0, departure)):.2g}"
    if compared.largest <= noise.mixed:
        evidence += f", another dtype makes differences up to {noise.mixed:.2g}"
    evidence += f"; {count} changes tried of: {', '.join(tried)}" if tried else ""
    return Finding("unknown", statement, evidence, compared.sample.sample_id, image, case.position)
