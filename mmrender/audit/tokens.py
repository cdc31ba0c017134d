"""Rows of the stages template and tokens: another prompt, or other sampled tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Edit, Trial, edited, joined, part, scopes, with_sampled
from mmrender.audit.report import Comparison, Decode, described, sampled_runs
from mmrender.audit.trainer import picked_logprobs
from mmrender.sidecar import common_prefix
from mmrender.trajectory.sample import TrainingSample

_MAX_PEERS: Final = 8
_MAX_CANDIDATES: Final = 12
_MAX_REPAIRS: Final = 8
_MAX_CUT: Final = 65
_MAX_PLACES: Final = 16
_PADS: Final = (*range(1, 17), 32, 64)


def _shifted(case: Case) -> Iterator[Trial]:
    moves = {f"are shifted: the sampler's were {by:+d} place(s)": by for by in (1, -1, 2, -2, 3, -3)}
    for text, by in {**moves, "are in reverse order": 0}.items():
        for runs, which in scopes(case):
            ids = case.sample.token_ids.copy()
            for start, stop in runs:
                own = ids[start:stop].copy()
                ids[start:stop] = np.roll(own, by) if by else own[::-1]
            yield Trial(
                f"the sampled tokens of {which} {text}",
                replace(case.sample, token_ids=ids),
                token=runs[0][0],
                since=runs[0][0],
            )


def _stops(case: Case) -> set[int]:
    """Return tokens that may end a completion: the model's own, and those that end the completions given."""
    found = set(_configured(case, "eos_token_id", "pad_token_id"))
    for one in [case.compared, *case.peers[:64]]:
        found.update(int(one.sample.token_ids[stop - 1]) for _, stop in sampled_runs(one.sample.loss_mask))
    return found


def _configured(case: Case, *names: str) -> list[int]:
    """Return the tokens that the model's configurations name so, each once."""
    model = case.trainer.model
    configs = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    held = [getattr(config, name, None) for config in configs for name in names]
    named = [one for value in held for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in dict.fromkeys(named) if isinstance(one, int)]


def _final_token(case: Case) -> Iterator[Trial]:
    """Yield stop tokens in place of the last token of a completion, if the sampler's number is theirs."""
    for number in case.departing_runs:
        place = case.runs[number][1] - 1
        for token in _read_off(case, place, sorted(_stops(case))):
            yield Trial(
                f"the last token of completion {number} is another: the sampler's number is that of token "
                f"{token}, not of {int(case.sample.token_ids[place])}",
                with_sampled(case.sample, place, [token]),
                token=place,
                since=place,
            )


def _read_off(
    case: Case, place: int, candidates: Sequence[int] | None = None, sample: TrainingSample | None = None
) -> list[int]:
    """Return tokens with the sampler's number at `place` under the trainer, the nearest first.

    Everything before `place` must agree already, in the sample as it is or in `sample`.
    """
    sampler = case.compared.sampler[np.searchsorted(case.compared.positions, place)]
    logits = case.trainer.logits_at(case.sample if sample is None else sample, [place])
    count = int(logits.shape[1])
    tokens = (
        np.arange(count) if candidates is None else np.array([c for c in candidates if c < count], np.int64)
    )
    found = picked_logprobs(logits.expand(len(tokens), -1), tokens) if len(tokens) < 64 else None
    if found is None:
        found = logits[0].float().log_softmax(-1).cpu().numpy()[tokens]
    distance = np.abs(found - sampler)
    own = case.sample.token_ids[place]
    order = [int(index) for index in np.argsort(distance) if distance[index] <= case.tolerance]
    return [int(tokens[index]) for index in order if tokens[index] != own][:_MAX_CANDIDATES]


