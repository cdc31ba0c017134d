"""Variations of the numbers that were recorded: read off the trainer's own distribution, without a forward.

Each yields the numbers of one completion under one hypothesis. It must fit whole completions, and all others
must agree without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Float32Array, sampled_runs
from mmrender.audit.trial import Case, least
from mmrender.caching import cached_property

_MOST_SHIFT: Final = 8
_CERTAIN: Final = -1e-6
_MOST_FITTED: Final = 32
_LEFT_OUT: Final = -0.999
CAUSES: Final[Mapping[str, Cause]] = {
    "rounded": "precision",
    "another's prompt": "ids",
    **dict.fromkeys(("missing or restricted", "restricted", "temperature", "penalty"), "sampling"),
    **dict.fromkeys(("capped logits", "top_p", "top_k", "min_p", "logit bias", "vocabulary"), "sampling"),
}
"""Kinds of cause of those variations that are not about `logprobs`."""


class Recorded(NamedTuple):
    """Log-probabilities under one hypothesis.

    Attributes:
        name: Name of the variation.
        statement: With `{}` for the completions that they fit.
        expected: float32 of shape `(m,)`, aligned to the view's tokens; NaN for tokens without expectation.
        fitted: How many numbers were fitted to the sampler's. Below 0 if these are remarkable themselves.
    """

    name: str
    statement: str
    expected: Float32Array
    fitted: int = 0

    @property
    def cause(self) -> Cause:
        """The kind of cause."""
        return CAUSES.get(self.name, "logprobs")


@dataclass(frozen=True)
class View:
    """One completion that differs.

    Attributes:
        case: Its sample.
        number: Index of the completion.
        rows: Its tokens, as indices into the case's `rows`.
    """

    case: Case
    number: int
    rows: npt.NDArray[np.intp]

    @cached_property
    def places(self) -> npt.NDArray[np.int32]:
        """Indices of its tokens in the sample: `(m,)`."""
        return self.case.compared.positions[self.case.rows[self.rows]]

    @cached_property
    def sampler(self) -> Float32Array:
        """The numbers that were recorded: `(m,)`."""
        return self.case.compared.sampler[self.case.rows[self.rows]]

    @cached_property
    def trainer(self) -> Float32Array:
        """The trainer's log-probabilities: `(m,)`."""
        return self.case.compared.trainer[self.case.rows[self.rows]]

    @cached_property
    def departing(self) -> npt.NDArray[np.bool_]:
        """Mark the tokens that differ: bool `(m,)`."""
        departing: npt.NDArray[np.bool_] = ~(np.abs(self.trainer - self.sampler) <= self.case.tolerance)
        return departing

    @cached_property
    def logits(self) -> Any:
        """The logits that predicted its tokens: float32 `(m, vocabulary)`."""
        return self.case.logits[self.rows]

    @cached_property
    def tokens(self) -> Any:
        """Its tokens as an index of logits: `(m, 1)`."""
        import torch

        ids = self.case.sample.token_ids[self.places].astype(np.int64)
        return torch.from_numpy(ids).to(self.logits.device)[:, None]

    @cached_property
    def target(self) -> Any:
        """The numbers that were recorded, as a tensor: `(m,)`."""
        import torch

        return torch.from_numpy(self.sampler.copy()).to(self.logits.device)

    def counts(self, rows: Any, everywhere: bool) -> Any:
        """Return how often each token came before, in the completion or everywhere: `(rows, vocabulary)`."""
        import torch

        ids, size = self.case.sample.token_ids, self.logits.shape[1]
        start = 0 if everywhere else self.case.runs[self.number][0]
        found = [np.bincount(ids[start:place], minlength=size)[:size] for place in self.places[rows].tolist()]
        return torch.from_numpy(np.stack(found)).to(self.logits.device)


def views(case: Case) -> list[View]:
    """Return the completions of a case that differ."""
    places = case.compared.positions[case.rows]
    held = [(number, *case.runs[number]) for number in case.departing_runs]
    found = [
        View(case, number, np.flatnonzero((places >= start) & (places < stop)))
        for number, start, stop in held
    ]
    return [view for view in found if len(view.rows)]


Reading: TypeAlias = Callable[[View], Iterator[Recorded]]


def _significant(values: Float32Array, digits: int) -> Float32Array:
    scale = 10.0 ** (np.floor(np.log10(np.maximum(np.abs(values), 1e-30))) - digits + 1)
    return np.asarray(np.round(values / scale) * scale, np.float32)


