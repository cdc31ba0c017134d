"""Rows of sampling and recording: read off the trainer's own distribution, without another forward.

Each yields the numbers of one completion under one hypothesis. It must fit whole completions, and all others
must agree without it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Recorded, minimum
from mmrender.audit.computed import bound, replaced
from mmrender.audit.report import Float32Array, sampled_runs
from mmrender.audit.vocabulary import configured, name_of
from mmrender.audit.weights import as_given

_MAX_SHIFT: Final = 4
_MAX_FITTED: Final = 32
_MAX_BIASED: Final = 6
_MAX_BANNED: Final = 16
_MAX_POSSIBLE: Final = 512
_MAX_SETS: Final = 64
"""Sets of so many banned tokens that are made larger."""
_CERTAIN: Final = -1e-6
_REMARKABLE: Final = 50
"""Integers from here on are no log-probabilities of sampled tokens."""
_MAX_LATE: Final = 8
_CLOSE: Final = 0.01
"""Tolerance in nats, above which cuts of another size for each token fit by chance."""
_MAX_KEPT: Final = 64
"""Tokens of a cut distribution, of more of which some set fits any number."""
_TELLING: Final = 8
"""Tokens whose probabilities may show one set of allowed tokens."""
_LIKE: Final = 0.6
"""Correlation of probabilities that chance makes once in thirty times."""


class View(NamedTuple):
    """One completion that differs, of `m` tokens.

    Attributes:
        case: Its sample.
        number: Index of the completion.
        rows: Its tokens, as indices into `case.compared.positions`.
        places: Indices of its tokens in the sample, int32 `(m,)`.
        sampler: The numbers that were recorded, float32 `(m,)`.
        trainer: The trainer's log-probabilities, float32 `(m,)`.
        departing: The tokens that differ, bool `(m,)`.
        logits: The logits that predicted its tokens: float32 tensor `(m, vocabulary)`.
        tokens: Its tokens as an index of logits: int64 tensor `(m, 1)`.
    """

    case: Case
    number: int
    rows: npt.NDArray[np.intp]
    places: npt.NDArray[np.int32]
    sampler: Float32Array
    trainer: Float32Array
    departing: npt.NDArray[np.bool_]
    logits: Any
    tokens: Any

    def of(self, logits: Any) -> Float32Array:
        """Return the log-probabilities of its tokens under other logits: `(m,)`."""
        picked: Float32Array = logits.log_softmax(-1).gather(1, self.tokens)[:, 0].cpu().numpy()
        return picked

    def counts(self, everywhere: bool) -> Any:
        """Return how often each token came before, in the completion or everywhere: `(m, vocabulary)`."""
        import torch

        ids, size = self.case.sample.token_ids, self.logits.shape[1]
        start = 0 if everywhere else self.case.runs[self.number][0]
        found = [np.bincount(ids[start:place], minlength=size)[:size] for place in self.places.tolist()]
        return torch.from_numpy(np.stack(found)).to(self.logits.device)


def views(case: Case) -> list[View]:
    """Return the completions of a case that differ."""
    import torch

    compared, found = case.compared, []
    beyond = compared.beyond(case.tolerance)
    for number in case.departing_runs:
        inside = np.flatnonzero(np.isin(case.rows, np.r_[case.rows_of(number)]))
        rows = case.rows[inside]
        if len(rows):
            logits, places = case.logits[inside], compared.positions[rows]
            ids = torch.from_numpy(case.sample.token_ids[places].astype(np.int64)).to(logits.device)[:, None]
            numbers = compared.sampler[rows], compared.trainer[rows]
            found.append(View(case, number, rows, places, *numbers, beyond[rows], logits, ids))
    return found


def _forms(view: View) -> Iterator[Recorded]:
    own, logs = view.trainer, view.logits.log_softmax(-1)
    entropy = (logs.exp() * logs).sum(-1).cpu().numpy()
    forms = {
        "probabilities were recorded, not their logarithms,": np.exp(own),
        "log-probabilities were recorded with the opposite sign": -own,
        "logarithms to the base 2 were recorded": own / np.log(2),
        "logarithms to the base 10 were recorded": own / np.log(10),
        "running sums of log-probabilities (cumulative_logprob) were recorded": np.cumsum(own),
        "each token was given its completion's mean": np.full_like(own, own.mean()),
        "each token was given its completion's sum": np.full_like(own, own.sum()),
        "the likeliest (top-1) token's log-probability was recorded, not the sampled one's,": (
            logs.amax(-1).cpu().numpy()
        ),
        "entropies with the opposite sign were recorded, not log-probabilities,": entropy,
        "entropies were recorded, not log-probabilities,": -entropy,
        "logits were recorded, which are not normalised,": (
            view.logits.gather(1, view.tokens)[:, 0].cpu().numpy()
        ),
    }
    if len(own) > 2:  # two in reverse order are also shifted by one place
        forms["log-probabilities were recorded in reverse order"] = own[::-1]
        if len(own) % 2 == 0:
            forms["log-probabilities of neighbours were exchanged"] = own[np.arange(len(own)) ^ 1]
    yield from (Recorded(text, values) for text, values in forms.items())


def _missing(view: View) -> Iterator[Recorded]:
    """Yield one number in place of many, or of all below it."""
    sampler, departing = view.sampler, view.departing
    values = {0.0 if value == 0 else value for value in sampler[departing].tolist()}
    if len(values) != 1 or (value := values.pop()) != value:
        return
    expected, count = np.where(departing, np.float32(value), view.trainer), int(departing.sum())
    text = f"{value:g} was recorded in place of {count} log-probabilities"
    if (sampler == np.float32(value)).all() or (count > 3 and value.is_integer()):
        yield Recorded(text, expected)
    elif value == 0:  # a remarkable number by itself
        text += ": they are missing, or the sampler had one token to choose from"
        yield Recorded(text, expected, -1)
    elif value.is_integer() and abs(value) >= _REMARKABLE:
        yield Recorded(f"{text}: a placeholder for none", expected, -1)
    elif count > 1 and view.trainer[departing].max() < value - view.case.tolerance:
        yield Recorded(f"log-probabilities below {value:g} were recorded as that", expected)
    elif count > 1 and view.trainer[departing].min() > value + view.case.tolerance:
        yield Recorded(f"log-probabilities above {value:g} were recorded as that", expected)


def _rounded(view: View) -> Iterator[Recorded]:
    """Yield numbers that have the digits of a shorter dtype or of few decimals only."""
    bits, own = np.ascontiguousarray(view.sampler).view(np.uint32), view.trainer
    for name, zero, unit in (("bfloat16", 16, 2.0**-8), ("float16", 13, 2.0**-11)):
        bound = 8 * unit * np.maximum(1, np.abs(own)) + view.case.tolerance
        if not (bits & ((1 << zero) - 1)).any() and (np.abs(view.sampler - own) <= bound).all():
            text = f"log-probabilities were computed or recorded in {name}"
            yield Recorded(text, view.sampler.copy())
            return
    for count in range(4):
        yield Recorded(f"log-probabilities were rounded to {count} decimals", np.round(own, count))
    for count in range(1, 5):
        digits = [float(f"{value:.{count}g}") for value in own.tolist()]
        text = f"log-probabilities were rounded to {count} significant digits"
        yield Recorded(text, np.asarray(digits, np.float32))
        with np.errstate(divide="ignore"):
            logs = np.log(np.round(np.exp(own.astype(np.float64)), count + 1))
        text = f"probabilities were rounded to {count + 1} decimals before their logarithm"
        yield Recorded(text, logs.astype(np.float32))


def _of_rounded_logits(view: View) -> Iterator[Recorded]:
    import torch

    for name, dtype in {"bfloat16": torch.bfloat16, "float16": torch.float16}.items():
        text = f"logits were rounded to {name} before their softmax"
        yield Recorded(text, view.of(view.logits.to(dtype).float()))


def _laid(values: Float32Array, source: npt.NDArray[np.intp]) -> Float32Array:
    """Return the values at some places, NaN for places outside."""
    inside = (source >= 0) & (source < len(values))
    if not len(values):
        return np.full(len(source), np.nan, np.float32)
    return np.where(inside, values[source.clip(0, len(values) - 1)], np.float32(np.nan)).astype(np.float32)


def _moved(by: int) -> str:
    return f"{abs(by)} place(s) {'later' if by > 0 else 'earlier'} than their tokens"


def _shifted(view: View) -> Iterator[Recorded]:
    """Yield log-probabilities a few places off: within the completion, among all, and with the prompt's."""
    own, prompts = np.arange(len(view.rows)), view.places.astype(np.intp)
    for by in sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)[1:]:
        where = f"{_moved(by)} (shifted)"
        text = f"the log-probabilities of {{}} are {where}"
        yield Recorded(text, _laid(view.trainer, own - by))
        among = f"the log-probabilities are {where} from {{}} on"
        yield Recorded(among, _laid(view.case.compared.trainer, view.rows - by))
        yield Recorded(f"{text}, the prompt's among them", _laid(view.case.everything, prompts - by))


