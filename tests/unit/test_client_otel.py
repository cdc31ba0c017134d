"""Spans and metrics of requests."""

import asyncio
import pickle
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from client_server import stub_server
from mmrender.client.hooks import OpenTelemetryHooks
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.errors import EngineStatusError

QUICK = RetryPolicy(wait_initial=0.001, wait_jitter=0.0)


class Telemetry:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.hooks = OpenTelemetryHooks(tracers, MeterProvider([self.reader]))

    def metrics(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        assert data is not None
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {metric.name: list(metric.data.data_points) for scope in scopes for metric in scope.metrics}


def test_calls_are_counted_timed_and_spans_that_the_server_sees_as_parents() -> None:
    telemetry = Telemetry()

    async def test() -> tuple[int, str]:
        async with stub_server() as server:
            transport = HTTPTransport(TransportConfig(server.url, retries=QUICK), hooks=[telemetry.hooks])
            await transport.request("POST", "/echo?secret=1", json={"a": 1})
            server.busy = 1
            await transport.request("GET", "/busy")
            server.busy = 9
            with pytest.raises(EngineStatusError):
                await transport.request("POST", "/busy", json={})
            task = asyncio.create_task(transport.request("POST", "/slow", json={}))
            while server.seen[-1][1] != "/slow":
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return int(server.url.rpartition(":")[2]), server.seen[0][2]["traceparent"]

    port, parent = asyncio.run(test())
    spans = telemetry.exporter.get_finished_spans()
    assert [span.name for span in spans] == ["POST /echo", "GET /busy", "POST /busy", "POST /slow"]
    good, retried, failed, cut = spans
    assert good.kind is SpanKind.CLIENT
    assert good.attributes == {
        "http.request.method": "POST",
        "server.address": "127.0.0.1",
        "server.port": port,
        "url.scheme": "http",
        "url.full": f"http://127.0.0.1:{port}/echo",
        "http.request.body.size": 7,
        "http.response.status_code": 200,
        "http.response.body.size": 7,
        "http.request.resend_count": 0,
    }
    assert parent.split("-")[2] == format(good.context.span_id, "016x")
    (event,) = retried.events
    assert event.name == "retry"
    assert dict(event.attributes or {}) == {"http.request.resend_count": 1, "error.type": "503"}
    ends = [(span.status.status_code, (span.attributes or {})["error.type"]) for span in (failed, cut)]
    assert ends == [(StatusCode.ERROR, "503"), (StatusCode.UNSET, "CancelledError")]
    metrics = telemetry.metrics()
    assert {point.value for point in metrics["http.client.active_requests"]} == {0}
    assert sum(point.value for point in metrics["mmrender.client.retries"]) == 1
    assert sum(point.count for point in metrics["http.client.request.duration"]) == 4
    assert sum(point.sum for point in metrics["http.client.request.body.size"]) == 7 + 2 + 2


def test_hooks_of_global_providers_are_pickled() -> None:
    transport = pickle.loads(pickle.dumps(HTTPTransport("http://127.0.0.1:1", hooks=[OpenTelemetryHooks()])))
    assert isinstance(transport.hooks[0], OpenTelemetryHooks)
