"""Rows of the stages template and tokens: another prompt, or other sampled tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.case import Case, Edit, Trial, edited, joined, part, scopes, with_sampled
from mmrender.audit.report import Comparison, Decode, Float32Array, described, sampled_runs
from mmrender.sidecar import common_prefix
from mmrender.trajectory.sample import TrainingSample

_MAX_PEERS: Final = 8
_MAX_CANDIDATES: Final = 12
_MAX_REPAIRS: Final = 8
_MAX_CUT: Final = 65
_MAX_SPECIALS: Final = 32


# --- other prompts


def _prompt_trial(case: Case, text: str, edits: Sequence[Edit], since: int | None = None) -> Trial:
    """Return the trial of another prompt, which need not explain tokens sampled before `since`."""
    first = edits[0][0]
    mask = case.sample.loss_mask & (np.arange(len(case.sample)) >= (since or 0))
    changed = edited(replace(case.sample, loss_mask=mask), edits)
    since = first if since is None else since
    return Trial(f"the sampler's prompt {text}", changed, token=first, since=since)


def _own_trial(case: Case, text: str, edits: Sequence[Edit]) -> Trial:
    """Return the trial of prompts that each completion that differs saw for itself, by one edit each.

    Later prompts have the trainer's tokens there, as of templates that rewrite earlier turns.
    """
    runs = [case.runs[number] for number in case.departing_runs]
    samples = []
    for (start, stop), edit in zip(runs, edits, strict=True):
        mask = np.zeros(len(case.sample), np.bool_)
        mask[start:stop] = True
        samples.append(edited(replace(case.sample, loss_mask=mask), [edit]))

    def values() -> Float32Array | None:
        out, positions = case.compared.trainer.copy(), case.compared.positions
        for (start, stop), own in zip(runs, case.trainer.sampled_of_many(samples), strict=True):
            if own is None:
                return None
            out[(positions >= start) & (positions < stop)] = own
        return out

    since = edits[0][0]
    return Trial(f"the sampler's prompt {text} when it was sampled", values=values, token=since, since=since)


def bounds(case: Case, stop: int | None = None) -> list[int]:
    """Return possible starts of turns before `stop`: where the first or second token of the sample recurs.

    By default before the first completion.
    """
    ids, stop = case.sample.token_ids, case.runs[0][0] if stop is None else stop
    for opener in ids[:2]:
        places = np.flatnonzero((ids[:stop] == opener) & ~case.sample.loss_mask[:stop]).tolist()
        if len(places) > 1:
            return [int(place) for place in places]
    return []


def _opening(case: Case) -> Iterator[Trial]:
    """Yield prompts that begin with a token or a turn more, or less."""
    sample = case.sample
    for token in sorted(
        {int(sample.token_ids[0]), *_configured(case, "bos_token_id", "eos_token_id", "pad_token_id")}
    ):
        for count in (1, 2, 3, 4, 8, 16):
            text = f"one more token, {token}" if count == 1 else f"{count} more tokens {token}, as of padding"
            text += ", a BOS" if count == 1 and token == sample.token_ids[0] else ""
            yield _prompt_trial(case, f"began with {text}", [(0, 0, [token] * count)], 0)
    first = min([case.runs[0][0], *(span.start for span in sample.media_spans)])
    for count in [*range(1, 33), *(len(sample) - 2**power for power in range(5, 16))]:
        if 0 < count < first:
            why = "without its BOS" if count == 1 else "cut from the left, truncated"
            yield _prompt_trial(case, f"lacked the first {count} token(s): {why}", [(0, count, [])], 0)
    turns = bounds(case)
    for start, stop in dict.fromkeys([*((turns[0], place) for place in turns[1:4]), *pairwise(turns)]):
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
    last = int(sample.token_ids[case.runs[0][0] - 1])
    for token in _specials(case):
        fillers |= {f"token {token}": [token], f"tokens {token} and {last}": [token, last]}
    for runs, which in scopes(case):
        for count in (1, 2, 3, 4):
            edits: list[Edit] = [(start - count, start, []) for start, _ in runs]
            if all(first > 0 and not held[first:last].any() for first, last, _ in edits):
                yield _prompt_trial(
                    case, f"lacked the last {count} token(s) of the generation prompt before {which}", edits
                )
            if all(first > 0 and not held[first:last].any() for first, last, _ in edits):
                twice: list[Edit] = [
                    (start, start, sample.token_ids[start - count : start].tolist()) for start, _ in runs
                ]
                yield _prompt_trial(
                    case,
                    f"had the last {count} token(s) of the generation prompt before {which} twice",
                    twice,
                )
        for text, ids in fillers.items():
            edits = [(start, start, ids) for start, _ in runs]
            yield _prompt_trial(case, f"had {text} more in the generation prompt before {which}", edits)
    last_runs = [case.runs[number] for number in case.departing_runs]
    for text, ids in fillers.items() if len(last_runs) > 1 else ():
        edits = [(start, start, ids) for start, _ in last_runs]
        yield _own_trial(case, f"had {text} more in the generation prompt before each completion", edits)
    for count in (1, 2, 3, 4) if len(last_runs) > 1 else ():
        edits = [(start - count, start, []) for start, _ in last_runs]
        if all(first > 0 and not held[first:end].any() for first, end, _ in edits):
            yield _own_trial(
                case,
                f"lacked the last {count} token(s) of the generation prompt before each completion",
                edits,
            )


def _around_images(case: Case) -> Iterator[Trial]:
    """Yield images elsewhere in their messages, without a token beside them, or left out of later prompts."""
    sample, spans, last = case.sample, case.sample.media_spans, case.departing_runs[-1]
    if not spans:
        return
    for beside, text in ((1, "with the tokens beside them"), (0, "without the tokens beside them")):
        blocks = [(span.start - beside, span.stop + beside) for span in spans]
        if all(a >= 0 and b <= len(sample) and not sample.loss_mask[a:b].any() for a, b in blocks):
            yield from _moved_images(case, blocks, text)
            for number in case.departing_runs[-1:]:
                since = case.runs[number - 1][1] if number else 0
                earlier = [(a, b) for a, b in blocks if b <= since]
                for chosen, which in (
                    (earlier, "all images but the last turn's"),
                    (earlier[:1], "the first image"),
                ):
                    if chosen and (which[4] != "f" or len(earlier) > 1):
                        edits: list[Edit] = [(a, b, []) for a, b in chosen]
                        what = f"lacked {which}, {text}, when it sampled completion {last}"
                        yield _prompt_trial(case, what, edits, since)
    for sides, text in (((-1,), "token before"), ((1,), "token after"), ((-1, 1), "tokens around")):
        for some in [spans, *([span] for span in spans if len(spans) > 1)]:
            places = [span.start - 1 if side < 0 else span.stop for span in some for side in sides]
            if all(0 <= at < len(sample) and not sample.loss_mask[at] for at in places):
                which = "every image" if len(some) > 1 else described(some[0])
                yield _prompt_trial(case, f"lacked the {text} {which}", [(at, at + 1, []) for at in places])


def _moved_images(case: Case, blocks: Sequence[tuple[int, int]], text: str) -> Iterator[Trial]:
    """Yield prompts whose images come first or last in their messages."""
    sample, turns = case.sample, [*bounds(case, len(case.sample)), len(case.sample)]
    for head in range(1, 6):
        for first in (True, False):
            edits: list[Edit] = []
            for start, stop in pairwise(turns):
                own = [(a, b) for a, b in blocks if start + head <= a and b <= stop - head]
                if not own or sample.loss_mask[start : stop - head].any():
                    continue
                images = [part(sample, a, b, sampled=False) for a, b in own]
                edges = [start + head, *(edge for block in own for edge in block), stop - head]
                between = [
                    part(sample, a, b, sampled=False) for a, b in zip(edges[::2], edges[1::2], strict=True)
                ]
                order = [*images, *between] if first else [*between, *images]
                edits.append((start + head, stop - head, joined(order, sample)))
            if edits:
                place = f"{head} token(s) {'after' if first else 'before'} the {'start' if first else 'end'}"
                side = "before" if first else "after"
                what = f"had the images of a message {place} of it, {side} its text, {text}"
                yield _prompt_trial(case, what, edits)


def _texts(case: Case) -> Iterator[Trial]:
    """Yield prompts whose text was cut or encoded in another way at its ends, or anywhere."""
    yield from _history_again(case)
    sample, by_text = case.sample, _pieces(case)[0]
    texts, ids = _pieces(case)[1], sample.token_ids
    free = ~sample.loss_mask
    for span in sample.media_spans:
        free[span.start : span.stop] = False
    # The stop token closes messages too.
    ends = [
        at
        for at in range(1, len(sample))
        if free[at] and ids[at] == ids[case.runs[0][1] - 1] and free[at - 1]
    ]
    for scope in ([ends] if len(ends) > 1 else []) + [[at] for at in ends[:12]]:
        which = "of each message" if len(scope) > 1 else f"of the message that ends at {scope[0]}"
        for count in range(1, 9):
            edits: list[Edit] = [(at - count, at, []) for at in scope]
            if all(at >= count and free[at - count : at].all() for at in scope) and _rising(edits):
                yield _prompt_trial(case, f"lacked the last {count} token(s) {which}: cut short", edits)
    blanks = {by_text[text] for text in ("\n", " ", "\n\n") if text in by_text}
    for token in sorted({*blanks, int(ids[case.runs[0][0] - 1])}):
        edits = [(at, at, [token]) for at in ends]
        if edits:
            yield _prompt_trial(case, f"had token {token} more at the end of each message", edits)
    closing = [max((at for at in ends if at < case.runs[n][0]), default=0) for n in case.departing_runs]
    for count in range(1, 9) if len(closing) > 1 else ():
        edits = [(at - count, at, []) for at in closing]
        if all(at >= count and free[at - count : at].all() for at in closing):
            yield _own_trial(case, f"lacked the last {count} token(s) of the last message: cut short", edits)
    merges = [
        at
        for at in range(len(sample) - 1)
        if by_text and free[at : at + 2].all() and texts[ids[at]] + texts[ids[at + 1]] in by_text
    ]
    after = {int(ids[at + 2]) for at in merges if at + 2 < len(sample)}
    scopes_of = {"everywhere": merges} | {
        f"before each token {token}": [at for at in merges if at + 2 < len(sample) and ids[at + 2] == token]
        for token in sorted(after)
    }
    for where, places in [*scopes_of.items(), *((f"at {at}", [at]) for at in merges[:16])]:
        chosen = [at for number, at in enumerate(places) if not number or at > places[number - 1] + 1]
        edits = [(at, at + 2, [by_text[texts[ids[at]] + texts[ids[at + 1]]]]) for at in chosen]
        if edits:
            yield _prompt_trial(case, f"had the same text encoded again, two tokens as one {where},", edits)


def _rising(edits: Sequence[Edit]) -> bool:
    return all(first[1] <= second[0] for first, second in pairwise(edits))


def _history(case: Case) -> Iterator[Trial]:
    """Yield other forms of earlier turns, before the completions that differ."""
    number = case.departing_runs[0]
    if not number:
        return
    since, runs = case.runs[number - 1][1], case.runs[:number]
    for text, edits in [*_turns_cut(case, runs), *_turns_left_out(case, runs)]:
        if _rising(edits):
            yield _prompt_trial(case, f"{text} when it sampled completion {number}", edits, since)


def _history_again(case: Case) -> Iterator[Trial]:
    """Yield an earlier completion encoded again, before the completions that differ."""
    number = case.departing_runs[0]
    by_text, texts = _pieces(case)
    start, stop = case.runs[number - 1]
    for place in range(start, min(stop, start + _MAX_CUT)) if by_text and number else ():
        for old, new in _cuts(case.sample.token_ids[place:stop], by_text, texts):
            text = f"had the text of completion {number - 1} encoded again, {new} at {place},"
            yield _prompt_trial(case, text, [(place, place + old, new)], stop)


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
            yield (
                f"lacked the first {count} token(s) of {which}, such as reasoning,",
                [(s, s + count, []) for s, _ in some],
            )


def _turns_left_out(case: Case, runs: list[tuple[int, int]]) -> Iterator[tuple[str, list[Edit]]]:
    """Yield prompts without a turn, or with one twice."""
    starts = [0, *(stop for _, stop in runs)]
    for (start, stop), since in zip(runs, starts, strict=False):
        for bound in [since, *(at for at in bounds(case) if since < at < start)]:
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
                for bound in bounds(case)[1:2]:
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
    lasts = [stop - 1 for _, stop in case.runs]
    for token in sorted(stops) if len(lasts) > 1 else ():
        ids = case.sample.token_ids.copy()
        ids[lasts] = token
        text = f"the last token of each completion is another stop token: the sampler's was {token}"
        yield Trial(text, replace(case.sample, token_ids=ids), token=lasts[0], since=lasts[0])
    for number in case.departing_runs:
        place = case.runs[number][1] - 1
        for token in _read_off(case, place, sorted(stops)):
            text = (
                f"the last token of completion {number} is another stop token: the sampler's number is that "
                f"of token {token}, not of {int(case.sample.token_ids[place])}"
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


def _specials(case: Case) -> list[int]:
    """Return tokens that are written as special tokens are, in angle brackets, and hold no image."""
    sample, (_, texts) = case.sample, _pieces(case)
    held = {int(token) for span in sample.media_spans for token in sample.token_ids[span.start : span.stop]}
    special = [token for token, text in enumerate(texts) if len(text) > 2 and text[0] + text[-1] == "<>"]
    return [token for token in special if token not in held][:_MAX_SPECIALS]


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
    "image places": _around_images,
    "prompt text": _texts,
    "another's prompt": _others_prompt,
    "another template": _alternatives,
    "encoded again": _encoded_again,
    "final token": _final_token,
    "altered token": _altered,
}
"""Changes to try, by row."""
