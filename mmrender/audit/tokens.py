"""Rows of the stages template and tokens: another prompt, or other sampled tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Edit, Trial, edited, joined, part, scopes, with_sampled
from mmrender.audit.report import Comparison, Decode, sampled_runs
from mmrender.sidecar import common_prefix
from mmrender.trajectory.sample import TrainingSample

_MAX_PEERS: Final = 8
_MAX_CANDIDATES: Final = 12
_MAX_REPAIRS: Final = 8
_MAX_CUT: Final = 65


# --- other prompts


def _prompt_trial(case: Case, text: str, edits: Sequence[Edit], since: int | None = None) -> Trial:
    """Return the trial of another prompt, which need not explain tokens sampled before `since`."""
    first = edits[0][0]
    mask = case.sample.loss_mask & (np.arange(len(case.sample)) >= (since or 0))
    changed = edited(replace(case.sample, loss_mask=mask), edits)
    since = first if since is None else since
    return Trial(f"the sampler's prompt {text}", changed, token=first, since=since)


def _bounds(case: Case) -> list[int]:
    """Return possible starts of turns: where the first or second token of the sample recurs."""
    ids, first = case.sample.token_ids, case.runs[0][0]
    for opener in ids[:2]:
        places = np.flatnonzero(ids[:first] == opener).tolist()
        if len(places) > 1:
            return [int(place) for place in places]
    return []


def _opening(case: Case) -> Iterator[Trial]:
    """Yield prompts that begin with a token or a turn more, or less."""
    sample = case.sample
    for token in sorted({int(sample.token_ids[0]), *_configured(case, "bos_token_id", "eos_token_id")}):
        yield _prompt_trial(case, f"began with one more token, {token}", [(0, 0, [token])], 0)
    first = min([case.runs[0][0], *(span.start for span in sample.media_spans)])
    for count in [*range(1, 33), *(len(sample) - 2**power for power in range(5, 16))]:
        if 0 < count < first:
            yield _prompt_trial(case, f"lacked the first {count} token(s)", [(0, count, [])], 0)
    bounds = _bounds(case)
    for start, stop in dict.fromkeys([*((bounds[0], place) for place in bounds[1:4]), *pairwise(bounds)]):
        about = f"the turn of tokens {start} to {stop - 1}"
        yield _prompt_trial(case, f"lacked {about}", [(start, stop, [])])
        twice: list[Edit] = [(stop, stop, part(sample, start, stop, sampled=False))]
        yield _prompt_trial(case, f"had {about} twice", twice)


def _before_completion(case: Case) -> Iterator[Trial]:
    """Yield prompts that end in a token more or less, as by another generation prompt."""
    sample = case.sample
    held = sample.loss_mask.copy()
    for span in sample.media_spans:
        held[span.start : span.stop] = True
    by_text, _ = _pieces(case)
    fillers = {
        f"one token {token}": [token] for token in {int(sample.token_ids[a - 1]) for a, _ in case.runs}
    }
    for texts in (["\n"], ["\n\n"], [" "], ["<think>", "\n"], ["<think>", "\n\n", "</think>", "\n\n"]):
        if all(text in by_text for text in texts):
            fillers[repr("".join(texts))] = [by_text[text] for text in texts]
    for runs, which in scopes(case):
        for count in (1, 2, 3, 4):
            edits: list[Edit] = [(start - count, start, []) for start, _ in runs]
            if all(first > 0 and not held[first:last].any() for first, last, _ in edits):
                yield _prompt_trial(case, f"lacked the last {count} token(s) before {which}", edits)
        for text, ids in fillers.items():
            edits = [(start, start, ids) for start, _ in runs]
            yield _prompt_trial(case, f"had {text} more before {which}", edits)


def _history(case: Case) -> Iterator[Trial]:
    """Yield other forms of earlier turns, before the completions that differ."""
    number = case.departing_runs[0]
    if not number:
        return
    since, runs = case.runs[number - 1][1], case.runs[:number]
    for text, edits in [*_turns_cut(case, runs), *_turns_left_out(case, runs)]:
        if all(first[1] <= second[0] for first, second in pairwise(edits)):
            yield _prompt_trial(case, f"{text} when it sampled completion {number}", edits, since)
    by_text, texts = _pieces(case)
    start, stop = runs[-1]
    for place in range(start, min(stop, start + _MAX_CUT)) if by_text else ():
        for old, new in _cuts(case.sample.token_ids[place:stop], by_text, texts):
            text = f"had the text of completion {number - 1} encoded again, {new} at {place},"
            yield _prompt_trial(case, text, [(place, place + old, new)], since)


def _turns_cut(case: Case, runs: list[tuple[int, int]]) -> Iterator[tuple[str, list[Edit]]]:
    """Yield completions cut at either end, or followed by other tokens."""
    ids = case.sample.token_ids
    beside = {int(ids[stop + at]) for _, stop in runs for at in (-1, 0, 1)}
    beside |= {int(ids[start - 1]) for start, _ in runs}
    for which, some in {"all completions before": runs, f"completion {len(runs) - 1}": runs[-1:]}.items():
        shortest = min(stop - start for start, stop in some)
        yield f"lacked {which}", [(*run, []) for run in some]
        for count in range(1, min(4, shortest)):
            yield f"lacked the last {count} token(s) of {which}", [(e - count, e, []) for _, e in some]
        for count in range(1, 5):
            yield f"lacked {count} token(s) after {which}", [(e, e + count, []) for _, e in some]
        for token in sorted(beside):
            yield f"had a token {token} more after {which}", [(e, e, [token]) for _, e in some]
            yield f"ended {which} with a token {token}", [(e - 1, e, [token]) for _, e in some]
        for count in range(1, min(shortest, _MAX_CUT)):
            yield f"lacked the first {count} token(s) of {which}", [(s, s + count, []) for s, _ in some]


def _turns_left_out(case: Case, runs: list[tuple[int, int]]) -> Iterator[tuple[str, list[Edit]]]:
    """Yield prompts without a turn, or with one twice."""
    starts = [0, *(stop for _, stop in runs)]
    for (start, stop), since in zip(runs, starts, strict=False):
        for bound in [since, *(at for at in _bounds(case) if since < at < start)]:
            yield f"lacked the tokens {bound} to {stop - 1}, a turn,", [(bound, stop, [])]
            again = part(case.sample, bound, stop, sampled=False)
            yield f"had the tokens {bound} to {stop - 1}, a turn, twice", [(stop, stop, again)]


def _others_prompt(case: Case) -> Iterator[Trial]:
    """Yield another sample's prompt, or its beginning, or all of another sample, before the completions."""
    sample = case.sample
    seen: set[tuple[int, ...]] = set()
    rated = [(common_prefix(sample.token_ids, peer.sample.token_ids), peer.sample) for peer in case.peers]
    for _, other in sorted(rated, key=lambda entry: -entry[0])[:_MAX_PEERS]:
        name, runs = other.sample_id or "another sample", sampled_runs(other.loss_mask)
        for number in case.departing_runs[:2]:
            start, stop = case.runs[number]
            if number < len(runs) and not _is_same(other, runs[number][0], sample, start):
                prompt = part(other, 0, runs[number][0], sampled=False)
                last = number == case.departing_runs[-1]
                yield Trial(
                    f"completion {number} was sampled after the prompt of {name}",
                    joined([prompt, part(sample, start, len(sample))], sample),
                    token=start,
                    until=None if last else stop + len(prompt) - start,
                )
        before = joined([part(other, 0, len(other), sampled=False), part(sample, 0, len(sample))], sample)
        yield Trial(f"the sampler's tokens attended to {name}, which came before them", before)
        # A turn that others begin with, such as a system prompt: up to where a token that opens turns recurs.
        ids, first = other.token_ids, min([runs[0][0] if runs else 0, *(s.start for s in other.media_spans)])
        for at, opener in enumerate(sample.token_ids[:3].tolist()):
            places = np.flatnonzero(ids[:first] == opener)
            turn = tuple(ids[places[0] : places[1]].tolist()) if len(places) > 1 else ()
            if turn and turn != tuple(sample.token_ids[at : at + len(turn)].tolist()) and turn not in seen:
                seen.add(turn)
                text = (
                    f"had the {len(turn)} token(s) more at {at} that {name} has there, as of a system prompt"
                )
                yield _prompt_trial(case, text, [(at, at, list(turn))], 0)
                for bound in _bounds(case)[1:2]:
                    text = f"had the {len(turn)} token(s) of {name} in place of tokens {at} to {bound - 1}"
                    yield _prompt_trial(case, text, [(at, bound, list(turn))], 0)


