"""Rows of recording: other numbers, read off the trainer's own distribution without another forward.

Each yields the numbers of one completion under one hypothesis. It must fit whole completions, and all others
must agree without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Trial
from mmrender.audit.computed import replaced
from mmrender.audit.report import Comparison, Float32Array, sampled_runs
from mmrender.audit.weights import as_given
from mmrender.caching import cached_property

_MAX_SHIFT: Final = 4
_REMARKABLE: Final = 50
"""Integers from here on are no log-probabilities of sampled tokens."""
_MAX_LATE: Final = 8


@dataclass(frozen=True, eq=False)
class View(Comparison):
    """One completion that differs, of `m` tokens.

    Attributes:
        case: Its sample.
        number: Index of the completion.
        rows: Its tokens, as indices into `case.compared.positions`.
        logits: The logits that predicted its tokens: float32 tensor `(m, vocabulary)`.
    """

    case: Case
    number: int
    rows: npt.NDArray[np.intp]
    logits: Any

    @cached_property
    def departing(self) -> npt.NDArray[np.bool_]:
        """Marks the tokens that differ."""
        return self.beyond(self.case.tolerance)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first token that differs, and the token after the last one, as indices into its tokens."""
        return int(self.departing.argmax()), len(self.rows) - int(self.departing[::-1].argmax())

    @cached_property
    def tokens(self) -> Any:
        """Its tokens as an index of logits: int64 tensor `(m, 1)`."""
        import torch

        ids = self.sample.token_ids[self.positions].astype(np.int64)
        return torch.from_numpy(ids).to(self.logits.device)[:, None]

    @property
    def is_rich(self) -> bool:
        """Whether three of its tokens differ, and all its numbers are finite."""
        return bool(self.departing.sum() >= 3 and np.isfinite(self.sampler).all())

    def under(self, logits: Any, some: Any = slice(None)) -> Float32Array:
        """Return the log-probabilities of its tokens, or of some, under other logits: `(m,)`."""
        picked: Float32Array = logits.log_softmax(-1).gather(1, self.tokens[some])[:, 0].cpu().numpy()
        return picked

    def counts(self, everywhere: bool) -> Any:
        """Return how often each token came before, in the completion or everywhere: `(m, vocabulary)`."""
        import torch

        ids, size = self.sample.token_ids, self.logits.shape[1]
        start = 0 if everywhere else self.case.runs[self.number][0]
        found = [np.bincount(ids[start:place], minlength=size)[:size] for place in self.positions.tolist()]
        return torch.from_numpy(np.stack(found)).to(self.logits.device)


def views(case: Case) -> list[View]:
    """Return the completions of a case that differ."""
    found = []
    for number in case.departing_runs:
        inside = np.flatnonzero(np.isin(case.rows, np.r_[case.rows_of(number)]))
        rows = case.rows[inside]
        if len(rows):
            own = case.compared.of_rows(rows)
            numbers = own.positions, own.sampler, own.trainer
            found.append(View(case.sample, *numbers, case, number, rows, case.logits[inside]))
    return found


def forms(view: View) -> Iterator[Trial]:
    """Yield other forms of the numbers, and numbers of other tokens."""
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
    yield from (Trial(text, expected=values) for text, values in forms.items())


def missing(view: View) -> Iterator[Trial]:
    """Yield one number in place of many, or of all below it."""
    sampler, departing = view.sampler, view.departing
    values = {0.0 if value == 0 else value for value in sampler[departing].tolist()}
    if len(values) != 1 or (value := values.pop()) != value:
        return
    expected, count = np.where(departing, np.float32(value), view.trainer), int(departing.sum())
    text = f"{value:g} was recorded in place of {count} log-probabilities"
    if (sampler == np.float32(value)).all() or (count > 3 and value.is_integer()):
        yield Trial(text, expected=expected)
    elif value == 0:  # a remarkable number by itself
        text += ": they are missing, or the sampler had one token to choose from"
        yield Trial(text, expected=expected, fitted=-1)
    elif value.is_integer() and abs(value) >= _REMARKABLE:
        yield Trial(f"{text}: a placeholder for none", expected=expected, fitted=-1)
    elif count > 1 and view.trainer[departing].max() < value - view.case.tolerance:
        yield Trial(f"log-probabilities below {value:g} were recorded as that", expected=expected)
    elif count > 1 and view.trainer[departing].min() > value + view.case.tolerance:
        yield Trial(f"log-probabilities above {value:g} were recorded as that", expected=expected)


