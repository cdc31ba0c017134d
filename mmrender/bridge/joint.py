"""What closes a completion without a stop token: one cut off in its content, or while still reasoning."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from mmrender.bridge.histories import History, skeleton
from mmrender.bridge.tail import NotBridged, Tail, TailFinder
from mmrender.errors import TemplateError
from mmrender.messages import Message
from mmrender.probing.profile import TemplateProfile
from mmrender.template.traced import TracedStr, plain

TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"

_PROMPT_TOKENS = 64
"""More than any generation prompt has."""


class Joint:
    """Closes cut-off completions of one template.

    Args:
        text_of: Renders messages of a history, with the generation prompt where the flag says so.
        profile: What is known about the template.
        tails: Finds the template's tails.
        decode: Text of token ids.
    """

    def __init__(
        self,
        text_of: Callable[[History, Sequence[Message], bool], TracedStr],
        profile: TemplateProfile,
        tails: TailFinder,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._text_of = text_of
        self._profile = profile
        self._tails = tails
        self._decode = decode

    def closing(
        self, tail: Tail, extension: Sequence[Message], prompt: Sequence[int], completion: Sequence[int]
    ) -> tuple[str, int]:
        """What closes the completion, and where the tail goes on from there.

        Args:
            tail: The tail that follows.
            extension: The new messages.
            prompt: Ids of the previous prompt.
            completion: Ids that were sampled, the last of them no stop token.
        """
        written = self._decode(completion)
        start = tail.close.start if tail.close is not None else 0
        if self._reasoning_is_open(prompt, written):
            return self._reasoning_close(extension), start
        if tail.close is None:
            own = _own_text(tail, len(skeleton(extension).messages) - 1)
            return "", own if written.endswith(plain(tail.text)[:own]) else 0
        close = self._content_close(tail, extension)
        return "" if written.endswith(close) else close, start

    def _reasoning_is_open(self, prompt: Sequence[int], written: str) -> bool:
        if self._profile.reasoning is None:
            return False
        opener, close = self._profile.reasoning
        before = self._decode(prompt[-_PROMPT_TOKENS:])
        prefilled = [text for text in self._profile.generation_prompts if before.endswith(text)]
        whole = max(prefilled, key=len, default="") + written
        return whole.rfind(opener) > whole.rfind(close.strip())

    def _content_close(self, tail: Tail, extension: Sequence[Message]) -> str:
        """What the template writes between plain content and its stop token, such as a newline."""
        history = skeleton(extension)
        if not history.assistant.tool_calls:
            return _before_stop(tail)
        return self._close_after(_without_calls(history), extension) or ""

    def _reasoning_close(self, extension: Sequence[Message]) -> str:
        """What the template writes between reasoning without content and its stop token."""
        history = _without_calls(skeleton(extension), content="", reasoning_content="Tqwertz")
        for following in (extension, ()):
            # A template may drop reasoning once something follows it.
            close = self._close_after(history, following)
            if close is not None:
                return close
        return self._profile.reasoning[1] if self._profile.reasoning is not None else ""

    def _close_after(self, history: History, following: Sequence[Message]) -> str | None:
        messages = [*history.messages, *following]
        last = len(history.messages) - 1
        try:
            tail = self._tails.find(self._text_of(history, messages, bool(following)), last)
        except (TemplateError, NotBridged):
            return None
        return _before_stop(tail) if tail.close is not None else plain(tail.text)[: _own_text(tail, last)]


def _without_calls(history: History, **fields: Any) -> History:
    return replace(history, assistant=msgspec.structs.replace(history.assistant, tool_calls=(), **fields))


def _before_stop(tail: Tail) -> str:
    return plain(tail.text)[: tail.close.start] if tail.close is not None else ""


def _own_text(tail: Tail, last: int) -> int:
    """Characters with which the template closes the assistant's turn where it writes no stop token."""
    end = 0
    for start, stop, origin in tail.text._spans:
        if start != end or origin.message != last:
            break
        end = stop
    return end
