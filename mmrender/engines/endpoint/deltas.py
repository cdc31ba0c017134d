"""A completion shown while it is sampled: reasoning and content as they are certain. Pure.

What is shown can never be taken back, so text is held back while it may still turn out to be something else:
part of a character, or the beginning of a tool call.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from mmrender.engines.endpoint.replies import message_of
from mmrender.errors import EngineReplyError
from mmrender.parsing import ParsedResponse

MARGIN: Final = 24
"""Characters held back where tools were offered; openers of calls are shorter."""


class DeltaWriter:
    """Turns growing completions into deltas.

    Args:
        parse: Reads a completion, whole or not.
        has_tools: Whether text may turn out to be a call.
    """

    def __init__(self, parse: Callable[[Sequence[int]], ParsedResponse], *, has_tools: bool) -> None:
        self._parse = parse
        self._margin = MARGIN if has_tools else 0
        self._ids: list[int] = []
        self._read = 0
        self._shown = {"reasoning_content": "", "content": ""}

    def add(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """Take tokens; return what can be shown by now."""
        self._ids += token_ids
        # Reading is linear in the whole, so long completions are read at every 64th part.
        if len(self._ids) - self._read < max(1, len(self._ids) // 64):
            return []
        self._read = len(self._ids)
        parsed = self._parse(self._ids)
        deltas = self._grown("reasoning_content", parsed.reasoning_content or "", self._margin)
        if not parsed.tool_calls and parsed.reasoning_closed:
            deltas += self._grown("content", parsed.content, self._margin)
        return deltas

    def _grown(self, name: str, text: str, margin: int) -> list[dict[str, str]]:
        certain = text.rstrip("\ufffd")
        # White space at the end may belong to scaffold that follows.
        certain = certain[: len(certain) - margin].rstrip() if margin else certain.rstrip()
        shown = self._shown[name]
        if len(certain) <= len(shown) or not certain.startswith(shown):
            return []
        self._shown[name] = certain
        return [{name: certain[len(shown) :]}]

    def end(self, parsed: ParsedResponse) -> list[dict[str, Any]]:
        """The rest, once the completion has ended.

        Raises:
            EngineReplyError: The whole reads differently from what was shown.
        """
        message = message_of(parsed)
        deltas: list[dict[str, Any]] = []
        for name, shown in self._shown.items():
            whole = message.get(name) or ""
            if not whole.startswith(shown):
                raise EngineReplyError(
                    "the completion as a whole reads differently from its beginning",
                    where=name,
                    expected=repr(shown)[-80:],
                    got=repr(whole)[-80:],
                )
            if len(whole) > len(shown):
                deltas.append({name: whole[len(shown) :]})
        calls = message.get("tool_calls")
        if calls:
            deltas.append({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        return deltas
