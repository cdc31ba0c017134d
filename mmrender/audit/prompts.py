"""Rows of the stage template: other prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise, product
from typing import Final, NamedTuple

import numpy as np

from mmrender.audit.case import Case, Edit, Trial, edited, joined, outside_media, part, scopes
from mmrender.audit.report import sampled_runs
from mmrender.audit.vocabulary import configured, name_of, pieces, said, specials
from mmrender.sidecar import common_prefix
from mmrender.trajectory.sample import TrainingSample

_MAX_CANDIDATES: Final = 12
_MAX_PEERS: Final = 8
_BLOCKS: Final = (16, 32, 64, 128)
"""Tokens of a block of a prefix cache."""
_MAX_CUT: Final = 65
_MAX_ROLES: Final = 4
_MAX_COMMON: Final = 96
"""Tokens that are tried in a header."""
_MAX_HEAD: Final = 8
"""Tokens of a message's header at most."""
_WRITTEN: Final = (("\n",), ("\n\n",), (" ",), ("<think>", "\n"), ("<think>", "\n\n", "</think>", "\n\n"))
"""Texts that templates write between others."""
_BESIDE: Final = {1: "with the tokens beside them", 0: "without the tokens beside them"}


class Blocks(NamedTuple):
    """Parts of prompts that templates, clients and limits write otherwise, and how.

    Attributes:
        row: The row that tries them.
        noun: Their name in a statement.
        blocks: Runs `[start, stop)`, rising. An edit is made at each.
        before: Tokens before a block that may be lacking.
        after: The same, after a block.
        inside: The same, at both ends of a block.
        fillers: Tokens that may have been added beside a block.
        since: Index of the first token that must be explained.
        own: Whether each completion that differs may have had the edit in its own prompt alone.
        whole: Whether the blocks may be lacking.
        twice: Whether the blocks may come twice.
    """

    row: str
    noun: str
    blocks: Sequence[tuple[int, int]]
    before: int = 0
    after: int = 0
    inside: int = 0
    fillers: Sequence[Sequence[int]] = ()
    since: int | None = None
    own: bool = False
    whole: bool = False
    twice: bool = False

    def edits(self, case: Case) -> Iterator[tuple[str, list[Edit]]]:
        """Yield edits that leave tokens out, repeat them, add some or replace one, by description."""
        noun, blocks = self.noun, self.blocks
        shortest = min(stop - start for start, stop in blocks)
        runs = {f"the {n} token(s) before {noun}": [(a - n, a) for a, _ in blocks] for n in _to(self.before)}
        runs |= {f"the {n} token(s) after {noun}": [(b, b + n) for _, b in blocks] for n in _to(self.after)}
        for n in _to(min(self.inside, shortest - 1)):
            runs[f"the first {n} token(s) of {noun}"] = [(a, a + n) for a, _ in blocks]
            runs[f"the last {n} token(s) of {noun}"] = [(b - n, b) for _, b in blocks]
        runs |= {noun: list(blocks)} if self.inside or self.whole else {}
        for which, some in runs.items():
            yield f"lacked {which}", [(a, b, []) for a, b in some]
        again = {noun: list(blocks)} if self.twice else {}
        again |= {
            f"the {n} token(s) before {noun}": [(a - n, a) for a, _ in blocks]
            for n in _to(min(self.before, 4))[1:]
        }
        for which, some in again.items():
            if some[0][0] >= 0:
                yield f"had {which} twice", [(b, b, part(case.sample, a, b, sampled=False)) for a, b in some]
        for ids in self.fillers:
            more = said(case, ids)
            if self.before:
                yield f"had {more} before {noun}", [(a, a, ids) for a, _ in blocks]
            if self.after:
                yield f"had {more} after {noun}", [(b, b, ids) for _, b in blocks]
            if self.inside and len(ids) == 1:
                which = noun if shortest == 1 else f"the last token of {noun}"
                yield f"had {name_of(case, ids[0])} for {which}", [(b - 1, b, ids) for _, b in blocks]

    def trials(self, case: Case) -> Iterator[Trial]:
        """Yield the edits that leave images and sampled tokens whole."""
        mask = case.sample.loss_mask & (np.arange(len(case.sample)) >= (self.since or 0))
        for text, edits in self.edits(case) if self.blocks else ():
            rising = all(first[1] <= second[0] for first, second in pairwise(edits))
            if edits[0][0] < 0 or not rising or any(mask[a:b].any() for a, b, _ in edits):
                continue
            yield prompt_trial(case, text, edits, self.since)
            if self.own and len(edits) == len(case.departing_runs) > 1:
                yield _own_trial(case, text, [[edit] for edit in edits])