def _late(view: View) -> Iterator[Recorded]:
    """Yield numbers of chunks that came in another order, twice or never, from the first difference on."""
    first, own = int(view.departing.argmax()), np.arange(len(view.rows))
    last = len(own) - int(view.departing[::-1].argmax())
    for by in range(1, last - first):
        order = np.concatenate([own[:first], np.roll(own[first:last], by), own[last:]])
        what = f"log-probabilities {first} to {last - 1} are two chunks in each other's place"
        yield Recorded(what, view.trainer[order], 1)
    for by in (by for by in range(-_MAX_LATE, _MAX_LATE + 1) if by and first):
        what = "a chunk of them came twice" if by > 0 else "a chunk of them was lost"
        text = f"the log-probabilities are {_moved(by)} from token {first} on, as if {what},"
        yield Recorded(text, _laid(view.trainer, own - np.where(own >= first, by, 0)), 1)


def _of_another(view: View) -> Iterator[Recorded]:
    """Yield the numbers of another completion, of this sample or of another one."""
    case, own = view.case, np.arange(len(view.rows))
    runs = [case.compared.trainer[case.rows_of(number)] for number in range(len(case.runs))]
    for by in range(1, len(runs)):
        others = np.concatenate([*runs[by:], *runs[:by]])
        text = f"the log-probabilities of completions are in another order, from completion {by} on,"
        yield Recorded(text, others[view.rows])
    for peer in [case.compared, *case.peers]:
        name = peer.sample.sample_id or "another sample"
        of = "" if peer is case.compared else f" of {name}"
        if of:  # one after another, whatever the lengths of the completions
            text = f"the log-probabilities are the numbers of {name}"
            yield Recorded(text, _laid(peer.trainer, view.rows))
        for other, (start, stop) in enumerate(sampled_runs(peer.sample.loss_mask)):
            if peer is not case.compared or other != view.number:
                values = peer.trainer[(peer.positions >= start) & (peer.positions < stop)]
                text = f"{{}} has the log-probabilities of completion {other}{of}"
                yield Recorded(text, _laid(values, own))


