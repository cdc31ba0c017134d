"""Rows of sampling and recording: read off the trainer's own distribution, without another forward.

Each yields the numbers of one completion under one hypothesis. It must fit whole completions, and all others must
agree without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Recorded, minimum
from mmrender.audit.report import Float32Array, sampled_runs
from mmrender.caching import cached_property

_MAX_SHIFT: Final = 4
_MAX_FITTED: Final = 32
_MAX_BANNED: Final = 6
_CERTAIN: Final = -1e-6


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def share(self) -> Any:
        """The sampler's divisor as a share of the trainer's, at each token: `(m,)`."""
        return (self.logits.log_softmax(-1).gather(1, self.tokens)[:, 0] - self.target).exp()

    def counts(self, rows: Any, everywhere: bool) -> Any:
        """Return how often each token came before, in the completion or everywhere: `(rows, vocabulary)`."""
        import torch

        ids, size = self.case.sample.token_ids, self.logits.shape[1]
        start = 0 if everywhere else self.case.runs[self.number][0]
        found = [np.bincount(ids[start:place], minlength=size)[:size] for place in self.places[rows].tolist()]
        return torch.from_numpy(np.stack(found)).to(self.logits.device)


def views(case: Case) -> list[View]:
    """Return the completions of a case that differ."""
    places, found = case.compared.positions[case.rows], []
    for number in case.departing_runs:
        start, stop = case.runs[number]
        found.append(View(case, number, np.flatnonzero((places >= start) & (places < stop))))
    return [view for view in found if len(view.rows)]


_FORMS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "probabilities were recorded, not their logarithms,": np.exp,
    "log-probabilities were recorded with the opposite sign": np.negative,
    "logarithms to the base 2 were recorded": lambda own: own / np.log(2),
    "logarithms to the base 10 were recorded": lambda own: own / np.log(10),
}
_SUMS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "running sums of log-probabilities were recorded": np.cumsum,
    "each token was given its completion's mean": lambda own: np.full_like(own, own.mean()),
    "each token was given its completion's sum": lambda own: np.full_like(own, own.sum()),
}
_DECIMALS: Final[Mapping[str, Callable[[Any], Any]]] = {
    f"{count} decimals were recorded": partial(np.round, decimals=count) for count in (0, 1, 2, 3)
}


def _of_table(table: Mapping[str, Callable[[Any], Any]], view: View) -> Iterator[Recorded]:
    for text, rule in table.items():
        yield Recorded(text + " in {}", np.asarray(rule(view.trainer), np.float32))


def _missing(view: View) -> Iterator[Recorded]:
    """Yield one number in place of many, or of all below it."""
    sampler, departing = view.sampler, view.departing
    values = {0.0 if value == 0 else value for value in sampler[departing].tolist()}
    if len(values) != 1 or (value := values.pop()) != value:
        return
    expected, count = np.where(departing, np.float32(value), view.trainer), int(departing.sum())
    text = f"{value:g} was recorded in place of {count} log-probabilities in {{}}"
    if (sampler == np.float32(value)).all() or (count > 3 and value.is_integer()):
        yield Recorded(text, expected)
    elif value == 0:
        # A remarkable number by itself.
        text += ": they are missing, or the sampler had one token to choose from"
        yield Recorded(text, expected, -1)
    elif count > 1 and view.trainer[departing].max() < value - view.case.tolerance:
        yield Recorded(f"log-probabilities below {value:g} were recorded as that in {{}}", expected)


def _rounded(view: View) -> Iterator[Recorded]:
    """Yield numbers, or logits, that have the digits of a shorter dtype or of few decimals only."""
    import torch

    bits = np.ascontiguousarray(view.sampler).view(np.uint32)
    for name, zero, unit in (("bfloat16", 16, 2.0**-8), ("float16", 13, 2.0**-11)):
        bound = 8 * unit * np.maximum(1, np.abs(view.trainer)) + view.case.tolerance
        if not (bits & ((1 << zero) - 1)).any() and (np.abs(view.sampler - view.trainer) <= bound).all():
            yield Recorded(
                f"log-probabilities were computed or recorded in {name} in {{}}", view.sampler.copy()
            )
            return
    yield from _of_table(_DECIMALS, view)
    for dtype in (torch.bfloat16, torch.float16):
        short = view.logits.to(dtype).float().log_softmax(-1).gather(1, view.tokens)[:, 0]
        name = str(dtype).removeprefix("torch.")
        yield Recorded(f"logits were rounded to {name} before their softmax in {{}}", short.cpu().numpy())


def _shifted(view: View) -> Iterator[Recorded]:
    """Yield log-probabilities a few places off: within the completion, among all, and with the prompt's."""
    compared, own = view.case.compared, view.case.rows[view.rows]
    for by in sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)[1:]:
        where = f"{abs(by)} place(s) {'later' if by > 0 else 'earlier'} than their tokens"
        source = np.arange(len(own)) - by
        inside = (source >= 0) & (source < len(own))
        expected = np.where(inside, view.trainer[source.clip(0, len(own) - 1)], np.float32(np.nan))
        yield Recorded(f"the log-probabilities of {{}} are {where}", expected)
        source = own - by
        inside = (source >= 0) & (source < len(compared.trainer))
        whole = compared.trainer[source.clip(0, len(compared.trainer) - 1)]
        yield Recorded(
            f"the log-probabilities are {where} from {{}} on", np.where(inside, whole, np.float32(np.nan))
        )
        if abs(by) < 3:
            source = (view.places - by).clip(0, len(view.case.everything) - 1)
            text = f"the log-probabilities of {{}} are {where}, the prompt's among them"
            yield Recorded(text, view.case.everything[source])