def _to(count: int) -> range:
    return range(1, count + 1)


def beside(row: str, case: Case) -> Iterator[Trial]:
    """Yield the trials of a row's blocks."""
    kinds = _completions, _images, _history, _turns, _messages
    for at in chain.from_iterable(kind(case) for kind in kinds):
        if at.row == row:
            yield from at.trials(case)


def _completions(case: Case) -> Iterator[Blocks]:
    """Yield the beginning of the sample, and generation prompts."""
    ids, common, start = case.sample.token_ids, _fillers(case), case.runs[0][0]
    special = [[token] for token in specials(case) if [token] not in common]
    own, last = int(ids[0]), int(ids[start - 1])
    firsts = sorted({own, *configured(case, "bos_token_id", "eos_token_id", "pad_token_id")})
    more = [[token] * count for token in firsts for count in (1, 2, 3, 4, 8, 16)]
    noun = "the beginning, as of a BOS or padding"
    yield Blocks("opening", noun, [(0, 0)], after=1, fillers=more + special, since=0)
    others = [[token] for token in firsts if token != own]
    yield Blocks("opening", "the first token, such as a BOS,", [(0, 1)], inside=1, fillers=others, since=0)
    first = min([start, *(span.start for span in case.sample.media_spans)])
    for count in [*range(2, 33), *(len(ids) - 2**power for power in range(5, 16))]:
        if 0 < count < first:
            noun = f"the first {count} token(s), cut from the left (truncated)"
            yield Blocks("opening", noun, [(0, count)], since=0, whole=True)
    departing = [case.runs[number] for number in case.departing_runs]
    for runs, which in scopes(case):
        noun = f"{which.replace('all', 'each').replace('ions', 'ion')}, in the generation prompt,"
        whole = runs is case.runs or len(departing) == 1
        more = [few for one in special if whole for few in (one, [*one, last])]
        yield Blocks("generation prompt", noun, runs, before=8, fillers=common + more, own=True)
    if 1 < len(departing) < len(case.runs):
        yield Blocks("generation prompt", "each completion, in the generation prompt,", departing, before=8)


def _history(case: Case) -> Iterator[Blocks]:
    """Yield earlier completions."""
    number, common = case.departing_runs[0], _fillers(case)
    runs, since = case.runs[:number], case.runs[number - 1][1]
    for some in [runs, runs[-1:]][:number]:
        which = "each earlier completion" if some is runs else f"completion {number - 1}"
        yield Blocks("history", which, some, 1, 4, _MAX_CUT, common, since)
        kept = [(start, stop - 1) for start, stop in some]
        yield Blocks("history", f"{which}, but for its stop token", kept, inside=_MAX_CUT, since=since)


