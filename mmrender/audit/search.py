"""The cause within a stage: rows are tried there, and the row that alone explains the numbers is named.

One rule names a cause, whatever the caller's tolerance is. The row must leave differences as small as the
measured arithmetic makes them, and a small share of the differences before. Its digits, less a digit for
each number that was fitted and less the digits of the number of trials, must rule out chance. All rows that
leave as little are named together.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np

from mmrender.audit.case import Array, Case, Recorded, Trial
from mmrender.audit.recorded import View, views
from mmrender.audit.report import STAGES, UNKNOWN, Comparison, Finding, Stage, described
from mmrender.audit.rows import ROWS, Row, finding_of
from mmrender.audit.stage import MAX_TOKENS, Effect, Fault, Place, weigh
from mmrender.caching import cached_property

DEFAULT_BUDGET: Final = 1500
"""Changes that are tried for one sample at most."""
_CERTAIN: Final = 12.0
"""Digits beyond which no other row can fit by chance, among the thousand or so trials."""
_CHANCE: Final = 1.3
"""Digits left after the number of trials is taken off (5 %)."""
_EXACT: Final = 3000.0
"""Minimum share, inverse, of the differences that such a row explains."""
_AS_WELL: Final = 3.0
"""Maximum remainder of a rival, as a multiple of the best row's remainder."""
_LIKENESS: Final = 1 / 30
"""Maximum share of the differences that a cause may leave. A change that only resembles it leaves more."""
_FITTED_LIKENESS: Final = 1 / 300
"""The same for a number of the model that was searched for: the best of many likenesses."""
_LOOSE_LIKENESS: Final = 1 / 8
"""The same if the sampler may have had another dtype, whose arithmetic the cause itself leaves."""
_LOOSE: Final = 1.5
"""Maximum remainder as a multiple of the difference between dtypes, if the sampler may have had another."""
_SHARE: Final = 0.25
"""Share of the largest difference up to which differences between dtypes are ignored."""
_COMMONEST: Final = "dtype"
"""The row that is tried before any stage is weighed: few forwards, and the cause of most differences."""
_AT_ONCE: Final = 32
_HOPELESS: Final = 1.5
"""Nats a token by which a stage is less likely than another before its rows are left out."""
_AGREEING: Final = 8
_FAINT: Final = 0.01
"""`_AGREEING` tokens that agree to this share of the largest difference rule out a change before them."""
_HALF: Final = 0.95
"""Maximum share of the differences that the first of two causes leaves."""
_NAMED: Final = {row.name: row for row in ROWS}
_NOUNS: Final[dict[Stage, str]] = {
    "template": "prompt",
    "tokens": "sampled tokens",
    "pixels": "pixels",
    "positions": "positions",
    "model": "model",
    "sampling": "distribution",
    "recording": "recorded numbers",
}
_SURVEYED: Final[dict[Stage, int]] = {"template": 12, "tokens": 12, "pixels": 6, "positions": 24, "model": 6}
"""Changes of each row that run before any other, and decide the order of stages."""
_NEARER: Final = 0.6
"""Maximum share of the differences of the first completion under a change that runs on the whole sample."""
_READ: Final = 8
"""Changes that are tried as the first of two causes, if the second needs no forward."""
_FIRSTS: Final = 3
"""The same, if it needs forwards."""
_SECONDS: Final = 2
"""Rows that are tried as the second of two causes."""
_FACTS: Final = {
    "template": "record the prompt ids that the server reports (return_token_ids), and compare them",
    "tokens": "record the sampled ids as the server reports them (return_token_ids)",
    "pixels": "pass `sources=`, the images before processing, or record the server's own tensors",
    "positions": "compare the server's rope settings with config.json",
    "model": "record the sampler's dtype and weight version (`step.extra['sampler']`), pass `weights=`, "
    "compare servers with `probe_weights`",
    "sampling": "record the sampling parameters and the server's logprobs mode (`step.extra['sampler']`)",
    "recording": "record log-probabilities as the server reports them",
}
"""The fact to record when a cause is not found, by stage."""


@dataclass(frozen=True)
class Noise:
    """Measured differences of a log-probability by arithmetic alone, in nats.

    Attributes:
        exact: Largest difference between two forwards that differ in batch, padding and attention only.
        mixed: Largest difference between two forwards that differ in dtype too.
        tolerance: Maximum difference under a row that explains a sample, if the arithmetic is the same.
        alarm: Maximum difference by another dtype.
        near: Share of tokens that another dtype does not change.
        tokens: Tokens of which `near` is the share.
        rms: Root mean square of the differences between dtypes.
    """

    exact: float
    mixed: float
    tolerance: float
    alarm: float
    near: float = 1.0
    tokens: int = 0
    rms: float = 0.0


