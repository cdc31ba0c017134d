"""Checks before any work: keys, hosts, sizes, rates."""

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

import msgspec

from mmrender.errors import importing
from mmrender.gateway import work
from mmrender.gateway.failures import CallerLeftError, RequestError
from mmrender.shipping.address import is_loopback

with importing(None, "serve", "the gateway"):
    import h11
    from starlette.requests import ClientDisconnect, Request
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_MAX_CHUNKS: Final = 4096
"""Chunks of a body that may be small. Further ones hold `_MIN_CHUNK_BYTES` on average."""
_MIN_CHUNK_BYTES: Final = 256
_MAX_STOPS: Final = 64
_MAX_STOP_CHARACTERS: Final = 8192


def key_of(request: Request) -> str:
    """Return the key of a request, as OpenAI's or Anthropic's clients send it. Empty without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    return key or request.headers.get("x-api-key", "").strip()


def is_one_of(key: str, keys: Sequence[str]) -> bool:
    """Whether a key is among the accepted ones. Takes equally long for each."""
    matches = [hmac.compare_digest(key.encode("utf-8", "replace"), each.encode()) for each in keys]
    return any(matches)


def check_page(request: Request) -> None:
    """Keep web pages of a browser on this machine out, for a gateway without a key.

    A page may send simple requests anywhere, and a rebound name makes it of the same origin. So the Host must
    be this machine's, a body must be declared as JSON, and a page's Origin must be local.

    Raises:
        RequestError: The request may come from a web page.
    """
    host = request.headers.get("host", "")
    if not _is_local(host):
        raise RequestError(403, f"the Host {host[:80]!r} is not this machine", code="wrong_host")
    origin = request.headers.get("origin")
    if origin is not None and not _is_local(origin.partition("://")[2]):
        raise RequestError(403, "web pages may not call the gateway", code="wrong_origin")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise RequestError(415, "the content type must be application/json", code="wrong_content_type")


def _is_local(host: str) -> bool:
    return is_loopback(host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host)


class Body(NamedTuple):
    """The JSON object of a request.

    Attributes:
        value: The object.
        size: Size of the work on it, see `mmrender.gateway.work`.
    """

    value: dict[str, Any]
    size: int


async def read_body(request: Request, limit: int, seconds: float) -> Body:
    """Read the JSON object of a request.

    Raises:
        RequestError: It is longer than `limit` bytes, late by `seconds`, or not a JSON object.
        CallerLeftError: The caller left before it was read.
    """
    too_long = RequestError(
        413,
        f"the request is longer than {limit} bytes. Agents send every picture again with each call: allow "
        "longer bodies by max_body_bytes, or send smaller pictures",
        code="request_too_large",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_long
        size = work.size_of(body)
        return Body(await work.do(_decoded, body, size=size), size)
    except ClientDisconnect as error:
        raise CallerLeftError from error
    except TimeoutError as error:
        message = f"the request did not come within {seconds:g} s"
        raise RequestError(408, message, code="request_timeout") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}", code="invalid_json") from error


def _decoded(text: bytearray) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any])


def check_charge(body: Mapping[str, Any], max_messages: int) -> None:
    """Bound the work of reading a body, before any of it is done.

    Raises:
        RequestError: It has too many messages, content parts or stop strings.
    """
    parts = 0
    for name in ("messages", "input", "system"):
        entries = body.get(name)
        for entry in entries if isinstance(entries, list) else ():
            content = entry.get("content") if isinstance(entry, Mapping) else None
            parts += 1 + (len(content) if isinstance(content, list) else 0)
        if parts > max_messages:
            raise RequestError(
                400, f"more than {max_messages} messages and parts", code="too_many_messages", param=name
            )
    for name in ("stop", "stop_sequences"):
        stops = body.get(name)
        stops = stops if isinstance(stops, list) else [stops]
        length = sum(len(stop) for stop in stops if isinstance(stop, str))
        if len(stops) > _MAX_STOPS or length > _MAX_STOP_CHARACTERS:
            message = f"more than {_MAX_STOPS} stop strings, or {_MAX_STOP_CHARACTERS} characters of them"
            raise RequestError(400, message, code="too_many_stops", param=name)


class RateLimit:
    """Refuses answers of a key that waits for too many already.

    Args:
        limit: Answers of one key at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()

    @contextmanager
    def charged(self, key: str, count: int) -> Iterator[None]:
        """Count answers of a key while they are sampled.

        Raises:
            RequestError: The key waits for too many.
        """
        if self._running[key] + count > self._limit:
            message = f"a key may wait for {self._limit} answers at a time"
            raise RequestError(429, message, code="too_many_requests")
        self._running[key] += count
        try:
            yield
        finally:
            self._running[key] -= count
            if not self._running[key]:
                del self._running[key]


class _ChargedConnection(h11.Connection):
    """Refuses bodies in many tiny chunks, since each costs as much as a large one."""

    _chunks = 0
    _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > _MAX_CHUNKS + self._bytes // _MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many chunks")
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        return event


class TimedProtocol(H11Protocol):
    """h11 with a timeout for request heads and a bound on chunks, which uvicorn lacks."""

    def __init__(self, *arguments: Any, head_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _ChargedConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or 1 << 16)
        self._head_seconds = head_seconds
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._late = self.loop.call_later(self._head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Read on. Bound the time of a head that has begun."""
        before: RequestResponseCycle | None = self.cycle  # None before the first head
        super().data_received(data)
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is not before:
            self._end_wait()
        elif self._late is None and (cycle is None or cycle.response_complete):
            self._late = self.loop.call_later(self._head_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait with the connection."""
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
