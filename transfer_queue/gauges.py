"""A queue's `Status` as Prometheus gauges, so that dashboards and alerts see what people see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.transfer_queue.queue import ServerInfo, Status

PREFIX = "penstock_queue_"


class QueueGauges(Collector):
    """Registered with a Prometheus registry; shows whatever status `newest` gives, nothing while it gives None."""

    def __init__(
        self, run: str, newest: Callable[[], Status | None], servers: Callable[[], Sequence[ServerInfo]] = tuple
    ) -> None:
        self._run = run
        self._newest = newest
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        status = self._newest()
        if status is None:
            return
        yield self._single("version", "Current policy version", status.version)
        yield self._single("step", "Next step to be leased", status.step)
        yield self._single("committed_step", "Steps below this are durable", status.committed_step)
        yield self._single("bytes", "Bytes that the run holds in the store", status.bytes)
        yield self._single("unconsumed_bytes", "Bytes that hold admission back", status.unconsumed_bytes)
        yield self._family("groups", "Groups by state", "state", status.groups)
        yield self._family("episodes", "Episodes by state, or ever", "state", status.episodes)
        yield self._family("age_seconds", "Age in its state of the group that is first there", "state", status.ages_s)
        yield self._waited(status)
        yield self._family("worker_episodes", "Episodes that a worker holds", "worker", status.workers)
        yield self._over_age(status)
        yield self._lag(status)

    def _single(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["run"])
        family.add_metric([self._run], value)
        return family

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["run", label])
        for key, value in sorted(values.items()):
            family.add_metric([self._run, key], value)
        return family

    def _waited(self, status: Status) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + "waited_seconds", "By role and cause", labels=["run", "waiter"])
        for waiter, seconds in sorted(status.waits_s.items()):
            family.add_metric([self._run, waiter], seconds)
        return family

    def _lag(self, status: Status) -> GaugeMetricFamily:
        text = "Versions that a rollout server is behind the newest one"
        family = GaugeMetricFamily(PREFIX + "server_version_lag", text, labels=["run", "server"])
        for server_id, versions in version_lags(status, self._servers()).items():
            family.add_metric([self._run, server_id], versions)
        return family

    def _over_age(self, status: Status) -> GaugeMetricFamily:
        text = "Share of over-age episodes by decile of response length, shortest first"
        family = GaugeMetricFamily(PREFIX + "over_age_share", text, labels=["run", "decile"])
        for number, row in enumerate(status.over_age, start=1):
            family.add_metric([self._run, str(number)], row.over_age / row.episodes if row.episodes else 0.0)
        return family


def version_lags(status: Status, servers: Sequence[ServerInfo]) -> dict[str, int]:
    """By server, in order of their names: versions between the newest one and what it holds."""
    return {s.server_id: max(0, status.version - s.version) for s in sorted(servers, key=lambda s: s.server_id)}


def exposition(run: str, status: Status, servers: Sequence[ServerInfo] = ()) -> bytes:
    """The gauges in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(QueueGauges(run, lambda: status, lambda: servers))
    return generate_latest(registry)