class Fit(NamedTuple):
    """A row that leaves little of the differences.

    Attributes:
        row: The row.
        trial: Its trial.
        largest: Largest difference that is left, in nats.
        rms: Root mean square of the differences that are left.
        tokens: Tokens that it explains.
        digits: Digits that chance would have to explain, the fitted numbers taken off.
    """

    row: Row
    trial: Trial
    largest: float
    rms: float
    tokens: int
    digits: float


class Search:
    """The search for the cause of one sample's differences.

    Args:
        case: The sample, and all data that may help.
        noise: Differences by arithmetic alone.
        budget: Changes that are tried at most.
        before: The finding about another sample, whose row is tried first, or whose stage if it has none.
    """

    def __init__(
        self, case: Case, noise: Noise, budget: int = DEFAULT_BUDGET, before: Finding | None = None
    ) -> None:
        self.case, self.noise, self.count = case, noise, 0
        self._left, self._before, self._tries = budget, before, Counter[str]()
        self.fits: list[Fit] = []
        self.places: list[Place] = []
        self._effects: list[Effect] = []
        self._faults = {row.name: self._of_row(case, row) for row in ROWS}

    def finding(self) -> Finding:
        """Return the stage, and the cause if a row explains the sample."""
        case = self.case
        if not case.compared.beyond(case.tolerance).any():
            return self.unknown([Place(0.0, Fault("model", "the arithmetic of the model"))])
        shown = _shown(case) or _by_version(case)
        if shown is not None:
            return shown
        self.fits = self._recorded(case)
        if self.fits:
            return self.named(self.fits)
        first = {_COMMONEST, "" if self._before is None else self._before.cause}
        self.fits = self._tried(case, [row for row in ROWS if row.name in first])
        if not any(map(self._is_certain, self.fits)):
            for row in ROWS:
                some = [*islice(self._faults[row.name], _SURVEYED.get(row.stage, 0))]
                self.fits += self._run(case, some, all_whole=True)
            self.fits += self._by_stage()
        likely = [fit for fit in self.fits if self._beyond_chance(fit)]
        if likely:
            return self.named(likely)
        self.places = self._weighed()
        return self._two() or self.unknown(self.places)

    def _by_stage(self) -> list[Fit]:
        """Return the rows that fit, the likeliest stage first, and all others that are not hopeless."""
        fits, before, places = list[Fit](), self._before, self._weighed()
        least = places[0].evidence - _HOPELESS * max(len(self._chosen), 1)
        evidence = {place.stage: place.evidence for place in places if place.evidence >= least}
        tried = {row.stage for row in ROWS if row.trials is not None}
        stages = sorted(tried & {*evidence}, key=lambda stage: -evidence[stage])
        # A prompt may differ at many places, and most changes are at one. It is tried second at last.
        if "template" in stages[2:]:
            stages.insert(1, stages.pop(stages.index("template")))
        # If the cause of another sample was not found, its stage and the likeliest are tried alone.
        if before is not None and before.cause == UNKNOWN:
            stages = list(dict.fromkeys([before.stage, *stages]))[:2]
        for stage in stages:
            rows = [row for row in ROWS if row.stage == stage and row.name != _COMMONEST]
            fits += self._tried(self.case, rows)
            if any(map(self._is_certain, fits)):
                break
        return fits

    @cached_property
    def _chosen(self) -> Array:
        """Indices of the tokens whose differences are weighed."""
        compared = self.case.compared
        # A token of probability 1, such as the only one that a grammar allows, agrees whatever the model saw.
        certain = (compared.sampler == 0) & ~compared.beyond(self.case.tolerance)
        usable = np.flatnonzero(np.isfinite(compared.difference) & ~certain)
        chosen: Array = usable[
            np.unique(np.linspace(0, max(len(usable) - 1, 0), MAX_TOKENS).round().astype(int))[: len(usable)]
        ]
        return chosen

    def _run(self, case: Case, faults: Sequence[Fault], *, all_whole: bool = False) -> list[Fit]:
        """Run faults, keep the differences that each makes, and return the rows that fit.

        Those that explain little of the first completion that differs do not run further, unless `all_whole`.
        """
        faults = faults[: max(self._left, 0)]
        self.count += len(faults)
        self._left -= len(faults)
        self._tries.update(fault.row for fault in faults)
        faults, fits = faults if all_whole else self._promising(case, faults), list[Fit]()
        for fault, varied in zip(faults, case.run([one.trial for one in faults]), strict=True):
            if varied is None or not len(varied.positions):
                continue
            if case is self.case:
                self._keep(fault, varied)
            fit = self._fit(case, _NAMED[fault.row], fault.trial, varied)
            fits += [] if fit is None else [fit]
        return fits

    def _keep(self, fault: Fault, varied: Comparison) -> None:
        """Keep the differences that a fault makes. Tokens before those that it must explain do not change."""
        trainer = self.case.compared.trainer
        if fault.trial.until is None and len(self._chosen) and len(varied.trainer) <= len(trainer):
            values = np.concatenate([trainer[: len(trainer) - len(varied.trainer)], varied.trainer])
            self._effects.append((fault, (trainer - values)[self._chosen]))

    def _weighed(self) -> list[Place]:
        """Return the stages, the likeliest first."""
        if not len(self._chosen):
            return [Place(0.0, Fault("recording", "the recorded numbers"))]
        compared, noise = self.case.compared, max(self.noise.exact, self.noise.rms)
        places = weigh(compared.difference[self._chosen], self._effects, noise)
        # No distribution has positive log-probabilities.
        positive = compared.sampler[self._chosen].max() > self.case.tolerance
        return sorted(places, key=lambda place: place.stage != "recording") if positive else places

    def _may_be_loose(self, case: Case) -> bool:
        """Whether the sampler may have had another dtype, and more differs than that makes."""
        noise = self.noise
        return noise.mixed > noise.tolerance and noise.alarm <= _SHARE * case.compared.largest

    def _is_likeness(self, before: float, after: float, *, loose: bool, share: float = _LIKENESS) -> bool:
        """Whether a change leaves too much of the differences, both root mean squares, to be the cause."""
        return after > max(2 * self.noise.exact, (_LOOSE_LIKENESS if loose else share) * before)

    def _is_certain(self, fit: Fit) -> bool:
        exact = fit.rms <= max(4 * self.noise.exact, self.case.compared.rms / _EXACT)
        return exact and fit.largest <= self.case.tolerance and fit.digits > _CERTAIN

    def _beyond_chance(self, fit: Fit) -> bool:
        return self._rules_out_chance(fit.digits, fit.row)

    def _rules_out_chance(self, digits: float, *rows: Row) -> bool:
        """Whether digits are more than the best change of some rows would have by chance.

        All rows are as likely, so a row of few changes needs fewer digits than a row of many.
        """
        trials = [len(ROWS) * max(self._tries[row.name], 1) for row in rows]
        return digits - float(np.log10(trials).sum()) > _CHANCE

    def _recorded(self, case: Case) -> list[Fit]:
        """Return rows whose numbers follow from the trainer's distribution without another forward."""
        # Numbers of a sampler with another dtype are only as near as its arithmetic allows.
        for tolerance in (case.tolerance, _LOOSE * self.noise.mixed)[: 1 + self._may_be_loose(case)]:
            fits = self._read(replace(case, tolerance=tolerance))
            # A row without a fitted number is preferred to a row with one.
            fewest = min((fit.trial.fitted for fit in fits), default=0)
            if fits:
                return [fit for fit in fits if fit.trial.fitted == fewest]
        return []

    def _read(self, case: Case) -> list[Fit]:
        """Return rows with a reading for each completion that differs."""
        held, fits = views(case), list[Fit]()
        for row in sorted(ROWS, key=lambda row: row.name == "restricted"):
            if row.readings is None or (row.name == "restricted" and fits):
                continue
            best: list[tuple[float, Recorded]] = []
            for view in held:
                readings = [*row.readings(view)]
                self._tries[row.name] = max(self._tries[row.name], len(readings))
                left = [_left_over(view, one) for one in readings]
                none = np.inf, Recorded("", view.trainer)
                best.append(min(zip(left, readings, strict=True), key=itemgetter(0), default=none))
            if not held or max(left for left, _ in best) > case.tolerance:
                continue
            texts: dict[str, list[int]] = {}
            for view, (_, recorded) in zip(held, best, strict=True):
                texts.setdefault(recorded.statement, []).append(view.number)
            parts = [text.format(_completions(case, numbers)) for text, numbers in texts.items()]
            fitted = max(recorded.fitted for _, recorded in best)
            rows = np.concatenate([view.rows for view in held])
            values = np.concatenate([recorded.expected for _, recorded in best])
            known = ~np.isnan(values)
            varied = replace(case.compared.of_rows(rows[known]), trainer=values[known])
            own = replace(case, compared=case.compared.of_rows(rows), departure=0)
            fit = self._fit(own, row, Trial("; ".join(parts), token=case.position, fitted=fitted), varied)
            fits += [fit] if fit is not None and self._beyond_chance(fit) else []
        return fits

    def _tried(self, case: Case, rows: Sequence[Row]) -> list[Fit]:
        """Return the rows that fit."""
        fits: list[Fit] = []
        of_rows = [self._faults[row.name] if case is self.case else self._of_row(case, row) for row in rows]
        faults = chain.from_iterable(of_rows)
        while chosen := list(islice(faults, max(0, min(_AT_ONCE, self._left)))):
            fits += self._run(case, chosen)
            if any(map(self._is_certain, fits)):
                break
        return fits

    @staticmethod
    def _of_row(case: Case, row: Row) -> Iterator[Fault]:
        """Yield the changes of a row."""
        for trial in row.trials(case) if row.trials is not None else ():
            if _may_explain(case, trial):
                place = trial.place or f"the {_NOUNS[row.stage]}, as of {row.name!r}"
                yield Fault(row.stage, place, trial, row.name)

    def _promising(self, case: Case, faults: Sequence[Fault]) -> list[Fault]:
        """Return the changes that explain the first completion that differs, or the most of it."""
        heads = [case.shortened(fault.trial) for fault in faults]
        varied = iter(case.run([head for head in heads if head is not None]))
        largest, promising = max(case.tolerance, _LOOSE * self.noise.mixed), list[Fault]()
        before = case.compared.before(len(case.head)).size
        for fault, head in zip(faults, heads, strict=True):
            one = None if head is None else next(varied)
            if head is None or (one and (one.largest <= largest or one.size <= _NEARER * before)):
                promising.append(fault)
        return promising

    def _fit(self, case: Case, row: Row, trial: Trial, varied: Comparison) -> Fit | None:
        """Return the fit of a change that explains the sample; None if it does not."""
        limits = {False: case.tolerance, True: _LOOSE * self.noise.mixed}
        share = _FITTED_LIKENESS if trial.fitted and trial.model is not None else _LIKENESS
        explains = any(
            varied.largest <= limits[loose]
            and not self._is_likeness(case.compared.rms, varied.rms, loose=loose, share=share)
            for loose in ((False, True) if self._may_be_loose(case) else (False,))
        )
        if not explains:
            return None
        departing = min(int(case.compared.beyond(case.tolerance).sum()), len(varied.positions))
        digits = _agreement(case, varied.rms) * (departing - trial.fitted)
        return Fit(row, trial, varied.largest, varied.rms, len(varied.positions), digits)

    def stated(self, finding: Finding) -> Finding | None:
        """Return the finding of another sample's row and statement, if they explain this sample too."""
        row = next((row for row in ROWS if row.name == finding.cause and row.trials is not None), None)
        trials = () if row is None or row.trials is None else row.trials(self.case)
        trial = next((trial for trial in trials if trial.statement == finding.statement), None)
        varied = None if trial is None else self.case.run([trial])[0]
        if row is None or trial is None or varied is None or not len(varied.positions):
            return None
        fit = self._fit(self.case, row, trial, varied)
        return None if fit is None or not self._beyond_chance(fit) else self.named([fit])

    def _two(self) -> Finding | None:
        """Return two causes that explain the sample together. The second is a reading, or like the rest."""
        for number, (first, change) in enumerate(self._ranked()[:_READ] if len(self._chosen) else ()):
            compared = self.case.run([first.trial])[0]
            rest = None if compared is None else self.case.after(first.trial, compared)
            if rest is None:
                continue
            fits = self._recorded(rest)
            for row in self._like(first, change) if number < _FIRSTS and not fits else ():
                fits += self._tried(rest, [row])
            if fits := [fit for fit in fits if self._is_pair(first, fit)]:
                return self._both(first, fits)
        return None

    def _like(self, first: Fault, change: Array) -> list[Row]:
        """Return the rows whose changes are the likest to the differences that a first change leaves."""
        rest = self.case.compared.difference[self._chosen] - change
        apart: dict[str, float] = {}
        for fault, other in self._effects:
            if fault is not first:
                left = float(np.square(rest - other).sum())
                apart[fault.row] = min(left, apart.get(fault.row, float(np.square(rest).sum())))
        likely = sorted(apart, key=lambda name: apart[name])[:_SECONDS]
        return [_NAMED[name] for name in likely if apart[name] < float(np.square(rest).sum())]

    def _is_pair(self, first: Fault, fit: Fit) -> bool:
        """Whether two causes agree with more numbers than chance explains."""
        case = self.case
        departing = int(case.compared.beyond(case.tolerance).sum())
        fitted = first.trial.fitted + fit.trial.fitted
        return self._rules_out_chance(
            _agreement(case, fit.rms) * (departing - fitted), _NAMED[first.row], fit.row
        )

    def _ranked(self) -> list[Effect]:
        """Return changes that bring the numbers nearer, but for a temperature, scale or offset of these."""
        basis = np.linalg.qr(self._slopes())[0]
        before = self.case.compared.difference[self._chosen]

        def sizes(of: Array) -> Array:
            return np.array([np.linalg.norm(of), np.linalg.norm(of - basis @ (basis.T @ of))]).clip(1e-9)

        ranked: list[tuple[float, Effect]] = []
        for fault, change in self._effects:
            if np.isfinite(change).all():
                share = float((sizes(before - change) / sizes(before)).min())
                ranked += [(share, (fault, change))] if share < _HALF else []
        return [effect for _, effect in sorted(ranked, key=itemgetter(0))]

    def _slopes(self) -> Array:
        """Return how the numbers change with the inverse temperature, a factor and an offset: `(m, 3)`."""
        case, compared = self.case, self.case.compared
        log = case.trainer.logits_at(case.sample, compared.positions[self._chosen]).double().log_softmax(-1)
        entropy = -(log.exp() * log).sum(-1).cpu().numpy()
        own = compared.trainer[self._chosen].astype(np.float64)
        return np.stack([own + entropy, own, np.ones(len(own))], 1)

    def _both(self, first: Fault, fits: list[Fit]) -> Finding:
        """Return the finding of two causes, at the stage that runs first."""
        second = self.named(fits)
        return replace(
            second,
            stage=min(first.stage, second.stage, key=STAGES.index),
            cause=f"{first.row} and {second.cause}",
            statement=f"{first.trial.statement}, and {second.statement}",
            remedy=f"{_NAMED[first.row].remedy}. {second.remedy}",
            token=self.case.position,
            image=first.trial.image,
        )

    def named(self, fits: list[Fit]) -> Finding:
        """Return the finding of the rows that leave the least."""
        case = self.case
        fits = [fit for fit in fits if fit.largest <= case.tolerance] or fits
        as_well = max(_AS_WELL * min(fit.rms for fit in fits), 2 * self.noise.exact)
        # A change that leaves tokens unexplained does not rival one that explains them too.
        count = max(fit.tokens for fit in fits if fit.rms <= as_well)
        rivals: dict[str, Fit] = {}
        for fit in sorted(fits, key=lambda fit: fit.rms):
            if fit.rms <= as_well and fit.tokens == count:
                rivals.setdefault(fit.row.name, fit)
        best = next(iter(rivals.values()))
        evidence = (
            f"largest difference {case.compared.largest:.4g} without that, {best.largest:.4g} with it; "
            f"{self.count} changes tried"
        )
        return Finding(
            best.row.stage,
            " or ".join(rivals),
            "; or ".join(fit.trial.statement for fit in rivals.values()),
            evidence,
            case.sample.sample_id,
            remedy=best.row.remedy,
            image=best.trial.image,
            token=case.position if best.trial.token is None else best.trial.token,
        )

    def unknown(self, places: Sequence[Place]) -> Finding:
        """Locate the difference if no row explains it."""
        case, compared = self.case, self.case.compared
        place = places[0]
        rows = [row.name for row in ROWS if row.stage == place.stage and (row.trials or row.readings)]
        statement = (
            f"unknown, in {place.fault.place}, beyond what {', '.join(rows[:-1])} and {rows[-1]} explain"
        )
        evidence = f"largest difference {compared.largest:.4g}, arithmetic {case.tolerance:.3g}"
        if case.departure > 0 and (suspects := compared.suspects(case.departure)):
            before = compared.largest_of(slice(0, case.departure))
            names = ", ".join(map(described, suspects))
            evidence += f", tokens agree up to {names}: before it at most {before:.2g}"
        if len(places) > 1:
            second, nats = places[1], places[0].evidence - places[1].evidence
            evidence += f"; {nats:.0f} nats likelier than {second.fault.place} ({second.stage})"
        evidence += f"; {self.count} changes tried"
        return Finding(
            place.stage,
            UNKNOWN,
            statement,
            evidence,
            case.sample.sample_id,
            remedy=_FACTS[place.stage],
            image=place.fault.trial.image,
            token=case.position,
            layer=place.fault.place if place.fault.place.startswith("layer ") else None,
        )


