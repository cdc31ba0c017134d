"""Sampled spans: the tokens of a rendered conversation that the model writes.

A sampled span begins where `mmrender.turns.sampled` says, and ends with its first stop token, also if the
template writes that token as the next turn's opener, or continues after it within the message.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from mmrender.tokens.encode import Encoded
from mmrender.tokens.rendered import TokenSpan
from mmrender.turns.sampled import SampledTurn
from mmrender.turns.turns import turn_ends, turn_stop


class SampledSpans(NamedTuple):
    """Spans with sampled tokens marked, and the turns that are not sampled whole.

    Attributes:
        spans: The spans, split at the sampled ranges.
        answer_only: Messages of which only the answer counts as sampled.
        misaligned: Messages whose prompt does not end at a token. None of their tokens is sampled.
    """

    spans: tuple[TokenSpan, ...]
    answer_only: tuple[int, ...]
    misaligned: tuple[int, ...]


def mark_sampled(encoded: Encoded, turns: Sequence[SampledTurn], stop_ids: Collection[int]) -> SampledSpans:
    """Mark the sampled tokens of turns."""
    ranges, answer_only, misaligned = [], [], []
    ends = turn_ends(encoded.spans)
    for turn in turns:
        clean = [cut for cut in turn.cuts if encoded.cuts[cut].clean]
        if not clean:
            misaligned.append(turn.message)
            continue
        if clean[0] != turn.prompt_stop:
            answer_only.append(turn.message)
        start = encoded.cuts[clean[0]].token
        stop = turn_stop(encoded.ids, start, ends.get(turn.message, start), stop_ids)
        if stop > start:
            ranges.append((start, stop, turn.message))
    return SampledSpans(tuple(_split(encoded.spans, ranges)), tuple(answer_only), tuple(misaligned))


def _split(spans: Sequence[TokenSpan], ranges: Sequence[tuple[int, int, int]]) -> list[TokenSpan]:
    """Split spans at the sampled ranges, which rise and do not overlap."""
    pieces: list[TokenSpan] = []
    rest = iter([*ranges, (spans[-1].stop, spans[-1].stop + 1, -1)] if spans else ())
    start, stop, owner = next(rest, (0, 0, -1))
    for span in spans:
        position, span_stop, message, kind, _ = span
        if stop > position and span_stop <= start:  # without sampled tokens
            pieces.append(span)
            continue
        while position < span_stop:
            while stop <= position:
                start, stop, owner = next(rest)
            is_sampled = start <= position
            end = min(stop if is_sampled else start, span_stop)
            pieces.append(TokenSpan(position, end, owner if is_sampled else message, kind, is_sampled))
            position = end
    return pieces
