"""Count requests and measure their times, for Prometheus."""

from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of times, in seconds."""


class Meters:
    """The metrics of one service, in a separate registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "posy_requests", "Requests for predictions, by transport and result", ["transport", "result"],
            registry=registry,
        )  # fmt: skip
        self._samples = Counter("posy_samples", "Samples that a model has answered", ["model"], registry=registry)
        self._seconds = Histogram(
            "posy_request_seconds", "Time to answer a request, without its transport", ["model"], buckets=BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._active = Gauge("posy_active_requests", "Requests that the service is answering", registry=registry)
        self._reloads = Counter(
            "posy_reloads", "Times that the models were loaded again", ["result"], registry=registry
        )
        self._waiting = Gauge("posy_waiting_requests", "Requests that wait for a model", registry=registry)
        # The library's lookup by label takes longer than counting.
        self._of_result = cache(self._requests.labels)
        self._of_model = cache(lambda model: (self._seconds.labels(model), self._samples.labels(model)))

    def answered(self, model: str, seconds: float, samples: int) -> None:
        """Record an answered request."""
        times, counter = self._of_model(model)
        times.observe(seconds)
        counter.inc(samples)

    def ended(self, transport: str, result: str) -> None:
        """Record the end of a request with its result: ``ok``, or the name of a status."""
        self._of_result(transport, result).inc()

    def watch_active(self, count: Callable[[], int]) -> None:
        """Measure the number of requests that the service is answering with a function."""
        self._active.set_function(count)

    def watch_waiting(self, count: Callable[[], int]) -> None:
        """Measure the number of requests that wait for a model with a function."""
        self._waiting.set_function(count)

    def reloaded(self, *, failed: bool) -> None:
        """Record that the models were loaded again."""
        self._reloads.labels("failed" if failed else "ok").inc()

    def text(self) -> bytes:
        """Return all metrics in the format of Prometheus."""
        return generate_latest(self._registry)
