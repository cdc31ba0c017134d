"""Rows of other tokens: other sampled ones, and other tokens of prompts, which gradients find."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Trial, cut, scopes, with_sampled
from mmrender.audit.prompts import heads
from mmrender.audit.report import Comparison, sampled_runs
from mmrender.audit.vocabulary import configured, name_of, pieces
from mmrender.trajectory.sample import TrainingSample

_MAX_CANDIDATES: Final = 12
_MAX_REPAIRS: Final = 8
_MAX_GRADIENTS: Final = 24
"""Tokens whose gradients are read."""
_MAX_PAIRS: Final = 1 << 25
"""Places times tokens of a vocabulary, up to which all tokens are tried."""
_MAX_RUN: Final = 32
"""Candidates that are run."""
_MAX_REPLACED: Final = 3
_NEARER: Final = 0.8
"""Maximum share of the differences that one replaced token of several leaves."""


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


def _replacements(
    case: Case, sample: TrainingSample, compared: Comparison, groups: Sequence[Sequence[int]]
) -> list[tuple[Sequence[int], int]]:
    """Return groups of places with another token, in the order of how far that lowers the differences.

    The model is taken for linear in the embedding of each token of a prompt, so the order is approximate.
    """
    import torch

    finite = np.flatnonzero(np.isfinite(compared.difference))
    some = finite[np.unique(np.linspace(0, len(finite) - 1, _MAX_GRADIENTS).round().astype(int))]
    found = case.trainer.slopes(sample, compared.positions[some]) if len(finite) and groups else None
    if found is None:
        return []
    (slopes, vectors), embedding = found, case.trainer.model.get_input_embeddings()
    lacking = -torch.from_numpy(compared.difference[some].copy()).to(slopes)
    flat = torch.tensor([place for places in groups for place in places], device=slopes.device)
    of = torch.tensor([group for group, places in enumerate(groups) for _ in places], device=slopes.device)
    # All tokens of a small vocabulary, and the prompt's own of a large one.
    size = len(embedding.weight)
    own = np.unique(sample.token_ids[flat.cpu().numpy()])
    tokens = np.arange(size) if size * len(groups) < _MAX_PAIRS else own
    with torch.no_grad():
        both = torch.cat([slopes, (slopes * vectors).sum(-1, keepdim=True)], -1)[:, flat]
        summed = both.new_zeros(len(both), len(groups), both.shape[-1]).index_add_(1, of, both)
        others = embedding(torch.from_numpy(tokens).to(flat.device)).float()
        changes = (summed[..., :-1] @ others.T - summed[..., -1:]).flatten(1)
        along = lacking @ changes
        likeness = along / changes.norm(dim=0).clamp(min=1e-9)
        best = [int(at) for at in likeness.topk(min(_MAX_RUN, len(likeness))).indices if along[at] > 0]
    pairs = [(groups[at // len(tokens)], int(tokens[at % len(tokens)])) for at in best]
    return [(places, token) for places, token in pairs if sample.token_ids[places[0]] != token]


def other_tokens(case: Case) -> Iterator[Trial]:
    """Yield prompts in which a token, or two or three, are others.

    A token of a template is another at all its places: those behind one token.
    """
    sample, best, own = case.sample, case.compared, case.sample.token_ids
    tied: dict[tuple[int, int], list[int]] = {}
    for at in np.flatnonzero(case.free).tolist():
        tied.setdefault((int(own[at - 1]) if at else -1, int(own[at])), []).append(at)
    groups = [[at] for some in tied.values() for at in some]
    groups += [some for some in tied.values() if len(some) > 1]
    headers, changed = heads(case), dict[int, int]()
    for _ in range(_MAX_REPLACED):
        found = _replacements(case, sample, best, groups)
        options = [{**changed, **dict.fromkeys(places, token)} for places, token in found]
        # The token may be right, and its place one off.
        options += [
            {**{at: one for at, one in changed.items() if at != place}, place + by: token}
            for place, token in list(changed.items())[-1:]
            for by in (-2, -1, 1, 2)
            if 0 <= place + by < len(own) and not case.sample.loss_mask[place + by]
        ]
        samples = []
        for option in options:
            ids = own.copy()
            ids[[*option]] = [*option.values()]
            samples.append(replace(case.sample, token_ids=ids))
        compared = case.run([Trial("", one) for one in samples])
        tried = [(one.rms, number) for number, one in enumerate(compared) if one is not None]
        least, number = min(tried, default=(np.inf, 0))
        if not least < _NEARER * best.rms:
            return
        best, sample, changed = compared[number] or best, samples[number], options[number]
        in_head = all(any(first <= at < last for first, last in headers) for at in changed)
        named = {at: (name_of(case, token), name_of(case, int(own[at]))) for at, token in changed.items()}
        texts = [f"{token} at {at}, not {instead}" for at, (token, instead) in named.items()]
        where = "another token in headers of messages" if in_head else "another token"
        fitted = 2 * len({(int(own[at]), token) for at, token in changed.items()})
        statement = f"the sampler's prompt had {where}: {' and '.join(texts)}"
        yield Trial(statement, sample, since=min(changed), fitted=fitted)
