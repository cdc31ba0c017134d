"""Digests of requests: when two messages, and two requests, are equal.

An agent sends its whole conversation with every call, and few agents repeat it byte for byte. This module
alone decides when two messages are equal:

- Messages of users, tools and systems: role, name, the id of the call that a tool answers, and all content,
  text exactly. A text equals its one text part. A picture is its source: a `data:` URL by its characters, any
  other URL by its address. Empty members equal absent ones.
- Answers: the text with runs of blanks folded, and the calls by name and arguments as JSON: key order does
  not count, and 1000.0 equals 1000. Reasoning, signatures and ids never count, since agents drop them.
- Tools: their order counts, the order of keys does not.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from mmrender.errors import InputError
from mmrender.messages import MediaPart, Message, TextPart

Digest: TypeAlias = str
"""32 hexadecimal digits."""

_EXACT: Final = 2**53
"""Integers from here on are not exact in JavaScript, through which many agents send them."""
_LARGEST: Final = 1 << 1023
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


class CallDigests(NamedTuple):
    """Digests of a call. `Call.digests` makes them.

    Attributes:
        request: Digest by which a repetition of the request is known. Whether it is streamed does not count.
        tools: Digest of the tools.
        messages: Digests of the messages in canonical form.
        instructions: Digest of the instructions, empty without them.
    """

    request: bytes
    tools: Digest
    messages: tuple[Digest, ...]
    instructions: Digest = ""


def hash_of(data: bytes) -> Digest:
    """Return the digest of bytes."""
    return blake3(data).hexdigest(length=16)


def digest_of(value: Any, *, as_javascript: bool = False) -> Digest:
    """Digest of plain data, by its JSON with sorted keys, or by its JSON after a way through JavaScript."""
    try:
        value = _as_javascript(value) if as_javascript else value
        return hash_of(_ENCODE(value))
    except RecursionError:
        raise InputError("a value is nested too deeply", where="messages or tools") from None
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair, or a number beyond 64 bits
        plain = msgspec.to_builtins(value, str_keys=True)
        return hash_of(json.dumps(plain, sort_keys=True).encode("ascii"))


def _as_javascript(value: Any) -> Any:
    """Return plain data in which numbers are equal if JavaScript cannot tell them apart."""
    if isinstance(value, Mapping):
        return {key: _as_javascript(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_javascript(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and _EXACT <= abs(value) < _LARGEST:
        return float(value)
    return value


def message_digest(message: Message, position: int) -> Digest:
    """Return the digest of a message in canonical form. Errors name its position."""
    if message.role == "assistant":
        return answer_digest(message.text, [(call.name, call.arguments) for call in message.tool_calls])
    parts = _parts(message, position)
    extra = {key: value for key, value in message.extra.items() if value not in (None, "", [], {})}
    return digest_of((message.role, message.name or "", message.tool_call_id or "", parts, extra))


def _parts(message: Message, position: int) -> list[Any]:
    content = message.content
    if not isinstance(content, tuple):
        return [content] if content else []
    parts: list[Any] = []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            parts += [part.text] if part.text else []
        elif isinstance(part, MediaPart):
            where = f"messages[{position}].content[{number}]"
            for medium in (part, getattr(part, "sound", None)):
                if medium is not None:
                    names = [name for name in medium.__struct_fields__ if name not in ("source", "sound")]
                    settings = {name: getattr(medium, name) for name in names}
                    parts.append([medium.modality, _source_digest(medium.source, where), settings])
    return parts


def _source_digest(source: Any, where: str) -> Digest:
    if isinstance(source, str):
        source = source.encode("utf-8", "surrogatepass")
    if not isinstance(source, bytes):
        raise InputError(
            "the source of a medium must be text or bytes",
            where=where,
            expected="a data: or http(s) URL, or bytes",
            got=type(source).__name__,
        )
    return hash_of(source)


def answer_digest(text: str, calls: Sequence[tuple[str, Any]]) -> Digest:
    """Return the digest of an answer in canonical form. A call is its name and its arguments."""
    return digest_of(("answer", folded(text), calls), as_javascript=True)


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message, one for each part, without reasoning."""
    content = message.content
    if isinstance(content, tuple):
        return [part.text for part in content if isinstance(part, TextPart)]
    return [content or ""]


def folded(text: str) -> str:
    """Return a text without blanks at its ends, and with one space for each run of blanks."""
    return " ".join(text.split())
