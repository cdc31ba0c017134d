"""Reads the reasoning of a completion, which may begin in the prompt.

The delimiters are those of the template's profile.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing.text import TokenSpeller, TokenText
from mmrender.probing.profile import ReasoningFormat

_PROMPT_TOKENS = 64
"""More than any generation prompt has."""


class Opening(NamedTuple):
    """Whether a prompt ends inside reasoning, and the text still missing before the reasoning begins."""

    inside: bool
    missing: str = ""


class Reasoning(NamedTuple):
    """Reasoning of a completion.

    Attributes:
        text: The reasoning; None without any, or for an empty block that was closed.
        closed: Whether the completion does not end inside reasoning.
        before: Characters `[0, before)` come before the block, and are content.
        rest: Where the rest begins: after the block.
        seen: Whether the completion holds a block, or the end of one.
    """

    text: str | None
    closed: bool
    before: int
    rest: int
    seen: bool


def opening_by_text(format_: ReasoningFormat, prompt: str) -> Opening:
    """Where a prompt leaves the model, from its text since the assistant's turn began."""
    begin = prompt.rfind(format_.begin)
    return _opening(format_, prompt, begin, prompt.rfind(format_.end))


def opening_by_tokens(
    format_: ReasoningFormat,
    generation_prompt: str,
    speller: TokenSpeller,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
) -> Opening:
    """Where a prompt leaves the model, from its tokens.

    Only the assistant's turn is read, from the last token that begins one, so that nothing earlier in the
    conversation counts.
    """
    header = generation_prompt.partition(format_.begin)[0]
    first = next(tokenizer.find(header, lambda _: True), None)
    begin_id = tokenizer.added_ids[first.token] if first is not None else None
    indices = range(len(prompt_ids) - 1, -1, -1)
    start = next(
        (index for index in indices if prompt_ids[index] == begin_id), len(prompt_ids) - _PROMPT_TOKENS
    )
    source = TokenText(prompt_ids[max(start, 0) :], speller)
    length = len(source.text)
    return _opening(
        format_, source.text, _last(source, format_.begin, length), _last(source, format_.end, length)
    )


def _opening(format_: ReasoningFormat, prompt: str, begin: int, end: int) -> Opening:
    if begin < 0 or end > begin:
        return Opening(inside=False)
    written = prompt[begin + len(format_.begin) :]
    missing = format_.after_begin.removeprefix(written) if format_.after_begin.startswith(written) else ""
    return Opening(inside=True, missing=missing)


def _last(source: TokenText, delimiter: str, stop: int) -> int:
    found, position = -1, source.find(delimiter, 0, stop)
    while position >= 0:
        found, position = position, source.find(delimiter, position + 1, stop)
    return found


def read_reasoning(
    format_: ReasoningFormat | None, source: TokenText, opening: Opening, first_call: int
) -> Reasoning:
    """Find the reasoning of a completion.

    The block begins in the prompt or with its first delimiter. Where only its end is there, all before that
    is reasoning, as templates read such text themselves. What a tool call holds begins and ends no block.

    Args:
        format_: The delimiters; None where the model has none.
        source: The completion.
        opening: Where the prompt left the model.
        first_call: Where the first tool call begins, or the length of the text.
    """
    length = len(source.text)
    if format_ is None:
        return Reasoning(None, closed=True, before=0, rest=0, seen=False)
    begin = source.find(format_.begin, 0, first_call)
    if opening.inside:
        before, start = 0, _skipped(source, opening.missing, 0)
        if begin >= 0 and not source.text[:begin].strip():
            # The model repeats what the prompt has written.
            start = _skipped(source, format_.after_begin, begin + len(format_.begin))
        end = source.find(format_.end, start, length)
    else:
        end = source.find(format_.end, 0, first_call)
        before = start = 0
        if begin >= 0 and (end < 0 or begin < end):
            before, start = begin, _skipped(source, format_.after_begin, begin + len(format_.begin))
            end = source.find(format_.end, start, length)
        elif end < 0:
            return Reasoning(None, closed=True, before=0, rest=0, seen=False)
    if end < 0:
        return Reasoning(source.text[start:], closed=False, before=before, rest=length, seen=True)
    text = source.text[start:end].removesuffix(format_.before_end)
    return Reasoning(text or None, closed=True, before=before, rest=end + len(format_.end), seen=True)


def _skipped(source: TokenText, expected: str, position: int) -> int:
    return position + len(expected) if source.text.startswith(expected, position) else position
