"""The cause within a stage: rows are tried there, and the row that alone explains the numbers is named.

One rule names a cause, whatever the caller's tolerance is. The row must leave differences as small as the
measured arithmetic makes them, and a small share of the differences before. Its digits, less a digit for
each number that was fitted and less the digits of the number of trials, must rule out chance. All rows that
leave as little are named together.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np

from mmrender.audit.case import Array, Case, Trial
from mmrender.audit.inspect import shown_by, shown_by_peers
from mmrender.audit.noise import Noise
from mmrender.audit.recorded import View, views
from mmrender.audit.report import STAGES, UNKNOWN, Comparison, Finding, described
from mmrender.audit.rows import KINDS, ROWS, Row, finding_of
from mmrender.audit.stage import MAX_TOKENS, READ, Effect, Place, weigh
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
_NEARER: Final = 0.6
"""Maximum share of the differences of the first completion under a change that runs on the whole sample."""
_READ: Final = 8
"""Changes that are tried as the first of two causes, if the second needs no forward."""
_LIKE: Final = ("temperature", "penalty", "soft cap", "scaled")
"""Rows of readings with one number, which other faults of their stages resemble."""
_FIRSTS: Final = 3
"""The same, if it needs forwards."""
_MAX_SECONDS: Final = 200
"""Changes that are tried as the second of two causes, also after the budget is spent."""
_SECONDS: Final = 2
"""Rows that are tried as the second of two causes."""


class Fit(NamedTuple):
    """A trial that leaves little of the differences.

    Attributes:
        trial: The trial.
        left: What is left of the differences of the tokens that it explains.
        digits: Digits that chance would have to explain, the fitted numbers taken off.
    """

    trial: Trial
    left: Comparison
    digits: float


class Search:
    """The search for the cause of one sample's differences.

    Args:
        case: The sample, and all data that may help.
        noise: Differences by arithmetic alone.
        budget: Changes that are tried at most, but for a second cause.
        before: The finding about another sample, whose row is tried first, or whose stage if it has none.
    """

    def __init__(
        self, case: Case, noise: Noise, budget: int = DEFAULT_BUDGET, before: Finding | None = None
    ) -> None:
        self.case, self.noise, self.count = case, noise, 0
        self._budget, self._before, self._tries = budget, before, Counter[str]()
        self.fits: list[Fit] = []
        self.places: list[Place] = []
        self._effects: list[Effect] = []
        self._likenesses: dict[str, Effect] = {}
        self._trials = {row.name: _of_row(case, row) for row in ROWS.values()}

    @np.errstate(over="ignore")  # a token that was not allowed is less likely than float32 has numbers for
    def finding(self) -> Finding:
        """Return the stage, and the cause if a row explains the sample."""
        case = self.case
        if not case.compared.beyond(case.tolerance).any():
            return self.unknown([Place("model", "the arithmetic of the model")])
        shown = shown_by(case.compared, case.tolerance)
        if shown is not None:
            return shown
        self.fits = self._recorded(case)
        if self.fits:
            return self.named(self.fits)
        first = {_COMMONEST, "" if self._before is None else self._before.cause}
        self.fits = self._tried(case, [row for row in ROWS.values() if row.name in first])
        if not any(map(self._is_certain, self.fits)):
            for name, trials in self._trials.items():
                some = [*islice(trials, KINDS[ROWS[name].stage].surveyed)]
                self.fits += self._run(case, some, all_whole=True)
            self.fits += self._by_stage()
        likely = [fit for fit in self.fits if self._rules_out_chance(fit.digits, fit.trial)]
        if likely:
            return self.named(likely)
        self.places = self._weighed()
        found = self._two() or shown_by_peers(case.compared, case.peers, case.tolerance)
        return found or self.unknown(self.places)

    def _by_stage(self) -> list[Fit]:
        """Return the trials that fit, the likeliest stage first, and all others that are not hopeless."""
        fits, before, places = list[Fit](), self._before, self._weighed()
        least = places[0].evidence - _HOPELESS * max(len(self._chosen), 1)
        stages = [one.stage for one in places if one.evidence >= least and one.stage not in READ]
        # A prompt may differ at many places, and most changes are at one. It is tried second at last.
        if "template" in stages[2:]:
            stages.insert(1, stages.pop(stages.index("template")))
        # If the cause of another sample was not found, its stage and the likeliest are tried alone.
        if before is not None and before.cause == UNKNOWN:
            stages = list(dict.fromkeys([before.stage, *stages]))[:2]
        for stage in stages:
            fits += self._tried(self.case, [row for row in ROWS.values() if row.stage == stage])
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
        chosen = np.linspace(0, max(len(usable) - 1, 0), MAX_TOKENS).round().astype(int)
        return np.asarray(usable[np.unique(chosen)[: len(usable)]])

    def _tried(self, case: Case, rows: Sequence[Row]) -> list[Fit]:
        """Return the trials of some rows that fit."""
        fits, is_own = list[Fit](), case is self.case
        trials = chain.from_iterable(self._trials[row.name] if is_own else _of_row(case, row) for row in rows)
        while chosen := list(islice(trials, max(0, min(_AT_ONCE, self._budget - self.count)))):
            fits += self._run(case, chosen)
            if any(map(self._is_certain, fits)):
                break
        return fits

    def _run(self, case: Case, trials: Sequence[Trial], *, all_whole: bool = False) -> list[Fit]:
        """Run trials, keep the differences that each makes, and return the trials that fit.

        Those that explain little of the first completion that differs do not run further, unless `all_whole`.
        """
        trials = trials[: max(self._budget - self.count, 0)]
        self.count += len(trials)
        self._tries.update(trial.row for trial in trials)
        trials, fits = trials if all_whole else self._promising(case, trials), list[Fit]()
        for trial, varied in zip(trials, case.run(trials), strict=True):
            if varied is None or not len(varied.positions):
                continue
            values = self.case.rest(varied) if case is self.case else None
            if values is not None and len(self._chosen):
                self._effects.append((trial, (self.case.compared.trainer - values)[self._chosen]))
            fits += self._fitting(case, trial, varied)
        return fits

    def _promising(self, case: Case, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that explain the first completion that differs, or the most of it."""
        heads = [case.shortened(trial) for trial in trials]
        varied = iter(case.run([head for head in heads if head is not None]))
        largest, promising = max(case.tolerance, _LOOSE * self.noise.mixed), list[Trial]()
        before = case.compared.before(len(case.head)).size
        for trial, head in zip(trials, heads, strict=True):
            one = None if head is None else next(varied)
            if head is None or (one and (one.largest <= largest or one.size <= _NEARER * before)):
                promising.append(trial)
        return promising

    def _weighed(self) -> list[Place]:
        """Return the stages, the likeliest first."""
        if not len(self._chosen):
            return [Place("recording", "the recorded numbers")]
        compared, noise = self.case.compared, max(self.noise.exact, self.noise.rms)
        effects = [*self._effects, *self._likenesses.values()]
        starts = np.searchsorted(compared.positions[self._chosen], [run[0] for run in self.case.runs[1:]])
        places = weigh(compared.difference[self._chosen], effects, noise, starts.tolist())
        # No distribution has positive log-probabilities.
        positive = compared.sampler[self._chosen].max() > self.case.tolerance
        return sorted(places, key=lambda place: place.stage != "recording") if positive else places

    # --- the rule

    def _limits(self, case: Case) -> list[tuple[float, float]]:
        """Return the largest difference that a cause may leave, and the maximum share of all differences.

        Both are larger if the sampler may have had another dtype, and the differences exceed that.
        """
        noise, limits = self.noise, [(case.tolerance, _LIKENESS)]
        if noise.mixed > noise.tolerance and noise.alarm <= _SHARE * case.compared.largest:
            limits.append((_LOOSE * noise.mixed, _LOOSE_LIKENESS))
        return limits

    def _fitting(self, case: Case, trial: Trial, varied: Comparison) -> list[Fit]:
        """Return the fit of a trial that explains the sample; none if it does not."""
        compared = case.compared
        for limit, share in self._limits(case):
            # The best of many numbers is more like the cause than a change that was not searched for.
            is_number = trial.fitted and trial.model is not None and share == _LIKENESS
            left = max(2 * self.noise.exact, (_FITTED_LIKENESS if is_number else share) * compared.rms)
            if varied.largest <= limit and not varied.rms > left:
                departing = min(int(compared.beyond(case.tolerance).sum()), len(varied.positions))
                digits = _digits(case, varied.rms) * (departing - trial.fitted)
                return [Fit(trial, varied, digits)]
        return []

    def _is_certain(self, fit: Fit) -> bool:
        exact = fit.left.rms <= max(4 * self.noise.exact, self.case.compared.rms / _EXACT)
        return exact and fit.left.largest <= self.case.tolerance and fit.digits > _CERTAIN

    def _rules_out_chance(self, digits: float, *trials: Trial) -> bool:
        """Whether digits are more than the best change of some rows would have by chance.

        All rows are as likely, so a row of few changes needs fewer digits than a row of many.
        """
        counts = [len(ROWS) * max(self._tries[trial.row], 1) for trial in trials]
        return digits - float(np.log10(counts).sum()) > _CHANCE

    # --- numbers that follow from the trainer's distribution without another forward

    def _recorded(self, case: Case) -> list[Fit]:
        """Return readings that fit, those with the fewest fitted numbers."""
        # Numbers of a sampler with another dtype are only as near as its arithmetic allows.
        for limit, _ in self._limits(case):
            fits = self._read(replace(case, tolerance=limit))
            if fits:
                fewest = min(fit.trial.fitted for fit in fits)
                return [fit for fit in fits if fit.trial.fitted == fewest]
        return []

    def _read(self, case: Case) -> list[Fit]:
        """Return rows with a reading for each completion that differs."""
        held, fits, trainer = views(case), list[Fit](), case.compared.trainer
        for row in sorted(ROWS.values(), key=lambda row: row.name == "restricted"):
            best = [self._nearest(row, view) for view in held]
            read = [one for one in best if one is not None]
            if len(read) < len(held) or not read or (row.name == "restricted" and fits):
                continue
            values, texts, left = trainer.copy(), dict[str, list[int]](), 0.0
            for view, one in zip(held, read, strict=True):
                values[view.rows], left = one.expected, max(left, _left_over(view, one))
                texts.setdefault(one.statement, []).append(view.number)
            if row.name in _LIKE and case.compared is self.case.compared:
                # A fault of the stage may resemble it.
                like = Trial("", place=f"the {KINDS[row.stage].noun}, as of {row.name!r}", row=row.name)
                change = trainer - np.where(np.isnan(values), trainer, values)
                self._likenesses[row.name] = like, change[self._chosen]
            if left > case.tolerance:
                continue
            parts = [
                (text if "{}" in text else f"{text} in {{}}").format(_completions(case, numbers))
                for text, numbers in texts.items()
            ]
            rows = np.concatenate([view.rows for view in held])
            known = rows[~np.isnan(values[rows])]
            varied = replace(case.compared.of_rows(known), trainer=values[known])
            own = replace(case, compared=case.compared.of_rows(rows))
            trial = Trial("; ".join(parts), fitted=max(one.fitted for one in read), row=row.name)
            found = self._fitting(own, trial, varied)
            fits += [fit for fit in found if self._rules_out_chance(fit.digits, trial)]
        return fits

    def _nearest(self, row: Row, view: View) -> Trial | None:
        """Return the reading of a row that is the nearest to a completion's numbers."""
        readings = row.readings(view)
        self._tries[row.name] = max(self._tries[row.name], len(readings))
        return min(readings, key=partial(_left_over, view), default=None)

    # --- two causes

    def _two(self) -> Finding | None:
        """Return two causes that explain the sample together. The second is a reading, or like the rest."""
        departing = int(self.case.compared.beyond(self.case.tolerance).sum())
        self._budget = max(self._budget, self.count + min(_MAX_SECONDS, self._budget))
        for number, (first, change) in enumerate(self._ranked()[:_READ] if len(self._chosen) else ()):
            compared = self.case.run([first])[0]
            rest = None if compared is None else self.case.after(first, compared)
            if rest is None:
                continue
            fits = self._recorded(rest)
            for row in self._like(first, change) if number < _FIRSTS and not fits else ():
                fits += self._tried(rest, [row])
            pairs = []
            for fit in fits:
                digits = _digits(self.case, fit.left.rms) * (departing - first.fitted - fit.trial.fitted)
                pairs += [fit] if self._rules_out_chance(digits, first, fit.trial) else []
            if pairs:
                second = self.named(pairs)
                return replace(
                    second,
                    stage=min(ROWS[first.row].stage, second.stage, key=STAGES.index),
                    cause=f"{first.row} and {second.cause}",
                    statement=f"{first.statement}, and {second.statement}",
                    remedy=f"{ROWS[first.row].remedy}. {second.remedy}",
                    token=self.case.position,
                    image=self.case.image_at(first.since),
                )
        return None

    def _like(self, first: Trial, change: Array) -> list[Row]:
        """Return the rows whose changes are the likest to the differences that a first change leaves."""
        rest = self.case.compared.difference[self._chosen] - change
        apart: dict[str, float] = {}
        for trial, other in self._effects:
            left = float(np.square(rest - other).sum())
            if trial is not first and left < float(np.square(rest).sum()):
                apart[trial.row] = min(left, apart.get(trial.row, left))
        return [ROWS[name] for name in sorted(apart, key=lambda name: apart[name])[:_SECONDS]]

    def _ranked(self) -> list[Effect]:
        """Return changes that bring the numbers nearer, but for a temperature, scale or offset of these."""
        case, compared = self.case, self.case.compared
        log = case.trainer.logits_at(case.sample, compared.positions[self._chosen]).double().log_softmax(-1)
        entropy = -(log.exp() * log).sum(-1).cpu().numpy()
        own, before = compared.trainer[self._chosen].astype(np.float64), compared.difference[self._chosen]
        # How the numbers change with the inverse temperature, a factor and an offset.
        basis = np.linalg.qr(np.stack([own + entropy, own, np.ones(len(own))], 1))[0]

        def sizes(of: Array) -> Array:
            return np.array([np.linalg.norm(of), np.linalg.norm(of - basis @ (basis.T @ of))]).clip(1e-9)

        finite = [(trial, change) for trial, change in self._effects if np.isfinite(change).all()]
        shares = [float((sizes(before - change) / sizes(before)).min()) for _, change in finite]
        return [finite[at] for at in np.argsort(shares, kind="stable") if shares[at] < _HALF]

    # --- findings

    def stated(self, finding: Finding) -> Finding | None:
        """Return the finding of another sample's row and statement, if they explain this sample too."""
        row = ROWS.get(finding.cause)
        trials = [] if row is None else _of_row(self.case, row)
        trial = next((trial for trial in trials if trial.statement == finding.statement), None)
        varied = None if trial is None else self.case.run([trial])[0]
        if trial is None or varied is None or not len(varied.positions):
            return None
        fits = self._fitting(self.case, trial, varied)
        return self.named(fits) if fits and self._rules_out_chance(fits[0].digits, trial) else None

    def named(self, fits: list[Fit]) -> Finding:
        """Return the finding of the trials that leave the least."""
        case = self.case
        fits = [fit for fit in fits if fit.left.largest <= case.tolerance] or fits
        as_well = max(_AS_WELL * min(fit.left.rms for fit in fits), 2 * self.noise.exact)
        fits = sorted((fit for fit in fits if fit.left.rms <= as_well), key=lambda fit: fit.left.rms)
        # A change that leaves tokens unexplained does not rival one that explains them too.
        count = max(len(fit.left.positions) for fit in fits)
        rivals: dict[str, Fit] = {}
        for fit in fits:
            if len(fit.left.positions) == count:
                rivals.setdefault(fit.trial.row, fit)
        best = next(iter(rivals.values()))
        evidence = (
            f"largest difference {case.compared.largest:.4g} without that, {best.left.largest:.4g} with it; "
            f"{self.count} changes tried"
        )
        statement = "; or ".join(fit.trial.statement.removesuffix(",") for fit in rivals.values())
        token, image = case.token_of(best.trial), case.image_at(best.trial.since)
        own = finding_of(best.trial.row, statement, evidence, case.sample, token=token, image=image)
        return replace(own, cause=" or ".join(rivals))

    def unknown(self, places: Sequence[Place]) -> Finding:
        """Locate the difference if no row explains it."""
        case, compared, place = self.case, self.case.compared, places[0]
        rows = [row.name for row in ROWS.values() if row.stage == place.stage and not row.shows]
        statement = f"unknown, in {place.name}: no row explains the numbers"
        evidence = f"largest difference {compared.largest:.4g}, arithmetic {case.tolerance:.3g}"
        if case.departure > 0 and (suspects := compared.suspects(case.departure)):
            before = compared.of_rows(slice(case.departure)).largest
            names = ", ".join(map(described, suspects))
            evidence += f", tokens agree up to {names}: before it at most {before:.2g}"
        if len(places) > 1:
            nats = place.evidence - places[1].evidence
            evidence += f"; {nats:.0f} nats likelier than {places[1].name} ({places[1].stage})"
        return Finding(
            place.stage,
            UNKNOWN,
            statement,
            f"{evidence}; {self.count} changes tried, of this stage by {', '.join(rows)}",
            case.sample.sample_id,
            remedy=KINDS[place.stage].fact,
            image=case.image_at(place.since),
            token=case.position,
            layer=place.name if place.name.startswith("layer ") else None,
        )