def _of_another(view: View) -> Iterator[Recorded]:
    """Yield the numbers of another completion, of this sample or of another one."""
    case = view.case
    own = case.sample.token_ids[slice(*case.runs[view.number])]
    for peer in [case.compared, *case.peers]:
        of = "" if peer is case.compared else f" of {peer.sample.sample_id or 'another sample'}"
        for other, (start, stop) in enumerate(sampled_runs(peer.sample.loss_mask)):
            if peer is case.compared and other == view.number:
                continue
            within = (peer.positions >= start) & (peer.positions < stop)
            expected = np.full(len(view.rows), np.nan, np.float32)
            values = peer.trainer[within][: len(expected)]
            expected[: len(values)] = values
            same = np.array_equal(own, peer.sample.token_ids[start:stop])
            how = "was sampled after the prompt" if same else "has the log-probabilities"
            yield Recorded(f"{{}} {how} of completion {other}{of}", expected)


def _scaled(view: View) -> Iterator[Recorded]:
    usable = view.departing & np.isfinite(view.sampler) & (view.trainer < -view.case.tolerance)
    if usable.sum() < 3:
        return
    factor = float(np.median(view.sampler[usable] / view.trainer[usable]))
    text = f"log-probabilities were multiplied by {factor:.4g} in {{}}"
    yield Recorded(text, (view.trainer * factor).astype(np.float32), 1)
    offset = float(np.median(view.sampler[usable] - view.trainer[usable]))
    text = f"{offset:+.4g} was added to log-probabilities in {{}}"
    yield Recorded(text, (view.trainer + offset).astype(np.float32), 1)


def _other_number(view: View) -> Iterator[Recorded]:
    """Yield other numbers that the same distribution has at each token."""
    import torch

    logprobs = view.logits.log_softmax(-1)
    forms = {
        "the likeliest token's log-probability was recorded, not the sampled one's,": logprobs.amax(-1),
        "logits were recorded, which are not normalised,": view.logits.gather(1, view.tokens)[:, 0],
        "entropies were recorded": torch.special.entr(logprobs.exp()).sum(-1),
    }
    for text, values in forms.items():
        yield Recorded(text + " in {}", values.cpu().numpy())


class _Step(NamedTuple):
    """A step between logits and log-probabilities with one number, and the number's bounds."""

    text: str
    rule: Callable[[Any, float, Any], Any]
    low: float
    high: float
    everywhere: bool = False


def _repetition(logits: Any, value: float, counts: Any) -> Any:
    return (logits / value).where(logits > 0, logits * value).where(counts > 0, logits)


def _uncapped(logits: Any, value: float, _: Any) -> Any:
    return value * (logits / value).clamp(-1 + 1e-7, 1 - 1e-7).atanh()


