"""Reads the reasoning of a completion, which may begin in the prompt.

The delimiters are those of the template's profile.
"""

from typing import NamedTuple

from mmrender.parsing.text import TokenText
from mmrender.probing.profile import ReasoningFormat


class Opening(NamedTuple):
    """Whether a prompt ends inside reasoning, and the text still missing before the reasoning begins."""

    inside: bool = False
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

    text: str | None = None
    closed: bool = True
    before: int = 0
    rest: int = 0
    seen: bool = False


def read_opening(format_: ReasoningFormat | None, prompt: TokenText) -> Opening:
    """Read where a prompt leaves the model, from its text since the assistant's turn began."""
    begin = -1 if format_ is None else prompt.find_last(format_.begin)
    if format_ is None or begin < 0 or prompt.find_last(format_.end) > begin:
        return Opening()
    written, expected = prompt.text[begin + len(format_.begin) :], format_.after_begin
    return Opening(inside=True, missing=expected[len(written) :] if expected.startswith(written) else "")


def read_reasoning(
    format_: ReasoningFormat | None, source: TokenText, opening: Opening, first_call: int
) -> Reasoning:
    """Find the reasoning of a completion.

    The block begins in the prompt or with its first delimiter. Where only its end is there, all before that
    is reasoning, as templates read such text themselves. What a tool call holds begins and ends no block.
    """
    if format_ is None:
        return Reasoning()
    text, length = source.text, len(source.text)

    def after(expected: str, position: int) -> int:
        return position + len(expected) if text.startswith(expected, position) else position

    begin = source.find(format_.begin, 0, first_call)
    end = -1 if opening.inside else source.find(format_.end, 0, first_call)
    before, start = 0, after(opening.missing, 0)
    # Where the prompt has opened the block, only a delimiter that repeats what it has written begins it.
    if begin >= 0 and (not text[:begin].strip() if opening.inside else end < 0 or begin < end):
        before = 0 if opening.inside else begin
        start = after(format_.after_begin, begin + len(format_.begin))
        end = source.find(format_.end, start, length)
    elif opening.inside:
        end = source.find(format_.end, start, length)
    elif end < 0:
        return Reasoning()
    if end < 0:
        return Reasoning(text[start:], closed=False, before=before, rest=length, seen=True)
    thought = text[start:end].removesuffix(format_.before_end)
    return Reasoning(thought or None, before=before, rest=end + len(format_.end), seen=True)