def _of_row(case: Case, row: Row) -> Iterator[Trial]:
    """Yield the trials of a row that may explain the first token that differs."""
    for trial in row.trials(case):
        if _may_explain(case, trial):
            place = trial.place or f"the {KINDS[row.stage].noun}, as of {row.name!r}"
            yield trial._replace(row=row.name, place=place)


def _digits(case: Case, left: float) -> float:
    """Return the digits in which each number agrees, if a cause leaves this root mean square, in nats."""
    differing = case.compared.difference[case.compared.beyond(case.tolerance)]
    differing = differing[np.isfinite(differing)]
    before = float(np.sqrt(np.mean(np.square(differing, dtype=np.float64)))) if len(differing) else 0.0
    return float(np.log10(max(before / max(left, case.tolerance / 10), 1.0)))


def _left_over(view: View, trial: Trial) -> float:
    """Return the largest difference that a reading leaves. It is infinite for too few tokens."""
    covered = ~np.isnan(trial.expected)
    with np.errstate(invalid="ignore"):
        left = np.abs(trial.expected - view.sampler)[covered]
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
    agreeing = case.compared.before(case.position).telling()
    agreeing = agreeing.of_rows(agreeing.positions > trial.since)
    return (
        trial.sample is None
        or trial.inputs is not None
        or trial.positions is not None
        or len(agreeing.positions) < _AGREEING
        or agreeing.rms > _FAINT * case.compared.largest
    )
