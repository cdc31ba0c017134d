"""Hooks: callbacks at the begin, the retries and the end of each call, and those that feed OpenTelemetry.

Hooks run on the event loop and must be quick. A hook that fails is logged and never fails the request.

```python
transport = HTTPTransport("http://127.0.0.1:8000", hooks=[OpenTelemetryHooks()])
```
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from mmrender.client.transport import JSONText
from mmrender.errors import EngineStatusError, MissingDependencyError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

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


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Boundaries of the duration's histogram: a completion may take an hour."""


class OpenTelemetryHooks(ClientHooks):
    """A span for each call, its retries as events, and four metrics; the server sees the span as its parent.

    The metrics are `http.client.request.duration` and `http.client.active_requests`,
    `http.client.request.body.size`, and `mmrender.client.retries`.

    Args:
        tracer_provider: Where spans go; by default the global one.
        meter_provider: Where metrics go; by default the global one.
    """

    def __init__(
        self, tracer_provider: "TracerProvider | None" = None, meter_provider: "MeterProvider | None" = None
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise MissingDependencyError.of_extra("opentelemetry", "otel", "tracing") from error
        self._providers = (tracer_provider, meter_provider)
        self._tracer = trace.get_tracer("mmrender.client", tracer_provider=tracer_provider)
        meter = metrics.get_meter("mmrender.client", meter_provider=meter_provider)
        self._duration = meter.create_histogram(
            "http.client.request.duration",
            unit="s",
            description="Time of a call, its retries included",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._size = meter.create_histogram(
            "http.client.request.body.size", unit="By", description="Size of request bodies"
        )
        self._active = meter.create_up_down_counter(
            "http.client.active_requests", unit="{request}", description="Calls under way"
        )
        self._retries = meter.create_counter(
            "mmrender.client.retries", unit="{attempt}", description="Attempts after the first"
        )
        # Calls begin and end in one event loop; several loops use keys of their own.
        self._spans: dict[int, Span] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._providers

    def on_request(self, event: RequestEvent) -> Mapping[str, str]:
        """Begin a span, and give its identity to the server."""
        from opentelemetry import propagate, trace

        labels = _labels(event)
        self._active.add(1, labels)
        self._size.record(event.request_bytes, labels)
        span = self._tracer.start_span(
            f"{event.method} {urlsplit(event.url).path}",
            kind=trace.SpanKind.CLIENT,
            attributes={**labels, "url.full": event.url, "http.request.body.size": event.request_bytes},
        )
        self._spans[event.call_id] = span
        headers: dict[str, str] = {}
        propagate.inject(headers, trace.set_span_in_context(span))
        return headers

    def on_retry(self, event: RequestEvent) -> None:
        """Note the attempt, and why it is made."""
        reason = {"error.type": _error_type(event.error)}
        self._retries.add(1, {**_labels(event), **reason})
        if (span := self._spans.get(event.call_id)) is not None:
            span.add_event("retry", {"http.request.resend_count": event.attempt - 1, **reason})

    def on_response(self, event: RequestEvent) -> None:
        """End the span."""
        self._end(event)

    def on_error(self, event: RequestEvent) -> None:
        """End the span with its error; a cancelled call is not one."""
        self._end(event)

    def _end(self, event: RequestEvent) -> None:
        from opentelemetry import trace

        labels, error = _labels(event), event.error
        result: dict[str, str | int] = {}
        if event.status is not None:
            result["http.response.status_code"] = event.status
        if error is not None:
            result["error.type"] = _error_type(error)
        self._active.add(-1, labels)
        self._duration.record(event.seconds, labels | result)
        span = self._spans.pop(event.call_id, None)
        if span is None:
            return
        if error is None:
            result["http.response.body.size"] = event.reply_bytes or 0
        elif not isinstance(error, asyncio.CancelledError | GeneratorExit):
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, str(error))
        span.set_attributes({**result, "http.request.resend_count": event.attempt - 1})
        span.end()


def _labels(event: RequestEvent) -> dict[str, str | int]:
    address = urlsplit(event.url)
    port = address.port or (443 if address.scheme == "https" else 80)
    return {
        "http.request.method": event.method,
        "server.address": address.hostname or "",
        "server.port": port,
        "url.scheme": address.scheme,
    }


def _error_type(error: BaseException | None) -> str:
    return str(error.status) if isinstance(error, EngineStatusError) else type(error).__name__
