"""Bodies on the socket: large ones written in slices, replies read into one buffer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from mmrender.client.encoding import Body
from mmrender.errors import EngineReplyError

_SLICE: Final = 256 << 10


def payload_of(body: Body | None) -> "bytes | BodyPayload | None":
    """What aiohttp is given: small bodies go out with the headers in one piece."""
    if body is None:
        return None
    return body.joined() if len(body) <= _SLICE else BodyPayload(body)


class BodyPayload(aiohttp.Payload):
    """A body that is written as slices of its pieces, not copied; between two, the socket may drain."""

    _value: Body
    _autoclose = True

    def __init__(self, body: Body) -> None:
        super().__init__(body, content_type="application/json")
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text, for aiohttp's own diagnostics."""
        return self._value.joined().decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all of it."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write all of it, or its first `content_length` bytes."""
        left = len(self._value) if content_length is None else content_length
        for piece in self._value.pieces:
            view = memoryview(piece)[:left]
            left -= len(view)
            for start in range(0, len(view), _SLICE):
                await writer.write(view[start : start + _SLICE])
                # A socket with a large buffer takes slice after slice at once; let others have their turn.
                await asyncio.sleep(0)


async def read_body(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes | memoryview:
    """Read the whole body: as it came where it came in one piece, else into one buffer of its size.

    Raises:
        EngineReplyError: It is longer than `limit` bytes; the rest is not read.
    """
    length = None if "Content-Encoding" in response.headers else response.content_length
    if length is None:
        return await _read_unsized(response, limit, where)
    if length > limit:
        raise _too_long(limit, f"{length} bytes", where)
    first = await response.content.readany()
    if len(first) == length:
        return first
    buffer = bytearray(length)
    position = 0
    chunk = first
    while chunk:
        buffer[position : position + len(chunk)] = chunk
        position += len(chunk)
        chunk = await response.content.readany()
    return memoryview(buffer).toreadonly()


async def _read_unsized(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    chunks: list[bytes] = []
    total = 0
    async for chunk in response.content.iter_any():
        total += len(chunk)
        if total > limit:
            raise _too_long(limit, "more", where)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_start(response: aiohttp.ClientResponse, count: int) -> bytes:
    """Read up to `count` bytes of an error's body; the rest is not wanted."""
    chunks: list[bytes] = []
    total = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        total += len(chunk)
        if total >= count:
            break
    return b"".join(chunks)[:count]


async def read_lines(response: aiohttp.ClientResponse, limit: int, where: str) -> AsyncIterator[bytes]:
    """Yield the lines of a body as they come, without line ends; a last line may lack its own.

    Raises:
        EngineReplyError: A line is longer than `limit` bytes.
    """
    begun: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        first, *others = chunk.split(b"\n")
        begun.append(first)
        size += len(first)
        if others:
            yield b"".join(begun).removesuffix(b"\r")
            for line in others[:-1]:
                yield line.removesuffix(b"\r")
            begun, size = [others[-1]], len(others[-1])
        if size > limit:
            raise _too_long(limit, "a longer line", where)
    if size:
        yield b"".join(begun).removesuffix(b"\r")


def _too_long(limit: int, got: str, where: str) -> EngineReplyError:
    return EngineReplyError(
        "the server's reply is too long",
        where=where,
        expected=f"at most {limit} bytes",
        got=got,
        remedy="Raise max_reply_bytes of the transport",
    )
