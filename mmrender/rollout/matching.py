"""Whether a conversation goes on from an earlier one.

Messages are compared as what they say, since what a client library echoes differs in form: tool arguments as
parsed JSON, where 1 and 1.0 are one number and true is none, empty as absent, a text as its one text part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrender.messages import ImagePart, Message, Part, TextPart, ThinkingPart, ToolCall, VideoPart


def begins_with(conversation: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """Whether `conversation` begins with all messages of `earlier`."""
    if len(conversation) < len(earlier):
        return False
    # Turns differ towards the end, where conversations part.
    pairs = zip(reversed(conversation[: len(earlier)]), reversed(earlier), strict=True)
    return all(same_message(later, former) for later, former in pairs)


def same_message(later: Message, earlier: Message) -> bool:
    """Whether two messages say the same.

    Where `later` leaves out the reasoning or the id of a call that `earlier` has, as most client libraries
    do when they echo a turn, it still says the same; another reasoning or id does not.
    """
    if later is earlier:
        return True
    return (
        later.role == earlier.role
        and (later.name or None) == (earlier.name or None)
        and (later.tool_call_id or None) == (earlier.tool_call_id or None)
        and _same_reasoning(later, earlier)
        and _same_calls(later.tool_calls, earlier.tool_calls)
        and _same_parts(_parts(later), _parts(earlier))
        and _same_json(_set(later.extra), _set(earlier.extra))
    )


def _same_reasoning(later: Message, earlier: Message) -> bool:
    said = _reasoning(later)
    return not said or said == _reasoning(earlier)


def _reasoning(message: Message) -> str:
    parts = message.content if isinstance(message.content, tuple) else ()
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
    return (message.reasoning_content or "") + "".join(thoughts)


def _same_calls(later: Sequence[ToolCall], earlier: Sequence[ToolCall]) -> bool:
    return len(later) == len(earlier) and all(
        one.name == other.name
        and _same_json(one.arguments, other.arguments)
        and (not one.id or not other.id or one.id == other.id)
        for one, other in zip(later, earlier, strict=True)
    )


def _same_json(later: Any, earlier: Any) -> bool:
    """Whether two values are the same in JSON; to Python, true is 1 and false is 0."""
    if isinstance(later, bool) or isinstance(earlier, bool):
        return later is earlier
    if isinstance(later, dict) and isinstance(earlier, dict):
        return later.keys() == earlier.keys() and all(_same_json(later[key], earlier[key]) for key in later)
    if isinstance(later, list | tuple) and isinstance(earlier, list | tuple):
        return len(later) == len(earlier) and all(map(_same_json, later, earlier))
    return bool(later == earlier)


def _parts(message: Message) -> list[Part]:
    content = message.content
    if content is None or isinstance(content, str):
        return [TextPart(content)] if content else []
    return [
        part
        for part in content
        if not isinstance(part, ThinkingPart) and not (isinstance(part, TextPart) and not part.text)
    ]


def _same_parts(later: Sequence[Part], earlier: Sequence[Part]) -> bool:
    return len(later) == len(earlier) and all(map(_same_part, later, earlier))


def _same_part(later: Part, earlier: Part) -> bool:
    if type(later) is not type(earlier):
        return False
    if isinstance(later, ImagePart | VideoPart) and isinstance(earlier, ImagePart | VideoPart):
        return getattr(later, "fps", None) == getattr(earlier, "fps", None) and _same_source(
            later.source, earlier.source
        )
    return later == earlier


def _same_source(later: Any, earlier: Any) -> bool:
    if later is earlier:
        return True
    if type(later) is not type(earlier):
        return False
    if isinstance(later, np.ndarray):
        return later.dtype == earlier.dtype and np.array_equal(later, earlier)
    if isinstance(later, list | tuple):
        return len(later) == len(earlier) and all(map(_same_source, later, earlier))
    # Paths, URLs and bytes compare as such, Pillow's images by their pixels.
    return bool(later == earlier)


def _set(extra: Any) -> dict[str, Any]:
    return {key: value for key, value in extra.items() if value not in (None, "", [], {})}