def _altered(case: Case) -> Iterator[Trial]:
    """Yield one sampled token replaced, left out or added at the first difference.

    The token is found in the trainer's own distribution, and all later tokens must then agree.
    """
    stop = case.runs[case.departing_runs[0]][1]
    place, ids = case.position, case.sample.token_ids
    number = case.departing_runs[0]
    if stop - place < 3:  # later tokens must be able to disagree
        return
    rest = ids[place:stop]
    for token in _read_off(case, place):
        yield Trial(
            f"token {place}, in completion {number}, is another: the sampler's was {token}, "
            f"not {int(ids[place])}",
            with_sampled(case.sample, place, [token]),
            token=place,
            since=place,
            fitted=1,
        )
        if len(rest) > 2:
            yield Trial(
                f"completion {number} lacks a token at {place}: the sampler's was {token}",
                with_sampled(case.sample, place, [token, *rest[:-1]]),
                token=place,
                since=place,
                fitted=1,
            )
    for count in (1, 2):
        if len(rest) > count + 2:
            # The last tokens were sampled too, but which is not known.
            yield Trial(
                f"completion {number} has {count} token(s) too many from {place} on",
                with_sampled(case.sample, place, rest[count:], stop=stop),
                token=place,
                since=place,
            )


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
    if not by_text:
        return
    number, place, sample = case.departing_runs[0], case.position, case.sample
    stop, said = case.runs[number][1], ""
    for _ in range(_MAX_REPAIRS):
        cuts = dict.fromkeys(
            (old, tuple(new)) for old, new in _cuts(sample.token_ids[place:stop], by_text, texts)
        )
        likely = set(_read_off(case, place, sorted({new[0] for _, new in cuts}), sample))
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
    for old in (1, 2, 3):
        if old > len(ids):
            return
        text = "".join(texts[token] for token in ids[:old])
        own = [int(token) for token in ids[:old]]
        splits = [[text]]
        splits += [[text[:cut], text[cut:]] for cut in range(1, len(text))]
        splits += [
            [text[:one], text[one:two], text[two:]] for one, two in combinations(range(1, len(text)), 2)
        ]
        for pieces in splits:
            if all(piece in by_text for piece in pieces):
                new = [by_text[piece] for piece in pieces]
                if new != own and new[0] != own[0]:
                    yield old, new


def _peers(case: Case) -> list[Comparison]:
    """Return samples by the number of tokens that they share with this one, the nearest first."""
    ids = case.sample.token_ids
    rated = [(common_prefix(ids, peer.sample.token_ids), peer) for peer in case.peers]
    return [peer for _, peer in sorted(rated, key=lambda entry: -entry[0])[:_MAX_PEERS]]


def _others_tokens(case: Case) -> Iterator[Trial]:
    """Yield completions of other samples in place of this one's, where their first tokens fit."""
    for number in case.departing_runs:
        start, stop = case.runs[number]
        firsts: dict[int, float] | None = None
        for peer in case.peers:
            for one, (first, last) in enumerate(sampled_runs(peer.sample.loss_mask)):
                tokens = peer.sample.token_ids[first:last][: stop - start]
                whole = len(tokens) == stop - start or len(tokens) >= 3
                if not whole or np.array_equal(tokens, case.sample.token_ids[start : start + len(tokens)]):
                    continue
                if firsts is None:
                    logits = case.trainer.logits_at(case.sample, [start])[0].float()
                    firsts = dict(enumerate(logits.log_softmax(-1).cpu().numpy()))
                recorded = case.compared.sampler[np.searchsorted(case.compared.positions, start)]
                if abs(firsts[int(tokens[0])] - recorded) > case.tolerance:
                    continue
                yield Trial(
                    f"completion {number} has the log-probabilities of other tokens: those of completion "
                    f"{one} of {peer.sample.sample_id or 'another sample'}",
                    with_sampled(case.sample, start, tokens, stop=stop),
                    token=start,
                    since=start,
                )