def _scaled(view: View) -> Iterator[Recorded]:
    usable = view.departing & np.isfinite(view.sampler) & (view.trainer < -view.case.tolerance)
    if usable.sum() < 3:
        return
    own, (theirs, ours) = view.trainer.astype(np.float64), np.stack([view.sampler, view.trainer])[:, usable]
    factor, offset = float(np.median(theirs / ours)), float(np.median(theirs - ours))
    epsilon = float(np.median(np.exp(theirs.astype(np.float64)) - np.exp(ours.astype(np.float64))))
    numbers = {f"log-probabilities were multiplied by {factor:.4g}": own * factor}
    if epsilon > 0:
        text = f"{epsilon:.3g} (epsilon) was added to probabilities before their logarithm"
        numbers[text] = np.log(np.exp(own) + epsilon)
    numbers[f"{offset:+.4g} was added to log-probabilities"] = own + offset
    means = view.logits.log_softmax(-1).mean(-1).cpu().numpy().astype(np.float64)
    share = float(np.median((theirs - ours) / (means[usable] - ours)))
    text = f"{share:.3g} of the mean over the vocabulary was mixed in (label smoothing)"
    numbers[text] = (1 - share) * own + share * means
    yield from (Recorded(f"{text}", one.astype(np.float32), 1) for text, one in numbers.items())


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


