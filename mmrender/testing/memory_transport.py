"""A transport without a network: scripted answers, and a record of what was asked. For tests."""

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mmrender.client.http import encode_json
from mmrender.client.transport import Reply, status_error
from mmrender.errors import EngineConnectionError, EngineTimeoutError


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer.

    Attributes:
        body: The body: bytes and text as they are, anything else as JSON.
        status: HTTP status.
        headers: HTTP headers.
        delay: Seconds before it comes, or between the lines of a stream.
        error: Raised in place of an answer.
        drop: The connection breaks: before an answer, or in a stream after its last line.
    """

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    error: BaseException | None = None
    drop: bool = False


_numbers = itertools.count(1)

DROPPED: Final = Answer(drop=True)
"""The connection breaks before an answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a server would see it.

    Attributes:
        method: HTTP method.
        path: Path below the root, without query.
        query: What follows the question mark.
        body: The JSON text, empty where there was none.
        headers: Headers of this call.
        idempotent: Whether the caller allowed to repeat it.
    """

    method: str
    path: str
    query: str
    body: bytes
    headers: Mapping[str, str]
    idempotent: bool

    @property
    def json(self) -> Any:
        """The body as decoded from its JSON text; None where there was none."""
        return msgspec.json.decode(self.body) if self.body else None


class MemoryTransport:
    """Answers from a script.

    Args:
        routes: By `"METHOD /path"` what is answered: a body (JSON value, text or bytes), an `Answer`, an
            exception to raise, a function of `Asked` that gives any of these or a coroutine of one, or a list
            of them to be used up call by call. A JSON list is written as `Answer([...])`. A route that is
            missing answers 404, and one that is used up is an `AssertionError`.
        base_url: What the server is called.
        delay: Seconds before every answer.

    Attributes:
        asked: Every request, in order.
        cancelled: Requests whose caller gave up while they were under way.
    """

    def __init__(
        self, routes: Mapping[str, Any] | None = None, *, base_url: str = "http://memory", delay: float = 0.0
    ) -> None:
        self._routes = {
            key: list(script) if isinstance(script, list) else script
            for key, script in (routes or {}).items()
        }
        self._base_url = base_url.rstrip("/")
        self._delay = delay
        self._number = next(_numbers)
        self.asked: list[Asked] = []
        self.cancelled: list[Asked] = []
        self.closed = 0

    @property
    def base_url(self) -> str:
        """What the server is called."""
        return self._base_url

    @property
    def server_key(self) -> str:
        """What is learnt of a scripted server holds for it alone."""
        return f"{self._base_url}#{self._number}"

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
    ) -> Reply:
        """Record the request and give the scripted answer; never repeats a call."""
        asked = self._record(method, path, json, headers, idempotent)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._answer(asked)
                await asyncio.sleep(self._delay + answer.delay)
        except asyncio.CancelledError:
            self.cancelled.append(asked)
            raise
        except TimeoutError as error:
            problem = f"the server did not answer within {timeout:g} s"
            raise EngineTimeoutError(problem, where=self._where(asked)) from error
        if answer.drop and answer.error is None:
            raise EngineConnectionError("the connection broke", where=self._where(asked))
        return Reply(answer.status, answer.headers, self._body(answer, asked))

    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Record the request and yield the lines of the scripted answer."""
        asked = self._record(method, path, json, headers, idempotent=False)
        try:
            answer = await self._answer(asked)
            for line in self._body(answer, asked).splitlines():
                await asyncio.sleep(self._delay + answer.delay)
                yield line
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(asked)
            raise
        if answer.drop:
            raise EngineConnectionError("the connection broke", where=self._where(asked))

    async def aclose(self) -> None:
        """Count the call; nothing is open."""
        self.closed += 1

    def _record(
        self,
        method: str,
        path: str,
        json: Any,
        headers: Mapping[str, str] | None,
        idempotent: bool | None,
    ) -> Asked:
        path, _, query = path.partition("?")
        body = b"" if json is None else b"".join(encode_json(json))
        repeatable = method == "GET" if idempotent is None else idempotent
        asked = Asked(method, path, query, body, dict(headers or {}), repeatable)
        self.asked.append(asked)
        return asked

    async def _answer(self, asked: Asked) -> Answer:
        key = f"{asked.method} {asked.path}"
        if key not in self._routes:
            return Answer({"detail": "Not Found"}, status=404)
        script = self._routes[key]
        if isinstance(script, list):
            if not script:
                raise AssertionError(f"no answer is left for {key}")
            script = script.pop(0)
        if callable(script):
            script = script(asked)
        if inspect.isawaitable(script):
            script = await script
        if isinstance(script, BaseException):
            return Answer(error=script)
        return script if isinstance(script, Answer) else Answer(script)

    def _body(self, answer: Answer, asked: Asked) -> bytes:
        """The bytes of an answer; one that is an error is raised."""
        if answer.error is not None:
            raise answer.error
        body = answer.body
        if isinstance(body, str):
            body = body.encode()
        elif not isinstance(body, bytes | bytearray | memoryview):
            body = msgspec.json.encode(body)
        if not 200 <= answer.status < 300:
            url = self._base_url + asked.path
            raise status_error(asked.method, url, answer.status, bytes(body), answer.headers)
        return bytes(body)

    def _where(self, asked: Asked) -> str:
        return f"{asked.method} {self._base_url}{asked.path}"
