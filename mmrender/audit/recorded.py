"""Variations of the numbers that were recorded: read off the trainer's own distribution, without a forward.

Each gives the numbers that would have been recorded, for each token of the case's rows. What fits does so in
whole completions; others must agree as they are.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.audit.report import Cause, Float32Array, sampled_runs
from mmrender.audit.trial import Case

_MOST_SHIFT: Final = 8
_CERTAIN: Final = -1e-6
_GRID: Final = 24


class Recorded(NamedTuple):
    """Numbers that would have been recorded.

    Attributes:
        name: Of the variation.
        cause: Of the variation.
        statement: With `{}` for the completions that they fit.
        expected: float32 of shape `(m,)`, aligned to the case's rows; NaN where nothing is expected.
        fitted: How many numbers were fitted to the sampler's.
    """

    name: str
    cause: Cause
    statement: str
    expected: Float32Array
    fitted: int = 0


Reading: TypeAlias = Callable[[Case], Iterator[Recorded]]


def _rows_runs(case: Case) -> list[npt.NDArray[np.intp]]:
    """Return, for each completion that departs, which of the case's rows it has."""
    positions = case.compared.positions[case.rows]
    bounds = [case.runs[number] for number in case.departing_runs]
    held = [np.flatnonzero((positions >= start) & (positions < stop)) for start, stop in bounds]
    return [rows for rows in held if len(rows)]


def _own(case: Case) -> tuple[Float32Array, Float32Array]:
    """Return the sampler's and the trainer's numbers of the case's rows."""
    return case.compared.sampler[case.rows], case.compared.trainer[case.rows]


def _forms(case: Case) -> Iterator[Recorded]:
    """Yield the log-probability in another form."""
    _, trainer = _own(case)
    forms: dict[str, npt.NDArray[Any]] = {
        "probabilities were recorded, not their logarithms,": np.exp(trainer),
        "logarithms to the base 2 were recorded": trainer / np.log(2),
        "logarithms to the base 10 were recorded": trainer / np.log(10),
        "log-probabilities were recorded with the opposite sign": -trainer,
        "inverse probabilities were recorded": np.exp(-trainer),
    }
    for text, expected in forms.items():
        yield Recorded("form", "logprobs", text + " in {}", expected.astype(np.float32))
    sums, means, totals, reverse = (np.full(len(trainer), np.nan, np.float32) for _ in range(4))
    for rows in _rows_runs(case):
        sums[rows], means[rows] = np.cumsum(trainer[rows]), trainer[rows].mean()
        totals[rows], reverse[rows] = trainer[rows].sum(), trainer[rows][::-1]
    yield Recorded("summed", "logprobs", "running sums of log-probabilities were recorded in {}", sums)
    yield Recorded(
        "summed", "logprobs", "each token was given the mean log-probability of its completion in {}", means
    )
    yield Recorded(
        "summed",
        "logprobs",
        "each token was given the log-probability of all of its completion in {}",
        totals,
    )
    yield Recorded("shifted numbers", "logprobs", "the log-probabilities are in reverse order in {}", reverse)


def _constant(case: Case) -> Iterator[Recorded]:
    """Yield the same number in place of many."""
    sampler, trainer = _own(case)
    departing = ~(np.abs(trainer - sampler) <= case.tolerance)
    if departing.sum() < 2 or len(set(sampler[departing].tolist())) != 1:
        return
    value = float(sampler[departing][0])
    expected = np.where(departing, np.float32(value), trainer)
    low = trainer[departing].max() < value - case.tolerance
    if value and low:
        yield Recorded(
            "clipped",
            "logprobs",
            f"log-probabilities below {value:g} were recorded as that in {{}}",
            expected,
        )
    elif (sampler == np.float32(value)).all() or departing.sum() >= 4:
        text = f"{value:g} was recorded in place of {int(departing.sum())} log-probabilities in {{}}"
        if value == 0 and len(case.departing_runs) < len(case.runs):
            text += ": they are missing, or the sampler had one token to choose from"
            yield Recorded("missing or restricted", "sampling", text, expected)
        else:
            yield Recorded("missing", "logprobs", text, expected)


