"""What the trainer tells Prometheus: a sink whose newest numbers wait to be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from penstock.trainer.sinks import Record, numbers

STEP_BUCKETS_S = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
PHASES = ("wait_s", "train_s", "publish_s")


class TrainerMetrics:
    """`MetricSink`, asked on rank 0. Every number of ``metrics.jsonl`` is a label of ``penstock_trainer_metric``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="penstock", registry=registry)
        self._version = Gauge("penstock_trainer_policy_version", "Version of the newest step", registry=registry)
        self._steps = Counter("penstock_trainer_steps", "Steps trained, replayed ones too", registry=registry)
        self._step_s = Histogram(
            "penstock_trainer_step_seconds", "Whole steps", buckets=STEP_BUCKETS_S, registry=registry
        )
        self._phase_s = Counter(
            "penstock_trainer_phase_seconds", "Time by phase: wait, train, publish", ["phase"], registry=registry
        )
        self._tokens = Counter("penstock_trainer_tokens", "Tokens of trained rows", registry=registry)
        self._episodes = Counter("penstock_trainer_episodes", "Episodes trained", registry=registry)
        self._metric = Gauge(
            "penstock_trainer_metric", "Newest value of each number of metrics.jsonl", ["name"], registry=registry
        )

    def rewind(self, step: int) -> None:
        self._version.set(step)

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        found = numbers(metrics)
        self._version.set(version)
        self._steps.inc()
        self._step_s.observe(found.get("wall_s", 0.0))
        for phase in PHASES:
            self._phase_s.labels(phase.removesuffix("_s")).inc(max(0.0, found.get(phase, 0.0)))
        self._tokens.inc(found.get("tokens", 0))
        self._episodes.inc(found.get("episodes", 0))
        self._set(found)

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._set(numbers(values))

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        """Nothing of these is a number."""

    def close(self) -> None:
        """Nothing is open."""

    def _set(self, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self._metric.labels(name).set(value)
