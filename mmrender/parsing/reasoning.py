"""How a model writes its reasoning: the delimiters, and whether the prompt has written the first one.

The delimiters are those that the model's own template prints round `reasoning_content`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from mmrender.model.tokenizer import Tokenizer
from mmrender.parsing.token_text import TokenSpeller, TokenText

Carrier: TypeAlias = Literal["reasoning_content", "thinking_part"]

_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]|\u25c1[^\u25c1\u25b7\s]+\u25b7"
_TAG_BEFORE = re.compile(rf"(?:{_TAG})\w*\Z")
_TAG_AFTER = re.compile(_TAG)
_WORD = re.compile(r"\w+\Z")


@dataclass(frozen=True)
class ReasoningFormat:
    """Delimiters of a reasoning block.

    Attributes:
        begin: Opens it, such as `<think>`.
        end: Closes it.
        after_begin: What the template writes between `begin` and the reasoning.
        before_end: What it writes between the reasoning and `end`.
        after_end: What stands between `end` and the content, where the template prints no reasoning.
        carrier: Which field of a message the template prints reasoning from.
        prompt: What the template writes to open the assistant's turn; says whether a completion begins inside
            reasoning where the prompt's tokens are not given.
    """

    begin: str
    end: str
    after_begin: str = ""
    before_end: str = ""
    after_end: str = ""
    carrier: Carrier = "reasoning_content"
    prompt: str = ""


class Opening(NamedTuple):
    """Where a prompt leaves the model: inside reasoning or not, and what it has yet to write before that."""

    inside: bool
    missing: str = ""


class Reasoning(NamedTuple):
    """Reasoning of a completion.

    Attributes:
        text: The reasoning; None where there is none, or an empty block that was closed.
        closed: Whether the completion does not end inside reasoning.
        before: Characters `[0, before)` come before the block, and are content.
        rest: Where the rest begins: after the block.
        seen: Whether there was a block in the completion, were it only its end.
    """

    text: str | None
    closed: bool
    before: int
    rest: int
    seen: bool


def find_delimiters(
    tokenizer: Tokenizer, before: str, after: str, *, carrier: Carrier, prompt: str
) -> ReasoningFormat | None:
    """Delimiters of reasoning that a template printed.

    Args:
        tokenizer: Added tokens are delimiters before anything else is.
        before: What the template wrote before the reasoning, turn header included.
        after: What it wrote between the reasoning and the content.
        carrier: Where the reasoning stood in the message.
        prompt: What the template writes to open the assistant's turn.

    Returns:
        None where nothing sets the reasoning apart.
    """
    begin = last_delimiter(tokenizer, before.rstrip())
    end = _first_delimiter(tokenizer, after.lstrip())
    if begin is None or end is None:
        return None
    return ReasoningFormat(
        begin,
        end,
        after_begin=before[len(before.rstrip()) :],
        before_end=after[: len(after) - len(after.lstrip())],
        carrier=carrier,
        prompt=prompt,
    )


def last_delimiter(tokenizer: Tokenizer, text: str) -> str | None:
    """The delimiter that ends a text: an added token or a tag, also with a word after it."""
    tokens = list(tokenizer.find(text, lambda _: True))
    if tokens and (tokens[-1].stop == len(text) or _WORD.fullmatch(text, tokens[-1].stop) is not None):
        return text[tokens[-1].start :]
    tag = _TAG_BEFORE.search(text)
    return tag.group() if tag is not None else None


def _first_delimiter(tokenizer: Tokenizer, text: str) -> str | None:
    token = next(tokenizer.find(text, lambda _: True), None)
    if token is not None and token.start == 0:
        return token.token
    tag = _TAG_AFTER.match(text)
    return tag.group() if tag is not None else None


def opening_by_text(format_: ReasoningFormat, prompt: str) -> Opening:
    """Where a prompt leaves the model, from its text since the assistant's turn began."""
    begin = prompt.rfind(format_.begin)
    return _opening(format_, prompt, begin, prompt.rfind(format_.end))


def opening_by_tokens(
    format_: ReasoningFormat, speller: TokenSpeller, tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> Opening:
    """Where a prompt leaves the model, from its tokens.

    Only the assistant's turn is read: what follows the last token that begins one, so that nothing earlier in
    the conversation counts.
    """
    source = TokenText(_turn_ids(format_, tokenizer, prompt_ids), speller)
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


def _turn_ids(format_: ReasoningFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Sequence[int]:
    """Tokens from the last one that begins an assistant's turn on."""
    header = format_.prompt.partition(format_.begin)[0]
    first = next(tokenizer.find(header, lambda _: True), None)
    if first is None:
        return prompt_ids[-64:]
    token_id = tokenizer.added_ids[first.token]
    for index in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[index] == token_id:
            return prompt_ids[index:]
    return prompt_ids[-64:]


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
