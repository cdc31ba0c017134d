"""Hooks: callbacks on start, retry and end of each call.

Hooks run on the event loop and must be quick. A hook that fails is logged and never fails the request. Spans
and metrics of OpenTelemetry come from its own instrumentation of aiohttp.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmrender.client.transport import JSONText

_log = logging.getLogger("mmrender.client")
_call_ids = itertools.count(1)

Moment: TypeAlias = Literal["on_request", "on_retry", "on_response", "on_error"]


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A moment in the life of one call.

    Attributes:
        call_id: Equal for all events of a call, and unique in this process.
        method: HTTP method.
        url: Server and path, without query.
        attempt: 1 for the first try.
        request_bytes: Size of the body as sent.
        seconds: Since the call began.
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
    """Base of all hooks; does nothing.

    A call gives `on_request` once, `on_retry` for each further attempt, and at its end either `on_response`
    or `on_error`.
    """

    def on_request(self, event: RequestEvent) -> Mapping[str, str] | None:
        """Called when the call begins. The result is sent as headers, such as `traceparent`."""
        return None

    def on_retry(self, event: RequestEvent) -> None:
        """Called when a further attempt begins; `event.error` says why."""

    def on_response(self, event: RequestEvent) -> None:
        """Called when a reply of status 2xx was read."""

    def on_error(self, event: RequestEvent) -> None:
        """Called when the call failed or was cancelled."""


class ObservedCall:
    """One call and its progress, reported to hooks. `target` is the server and path, with query."""

    def __init__(
        self, method: str, target: str, body: Sequence[bytes | JSONText], hooks: Sequence[ClientHooks]
    ) -> None:
        self.method = method
        self.body = body
        self.size = sum(map(len, body))
        self.headers: dict[str, str] = {}
        self.target = target
        self.url = target.partition("?")[0]
        self.where = f"{method} {self.url}"
        self.status: int | None = None
        self.is_kept = False  # whether the attempt uses a connection that served an earlier call
        self.attempt = 1
        self._hooks = hooks
        self._begun = time.perf_counter()
        self._id = next(_call_ids)

    def report(
        self, moment: Moment, *, error: BaseException | None = None, reply_bytes: int | None = None
    ) -> dict[str, str]:
        """Call every hook; return the headers that they want to send."""
        headers: dict[str, str] = {}
        if not self._hooks:
            return headers
        seconds = time.perf_counter() - self._begun
        event = RequestEvent(
            self._id, self.method, self.url, self.attempt, self.size, seconds, self.status, reply_bytes, error
        )
        for hook in self._hooks:
            try:
                headers.update(getattr(hook, moment)(event) or {})
            except Exception:  # noqa: BLE001 - a hook is foreign code
                _log.exception("the hook %s.%s failed", type(hook).__name__, moment)
        return headers
