"""Counters of the daemon in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laguna_gguf.daemon.model import Model
from laguna_gguf.daemon.proxy.compression import Shortened

disable_created_metrics()  # gauges of start times beside every counter

PREFIX = "pflash_"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What the daemon has done since it started."""

    def __init__(self, model: Model) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            PREFIX + "requests",
            "Answers by route and HTTP status; 499: the client left",
            ["path", "status"],
            registry=self.registry,
        )
        self._compressions = self._counter("compressions", "Prompts that were compressed")
        self._failures = Counter(
            PREFIX + "compression_failures",
            "Prompts that could not be compressed, by HTTP status",
            ["status"],
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Target tokens of prompts before compression")
        self._served_tokens = self._counter("served_tokens", "And of what was sent instead")
        self._seconds = Histogram(
            PREFIX + "compress_seconds",
            "Time a client waited for a compression",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_ModelCollector(model))

    def count_request(self, path: str, status: str) -> None:
        self._requests.labels(path, status).inc()

    def count_compression(self, shortened: Shortened) -> None:
        self._compressions.inc()
        self._prompt_tokens.inc(shortened.prompt_tokens)
        self._served_tokens.inc(shortened.served_tokens)
        self._seconds.observe(shortened.timings["compress_ms"] / 1e3)

    def count_failure(self, status: int) -> None:
        self._failures.labels(str(status)).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(PREFIX + name, documentation, registry=self.registry)


class _ModelCollector(Collector):
    """Reads the state of the model process when asked."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._model.stats()
        values = {
            "drafter_ready": (int(stats["state"] == "ready"), "Whether the drafter is loaded"),
            "drafter_restarts": (stats["restarts"], "How often the model process had to be started again"),
            "queue_waiting": (stats["waiting"], "Prompts that wait for the drafter"),
            "queue_running": (stats["running"], "Prompts that the drafter works on, 0 or 1"),
        }
        for name, (value, documentation) in values.items():
            yield GaugeMetricFamily(PREFIX + name, documentation, value=value)