def _messages(case: Case) -> Iterator[Blocks]:
    """Yield the headers and ends of messages."""
    ids, common, headers = case.sample.token_ids, _fillers(case), heads(case)
    own_role = next((ids[at + 1] for at, stop in headers if stop == case.runs[0][0]), None)
    roles: dict[int, list[tuple[int, int]]] = {}
    for head in headers:
        roles.setdefault(int(ids[head[0] + 1]), []).append(head)
    named = {f"each message of {name_of(case, role)}": own for role, own in [*roles.items()][:_MAX_ROLES]}
    for which, chosen in ({"each message": headers} | named).items() if headers else ():
        ends = [(stop, stop) for _, stop in chosen]
        is_own = chosen is headers or chosen[-1][1] in (start for start, _ in case.runs)
        more = common if is_own else [[token] for token in _commonest(case)]
        noun = f"the text of {which}, in its header,"
        yield Blocks("opening", noun, ends, before=headers[0][1] - headers[0][0], fillers=more, since=0)
    # Headers of completions have another role.
    places = [(at + 1, at + 2) for at, _ in roles.get(own_role, [])] if own_role is not None else []
    others = [[token] for token in _commonest(case) if token != own_role]
    yield Blocks("generation prompt", "the role in generation prompts,", places, inside=1, fillers=others)
    # The stop token closes messages too.
    stop = ids[case.runs[0][1] - 1]
    ends = [(a, a + 1) for a in range(1, len(ids)) if case.free[a] and ids[a] == stop and case.free[a - 1]]
    if len(ends) > 1:
        yield Blocks("prompt text", "the end of each message", ends, before=8, fillers=common)
    for end in ends[:_MAX_CANDIDATES]:
        yield Blocks("prompt text", f"the end of the message at {end[0]}", [end], before=4)
    starts = [case.runs[number][0] for number in case.departing_runs]
    lasts = [max((end for end in ends if end[0] < start), default=(0, 0)) for start in starts]
    if len(lasts) > 1:
        yield Blocks("prompt text", "the end of the last message", lasts, before=8, own=True)


def heads(case: Case) -> list[tuple[int, int]]:
    """Return the headers of messages, as long as the generation prompt: runs `[start, stop)`."""
    starts = bounds(case, len(case.sample))
    length = next((case.runs[0][0] - at for at in reversed(starts) if at < case.runs[0][0]), 0)
    heads = [(at, at + length) for at in starts if not case.sample.loss_mask[at : at + length].any()]
    return [head for head in heads if head[1] <= len(case.sample)] if 1 < length <= _MAX_HEAD else []


def _commonest(case: Case) -> list[int]:
    """Return the commonest tokens of all samples, one of which a template may write elsewhere."""
    some = [one.sample.token_ids for one in case.peers[:_MAX_PEERS]]
    tokens, counts = np.unique(np.concatenate([case.sample.token_ids, *some]), return_counts=True)
    held = {int(case.sample.token_ids[span.start]) for span in case.sample.media_spans}
    order = tokens[np.argsort(-counts, kind="stable")].tolist()
    return [token for token in order if token not in held][:_MAX_COMMON]


def _fillers(case: Case) -> list[list[int]]:
    """Return tokens that may have been added: those at borders of the sample, and texts of templates."""
    sample, (by_text, _) = case.sample, pieces(case)
    edges = {0, *(at for a, b in case.runs for at in (a - 1, b - 1, b, b + 1))}
    edges |= {
        at for one in sample.media_spans for at in (one.start - 2, one.start - 1, one.stop, one.stop + 1)
    }
    ends = {stop - 1 for _, stop in case.runs}
    inside = [at for at in sorted(edges) if 0 <= at < len(sample) and (case.free[at] or at in ends)]
    common = [[token] for token in dict.fromkeys(sample.token_ids[inside].tolist())]
    return common + [[by_text[text] for text in texts] for texts in _WRITTEN if by_text.keys() >= {*texts}]


def prompt_trial(case: Case, text: str, edits: Sequence[Edit], since: int | None = None) -> Trial:
    """Return the trial of another prompt, which need not explain tokens sampled before `since`."""
    mask = case.sample.loss_mask & (np.arange(len(case.sample)) >= (since or 0))
    changed = edited(replace(case.sample, loss_mask=mask), edits)
    return Trial(f"the sampler's prompt {text}", changed, since=edits[0][0] if since is None else since)


def _own_trial(case: Case, text: str, edits: Sequence[Sequence[Edit]]) -> Trial:
    """Return the trial of prompts that each completion that differs saw for itself, by edits of its own.

    Later prompts have the trainer's tokens there, as of templates that rewrite earlier turns.
    """
    parts = []
    for number, own in zip(case.departing_runs, edits, strict=True):
        alone = part(case.of_run(number), 0, case.runs[number][1])
        parts.append(Trial("", edited(alone, own)))
    what, since = f"the sampler's prompt {text} when it was sampled", edits[0][0][0]
    return Trial(what, parts=parts, since=since)


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