def _running_mean(own: Any) -> Any:
    return np.cumsum(own) / np.arange(1, len(own) + 1)


def _to_step(own: Any, step: float, rule: Callable[[Any], Any]) -> Any:
    # The last bit must not cut a number on a step to the step below.
    return rule(own / step + (1e-6 if rule is np.trunc else 0)) * step


_STEPS: Final = (1, 0.5, 0.25, 0.125, 0.0625, 0.1, 0.05, 0.01, 0.005)
_FORMS: Final[Mapping[str, Mapping[str, Callable[[Any], Any]]]] = {
    "form": {
        "probabilities were recorded, not their logarithms,": np.exp,
        "probabilities in percent were recorded": lambda own: 100 * np.exp(own),
        "inverse probabilities were recorded": lambda own: np.exp(-own),
        "log-odds were recorded": lambda own: own - np.log(-np.expm1(np.minimum(own, -1e-9))),
        "log-probabilities were recorded with the opposite sign": np.negative,
        "logarithms to the base 2 were recorded": lambda own: own / np.log(2),
        "logarithms to the base 2, the opposite sign,": lambda own: -own / np.log(2),
        "logarithms to the base 10 were recorded": lambda own: own / np.log(10),
        "logarithms to the base 10, the opposite sign,": lambda own: -own / np.log(10),
    },
    "summed": {
        "running sums of log-probabilities were recorded": np.cumsum,
        "sums of the log-probabilities left were recorded": lambda own: np.cumsum(own[::-1])[::-1],
        "running means of log-probabilities were recorded": _running_mean,
        "each token was given its completion's mean": lambda own: np.full_like(own, own.mean()),
        "each token was given its completion's log-probability": lambda own: np.full_like(own, own.sum()),
    },
    "shifted numbers": {
        "the log-probabilities are in reverse order": lambda own: own[::-1],
        "the log-probabilities are sorted, the smallest first,": np.sort,
        "the log-probabilities are sorted, the largest first,": lambda own: np.sort(own)[::-1],
    },
    "rounded": {
        **{f"multiples of {n:g} were recorded": partial(_to_step, step=n, rule=np.round) for n in _STEPS},
        **{
            f"multiples of {n:g}, cut, were recorded": partial(_to_step, step=n, rule=np.trunc)
            for n in _STEPS
        },
        **{f"{count} digits were recorded": partial(_significant, digits=count) for count in (1, 2, 3)},
    },
}
"""Other numbers made of the log-probabilities of a completion: statement and rule, by variation."""


def _forms(view: View) -> Iterator[Recorded]:
    for name, rules in _FORMS.items():
        for text, rule in rules.items():
            yield Recorded(name, text + " in {}", np.asarray(rule(view.trainer), np.float32))


def _constant(view: View) -> Iterator[Recorded]:
    """Yield the same number in place of many."""
    case, sampler, departing = view.case, view.sampler, view.departing
    values = set(sampler[departing].tolist())
    if len(values) != 1 or (value := values.pop()) != value:
        return
    expected, count = np.where(departing, np.float32(value), view.trainer), int(departing.sum())
    text = f"{value:g} was recorded in place of {count} log-probabilities in {{}}"
    if (case.compared.sampler == np.float32(value)).all():
        yield Recorded("missing", text, expected)
    elif value == 0:
        text += ": they are missing, or the sampler had one token to choose from"
        yield Recorded("missing or restricted", text, expected, -1)
    elif count > 1 and view.trainer[departing].max() < value - case.tolerance:
        yield Recorded(
            "clipped", f"log-probabilities below {value:g} were recorded as that in {{}}", expected
        )
    elif count > 3 and value.is_integer():
        yield Recorded("missing", text, expected)


def _low_precision(view: View) -> Iterator[Recorded]:
    """Yield numbers that have the digits of a shorter dtype only."""
    bits = np.ascontiguousarray(view.sampler).view(np.uint32)
    for name, zero, unit in (("bfloat16", 16, 2.0**-8), ("float16", 13, 2.0**-11)):
        bound = 8 * unit * np.maximum(1, np.abs(view.trainer)) + view.case.tolerance
        if not (bits & ((1 << zero) - 1)).any() and (np.abs(view.sampler - view.trainer) <= bound).all():
            text = f"log-probabilities were computed or recorded in {name} in {{}}"
            yield Recorded("rounded", text, view.sampler.copy())
            return


