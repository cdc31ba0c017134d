"""Rows of sampling: other distributions, read off the trainer's own without another forward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Any, Final, TypeAlias

import numpy as np

from mmrender.audit.case import Case, Trial, minimum
from mmrender.audit.recorded import View
from mmrender.audit.vocabulary import configured, name_of

_MAX_FITTED: Final = 32
_MAX_BIASED: Final = 6
_MAX_BANNED: Final = 16
_MAX_POSSIBLE: Final = 512
_MAX_SETS: Final = 64
"""Sets of so many banned tokens that are made larger."""
_CERTAIN: Final = -1e-6
_CLOSE: Final = 0.01
"""Tolerance in nats, above which cuts of another size for each token fit by chance."""
_MAX_KEPT: Final = 64
"""Tokens of a cut distribution, of more of which some set fits any number."""
_TELLING: Final = 8
"""Tokens whose probabilities may show one set of allowed tokens."""
_LIKE: Final = 0.6
"""Correlation of probabilities that chance makes once in thirty times."""


def of_rounded_logits(view: View) -> Iterator[Trial]:
    """Yield the distribution of logits that were rounded."""
    import torch

    for name, dtype in {"bfloat16": torch.bfloat16, "float16": torch.float16}.items():
        text = f"logits were rounded to {name} before their softmax"
        yield Trial(text, expected=view.under(view.logits.to(dtype).float()))


_Step: TypeAlias = tuple[str, Callable[[Any, float, Any], Any], float, float, bool, float]
"""A step from logits with one number: its text and rule, the number's bounds, whether
the prompt's tokens count, and the number that changes nothing."""


def _repetition(logits: Any, value: float, counts: Any) -> Any:
    return (logits / value).where(logits > 0, logits * value).where(counts > 0, logits)


_STEPS: Final[Mapping[str, Sequence[_Step]]] = {
    "soft cap": [
        ("after logits were capped softly at", lambda own, n, _: n * (own / n).tanh(), 0.5, 200.0, False, 0.0)
    ],
    "temperature": [("at temperature", lambda own, n, _: own / n, 0.02, 50.0, False, 1.0)],
    "penalty": [
        (f"after a {name} penalty{', the prompt included,' * where} of", rule, low, 5.0, where, own)
        for name, rule, low, own in (
            ("repetition", _repetition, 0.2, 1.0),
            ("presence", lambda own, n, counts: own - n * (counts > 0), 0.01, 0.0),
            ("frequency", lambda own, n, counts: own - n * counts, 0.01, 0.0),
        )
        for where in (False, True)
    ],
}


