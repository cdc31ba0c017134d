"""The way to a server, as backends see it."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful HTTP answer. `body` is the whole of it, not copied again."""

    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview


@runtime_checkable
class Transport(Protocol):
    """Sends one request to one server.

    Errors are of one tree: `EngineConnectionError`, `EngineTimeoutError`, and `EngineStatusError` for every
    status outside 2xx. Cancelling the awaiting task closes the request's connection.
    """

    @property
    def base_url(self) -> str:
        """Root of the server without a trailing slash, such as `http://127.0.0.1:8000`."""
        ...

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
        """Send a request and read the whole answer.

        Args:
            method: HTTP method.
            path: Path below `base_url`, query included.
            json: Body, encoded by msgspec; off the event loop when it is large. Base64 as
                `mmrender.client.encoding.PlainText` is sent without being copied.
            headers: Besides the transport's own.
            timeout: Seconds for the whole call; None takes the transport's setting.
            idempotent: Whether the call may be repeated after it may have reached the server; None says so
                for GET only. A connection that was never made is always tried again.
        """
        ...

    def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Send a request, once, and yield the lines of its answer as they come, without line ends."""
        ...

    async def aclose(self) -> None:
        """Close connections that belong to the running event loop."""
        ...
