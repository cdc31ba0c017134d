"""Spans and metrics of requests for OpenTelemetry, named by its semantic conventions for HTTP clients.

```python
transport = HTTPTransport("http://127.0.0.1:8000", hooks=[OpenTelemetryHooks()])
```
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmrender.client.hooks import ClientHooks, RequestEvent
from mmrender.errors import EngineStatusError, MissingDependencyError

try:
    from opentelemetry import metrics, propagate, trace
except ImportError as error:
    raise MissingDependencyError.of_extra("opentelemetry", "otel", "tracing") from error

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

_SCOPE = "mmrender.client"
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
        self._providers = (tracer_provider, meter_provider)
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
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
        reason = _error_type(event)
        self._retries.add(1, {**_labels(event), "error.type": reason})
        span = self._spans.get(event.call_id)
        if span is not None:
            span.add_event("retry", {"http.request.resend_count": event.attempt - 1, "error.type": reason})

    def on_response(self, event: RequestEvent) -> None:
        """End the span."""
        span = self._ended(event, {})
        if span is not None:
            span.set_attribute("http.response.body.size", event.reply_bytes or 0)
            span.end()

    def on_error(self, event: RequestEvent) -> None:
        """End the span with its error; a cancelled call is not one."""
        reason = _error_type(event)
        span = self._ended(event, {"error.type": reason})
        if span is None:
            return
        span.set_attribute("error.type", reason)
        if event.error is not None and not isinstance(event.error, asyncio.CancelledError | GeneratorExit):
            span.record_exception(event.error)
            span.set_status(trace.StatusCode.ERROR, str(event.error))
        span.end()

    def _ended(self, event: RequestEvent, more: Mapping[str, str]) -> "Span | None":
        labels = _labels(event)
        self._active.add(-1, labels)
        status = {} if event.status is None else {"http.response.status_code": event.status}
        self._duration.record(event.seconds, {**labels, **status, **more})
        span = self._spans.pop(event.call_id, None)
        if span is not None:
            span.set_attributes({**status, "http.request.resend_count": event.attempt - 1})
        return span


def _labels(event: RequestEvent) -> dict[str, str | int]:
    address = urlsplit(event.url)
    port = address.port or (443 if address.scheme == "https" else 80)
    return {
        "http.request.method": event.method,
        "server.address": address.hostname or "",
        "server.port": port,
        "url.scheme": address.scheme,
    }


def _error_type(event: RequestEvent) -> str:
    if isinstance(event.error, EngineStatusError):
        return str(event.error.status)
    return type(event.error).__name__