def _others_prompt(case: Case) -> Iterator[Trial]:
    """Yield the prompt of another sample before this one's completions, and all of another before it."""
    sample = case.sample
    for peer in _peers(case):
        other, name = peer.sample, peer.sample.sample_id or "another sample"
        runs = sampled_runs(other.loss_mask)
        for number in case.departing_runs[:2]:
            start, stop = case.runs[number]
            if number >= len(runs) or _is_same(other, runs[number][0], sample, start):
                continue
            prompt = part(other, 0, runs[number][0], sampled=False)
            yield Trial(
                f"completion {number} was sampled after the prompt of {name}",
                joined([prompt, part(sample, start, len(sample))], sample),
                token=start,
                until=None if number == case.departing_runs[-1] else stop + len(prompt) - start,
            )
        whole = joined([part(other, 0, len(other), sampled=False), part(sample, 0, len(sample))], sample)
        yield Trial(
            f"the sampler's tokens attended to those of {name}, which came before them", whole, token=0
        )


def _is_same(one: TrainingSample, stop: int, two: TrainingSample, end: int) -> bool:
    """Whether two prompts have the same tokens and media."""
    media = [[s.item.identity for s in of.media_spans if s.start < end] for of in (one, two)]
    return stop == end and np.array_equal(one.token_ids[:end], two.token_ids[:end]) and media[0] == media[1]


def _prompt_trial(case: Case, text: str, edits: Sequence[Edit], since: int | None = None) -> Trial:
    """Return the trial of another prompt, which need not explain tokens sampled before `since`."""
    first = edits[0][0]
    mask = case.sample.loss_mask & (np.arange(len(case.sample)) >= (since or 0))
    changed = edited(replace(case.sample, loss_mask=mask), edits)
    return Trial(
        f"the sampler's prompt {text}", changed, token=first, since=first if since is None else since
    )


def _bounds(case: Case) -> list[int]:
    """Return possible starts of turns: where the first or second token of the sample recurs."""
    ids, first = case.sample.token_ids, case.runs[0][0]
    for opener in (0, 1):
        places = np.flatnonzero(ids[:first] == ids[opener]) if len(ids) > opener else np.zeros(0)
        if len(places) > 1:
            return [int(place) for place in places]
    return []


def _opening(case: Case) -> Iterator[Trial]:
    """Yield prompts that begin with a token or a turn more, or less, or with another one's."""
    sample = case.sample
    for token in sorted({int(sample.token_ids[0]), *_configured(case, "bos_token_id", "eos_token_id")}):
        yield _prompt_trial(case, f"began with one more token, {token}", [(0, 0, [token])], 0)
    first = min([case.runs[0][0], *(span.start for span in sample.media_spans)])
    lengths = [len(sample) - 2**power for power in range(5, 16)]
    for count in [*range(1, 33), *(each for each in lengths if each > 32)]:
        if count < first:
            yield _prompt_trial(case, f"lacked the first {count} token(s)", [(0, count, [])], 0)
    bounds = _bounds(case)
    for start, stop in [(bounds[0], place) for place in bounds[1:4]] + list(pairwise(bounds[1:])):
        about = "its beginning, as of a system prompt" if start == bounds[0] else "the turn"
        yield _prompt_trial(case, f"lacked {about}: the tokens {start} to {stop - 1}", [(start, stop, [])])
        twice: list[Edit] = [(stop, stop, part(sample, start, stop, sampled=False))]
        yield _prompt_trial(case, f"had {about} twice: the tokens {start} to {stop - 1}", twice)
    for turn, name in _openings(case):
        begin = f"began with the {len(turn)} token(s) that {name} begins with"
        yield _prompt_trial(case, f"{begin}, as with a system prompt", [(0, 0, turn)], 0)
        for place in bounds[1:2]:
            yield _prompt_trial(case, f"{begin}, in place of {place}", [(0, place, turn)], 0)


