"""Prometheus' metrics of the trainer: a sink whose newest numbers wait to be scraped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common import Metrics
from penstock.trainer.sinks import Record, numbers


class TrainerMetrics(Metrics):
    """`MetricSink`, asked on rank 0. Every number of ``metrics.jsonl`` is a label of ``penstock_trainer_metric``."""

    def __init__(self) -> None:
        super().__init__("trainer")
        self._version = self.gauge("policy_version", "Version of the newest step")
        self._steps = self.counter("steps", "Steps trained, replayed ones too")
        buckets_s = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
        self._step_s = self.histogram("step_seconds", "Whole steps", buckets=buckets_s)
        self._phase_s = self.counter("phase_seconds", "Time by phase: wait, train, publish", ["phase"])
        self._tokens = self.counter("tokens", "Tokens of trained rows")
        self._episodes = self.counter("episodes", "Episodes trained")
        self._metric = self.gauge("metric", "Newest value of each number of metrics.jsonl", ["name"])

    def rewind(self, step: int) -> None:
        self._version.set(step)

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        values = numbers(metrics)
        self._version.set(version)
        self._steps.inc()
        self._step_s.observe(values.get("wall_s", 0.0))
        for phase in ("wait", "train", "publish"):
            self._phase_s.labels(phase).inc(max(0.0, values.get(f"{phase}_s", 0.0)))
        self._tokens.inc(values.get("tokens", 0))
        self._episodes.inc(values.get("episodes", 0))
        self._set(values)

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._set(numbers(values))

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        """Nothing of these is a number."""

    def close(self) -> None:
        """Nothing is open."""

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._metric.labels(name).set(value)
