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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from mmrender.errors import TemplateError
from mmrender.messages import Message, RenderRequest, TextPart, ThinkingPart
from mmrender.template.profile import ReasoningFormat, TemplateProfile
from mmrender.template.text import Span, TracedStr, plain
from mmrender.tokens.encode import Encoded
from mmrender.tokens.rendered import TokenSpan
from mmrender.tokens.turns import turn_stop

_CHECKED = 6
"""Number of prompts of one conversation that are rendered whole; with more turns, the others are read off
renderings of single rounds, which those must bear out."""


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


_Render: TypeAlias = Callable[[Sequence[Message]], TracedStr]
"""Renders the prompt after messages."""


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
    request: RenderRequest,
    profile: TemplateProfile,
    render: Callable[[RenderRequest], TracedStr],
) -> tuple[list[Turn], list[int]]:
    """Find the assistant turns that the model writes, and the messages whose turns are rewritten.

    Args:
        text: The rendered conversation.
        request: The conversation. A turn that it continues is prompt as far as it goes.
        profile: Says what the generation prompt is. Where it depends on the conversation, or where the
            template rewrites history, prompts are rendered.
        render: Renders requests.
    """
    messages = request.messages if request.continued is None else request.messages[:-1]
    body = plain(text)
    spans_of: defaultdict[int, list[Span]] = defaultdict(list)
    for span in text.spans:
        spans_of[span[2].message].append(span)
    starts = {index: spans[0][0] for index, spans in spans_of.items()}
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

    def turn_after(index: int, prompt: str | None) -> Turn:
        """The turn, as far as the text goes on from a prompt."""
        stop = answer = None
        if prompt is not None:
            start = starts.get(index, len(body))
            if body.startswith(prompt) and (not is_fixed or len(prompt) == start + len(opening)):
                stop = len(prompt)
            if block is not None and index in alone:
                answer = block.answer_start(body, start, prompt)
                if answer is not None:  # blanks that begin the content belong to it
                    contents = (low for low, _, origin in spans_of[index] if origin.kind == "content")
                    answer = min(answer, next(contents, answer))
        return Turn(index, stop, answer)

    turns: dict[int, Turn] = {}
    asked = []
    for index in answers:
        begins = is_fixed and index in starts and body.startswith(opening, starts[index])
        if is_fixed and (profile.prefix_stable if begins else is_settled):
            turns[index] = turn_after(index, body[: starts.get(index, len(body))] + opening)
        elif begins or index in alone or not is_fixed:
            asked.append(index)

    def prompt_after(messages: Sequence[Message]) -> TracedStr:
        return render(request.prompt_after(messages))

    def whole(index: int) -> Turn:
        try:
            return turn_after(index, plain(prompt_after(messages[:index])))
        except TemplateError:
            return turn_after(index, None)

    found: dict[int, Turn] = {}
    if len(asked) > _CHECKED:
        known = opening if is_fixed else None
        rounds = _prompts_by_rounds(body, messages, asked, starts=starts, opening=known, render=prompt_after)
        found = {index: turn_after(index, prompt) for index, prompt in rounds}
        if len(found) < len(asked) or any(whole(index) != found[index] for index in _checked(found, asked)):
            found = {}
    turns |= found or {index: whole(index) for index in asked}
    written = [turn for _, turn in sorted(turns.items()) if turn[1:] != (None, None)]
    return written, sorted({*answers} - {turn.message for turn in written})


def _checked(turns: Mapping[int, Turn], asked: Sequence[int]) -> set[int]:
    """Turns of a conversation, from its beginning to its end, and some that are unlike the turn before."""
    kinds = [(turns[index].prompt_stop is None, turns[index].answer_start is None) for index in asked]
    changes = [asked[place] for place, (one, two) in enumerate(pairwise(kinds), 1) if one != two]
    return {*asked[:: -(-len(asked) // _CHECKED)], asked[-1], *changes[:_CHECKED]}


def _prompts_by_rounds(
    body: str,
    messages: Sequence[Message],
    asked: Sequence[int],
    *,
    starts: Mapping[int, int],
    opening: str | None,
    render: _Render,
) -> Iterator[tuple[int, str]]:
    """Yield the prompts of turns, read off renderings of the system prompt and one round each.

    A round goes from a user message to the last answer before the next. The text before it is taken from the
    conversation. Turns are left out where the template refuses a round, or where no round holds them.

    Args:
        body: The rendered conversation.
        messages: The conversation.
        asked: Turns to find prompts of.
        starts: Where each message begins in the text.
        opening: The generation prompt: one rendering then shows all prompts of a round. None where it depends
            on the conversation.
        render: Renders the prompt after messages.
    """
    head = next((index for index, message in enumerate(messages) if message.role != "system"), 0)
    wanted, first = {*asked}, -1
    rounds: list[tuple[int, list[int]]] = []
    for index, message in enumerate(messages):
        if message.role == "user" and messages[index - 1].role != "user":
            first = index
        if index in wanted and first in starts:
            if opening is None or not rounds or rounds[-1][0] != first:
                rounds.append((first, []))
            rounds[-1][1].append(index)
    for first, (*earlier, last) in rounds:
        try:
            shown = render([*messages[:head], *messages[first:last]])
        except TemplateError:
            continue
        begins: dict[int, int] = {}
        for start, _, origin in shown.spans:
            begins.setdefault(origin.message - head + first, start)
        if begins.keys() >= {first, *earlier}:
            before, window = body[: starts[first]], plain(shown)
            for index in earlier:
                yield index, before + window[begins[first] : begins[index]] + (opening or "")
            yield last, before + window[begins[first] :]


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