def _agreement(case: Case, left: float) -> float:
    """Return the digits in which each number agrees, if a cause leaves this root mean square, in nats."""
    differing = case.compared.difference[case.compared.beyond(case.tolerance)]
    differing = differing[np.isfinite(differing)]
    before = float(np.sqrt(np.mean(np.square(differing, dtype=np.float64)))) if len(differing) else 0.0
    return float(np.log10(max(before / max(left, case.tolerance / 10), 1.0)))


def _left_over(view: View, recorded: Recorded) -> float:
    """Return the largest difference that a reading leaves. It is infinite for too few tokens."""
    covered = ~np.isnan(recorded.expected)
    with np.errstate(invalid="ignore"):
        left = np.abs(recorded.expected - view.sampler)[covered]
    enough = 0 < (covered & view.departing).sum() >= (~covered).sum()
    return float(left.max()) if enough and np.isfinite(left).all() else np.inf


def _completions(case: Case, numbers: list[int]) -> str:
    if len(numbers) == len(case.runs):
        return "all completions" if len(numbers) > 1 else "the completion"
    return "completion " + ", ".join(map(str, numbers))


def _may_explain(case: Case, trial: Trial) -> bool:
    """Whether a change begins early enough to explain the first token that differs.

    A change of tokens or images is ruled out if many tokens agree after it.
    """
    if trial.since > case.position:
        return False
    agreeing = case.compared.before(case.position).after(trial.since).telling()
    return (
        trial.sample is None
        or trial.inputs is not None
        or trial.positions is not None
        or len(agreeing.positions) < _AGREEING
        or agreeing.rms > _FAINT * case.compared.largest
    )