def _rounded(case: Case) -> Iterator[Recorded]:
    sampler, trainer = _own(case)
    for digits in (0, 1, 2, 3):
        if np.allclose(sampler, np.round(sampler, digits), atol=1e-6):
            near = np.abs(sampler - trainer) <= 0.5001 * 10.0**-digits + case.tolerance
            expected = np.where(near, sampler, np.float32(np.nan))
            if near.all():
                text = f"log-probabilities were rounded to {digits} decimal(s) in {{}}"
                yield Recorded("rounded", "logprobs", text, expected)
            return
    bits = np.ascontiguousarray(sampler).view(np.uint32)
    for name, zero, unit in (("bfloat16", 16, 2.0**-8), ("float16", 13, 2.0**-11)):
        near = np.abs(sampler - trainer) <= 8 * unit * np.maximum(1, np.abs(trainer)) + case.tolerance
        if not (bits & ((1 << zero) - 1)).any() and near.all():
            text = f"log-probabilities were computed or recorded in {name} in {{}}"
            yield Recorded("rounded", "precision", text, sampler.copy())
            return


def _shifted(case: Case) -> Iterator[Recorded]:
    """Yield log-probabilities that are a few places off, within each completion."""
    _, trainer = _own(case)
    whole = case.compared.trainer
    for by in sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs):
        if not by:
            continue
        expected = np.full(len(trainer), np.nan, np.float32)
        for rows in _rows_runs(case):
            if len(rows) > abs(by) + 1:
                source = trainer[rows]
                moved = np.full(len(rows), np.nan, np.float32)
                moved[max(by, 0) : len(rows) + min(by, 0)] = source[max(-by, 0) : len(rows) - max(by, 0)]
                expected[rows] = moved
        where = "later" if by > 0 else "earlier"
        text = f"the log-probabilities of {{}} are {abs(by)} place(s) {where} than their tokens"
        yield Recorded("shifted numbers", "logprobs", text, expected)
        across = np.full(len(whole), np.nan, np.float32)
        across[max(by, 0) : len(whole) + min(by, 0)] = whole[max(-by, 0) : len(whole) - max(by, 0)]
        if len(case.runs) > 1:
            text = f"the log-probabilities are {abs(by)} place(s) {where} than their tokens from {{}} on"
            yield Recorded("shifted numbers", "logprobs", text, across[case.rows])


def _of_another(case: Case) -> Iterator[Recorded]:
    """Yield the numbers of another completion, of this sample or of another one."""
    _, trainer = _own(case)
    positions = case.compared.positions
    own = {
        number: case.compared.trainer[(positions >= start) & (positions < stop)]
        for number, (start, stop) in enumerate(case.runs)
    }
    for number, rows in zip(case.departing_runs, _rows_runs(case), strict=False):

        def laid(values: Float32Array, rows: npt.NDArray[np.intp] = rows) -> Float32Array:
            expected = np.full(len(trainer), np.nan, np.float32)
            count = min(len(rows), len(values))
            expected[rows[:count]] = values[:count]
            return expected

        for other, values in own.items():
            if other != number:
                text = f"{{}} has the log-probabilities of completion {other}"
                yield Recorded("another's numbers", "logprobs", text, laid(values))
        for peer in case.peers:
            name = peer.sample.sample_id or "another sample"
            for other, (start, stop) in enumerate(sampled_runs(peer.sample.loss_mask)):
                values = peer.trainer[(peer.positions >= start) & (peer.positions < stop)]
                text = f"{{}} has the log-probabilities of completion {other} of {name}"
                if np.array_equal(
                    case.sample.token_ids[slice(*case.runs[number])], peer.sample.token_ids[start:stop]
                ):
                    # Of the same tokens after another prompt.
                    text = f"{{}} was sampled after the prompt of completion {other} of {name}"
                    yield Recorded("another's prompt", "ids", text, laid(values))
                else:
                    yield Recorded("another's numbers", "logprobs", text, laid(values))


def _scaled(case: Case) -> Iterator[Recorded]:
    sampler, trainer = _own(case)
    departing = np.abs(trainer - sampler) > case.tolerance
    usable = departing & np.isfinite(sampler) & (trainer < -case.tolerance)
    if usable.sum() < 3:
        return
    factor = float(np.median(sampler[usable] / trainer[usable]))
    yield Recorded(
        "scaled",
        "logprobs",
        f"log-probabilities were multiplied by {factor:.4g} in {{}}",
        (trainer * factor).astype(np.float32),
        1,
    )
    offset = float(np.median(sampler[usable] - trainer[usable]))
    yield Recorded(
        "scaled",
        "logprobs",
        f"{offset:+.4g} was added to log-probabilities in {{}}",
        (trainer + offset).astype(np.float32),
        1,
    )


