"""Finds how a template writes reasoning, by letting it write some."""

import re
from itertools import product
from typing import get_args

import msgspec

from mmrender.messages import Message, TextPart, ThinkingPart, ToolCall
from mmrender.parsing.probes import TurnProber
from mmrender.parsing.reasoning import Carrier, ReasoningFormat, find_delimiters, last_delimiter

_CONTENT, _REASONING, _BREAK = "qwertzC", "qwertzR", "\n\n"
_CALL = (ToolCall(name="probe_none", arguments={}, id="call00000"),)
_TAG = re.compile(r"([<\[\u25c1])(\w[^<>\[\]\u25c1\u25b7]*)([>\]\u25b7])")


def with_reasoning(message: Message, text: str, carrier: Carrier) -> Message:
    """The message with reasoning in the field that the template prints it from."""
    if carrier == "reasoning_content":
        return msgspec.structs.replace(message, reasoning_content=text)
    content = (TextPart(message.content),) if isinstance(message.content, str) else message.content or ()
    return msgspec.structs.replace(message, content=(ThinkingPart(text), *content))


def find_reasoning(prober: TurnProber) -> ReasoningFormat | None:
    """How a template writes reasoning; None where it cannot be seen to write any."""
    prompt = prober.prompt()
    # Some templates print reasoning beside calls only.
    for carrier, calls in product(get_args(Carrier), ((), _CALL)):
        message = Message(role="assistant", content=_CONTENT, tool_calls=calls)
        turn = prober.turn(with_reasoning(message, _REASONING, carrier))
        text = "" if turn is None else turn.header + turn.text
        before, found, rest = text.partition(_REASONING)
        if found:
            after = rest.partition(_CONTENT)[0]
            return find_delimiters(prober.tokenizer, before, after, carrier=carrier, prompt=prompt)
    return _from_prompt(prober, prompt)


def _from_prompt(prober: TurnProber, prompt: str) -> ReasoningFormat | None:
    """The block that the prompt opens, of a template that leaves reasoning out of the turns that it prints.

    It counts where the template takes such a block out of the content.
    """
    begin = last_delimiter(prober.tokenizer, prompt.rstrip())
    tag = _TAG.fullmatch(begin) if begin is not None else None
    if begin is None or tag is None:
        return None
    end = f"{tag.group(1)}/{tag.group(2)}{tag.group(3)}"
    shown = [
        _without_block(prober, f"{begin}{_REASONING}{end}{between}{_CONTENT}") for between in ("", _BREAK)
    ]
    if shown[0] != _CONTENT:
        return None
    inside = prompt[len(prompt.rstrip()) :]
    after_end = _BREAK if shown[1] == _CONTENT else ""
    return ReasoningFormat(
        begin, end, after_begin=inside, before_end=inside, after_end=after_end, prompt=prompt
    )


def _without_block(prober: TurnProber, content: str) -> str | None:
    """What a template prints of a content that holds a reasoning block; None where it keeps the block."""
    turn = prober.turn(Message(role="assistant", content=content))
    return turn.text if turn is not None and _REASONING not in turn.text else None