def moved_text(case: Case) -> Iterator[Trial]:
    """Yield prompts without a first message of their own, whose text begins a later message."""
    headers, ids = heads(case), case.sample.token_ids
    if len(headers) < 3 or headers[1][0] > case.runs[0][0]:
        return
    (start, begin), (after, into), ends = *headers[:2], np.flatnonzero(ids == ids[case.runs[0][1] - 1])
    text = ids[begin : min([after, *ends[ends >= begin]])].tolist()
    gone: Edit = (start, after, [])
    for count in range(3):
        added = text + count * [int(ids[begin - 1])]
        what = f"lacked the first message, whose text, with {count} token(s) after it, began"
        yield prompt_trial(case, f"{what} the second one", [gone, (into, into, added)], start)
        starts = [case.runs[number][0] for number in case.departing_runs]
        lasts = [
            max((stop for at, stop in headers if start < at and stop < own), default=0) for own in starts
        ]
        if all(lasts):
            edits = [[gone, (last, last, added)] for last in lasts]
            yield _own_trial(case, f"{what} the last message", edits)


def _texts_in(case: Case, since: int, stop: int) -> list[tuple[int, int]]:
    """Return the texts between headers, stop tokens and images: runs `[start, stop)`."""
    ids = case.sample.token_ids
    edges = {last for _, last in heads(case)}
    edges |= {at for at in range(stop) if ids[at] == ids[case.runs[0][1] - 1]}
    edges |= {edge for span in case.sample.media_spans for edge in (span.start - 1, span.stop + 1)}
    texts = pairwise(sorted(edge for edge in edges if since <= edge <= stop))
    return [(first, last) for first, last in texts if case.free[first:last].all()]


def exchanged(case: Case) -> Iterator[Trial]:
    """Yield prompts in which two texts or two neighbouring turns are in each other's place."""
    sample, (since, stop) = case.sample, case.prompt_of(case.departing_runs[0])
    texts = [one for one in _texts_in(case, 0, stop) if one[1] - one[0] > 1][-_MAX_CANDIDATES:]
    turns = [*pairwise(pairwise(bounds(case, stop)))]
    for (first, last), (start, end) in [*combinations(texts, 2), *turns]:
        one, two = (part(sample, a, b, sampled=False) for a, b in ((first, last), (start, end)))
        if not sample.loss_mask[max(first, since) : end].any():
            what = f"had the tokens {first} to {last - 1} and {start} to {end - 1} in each other's place"
            yield prompt_trial(case, f"{what} (exchanged)", [(first, last, two), (start, end, one)], since)


def _turns(case: Case) -> Iterator[Blocks]:
    """Yield turns, texts and special tokens that may be lacking in prompts, or come twice."""
    number, ids, free = case.departing_runs[0], case.sample.token_ids, case.free
    since, stop = case.prompt_of(number)
    starts = [*bounds(case, stop), stop]
    for first, last in combinations(starts, 2):
        # The last turn opens the completion.
        if last - first > 1 and (last < stop or not number):
            noun = f"the tokens {first} to {last - 1}, one turn or more,"
            yield Blocks("history", noun, [(first, last)], since=since, whole=True)
    for what, blocks in {"turn": pairwise(starts), "text": _texts_in(case, since, stop)}.items():
        for first, last in blocks:
            noun = f"the tokens {first} to {last - 1}, a {what},"
            yield Blocks("history", noun, [(first, last)], since=since, twice=True)
    written, end = [*specials(case), *configured(case, "eos_token_id")], case.runs[-1][0] - 1
    for token in dict.fromkeys(int(ids[at]) for at in range(end) if ids[at] in written and free[at]):
        places = [at for at in range(end) if ids[at] == token and free[at]]
        for follower in dict.fromkeys(int(ids[at + 1]) for at in places):
            noun = f"each {name_of(case, token)} but those before {name_of(case, follower)}"
            lost = [(at, at + 1) for at in places if ids[at + 1] != follower]
            yield Blocks("history", noun, lost, whole=True)
    inside = [at for start, last in case.runs[:number] for at in range(start, last - 1) if ids[at] in written]
    noun = "the special tokens within earlier completions (skip_special_tokens)"
    yield Blocks("history", noun, [(at, at + 1) for at in inside], since=since, whole=True)
    for start, last in case.runs[:number]:
        for first in (at for at in (0, *starts) if at < start):
            noun = f"the tokens {first} to {last - 1}, a turn,"
            yield Blocks("history", noun, [(first, last)], since=since, whole=True)


