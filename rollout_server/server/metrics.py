"""Prometheus metrics of a rollout server."""

from __future__ import annotations

from penstock.common import Metrics
from penstock.weight_sync import LoadReport


class RolloutMetrics(Metrics):
    """``penstock_rollout_*`` of one server."""

    def __init__(self) -> None:
        super().__init__("rollout")
        self.tokens = self.counter("tokens", "Tokens sampled")
        self.requests = self.counter("requests", "Generate calls by outcome", ["outcome"])
        self.in_flight = self.gauge("in_flight", "Generate calls in flight")
        self.version = self.gauge("policy_version", "Version of the loaded weights")
        self.lag = self.gauge("version_lag", "Versions behind the newest announced one")
        self.updates = self.counter("weight_updates", "Weight swaps done")
        self.refused = self.counter("weights_refused", "Weights that did not verify")
        self.restarts = self.counter("engine_restarts", "Engine restarts")
        pauses_s = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
        self.pause_s = self.histogram("pause_seconds", "Decoding paused per swap", buckets=pauses_s)
        self.fetch_s = self.histogram("fetch_seconds", "Fetch and check of new weights")

    def updated(self, report: LoadReport) -> None:
        """Records a swap."""
        self.updates.inc()
        self.version.set(report.version)
        self.pause_s.observe(report.pause_s)
        self.fetch_s.observe(report.fetch_s)
