"""Prometheus: a registry per process or server, metric families made at scrape time, and ``GET /metrics``.

A registry is never the library's global one: tests run several servers in one process.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from starlette.types import ASGIApp

METRICS_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4"
NAMESPACE = "penstock"


class Metrics:
    """Base of a component's metrics: creates them in a registry that it owns.

    Names get the prefix ``penstock_COMPONENT_``; a counter's ``_total`` is appended by the library.
    """

    def __init__(self, component: str, *, process: bool = True) -> None:
        """Args:
        component: ``rollout``, ``agent``, …
        process: add CPU, memory and open files of this process, ``penstock_process_*``.
        """
        self.registry = CollectorRegistry()
        self._prefix = f"{NAMESPACE}_{component}_"
        if process:
            ProcessCollector(namespace=NAMESPACE, registry=self.registry)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows."""
        return Counter(self._prefix + name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down."""
        return Gauge(self._prefix + name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS
    ) -> Histogram:
        """A distribution, by default in seconds up to 10."""
        return Histogram(self._prefix + name, text, labels, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """The exposition, of `CONTENT_TYPE`."""
        return generate_latest(self.registry)


Samples = Mapping[str, float] | Iterable[tuple[Sequence[str], float]]


def gauge_family(name: str, text: str, labels: Sequence[str], samples: Samples) -> GaugeMetricFamily:
    """Gauges for a collector: ``{label value: number}`` if there is one label, else pairs (label values, number)."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in _samples(samples):
        family.add_metric(values, number)
    return family


def counter_family(name: str, text: str, labels: Sequence[str], samples: Samples) -> CounterMetricFamily:
    """Counters for a collector, see `gauge_family`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in _samples(samples):
        family.add_metric(values, number)
    return family


def _samples(samples: Samples) -> Iterable[tuple[Sequence[str], float]]:
    return [([key], value) for key, value in samples.items()] if isinstance(samples, Mapping) else samples


def exposition(collector: Any) -> bytes:
    """Returns the metrics of one collector in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def metrics_token(run_token: str) -> str:
    """Returns a token that gives access to metrics only. The run's token cannot be computed from it."""
    return hmac.digest(run_token.encode(), b"penstock: metrics alone", "sha256").hex()


def metrics_app(registry: CollectorRegistry, token: str, lifespan: Any = None) -> ASGIApp:
    """``GET /metrics`` as an ASGI app, for holders of the run's token or of its `metrics_token`.

    Args:
        lifespan: Starlette's: what runs next to the server.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from penstock.common.http import RequireToken, opens

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    app = Starlette(routes=[Route(METRICS_PATH, metrics)], lifespan=lifespan)
    return RequireToken(app, opens(token, {METRICS_PATH: metrics_token(token)}))