def _images(case: Case) -> Iterator[Blocks]:
    """Yield images that may be lacking in later prompts, or have other neighbours."""
    spans, last, common = case.sample.media_spans, case.departing_runs[-1], _fillers(case)
    images = [(span.start, span.stop) for span in spans]
    for some in ([images] if images else []) + [[one] for one in images if len(images) > 1]:
        which = "each image" if len(some) > 1 else f"image {images.index(some[0])}"
        fillers = common if some is images else ()
        yield Blocks("image places", f"the placeholders of {which}", some, 1, 1, fillers=fillers)
        yield Blocks("image places", which, _around(some, 1), 2, 2, fillers=fillers)
    since, _ = case.prompt_of(last)
    for beside, text in _BESIDE.items():
        earlier = [block for block in _around(images, beside) if block[1] <= since]
        for chosen, which in ((earlier, "all images but the last turn's"), (earlier[:1], "the first image")):
            noun = f"{which}, {text}, when it sampled completion {last}"
            yield Blocks("image places", noun, chosen, since=since, whole=True)


def _around(blocks: Sequence[tuple[int, int]], beside: int) -> list[tuple[int, int]]:
    return [(start - beside, stop + beside) for start, stop in blocks]


def image_places(case: Case) -> Iterator[Trial]:
    """Yield images elsewhere in their messages, with other neighbours, or lacking."""
    since, _ = case.prompt_of(case.departing_runs[-1])
    for beside, text in _BESIDE.items():
        around = _around([(span.start, span.stop) for span in case.sample.media_spans], beside)
        if any(a < 0 or case.sample.loss_mask[a:b].any() for a, b in around):
            continue
        yield from _moved_images(case, around, text)
        earlier = [part(case.sample, *block, sampled=False) for block in around if block[1] <= since]
        for at in (stop for start, stop in heads(case) if start >= since):
            for block in earlier[:: max(len(earlier) - 1, 1)]:
                what = f"had an image of an earlier message again, {text}, at {at}"
                yield prompt_trial(case, what, [(at, at, block)], since)


def _moved_images(case: Case, blocks: Sequence[tuple[int, int]], text: str) -> Iterator[Trial]:
    """Yield prompts whose images come first or last in their messages."""
    sample, turns = case.sample, [*bounds(case, len(case.sample)), len(case.sample)]
    for head, first in product(range(1, 6), (True, False)):
        edits: list[Edit] = []
        for start, stop in pairwise(turns):
            own = [(a, b) for a, b in blocks if start + head <= a and b <= stop - head]
            if not own or sample.loss_mask[start : stop - head].any():
                continue
            at = start + head if first else stop - head
            moved: list[Edit] = [(at, at, part(sample, a, b, sampled=False)) for a, b in own]
            gone: list[Edit] = [(a, b, []) for a, b in own]
            edits += [*moved, *gone] if first else [*gone, *moved]
        if edits:
            place = f"{head} token(s) {'after' if first else 'before'} the {'start' if first else 'end'}"
            side = "before" if first else "after"
            what = f"had the images of a message {place} of it, {side} its text, {text}"
            yield prompt_trial(case, what, edits)


