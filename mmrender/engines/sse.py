"""Server-sent events, as OpenAI's streams use them: read and written."""

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from mmrender.errors import EngineReplyError

DONE: Final = b"data: [DONE]\n\n"
"""The event that ends a stream."""


async def events(lines: AsyncIterator[bytes], *, where: str) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream, until it says that it is done.

    Raises:
        EngineReplyError: An event is no JSON object, or the stream ends before it says so.
    """
    async for line in lines:
        if not line.startswith(b"data:"):
            continue  # empty lines between events, comments, names of events
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise EngineReplyError("an event is no JSON", where=where, got=repr(text[:200])) from error
        if not isinstance(event, dict):
            raise EngineReplyError("an event is no JSON object", where=where, got=repr(text[:200]))
        yield event
    raise EngineReplyError("the stream broke off", where=where, expected="[DONE] at its end")


def event_of(value: Any) -> bytes:
    """One event that holds a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
