"""What a transport tells of its requests, for metrics and tracing.

A hook is an object with the four methods of `ClientHooks`; subclass it and override what you need. Hooks run
on the event loop, so they must be quick. One that fails is logged and never fails the request.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_log = logging.getLogger("mmrender.client")


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
        error: What went wrong: on a retry in the attempt before, on an error at last. A cancelled call ends
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
    """Does nothing; the base of all hooks.

    A call gives `on_request` once, `on_retry` for each further attempt, and at its end either `on_response`
    or `on_error`.
    """

    def on_request(self, event: RequestEvent) -> Mapping[str, str] | None:
        """The call begins. What is returned is sent as headers, such as `traceparent`."""
        return None

    def on_retry(self, event: RequestEvent) -> None:
        """A further attempt begins; `event.error` says why."""

    def on_response(self, event: RequestEvent) -> None:
        """The reply was read whole, and its status is one of 2xx."""

    def on_error(self, event: RequestEvent) -> None:
        """The call failed, or was cancelled."""


_call_ids = itertools.count(1)


def next_call_id() -> int:
    """A number for one call."""
    return next(_call_ids)


class HookList:
    """Tells several hooks of an event, and outlives those that fail."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: Sequence[ClientHooks] = ()) -> None:
        self.hooks = tuple(hooks)

    def __bool__(self) -> bool:
        return bool(self.hooks)

    def on_request(self, event: RequestEvent) -> dict[str, str]:
        """Tell of a call's begin, and return the headers that hooks want to send."""
        headers: dict[str, str] = {}
        for hook in self.hooks:
            headers.update(self._tell(hook, "on_request", event) or {})
        return headers

    def on_retry(self, event: RequestEvent) -> None:
        """Tell of a further attempt."""
        for hook in self.hooks:
            self._tell(hook, "on_retry", event)

    def on_response(self, event: RequestEvent) -> None:
        """Tell of a good end."""
        for hook in self.hooks:
            self._tell(hook, "on_response", event)

    def on_error(self, event: RequestEvent) -> None:
        """Tell of a bad end."""
        for hook in self.hooks:
            self._tell(hook, "on_error", event)

    def _tell(self, hook: ClientHooks, method: str, event: RequestEvent) -> Mapping[str, str] | None:
        try:
            told: Mapping[str, str] | None = getattr(hook, method)(event)
        except Exception:  # noqa: BLE001 - a hook is foreign code
            _log.exception("the hook %s.%s failed", type(hook).__name__, method)
            return None
        return told
