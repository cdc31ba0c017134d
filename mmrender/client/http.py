"""`HTTPTransport`: requests over pooled connections, with a deadline, bounded retries and hooks."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from mmrender.client.calls import Call
from mmrender.client.config import TransportConfig
from mmrender.client.encoding import Body, encode_body
from mmrender.client.hooks import ClientHooks, HookList
from mmrender.client.replies import MAX_ERROR_BYTES, is_success, status_error
from mmrender.client.transport import Reply
from mmrender.errors import EngineError, EngineStatusError, EngineTimeoutError, MissingDependencyError

try:
    import aiohttp
    import stamina
except ImportError as error:
    raise MissingDependencyError.of_extra("aiohttp or stamina", "client", "the HTTP client") from error

from mmrender.client.body import payload_of, read_body, read_lines, read_start
from mmrender.client.failures import engine_errors, retry_rule
from mmrender.client.sessions import LoopSessions


class HTTPTransport:
    """The way to one server over HTTP/1.1.

    It may be shared by threads, each with its event loop, and pickled where its hooks can be. Connections
    are pooled for each loop, and closed by `aclose` or when the loop ends. Redirects are not followed,
    cookies are not kept, and proxy settings of the environment are not used. Retries are carried out by
    stamina, whose own instrumentation sees them too.

    Args:
        config: The server and all settings, or only its base URL.
        hooks: What is told of each call.
        **settings: Fields of `TransportConfig`.

    Raises:
        InputError: The base URL or a setting cannot be used.
    """

    def __init__(
        self, config: TransportConfig | str, *, hooks: Sequence[ClientHooks] = (), **settings: Any
    ) -> None:
        self.config = (
            TransportConfig(config, **settings) if isinstance(config, str) else replace(config, **settings)
        )
        self._hooks = HookList(hooks)
        self._sessions = LoopSessions(self.config)

    def __reduce__(self) -> tuple[object, ...]:
        return _arrived, (self.config, self._hooks.hooks)

    def __repr__(self) -> str:
        return f"HTTPTransport({self.config.base_url!r})"

    @property
    def base_url(self) -> str:
        """Root of the server, without a trailing slash."""
        return self.config.base_url

    async def aclose(self) -> None:
        """Close the connections of the running event loop; a later call opens new ones."""
        await self._sessions.aclose()

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
        """Send a request and read the whole reply; see `Transport.request`.

        A connection that was never made is tried again. After a status of 502, 503 or 504 the call is
        repeated only if it is idempotent, since a gateway gives these also for requests that it passed on.

        Raises:
            EngineConnectionError: The server was not reached, or the connection broke.
            EngineTimeoutError: The call took longer than `timeout`.
            EngineStatusError: The status of the reply is not one of 2xx.
            EngineReplyError: The reply is longer than `max_reply_bytes`.
            InputError: The body cannot be written as JSON, or a header cannot be sent.
        """
        repeatable = method in ("GET", "HEAD") if idempotent is None else idempotent
        seconds = self.config.timeout if timeout is None else timeout
        call = Call(method, self.base_url, path, self._hooks)
        try:
            async with asyncio.timeout(seconds):
                body = None if json is None else await encode_body(json, self.config.encode_inline_bytes)
                sent = call.begin(body, headers)
                reply = await self._with_retries(call, body, sent, repeatable)
        except TimeoutError as error:
            late = EngineTimeoutError(f"the server did not answer within {seconds:g} s", where=call.where)
            call.fail(late)
            raise late from error
        except BaseException as error:
            call.fail(error)
            raise
        call.succeed(len(reply.body))
        return reply

    async def _with_retries(
        self, call: Call, body: Body | None, headers: Mapping[str, str], repeatable: bool
    ) -> Reply:
        config = self.config
        attempts = stamina.retry_context(
            on=retry_rule(idempotent=repeatable, wait_max=config.wait_max),
            attempts=config.attempts,
            timeout=None,
            wait_initial=config.wait_initial,
            wait_max=config.wait_max,
            wait_jitter=config.wait_jitter,
        )
        failure: EngineError | None = None
        async for attempt in attempts:
            with attempt:
                if attempt.num > 1:
                    call.retry(attempt.num, failure)
                try:
                    return await self._once(call, body, headers)
                except EngineError as error:
                    failure = error
                    raise
        raise RuntimeError("unreachable: the last attempt returns or raises")

    async def _once(self, call: Call, body: Body | None, headers: Mapping[str, str]) -> Reply:
        session = await self._sessions.get()
        with engine_errors(call.where):
            async with self._sent(session, call, body, headers) as response:
                call.status = response.status
                if not is_success(response.status):
                    raise await _refusal(call, response)
                content = await read_body(response, self.config.max_reply_bytes, call.where)
                return Reply(response.status, response.headers, content)

    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Send a request, once, and yield the lines of the reply as they come, without line ends.

        The connection is closed when the iterator is. `timeout` of the configuration bounds the wait for each
        piece, not the whole.

        Raises:
            EngineError: As for `request`.
        """
        call = Call(method, self.base_url, path, self._hooks)
        silence = aiohttp.ClientTimeout(
            sock_connect=self.config.connect_timeout, sock_read=self.config.timeout
        )
        total = 0
        try:
            body = None if json is None else await encode_body(json, self.config.encode_inline_bytes)
            sent = call.begin(body, headers)
            session = await self._sessions.get()
            with engine_errors(call.where):
                async with self._sent(session, call, body, sent, timeout=silence) as response:
                    call.status = response.status
                    if not is_success(response.status):
                        raise await _refusal(call, response)
                    async for line in read_lines(response, self.config.max_reply_bytes, call.where):
                        total += len(line)
                        yield line
        except BaseException as error:
            call.fail(error)
            raise
        call.succeed(total)

    @staticmethod
    def _sent(
        session: aiohttp.ClientSession,
        call: Call,
        body: Body | None,
        headers: Mapping[str, str],
        **options: Any,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return session.request(
            call.method,
            call.target,
            data=payload_of(body),
            headers=headers,
            allow_redirects=False,
            **options,
        )


async def _refusal(call: Call, response: aiohttp.ClientResponse) -> EngineStatusError:
    body = await read_start(response, MAX_ERROR_BYTES)
    return status_error(call.method, call.url, response.status, body, response.headers)


def _arrived(config: TransportConfig, hooks: tuple[ClientHooks, ...]) -> HTTPTransport:
    return HTTPTransport(config, hooks=hooks)