def stepped(name: str, view: View) -> Iterator[Trial]:
    """Yield the distribution after a step of the sampler with one number, the best of a search."""
    chosen = np.flatnonzero(view.departing & np.isfinite(view.sampler))
    if len(chosen) < 3:
        return
    chosen = chosen[:: max(1, len(chosen) // _MAX_FITTED)]
    some, target = view.logits[chosen], view.sampler[chosen]
    before = float(np.abs(target - view.trainer[chosen]).mean())
    for text, rule, low, high, everywhere, own in _STEPS[name]:
        counts = view.counts(everywhere)

        def losses(values: Sequence[float], rule: Any = rule, counts: Any = counts[chosen]) -> list[float]:
            numbers = (view.under(rule(some, value, counts), chosen) for value in values)
            return [float(np.abs(one - target).mean()) for one in numbers]

        value = minimum(losses, low, high, points=24, enough=before, own=own)
        expected = view.under(rule(view.logits, value, counts))
        yield Trial(f"the log-probabilities are those {text} {value:.4g}", expected=expected, fitted=1)


def decayed(view: View) -> Iterator[Trial]:
    """Yield the distribution after a growth of the stop token's logit from some token on.

    At each token the others' numbers show the growth. Its logarithm is a line, of the factor and the start.
    """
    places, ids = np.arange(len(view.rows)), view.tokens[:, 0].cpu().numpy()
    for stop in dict.fromkeys([int(ids[-1]), *configured(view.case, "eos_token_id")]):
        own = view.logits[:, stop].cpu().numpy().astype(np.float64)
        share = np.exp(own - view.logits.logsumexp(-1).cpu().numpy())
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            growth = np.log1p(np.expm1(view.trainer - view.sampler.astype(np.float64)) / share)
            logs = np.log1p(growth / np.abs(own))
            usable = view.departing & (ids != stop) & np.isfinite(logs)
            if usable.sum() < 2:
                continue
            slope, level = np.polyfit(places[usable], logs[usable], 1)
            near = round(float(np.clip(-level / slope, 0, len(places)))) if slope else 0
            for start in range(max(0, near - 1), near + 2):
                some = (logs[usable] / (places[usable] - start))[places[usable] > start]
                factor = float(np.exp(np.median(some))) if len(some) else 1.0
                grown = np.abs(own) * (factor ** (places - start).clip(0) - 1)
                expected = view.trainer - np.log1p(share * np.expm1(grown)) + grown * (ids == stop)
                what = f"the logit of the stop token {name_of(view.case, stop)} grew by {factor:.4g} a token"
                text = f"{what} after {start} tokens (exponential_decay_length_penalty)"
                yield Trial(text, expected=expected.astype(np.float32), fitted=2)


def truncated(view: View) -> Iterator[Trial]:
    """Yield the distribution cut to its likeliest tokens, in the way that all tokens allow."""
    import torch

    if not np.isfinite(view.sampler).all():
        return
    target = torch.from_numpy(view.sampler.copy()).to(view.logits.device)
    for temperature, typical in product((1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5), (False, True)):
        logprobs = (view.logits / temperature).log_softmax(-1)
        own = logprobs.gather(1, view.tokens)[:, 0]
        # The order in which tokens are kept: the likeliest first, or the nearest to the entropy.
        surprise = (-logprobs + (logprobs.exp() * logprobs).sum(-1, keepdim=True)).abs()
        ordered = logprobs.gather(1, (surprise if typical else -logprobs).argsort(-1))
        masses = ordered.exp().cumsum(-1)
        wanted = (own - target).exp().clamp(max=1.0)  # the mass that is left, by which an engine divides
        last = (masses - wanted[:, None]).abs().argmin(-1, keepdim=True)
        kept = masses.gather(1, last)[:, 0]
        expected = (own - kept.log()).cpu().numpy()
        fits = ~(np.abs(expected - view.sampler) > view.case.tolerance)
        # Nothing was cut off if the remaining mass is the whole mass.
        if not fits.all() or float(kept.log().abs().max()) <= view.case.tolerance:
            continue
        ranks = torch.arange(1, masses.shape[1] + 1, device=masses.device).expand_as(masses)
        # What a rule compares with its number, from the likeliest token on, and how far that may be off.
        rules: dict[str, tuple[Any, float]] = {
            "top_k of {:.0f}": (ranks, -0.5),
            "top_p between {:.4g} and {:.4g}": (masses - ordered.exp(), 1e-4),
            "min_p between {3:.4g} and {2:.4g}": (ordered[:, :1] - ordered, 0.0),
            "epsilon_cutoff between {3:.4g} and {2:.4g}, a least probability": (-ordered, 0.0),
        }
        if typical:
            rules = {"typical_p between {:.4g} and {:.4g}": rules["top_p between {:.4g} and {:.4g}"]}
        size, rule = int(last.max()) + 1, ""
        for text, (values, slack) in rules.items():
            low = float(values.gather(1, last).max())
            high = float(values.gather(1, (last + 1).clamp(max=values.shape[1] - 1)).min())
            if low <= high + slack:
                rule = text.format(low, high, np.exp(-low), np.exp(-high))
                break
        else:
            if not typical and size <= _MAX_KEPT and view.case.tolerance < _CLOSE:
                rule = f"several of top_k (up to {size}), top_p and min_p"
        if rule:
            at = "" if temperature == 1.0 else f" at temperature {temperature:g}"
            yield Trial(f"the log-probabilities are those after {rule}{at}", expected=expected)


def other_support(view: View) -> Iterator[Trial]:
    """Yield the distribution over the first tokens of the vocabulary, over padding too, or without some."""
    if not view.is_rich:
        return
    own, probabilities, case = view.under(view.logits), view.logits.softmax(-1).cpu().numpy(), view.case

    def without(text: str, lost: Any, fitted: int = 0) -> Trial:
        """Return the numbers of a distribution that lost a share of its mass at each token."""
        return Trial(text, expected=(own - np.log((1 - lost).clip(1e-12))).astype(np.float32), fitted=fitted)

    banned_by = "forbidden (logit_bias, bad_words) and could not be sampled"
    named = {name: one for name, one in vars(case.trainer.model.config).items() if isinstance(one, int)}
    media = [named[name] for name in named if name.endswith(("_token_id", "_token_index"))]
    text_ids = {named.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    media = sorted({one for one in media if 0 <= one < probabilities.shape[1]} - text_ids)
    if media:
        yield without(f"the tokens of media were {banned_by}", probabilities[:, media].sum(1))
    for length, start in product((2, 3, 4), (0, case.runs[view.number][0])):
        repeated = np.zeros(len(own))
        for row, place in enumerate(view.positions.tolist()):
            # Tokens that have followed the last ones before.
            seen = case.sample.token_ids[start:place]
            if len(seen) >= length:
                parts = np.lib.stride_tricks.sliding_window_view(seen, length)
                after = parts[(parts[:, :-1] == seen[1 - length :]).all(1), -1]
                repeated[row] = probabilities[row, np.unique(after)].sum()
        where = "the completion" if start else "prompt and completion"
        text = f"sequences of {length} tokens in {where} could not be repeated (no_repeat_ngram_size)"
        yield without(text, repeated)
    share = np.exp(own - view.sampler)  # the sampler's divisor as a share of the trainer's
    masses = probabilities.cumsum(-1)
    size = int(np.abs(np.log(masses) - np.log(share)[:, None]).max(0).argmin()) + 1
    over = "the sampler's distribution was over"
    yield without(f"{over} the first {size} tokens of the vocabulary", 1 - masses[:, size - 1], 1)
    total = view.logits.logsumexp(-1).cpu().numpy()
    if (more := round(float(np.median((share - 1) * np.exp(total))))) > 0:
        text = f"{over} {more} tokens more, of logit 0, as of a padded vocabulary,"
        yield without(text, -more * np.exp(-total), 1)
    banned = case.once("banned", lambda: _banned(case))
    if banned:
        which = f"token(s) {', '.join(map(str, banned))} were {banned_by}"
        yield without(which, probabilities[:, banned].sum(1), len(banned))
    last = int(np.flatnonzero(view.departing)[-1]) + 1  # the first tokens only, as with min_tokens
    for token in banned if len(banned) == 1 else ():
        lost = np.where(np.arange(len(own)) < last, probabilities[:, token], 0)
        text = f"token {token} could not be sampled among the first {last} tokens (min_tokens)"
        yield without(text, lost, 2)


def _banned(case: Case) -> list[int]:
    """Return the tokens whose probabilities add up to the mass that the sampler lacks at each token.

    A token is none of these if it alone has more than that mass anywhere, so few sets are left to try.
    """
    rows = case.compared.of_rows(case.rows)
    departing = np.flatnonzero(rows.beyond(case.tolerance) & np.isfinite(rows.sampler))
    lacking = -np.expm1(rows.difference[departing].astype(np.float64))
    masses = case.logits[departing].double().softmax(-1).cpu().numpy()
    possible = np.flatnonzero((masses <= lacking[:, None] + case.tolerance).all(0))
    possible = possible[np.argsort(-masses[:, possible].sum(0))[:_MAX_POSSIBLE]]
    masses = masses[:, possible]
    sets = {frozenset[int](): lacking}
    best = float(np.square(lacking).sum()), frozenset[int]()
    for _ in range(_MAX_BANNED):
        larger = {
            chosen | {int(one)}: left - masses[:, one]
            for chosen, left in sets.items()
            for one in np.flatnonzero((masses <= left[:, None] + case.tolerance).all(0))
            if one not in chosen
        }
        losses = [(float(np.square(left).sum()), one) for one, left in larger.items()]
        sizes = sorted(losses, key=itemgetter(0))
        best = min([best, *sizes[:1]], key=itemgetter(0))
        sets = {chosen: larger[chosen] for _, chosen in sizes[:_MAX_SETS]}
    return sorted(int(possible[one]) for one in best[1])


def biased(view: View) -> Iterator[Trial]:
    """Yield the distribution after a bias on one token, which all numbers that differ must allow.

    With a bias `b` on a token of probability `p`, those of others are divided by `1 + p (e^b - 1)`.
    """
    if not view.is_rich:
        return
    some = np.flatnonzero(view.departing)[:_MAX_FITTED]
    tokens = view.tokens[some, 0].cpu().numpy()
    probabilities = view.logits[some].double().softmax(-1).cpu().numpy()
    growth = np.expm1(np.clip(view.trainer[some].astype(np.float64) - view.sampler[some], -30, 30))
    others = np.ones(probabilities.shape, np.bool_)
    others[np.arange(len(tokens)), tokens] = False  # a token's own number has the bias itself
    weights = np.where(others, probabilities, 0)
    slopes = (weights * growth[:, None]).sum(0) / np.square(weights).sum(0).clip(1e-30)
    errors = np.square(np.where(others, growth[:, None] - weights * slopes, 0)).sum(0)
    for token in np.argsort(errors)[:_MAX_BIASED].tolist():
        if slopes[token] <= -1 or abs(slopes[token]) < 1e-4:
            continue
        bias, logits = float(np.log1p(slopes[token])), view.logits.clone()
        logits[:, token] += bias
        text = f"token {token} had a bias of {bias:.3g} on its logit (logit_bias)"
        yield Trial(text, expected=view.under(logits), fitted=2)


def restricted(view: View) -> Iterator[Trial]:
    """Yield tokens of which a grammar or mask allowed only a few.

    Engines renormalise over the allowed tokens, so their numbers are never below the model's, and 0 if one
    token was allowed.
    """
    sampler, departing = view.sampler, view.departing
    certain = int(np.sum(departing & (sampler >= _CERTAIN)))
    below = (sampler[departing] > view.trainer[departing]).all() and (sampler <= 0).all()
    if below and (certain >= max(2, departing.sum() / 2) or _is_over_one_set(view)):
        text = (
            "the sampler was restricted to a part of the vocabulary, as by a grammar or forbidden tokens: "
            f"the sampler is higher at all {int(departing.sum())} tokens, and certain of {certain},"
        )
        yield Trial(text, expected=np.where(departing, sampler, view.trainer))


def _is_over_one_set(view: View) -> bool:
    """Whether the numbers look like those over one set of allowed tokens.

    Engines divide by the probability of the set. It holds all sampled tokens, so it is theirs at least, and
    it is large where theirs is.
    """
    share = np.exp((view.trainer - view.sampler).astype(np.float64))
    sampled = view.logits.softmax(-1)[:, view.tokens[:, 0].unique()].sum(-1).cpu().numpy()
    fits = (sampled <= share * (1 + 1e-3) + view.case.tolerance).all() and view.departing.all()
    if not fits or len(share) < _TELLING or np.ptp(share) == 0:
        return False
    return float(np.corrcoef(np.log(share), np.log(sampled))[0, 1]) > _LIKE