def _of_distribution(case: Case) -> Iterator[Recorded]:
    """Yield other numbers that the same distribution has at each token."""
    import torch

    logits, tokens = case.logits, _tokens(case)
    logprobs = logits.log_softmax(-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    own = logits.gather(1, tokens)[:, 0]
    forms = {
        "the likeliest token's log-probability was recorded, not the sampled one's,": logprobs.max(-1).values,
        "the least likely token's log-probability was recorded": logprobs.min(-1).values,
        "logits were recorded, which are not normalised,": own,
        "entropies were recorded": entropy,
        "negative entropies were recorded": -entropy,
    }
    for text, values in forms.items():
        yield Recorded("other number", "logprobs", text + " in {}", values.cpu().numpy())


def _tokens(case: Case) -> Any:
    import torch

    positions = case.compared.positions[case.rows]
    ids = case.sample.token_ids[positions].astype(np.int64)
    return torch.from_numpy(ids).to(case.logits.device)[:, None]


def _fitted(case: Case) -> Iterator[Recorded]:
    """Yield the distribution after a step of the sampler with one number, the best of a search."""
    import torch

    sampler, trainer = _own(case)
    departing = np.flatnonzero(~(np.abs(trainer - sampler) <= case.tolerance) & np.isfinite(sampler))
    if len(departing) < 3:
        return
    tokens, counts = _tokens(case), _counts(case)
    chosen = departing[:: max(1, len(departing) // 32)]
    target = torch.from_numpy(sampler.copy()).to(case.logits.device)

    def after(rule: Any, value: float, rows: Any) -> Any:
        changed = rule(case.logits[rows], value, counts(rows))
        return (changed.gather(1, tokens[rows]) - changed.logsumexp(-1, keepdim=True))[:, 0]

    for name, text, rule, low, high in _RULES:

        def loss(at: float, rule: Any = rule, low: float = low, high: float = high) -> float:
            value = float(np.exp(at)) if low > 0 else at
            return float((after(rule, value, chosen) - target[chosen]).abs().mean())

        best = _least(loss, *((np.log(low), np.log(high)) if low > 0 else (low, high)))
        value = float(np.exp(best)) if low > 0 else best
        expected = after(rule, value, np.arange(len(sampler)))
        yield Recorded(name, "sampling", text.format(f"{value:.4g}") + " in {}", expected.cpu().numpy(), 1)


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number is least: a grid, then golden sections round its best point."""
    grid = np.linspace(low, high, _GRID)
    best = int(np.argmin([loss(float(at)) for at in grid]))
    left, right = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _GRID - 1)])
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(32):
        one, two = right - ratio * (right - left), left + ratio * (right - left)
        left, right = (left, two) if loss(one) < loss(two) else (one, right)
    return (left + right) / 2


def _counts(case: Case) -> Callable[[Any], tuple[Any, Any]]:
    """Return a function that gives, for rows, how often each token of the vocabulary came before.

    It returns counts within the completion, and whether it came anywhere, both `(rows, vocabulary)`.
    """
    import torch

    ids, size = case.sample.token_ids, int(case.logits.shape[1])
    positions = case.compared.positions[case.rows]
    starts = {}
    for start, stop in case.runs:
        starts.update(dict.fromkeys(range(start, stop), start))

    def counts(rows: Any) -> tuple[Any, Any]:
        own = [np.bincount(ids[starts[at] : at], minlength=size)[:size] for at in positions[rows].tolist()]
        seen = [np.bincount(ids[:at], minlength=size)[:size] > 0 for at in positions[rows].tolist()]
        device = case.logits.device
        return torch.from_numpy(np.stack(own)).to(device), torch.from_numpy(np.stack(seen)).to(device)

    return counts


def _repetition(logits: Any, value: float, counts: tuple[Any, Any]) -> Any:
    penalised = (logits / value).where(logits > 0, logits * value)
    return penalised.where(counts[1], logits)


_RULES: Final[tuple[tuple[str, str, Any, float, float], ...]] = (
    (
        "temperature",
        "the log-probabilities are those at temperature {}",
        lambda logits, value, _: logits / value,
        0.02,
        50.0,
    ),
    ("penalty", "the log-probabilities are those after a repetition penalty of {}", _repetition, 0.2, 5.0),
    (
        "penalty",
        "the log-probabilities are those after a presence penalty of {}",
        lambda logits, value, counts: logits - value * (counts[0] > 0),
        -4.0,
        4.0,
    ),
    (
        "penalty",
        "the log-probabilities are those after a frequency penalty of {}",
        lambda logits, value, counts: logits - value * counts[0],
        -4.0,
        4.0,
    ),
    (
        "capped logits",
        "the log-probabilities are those of logits capped softly at {}",
        lambda logits, value, _: value * (logits / value).tanh(),
        1.0,
        200.0,
    ),
)
"""Steps between logits and log-probabilities: name, statement, rule, and the bounds of its number."""

_TEMPERATURES: Final = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)


def _truncated(case: Case) -> Iterator[Recorded]:
    """Yield the distribution cut to its likeliest tokens, in the one way that all tokens allow."""
    import torch

    sampler, _ = _own(case)
    if not np.isfinite(sampler).all():
        return
    tokens = _tokens(case)
    target = torch.from_numpy(sampler.copy()).to(case.logits.device)
    for temperature in _TEMPERATURES:
        logprobs = (case.logits / temperature).log_softmax(-1)
        own = logprobs.gather(1, tokens)[:, 0]
        ordered = logprobs.sort(-1, descending=True).values
        masses = ordered.exp().cumsum(-1)
        # The mass of what was left over, by which an engine divides.
        wanted = (own - target).exp().clamp(max=1.0)
        size = (masses - wanted[:, None]).abs().argmin(-1)
        kept = masses.gather(1, size[:, None])[:, 0]
        expected = (own - kept.log()).cpu().numpy()
        fits = ~(np.abs(expected - sampler) > case.tolerance)
        # Nothing was cut off where all that is left over is all there is.
        if not fits.all() or float(kept.log().abs().max()) <= case.tolerance:
            continue
        at = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        before = torch.where(size > 0, masses.gather(1, (size - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        low, high = float(before.max()), float(kept.min())
        if int(size.min()) == int(size.max()):
            count = int(size[0]) + 1
            text = f"the log-probabilities are those of the {count} likeliest tokens (top_k){at} in {{}}"
            yield Recorded("top_k", "sampling", text, expected)
        elif low <= high + 1e-4:
            text = f"the log-probabilities are those after top_p between {low:.4g} and {high:.4g}{at} in {{}}"
            yield Recorded("top_p", "sampling", text, expected)
        else:
            first = ordered[:, 0]
            last = (ordered.gather(1, size[:, None])[:, 0] - first).exp()
            beyond = (size + 1).clamp(max=ordered.shape[1] - 1)
            after = (ordered.gather(1, beyond[:, None])[:, 0] - first).exp()
            if float(after.max()) <= float(last.min()):
                text = (
                    f"the log-probabilities are those after min_p between {float(after.max()):.4g} and "
                    f"{float(last.min()):.4g}{at} in {{}}"
                )
                yield Recorded("min_p", "sampling", text, expected)


def _banned(case: Case) -> Iterator[Recorded]:
    """Yield the distribution without one token, or without those of images."""
    import torch

    sampler, trainer = _own(case)
    departing = np.flatnonzero(np.abs(trainer - sampler) > case.tolerance)
    if len(departing) < 3 or not (sampler[departing] > trainer[departing]).all():
        return
    logprobs = case.logits.log_softmax(-1)
    own = logprobs.gather(1, _tokens(case))[:, 0]
    wanted = torch.from_numpy(trainer - sampler).to(own.device)
    left = torch.log1p(-logprobs.exp().clamp(max=1 - 1e-7))
    token = int((left - wanted[:, None]).abs().amax(0).argmin())
    yield Recorded(
        "banned token",
        "sampling",
        f"the sampler's distribution left out token {token} in {{}}",
        (own - left[:, token]).cpu().numpy(),
        1,
    )


def _restricted(case: Case) -> Iterator[Recorded]:
    """Yield tokens that a grammar or mask left few others beside.

    Engines renormalise over what is left, so their numbers are never below the model's, and 0 where one
    token was left.
    """
    sampler, trainer = _own(case)
    departing = np.abs(trainer - sampler) > case.tolerance
    certain = int(np.sum(departing & (sampler >= _CERTAIN)))
    below = (sampler[departing] > trainer[departing]).all() and (sampler <= 0).all()
    if not below or certain < max(2, departing.sum() / 2):
        return
    text = (
        "the sampler was restricted to a grammar or a few tokens, and its log-probabilities are of these: "
        f"{int(departing.sum())} tokens depart, the sampler higher in all and certain of {certain}, in {{}}"
    )
    yield Recorded("restricted", "sampling", text, np.where(departing, sampler, trainer))


RECORDED_VARIATIONS: Final[tuple[tuple[Reading, ...], ...]] = (
    (_constant, _forms, _rounded, _shifted, _of_another),
    (_scaled, _of_distribution, _fitted, _truncated, _banned),
    (_restricted,),
)
"""Readings in groups; a later group is tried where none of an earlier one fits."""