def _stepped(name: str, view: View) -> Iterator[Recorded]:
    """Yield the distribution after a step of the sampler with one number, the best of a search."""
    chosen = np.flatnonzero(view.departing & np.isfinite(view.sampler))
    if len(chosen) < 3:
        return
    chosen = chosen[:: max(1, len(chosen) // _MAX_FITTED)]
    some, target = view._replace(logits=view.logits[chosen], tokens=view.tokens[chosen]), view.sampler[chosen]
    before = float(np.abs(target - view.trainer[chosen]).mean())
    for text, rule, low, high, everywhere, own in _STEPS[name]:
        counts = view.counts(everywhere)

        def losses(values: Sequence[float], rule: Any = rule, counts: Any = counts[chosen]) -> list[float]:
            numbers = (some.of(rule(some.logits, value, counts)) for value in values)
            return [float(np.abs(one - target).mean()) for one in numbers]

        value = minimum(losses, low, high, points=24, enough=before, own=own)
        expected = view.of(rule(view.logits, value, counts))
        yield Recorded(f"the log-probabilities are those {text} {value:.4g}", expected, 1)


def _decayed(view: View) -> Iterator[Recorded]:
    """Yield the distribution after a growth of the stop token's logit from some token on.

    At each token the others' numbers show the growth, and so the factor, without a search.
    """
    places, first = np.arange(len(view.rows)), int(view.departing.argmax())
    ids = view.tokens[:, 0].cpu().numpy()
    for stop in dict.fromkeys([int(ids[-1]), *configured(view.case, "eos_token_id")]):
        own = view.logits[:, stop].cpu().numpy().astype(np.float64)
        share = np.exp(own - view.logits.logsumexp(-1).cpu().numpy())
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            growth = np.log1p(np.expm1(view.trainer - view.sampler.astype(np.float64)) / share)
            for start in range(max(0, first - _MAX_SHIFT), max(first, 1)):
                powers = (places - start).clip(0)
                factors = (1 + growth / np.abs(own)) ** (1 / powers)
                some = factors[view.departing & (ids != stop) & (powers > 0) & np.isfinite(factors)]
                if len(some) < 2:
                    continue
                factor, logits = float(np.median(some)), view.logits.clone()
                logits[:, stop] += view.logits[:, stop].abs() * logits.new_tensor(factor**powers - 1)
                what = f"the logit of the stop token {name_of(view.case, stop)} grew by {factor:.4g} a token"
                text = f"{what} after {start} tokens (exponential_decay_length_penalty)"
                yield Recorded(text, view.of(logits), 2)


def _truncated(view: View) -> Iterator[Recorded]:
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
            yield Recorded(f"the log-probabilities are those after {rule}{at}", expected)


def _other_support(view: View) -> Iterator[Recorded]:
    """Yield the distribution over the first tokens of the vocabulary, over padding too, or without some."""
    if view.departing.sum() < 3 or not np.isfinite(view.sampler).all():
        return
    own, probabilities = view.of(view.logits), view.logits.softmax(-1).cpu().numpy()

    def without(text: str, lost: Any, fitted: int = 0) -> Recorded:
        """Return the numbers of a distribution that lost a share of its mass at each token."""
        return Recorded(f"{text}", (own - np.log((1 - lost).clip(1e-12))).astype(np.float32), fitted)

    banned_by = "forbidden (logit_bias, bad_words) and could not be sampled"
    media = sorted(token for token in _media_tokens(view.case) if token < probabilities.shape[1])
    if media:
        yield without(f"the tokens of media were {banned_by}", probabilities[:, media].sum(1))
    ids = view.case.sample.token_ids
    for length, start in product((2, 3, 4), (0, view.case.runs[view.number][0])):
        if length > len(ids):
            continue
        # Tokens that have followed the last ones before.
        repeated, parts = np.zeros(len(own)), np.lib.stride_tricks.sliding_window_view(ids, length)
        for row, place in enumerate(view.places.tolist()):
            if place >= length - 1:
                own_last, before = (
                    ids[place - length + 1 : place],
                    parts[start : max(place - length + 1, start)],
                )
                after = before[(before[:, :-1] == own_last).all(1), -1]
                repeated[row] = probabilities[row, np.unique(after)].sum()
        where = "the completion" if start else "prompt and completion"
        text = f"sequences of {length} tokens in {where} could not be repeated (no_repeat_ngram_size)"
        yield without(text, repeated)
    share = np.exp(own - view.sampler)  # the sampler's divisor as a share of the trainer's
    masses = probabilities.cumsum(-1)
    size = int(np.abs(np.log(masses) - np.log(share)[:, None]).max(0).argmin()) + 1
    text = f"the sampler's distribution was over the first {size} tokens of the vocabulary"
    yield without(text, 1 - masses[:, size - 1], 1)
    total = view.logits.logsumexp(-1).cpu().numpy()
    if (more := round(float(np.median((share - 1) * np.exp(total))))) > 0:
        text = (
            f"the sampler's distribution was over {more} tokens more, of logit 0, as of a padded vocabulary,"
        )
        yield without(text, -more * np.exp(-total), 1)
    banned = view.case.once("banned", lambda: _banned(view.case))
    if banned:
        which = f"token(s) {', '.join(map(str, banned))} were {banned_by}"
        yield without(which, probabilities[:, banned].sum(1), len(banned))
    last = int(np.flatnonzero(view.departing)[-1]) + 1  # the first tokens only, as with min_tokens
    for token in banned if len(banned) == 1 else ():
        lost = np.where(np.arange(len(own)) < last, probabilities[:, token], 0)
        yield without(
            f"token {token} could not be sampled among the first {last} tokens (min_tokens)", lost, 2
        )


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
        sizes = sorted(
            ((float(np.square(left).sum()), one) for one, left in larger.items()), key=itemgetter(0)
        )
        best = min([best, *sizes[:1]], key=itemgetter(0))
        sets = {chosen: larger[chosen] for _, chosen in sizes[:_MAX_SETS]}
    return sorted(int(possible[one]) for one in best[1])


def _media_tokens(case: Case) -> set[int]:
    """Return the tokens of media that the model's configuration names."""
    named = vars(case.trainer.model.config).items()
    own = [(name, one) for name, one in named if name.endswith(("_token_id", "_token_index"))]
    return {
        one for name, one in own if name[:3] not in ("bos", "eos", "pad") if isinstance(one, int) and one >= 0
    }


def _biased(view: View) -> Iterator[Recorded]:
    """Yield the distribution after a bias on one token, which all numbers that differ must allow.

    With a bias `b` on a token of probability `p`, those of others are divided by `1 + p (e^b - 1)`.
    """
    if view.departing.sum() < 3 or not np.isfinite(view.sampler).all():
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
        bias = float(np.log1p(slopes[token]))
        logits = view.logits.clone()
        logits[:, token] += bias
        yield Recorded(
            f"token {token} had a bias of {bias:.3g} on its logit (logit_bias)", view.of(logits), 2
        )


def _restricted(view: View) -> Iterator[Recorded]:
    """Yield tokens of which a grammar or mask allowed only a few.

    Engines renormalise over the allowed tokens, so their numbers are never below the model's, and 0 if one
    token was allowed.
    """
    sampler, departing = view.sampler, view.departing
    certain = int(np.sum(departing & (sampler >= _CERTAIN)))
    below = (sampler[departing] > view.trainer[departing]).all() and (sampler <= 0).all()
    if below and (certain >= max(2, departing.sum() / 2) or _is_over_one_set(view)):
        text = (
            "the sampler was restricted to a grammar or a few tokens, and its numbers are of these: "
            f"the sampler is higher at all {int(departing.sum())} tokens, and certain of {certain},"
        )
        yield Recorded(text, np.where(departing, sampler, view.trainer))


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


def _of_other_weights(view: View) -> Iterator[Recorded]:
    """Yield completions that other weights began or ended, as of requests continued after an update."""
    case, places = view.case, np.arange(len(view.rows))
    first = int(view.departing.argmax())
    last = len(places) - int(view.departing[::-1].argmax())
    for name, given in case.weights.items():
        change = bound(replaced, as_given(given, case.trainer.model))
        values = case.once(("weights", name), partial(case.trainer.attempt, case.sample, model=change))
        if values is None:
            continue
        begun, ended = f"the first {last} tokens of {{}}", f"the tokens of {{}} from {first} on"
        for text, of in {begun: places < last, ended: places >= first}.items():
            expected = np.where(of, values[view.rows], view.trainer)
            yield Recorded(f"{text} are of the weights of {name}", expected, 1)


READINGS: Final[Mapping[str, Callable[[View], Iterator[Recorded]]]] = {
    "missing": _missing,
    "form": _forms,
    "rounded": _rounded,
    "logits dtype": _of_rounded_logits,
    "shifted numbers": _shifted,
    "chunk": _late,
    "another's numbers": _of_another,
    "scaled": _scaled,
    "weights": _of_other_weights,
    "truncation": _truncated,
    "vocabulary": _other_support,
    "bias": _biased,
    "restricted": _restricted,
    **{name: partial(_stepped, name) for name in ("soft cap", "temperature")},
    "penalty": lambda view: chain(_stepped("penalty", view), _decayed(view)),
}
"""Numbers to try for a completion, by row."""
