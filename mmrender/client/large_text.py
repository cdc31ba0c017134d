"""Large base64 texts taken out of a JSON reply without parsing them as JSON text.

A parser copies a text of megabytes at least once and looks at each of its bytes. Here such texts are found in
the raw bytes and replaced by short marks, and only what is left is parsed.
"""

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from mmrender.errors import EngineReplyError

LARGE_KEYS: Final = ("routed_experts",)
SMALLEST: Final = 4096
"""Shorter texts are left to the parser."""

_QUOTE: Final = ord('"')
_COLON: Final = re.compile(rb'\s*:\s*(?=["{])')
_NUMBERS: Final = frozenset({int, float})
_MEMBER: Final = re.compile(rb'[\s,]*"([^"\\]*)"\s*:\s*')
_PLAIN_VALUE: Final = re.compile(rb'[-+.\w]+|\[[^\[\]{}"]*\]')


class _Cut(NamedTuple):
    """A text without its quotes: bytes `[start, stop)` of the reply."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CutReply:
    """A JSON reply without its large texts.

    Attributes:
        body: The JSON text with a mark in place of each; the reply itself where there is none.
        texts: The large texts by mark, as views of the reply. Nobody who wrote it can know the marks.
    """

    body: bytes | memoryview
    texts: Mapping[str, memoryview]

    def text(self, value: Any) -> Any:
        """The large text that a value of the decoded body stands for, or else the value."""
        return self.texts.get(value, value) if isinstance(value, str) else value


def cut_large_texts(
    reply: bytes | bytearray | memoryview, keys: Collection[str] = LARGE_KEYS, *, smallest: int = SMALLEST
) -> CutReply:
    """Take the large texts out of a JSON reply.

    A text is taken out if it is the value of one of `keys`, or of `data` in an object that is. Text that only
    looks like such a member makes no difference, since quotes within a text are escaped.

    Args:
        reply: As it came; views of it are returned, so it must not be changed.
        keys: Names of members that may be large.
        smallest: Length from which a text counts as large.
    """
    view = memoryview(reply).cast("B")
    cuts = [cut for cut in _find(_searchable(view), keys) if cut.stop - cut.start >= smallest]
    if not cuts:
        return CutReply(view, {})
    mark = secrets.token_hex(16)
    pieces: list[bytes | memoryview] = []
    texts: dict[str, memoryview] = {}
    position = 0
    for cut in cuts:
        name = f"{mark}{len(texts)}"
        texts[name] = view[cut.start : cut.stop]
        pieces += [view[position : cut.start], name.encode()]
        position = cut.stop
    return CutReply(b"".join([*pieces, view[position:]]), texts)


def decode_reply(
    reply: bytes | bytearray | memoryview,
    keys: Collection[str] = LARGE_KEYS,
    *,
    smallest: int = SMALLEST,
    where: str = "reply",
) -> Any:
    """Decode a JSON reply, with large texts as views of it.

    The result equals `decode_reply_whole`'s, but for the type of these texts.

    Raises:
        EngineReplyError: It is not JSON.
    """
    cut = cut_large_texts(reply, keys, smallest=smallest)
    decoded = decode_reply_whole(cut.body, where=where)
    return _restored(decoded, cut) if cut.texts else decoded


def decode_reply_whole(reply: bytes | bytearray | memoryview, *, where: str = "reply") -> Any:
    """Decode a JSON reply with everything in it.

    Raises:
        EngineReplyError: It is not JSON.
    """
    try:
        return msgspec.json.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineReplyError("the server's reply is not JSON", where=where, got=str(error)) from error


def _restored(value: Any, cut: CutReply) -> Any:
    if isinstance(value, dict):
        return {name: _restored(member, cut) for name, member in value.items()}
    if isinstance(value, list) and not _NUMBERS.issuperset(map(type, value)):
        return [_restored(member, cut) for member in value]
    return cut.text(value)


def _find(raw: bytes | bytearray, keys: Collection[str]) -> list[_Cut]:
    """Texts that are members of one of the names, or `data` of an object that is, in order."""
    found = {cut for key in keys for cut in _find_key(raw, b'"' + key.encode() + b'"')}
    return sorted(found)


def _find_key(raw: bytes | bytearray, quoted: bytes) -> Iterator[_Cut]:
    position = raw.find(quoted)
    while position >= 0:
        # Behind a backslash the quote is part of a text. Any other opens a text, as letters follow it, and a
        # text before a colon is a name.
        value = None if raw[position - 1 : position] == b"\\" else _COLON.match(raw, position + len(quoted))
        position += len(quoted)
        if value is not None:
            start = value.end()
            cut = _plain_text(raw, start) if raw[start] == _QUOTE else _data_of(raw, start + 1)
            if cut is not None:
                yield cut
                position = cut.stop
        position = raw.find(quoted, position)


def _data_of(raw: bytes | bytearray, position: int) -> _Cut | None:
    """The text of the member `data` of the object whose members begin here; None where it is not plain."""
    while found := _MEMBER.match(raw, position):
        position = found.end()
        if raw[position : position + 1] == b'"':
            cut = _plain_text(raw, position)
            if cut is None or found[1] == b"data":
                return cut
            position = cut.stop + 1
            continue
        value = _PLAIN_VALUE.match(raw, position)
        if value is None:
            return None
        position = value.end()
    return None


def _plain_text(raw: bytes | bytearray, quote: int) -> _Cut | None:
    """The text whose opening quote is given; None where something in it is escaped, or it does not end."""
    stop = raw.find(b'"', quote + 1)
    if stop < 0 or raw.find(b"\\", quote + 1, stop) >= 0:
        return None
    return _Cut(quote + 1, stop)


def _searchable(view: memoryview) -> bytes | bytearray:
    """The bytes of a view in a form that has `find`: what it is a view of, where that is all of it."""
    whole = view.obj
    if isinstance(whole, bytes | bytearray) and len(whole) == view.nbytes and view.c_contiguous:
        return whole
    return bytes(view)