def _shown(case: Case) -> Finding | None:
    """Report numbers that are missing at some tokens, if all other tokens agree."""
    compared, beyond = case.compared, case.compared.beyond(case.tolerance)
    absent, places = ~np.isfinite(compared.sampler), {*compared.positions[beyond].tolist()}
    starts, ends = {start for start, _ in case.runs}, {stop - 1 for _, stop in case.runs}
    row, count = "missing", f"{int(beyond.sum())} of {len(beyond)} tokens, and all other tokens agree"
    if absent.any() and not beyond[~absent].any():
        text = (
            f"{compared.sampler[absent][0]:g} was recorded in place of log-probabilities, which are missing"
        )
    elif beyond.all() or compared.sampler[beyond].any():
        return None
    elif places == starts and min(len(starts), len({*case.sample.token_ids[[*starts]]})) > 1:
        # A prompt ends in the same token each time, and a completion begins with any.
        text = "0 was recorded for the first token of each completion: it has no log-probability"
    elif places == starts:
        row = "loss mask"
        text = "the first token of each completion has no log-probability: the mask begins one token early"
    elif places <= ends:
        row = "final token"
        text = "the last token of a completion has no log-probability: it was added after sampling"
    else:
        return None
    return finding_of(row, text, count, case.sample, token=case.position)


def _by_version(case: Case) -> Finding | None:
    """Report one version of the weights, if its tokens alone differ."""
    beyond, positions = case.compared.beyond(case.tolerance), case.compared.positions
    versions = {span.version for span in case.sample.weight_versions}
    for version in sorted(versions) if len(versions) > 1 else ():
        of_it = np.zeros(len(beyond), np.bool_)
        for name, start, stop in case.sample.weight_versions:
            of_it |= (positions >= start) & (positions < stop) & (name == version)
        enough = of_it.sum() >= 4 and (~of_it).sum() >= 4
        if enough and not beyond[~of_it].any() and beyond[of_it].mean() > 0.5:
            text = (
                f"the tokens that the weights {version!r} sampled differ, and tokens of other weights agree"
            )
            evidence = f"{beyond.sum()} of {of_it.sum()} tokens differ, none of the {(~of_it).sum()}"
            return finding_of("weights", text, evidence, case.sample, token=case.position)
    return None
