"""What a sidecar counts, in Prometheus' terms. One registry per server: tests run several in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from penstock.rollout_server.protocol import LoadReport

PAUSE_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="penstock", registry=self.registry)
        self.tokens = Counter("penstock_rollout_tokens", "Tokens sampled", registry=self.registry)
        self.requests = Counter(
            "penstock_rollout_requests", "Generate calls by how they ended", ["outcome"], registry=self.registry
        )
        self.in_flight = Gauge("penstock_rollout_in_flight", "Generate calls being answered", registry=self.registry)
        self.version = Gauge("penstock_rollout_policy_version", "Version of the loaded weights", registry=self.registry)
        self.lag = Gauge(
            "penstock_rollout_version_lag", "Versions behind the newest announced one", registry=self.registry
        )
        self.updates = Counter("penstock_rollout_weight_updates", "Weight swaps done", registry=self.registry)
        self.refused = Counter(
            "penstock_rollout_weights_refused", "Weights that did not verify", registry=self.registry
        )
        self.restarts = Counter("penstock_rollout_engine_restarts", "Engine restarts", registry=self.registry)
        self.pause_s = Histogram(
            "penstock_rollout_pause_seconds",
            "Decoding paused per swap",
            buckets=PAUSE_BUCKETS_S,
            registry=self.registry,
        )
        self.fetch_s = Histogram(
            "penstock_rollout_fetch_seconds", "Fetch and check of new weights", registry=self.registry
        )

    def updated(self, report: LoadReport) -> None:
        self.updates.inc()
        self.version.set(report.version)
        self.pause_s.observe(report.pause_s)
        self.fetch_s.observe(report.fetch_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)
