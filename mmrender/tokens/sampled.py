"""Tokens of a rendered conversation that the model writes: sampled = full minus prompt.

An assistant turn is sampled from where its generation prompt ends through its stop token. The prompt of turn
`i` is the rendering of the messages before it with the generation prompt, so the turn must begin with the
generation prompt, to the token. Where it does not, the template writes history differently from what it asked
the model for: the turn counts as rewritten, and none of its tokens as sampled.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mmrender.errors import TemplateError
from mmrender.messages import Message
from mmrender.probing.profile import TemplateProfile
from mmrender.template.text import TracedStr, plain
from mmrender.tokens.encode import Encoded
from mmrender.tokens.rendered import TokenSpan
from mmrender.tokens.turns import turn_stop


class Turn(NamedTuple):
    """An assistant message, and the character at which its generation prompt ends."""

    message: int
    prompt_stop: int


def assistant_turns(
    text: TracedStr,
    messages: Sequence[Message],
    profile: TemplateProfile,
    render: Callable[..., TracedStr],
) -> tuple[list[Turn], list[int]]:
    """Find the assistant turns that follow their prompt, and the messages whose turns do not.

    Args:
        text: The rendered conversation.
        messages: The conversation.
        profile: Says what the generation prompt is. Where it depends on the conversation, or where the
            template rewrites history, each turn's prompt is rendered.
        render: Renders messages; takes `add_generation_prompt`.
    """
    body = plain(text)
    starts: dict[int, int] = {}
    for start, _, origin in text.spans:
        starts.setdefault(origin.message, start)
    is_fixed = len(profile.generation_prompts) == 1
    turns, rewritten = [], []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        stop: int | None = None
        if is_fixed and index in starts and body.startswith(profile.generation_prompt, starts[index]):
            stop = starts[index] + len(profile.generation_prompt)
        if not is_fixed or (stop is not None and not profile.prefix_stable):
            try:
                prompt = plain(render(messages[:index], add_generation_prompt=True))
            except TemplateError:
                stop = None
            else:
                follows = body.startswith(prompt) and stop in (None, len(prompt))
                stop = len(prompt) if follows else None
        if stop is None:
            rewritten.append(index)
        else:
            turns.append(Turn(index, stop))
    return turns, rewritten


def mark_sampled(
    encoded: Encoded, turns: Sequence[Turn], stop_ids: Collection[int]
) -> tuple[tuple[TokenSpan, ...], list[int]]:
    """Return the spans with sampled tokens marked, and the messages whose prompt does not end at a token.

    A sampled span ends with its first stop token, also where the template writes it as the next turn's opener
    or goes on within the message.
    """
    ranges, misaligned = [], []
    for turn in turns:
        start = encoded.cuts[turn.prompt_stop]
        if start.clean:
            stop = turn_stop(encoded.ids, encoded.spans, turn.message, start.token, stop_ids)
            ranges.append((start.token, stop, turn.message))
        else:
            misaligned.append(turn.message)
    return tuple(_overlaid(encoded.spans, ranges)), misaligned


def _overlaid(spans: Sequence[TokenSpan], ranges: Sequence[tuple[int, int, int]]) -> list[TokenSpan]:
    """Split spans at the sampled ranges, which rise and do not overlap."""
    result: list[TokenSpan] = []
    first = 0
    for span in spans:
        position, end, owner, kind, _ = span
        while first < len(ranges) and ranges[first][1] <= position:
            first += 1
        index = first
        while index < len(ranges) and ranges[index][0] < end:
            start, stop, message = ranges[index]
            low, high = max(start, position), min(stop, end)
            if position < low:
                result.append(TokenSpan(position, low, owner, kind, False))
            result.append(TokenSpan(low, high, message, kind, True))
            position, index = high, index + 1
        if position == span.start:
            result.append(span)
        elif position < end:
            result.append(TokenSpan(position, end, owner, kind, False))
    return result