_TEMPERATURE: Final = (_Step("at temperature", lambda logits, value, _: logits / value, 0.02, 50.0),)
_PENALTIES: Final = tuple(
    _Step(f"after a {name} penalty{where} of", rule, low, 5.0, bool(where))
    for name, rule, low in (
        ("repetition", _repetition, 0.2),
        ("presence", lambda logits, value, counts: logits - value * (counts > 0), 0.01),
        ("frequency", lambda logits, value, counts: logits - value * counts, 0.01),
    )
    for where in ("", ", the prompt included,")
)
_CAPS: Final = (
    _Step("of logits capped at", lambda logits, value, _: value * (logits / value).tanh(), 1.0, 200.0),
    _Step("of logits without their cap at", _uncapped, 1.0, 200.0),
)


def _stepped(steps: tuple[_Step, ...], view: View) -> Iterator[Recorded]:
    """Yield the distribution after a step of the sampler with one number, the best of a search."""
    departing = np.flatnonzero(view.departing & np.isfinite(view.sampler))
    if len(departing) < 3:
        return
    chosen = departing[:: max(1, len(departing) // _MAX_FITTED)]
    before = float(np.abs(view.sampler - view.trainer)[chosen].mean())

    def after(step: _Step, value: float, rows: Any, counts: Any) -> Any:
        changed = step.rule(view.logits[rows], value, counts)
        return (changed.gather(1, view.tokens[rows]) - changed.logsumexp(-1, keepdim=True))[:, 0]

    for step in steps:
        counts = view.counts(chosen, step.everywhere)

        def loss(value: float, step: _Step = step, counts: Any = counts) -> float:
            return float((after(step, value, chosen, counts) - view.target[chosen]).abs().mean())

        value = minimum(loss, step.low, step.high, points=24, enough=before)
        every = np.arange(len(view.rows))
        expected = after(step, value, every, view.counts(every, step.everywhere)).cpu().numpy()
        yield Recorded(f"the log-probabilities are those {step.text} {value:.4g} in {{}}", expected, 1)


def _truncated(view: View) -> Iterator[Recorded]:
    """Yield the distribution cut to its likeliest tokens, in the way that all tokens allow."""
    import torch

    if not np.isfinite(view.sampler).all():
        return
    for temperature in (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5):
        logprobs = (view.logits / temperature).log_softmax(-1)
        own = logprobs.gather(1, view.tokens)[:, 0]
        ordered = logprobs.sort(-1, descending=True).values
        masses = ordered.exp().cumsum(-1)
        wanted = (own - view.target).exp().clamp(max=1.0)  # the mass that is left, by which an engine divides
        size = (masses - wanted[:, None]).abs().argmin(-1)
        kept = masses.gather(1, size[:, None])[:, 0]
        expected = (own - kept.log()).cpu().numpy()
        fits = ~(np.abs(expected - view.sampler) > view.case.tolerance)
        # Nothing was cut off if the remaining mass is the whole mass.
        if not fits.all() or float(kept.log().abs().max()) <= view.case.tolerance:
            continue
        before = torch.where(size > 0, masses.gather(1, (size - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        last = (ordered.gather(1, size[:, None])[:, 0] - ordered[:, 0]).exp()
        beyond = (size + 1).clamp(max=ordered.shape[1] - 1)
        after = (ordered.gather(1, beyond[:, None])[:, 0] - ordered[:, 0]).exp()
        if int(size.min()) == int(size.max()):
            rule = f"top_k of {int(size[0]) + 1}"
        elif float(before.max()) <= float(kept.min()) + 1e-4:
            rule = f"top_p between {float(before.max()):.4g} and {float(kept.min()):.4g}"
        elif float(after.max()) <= float(last.min()):
            rule = f"min_p between {float(after.max()):.4g} and {float(last.min()):.4g}"
        else:
            continue
        at = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        yield Recorded(f"the log-probabilities are those after {rule}{at} in {{}}", expected)


def _vocabulary(view: View) -> Iterator[Recorded]:
    """Yield the distribution over the first tokens of the vocabulary, or over padding as well."""
    import torch

    if view.departing.sum() < 3 or not np.isfinite(view.sampler).all():
        return
    own = view.logits.log_softmax(-1).gather(1, view.tokens)[:, 0]
    masses = view.logits.softmax(-1).cumsum(-1)
    size = int((masses.log() - view.share.log()[:, None]).abs().amax(0).argmin()) + 1
    expected = (own - masses[:, size - 1].log()).cpu().numpy()
    text = f"the sampler's distribution was over the first {size} tokens of the vocabulary in {{}}"
    yield Recorded(text, expected, 1)
    more = round(float(((view.share - 1) * view.logits.logsumexp(-1).exp()).median()))
    if more > 0:
        whole = view.logits.logsumexp(-1)
        total = torch.logaddexp(whole, torch.full_like(whole, float(more)).log())
        expected = (view.logits.gather(1, view.tokens)[:, 0] - total).cpu().numpy()
        text = f"the sampler's distribution was over {more} tokens more, of logit 0, in {{}}"
        yield Recorded(text, expected, 1)


def _biased(view: View) -> Iterator[Recorded]:
    """Yield distributions without some tokens, or with a bias on one."""
    if view.departing.sum() < 3 or not np.isfinite(view.sampler).all():
        return
    probabilities, share = view.logits.softmax(-1), view.share
    own = view.logits.log_softmax(-1).gather(1, view.tokens)[:, 0]
    left, banned = 1 - share, list[int]()
    while len(banned) < _MAX_BANNED and float(left.abs().max()) > 1e-5:
        token = int((left[:, None] - probabilities).abs().sum(0).argmin())
        if token in banned or float((left - probabilities[:, token]).abs().sum()) >= float(left.abs().sum()):
            break
        banned.append(token)
        left = left - probabilities[:, token]
        kept = (1 - probabilities[:, banned].sum(1)).clamp(min=1e-12)
        text = f"token(s) {', '.join(map(str, banned))} could not be sampled in {{}}"
        yield Recorded(text, (own - kept.log()).cpu().numpy(), len(banned))
    last = int(np.flatnonzero(view.departing)[-1]) + 1  # the first tokens only, as with min_tokens
    for token in banned[:1]:
        kept = 1 - probabilities[:, token]
        kept[last:] = 1.0
        text = f"token {token} could not be sampled among the first {last} tokens of {{}}"
        yield Recorded(text, (own - kept.clamp(min=1e-12).log()).cpu().numpy(), 2)
    # With a bias on one token, the same multiple of its probability is added to the divisor.
    ratios = ((share - 1)[:, None] / probabilities.clamp(min=1e-12)).gather(0, probabilities.argmax(0)[None])[
        0
    ]
    ratios = ratios.clamp(min=-1 + 1e-6)
    others = (1 + ratios * probabilities).clamp(min=1e-12).log() - share.log()[:, None]
    token = int(others.abs().amax(0).argmin())
    bias = float(np.log1p(float(ratios[token])))
    expected = own - (1 + np.expm1(bias) * probabilities[:, token]).clamp(min=1e-12).log()
    text = f"the sampler's distribution had a bias of {bias:+.3g} on token {token} in {{}}"
    yield Recorded(text, (expected + (view.tokens[:, 0] == token) * bias).cpu().numpy(), 2)


def _restricted(view: View) -> Iterator[Recorded]:
    """Yield tokens of which a grammar or mask allowed only a few.

    Engines renormalise over the allowed tokens, so their numbers are never below the model's, and 0 if one
    token was allowed.
    """
    sampler, departing = view.sampler, view.departing
    certain = int(np.sum(departing & (sampler >= _CERTAIN)))
    below = (sampler[departing] > view.trainer[departing]).all() and (sampler <= 0).all()
    if below and certain >= max(2, departing.sum() / 2):
        text = (
            "the sampler was restricted to a grammar or a few tokens, and its log-probabilities are of these: "
            f"{int(departing.sum())} tokens depart, the sampler higher in all and certain of {certain}, in {{}}"
        )
        yield Recorded(text, np.where(departing, sampler, view.trainer))


READINGS: Final[Mapping[str, Callable[[View], Iterator[Recorded]]]] = {
    "missing": _missing,
    "form": partial(_of_table, _FORMS),
    "summed": partial(_of_table, _SUMS),
    "rounded": _rounded,
    "shifted numbers": _shifted,
    "another's numbers": _of_another,
    "scaled": _scaled,
    "other number": _other_number,
    "temperature": partial(_stepped, _TEMPERATURE),
    "penalty": partial(_stepped, _PENALTIES),
    "soft cap": partial(_stepped, _CAPS),
    "truncation": _truncated,
    "vocabulary": _vocabulary,
    "logit bias": _biased,
    "restricted": _restricted,
}
"""Numbers to try for a completion, by row."""