def _is_same(one: TrainingSample, stop: int, two: TrainingSample, end: int) -> bool:
    """Whether two prompts have the same tokens and media."""
    media = [[s.item.identity for s in of.media_spans if s.start < end] for of in (one, two)]
    return stop == end and np.array_equal(one.token_ids[:end], two.token_ids[:end]) and media[0] == media[1]


def _alternatives(case: Case) -> Iterator[Trial]:
    for name, other in case.alternatives.items():
        if int(other.loss_mask.sum()) == len(case.compared.positions):
            logprobs = np.zeros(len(other), np.float32)
            logprobs[other.loss_mask] = case.compared.sampler
            first = common_prefix(other.token_ids, case.sample.token_ids)
            text = f"the sampler's prompt was built by {name}: the tokens part at {first}"
            since = min(first, *(span.start for span in case.sample.media_spans), len(case.sample))
            yield Trial(text, replace(other, logprobs=logprobs), token=first, since=since)


# --- other sampled tokens


def _configured(case: Case, *names: str) -> list[int]:
    """Return the tokens that the model's configurations name so, each once."""
    model = case.trainer.model
    configs = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    held = [getattr(config, name, None) for config in configs for name in names]
    named = [one for value in held for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in dict.fromkeys(named) if isinstance(one, int)]


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


