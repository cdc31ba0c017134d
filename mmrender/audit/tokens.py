"""Variations of the tokens that the sampler had: shifted, replaced, lost, added, or another rollout's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mmrender.audit.images import shift_text
from mmrender.audit.report import Comparison, Decode, sampled_runs
from mmrender.audit.trainer import picked_logprobs
from mmrender.audit.trial import Case, Trial, Variation, scopes, with_sampled, with_tokens
from mmrender.spans import MultiModalData, common_prefix
from mmrender.trajectory.sample import TrainingSample

_MOST_PEERS: Final = 8
_MOST_CANDIDATES: Final = 12
_MOST_REPAIRS: Final = 8
_PADS: Final = (1, 2, 3, 4, 8, 16, 32, 64)


def _shifted(case: Case) -> Iterator[Trial]:
    for by in (1, -1, 2, -2, 3, -3):
        for runs, which in scopes(case):
            ids = case.sample.token_ids.copy()
            for start, stop in runs:
                ids[start:stop] = np.roll(ids[start:stop], by)
            yield Trial(
                f"the sampled tokens of {which} are shifted: the sampler's were {shift_text(by)}",
                replace(case.sample, token_ids=ids),
                token=runs[0][0],
                since=runs[0][0],
            )
    for runs, which in scopes(case):
        ids = case.sample.token_ids.copy()
        for start, stop in runs:
            ids[start:stop] = ids[start:stop][::-1].copy()
        yield Trial(
            f"the sampled tokens of {which} are in reverse order",
            replace(case.sample, token_ids=ids),
            token=runs[0][0],
            since=runs[0][0],
        )


def _stops(case: Case) -> set[int]:
    """Return tokens that may end a completion: the model's own, and those that end the completions given."""
    model = case.trainer.model
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        for name in ("eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            found.update(value if isinstance(value, list | tuple) else [value] if value is not None else [])
    for one in [case.compared, *case.peers[:64]]:
        found.update(int(one.sample.token_ids[stop - 1]) for _, stop in sampled_runs(one.sample.loss_mask))
    return found


def _final_token(case: Case) -> Iterator[Trial]:
    """Yield stop tokens in place of the last token of a completion, where the sampler's number is theirs."""
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
    """Return tokens that the trainer gives the sampler's number at `place`, the nearest first.

    Everything before `place` must agree already, in the sample as it is or in the one given.
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
    return [int(tokens[index]) for index in order if tokens[index] != own][:_MOST_CANDIDATES]


def _altered(case: Case) -> Iterator[Trial]:
    """Yield one sampled token replaced, left out or added where the numbers part.

    What stands there is read off the trainer's own distribution; what follows must then agree.
    """
    stop = case.runs[case.departing_runs[0]][1]
    place, ids = case.position, case.sample.token_ids
    number = case.departing_runs[0]
    if stop - place < 3:  # what follows must be able to disagree
        return
    rest = ids[place:stop]
    for token in _read_off(case, place):
        yield Trial(
            f"token {place}, in completion {number}, is another: the sampler's was {token}, "
            f"not {int(ids[place])}",
            with_sampled(case.sample, place, [token]),
            token=place,
            since=place,
        )
        if len(rest) > 2:
            yield Trial(
                f"completion {number} lacks a token at {place}: the sampler's was {token}",
                with_sampled(case.sample, place, [token, *rest[:-1]]),
                token=place,
                since=place,
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


@lru_cache(maxsize=2)
def _pieces(decode: Decode, count: int) -> tuple[Mapping[str, int], Sequence[str]]:
    """Return the tokens of a vocabulary by their text, and their texts."""
    texts = [decode([token]) for token in range(count)]
    return {text: token for token, text in reversed(list(enumerate(texts))) if text}, texts


def _encoded_again(case: Case) -> Iterator[Trial]:
    """Yield a completion whose text was cut into other tokens wherever the numbers part.

    From place to place the tokens are chosen by which the next numbers agree the furthest.
    """
    if case.decode is None:
        return
    by_text, texts = _pieces(case.decode, int(case.trainer.model.get_output_embeddings().weight.shape[0]))
    number, place, sample = case.departing_runs[0], case.position, case.sample
    stop, said = case.runs[number][1], ""
    for _ in range(_MOST_REPAIRS):
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


def _exchanged_turns(case: Case) -> Iterator[Trial]:
    sample = case.sample
    for one, two in list(combinations(range(len(case.runs)), 2))[:10]:
        first, second = case.runs[one], case.runs[two]
        count = min(first[1] - first[0], second[1] - second[0])
        a, b = slice(first[0], first[0] + count), slice(second[0], second[0] + count)
        whole = first[1] - first[0] == second[1] - second[0]
        ids = sample.token_ids.copy()
        ids[a], ids[b] = sample.token_ids[b], sample.token_ids[a]
        if whole:
            yield Trial(
                f"the tokens of completions {one} and {two} are in exchanged places",
                replace(sample, token_ids=ids),
                token=first[0],
                since=first[0],
            )
        moved = _exchanged_runs(sample, first, second)
        yield Trial(
            f"completions {one} and {two}, with their log-probabilities, are in exchanged turns",
            moved,
            token=first[0],
            since=first[0],
        )
        asked = _exchanged_prompts(case, one, two)
        if asked is not None:
            yield Trial(
                f"the prompts before completions {one} and {two} are in exchanged turns",
                asked,
                token=first[0],
            )


def _rebuilt(sample: TrainingSample, parts: Sequence[tuple[int, int]]) -> TrainingSample:
    """Return a sample of these parts `[start, stop)`, in this order, with what belongs to them."""
    order = np.concatenate([np.arange(start, stop) for start, stop in parts])
    entries, done = [], 0
    for start, stop in parts:
        entries += [
            (span.range.shifted(done - start), span.item)
            for span in sample.media_spans
            if start <= span.start and span.stop <= stop
        ]
        done += stop - start
    return TrainingSample(
        sample.token_ids[order],
        sample.loss_mask[order],
        None if sample.logprobs is None else sample.logprobs[order],
        MultiModalData.of(entries),
        sample_id=sample.sample_id,
    )


def _exchanged_runs(
    sample: TrainingSample, first: tuple[int, int], second: tuple[int, int]
) -> TrainingSample:
    parts = [(0, first[0]), second, (first[1], second[0]), first, (second[1], len(sample))]
    return _rebuilt(sample, parts)


def _exchanged_prompts(case: Case, one: int, two: int) -> TrainingSample | None:
    """Return the sample with the prompt parts before two completions exchanged; None where they are equal."""
    starts = [0, *(stop for _, stop in case.runs)]
    head = (starts[one], case.runs[one][0]) if one else None
    if head is None:
        # The first prompt holds the system prompt too: only what is new in it since the last opener moves.
        opener = int(case.sample.token_ids[starts[two]]) if starts[two] < len(case.sample) else -1
        places = np.flatnonzero(case.sample.token_ids[: case.runs[0][0]] == opener)
        if len(places) == 0:
            return None
        head = (int(places[-1]), case.runs[0][0])
    tail = (starts[two], case.runs[two][0])
    parts = [(0, head[0]), tail, case.runs[one], (case.runs[one][1], tail[0]), head]
    return _rebuilt(case.sample, [*parts, (tail[1], len(case.sample))])


def _peers(case: Case) -> list[Comparison]:
    """Return the samples that share the most tokens with this one, the nearest first."""
    ids = case.sample.token_ids
    rated = [(common_prefix(ids, peer.sample.token_ids), peer) for peer in case.peers]
    return [peer for _, peer in sorted(rated, key=lambda entry: -entry[0])[:_MOST_PEERS]]


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
    """Yield the prompt of another sample, media and all, before this one's completions."""
    for peer in _peers(case):
        name = peer.sample.sample_id or "another sample"
        runs = sampled_runs(peer.sample.loss_mask)
        for number in case.departing_runs[:2]:
            start, stop = case.runs[number]
            if number >= len(runs):
                continue
            other = runs[number][0]
            if other == start and np.array_equal(
                peer.sample.token_ids[:start], case.sample.token_ids[:start]
            ):
                same = [span.item.identity for span in case.sample.media_spans if span.start < start]
                theirs = [span.item.identity for span in peer.sample.media_spans if span.start < other]
                if same == theirs:
                    continue
            yield Trial(
                f"completion {number} was sampled after the prompt of {name}",
                _after(peer.sample, other, case.sample, start),
                token=start,
                until=None if number == case.departing_runs[-1] else stop,
            )


def _after(prompt: TrainingSample, stop: int, sample: TrainingSample, start: int) -> TrainingSample:
    """Return the tokens of `sample` from `start` on after those of `prompt` before `stop`."""
    entries = [(span.range, span.item) for span in prompt.media_spans if span.start < stop]
    entries += [
        (span.range.shifted(stop - start), span.item) for span in sample.media_spans if span.start >= start
    ]
    zeros = np.zeros(stop)
    recorded = sample.logprobs if sample.logprobs is not None else np.zeros(len(sample), np.float32)
    return TrainingSample(
        np.concatenate([prompt.token_ids[:stop], sample.token_ids[start:]]),
        np.concatenate([zeros.astype(np.bool_), sample.loss_mask[start:]]),
        np.concatenate([zeros.astype(np.float32), recorded[start:]]),
        MultiModalData.of(entries),
        sample_id=sample.sample_id,
    )


def _bounds(case: Case) -> list[int]:
    """Return where turns may begin: at the first or second token of the sample, where it recurs."""
    ids, first = case.sample.token_ids, case.runs[0][0]
    for opener in (0, 1):
        places = np.flatnonzero(ids[:first] == ids[opener]) if len(ids) > opener else np.zeros(0)
        if len(places) > 1:
            return [int(place) for place in places]
    return []


def _opening(case: Case) -> Iterator[Trial]:
    """Yield prompts that begin with a token or a turn more, or less."""
    sample, config = case.sample, case.trainer.model.config
    text = config.get_text_config()
    begins = {getattr(one, "bos_token_id", None) for one in (config, text)} | {int(sample.token_ids[0])}
    begins |= {getattr(text, "eos_token_id", None)}
    for token in sorted(each for each in begins if isinstance(each, int)):
        yield Trial(
            f"the sampler's prompt began with one more token, {token}",
            with_tokens(sample, 0, 0, [token]),
            token=0,
        )
    most = case.runs[0][0] - 1
    for count in (1, 2, 3):
        if count < most and not any(span.start < count for span in sample.media_spans):
            yield Trial(
                f"the sampler's prompt lacked the first {count} token(s)",
                with_tokens(sample, 0, count, []),
                token=0,
            )
    bounds = _bounds(case)
    for place in bounds[1:4]:
        head = bounds[0]
        yield Trial(
            f"the sampler's prompt lacked its beginning, the tokens {head} to {place - 1}, as of a system "
            "prompt",
            with_tokens(sample, head, place, []),
            token=head,
        )
    for start, stop in pairwise(bounds[1:]):
        yield Trial(
            f"the sampler's prompt lacked the turn of the tokens {start} to {stop - 1}",
            with_tokens(sample, start, stop, []),
            token=start,
            since=start,
        )
    for turn, name in _openings(case):
        yield Trial(
            f"the sampler's prompt began with {len(turn)} token(s) more, those that {name} begins with, "
            "as with a system prompt",
            with_tokens(sample, 0, 0, turn),
            token=0,
        )


def _openings(case: Case) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield what other samples have before a token that this one begins with."""
    seen: set[tuple[int, ...]] = set()
    for peer in case.peers:
        ids, runs = peer.sample.token_ids, sampled_runs(peer.sample.loss_mask)
        first = min([runs[0][0] if runs else 0, *(span.start for span in peer.sample.media_spans)])
        for place in np.flatnonzero(ids[1:first] == case.sample.token_ids[0])[:3] + 1:
            turn = tuple(ids[:place].tolist())
            if turn not in seen and len(seen) < _MOST_PEERS:
                seen.add(turn)
                yield turn, peer.sample.sample_id or "another sample"


def _before_completion(case: Case) -> Iterator[Trial]:
    """Yield prompts that end in a token more or less, as by another generation prompt."""
    sample = case.sample
    for runs, which in scopes(case):
        for count in (1, 2, 3, 4):
            changed, fits = sample, True
            for start, _ in reversed(runs):
                fits = fits and start > count and not sample.loss_mask[start - count : start].any()
                fits = fits and not any(
                    start - count < span.stop and span.start < start for span in sample.media_spans
                )
                changed = with_tokens(changed, start - count, start, []) if fits else changed
            if fits:
                yield Trial(
                    f"the sampler's prompt lacked the last {count} token(s) before {which}",
                    changed,
                    token=runs[0][0] - count,
                    since=runs[0][0] - count,
                )
        for ids, text in _fillers(case):
            changed = sample
            for start, _ in reversed(runs):
                changed = with_tokens(changed, start, start, ids)
            yield Trial(
                f"the sampler's prompt had {text} more before {which}",
                changed,
                token=runs[0][0],
                since=runs[0][0],
            )


def _fillers(case: Case) -> Iterator[tuple[list[int], str]]:
    """Yield tokens that generation prompts differ in."""
    seen = {int(case.sample.token_ids[start - 1]) for start, _ in case.runs}
    for token in sorted(seen)[:3]:
        yield [token], f"one token {token}"
    if case.decode is None:
        return
    by_text, _ = _pieces(case.decode, int(case.trainer.model.get_output_embeddings().weight.shape[0]))
    for texts in (["\n"], ["\n\n"], [" "], ["<think>", "\n"], ["<think>", "\n\n", "</think>", "\n\n"]):
        if all(text in by_text for text in texts):
            yield [by_text[text] for text in texts], repr("".join(texts))


def _attended_padding(case: Case) -> Iterator[Trial]:
    sample, config = case.sample, case.trainer.model.config
    text = config.get_text_config()
    named = [getattr(one, name, None) for one in (config, text) for name in ("pad_token_id", "eos_token_id")]
    features = set(case.trainer.family.feature_token_ids.values())
    pads = [each for each in dict.fromkeys([*named, 0]) if isinstance(each, int) and each not in features][:3]
    longest = [len(peer.sample) - len(sample) for peer in case.peers]
    starts = [sampled_runs(peer.sample.loss_mask)[:1] for peer in case.peers]
    longest += [runs[0][0] - case.runs[0][0] for runs in starts if runs]
    counts = {*_PADS, *(each for each in longest if 0 < each < 512)}
    counts |= {-len(sample) % side for side in (8, 16, 32, 64, 128)}
    counts |= {-case.runs[0][0] % side for side in (8, 16, 32, 64, 128)}
    for pad in pads:
        for count in sorted(counts - {0})[:24]:
            yield Trial(
                f"the sampler attended to padding: {count} token(s) {pad} before the prompt",
                with_tokens(sample, 0, 0, [pad] * count),
                token=0,
            )
        for count in sorted(counts - {0})[:8]:
            start = case.runs[0][0]
            yield Trial(
                f"the sampler attended to padding: {count} token(s) {pad} between prompt and completion",
                with_tokens(sample, start, start, [pad] * count),
                token=start,
                since=start,
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


TOKEN_VARIATIONS: Final[tuple[Variation, ...]] = (
    Variation(
        "shifted tokens",
        "ids",
        "the tokens of one completion or of all a few places off, or reversed",
        _shifted,
    ),
    Variation("final token", "ids", "a completion that ends in another stop token", _final_token),
    Variation("altered token", "ids", "one sampled token replaced, lost or added", _altered),
    Variation(
        "encoded again", "ids", "a completion whose text was encoded again; needs `decode`", _encoded_again
    ),
    Variation(
        "exchanged turns",
        "ids",
        "completions, or the prompts before them, in exchanged turns",
        _exchanged_turns,
    ),
    Variation("another's tokens", "ids", "a completion of another branch or rollout", _others_tokens),
    Variation(
        "another's prompt", "ids", "the prompt, images and all, of another branch or rollout", _others_prompt
    ),
    Variation("opening", "ids", "a BOS, a system prompt or a turn more or less", _opening),
    Variation(
        "generation prompt", "ids", "tokens more or less right before a completion", _before_completion
    ),
    Variation(
        "attended padding",
        "ids",
        "padding before the prompt or the completion that was attended to",
        _attended_padding,
    ),
    Variation("another template", "ids", "the prompt as one of the `alternatives` has it", _alternatives),
)