def _shifted(view: View) -> Iterator[Recorded]:
    """Yield log-probabilities a few places off: within the completion, among all, and with the prompt's."""
    compared, own = view.case.compared, view.case.rows[view.rows]
    for by in sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs)[1:]:
        where = f"{abs(by)} place(s) {'later' if by > 0 else 'earlier'} than their tokens"
        source = np.arange(len(own)) - by
        inside = (source >= 0) & (source < len(own))
        expected = np.where(inside, view.trainer[source.clip(0, len(own) - 1)], np.float32(np.nan))
        yield Recorded("shifted numbers", f"the log-probabilities of {{}} are {where}", expected)
        source = own - by
        inside = (source >= 0) & (source < len(compared.trainer))
        whole = compared.trainer[source.clip(0, len(compared.trainer) - 1)]
        text = f"the log-probabilities are {where} from {{}} on"
        yield Recorded("shifted numbers", text, np.where(inside, whole, np.float32(np.nan)))
        if abs(by) < 3:
            source = (view.places - by).clip(0, len(view.case.everything) - 1)
            text = f"the log-probabilities of {{}} are {where}, the prompt's among them"
            yield Recorded("shifted numbers", text, view.case.everything[source])


def _reordered(view: View) -> Iterator[Recorded]:
    """Yield the completion's own numbers in the order that fits best."""
    expected = np.empty_like(view.trainer)
    expected[np.argsort(view.sampler, kind="stable")] = np.sort(view.trainer)
    yield Recorded("shifted numbers", "the log-probabilities are in another order in {}", expected)
    numbers = np.sort(view.case.compared.trainer)
    after = np.searchsorted(numbers, view.sampler).clip(1, len(numbers) - 1)
    below, above = numbers[after - 1], numbers[after]
    nearest = np.where(np.abs(below - view.sampler) < np.abs(above - view.sampler), below, above)
    # Of the digits of a number one or two are lost to the choice among all.
    text = "the log-probabilities belong to other tokens of the rollout in {}"
    yield Recorded("shifted numbers", text, nearest, len(view.rows) // 3)


def _of_another(view: View) -> Iterator[Recorded]:
    """Yield the numbers of another completion, of this sample or of another one."""
    case = view.case
    own = case.sample.token_ids[slice(*case.runs[view.number])]
    for peer in [case.compared, *case.peers]:
        of = "" if peer is case.compared else f" of {peer.sample.sample_id or 'another sample'}"
        for other, (start, stop) in enumerate(sampled_runs(peer.sample.loss_mask)):
            if peer is case.compared and other == view.number:
                continue
            held = (peer.positions >= start) & (peer.positions < stop)
            values = peer.trainer[held][: len(view.rows)]
            expected = np.full(len(view.rows), np.nan, np.float32)
            expected[: len(values)] = values
            if np.array_equal(own, peer.sample.token_ids[start:stop]):
                text = f"{{}} was sampled after the prompt of completion {other}{of}"
                yield Recorded("another's prompt", text, expected)
            else:
                text = f"{{}} has the log-probabilities of completion {other}{of}"
                yield Recorded("another's numbers", text, expected)


def _scaled(view: View) -> Iterator[Recorded]:
    usable = view.departing & np.isfinite(view.sampler) & (view.trainer < -view.case.tolerance)
    if usable.sum() < 3:
        return
    factor = float(np.median(view.sampler[usable] / view.trainer[usable]))
    text = f"log-probabilities were multiplied by {factor:.4g} in {{}}"
    yield Recorded("scaled", text, (view.trainer * factor).astype(np.float32), 1)
    offset = float(np.median(view.sampler[usable] - view.trainer[usable]))
    text = f"{offset:+.4g} was added to log-probabilities in {{}}"
    yield Recorded("scaled", text, (view.trainer + offset).astype(np.float32), 1)


def _of_distribution(view: View) -> Iterator[Recorded]:
    """Yield other numbers that the same distribution has at each token."""
    import torch

    logits = view.logits
    logprobs = logits.log_softmax(-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    forms = {
        "the likeliest token's log-probability was recorded, not the sampled one's,": logprobs.max(-1).values,
        "the least likely token's log-probability was recorded": logprobs.min(-1).values,
        "logits were recorded, which are not normalised,": logits.gather(1, view.tokens)[:, 0],
        "entropies were recorded": entropy,
        "negative entropies were recorded": -entropy,
    }
    for text, values in forms.items():
        yield Recorded("other number", text + " in {}", values.cpu().numpy())
    for dtype in (torch.bfloat16, torch.float16):
        rounded = logits.to(dtype).float().log_softmax(-1).gather(1, view.tokens)[:, 0]
        text = f"logits were rounded to {str(dtype).removeprefix('torch.')} before their softmax in {{}}"
        yield Recorded("rounded", text, rounded.cpu().numpy())


def _fitted(view: View) -> Iterator[Recorded]:
    """Yield the distribution after a step of the sampler with one number, the best of a search."""
    departing = np.flatnonzero(view.departing & np.isfinite(view.sampler))
    if len(departing) < 3:
        return
    chosen = departing[:: max(1, len(departing) // _MOST_FITTED)]
    before = float(np.abs(view.sampler - view.trainer)[chosen].mean())

    def after(step: _Step, value: float, rows: Any, counts: Any) -> Any:
        changed = step.rule(view.logits[rows], value, counts)
        return (changed.gather(1, view.tokens[rows]) - changed.logsumexp(-1, keepdim=True))[:, 0]

    for step in _SAMPLER_STEPS:
        counts = view.counts(chosen, step.everywhere)

        def loss(value: float, step: _Step = step, counts: Any = counts) -> float:
            return float((after(step, value, chosen, counts) - view.target[chosen]).abs().mean())

        value = least(loss, step.low, step.high, points=24, enough=before)
        every = np.arange(len(view.rows))
        expected = after(step, value, every, view.counts(every, step.everywhere)).cpu().numpy()
        text = f"the log-probabilities are those {step.text} {value:.4g} in {{}}"
        yield Recorded(step.name, text, expected, 1)


class _Step(NamedTuple):
    """A step between logits and log-probabilities with one number, and the number's bounds."""

    name: str
    text: str
    rule: Callable[[Any, float, Any], Any]
    low: float
    high: float
    everywhere: bool = False


def _repetition(logits: Any, value: float, counts: Any) -> Any:
    return (logits / value).where(logits > 0, logits * value).where(counts > 0, logits)


def _capped(logits: Any, value: float, _: Any) -> Any:
    return value * (logits / value).tanh()


def _uncapped(logits: Any, value: float, _: Any) -> Any:
    return value * (logits / value).clamp(-1 + 1e-7, 1 - 1e-7).atanh()


_PENALTIES: Final[Mapping[str, tuple[Callable[[Any, float, Any], Any], float, float]]] = {
    "repetition": (_repetition, 0.2, 5.0),
    "presence": (lambda logits, value, counts: logits - value * (counts > 0), 0.01, 5.0),
    "frequency": (lambda logits, value, counts: logits - value * counts, 0.01, 5.0),
}
_SAMPLER_STEPS: Final[tuple[_Step, ...]] = (
    _Step("temperature", "at temperature", lambda logits, value, _: logits / value, 0.02, 50.0),
    *(
        _Step("penalty", f"after a {name} penalty{where} of", *rule, bool(where))
        for name, rule in _PENALTIES.items()
        for where in ("", ", the prompt included,")
    ),
    _Step("capped logits", "of logits capped at", _capped, 1.0, 200.0),
    _Step("capped logits", "of logits without their cap at", _uncapped, 1.0, 200.0),
)

_TEMPERATURES: Final = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)


def _truncated(view: View) -> Iterator[Recorded]:
    """Yield the distribution cut to its likeliest tokens, in the way that all tokens allow."""
    import torch

    if not np.isfinite(view.sampler).all():
        return
    for temperature in _TEMPERATURES:
        logprobs = (view.logits / temperature).log_softmax(-1)
        own = logprobs.gather(1, view.tokens)[:, 0]
        ordered = logprobs.sort(-1, descending=True).values
        masses = ordered.exp().cumsum(-1)
        # The remaining mass, by which an engine divides.
        wanted = (own - view.target).exp().clamp(max=1.0)
        size = (masses - wanted[:, None]).abs().argmin(-1)
        kept = masses.gather(1, size[:, None])[:, 0]
        expected = (own - kept.log()).cpu().numpy()
        fits = ~(np.abs(expected - view.sampler) > view.case.tolerance)
        # Nothing was cut off if the remaining mass is the whole mass.
        if not fits.all() or float(kept.log().abs().max()) <= view.case.tolerance:
            continue
        before = torch.where(size > 0, masses.gather(1, (size - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        first = ordered[:, 0]
        last = (ordered.gather(1, size[:, None])[:, 0] - first).exp()
        beyond = (size + 1).clamp(max=ordered.shape[1] - 1)
        after = (ordered.gather(1, beyond[:, None])[:, 0] - first).exp()
        if int(size.min()) == int(size.max()):
            name, bounds = "top_k", f"of {int(size[0]) + 1}"
        elif float(before.max()) <= float(kept.min()) + 1e-4:
            name, bounds = "top_p", f"between {float(before.max()):.4g} and {float(kept.min()):.4g}"
        elif float(after.max()) <= float(last.min()):
            name, bounds = "min_p", f"between {float(after.max()):.4g} and {float(last.min()):.4g}"
        else:
            continue
        at = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        yield Recorded(name, f"the log-probabilities are those after {name} {bounds}{at} in {{}}", expected)


def _other_vocabulary(view: View) -> Iterator[Recorded]:
    """Yield the distribution over fewer tokens or more, or with a bias on one."""
    import torch

    if view.departing.sum() < 3 or not np.isfinite(view.sampler).all():
        return
    logprobs = view.logits.log_softmax(-1)
    own, probabilities = logprobs.gather(1, view.tokens), logprobs.exp()
    # The engine's divisor as a share of the trainer's.
    share = (own[:, 0] - view.target).exp()
    masses = probabilities.cumsum(-1)
    size = int((masses.log() - share.log()[:, None]).abs().amax(0).argmin()) + 1
    expected = own[:, 0] - masses[:, size - 1].log()
    text = f"the sampler's distribution was over the first {size} tokens of the vocabulary in {{}}"
    yield Recorded("vocabulary", text, expected.cpu().numpy(), 1)
    more = round(float(((share - 1) * view.logits.logsumexp(-1).exp()).median()))
    if more > 0:
        total = torch.logaddexp(view.logits.logsumexp(-1), torch.tensor(float(more), device=own.device).log())
        expected = view.logits.gather(1, view.tokens)[:, 0] - total
        text = f"the sampler's distribution was over {more} tokens more, of logit 0, in {{}}"
        yield Recorded("vocabulary", text, expected.cpu().numpy(), 1)
    # With a bias on one token, the same multiple of its probability is added to the divisor.
    ratios = (share - 1)[:, None] / probabilities.clamp(min=1e-12)
    ratios = ratios.gather(0, probabilities.argmax(0)[None])[0].clamp(min=-1 + 1e-12)
    others = (1 + ratios * probabilities).clamp(min=1e-12).log() - share.log()[:, None]
    token = int(others.abs().amax(0).argmin())
    ratio = float(ratios[token])
    left_out = ratio < _LEFT_OUT
    bias = float(np.log1p(-1 + 1e-12 if left_out else ratio))
    expected = own[:, 0] - (1 + np.expm1(bias) * probabilities[:, token]).clamp(min=1e-12).log()
    expected = expected + (view.tokens[:, 0] == token) * bias
    kind = "left out" if left_out else f"had a bias of {bias:+.3g} on"
    text = f"the sampler's distribution {kind} token {token} in {{}}"
    yield Recorded("logit bias", text, expected.cpu().numpy(), 1 if left_out else 2)


def _restricted(view: View) -> Iterator[Recorded]:
    """Yield tokens of which a grammar or mask allowed only a few.

    Engines renormalise over the allowed tokens, so their numbers are never below the model's, and 0 if one
    token was allowed.
    """
    sampler, departing = view.sampler, view.departing
    certain = int(np.sum(departing & (sampler >= _CERTAIN)))
    below = (sampler[departing] > view.trainer[departing]).all() and (sampler <= 0).all()
    if not below or certain < max(2, departing.sum() / 2):
        return
    text = (
        "the sampler was restricted to a grammar or a few tokens, and its log-probabilities are of these: "
        f"{int(departing.sum())} tokens depart, the sampler higher in all and certain of {certain}, in {{}}"
    )
    yield Recorded("restricted", text, np.where(departing, sampler, view.trainer))


RECORDED_VARIATIONS: Final[tuple[tuple[Reading, ...], ...]] = (
    (_constant, _forms, _low_precision, _shifted, _of_another),
    (_reordered, _scaled, _of_distribution, _fitted, _truncated, _other_vocabulary),
    (_restricted,),
)
"""Readings in groups. A later group is tried if an earlier one does not fit."""