def _final_token(case: Case) -> Iterator[Trial]:
    """Yield stop tokens in place of the last token of a completion, if the sampler's number is theirs."""
    stops = set(_configured(case, "eos_token_id", "pad_token_id"))
    for one in [case.compared, *case.peers[:64]]:
        stops.update(int(one.sample.token_ids[stop - 1]) for _, stop in sampled_runs(one.sample.loss_mask))
    for number in case.departing_runs:
        place = case.runs[number][1] - 1
        for token in _read_off(case, place, sorted(stops)):
            text = (
                f"the last token of completion {number} is another: the sampler's number is that of token "
                f"{token}, not of {int(case.sample.token_ids[place])}"
            )
            yield Trial(text, with_sampled(case.sample, place, [token]), token=place, since=place)


def _altered(case: Case) -> Iterator[Trial]:
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
            yield Trial(text, replace(sample, token_ids=ids), token=runs[0][0], since=runs[0][0])
    stop = case.runs[number][1]
    rest = sample.token_ids[place:stop]
    if len(rest) < 3:  # later tokens must be able to disagree
        return
    for token in _read_off(case, place):
        text = f"token {place}, in completion {number}, is another: the sampler's was {token}, not {rest[0]}"
        yield Trial(text, with_sampled(sample, place, [token]), token=place, since=place, fitted=1)
        changed = with_sampled(sample, place, [token, *rest[:-1]])
        text = f"completion {number} lacks a token at {place}: the sampler's was {token}"
        yield Trial(text, changed, token=place, since=place, fitted=1)
    for count in (1, 2):
        if len(rest) > count + 2:
            # The last tokens were sampled too, but which is not known.
            text = f"completion {number} has {count} token(s) too many from {place} on"
            yield Trial(text, with_sampled(sample, place, rest[count:], stop=stop), token=place, since=place)


def _pieces(case: Case) -> tuple[Mapping[str, int], Sequence[str]]:
    """Return the tokens of the vocabulary by their text, and their texts, empty without `decode`."""
    if case.decode is None:
        return {}, ()
    return _read_vocabulary(case.decode, len(case.trainer.model.get_output_embeddings().weight))


@lru_cache(maxsize=2)
def _read_vocabulary(decode: Decode, count: int) -> tuple[Mapping[str, int], Sequence[str]]:
    texts = [decode([token]) for token in range(count)]
    return {text: token for token, text in reversed(list(enumerate(texts))) if text}, texts


def _encoded_again(case: Case) -> Iterator[Trial]:
    """Yield a completion whose text was cut into other tokens wherever the numbers part.

    From place to place the tokens are chosen by which the next numbers agree the furthest.
    """
    by_text, texts = _pieces(case)
    number, place, sample = case.departing_runs[0], case.position, case.sample
    stop, said = case.runs[number][1], ""
    for _ in range(_MAX_REPAIRS if by_text else 0):
        cuts = dict.fromkeys(
            (old, tuple(new)) for old, new in _cuts(sample.token_ids[place:stop], by_text, texts)
        )
        likely = set(_read_off(case, place, [new[0] for _, new in cuts], sample) if cuts else ())
        laid = [(new, _laid(sample, place, stop, old, new)) for old, new in cuts if new[0] in likely]
        values = case.trainer.sampled_of_many([changed for _, changed in laid])
        furthest = place
        for (new, changed), found in zip(laid, values, strict=True):
            own = None if found is None else Comparison.of_sampled(changed, found).before(stop)
            departure = None if own is None else own.first_departure(case.tolerance)
            reached = stop if departure is None or own is None else int(own.positions[departure])
            if own is not None and reached > furthest:
                furthest, best, chosen = reached, changed, new
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
        yield Trial(said, sample, token=case.position, since=case.position, until=stop)


def _laid(sample: TrainingSample, place: int, stop: int, old: int, new: Sequence[int]) -> TrainingSample:
    """Return a completion that ends before `stop`, with `old` tokens at `place` replaced by others."""
    # Numbers were laid to tokens from the front: of more tokens the last were cut off, of fewer not known.
    tokens = [*new, *sample.token_ids[place + old : stop]][: stop - place]
    return with_sampled(sample, place, tokens, stop=stop)


def _cuts(
    ids: npt.NDArray[Any], by_text: Mapping[str, int], texts: Sequence[str]
) -> Iterator[tuple[int, list[int]]]:
    """Yield how many tokens are replaced, and by which, so that the text stays."""
    for old in range(1, min(3, len(ids)) + 1):
        own = [int(token) for token in ids[:old]]
        text = "".join(texts[token] for token in own)
        for parts in (0, 1, 2):
            for cuts in combinations(range(1, len(text)), parts):
                pieces = [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]
                new = [by_text[piece] for piece in pieces if piece in by_text]
                if len(new) == len(pieces) and new[0] != own[0]:
                    yield old, new


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    "history": _history,
    "opening": _opening,
    "generation prompt": _before_completion,
    "another's prompt": _others_prompt,
    "another template": _alternatives,
    "encoded again": _encoded_again,
    "final token": _final_token,
    "altered token": _altered,
}
"""Changes to try, by row."""
