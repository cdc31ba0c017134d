"""A transport without a network, for tests: scripted answers, and a record of the requests."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mmrender.client.http import encode_json, joined
from mmrender.client.transport import Reply, status_error
from mmrender.errors import EngineConnectionError, EngineReplyError, EngineTimeoutError


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer.

    Attributes:
        body: The body: bytes and text as they are, anything else as JSON.
        status: HTTP status.
        headers: HTTP headers.
        delay: Seconds before it comes, or between the lines of a stream.
        drop: The connection breaks: before an answer, or in a stream after its last line.
    """

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False


DROPPED: Final = Answer(drop=True)
"""The connection breaks before an answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a server would see it.

    Attributes:
        method: HTTP method.
        path: Path below the root, without query.
        query: The part after the question mark.
        body: The JSON text, or empty.
        headers: Headers of this call.
        idempotent: Whether the caller allowed repeating it.
    """

    method: str
    path: str
    query: str
    body: bytes
    headers: Mapping[str, str]
    idempotent: bool

    @property
    def json(self) -> Any:
        """The decoded body, or None if it is empty."""
        return msgspec.json.decode(self.body) if self.body else None


class MemoryTransport:
    """Answers from a script.

    Args:
        routes: The answer by `"METHOD /path"`: a body (JSON value, text or bytes), an `Answer`, an exception
            to raise, a function of `Asked` that returns any of these or a coroutine of one, or a list of them
            to be used up call by call. A JSON list is written as `Answer([...])`. Missing routes answer 404,
            and a used-up list raises `AssertionError`.
        base_url: URL of the server in requests and errors.

    Attributes:
        base_url: URL of the server in requests and errors.
        asked: Every request, in order.
        cancelled: Requests whose caller gave up while they were under way.
        closed: Calls of `aclose`.
    """

    def __init__(self, routes: Mapping[str, Any] | None = None, *, base_url: str = "http://memory") -> None:
        self.base_url: Final = base_url.rstrip("/")
        self.asked: list[Asked] = []
        self.cancelled: list[Asked] = []
        self.closed = 0
        # Lists are used up, and the caller's stay as they are.
        self._routes = {
            key: list(one) if isinstance(one, list) else one for key, one in (routes or {}).items()
        }

    def of_path(self, path: str) -> list[Asked]:
        """The requests for one path."""
        return [asked for asked in self.asked if asked.path == path]

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        idempotent: bool | None = None,
        max_reply_bytes: int | None = None,
    ) -> Reply:
        """Record the request and return the scripted answer. A call is never repeated."""
        asked = self._record(method, path, json, headers, idempotent)
        try:
            async with asyncio.timeout(timeout):
                answer, body = await self._answer(asked)
                await asyncio.sleep(answer.delay)
        except asyncio.CancelledError:
            self.cancelled.append(asked)
            raise
        except TimeoutError as error:
            problem = f"the server did not answer within {timeout:g} s"
            raise EngineTimeoutError(problem, where=self._where(asked)) from error
        if answer.drop:
            raise EngineConnectionError("the connection broke", where=self._where(asked))
        if max_reply_bytes is not None and len(body) > max_reply_bytes:
            expected = f"at most {max_reply_bytes} bytes"
            raise EngineReplyError(
                "the server's reply is too long", where=self._where(asked), expected=expected
            )
        return Reply(answer.status, answer.headers, body)

    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Record the request and yield the lines of the scripted answer."""
        asked = self._record(method, path, json, headers, idempotent=False)
        try:
            answer, body = await self._answer(asked)
            for line in body.splitlines():
                await asyncio.sleep(answer.delay)
                yield line
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(asked)
            raise
        if answer.drop:
            raise EngineConnectionError("the connection broke", where=self._where(asked))

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1

    def _record(
        self, method: str, path: str, json: Any, headers: Mapping[str, str] | None, idempotent: bool | None
    ) -> Asked:
        path, _, query = path.partition("?")
        body = b"" if json is None else joined(encode_json(json))
        repeatable = method == "GET" if idempotent is None else idempotent
        self.asked.append(Asked(method, path, query, body, dict(headers or {}), repeatable))
        return self.asked[-1]

    async def _answer(self, asked: Asked) -> tuple[Answer, bytes]:
        """Return the scripted answer and its body, or raise the scripted error."""
        key = f"{asked.method} {asked.path}"
        script = self._routes.get(key, Answer({"detail": "Not Found"}, status=404))
        if isinstance(script, list):
            if not script:
                raise AssertionError(f"no answer is left for {key}")
            script = script.pop(0)
        if callable(script):
            script = script(asked)
        if inspect.isawaitable(script):
            script = await script
        if isinstance(script, BaseException):
            raise script
        answer = script if isinstance(script, Answer) else Answer(script)
        body = answer.body
        if not isinstance(body, str | bytes | bytearray | memoryview):
            body = msgspec.json.encode(body)
        body = body.encode() if isinstance(body, str) else bytes(body)
        if not 200 <= answer.status < 300:
            await asyncio.sleep(answer.delay)
            raise status_error(asked.method, self.base_url + asked.path, answer.status, body, answer.headers)
        return answer, body

    def _where(self, asked: Asked) -> str:
        return f"{asked.method} {self.base_url}{asked.path}"
