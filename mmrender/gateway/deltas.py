"""`TextDeltas`: text of an answer, sent as soon as it is certain."""

from collections.abc import Callable, Sequence
from typing import Final

from mmrender.client.types import FinishReason
from mmrender.errors import EngineReplyError
from mmrender.gateway.call import Delta, OnDelta
from mmrender.gateway.writing import Field
from mmrender.parsing.parser import ParsedResponse

_OPENER: Final = 32
"""Characters withheld while a tool call may be opening. Openers of all grammars are shorter."""

_SHARE: Final = 16
_LONG_SHARE: Final = 64
_STEP: Final = 64
"""An answer is parsed again once it has grown by a 16th or by 64 tokens, and a long one by a 64th. Parsing is
linear, so all of it is, too."""


def without_stop(text: str, stop: str | None) -> str:
    """Return the text up to the stop string that ended it, which is the last. A token may go on behind it."""
    return text.rpartition(stop)[0] if stop and stop in text else text


class TextDeltas:
    """Turns the sampled tokens of one answer into deltas.

    A delta cannot be taken back, so text is withheld while it may still become something else: part of a
    character, a stop string, the beginning of a tool call, or blanks that belong to the template. Calls are
    never sent before the end.

    Args:
        parse: Reads the answer so far.
        on_delta: Called with each piece of text.
        index: Number of the answer within its reply.
        stops: Stop strings that the answer will not contain.
        offers_tools: Whether the model may call a tool.
    """

    def __init__(
        self,
        parse: Callable[[Sequence[int]], ParsedResponse],
        on_delta: OnDelta,
        *,
        index: int = 0,
        stops: Sequence[str] = (),
        offers_tools: bool = False,
    ) -> None:
        self._parse = parse
        self._on_delta = on_delta
        self._index = index
        self._stops = stops
        self._withheld = max([_OPENER if offers_tools else 0, *(len(stop) - 1 for stop in stops)])
        self._ids: list[int] = []
        self._parsed = 0
        self._shown: dict[Field, str] = {"reasoning": "", "content": ""}

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] = (),
        finish_reason: FinishReason | None = None,
        /,
    ) -> None:
        """Take sampled tokens, as `OnTokens` does, and send the text that is certain now."""
        self._ids += token_ids
        length = len(self._ids)
        if length - self._parsed < max(1, min(length // _SHARE, _STEP), length // _LONG_SHARE):
            return
        self._parsed = length
        parsed = self._parse(self._ids)
        if not parsed.reasoning_closed:
            self._show("reasoning", self._certain(parsed.reasoning_content or ""))
            return
        # Closed reasoning is complete, and is sent whole before the first text.
        self._show("reasoning", parsed.reasoning_content or "")
        if not parsed.tool_calls:
            self._show("content", self._certain(parsed.content))

    def finish(self, reasoning: str | None, content: str) -> None:
        """Send the rest.

        Args:
            reasoning: The reasoning of the answer.
            content: Its text.

        Raises:
            EngineReplyError: The whole answer does not begin with the text that was sent.
        """
        whole: dict[Field, str] = {"reasoning": reasoning or "", "content": content}
        for field, text in whole.items():
            self._show(field, text)
            if text != self._shown[field]:
                raise EngineReplyError(
                    "the answer parses differently as a whole than its beginning did",
                    where=field,
                    expected=repr(self._shown[field][-80:]),
                    got=repr(text[-80:]),
                )

    def _certain(self, text: str) -> str:
        """The beginning of a text that more tokens will not change."""
        text = text.rstrip("\ufffd")
        for stop in self._stops:
            text = text.split(stop)[0]
        return text[: max(0, len(text) - self._withheld)].rstrip()

    def _show(self, field: Field, text: str) -> None:
        """Send the rest of a text. Wait if it does not begin with the text that has been sent."""
        shown = self._shown[field]
        if len(text) > len(shown) and text.startswith(shown):
            self._shown[field] = text
            self._on_delta(Delta(self._index, field, text[len(shown) :]))