def texts(case: Case) -> Iterator[Trial]:
    """Yield prompts whose text was cut short, or encoded in another way."""
    sample, (by_text, texts) = case.sample, pieces(case)
    # Completions of earlier turns are text of later prompts.
    since, _ = case.prompt_of(case.departing_runs[0])
    ids, is_prompt = sample.token_ids, ~sample.loss_mask | (np.arange(len(sample)) < since)
    free = outside_media(sample) & is_prompt
    named: dict[str, dict[int, Edit]] = {}
    spelled = [(token, texts[token]) for token in specials(case)]
    for at in range(len(sample) - 1) if texts else ():
        pair, whole = texts[ids[at]] + texts[ids[at + 1]], texts[ids[at]]
        if free[at : at + 2].all() and pair in by_text:
            named.setdefault("two tokens as one", {})[at] = (at, at + 2, [by_text[pair]])
        cuts = [(whole[:cut], whole[cut:]) for cut in range(1, len(whole))]
        halves = next(([by_text[a], by_text[b]] for a, b in cuts if a in by_text and b in by_text), None)
        if free[at] and halves:
            named.setdefault("one token as two", {})[at] = (at, at + 1, halves)
        for token, text in (one for one in spelled if whole and one[1].startswith(whole)):
            spellings = ("".join(texts[one] for one in ids[at : at + n]) for n in range(2, len(text) + 1))
            length = next((n for n, spelling in enumerate(spellings, 2) if spelling == text), 0)
            if length and free[at : at + length].all():
                named.setdefault(f"a text as the special token {text!r}", {})[at] = (at, at + length, [token])
    for text, places in named.items():
        some = {"everywhere": [*places.values()]}
        some |= {f"at {at}": [edit] for at, edit in list(places.items())[:16]}
        for edit in places.values():
            if edit[1] < len(ids):
                some.setdefault(f"before each {name_of(case, int(ids[edit[1]]))}", []).append(edit)
        for where, edits in some.items():
            apart: list[Edit] = []
            for edit in edits:
                apart += [edit] if not apart or edit[0] >= apart[-1][1] else []
            yield prompt_trial(case, f"had the same text encoded again, {text} {where},", apart, since)


def others_prompt(case: Case) -> Iterator[Trial]:
    """Yield another sample's prompt, or all of another sample, before the completions."""
    sample, last = case.sample, case.departing_runs[-1]
    peers = sorted(case.peers, key=lambda one: -common_prefix(sample.token_ids, one.sample.token_ids))
    for other in (peer.sample for peer in peers[:_MAX_PEERS]):
        name, runs = other.sample_id or "another sample", sampled_runs(other.loss_mask)
        for number in case.departing_runs[:2]:
            start, stop = case.runs[number]
            length = runs[number][0] if number < len(runs) else 0
            if length and _seen(other, length) != _seen(sample, start):
                prompt = part(other, 0, length, sampled=False)
                changed = joined(
                    [prompt, part(sample, start, len(sample) if number == last else stop)], sample
                )
                yield Trial(f"completion {number} was sampled after the prompt of {name}", changed)
        first = min([case.runs[0][0], *(s.start for s in (*sample.media_spans, *other.media_spans))])
        for count in (size for size in _BLOCKS if size < min(first, len(other))):
            text = f"had the first {count} tokens of {name}, as of a block of a prefix cache,"
            yield prompt_trial(case, text, [(0, count, other.token_ids[:count].tolist())], 0)
        before = joined([part(other, 0, len(other), sampled=False), part(sample, 0, len(sample))], sample)
        yield Trial(f"the sampler's tokens attended to {name}, which came before them", before)


def _seen(sample: TrainingSample, stop: int) -> tuple[bytes, list[str]]:
    """Return the tokens before `stop`, and the identities of their media."""
    media = [span.item.identity for span in sample.media_spans if span.start < stop]
    return sample.token_ids[:stop].tobytes(), media


def alternatives(of_media: bool, case: Case) -> Iterator[Trial]:
    """Yield the sample as something else builds it, with other media alone or with another text."""
    for name, other in case.alternatives.items():
        own, theirs = (one.token_ids[outside_media(one)] for one in (case.sample, other))
        is_same = np.array_equal(own, theirs)
        if is_same == of_media and int(other.loss_mask.sum()) == len(case.compared.positions):
            logprobs = np.zeros(len(other), np.float32)
            logprobs[other.loss_mask] = case.compared.sampler
            first = common_prefix(other.token_ids, case.sample.token_ids)
            text = f"the sampler's prompt was built by {name}: the tokens part at {first}"
            text = f"the sampler saw the images or clips of {name}" if of_media else text
            since = min(first, *(span.start for span in case.sample.media_spans), len(case.sample))
            yield Trial(text, replace(other, logprobs=logprobs), since=since)
