"""Rows of the stage tokens: other sampled tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Trial, cut, scopes, with_sampled
from mmrender.audit.report import Comparison, sampled_runs
from mmrender.audit.vocabulary import configured, name_of, pieces
from mmrender.trajectory.sample import TrainingSample

_MAX_CANDIDATES: Final = 12
_MAX_REPAIRS: Final = 8


def _read_off(
    case: Case, place: int, candidates: Sequence[int] = (), sample: TrainingSample | None = None
) -> list[int]:
    """Return tokens with the sampler's number at `place` under the trainer, the nearest first.

    Everything before `place` must agree already, in the sample as it is or in `sample`.
    """
    sampler = case.compared.sampler[np.searchsorted(case.compared.positions, place)]
    logits = case.trainer.logits_at(case.sample if sample is None else sample, [place])
    found = logits[0].float().log_softmax(-1).cpu().numpy()
    distance = np.abs(found - sampler)
    order = [int(token) for token in np.argsort(distance) if distance[token] <= case.tolerance]
    allowed, own = set(candidates or order), case.sample.token_ids[place]
    return [token for token in order if token != own and token in allowed][:_MAX_CANDIDATES]


def final_token(case: Case) -> Iterator[Trial]:
    """Yield stop tokens in place of the last token of a completion, if the sampler's number is theirs."""
    stops = set(configured(case, "eos_token_id", "pad_token_id"))
    for one in [case.compared, *case.peers[:64]]:
        stops.update(int(one.sample.token_ids[stop - 1]) for _, stop in sampled_runs(one.sample.loss_mask))
    lasts = [stop - 1 for _, stop in case.runs]
    for token in sorted(stops) if len(lasts) > 1 else ():
        ids = case.sample.token_ids.copy()
        ids[lasts] = token
        text = (
            "the last token of each completion is another stop token: "
            f"the sampler's was {name_of(case, token)}"
        )
        yield Trial(text, replace(case.sample, token_ids=ids), since=lasts[0])
    for number in case.departing_runs:
        place = case.runs[number][1] - 1
        for token in _read_off(case, place, sorted(stops)):
            text = (
                f"the last token of completion {number} is another stop token: the sampler's number is that "
                f"of {name_of(case, token)}, not of {name_of(case, int(case.sample.token_ids[place]))}"
            )
            yield Trial(text, with_sampled(case.sample, place, [token]), since=place)


def altered(case: Case) -> Iterator[Trial]:
    """Yield one sampled token replaced, left out or added at the first difference, or all shifted.

    The token is found in the trainer's own distribution, and all later tokens must then agree.
    """
    number, place, sample = case.departing_runs[0], case.position, case.sample
    for by in (1, -1, 2, -2):
        for runs, which in scopes(case):
            ids = sample.token_ids.copy()
            for start, stop in runs:
                ids[start:stop] = np.roll(ids[start:stop], by)
            text = f"the sampled tokens of {which} are shifted: the sampler's were {by:+d} place(s)"
            yield Trial(text, replace(sample, token_ids=ids), since=runs[0][0])
    stop = case.runs[number][1]
    rest = sample.token_ids[place:stop]
    if len(rest) < 3:  # later tokens must be able to disagree
        return
    for token in _read_off(case, place):
        text = (
            f"the token at {place}, in completion {number}, is another: "
            f"the sampler's was {name_of(case, token)}, not {name_of(case, int(rest[0]))}"
        )
        yield Trial(text, with_sampled(sample, place, [token]), since=place, fitted=1)
        changed = with_sampled(sample, place, [token, *rest[:-1]])
        text = f"completion {number} lacks a token at {place}: the sampler's was {name_of(case, token)}"
        yield Trial(text, changed, since=place, fitted=1)
    for count in (1, 2):
        if len(rest) > count + 2:
            # The last tokens were sampled too, but which is not known.
            text = f"completion {number} has {count} token(s) too many from {place} on"
            yield Trial(text, with_sampled(sample, place, rest[count:], stop=stop), since=place)


def encoded_again(case: Case) -> Iterator[Trial]:
    """Yield a completion whose text was cut into other tokens wherever the numbers part.

    From place to place the tokens are chosen by which the next numbers agree the furthest.
    """
    by_text, texts = pieces(case)
    number, place, sample = case.departing_runs[0], case.position, case.sample
    stop, said = case.runs[number][1], ""
    for _ in range(_MAX_REPAIRS if by_text else 0):
        cuts = dict.fromkeys(_cuts(sample.token_ids[place:stop], by_text, texts))
        likely = set(_read_off(case, place, [new[0] for _, new in cuts], sample) if cuts else ())
        # Numbers were laid to tokens from the front: of more tokens the last were cut off, of fewer unknown.
        laid = {
            new: [*new, *sample.token_ids[place + old : stop]][: stop - place]
            for old, new in cuts
            if new[0] in likely
        }
        changed = [with_sampled(sample, place, tokens, stop=stop) for tokens in laid.values()]
        furthest, best, chosen = place, sample, tuple[int, ...]()
        for new, one, found in zip(laid, changed, case.trainer.sampled_of_many(changed), strict=True):
            own = None if found is None else Comparison.of(one, found).before(stop)
            departure = None if own is None else own.first_departure(case.tolerance)
            reached = stop if departure is None or own is None else int(own.positions[departure])
            if own is not None and reached > furthest:
                furthest, best, chosen = reached, one, new
        if furthest == place:
            return
        text = "".join(texts[token] for token in chosen)
        said = said or (
            f"the text of completion {number} was encoded again: at {place} the sampler's tokens for "
            f"{text!r} were {list(chosen)}"
        )
        sample, place = best, furthest
        if furthest == stop:
            break
    if said:
        yield Trial(said, cut(sample, stop), since=case.position)


def _cuts(
    ids: npt.NDArray[Any], by_text: Mapping[str, int], texts: Sequence[str]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield how many tokens are replaced, and by which, so that the text stays."""
    for old in range(1, min(3, len(ids)) + 1):
        text = "".join(texts[token] for token in ids[:old])
        for parts in (0, 1, 2):
            for cuts in combinations(range(1, len(text)), parts):
                pieces = [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]
                new = tuple(by_text[piece] for piece in pieces if piece in by_text)
                if len(new) == len(pieces) and new[0] != ids[0]:
                    yield old, new
