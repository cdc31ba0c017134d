"""Hooks: callbacks on start, retry and end of each call.

Hooks run on the event loop and must be quick. A hook that fails is logged and never fails the request. Spans
and metrics of OpenTelemetry come from its own instrumentation of aiohttp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Moment: TypeAlias = Literal["on_request", "on_retry", "on_response", "on_error"]


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One event of a call.

    Attributes:
        call_id: Equal for all events of a call, and unique in this process.
        method: HTTP method.
        url: Server and path, without query.
        attempt: 1 for the first attempt.
        request_bytes: Size of the body.
        seconds: Seconds since the call began.
        status: HTTP status of the reply, once there is one.
        reply_bytes: Size of the reply's body, once it was read.
        error: On a retry the error of the attempt before, on an error the final one. A cancelled call ends
            with `asyncio.CancelledError`.
    """

    call_id: int
    method: str
    url: str
    attempt: int = 1
    request_bytes: int = 0
    seconds: float = 0.0
    status: int | None = None
    reply_bytes: int | None = None
    error: BaseException | None = None


class ClientHooks:
    """Base of all hooks. Does nothing.

    A call reports `on_request` once, `on_retry` for each further attempt, and at its end either `on_response`
    or `on_error`.
    """

    def on_request(self, event: RequestEvent) -> Mapping[str, str] | None:
        """Called when the call begins. The result is sent as headers, such as `traceparent`."""
        return None

    def on_retry(self, event: RequestEvent) -> None:
        """Called when a further attempt begins. `event.error` is the reason."""

    def on_response(self, event: RequestEvent) -> None:
        """Called when a reply of status 2xx was read."""

    def on_error(self, event: RequestEvent) -> None:
        """Called when the call failed or was cancelled."""
