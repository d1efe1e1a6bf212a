"""Counters of the server in Prometheus' text format, under the stems that llama-server and vLLM share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laguna_gguf.dflash.stats import SpecStats
from laguna_gguf.serve.meter import Meter

disable_created_metrics()  # gauges of start times beside every counter

PREFIX = "laguna_"


class HasStats(Protocol):
    """A session."""

    @property
    def stats(self) -> SpecStats: ...


class Metrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Answers by route and HTTP status; 499: the client left", "path", "status"
        )
        self.waiting = self._gauge("requests_deferred", "Requests that wait for the model")
        self.running = self._gauge("requests_processing", "Requests that the model works on, 0 or 1")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens evaluated")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that did not have to be evaluated")
        self._prompt_seconds = self._counter("prompt_seconds", "Time until the first token")
        self._predicted_tokens = self._counter("tokens_predicted", "Tokens generated")
        self._predicted_seconds = self._counter("tokens_predicted_seconds", "Time from the first token to the last")
        self._session = _SessionCollector()
        self.registry.register(self._session)

    def watch(self, session: HasStats | None) -> None:
        """Report the drafting of this session; None: of none any more."""
        self._session.session = session

    def count_generation(self, meter: Meter) -> None:
        """Add one finished or interrupted generation."""
        if meter.n_predicted:
            self._prompt_tokens.inc(meter.n_prompt - meter.n_cached)
            self._cached_tokens.inc(meter.n_cached)
            self._prompt_seconds.inc(meter.prompt_ms / 1e3)
            self._predicted_tokens.inc(meter.n_predicted)
            self._predicted_seconds.inc(meter.predicted_ms / 1e3)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(PREFIX + name, documentation, registry=self.registry)


class _SessionCollector(Collector):
    """Reads the session's own counters when asked, so that a long generation is seen while it runs."""

    def __init__(self) -> None:
        self.session: HasStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.session is None:
            return
        stats = self.session.stats
        values: dict[str, Any] = {
            "spec_decode_num_drafts": (stats.rounds - stats.plain_rounds, "Rounds with drafts"),
            "spec_decode_num_draft_tokens": (stats.drafted_tokens, "Tokens drafted"),
            "spec_decode_num_accepted_tokens": (stats.accepted_tokens, "Drafted tokens accepted"),
        }
        for name, (value, documentation) in values.items():
            yield CounterMetricFamily(PREFIX + name, documentation, value=value)
        by_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Rounds whose draft here was accepted",
            labels=["position"],
        )
        for position, count in enumerate(stats.accepted_by_depth):
            by_position.add_metric([str(position)], count)
        yield by_position
        yield GaugeMetricFamily(
            PREFIX + "draft_max_now", "Tokens drafted a round at the moment", value=stats.draft_max_now
        )
