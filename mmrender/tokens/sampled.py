"""Tokens of a rendered conversation that the model writes: sampled = full minus prompt.

An assistant turn is sampled from where its generation prompt ends through its stop token. The prompt of turn
`i` is the rendering of the messages before it with the generation prompt, so the turn must begin with the
generation prompt, to the token. If it does not, the template writes history differently from what it asked
the model for: the turn counts as rewritten, and none of its tokens as sampled.

One kind of turn has an answer all the same: its generation prompt writes a reasoning block, open or empty,
and the turn has no reasoning, so the template leaves the block out or writes an empty one. All that the turn
says is its answer, and the answer counts as sampled, from its first token through the stop token. The tokens
of the block do not: a prompt writes them.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mmrender.errors import TemplateError
from mmrender.messages import Message, TextPart, ThinkingPart
from mmrender.probing.profile import ReasoningFormat, TemplateProfile
from mmrender.template.text import Span, TracedStr, plain
from mmrender.tokens.encode import Encoded
from mmrender.tokens.rendered import TokenSpan
from mmrender.tokens.turns import turn_stop


class Turn(NamedTuple):
    """An assistant message, and the characters at which its sampled tokens may begin.

    Attributes:
        message: Index of the message.
        prompt_stop: End of its generation prompt; None if the text does not continue its prompt.
        answer_start: Start of its answer, if it has no reasoning and its generation prompt writes a block.
    """

    message: int
    prompt_stop: int | None
    answer_start: int | None


class Sampled(NamedTuple):
    """Spans with sampled tokens marked, and the turns that are not sampled whole.

    Attributes:
        spans: The spans, split at the sampled ranges.
        answer_only: Messages of which the answer alone counts as sampled.
        misaligned: Messages whose prompt does not end at a token; none of their tokens is sampled.
    """

    spans: tuple[TokenSpan, ...]
    answer_only: tuple[int, ...]
    misaligned: tuple[int, ...]


def assistant_turns(
    text: TracedStr,
    messages: Sequence[Message],
    profile: TemplateProfile,
    render: Callable[..., TracedStr],
) -> tuple[list[Turn], list[int]]:
    """Find the assistant turns that the model writes, and the messages whose turns are rewritten.

    Args:
        text: The rendered conversation.
        messages: The conversation.
        profile: Says what the generation prompt is. Where it depends on the conversation, or where the
            template rewrites history, each turn's prompt is rendered.
        render: Renders messages; takes `add_generation_prompt`.
    """
    body = plain(text)
    spans_of: defaultdict[int, list[Span]] = defaultdict(list)
    for span in text.spans:
        spans_of[span[2].message].append(span)
    prompts, block = profile.generation_prompts, profile.reasoning
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if block is not None and not any(block.begin in prompt for prompt in prompts):
        block = None
    alone = {
        index
        for index in answers
        if block is not None and _is_answer_alone(messages[index], body, spans_of[index], block)
    }
    is_fixed, is_settled = len(prompts) == 1, profile.answers_stable and len(alone) == len(answers)
    opening = profile.generation_prompt
    turns, rewritten = [], []
    for index in answers:
        start = spans_of[index][0][0] if spans_of[index] else len(body)
        begins = is_fixed and bool(spans_of[index]) and body.startswith(opening, start)
        prompt: str | None = None
        if is_fixed and (profile.prefix_stable if begins else is_settled):
            prompt = body[:start] + opening
        elif begins or index in alone or not is_fixed:
            try:
                prompt = plain(render(messages[:index], add_generation_prompt=True))
            except TemplateError:
                prompt = None
        stop = answer = None
        if prompt is not None:
            if body.startswith(prompt) and (not is_fixed or len(prompt) == start + len(opening)):
                stop = len(prompt)
            if block is not None and index in alone:
                answer = block.answer_start(body, start, prompt)
                if answer is not None:  # blanks that begin the content belong to it
                    contents = (low for low, _, origin in spans_of[index] if origin.kind == "content")
                    answer = min(answer, next(contents, answer))
        if stop is None and answer is None:
            rewritten.append(index)
        else:
            turns.append(Turn(index, stop, answer))
    return turns, rewritten


def _is_answer_alone(message: Message, body: str, spans: Sequence[Span], block: ReasoningFormat) -> bool:
    """Whether a turn has no reasoning, and the text holds all of its content, but for an empty block."""
    parts = message.content if isinstance(message.content, tuple) else (TextPart(message.content or ""),)
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
    if not spans or message.reasoning_content or any(thoughts):
        return False
    written = "".join(body[low:high] for low, high, origin in spans if origin.kind == "content")
    content = "".join(part.text for part in parts if isinstance(part, TextPart))
    return "".join(written.split()) == "".join(block.empty.sub("", content, count=1).split())


def mark_sampled(encoded: Encoded, turns: Sequence[Turn], stop_ids: Collection[int]) -> Sampled:
    """Mark the sampled tokens of turns.

    A sampled span ends with its first stop token, also where the template writes it as the next turn's opener
    or goes on within the message.
    """
    ranges, answer_only, misaligned = [], [], []
    for turn in turns:
        cuts = [cut for cut in (turn.prompt_stop, turn.answer_start) if cut is not None]
        clean = [cut for cut in cuts if encoded.cuts[cut].clean]
        if not clean:
            misaligned.append(turn.message)
            continue
        if clean[0] != turn.prompt_stop:
            answer_only.append(turn.message)
        start = encoded.cuts[clean[0]].token
        stop = turn_stop(encoded.ids, encoded.spans, turn.message, start, stop_ids)
        ranges.append((start, stop, turn.message))
    return Sampled(tuple(_overlaid(encoded.spans, ranges)), tuple(answer_only), tuple(misaligned))


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