def _openings(case: Case) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the tokens that other samples have before a token with which this sample, or a turn, begins."""
    seen: set[tuple[int, ...]] = set()
    own = case.sample.token_ids
    opener = own[_bounds(case)[0]] if _bounds(case) else own[0]
    for peer in case.peers:
        ids, runs = peer.sample.token_ids, sampled_runs(peer.sample.loss_mask)
        first = min([runs[0][0] if runs else 0, *(span.start for span in peer.sample.media_spans)])
        for place in (np.flatnonzero(np.isin(ids[1:first], [own[0], opener]))[:3] + 1).tolist():
            turn = tuple(ids[:place].tolist())
            if turn not in seen and turn != tuple(own[:place].tolist()) and len(seen) < _MAX_PEERS:
                seen.add(turn)
                yield turn, peer.sample.sample_id or "another sample"


def _before_completion(case: Case) -> Iterator[Trial]:
    """Yield prompts that end in a token more or less, as by another generation prompt."""
    sample = case.sample
    held = sample.loss_mask.copy()
    for span in sample.media_spans:
        held[span.start : span.stop] = True
    for runs, which in scopes(case):
        for count in (1, 2, 3, 4):
            edits: list[Edit] = [(start - count, start, []) for start, _ in runs]
            if all(first > 0 and not held[first:last].any() for first, last, _ in edits):
                yield _prompt_trial(case, f"lacked the last {count} token(s) before {which}", edits)
        for ids, text in _fillers(case):
            edits = [(start, start, ids) for start, _ in runs]
            yield _prompt_trial(case, f"had {text} more before {which}", edits)


def _fillers(case: Case) -> Iterator[tuple[list[int], str]]:
    """Yield tokens that generation prompts differ in."""
    seen = {int(case.sample.token_ids[start - 1]) for start, _ in case.runs}
    for token in sorted(seen)[:3]:
        yield [token], f"one token {token}"
    by_text, _ = _pieces(case)
    for texts in (["\n"], ["\n\n"], [" "], ["<think>", "\n"], ["<think>", "\n\n", "</think>", "\n\n"]):
        if all(text in by_text for text in texts):
            yield [by_text[text] for text in texts], repr("".join(texts))


def _history(case: Case) -> Iterator[Trial]:
    """Yield other forms of earlier turns, before the completions that differ."""
    number = case.departing_runs[0]
    if not number:
        return
    since = case.runs[number - 1][1]
    found = chain(_turns_cut(case, case.runs[:number]), _turns_left_out(case, case.runs[:number]))
    for text, edits in found:
        if all(first[1] <= second[0] for first, second in pairwise(edits)):
            yield _prompt_trial(case, f"{text} when it sampled completion {number}", edits, since)
    by_text, texts = _pieces(case)
    start, stop = case.runs[number - 1]
    for place in range(start, min(stop, start + _MAX_CUT)) if by_text else ():
        for old, new in _cuts(case.sample.token_ids[place:stop], by_text, texts):
            text = f"had the text of completion {number - 1} encoded again, {new} at {place},"
            yield _prompt_trial(case, text, [(place, place + old, new)], since)


def _turns_cut(case: Case, runs: list[tuple[int, int]]) -> Iterator[tuple[str, list[Edit]]]:
    """Yield completions cut at either end, or followed by other tokens."""
    sample = case.sample
    beside = {int(sample.token_ids[stop + at]) for _, stop in runs for at in (-1, 0, 1)}
    beside |= {int(sample.token_ids[start - 1]) for start, _ in runs}
    names = {"all completions before": runs, f"completion {len(runs) - 1}": runs[-1:]}
    for which, some in names.items():
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
    """Yield prompts without a turn, or without the images of earlier ones."""
    starts = [0, *(stop for _, stop in runs)]
    for (start, stop), since in zip(runs, starts, strict=False):
        for bound in [since, *(at for at in _bounds(case) if since < at < start)]:
            yield f"lacked the tokens {bound} to {stop - 1}, a turn,", [(bound, stop, [])]
            again = part(case.sample, bound, stop, sampled=False)
            yield f"had the tokens {bound} to {stop - 1}, a turn, twice", [(stop, stop, again)]
    spans = [span for span in case.sample.media_spans if span.stop < case.runs[len(runs)][0]]
    for shown in {1, sum(span.start > starts[-1] for span in spans)} - {0, len(spans)}:
        for margin, beside in ((0, ""), (1, ", and the tokens around them,")):
            hidden: list[Edit] = [(one.start - margin, one.stop + margin, []) for one in spans[:-shown]]
            yield f"lacked all images but the last {shown}{beside}", hidden


def _attended_padding(case: Case) -> Iterator[Trial]:
    sample = case.sample
    named = dict.fromkeys([*_configured(case, "pad_token_id", "eos_token_id")[:2], 0])
    pads = [token for token in named if token not in case.trainer.family.feature_token_ids.values()]
    longest = [len(peer.sample) - len(sample) for peer in case.peers]
    starts = [sampled_runs(peer.sample.loss_mask)[:1] for peer in case.peers]
    longest += [runs[0][0] - case.runs[0][0] for runs in starts if runs]
    counts = {*_PADS, *(each for each in longest if 0 < each < 512)}
    counts |= {-length % side for length in (len(sample), case.runs[0][0]) for side in (8, 16, 32, 64, 128)}
    begins = {start for run, (start, _) in enumerate(case.runs) if run in case.departing_runs[:2]}
    for pad in pads:
        for place in (0, *sorted({case.runs[0][0], *begins})):
            where = "between prompt and completion" if place else "before the prompt"
            for count in sorted(counts - {0})[: 8 if place else 24]:
                yield Trial(
                    f"the sampler attended to padding: {count} token(s) {pad} {where}",
                    edited(sample, [(place, place, [pad] * count)]),
                    token=place,
                    since=place,
                )


def _alternatives(case: Case) -> Iterator[Trial]:
    for name, other in case.alternatives.items():
        if int(other.loss_mask.sum()) != len(case.compared.positions):
            continue
        logprobs = np.zeros(len(other), np.float32)
        logprobs[other.loss_mask] = case.compared.sampler
        first = common_prefix(other.token_ids, case.sample.token_ids)
        yield Trial(
            f"the sampler's prompt was built by {name}: the tokens part at {first}",
            replace(other, logprobs=logprobs),
            token=first,
            since=min(first, *(span.start for span in case.sample.media_spans), len(case.sample)),
        )


def _placed(case: Case) -> Iterator[Trial]:
    """Yield prompts that lack an image, have it twice, or have it in another place."""
    sample = case.sample
    stops = [0, *(stop for _, stop in case.runs)]
    for span in case.suspects:
        for margin, beside in ((0, ""), (1, ", and the tokens around it,")):
            start, stop, name = span.start - margin, span.stop + margin, described(span) + beside
            if start < 0 or stop > len(sample) or sample.loss_mask[start:stop].any():
                continue
            block = part(sample, start, stop)
            edits: dict[str, list[Edit]] = {f"lacked the placeholder of {name}": [(start, stop, [])]}
            edits[f"had {name} twice"] = [(stop, stop, block)]
            low = max(end for end in stops if end <= start)
            high = min([first for first, _ in case.runs if first >= stop], default=stop)
            before, after = [*range(low, start)][-_MAX_PLACES:], [*range(stop + 1, high + 1)][:_MAX_PLACES]
            for place in before:
                edits[f"had {name} before token {place}"] = [(place, place, block), (start, stop, [])]
            for place in after:
                edits[f"had {name} before token {place}"] = [(start, stop, []), (place, place, block)]
            for text, made in edits.items():
                changed = edited(sample, made)
                since = made[0][0]
                yield Trial(f"the sampler's prompt {text}", changed, image=span.position, since=since)


TESTS: Final[Mapping[str, Callable[[Case], Iterator[Trial]]]] = {
    "history": _history,
    "opening": _opening,
    "generation prompt": _before_completion,
    "image placed": _placed,
    "another's prompt": _others_prompt,
    "another template": _alternatives,
    "encoded again": _encoded_again,
    "final token": _final_token,
    "altered token": _altered,
    "shifted tokens": _shifted,
    "another's tokens": _others_tokens,
    "attended padding": _attended_padding,
}
"""Changes to try, by row."""
