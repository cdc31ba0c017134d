"""Which tokens of a rendered conversation the model writes: sampled = full minus prompt.

An assistant turn is sampled from where its generation prompt ends through its stop token. The prompt of turn
`i` is the rendering of the messages before it with the generation prompt, so the turn must begin with the
generation prompt, to the token. Where it does not, the template writes history differently from what it asked
the model for: the turn counts as rewritten, and none of its tokens as sampled.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from mmrender.errors import TemplateError
from mmrender.messages import Message
from mmrender.template.origin import Span
from mmrender.template.traced import TracedStr, plain
from mmrender.tokens.rendered import TokenSpan
from mmrender.tokens.stream import Encoded


class Turn(NamedTuple):
    """The characters of one assistant message: where it begins, where its prompt and its content end."""

    message: int
    start: int
    prompt_stop: int
    content_stop: int


def assistant_turns(
    text: TracedStr, assistants: Collection[int], prompt: str
) -> tuple[list[Turn], list[int]]:
    """Find the assistant turns that begin with the generation prompt, and the messages whose turns do not.

    Args:
        text: The rendered conversation.
        assistants: Indices of the assistant messages.
        prompt: What the template writes to open the assistant's turn.
    """
    turns: dict[int, Turn] = {}
    for start, stop, origin in _own_turns(text, assistants):
        index = origin.message
        turn = turns.get(index) or Turn(index, start, start + len(prompt), start + len(prompt))
        if origin.is_content:
            turn = turn._replace(content_stop=max(stop, turn.prompt_stop))
        turns[index] = turn
    body = plain(text)
    opened = [turn for turn in turns.values() if body.startswith(prompt, turn.start)]
    kept = {turn.message for turn in opened}
    return opened, [index for index in assistants if index not in kept]


def _own_turns(text: TracedStr, assistants: Collection[int]) -> Iterator[Span]:
    """Spans of each assistant message, up to where the text turns to another message.

    A later turn may print a value of an earlier one, such as the name of the tool that it answers for.
    """
    left: set[int] = set()
    current = -1
    for span in text._spans:
        index = span[2].message
        if index < 0:
            continue
        if index != current:
            left.add(current)
            current = index
        if index in assistants and index not in left:
            yield span


def prompted_turns(
    text: TracedStr,
    messages: Sequence[Message],
    turns: Sequence[Turn],
    render: Callable[[Sequence[Message], bool], TracedStr],
) -> tuple[list[Turn], list[int]]:
    """Keep the turns that follow what the template writes as their prompt; list the messages of others.

    For a template that rewrites history: it may, say, move the system prompt into a later turn.
    """
    body = plain(text)
    kept = [
        turn for turn in turns if _prompt_of(messages[: turn.message], render) == body[: turn.prompt_stop]
    ]
    messages_kept = {turn.message for turn in kept}
    return kept, [turn.message for turn in turns if turn.message not in messages_kept]


def mark_sampled(
    encoded: Encoded, turns: Sequence[Turn], stop_ids: Collection[int]
) -> tuple[tuple[TokenSpan, ...], list[int]]:
    """Return the spans with sampled tokens marked, and the messages whose prompt does not end at a token.

    A stop token belongs to the message that it ends, also where the template writes it as the next opener.
    """
    ranges, torn = [], []
    for turn in turns:
        start = encoded.cuts[turn.prompt_stop]
        if not start.clean:
            torn.append(turn.message)
            continue
        ranges.append((start.token, _sampled_stop(encoded, turn, stop_ids), turn.message))
    return tuple(_overlaid(encoded.spans, ranges)), torn


def _sampled_stop(encoded: Encoded, turn: Turn, stop_ids: Collection[int]) -> int:
    """Token index after the stop token, or after the last token of the message where there is none."""
    first = encoded.cuts[turn.content_stop].token
    last = _turn_end(encoded.spans, turn.message, first)
    ids = encoded.ids
    for index in range(first, min(last + 1, len(ids))):
        if ids[index] in stop_ids:
            return index + 1
    return last


def _turn_end(spans: Sequence[TokenSpan], message: int, default: int) -> int:
    """Token index where the first stretch of a message ends."""
    end = default
    begun = False
    for span in spans:
        if span.message == message:
            end, begun = span.stop, True
        elif begun and span.message >= 0:
            break
    return end


def _overlaid(spans: Sequence[TokenSpan], ranges: Sequence[tuple[int, int, int]]) -> list[TokenSpan]:
    """Split spans at the sampled ranges, which rise and do not overlap."""
    result: list[TokenSpan] = []
    first = 0
    for span in spans:
        position = span.start
        while first < len(ranges) and ranges[first][1] <= position:
            first += 1
        index = first
        while index < len(ranges) and ranges[index][0] < span.stop:
            start, stop, message = ranges[index]
            low, high = max(start, position), min(stop, span.stop)
            if position < low:
                result.append(span._replace(start=position, stop=low))
            result.append(TokenSpan(low, high, message, span.kind, True))
            position, index = high, index + 1
        if position < span.stop:
            result.append(span._replace(start=position))
    return result


def turns_by_rendering(
    text: TracedStr,
    messages: Sequence[Message],
    assistants: Collection[int],
    render: Callable[[Sequence[Message], bool], TracedStr],
) -> tuple[list[Turn], list[int]]:
    """As `assistant_turns`, for a template whose generation prompt depends on the conversation.

    Args:
        text: The rendered conversation.
        messages: The conversation.
        assistants: Indices of the assistant messages.
        render: Renders messages, with the generation prompt where the flag says so.
    """
    body = plain(text)
    turns, rewritten = [], []
    for index in assistants:
        prompt = _prompt_of(messages[:index], render)
        if prompt is None or not body.startswith(prompt):
            rewritten.append(index)
            continue
        stop = len(prompt)
        content = [high for _, high, origin in _own_turns(text, [index]) if origin.is_content]
        turns.append(Turn(index, stop, stop, max([stop, *content])))
    return turns, rewritten


def _prompt_of(
    messages: Sequence[Message], render: Callable[[Sequence[Message], bool], TracedStr]
) -> str | None:
    try:
        return plain(render(messages, True))
    except TemplateError:
        return None
