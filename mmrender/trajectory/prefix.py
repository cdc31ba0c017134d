"""Places in a tree: the common prefix of two sequences of tokens, with the media behind their placeholders.

Placeholders of two images of one size are the same tokens, so tokens alone do not tell where prompts part.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from mmrender.errors import TrajectoryError
from mmrender.sidecar import MediaSpan, common_prefix
from mmrender.trajectory.step import Int32Array, Step


class SharedPrefix(NamedTuple):
    """The first `length` tokens agree, media included, and do not end within a placeholder range.

    If the tokens alone agree further, up to `tokens`, `conflict` is the medium that only one of the two
    sequences has there, and `known` says whether this is the earlier sequence.
    """

    length: int
    tokens: int
    conflict: MediaSpan | None = None
    known: bool = False


NOTHING_SHARED: Final = SharedPrefix(0, 0)


def media_before(media: Sequence[MediaSpan], stop: int) -> Sequence[MediaSpan]:
    """Return the media, in prompt order, that begin before the token `stop`."""
    return media[: bisect_left(media, stop, key=lambda span: span.range.offset)]


def media_from(media: Sequence[MediaSpan], start: int) -> Sequence[MediaSpan]:
    """Return the media, in prompt order, that begin at the token `start` or later."""
    return media[bisect_left(media, start, key=lambda span: span.range.offset) :]


def shared_prefix(
    start: int,
    known_ids: Int32Array,
    known: Sequence[MediaSpan],
    prompt: Int32Array,
    media: Sequence[MediaSpan],
) -> SharedPrefix:
    """Compare a prompt with the part of a known sequence that begins at `start`. The tokens before are equal.

    Args:
        start: Number of tokens that agree already, media included.
        known_ids: Tokens of the known sequence from `start` on.
        known: Its media from `start` on.
        prompt: All tokens of the prompt.
        media: All its media.
    """
    tokens = start + common_prefix(known_ids, prompt[start:])
    ours = media_before(media_from(media, start), tokens)
    for first, second in zip_longest(ours, media_before(known, tokens)):
        places = [tokens if span is None else span.start for span in (first, second)]
        if places[0] != places[1]:
            is_known = places[1] < places[0]
            return SharedPrefix(min(places), tokens, second if is_known else first, is_known)
        if first.range != second.range or first.item.identity != second.item.identity:
            return SharedPrefix(first.start, first.start)  # another image: a branch that starts here
    length = ours[-1].start if ours and ours[-1].stop > tokens else tokens
    return SharedPrefix(length, length)


class Place(NamedTuple):
    """Start of a prompt: parent, number of shared tokens, and the tokens and media that it adds."""

    parent: Step | None
    keep: int
    prompt_delta: Int32Array
    media: Sequence[MediaSpan]


def find_place(
    steps: Sequence[Step], prompt: Int32Array, media: Sequence[MediaSpan], parent: Step | None, where: str
) -> Place:
    """Find the place of a prompt by comparing it with `parent`, or with all steps of a tree.

    Raises:
        TrajectoryError: Prompt and step have different media at the same tokens. `where` is the next step.
    """
    if parent is None:
        # Each stored token is compared at most once.
        best: Step | None = None
        found = NOTHING_SHARED
        all_shared: list[SharedPrefix] = []
        for step in steps:
            shared = NOTHING_SHARED if step.parent is None else all_shared[step.parent.index]
            if step.parent is None or shared.length >= step.keep:
                shared = shared_prefix(step.keep, step.own_ids, step.own_media, prompt, media)
            all_shared.append(shared)
            if shared.tokens > found.tokens:
                best, found = step, shared
        # Shared tokens that a step has from its parent make the parent the place.
        while best is not None and best.parent is not None and found.length <= best.keep:
            best = best.parent
        parent, shared = best if found.tokens else None, found
    else:
        shared = shared_prefix(0, parent.token_ids, parent.media, prompt, media)
    span = shared.conflict
    if span is not None and parent is not None:
        raise TrajectoryError(
            f"the sidecar and steps[{parent.index}] show different media at the same tokens",
            where=f"{where}.multi_modal_data",
            expected=f"{span.modality} {span.item.identity[:12]}" if shared.known else "no range there",
            got=f"{'no range' if shared.known else span.modality} at [{span.start}, {span.stop})",
            remedy="Append every step with the sidecar of its whole prompt, and shift the ranges of new "
            "media by the length of prompts and completions before them",
        )
    return Place(parent, shared.length, prompt[shared.length :], media_from(media, shared.length))