def rounded(view: View) -> Iterator[Trial]:
    """Yield numbers that have the digits of a shorter dtype or of few decimals only."""
    bits, own = np.ascontiguousarray(view.sampler).view(np.uint32), view.trainer
    for name, zero, unit in (("bfloat16", 16, 2.0**-8), ("float16", 13, 2.0**-11)):
        bound = 8 * unit * np.maximum(1, np.abs(own)) + view.case.tolerance
        if not (bits & ((1 << zero) - 1)).any() and (np.abs(view.sampler - own) <= bound).all():
            text = f"log-probabilities were computed or recorded in {name}"
            yield Trial(text, expected=view.sampler.copy())
            return
    for count in range(4):
        yield Trial(f"log-probabilities were rounded to {count} decimals", expected=np.round(own, count))
    for count in range(1, 5):
        digits = [float(f"{value:.{count}g}") for value in own.tolist()]
        text = f"log-probabilities were rounded to {count} significant digits"
        yield Trial(text, expected=np.asarray(digits, np.float32))
        with np.errstate(divide="ignore"):
            logs = np.log(np.round(np.exp(own.astype(np.float64)), count + 1))
        text = f"probabilities were rounded to {count + 1} decimals before their logarithm"
        yield Trial(text, expected=logs.astype(np.float32))


def _laid(values: Float32Array, source: npt.NDArray[np.integer]) -> Float32Array:
    """Return the values at some places, NaN for places outside."""
    inside = (source >= 0) & (source < len(values))
    return np.append(values, np.float32(np.nan))[np.where(inside, source, len(values))]


def _moved(by: int) -> str:
    return f"{abs(by)} place(s) {'later' if by > 0 else 'earlier'} than their tokens"


def shifted(view: View) -> Iterator[Trial]:
    """Yield log-probabilities a few places off: within the completion, among all, and with the prompt's."""
    for by in sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)[1:]:
        where = f"{_moved(by)} (shifted)"
        text = f"the log-probabilities of {{}} are {where}"
        yield Trial(text, expected=_laid(view.trainer, np.arange(len(view.rows)) - by))
        among = f"the log-probabilities are {where} from {{}} on"
        yield Trial(among, expected=_laid(view.case.compared.trainer, view.rows - by))
        yield Trial(
            f"{text}, the prompt's among them", expected=_laid(view.case.everything, view.positions - by)
        )


def late(view: View) -> Iterator[Trial]:
    """Yield numbers of chunks that came in another order, twice or never, from the first difference on."""
    own, (first, last) = np.arange(len(view.rows)), view.bounds
    for by in range(1, last - first):
        order = np.concatenate([own[:first], np.roll(own[first:last], by), own[last:]])
        what = f"log-probabilities {first} to {last - 1} are two chunks in each other's place"
        yield Trial(what, expected=view.trainer[order], fitted=1)
    for by in (by for by in range(-_MAX_LATE, _MAX_LATE + 1) if by and first):
        what = "a chunk of them came twice" if by > 0 else "a chunk of them was lost"
        text = f"the log-probabilities are {_moved(by)} from token {first} on, as if {what},"
        yield Trial(text, expected=_laid(view.trainer, own - np.where(own >= first, by, 0)), fitted=1)


def of_another(view: View) -> Iterator[Trial]:
    """Yield the numbers of another completion, of this sample or of another one."""
    case, own = view.case, np.arange(len(view.rows))
    runs = [case.compared.trainer[case.rows_of(number)] for number in range(len(case.runs))]
    for by in range(1, len(runs)):
        others = np.concatenate([*runs[by:], *runs[:by]])
        text = f"the log-probabilities of completions are in another order, from completion {by} on,"
        yield Trial(text, expected=others[view.rows])
    for peer in [case.compared, *case.peers]:
        name = peer.sample.sample_id or "another sample"
        of = "" if peer is case.compared else f" of {name}"
        if of:  # one after another, whatever the lengths of the completions
            text = f"the log-probabilities are the numbers of {name}"
            yield Trial(text, expected=_laid(peer.trainer, view.rows))
        for other, (start, stop) in enumerate(sampled_runs(peer.sample.loss_mask)):
            if peer is not case.compared or other != view.number:
                values = peer.trainer[(peer.positions >= start) & (peer.positions < stop)]
                text = f"{{}} has the log-probabilities of completion {other}{of}"
                yield Trial(text, expected=_laid(values, own))


def scaled(view: View) -> Iterator[Trial]:
    """Yield numbers after a factor, an offset or an epsilon."""
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
    yield from (Trial(text, expected=one.astype(np.float32), fitted=1) for text, one in numbers.items())


def of_other_weights(view: View) -> Iterator[Trial]:
    """Yield completions that other weights began or ended, as of requests continued after an update."""
    case, places, (first, last) = view.case, np.arange(len(view.rows)), view.bounds
    for name, given in case.weights.items():
        changed = case.trainer.changed(model=partial(replaced, as_given(given, case.trainer.model)))
        (values,) = case.once(("weights", name), partial(changed.sampled_of_many, [case.sample]))
        if values is None:
            continue
        begun, ended = f"the first {last} tokens of {{}}", f"the tokens of {{}} from {first} on"
        for text, of in {begun: places < last, ended: places >= first}.items():
            expected = np.where(of, values[view.rows], view.trainer)
            yield Trial(f"{text} are of the weights of {name}", expected=expected, fitted=1)
