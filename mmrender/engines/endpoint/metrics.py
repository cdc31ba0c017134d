"""Counts and gauges of one server, in Prometheus's text."""

from collections.abc import Iterable

from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import MissingDependencyError

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependencyError.of_extra("prometheus_client", "serve", "the metrics route") from error


class ServerMetrics:
    """What a server counts. Each has a registry of its own.

    Args:
        client: The engines to watch.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, client: InferenceEngineClient) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mmrender_requests", "Requests answered.", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "mmrender_request_seconds",
            "Seconds from request to end of answer.",
            ["route"],
            registry=self._registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800),
        )
        self._tokens = Counter("mmrender_tokens", "Tokens.", ["kind"], registry=self._registry)
        self._registry.register(_Engines(client))

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def used(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count tokens."""
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("completion").inc(completion_tokens)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _Engines(Collector):
    """Gauges that are read off the client when asked for."""

    def __init__(self, client: InferenceEngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        """The gauges."""
        up = GaugeMetricFamily("mmrender_engine_up", "Whether an engine gets work.", labels=["engine"])
        running = GaugeMetricFamily(
            "mmrender_engine_requests_running", "Requests under way.", labels=["engine"]
        )
        waiting = GaugeMetricFamily(
            "mmrender_engine_requests_waiting", "Requests that wait for a place.", labels=["engine"]
        )
        for name, member in self._client.members.items():
            up.add_metric([name], float(member.ill is None))
            running.add_metric([name], len(member.calls))
            waiting.add_metric([name], member.slots.waiting)
        paused = GaugeMetricFamily(
            "mmrender_paused", "Whether the client is paused.", value=float(self._client.is_paused)
        )
        return [up, running, waiting, paused]
